"""What sets a tensor apart from that of the base, summed block by block while both are read.

D is the difference W - B of a tensor W of the model and B of the base.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.commands.doctor.pairs import ROUNDING, Pair
from locater.commands.doctor.tensors import GROUP, probes

RANK_PROBES = 80  # random vectors that D is met by: ranks up to 64 show
HIGHEST_RANK = 64
WINDOW = 8  # directions among which the last of a low rank is looked for
# mean square of the error of rounding to a dtype, as a share of the mean square of the numbers
ROUNDING_NOISE = {"bfloat16": 2.4e-6, "float16": 4e-8}
MANY_ROWS, FEW_PROBES = 65_536, 24
TINY = 1e-6  # squares of a group, as a share of the base's: sums of products say nothing below it


class Differ:
    """Sums over D of one tensor, block by block."""

    def __init__(self, pair: Pair, shape: tuple[int, ...]) -> None:
        self.pair, self.width = pair, math.prod(shape[1:])
        rows = shape[0] if shape else 1
        self.count = RANK_PROBES if rows <= MANY_ROWS else FEW_PROBES
        wide = min(rows, self.width) >= 16
        self.gram = torch.zeros(self.count, self.count, dtype=torch.float64) if wide else None
        self.dtypes: set[str] = set()
        self._sums = dict.fromkeys(("dot", "own", "base", "delta", "ed", "ee"), 0.0)
        self._rows = 0
        self._expected: Tensor | None = None

    def add(
        self, stored: Tensor, base_stored: Tensor, x: Tensor, b: Tensor, same: bool, expected: Tensor | None
    ) -> None:
        """Rows of both as they are stored, and as float matrices; and what the adapter adds to them."""
        pair, sums = self.pair, self._sums
        if expected is not None and self.width > 1:
            self._add_expected(expected)
        pair.same_dtype = stored.dtype == base_stored.dtype
        x, b = (x, b) if x.dtype == b.dtype else (x.double(), b.double())
        same = same or (not pair.same_dtype and torch.equal(x, b))
        own_square = _square(x)
        sums["own"] += own_square
        if same:
            for key in ("dot", "base"):
                sums[key] += own_square
            if expected is not None:
                sums["ee"] += _square(expected)
            pair.groups += x.numel() // GROUP
            return
        pair.equal = False
        d = x - b
        delta, base = _square(d), _square(b)
        pair.cast &= pair.same_dtype and delta <= ROUNDING["bfloat16"] ** 2 * base and _is_cast(x, b)
        sums["base"] += base
        sums["delta"] += delta
        sums["dot"] += _dot(x, b)
        pair.delta_sum += float(d.sum(1).sum(dtype=torch.float64))
        if expected is not None:
            sums["ee"] += _square(expected)
            sums["ed"] += _dot(d, expected)
        self.dtypes |= {str(t.dtype).removeprefix("torch.") for t in (stored, base_stored)}
        types = (*(str(t.dtype).removeprefix("torch.") for t in (stored, base_stored)), pair.stored)
        limit = max(ROUNDING.get(t, 0.0) for t in types)
        if pair.cast or (not pair.same_dtype and delta <= (limit**2) * base):
            return
        if self.gram is not None:
            y = (d.float() @ probes(self.width, self.count)).double()
            self.gram += y.mT @ y
        if self.width >= GROUP:
            self._look_at_groups(x, b, d)

    def _add_expected(self, expected: Tensor) -> None:
        """Its part of R^T E R."""
        rows = self.pair.numbers // self.width
        part = probes(rows)[self._rows : self._rows + len(expected)].mT @ (expected.float() @ probes(self.width))
        self._expected = part if self._expected is None else self._expected + part
        self._rows += len(expected)

    def _look_at_groups(self, x: Tensor, b: Tensor, d: Tensor) -> None:
        """Each group of numbers by its sums: of b, of d = x - b, and of the products of both."""
        pair, cut = self.pair, self.width // GROUP * GROUP
        x, b, d = (t[:, :cut].reshape(-1, GROUP) for t in (x, b, d))
        ones = torch.ones(GROUP, dtype=d.dtype)
        squares = d.square()
        bb, db, dd = b.square() @ ones, (d * b) @ ones, squares @ ones
        tiny = 1e-30
        factor_less_1 = db / bb.clamp_min(tiny)
        xx = (bb + 2 * db + dd).clamp_min(tiny)
        beside = (dd - db * factor_less_1).clamp_min(0) / xx
        odd = (factor_less_1.abs() > 0.12) & (beside < 0.05) & (bb > 0)
        lost = odd & (xx < TINY * bb)
        if bool(lost.any()):  # zeros are a lost scale, and other numbers that are far too small are not
            odd[lost] = ~x[lost].any(1)
        shifted = ((d @ ones).square() > 0.85 * GROUP * dd) & (dd > 0.1 * bb)
        shifted &= ~odd
        pair.groups += len(d)
        pair.odd_groups += int(odd.sum())
        if pair.odd_groups:
            pair.zero_groups += int((~x[odd].any(1)).sum())
        pair.shifted_groups += int(shifted.sum())
        pair.odd_delta += float(dd[odd].sum(dtype=torch.float64))
        pair.shifted_delta += float(dd[shifted].sum(dtype=torch.float64))
        pair.changed_groups += int((dd > 0).sum())
        fourth = GROUP * (squares.square_() @ ones) / dd.square()  # where nothing changed it is NaN
        pair.kurtosis += float(fourth.nan_to_num(0.0, 0.0, 0.0).sum(dtype=torch.float64))

    def done(self) -> None:
        pair, sums = self.pair, self._sums
        pair.dot, pair.delta = sums["dot"], math.sqrt(sums["delta"])
        pair.size, pair.base_size = math.sqrt(sums["own"]), math.sqrt(sums["base"])
        pair.expected, pair.expected_dot = math.sqrt(sums["ee"]), sums["ed"]
        pair.expected_signature = None if self._expected is None else self._expected.flatten()
        if self.gram is not None and pair.changed and bool(self.gram.isfinite().all()):
            values = torch.linalg.eigvalsh(self.gram).flip(0).clamp_min(0)
            total = float(values.sum())
            if total > 0:
                pair.shares = [round(float(x) / total, 6) for x in values[:16]]
                most = min(self.width, pair.numbers // max(self.width, 1))
                noise = max(ROUNDING_NOISE.get(x, 1e-12) for x in self.dtypes) * sums["own"]
                pair.rank = low_rank(values, most, noise / sums["delta"])


def low_rank(values: Tensor, most: int, noise: float = 0.0) -> int | None:
    """The rank of a map from the squared singular values of its sketch, largest first; None where it is not low.

    Behind a low rank there is no more than the `noise` of rounding, as a share of all squares.

    >>> low_rank(torch.tensor([9.0, 4.0, 1e-4, 9e-5, 8e-5, 8e-5]), 64, 1e-4), low_rank(torch.linspace(6, 1, 6), 64)
    (2, None)
    """
    shares = values / values.sum()
    tails = shares.flip(0).cumsum(0).flip(0)  # from each on
    limit = 2 * noise + 1e-7
    below = (tails[1:] <= limit).nonzero().flatten()
    if not len(below):
        return None
    gaps = shares[:-1] / shares[1:].clamp_min(1e-14)
    first = int(below[0])
    rank = first + int(gaps[first : first + WINDOW].argmax()) + 1  # where the gap is, near where the noise begins
    known = rank <= min(HIGHEST_RANK, max(1, most // 2)) and float(gaps[rank - 1]) >= 2 and float(tails[rank]) < 0.2
    return rank if known else None


def _is_cast(x: Tensor, b: Tensor) -> bool:
    """Whether one is the other, rounded to a type of 16 bits: what float32 keeps of it."""
    return any(torch.equal(u, v.to(t).to(v)) for t in (torch.float16, torch.bfloat16) for u, v in ((x, b), (b, x)))


def _dot(x: Tensor, y: Tensor) -> float:
    """The inner product, by rows: a sum over a whole block would round more."""
    rows = torch.linalg.vecdot(x, y) if x is not y else torch.linalg.vector_norm(x, dim=1).square()
    return float(rows.sum(dtype=torch.float64))


def _square(x: Tensor) -> float:
    return _dot(x, x)
