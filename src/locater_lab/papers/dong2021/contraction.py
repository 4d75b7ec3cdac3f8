"""How fast attention makes tokens equal, and what skips, MLPs, LayerNorm and a mask change in that (study a); and the
bounds of the paper over random draws (study b).

Residuals of a deep stack leave float64 after three layers if tokens are stored as they are: 1e-16 of the shared part is
rounding. `SplitTokens` keeps the shared part and the residual apart, and `advance` moves both without ever subtracting one
from the other, so that a residual of 1e-200 has its sixteen digits.

The bounds are those of the paper's first version on arXiv, with the constant 4. That constant is too small for many
tokens; the second version repairs it by a factor γ that depends on the attention weights. Claims b6 and b7 are about
that constant, not about the paper as it stands.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import composite_norm, token_residual
from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory import (
    FunctionalBlock,
    attention_bound,
    beta,
    contraction_order,
    contraction_rate,
    depth_residuals,
    layer_bound,
    mlp_lipschitz,
    skip_bound,
)

# ---- a: cubic contraction ----


TOKENS, WIDTH, DEPTH = 16, 8, 12
SEEDS = {True: 16, False: 64}
SIZES = torch.tensor([0.3, 0.1, 0.03, 0.01, 0.003], dtype=torch.float64)  # how far apart tokens are, for the order
FLOOR = 1e-250  # under it residuals are not followed
EQUAL_SHARE = 1e-6  # share of the tokens' size at which they count as equal
GAINS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of an MLP's first map: its Lipschitz constant is proportional
MASKED_DEPTH, MASKED_FROM = 40, 20  # layers under a causal mask; from which one the rate is read
KINDS = ("attention", "with MLPs", "with LayerNorm", "with skips", "causal mask", "a whole block")

CONTRACTION_CLAIMS = (
    Claim(
        "a1", "A layer of attention without a mask contracts the residual to its third power",
        "slope of log residual after against log residual before, tokens 0.003 to 0.01 apart", "about", 3.0, 0.05,
        where="theorem on one layer",
    ),
    Claim(
        "a2", "With a causal mask it is the first power: the paper's rate is one of attention that sees both ways",
        "the same slope with a causal mask", "about", 1.0, 0.05, by="ours",
    ),
    Claim(
        "a3", "The residual of pure attention falls doubly exponentially with depth",
        f"log residual over that of the layer before, last layer above {FLOOR:g}", "about", 3.0, 0.15, where="abstract",
    ),
    Claim(
        "a4", "Skip connections stop it, the first part of a10",
        f"residual as a share of the tokens' size after {DEPTH} layers of attention with skips, mean of draws",
        "at least", 0.25, where="abstract", bound="ours",
    ),
    Claim(
        "a5", "MLPs alone do not stop it, against the second part of a10",
        f"log10 of the residual's share after {DEPTH} layers of attention and MLP, least collapsed draw",
        "at most", -6.0, by="ours",
    ),
    Claim(
        "a6", "The larger the Lipschitz constant of MLPs, the slower it is",
        f"rank correlation of the gain of MLPs with the layers until the residual's share is under {EQUAL_SHARE:g}",
        "at least", 0.9, where="theorem with MLPs", bound="ours",
    ),
    Claim(
        "a7", "LayerNorm alone does not stop it",
        f"log10 of the residual's share after {DEPTH} layers of attention and LayerNorm, least collapsed draw",
        "at most", -6.0, where="remark on LayerNorm", bound="ours",
    ),
    Claim(
        "a8", "Under a causal mask the fall is a plain exponential, a factor of 1/2 a layer, whatever the weights",
        f"residual's share over that of the layer before, geometric mean of layers {MASKED_FROM} to {MASKED_DEPTH}",
        "about", 0.5, 0.03, by="ours",
    ),
    Claim(
        "a9", "MLPs counteract it: with MLPs that keep a token's size it takes more layers than without",
        f"layers until the residual's share is under {EQUAL_SHARE:g} with MLPs of gain 1, less those of attention alone",
        "at least", 0.0, where="theorem with MLPs", bound="ours",
    ),
    Claim(
        "a10", "Skip connections alone and MLPs alone stop the output from degeneration, which is one reading of the abstract",
        f"log10 of the residual's share after {DEPTH} layers of attention with one of the two: the lesser, mean of draws",
        "at least", -6.0, by="ours",
    ),
)  # fmt: skip


# --- draws ---


def block(seed: int, width: int = WIDTH, heads: int = 1, size: float = 1.0, **kind: Any) -> FunctionalBlock:
    """Gaussian maps that keep a token's size on average when `size` is 1.

    >>> block(0).W_QK.shape, round(block(0).scale, 3)
    (torch.Size([1, 8, 8]), 0.354)
    """
    maps = draw_normal(2, heads, width, width, seed=seed) * size / math.sqrt(width)
    return FunctionalBlock(maps[0], maps[1], scale=width**-0.5, **kind)


def relu_mlp(
    seed: int, gain: float = 1.0, width: int = WIDTH, hidden: int = 4 * WIDTH
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """x -> relu(x W_in + a) W_out, which keeps a token's size on average at gain 1; and both maps."""
    W_in = gain * draw_normal(width, hidden, seed=seed) / math.sqrt(width)
    W_out, shift = draw_normal(hidden, width, seed=seed + 1) * math.sqrt(2 / hidden), draw_normal(hidden, seed=seed + 2)
    return lambda y: (y @ W_in + shift).relu() @ W_out, W_in, W_out


# --- tokens that keep their digits ---


@dataclass(frozen=True)
class SplitTokens:
    """X = 1 v^T + R, R of mean zero over tokens; the two are stored apart."""

    shared: Float[Tensor, " width"]
    rest: Float[Tensor, "tokens width"]

    @classmethod
    def of(cls, x: Float[Tensor, "tokens width"]) -> SplitTokens:
        return cls(x.mean(0), x - x.mean(0))


def advance(x: SplitTokens, layer: FunctionalBlock) -> SplitTokens:
    """One layer of pure attention without a mask, to full precision however small R is.

        b = softmax(s v Q R^T)        E = s R Q R^T        t_i = sum_j b_j (e^E_ij - 1)
        P_ij - b_j = b_j (e^E_ij - 1 - t_i) / (1 + t_i)    R' = sum_h (P - 1 b^T) R W_h    v' = sum_h (v + b R) W_h

    >>> start = SplitTokens.of(draw_normal(5, 8, seed=1))
    >>> after = advance(start, block(2))
    >>> bool(torch.allclose(after.shared + after.rest, block(2)(start.shared + start.rest)))
    True
    """
    if layer.causal or layer.skip or layer.norm or layer.mlp is not None:
        raise ValueError("advance is for attention alone")
    v, R = x.shared, x.rest
    b = (layer.scale * (v @ layer.W_QK @ R.mT)).softmax(-1).unsqueeze(-2)  # (heads, 1, tokens)
    grown = torch.expm1(layer.scale * (R @ layer.W_QK @ R.mT))
    total = (b * grown).sum(-1, keepdim=True)
    rest = (b * (grown - total) / (1 + total) @ R @ layer.W_VO).sum(0)
    shared = ((v + b @ R) @ layer.W_VO).sum(0).squeeze(0)
    return SplitTokens(shared + rest.mean(0), rest - rest.mean(0))


def exact_depth(x: Float[Tensor, "tokens width"], layers: Sequence[FunctionalBlock]) -> list[float]:
    """||res(X_l)|| layer by layer until it is under FLOOR."""
    at, residuals = SplitTokens.of(x), [composite_norm(x - x.mean(0)).item()]
    for layer in layers:
        at = advance(at, layer)
        residuals.append(composite_norm(at.rest).item())
        if residuals[-1] < FLOOR:
            break
    return residuals


# --- what is measured ---


def contraction_slopes(seed: int, heads: int, **kind: Any) -> Float[Tensor, " steps"]:
    """Slopes of log residual after against before, from far apart tokens to close ones."""
    layer = block(seed, heads=heads, **kind)
    v, R = draw_normal(1, WIDTH, seed=seed + 1000), draw_normal(TOKENS, WIDTH, seed=seed + 2000)
    after = torch.stack([depth_residuals(v + size * R, [layer])[1] for size in SIZES])
    return contraction_order(SIZES, after)


def stack_of(kind: str, seed: int, depth: int = DEPTH, gain: float = 1.0) -> list[FunctionalBlock]:
    """Blocks of one of KINDS, every layer redrawn."""
    blocks = []
    for layer in range(depth):
        own = 1000 * seed + 10 * layer
        mlp = relu_mlp(own + 5, gain)[0]
        parts: dict[str, dict[str, Any]] = {
            "attention": {}, "with MLPs": dict(mlp=mlp), "with LayerNorm": dict(norm=True), "with skips": dict(skip=True),
            "causal mask": dict(causal=True), "a whole block": dict(mlp=mlp, mlp_skip=True, skip=True, norm=True),
        }  # fmt: skip
        blocks.append(block(own, **parts[kind]))
    return blocks


def residual_shares(kind: str, seed: int, depth: int = DEPTH, gain: float = 1.0) -> list[float]:
    """Residual as a share of the tokens' size at layers 0 ... depth."""
    return depth_residuals(
        draw_normal(TOKENS, WIDTH, seed=seed), stack_of(kind, seed, depth, gain), relative=True
    ).tolist()


def layers_until_equal(residual_shares: Sequence[float]) -> int:
    """Layers until tokens count as equal; their number and one more where they never do.

    >>> layers_until_equal([1.0, 0.1, 1e-9]), layers_until_equal([1.0, 0.9])
    (2, 2)
    """
    return next((layer for layer, share in enumerate(residual_shares) if share < EQUAL_SHARE), len(residual_shares))


def masked_rate(seed: int) -> float:
    """Geometric mean of the factor per layer, deep under a causal mask; LayerNorm-free, so the shared part moves as the
    rest does.
    """
    by_layer = torch.tensor(residual_shares("causal mask", seed, MASKED_DEPTH), dtype=torch.float64)
    return contraction_rate(by_layer[MASKED_FROM:]).log().mean().exp().item()


def last_log_ratio(residuals: Sequence[float]) -> float:
    """log r_(l+1) / log r_l at the last layer above FLOOR: 3 where the constant no longer counts beside the
    residual.
    """
    logs = [math.log(r) for r in residuals if r >= FLOOR]
    return logs[-1] / logs[-2]


mean_over_draws = partial(by_seed, of="draws")


def largest_of_draws(values: Sequence[float], numbers: Mapping[str, Any] | None = None) -> Measurement:
    """The largest of all draws, a bound for every one of them: no spread."""
    return Measurement(max(values), 0.0, f"none: the largest of {len(values)} draws", numbers or {})


def measure_contraction(setting: Setting) -> Results:
    """All draws of every kind."""
    seeds = list(range(SEEDS[setting.quick]))
    orders = {
        name: torch.stack([contraction_slopes(seed, 1 + seed % 3, causal=name == "causal") for seed in seeds])
        for name in ("free", "causal")
    }
    exact = [exact_depth(draw_normal(TOKENS, WIDTH, seed=seed), stack_of("attention", seed)) for seed in seeds]
    depth = {kind: [residual_shares(kind, seed) for seed in seeds] for kind in setting.each(list(KINDS))}
    until = [[layers_until_equal(residual_shares("with MLPs", seed, gain=gain)) for gain in GAINS] for seed in seeds]
    slower = [spearman(torch.tensor(GAINS), torch.tensor([float(n) for n in row])) or 0.0 for row in until]
    alone = [layers_until_equal(by_layer) for by_layer in depth["attention"]]
    later = [float(row[GAINS.index(1.0)] - n) for row, n in zip(until, alone, strict=True)]
    ends = {kind: [_log10(by_layer[-1]) for by_layer in draws] for kind, draws in depth.items()}
    parts = ("with skips", "with MLPs")
    lesser = [min(pair) for pair in zip(*(ends[part] for part in parts), strict=True)]
    measured = {
        "a1": mean_over_draws(orders["free"][:, -1].tolist()),
        "a2": mean_over_draws(orders["causal"][:, -1].tolist()),
        "a3": mean_over_draws([last_log_ratio(residuals) for residuals in exact]),
        "a4": mean_over_draws([by_layer[-1] for by_layer in depth["with skips"]]),
        "a5": largest_of_draws(ends["with MLPs"]),
        "a6": mean_over_draws(slower),
        "a7": largest_of_draws(ends["with LayerNorm"]),
        "a8": mean_over_draws([masked_rate(seed) for seed in seeds]),
        "a9": mean_over_draws(later),
        "a10": mean_over_draws(lesser, {part: fmean(ends[part]) for part in parts}),
    }
    gains = [{"gain": gain, "layers": fmean(row[n] for row in until)} for n, gain in enumerate(GAINS)]
    tables = {
        "contraction_orders": _orders_table(orders),
        "exact_residual": _exact_table(exact),
        "residual_by_layer": {kind: _layers_table(draws) for kind, draws in depth.items()},
        "layers_until_equal": {"alone": fmean(alone), "by_gain": gains},
    }
    return Results(measured, tables)


def _orders_table(orders: Mapping[str, Float[Tensor, "draws steps"]]) -> dict[str, list[tuple[float, float]]]:
    """Mean slope against how far apart tokens are, half way between two sizes."""
    middle = [math.sqrt(a * b) for a, b in pairwise(SIZES.tolist())]
    return {name: list(zip(middle, draws.mean(0).tolist(), strict=True)) for name, draws in orders.items()}


def _exact_table(exact: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Median of log10 residual over draws at every depth that all of them reach; and three times the layer before."""
    reached = min(len(residuals) for residuals in exact)
    logs = torch.tensor([residuals[:reached] for residuals in exact], dtype=torch.float64).clamp_min(1e-308).log10()
    medians = logs.median(0).values.tolist()
    return {"log10": medians, "tripled": [(n + 1, 3 * x) for n, x in enumerate(medians[:-1]) if n >= 2]}


def _layers_table(draws: Sequence[Sequence[float]]) -> dict[str, Any]:
    """Geometric mean over draws, as points and at the last layer; a share that is rounding counts as 1e-17."""
    means = torch.tensor(draws, dtype=torch.float64).clamp_min(1e-17).log().mean(0).exp().tolist()
    return {"points": visible_points(means), "last": means[-1]}


def visible_points(residual_shares: Sequence[float]) -> list[tuple[int, float]]:
    """Points (layer, share) until float64 has nothing left to show.

    >>> visible_points([1.0, 1e-8, 1e-17, 1e-17])
    [(0, 1.0), (1, 1e-08), (2, 1e-17)]
    """
    last = next((n for n, share in enumerate(residual_shares) if share < 1e-16), len(residual_shares) - 1)
    return [(n, max(share, 1e-17)) for n, share in enumerate(residual_shares[: last + 1])]


def _log10(share: float) -> float:
    return math.log10(max(share, 1e-17))


CONTRACTION_STUDY = Study("cubic contraction", CONTRACTION_CLAIMS, measure_contraction)


# ---- b: bounds over random draws ----


DRAWS = {True: 600, False: 6000}
BOUND_WIDTH, BOUND_TOKENS, TOKEN_DISTANCES = 4, (2, 5, 20), (0.05, 0.3, 1.0, 4.0)
DEEP, ROUNDING = 4, 1e-11  # layers at most; a residual this small beside the tokens is not compared
HUB_WEIGHT, OWN_WEIGHT = 7.0, 100.0  # of the crowd
CROWD = 1_000_000  # tokens that see themselves

BOUNDS_CLAIMS = (
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
class LayerDraw:
    """One layer on one set of tokens: residual after it, over the stated and over the proved bound."""

    tokens: int
    size: float
    stated: float
    proved: float


def draw_layer(seed: int, tokens: int, size: float, centre: str) -> LayerDraw:
    """Gaussian tokens `size` apart around a Gaussian centre; every fifth draw has sharper attention, which piles up on
    single keys.
    """
    layer = block(seed, BOUND_WIDTH, heads=1 + seed % 3, size=size * (1 + 3 * (seed % 5 == 0)))
    x = size * draw_normal(tokens, BOUND_WIDTH, seed=seed + 10_000) + draw_normal(1, BOUND_WIDTH, seed=seed + 20_000)
    before, after = depth_residuals(x, [layer], centre).tolist()
    stated = attention_bound(before, beta(layer.W_QK, layer.W_VO), layer.scale, heads=len(layer.W_QK)).item()
    return LayerDraw(tokens, size, after / stated, best_at_least(layer(x)) / layer_bound(x, layer, centre).item())


def best_at_least(x: Float[Tensor, "tokens width"]) -> float:
    """What no ||X - 1 v^T|| is under: medians are best for columns, and no v is closer to two tokens than half their
    distance.

    >>> round(best_at_least(torch.tensor([[1.0], [-1.0]])) ** 2, 6)
    2.0
    """
    columns = (x - x.quantile(0.5, dim=0, interpolation="lower")).abs().sum(0).max()
    return (columns * torch.cdist(x, x, p=1).max() / 2).sqrt().item()


def deep_log_ratio(seed: int, kind: str) -> float | None:
    """log10 of residual over bound after 1 to DEEP layers; None where float64 has nothing left to compare."""
    depth, heads, size = 1 + seed % DEEP, 1 + seed % 2, (0.3, 0.6, 1.0)[seed % 3]
    mlp, W_in, W_out = relu_mlp(seed + 7, 1.0, BOUND_WIDTH, 6)
    parts: dict[str, dict[str, Any]] = {"pure": {}, "skip": dict(skip=True), "mlp": dict(mlp=mlp)}
    layers = [block(100 * seed + i, BOUND_WIDTH, heads, **parts[kind]) for i in range(depth)]
    x = size * draw_normal(6, BOUND_WIDTH, seed=seed + 500)
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


def crowd_of(m: int) -> Crowd:
    """A key that all tokens see (the hub), m tokens that see themselves as well, m that are nothing but the centre.

    Token 0 is the centre and a unit along channel 0, token j = 1 ... m one along channel j; W_QK = K 1, W_VO = 1, s =
    1, ||R|| = 1. The centre lies along channel 0, so that the hub has HUB times and a token for itself ITSELF times the
    weight of all 2 m others. Tokens of a kind have the same row of attention up to the place of the weight on itself,
    so two rows stand for all: in channel 0 the two kinds differ by their weight on the hub, and two tokens of the first
    by that on themselves.

    >>> small, large = crowd_of(1_000), crowd_of(10_000)
    >>> small.residual < small.stated, large.residual < large.stated, large.residual < large.proved
    (True, False, True)
    """
    strength, bias = math.log(OWN_WEIGHT * 2 * m), math.log(HUB_WEIGHT * 2 * m)
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


def crossing_count() -> int:
    """The least number of tokens at which this crowd exceeds the stated bound, by bisection over m."""
    low, high = 100, 100_000
    while high - low > 1:
        middle = (low + high) // 2
        at = crowd_of(middle)
        low, high = (low, middle) if at.residual > at.stated else (middle, high)
    return 2 * high + 1


# --- the study ---


def measure_bounds(setting: Setting) -> Results:
    """All draws, and crowds of growing size."""
    count = DRAWS[setting.quick]
    plan = [
        (seed, BOUND_TOKENS[seed % 3], TOKEN_DISTANCES[seed % 4], centre)
        for seed in range(count)
        for centre in ("mean", "midrange")
    ]
    draws = [draw_layer(*each) for each in setting.each(plan)]
    ratios = {
        kind: [r for seed in range(count // 2) if (r := deep_log_ratio(seed, kind)) is not None]
        for kind in ("pure", "skip", "mlp")
    }
    crowds = [crowd_of(m) for m in (100, 1_000, 10_000, 100_000, CROWD)]
    stated = [draw.stated for draw in draws]
    last = crowds[-1]
    measured = {
        "b1": largest_of_draws(stated),
        "b2": largest_of_draws(stated),
        "b3": largest_of_draws(ratios["pure"], {"least": min(ratios["pure"])}),
        "b4": largest_of_draws([10**r for r in ratios["skip"]]),
        "b5": largest_of_draws([10**r for r in ratios["mlp"]]),
        "b6": Measurement(last.residual / last.stated, 0.0, "none: solved"),
        "b7": largest_of_draws([d.proved for d in draws] + [c.residual / c.proved for c in crowds]),
    }
    used = {
        "by_size": [
            {"size": size, "share": max(d.stated for d in draws if d.size == size)} for size in TOKEN_DISTANCES
        ],
        "by_tokens": [(n, max(d.stated for d in draws if d.tokens == n)) for n in BOUND_TOKENS],
        "median": float(torch.tensor(stated).median()),
    }
    return Results(
        measured, {"bound_used": used, "crowds": [vars(c) for c in crowds], "crowd_crossing": crossing_count()}
    )


BOUNDS_STUDY = Study("bounds over random draws", BOUNDS_CLAIMS, measure_bounds)
