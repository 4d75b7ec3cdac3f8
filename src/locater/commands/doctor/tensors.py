"""What doctor takes from each tensor while it is read once, in blocks of rows: facts, and small sketches.

A sketch is the product with fixed random vectors, the same for every tensor of that width: S = W R, with R (d, PROBES).
Rows of two tensors that are equal, scaled or in another order show in their sketches, and so do copies of a tensor.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from typing import NamedTuple

import torch
from torch import Tensor

from locater.sources.weights import ModuleWeights, Rows, Weights, take_rows

PROBES = 8
BLOCK = 2**19  # numbers that are looked at together: in float32 they stay in the cache of a core
READ = 2**22  # numbers that are read together
SAMPLE = 65_536  # numbers from which the distribution is judged
QUARTILES = 16_384  # of these, for quartiles
LEVELS = 512  # groups of numbers whose distinct values are counted, in each piece that is read
GROUP = 32  # numbers that share a scale in common formats of quantised weights
KEPT = 65_536  # numbers of a vector that is kept as it is
WILD = 1e4  # a number that no weight of a trained model comes near
EMBEDDINGS = ("embed_tokens.weight", "word_embeddings.weight", "wte.weight", "embed_in.weight")
HOLD_AT_ONCE = 2**25  # numbers of a map that is kept until its layer is done
HELD = 2**27  # bytes of maps that stay in memory until their layer is done


@lru_cache(maxsize=64)
def probes(width: int, count: int = PROBES) -> Tensor:
    """Fixed random vectors of standard normal numbers, (width, count)."""
    generator = torch.Generator().manual_seed(width * 1009 + count)
    return torch.randn(width, count, generator=generator)


class Place(NamedTuple):
    """Where a tensor belongs: `model.layers.3.mlp.up_proj.weight` is (model.layers, 3, mlp.up_proj.weight)."""

    stack: str
    layer: int | None
    kind: str


NUMBER = re.compile(r"^(?P<stack>.*?)\.?(?:(?<=\.)|^)(?P<layer>\d{1,6})\.(?P<kind>.+)$")


def place_of(name: str) -> Place:
    """The stack, layer and kind of a tensor.

    >>> place_of("model.layers.3.mlp.up_proj.weight")
    Place(stack='model.layers', layer=3, kind='mlp.up_proj.weight')
    >>> place_of("lm_head.weight").layer is None
    True
    """
    match = NUMBER.match(name)
    if match is None:
        return Place("", None, name)
    return Place(match["stack"], int(match["layer"]), match["kind"])


@dataclass
class Facts:
    """One tensor. Norms are root mean squares; `signature` is R^T W R, (PROBES, PROBES), flattened."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    numbers: int = 0
    bytes: int = 0
    nan: int = 0
    inf: int = 0
    least: float = math.inf
    most: float = -math.inf
    mean: float = 0.0
    rms: float = 0.0
    spread: float = 0.0  # between the quartiles of log2 |x|: 1.9 for normal numbers
    inner_spread: float = 0.0  # the same among 32 neighbours, the median: no scales of rows are in it
    zeros: float = 0.0  # share of the numbers
    mantissa: float = 23.0  # bits that all but a hundredth of the numbers fit in
    wild: float = 0.0  # the same in rows with numbers that no weight comes near
    levels: float = 0.0  # median number of distinct values in groups of 32
    zero_rows: int = 0
    longest_zeros: tuple[int, int] = (0, 0)  # the longest run of zero rows
    row_ratio: float = 1.0  # largest root mean square of a row over the median
    row_at: int = 0
    signature: Tensor | None = field(default=None, repr=False)
    values: Tensor | None = field(default=None, repr=False)  # of a vector
    file: str = ""

    @property
    def place(self) -> Place:
        return place_of(self.name)

    @property
    def largest(self) -> float:
        return max(abs(self.least), abs(self.most)) if self.numbers else 0.0

    @property
    def zero(self) -> bool:
        return self.numbers > 0 and self.largest == 0 and not self.nan

    @property
    def constant(self) -> bool:
        return self.numbers > 1 and self.least == self.most != 0 and not self.nan

    @property
    def is_map(self) -> bool:
        """A matrix, and no vector in the shape of one."""
        return len(self.shape) >= 2 and min(self.shape[0], self.numbers // max(self.shape[0], 1)) > 1

    @property
    def finite(self) -> bool:
        return not (self.nan or self.inf)


def blocks(weights: Weights, name: str) -> Iterator[tuple[int, int]]:
    """Ranges of rows with at most BLOCK numbers each."""
    shape = weights.shape(name)
    rows = shape[0] if shape else 1
    step = max(1, BLOCK // max(1, math.prod(shape[1:])))
    yield from ((start, min(start + step, rows)) for start in range(0, rows, step))


def as_matrix(tensor: Tensor) -> Tensor:
    """(rows, everything else), in float32 or float64."""
    x = tensor.detach()
    x = x if x.dtype in (torch.float32, torch.float64) else x.float()
    return x.reshape(len(x), -1) if x.ndim > 1 else x.reshape(-1, 1) if x.ndim else x.reshape(1, 1)


class Reader:
    """Reads rows of one tensor, in pieces that are larger than the blocks that are asked for, or all of it at once."""

    def __init__(self, weights: Weights, name: str, whole: bool = False) -> None:
        self.weights, self.name = weights, name
        shape = weights.shape(name)
        most = HOLD_AT_ONCE if whole else READ
        one = math.prod(shape) <= most or isinstance(weights, ModuleWeights) or not shape
        self.whole = weights.read(name).detach().cpu() if one else None
        self._rows = shape[0] if shape else 1
        self._step = max(1, READ // max(1, math.prod(shape[1:])))
        self._piece, self._start, self._stop = torch.empty(0), 0, 0

    def __call__(self, start: int, stop: int) -> Tensor:
        if self.whole is not None:
            return self.whole[start:stop] if self.whole.ndim else self.whole
        if not self._start <= start <= stop <= self._stop:
            self._piece = torch.empty(0)  # two pieces are never in memory
            self._start, self._stop = start, min(max(stop, start + self._step), self._rows)
            self._piece = self.weights.read(self.name, [(self._start, self._stop)])
        return self._piece[start - self._start : stop - self._start]


class Collector:
    """Facts and the row sketch of one tensor, block by block."""

    def __init__(self, weights: Weights, name: str) -> None:
        shape = weights.shape(name)
        self.rows = shape[0] if shape else 1
        self.width = math.prod(shape[1:])
        self.facts = Facts(name, shape, "", math.prod(shape), file=file_of(weights, name))
        self.sketch = torch.zeros(self.rows, PROBES if self.width > 1 else 1)
        self._squares, self._sum = 0.0, 0.0
        self._row_norms: list[Tensor] = []
        self._samples: list[Tensor] = []
        self._wild: list[float] = []
        self._levels: list[Tensor] = []
        self._inner: list[Tensor] = []

    def add(self, start: int, stored: Tensor) -> Tensor:
        """Look at the rows from `start` on; returns them as a float matrix, without what is not finite."""
        facts, x = self.facts, as_matrix(stored)
        facts.dtype = str(stored.dtype).removeprefix("torch.")
        facts.bytes += stored.numel() * stored.element_size()
        if not x.numel():
            return x
        low, high = (float(v) for v in torch.aminmax(x))
        finite = math.isfinite(low) and math.isfinite(high)
        if not finite or max(abs(low), abs(high)) > WILD:
            self._look_at_wild_rows(x)
        if not finite:
            facts.nan += int(x.isnan().sum())
            facts.inf += int(x.isinf().sum())
            x = x.nan_to_num(0.0, 0.0, 0.0)
            low, high = (float(v) for v in torch.aminmax(x))
        facts.least, facts.most = min(facts.least, low), max(facts.most, high)
        norms = torch.linalg.vector_norm(x, dim=1)
        self._row_norms.append(norms)
        self._squares += float(norms.double().square().sum())
        self._sum += float(x.sum(1).sum(dtype=torch.float64))
        self._sample(x)
        stop = start + len(x)
        self.sketch[start:stop] = x if self.width == 1 else (probes(self.width).mT @ x.float().mT).mT
        return x

    def _look_at_wild_rows(self, x: Tensor) -> None:
        rows = ((~x.isfinite()) | (x.abs() > WILD)).any(1).nonzero().flatten()[:64]
        for row in x[rows]:
            values = row[row.isfinite() & (row != 0)]
            if len(values) > 8:
                self._wild.append(_quartile_range(values))

    def _sample(self, x: Tensor) -> None:
        flat = x.reshape(-1)
        share = max(1, SAMPLE * len(flat) // max(self.facts.numbers, 1))
        self._samples.append(flat[:: max(1, len(flat) // share)][:share].clone())  # a view would keep its block
        if self.width >= GROUP:
            most = max(LEVELS // 8, LEVELS * len(flat) // max(1, min(self.facts.numbers, READ)))
            groups = x[:: max(1, len(x) * 8 // most), : self.width // GROUP * GROUP].reshape(-1, GROUP)[:most]
            groups = groups[groups.any(1)]
            self._levels.append((groups.sort(-1).values.diff(dim=-1) != 0).sum(-1) + 1)
            sizes = groups.abs().sort(-1).values
            sizes = sizes[sizes[:, 0] > 0]
            self._inner.append(sizes[:, 3 * GROUP // 4].log2() - sizes[:, GROUP // 4].log2())

    def done(self) -> tuple[Facts, Tensor]:
        """The facts, and the sketch (rows, PROBES)."""
        facts = self.facts
        count = max(facts.numbers, 1)
        facts.mean, facts.rms = self._sum / count, math.sqrt(self._squares / count)
        if self._samples:
            sampled = torch.cat(self._samples)
            values = sampled[sampled != 0]
            facts.zeros = 1 - len(values) / max(1, len(sampled))
            facts.spread = _quartile_range(values) if len(values) > 8 else 0.0
            facts.mantissa = _mantissa_bits(values) if len(values) > 8 else 23.0
        facts.wild = sorted(self._wild)[len(self._wild) // 2] if self._wild else 0.0
        if sum(map(len, self._levels)):
            facts.levels = float(torch.cat(self._levels).median())
        if sum(map(len, self._inner)):
            facts.inner_spread = float(torch.cat(self._inner).median())
        if self._row_norms and self.width > 1:
            self._of_rows(torch.cat(self._row_norms))
        if self.width > 1:
            facts.signature = (probes(self.rows).mT @ self.sketch).flatten()
        elif self.rows <= KEPT:
            facts.values = self.sketch.flatten().clone()
        return facts, self.sketch

    def _of_rows(self, norms: Tensor) -> None:
        facts = self.facts
        zeros = norms == 0
        facts.zero_rows = int(zeros.sum())
        facts.longest_zeros = _longest_run(zeros)
        middle = float(norms[~zeros].median()) if not bool(zeros.all()) else 0.0
        if middle:
            facts.row_ratio, facts.row_at = float(norms.max()) / middle, int(norms.argmax())


def _quartile_range(values: Tensor) -> float:
    """Distance between the quartiles of log2 |x|, which a few scaled rows do not change."""
    sizes = values[:: 1 + len(values) // QUARTILES].abs()
    low, high = (float(sizes.kthvalue(1 + round(share * (len(sizes) - 1))).values) for share in (0.25, 0.75))
    return math.log2(high) - math.log2(low)


def _mantissa_bits(values: Tensor) -> float:
    """Bits of mantissa, the leading one aside, that 99 of 100 numbers fit in.

    >>> _mantissa_bits(torch.tensor([1.0, 1.5, 0.75, 3.0]))
    1.0
    """
    bits = values[:: 1 + len(values) // QUARTILES].float().contiguous().view(torch.int32) & 0x7FFFFF
    lowest = (bits & -bits).double().clamp_min(1).log2()  # of the bits that are set
    used = torch.where(bits == 0, torch.zeros_like(lowest), 23 - lowest)
    return float(used.kthvalue(max(1, math.ceil(0.99 * len(used)))).values)


def _longest_run(marks: Tensor) -> tuple[int, int]:
    """The longest run of True, as (start, stop).

    >>> _longest_run(torch.tensor([True, False, True, True]))
    (2, 4)
    """
    if not bool(marks.any()):
        return (0, 0)
    edges = torch.diff(torch.nn.functional.pad(marks.int(), (1, 1)))
    starts, stops = (edges == 1).nonzero().flatten(), (edges == -1).nonzero().flatten()
    best = int((stops - starts).argmax())
    return int(starts[best]), int(stops[best])


def file_of(weights: Weights, name: str) -> str:
    """The file that holds a tensor, where the source has several."""
    entries = getattr(weights, "_entries", None)
    return "" if not entries or name not in entries else str(getattr(entries[name][0], "name", entries[name][0]))


class HeldWeights:
    """Weights whose maps of the current layer stay in memory: heads are looked at without reading them again."""

    def __init__(self, weights: Weights) -> None:
        self.where = weights.where
        self.weights = weights
        self.held: dict[str, Tensor] = {}
        self.room = HELD

    def names(self) -> object:
        return self.weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self.weights.shape(name)

    def hold(self, name: str, tensor: Tensor) -> None:
        """Keep a tensor that was read as a whole, where there is room."""
        size = tensor.numel() * tensor.element_size()
        if size <= self.room:
            self.held[name], self.room = tensor, self.room - size

    def release(self) -> None:
        self.held.clear()
        self.room = HELD

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self.held.get(name)
        return self.weights.read(name, rows) if tensor is None else take_rows(tensor, rows)

    def __getattr__(self, name: str) -> object:
        if name == "weights":  # not yet there, while a copy is made
            raise AttributeError(name)
        return getattr(self.weights, name)
