"""What doctor knows of the heads of one layer: sketches of its maps by head, and what the heads do to random tokens.

Axes: H query heads, K key heads, h head size, d width, P probes. Maps are met by P random tokens Z (d, P), never
multiplied with each other, so that a layer of any width is looked at in one pass over its maps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from locater.commands.doctor.tensors import BLOCK, PROBES, probes
from locater.layers.layer import AttentionLayer, Projection
from locater.layers.norm import Norm
from locater.layers.row_readers import row_reader
from locater.numerics import upcast

OFFSETS = (1, 7, 40)  # distances at which a rotation shows


@dataclass
class LayerHeads:
    """The heads of one layer. Sketches are of maps as they are stored; effects are of maps as they act."""

    number: int
    name: str
    heads: int
    kv_heads: int
    query: Tensor  # (H, h, P)
    key: Tensor  # (K, h, P)
    value: Tensor | None  # (K, h, P)
    out: Tensor | None  # (H, h, P): sketch of the columns
    query_rows: Tensor  # (H, h) norms of rows
    key_rows: Tensor
    # (offsets + 1, H, d + 1, P + 1): Q^T R_offset K Z; last are what the bias of queries, and that of keys, adds
    logits: Tensor
    outputs: Tensor | None  # (H, d, P + 1): O V Z, and what the bias of values adds
    constant: Tensor | None  # (d,): what biases of values and outputs add together
    scale: float
    rotary: bool
    channels: int = 0  # that are rotated
    keyed: bool = True  # whether the bias of keys shows: without positions it adds the same to all keys
    normed: tuple[str, ...] = ()  # maps with a norm of their own, which takes their scale away

    @cached_property
    def spread(self) -> Tensor:
        """Spread of the logits of unit tokens, (H,)."""
        return self.scale * (self.logits[0, :, :-1, :PROBES].square().sum((1, 2)) / PROBES).sqrt()

    @cached_property
    def written(self) -> Tensor | None:
        """Frobenius norm of O_h V_h, (H,)."""
        return None if self.outputs is None else (self.outputs[..., :PROBES].square().sum((1, 2)) / PROBES).sqrt()

    def forget(self) -> None:
        """Drop what heads do to tokens, the largest part, and keep the numbers made of it."""
        _ = self.spread, self.written
        self.logits, self.outputs = self.logits[:0].clone(), None  # a view would keep all of it

    def maps(self) -> dict[str, Tensor]:
        """The sketches by the name of the map."""
        parts = {"query": self.query, "key": self.key, "value": self.value, "out": self.out}
        return {name: part for name, part in parts.items() if part is not None}


def layer_heads(layer: AttentionLayer, number: int) -> LayerHeads:
    """Sketches and effects of the heads of a layer."""
    width, memory = layer.query.shape[1], layer.key.shape[1]
    q_rows, q_norms = _row_sketch(layer.query, probes(width))
    k_rows, k_norms = _row_sketch(layer.key, probes(memory))
    query, key = (x.unflatten(0, (n, -1)) for x, n in ((q_rows, layer.heads), (k_rows, layer.kv_heads)))
    side = layer.key_side_norm
    tokens = _tokens(side, probes(memory))
    met = _row_sketch(layer.key, tokens, bias=True)[0].unflatten(0, (layer.kv_heads, -1))
    met = _normed(met, layer.key_norm)
    turned = torch.cat([_turned(layer, met, offset) for offset in (0, *OFFSETS)], 2)
    logits = _back(layer, turned, _size(layer)).unflatten(2, (-1, met.shape[2])).movedim(2, 0).contiguous()
    value = out = outputs = constant = None
    if layer.value is not None and layer.out is not None:
        value = _row_sketch(layer.value, probes(layer.value.shape[1]))[0].unflatten(0, (layer.kv_heads, -1))
        given = _row_sketch(layer.value, _tokens(layer.value_stream_norm or side, probes(layer.value.shape[1])), True)[
            0
        ]
        out, outputs = _written(layer, given.unflatten(0, (layer.kv_heads, -1)))
        constant = outputs[..., -1].sum(0) + (0 if layer.out.bias is None else _finite(layer.out.bias))
    return LayerHeads(
        number,
        layer.name,
        layer.heads,
        layer.kv_heads,
        query,
        key,
        value,
        out,
        q_norms.view(layer.heads, -1),
        k_norms.view(layer.kv_heads, -1),
        logits,
        outputs,
        constant,
        layer.scale,
        layer.rotary is not None,
        0 if layer.rotary is None else layer.rotary.channels,
        layer.rotary is not None or layer.relative is not None or layer.key_norm is not None,
        tuple(x for x, norm in (("query", layer.query_norm), ("key", layer.key_norm)) if norm is not None),
    )


def _tokens(norm: Norm, z: Tensor) -> Tensor:
    """Unit tokens after gain and mean removal of the norm in front, without its bias."""
    x = z - z.mean(0, keepdim=True) if norm.kind == "layer" else z
    return x if norm.gain is None else x * norm.gain.detach().cpu().to(x)[:, None]


def _parts(projection: Projection) -> Iterator[tuple[int, Tensor]]:
    """Rows of a map in blocks, in float32, without what is not finite."""
    read, (rows, width) = row_reader(projection.weight), projection.shape
    step = max(1, BLOCK // max(1, width))
    for start in range(0, rows, step):
        part = upcast(read(start, min(start + step, rows)).detach().cpu()).float()
        yield start, part if math.isfinite(float(part.sum())) else part.nan_to_num(0.0, 0.0, 0.0)


def _row_sketch(projection: Projection, tokens: Tensor, bias: bool = False) -> tuple[Tensor, Tensor]:
    """(W tokens (rows, P), norms of the rows); `bias` adds that of the map as a last column."""
    sketch, norms = torch.zeros(projection.shape[0], tokens.shape[1]), torch.zeros(projection.shape[0])
    for start, part in _parts(projection):
        sketch[start : start + len(part)] = (tokens.mT @ part.mT).mT
        norms[start : start + len(part)] = part.norm(dim=1)
    if bias:
        c = torch.zeros(len(sketch)) if projection.bias is None else _finite(projection.bias)
        sketch = torch.cat([sketch, c[:, None]], 1)
    return sketch, norms


def _finite(x: Tensor) -> Tensor:
    return x.detach().cpu().float().nan_to_num(0.0, 0.0, 0.0)


def _normed(x: Tensor, norm: Norm | None) -> Tensor:
    """Queries or keys behind a norm of their own, in mean field: its root mean square is that over the probes."""
    if norm is None:
        return x
    if norm.kind == "layer":
        x = x - x.mean(1, keepdim=True)
    gain = torch.ones(x.shape[1]) if norm.gain is None else norm.gain.detach().cpu().float()
    return x * _energy(x).rsqrt()[:, None, None] * gain[..., None]


def _energy(x: Tensor) -> Tensor:
    """Mean square of queries or keys (heads, h, P + 1) over tokens, the last column their bias: (heads,)."""
    maps, bias = x[..., :-1].square().mean((1, 2)), x[..., -1].square().mean(1)
    return (maps + bias).clamp_min(1e-30)


def _turned(layer: AttentionLayer, met: Tensor, offset: int) -> Tensor:
    """Keys of the probes, rotated by an offset: (K, h, P)."""
    if layer.rotary is None or not offset:
        return met
    at = torch.full((met.shape[-1],), offset - layer.rotary.first)
    return layer.rotary.rotate(met.mT, at).mT


def _size(layer: AttentionLayer) -> Tensor | None:
    """The factors of a norm of queries in mean field, (H, h), from the same probes."""
    if layer.query_norm is None:
        return None
    tokens = _tokens(layer.norm, probes(layer.query.shape[1]))
    met = _row_sketch(layer.query, tokens, bias=True)[0].unflatten(0, (layer.heads, -1))
    gain = torch.ones(met.shape[1]) if layer.query_norm.gain is None else layer.query_norm.gain.detach().cpu().float()
    return _energy(met).rsqrt()[:, None] * gain


def _back(layer: AttentionLayer, met: Tensor, size: Tensor | None) -> Tensor:
    """Q^T of turned keys, as queries act on unit tokens: (H, d + 1, N); the last row is that of the query's bias."""
    met = met.repeat_interleave(layer.group, 0)  # (H, h, N)
    if size is not None:
        met = met * size[..., None]
    flat = met.flatten(0, 1)
    heads, rows = layer.heads, met.shape[1]
    total = torch.zeros(heads, layer.query.shape[1], met.shape[-1])
    for start, part in _parts(layer.query):
        stop, at = start + len(part), start
        while at < stop:  # a block may begin and end inside a head
            head = at // rows
            end = min(stop, (head + 1) * rows)
            total[head] += part[at - start : end - start].mT @ flat[at:end]
            at = end
    norm = layer.norm
    if norm.gain is not None:
        total = total * norm.gain.detach().cpu().float()[:, None]
    if norm.kind == "layer":
        total = total - total.mean(1, keepdim=True)
    bias = layer.query.bias
    last = torch.zeros(heads, 1, met.shape[-1])
    if bias is not None:
        last = _finite(bias).view(heads, 1, -1) @ met
    return torch.cat([total, last], 1)


def _written(layer: AttentionLayer, given: Tensor) -> tuple[Tensor, Tensor]:
    """(sketch of the columns of O by head (H, h, P), O V Z (H, d, P))."""
    assert layer.out is not None
    rows, columns = layer.out.shape
    given = given.repeat_interleave(layer.group, 0)  # (H, h, P)
    size = columns // layer.heads
    sketch, written = torch.zeros(columns, PROBES), torch.zeros(layer.heads, rows, given.shape[-1])
    for start, part in _parts(layer.out):
        sketch += part.mT @ probes(rows)[start : start + len(part)]
        if given.shape[1] == size:
            by_head = part.unflatten(1, (layer.heads, size))
            written[:, start : start + len(part)] = torch.einsum("rHh,HhP->HrP", by_head, given)
    return sketch.unflatten(0, (layer.heads, size)), written
