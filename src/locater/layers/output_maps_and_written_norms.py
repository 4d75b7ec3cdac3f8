"""What each head writes to the residual stream: the maps of its values and of its output, with norms folded in.

    z -> gain * z + bias -> W_V . + b_V -> (norm of values) -> attention -> (gain of a norm) -> W_O,h

A head writes O_h V_h z for a token z that it attends to. The product is never formed: its norm is that of small
matrices.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.layers.head_blocks import norm_of_heads, rows_of_heads
from locater.layers.layer import AttentionLayer
from locater.layers.norm_folding import folded, mean_field
from locater.layers.row_readers import row_reader
from locater.numerics import finite_or_none, known_median, upcast

AT_ONCE = 2**22  # numbers of an output map that are in memory at a time, in float64
ROUNDING = 1e-12  # of the product of the factors' squared norms: a smaller squared norm of O_h V_h is zero


@dataclass(frozen=True)
class OutputMaps:
    """The maps of one layer, read when they are needed. Build it with `output_maps`."""

    layer: AttentionLayer
    raw: bool = False  # parameters as they are stored, without biases

    __repr__ = brief

    @property
    def size(self) -> int:
        """Channels of the values of a head."""
        assert self.layer.value is not None
        return self.layer.value.shape[0] // self.layer.kv_heads

    def values(self) -> Iterator[Float[Tensor, "k v e"]]:
        """V of some key heads at a time, float64, with its constant part as the last column."""
        layer = self.layer
        assert layer.value is not None
        width = layer.value.shape[1]
        read, step = row_reader(layer.value.weight), max(1, AT_ONCE // (self.size * width))
        for first in range(0, layer.kv_heads, step):
            heads = first, min(first + step, layer.kv_heads)
            part = rows_of_heads(layer.value, read, heads, layer.kv_heads)
            weight = part.weight().unflatten(0, (heads[1] - heads[0], -1))
            if self.raw:
                yield _on_cpu(torch.nn.functional.pad(upcast(weight), (0, 1)))
                continue
            weight, shift = folded(weight, part, layer.value_stream_norm or layer.key_side_norm)
            norm = norm_of_heads(layer.head_value_norm, heads)
            weight, shift = (weight, shift) if norm is None else mean_field(weight, shift, norm)
            yield _on_cpu(torch.cat([weight, shift[..., None]], -1))

    def out_rows(self) -> Iterator[Float[Tensor, "rows H v"]]:
        """Rows of the output map, float64, a few at a time."""
        layer = self.layer
        assert layer.out is not None
        count, width = layer.out.shape
        read, step, gain = row_reader(layer.out.weight), max(1, AT_ONCE // width), self._gain()
        for start in range(0, count, step):
            rows = _on_cpu(read(start, min(start + step, count))).unflatten(1, (layer.heads, -1))
            yield rows if gain is None else rows * gain

    def _gain(self) -> Tensor | None:
        """Of the norm in front of the output map, (v) or (H, v)."""
        norm = self.layer.mixed_norm
        if self.raw or norm is None or norm.gain is None:
            return None
        gain = _on_cpu(norm.gain)
        return gain if gain.numel() == self.size else gain.view(self.layer.heads, self.size)


def output_maps(layer: AttentionLayer, raw: bool = False) -> OutputMaps | None:
    """The maps of values and output of a layer; None where they are not known, or where heads are mixed in another
    way.
    """
    if layer.value is None or layer.out is None:
        return None
    if layer.out.shape[1] * layer.kv_heads != layer.value.shape[0] * layer.heads:
        return None
    return OutputMaps(layer, raw)


def column_gram(rows: Iterable[Float[Tensor, "rows H n"]]) -> Float[Tensor, "H n n"]:
    """Products of the columns of an output map, head by head, from some rows at a time."""
    stacked = (part.transpose(0, 1) for part in rows)
    return sum((part.mT @ part for part in stacked), start=torch.zeros((), dtype=torch.float64))


@torch.no_grad()
def written_norms(layer: AttentionLayer, raw: bool = False) -> list[float | None]:
    """The Frobenius norm of O_h V_h of every head, with the constant part of its values as one more column: 0 for a
    head that writes nothing, whatever it attends to. NaN where the maps are not finite, None where they are not known.
    """
    maps = output_maps(layer, raw)
    if maps is None:
        return [None] * layer.heads
    values = torch.cat([V @ V.mT for V in maps.values()]).repeat_interleave(layer.group, 0)
    outputs = column_gram(maps.out_rows())
    squared = (outputs * values).sum((1, 2))
    rounding = ROUNDING * outputs.norm(dim=(1, 2)) * values.norm(dim=(1, 2))
    return [float(x) for x in squared.where(~(squared <= rounding), 0).sqrt()]


def written_shares(norms: Sequence[float | None]) -> list[float | None]:
    """What each head of a layer writes, over the median of those that write: 0 for a head that writes nothing.

    >>> written_shares([2.0, 4.0, 0.0, 6.0, None])
    [0.5, 1.0, 0.0, 1.5, None]
    """
    typical = known_median(norm for norm in norms if norm and math.isfinite(norm))
    shares = [norm and norm / (typical or 1.0) for norm in norms]
    return [None if share is None else finite_or_none(share) for share in shares]


def _on_cpu(x: Tensor) -> Tensor:
    return x.detach().cpu().double()
