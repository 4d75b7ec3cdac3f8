"""How much of the differences between tokens survives a row of attention, from the spread of its logits or its entropy.

docs/theory.md section 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

STEP = 0.5  # of the sums that replace integrals, in logits: e^-e^y is so smooth that six digits are right
TOGETHER = 2**17  # numbers of a grid of variances, log t and logits or keys that are computed at a time
GONE = 1e3  # e^-y is 0 long before
LARGEST = 225.0  # variance of logits; above it rows are nearly one-hot, and their distance from it falls as 1 / sqrt v


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
    v = torch.as_tensor(variance, dtype=torch.float64)
    keys = _keys(length)
    return _kept_squares(v.flatten().cpu(), keys, typical).sqrt().reshape(v.shape).to(v.device)


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
    H = torch.as_tensor(entropy, dtype=torch.float64)
    entropies, shares = _share_by_entropy(tuple(_keys(length).tolist()), typical)
    at = torch.searchsorted(entropies, H.cpu().nan_to_num().contiguous()).clamp(1, len(entropies) - 1)
    between = ((H.cpu() - entropies[at - 1]) / (entropies[at] - entropies[at - 1])).clamp(0, 1)
    return (shares[at - 1] + between * (shares[at] - shares[at - 1])).to(H.device)


@lru_cache(maxsize=64)
def _share_by_entropy(
    keys: tuple[float, ...], typical: bool
) -> tuple[Float[Tensor, " points"], Float[Tensor, " points"]]:
    """A table from one-hot rows to uniform ones: entropy of normal logits, and `residual_kept` of the same logits."""
    rows, largest = torch.tensor(keys, dtype=torch.float64), math.sqrt(LARGEST)
    # denser where spreads are small
    variances = (torch.linspace(largest, 0, 48, dtype=torch.float64).square() / largest).square()
    entropies = _over_variances(_entropy, variances, rows)
    shares = _kept_squares(variances, rows, typical).sqrt()
    one_hot = torch.tensor([[0.0], [1.0]], dtype=torch.float64)
    return torch.cat([one_hot[0], entropies]), torch.cat([one_hot[1], shares])


def _keys(length: Sequence[int] | int) -> Float[Tensor, " rows"]:
    return torch.as_tensor([length] if isinstance(length, int) else list(length), dtype=torch.float64)


def _kept_squares(variance: Float[Tensor, " n"], keys: Float[Tensor, " rows"], typical: bool) -> Float[Tensor, " n"]:
    """E sum p^2, or 1 / E (1 / sum p^2), mean over rows with these numbers of keys, for each variance."""
    kept = torch.where(variance > 0, 1.0, torch.nan).double()  # of a variance that is infinite, or no number
    known = variance < math.inf
    v = variance[known]
    limited = v.clamp_max(LARGEST)
    beyond = torch.where(v > limited, (limited / v).sqrt(), 1.0)
    if typical:
        kept[known] = 1 / (1 + (_over_variances(_participation, limited, keys, 2) - 1) * beyond)
    else:
        kept[known] = 1 - (1 - _over_variances(_squares, limited, keys)) * beyond
    return kept


def _over_variances(
    integral: Callable[[Tensor, Tensor], Tensor],
    variance: Float[Tensor, " n"],
    keys: Float[Tensor, " rows"],
    factor: int = 1,  # of the spread of logits, in this integral
) -> Float[Tensor, " n"]:
    """The mean over rows of an integral, for each variance; those whose grids of logits have the same size together."""
    means = torch.empty_like(variance)
    sizes = torch.tensor([_logit_count(factor * math.sqrt(v), float(keys.max())) for v in variance.tolist()])
    for size in sizes.unique().tolist():
        of_size = (sizes == size).nonzero()[:, 0]
        for some in of_size.split(max(1, TOGETHER // (len(keys) + size) // 256)):
            means[some] = integral(variance[some], keys).mean(-1)
    return means


def _squares(v: Float[Tensor, " n"], keys: Float[Tensor, " rows"]) -> Float[Tensor, "n rows"]:
    """E sum p^2 for each number of keys: T E[y^2 e^-y] f^(T-1), y = t e^l, over log t."""
    t, logits, weight = _grid(v.sqrt(), float(keys.max()))
    y = _powers(t, logits)
    rest = torch.expm1(-y)  # e^-y - 1, with the digits that a thousand million keys need
    f = torch.log1p((rest @ weight).clamp_min(-1))
    return STEP * keys * ((rest.add_(1).mul_(y).mul_(y) @ weight)[:, None] * _power(f, keys - 1)).sum(-1)


def _participation(v: Float[Tensor, " n"], keys: Float[Tensor, " rows"]) -> Float[Tensor, "n rows"]:
    """E (sum e^l)^2 / sum e^2l for each number of keys, in the same way with y = t e^2l."""
    t, logits, weight = _grid(2 * v.sqrt(), float(keys.max()))
    y = _powers(t, logits)
    rest = torch.expm1(-y)
    f = torch.log1p((rest @ weight).clamp_min(-1))
    one, two = ((rest.add_(1) * y**0.5 @ weight)[:, None], (rest.mul_(y) @ weight)[:, None])
    pairs = (keys[:, None] - 1) * one.square() * _power(f, (keys - 2).clamp_min(0))
    return STEP * keys * (two * _power(f, keys - 1) + pairs).sum(-1)


def _entropy(v: Float[Tensor, " n"], keys: Float[Tensor, " rows"]) -> Float[Tensor, "n rows"]:
    """Entropy of rows with these numbers of keys: log of the sum minus the mean logit."""
    t, logits, weight = _grid(v.sqrt(), float(keys.max()))
    y = _powers(t, logits)
    rest = torch.expm1(-y)
    f = torch.log1p((rest @ weight).clamp_min(-1))
    total = ((-t).exp()[:, None] - _power(f, keys)).sum(-1)
    mean = (rest.add_(1).mul_(y) @ (logits * weight)[..., None])[..., 0]
    return STEP * (total - keys * (mean[:, None] * _power(f, keys - 1)).sum(-1))


def _logit_count(spread: float, keys: float) -> int:
    """Logits on one side of their mean."""
    return math.ceil(_reach(keys) * max(1.0, spread) / STEP)


def _reach(keys: float) -> float:
    """Standard deviations: no key of any row is farther out."""
    return math.sqrt(2 * (2 * math.log(keys) + 36))


def _grid(
    spread: Float[Tensor, " n"], keys: float
) -> tuple[Float[Tensor, "n t"], Float[Tensor, "n l"], Float[Tensor, " l"]]:
    """t, normal logits l with these spreads, and the weights of the logits. The integrals vanish at both ends of the
    largest range of log t.
    """
    far, largest = _reach(keys), float(spread.max())
    z = torch.linspace(-far, far, 2 * _logit_count(largest, keys) + 1, dtype=torch.float64)
    weight = (-z.square() / 2).exp()
    steps = math.ceil((math.log(keys) + 2 * far * largest + 45) / STEP)
    log_t = (-math.log(keys) - far * spread - 40)[:, None] + STEP * torch.arange(steps, dtype=torch.float64)
    return log_t.exp(), spread[:, None] * z, weight / weight.sum()


def _powers(t: Float[Tensor, "n t"], logits: Float[Tensor, "n l"]) -> Float[Tensor, "n t l"]:
    """t e^l, where e^-(t e^l) is not 0 anyway."""
    return (t[..., None] * logits.exp()[:, None]).clamp_max_(GONE)


def _power(log: Float[Tensor, "n t"], keys: Float[Tensor, " rows"]) -> Float[Tensor, "n rows t"]:
    """e^(keys log); 1 where keys is 0 and log is -inf."""
    return torch.where(keys[:, None] > 0, keys[:, None] * log[:, None], 0.0).exp()
