"""The bounds of the paper over random draws: whether they hold, and how loose they are. Study b.

They are those of the paper's first version on arXiv, with the constant 4. That constant is too small for many tokens;
the second version repairs it by a factor γ that depends on the attention weights. Claims b6 and b7 are about that
constant, not about the paper as it stands.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import composite_norm, token_residual
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.dong2021.contraction import FLOOR, block, exact_depth, relu_mlp, worst
from locater_lab.theory import attention_bound, beta, depth_residuals, layer_bound, mlp_lipschitz, skip_bound

DRAWS = {True: 600, False: 6000}
WIDTH, TOKENS, SIZES = 4, (2, 5, 20), (0.05, 0.3, 1.0, 4.0)
DEEP, ROUNDING = 4, 1e-11  # layers at most; a residual this small beside the tokens is not compared
HUB, ITSELF = 7.0, 100.0  # of the crowd
CROWD = 1_000_000  # tokens that see themselves

CLAIMS = (
    Claim(
        "b1", "One layer of attention: residual at most 4 β s |res|^3",
        "largest residual over its bound, random draws, two centres, one to three heads", "at most", 1.0,
        where="theorem on one layer, version 1",
    ),
    Claim(
        "b2", "The bound of one layer is so loose that random draws stay a thousand times under it",
        "the same number", "at most", 0.001, by="ours",
    ),
    Claim(
        "b3", "L layers of pure attention: residual at most (4 β H s)^((3^L - 1)/2) |res|^(3^L)",
        f"largest log10 of residual over bound, 1 to {DEEP} layers", "at most", 0.0,
        where="theorem on L layers, version 1",
    ),
    Claim(
        "b4", "With skips: residual at most the largest of L + 1 terms, one of which does not fall",
        f"largest residual over its bound, 1 to {DEEP} layers with skips", "at most", 1.0,
        where="theorem with skips, version 1",
    ),
    Claim(
        "b5", "With MLPs: the same as without, with λ beside β",
        f"largest residual over its bound, 1 to {DEEP} layers with MLPs", "at most", 1.0,
        where="theorem with MLPs, version 1",
    ),
    Claim(
        "b6", "The constant 4 of version 1 would do for any number of tokens (version 2 repairs it by a factor γ)",
        f"residual over the bound of one layer, a crowd of {2 * CROWD + 1:,} tokens around one key", "at most", 1.0,
        by="ours",
    ),
    Claim(
        "b7", "sqrt(2 g) in the place of 4, g the load of the busiest key, is enough",
        "largest of residual over this bound, the same draws; crowds, with g at its largest, n", "at most", 1.0, by="ours",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Draw:
    """One layer on one set of tokens: residual after it, over the stated and over the proved bound."""

    tokens: int
    size: float
    stated: float
    proved: float


def one_layer(seed: int, tokens: int, size: float, centre: str) -> Draw:
    """Gaussian tokens `size` apart around a Gaussian centre; every fifth draw has sharper attention, which piles up on
    single keys.
    """
    layer = block(seed, WIDTH, heads=1 + seed % 3, size=size * (1 + 3 * (seed % 5 == 0)))
    x = size * normal(tokens, WIDTH, seed=seed + 10_000) + normal(1, WIDTH, seed=seed + 20_000)
    before, after = depth_residuals(x, [layer], centre).tolist()
    stated = attention_bound(before, beta(layer.W_QK, layer.W_VO), layer.scale, heads=len(layer.W_QK)).item()
    return Draw(tokens, size, after / stated, best_at_least(layer(x)) / layer_bound(x, layer, centre).item())


def best_at_least(x: Float[Tensor, "tokens width"]) -> float:
    """What no ||X - 1 v^T|| is under: medians are best for columns, and no v is closer to two tokens than half their
    distance.

    >>> round(best_at_least(torch.tensor([[1.0], [-1.0]])) ** 2, 6)
    2.0
    """
    columns = (x - x.quantile(0.5, dim=0, interpolation="lower")).abs().sum(0).max()
    return (columns * torch.cdist(x, x, p=1).max() / 2).sqrt().item()


def deep(seed: int, kind: str) -> float | None:
    """log10 of residual over bound after 1 to DEEP layers; None where float64 has nothing left to compare."""
    depth, heads, size = 1 + seed % DEEP, 1 + seed % 2, (0.3, 0.6, 1.0)[seed % 3]
    mlp, W_in, W_out = relu_mlp(seed + 7, 1.0, WIDTH, 6)
    parts: dict[str, dict[str, Any]] = {"pure": {}, "skip": dict(skip=True), "mlp": dict(mlp=mlp)}
    layers = [block(100 * seed + i, WIDTH, heads, **parts[kind]) for i in range(depth)]
    x = size * normal(6, WIDTH, seed=seed + 500)
    largest = max(beta(layer.W_QK, layer.W_VO).item() for layer in layers)
    scale = layers[0].scale
    before = composite_norm(token_residual(x)).item()
    if kind == "pure":
        after = exact_depth(x, layers)[-1]
        if after < FLOOR:
            return None
        bound = attention_bound(before, largest, scale, depth, heads, log=True)
    else:
        after, share = (depth_residuals(x, layers, relative=relative)[-1].item() for relative in (False, True))
        if not share >= ROUNDING:  # NaN where an MLP leaves nothing of the tokens
            return None
        steep = mlp_lipschitz(W_in, W_out)
        bound = skip_bound(before, largest, scale, depth, heads, log=True)
        if kind == "mlp":
            bound = attention_bound(before, largest, scale, depth, heads, steep, log=True)
    return math.log10(after) - bound.item() / math.log(10)


# --- the crowd ---


@dataclass(frozen=True)
class Crowd:
    """A residual that grows as sqrt n where its bound grows as log n."""

    tokens: int
    residual: float  # no centre brings it under this
    stated: float  # 4 beta s ||R||^3
    proved: float  # sqrt(2 n) in the place of 4


def crowd(m: int) -> Crowd:
    """A key that all tokens see (the hub), m tokens that see themselves as well, m that are nothing but the centre.

    Token 0 is the centre and a unit along channel 0, token j = 1 ... m one along channel j; W_QK = K 1, W_VO = 1, s =
    1, ||R|| = 1. The centre lies along channel 0, so that the hub has HUB times and a token for itself ITSELF times the
    weight of all 2 m others. Tokens of a kind have the same row of attention up to the place of the weight on itself,
    so two rows stand for all: in channel 0 the two kinds differ by their weight on the hub, and two tokens of the first
    by that on themselves.

    >>> small, large = crowd(1_000), crowd(10_000)
    >>> small.residual < small.stated, large.residual < large.stated, large.residual < large.proved
    (True, False, True)
    """
    strength, bias = math.log(ITSELF * 2 * m), math.log(HUB * 2 * m)
    seeing, idle = torch.zeros(2, 2 * m + 1, dtype=torch.float64)
    seeing[0] = idle[0] = bias
    seeing[1] = strength
    seeing, idle = seeing.softmax(0), idle.softmax(0)
    # m rows above and m below the median; that of the hub may be anywhere
    column = m * (idle[0] - seeing[0]).item() - 1
    row = (seeing[1] - seeing[2]).item()  # half the distance of two that see themselves
    n = 2 * m + 1
    bounds = (attention_bound(1.0, strength, 1.0, constant=c).item() for c in (4.0, math.sqrt(2 * n)))
    return Crowd(n, math.sqrt(column * row), *bounds)


def crossing() -> int:
    """The least number of tokens at which this crowd exceeds the stated bound, by bisection over m."""
    low, high = 100, 100_000
    while high - low > 1:
        middle = (low + high) // 2
        at = crowd(middle)
        low, high = (low, middle) if at.residual > at.stated else (middle, high)
    return 2 * high + 1


# --- the study ---


def measure(setting: Setting) -> Results:
    """All draws, and crowds of growing size."""
    count = DRAWS[setting.quick]
    plan = [
        (seed, TOKENS[seed % 3], SIZES[seed % 4], centre) for seed in range(count) for centre in ("mean", "midrange")
    ]
    draws = [one_layer(*each) for each in setting.each(plan)]
    ratios = {
        kind: [r for seed in range(count // 2) if (r := deep(seed, kind)) is not None]
        for kind in ("pure", "skip", "mlp")
    }
    crowds = [crowd(m) for m in (100, 1_000, 10_000, 100_000, CROWD)]
    stated = [draw.stated for draw in draws]
    last = crowds[-1]
    measured = {
        "b1": worst(stated),
        "b2": worst(stated),
        "b3": worst(ratios["pure"], {"least": min(ratios["pure"])}),
        "b4": worst([10**r for r in ratios["skip"]]),
        "b5": worst([10**r for r in ratios["mlp"]]),
        "b6": Measurement(last.residual / last.stated, 0.0, "none: solved"),
        "b7": worst([d.proved for d in draws] + [c.residual / c.proved for c in crowds]),
    }
    used = {
        "by_size": [{"size": size, "share": max(d.stated for d in draws if d.size == size)} for size in SIZES],
        "by_tokens": [(n, max(d.stated for d in draws if d.tokens == n)) for n in TOKENS],
        "median": float(torch.tensor(stated).median()),
    }
    return Results(measured, {"bound_used": used, "crowds": [vars(c) for c in crowds], "crowd_crossing": crossing()})


STUDY = Study("bounds over random draws", CLAIMS, measure)
