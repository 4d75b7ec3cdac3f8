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
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import composite_norm
from locater.numerics import spearman
from locater.theory import Block, contraction_order, contraction_rate, depth_residuals
from locater_papers.engine.claims import Claim, Measured, by_seed
from locater_papers.engine.draws import normal
from locater_papers.engine.papers import Setting, Study

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
    ),
    Claim(
        "a2", "With a causal mask it is the first power: the paper's rate is one of attention that sees both ways",
        "the same slope with a causal mask", "about", 1.0, 0.05, by="ours",
    ),
    Claim(
        "a3", "The residual of pure attention falls doubly exponentially with depth",
        f"log residual over that of the layer before, last layer above {FLOOR:g}", "about", 3.0, 0.15,
    ),
    Claim(
        "a4", "Skips stop it",
        f"residual as a share of the tokens' size after {DEPTH} layers of attention with skips, mean of draws", "at least", 0.25,
    ),
    Claim(
        "a5", "MLPs alone do not stop it",
        f"log10 of the residual's share after {DEPTH} layers of attention and MLP, least collapsed draw", "at most", -6.0,
    ),
    Claim(
        "a6", "The larger the Lipschitz constant of MLPs, the slower it is",
        f"rank correlation of the gain of MLPs with the layers until the residual's share is under {GONE:g}", "at least", 0.9,
    ),
    Claim(
        "a7", "LayerNorm alone does not stop it",
        f"log10 of the residual's share after {DEPTH} layers of attention and LayerNorm, least collapsed draw", "at most", -6.0,
    ),
    Claim(
        "a8", "Under a causal mask the fall is a plain exponential, a factor of 2 a layer, whatever the weights",
        f"residual's share over that of the layer before, geometric mean of layers {MASKED_FROM} to {MASKED_DEPTH}", "about", 0.5, 0.03,
        by="ours",
    ),
    Claim(
        "a9", "MLPs counteract it: with MLPs that keep a token's size it takes more layers than without",
        f"layers until the residual's share is under {GONE:g} with MLPs of gain 1, less those of attention alone", "at least", 0.0,
    ),
)  # fmt: skip


# --- draws ------------------------------------------------------------------------------------------------------------


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


# --- tokens that keep their digits ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Tokens:
    """X = 1 v^T + R, R of mean zero over tokens; the two are held apart."""

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
    at, found = Tokens.of(x), [composite_norm(x - x.mean(0)).item()]
    for layer in layers:
        at = advance(at, layer)
        found.append(composite_norm(at.rest).item())
        if found[-1] < FLOOR:
            break
    return found


# --- what is measured -------------------------------------------------------------------------------------------------


def order(seed: int, heads: int, **kind: Any) -> Float[Tensor, " steps"]:
    """Slopes of log residual after against before, from far apart tokens to close ones."""
    layer = block(seed, heads=heads, **kind)
    v, R = normal(1, WIDTH, seed=seed + 1000), normal(TOKENS, WIDTH, seed=seed + 2000)
    after = torch.stack([depth_residuals(v + size * R, [layer])[1] for size in SIZES])
    return contraction_order(SIZES, after)


def stack(kind: str, seed: int, depth: int = DEPTH, gain: float = 1.0) -> list[Block]:
    """Blocks of one of KINDS, every layer drawn anew."""
    made = []
    for layer in range(depth):
        own = 1000 * seed + 10 * layer
        mlp = relu_mlp(own + 5, gain)[0]
        parts: dict[str, dict[str, Any]] = {
            "attention": {}, "with MLPs": dict(mlp=mlp), "with LayerNorm": dict(norm=True), "with skips": dict(skip=True),
            "causal mask": dict(causal=True), "a whole block": dict(mlp=mlp, mlp_skip=True, skip=True, norm=True),
        }  # fmt: skip
        made.append(block(own, **parts[kind]))
    return made


def shares(kind: str, seed: int, depth: int = DEPTH, gain: float = 1.0) -> list[float]:
    """Residual as a share of the tokens' size at layers 0 ... depth."""
    return depth_residuals(normal(TOKENS, WIDTH, seed=seed), stack(kind, seed, depth, gain), relative=True).tolist()


def until_gone(found: Sequence[float]) -> int:
    """Layers until tokens count as equal; their number and one more where they never do.

    >>> until_gone([1.0, 0.1, 1e-9]), until_gone([1.0, 0.9])
    (2, 2)
    """
    return next((layer for layer, share in enumerate(found) if share < GONE), len(found))


def masked_rate(seed: int) -> float:
    """Geometric mean of the factor per layer, deep under a causal mask; LayerNorm-free, so the shared part moves as the
    rest does.
    """
    found = torch.tensor(shares("causal mask", seed, MASKED_DEPTH), dtype=torch.float64)
    return contraction_rate(found[MASKED_FROM:]).log().mean().exp().item()


def last_ratio(residuals: Sequence[float]) -> float:
    """log r_(l+1) / log r_l at the last layer above FLOOR: 3 where the constant no longer counts beside the
    residual.
    """
    kept = [math.log(r) for r in residuals if r >= FLOOR]
    return kept[-1] / kept[-2]


over_draws = partial(by_seed, of="draws")


def worst(values: Sequence[float], numbers: Mapping[str, Any] | None = None) -> Measured:
    """The largest of all draws, a bound for every one of them: no spread."""
    return Measured(max(values), 0.0, f"none: the largest of {len(values)} draws", numbers or {})


def measure(setting: Setting) -> Mapping[str, Measured]:
    """All draws of every kind."""
    seeds = list(range(SEEDS[setting.quick]))
    orders = {
        name: torch.stack([order(seed, 1 + seed % 3, causal=name == "causal") for seed in seeds])
        for name in ("free", "causal")
    }
    deep = [exact_depth(normal(TOKENS, WIDTH, seed=seed), stack("attention", seed)) for seed in seeds]
    depth = {kind: [shares(kind, seed) for seed in seeds] for kind in setting.each(list(KINDS))}
    until = [[until_gone(shares("with MLPs", seed, gain=gain)) for gain in GAINS] for seed in seeds]
    slower = [spearman(torch.tensor(GAINS), torch.tensor([float(n) for n in row])) or 0.0 for row in until]
    alone = [until_gone(found) for found in depth["attention"]]
    later = [float(row[GAINS.index(1.0)] - n) for row, n in zip(until, alone, strict=True)]
    curves = {"sizes": SIZES.tolist(), **{name: held.mean(0).tolist() for name, held in orders.items()}}
    return {
        "a1": over_draws(orders["free"][:, -1].tolist(), {"orders": curves}),
        "a2": over_draws(orders["causal"][:, -1].tolist()),
        "a3": over_draws([last_ratio(found) for found in deep], {"exact": _exact_table(deep)}),
        "a4": over_draws([found[-1] for found in depth["with skips"]], {"depth": {kind: _geometric(held) for kind, held in depth.items()}}),
        "a5": worst([_log10(found[-1]) for found in depth["with MLPs"]]),
        "a6": over_draws(slower, {"gains": list(GAINS), "layers": torch.tensor(until).double().mean(0).tolist()}),
        "a9": over_draws(later, {"alone": sum(alone) / len(alone)}),
        "a7": worst([_log10(found[-1]) for found in depth["with LayerNorm"]]),
        "a8": over_draws([masked_rate(seed) for seed in seeds]),
    }  # fmt: skip


def _exact_table(deep: Sequence[Sequence[float]]) -> list[float]:
    """Median of log10 residual over draws at every depth that all of them reach."""
    reached = min(len(found) for found in deep)
    held = torch.tensor([found[:reached] for found in deep], dtype=torch.float64).clamp_min(1e-308).log10()
    return held.median(0).values.tolist()


def _geometric(held: Sequence[Sequence[float]]) -> list[float]:
    """Geometric mean over draws; a share that is rounding counts as 1e-17."""
    return torch.tensor(held, dtype=torch.float64).clamp_min(1e-17).log().mean(0).exp().tolist()


def _log10(share: float) -> float:
    return math.log10(max(share, 1e-17))


STUDY = Study("cubic contraction", CLAIMS, measure)
