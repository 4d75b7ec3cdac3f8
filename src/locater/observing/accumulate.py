"""Adding up the calls of a layer: each call is reduced to a few sums per head, by an operator that stays in compiled
graphs. Which sums there are (`COLUMNS`), and which of them are asked for (`StatisticsOptions`).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from threading import get_ident
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locater.calls.call_and_masks import Call
from locater.calls.listeners import report_uncounted
from locater.kernels import SUMMED, AttentionStatistics, Terms, add_head_sums, row_statistics, statistics_of
from locater.kernels.reference import weight_at
from locater.numerics import upcast
from locater.observing.row_masks import (
    CountedRows,
    Placement,
    call_for_heads,
    counted_rows,
    next_sample,
    placed_rows,
    sample_rows,
    spans,
    traced_placement,
)
from locater.torch_private import add_to_each, disable_dynamo, in_backward_pass

STACKED = 1 << 25  # numbers that are brought together to be summed at once

# One column per sum over the rows that count, counts before what they count. A mean is a column over its count.
COLUMNS = (
    *SUMMED,  # calls, rows, wide_rows, first_rows; entropy, row_mass, max_probability, ..., entropy_ratio, sink
    *("rest_rows", "wide_rest_rows", "rest_entropy", "rest_entropy_ratio"),
    "outputs",
)
COLUMN = {name: column for column, name in enumerate(COLUMNS)}
MAXIMA = ("max_logit",)
accumulated: set[int] = set()  # addresses of the sums that a call was added to
owners: dict[int, int] = {}  # by address of sums: the thread whose calls are added to them, where it is one alone


def is_of_another_thread(sums: Tensor) -> bool:
    """Whether calls of this thread are not added to these sums; asked by operators, which run in compiled graphs."""
    return owners.get(sums.data_ptr(), here := get_ident()) != here


@dataclass(frozen=True)
class StatisticsOptions:
    """Which statistics of every call to add up, and over which rows."""

    rows: int = 0  # rows to sample of each call; 0: all
    rest: bool = False  # entropy without the first key too
    offsets: Sequence[tuple[int, int]] = ()  # (offset, first row): weight on the key `offset` before
    outputs: bool = False  # Gram matrices of head outputs
    by_request: bool = False  # sums of every sequence too; not an argument of the operator, which adds up one call

    def flat(self) -> tuple[int, bool, list[int], list[int]]:
        """The arguments of the operator: all but `outputs`, which shows in the accumulators, and `by_request`."""
        return self.rows, self.rest, [offset for offset, _ in self.offsets], [start for _, start in self.offsets]


class Accumulators(NamedTuple):
    """The tensors that calls are added to."""

    sums: Tensor  # (H, COLUMNS)
    maxima: Tensor  # (H, MAXIMA)
    pairs: Tensor  # (H, offsets, 2)
    gram: Tensor | None  # (H, V, V)

    def added(self) -> list[Tensor]:
        """The tensors that hold sums: all but the maxima."""
        return [self.sums, self.pairs] if self.gram is None else [self.sums, self.pairs, self.gram]

    def like(self) -> Accumulators:
        """Others of the same shape, to which no call was added."""
        with torch.inference_mode(False):
            gram = None if self.gram is None else torch.zeros_like(self.gram)
            maxima = torch.full_like(self.maxima, -torch.inf)
            return Accumulators(torch.zeros_like(self.sums), maxima, torch.zeros_like(self.pairs), gram)

    def add(self, other: Accumulators) -> None:
        """Add the calls of another."""
        for mine, more in zip(self.added(), other.added(), strict=True):
            mine.add_(more)
        torch.maximum(self.maxima, other.maxima, out=self.maxima)


def wide(device: torch.device) -> torch.dtype:
    """The widest floating type of a device."""
    return torch.float32 if device.type == "mps" else torch.float64


def accumulate_call(
    call: Call, into: Accumulators, options: StatisticsOptions, own: bool, heads: Tensor | None, mailbox: int
) -> None:
    """Add one call to its accumulators. Traced by torch.compile: an operator and nothing else.

    `own`: queries and keys are the same tokens. `heads` are the query heads to count, all where None. With a
    `mailbox` (`ListeningSwitch.mailbox`), a call that cannot be counted is left out, and the reason reported there.
    """
    traced = torch.compiler.is_dynamo_compiling()
    placement: list[Tensor] = []
    if traced:
        kernels = call.query.device.type == "cuda" and not (options.rest or options.offsets or into.gram is not None)
        placement = traced_placement(call, own, heads, kernels, mailbox)
    _operator(
        *(call.query, call.key, *call.terms.flat(), call.output, call.cut, call.statistics),
        *(*into, heads, placement, own, mailbox, not traced, *options.flat()),
    )


SCHEMA = (
    f"accumulate_call(Tensor q, Tensor k, {Terms.SCHEMA}, Tensor? output, Tensor? cut, Tensor? statistics, "
    "Tensor(a!) sums, Tensor(b!) maxima, Tensor(c!) pairs, Tensor(d!)? gram, Tensor? heads, "
    "Tensor[] placement, bool own, SymInt mailbox, bool again, SymInt rows, bool rest, "
    "SymInt[] offsets, SymInt[] starts) -> ()"
)


def _run(q: Tensor, k: Tensor, *arguments: Any) -> None:
    """The operator: `accumulate_call` of its arguments. Run again in a backward pass by activation checkpointing, it
    does nothing.
    """
    if in_backward_pass() or not q.numel() or not k.numel():
        return
    terms, more = Terms.from_flat(arguments[: Terms.ARGUMENTS]), arguments[Terms.ARGUMENTS :]
    output, cut, numbers, sums, maxima, pairs, gram, heads, placed, own, mailbox, again, *asked = more
    rows, rest, offsets, starts = asked
    call, into = Call(q, k, terms, output, cut, statistics=numbers), Accumulators(sums, maxima, pairs, gram)
    options = StatisticsOptions(rows, rest, list(zip(offsets, starts, strict=True)))
    if is_of_another_thread(sums):
        return
    try:
        with (
            torch.no_grad(),
            torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext(),
        ):
            add_call(call, into, options, own, heads, again, Placement(*placed) if placed else None)
        accumulated.add(sums.data_ptr())
    except Exception as error:  # a lenient observation does not end the user's training, whatever happens in it
        if not mailbox:
            raise
        report_uncounted(mailbox, error)
        for tensor in into.added():
            tensor.zero_()  # some columns may have been added to, others not
        maxima.fill_(-torch.inf)


# Not torch.library.custom_op, whose wrappers in Python take as long as what is counted here. There is nothing to
# differentiate.
_library = torch.library.Library("locater", "FRAGMENT")
_library.define(SCHEMA, tags=torch.Tag.pt2_compliant_tag)
_library.impl("accumulate_call", disable_dynamo(_run), "CompositeExplicitAutograd")
_library.impl("accumulate_call", torch.library.fallthrough_kernel, "Autograd")
_operator = torch.ops.locater.accumulate_call.default


def _fake(*args: object, **kwargs: object) -> None:
    return None


torch.library.register_fake("locater::accumulate_call", _fake, lib=_library)


def add_call(
    call: Call,
    into: Accumulators,
    options: StatisticsOptions,
    own: bool,
    heads: Tensor | None,
    again: bool = False,
    placement: Placement | None = None,
) -> None:
    """`accumulate_call`, without the operator around it. `again`: masks of the same memory are the same masks, which is
    not so in a compiled graph; there `placement` comes with the call.

    A head whose `call.output` is not finite gets NaN for its numbers; an output (B, T, E) stands for all heads.
    """
    if heads is not None:
        call = call_for_heads(replace(call, statistics=None), heads)
    terms, (B, _, T, _), S = call.terms, call.query.shape, call.key.shape[2]
    gram, output = into.gram, call.output
    if output is None or output.ndim != 4:
        gram = None
        if output is not None and (output.ndim != 3 or output.shape[:2] != (B, T)):
            call, output = replace(call, output=None), None
    more = options.rest or bool(options.offsets) or gram is not None
    at = next_sample(T, options.rows, call.query.device) if 0 < options.rows < T else None
    if not more and T <= S and call.cut is None and not terms.has_masks and terms.positions is None:
        _add_unmasked(call, into, at)
        return
    rows = counted_rows(call, own, again) if placement is None else placed_rows(call, placement)
    if not more and rows.terms.positions is None and (output is None or output.ndim == 4):
        q, k, terms, output, counted, first, _ = rows
        seen = placement.both_spans if placement and placement.spans.numel() else partial(spans, call, own, again)
        if add_head_sums(q, k, terms, at, output, into.sums, into.maxima, counted, first, spans=seen):
            return
    rows = rows if at is None else sample_rows(rows, at)
    lse = _add_masked_rows(rows, into)
    if options.rest:
        _add_without_first_key(rows, into)
    for column, (offset, start) in enumerate(options.offsets):
        _add_offset_weight(rows, lse, offset, start, into.pairs[:, column])
    _mark_nonfinite(rows.output, rows.counted[:, None] & (lse != -torch.inf), into)
    if gram is not None and rows.output is not None:
        o = upcast(rows.output).masked_fill(~rows.counted[:, :, None, None], 0).transpose(1, 2)  # (B, H, T, V)
        gram += (o.mT @ o).sum(0)
        into.sums[:, COLUMN["outputs"]].add_(1)


def _add_unmasked(call: Call, into: Accumulators, at: Tensor | None) -> None:
    """As `_add_masked_rows`, for a call without masks but causal and window: every row counts, and how many keys each
    row sees follows from its position. Of the rows `at` (R,), None for all.
    """
    q, k, terms, output = call.query, call.key, call.terms, call.output
    apart = None if output is None or output.ndim == 3 else output  # heads are told apart
    if add_head_sums(q, k, terms, at, apart, into.sums, into.maxima, statistics=call.statistics):
        output = output if apart is None else None  # which has been looked at
    elif at is None:
        _add_all_rows(q, k, terms, into, call.statistics)
    else:
        _add_sampled_rows(q, k, terms, at, into)
    _mark_nonfinite(output if output is None or at is None else output[:, at], None, into)


def _add_sampled_rows(q: Tensor, k: Tensor, terms: Terms, at: Tensor, into: Accumulators) -> None:
    """The rows at `at` (R,), among which those that see one key or not the first one are anywhere."""
    B, S = q.shape[0], k.shape[2]
    stats = row_statistics(q, k, terms, rows=at)
    visible = stats.visible[0, 0]  # (R,): the same for every head
    wide = visible > 1
    ratio = stats.entropy / torch.log(visible.clamp_min(2).to(stats.entropy.dtype))
    look = wide.new_ones(len(at)) if terms.window is None else at + (S - q.shape[2]) < terms.window
    top = torch.exp(stats.max_logit - stats.log_sum_exp)
    counts = [1.0, float(B * len(at))]
    add_to_each(into.sums.unbind(1)[: COLUMN["wide_rows"]], counts)
    into.sums[:, COLUMN["wide_rows"] : COLUMN["entropy"]].add_(torch.stack((wide, look)).sum(1) * B)
    _add_means(into.sums, "entropy", _mean_columns(stats, top, ratio.masked_fill_(~wide, 0), stats.first_mass))
    _update_maxima(into.maxima, stats.max_logit)


def _add_all_rows(q: Tensor, k: Tensor, terms: Terms, into: Accumulators, numbers: Tensor | None) -> None:
    """All rows; `numbers` are their statistics, where they came with the call."""
    B, T, S = q.shape[0], q.shape[2], k.shape[2]
    stats = row_statistics(q, k, terms) if numbers is None else statistics_of(numbers, terms, S)
    several = terms.window is None or terms.window > 1
    wide = 0 if not several or S < 2 else T - 1 if terms.causal and T == S else T  # the others are the first rows
    look = T if terms.window is None else min(max(terms.window - (S - T), 0), T)
    ratio = stats.entropy / torch.log(stats.visible[:1, :1].clamp_min(2).to(stats.entropy.dtype))
    if wide < T:
        ratio[:, :, : T - wide].zero_()
    top = torch.exp(stats.max_logit - stats.log_sum_exp)
    counts = (1.0, float(B * T), float(B * wide), float(B * look))
    add_to_each(into.sums.unbind(1)[: COLUMN["entropy"]], counts)
    _add_means(into.sums, "entropy", _mean_columns(stats, top, ratio, stats.first_mass))
    _update_maxima(into.maxima, stats.max_logit)


def _add_masked_rows(rows: CountedRows, into: Accumulators) -> Tensor:
    """Every column but those without the first key; returns the log-sum-exp of the rows."""
    at, q, terms = rows.sample or (None, rows.q, rows.terms)
    stats = row_statistics(q, rows.k, terms, rows=at)
    shown = (stats.visible > 0) & rows.counted[:, None]
    sink, look = weight_at(rows.q, rows.k, rows.terms, rows.first, stats.log_sum_exp)
    ratio, wide = _entropy_ratio(stats, shown)
    into.sums[:, COLUMN["calls"]].add_(1)
    _add_means(into.sums, "rows", (shown, wide, shown & look))
    _add_means(into.sums, "entropy", _mean_columns(stats, stats.max_probability, ratio, sink), ~shown)
    _update_maxima(into.maxima, stats.max_logit.masked_fill(~shown, -torch.inf))
    return stats.log_sum_exp


def _mean_columns(
    stats: AttentionStatistics, top: Tensor, ratio: Tensor, sink: Tensor | None
) -> tuple[Tensor | None, ...]:
    """The columns from "entropy" to "sink"."""
    return (
        stats.entropy,
        stats.row_mass,
        top,
        stats.participation,
        stats.distance,
        stats.self_mass,
        ratio,
        sink,
    )


def _add_without_first_key(rows: CountedRows, into: Accumulators) -> None:
    """Entropy without the first key, which often takes weight that has nothing to do with content."""
    q, k, terms, _, counted, first, _ = rows
    B, S = k.shape[0], k.shape[2]
    later = torch.ones(B, S + 1, dtype=torch.bool, device=k.device)
    later = later.scatter(1, torch.where(first < 0, S, first), False)[:, :S]
    padding = later if terms.padding is None else later & terms.padding
    stats = row_statistics(q, k, replace(terms, padding=padding, sinks=None), extended=False)
    shown = (stats.visible > 0) & counted[:, None]
    ratio, wide = _entropy_ratio(stats, shown)
    _add_means(into.sums, "rest_rows", (shown, wide))
    _add_means(into.sums, "rest_entropy", (stats.entropy, ratio), ~shown)


def _add_offset_weight(rows: CountedRows, lse: Tensor, offset: int, start: int, into: Tensor) -> None:
    """Weight of rows from `start` on, on the key `offset` before them: (sum, rows)."""
    q, k, terms, _, counted, *_ = rows
    positions = terms.at(q.shape[2], k.shape[2], q.device)
    far_enough = positions >= max(start, offset)
    keys = torch.where(far_enough, positions - offset, torch.full_like(positions, -1))[None]
    weight, look = weight_at(q, k, terms, keys, lse)
    shown = counted[:, None] & look
    into[:, 0].add_(torch.where(shown, weight, torch.zeros_like(weight)).sum((0, 2), dtype=into.dtype))
    into[:, 1].add_(shown.sum((0, 2), dtype=into.dtype))


def _entropy_ratio(stats: AttentionStatistics, shown: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy over the log of the visible keys, 0 in rows that see fewer than two; and the rows that see more."""
    wide = shown & (stats.visible > 1)
    ratio = stats.entropy / torch.log(stats.visible.clamp_min(2).to(stats.entropy.dtype))
    return ratio.masked_fill_(~wide, 0), wide


def _add_means(sums: Tensor, start: str, columns: Sequence[Tensor | None], hidden: Tensor | None = None) -> None:
    """Add numbers (B, H, T), summed over the rows that are not `hidden`, to the column `start` and those after it."""
    present, at = [x for x in columns if x is not None], COLUMN[start]
    together = max(1, STACKED // present[0].numel())
    for begin in range(0, len(present), together):
        part = torch.stack(present[begin : begin + together])
        if hidden is not None:
            part.masked_fill_(hidden, 0)
        # `sums[...] +=` would copy once more
        sums.narrow(1, at + begin, len(part)).add_(part.sum((1, 3), dtype=sums.dtype).T)


def _mark_nonfinite(output: Tensor | None, shown: Tensor | None, into: Accumulators) -> None:
    """Make the numbers of a head NaN if its output is not finite in a row that is `shown` (B, H, T), None for all.

    Statistics are computed in float32 at least, and float16 overflows where that does not: a softmax of infinite logits
    is NaN in the model and would be a one-hot row here. The largest logit stays, since it says why.
    """
    sums, pairs = into.sums, into.pairs
    if output is None or (output.ndim == 4 and output.shape[2] != len(sums)):
        return
    row_sums = output.sum(-1, dtype=torch.promote_types(output.dtype, torch.float32))  # (B, T, H)
    if row_sums.ndim == 2:  # of all heads together
        row_sums = row_sums[:, :, None].repeat(1, 1, len(sums))
    if shown is not None:
        row_sums.masked_fill_(~shown.transpose(1, 2), 0)
    nothing = row_sums.sum((0, 1), dtype=sums.dtype).mul_(0)  # (H,): 0, or NaN
    sums.narrow(1, COLUMN["entropy"], COLUMN["outputs"] - COLUMN["entropy"]).add_(nothing[:, None])
    if pairs.numel():
        pairs.add_(nothing[:, None, None])


def _update_maxima(maxima: Tensor, logits: Tensor) -> None:
    largest = maxima[:, 0]
    torch.maximum(largest, logits.amax((0, 2)).to(largest.dtype), out=largest)  # NaN wins, as it should
