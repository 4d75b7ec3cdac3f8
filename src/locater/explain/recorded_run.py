"""One run of a model on one input, recorded: what every method of this room but the gradients of embeddings works on.

`Run` has each attention call (queries, keys, terms, values, output), and the input and output of the modules that the
block of its family names. The model runs under its own attention backend, once for all methods that are given the same
`Run`.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.interceptors import AttentionRequest, Interceptor, add_interceptor, remove_interceptor
from locater.calls.listeners import ListeningSwitch
from locater.calls.patching import replace_method
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain.attention_event import AttentionEvent, recomputed_values
from locater.families.record import Block, BlockModules, Part
from locater.families.registry import block_of, family_of
from locater.families.taps import is_tapped
from locater.layers import AttentionLayer
from locater.observing.attention_maps import attention_maps, without_autocast
from locater.observing.input_covariances import attention_input
from locater.observing.listening_site import listening_to
from locater.observing.run_model import IDS, as_keywords, check_tokens, run_checked
from locater.sources.open_source import config_of
from locater.sources.weights import ModuleWeights
from locater.torch_private import unwrap_compiled

Inputs = Mapping[str, Any] | Tensor


@dataclass(frozen=True)
class ModuleCall:
    """One call of a module: its first argument and its first output."""

    input: Tensor
    output: Tensor
    others: tuple[Tensor, ...] = ()  # of a mixture's experts: the chosen ones and their weights


class Run:
    """One run of `model` on one input (`inputs`: keywords, or its first argument), recorded when it is first needed.

    With `gradients` the outputs of its attention are in one graph with its output, and values are known. With `blocks`
    the modules that its block names are recorded too, where its family has one. What a method does not need costs
    memory; a run that several methods share has both.

    >>> from locater.explain import paths, rollout
    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=16, layers=1, width=16, heads=2, kv_heads=2, hidden=16), scale=0.3)
    >>> run = Run(model, torch.arange(6)[None])
    >>> rollout(run, target=3).target.what, paths(run, target=3).target.what          # the model ran once
    ('logit 3 at token 5', 'logit 3 at token 5')
    """

    def __init__(self, model: nn.Module, inputs: Inputs, *, gradients: bool = True, blocks: bool = True) -> None:
        self.model = unwrap_compiled(model)
        self.name = type(self.model).__name__
        self.keywords = as_keywords(self.model, inputs)
        self.gradients, self.with_blocks = gradients, blocks
        self.weights = ModuleWeights(self.model)

    @cached_property
    def layers(self) -> Sequence[AttentionLayer]:
        return attention_layers(self.model)

    @cached_property
    def block(self) -> Block:
        """The block of its family; refused where there is none, where paths through it do not make the whole output,
        and where the model cannot take the inputs.
        """
        block = _block_of(self.model)
        _check_one_stack(self.model, block, self.layers)
        check_inputs(self.model, self.keywords)
        return block

    @cached_property
    def _record(self) -> _Record:
        record, block = _Record(), self._block_to_record()
        with torch.inference_mode(False), ExitStack() as stack:
            self._record_attention(stack, record)
            if block is not None:
                self._record_blocks(stack, record, block)
            record.output = run_checked(self.model, self.keywords, self.gradients)
        return record

    def _block_to_record(self) -> Block | None:
        if not self.with_blocks:
            return None
        try:
            return self.block
        except LocaterError:  # methods that need the block say why there is none
            return None

    def _record_attention(self, stack: ExitStack, record: _Record) -> None:
        """Every attention call. Parameters need no gradient meanwhile."""
        sites: dict[int, _EventSite] = {}
        for layer in self.layers:
            module = self.weights.submodule(layer.name)
            if id(module) not in sites:  # one module may be several layers
                sites[id(module)] = _EventSite(
                    layer.name, module, ListeningSwitch(), layer, record.events, self.gradients
                )
        family = family_of(self.model)
        tapped = {key for key, site in sites.items() if is_tapped(site.module, family)}
        if self.gradients and not tapped:  # PyTorch's encoder goes past its attention where nothing needs a gradient
            stack.enter_context(without_parameter_gradients(self.model))
        stack.enter_context(listening_to(self.model, list(sites.values())))
        for key, site in sites.items():
            if not self.gradients:
                continue
            if key in tapped:
                stack.callback(replace_method(site.module, "forward", site.record_values))
                continue
            add_interceptor(site.module, site.value_recorder)
            stack.callback(remove_interceptor, site.module, site.value_recorder)

    def _record_blocks(self, stack: ExitStack, record: _Record, block: Block) -> None:
        """Input and output of the modules that a block names, and the last stream."""
        blocks = BlockRecord(self.weights, block, self.layers, record.module_calls, record.events)
        # some blocks add to the output of their MLP in place
        copied = {blocks.modules(layer).find(block.mlp or block.down) for layer in self.layers}
        for path in blocks.paths_to_record():
            keep = partial(_record_module_call, record.module_calls.setdefault(path, []), path in copied)
            stack.callback(replace_method(self.weights.submodule(path), "forward", keep))
        last = self.weights.submodule(blocks.final_norm() or block.path(self.layers[-1]))
        stack.callback(replace_method(last, "forward", record.record_end))

    @property
    def output(self) -> Any:
        """What the model returned."""
        return self._record.output

    @property
    def events(self) -> Sequence[AttentionEvent]:
        """Its attention calls in the order of the forward pass."""
        if not self._record.events:
            raise LocaterError(
                f"{self.name}: no attention call was observed: load it with attn_implementation='sdpa' or 'eager'"
            )
        return self._record.events

    @property
    def end(self) -> Tensor:
        """The last stream as the model passed it on, with the gradient of what reads it."""
        _ = self.block
        if self._record.end is None:
            raise LocaterError(f"{self.name}: its last norm was not called, so it is not known what is read")
        return self._record.end

    @property
    def blocks(self) -> BlockRecord:
        return BlockRecord(self.weights, self.block, self.layers, self._record.module_calls, self._record.events)

    def values(self, method: str) -> Sequence[AttentionEvent]:
        """Its attention calls, refused in one line where the values of one were not seen."""
        for event in self.events:
            if event.value is None:
                raise LocaterError(
                    f"{event.layer.name}: {method} needs the values of attention, and those of this module are not "
                    "known: use rollout, raw_attention or gradient_input"
                )
        return self.events

    def maps(self, layer: int, heads: Sequence[int]) -> Float[Tensor, "h T S"]:
        """The attention maps of some heads of a layer, of the first input."""
        name = self.layers[layer].name
        events = [event for event in self.events if event.layer is self.layers[layer]]
        if len(events) != 1:
            raise LocaterError(
                f"{name}: called {len(events)} times in one run of the model, so its maps cannot be told apart: "
                "choose other heads"
            )
        query = events[0].call.query
        with torch.no_grad(), without_autocast(query.device):
            return attention_maps(events[0].call, torch.tensor(heads, device=query.device))[0]


def as_run(model: nn.Module | Run, inputs: Inputs | None, *, gradients: bool = False, blocks: bool = False) -> Run:
    """A run of the model with what one method needs, or the run that it was given in the place of a model."""
    if isinstance(model, Run):
        if inputs is not None:
            raise LocaterError("a recorded run has its inputs: leave them out, or give the model")
        return model
    if inputs is None:
        raise LocaterError(f"{type(model).__name__}: give the inputs to explain, or a locater.explain.Run")
    return Run(model, inputs, gradients=gradients, blocks=blocks)


@dataclass
class _Record:
    """What one run left behind."""

    output: Any = None
    events: list[AttentionEvent] = field(default_factory=list)
    module_calls: dict[str, list[ModuleCall]] = field(default_factory=dict)
    end: Tensor | None = None

    def record_end(self, module: nn.Module, forward: Any, *args: Any, **kw: Any) -> Any:
        """Note the last module's output, as a leaf where it is in no graph. Gradients stay on until the context of the
        run ends.
        """
        out = forward(*args, **kw)
        y = out[0] if isinstance(out, tuple) else out
        self.end = y if y.requires_grad else y.detach().requires_grad_()
        torch.set_grad_enabled(True)
        return (self.end, *out[1:]) if isinstance(out, tuple) else self.end


def _record_module_call(
    module_calls: list[ModuleCall], copied: bool, module: nn.Module, forward: Any, *args: Any, **kw: Any
) -> Any:
    out = forward(*args, **kw)
    x = args[0] if args else next(iter(kw.values()))
    y = (out[0] if isinstance(out, tuple) else out).detach()
    others = tuple(a.detach() for a in (*args, *kw.values()) if isinstance(a, Tensor) and a is not x)
    module_calls.append(ModuleCall(x.detach(), y.clone() if copied else y, others))
    return out


@dataclass(frozen=True)
class BlockRecord:
    """What the modules of a model's blocks got and returned in one run, by path."""

    weights: ModuleWeights
    block: Block
    layers: Sequence[AttentionLayer]
    module_calls: Mapping[str, list[ModuleCall]]
    events: Sequence[AttentionEvent]

    def modules(self, layer: AttentionLayer) -> BlockModules:
        """The block of a layer."""
        return BlockModules(self.weights, self.block.path(layer))

    def find(self, layer: AttentionLayer, part: Part) -> str | None:
        """The path of a part of a layer's block, where it is there and was called."""
        path = self.modules(layer).find(part)
        return path if path is not None and self.module_calls.get(path) else None

    def final(self) -> str | None:
        """The path of the norm after the last block, where it is there and was called."""
        path = self.final_norm()
        return path if path is not None and self.module_calls.get(path) else None

    def only_call(self, path: str) -> ModuleCall:
        """The only call of a module, with axes (batch, tokens, ...)."""
        module_calls = self.module_calls.get(path, [])
        if len(module_calls) != 1:
            raise LocaterError(
                f"{path}: called {len(module_calls)} times in one run of the model; paths need every part once"
            )
        return ModuleCall(self.batch_first(module_calls[0].input), self.batch_first(module_calls[0].output))

    def in_call_order(self) -> Iterator[tuple[BlockRecord, AttentionLayer, Call]]:
        """The attention calls in the model's order, each with its layer and a record of that turn alone. Layers that
        share one module (ALBERT) take turns.
        """
        counts = Counter(event.layer.name for event in self.events)
        unheard = next((layer.name for layer in self.layers if not counts[layer.name]), None)
        if unheard is not None:
            raise LocaterError(
                f"{unheard}: no attention call was observed in one run of the model: "
                "load it with attn_implementation='sdpa' or 'eager'"
            )
        taken: Counter[str] = Counter()
        for event in self.events:
            layer, count, turn = event.layer, counts[event.layer.name], taken[event.layer.name]
            taken[layer.name] += 1
            inside = f"{self.block.path(layer)}."
            module_calls = {
                path: calls[turn : turn + 1] if path.startswith(inside) and len(calls) == count else calls
                for path, calls in self.module_calls.items()
            }
            yield replace(self, module_calls=module_calls), layer, event.call

    def ends(self) -> tuple[Tensor, Tensor]:
        """The stream that enters the first block, and the one that leaves the last."""
        first, last = (self.module_calls.get(self.block.path(self.layers[i]), []) for i in (0, -1))
        if not first or not last:
            raise LocaterError(f"{self.block.path(self.layers[0])}: not called in a run of the model")
        return self.batch_first(first[0].input), self.batch_first(last[-1].output)

    def batch_first(self, x: Tensor) -> Tensor:
        """Some blocks put the tokens first, and some MLPs get all tokens of a batch in one axis."""
        if x.ndim != 2:
            return x.transpose(0, 1) if self.block.time_first else x
        first = self.module_calls[self.block.path(self.layers[0])][0].input
        return x.unflatten(0, first.shape[:2])

    def paths_to_record(self) -> list[str]:
        """Paths of modules whose input and output are needed."""
        block = self.block
        paths: list[str | None] = [block.path(self.layers[0]), block.path(self.layers[-1]), self.final_norm()]
        for layer in self.layers:
            modules = self.modules(layer)
            mlp = (block.mlp, block.up, block.down, block.experts, block.shared_up, block.shared_down)
            paths += [modules.find(part) for part in (*block.norms, *mlp)]
        return list(dict.fromkeys(path for path in paths if path is not None))

    def final_norm(self) -> str | None:
        """The path of the norm after the last block, where it is there."""
        stack = self.block.path(self.layers[0]).rpartition(".")[0]
        return BlockModules(self.weights, stack.removesuffix(self.block.stack).removesuffix(".")).find(self.block.final)


# Inputs that a model cannot take, refused before it runs: on a GPU the model's own error would end the process.


def check_inputs(model: nn.Module, keywords: Mapping[str, Any]) -> None:
    """Refuse inputs without a batch axis or without tokens, more tokens than the model has positions, and token ids
    that are not in its vocabulary.
    """
    name = next((name for name in (*IDS, *keywords) if isinstance(keywords.get(name), Tensor)), None)
    x = None if name is None else keywords[name]
    if x is None:
        return
    check_tokens(model, str(name), x)
    if x.ndim != 2 or x.is_floating_point():
        return
    for path, table in model.named_modules():
        kind = path.rpartition(".")[2]
        positions = isinstance(table, nn.Embedding) and ("position" in kind or kind == "wpe")
        if positions and x.shape[1] > table.num_embeddings:
            raise LocaterError(
                f"the input has {x.shape[1]} tokens and {path} has {table.num_embeddings} positions: shorten it"
            )


def _block_of(model: nn.Module) -> Block:
    kind = config_of(model).get("model_type")
    name = f"{type(model).__name__}: " + (f"model_type {kind!r}" if kind else "a model without a model_type")
    try:
        block = block_of(model)
    except LocaterError as error:
        raise LocaterError(f"{name} is not split into linear steps: {error}") from None
    if block is None:
        raise LocaterError(
            f"{name} is not split into linear steps: describe its blocks with locater.register(), "
            "docs/add-a-family.md; locater.explain.gradient_input needs no such record"
        )
    return block


def _check_one_stack(model: nn.Module, block: Block, layers: Sequence[AttentionLayer]) -> None:
    """Refuse models of which one stream is not the whole."""
    cross = next((layer.name for layer in layers if layer.kind != "self"), None)
    if cross is not None:
        raise LocaterError(
            f"{cross}: paths go through one stack, and cross-attention joins two: pass a model without it, "
            "or use locater.explain.relevance"
        )
    stacks = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", block.path(layer)) for layer in layers)
    if len(stacks) > 1:
        raise LocaterError(
            f"{type(model).__name__}: paths go through one stack, and it has {' and '.join(stacks)}: pass one of them"
        )


@contextmanager
def without_parameter_gradients(model: nn.Module) -> Iterator[None]:
    """No parameter needs a gradient, then as before: activations that only weights would need are not stored."""
    trained = [p for p in model.parameters() if p.requires_grad]
    try:
        for p in trained:
            p.requires_grad_(False)
        yield
    finally:
        for p in trained:
            p.requires_grad_(True)


class _ValueRecorder(Interceptor):
    """Keeps the values and the output of a call until its listeners receive it. Comes after all other interceptors."""

    order = 1000

    def __init__(self, gradients: bool) -> None:
        self.gradients = gradients
        self.kept: tuple[Tensor | None, Tensor | None] = (None, None)

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        return replace(request, attend=partial(self._attend, request.attend))

    def _attend(
        self, attend: Callable[..., Any], module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any
    ) -> Any:
        out = attend(module, q, k, v, *args, **kw)
        if self.gradients and not out[0].requires_grad:
            out[0].requires_grad_(True)  # nothing before it needs a gradient
        self.kept = (v.detach(), out[0])
        return out


@dataclass(eq=False)
class _EventSite:
    """A listener that adds each call of its module to the events of the run."""

    name: str
    module: nn.Module
    switch: ListeningSwitch
    layer: AttentionLayer
    events: list[AttentionEvent]
    gradients: bool
    value_recorder: _ValueRecorder = field(init=False)

    def __post_init__(self) -> None:
        self.value_recorder = _ValueRecorder(self.gradients)

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model or in a saved one."""
        return type(None), ()

    def record_values(self, module: nn.Module, forward: Callable[..., Any], *args: Any, **kw: Any) -> Any:
        """In the place of the forward of a module that does not pass the interface: its values, from its input."""
        before = len(self.events)
        out = forward(*args, **kw)
        read = attention_input(module, args, kw)
        if len(self.events) == before + 1 and read is not None:
            event, y = self.events[-1], out[0] if isinstance(out, tuple) else out
            values = recomputed_values(event.layer, event.call, module, read, y)
            if values is not None:
                if self.gradients and not y.requires_grad:
                    y.requires_grad_(True)
                output = y if self.gradients else None
                self.events[-1] = AttentionEvent(event.layer, event.call, values.value, output, values.to_heads)
        return out

    def receive(self, call: Call) -> None:
        value, output = self.value_recorder.kept
        self.value_recorder.kept = (None, None)
        if value is not None:  # keys beyond those of the call are empty places of a cache
            value = value[:, :, : call.key.shape[2]]
        self.events.append(AttentionEvent(self.layer, call, value, output if self.gradients else None))
