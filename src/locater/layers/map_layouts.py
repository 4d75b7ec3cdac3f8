"""Layouts of norms, maps and vectors: names of stored tensors and rows of them. A layout and any source of tensors give
a `Norm`, a `Projection` or numbers.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache, partial

import torch
from torch import Tensor

from locater.layers.layer import FUNCTIONS, Projection
from locater.layers.norm import Norm, NormKind
from locater.layers.projection_with_norm import joined_maps, normed
from locater.layers.row_readers import PickedRows, StoredRows, read_floats
from locater.numerics import upcast
from locater.sources.weights import ModuleWeights, Rows, Weights, take_rows

Runs = tuple[range, ...]  # numbers of rows or channels, in the order wanted
Reads = Iterator[tuple[str, Rows | None]]  # tensors, and which rows of them; None: all


def runs_of(numbers: Iterable[int]) -> Runs:
    """Numbers as runs with one step.

    >>> runs_of([0, 1, 2, 8, 10, 12])
    (range(0, 3), range(8, 13, 2))
    """
    given, runs, at = list(numbers), [], 0
    while at < len(given):
        step = given[at + 1] - given[at] if at + 1 < len(given) else 1
        step = step or 1  # a number twice: two runs
        stop = at + 1
        while stop < len(given) and given[stop] - given[stop - 1] == step:
            stop += 1
        last = given[stop - 1]
        runs.append(range(given[at], last + (1 if step > 0 else -1), step))
        at = stop
    return tuple(runs)


def numbers_in(runs: Runs) -> list[int]:
    """The numbers themselves.

    >>> numbers_in((range(0, 3), range(8, 13, 2)))
    [0, 1, 2, 8, 10, 12]
    """
    return [number for run in runs for number in run]


def count(runs: Runs) -> int:
    return sum(map(len, runs))


def picked(runs: Runs, places: Iterable[int]) -> Runs:
    """The numbers at these places."""
    numbers = numbers_in(runs)
    return runs_of(numbers[place] for place in places)


def per_head(runs: Runs, heads: int, size: int) -> Runs:
    """The same runs in each of `heads` heads of `size` rows.

    >>> per_head((range(0, 4, 2), range(1, 4, 2)), 2, 4)
    (range(0, 4, 2), range(1, 4, 2), range(4, 8, 2), range(5, 8, 2))
    """
    starts = range(0, heads * size, size)
    return tuple(range(start + run.start, start + run.stop, run.step) for start in starts for run in runs)


@dataclass(frozen=True)
class _Rows:
    """How runs are read: ranges of the stored rows (None: all of them), then the places of the rows in these, where
    they are in another order.
    """

    ranges: Rows | None
    places: Tensor | None = None

    @staticmethod
    def of(runs: Runs, stored: int) -> _Rows:
        if runs == (range(stored),):
            return _Rows(None)
        if all(run.step == 1 for run in runs):
            return _Rows([(run.start, run.stop) for run in runs])
        ranges, places = _covered(runs)
        return _Rows(None if ranges == [(0, stored)] else ranges, torch.tensor(places))

    def take(self, tensor: Tensor) -> Tensor:
        """These rows of a tensor in memory."""
        some = take_rows(tensor, self.ranges)
        return some if self.places is None else some[self.places]


@lru_cache(maxsize=64)  # layers of a model have the same runs
def _covered(runs: Runs) -> tuple[list[tuple[int, int]], list[int]]:
    """Ranges in which all numbers of some runs are, and the place of each number in these.

    >>> _covered((range(0, 4, 2), range(1, 4, 2), range(8, 12, 2)))
    ([(0, 4), (8, 11)], [0, 2, 1, 3, 4, 6])
    """
    spans = [(min(run[0], run[-1]), max(run[0], run[-1]) + 1) for run in runs]
    ranges: list[tuple[int, int]] = []
    for start, stop in sorted(spans):
        if ranges and start <= ranges[-1][1]:
            ranges[-1] = (ranges[-1][0], max(ranges[-1][1], stop))
        else:
            ranges.append((start, stop))
    starts, before = [start for start, _ in ranges], [0]
    for start, stop in ranges:
        before.append(before[-1] + stop - start)
    places: list[int] = []
    for run, (start, _) in zip(runs, spans, strict=True):
        at = bisect_right(starts, start) - 1
        places += [number + before[at] - starts[at] for number in run]
    return ranges, places


def rows_taken(tensor: Tensor, runs: Runs) -> Tensor:
    return _Rows.of(runs, len(tensor)).take(tensor)


@dataclass(frozen=True)
class VectorLayout:
    """Numbers of a stored tensor, flattened."""

    name: str
    places: Runs
    factor: float = 1.0
    function: str = "identity"  # of the stored numbers, before the factor

    def picked(self, places: Sequence[int]) -> VectorLayout:
        """The same with these of its numbers."""
        return replace(self, places=picked(self.places, places))

    def build(self, weights: Weights) -> Tensor:
        numbers = FUNCTIONS[self.function](rows_taken(upcast(read_floats(weights, self.name)).flatten(), self.places))
        return numbers if self.factor == 1 else numbers * self.factor


@dataclass(frozen=True)
class NormLayout:
    """A norm by the names of its tensors."""

    kind: NormKind = "none"
    gain: str | tuple[str, ...] | None = None  # several: those of one head after the other
    offset: float = 0.0  # the gain is `offset` plus the tensor
    bias: str | None = None
    eps: float = 0.0
    channels: tuple[int, ...] | None = None  # order of the channels; None: as stored
    factors: VectorLayout | None = None  # of what the norm gives

    def picked(self, order: Sequence[int]) -> NormLayout:
        """The same with its channels in this order."""
        channels = order if self.channels is None else [self.channels[place] for place in order]
        factors = None if self.factors is None else self.factors.picked(order)
        as_stored = list(channels) == list(range(len(channels)))
        return replace(self, channels=None if as_stored else tuple(channels), factors=factors)

    def vectors(self, weights: Weights) -> Reads:
        """What `build` reads."""
        gains = (self.gain,) if isinstance(self.gain, str) else self.gain or ()
        yield from ((name, None) for name in (*gains, self.bias, self.factors and self.factors.name) if name)

    def build(self, weights: Weights) -> Norm:
        """The norm of these weights. The offset is added in float32 at least, as the models do: 1 + w of a bfloat16 w
        is not a bfloat16 number.
        """
        bias = None if self.bias is None else read_floats(weights, self.bias)
        if self.gain is None or isinstance(self.gain, str):
            gain = None if self.gain is None else read_floats(weights, self.gain)
        else:
            gain = torch.stack([read_floats(weights, name) for name in self.gain])
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
    shape: tuple[int, ...]  # as stored
    rows: Runs
    bias: str | None = None
    transposed: bool = False  # stored (in, out)
    columns: tuple[int, ...] | None = None
    inner: NormLayout | None = None  # a norm over all rows at once, after the map
    inner_blocks: int = 1  # over each of so many runs of the rows
    shift: VectorLayout | None = None  # added apart from the bias
    factors: VectorLayout | None = None  # of each row, bias and shift included
    axes: int = 1  # how many axes of the stored tensor are flattened into the first of two
    latent: MapLayout | None = None  # a map in front of this one
    latent_norm: NormLayout | None = None  # between the two

    def picked(self, places: Sequence[int]) -> MapLayout:
        """The same with these of its rows."""
        inner = None if self.inner is None else self.inner.picked(places)
        shift, factors = (None if x is None else x.picked(places) for x in (self.shift, self.factors))
        return replace(self, rows=picked(self.rows, places), inner=inner, shift=shift, factors=factors)

    def within_heads(self, heads: int, order: Sequence[int]) -> MapLayout:
        """The same with each head's rows put in `order`; rows that `order` leaves out are dropped."""
        size = count(self.rows) // heads
        runs = per_head(runs_of(order), heads, size)
        if self.rows == (range(heads * size),) and self.inner is None and self.shift is None and self.factors is None:
            return replace(self, rows=runs)
        return self.picked(numbers_in(runs))

    def maps(self, weights: Weights) -> Reads:
        """What its matrix is read from."""
        yield self.weight, None if self.transposed or self.axes > 1 else self._rows().ranges
        if self.latent is not None:
            yield from self.latent.maps(weights)

    def vectors(self, weights: Weights) -> Reads:
        """What `build` reads: where a norm is inside and something is added, the matrices too."""
        if self.bias is not None:
            yield self.bias, self._rows().ranges
        yield from ((x.name, None) for x in (self.shift, self.factors) if x is not None)
        for norm in (self.inner, self.latent_norm):
            yield from () if norm is None else norm.vectors(weights)
        if self.latent is not None:
            yield from self.latent.vectors(weights)
        if self._adds():
            yield from self.maps(weights)

    def _adds(self) -> bool:
        """Whether a bias of it depends on its matrices."""
        parts, norms = [part for part in (self, self.latent) if part is not None], (self.inner, self.latent_norm)
        inside = self.latent is not None or self.inner is not None
        biased = any(part.bias is not None or part.shift is not None for part in parts)
        return inside and (biased or any(norm is not None and norm.bias is not None for norm in norms))

    def build(self, weights: Weights, before: Norm) -> Projection:
        """The map of these weights; `before` is the norm of the stream that it reads."""
        plain = self._plain(weights)
        if self.latent is not None:
            down = self.latent.build(weights, before)
            if self.latent_norm is None:
                return _product(plain, down)
            return normed(down, self.latent_norm.build(weights), before, up=plain)
        if self.inner is None:
            return plain
        return normed(plain, self.inner.build(weights), before, blocks=self.inner_blocks)

    def _plain(self, weights: Weights) -> Projection:
        rows, bias = self._rows(), None
        if self.bias is not None:
            bias = read_floats(weights, self.bias, rows.ranges)
            bias = bias if rows.places is None else bias[rows.places]
        if self.shift is not None:
            shift = self.shift.build(weights)
            bias = shift if bias is None else upcast(bias) + shift
        shape = (count(self.rows), self.width)
        read = self._reader(weights, rows)
        if self.factors is None:
            return Projection(read, shape, bias)
        factors = self.factors.build(weights)  # a product of two 16-bit numbers is no 16-bit number
        return Projection(lambda: upcast(read()) * factors[:, None], shape, None if bias is None else bias * factors)

    @property
    def width(self) -> int:
        """Of what it reads."""
        return math.prod(self.shape[: self.axes] if self.transposed else self.shape[self.axes :])

    def _rows(self) -> _Rows:
        stored = self.shape[self.axes :] if self.transposed else self.shape[: self.axes]
        return _Rows.of(self.rows, math.prod(stored))

    def _reader(self, weights: Weights, rows: _Rows) -> Callable[[], Tensor]:
        """What reads the map when it is needed, and ranges of its rows where it is a file's. A live model has it in
        memory already, and may have to merge adapters or gather shards for it: it is read there once, as a whole.
        """
        if self.transposed or self.axes > 1 or self.columns is not None or len(self.shape) != 2:
            return lambda: self._matrix(weights, rows)
        stored: Callable[[], Tensor] = StoredRows(partial(read_floats, weights, self.weight), rows.ranges)
        if isinstance(weights, ModuleWeights):
            stored = partial(read_floats, weights, self.weight, rows.ranges)
        return stored if rows.places is None else PickedRows(stored, rows.places)

    def _matrix(self, weights: Weights, rows: _Rows) -> Tensor:
        if self.transposed or self.axes > 1:
            matrix = read_floats(weights, self.weight).flatten(0, self.axes - 1).flatten(1)
            matrix = rows.take(matrix.mT if self.transposed else matrix)
        else:
            matrix = read_floats(weights, self.weight, rows.ranges)
            matrix = (matrix if rows.places is None else matrix[rows.places]).flatten(1)
        return matrix if self.columns is None else matrix[:, list(self.columns)]


@dataclass(frozen=True)
class JoinedLayout:
    """Rows of several maps of one stream."""

    parts: tuple[MapLayout, ...]
    places: Runs  # over the rows of all parts, one after the other
    heads: int  # the rows are those of so many heads

    def picked(self, places: Sequence[int]) -> JoinedLayout:
        """The same with these of its rows."""
        return replace(self, places=picked(self.places, places))

    def within_heads(self, heads: int, order: Sequence[int]) -> JoinedLayout:
        """The same with each head's rows put in `order`."""
        return self.picked(numbers_in(per_head(runs_of(order), heads, count(self.places) // heads)))

    def maps(self, weights: Weights) -> Reads:
        """What its matrix is read from."""
        for part in self.parts:
            yield from part.maps(weights)

    def vectors(self, weights: Weights) -> Reads:
        """What `build` reads."""
        for part in self.parts:
            yield from part.vectors(weights)

    def build(self, weights: Weights, before: Norm) -> Projection:
        """The map of these weights; `before` is the norm of the stream that it reads."""
        shared = self._shared()
        if shared is None:
            return joined_maps(
                [part.build(weights, before) for part in self.parts], torch.tensor(numbers_in(self.places))
            )
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
        order = shared_in_front(front, own, self.heads, front_first=plain[0] == 0)
        return (front, own) if own.latent_norm is not None and numbers_in(self.places) == order else None


def shared_in_front(front: MapLayout, own: MapLayout, heads: int, front_first: bool = True) -> list[int]:
    """Places of the rows of two maps joined, those of `front` in front of each head's own; of the maps themselves
    `front` comes first, or last.
    """
    first, size = count(front.rows), count(own.rows) // heads
    start, behind = (0, first) if front_first else (heads * size, 0)
    shared = range(start, start + first)
    return [
        place for head in range(heads) for place in (*shared, *range(behind + head * size, behind + (head + 1) * size))
    ]


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
