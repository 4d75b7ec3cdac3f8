"""Reduce one call of an attention layer to a few sums per head, and add them up.

`locater::tally` is an operator of its own, so that a compiled model keeps one graph: it returns nothing and adds to tensors.
Sums are float64 where the device has it. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from locater.kernels import attention_statistics
from locater.kernels.reference import weight_at
from locater.kernels.terms import Terms, full_terms
from locater.spectrum import upcast

# One column per sum over the rows that count. A mean is a column over its count.
COLUMNS = (
    "calls", "rows", "entropy", "row_mass", "max_probability", "participation", "distance", "self_mass",
    "wide_rows", "entropy_ratio", "first_rows", "sink", "rest_rows", "rest_entropy", "wide_rest_rows", "rest_entropy_ratio",
)  # fmt: skip
AT = {name: column for column, name in enumerate(COLUMNS)}
MAXIMA = ("max_logit",)
_rows = torch.Generator()  # which rows are sampled


def wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


@torch.library.custom_op("locater::tally", mutates_args=("sums", "maxima", "pairs", "gram"))
def tally(
    q: Tensor, k: Tensor, sums: Tensor, maxima: Tensor, pairs: Tensor, gram: Tensor | None, scale: float, causal: bool, own: bool,
    window: int, softcap: float, padding: Tensor | None, mask: Tensor | None, bias: Tensor | None, alibi: Tensor | None,
    sinks: Tensor | None, output: Tensor | None, heads: Tensor | None, rows: int, rest: bool, offsets: Sequence[int], starts: Sequence[int],
) -> None:  # fmt: skip
    """Add one call to `sums` (H, COLUMNS), `maxima` (H, MAXIMA), `pairs` (H, offsets, 2) and `gram` (H, V, V).

    `own` says that queries and keys are the same tokens; `window` and `softcap` are 0 for none; `heads` are those wanted; `rows`
    is how many rows to sample, 0 for all. Called again in the backward pass by activation checkpointing, it does nothing.
    """
    if torch._C._current_graph_task_id() != -1 or not q.shape[2] or not k.shape[2]:
        return
    if heads is not None:
        q, k, bias, mask = _some_heads(q, k, bias, mask, heads)
        alibi, sinks, output = (
            None if alibi is None else alibi[heads],
            None if sinks is None else sinks[heads],
            None if output is None else output[:, :, heads],
        )
    terms = Terms(scale, causal, window or None, softcap or None, padding, None, mask, bias, alibi, sinks)
    with torch.autocast(q.device.type, enabled=False):
        terms = full_terms(terms, q.shape[0], q.shape[1], q.shape[2], k.shape[2])
        terms, counted, first = _placed(q, k, terms, own)
        if 0 < rows < q.shape[2]:
            q, terms, counted, output = _some_rows(q, k, terms, counted, output, rows)
        lse = _add(q, k, terms, counted, first, sums, maxima)
        if rest:
            _add_rest(q, k, terms, counted, first, sums)
        for column, (offset, start) in enumerate(zip(offsets, starts, strict=True)):
            _add_pairs(q, k, terms, counted, lse, offset, start, pairs[:, column])
        if gram is not None and output is not None:
            o = (upcast(output) * counted[:, :, None, None]).transpose(1, 2)  # (B, H, T, V)
            gram += (o.mT @ o).sum(0)


@tally.register_fake
def _(*args: object, **kwargs: object) -> None:
    return None


def _some_heads(
    q: Tensor, k: Tensor, bias: Tensor | None, mask: Tensor | None, heads: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    group = q.shape[1] // k.shape[1]
    return (
        q[:, heads], k[:, heads // group],
        bias if bias is None or bias.ndim < 4 or bias.shape[1] == 1 else bias[:, heads],
        mask if mask is None or mask.ndim < 4 or mask.shape[1] == 1 else mask[:, heads],
    )  # fmt: skip


def _in_sight(terms: Terms) -> Tensor | None:
    """What the given mask and bias leave in sight (b, t, S), of any head; None where there is neither."""
    parts = [] if terms.mask is None else [terms.mask.any(1)]
    if terms.bias is not None:
        parts.append((terms.bias > -torch.inf).any(1))
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _placed(q: Tensor, k: Tensor, terms: Terms, own: bool) -> tuple[Terms, Tensor, Tensor]:
    """Terms with the queries' positions, the rows that count (B, T), the first key in sight of each sequence (B,).

    A key that no query may look at is padding. Where queries and keys are the same tokens, its row is padding too. Among cached
    keys a query's own is the last it sees: a cache may have room left after it.
    """
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    seen = _in_sight(terms)
    real = torch.ones(B, S, dtype=torch.bool, device=q.device) if seen is None else seen.any(1).expand(B, S)
    if terms.padding is not None:
        real = real & terms.padding
    first = real.to(torch.int8).argmax(-1)
    if not own or S < T:
        return terms, torch.ones(B, T, dtype=torch.bool, device=q.device), first
    if T < S and seen is not None:
        last = torch.where(seen, torch.arange(S, device=q.device), -1).amax(-1).amax(0).expand(T)
        terms = replace(terms, positions=last.clamp_min(0))
    return terms, real[:, terms.at(T, S, q.device)], first


def _some_rows(
    q: Tensor, k: Tensor, terms: Terms, counted: Tensor, output: Tensor | None, rows: int
) -> tuple[Tensor, Terms, Tensor, Tensor | None]:
    """One row out of each of `rows` equal parts."""
    T, S = q.shape[2], k.shape[2]
    at = ((torch.arange(rows) + torch.rand(rows, generator=_rows)) * (T / rows)).long().clamp_max(T - 1).to(q.device)
    held = vars(terms)
    for name in ("mask", "bias"):
        if held[name] is not None and held[name].shape[-2] != 1:
            held = {**held, name: held[name][..., at, :]}
    held = {**held, "positions": terms.at(T, S, q.device)[at]}
    return q[:, :, at], Terms(**held), counted[:, at], None if output is None else output[:, at]


def _add(q: Tensor, k: Tensor, terms: Terms, counted: Tensor, first: Tensor, sums: Tensor, maxima: Tensor) -> Tensor:
    """Every column but those of the rest; returns the log-sum-exp of the rows."""
    found = attention_statistics(q, k, **vars(terms))
    shown = (found.visible > 0) & counted[:, None]
    sink, look = weight_at(q, k, terms, first[:, None], found.log_sum_exp)
    _put(sums, shown, rows=None, entropy=found.entropy, row_mass=found.row_mass, max_probability=found.max_probability,
         participation=found.participation, distance=found.distance, self_mass=found.self_mass)  # fmt: skip
    _put(sums, shown & (found.visible > 1), wide_rows=None, entropy_ratio=found.entropy_ratio)
    _put(sums, shown & look, first_rows=None, sink=sink)
    sums[:, AT["calls"]] += 1
    top = torch.where(shown, found.max_logit, torch.full_like(found.max_logit, -torch.inf)).amax((0, 2))
    maxima[:, 0] = torch.maximum(maxima[:, 0], top.to(maxima))  # NaN wins, as it should
    return found.log_sum_exp


def _add_rest(q: Tensor, k: Tensor, terms: Terms, counted: Tensor, first: Tensor, sums: Tensor) -> None:
    """Entropy without the first key, which often takes weight that has nothing to do with content."""
    later = torch.ones(k.shape[0], k.shape[2], dtype=torch.bool, device=k.device).scatter(1, first[:, None], False)
    padding = later if terms.padding is None else later & terms.padding
    found = attention_statistics(q, k, extended=False, **{**vars(terms), "padding": padding, "sinks": None})
    shown = (found.visible > 0) & counted[:, None]
    _put(sums, shown, rest_rows=None, rest_entropy=found.entropy)
    _put(sums, shown & (found.visible > 1), wide_rest_rows=None, rest_entropy_ratio=found.entropy_ratio)


def _put(sums: Tensor, where: Tensor, **columns: Tensor | None) -> None:
    """Add the sum of each column over the rows in `where`; None counts them."""
    for name, value in columns.items():
        held = where if value is None else torch.where(where, value, torch.zeros_like(value))
        sums[:, AT[name]] += held.sum((0, 2), dtype=sums.dtype)


def _add_pairs(q: Tensor, k: Tensor, terms: Terms, counted: Tensor, lse: Tensor, offset: int, start: int, into: Tensor) -> None:
    """Weight of rows from `start` on, on the key `offset` before them: (sum, rows)."""
    positions = terms.at(q.shape[2], k.shape[2], q.device)
    wanted = positions >= max(start, offset)
    weight, look = weight_at(q, k, terms, torch.where(wanted, positions - offset, torch.full_like(positions, -1))[None], lse)
    shown = counted[:, None] & look
    into[:, 0] += torch.where(shown, weight, torch.zeros_like(weight)).sum((0, 2), dtype=into.dtype)
    into[:, 1] += shown.sum((0, 2), dtype=into.dtype)
