"""Which keys a query sees, read from the mask of one call: all, causal, a window, runs of tokens, padding apart."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locater.discovery.taped_calls import MASKED
from locater.errors import UnreadableError
from locater.layers.layout import LogitsLayout


@dataclass(frozen=True)
class VisibleKeys:
    """Where the queries of a call may look."""

    seen: Tensor  # (B, H, T, S)
    padding: Tensor | None  # (B, S): True for real tokens; None where no sequence has padding
    rows: Tensor  # (B, T): queries that are no padding


def visible_keys(constant: Tensor) -> VisibleKeys:
    """From the constant part of logits (B, H, T, S). Keys that no query of a sequence sees are padding, if another
    sequence of the batch sees them: a rule of the model hides the same keys in all sequences.
    """
    seen = constant > MASKED
    real = seen.any(2).any(1)  # (B, S)
    rows = torch.ones(seen.shape[0], seen.shape[2], dtype=torch.bool)
    if (real == real[:1]).all():
        return VisibleKeys(seen, None, rows)
    if seen.shape[2] == seen.shape[3]:  # queries of padding tokens count for nothing
        rows = real
    return VisibleKeys(seen, real, rows)


def read_mask(layout: LogitsLayout, constant: Tensor, chunks: Collection[int] = ()) -> LogitsLayout:
    """The layout with the rule that its mask follows. Runs of tokens count as a rule only where a setting of the model
    (`chunks`) has their length: packed sequences look the same.
    """
    view = visible_keys(constant)
    seen = view.seen[:, 0]  # (B, T, S)
    if (view.seen != view.seen[:, :1]).any():
        raise UnreadableError("its heads are masked differently")
    kept = torch.ones_like(seen) if view.padding is None else view.padding[:, None, :].expand(seen.shape)
    for rule, causal, window, chunk in _rules(seen, chunks):
        if torch.equal((rule & kept)[view.rows], seen[view.rows]):
            return replace(layout, causal=causal, window=window, chunk=chunk)
    if (seen != seen[:1]).any():
        raise UnreadableError("its sequences are masked differently")
    raise UnreadableError("its mask is neither causal nor a window")


def _rules(seen: Tensor, chunks: Collection[int]) -> Iterator[tuple[Tensor, bool, int | None, int | None]]:
    """(who sees whom (T, S), causal, window, chunk) of the rules that may fit."""
    length, keys = seen.shape[-2:]
    distance = torch.arange(length)[:, None] + (keys - length) - torch.arange(keys)
    reach = int(distance.abs().expand(seen.shape)[seen].max()) + 1
    window = reach if 1 < reach < max(length, keys) else None  # with 1, tokens of an example are kept apart
    for causal in (False, True):
        ahead = distance >= 0 if causal else torch.ones_like(distance, dtype=torch.bool)
        yield ahead, causal, None, None
        if window is not None:
            yield ahead & (distance.abs() < window), causal, window, None
        for chunk in sorted({size for size in chunks if 0 < size < keys}):
            run = torch.arange(keys) // chunk
            yield ahead & (run[keys - length :, None] == run), causal, None, chunk
