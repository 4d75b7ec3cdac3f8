"""`observe()`: statistics of every attention head of a model while it runs, under any attention backend."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from functools import partial
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.attention_like import folded_paths
from locater.calls.listeners import ListeningSwitch, counts_this_thread, run_pass
from locater.calls.patching import replace_method
from locater.errors import LocaterError
from locater.families.taps import refuse_unobservable
from locater.inputs.token_groups import TokenGroups, token_groups
from locater.layers.tensor_parallel import SplitHeads
from locater.observing.accumulate import StatisticsOptions, owners
from locater.observing.attention_maps import pattern_sites
from locater.observing.attention_shares import AttentionShares, GroupShares, shown_groups
from locater.observing.layer_choice import Choice, choose, choose_heads
from locater.observing.layers_by_calls import CalledLayers
from locater.observing.layers_by_record import KnownLayers, known_layers
from locater.observing.listening_site import Site, clear, listening_to
from locater.observing.pipeline_stages import PipelineStages
from locater.observing.reduce_ranks import combine_ranks
from locater.observing.residual_stream import Padding, SeenLayer, listen_to_stream, stream_points
from locater.observing.row_masks import forget_masks
from locater.observing.seen_heads import SeenHead, accumulators, fetch_numbers, rows_of, totals
from locater.observing.split_tokens import mesh_of_split_tokens, refuse_gathered_keys
from locater.torch_private import (
    COMPILED_CALL,
    attention_implementation,
    in_trial_pass,
    is_compiled_in_place,
    unwrap_compiled,
)

if TYPE_CHECKING:
    import pandas


# The layers of a model that a family reads, as places where attention is listened to.


def sites_of_known_layers(
    model: nn.Module,
    known: KnownLayers,
    parts: Sequence[nn.Module],
    options: StatisticsOptions,
    layers: Choice,
    heads: Choice,
    switch: ListeningSwitch,
) -> list[Site]:
    """A site for each of the chosen layers, which knows the heads that this rank computes."""
    split = SplitHeads(model)
    sites = []
    for number, layer in choose(list(enumerate(known.layers)), layers, "layers"):
        module = parts[layer.part]
        refuse_unobservable(module, known.family, layer.name)
        site = Site(
            name=layer.name,
            number=number,
            kind=layer.kind,
            module=module,
            group=layer.group,
            count=layer.heads,
            heads=choose_heads(layer.heads, heads),
            switch=switch,
            options=options,
            layer=layer,
            output_size=layer.output_size,
            split=split.of(layer.name, layer.heads),
        )
        sites.append(site)
    clear(sites)
    return sites


def observe(
    model: nn.Module,
    *,
    every: int = 1,
    layers: Choice = None,
    heads: Choice = None,
    rows: int | None = None,
    rest: bool = False,
    outputs: bool = False,
    hidden: bool = False,
    offsets: Sequence[int | tuple[int, int]] = (),
    patterns: Sequence[tuple[int, int]] = (),
    groups: TokenGroups | bool = False,
    beyond: tuple[int, int] | None = None,
    fused: bool = False,
    by_request: bool = False,
    any_thread: bool = False,
    pipeline: Any = None,
) -> Observation:
    """Listen to `model` inside a `with` block. Outputs do not change, and no T x T matrix is built but `patterns`.

    `every` observes one forward pass in that many. `layers` and `heads` are indices, or a count of evenly spaced ones;
    `rows` is how many rows of each call to sample. `rest` adds the entropy without the first key, `outputs` the ranks
    and singular values of head outputs, `hidden` measures of the stream between blocks, and `offsets` the weight on the
    key that many tokens before (a pair adds the first row to count). `patterns` are the (layer, head) whose maps
    `seen.pattern(layer, head)` returns: those of the last pass. `fused` lets attention run in a kernel that returns its
    statistics too, where that takes a call; outputs then differ from those of the model's own kernel by rounding.
    `by_request` keeps rows of every sequence of a batch, or request of generate_batch(), for `seen.by_request`.
    `any_thread` counts passes of whichever thread runs the model, one at a time: generate_batch() has a thread of its
    own.
    `groups` (`locater.token_groups(model)`, or True for that) adds `seen.groups`, the shares of attention by group of
    tokens, and `beyond=(window, sinks)` the weight of each head on keys that are neither among the last `window` nor
    the first `sinks` that a query sees; each takes about as long as attention itself.
    `pipeline` is the process group of the stages of a pipeline, of which `model` is this rank's: `reduce()` then gives
    the rows of all stages.

    >>> block = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> with observe(nn.TransformerEncoder(block, 1, enable_nested_tensor=False)) as seen:
    ...     _ = seen.model(torch.zeros(1, 4, 16))
    >>> [round(row.entropy_ratio, 3) for row in seen.rows]     # equal tokens: every key gets the same weight
    [1.0, 1.0]
    """
    if not isinstance(model, nn.Module):
        raise LocaterError(f"observe: {model!r:.60} is no nn.Module; `locater.probe` takes a folder or a hub id")
    if rows is not None and rows < 1:
        raise LocaterError(f"rows={rows}: at least 1, or None for all rows")
    if every < 1:
        raise LocaterError(f"every={every}: count from 1, which observes each forward pass")
    pairs = [(x, x) if isinstance(x, int) else x for x in offsets]
    options = StatisticsOptions(rows or 0, rest, tuple(pairs), outputs, by_request)
    if beyond is not None and (beyond[0] < 1 or beyond[1] < 0):
        raise LocaterError(f"beyond={beyond}: (window, sinks), a window of 1 key or more, and 0 sinks or more")
    told_apart = token_groups(model) if groups is True else groups or None
    shares = AttentionShares(told_apart, beyond) if told_apart is not None or beyond is not None else None
    return Observation(
        model,
        options,
        layers,
        heads,
        every,
        hidden,
        patterns=patterns,
        fused=fused,
        shares=shares,
        pipeline=pipeline,
        any_thread=any_thread,
    )


class Observation:
    """A model under observation. `rows` can be read inside the block or after it."""

    def __init__(
        self,
        model: nn.Module,
        options: StatisticsOptions,
        layers: Choice = None,
        heads: Choice = None,
        every: int = 1,
        hidden: bool = False,
        lenient: bool = False,
        patterns: Sequence[tuple[int, int]] = (),
        fused: bool = False,
        loss_only: bool = False,
        any_thread: bool = False,
        shares: AttentionShares | None = None,
        pipeline: Any = None,
    ) -> None:
        if pipeline is not None and (layers is not None or hidden or patterns or shares):
            raise LocaterError(
                "layers=, hidden=True, patterns=, groups= and beyond= are of a whole model, and a stage of a pipeline "
                "has a part of it: leave them out"
            )
        if isinstance(model, nn.DataParallel) and len(model.device_ids) > 1:
            raise LocaterError(
                "nn.DataParallel runs copies of the model, which are not observed: observe model.module on one device"
            )
        self.model = model
        self.every, self.any_thread = every, any_thread
        self._options = options
        # in a training run, passes of an evaluation between steps are not part of a step
        self.switch = ListeningSwitch(
            trained=None if every else unwrap_compiled(model),
            lenient=lenient,
            fused=fused,
            loss_only=loss_only,
            also=None if shares is None else shares.add,
        )
        self.shares = shares
        self.by_calls: CalledLayers | None = None  # where no record tells the layers
        try:
            known, parts = known_layers(model)
        except LocaterError as error:
            if patterns:
                raise
            self.family = None
            self.by_calls = CalledLayers(model, str(error), options, layers, heads, self.switch)
            self.sites = self.by_calls.sites
        else:
            self.family = known.family
            self.sites = sites_of_known_layers(model, known, parts, options, layers, heads, self.switch)
        if hidden and SplitHeads(model).is_any:
            raise LocaterError(
                f"{type(model).__name__}: it is split over ranks, and so may be the tokens between its blocks: "
                "observe it without hidden=True"
            )
        if shares is not None:
            shares.refuse_split(model)
        self.pattern_sites = pattern_sites(model, patterns, self.switch)
        self.streams = stream_points(model, self._attention_paths()) if hidden else []
        self._counter = _PassCounter(self.switch, every, self.by_calls, shares)
        if self.by_calls is not None:
            self._counter.needs_whole_sequences = "its attention is found by its calls, which are those of the parts"
        elif hidden or patterns:
            self._counter.needs_whole_sequences = "hidden=True and patterns= are of whole sequences"
        elif shares is not None:
            self._counter.needs_whole_sequences = "groups= and beyond= are of whole sequences"
        self.stages = None if pipeline is None else PipelineStages(pipeline)
        self.reduced = False  # whether the numbers are those of all ranks
        self._agreed = False  # whether all ranks are known to have the same layers
        self._end: weakref.finalize[..., Any] | None = None  # removes the listeners

    @property
    def passes(self) -> int:
        """Forward passes of `model` inside the block."""
        return self._counter.passes

    @property
    def elsewhere(self) -> int:
        """Forward passes in other threads, which do not count."""
        return self._counter.elsewhere

    @property
    def ended(self) -> bool:
        return self._counter.ended

    def __repr__(self) -> str:
        name, heads = type(self.model).__name__, sum(len(site.heads) for site in self.sites)
        return f"Observation({name}, {heads} heads in {len(self.sites)} layers, {self.passes} forward passes)"

    def _repr_html_(self) -> str:
        """What a notebook shows."""
        from locater.report.notebook import observation_in_notebook

        rows = [vars(row) for row in self.rows] if any(self.called) else []
        groups = [] if self.shares is None else self.shares.of_groups()
        return observation_in_notebook(type(self.model).__name__, rows, self.passes, self.notes, groups)

    def plot(self, column: str | None = None) -> Any:
        """One column of all heads, heads by layers; without a name the entropy.

        A matplotlib Figure, or an altair Chart where only altair is installed.
        """
        from locater.report.plots import map_of_measured, plot

        return plot(map_of_measured(type(self.model).__name__, [vars(row) for row in self.rows], column))

    def __enter__(self) -> Self:
        if self._end is not None and self._end.alive:
            raise LocaterError("this observation is already under way: make another with observe(model)")
        refuse_gathered_keys(self.model)
        # a trainer may run in another thread than the one in which a monitor was attached
        self.switch.thread = get_ident() if self.every and not self.any_thread else None
        with ExitStack() as stack:
            self._claim_sums(stack)
            listeners = self.sites if self.by_calls is None else self.by_calls.listeners
            stack.enter_context(listening_to(self.model, [*listeners, *self.pattern_sites], self.family))
            for undo in () if self.by_calls is None else self.by_calls.listen():
                stack.callback(undo)
            padding = Padding()
            for undo in listen_to_stream(self.streams, padding, self.switch):
                stack.callback(undo)
            for part in self._parts_that_may_be_called():
                stack.callback(replace_method(part, _entry_method(part), partial(_run_pass, self.switch)))
            run_pass_observed = partial(_run_observed_pass, self._counter, padding if self.streams else None)
            stack.callback(replace_method(self.model, _entry_method(self.model), run_pass_observed))
            # nothing on the model refers to this observation: one that nobody can read any more ends by itself
            self._end = weakref.finalize(self, _end_observation, stack.pop_all(), self._counter)
            self._end.atexit = False
        self._counter.ended = False
        return self

    def _claim_sums(self, stack: ExitStack) -> None:
        """Let operators of a compiled model count the calls of this thread alone."""
        if self.switch.thread is not None:
            for sums in (*(site.here.sums for site in self.sites), *(point.sums for point in self.streams)):
                if sums.numel():
                    owners[sums.data_ptr()] = self.switch.thread
                    stack.callback(owners.pop, sums.data_ptr(), None)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        known = [site.is_known_to_be_called() for site in self.sites]  # where none is, the device has to be asked
        self.close()
        if kind is None and (self.passes or self.elsewhere) and not any(known) and not any(self.called):
            raise LocaterError(self.why_nothing())

    def close(self) -> None:
        """Remove the listeners; the numbers stay."""
        if self._end is not None:
            self._end()
        self.switch.on = False

    def __deepcopy__(self, memo: dict[int, Any]) -> None:
        """A copy of a model, such as a running average of it, is not observed."""
        return

    @property
    def rows(self) -> list[SeenHead]:
        """One row per head, layer by layer in the order of a scan. Layers that were not called have none."""
        split = next((site for site in self.sites if site.split.parts > 1), None)
        if split is not None and not self.reduced:
            raise LocaterError(
                f"{split.name}: its heads are split over {split.split.parts} ranks, and this one has a part of them: "
                "call seen.reduce() on every rank before seen.rows"
            )
        if self._counter.split_tokens and not self.reduced:
            raise LocaterError(
                f"{type(self.model).__name__}: tokens were split over ranks (context parallelism), and this one has a "
                "part of the rows: call seen.reduce() on every rank before seen.rows"
            )
        if self.stages is not None and not self.reduced:
            raise LocaterError(
                f"{type(self.model).__name__}: it is a stage of a pipeline, and this rank has its layers alone: call "
                "seen.reduce() on every rank before seen.rows"
            )
        rows = rows_of(self.sites)
        if not rows:
            raise LocaterError(self.why_nothing())
        if self.shares is not None and self.shares.cache is not None:
            beyond = self.shares.beyond()
            rows = [replace(row, beyond=beyond.get((row.name, row.layer, row.head))) for row in rows]
        return rows

    @property
    def by_request(self) -> dict[str | int, list[SeenHead]]:
        """The rows of every sequence of the batch, by its number, or of every request of generate_batch(), by its id;
        of this rank's tokens alone.
        """
        if not any(site.options.by_request for site in self.sites):
            raise LocaterError("rows of single requests were not kept: observe(model, by_request=True)")
        names = dict.fromkeys(name for site in self.sites for name in site.requests)
        return {name: rows_of(self.sites, name) for name in names}

    @property
    def groups(self) -> list[GroupShares]:
        """What each head gives to each group of tokens, where `groups` was asked for."""
        return shown_groups(self.shares, type(self.model).__name__, self.passes)

    @property
    def called(self) -> list[bool]:
        """Whether each site was called since the last `clear`."""
        return [total.called for total in totals(self.sites, fetch_numbers(accumulators(self.sites)))]

    @property
    def layers(self) -> list[SeenLayer]:
        """The stream before the first block and after each, where `hidden=True`."""
        return [row for row in (point.row() for point in self.streams) if row is not None]

    def pattern(self, layer: int, head: int) -> Float[Tensor, "B T S"]:
        """The attention map of one head in the last observed call: one of `observe(model, patterns=[(layer, head)])`.

        float32 at least. A row that sees no key is zero; with sinks a row sums to less than 1.
        """
        for site in self.pattern_sites:
            if site.number == layer and head in site.heads:
                return site.map_of(head)
        raise LocaterError(
            f"the pattern of layer {layer}, head {head} was not kept: observe(model, patterns=[({layer}, {head})])"
        )

    @property
    def silent(self) -> list[str]:
        """Names of attention layers that were not called."""
        if self.by_calls is not None:
            return self.by_calls.silent
        return [site.name for site, called in zip(self.sites, self.called, strict=True) if not called]

    @property
    def notes(self) -> list[str]:
        """What the rows leave out, each in a line: unknown maps, attention modules that never ran or were missed."""
        others = (
            [f"not counted: {self.elsewhere} forward passes in other threads than the one that entered observe()"]
            if self.elsewhere
            else []
        )
        if self.by_calls is not None:
            return [*self.by_calls.notes, *others]
        silent = self.silent
        if silent and self.passes:
            others.insert(0, f"attention modules that never ran: {folded_paths(silent, most=None)}")
        return others

    def _parts_that_may_be_called(self) -> list[nn.Module]:
        """Parts of the model that a training loop may call in place of the whole: generate() calls the model inside an
        adapter, a LightningModule the model that it trains. They hold several of the layers.
        """
        if not self.switch.loss_only or self.by_calls is not None:  # where modules are followed, each may begin a pass
            return []
        parts, layers = dict(self.model.named_modules()), self._attention_paths()
        paths = [name.split(".") for name in layers]
        within = Counter(".".join(path[:length]) for path in paths for length in range(len(path)))
        return [
            parts[name]
            for name, count in within.items()
            if name and count >= min(2, len(layers)) and not isinstance(parts[name], nn.ModuleList | nn.ModuleDict)
        ]

    def _attention_paths(self) -> list[str]:
        """Paths of the attention modules, as far as they are known before the model runs."""
        if self.by_calls is not None:
            return self.by_calls.attention
        modules = {id(site.module) for site in self.sites}
        return [name for name, module in self.model.named_modules() if id(module) in modules]

    def clear(self) -> None:
        """Discard the numbers so far."""
        clear(self.sites)
        self.reduced = self._counter.split_tokens = False
        for point in self.streams:
            point.sums.zero_()
        if self.shares is not None:
            self.shares.clear()

    def reduce(self, group: Any = None) -> None:
        """Combine the ranks of a distributed run: sums are added, largest logits compared. Every rank calls it once,
        and all have the same numbers afterwards, of all heads also where these are split over ranks. Two collectives
        for all heads together; the first time two more.
        """
        if self.shares is not None:
            raise LocaterError("groups= and beyond= are not combined over ranks: read them on each rank")
        if self.stages is not None and not self.stages.joined:
            self.stages.join(self.model, self.sites, self.switch, self._options)
        ask = self.by_calls is not None or not self._agreed
        combine_ranks(self.model, self.sites, self.streams, ask, not self._agreed, group)
        self.reduced = self._agreed = True

    def to_pandas(self) -> pandas.DataFrame:
        """One row per head, as a pandas frame."""
        import pandas

        return pandas.DataFrame([asdict(row) for row in self.rows])

    def why_nothing(self) -> str:
        """Why there are no rows."""
        name = type(self.model).__name__
        if not self.passes and self.elsewhere:
            return (
                f"{name}: nothing was observed, because the model ran in another thread, whose calls are not counted: "
                "enter observe() in the thread that runs it, or count any: observe(model, any_thread=True)"
            )
        if not self.passes and self.every:
            return f"{name}: nothing was observed, because the model was not run inside the block"
        if self.by_calls is not None:
            return f"{name}: no softmax attention was found. {self.by_calls.why_nothing()}"
        how = attention_implementation(self.model)
        implementation = f" (attn_implementation {how!r})" if how else ""
        return (
            f"{name}: nothing was observed: its attention{implementation} does not pass where Locater listens. "
            "Run the module that was handed to observe(), load it with attn_implementation='sdpa' or 'eager', "
            "or describe its queries and keys with locater.register()"
        )


def _entry_method(module: nn.Module) -> str:
    """The method of a module to replace: outside of its graph where it was compiled in place, since inside passes could
    not be counted.
    """
    return COMPILED_CALL if is_compiled_in_place(module) else "forward"


def _run_pass(switch: ListeningSwitch, part: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
    """Replaces the forward of a part of the model."""
    return run_pass(switch, part, forward, *args, **kw)


@dataclass(eq=False)
class _PassCounter:
    """What a model under observation knows of it: which passes count."""

    switch: ListeningSwitch
    every: int
    by_calls: CalledLayers | None
    shares: AttentionShares | None = None
    passes: int = 0
    elsewhere: int = 0
    ended: bool = True
    needs_whole_sequences: str | None = None  # why a pass whose tokens are split over ranks is refused
    split_tokens: bool = False  # whether the tokens of a pass were split over ranks


def _end_observation(listeners: ExitStack, counter: _PassCounter) -> None:
    """Take the listeners off."""
    counter.ended = True
    listeners.close()


def _run_observed_pass(
    watch: _PassCounter, padding: Padding | None, model: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any
) -> Any:
    """Replaces the model's forward. Not a hook: hooks turn off PyTorch's fast path, and a compiled model ignores hooks
    that come after its first call.
    """
    if watch.ended:  # it could not be removed, because another method replaced it in turn
        return forward(*args, **kw)
    if not counts_this_thread(watch.switch):
        watch.elsewhere += 1
        if watch.switch.lenient:
            watch.switch.missed.append(
                LocaterError("a pass ran in another thread at the same time, and does not count")
            )
        return forward(*args, **kw)
    if watch.switch.thread is None and not torch.compiler.is_dynamo_compiling():
        watch.switch.thread = get_ident()  # until the pass ends
        try:
            return _run_observed_pass(watch, padding, model, forward, *args, **kw)
        finally:
            watch.switch.thread = None
    if not torch.compiler.is_dynamo_compiling() and watch.switch.on and in_trial_pass():
        watch.switch.on = False
        try:
            return forward(*args, **kw)
        finally:
            watch.switch.on = True
    if not torch.compiler.is_dynamo_compiling():
        watch.switch.tokens = mesh_of_split_tokens(model, watch.needs_whole_sequences)
        watch.split_tokens |= watch.switch.tokens is not None
        forget_masks()
        if watch.by_calls is not None:
            watch.by_calls.begin_pass()
        if watch.shares is not None:
            watch.shares.begin_pass(model, args, kw)
    if padding is not None:
        padding.before(model, args, kw)
    # a counter inside a graph would be recompiled at each value
    if watch.every and not torch.compiler.is_dynamo_compiling():
        watch.switch.on = watch.passes % watch.every == 0
        watch.passes += 1
    out = run_pass(watch.switch, model, forward, *args, **kw)
    if not torch.compiler.is_dynamo_compiling() and watch.switch.on and watch.switch.outputs is None:
        watch.switch.outputs = count_outputs(model, out)
    return out


def count_outputs(model: nn.Module, out: Any) -> int | None:
    """How many outputs a model chooses between, its vocabulary or classes, as the last axis of the logits that it
    returned; where it returned none (a loss alone), as its configuration says. None where neither is known.
    """
    logits = out.get("logits") if isinstance(out, Mapping) else getattr(out, "logits", None)
    candidates = (logits,) if hasattr(out, "logits") or isinstance(out, Mapping) else out
    for x in candidates if isinstance(candidates, tuple | list) else (candidates,):
        if isinstance(x, Tensor) and x.ndim > 1 and x.is_floating_point():
            return int(x.shape[-1])
    size = getattr(getattr(model, "config", None), "vocab_size", None)
    return size if type(size) is int else None
