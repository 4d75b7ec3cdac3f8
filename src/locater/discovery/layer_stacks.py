"""The recorded operations of several layers, split into layers, and layers with the same operations put together."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.func import vmap
from torch.fx.experimental.proxy_tensor import make_fx

from locater.layers.norm_folding import Effective
from locater.torch_private import without_fake_tensors

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
