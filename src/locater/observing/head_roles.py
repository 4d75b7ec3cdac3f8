"""Scores of a head's role: weight on the previous token, on the same token before, and on the token after that one
(induction); and induction by other parents than the last token.

The first three (`circuit_scores`) are measured on random tokens repeated once, r r, where nothing but the repetition
can be attended to. Only three diagonals of the maps are computed, so the maps are never built. In r r the tokens before
and before that repeat together, so the others are measured on random tokens of a small alphabet, where they repeat
apart.

Induction by any parents (`match_scores`): at token t a model predicts token t + 1, whose parents are the tokens at the
distances `parents` before it. A key s matches where its own parents are the same tokens:

    x[s - p] = x[t + 1 - p] for every p in parents, s <= t

Parents (1,) are the usual induction, x[s - 1] = x[t]; (1, 2) asks for the last two tokens, (2,) skips the last one.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.listeners import ListeningSwitch, add_listener, remove_listener
from locater.errors import LocaterError
from locater.kernels import Terms, row_statistics
from locater.observing.accumulate import wide
from locater.observing.observation import observe
from locater.observing.run_model import run_model

PERIOD, SEQUENCES = 50, 4
ALPHABET, LENGTH = 8, 128  # tokens that the sequences of the second pass are made of, and their length
SKIP, PAIR = (2,), (1, 2)  # sets of parents
Parents = tuple[int, ...]


@dataclass(frozen=True)
class Circuit:
    """Mean weight of a head on the token before; in the repeat, on the same token before, and on the one after it.

    `skip_induction` and `pair_induction` are weight less that of uniform attention: on tokens two after an earlier copy
    of the token before the current one, and on tokens that followed the same two tokens.
    """

    previous: float | None
    duplicate: float | None
    induction: float | None
    skip_induction: float | None = None
    pair_induction: float | None = None


def circuit_scores(
    model: nn.Module, period: int = PERIOD, sequences: int = SEQUENCES, seed: int = 0
) -> dict[tuple[int, int], Circuit]:
    """Scores by (layer, head), from `sequences` random sequences of length `period`, repeated once, and as many of a
    small alphabet.

    In the repeat, row t attends to t - 1 (previous), t - period (duplicate) and t - period + 1 (induction). A uniform
    causal head would have about 1 / t everywhere.
    """
    config: Any = getattr(model, "config", None)
    text = _text_config(model)
    rows, most = getattr(text, "vocab_size", None), getattr(text, "max_position_embeddings", None)
    if not rows or getattr(config, "is_encoder_decoder", False):
        raise LocaterError(f"{type(model).__name__}: circuit scores need one stack of layers over a vocabulary")
    period = period_of(model, period)
    allowed = torch.tensor(sorted(set(range(rows)) - _special(config) - _special(text)))
    if period < 3 or not len(allowed):
        raise LocaterError(
            f"{type(model).__name__}: circuit scores need at least 8 positions and one token that is not special"
        )
    generator = torch.Generator().manual_seed(seed)
    once = allowed[torch.randint(len(allowed), (sequences, period), generator=generator)]
    with observe(model, offsets=((1, period), (period, period), (period - 1, period))) as seen:
        run_model(model, {"input_ids": torch.cat([once, once], 1)})
    few = allowed[torch.randperm(len(allowed), generator=generator)[:ALPHABET]]
    length = min(LENGTH, (most or LENGTH + 2) - 2)
    ids = few[torch.randint(len(few), (sequences, length), generator=generator)]
    by_parents = _by_parents(model, ids)
    return {
        (row.layer, row.head): Circuit(
            row.offsets[1],
            row.offsets[period],
            row.offsets[period - 1],
            *by_parents.get((row.layer, row.head), (None, None)),
        )
        for row in seen.rows
        if row.kind == "self"
    }


def period_of(model: nn.Module, period: int = PERIOD) -> int:
    """How many tokens are repeated: as many as asked for, or as the model has positions for."""
    most = getattr(_text_config(model), "max_position_embeddings", None)
    return min(period, (most or 2 * period) // 2 - 1)


def _text_config(model: nn.Module) -> Any:
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _by_parents(model: nn.Module, ids: Tensor) -> dict[tuple[int, int], tuple[float | None, float | None]]:
    """Skip and pair induction of each head. Empty where keys are not just the tokens of the input, as with learned keys
    in front of them: the other scores are known there all the same.
    """
    try:
        matched = match_scores(model, ids, (SKIP, PAIR))
    except LocaterError:
        return {}
    return {head: (scores[SKIP].excess, scores[PAIR].excess) for head, scores in matched.items()}


def _special(config: Any) -> set[int]:
    """Ids that a model knows by role; some have a list of them."""
    roles = (getattr(config, f"{name}_token_id", None) for name in ("pad", "bos", "eos", "sep", "cls", "mask"))
    return {i for ids in roles if ids is not None for i in (ids if isinstance(ids, list | tuple) else [ids])}


# ---- induction by any parents


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
    switch: ListeningSwitch = field(default_factory=ListeningSwitch)
    sums: Tensor | None = None

    def receive(self, call: Call) -> None:
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
            add_listener(site)
            stack.callback(remove_listener, site)
        run_model(model, {"input_ids": ids})
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
