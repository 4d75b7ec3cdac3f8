"""The layout of a discovered attention layer: names of tensors, rows and numbers. From it and any source of tensors an
`AttentionLayer` is built.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from locater.checkpoints.weights import Rows, Weights
from locater.families.bias import Alibi
from locater.families.build import read_floats
from locater.families.discovered_norms import NormLayout
from locater.families.layer import AttentionLayer, Kind, Projection
from locater.families.norm import Norm
from locater.families.normed import normed
from locater.families.rotary import Rotary, RotaryTable


@dataclass(frozen=True)
class MapLayout:
    """Rows of a stored map, in the order wanted; `columns` reorders what it reads."""

    weight: str
    rows: tuple[int, ...]
    bias: str | None = None
    transposed: bool = False  # stored (in, out)
    columns: tuple[int, ...] | None = None
    inner: NormLayout | None = None  # a norm over all rows at once, after the map

    def build(self, weights: Weights, before: Norm) -> Projection:
        width = weights.shape(self.weight)[0 if self.transposed else 1]
        bias = None if self.bias is None else weights.read(self.bias)[list(self.rows)]
        plain = Projection(lambda: self._matrix(weights), (len(self.rows), width), bias)
        return plain if self.inner is None else normed(plain, self.inner.build(weights), before)

    def _matrix(self, weights: Weights) -> Tensor:
        if self.transposed:
            matrix = read_floats(weights, self.weight).mT[list(self.rows)]
        else:
            ranges, places = _ranges(self.rows)
            matrix = read_floats(weights, self.weight, ranges)
            matrix = matrix if places is None else matrix[places]
        return matrix if self.columns is None else matrix[:, list(self.columns)]


@dataclass(frozen=True)
class LogitsLayout:
    """From products of queries and keys to weights."""

    scale: float = 1.0
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None  # slope of each head
    causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class AttentionLayout:
    """Everything that `AttentionLayer` has, as names and numbers."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    query: MapLayout
    key: MapLayout
    logits: LogitsLayout
    value: MapLayout | None = None
    out: MapLayout | None = None
    norm: NormLayout = field(default_factory=NormLayout)
    memory_norm: NormLayout | None = None
    query_norm: NormLayout | None = None
    key_norm: NormLayout | None = None
    norm_last: bool = False
    frequencies: tuple[float, ...] = ()
    amplitude: float = 1.0
    angles: tuple[tuple[float, ...], ...] = ()  # of each token of the example and each pair, in place of frequencies
    kind: Kind = "self"
    product_scale: float = 1.0  # factor of queries times factor of keys, beside their maps
    unknown_logits: str | None = None  # why only queries and keys are known
    unknown_output: str | None = None

    def build(self, weights: Weights, index: int = 0) -> AttentionLayer:
        """The layer of these weights."""
        norm = self.norm.build(weights)
        memory = None if self.memory_norm is None else self.memory_norm.build(weights)
        side = norm if self.kind == "self" else memory or Norm()
        logits = self.logits
        return AttentionLayer(
            name=self.name,
            index=index,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            query=self.query.build(weights, norm),
            key=self.key.build(weights, side),
            value=None if self.value is None else self.value.build(weights, side),
            out=None if self.out is None else self.out.build(weights, Norm()),
            scale=logits.scale,
            norm=norm,
            memory_norm=memory,
            query_norm=None if self.query_norm is None else self.query_norm.build(weights),
            key_norm=None if self.key_norm is None else self.key_norm.build(weights),
            norm_last=self.norm_last,
            rotary=Rotary(torch.tensor(self.frequencies), self.amplitude) if self.frequencies else None,
            rotary_table=RotaryTable(torch.tensor(self.angles, dtype=torch.float64)) if self.angles else None,
            bias=None if logits.alibi is None else Alibi(torch.tensor(logits.alibi, dtype=torch.float64)),
            softcap=logits.softcap,
            causal=logits.causal,
            window=logits.window,
            kind=self.kind,
            provenance="discovered",
            unknown_logits=self.unknown_logits,
            unknown_output=self.unknown_output,
        )


def _ranges(rows: Sequence[int]) -> tuple[Rows, Tensor | None]:
    """Ranges that hold these rows, in ascending order; and where each row is in them, unless they are in order."""
    ranges: list[tuple[int, int]] = []
    ordered = sorted(set(rows))
    for row in ordered:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    if list(rows) == ordered:
        return ranges, None
    place = {row: at for at, row in enumerate(ordered)}
    return ranges, torch.tensor([place[row] for row in rows])
