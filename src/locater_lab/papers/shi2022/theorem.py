"""The theorem on blocks with LayerNorm after the sums: when it promises that tokens become equal, and what v is worth.
Study c.

    d(H_{l+1}) <= v d(H_l),   v = (1 + s^2) (1 + h s sqrt(lambda)) / (sigma_1 sigma_2)

with h heads, s the largest singular value of any weight, sigma_1 and sigma_2 the least standard deviation of a token in
front of the two norms. v is the form in this project's notes, reconstructed and proved there; the abstract says in words
that tokens converge where LayerNorm's standard deviation is sufficiently large.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import token_cosine
from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.compute import normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.shi2022.bounds import lam, layer_norm, least_deviation
from locater_lab.papers.shi2022.cosine import distance

DRAWS, PARTS = {True: 1000, False: 6000}, 8
WIDTH, TOKENS, SIZES = 16, (4, 16, 48), (0.01, 0.1, 0.3, 1.0, 3.0)
BUILT_HEADS, BUILT, BUILT_DEPTH, BUILT_TOKENS = 8, 0.2, 8, 16
ALIKE = (0.0, 1.0, 4.0)  # shared vector at the start of the built stack, in units of a token's own part

CLAIMS = (
    Claim(
        "c1", "d after a block is at most v times d before it", "largest d(H') / (v d(H)), Gaussian weights of five sizes", "at most", 1.0,
        where="theorem on blocks with norms after the sums",
    ),
    Claim(
        "c2", "The bound is loose", "median of d(H') / (v d(H)) where weights keep a token's size (1)", "at most", 0.1, by="ours",
    ),
    Claim(
        "c3", "Weights that keep a token's size bring v under 1", "least v of the draws with weights of size 1", "at most", 1.0, by="ours",
    ),
    Claim(
        "c4", "v under 1 can be reached: many heads that copy the mean to every token",
        f"v of the last of {BUILT_DEPTH} blocks built for it, tokens independent at first", "at most", 1.0, by="ours",
    ),
    Claim(
        "c5", "There tokens become equal exponentially, at the rate v",
        "geometric mean of d(H') / d(H) over v, last three of the built blocks", "about", 1.0, 0.1, by="ours",
    ),
    Claim(
        "c6", "A large standard deviation in front of the norms makes tokens converge",
        f"rank correlation of σ1 σ2 with d(H') / d(H), mean of {PARTS} parts of the draws", "at most", -0.5, where="abstract", bound="ours",
    ),
    Claim(
        "c7", "The smaller v, the closer tokens come",
        f"rank correlation of v with d(H') / d(H), mean of {PARTS} parts of the draws", "at least", 0.5, by="ours",
    ),
    Claim(
        "c8", "Tokens come closer only where v is under 1",
        "share of draws with v above 1 among those whose tokens came closer", "at most", 0.5, by="ours",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Weights:
    """One block; weights act from the right."""

    W_QK: Float[Tensor, "heads width width"]
    W_VO: Float[Tensor, "heads width width"]
    W_in: Float[Tensor, "width hidden"]
    W_out: Float[Tensor, "hidden width"]

    @property
    def s(self) -> float:
        return max(torch.linalg.matrix_norm(w, 2).max().item() for w in (self.W_VO, self.W_in, self.W_out))


@dataclass(frozen=True)
class Step:
    """What one block did."""

    size: float
    v: float
    kept: float  # d after over d before
    sigma: float  # sigma_1 sigma_2
    cosine: float  # before


def post_block(x: Float[Tensor, "tokens width"], w: Weights) -> tuple[Tensor, float, float]:
    """Tokens after the block, v, and sigma_1 sigma_2."""
    a = (x @ w.W_QK @ x.mT / math.sqrt(x.shape[1])).softmax(-1)
    y = x + (a @ x @ w.W_VO).sum(0)
    first, y = least_deviation(y), layer_norm(y)
    z = y + (y @ w.W_in).relu() @ w.W_out
    sigma = first * least_deviation(z)
    largest = max(lam(each) for each in a)
    return layer_norm(z), (1 + w.s**2) * (1 + len(a) * w.s * largest**0.5) / sigma, sigma


def drawn(seed: int) -> Step:
    """Tokens as a norm leaves them, Gaussian weights of one of five sizes, one to four heads, some attention sharp."""
    n, heads, size = TOKENS[seed % 3], 1 + seed % 4, SIZES[seed % 5]
    x = layer_norm((0.1, 1.0)[seed % 2] * normal(n, WIDTH, seed=seed) + normal(1, WIDTH, seed=seed + 10_000))
    sharp = (1.0, 4.0)[seed // 7 % 2] / math.sqrt(WIDTH)
    w = Weights(
        sharp * normal(heads, WIDTH, WIDTH, seed=seed + 20_000),
        size / math.sqrt(WIDTH) * normal(heads, WIDTH, WIDTH, seed=seed + 30_000),
        size / math.sqrt(WIDTH) * normal(WIDTH, 4 * WIDTH, seed=seed + 40_000),
        size / math.sqrt(4 * WIDTH) * normal(4 * WIDTH, WIDTH, seed=seed + 50_000),
    )
    return _step(x, w, size)[1]


def _step(x: Tensor, w: Weights, size: float) -> tuple[Tensor, Step]:
    y, v, sigma = post_block(x, w)
    return y, Step(size, v, distance(y) / distance(x), sigma, token_cosine(x[None]).item())


def built(shared: float) -> list[Step]:
    """Blocks whose heads all copy what they see, W_VO = s 1: what tokens share grows by 1 + h s, what differs by 1 + h
    s sqrt(lambda).
    """
    one = torch.eye(WIDTH, dtype=torch.float64)
    heads = one.expand(BUILT_HEADS, -1, -1)
    w = Weights(0.5 * heads, BUILT * heads, BUILT * one, BUILT * one)
    x = layer_norm(normal(BUILT_TOKENS, WIDTH, seed=0) + shared * normal(1, WIDTH, seed=1))
    steps = []
    for _ in range(BUILT_DEPTH):
        x, step = _step(x, w, BUILT)
        steps.append(step)
    return steps


def correlation(steps: Sequence[Step], name: str) -> float:
    """Rank correlation of a number of the steps with what is kept of d."""
    x, y = (torch.tensor([getattr(step, key) for step in steps], dtype=torch.float64) for key in (name, "kept"))
    return spearman(x, y) or 0.0


def by_parts(draws: Sequence[Step], name: str) -> Measurement:
    """The correlation in each part of the draws; that of all draws is beside them."""
    ends = [len(draws) * n // PARTS for n in range(PARTS + 1)]
    values = [correlation(draws[start:end], name) for start, end in pairwise(ends)]
    return by_seed(values, {"all_draws": correlation(draws, name)}, of="parts of the draws")


def measure(setting: Setting) -> Results:
    """Draws, and the built stack from three starts."""
    draws = [drawn(seed) for seed in setting.each(list(range(DRAWS[setting.quick])))]
    stacks = {shared: built(shared) for shared in ALIKE}
    usual = [step for step in draws if step.size == 1.0]
    closer = [step for step in draws if step.kept < 1]
    last = stacks[0.0][-3:]
    rate = math.exp(sum(math.log(step.kept / step.v) for step in last) / 3)
    above = sum(step.v > 1 for step in closer) / len(closer)
    least = {"least": min(step.v for step in draws)}
    measured = {
        "c1": Measurement(max(step.kept / step.v for step in draws), 0.0, f"none: the largest of {len(draws)} draws"),
        "c2": Measurement(median(step.kept / step.v for step in usual), 0.0, f"none: the median of {len(usual)} draws"),
        "c3": Measurement(min(step.v for step in usual), 0.0, f"none: the least of {len(usual)} draws", least),
        "c4": Measurement(stacks[0.0][-1].v, 0.0, "none: computed"),
        "c5": Measurement(rate, 0.0, "none: computed"),
        "c6": by_parts(draws, "sigma"),
        "c7": by_parts(draws, "v"),
        "c8": Measurement(above, 0.0, f"none: counted over {len(closer)} draws"),
    }
    tables: dict[str, Any] = {
        "drawn_blocks": [_row(size, [step for step in draws if step.size == size]) for size in SIZES],
        "built_blocks": {
            "heads": BUILT_HEADS,
            "s": BUILT,
            "stacks": {f"{shared:g}": [vars(step) for step in steps] for shared, steps in stacks.items()},
        },
    }
    return Results(measured, tables)


def _row(size: float, steps: Sequence[Step]) -> dict[str, float]:
    return {
        "size": size,
        "least_v": min(step.v for step in steps),
        "share": max(step.kept / step.v for step in steps),
        **{name: median(getattr(step, name) for step in steps) for name in ("v", "kept", "sigma")},
        "correlation": correlation(steps, "v"),
    }


STUDY = Study("the theorem", CLAIMS, measure)
