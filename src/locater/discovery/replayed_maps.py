"""The effective maps of a live model, recorded once and replayed at each step; equal layers are folded together.

Finding the heads takes names, patterns and a configuration, and folding each layer apart takes a dozen small
operations: milliseconds for a model of twelve layers, and as much again on a GPU that waits for them to be launched.
torch.compile cannot trace the search at all. So the operations that lead from the tensors to each layer's maps are
recorded once, without data. Layers with the same operations are stacked and folded as one from then on, with the
tensors as they are at that moment. What cannot be recorded is folded layer by layer.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar
from weakref import WeakSet

import torch
from torch import Tensor, fx, nn
from torch.func import functionalize, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from locater.discovery.record_or_discovery import Reading, whole_reading
from locater.errors import LocaterError, first_line
from locater.layers.layer import AttentionLayer
from locater.layers.norm_folding import Effective, effective
from locater.sources.live_tensors import is_a
from locater.sources.open_source import config_of
from locater.sources.weights import ModuleWeights, Rows, take_rows
from locater.spectrum import cross_moments, moments
from locater.torch_private import fake_tensor_mode, own_children, own_parameters, without_fake_tensors

STACKED = 1 << 26  # numbers, of the tensors read and the maps made, that are in memory at a time
OUTPUTS = 3  # of each layer: queries, keys, key terms
KEPT = 64  # folds of stacks that are kept, for models with the same operations that come later


@dataclass(frozen=True)
class LayerStack:
    """Layers that are folded by the same operations, as one."""

    layers: list[int]  # their numbers
    tensors: list[list[str]]  # names of what each layer reads
    scales: list[float]
    kv_heads: int
    cross: bool
    # stacked tensors -> queries (L, H, h, d), keys (L, K, h, d), key terms (L, H, d)
    fold: fx.GraphModule
    # the same without the key terms
    fold_maps: fx.GraphModule


# by number of layers, mode and signature: `fold` and `fold_maps` of a stack
_folds: dict[Any, tuple[fx.GraphModule, fx.GraphModule]] = {}


@dataclass(frozen=True)
class _LayerGraph:
    """The operations of one layer: every node that its outputs depend on, in an order of its own."""

    number: int
    folded: Effective
    nodes: list[fx.Node]
    outputs: Sequence[fx.Node]

    @property
    def inputs(self) -> list[fx.Node]:
        return [node for node in self.nodes if node.op == "placeholder"]

    def signature(self, whole: fx.GraphModule) -> Any:
        """Equal for layers that are folded by the same operations."""
        place = {node: i for i, node in enumerate(self.nodes)}
        operations = (_operation(node, place, whole) for node in self.nodes)
        return (self.folded.cross, *operations, *(place[node] for node in self.outputs))


def layer_stacks(
    whole: fx.GraphModule, numbers: Sequence[int], names: Sequence[str], folded: Sequence[Effective]
) -> Iterator[LayerStack]:
    """Stacks of the layers numbered `numbers`, from the recording `whole` of them all.

    `names` are the tensors that it reads, `folded` what it made of each layer when it was recorded.
    """
    name_of = dict(zip((node for node in whole.graph.nodes if node.op == "placeholder"), names, strict=True))
    outputs = next(node for node in whole.graph.nodes if node.op == "output").args[0]
    by_signature: dict[Any, list[_LayerGraph]] = {}
    for at, (number, layer) in enumerate(zip(numbers, folded, strict=True)):
        ends = outputs[OUTPUTS * at : OUTPUTS * (at + 1)]
        graph = _LayerGraph(number, layer, _leading_to(ends), ends)
        by_signature.setdefault(graph.signature(whole), []).append(graph)
    for signature, alike in by_signature.items():
        first = alike[0]
        inputs = [node.meta["val"] for node in first.inputs]
        numel = sum(x.numel() for x in (*inputs, first.folded.query, first.folded.key))
        most = max(1, STACKED // numel)
        for start in range(0, len(alike), most):
            part = alike[start : start + most]
            key = (len(part), torch.is_inference_mode_enabled(), signature)  # constants made in that mode stay of it
            if key not in _folds:
                if len(_folds) >= KEPT:
                    _folds.clear()
                _folds[key] = _fold(part, inputs, whole)
            yield _stack(part, name_of, *_folds[key])


def _fold(
    alike: Sequence[_LayerGraph], inputs: Sequence[Tensor], whole: fx.GraphModule
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """The operations of one layer for a stack of them: with the key terms, and without. They hold no parameters, so
    that all stacks of one signature and size can share them.
    """
    first = alike[0]
    one_layer = _part(first.nodes, first.outputs, whole)
    fold = make_fx(vmap(one_layer), tracing_mode="fake")(*(torch.stack([x] * len(alike)) for x in inputs))
    for name in {str(node.target) for node in fold.graph.nodes if node.op == "get_attr"}:
        constant = getattr(fold, name)
        if constant.ndim:  # an order of rows on another device would make a GPU wait
            setattr(fold, name, constant.to(inputs[0].device))
    return fold, _with_outputs(fold, 2)


def _stack(
    alike: Sequence[_LayerGraph], name_of: dict[fx.Node, str], fold: fx.GraphModule, fold_maps: fx.GraphModule
) -> LayerStack:
    first = alike[0]
    return LayerStack(
        [layer.number for layer in alike],
        [[name_of[node] for node in layer.inputs] for layer in alike],
        [layer.folded.scale for layer in alike],
        first.folded.key.shape[0],
        first.folded.cross,
        fold,
        fold_maps,
    )


def tensor_kind(x: Tensor) -> Any:
    """What recorded operations depend on, beside the numbers."""
    return x.shape, x.dtype, x.device


def _leading_to(ends: Sequence[fx.Node]) -> list[fx.Node]:
    """These nodes and all that they depend on, each after those it needs.

    The order depends on the layer alone, not on who else reads a node, so that layers can be compared.
    """
    ordered: dict[fx.Node, None] = {}
    left = [(node, False) for node in reversed(ends)]
    while left:
        node, ready = left.pop()
        if ready:
            ordered[node] = None
        elif node not in ordered:
            left += [(node, True), *((other, False) for other in reversed(node.all_input_nodes))]
    return list(ordered)


def _operation(node: fx.Node, place: dict[fx.Node, int], whole: fx.GraphModule) -> Any:
    """What a node computes, with other nodes by their place."""
    if node.op == "placeholder":
        return tensor_kind(node.meta["val"])
    if node.op == "get_attr":  # a constant of the reader, such as an order of rows
        constant = getattr(whole, str(node.target))
        with without_fake_tensors():
            return constant.dtype, constant.device, str(constant.tolist())
    by_place = fx.node.map_arg((node.args, dict(node.kwargs)), lambda other: f"node {place[other]}")
    return node.op, node.target, repr(by_place)


def _part(nodes: Sequence[fx.Node], outputs: Sequence[fx.Node], whole: fx.GraphModule) -> fx.GraphModule:
    """These nodes as a graph of its own."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda other: copies[other])
    graph.output(tuple(copies[node] for node in outputs))
    return fx.GraphModule(whole, graph)


def _with_outputs(module: fx.GraphModule, count: int) -> fx.GraphModule:
    """The same operations with the first outputs alone; what only the others need is left out."""
    graph = fx.Graph()
    outputs = graph.graph_copy(module.graph, {})
    assert isinstance(outputs, list | tuple)
    graph.output(tuple(outputs[:count]))
    graph.eliminate_dead_code()
    return fx.GraphModule(module, graph)


logger = logging.getLogger("locater")
Result = TypeVar("Result")
Inputs = Callable[[], tuple[Tensor, ...]]
Maps = tuple[Tensor, Tensor, Tensor]  # queries (L, H, h, d), keys (L, K, h, d), logit scales (L,) of L layers


class Recorder(ModuleWeights):
    """Remembers each tensor that is read, and returns what is in `tensors` in its place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.tensors: dict[str, Tensor] = {}

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        if name not in self.tensors:
            self.tensors[name] = super().read(name)
        return take_rows(self.tensors[name], rows)

    def now(self, name: str) -> Tensor:
        """The tensor of the model as it is now; plain parameters are returned without a search for parametrizations."""
        place = self.live_tensor(name)
        if not (place.adapters or place.packed) and "parametrizations" not in own_children(place.module):
            parameter = own_parameters(place.module).get(place.attribute)
            if type(parameter) is nn.Parameter and parameter.numel() and not parameter.is_meta:
                return parameter
        return ModuleWeights.read(self, name)


@dataclass(frozen=True)
class Spectra:
    """Of the stacked layers numbered `layers`, on their device: what logits over unit tokens are made of, before the
    scale.
    """

    layers: list[int]
    scales: list[float]
    frobenius_sq: Tensor  # (L, H)
    key_term: Tensor  # (L, H): |e|
    trace: Tensor | None  # (L, H); None for cross-attention

    @property
    def tensors(self) -> list[Tensor]:
        return [x for x in (self.frobenius_sq, self.key_term, self.trace) if x is not None]


def spectra_of(layer: int, folded: Effective) -> Spectra:
    """Of one layer alone."""
    of_layer = folded.moments()
    trace = None if of_layer.cross is None else of_layer.trace[None]
    return Spectra([layer], [folded.scale], of_layer.frobenius_sq[None], folded.key_term.norm(dim=-1)[None], trace)


def maps_of(folded: Effective) -> Maps:
    """Of one layer alone."""
    query, key = folded.query[None], folded.key[None]
    return query, key, torch.tensor([folded.scale], dtype=query.dtype, device=query.device)


class FoldedStacks:
    """The chosen layers of a model, numbered as in a scan. Raises LocaterError where they cannot be read.

    `fold` makes the maps of a layer; `inputs` are, by the number of a layer, further tensors for it, re-read at each
    call. `read` finds the layers that are numbered, where these are not those of a scan.

    A model that moves to another device or dtype, or that gets an adapter, is recorded again at the next call; though
    not inside a compiled step, so begin when the model is where it will be trained. Where a model cannot be recorded,
    each call folds layer by layer, and a warning says so once for a model.
    """

    stacks: list[LayerStack] | None  # None where the model cannot be recorded

    def __init__(
        self,
        model: nn.Module,
        chosen: Sequence[int],
        fold: Callable[..., Effective] = effective,
        inputs: Mapping[int, Inputs] | None = None,
        read: Callable[[ModuleWeights], Reading] | None = None,
    ) -> None:
        self.model, self.chosen, self.fold = model, list(chosen), fold
        self.inputs = inputs or {}
        self._read_model = read or (lambda weights: whole_reading(weights, config_of(model)))
        self._record()

    def maps(self) -> list[Maps]:
        """Maps of each stack, from the weights as they are now; gradients flow to these."""
        return self._of_each(self._maps, lambda number, folded: maps_of(folded))

    @torch.no_grad()
    def spectra(self) -> list[Spectra]:
        """Spectra of each stack, from the weights as they are now. Nothing here waits for the device."""
        return self._of_each(self._spectra, spectra_of)

    def _of_each(
        self, replay: Callable[[LayerStack], Result], of_layer: Callable[[int, Effective], Result]
    ) -> list[Result]:
        """`replay` of each stack, of a model that has changed after another recording; `of_layer` of each layer where
        the model cannot be recorded.
        """
        if self.stacks is not None and torch.compiler.is_compiling():
            return [replay(stack) for stack in self.stacks]
        if self.stacks is not None:
            try:
                self._check_modules()
                return [replay(stack) for stack in self.stacks]
            except _ChangedError:
                self._record()
        if self.stacks is not None:
            return [replay(stack) for stack in self.stacks]
        layers = self._read_model(ModuleWeights(self.model)).build(self.chosen)
        folded = (self.fold(layer, *self._copied_inputs(i)) for i, layer in zip(self.chosen, layers, strict=True))
        return [of_layer(i, maps) for i, maps in zip(self.chosen, folded, strict=True)]

    def _copied_inputs(self, number: int) -> tuple[Tensor, ...]:
        """Copies, since what fills them may write over them while a graph still needs them."""
        return tuple(x.clone() for x in self.inputs[number]()) if number in self.inputs else ()

    def _maps(self, stack: LayerStack) -> Maps:
        query, key = stack.fold_maps(*self._read(stack))
        return query, key, torch.tensor(stack.scales, dtype=query.dtype, device=query.device)

    def _spectra(self, stack: LayerStack) -> Spectra:
        tensors = self._read(stack)
        with torch.autocast(tensors[0].device.type, enabled=False):
            query, key, term = stack.fold(*tensors)
        del tensors
        groups, key = query.unflatten(1, (stack.kv_heads, -1)), key.unsqueeze(2)
        of_heads = cross_moments(groups, key) if stack.cross else moments(groups, key)
        trace = None if of_heads.cross is None else of_heads.trace.flatten(1)
        return Spectra(stack.layers, stack.scales, of_heads.frobenius_sq.flatten(1), term.norm(dim=-1), trace)

    def _read(self, stack: LayerStack) -> list[Tensor]:
        by_layer = [[self._now(name) for name in names] for names in stack.tensors]
        return [torch.stack(same) for same in zip(*by_layer, strict=True)]

    def _now(self, name: str) -> Tensor:
        if name in self._places:
            number, place = self._places[name]
            tensor = self.inputs[number]()[place]
        elif torch.compiler.is_compiling():
            return ModuleWeights.read(self._weights, name)
        else:
            tensor = self._weights.now(name)
        if not torch.compiler.is_compiling() and tensor_kind(tensor) != self._kinds[name]:
            raise _ChangedError
        return tensor

    def _check_modules(self) -> None:
        if any(own_children(parent).get(name) is not child for parent, name, child in self._edges) or any(
            _active_copy(wrapper) != active for wrapper, active in self._wrappers
        ):
            raise _ChangedError

    def _record(self) -> None:
        """Record the stacks, or warn that there are none."""
        self.stacks = None
        try:
            self.stacks = self._recorded()
        except LocaterError:
            raise
        except Exception as error:  # what a reader of somebody else's family does may not be traceable
            _warn_unrecorded(self.model, error)

    @torch.no_grad()
    def _recorded(self) -> list[LayerStack]:
        self._weights = weights = _Shapes(self.model)
        self._places = {
            f"input {place} of layer {number}": (number, place)
            for number in self.inputs
            for place in range(len(self.inputs[number]()))
        }
        for name, (number, place) in self._places.items():
            weights.put(name, self.inputs[number]()[place])
        self._reading: Reading | None = self._read_model(weights)
        if any(isinstance(item, AttentionLayer) for item in self._reading.found):
            self._reading = None  # a reader that reads tensors is recorded, too
        with weights.mode:
            list(self._fold())
        names, fakes = list(weights.tensors), list(weights.tensors.values())
        self._kinds = weights.kinds
        folded: list[Effective] = []

        def maps(*tensors: Tensor) -> list[Tensor]:
            weights.tensors = dict(zip(names, tensors, strict=True))
            folded[:] = self._fold()
            return [x for layer in folded for x in (layer.query, layer.key, layer.key_term)]

        with torch.autocast(fakes[0].device.type, enabled=False):
            whole = make_fx(functionalize(maps), tracing_mode="fake")(*fakes)
            weights.tensors = {}
            stacks = list(layer_stacks(whole, self.chosen, names, folded))
        own = [weights.live_tensor(name).module for name in names if name not in self._places]
        self._edges = _edges(self.model, own)
        wrappers = [part for part in self.model.modules() if is_a(part, "peft.utils.other", "ModulesToSaveWrapper")]
        self._wrappers = [(wrapper, _active_copy(wrapper)) for wrapper in wrappers]
        return stacks

    def _fold(self) -> Iterator[Effective]:
        reading = self._reading or self._read_model(self._weights)
        for i, layer in zip(self.chosen, reading.build(self.chosen), strict=True):
            yield self.fold(layer, *(self._weights.tensors[name] for name, (at, _) in self._places.items() if at == i))


def _warn_unrecorded(model: nn.Module, error: Exception) -> None:
    """Once for a model, whoever reads its maps."""
    if model not in _warned:
        _warned.add(model)
        name, reason = type(model).__name__, f"{type(error).__name__}: {first_line(error)}"
        logger.warning(
            "the maps of %s are re-read layer by layer at each step, which is slower: they cannot be recorded (%s)",
            name,
            reason,
        )


_warned: WeakSet[nn.Module] = WeakSet()


class _ChangedError(Exception):
    """A tensor has moved or has another shape, or there is a new module, such as an adapter: other operations may be
    needed.
    """


class _Shapes(Recorder):
    """Returns, for every tensor, one without data."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.mode = fake_tensor_mode()
        self.kinds: dict[str, Any] = {}

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        if name not in self.tensors:
            with without_fake_tensors():
                tensor = ModuleWeights.read(self, name).detach()
            self.put(name, tensor)
        return take_rows(self.tensors[name], rows)

    def put(self, name: str, tensor: Tensor) -> None:
        """From now on there is a tensor of this name, of the same kind and without data."""
        self.kinds[name] = tensor_kind(tensor)
        self.tensors[name] = self.mode.from_tensor(tensor)


def _edges(model: nn.Module, modules: Sequence[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) on the way from the model to these modules."""
    above = {
        child: (parent, name)
        for parent in model.modules()
        for name, child in own_children(parent).items()
        if child is not None
    }
    edges: dict[nn.Module, tuple[nn.Module, str, nn.Module]] = {}
    for module in modules:
        while module is not model and module not in edges:
            edges[module] = (*above[module], module)
            module = above[module][0]
    return list(edges.values())


def _active_copy(wrapper: Any) -> Any:
    """Of a module that peft trains whole beside adapters: which of its copies is in use."""
    return list(wrapper.active_adapters), wrapper.disable_adapters
