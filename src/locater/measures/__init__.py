"""Measures of hidden states: how alike tokens are, how many directions they use, what sticks out, how normal they are.

Hidden states are (batch, tokens, width). `real` marks tokens that are not padding; padding does not count, whatever it
holds. Everything is computed and returned in float64, whatever the precision of x: near collapse the answer is a small
difference of large numbers. A value that does not exist (no tokens, a zero matrix, something infinite among the real
tokens) is NaN.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from locater.errors import LocaterError
from locater.numerics import one_thread, upcast

NOISE = 1e-14  # of a channel: a token closer to the mean than this differs from it by the rounding of the mean alone
MASSIVE, MASSIVE_RATIO = 100.0, 1000.0  # Sun et al. 2024
CENTRES = ("mean", "midrange", "svd")
BLOCK = 4096  # tokens that are upcast at a time where the float64 copy of all of them is not needed

Sequences = Float[Tensor, "batch tokens width"]
Real = Bool[Tensor, "batch tokens"]
PerSequence = Float[Tensor, "batch"]
PerChannel = Float[Tensor, "width"]
Scalar = Float[Tensor, ""]
Place = Int[Tensor, "batch"]
Verdict = Bool[Tensor, "batch"]


# --- how alike the tokens are -----------------------------------------------------------------------------------------


def composite_norm(x: Float[Tensor, "*n tokens width"]) -> Float[Tensor, "*n"]:
    """sqrt(||X||_1 ||X||_inf), the root of the largest column abs-sum times the largest row abs-sum (Dong, Cordonnier,
    Loukas 2021).

    Homogeneous and sub-multiplicative, and no norm: it breaks the triangle inequality, which each of its two factors
    obeys.

    >>> row, column = torch.tensor([[1.0, 1.0], [0.0, 0.0]]), torch.tensor([[1.0, 0.0], [1.0, 0.0]])
    >>> [round(composite_norm(x).item() ** 2, 6) for x in (row, column, row + column)]          # sqrt 2 + sqrt 2 < 3
    [2.0, 2.0, 9.0]
    """
    top = x.double().abs().amax((-2, -1))
    return _composite(_scaled(x.double(), (-2, -1))) * top


def token_residual(
    x: Float[Tensor, "*n tokens width"], real: Bool[Tensor, "*n tokens"] | None = None, centre: str = "mean"
) -> Float[Tensor, "*n tokens width"]:
    """What is left of X once the part that all tokens share is taken out; padding is 0. `centre` says which part.

    "mean": 1 v^T, v the mean over tokens. Whatever v is best for `composite_norm`, the mean is at most 2 (1 - 1/n)
    times worse. "midrange": 1 v^T, v halfway between the least and the largest of each channel, the best v for the
    largest entry. "svd": the closest matrix of rank one, in which tokens share a direction and not a length.

    >>> x = torch.tensor([[0.0, 1.0], [0.0, 1.0], [3.0, 1.0]])
    >>> [token_residual(x, centre=name)[:, 0].tolist() for name in ("mean", "midrange")]
    [[-1.0, -1.0, 2.0], [-1.5, -1.5, 1.5]]
    >>> bool(token_residual(torch.tensor([[1.0, 2.0], [3.0, 6.0]]), centre="svd").abs().max() < 1e-14)
    True
    """
    if centre not in CENTRES:
        raise LocaterError(f"centre={centre!r} is not known: use one of {', '.join(CENTRES)}")
    x, keep = _filled(x, real)
    without = {"mean": _centred, "midrange": _without_midrange, "svd": _without_first}[centre]
    return without(x, keep)


def rank_residual(x: Sequences, real: Real | None = None, norm: str = "composite", centre: str = "mean") -> PerSequence:
    """||X - 1 mean^T|| / ||X||: the distance from all tokens being equal. 0 is rank collapse (Dong, Cordonnier, Loukas
    2021).

    `norm` is "composite", sqrt(max column abs-sum * max row abs-sum) with tokens as rows, which is what their figures
    show, or "frobenius", whose square is one minus the share of the mean in the energy. The paper subtracts the closest
    1 v^T; its figure code the mean over tokens, as here, which is closest in the Frobenius norm only. Other centres:
    `token_residual`.

    >>> x = torch.tensor([[[3.0, 1.0], [1.0, 1.0]]])          # mean (2, 1), residual [[1, 0], [-1, 0]]
    >>> round(rank_residual(x).item() ** 2, 6), round(rank_residual(x, norm="frobenius").item() ** 2, 6)
    (0.125, 0.166667)
    """
    if norm not in ("composite", "frobenius"):
        raise LocaterError(f"norm={norm!r} is not known: use 'composite' or 'frobenius'")
    size = _composite if norm == "composite" else _frobenius
    x, keep = _clean(x, real)
    return size(token_residual(x, keep, centre)) / size(x)


def token_cosine(x: Sequences, real: Real | None = None, centred: bool = False) -> PerSequence:
    """Mean cosine over pairs of distinct tokens (Shi et al. 2022), from the sum of the n unit vectors: (|sum u|^2 - n)
    / (n (n - 1)).

    1 when all tokens point the same way, 0 when pairs are orthogonal on average, never below -1 / (n - 1). A large
    common mean alone takes it near 1; `centred` subtracts the mean over tokens first and asks about the rest. Tokens
    without a direction (zero, or at the mean when centred) do not count; NaN where fewer than two are left.

    >>> token_cosine(torch.tensor([[[1.0, 0.0], [5.0, 0.0], [0.0, 2.0]]])).item()          # cosines 1, 0, 0
    0.3333333333333333
    """
    x, keep = _clean(x, real)
    x = _scaled(_centred(x, keep) if centred else x, (-1,))
    norm = torch.linalg.vector_norm(x, dim=-1, keepdim=True)  # at least 1 after scaling, or 0
    total = (x / norm.clamp_min(1)).sum(-2).square().sum(-1)
    n = (norm > 0).sum((-2, -1))
    return torch.where(n > 1, (total - n) / (n * (n - 1)), math.nan)


# --- how many directions they use -------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Ranks:
    """Three answers to how many directions a matrix with singular values s uses. 0 for a zero matrix."""

    stable: Float[Tensor, "*n"]  # sum s^2 / max s^2
    effective: Float[Tensor, "*n"]  # exp of the entropy of s / sum s
    numerical: Float[Tensor, "*n"]  # how many s > tolerance * max s; a float, so that NaN can be said
    # s, largest first, as they came: those that count as zero above are still in it
    singular_values: Float[Tensor, "*n D"]


def singular_values(gram: Float[Tensor, "*n D D"]) -> Float[Tensor, "*n D"]:
    """Singular values of X from its Gram matrix X X^T or X^T X, largest first.

    A Gram matrix squares the condition number: values below sqrt(D eps) of the largest, eps being the rounding of
    `gram` (1.5e-8 sqrt(D) in float64, 3.5e-4 sqrt(D) in float32), are rounding, whatever precision the decomposition
    has.

    >>> singular_values(torch.diag(torch.tensor([4.0, 9.0]))).tolist()
    [3.0, 2.0]
    """
    return _eigenvalues(gram).clamp_min(0).sqrt()


def ranks_of_gram(gram: Float[Tensor, "*n D D"], tolerance: float | None = None) -> Ranks:
    """Stable, effective and numerical rank of X from its Gram matrix.

    Effective rank is that of Roy and Vetterli (2007), on s / sum s. The variant on s^2 / sum s^2, the von Neumann
    entropy of gram / tr(gram), is never larger, and nearer to the stable rank. Singular values under the floor sqrt(D
    eps) of `singular_values` are taken as zero, and the floor is the default tolerance: no smaller one can be kept.

    >>> ranks = ranks_of_gram(torch.diag(torch.tensor([4.0, 1.0, 1.0, 0.0])))          # s = 2, 1, 1, 0
    >>> ranks.stable.item(), round(ranks.effective.item() ** 2, 6), ranks.numerical.item()
    (1.5, 8.0, 3.0)
    """
    eps = torch.finfo(upcast(gram).dtype).eps
    floor = torch.tensor(math.sqrt(gram.shape[-1] * eps), dtype=torch.float64, device=gram.device)
    return _ranks(singular_values(gram), floor, floor if tolerance is None else torch.full_like(floor, tolerance))


def ranks(x: Sequences, real: Real | None = None, centred: bool = False, tolerance: float | None = None) -> Ranks:
    """Ranks of every sequence's (tokens, width) matrix, from the smaller of its two Gram matrices.

    The Gram matrix is float64, so singular values down to 1.5e-8 sqrt(min(tokens, width)) of the largest are seen. The
    default tolerance is the usual max(tokens, width) eps, eps that of x, which is above this floor for float32; for
    float64 the floor stands in. Half precision is judged as float32: its own rounding then counts as rank, so give a
    tolerance. `centred` leaves out the mean over tokens, which otherwise tends to be the first direction.

    >>> x = torch.tensor([[[1.0, 2.0, 0.0], [2.0, 4.0, 0.0]]])
    >>> ranks(x).numerical.item(), round(ranks(x).stable.item(), 6), round(ranks(x).effective.item(), 6)
    (1.0, 1.0, 1.0)
    """
    eps = torch.finfo(upcast(x).dtype).eps
    x, keep = _filled(x, real)
    size = x.abs().amax((-2, -1)).unsqueeze(-1)
    x = _scaled(x, (-2, -1))
    x = _centred(x, keep) if centred else x
    tokens, width = x.shape[-2:]
    found = singular_values(x @ x.mT if tokens <= width else x.mT @ x)
    n = keep.sum(-1)
    floor = (n.clamp_max(width) * torch.finfo(torch.float64).eps).sqrt()
    usual = n.clamp_min(width) * eps if tolerance is None else torch.full_like(floor, tolerance)
    found = found.masked_fill((n == 0).unsqueeze(-1), math.nan)
    return replace(_ranks(found, floor, usual), singular_values=found * size)


# --- what sticks out --------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Massive:
    """The largest entry of each sequence beside its median. token and channel are -1 where there is no token."""

    top: PerSequence
    median: PerSequence
    ratio: PerSequence
    token: Place
    channel: Place
    is_massive: Verdict


def massive_activations(x: Sequences, real: Real | None = None) -> Massive:
    """Largest |x| and median |x| over tokens and channels, and whether the first is massive: > 100 and >= 1000 medians
    (Sun et al. 2024).

    Of an even number of entries the median is the lower middle one. Widths and precisions differ: compare ratios.

    >>> x = torch.ones(1, 3, 4)
    >>> x[0, 2, 1] = -1500
    >>> found = massive_activations(x)
    >>> found.ratio.item(), found.token.item(), found.channel.item(), found.is_massive.item()
    (1500.0, 2, 1, True)
    """
    width = x.shape[-1]
    size = upcast(x).abs()
    absent = torch.zeros_like(x[..., 0], dtype=torch.bool) if real is None else ~real
    top, where = size.masked_fill(absent.unsqueeze(-1), -1).flatten(-2).max(-1)  # max, like amax, lets NaN through
    median = size.masked_fill(absent.unsqueeze(-1), math.nan).flatten(-2).nanmedian(-1).values.double()
    empty = absent.all(-1)
    top = top.double().masked_fill(empty, math.nan)
    return Massive(
        top=top,
        median=median,
        ratio=top / median,
        token=(where // width).masked_fill(empty, -1),
        channel=(where % width).masked_fill(empty, -1),
        is_massive=(top > MASSIVE) & (top >= MASSIVE_RATIO * median),
    )


# --- the mean, and how normal the rest is -----------------------------------------------------------------------------


@dataclass(frozen=True)
class ChannelMoments:
    """Mean and central moments of every channel, over tokens that come in parts; a part is added without looking back.

    Kept as sums of powers of x - mean and joined by the formulas of Pébay (2008). Sums of x^2, x^3, x^4 would be
    simpler and lose every digit of the kurtosis once a channel's mean is 10,000 times its spread, as it is where
    activations are massive.

    >>> parts = torch.tensor([[0.0], [2.0]]), torch.tensor([[10.0]])
    >>> seen = ChannelMoments.empty(1)
    >>> for part in parts:
    ...     seen = seen.add(part)
    >>> seen.mean.item(), seen.second.item(), round(seen.excess_kurtosis.item(), 6)
    (4.0, 56.0, -1.5)
    """

    count: Scalar
    mean: PerChannel
    second: PerChannel  # sum (x - mean)^2
    third: PerChannel
    fourth: PerChannel

    @classmethod
    def empty(cls, width: int, device: torch.device | str | None = None) -> ChannelMoments:
        """Of no tokens yet."""
        return cls.of(torch.zeros(0, width, device=device))

    @classmethod
    def of(cls, x: Float[Tensor, "*tokens width"], real: Bool[Tensor, "*tokens"] | None = None) -> ChannelMoments:
        """Of the tokens of x that are real."""
        keep = (torch.ones_like(x[..., 0], dtype=torch.bool) if real is None else real).reshape(-1, 1)
        # masked, not selected: selecting would stop a GPU
        x = x.reshape(-1, x.shape[-1]).masked_fill(~keep, 0).double()
        count = keep.sum().double()
        mean = x.sum(0) / count.clamp_min(1)
        rest = (x - mean).masked_fill(~keep, 0)
        square = rest.square()
        return cls(count, mean, square.sum(0), (square * rest).sum(0), square.square().sum(0))

    def add(self, x: Float[Tensor, "*tokens width"], real: Bool[Tensor, "*tokens"] | None = None) -> ChannelMoments:
        """With more tokens."""
        return self.merge(ChannelMoments.of(x, real))

    def merge(self, other: ChannelMoments) -> ChannelMoments:
        """Of both sets of tokens."""
        n = (self.count + other.count).clamp_min(1)
        a, b = self.count / n, other.count / n
        gap = other.mean - self.mean
        between = n * a * b * gap**2  # what the distance of the two means adds to the second sum
        third = between * gap * (a - b) + 3 * gap * (a * other.second - b * self.second)
        fourth = (
            between * gap**2 * (a**2 - a * b + b**2)
            + 6 * gap**2 * (a**2 * other.second + b**2 * self.second)
            + 4 * gap * (a * other.third - b * self.third)
        )
        return ChannelMoments(
            self.count + other.count,
            self.mean + b * gap,
            self.second + other.second + between,
            self.third + other.third + third,
            self.fourth + other.fourth + fourth,
        )

    @property
    def mean_share(self) -> Scalar:
        """|mean|^2 / E|x|^2: the part of the energy that is the same for all tokens. NaN for no tokens or no energy."""
        energy = self.mean.square().sum()
        return torch.where(self.count > 0, energy / (energy + self.second.sum() / self.count), math.nan)

    @property
    def excess_kurtosis(self) -> PerChannel:
        """E(x - mean)^4 / (E(x - mean)^2)^2 - 3 per channel: 0 if normal. NaN for a channel that does not vary."""
        constant = self.second <= self.count * (NOISE * self.mean).square()
        return (self.count * self.fourth / self.second**2 - 3).masked_fill(constant, math.nan)

    @property
    def median_kurtosis(self) -> Scalar:
        """Median excess kurtosis of the channels that vary: a few channels have huge ones, and would be all that a mean
        shows.
        """
        return self.excess_kurtosis.nanquantile(0.5)


def mean_share(x: Float[Tensor, "*tokens width"], real: Bool[Tensor, "*tokens"] | None = None) -> Scalar:
    """|mean|^2 / E|x|^2 over all tokens of all sequences; in parts: `ChannelMoments`.

    >>> mean_share(torch.tensor([[3.0, 1.0], [3.0, -1.0]])).item()
    0.9
    """
    return ChannelMoments.of(x, real).mean_share


def excess_kurtosis(x: Float[Tensor, "*tokens width"], real: Bool[Tensor, "*tokens"] | None = None) -> PerChannel:
    """Excess kurtosis of every channel over all tokens of all sequences (the biased estimate); in parts:
    `ChannelMoments`.

    >>> excess_kurtosis(torch.tensor([[1.0, 0.0], [-1.0, 0.0], [1.0, 0.0], [-1.0, 4.0]])).tolist()
    [-2.0, -0.6666666666666665]
    """
    return ChannelMoments.of(x, real).excess_kurtosis


@dataclass(frozen=True)
class Normality:
    """Kolmogorov distances over random directions, and what the mean would be for tokens that are normal."""

    mean: float
    max: float
    expected: float


def normality_distance(x: Float[Tensor, "tokens width"], projections: int = 16, seed: int = 0) -> Normality:
    """sup |F_n - Phi| of the standardised tokens along random unit directions; 0 is normal, two equal points give 0.34.

    Mean and spread are estimated, so normal tokens come closer than Kolmogorov's law says (Lilliefors 1967). `expected`
    is their mean distance, (0.6366 - 0.153 / sqrt(n) - 0.122 / n) / sqrt(n), fitted to 30,000 to 800,000 draws per n:
    within 0.2 % of them for 8 to 2,048 independent tokens, 4 % too high at 3. One direction spreads by 0.147 / sqrt(n)
    around it, and the largest of 16 independent ones has mean 0.93 / sqrt(n). Tokens of one text depend on each other,
    which is worth fewer of them. NaN under three.

    >>> found = normality_distance(torch.tensor([-1.0, 1.0]).repeat(500)[:, None])
    >>> round(found.mean, 3), round(found.expected, 4)
    (0.341, 0.02)
    """
    n, width = x.shape
    if n < 3:
        return Normality(math.nan, math.nan, math.nan)
    generator = torch.Generator().manual_seed(seed)  # drawn on the CPU: the same directions on every device
    directions = torch.randn(width, projections, generator=generator, dtype=torch.float64).to(x.device)
    directions = directions / torch.linalg.vector_norm(directions, dim=0)
    along = torch.cat([part.double() @ directions for part in x.split(BLOCK)])
    spread = along.std(0)
    spread = spread.masked_fill(spread <= NOISE * along.abs().amax(0), math.nan)
    cdf = torch.special.ndtr(((along - along.mean(0)) / spread).sort(0).values)
    # the empirical law just before each token
    below = torch.arange(n, dtype=torch.float64, device=x.device)[:, None] / n
    distance = torch.maximum(cdf - below, below + 1 / n - cdf).amax(0)
    expected = (0.6366 - 0.153 / math.sqrt(n) - 0.122 / n) / math.sqrt(n)
    return Normality(distance.mean().item(), distance.amax().item(), expected)


@dataclass(frozen=True)
class Directions:
    """Shares of E|x|^2 = |mean|^2 + tr C. `mean` and all of `principal` sum to 1; `along_mean` is the part of C on the
    mean's axis.
    """

    mean: Float[Tensor, "*n"]
    along_mean: Float[Tensor, "*n"]
    principal: Float[Tensor, "*n k"]


def top_directions(mean: Float[Tensor, "*n d"], covariance: Float[Tensor, "*n d d"], k: int) -> Directions:
    """Shares of the energy of tokens with this mean and covariance C: of the mean, and of the top k principal
    directions of C.

        mean = |m|^2 / E,   along_mean = m^T C m / (|m|^2 E),   principal_i = lambda_i(C) / E,   E = |m|^2 + tr C

    The energy on the axis of the mean is mean + along_mean, whether or not that axis is principal.

    >>> found = top_directions(torch.tensor([2.0, 0.0, 0.0]), torch.diag(torch.tensor([1.0, 4.0, 1.0])), k=1)
    >>> found.mean.item(), found.along_mean.item(), found.principal.tolist()
    (0.4, 0.1, [0.4])
    """
    if not 1 <= k <= mean.shape[-1]:
        raise LocaterError(
            f"k={k}: a width of {mean.shape[-1]} has between 1 and {mean.shape[-1]} principal directions"
        )
    m, C = mean.double(), covariance.double()
    square = m.square().sum(-1)
    energy = square + C.diagonal(dim1=-2, dim2=-1).sum(-1)
    stretch = ((C @ m.unsqueeze(-1)).squeeze(-1) * m).sum(-1)
    along = torch.where(square > 0, stretch / square, torch.zeros_like(square))
    values = _eigenvalues(C)[..., :k].clamp_min(0)
    return Directions(square / energy, along / energy, values / energy.unsqueeze(-1))


# --- parts ------------------------------------------------------------------------------------------------------------


def _scaled(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    """The largest entry along the axes becomes 1, so that no square leaves the range of float64; zeros stay."""
    top = x.abs().amax(axes, keepdim=True)
    return x / torch.where(top == 0, 1, top)


def _clean(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """x in float64 with padding at zero and the largest entry of each sequence at 1; and which tokens are real."""
    x, keep = _filled(x, real)
    return _scaled(x, (-2, -1)), keep


def _filled(x: Tensor, real: Tensor | None) -> tuple[Tensor, Tensor]:
    """x in float64 with padding at zero; and which tokens are real."""
    keep = torch.ones_like(x[..., 0], dtype=torch.bool) if real is None else real
    return x.masked_fill(~keep.unsqueeze(-1), 0).double(), keep  # filled, not multiplied: padding may be NaN


def _centred(x: Tensor, keep: Tensor) -> Tensor:
    """Real tokens less their mean; what is left of equal entries by rounding is zero, or noise would be given
    directions.
    """
    mean = x.sum(-2, keepdim=True) / keep.sum(-1).clamp_min(1)[..., None, None]
    rest = (x - mean).masked_fill(~keep.unsqueeze(-1), 0)
    return rest.masked_fill(rest.abs() <= NOISE * x.abs().amax(-2, keepdim=True), 0)


def _without_midrange(x: Tensor, keep: Tensor) -> Tensor:
    absent = ~keep.unsqueeze(-1)
    middle = (
        x.masked_fill(absent, -math.inf).amax(-2, keepdim=True) / 2
        + x.masked_fill(absent, math.inf).amin(-2, keepdim=True) / 2
    )
    return (x - middle).masked_fill(absent, 0)


def _without_first(x: Tensor, keep: Tensor) -> Tensor:
    """x less its first singular triple; NaN for a matrix that is not finite, where the solver would raise."""
    finite = x.isfinite().all(-1).all(-1)[..., None, None]
    with one_thread():
        U, s, Vh = torch.linalg.svd(x.masked_fill(~finite, 0), full_matrices=False)
    rest = (x - U[..., :, :1] * s[..., None, :1] * Vh[..., :1, :]).masked_fill(~finite, math.nan)
    return rest.masked_fill(~keep.unsqueeze(-1), 0)


def _composite(x: Tensor) -> Tensor:
    size = x.abs()
    return (size.sum(-2).amax(-1) * size.sum(-1).amax(-1)).sqrt()


def _frobenius(x: Tensor) -> Tensor:
    return torch.linalg.vector_norm(x, dim=(-2, -1))


def _eigenvalues(symmetric: Tensor) -> Tensor:
    """float64, largest first; NaN for a matrix that is not finite, where the solver would raise and take the other
    matrices along.

    In one thread: on the CPU two took 1.1 to 6 times as long at every size from 32 to 1,024.
    """
    finite = symmetric.isfinite().all(-1).all(-1).unsqueeze(-1)
    with one_thread():
        values = torch.linalg.eigvalsh(symmetric.double().masked_fill(~finite.unsqueeze(-1), 0)).flip(-1)
    return values.masked_fill(~finite, math.nan)


def _ranks(found: Tensor, floor: Tensor, tolerance: Tensor) -> Ranks:
    top = found[..., 0]
    s = (found / torch.where(top == 0, 1, top).unsqueeze(-1)).where(found > (floor * top).unsqueeze(-1), 0)
    stable = s.square().sum(-1)
    effective = torch.special.entr(s / s.sum(-1, keepdim=True)).sum(-1).exp()
    numerical = (s > tolerance.unsqueeze(-1)).sum(-1).double()
    # 0 stays 0 and NaN stays NaN
    stable, effective, numerical = (x.where(top > 0, top) for x in (stable, effective, numerical))
    return Ranks(stable, effective, numerical, found)
