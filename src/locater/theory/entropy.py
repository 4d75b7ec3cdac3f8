"""Entropy of a row of attention without computing the row, and how much of the differences between tokens it keeps.

Lower bounds, an estimate, a ratio to compare lengths (docs/theory.md section 7), and rows of normal logits exactly
(section 10). All entropies are in nats.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater.numerics import as_float64

CPU = torch.device("cpu")
STEP = 0.5  # of the sums that replace integrals, in logits: e^-e^y is so smooth that six digits are right
TOGETHER = 2**17  # numbers of a grid of variances, log t and logits or keys that are computed at a time
ON_GPU = 2**23  # the same on a GPU, 64 MiB: one large batch takes as long as a small one
LARGEST_GRID = 2**18  # numbers, 2 MiB: a grid of more is gone through in pieces of log t
GONE = 1e3  # e^-y is 0 long before
LARGEST = 225.0  # variance of logits; above it rows are nearly one-hot, and their distance from it falls as 1 / sqrt v
FAR = (15.0, 24.0, 40.0)  # spreads, the square roots of variances, that continue the entropy beyond the largest


def entropy_floor(norm: Float[Tensor, "*n"] | float, length: int) -> Float[Tensor, "*n"]:
    """The lowest entropy of a softmax row of T logits whose mean-centred l2 norm is s (Zhai et al. 2023).

        b = exp(-s sqrt(T/(T-1))),   H >= log(1 + (T-1) b) + s sqrt(T(T-1)) b / (1 + (T-1) b)

    Reached by the row with one logit above T - 1 equal ones.

    >>> round(entropy_floor(0.0, 8).item() - math.log(8), 12)
    0.0
    """
    s = as_float64(norm)
    if length < 2:
        return torch.zeros_like(s)
    t = length
    b = torch.exp(-s * math.sqrt(t / (t - 1)))
    total = 1 + (t - 1) * b
    return torch.log(total) + s * math.sqrt(t * (t - 1)) * b / total


def entropy_floor_of_range(spread: Float[Tensor, "*n"] | float, length: int) -> Float[Tensor, "*n"]:
    """The lowest entropy of a row of T logits that differ by at most `spread`: the minimum over rows with two values.

    With k logits at the top and T - k at the bottom, p = k / (k + (T-k) e^-spread) is the mass of the top:
    H = -p log(p/k) - (1-p) log((1-p)/(T-k)).

    >>> round(entropy_floor_of_range(0.0, 8).item() - math.log(8), 12)
    0.0
    """
    r = as_float64(spread).unsqueeze(-1)
    if length < 2:
        return torch.zeros_like(r.squeeze(-1))
    k = torch.arange(1, length, dtype=torch.float64, device=r.device)
    rest = (length - k) * torch.exp(-r)
    p = k / (k + rest)
    entropy = torch.log(k + rest) + (1 - p) * r  # log-sum-exp with the top at 0, minus the mean logit -(1-p) r
    return entropy.amin(-1)


def second_order_entropy(variance: Float[Tensor, "*n"] | float, length: int) -> Float[Tensor, "*n"]:
    """log T - v/2: the entropy of T normal logits of variance v to second order in their spread, at least 0.

    Close for v well below 2 log T. For every v there is `expected_entropy`.

    >>> round(second_order_entropy(1.0, 256).item(), 3)
    5.045
    """
    v = as_float64(variance)
    return (math.log(length) - v / 2).clamp_min(0)


def entropy_ratio(entropy: Float[Tensor, "*n rows"], visible: Int[Tensor, "*n rows"]) -> Float[Tensor, "*n"]:
    """Mean over rows of H_i / log(visible keys): 1 is uniform attention, at any length.

    Rows with fewer than two visible keys do not count. NaN where no row counts.

    >>> entropy_ratio(torch.log(torch.tensor([1.0, 2.0, 3.0])), torch.tensor([1, 2, 3])).item()
    1.0
    """
    counts = visible >= 2
    share = torch.where(counts, entropy / torch.log(visible.clamp_min(2).to(entropy.dtype)), torch.zeros_like(entropy))
    return share.sum(-1) / counts.sum(-1)


def residual_kept(
    variance: Float[Tensor, "*n"] | float, length: Sequence[int] | int, typical: bool = False
) -> Float[Tensor, "*n"]:
    """The share of the differences between tokens that a row of attention keeps, from the variance v of its logits
    across T keys.

    A row p maps residuals r_j to sum_j p_j r_j. Where the residuals are independent of the weights, the result has
    sqrt(sum p^2) of their root mean square: 1 / sqrt T for uniform attention, 1 for a row with one key. For normal
    logits l, with f(t) = E e^(-t x), x = e^l,

        kept^2 = E sum p^2 = T integral t f''(t) f(t)^(T-1) dt

    exactly, for every v and T. It is exp(v) / T where v is well below log T, and tends to 1 - sqrt(2 log T / v) where v
    is well above.

    `typical` gives 1 / sqrt(E (1 / sum p^2)) instead, from the mean participation that `observe` measures. A few sharp
    rows dominate the mean of sum p^2 and hardly count here, so it is never larger. `length` may be a sequence with the
    number of keys of each row, for the mean over rows: range(1, T + 1) under a causal mask.

    This is attention alone, without a skip. Weights that depend on content keep more: for normal tokens in d
    directions kept^2 grows by about F / d, with F the variance of the query-key part. Without a mask, the mean over all
    rows, 1 / T in the square, is shared by all tokens and is no residual.

    >>> [round(residual_kept(v, 256).item(), 4) for v in (0.0, 1.0, 4.0, 100.0)]
    [0.0625, 0.1017, 0.2696, 0.8487]
    >>> round(residual_kept(4.0, 256, typical=True).item(), 3)
    0.219
    """
    v = as_float64(variance)
    return _kept_squares(v.flatten(), _keys(length, v.device), typical).sqrt().reshape(v.shape)


def kept_at_entropy(
    entropy: Float[Tensor, "*n"] | float, length: Sequence[int] | int, typical: bool = False
) -> Float[Tensor, "*n"]:
    """`residual_kept` from the mean entropy H of rows in nats: that of the normal logits with this entropy.

        E H = integral (e^-t - f^T) dt / t - T integral E[l x e^(-t x)] f^(T-1) dt

    which is log T - v/2 where v is well below 2 log T.

    >>> round(kept_at_entropy(math.log(256), 256).item(), 4)
    0.0625
    >>> round(kept_at_entropy(0.0, 256).item(), 4)
    1.0
    """
    H = as_float64(entropy)
    entropies, shares = _share_by_entropy(tuple(_keys(length, CPU).tolist()), typical)
    at = torch.searchsorted(entropies, H.cpu().nan_to_num().contiguous()).clamp(1, len(entropies) - 1)
    between = ((H.cpu() - entropies[at - 1]) / (entropies[at] - entropies[at - 1])).clamp(0, 1)
    return (shares[at - 1] + between * (shares[at] - shares[at - 1])).to(H.device)


def expected_entropy(variance: Float[Tensor, "*n"] | float, length: int) -> Float[Tensor, "*n"]:
    """The mean entropy in nats of a row of T normal logits of variance v.

    The integral of `kept_at_entropy`, within 0.002 nats for every v and every T up to 10^9: log T at v = 0, about
    log T - v/2 where v is well below 2 log T, and 0 in the limit of large v, where it falls as 1 / sqrt v. It is not 0
    at v = 2 log T: of 256 keys there are 2.26 nats left.

    >>> [round(expected_entropy(v, 256).item(), 2) for v in (0.0, 1.0, 11.09, 25.0, 100.0, 1e6)]
    [5.55, 5.05, 2.26, 1.35, 0.56, 0.0]
    """
    v = as_float64(variance)
    flat = v.flatten()
    known = (flat >= 0) & (flat < math.inf)
    limited = torch.where(known, flat, 0.0).clamp_max(LARGEST)
    entropy = _over_variances(_entropy, limited, _keys(length, flat.device)).clamp(0, math.log(length))
    beyond = known & (flat > LARGEST)
    if bool(beyond.any()):
        spread = flat[beyond].sqrt()
        powers = torch.stack([spread**-n for n in range(1, len(FAR) + 1)], -1)
        entropy[beyond] = (powers @ _tail(length).to(flat.device)).clamp_min(0)
    return torch.where(known, entropy, torch.where(flat == math.inf, 0.0, torch.nan)).reshape(v.shape)


@lru_cache(maxsize=64)
def _tail(length: int) -> Float[Tensor, " powers"]:
    """Factors of 1/s, 1/s^2, 1/s^3 in the entropy of rows with a large spread s, through its values at FAR."""
    spread = torch.tensor(FAR, dtype=torch.float64, device=CPU)
    entropy = _over_variances(_entropy, spread.square(), _keys(length, CPU))
    powers = torch.stack([spread**-n for n in range(1, len(FAR) + 1)], -1)
    return torch.linalg.solve(powers, entropy)


@lru_cache(maxsize=64)
def variance_at(share: float, length: int) -> float:
    """The variance of T normal logits at which their expected entropy is this share of log T.

    >>> round(variance_at(0.1, 256) ** 0.5, 2)
    10.13
    """
    low, high = 0.0, 4.0
    while _entropy_share(high, length) > share:
        low, high = high, 4 * high
    while high - low > 1e-6 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if _entropy_share(middle, length) > share else (low, middle)
    return (low + high) / 2


def _entropy_share(variance: float, length: int) -> float:
    v = torch.tensor(variance, dtype=torch.float64, device=CPU)
    return expected_entropy(v, length).item() / math.log(length)


@lru_cache(maxsize=64)
def _share_by_entropy(
    keys: tuple[float, ...], typical: bool
) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
    """A table from one-hot rows to uniform ones: entropy of normal logits, and `residual_kept` of the same logits."""
    rows, largest = torch.tensor(keys, dtype=torch.float64, device=CPU), math.sqrt(LARGEST)
    # denser where spreads are small
    variances = (torch.linspace(largest, 0, 48, dtype=torch.float64, device=CPU).square() / largest).square()
    entropies = _over_variances(_entropy, variances, rows)
    shares = _kept_squares(variances, rows, typical).sqrt()
    one_hot = torch.tensor([[0.0], [1.0]], dtype=torch.float64, device=CPU)
    return torch.cat([one_hot[0], entropies]), torch.cat([one_hot[1], shares])


def _keys(length: Sequence[int] | int, device: torch.device) -> Float[Tensor, " rows"]:
    return torch.tensor([length] if isinstance(length, int) else list(length), dtype=torch.float64, device=device)


def _kept_squares(variance: Float[Tensor, " n"], keys: Float[Tensor, " rows"], typical: bool) -> Float[Tensor, " n"]:
    """E sum p^2, or 1 / E (1 / sum p^2), mean over rows with these numbers of keys, for each variance."""
    known = variance < math.inf
    v = torch.where(known, variance, 0.0)
    limited = v.clamp_max(LARGEST)
    beyond = torch.where(v > limited, (limited / v).sqrt(), 1.0)
    if typical:
        kept = 1 / (1 + (_over_variances(_participation, limited, keys, 2) - 1) * beyond)
    else:
        kept = 1 - (1 - _over_variances(_squares, limited, keys)) * beyond
    unknown = torch.where(variance > 0, 1.0, torch.nan)  # of a variance that is infinite, or no number
    return torch.where(known, kept, unknown)


Grid = tuple[Float[Tensor, "n t"], Float[Tensor, "n l"], Float[Tensor, "*n l"]]  # t, logits, weights of logits


def _over_variances(
    integral: Callable[[Grid, Tensor], Tensor],
    variance: Float[Tensor, " n"],
    keys: Float[Tensor, " rows"],
    factor: int = 1,  # of the spread of logits, in this integral
) -> Float[Tensor, " n"]:
    """The mean over rows of an integral, for each variance."""
    means, most = torch.empty_like(variance), float(keys.max())
    spreads = [factor * math.sqrt(v) for v in variance.tolist()]
    batches = _batches_in_cache if variance.device.type == "cpu" else _large_batches
    for some in batches(spreads, most, len(keys)):
        ends = min(spreads[i] for i in some), max(spreads[i] for i in some)
        at = torch.tensor(some, device=variance.device)
        grid = _grid(factor * variance[at].sqrt(), most, *ends)
        means[at] = torch.stack([integral(piece, keys) for piece in _pieces(grid)]).sum(0).mean(-1)
    return means


def _pieces(grid: Grid) -> Iterator[Grid]:
    """The grid as pieces of log t, over which the integrals are sums. One spread of 40 alone has 3 million numbers."""
    t, logits, weight = grid
    size = ON_GPU if t.device.type != "cpu" else LARGEST_GRID
    return ((part, logits, weight) for part in t.split(max(1, size // logits.numel()), -1))


def _batches_in_cache(spreads: Sequence[float], keys: float, rows: int) -> Iterator[list[int]]:
    """Spreads whose grids of logits have the same size, few enough for a cache."""
    by_size: dict[int, list[int]] = {}
    for i, spread in enumerate(spreads):
        by_size.setdefault(_logit_count(spread, keys), []).append(i)
    for size, of_size in sorted(by_size.items()):
        count = max(1, TOGETHER // (rows + size) // 256)
        yield from (of_size[i : i + count] for i in range(0, len(of_size), count))


def _large_batches(spreads: Sequence[float], keys: float, rows: int) -> Iterator[list[int]]:
    """As many spreads as fit into the memory of a batch, the largest first, since it has the largest grid."""
    left = sorted(range(len(spreads)), key=spreads.__getitem__, reverse=True)
    while left:
        largest = spreads[left[0]]
        each = _step_count(largest, keys) * (2 * _logit_count(largest, keys) + 1 + rows)
        count = max(1, ON_GPU // each)
        yield left[:count]
        left = left[count:]


def _squares(grid: Grid, keys: Float[Tensor, " rows"]) -> Float[Tensor, "n rows"]:
    """E sum p^2 for each number of keys: T E[y^2 e^-y] f^(T-1), y = t e^l, over log t."""
    t, logits, weight = grid
    y = _powers(t, logits)
    rest = y.neg().expm1_()  # e^-y - 1, with the digits that a thousand million keys need
    f = torch.log1p(_mean(rest, weight).clamp_min(-1))
    return STEP * keys * (_mean(rest.add_(1).mul_(y).mul_(y), weight)[:, None] * _power(f, keys - 1)).sum(-1)


def _participation(grid: Grid, keys: Float[Tensor, " rows"]) -> Float[Tensor, "n rows"]:
    """E (sum e^l)^2 / sum e^2l for each number of keys, in the same way with y = t e^2l: a grid of twice the spread."""
    t, logits, weight = grid
    y = _powers(t, logits)
    rest = y.neg().expm1_()
    f = torch.log1p(_mean(rest, weight).clamp_min(-1))
    one, two = _mean(rest.add_(1) * y**0.5, weight)[:, None], _mean(rest.mul_(y), weight)[:, None]
    pairs = (keys[:, None] - 1) * one.square() * _power(f, (keys - 2).clamp_min(0))
    return STEP * keys * (two * _power(f, keys - 1) + pairs).sum(-1)


def _entropy(grid: Grid, keys: Float[Tensor, " rows"]) -> Float[Tensor, "n rows"]:
    """Entropy of rows with these numbers of keys: log of the sum minus the mean logit."""
    t, logits, weight = grid
    y = _powers(t, logits)
    rest = y.neg().expm1_()
    f = torch.log1p(_mean(rest, weight).clamp_min(-1))
    total = ((-t).exp()[:, None] - _power(f, keys)).sum(-1)
    mean = _mean(rest.add_(1).mul_(y), logits * weight)
    return STEP * (total - keys * (mean[:, None] * _power(f, keys - 1)).sum(-1))


def _logit_count(spread: float, keys: float) -> int:
    """Logits on one side of their mean."""
    return math.ceil(_reach(keys) * max(1.0, spread) / STEP)


def _step_count(spread: float, keys: float) -> int:
    """Steps of log t. The integrals vanish at both ends of this range."""
    return math.ceil((math.log(keys) + 2 * _reach(keys) * spread + 45) / STEP)


def _reach(keys: float) -> float:
    """Standard deviations: no key of any row is farther out."""
    return math.sqrt(2 * (2 * math.log(keys) + 36))


def _grid(spread: Float[Tensor, " n"], keys: float, smallest: float, largest: float) -> Grid:
    """t, normal logits with these spreads, from the smallest to the largest, and the weights of the logits.

    Each spread has the logits that it has alone. Where their numbers differ, those that a spread does not have weigh 0.
    """
    far, count, device = _reach(keys), _logit_count(largest, keys), spread.device
    if count == _logit_count(smallest, keys):
        z = torch.linspace(-far, far, 2 * count + 1, dtype=torch.float64, device=device)
        weight = (-z.square() / 2).exp()
    else:
        own = (far * spread.clamp_min(1) / STEP).ceil()[:, None]  # `_logit_count` of each
        place = torch.arange(2 * count + 1, dtype=torch.float64, device=device)
        z = far * (place / own - 1)
        weight = torch.where(place <= 2 * own, (-z.square() / 2).exp(), 0.0)
    steps = torch.arange(_step_count(largest, keys), dtype=torch.float64, device=device)
    log_t = (-math.log(keys) - far * spread - 40)[:, None] + STEP * steps
    return log_t.exp(), spread[:, None] * z, weight / weight.sum(-1, keepdim=True)


def _mean(values: Float[Tensor, "n t l"], weight: Float[Tensor, "*n l"]) -> Float[Tensor, "n t"]:
    """Over logits, with weights that all spreads share, or each has its own."""
    return values @ weight if weight.ndim == 1 else (values @ weight[..., None])[..., 0]


def _powers(t: Float[Tensor, "n t"], logits: Float[Tensor, "n l"]) -> Float[Tensor, "n t l"]:
    """t e^l, where e^-(t e^l) is not 0 anyway."""
    return (t[..., None] * logits.exp()[:, None]).clamp_max_(GONE)


def _power(log: Float[Tensor, "n t"], keys: Float[Tensor, " rows"]) -> Float[Tensor, "n rows t"]:
    """e^(keys log); 1 where keys is 0 and log is -inf."""
    return torch.where(keys[:, None] > 0, keys[:, None] * log[:, None], 0.0).exp()
