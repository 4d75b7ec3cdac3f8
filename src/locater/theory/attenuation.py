"""What a row of attention keeps of the differences between tokens, from the spread of its logits or from its entropy."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

STEP = 0.5  # of sums in place of integrals, in logits: e^-e^y is so smooth that six digits are right
LARGEST = 225.0  # variance of logits; beyond it rows are all but one-hot, and what is missing falls as 1 / sqrt v


def residual_kept(
    variance: Float[Tensor, "*n"] | float, length: Sequence[int] | int, typical: bool = False
) -> Float[Tensor, "*n"]:
    """What a row of attention keeps of the differences between tokens, from the variance v of its logits across T keys.

    A row p takes residuals r_j to sum_j p_j r_j. Where these have nothing to do with the weights, that is sqrt(sum p^2)
    of their size in root mean square: 1 / sqrt T for uniform attention, 1 for a row with one key. For normal logits l,
    with f(t) = E e^(-t x), x = e^l,

        kept^2 = E sum p^2 = T integral t f''(t) f(t)^(T-1) dt

    exactly, at every v and T. It is exp(v) / T where v is well below log T, and tends to 1 - sqrt(2 log T / v) well
    above.

    `typical` is 1 / sqrt(E (1 / sum p^2)), of the mean participation that `observe` measures: a few sharp rows carry
    the mean of sum p^2 and hardly count here, so it is never more. `length` may name the keys of every row, for the
    mean over rows: range(1, T + 1) under a causal mask.

    This is attention alone, with no skip. Weights that depend on content keep more, about F / d more in the square for
    normal tokens in d directions, F the variance of the query-key part; and without a mask the mean over all rows, 1 /
    T in the square, is no residual.

    >>> [round(residual_kept(v, 256).item(), 4) for v in (0.0, 1.0, 4.0, 100.0)]
    [0.0625, 0.1017, 0.2696, 0.8487]
    >>> round(residual_kept(4.0, 256, typical=True).item(), 3)
    0.219
    """
    v = torch.as_tensor(variance, dtype=torch.float64)
    keys = _keys(length)
    found = torch.tensor([_kept_square(x, keys, typical) for x in v.flatten().tolist()], dtype=torch.float64)
    return found.sqrt().reshape(v.shape).to(v.device)


def kept_at_entropy(
    entropy: Float[Tensor, "*n"] | float, length: Sequence[int] | int, typical: bool = False
) -> Float[Tensor, "*n"]:
    """`residual_kept` where the mean entropy H of rows is known, in nats, and not the variance: that of normal logits
    with this entropy.

        E H = integral (e^-t - f^T) dt / t - T integral E[l x e^(-t x)] f^(T-1) dt        log T - v/2 where v is well below 2 log T

    >>> round(kept_at_entropy(math.log(256), 256).item(), 4)
    0.0625
    >>> round(kept_at_entropy(0.0, 256).item(), 4)
    1.0
    """
    H = torch.as_tensor(entropy, dtype=torch.float64)
    known, kept = _entropies(tuple(_keys(length).tolist()), typical)
    at = torch.searchsorted(known, H.cpu().nan_to_num().contiguous()).clamp(1, len(known) - 1)
    share = ((H.cpu() - known[at - 1]) / (known[at] - known[at - 1])).clamp(0, 1)
    return (kept[at - 1] + share * (kept[at] - kept[at - 1])).to(H.device)


@lru_cache(maxsize=64)
def _entropies(keys: tuple[float, ...], typical: bool) -> tuple[Tensor, Tensor]:
    """Entropy of normal logits and what they keep, from one-hot rows to uniform ones."""
    rows, largest = torch.tensor(keys, dtype=torch.float64), math.sqrt(LARGEST)
    # closer where they are small
    spreads = [x * x / largest for x in torch.linspace(largest, 0, 48, dtype=torch.float64).tolist()]
    table = [(0.0, 1.0), *((_entropy(x * x, rows), math.sqrt(_kept_square(x * x, rows, typical))) for x in spreads)]
    return torch.tensor([H for H, _ in table], dtype=torch.float64), torch.tensor(
        [kept for _, kept in table], dtype=torch.float64
    )


def _keys(length: Sequence[int] | int) -> Tensor:
    return torch.as_tensor([length] if isinstance(length, int) else list(length), dtype=torch.float64)


def _kept_square(variance: float, keys: Tensor, typical: bool) -> float:
    """E sum p^2, or 1 / E (1 / sum p^2), mean over rows with so many keys."""
    if not variance < math.inf:
        return 1.0 if variance > 0 else math.nan
    v = min(variance, LARGEST)
    found = float(_participation(v, keys).mean()) if typical else 1 - float(_squares(v, keys).mean())
    beyond = math.sqrt(v / variance) if variance > v else 1.0
    return 1 / (1 + (found - 1) * beyond) if typical else 1 - found * beyond


def _squares(v: float, keys: Tensor) -> Tensor:
    """E sum p^2 for each number of keys: T E[y^2 e^-y] f^(T-1), y = t e^l, over log t."""
    y, weight = _logits(math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    return STEP * keys * ((2 * y - y.exp()).exp() @ weight * _power(f, keys - 1)).sum(-1)


def _participation(v: float, keys: Tensor) -> Tensor:
    """E (sum e^l)^2 / sum e^2l for each number of keys, in the same way with y = t e^2l."""
    y, weight = _logits(2 * math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    one, two = ((k * y - y.exp()).exp() @ weight for k in (0.5, 1.0))
    return (
        STEP
        * keys
        * (two * _power(f, keys - 1) + (keys[:, None] - 1) * one.square() * _power(f, (keys - 2).clamp_min(0))).sum(-1)
    )


def _entropy(v: float, keys: Tensor) -> float:
    """Mean entropy of rows with so many keys, as log of the sum minus the mean logit."""
    y, weight = _logits(math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    middle = y[:, len(weight) // 2]  # log t
    total = ((-middle.exp()).exp() - _power(f, keys)).sum(-1)
    mean = keys * (((y - middle[:, None]) * (y - y.exp()).exp()) @ weight * _power(f, keys - 1)).sum(-1)
    return STEP * float((total - mean).mean())


def _logits(spread: float, keys: float) -> tuple[Tensor, Tensor]:
    """log t + l for every log t (rows) and normal logit l (columns) of that spread, and the weights of the latter."""
    far = math.sqrt(2 * (2 * math.log(keys) + 36))  # standard deviations: no key of any row is farther out
    count = math.ceil(far * max(1.0, spread) / STEP)
    z = torch.linspace(-far, far, 2 * count + 1, dtype=torch.float64)
    weight = (-z.square() / 2).exp()
    log_t = torch.arange(-math.log(keys) - far * spread - 40, far * spread + 5, STEP, dtype=torch.float64)
    return log_t[:, None] + spread * z, weight / weight.sum()


def _power(log: Tensor, keys: Tensor) -> Tensor:
    """e^(keys log), 1 where keys is 0 and log -inf."""
    return torch.where(keys[:, None] > 0, keys[:, None] * log, 0.0).exp()
