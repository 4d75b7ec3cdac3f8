"""What a gate changes, by the place it is put: linear experts, W_V and W_O as one matrix, the rank of a head's output.
Study b.

Places as in Qiu et al. (2025): 1 after attention, 2 on values, 3 on keys, 4 on queries, 5 after W_O. The abstract of
Nguyen et al. says that their theory explains why places 1 and 2 help and the others do not; public summaries give
experts that are not linear as the reason. Maps are fixed as they are at one input, since the claims are about experts;
x then varies, and gates with it.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from statistics import fmean

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.papers.nguyen2026.mixture import EXACT

TOKENS, WIDTH, SIZE = 6, 8, 3
PLACES = (
    "none",
    "1 after attention",
    "1, one per head",
    "2 values",
    "2, one per head",
    "3 keys",
    "4 queries",
    "5 after W_O",
)
GATE = 1.0  # standard deviation of a gate's logits
SPREADS = (0.1, 0.32, 1.0, 2.0, 4.0)  # 0.32 is this package's first weights at a width of 256
DRAWS, SEEDS = {True: 2000, False: 8000}, {True: 8, False: 20}
FIXED = "the map fixed"

CLAIMS = (
    Claim("b1", "Without a gate a head's output is linear in its tokens", f"share of variance that a linear fit leaves, {FIXED}",
          "at most", 1e-9, by="summary"),
    Claim("b2", "A gate after attention, or on the values, makes the experts non-linear",
          "share of variance that a linear fit leaves, the least of places 1 and 2, per element and per head, gate logits of deviation 1, "
          f"{FIXED}", "at least", 0.05, by="summary", bound="ours"),
    Claim("b3", "Gates on keys and queries do not: they act through the map alone",
          f"share of variance that a linear fit leaves, the larger of places 3 and 4, {FIXED}", "at most", 1e-9, by="ours"),
    Claim("b4", "Nor does a gate after W_O, so that linear experts tell the places that help from those that do not",
          f"share of variance that a linear fit leaves, place 5, {FIXED}", "at most", 1e-9, by="ours"),
    Claim("b5", "Gates begin nearly linear: the first weights of a gate, 0.02 at a width of 256",
          "share of variance that a linear fit leaves, place 1, gate logits of standard deviation 0.32", "at most", 0.01, by="ours"),
    Claim("b6", "A gate between W_V and W_O keeps them from being one matrix",
          "relative change of the output when W_V, W_O become W_V R, R^T W_O, R a rotation; the lesser of places "
          "1 and 2, per element", "at least", 0.1, by="ours"),
    Claim("b7", "So does a gate of one number per head", "the same, the lesser of places 1 and 2, one number per head", "at least", 0.1,
          by="ours"),
    Claim("b8", "Gates elsewhere leave them one matrix", "the same, the largest of no gate and places 3, 4, 5", "at most", 1e-12,
          by="ours"),
    Claim("b9", "A gate does not raise the rank of what a head adds: at most the size of the head",
          "largest rank less the size of the head, places 1 to 4", "at most", 0.0, by="ours"),
    Claim("b10", "Not after W_O either", "largest rank less the size of the head, place 5", "at most", 0.0, by="ours"),
)  # fmt: skip

Head = Callable[[Tensor], Tensor]  # (batch, N, D) to (batch, N, D)


def head(
    place: str,
    seed: int,
    spread: float = GATE,
    tokens: int = TOKENS,
    width: int = WIDTH,
    size: int = SIZE,
    turn: bool = False,
) -> Head:
    """What one head adds to tokens, its map fixed as it is at one input; `turn` replaces W_V, W_O by W_V R, R^T W_O."""
    g = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=g, dtype=torch.float64)

    query, key, value = (draw(width, size) / math.sqrt(width) for _ in range(3))
    out, at, mixed = draw(size, width) / math.sqrt(size), draw(tokens, width), draw(size, size)
    gate = spread * draw(width, width) / math.sqrt(width)
    if turn:
        rotation = torch.linalg.qr(mixed).Q
        value, out = value @ rotation, rotation.mT @ out
    q, k = at @ query, at @ key
    q = q * (at @ gate[:, :size]).sigmoid() if place.startswith("4") else q
    k = k * (at @ gate[:, :size]).sigmoid() if place.startswith("3") else k
    weights = mechanism("softmax").map(q[None, None], k[None, None])[0, 0]  # (N, N)
    columns = slice(0, 1) if "per head" in place else slice(0, size)

    def run(x: Tensor) -> Tensor:
        v = x @ value
        if place.startswith("2"):
            v = v * (x @ gate[:, columns]).sigmoid()
        y = weights @ v
        if place.startswith("1"):
            y = y * (x @ gate[:, columns]).sigmoid()
        y = y @ out
        return y * (x @ gate).sigmoid() if place.startswith("5") else y

    return run


def explained(x: Float[Tensor, "n N D"], y: Float[Tensor, "n N D"]) -> float:
    """R^2 of the best affine map from all entries of x to all of y, on the second half of the samples; fitted on the
    first.
    """
    flat = torch.cat([x.flatten(1), torch.ones(len(x), 1, dtype=x.dtype)], 1)
    half = len(x) // 2
    fit = torch.linalg.lstsq(flat[:half], y.flatten(1)[:half]).solution
    rest = y.flatten(1)[half:]
    left = rest - flat[half:] @ fit
    return 1 - float(left.square().sum() / (rest - rest.mean(0)).square().sum())


def linear_share(place: str, seed: int, draws: int, spread: float = GATE) -> float:
    x = torch.randn(draws, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1000 + seed), dtype=torch.float64)
    return explained(x, head(place, seed, spread)(x))


def merged(place: str, seed: int) -> float:
    """Relative change of the output when W_V and W_O are turned against each other: 0 where only their product
    counts.
    """
    x = torch.randn(8, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2000 + seed), dtype=torch.float64)
    a, b = (head(place, seed, turn=turn)(x) for turn in (False, True))
    return float((a - b).norm() / a.norm())


def rank(place: str, seed: int) -> int:
    """Of what a head of size 3 adds to 24 tokens of width 16."""
    x = torch.randn(24, 16, generator=torch.Generator().manual_seed(3000 + seed), dtype=torch.float64)
    return int(torch.linalg.matrix_rank(head(place, seed, tokens=24, width=16)(x)))


def measure(setting: Setting) -> Results:
    seeds, draws = range(SEEDS[setting.quick]), DRAWS[setting.quick]
    linear = {place: [linear_share(place, seed, draws) for seed in seeds] for place in PLACES}
    turned = {place: [merged(place, seed) for seed in seeds] for place in PLACES}
    ranks = {place: max(rank(place, seed) for seed in seeds) for place in PLACES}
    gates, per_head = ("1 after attention", "2 values"), ("1, one per head", "2, one per head")
    first = [linear_share("1 after attention", seed, draws, 0.32) for seed in seeds]
    measured = {
        "b1": Measurement(1 - min(linear["none"]), 0.0, EXACT),
        "b2": by_seed([1 - max(linear[p][s] for p in (*gates, *per_head)) for s in seeds]),
        "b3": Measurement(1 - min(x for p in ("3 keys", "4 queries") for x in linear[p]), 0.0, EXACT),
        "b4": by_seed([1 - x for x in linear["5 after W_O"]]),
        "b5": by_seed([1 - x for x in first]),
        "b6": by_seed([min(turned[p][s] for p in gates) for s in seeds]),
        "b7": by_seed([min(turned[p][s] for p in per_head) for s in seeds]),
        "b8": Measurement(
            max(x for p in ("none", "3 keys", "4 queries", "5 after W_O") for x in turned[p]), 0.0, EXACT
        ),
        "b9": Measurement(float(max(ranks[p] for p in PLACES[:-1]) - SIZE), 0.0, EXACT),
        "b10": Measurement(float(ranks["5 after W_O"] - SIZE), 0.0, EXACT),
    }
    rows = [{"place": p, "linear": fmean(linear[p]), "merged": fmean(turned[p]), "rank": ranks[p]} for p in PLACES]
    return Results(measured, {"gate_places": {"size": SIZE, "rows": rows, "curves": _curves(draws)}})


def _curves(draws: int) -> dict[str, list[list[float]]]:
    """How linear a head is against the deviation of its gate's logits, means of three heads."""
    return {
        place: [[s, fmean(linear_share(place, seed, draws, s) for seed in range(3))] for s in SPREADS]
        for place in ("1 after attention", "2 values", "5 after W_O")
    }


STUDY = Study("what a gate changes, by its place", CLAIMS, measure)
