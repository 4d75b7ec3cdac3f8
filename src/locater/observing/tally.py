"""Reduce one call of an attention layer to a few sums per head, and add them up.

`locater::tally` is an operator of its own, so that a compiled model keeps one graph: it returns nothing and adds to
tensors. Sums are float64 where the device has it. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from locater.attention.listeners import missed
from locater.kernels import attention_statistics
from locater.kernels.reference import weight_at
from locater.kernels.terms import AttentionStatistics, Terms, full_terms
from locater.numerics import upcast

# One column per sum over the rows that count, counts before what they count. A mean is a column over its count.
COLUMNS = (
    "calls", "rows", "wide_rows", "first_rows",
    "entropy", "row_mass", "max_probability", "participation", "distance", "self_mass", "entropy_ratio", "sink",
    "rest_rows", "wide_rest_rows", "rest_entropy", "rest_entropy_ratio", "outputs",
)  # fmt: skip
AT = {name: column for column, name in enumerate(COLUMNS)}
MAXIMA = ("max_logit",)
STACKED = 1 << 25  # numbers that are brought together to be summed at once
_rows = torch.Generator()  # which rows are sampled


@dataclass(frozen=True)
class StatisticsOptions:
    """What to keep of every call."""

    rows: int = 0  # rows to sample of each call; 0: all
    rest: bool = False  # entropy without the first key too
    offsets: Sequence[tuple[int, int]] = ()  # (offset, first row): weight on the key `offset` before
    outputs: bool = False  # Gram matrices of head outputs


def wide(device: torch.device) -> torch.dtype:
    return torch.float32 if device.type == "mps" else torch.float64


def _kernel(
    q: Tensor, k: Tensor, sums: Tensor, maxima: Tensor, pairs: Tensor, gram: Tensor | None, scale: float, causal: bool, own: bool,
    window: int, softcap: float, padding: Tensor | None, documents: Tensor | None, mask: Tensor | None, bias: Tensor | None,
    alibi: Tensor | None, sinks: Tensor | None, output: Tensor | None, heads: Tensor | None, cut: Tensor | None, rows: int, rest: bool,
    offsets: Sequence[int], starts: Sequence[int], lenient: bool,
) -> None:  # fmt: skip
    """Add one call to `sums` (H, COLUMNS), `maxima` (H, MAXIMA), `pairs` (H, offsets, 2) and `gram` (H, V, V).

    `own` says that queries and keys are the same tokens; `window` and `softcap` are 0 for none; `heads` are those
    wanted; `cut` (B,) marks sequences whose first key is gone from the cache; `rows` is how many rows to sample, 0 for
    all. `output` (B, T, H, V) is what the model made: a head that it made no finite number of gets none here either;
    (B, T, E) stands for all heads. `lenient` leaves out what cannot be counted, for want of memory or whatever else,
    and keeps the reason in `missed`. Called again in the backward pass by activation checkpointing, it does nothing.
    """
    if torch._C._current_graph_task_id() != -1 or not q.numel() or not k.numel():
        return
    try:
        with (
            torch.no_grad(),
            torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext(),
        ):
            _tally(q, k, sums, maxima, pairs, gram, scale, causal, own, window, softcap, padding, documents, mask, bias, alibi, sinks,
                   output, heads, cut, rows, rest, offsets, starts)  # fmt: skip
    except Exception as error:
        if not lenient:
            raise
        missed.append(error)
        for held in (sums, pairs) if gram is None else (sums, pairs, gram):
            held.zero_()  # some columns may have been added to, others not
        maxima.fill_(-torch.inf)


# Not torch.library.custom_op, whose wrappers in Python take as long as what is counted here. There is nothing to
# differentiate.
_library = torch.library.Library("locater", "FRAGMENT")
_library.define(
    "tally" + torch.library.infer_schema(_kernel, mutates_args=("sums", "maxima", "pairs", "gram")),
    tags=torch.Tag.pt2_compliant_tag,
)
_library.impl("tally", _disable_dynamo(_kernel), "CompositeExplicitAutograd")
_library.impl("tally", torch.library.fallthrough_kernel, "Autograd")
tally = torch.ops.locater.tally.default


def _fake(*args: object, **kwargs: object) -> None:
    return None


torch.library.register_fake("locater::tally", _fake, lib=_library)


def _tally(
    q: Tensor, k: Tensor, sums: Tensor, maxima: Tensor, pairs: Tensor, gram: Tensor | None, scale: float, causal: bool, own: bool,
    window: int, softcap: float, padding: Tensor | None, documents: Tensor | None, mask: Tensor | None, bias: Tensor | None,
    alibi: Tensor | None, sinks: Tensor | None, output: Tensor | None, heads: Tensor | None, cut: Tensor | None, rows: int, rest: bool,
    offsets: Sequence[int], starts: Sequence[int],
) -> None:  # fmt: skip
    if heads is not None:
        q, k, bias, mask = _some_heads(q, k, bias, mask, heads)
        alibi, sinks, output = (
            None if alibi is None else alibi[heads],
            None if sinks is None else sinks[heads],
            output if output is None or output.ndim < 4 else output[:, :, heads],
        )
    terms = Terms(scale, causal, window or None, softcap or None, padding, documents, mask, bias, alibi, sinks)
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    if output is None or output.ndim != 4:
        gram = None
        output = output if output is not None and output.ndim == 3 and output.shape[:2] == (B, T) else None
    more = rest or bool(offsets) or gram is not None
    if not more and T <= S and not 0 < rows < T and all(x is None for x in (padding, documents, mask, bias, cut)):
        _add_whole(q, k, terms, sums, maxima)
        _spoil(output, None, sums, pairs)
        return
    terms = full_terms(terms, B, q.shape[1], T, S)
    terms, counted, first = _placed(q, k, terms, own, cut)
    if 0 < rows < T:
        q, terms, counted, first, output = _some_rows(q, k, terms, counted, first, output, rows)
    lse = _add(q, k, terms, counted, first, sums, maxima)
    if rest:
        _add_rest(q, k, terms, counted, first, sums)
    for column, (offset, start) in enumerate(zip(offsets, starts, strict=True)):
        _add_pairs(q, k, terms, counted, lse, offset, start, pairs[:, column])
    _spoil(output, counted[:, None] & (lse != -torch.inf), sums, pairs)
    if gram is not None and output is not None:
        o = upcast(output).masked_fill(~counted[:, :, None, None], 0).transpose(1, 2)  # (B, H, T, V)
        gram += (o.mT @ o).sum(0)
        sums[:, AT["outputs"]].add_(1)


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


def _placed(q: Tensor, k: Tensor, terms: Terms, own: bool, cut: Tensor | None) -> tuple[Terms, Tensor, Tensor]:
    """Terms with the queries' positions, the rows that count (B, T), the first key of each row's sequence (B, T), -1
    where it is gone.

    A key that no query may look at is padding. Where queries and keys are the same tokens, its row is padding too.
    Among cached keys a query's own is the last it sees, unless several see the same last: a cache may have room left
    after it.
    """
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    seen = _in_sight(terms)
    real = torch.ones(B, S, dtype=torch.bool, device=q.device) if seen is None else seen.any(1).expand(B, S)
    if terms.padding is not None:
        real = real & terms.padding
    first = real.to(torch.int8).argmax(-1)[:, None].expand(B, T)
    if not own or S < T:
        return terms, torch.ones(B, T, dtype=torch.bool, device=q.device), first
    if T < S and seen is not None:
        last = torch.where(seen, torch.arange(S, device=q.device), -1).amax(-1).amax(0).expand(T)
        rising = ((last[1:] > last[:-1]) | (last[:-1] < 0)).all()
        terms = replace(terms, positions=torch.where(rising, last, terms.at(T, S, q.device)).clamp_min(0))
    if cut is not None:  # the oldest key of a window is none of note
        first = torch.where(cut[:, None], -1, first)
    elif T == S:
        first = _first_of_document(terms, seen, first)
    return terms, real[:, terms.at(T, S, q.device)], first


def _first_of_document(terms: Terms, seen: Tensor | None, first: Tensor) -> Tensor:
    """The first key (B, T) where a sequence holds several documents: one begins where neither it nor what follows looks
    back.
    """
    T = first.shape[1]
    at = torch.arange(T, device=first.device)
    if terms.documents is not None:
        begins = torch.nn.functional.pad(terms.documents.diff(dim=-1) != 0, (1, 0), value=True)
    elif seen is not None and seen.shape[1] == T > 1:
        shown = seen if terms.padding is None else seen & terms.padding[:, None]
        earliest = torch.where(shown.any(-1), shown.to(torch.int8).argmax(-1), T)
        begins = (earliest.flip(-1).cummin(-1).values.flip(-1) >= at) & shown.diagonal(dim1=-2, dim2=-1)
    else:
        return first
    found = torch.where(begins, at, -1).cummax(-1).values
    return torch.where(found < 0, first, found)


def _some_rows(
    q: Tensor, k: Tensor, terms: Terms, counted: Tensor, first: Tensor, output: Tensor | None, rows: int
) -> tuple[Tensor, Terms, Tensor, Tensor, Tensor | None]:
    """One row out of each of `rows` equal parts."""
    T, S = q.shape[2], k.shape[2]
    at = ((torch.arange(rows) + torch.rand(rows, generator=_rows)) * (T / rows)).long().clamp_max(T - 1).to(q.device)
    held = vars(terms)
    for name in ("mask", "bias"):
        if held[name] is not None and held[name].shape[-2] != 1:
            held = {**held, name: held[name][..., at, :]}
    held = {**held, "positions": terms.at(T, S, q.device)[at]}
    return q[:, :, at], Terms(**held), counted[:, at], first[:, at], None if output is None else output[:, at]


def _add_whole(q: Tensor, k: Tensor, terms: Terms, sums: Tensor, maxima: Tensor) -> None:
    """As `_add`, of a call without masks but causal and window: every row counts, and how many keys each sees is known
    by its place.
    """
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    found = attention_statistics(q, k, **vars(terms))
    several = terms.window is None or terms.window > 1
    wide = 0 if not several or S < 2 else T - 1 if terms.causal and T == S else T  # the others are the first rows
    look = T if terms.window is None else min(max(terms.window - (S - T), 0), T)
    ratio = found.entropy / torch.log(found.visible[:1, :1].clamp_min(2).to(found.entropy.dtype))
    if wide < T:
        ratio[:, :, : T - wide].zero_()
    top = torch.exp(found.max_logit - found.log_sum_exp)
    columns = (
        found.entropy,
        found.row_mass,
        top,
        found.participation,
        found.distance,
        found.self_mass,
        ratio,
        found.first_mass,
    )
    torch._foreach_add_(sums.unbind(1)[: AT["entropy"]], (1.0, float(B * T), float(B * wide), float(B * look)))
    _put(sums, "entropy", columns)
    _raise(maxima, found.max_logit)


def _add(q: Tensor, k: Tensor, terms: Terms, counted: Tensor, first: Tensor, sums: Tensor, maxima: Tensor) -> Tensor:
    """Every column but those of the rest; returns the log-sum-exp of the rows."""
    found = attention_statistics(q, k, **vars(terms))
    shown = (found.visible > 0) & counted[:, None]
    sink, look = weight_at(q, k, terms, first, found.log_sum_exp)
    ratio, wide = _ratio(found, shown)
    sums[:, AT["calls"]].add_(1)
    _put(sums, "rows", (shown, wide, shown & look))
    columns = (
        found.entropy,
        found.row_mass,
        found.max_probability,
        found.participation,
        found.distance,
        found.self_mass,
        ratio,
        sink,
    )
    _put(sums, "entropy", columns, ~shown)
    _raise(maxima, found.max_logit.masked_fill(~shown, -torch.inf))
    return found.log_sum_exp


def _add_rest(q: Tensor, k: Tensor, terms: Terms, counted: Tensor, first: Tensor, sums: Tensor) -> None:
    """Entropy without the first key, which often takes weight that has nothing to do with content."""
    B, S = k.shape[0], k.shape[2]
    later = torch.ones(B, S + 1, dtype=torch.bool, device=k.device).scatter(1, torch.where(first < 0, S, first), False)[
        :, :S
    ]
    padding = later if terms.padding is None else later & terms.padding
    found = attention_statistics(q, k, extended=False, **{**vars(terms), "padding": padding, "sinks": None})
    shown = (found.visible > 0) & counted[:, None]
    ratio, wide = _ratio(found, shown)
    _put(sums, "rest_rows", (shown, wide))
    _put(sums, "rest_entropy", (found.entropy, ratio), ~shown)


def _ratio(found: AttentionStatistics, shown: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy over the log of the visible keys, 0 in rows that see fewer than two; and the rows that see more."""
    wide = shown & (found.visible > 1)
    ratio = found.entropy / torch.log(found.visible.clamp_min(2).to(found.entropy.dtype))
    return ratio.masked_fill_(~wide, 0), wide


def _put(sums: Tensor, start: str, columns: Sequence[Tensor | None], hidden: Tensor | None = None) -> None:
    """Add the sums over the rows that are not `hidden` of numbers (B, H, T) to the column `start` and those after
    it.
    """
    held, at = [x for x in columns if x is not None], AT[start]
    together = max(1, STACKED // held[0].numel())
    for begin in range(0, len(held), together):
        part = torch.stack(held[begin : begin + together])
        if hidden is not None:
            part.masked_fill_(hidden, 0)
        # `sums[...] +=` would copy once more
        sums.narrow(1, at + begin, len(part)).add_(part.sum((1, 3), dtype=sums.dtype).T)


def _spoil(output: Tensor | None, shown: Tensor | None, sums: Tensor, pairs: Tensor) -> None:
    """No number of a head whose output is not finite in a row that is `shown` (B, H, T), None for all.

    Statistics are computed in float32 at least, and float16 overflows where that does not: a softmax of infinite logits
    is NaN in the model and would be a one-hot row here. The largest logit stays, since it says why.
    """
    if output is None or (output.ndim == 4 and output.shape[2] != len(sums)):
        return
    made = output.sum(-1, dtype=torch.promote_types(output.dtype, torch.float32))  # (B, T, H)
    if made.ndim == 2:  # of all heads together
        made = made[:, :, None].repeat(1, 1, len(sums))
    if shown is not None:
        made.masked_fill_(~shown.transpose(1, 2), 0)
    nothing = made.sum((0, 1), dtype=sums.dtype).mul_(0)  # (H,): 0, or NaN
    sums.narrow(1, AT["entropy"], AT["outputs"] - AT["entropy"]).add_(nothing[:, None])
    if pairs.numel():
        pairs.add_(nothing[:, None, None])


def _raise(maxima: Tensor, logits: Tensor) -> None:
    held = maxima[:, 0]
    torch.maximum(held, logits.amax((0, 2)).to(held.dtype), out=held)  # NaN wins, as it should


def _add_pairs(
    q: Tensor, k: Tensor, terms: Terms, counted: Tensor, lse: Tensor, offset: int, start: int, into: Tensor
) -> None:
    """Weight of rows from `start` on, on the key `offset` before them: (sum, rows)."""
    positions = terms.at(q.shape[2], k.shape[2], q.device)
    wanted = positions >= max(start, offset)
    weight, look = weight_at(
        q, k, terms, torch.where(wanted, positions - offset, torch.full_like(positions, -1))[None], lse
    )
    shown = counted[:, None] & look
    into[:, 0].add_(torch.where(shown, weight, torch.zeros_like(weight)).sum((0, 2), dtype=into.dtype))
    into[:, 1].add_(shown.sum((0, 2), dtype=into.dtype))
