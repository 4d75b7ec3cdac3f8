"""How much of the differences between tokens survives a row of attention, from the spread of its logits or its entropy.

docs/theory.md section 10.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

STEP = 0.5  # of the sums that replace integrals, in logits: e^-e^y is so smooth that six digits are right
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
    squares = torch.tensor([_kept_square(x, keys, typical) for x in v.flatten().tolist()], dtype=torch.float64)
    return squares.sqrt().reshape(v.shape).to(v.device)


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
    spreads = [x * x / largest for x in torch.linspace(largest, 0, 48, dtype=torch.float64).tolist()]
    table = [(0.0, 1.0), *((_entropy(x * x, rows), math.sqrt(_kept_square(x * x, rows, typical))) for x in spreads)]
    entropies, shares = torch.tensor(table, dtype=torch.float64).unbind(1)
    return entropies.contiguous(), shares.contiguous()


def _keys(length: Sequence[int] | int) -> Float[Tensor, " rows"]:
    return torch.as_tensor([length] if isinstance(length, int) else list(length), dtype=torch.float64)


def _kept_square(variance: float, keys: Float[Tensor, " rows"], typical: bool) -> float:
    """E sum p^2, or 1 / E (1 / sum p^2), mean over rows with these numbers of keys."""
    if not variance < math.inf:
        return 1.0 if variance > 0 else math.nan
    v = min(variance, LARGEST)
    beyond = math.sqrt(v / variance) if variance > v else 1.0
    if typical:
        return 1 / (1 + (float(_participation(v, keys).mean()) - 1) * beyond)
    return 1 - (1 - float(_squares(v, keys).mean())) * beyond


def _squares(v: float, keys: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """E sum p^2 for each number of keys: T E[y^2 e^-y] f^(T-1), y = t e^l, over log t."""
    y, weight = _logits(math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    return STEP * keys * ((2 * y - y.exp()).exp() @ weight * _power(f, keys - 1)).sum(-1)


def _participation(v: float, keys: Float[Tensor, " rows"]) -> Float[Tensor, " rows"]:
    """E (sum e^l)^2 / sum e^2l for each number of keys, in the same way with y = t e^2l."""
    y, weight = _logits(2 * math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    one, two = ((k * y - y.exp()).exp() @ weight for k in (0.5, 1.0))
    pairs = (keys[:, None] - 1) * one.square() * _power(f, (keys - 2).clamp_min(0))
    return STEP * keys * (two * _power(f, keys - 1) + pairs).sum(-1)


def _entropy(v: float, keys: Float[Tensor, " rows"]) -> float:
    """Mean entropy of rows with these numbers of keys: log of the sum minus the mean logit."""
    y, weight = _logits(math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    middle = y[:, len(weight) // 2]  # log t
    total = ((-middle.exp()).exp() - _power(f, keys)).sum(-1)
    mean = keys * (((y - middle[:, None]) * (y - y.exp()).exp()) @ weight * _power(f, keys - 1)).sum(-1)
    return STEP * float((total - mean).mean())


def _logits(spread: float, keys: float) -> tuple[Float[Tensor, "t l"], Float[Tensor, " l"]]:
    """log t + l for every log t (rows) and normal logit l (columns) with this spread, and the weights of the logits."""
    far = math.sqrt(2 * (2 * math.log(keys) + 36))  # standard deviations: no key of any row is farther out
    count = math.ceil(far * max(1.0, spread) / STEP)
    z = torch.linspace(-far, far, 2 * count + 1, dtype=torch.float64)
    weight = (-z.square() / 2).exp()
    log_t = torch.arange(-math.log(keys) - far * spread - 40, far * spread + 5, STEP, dtype=torch.float64)
    return log_t[:, None] + spread * z, weight / weight.sum()


def _power(log: Float[Tensor, " t"], keys: Float[Tensor, " rows"]) -> Float[Tensor, "rows t"]:
    """e^(keys log); 1 where keys is 0 and log is -inf."""
    return torch.where(keys[:, None] > 0, keys[:, None] * log, 0.0).exp()
