"""Induction scores for any parents: weight of a head on the tokens that followed the same context before.

At token t a model predicts token t + 1, whose parents are the tokens at the distances `parents` before it. A key s
matches where its own parents are the same tokens:

    x[s - p] = x[t + 1 - p] for every p in parents, s <= t

Parents (1,) are the usual induction, x[s - 1] = x[t]; (1, 2) asks for the last two tokens, (2,) skips the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from locater.calls.call import Call
from locater.calls.listeners import Switch, enter, leave
from locater.errors import LocaterError
from locater.kernels import Terms, row_statistics
from locater.observing.accumulators import wide
from locater.observing.forward_pass import run
from locater.observing.observation import observe

Parents = tuple[int, ...]


@dataclass(frozen=True)
class Match:
    """Mean weight on matching keys over the rows that have one, and what uniform attention would give them."""

    weight: float | None
    chance: float | None
    rows: int

    @property
    def excess(self) -> float | None:
        """Weight less chance: 0 for a head that does not look for the context, 1 - chance for one that does nothing
        else.
        """
        return None if self.weight is None or self.chance is None else self.weight - self.chance


def matches(ids: Int[Tensor, "B T"], parents: Sequence[int]) -> Bool[Tensor, "B T S"]:
    """Whether key s has the parents that the token after t has, and is not after t.

    >>> matches(torch.tensor([[0, 1, 0, 1]]), (1,))[0, 2].tolist()  # 1 followed the earlier 0
    [False, True, False, False]
    """
    T = ids.shape[1]
    at = torch.arange(T, device=ids.device)
    same = (at[None, :] <= at[:, None]).expand(len(ids), T, T)
    for distance in parents:
        complete = (at + 1 >= distance)[:, None] & (at >= distance)[None, :]
        query = ids[:, (at + 1 - distance).clamp_min(0)]
        key = ids[:, (at - distance).clamp_min(0)]
        same = same & complete & (query[:, :, None] == key[:, None, :])
    return same


@dataclass
class _MatchSite:
    """One attention module that is listened to, and its sums (H, parents, 3): weight, chance, rows."""

    name: str
    module: nn.Module
    masks: list[Tensor]
    switch: Switch = field(default_factory=Switch)
    sums: Tensor | None = None

    def see(self, call: Call) -> None:
        q, k = call.query, call.key
        B, H, T, S = *q.shape[:3], k.shape[2]
        if T != S or any(mask.shape != (B, T, S) for mask in self.masks):
            raise LocaterError(f"{self.name}: match scores need every token of the input among queries and keys")
        terms = call.terms.checked(B, H, T, S)
        whole = row_statistics(q, k, terms, extended=False)
        parts = [self._part(call, terms, mask.to(q.device), whole.log_sum_exp, whole.visible) for mask in self.masks]
        sums = torch.stack(parts, 1)  # (H, parents, 3)
        self.sums = sums if self.sums is None else self.sums + sums

    def _part(self, call: Call, terms: Terms, mask: Tensor, log_sum: Tensor, visible: Tensor) -> Tensor:
        """Sums (H, 3) of one set of parents. A sink takes weight from the whole row, and is no match."""
        mask = mask[:, None]
        inside = replace(terms, mask=mask if terms.mask is None else terms.mask & mask, sinks=None)
        part = row_statistics(call.query, call.key, inside, extended=False)
        counts = (part.visible > 0).expand_as(log_sum)
        weight = torch.exp(part.log_sum_exp - log_sum)
        chance = (part.visible.to(weight) / visible.clamp_min(1)).expand_as(log_sum)
        kept = torch.stack([weight, chance, torch.ones_like(weight)])
        return torch.where(counts, kept, 0).sum((1, 3), dtype=wide(kept.device)).T


def match_scores(
    model: nn.Module, ids: Int[Tensor, "B T"], parents: Sequence[Sequence[int]] = ((1,), (2,), (1, 2))
) -> dict[tuple[int, int], dict[Parents, Match]]:
    """Scores by (layer, head) and parents, from one pass over token ids. Each set of parents needs a B x T x T mask of
    bits, so this is for short sequences; maps of heads are not built.
    """
    if ids.ndim != 2:
        raise LocaterError(f"match scores take ids (sequences, tokens), not of shape {tuple(ids.shape)}")
    if not parents or any(not each or min(each) < 1 or len(set(each)) < len(each) for each in parents):
        raise LocaterError(
            f"parents={list(parents)}: give sets of distances from 1 on, each once, such as [(1,), (1, 2)]"
        )
    masks = [matches(ids, each) for each in parents]
    with observe(model, rows=1) as seen, ExitStack() as stack:
        if seen.by_calls is not None:
            raise LocaterError(f"{type(model).__name__}: match scores need layers that are known before the model runs")
        sites = [_MatchSite(site.name, site.module, masks) for site in seen.sites if site.kind == "self"]
        numbers = [site.number for site in seen.sites if site.kind == "self"]
        for site in sites:
            enter(site)
            stack.callback(leave, site)
        run(model, {"input_ids": ids})
    return {
        (number, head): {tuple(each): _match(*totals) for each, totals in zip(parents, rows, strict=True)}
        for number, site in zip(numbers, sites, strict=True)
        if site.sums is not None
        for head, rows in enumerate(site.sums.tolist())
    }


def _match(weight: float, chance: float, rows: float) -> Match:
    if not rows or weight != weight:
        return Match(None, None, int(rows) if rows == rows else 0)
    return Match(weight / rows, chance / rows, int(rows))
