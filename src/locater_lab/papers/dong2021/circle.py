"""One attention layer applied again and again to two points on a circle, with and without skip and MLP: study g.

1,000 points on a circle of radius 0.3; points i and i + 499 are the two tokens of an input, and the layer learns to
move both by one step, 0.36 degrees. Then its output is fed back. A layer that mixes tokens brings them together,
whatever it has learnt of the circle.

    x -> f(x)          f = Linear(2, d), LayerNorm, attention of two heads, [skip], LayerNorm, [MLP, skip, LayerNorm], Linear(d, 2)
    x -> x + f(x)      the same with a skip around all of it

Several seeds are trained at once, along the first axis of every tensor. The published rate, 1e-5, leaves a layer of
this size where it was drawn; RATE does not.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study

POINTS, RADIUS, APART, WALKED = 1000, 0.3, 499, 300
HEADS, BATCH, RATE = 2, 64, 3e-3
STEPS, SEEDS = {True: 400, False: 3000}, {True: 24, False: 64}
MERGED = 0.1  # of the distance at the start: tokens closer than that count as merged
EARLY = 10  # steps after which widths are compared
Pairs = Float[Tensor, "seeds batch 2 2"]
Weights = dict[str, Tensor]


@dataclass(frozen=True)
class LayerVariant:
    """What stands around attention."""

    name: str
    width: int = 32
    skip: bool = False  # around attention
    mlp: bool = False
    outer: bool = False  # x + f(x)


VARIANTS = (
    LayerVariant("attention"),
    LayerVariant("attention, width 8", width=8),
    LayerVariant("attention and MLP", mlp=True),
    LayerVariant("attention with skip", skip=True),
    LayerVariant("x + attention", outer=True),
)

CLAIMS = (
    Claim(
        "g1", "A layer of attention applied again and again brings its tokens together",
        f"share of seeds whose tokens have merged after {WALKED} steps, attention alone", "at least", 0.5,
        where="experiment on a circle", bound="ours",
    ),
    Claim(
        "g2", "A skip around the recurrence keeps them apart", "the same share of x + attention", "at most", 0.2,
        where="experiment on a circle", bound="ours",
    ),
    Claim(
        "g3", "An MLP keeps them apart", "the same share of attention and MLP", "at most", 0.2,
        where="experiment on a circle", bound="ours",
    ),
    Claim(
        "g4", "A skip around attention, inside the layer, keeps them apart",
        "the same share of attention with skip", "at most", 0.2, by="ours",
    ),
    Claim(
        "g5", "Tokens merge the faster the narrower the layer is",
        f"share of seeds merged after {EARLY} steps, width 8 less width 32", "at least", 0.0,
        where="experiment on a circle",
    ),
)  # fmt: skip


def circle_points() -> Float[Tensor, "points 2"]:
    """All points, in order.

    >>> bool(torch.allclose(circle_points().norm(dim=1), torch.tensor(RADIUS)))
    True
    """
    angle = 2 * math.pi * torch.arange(POINTS) / POINTS
    return RADIUS * torch.stack([angle.cos(), angle.sin()], 1)


def token_pairs(at: Tensor, ahead: int = 0) -> Tensor:
    """The two tokens (..., 2, 2) of input `at`, moved by `ahead` steps."""
    points = circle_points()
    return torch.stack([points[(at + ahead) % POINTS], points[(at + APART + ahead) % POINTS]], -2)


def draw_weights(variant: LayerVariant, seeds: int) -> Weights:
    """Maps N(0, 1/rows), shifts zero; one set per seed."""
    d, generator = variant.width, torch.Generator().manual_seed(1)
    sides = {
        "in": (2, d),
        "query": (d, d),
        "key": (d, d),
        "value": (d, d),
        "output": (d, d),
        "wide": (d, d),
        "narrow": (d, d),
        "out": (d, 2),
    }
    weights = {name: torch.randn(seeds, *side, generator=generator) / side[0] ** 0.5 for name, side in sides.items()}
    weights |= {f"{name}_shift": torch.zeros(seeds, 1, side[1]) for name, side in sides.items()}
    return {name: x.requires_grad_() for name, x in weights.items()}


def apply_layer(variant: LayerVariant, weights: Weights, x: Pairs) -> Pairs:
    """x + f(x), or f(x)."""

    def affine(name: str, y: Tensor) -> Tensor:
        return (y.flatten(1, 2) @ weights[name] + weights[f"{name}_shift"]).unflatten(1, y.shape[1:3])

    def normalize(y: Tensor) -> Tensor:
        return functional.layer_norm(y, y.shape[-1:])

    y = normalize(affine("in", x))
    query, key, value = (
        affine(name, y).unflatten(-1, (HEADS, -1)).transpose(2, 3) for name in ("query", "key", "value")
    )
    mixed = functional.scaled_dot_product_attention(query, key, value).transpose(2, 3).flatten(3)
    y = normalize(affine("output", mixed) + (y if variant.skip else 0))
    if variant.mlp:
        y = normalize(y + affine("narrow", functional.gelu(affine("wide", y))))
    output = affine("out", y)
    return x + output if variant.outer else output


def train_variant(variant: LayerVariant, seeds: int, steps: int) -> Weights:
    """Adam with cosine decay on the squared error of the next pair, random starts."""
    weights, generator = draw_weights(variant, seeds), torch.Generator().manual_seed(0)
    optimizer = torch.optim.Adam(weights.values(), lr=RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        at = torch.randint(POINTS, (seeds, BATCH), generator=generator)
        error = (
            (apply_layer(variant, weights, token_pairs(at)) - token_pairs(at, 1)).square().sum((-2, -1)).mean(1).sum()
        )
        optimizer.zero_grad()
        error.backward()
        optimizer.step()
        schedule.step()
    return weights


@torch.no_grad()
def walk_states(variant: LayerVariant, weights: Weights, steps: int = WALKED) -> Float[Tensor, "states seeds 2 2"]:
    """The first pair and what the layer makes of it, fed back."""
    x = token_pairs(torch.zeros(len(weights["in"]), 1, dtype=torch.long))
    states = [x]
    for _ in range(steps):
        states.append(apply_layer(variant, weights, states[-1]))
    return torch.stack(states).squeeze(2)


@torch.no_grad()
def prediction_error(variant: LayerVariant, weights: Weights) -> list[float]:
    """Root mean square distance of a predicted point from the right one, in steps of the circle."""
    at = torch.arange(POINTS).expand(len(weights["in"]), POINTS)
    off = (apply_layer(variant, weights, token_pairs(at)) - token_pairs(at, 1)).square().sum(-1).mean((1, 2)).sqrt()
    return (off / (2 * math.pi * RADIUS / POINTS)).tolist()


def relative_distance(states: Float[Tensor, "states seeds 2 2"]) -> Float[Tensor, "states seeds"]:
    """Distance of the two tokens over that at the start."""
    distance = (states[..., 0, :] - states[..., 1, :]).norm(dim=-1)
    return distance / distance[0]


def measure(setting: Setting) -> Results:
    """Every variant, all seeds at once."""
    merged: dict[str, Float[Tensor, "states seeds"]] = {}
    table = dict[str, Any]()
    for variant in setting.each(list(VARIANTS)):
        weights = train_variant(variant, SEEDS[setting.quick], STEPS[setting.quick])
        states = walk_states(variant, weights)
        merged[variant.name] = (relative_distance(states) < MERGED).double()
        table[variant.name] = {
            "error": float(torch.tensor(prediction_error(variant, weights)).median()),
            "share_merged": merged[variant.name][::10].mean(1).tolist(),
            "merged": _typical(states, merging=True),
            "apart": _typical(states, merging=False),
        }
    measured = {
        "g1": share_of_seeds(merged["attention"][-1]),
        "g2": share_of_seeds(merged["x + attention"][-1]),
        "g3": share_of_seeds(merged["attention and MLP"][-1]),
        "g4": share_of_seeds(merged["attention with skip"][-1]),
        "g5": difference_of_shares(merged["attention, width 8"][EARLY], merged["attention"][EARLY]),
    }
    return Results(measured, {"circle": table})


def _typical(states: Float[Tensor, "states seeds 2 2"], merging: bool) -> list[list[list[float]]]:
    """Paths of both tokens for one seed: of those that merge the middle one by when, shown until then; of the others by
    distance.
    """
    distance = relative_distance(states)
    kind = (distance[-1] < MERGED) == merging
    if not kind.any():
        return []
    when = (distance < MERGED).int().argmax(0)
    of_kind = kind.nonzero().squeeze(1)
    key = when.double() if merging else distance[-1].double()
    seed = int(of_kind[key[of_kind].argsort(stable=True)[len(of_kind) // 2]])
    path = states[: int(when[seed]) + EARLY if merging else len(states), seed]
    return [[[round(c, 4) for c in point] for point in path[:, token].tolist()] for token in range(2)]


def share_of_seeds(yes: Float[Tensor, " seeds"]) -> Measurement:
    """A share with its 95 % interval (Wilson), which stays open where all seeds agree.

    >>> measured = share_of_seeds(torch.zeros(24))
    >>> round(measured.value, 3), round(measured.value + measured.spread, 3)
    (0.069, 0.138)
    """
    n, p, z = len(yes), float(yes.double().mean()), 1.96
    middle = (p + z * z / (2 * n)) / (1 + z * z / n)
    room = z * math.sqrt(p * (1 - p) / n + z * z / (4 * n * n)) / (1 + z * z / n)
    return Measurement(middle, room, f"Wilson interval over {n} seeds", {"share": p}, tuple(yes.tolist()))


def difference_of_shares(yes: Float[Tensor, " seeds"], other: Float[Tensor, " seeds"]) -> Measurement:
    """One share less another, their intervals added in squares.

    >>> round(difference_of_shares(torch.ones(24), torch.zeros(24)).value, 3)
    0.862
    """
    a, b = share_of_seeds(yes), share_of_seeds(other)
    numbers = {"share": a.numbers["share"], "other": b.numbers["share"]}
    spread = math.hypot(a.spread, b.spread)
    return Measurement(a.value - b.value, spread, a.spread_of, numbers, tuple((yes - other).tolist()))


STUDY = Study("points on a circle", CLAIMS, measure)
