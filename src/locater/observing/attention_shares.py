"""Where the weight of heads goes: to each group of tokens, and to keys that a cache with a window would not keep.

The rows of a map are computed some at a time and summed at once: no T x T matrix. This costs about as much as attention
itself, so it is done only where it is asked for.

Axes: B sequences, H heads, T queries, S keys, G groups.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.brief import brief
from locater.calls.call_and_masks import Call
from locater.calls.head_removal import within_window
from locater.errors import LocaterError
from locater.inputs.token_groups import GROUPS, TokenGroups
from locater.kernels import weights_by_rows
from locater.layers.tensor_parallel import SplitHeads
from locater.observing.accumulate import wide
from locater.observing.row_masks import call_for_heads, counted_rows
from locater.torch_private import disable_dynamo, in_backward_pass


@dataclass(frozen=True)
class GroupShares:
    """What one head gives to each group of tokens: the mean over rows of the sum of its weights there."""

    layer: int
    head: int
    name: str
    shares: dict[str, float]  # by group of keys, over all rows
    even: dict[str, float]  # what even weights over the keys in sight would give
    by_query: dict[str, dict[str, float]]  # the same as `shares`, of the rows of each group

    __repr__ = brief


class Place(Protocol):
    """A site, as far as it matters here."""

    name: str
    number: int
    kind: str
    placed: bool
    heads: list[int]
    picked: Tensor | None


@dataclass
class _Sums:
    rows: Tensor  # (G,) rows of each group
    given: Tensor  # (H, G, G): by group of rows, then of keys
    even: Tensor  # (G,)
    all_rows: Tensor  # ()
    beyond: Tensor  # (H,)


@dataclass(eq=False)
class AttentionShares:
    """The sums of one observation, by site. `cache`: the window and the sinks that a cache would keep."""

    groups: TokenGroups | None = None
    cache: tuple[int, int] | None = None
    labels: Tensor | None = None  # (B, T) of the pass that runs
    unlabelled: set[str] = field(default_factory=set)  # sites whose keys are not the tokens of the batch
    sums: dict[tuple[str, int], _Sums] = field(default_factory=dict)  # by name and number of the site
    places: dict[tuple[str, int], Place] = field(default_factory=dict)

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        return None

    def refuse_split(self, model: nn.Module) -> None:
        if SplitHeads(model).is_any:
            raise LocaterError(
                f"{type(model).__name__}: it is split over ranks: observe it without groups= and beyond=, or in one "
                "process"
            )

    def begin_pass(self, model: nn.Module, args: Sequence[Any], kwargs: Mapping[str, Any]) -> None:
        """The groups of the tokens that the model is about to read."""
        if self.groups is None:
            return
        named = dict(kwargs)
        if args:
            named |= dict(zip(inspect.signature(model.forward).parameters, args, strict=False))
        ids = named.get("input_ids")
        self.labels = self.groups.labels(ids) if isinstance(ids, Tensor) and ids.ndim == 2 else None

    @disable_dynamo
    def add(self, site: Place, call: Call) -> None:
        """Add one call of all heads of a site."""
        if in_backward_pass() or site.kind != "self" or not site.placed:
            return
        if site.picked is not None:
            call = call_for_heads(call, site.picked)
        key = (site.name, site.number)
        with torch.no_grad(), torch.autocast(call.query.device.type, enabled=False):
            new = self._of_call(site, call)
        old = self.sums.get(key)
        parts = [getattr(new, name) if old is None else getattr(old, name) + getattr(new, name) for name in _FIELDS]
        self.sums[key], self.places[key] = _Sums(*parts), site

    def _of_call(self, site: Place, call: Call) -> _Sums:
        rows, device = counted_rows(call, own=True), call.query.device
        (_, H, T, _), S, G, dtype = call.query.shape, call.key.shape[2], len(GROUPS), wide(device)
        members = self._members(site, call)
        positions = rows.terms.at(T, S, device)
        sums = _Sums(*(torch.zeros(shape, dtype=dtype, device=device) for shape in ((G,), (H, G, G), (G,), (), (H,))))
        for at, weights, seen in weights_by_rows(rows.q, rows.k, rows.terms):
            end = weights.shape[-1]
            counted = rows.counted[:, at] & seen.any(-1).any(1)
            sums.all_rows += counted.sum()
            weights = weights * counted[:, None, :, None]
            if self.cache is not None:
                distance = positions[at, None] - torch.arange(end, device=device)
                kept = within_window(seen, distance.abs() < self.cache[0], self.cache[1])
                sums.beyond += weights.masked_fill(kept, 0).sum((0, 2, 3), dtype=dtype)
            if members is not None:
                of_rows = members[:, positions[at]] * counted[..., None]
                on_groups = weights @ members[:, None, :end].to(weights)
                sums.given += torch.einsum("bhtg,btr->hrg", on_groups.to(dtype), of_rows.to(dtype))
                sums.rows += of_rows.sum((0, 1), dtype=dtype)
                shown = (seen[:, :1] & counted[:, None, :, None]).to(weights)
                even = (shown / shown.sum(-1, keepdim=True).clamp_min(1)) @ members[:, None, :end].to(weights)
                sums.even += even.sum((0, 1, 2), dtype=dtype)
        return sums

    def _members(self, site: Place, call: Call) -> Tensor | None:
        """(B, S, G), 1 where a key is of a group; None where keys are not the tokens of the batch."""
        if self.groups is None:
            return None
        here = (call.key.shape[0], call.key.shape[2])
        in_tower = any(part.startswith("vis") for part in site.name.split("."))
        if self.labels is None or self.labels.shape != here or in_tower:
            self.unlabelled.add(site.name)
            return None
        return functional.one_hot(self.labels, len(GROUPS)).to(call.query.device)

    def clear(self) -> None:
        self.sums.clear()
        self.unlabelled.clear()

    def beyond(self) -> dict[tuple[str, int, int], float]:
        """The share of its weight that a head gives to keys beyond sinks and window, by name, layer and head."""
        found = {}
        for key, sums in self.sums.items() if self.cache is not None else ():
            rows = float(sums.all_rows)
            for head, total in zip(self.places[key].heads, sums.beyond.tolist(), strict=True):
                if rows and total == total:
                    found[(*key, head)] = total / rows
        return found

    def of_groups(self) -> list[GroupShares]:
        """One per head of the sites whose keys are the tokens of the batch, layer by layer."""
        found = []
        for key, sums in sorted(self.sums.items(), key=lambda item: item[0][1]):
            rows, even = sums.rows.tolist(), sums.even.tolist()
            if not sum(rows):
                continue
            of_groups = [(number, group) for number, group in enumerate(GROUPS) if rows[number]]
            for head, given in zip(self.places[key].heads, sums.given.tolist(), strict=True):
                total = [sum(row[number] for row in given) / sum(rows) for number in range(len(GROUPS))]
                by_query = {
                    asked: {group: given[number][to] / rows[number] for to, group in of_groups}
                    for number, asked in of_groups
                }
                shares = {group: total[number] for number, group in of_groups}
                evenly = {group: even[number] / sum(rows) for number, group in of_groups}
                found.append(GroupShares(key[1], head, key[0], shares, evenly, by_query))
        return found


_FIELDS = ("rows", "given", "even", "all_rows", "beyond")


def shown_groups(shares: AttentionShares | None, name: str, passes: int) -> list[GroupShares]:
    """What was observed of groups, or why there is nothing."""
    if shares is None or shares.groups is None:
        raise LocaterError("groups of tokens were not observed: observe(model, groups=True)")
    found = shares.of_groups()
    if not found and passes:
        raise LocaterError(f"{name}: no attention over the tokens of a batch was seen: give the model input_ids")
    if not found:
        raise LocaterError(f"{name}: the model was not run inside the block")
    return found
