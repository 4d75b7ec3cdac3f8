"""The effective maps of a live model, layers alike folded together, found once and replayed at each call.

To find the heads takes names, patterns and a configuration, and to fold each layer apart takes a dozen small
operations: milliseconds for a model of twelve layers, and as much again on a GPU that waits for them to be launched. So
the operations that lead from the tensors to each layer's maps are recorded once, without data. Layers whose operations
are the same are stacked and folded as one from then on, with the tensors as they are at that moment. What cannot be
recorded can still be folded layer by layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode, unset_fake_temporarily
from torch.func import functionalize, vmap
from torch.fx.experimental.proxy_tensor import make_fx

from locater.checkpoints.live_tensors import is_a
from locater.checkpoints.sources import config_of
from locater.checkpoints.weights import ModuleWeights, Rows, take_rows
from locater.errors import LocaterError
from locater.families.effective import Effective, effective
from locater.families.registry import layers_of
from locater.spectrum import cross_moments, moments

STACKED = 1 << 26  # numbers, of the tensors read and the maps made, that are held at a time


class Recorder(ModuleWeights):
    """Remembers what was read, and hands out what it is given in its place."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.held: dict[str, Tensor] = {}

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        if name not in self.held:
            self.held[name] = super().read(name)
        return take_rows(self.held[name], rows)

    def now(self, name: str) -> Tensor:
        """What `read` gives, without the search for parametrizations where it is plain to see that there are none."""
        place = self.live_tensor(name)
        if not place.adapters and "parametrizations" not in place.module._modules:
            held = place.module._parameters.get(place.attribute)
            if type(held) is nn.Parameter and held.numel() and not held.is_meta:
                return held
        return ModuleWeights.read(self, name)


@dataclass(frozen=True)
class Stack:
    """Layers that are folded by the same operations."""

    layers: list[int]  # their numbers
    tensors: list[list[str]]  # names, for each layer
    scales: list[float]
    kv_heads: int
    cross: bool
    # stacked tensors -> queries (L, H, h, d), keys (L, K, h, d), key terms (L, H, d)
    fold: Callable[..., tuple[Tensor, Tensor, Tensor]]


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
    found = folded.moments()
    trace = None if found.cross is None else found.trace[None]
    return Spectra([layer], [folded.scale], found.frobenius_sq[None], folded.key_term.norm(dim=-1)[None], trace)


class FoldedStacks:
    """The chosen layers of a model, numbered as in a scan. Raises what reading or recording them raises."""

    def __init__(self, model: nn.Module, chosen: Sequence[int]) -> None:
        self.model, self.chosen = model, list(chosen)
        self._record()

    @torch.no_grad()
    def spectra(self) -> list[Spectra]:
        """From the weights as they are now. Nothing here waits for the device."""
        try:
            return list(self._spectra())
        except _ChangedError:
            self._record()
            return list(self._spectra())

    def _spectra(self) -> Iterator[Spectra]:
        if any(parent._modules.get(name) is not child for parent, name, child in self._edges):
            raise _ChangedError
        for stack in self.stacks:
            tensors = self._read(stack)
            with torch.autocast(tensors[0].device.type, enabled=False):
                query, key, term = stack.fold(*tensors)
            del tensors
            groups, key = query.unflatten(1, (stack.kv_heads, -1)), key.unsqueeze(2)
            found = cross_moments(groups, key) if stack.cross else moments(groups, key)
            trace = None if found.cross is None else found.trace.flatten(1)
            yield Spectra(stack.layers, stack.scales, found.frobenius_sq.flatten(1), term.norm(dim=-1), trace)

    def _read(self, stack: Stack) -> list[Tensor]:
        read = [[self._now(name) for name in names] for names in stack.tensors]
        return [torch.stack(same) for same in zip(*read, strict=True)]

    def _now(self, name: str) -> Tensor:
        tensor = self._weights.now(name)
        if _kind(tensor) != self._kinds[name]:
            raise _ChangedError
        return tensor

    # Recording

    @torch.no_grad()
    def _record(self) -> None:
        if any(is_a(part, "peft.utils.other", "ModulesToSaveWrapper") for part in self.model.modules()):
            raise LocaterError(
                f"{type(self.model).__name__}: which copy of a module is in use may change, so it cannot be recorded"
            )
        self._weights = weights = _Shapes(self.model)
        with weights.mode:
            list(self._fold())
        names, stands = list(weights.held), list(weights.held.values())
        self._kinds = weights.kinds
        made: list[Effective] = []

        def maps(*tensors: Tensor) -> list[Tensor]:
            weights.held = dict(zip(names, tensors, strict=True))
            made[:] = self._fold()
            return [x for folded in made for x in (folded.query, folded.key, folded.key_term)]

        with torch.autocast(stands[0].device.type, enabled=False):
            whole = make_fx(functionalize(maps), tracing_mode="fake")(*stands)
            weights.held = {}
            self.stacks = list(_stacks(whole, self.chosen, names, made))
        self._edges = _edges(self.model, [weights.live_tensor(name).module for name in names])

    def _fold(self) -> Iterator[Effective]:
        layers = list(layers_of(self._weights, config_of(self.model)))
        yield from (effective(layers[i]) for i in self.chosen)


class _ChangedError(Exception):
    """A tensor has moved or has another shape, or a module has come between, such as an adapter: the operations may be
    others.
    """


class _Shapes(Recorder):
    """Stands in for every tensor with one that has no data."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__(module)
        self.mode = FakeTensorMode()
        self.kinds: dict[str, Any] = {}

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        if name not in self.held:
            with unset_fake_temporarily():
                tensor = ModuleWeights.read(self, name).detach()
            self.kinds[name] = _kind(tensor)
            self.held[name] = self.mode.from_tensor(tensor)
        return take_rows(self.held[name], rows)


def _kind(x: Tensor) -> Any:
    """What the recorded operations depend on, beside the numbers."""
    return x.shape, x.dtype, x.device


def _edges(model: nn.Module, wanted: Sequence[nn.Module]) -> list[tuple[nn.Module, str, nn.Module]]:
    """(parent, name, child) on the way from the model to these modules."""
    above = {
        child: (parent, name)
        for parent in model.modules()
        for name, child in parent._modules.items()
        if child is not None
    }
    found: dict[nn.Module, tuple[nn.Module, str, nn.Module]] = {}
    for module in wanted:
        while module is not model and module not in found:
            found[module] = (*above[module], module)
            module = above[module][0]
    return list(found.values())


def _stacks(whole: fx.GraphModule, layers: list[int], names: list[str], made: list[Effective]) -> Iterator[Stack]:
    """The recording taken apart into layers, and layers of the same operations put together."""
    inputs = dict(zip((node for node in whole.graph.nodes if node.op == "placeholder"), names, strict=True))
    outputs = next(node for node in whole.graph.nodes if node.op == "output").args[0]
    alike: dict[Any, list[tuple[int, Effective, list[fx.Node], Sequence[fx.Node]]]] = {}
    for at, (layer, folded) in enumerate(zip(layers, made, strict=True)):
        ends = outputs[3 * at : 3 * at + 3]
        nodes = _leading_to(ends)
        place = {node: i for i, node in enumerate(nodes)}
        what = (folded.cross, *(_what(node, place, whole) for node in nodes), *(place[node] for node in ends))
        alike.setdefault(what, []).append((layer, folded, nodes, ends))
    for same in alike.values():
        _, folded, nodes, ends = same[0]
        read = [node.meta["val"] for node in nodes if node.op == "placeholder"]
        most = max(1, STACKED // sum(x.numel() for x in (*read, folded.query, folded.key)))
        one = vmap(_part(nodes, ends, whole))
        for start in range(0, len(same), most):
            part = same[start : start + most]
            fold = make_fx(one, tracing_mode="fake")(*(torch.stack([x] * len(part)) for x in read))
            for name in {str(node.target) for node in fold.graph.nodes if node.op == "get_attr"}:
                held = getattr(fold, name)
                # an order of rows that is elsewhere makes a GPU wait
                setattr(fold, name, held.to(read[0].device) if held.ndim else held)
            yield Stack(
                [layer for layer, *_ in part],
                [[inputs[node] for node in nodes if node.op == "placeholder"] for _, _, nodes, _ in part],
                [folded.scale for _, folded, _, _ in part],
                folded.key.shape[0],
                folded.cross,
                fold.forward,
            )


def _leading_to(ends: Sequence[fx.Node]) -> list[fx.Node]:
    """The nodes that these depend on and themselves, each after those it needs; in an order that does not know who else
    reads them.
    """
    found: dict[fx.Node, None] = {}
    left = [(node, False) for node in reversed(ends)]
    while left:
        node, ready = left.pop()
        if ready:
            found[node] = None
        elif node not in found:
            left += [(node, True), *((other, False) for other in reversed(node.all_input_nodes))]
    return list(found)


def _what(node: fx.Node, place: dict[fx.Node, int], whole: fx.GraphModule) -> Any:
    """What a node does, with other nodes by their place."""
    if node.op == "placeholder":
        return _kind(node.meta["val"])
    if node.op == "get_attr":  # numbers of the reader's own, such as an order of rows
        held = getattr(whole, str(node.target))
        with unset_fake_temporarily():
            return held.dtype, held.device, str(held.tolist())
    by_place = fx.node.map_arg((node.args, dict(node.kwargs)), lambda other: f"node {place[other]}")
    return node.op, node.target, repr(by_place)


def _part(nodes: list[fx.Node], ends: Sequence[fx.Node], whole: fx.GraphModule) -> fx.GraphModule:
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in nodes:
        copies[node] = graph.node_copy(node, lambda other: copies[other])
    graph.output(tuple(copies[node] for node in ends))
    return fx.GraphModule(whole, graph)
