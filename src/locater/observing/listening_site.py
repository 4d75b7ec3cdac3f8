"""A place where attention is listened to: one attention module, and the sums of its calls. And `listening_to`, which
announces the calls of a model to such places for the length of a `with` block.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import torch
from torch import Tensor, nn

from locater.calls import attention_interface
from locater.calls.call_and_masks import Call
from locater.calls.listeners import Listener, ListeningSwitch, add_listener, is_measured, remove_listener
from locater.calls.patching import force_retrace, replace_method
from locater.errors import LocaterError
from locater.families.record import Family
from locater.families.registry import family_of
from locater.families.taps import put_tap, refuse_unobservable
from locater.layers import AttentionLayer
from locater.layers.tensor_parallel import WHOLE, Split, SplitHeads
from locater.observing.accumulate import (
    COLUMNS,
    MAXIMA,
    Accumulators,
    StatisticsOptions,
    accumulate_call,
    accumulated,
    wide,
)
from locater.observing.layers_by_record import KnownLayer, parts_of
from locater.observing.split_tokens import calls_of_whole_rows, refuse_part_of_heads
from locater.torch_private import (
    disable_dynamo,
    is_compiled_in_place,
    own_children,
    own_parameters,
    subtract_from_each,
    zero_each,
)


@dataclass
class Site:
    """One attention module under observation. `heads` are the numbers of the query heads that are observed.

    Where heads are split over ranks, `totals` has rows for all of `heads`, and a call adds to those of this rank.
    Accumulators are made without values: `clear` sets those of all sites at once.
    """

    counts_split_heads: ClassVar[bool] = True
    counts_requests: ClassVar[bool] = True
    name: str
    number: int
    kind: str
    module: nn.Module
    group: int  # query heads per key head
    count: int  # query heads
    heads: list[int]
    switch: ListeningSwitch
    options: StatisticsOptions
    layer: AttentionLayer | KnownLayer | None  # None where the module was found by its calls
    output_size: int | None = None  # of a head's output, where it is known
    device: torch.device | None = None  # of the sums, where it is not that of the parameters
    placed: bool = True  # whether keys are tokens in order, so that distances and a first key are known
    split: Split = WHOLE  # which heads this rank computes
    totals: Accumulators = field(init=False)
    here: Accumulators = field(init=False)  # the rows of `totals` that are of this rank
    picked: Tensor | None = field(init=False, default=None)  # those of `heads` that a call has here, None for all of it
    requests: dict[str | int, Accumulators] = field(init=False, default_factory=dict)  # with `by_request`

    def __post_init__(self) -> None:
        if torch.is_inference_mode_enabled():  # tensors made there could be written to nowhere else
            with torch.inference_mode(False):
                self._make_sums()
        else:
            self._make_sums()

    def _make_sums(self) -> None:
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
        accumulated.discard(self.here.sums.data_ptr())

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
        known = address in accumulated
        accumulated.discard(address)
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
        plain = not (options.rows or options.rest or options.offsets or options.outputs or options.by_request)
        return self.switch.fused and plain and self.picked is None

    def receive(self, call: Call, first: int | None = None) -> None:
        """Add one call, of all heads or of those from `first` on. Traced by torch.compile: an operator and nothing
        else.
        """
        own = self.kind == "self" and self.placed
        if self.switch.tokens is not None:
            self._receive_part(call, own and first is None)
        elif first is not None:
            if is_measured(self, call):
                self._receive_some(call, first, own)
        elif is_measured(self, call) and self._has_own_heads(call) and len(self.here.sums):
            if call.parts is None and not self.options.by_request:
                accumulate_call(call, self.here, self.options, own, self.picked, self.switch.mailbox)
            else:
                self._receive_requests(call, own)
            if self.switch.also is not None:
                self.switch.also(self, call)

    @disable_dynamo
    def _receive_requests(self, call: Call, own: bool) -> None:
        """Add a call request by request: to the sums of each where these are asked for, and to those of all."""
        if call.parts is not None and self.switch.also is not None:
            raise LocaterError(
                f"{self.name}: groups= and beyond= are not kept of calls on a paged cache: leave them out"
            )
        for request, part in call.by_request():
            if not self.options.by_request:
                accumulate_call(part, self.here, self.options, own, self.picked, self.switch.mailbox)
                continue
            sums = self.requests.get(request)
            if sums is None:
                sums = self.requests[request] = self.here.like()
            new = self.here.like()
            accumulate_call(part, new, self.options, own, self.picked, self.switch.mailbox)
            for into in (sums, self.here):
                into.add(new)
            if new.sums.data_ptr() in accumulated:
                accumulated.discard(new.sums.data_ptr())
                accumulated.add(self.here.sums.data_ptr())

    def _receive_part(self, call: Call, own: bool) -> None:
        """Add a call of the tokens that this rank has of each sequence, all heads at once. A rank that cannot add it
        still gathers keys where others do.
        """
        try:
            if not own:
                raise refuse_part_of_heads(self.name)
            parts = list(calls_of_whole_rows(call, self.switch.tokens, self.name))
        except LocaterError as error:
            if not self.switch.lenient:
                raise
            self.switch.missed.append(error)
            return
        for part in parts:
            if is_measured(self, part) and self._has_own_heads(part) and len(self.here.sums):
                accumulate_call(part, self.here, self.options, True, self.picked, self.switch.mailbox)

    def _receive_some(self, call: Call, first: int, own: bool) -> None:
        """Add a call of the heads from `first` on."""
        if self.options.by_request or call.parts is not None:
            raise LocaterError(f"{self.name}: its heads attend one at a time: rows by request are not kept there")
        end = first + call.query.shape[1]
        chosen = [(at, head - first) for at, head in enumerate(self.heads) if first <= head < end]
        if chosen:
            rows = slice(chosen[0][0], chosen[-1][0] + 1)
            into = Accumulators(*(None if x is None else x[rows] for x in self.totals))  # type: ignore[arg-type]
            picked = None
            if len(chosen) < end - first:
                picked = torch.tensor([head for _, head in chosen], device=call.query.device)
            accumulate_call(call, into, self.options, own, picked, self.switch.mailbox)

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
    for site in sites:
        site.requests.clear()
    zero_each([*added, *maxima])
    subtract_from_each(maxima, torch.inf)


@contextmanager
def listening_to(
    model: nn.Module, sites: Sequence[Listener], family: Family | Literal["own"] | None = "own"
) -> Iterator[None]:
    """Announce the attention calls of `model` to `sites` inside the `with` block.

    `family` is that of the model, where it is known already; without any (None) taps go by the class of a module alone.
    """
    family = family_of(model) if family == "own" else family
    whole = next((site for site in sites if not getattr(site, "counts_split_heads", False)), None)
    if whole is not None and SplitHeads(model).is_any:
        raise LocaterError(
            f"{whole.name or type(model).__name__}: its heads may be split over ranks, and single heads are read only "
            "from a whole model: load its checkpoint in one process"
        )
    with ExitStack() as stack:
        attention_interface.install()
        stack.callback(attention_interface.remove)
        for site in sites:
            refuse_unobservable(site.module, family, site.name)
            add_listener(site)
            stack.callback(remove_listener, site)
            for undo in put_tap(site.module, family):
                stack.callback(undo)
        for part in parts_that_may_be_compiled(model):
            stack.callback(replace_method(part, "forward", force_retrace))
        yield


def parts_that_may_be_compiled(model: nn.Module) -> list[nn.Module]:
    """Parts that may be compiled already. Their graphs are guarded on `forward`, but not on a new entry in the table of
    attention functions.
    """
    compiled = [
        own_children(part).get("_orig_mod", part if is_compiled_in_place(part) else None) for part in parts_of(model)
    ]
    return [part for part in compiled if part is not None]
