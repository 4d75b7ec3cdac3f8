"""How fast attention makes tokens equal, and what skips, MLPs, LayerNorm and a mask change in that: study a.

Residuals of a deep stack leave float64 after three layers if tokens are stored as they are: 1e-16 of the shared part is
rounding. `Tokens` keeps the shared part and the residual apart, and `advance` moves both without ever subtracting one
from the other, so that a residual of 1e-200 has its sixteen digits.
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

from locater.measures import composite_norm
from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory import Block, contraction_order, contraction_rate, depth_residuals

TOKENS, WIDTH, DEPTH = 16, 8, 12
SEEDS = {True: 16, False: 64}
SIZES = torch.tensor([0.3, 0.1, 0.03, 0.01, 0.003], dtype=torch.float64)  # how far apart tokens are, for the order
FLOOR = 1e-250  # under it residuals are not followed
GONE = 1e-6  # share of the tokens' size at which they count as equal
GAINS = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)  # of an MLP's first map: its Lipschitz constant is proportional
MASKED_DEPTH, MASKED_FROM = 40, 20  # layers under a causal mask; from which one the rate is read
KINDS = ("attention", "with MLPs", "with LayerNorm", "with skips", "causal mask", "a whole block")

CLAIMS = (
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
        f"rank correlation of the gain of MLPs with the layers until the residual's share is under {GONE:g}",
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
        f"layers until the residual's share is under {GONE:g} with MLPs of gain 1, less those of attention alone",
        "at least", 0.0, where="theorem with MLPs", bound="ours",
    ),
    Claim(
        "a10", "Skip connections and MLPs stop the output from degeneration",
        f"log10 of the residual's share after {DEPTH} layers of attention with one of the two: the lesser, mean of draws",
        "at least", -6.0, where="abstract", bound="ours",
    ),
)  # fmt: skip


# --- draws ---


def block(seed: int, width: int = WIDTH, heads: int = 1, size: float = 1.0, **kind: Any) -> Block:
    """Gaussian maps that keep a token's size on average when `size` is 1.

    >>> block(0).W_QK.shape, round(block(0).scale, 3)
    (torch.Size([1, 8, 8]), 0.354)
    """
    maps = normal(2, heads, width, width, seed=seed) * size / math.sqrt(width)
    return Block(maps[0], maps[1], scale=width**-0.5, **kind)


def relu_mlp(
    seed: int, gain: float = 1.0, width: int = WIDTH, hidden: int = 4 * WIDTH
) -> tuple[Callable[[Tensor], Tensor], Tensor, Tensor]:
    """x -> relu(x W_in + a) W_out, which keeps a token's size on average at gain 1; and both maps."""
    W_in = gain * normal(width, hidden, seed=seed) / math.sqrt(width)
    W_out, shift = normal(hidden, width, seed=seed + 1) * math.sqrt(2 / hidden), normal(hidden, seed=seed + 2)
    return lambda y: (y @ W_in + shift).relu() @ W_out, W_in, W_out


# --- tokens that keep their digits ---


@dataclass(frozen=True)
class Tokens:
    """X = 1 v^T + R, R of mean zero over tokens; the two are stored apart."""

    shared: Float[Tensor, " width"]
    rest: Float[Tensor, "tokens width"]

    @classmethod
    def of(cls, x: Float[Tensor, "tokens width"]) -> Tokens:
        return cls(x.mean(0), x - x.mean(0))


def advance(x: Tokens, layer: Block) -> Tokens:
    """One layer of pure attention without a mask, to full precision however small R is.

        b = softmax(s v Q R^T)        E = s R Q R^T        t_i = sum_j b_j (e^E_ij - 1)
        P_ij - b_j = b_j (e^E_ij - 1 - t_i) / (1 + t_i)    R' = sum_h (P - 1 b^T) R W_h    v' = sum_h (v + b R) W_h

    >>> start = Tokens.of(normal(5, 8, seed=1))
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
    return Tokens(shared + rest.mean(0), rest - rest.mean(0))


def exact_depth(x: Float[Tensor, "tokens width"], layers: Sequence[Block]) -> list[float]:
    """||res(X_l)|| layer by layer until it is under FLOOR."""
    at, residuals = Tokens.of(x), [composite_norm(x - x.mean(0)).item()]
    for layer in layers:
        at = advance(at, layer)
        residuals.append(composite_norm(at.rest).item())
        if residuals[-1] < FLOOR:
            break
    return residuals


# --- what is measured ---


def order(seed: int, heads: int, **kind: Any) -> Float[Tensor, " steps"]:
    """Slopes of log residual after against before, from far apart tokens to close ones."""
    layer = block(seed, heads=heads, **kind)
    v, R = normal(1, WIDTH, seed=seed + 1000), normal(TOKENS, WIDTH, seed=seed + 2000)
    after = torch.stack([depth_residuals(v + size * R, [layer])[1] for size in SIZES])
    return contraction_order(SIZES, after)


def stack(kind: str, seed: int, depth: int = DEPTH, gain: float = 1.0) -> list[Block]:
    """Blocks of one of KINDS, every layer drawn anew."""
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


def shares(kind: str, seed: int, depth: int = DEPTH, gain: float = 1.0) -> list[float]:
    """Residual as a share of the tokens' size at layers 0 ... depth."""
    return depth_residuals(normal(TOKENS, WIDTH, seed=seed), stack(kind, seed, depth, gain), relative=True).tolist()


def until_gone(residual_shares: Sequence[float]) -> int:
    """Layers until tokens count as equal; their number and one more where they never do.

    >>> until_gone([1.0, 0.1, 1e-9]), until_gone([1.0, 0.9])
    (2, 2)
    """
    return next((layer for layer, share in enumerate(residual_shares) if share < GONE), len(residual_shares))


def masked_rate(seed: int) -> float:
    """Geometric mean of the factor per layer, deep under a causal mask; LayerNorm-free, so the shared part moves as the
    rest does.
    """
    by_layer = torch.tensor(shares("causal mask", seed, MASKED_DEPTH), dtype=torch.float64)
    return contraction_rate(by_layer[MASKED_FROM:]).log().mean().exp().item()


def last_ratio(residuals: Sequence[float]) -> float:
    """log r_(l+1) / log r_l at the last layer above FLOOR: 3 where the constant no longer counts beside the
    residual.
    """
    logs = [math.log(r) for r in residuals if r >= FLOOR]
    return logs[-1] / logs[-2]


over_draws = partial(by_seed, of="draws")


def worst(values: Sequence[float], numbers: Mapping[str, Any] | None = None) -> Measurement:
    """The largest of all draws, a bound for every one of them: no spread."""
    return Measurement(max(values), 0.0, f"none: the largest of {len(values)} draws", numbers or {})


def measure(setting: Setting) -> Results:
    """All draws of every kind."""
    seeds = list(range(SEEDS[setting.quick]))
    orders = {
        name: torch.stack([order(seed, 1 + seed % 3, causal=name == "causal") for seed in seeds])
        for name in ("free", "causal")
    }
    exact = [exact_depth(normal(TOKENS, WIDTH, seed=seed), stack("attention", seed)) for seed in seeds]
    depth = {kind: [shares(kind, seed) for seed in seeds] for kind in setting.each(list(KINDS))}
    until = [[until_gone(shares("with MLPs", seed, gain=gain)) for gain in GAINS] for seed in seeds]
    slower = [spearman(torch.tensor(GAINS), torch.tensor([float(n) for n in row])) or 0.0 for row in until]
    alone = [until_gone(by_layer) for by_layer in depth["attention"]]
    later = [float(row[GAINS.index(1.0)] - n) for row, n in zip(until, alone, strict=True)]
    ends = {kind: [_log10(by_layer[-1]) for by_layer in draws] for kind, draws in depth.items()}
    parts = ("with skips", "with MLPs")
    lesser = [min(pair) for pair in zip(*(ends[part] for part in parts), strict=True)]
    measured = {
        "a1": over_draws(orders["free"][:, -1].tolist()),
        "a2": over_draws(orders["causal"][:, -1].tolist()),
        "a3": over_draws([last_ratio(residuals) for residuals in exact]),
        "a4": over_draws([by_layer[-1] for by_layer in depth["with skips"]]),
        "a5": worst(ends["with MLPs"]),
        "a6": over_draws(slower),
        "a7": worst(ends["with LayerNorm"]),
        "a8": over_draws([masked_rate(seed) for seed in seeds]),
        "a9": over_draws(later),
        "a10": over_draws(lesser, {part: fmean(ends[part]) for part in parts}),
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
    return {"points": visible(means), "last": means[-1]}


def visible(residual_shares: Sequence[float]) -> list[tuple[int, float]]:
    """Points (layer, share) until float64 has nothing left to show.

    >>> visible([1.0, 1e-8, 1e-17, 1e-17])
    [(0, 1.0), (1, 1e-08), (2, 1e-17)]
    """
    last = next((n for n, share in enumerate(residual_shares) if share < 1e-16), len(residual_shares) - 1)
    return [(n, max(share, 1e-17)) for n, share in enumerate(residual_shares[: last + 1])]


def _log10(share: float) -> float:
    return math.log10(max(share, 1e-17))


STUDY = Study("cubic contraction", CLAIMS, measure)
