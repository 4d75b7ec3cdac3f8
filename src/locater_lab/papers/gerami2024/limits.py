"""What a polynomial in the place of the exponential can weigh at most: positivity, sharpness, entropy, gradients. Study
b.

With |x| <= 1, which unit queries and keys give, f(x) = 1 + x + x^2/2 = ((1 + x)^2 + 1) / 2 lies between 1/2 and 5/2.
Hence among n keys

    A_ij <= 5 / (n + 4)        log n - H <= 0.313        |dO_i / dx_il| <= 4 / (n + 4) |v_l - o_i|

The first and the last are attained by one key along the query and all others against it, the second by a share of keys
along it. The last is true from n = 4 on: (1 + x) / (f(x) + (n - 1) / 2) is largest at x = 1 only where (n - 1) / 2 >=
3/2. With a scale s > 1 one key can have half of the weight once s^2 + 2 s + 2 = n - 1, where softmax needs exp(2 s) = n
- 1.
"""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.papers.gerami2024.exactness import polynomial

DRAWS = {True: 200, False: 2000}
KEYS = (4, 40, 400, 4000)
SIZE = 16
RATIO = 5.0  # of the largest f to the least, |x| <= 1, order 2
GAP = 0.313  # nats: `widest_gap`, rounded up
GAP_OF = f"none: the largest of {len(KEYS)} numbers of keys and every share of them"

CLAIMS = (
    Claim(
        "b1", "Weights of order 2 are positive whatever queries and keys are",
        "least f over draws without a norm: weights of the mechanism's map over that of a key at 0, where f is 1", "at least", 0.5,
        by="ours",
    ),
    Claim(
        "b2", "Order 1 without a norm is no attention: weights are negative",
        "least 1 + x over normal x of standard deviation 3", "at most", 0.0, by="ours",
    ),
    Claim(
        "b3", "f is close to exp, whose Taylor polynomial it is", "largest relative distance of f from exp, x from -1 to 1, order 2",
        "at most", 0.1, by="ours",
    ),
    Claim(
        "b4", "Normalised Fastmax cannot localise: no weight exceeds 5 / (n + 4)",
        f"largest excess of a weight over that, relative, draws and keys built for it, {KEYS[0]} to {KEYS[-1]:,} keys", "at most", 1e-12,
        by="ours",
    ),
    Claim("b5", "The cap is attained", "largest shortfall from it, relative, built keys", "at most", 1e-12, by="ours"),
    Claim(
        "b6", "Entropy is all but that of a uniform row", "mean entropy over log n, 40 Gaussian keys, heads of 64", "about",
        0.997, 0.003, by="ours",
    ),
    Claim(
        "b7", f"Whatever keys there are, entropy is within {GAP:g} nats of log n",
        "largest log n - H, keys along or against the query in any number",
        "at most", GAP, by="ours",
    ),
    Claim(
        "b8", "From 4 keys on, the slope of an output o to the score of a key is at most 4 / (n + 4) times the distance of o from its "
        "value",
        "largest excess of autograd's slope over the bound, relative, draws and built keys", "at most", 1e-12, by="ours",
    ),
    Claim(
        "b9", "Gradients to scores fall as 1 / n", "exponent of the largest slope to a score, over that distance, in n; built keys, 40 "
        "to 4,000", "about", -1.0, 0.05, by="summary", bound="ours",
    ),
    Claim(
        "b10", "A scale brings localisation back, as it does for softmax",
        "scale at which one of 4,000 keys can have half of the weight, over that of softmax", "at most", 2.0, by="ours",
    ),
)  # fmt: skip


def build_keys(n: int, along: int = 1) -> tuple[Float[Tensor, "1 1 1 D"], Float[Tensor, "1 1 n D"]]:
    """A query, and n keys of which the first `along` point along it and the others against it."""
    q = normal(1, 1, 1, SIZE, seed=n)
    signs = torch.ones(n, 1, dtype=torch.float64)
    signs[along:] = -1
    return q, q * signs


def least_f(seed: int) -> float:
    """Of order 2 without a norm: x has a standard deviation of 3, and the first key is 0."""
    q, k = 3 * normal(1, 1, 16, SIZE, seed=seed), normal(1, 1, 33, SIZE, seed=seed + 10_000)
    k[..., 0, :] = 0
    weights = mechanism("fastmax").map(q, k, norm=None)
    return (weights / weights[..., :1]).min().item()


def largest_weight(q: Tensor, k: Tensor, **options: Any) -> float:
    return mechanism("fastmax").map(q, k, **options).max().item()


def entropy(weights: Tensor) -> Float[Tensor, "*rows"]:
    return torch.special.entr(weights).sum(-1)


def entropy_of_draw(seed: int, size: int, n: int = 40) -> float:
    """Mean entropy over log n of Gaussian queries and keys. x spreads by 1 / sqrt(D), so it is about 1 - 1 / (2 D log
    n).

    >>> abs(entropy_of_draw(0, 64) - (1 - 1 / (128 * math.log(40)))) < 1e-3
    True
    """
    q, k = normal(1, 1, 64, size, seed=seed), normal(1, 1, n, size, seed=seed + 1000)
    return (entropy(mechanism("fastmax").map(q, k)).mean() / math.log(n)).item()


def widest_gap(ratio: float = RATIO) -> float:
    """Largest log n - H of weights within `ratio` of each other: a share a of them at the top,
    p = ratio / (1 + (ratio - 1) a), gap(a) = a p log p + (1 - a) p / ratio log(p / ratio).

    >>> round(widest_gap(), 4)
    0.3128
    """
    a = torch.linspace(1e-6, 1 - 1e-6, 200_001, dtype=torch.float64)
    p = ratio / (1 + (ratio - 1) * a)
    return (a * p * p.log() + (1 - a) * p / ratio * (p / ratio).log()).max().item()


def largest_slope(x: Tensor, values: Float[Tensor, "n E"]) -> float:
    """Largest over keys of |dO / dx_l| / |v_l - o|, by autograd of the map of scores x."""
    x = x.clone().requires_grad_()
    weight = polynomial(x, 2)
    out = weight @ values / weight.sum()
    rows = torch.stack([torch.autograd.grad(o, x, retain_graph=True)[0] for o in out])  # (E, n)
    return (rows.norm(dim=0) / (values - out.detach()).norm(dim=1)).max().item()


def half_scale(n: int, fastmax: bool) -> float:
    """The least scale at which one of n keys can have half of the weight; by bisection of the mechanism's own map.

    Fastmax's other keys are where f is least, at x = -1: at a cosine of -1 / s.
    """
    low, high = 1.0, 1e4
    for _ in range(60):
        s = math.sqrt(low * high)
        if fastmax:
            q = torch.tensor([[[[1.0, 0.0]]]], dtype=torch.float64)
            other = torch.tensor([-1 / s, math.sqrt(1 - 1 / s**2)], dtype=torch.float64)
            k = torch.cat([q[0, 0], other.expand(n - 1, 2)])[None, None]
            top = mechanism("fastmax").map(q, k, scale=s)[..., 0].item()
        else:
            q, k = build_keys(n)
            unit = q / q.norm()
            top = mechanism("softmax").map(unit, k / k.norm(dim=-1, keepdim=True), scale=s)[..., 0].item()
        low, high = (low, s) if top > 0.5 else (s, high)
    return math.sqrt(low * high)


def limits_of_draw(seed: int) -> tuple[float, float | None]:
    """One draw: its largest weight over the cap, and its largest slope over the bound; slopes of few keys alone."""
    n = KEYS[seed % 3]
    q = 3 * normal(1, 1, 8, SIZE, seed=seed)
    k = normal(1, 1, n, SIZE, seed=seed + 10_000) + (seed % 2) * normal(1, 1, 1, SIZE, seed=seed + 1)
    weight = mechanism("fastmax").map(q, k).max().item() * (n + 4) / 5
    if n > 40:
        return weight, None
    x = (q / q.norm(dim=-1, keepdim=True) @ (k / k.norm(dim=-1, keepdim=True)).mT)[0, 0, 0]
    return weight, largest_slope(x, normal(n, 3, seed=seed + 5)) * (n + 4) / 4


def limits_of_built_keys(n: int) -> dict[str, Any]:
    """Keys built to attain each bound, beside the bounds and softmax."""
    q, k = build_keys(n)
    weight = largest_weight(q, k)
    gap = max(math.log(n) - entropy(mechanism("fastmax").map(*build_keys(n, m))).item() for m in _shares(n))
    return {
        "keys": n,
        "cap": 5 / (n + 4),
        "built": weight,
        "softmax": math.exp(2) / (n - 1 + math.exp(2)),
        "uniform": 1 / n,
        "gap": gap,
        "share": 1 - gap / math.log(n),
        "slope": largest_slope(k[0, 0, :, 0].sign() * q[0, 0, 0, 0].sign(), normal(n, 3, seed=n)),
        "slope_bound": 4 / (n + 4),
        "half_scale": half_scale(n, True) if n > 10 else None,
        "half_scale_softmax": half_scale(n, False) if n > 10 else None,
    }


def measure(setting: Setting) -> Results:
    """Draws, and keys built to attain each bound."""
    count = DRAWS[setting.quick]
    raw = torch.cat([3 * normal(512, seed=seed) for seed in range(count)])
    drawn = [limits_of_draw(seed) for seed in range(count)]
    weights, slopes = [weight for weight, _ in drawn], [x for _, x in drawn if x is not None]
    rows = [limits_of_built_keys(n) for n in KEYS]
    by_keys = {row["keys"]: row for row in rows}
    attained = [row["built"] * (row["keys"] + 4) / 5 for row in rows]
    steep = [row["slope"] * (row["keys"] + 4) / 4 for row in rows]
    ratios = {size: [entropy_of_draw(seed, size) for seed in range(20)] for size in (16, 64, 256)}
    x = torch.linspace(-1, 1, 2001, dtype=torch.float64)
    off = (polynomial(x, 2) / x.exp() - 1).abs().max().item()
    largest = f"none: the largest of {count} draws and {len(KEYS)} built"
    least_weight = round(min(least_f(seed) for seed in range(count)), 12)
    negative = {"negative": (raw < -1).double().mean().item()}
    measured = {
        "b1": Measurement(least_weight, 0.0, f"none: the least of {count} draws"),
        "b2": Measurement(polynomial(raw, 1).min().item(), 0.0, f"none: the least of {len(raw):,} numbers", negative),
        "b3": Measurement(off, 0.0, "none: computed"),
        "b4": Measurement(max(*weights, *attained) - 1, 0.0, largest, {"drawn": max(weights)}),
        "b5": Measurement(1 - min(attained), 0.0, f"none: the largest of {len(KEYS)}"),
        "b6": by_seed(ratios[64], of="draws"),
        "b7": Measurement(max(row["gap"] for row in rows), 0.0, GAP_OF, {"gap": widest_gap()}),
        "b8": Measurement(max(*slopes, *steep) - 1, 0.0, largest, {"drawn": max(slopes)}),
        "b9": Measurement(
            math.log(by_keys[4000]["slope"] / by_keys[40]["slope"]) / math.log(100), 0.0, "none: computed"
        ),
        "b10": Measurement(rows[-1]["half_scale"] / rows[-1]["half_scale_softmax"], 0.0, "none: bisection"),
    }
    tables = {
        "limits_by_keys": rows,
        "polynomial_less_exp": {"at_minus_1": 0.5 / math.exp(-1) - 1, "at_1": 2.5 / math.e - 1},
        "entropy_by_head_size": {str(size): fmean(values) for size, values in ratios.items()},
    }
    return Results(measured, tables)


def _shares(n: int) -> range:
    return range(1, n, max(1, n // 200))


STUDY = Study("limits of the polynomial", CLAIMS, measure)
