"""The layout of a discovered attention layer: names of tensors, rows and numbers. From it and any source of tensors an
`AttentionLayer` is built.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

import torch

from locater.layers.bias import Alibi, PairBias, PositionBias
from locater.layers.build import read_floats
from locater.layers.gate import Gate
from locater.layers.layer import AttentionLayer, Kind
from locater.layers.map_layouts import AnyMap, MapLayout, NormLayout
from locater.layers.norm import Norm
from locater.layers.pairs import PairTable, PairTerms
from locater.layers.rotary import Rotary, RotaryTable
from locater.sources.weights import Weights


@dataclass(frozen=True)
class TableLayout:
    """A parameter of which each pair of positions reads a row."""

    name: str
    rows: tuple[tuple[int, ...], ...]  # (T, S); -1 where it is not known
    axis: int  # of heads, or of channels; all others together are rows

    def build(self, weights: Weights) -> PairTable:
        table = read_floats(weights, self.name).movedim(self.axis, -1)
        return PairTable(table.reshape(-1, table.shape[-1]), torch.tensor(self.rows))


@dataclass(frozen=True)
class LogitsLayout:
    """From products of queries and keys to weights."""

    scale: float = 1.0
    softcap: float | None = None
    alibi: tuple[float, ...] | None = None  # slope of each head
    table: TableLayout | None = None  # a bias for each head and pair of positions
    content: tuple[TableLayout, ...] = ()  # vectors of pairs of positions, which queries meet
    content_scale: float = 1.0
    sinks: str | None = None
    shifted: bool = False  # all logits of a row are off by the same number, which softmax does not see
    causal: bool = False
    window: int | None = None
    chunk: int | None = None

    def bias(self, weights: Weights) -> PositionBias | None:
        if self.alibi is not None:
            return Alibi(torch.tensor(self.alibi, dtype=torch.float64))
        return None if self.table is None else PairBias(self.table.build(weights))

    def relative(self, weights: Weights) -> PairTerms | None:
        if not self.content:
            return None
        return PairTerms(tuple(part.build(weights) for part in self.content), self.content_scale / self.scale)


@dataclass(frozen=True)
class AttentionLayout:
    """Everything that `AttentionLayer` has, as names and numbers."""

    name: str
    heads: int
    kv_heads: int
    head_dim: int
    query: AnyMap
    key: AnyMap
    logits: LogitsLayout
    value: AnyMap | None = None
    out: MapLayout | None = None
    head_value_norm: NormLayout | None = None
    mixed_norm: NormLayout | None = None
    mixed_norm_apart: bool = False
    gate: MapLayout | None = None
    gate_function: str = ""
    norm: NormLayout = field(default_factory=NormLayout)
    memory_norm: NormLayout | None = None
    value_stream_norm: NormLayout | None = None
    query_norm: NormLayout | None = None
    key_norm: NormLayout | None = None
    norm_last: bool = False
    frequencies: tuple[float, ...] = ()
    amplitude: float = 1.0
    first_position: int = 0
    angles: tuple[tuple[float, ...], ...] = ()  # of each token of the example and each pair, in place of frequencies
    kind: Kind = "self"
    product_scale: float = 1.0  # factor of queries times factor of keys, beside their maps
    unknown_scale: str | None = None  # why only queries and keys are known
    unknown_logits: str | None = None  # the same where the factor from products to logits is known
    unknown_mask: str | None = None
    unknown_output: str | None = None
    inputs_matter: str | None = None

    def build(self, weights: Weights, index: int = 0) -> AttentionLayer:
        """The layer of these weights."""
        norm = self.norm.build(weights)
        memory = None if self.memory_norm is None else self.memory_norm.build(weights)
        side = norm if self.kind == "self" else memory or Norm()
        value_stream_norm = None if self.value_stream_norm is None else self.value_stream_norm.build(weights)
        logits = self.logits
        return AttentionLayer(
            name=self.name,
            index=index,
            heads=self.heads,
            kv_heads=self.kv_heads,
            head_dim=self.head_dim,
            query=self.query.build(weights, norm),
            key=self.key.build(weights, side),
            value=None if self.value is None else self.value.build(weights, value_stream_norm or side),
            out=None if self.out is None else self.out.build(weights, Norm()),
            scale=logits.scale if self.unknown_scale is None else math.nan,
            head_value_norm=None if self.head_value_norm is None else self.head_value_norm.build(weights),
            mixed_norm=None if self.mixed_norm is None else self.mixed_norm.build(weights),
            mixed_norm_apart=self.mixed_norm_apart,
            gate=None if self.gate is None else Gate(self.gate.build(weights, norm), self.gate_function),
            norm=norm,
            memory_norm=memory,
            value_stream_norm=value_stream_norm,
            query_norm=None if self.query_norm is None else self.query_norm.build(weights),
            key_norm=None if self.key_norm is None else self.key_norm.build(weights),
            norm_last=self.norm_last,
            rotary=self._rotary(),
            rotary_table=RotaryTable(torch.tensor(self.angles, dtype=torch.float64)) if self.angles else None,
            relative=logits.relative(weights),
            bias=logits.bias(weights),
            sinks=None if logits.sinks is None else read_floats(weights, logits.sinks).reshape(-1),
            softcap=logits.softcap,
            causal=logits.causal,
            window=logits.window,
            chunk=logits.chunk,
            kind=self.kind,
            provenance="discovered",
            unknown_scale=self.unknown_scale,
            unknown_logits=self.unknown_logits,
            unknown_mask=self.unknown_mask,
            unknown_output=self.unknown_output,
            inputs_matter=self.inputs_matter,
        )

    def _rotary(self) -> Rotary | None:
        if not self.frequencies:
            return None
        return Rotary(torch.tensor(self.frequencies, dtype=torch.float32), self.amplitude, self.first_position)
