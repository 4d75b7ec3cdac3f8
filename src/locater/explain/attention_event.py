"""One attention call of a recorded run: its maps, and how the gradient of a target reaches them.

The gradient with respect to a map A needs no map in the graph: attention is O = A V, so dA = dO V^T, from the gradient
of its output O and its values V.

Axes: B sequences, T queries, S keys, H query heads, K key heads, V size of a value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.layers import AttentionLayer
from locater.numerics import upcast
from locater.observing.attention_maps import attention_maps, without_autocast
from locater.observing.input_covariances import AttentionInput
from locater.observing.residual_stream import time_first

# Values of attention whose calls come without them: computed again from the input of the module, checked by its output.


class Values(NamedTuple):
    """Values, and how the gradient of what the module returned becomes that of attention's output O = A V."""

    value: Float[Tensor, "B K S V"]
    to_heads: Callable[[Tensor], Float[Tensor, "B T H V"]]


@torch.no_grad()
def recomputed_values(
    layer: AttentionLayer, call: Call, module: nn.Module, read: AttentionInput, y: Tensor
) -> Values | None:
    """Values of the stream that keys read. None unless O = A V, or O behind the output map, is what the module
    returned: a module that norms its input, adds a skip or has another layout is not guessed at.
    """
    tokens_first = time_first(module)
    if layer.value is None or not isinstance(y, Tensor) or y.ndim != 3:
        return None
    source = upcast(read.x if read.memory is None else read.memory)
    if source.shape[1] != call.key.shape[2] or source.shape[-1] != layer.value.shape[1]:
        return None
    value = layer.value(source).unflatten(-1, (layer.kv_heads, -1)).transpose(1, 2)
    mixed = (attention_maps(call) @ value.repeat_interleave(layer.group, 1)).transpose(1, 2).flatten(2)  # (B, T, H V)
    returned = upcast((y.transpose(0, 1) if tokens_first else y).detach())
    if _equal(mixed, returned, y.dtype):
        return Values(value, partial(_heads, layer.heads, None, tokens_first))
    for W_O, bias in _output_maps(layer, module):
        b = None if bias is None else bias.to(mixed)
        if _equal(nn.functional.linear(mixed, W_O.to(mixed), b), returned, y.dtype):
            return Values(value, partial(_heads, layer.heads, W_O, tokens_first))
    return None


def _output_maps(layer: AttentionLayer, module: nn.Module) -> Iterator[tuple[Tensor, Tensor | None]]:
    """Maps (d, H V) that may be the last one of the module. A layer's record has layer scale in it, which is applied
    outside.
    """
    width = 0 if layer.value is None else layer.group * layer.value.shape[0]
    for part in module.children():
        if isinstance(part, nn.Linear) and part.in_features == width:
            yield part.weight.detach(), None if part.bias is None else part.bias.detach()
    if layer.out is not None:
        yield layer.out.weight().detach(), None if layer.out.bias is None else layer.out.bias.detach()


def _heads(heads: int, W_O: Tensor | None, tokens_first: bool, slope: Tensor) -> Tensor:
    slope = upcast(slope.transpose(0, 1) if tokens_first else slope)
    return (slope if W_O is None else slope @ W_O.to(slope)).unflatten(-1, (heads, -1))


def _equal(ours: Tensor, theirs: Tensor, dtype: torch.dtype) -> bool:
    """Within the precision of the model, or of float32 where models compute their softmax in it."""
    if ours.shape != theirs.shape:
        return False
    most = max(torch.finfo(dtype).eps, torch.finfo(torch.float32).eps) ** 0.5 * float(theirs.abs().max())
    return bool((ours - theirs).abs().max() <= most)


# The event.

AT_ONCE = 1 << 26  # numbers of the maps that are built at a time


@dataclass(frozen=True, eq=False)
class AttentionEvent:
    """One attention call of a run. `value` and `output` are None where they were not seen."""

    layer: AttentionLayer
    call: Call
    value: Float[Tensor, "B K S V"] | None
    output: Tensor | None  # in the graph: (B, T, H, V), or what `to_heads` takes the gradient of
    to_heads: Callable[[Tensor], Float[Tensor, "B T H V"]] | None = None  # gradient of `output` -> dO

    def mean_map(self, row: int = 0) -> Float[Tensor, "T S"]:
        """The mean over heads of one sequence's maps."""
        return self._sum_over_heads(lambda maps, heads: maps, row) / self.layer.heads

    def relevance(self, gradient: Tensor | None, row: int = 0) -> Float[Tensor, "T S"]:
        """mean over heads of max(dA * A, 0), with dA = dO V^T; `gradient` is dO, None for zero."""
        if gradient is None:
            return upcast(self.call.query).new_zeros(self.call.query.shape[2], self.call.key.shape[2])
        assert self.value is not None
        values, slope = upcast(self.value[row]), upcast(gradient[row]).transpose(0, 1)  # (K, S, V), (H, T, V)
        group = slope.shape[0] // values.shape[0]

        def weighted(maps: Tensor, heads: Tensor) -> Tensor:
            return (slope[heads] @ values[heads // group].mT * maps).clamp_min(0)

        return self._sum_over_heads(weighted, row) / self.layer.heads

    def _sum_over_heads(self, of: Callable[[Tensor, Tensor], Tensor], row: int) -> Tensor:
        """The sum over heads of a function of their maps (h, T, S), some heads at a time."""
        query = self.call.query
        (B, H, T, _), S = query.shape, self.call.key.shape[2]
        many = max(1, AT_ONCE // (B * T * S))
        parts = torch.arange(H, device=query.device).split(many)
        with torch.no_grad(), without_autocast(query.device):
            return torch.stack([of(attention_maps(self.call, heads)[row], heads).sum(0) for heads in parts]).sum(0)
