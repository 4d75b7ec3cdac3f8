"""The effective maps of a live model as one function of its tensors, found once and replayed at each step.

To find the heads takes names, patterns and a configuration, which costs milliseconds and which torch.compile cannot
trace. What remains is a fixed sequence of tensor operations, from the tensors that are read to the folded maps: it is
recorded at the first call and replayed from then on, with the tensors as they are at that moment. A model that moves to
another device or dtype is recorded anew, though not from inside a compiled step: attach when the model is where it will
be trained.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.fx.experimental.proxy_tensor import make_fx

from locater.checkpoints.sources import config_of
from locater.checkpoints.weights import ModuleWeights
from locater.control.base import Layers, chosen_layers
from locater.families import AttentionLayer, Effective, effective, layers_of
from locater.families.folded import Recorder


class FoldedMaps:
    """Query and key maps of the chosen self-attention layers, norms folded in; layers of one shape stacked."""

    def __init__(self, model: nn.Module, chosen: Layers = None) -> None:
        self.model, self.chosen = model, chosen
        self.weights = Recorder(model)
        with torch.no_grad():
            for layer in self._read():
                effective(layer)
        self.names = list(self.weights.held)
        self._replay: fx.GraphModule | None = None
        self._of: list[Any] = []
        self()

    def __call__(self) -> list[tuple[Tensor, Tensor, Tensor]]:
        """(queries (L, H, h, d), keys (L, K, h, d), logit scales (L,)) of each stack."""
        tensors = [ModuleWeights.read(self.weights, name) for name in self.names]
        if not torch.compiler.is_compiling() and self._of != [_kind(x) for x in tensors]:
            tensors = self._record(tensors)
        assert self._replay is not None
        flat = self._replay(*tensors)
        return [(flat[3 * i], flat[3 * i + 1], flat[3 * i + 2]) for i in range(len(flat) // 3)]

    def _read(self) -> list[AttentionLayer]:
        return chosen_layers(layers_of(self.weights, config_of(self.model)), self.chosen, self.weights.where)

    def _record(self, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Record the operations; returns the tensors that they use, in the order wanted."""
        replay = make_fx(self._fold)(*(x.detach() for x in tensors))
        replay.graph.eliminate_dead_code()
        inputs = [node for node in replay.graph.nodes if node.op == "placeholder"]
        used = [bool(node.users) for node in inputs]
        for node in inputs:
            if not node.users:
                replay.graph.erase_node(node)
        replay.recompile()
        self.names = [name for name, wanted in zip(self.names, used, strict=True) if wanted]
        kept = [x for x, wanted in zip(tensors, used, strict=True) if wanted]
        self._replay, self._of = replay, [_kind(x) for x in kept]
        return kept

    def _fold(self, *tensors: Tensor) -> list[Tensor]:
        self.weights.held = dict(zip(self.names, tensors, strict=True))
        stacks: dict[tuple[torch.Size, torch.Size], list[Effective]] = {}
        for folded in map(effective, self._read()):
            stacks.setdefault((folded.query.shape, folded.key.shape), []).append(folded)
        self.weights.held = {}
        found: list[Tensor] = []
        for same in stacks.values():
            query, key = torch.stack([x.query for x in same]), torch.stack([x.key for x in same])
            found += [query, key, torch.tensor([x.scale for x in same], dtype=query.dtype, device=query.device)]
        return found


def _kind(x: Tensor) -> Any:
    """What the recorded operations depend on, beside the numbers."""
    return x.device, x.dtype, x.shape, x.stride()
