"""A place where attention is listened to: one attention module, and the sums of its calls."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor, nn

from locater.calls.call import Call
from locater.calls.listeners import Switch, is_measured, report_missed
from locater.errors import LocaterError
from locater.kernels import AttentionStatistics, Terms, add_head_sums, row_statistics, statistics_of
from locater.kernels.reference import weight_at
from locater.layers.tensor_parallel import WHOLE, Split
from locater.numerics import upcast
from locater.observing.accumulators import (
    AT,
    COLUMNS,
    MAXIMA,
    Accumulators,
    StatisticsOptions,
    is_of_another_thread,
    tallied,
    wide,
)
from locater.observing.compiled_row_masks import Placement, placed_rows, traced_placement
from locater.observing.row_masks import CountedRows, counted_rows, next_sample, of_heads, sampled, spans
from locater.torch_private import (
    add_to_each,
    disable_dynamo,
    in_backward_pass,
    own_children,
    own_parameters,
    subtract_from_each,
    zero_each,
)

if TYPE_CHECKING:
    from locater.layers import AttentionLayer
    from locater.observing.layers_by_record import KnownLayer


# Reduce one call of an attention layer to a few sums per head, and add them up.


STACKED = 1 << 25  # numbers that are brought together to be summed at once


def tally(
    call: Call, into: Accumulators, options: StatisticsOptions, own: bool, heads: Tensor | None, mailbox: int
) -> None:
    """Add one call to its accumulators. Traced by torch.compile: an operator and nothing else.

    `own`: queries and keys are the same tokens. `heads` are the query heads to count, all where None. With a
    `mailbox` (`Switch.mailbox`), a call that cannot be counted is left out, and the reason reported there.
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
    f"tally(Tensor q, Tensor k, {Terms.SCHEMA}, Tensor? output, Tensor? cut, Tensor? statistics, "
    "Tensor(a!) sums, Tensor(b!) maxima, Tensor(c!) pairs, Tensor(d!)? gram, Tensor? heads, "
    "Tensor[] placement, bool own, SymInt mailbox, bool again, SymInt rows, bool rest, "
    "SymInt[] offsets, SymInt[] starts) -> ()"
)


def _run(q: Tensor, k: Tensor, *arguments: Any) -> None:
    """The operator: `tally` of its arguments. Run again in a backward pass by activation checkpointing, it does
    nothing.
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
        tallied.add(sums.data_ptr())
    except Exception as error:
        if not mailbox:
            raise
        report_missed(mailbox, error)
        for tensor in into.added():
            tensor.zero_()  # some columns may have been added to, others not
        maxima.fill_(-torch.inf)


# Not torch.library.custom_op, whose wrappers in Python take as long as what is counted here. There is nothing to
# differentiate.
_library = torch.library.Library("locater", "FRAGMENT")
_library.define(SCHEMA, tags=torch.Tag.pt2_compliant_tag)
_library.impl("tally", disable_dynamo(_run), "CompositeExplicitAutograd")
_library.impl("tally", torch.library.fallthrough_kernel, "Autograd")
_operator = torch.ops.locater.tally.default


def _fake(*args: object, **kwargs: object) -> None:
    return None


torch.library.register_fake("locater::tally", _fake, lib=_library)


def add_call(
    call: Call,
    into: Accumulators,
    options: StatisticsOptions,
    own: bool,
    heads: Tensor | None,
    again: bool = False,
    placement: Placement | None = None,
) -> None:
    """`tally`, without the operator around it. `again`: masks of the same memory are the same masks, which is not so in
    a compiled graph; there `placement` comes with the call.

    A head whose `call.output` is not finite gets NaN for its numbers; an output (B, T, E) stands for all heads.
    """
    if heads is not None:
        call = of_heads(replace(call, statistics=None), heads)
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
    rows = rows if at is None else sampled(rows, at)
    lse = _add(rows, into)
    if options.rest:
        _add_rest(rows, into)
    for column, (offset, start) in enumerate(options.offsets):
        _add_pairs(rows, lse, offset, start, into.pairs[:, column])
    _spoil(rows.output, rows.counted[:, None] & (lse != -torch.inf), into)
    if gram is not None and rows.output is not None:
        o = upcast(rows.output).masked_fill(~rows.counted[:, :, None, None], 0).transpose(1, 2)  # (B, H, T, V)
        gram += (o.mT @ o).sum(0)
        into.sums[:, AT["outputs"]].add_(1)


def _add_unmasked(call: Call, into: Accumulators, at: Tensor | None) -> None:
    """As `_add`, for a call without masks but causal and window: every row counts, and how many keys each row sees
    follows from its position. Of the rows `at` (R,), None for all.
    """
    q, k, terms, output = call.query, call.key, call.terms, call.output
    apart = None if output is None or output.ndim == 3 else output  # heads are told apart
    if add_head_sums(q, k, terms, at, apart, into.sums, into.maxima, statistics=call.statistics):
        output = output if apart is None else None  # which has been looked at
    elif at is None:
        _add_whole(q, k, terms, into, call.statistics)
    else:
        _add_some(q, k, terms, at, into)
    _spoil(output if output is None or at is None else output[:, at], None, into)


def _add_some(q: Tensor, k: Tensor, terms: Terms, at: Tensor, into: Accumulators) -> None:
    """The rows at `at` (R,), among which those that see one key or not the first one are anywhere."""
    B, S = q.shape[0], k.shape[2]
    stats = row_statistics(q, k, terms, rows=at)
    visible = stats.visible[0, 0]  # (R,): the same for every head
    wide = visible > 1
    ratio = stats.entropy / torch.log(visible.clamp_min(2).to(stats.entropy.dtype))
    look = wide.new_ones(len(at)) if terms.window is None else at + (S - q.shape[2]) < terms.window
    top = torch.exp(stats.max_logit - stats.log_sum_exp)
    counts = [1.0, float(B * len(at))]
    add_to_each(into.sums.unbind(1)[: AT["wide_rows"]], counts)
    into.sums[:, AT["wide_rows"] : AT["entropy"]].add_(torch.stack((wide, look)).sum(1) * B)
    _put(into.sums, "entropy", _means(stats, top, ratio.masked_fill_(~wide, 0), stats.first_mass))
    _raise(into.maxima, stats.max_logit)


def _add_whole(q: Tensor, k: Tensor, terms: Terms, into: Accumulators, numbers: Tensor | None) -> None:
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
    add_to_each(into.sums.unbind(1)[: AT["entropy"]], counts)
    _put(into.sums, "entropy", _means(stats, top, ratio, stats.first_mass))
    _raise(into.maxima, stats.max_logit)


def _add(rows: CountedRows, into: Accumulators) -> Tensor:
    """Every column but those without the first key; returns the log-sum-exp of the rows."""
    at, q, terms = rows.sample or (None, rows.q, rows.terms)
    stats = row_statistics(q, rows.k, terms, rows=at)
    shown = (stats.visible > 0) & rows.counted[:, None]
    sink, look = weight_at(rows.q, rows.k, rows.terms, rows.first, stats.log_sum_exp)
    ratio, wide = _ratio(stats, shown)
    into.sums[:, AT["calls"]].add_(1)
    _put(into.sums, "rows", (shown, wide, shown & look))
    _put(into.sums, "entropy", _means(stats, stats.max_probability, ratio, sink), ~shown)
    _raise(into.maxima, stats.max_logit.masked_fill(~shown, -torch.inf))
    return stats.log_sum_exp


def _means(stats: AttentionStatistics, top: Tensor, ratio: Tensor, sink: Tensor | None) -> tuple[Tensor | None, ...]:
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


def _add_rest(rows: CountedRows, into: Accumulators) -> None:
    """Entropy without the first key, which often takes weight that has nothing to do with content."""
    q, k, terms, _, counted, first, _ = rows
    B, S = k.shape[0], k.shape[2]
    later = torch.ones(B, S + 1, dtype=torch.bool, device=k.device)
    later = later.scatter(1, torch.where(first < 0, S, first), False)[:, :S]
    padding = later if terms.padding is None else later & terms.padding
    stats = row_statistics(q, k, replace(terms, padding=padding, sinks=None), extended=False)
    shown = (stats.visible > 0) & counted[:, None]
    ratio, wide = _ratio(stats, shown)
    _put(into.sums, "rest_rows", (shown, wide))
    _put(into.sums, "rest_entropy", (stats.entropy, ratio), ~shown)


def _add_pairs(rows: CountedRows, lse: Tensor, offset: int, start: int, into: Tensor) -> None:
    """Weight of rows from `start` on, on the key `offset` before them: (sum, rows)."""
    q, k, terms, _, counted, *_ = rows
    positions = terms.at(q.shape[2], k.shape[2], q.device)
    far_enough = positions >= max(start, offset)
    keys = torch.where(far_enough, positions - offset, torch.full_like(positions, -1))[None]
    weight, look = weight_at(q, k, terms, keys, lse)
    shown = counted[:, None] & look
    into[:, 0].add_(torch.where(shown, weight, torch.zeros_like(weight)).sum((0, 2), dtype=into.dtype))
    into[:, 1].add_(shown.sum((0, 2), dtype=into.dtype))


def _ratio(stats: AttentionStatistics, shown: Tensor) -> tuple[Tensor, Tensor]:
    """Entropy over the log of the visible keys, 0 in rows that see fewer than two; and the rows that see more."""
    wide = shown & (stats.visible > 1)
    ratio = stats.entropy / torch.log(stats.visible.clamp_min(2).to(stats.entropy.dtype))
    return ratio.masked_fill_(~wide, 0), wide


def _put(sums: Tensor, start: str, columns: Sequence[Tensor | None], hidden: Tensor | None = None) -> None:
    """Add numbers (B, H, T), summed over the rows that are not `hidden`, to the column `start` and those after it."""
    present, at = [x for x in columns if x is not None], AT[start]
    together = max(1, STACKED // present[0].numel())
    for begin in range(0, len(present), together):
        part = torch.stack(present[begin : begin + together])
        if hidden is not None:
            part.masked_fill_(hidden, 0)
        # `sums[...] +=` would copy once more
        sums.narrow(1, at + begin, len(part)).add_(part.sum((1, 3), dtype=sums.dtype).T)


def _spoil(output: Tensor | None, shown: Tensor | None, into: Accumulators) -> None:
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
    sums.narrow(1, AT["entropy"], AT["outputs"] - AT["entropy"]).add_(nothing[:, None])
    if pairs.numel():
        pairs.add_(nothing[:, None, None])


def _raise(maxima: Tensor, logits: Tensor) -> None:
    largest = maxima[:, 0]
    torch.maximum(largest, logits.amax((0, 2)).to(largest.dtype), out=largest)  # NaN wins, as it should


@dataclass
class Site:
    """One attention module under observation. `heads` are the numbers of the query heads that are observed.

    Where heads are split over ranks, `totals` has rows for all of `heads`, and a call adds to those of this rank.
    Accumulators are made without values: `clear` sets those of all sites at once.
    """

    counts_split_heads: ClassVar[bool] = True
    name: str
    number: int
    kind: str
    module: nn.Module
    group: int  # query heads per key head
    count: int  # query heads
    heads: list[int]
    switch: Switch
    options: StatisticsOptions
    layer: AttentionLayer | KnownLayer | None  # None where the module was found by its calls
    output_size: int | None = None  # of a head's output, where it is known
    device: torch.device | None = None  # of the sums, where it is not that of the parameters
    placed: bool = True  # whether keys are tokens in order, so that distances and a first key are known
    split: Split = WHOLE  # which heads this rank computes
    totals: Accumulators = field(init=False)
    here: Accumulators = field(init=False)  # the rows of `totals` that are of this rank
    picked: Tensor | None = field(init=False, default=None)  # those of `heads` that a call has here, None for all of it

    def __post_init__(self) -> None:
        if torch.is_inference_mode_enabled():  # tensors made there could be written to nowhere else
            with torch.inference_mode(False):
                self._make()
        else:
            self._make()

    def _make(self) -> None:
        device = self.device or device_of(self.module)
        count, dtype, size, gram = len(self.heads), wide(device), self.output_size, None
        if self.options.outputs and size is not None:
            gram = torch.empty(count, size, size, dtype=dtype, device=device)
        self.here = self.totals = Accumulators(
            sums=torch.empty(count, len(COLUMNS), dtype=dtype, device=device),
            maxima=torch.empty(count, len(MAXIMA), dtype=torch.float32, device=device),
            pairs=torch.empty(count, len(self.options.offsets), 2, dtype=dtype, device=device),
            gram=gram,
        )
        if count < self.count or self.split.parts > 1:
            self._choose_own(device)
        tallied.discard(self.here.sums.data_ptr())

    def _choose_own(self, device: torch.device) -> None:
        """Which of `heads` a call has here, and the rows of `totals` that are theirs."""
        first, end = self.split.run(self.count)
        own = [head - first for head in self.heads if first <= head < end]
        if len(own) < end - first:
            self.picked = torch.tensor(own, dtype=torch.long, device=device)
        if len(own) < len(self.heads):
            rows = slice(start := sum(head < first for head in self.heads), start + len(own))
            self.here = Accumulators(*(None if x is None else x[rows] for x in self.totals))  # type: ignore[arg-type]

    def is_known_to_be_called(self) -> bool:
        """Whether a call was added since this was last asked, as far as that is known without waiting for the
        device.
        """
        address = self.here.sums.data_ptr()
        known = address in tallied
        tallied.discard(address)
        return known

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()

    @property
    def sums(self) -> Tensor:
        return self.totals.sums

    @property
    def maxima(self) -> Tensor:
        return self.totals.maxima

    @property
    def gram(self) -> Tensor | None:
        return self.totals.gram

    @property
    def takes_statistics(self) -> bool:
        """Whether statistics that come with a call are all that is counted of it."""
        options = self.options
        plain = not (options.rows or options.rest or options.offsets or options.outputs)
        return self.switch.fused and plain and self.picked is None

    def see(self, call: Call, first: int | None = None) -> None:
        """Add one call, of all heads or of those from `first` on. Traced by torch.compile: an operator and nothing
        else.
        """
        own = self.kind == "self" and self.placed
        if first is not None:
            if is_measured(self, call):
                self._see_some(call, first, own)
        elif is_measured(self, call) and self._has_own_heads(call) and len(self.here.sums):
            tally(call, self.here, self.options, own, self.picked, self.switch.mailbox)

    def _see_some(self, call: Call, first: int, own: bool) -> None:
        """Add a call of the heads from `first` on."""
        end = first + call.query.shape[1]
        chosen = [(at, head - first) for at, head in enumerate(self.heads) if first <= head < end]
        if chosen:
            rows = slice(chosen[0][0], chosen[-1][0] + 1)
            into = Accumulators(*(None if x is None else x[rows] for x in self.totals))  # type: ignore[arg-type]
            picked = None
            if len(chosen) < end - first:
                picked = torch.tensor([head for _, head in chosen], device=call.query.device)
            tally(call, into, self.options, own, picked, self.switch.mailbox)

    def _has_own_heads(self, call: Call) -> bool:
        """Whether a call has the heads of this rank: rows of others would be counted as theirs. Raises where not."""
        first, end = self.split.run(self.count)
        if call.query.shape[1] == end - first:
            return True
        error = LocaterError(
            f"{self.name}: {call.query.shape[1]} query heads arrived, and {end - first} of {self.count} were expected: "
            "observe a model after it is split over ranks, with each rank computing an equal part of its heads"
        )
        if not self.switch.lenient:
            raise error
        self.switch.missed.append(error)
        return False


def device_of(module: nn.Module) -> torch.device:
    """The device of the parameters of a module; attention has them in its children, which are looked at first."""
    for part in (module, *own_children(module).values()):
        for parameter in () if part is None else own_parameters(part).values():
            if parameter is not None:
                return parameter.device
    return next((p.device for p in module.parameters()), torch.device("cpu"))


def clear(sites: Sequence[Site]) -> None:
    """Set the accumulators of all sites back, in two operations."""
    if not sites:
        return
    maxima = [site.totals.maxima for site in sites]
    added = [x for site in sites for x in site.totals.added() if x.numel()]
    zero_each([*added, *maxima])
    subtract_from_each(maxima, torch.inf)
