"""`AttentionLayout`: where the heads of a layer are, as data. Records and discovery make it; from it and any source of
tensors an `AttentionLayer` is built.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import torch
from torch import Tensor

from locater.layers.layer import AttentionLayer, Gate, Kind, Provenance
from locater.layers.map_layouts import AnyMap, MapLayout, NormLayout, Reads
from locater.layers.norm import Norm
from locater.layers.position_biases import (
    Alibi,
    PairBias,
    PairTable,
    PairTerms,
    RelativeBias,
    RelativeTerms,
    RoundedAlibi,
    bucket,
    sinusoid,
)
from locater.layers.rotary import Rotary, RotaryTable, rotary_from_config
from locater.layers.row_readers import read_floats
from locater.numerics import upcast
from locater.sources.weights import Weights
from locater.torch_private import without_dispatch_modes


class Part:
    """A part of a layout that is built on its own."""

    def vectors(self, weights: Weights) -> Reads:
        """What `build` reads."""
        yield from ()


@dataclass(frozen=True)
class RotaryLayout(Part):
    """Rotary positions: the angle of each pair of channels per position."""

    frequencies: tuple[float, ...]
    amplitude: float = 1.0
    first: int = 0  # the model's number for position 0

    def build(self, weights: Weights) -> Rotary:
        return Rotary(torch.tensor(self.frequencies, dtype=torch.float32), self.amplitude, self.first)


def rotary_layout(
    config: Mapping[str, Any], head_dim: int, kind: str | None = None, share: float = 1.0
) -> RotaryLayout:
    """`rotary_from_config` as numbers, also while the maps of a model are being recorded without data."""
    with without_dispatch_modes():
        rotary = rotary_from_config(config, head_dim, kind, share)
        return RotaryLayout(tuple(rotary.frequencies.tolist()), rotary.amplitude)


@dataclass(frozen=True)
class AlibiLayout(Part):
    """-slope * distance, one slope for each head."""

    slopes: tuple[float, ...]
    rounded: float | None = None  # a factor of it, where positions are rounded to bfloat16 as in Falcon

    def build(self, weights: Weights) -> Alibi:
        slopes = torch.tensor(self.slopes, dtype=torch.float64)
        return Alibi(slopes) if self.rounded is None else RoundedAlibi(slopes, self.rounded)


@dataclass(frozen=True)
class BucketLayout:
    """A table with a row for each bucket of distances, as that of T5."""

    name: str
    both_ways: bool
    farthest: int = 128
    buckets: int | None = None  # None: as many as the table has rows

    def vectors(self, weights: Weights) -> Reads:
        yield self.name, None if self.buckets is None else [(0, self.buckets)]

    def build(self, weights: Weights) -> RelativeBias:
        return RelativeBias(read_floats(weights, *next(self.vectors(weights))), self.both_ways, self.farthest)


@dataclass(frozen=True)
class TableLayout:
    """A parameter of which each pair of positions reads a row."""

    name: str
    rows: tuple[tuple[int, ...], ...]  # (T, S); -1 where it is not known
    axis: int  # of heads, or of channels; all others together are rows

    def vectors(self, weights: Weights) -> Reads:
        yield self.name, None

    def pairs(self, weights: Weights) -> PairTable:
        table = read_floats(weights, self.name).movedim(self.axis, -1)
        return PairTable(table.reshape(-1, table.shape[-1]), torch.tensor(self.rows))

    def build(self, weights: Weights) -> PairBias:
        return PairBias(self.pairs(weights))


@dataclass(frozen=True)
class PairTermsLayout:
    """Vectors of pairs of positions, which queries meet."""

    tables: tuple[TableLayout, ...]
    factor: float = 1.0

    def vectors(self, weights: Weights) -> Reads:
        for table in self.tables:
            yield from table.vectors(weights)

    def build(self, weights: Weights) -> PairTerms:
        return PairTerms(tuple(table.pairs(weights) for table in self.tables), self.factor)


@dataclass(frozen=True)
class SinusoidLayout(Part):
    """A distance as sines and cosines (XLNet)."""

    width: int
    farthest: int  # distances beyond it count as it, where it is positive

    def build(self, weights: Weights) -> Callable[[Tensor], Tensor]:
        return sinusoid(self.width, self.farthest)


@dataclass(frozen=True)
class EmbeddingLayout:
    """A distance as a row of a table, `span` rows on either side (DeBERTa)."""

    name: str
    span: int
    buckets: int  # far distances share rows by logarithm, where it is positive
    farthest: int
    norm: NormLayout  # of the rows

    def vectors(self, weights: Weights) -> Reads:
        yield from self.norm.vectors(weights)

    def build(self, weights: Weights) -> Callable[[Tensor], Tensor]:
        norm = self.norm.build(weights)

        def code(distances: Tensor) -> Tensor:
            place = (bucket(distances, self.buckets, self.farthest) if self.buckets > 0 else distances) + self.span
            rows = read_floats(weights, self.name).to(distances.device)[place.clamp(0, 2 * self.span - 1)]
            return norm(upcast(rows))

        return code


@dataclass(frozen=True)
class DistanceLayout:
    """Keys, and queries, of the distance itself."""

    code: SinusoidLayout | EmbeddingLayout
    key: MapLayout | None = None
    query: MapLayout | None = None
    shift: tuple[str, str] | None = None  # of queries that meet it: the first tensor minus the second

    def vectors(self, weights: Weights) -> Reads:
        for part in (self.code, self.key, self.query):
            yield from () if part is None else part.vectors(weights)

    def build(self, weights: Weights) -> RelativeTerms:
        key, query = (None if x is None else x.build(weights, Norm()) for x in (self.key, self.query))
        return RelativeTerms(self.code.build(weights), key, query, self.shift and self._shift(weights, *self.shift))

    @staticmethod
    def _shift(weights: Weights, name: str, other: str) -> Callable[[], Tensor]:
        return lambda: upcast(read_floats(weights, name)) - upcast(read_floats(weights, other))


@dataclass(frozen=True)
class SinksLayout:
    """A tensor with one logit for each head."""

    name: str

    def vectors(self, weights: Weights) -> Reads:
        yield self.name, None

    def build(self, weights: Weights) -> Tensor:
        return read_floats(weights, self.name).reshape(-1)


@dataclass(frozen=True)
class LogitsLayout:
    """From products of queries and keys to weights."""

    scale: float = 1.0
    softcap: float | None = None
    bias: AlibiLayout | BucketLayout | TableLayout | None = None
    relative: PairTermsLayout | DistanceLayout | None = None
    sinks: SinksLayout | None = None
    shifted: bool = False  # all logits of a row are off by the same number, which softmax does not see
    causal: bool = False
    window: int | None = None
    chunk: int | None = None


@dataclass(frozen=True)
class AttentionLayout:
    """Everything that `AttentionLayer` has, as names and numbers. Fields of one name become each other."""

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
    rotary: RotaryLayout | None = None
    angles: tuple[tuple[float, ...], ...] = ()  # of each token of the example and each pair, in place of `rotary`
    kind: Kind = "self"
    index: int = 0
    provenance: Provenance = "family"
    product_scale: float = 1.0  # factor of queries times factor of keys, beside their maps
    unknown_scale: str | None = None  # why only queries and keys are known
    unknown_logits: str | None = None  # the same where the factor from products to logits is known
    unknown_mask: str | None = None
    unknown_output: str | None = None
    unknown_norm: str | None = None
    inputs_matter: str | None = None

    def with_logits(self, **changes: Any) -> AttentionLayout:
        """The same with other numbers between products and weights."""
        return replace(self, logits=replace(self.logits, **changes))

    def maps(self, weights: Weights) -> Reads:
        """What the query and key maps are read from."""
        yield from self.query.maps(weights)
        yield from self.key.maps(weights)

    def vectors(self, weights: Weights) -> Reads:
        """What `build` reads: gains, biases, tables."""
        for part in (self.query, self.key, self.value, self.out, self.gate):
            yield from () if part is None else part.vectors(weights)
        for part in (*(getattr(self, name) for name in _PARTS), *(getattr(self.logits, name) for name in _OF_LOGITS)):
            yield from () if part is None else part.vectors(weights)

    def build(self, weights: Weights, quantised: str | None = None) -> AttentionLayer:
        """The layer of these weights."""
        parts: dict[str, Any] = {name: getattr(self, name) for name in _NUMBERS}
        parts |= {name: getattr(self.logits, name) for name in _NUMBERS_OF_LOGITS}
        for layout, names in ((self, _PARTS), (self.logits, _OF_LOGITS)):
            for name in names:
                part = getattr(layout, name)
                parts[name] = None if part is None else part.build(weights)
        if self.unknown_scale is not None:
            parts["scale"] = math.nan
        norm = parts["norm"]
        side = norm if self.kind == "self" else parts["memory_norm"] or Norm()
        values = parts["value_stream_norm"] or side
        return AttentionLayer(
            **parts,
            query=self.query.build(weights, norm),
            key=self.key.build(weights, side),
            value=None if self.value is None else self.value.build(weights, values),
            out=None if self.out is None else self.out.build(weights, Norm()),
            gate=None if self.gate is None else Gate(self.gate.build(weights, norm), self.gate_function),
            rotary_table=RotaryTable(torch.tensor(self.angles, dtype=torch.float64)) if self.angles else None,
            quantised=quantised,
        )


def _names(kind: type, built: bool) -> list[str]:
    """The fields of a layout that a layer has too: numbers, or what is built on its own."""
    shared = {part.name for part in fields(AttentionLayer)} - {"query", "key", "value", "out", "gate"}
    return [part.name for part in fields(kind) if part.name in shared and ("Layout" in str(part.type)) == built]


_NUMBERS, _PARTS = (_names(AttentionLayout, built) for built in (False, True))
_NUMBERS_OF_LOGITS, _OF_LOGITS = (_names(LogitsLayout, built) for built in (False, True))
