"""Layouts of norms and maps: names of stored tensors and rows of them. A layout and any source of tensors give a `Norm`
or a `Projection`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locater.layers.build import read_floats
from locater.layers.joined import joined_maps
from locater.layers.layer import Projection
from locater.layers.norm import Norm, NormKind
from locater.layers.normed import normed
from locater.layers.row_readers import StoredRows
from locater.layers.vector_layouts import VectorLayout
from locater.numerics import upcast
from locater.sources.weights import ModuleWeights, Rows, Weights, row_ranges


@dataclass(frozen=True)
class NormLayout:
    """A norm by the names of its tensors."""

    kind: NormKind = "none"
    gain: str | None = None
    offset: float = 0.0  # the gain is `offset` plus the tensor
    bias: str | None = None
    eps: float = 0.0
    channels: tuple[int, ...] | None = None  # order of the channels; None: as stored
    factors: VectorLayout | None = None  # of what the norm gives

    def picked(self, order: Sequence[int]) -> NormLayout:
        """The same with its channels in this order."""
        channels = order if self.channels is None else [self.channels[place] for place in order]
        factors = None if self.factors is None else self.factors.picked(order)
        return replace(self, channels=tuple(channels), factors=factors)

    def build(self, weights: Weights) -> Norm:
        gain, bias = (None if name is None else read_floats(weights, name) for name in (self.gain, self.bias))
        if gain is not None and self.offset:
            gain = upcast(gain) + self.offset
        if self.channels is not None:
            order = list(self.channels)
            gain, bias = (None if x is None or x.numel() == 1 else x[..., order] for x in (gain, bias))
        if self.factors is not None:
            factors = self.factors.build(weights)
            gain, bias = (factors if gain is None else gain * factors), (None if bias is None else bias * factors)
        return Norm(self.kind, gain, bias, self.eps)


@dataclass(frozen=True)
class MapLayout:
    """Rows of a stored map, in the order wanted; `columns` reorders what it reads."""

    weight: str
    rows: tuple[int, ...]
    bias: str | None = None
    transposed: bool = False  # stored (in, out)
    columns: tuple[int, ...] | None = None
    inner: NormLayout | None = None  # a norm over all rows at once, after the map
    shift: VectorLayout | None = None  # added apart from the bias
    factors: VectorLayout | None = None  # of each row, bias and shift included
    axes: int = 1  # how many axes of the stored tensor are flattened into the first of two
    latent: MapLayout | None = None  # a map in front of this one
    latent_norm: NormLayout | None = None  # between the two

    def picked(self, places: Sequence[int]) -> MapLayout:
        """The same with these of its rows."""
        inner = self.inner
        if inner is not None and inner.channels is not None:
            inner = replace(inner, channels=tuple(inner.channels[place] for place in places))
        shift, factors = (None if x is None else x.picked(places) for x in (self.shift, self.factors))
        return replace(
            self, rows=tuple(self.rows[place] for place in places), inner=inner, shift=shift, factors=factors
        )

    def build(self, weights: Weights, before: Norm) -> Projection:
        """The map of these weights; `before` is the norm of the stream that it reads."""
        plain = self._plain(weights)
        if self.latent is not None:
            down = self.latent.build(weights, before)
            if self.latent_norm is None:
                return _product(plain, down)
            return normed(down, self.latent_norm.build(weights), before, up=plain)
        return plain if self.inner is None else normed(plain, self.inner.build(weights), before)

    def _plain(self, weights: Weights) -> Projection:
        stored = weights.shape(self.weight)
        width = math.prod(stored[: self.axes] if self.transposed else stored[self.axes :])
        bias = None if self.bias is None else read_floats(weights, self.bias)[list(self.rows)]
        if self.shift is not None:
            shift = self.shift.build(weights)
            bias = shift if bias is None else upcast(bias) + shift
        shape = (len(self.rows), width)
        if self.factors is None:
            return Projection(self._reader(weights), shape, bias)
        factors = self.factors.build(weights)
        return Projection(
            lambda: upcast(self._matrix(weights)) * factors[:, None], shape, None if bias is None else bias * factors
        )

    def _reader(self, weights: Weights) -> Callable[[], Tensor]:
        """What reads the map when it is needed, and ranges of its rows where it is a file's."""
        if isinstance(weights, ModuleWeights) or self.transposed or self.axes > 1:
            return lambda: self._matrix(weights)
        return StoredRows(lambda ranges: self._some_rows(weights, ranges))

    def _some_rows(self, weights: Weights, ranges: Rows | None) -> Tensor:
        chosen = self.rows if ranges is None else tuple(row for a, b in ranges for row in self.rows[a:b])
        return replace(self, rows=chosen)._matrix(weights)

    def _matrix(self, weights: Weights) -> Tensor:
        if self.transposed or self.axes > 1:
            matrix = read_floats(weights, self.weight).flatten(0, self.axes - 1).flatten(1)
            matrix = (matrix.mT if self.transposed else matrix)[list(self.rows)]
        else:
            ranges, places = row_ranges(self.rows)
            matrix = read_floats(weights, self.weight, ranges)
            matrix = (matrix if places is None else matrix[places]).flatten(1)
        return matrix if self.columns is None else matrix[:, list(self.columns)]


@dataclass(frozen=True)
class JoinedLayout:
    """Rows of several maps of one stream."""

    parts: tuple[MapLayout, ...]
    places: tuple[int, ...]  # over the rows of all parts, one after the other
    heads: int  # the rows are those of so many heads

    def picked(self, places: Sequence[int]) -> JoinedLayout:
        """The same with these of its rows."""
        return replace(self, places=tuple(self.places[place] for place in places))

    def build(self, weights: Weights, before: Norm) -> Projection:
        """The map of these weights; `before` is the norm of the stream that it reads."""
        shared = self._shared()
        if shared is None:
            return joined_maps([part.build(weights, before) for part in self.parts], torch.tensor(self.places))
        front, own = shared
        assert own.latent is not None
        assert own.latent_norm is not None
        return normed(
            own.latent.build(weights, before),
            own.latent_norm.build(weights),
            before,
            up=own._plain(weights),
            shared=front._plain(weights),
            heads=self.heads,
        )

    def _shared(self) -> tuple[MapLayout, MapLayout] | None:
        """(rows that all heads have in front, each head's own rows from a latent), where that is the order; None where
        it is another one.
        """
        plain = [number for number, part in enumerate(self.parts) if part.latent is None and part.inner is None]
        if len(self.parts) != 2 or len(plain) != 1:
            return None
        front, own = self.parts[plain[0]], self.parts[1 - plain[0]]
        start = 0 if plain[0] == 0 else len(own.rows)
        first, size = len(front.rows), len(own.rows) // self.heads
        behind = len(front.rows) if plain[0] == 0 else 0
        order = [
            place
            for head in range(self.heads)
            for place in (*range(start, start + first), *range(behind + head * size, behind + (head + 1) * size))
        ]
        return (front, own) if own.latent_norm is not None and list(self.places) == order else None


AnyMap = MapLayout | JoinedLayout


def _product(up: Projection, down: Projection) -> Projection:
    """up(down(x)) as one map."""
    bias = up.bias
    if down.bias is not None:
        moved = upcast(up.weight()) @ down.bias.to(upcast(up.weight()))
        bias = moved if bias is None else moved + bias.to(moved)
    return Projection(lambda: _multiplied(up, down), (up.shape[0], down.shape[1]), bias)


def _multiplied(up: Projection, down: Projection) -> Tensor:
    high = upcast(up.weight())
    return high @ down.weight().to(high)
