"""Tokens by depth in drawn models: what the theorem promises (study c), norms after the sums and in front of them
(study d), and fusion of layers in training (study f).

**The theorem (study c)** is on blocks with LayerNorm after the sums: when does it promise that tokens become equal, and
what is v worth?

    d(H_{l+1}) <= v d(H_l),   v = (1 + s^2) (1 + h s sqrt(lambda)) / (sigma_1 sigma_2)

with h heads, s the largest singular value of any weight, sigma_1 and sigma_2 the least standard deviation of a token in
front of the two norms. v is the form in this project's notes, reconstructed and proved there; the abstract says in
words that tokens converge where LayerNorm's standard deviation is sufficiently large.

**Norms (study d).** The paper is about BERT, whose norms stand after the sums. Models of today have them in front of
attention and MLP.

**Fusion (study f)**, judged by training runs: does fusing all layers help a masked language model, and does the place
of the norm matter?
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise, product
from statistics import fmean, median
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.measures import token_cosine
from locater.numerics import spearman
from locater_lab.engine.arms import Line, difference, mean_of_arm, study_of_arms, table_of_arms
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.mechanism_runs import MASKED, SOFTMAX_MASKED, arm, at_lower_rates
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Arm, Runs
from locater_lab.papers.shi2022.token_distance import (
    attention_eigenvalue,
    distance_from_equal,
    layer_norm,
    least_deviation,
)

# ---- c: the theorem ----


THEOREM_DRAWS, PARTS = {True: 1000, False: 6000}, 8
THEOREM_WIDTH, THEOREM_TOKENS, WEIGHT_SIZES = 16, (4, 16, 48), (0.01, 0.1, 0.3, 1.0, 3.0)
BUILT_HEADS, BUILT, BUILT_DEPTH, BUILT_TOKENS = 8, 0.2, 8, 16
ALIKE = (0.0, 1.0, 4.0)  # shared vector at the start of the built stack, in units of a token's own part

THEOREM_CLAIMS = (
    Claim(
        "c1", "d after a block is at most v times d before it", "largest d(H') / (v d(H)), Gaussian weights of five sizes", "at most", 1.0,
        by="ours",
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
class BlockWeights:
    """One block; weights act from the right."""

    W_QK: Float[Tensor, "heads width width"]
    W_VO: Float[Tensor, "heads width width"]
    W_in: Float[Tensor, "width hidden"]
    W_out: Float[Tensor, "hidden width"]

    @property
    def s(self) -> float:
        return max(torch.linalg.matrix_norm(w, 2).max().item() for w in (self.W_VO, self.W_in, self.W_out))


@dataclass(frozen=True)
class BlockStep:
    """What one block did."""

    size: float
    v: float
    kept: float  # d after over d before
    sigma: float  # sigma_1 sigma_2
    cosine: float  # before


def post_block(x: Float[Tensor, "tokens width"], w: BlockWeights) -> tuple[Tensor, float, float]:
    """Tokens after the block, v, and sigma_1 sigma_2."""
    a = (x @ w.W_QK @ x.mT / math.sqrt(x.shape[1])).softmax(-1)
    y = x + (a @ x @ w.W_VO).sum(0)
    first, y = least_deviation(y), layer_norm(y)
    z = y + (y @ w.W_in).relu() @ w.W_out
    sigma = first * least_deviation(z)
    largest = max(attention_eigenvalue(each) for each in a)
    return layer_norm(z), (1 + w.s**2) * (1 + len(a) * w.s * largest**0.5) / sigma, sigma


def run_draw(seed: int) -> BlockStep:
    """Tokens as a norm leaves them, Gaussian weights of one of five sizes, one to four heads, some attention sharp."""
    n, heads, size = THEOREM_TOKENS[seed % 3], 1 + seed % 4, WEIGHT_SIZES[seed % 5]
    x = layer_norm(
        (0.1, 1.0)[seed % 2] * draw_normal(n, THEOREM_WIDTH, seed=seed)
        + draw_normal(1, THEOREM_WIDTH, seed=seed + 10_000)
    )
    sharp = (1.0, 4.0)[seed // 7 % 2] / math.sqrt(THEOREM_WIDTH)
    w = BlockWeights(
        sharp * draw_normal(heads, THEOREM_WIDTH, THEOREM_WIDTH, seed=seed + 20_000),
        size / math.sqrt(THEOREM_WIDTH) * draw_normal(heads, THEOREM_WIDTH, THEOREM_WIDTH, seed=seed + 30_000),
        size / math.sqrt(THEOREM_WIDTH) * draw_normal(THEOREM_WIDTH, 4 * THEOREM_WIDTH, seed=seed + 40_000),
        size / math.sqrt(4 * THEOREM_WIDTH) * draw_normal(4 * THEOREM_WIDTH, THEOREM_WIDTH, seed=seed + 50_000),
    )
    return _step(x, w, size)[1]


def _step(x: Tensor, w: BlockWeights, size: float) -> tuple[Tensor, BlockStep]:
    y, v, sigma = post_block(x, w)
    return y, BlockStep(size, v, distance_from_equal(y) / distance_from_equal(x), sigma, token_cosine(x[None]).item())


def run_built_stack(shared: float) -> list[BlockStep]:
    """Blocks whose heads all copy what they see, W_VO = s 1: what tokens share grows by 1 + h s, what differs by 1 + h
    s sqrt(lambda).
    """
    one = torch.eye(THEOREM_WIDTH, dtype=torch.float64)
    heads = one.expand(BUILT_HEADS, -1, -1)
    w = BlockWeights(0.5 * heads, BUILT * heads, BUILT * one, BUILT * one)
    x = layer_norm(draw_normal(BUILT_TOKENS, THEOREM_WIDTH, seed=0) + shared * draw_normal(1, THEOREM_WIDTH, seed=1))
    steps = []
    for _ in range(BUILT_DEPTH):
        x, step = _step(x, w, BUILT)
        steps.append(step)
    return steps


def rank_correlation_with_kept(steps: Sequence[BlockStep], name: str) -> float:
    """Rank correlation of a number of the steps with what is kept of d."""
    x, y = (torch.tensor([getattr(step, key) for step in steps], dtype=torch.float64) for key in (name, "kept"))
    return spearman(x, y) or 0.0


def correlation_by_parts(draws: Sequence[BlockStep], name: str) -> Measurement:
    """The correlation in each part of the draws; that of all draws is beside them."""
    ends = [len(draws) * n // PARTS for n in range(PARTS + 1)]
    values = [rank_correlation_with_kept(draws[start:end], name) for start, end in pairwise(ends)]
    return by_seed(values, {"all_draws": rank_correlation_with_kept(draws, name)}, of="parts of the draws")


def measure_theorem(setting: Setting) -> Results:
    """Draws, and the built stack from three starts."""
    draws = [run_draw(seed) for seed in setting.each(list(range(THEOREM_DRAWS[setting.quick])))]
    stacks = {shared: run_built_stack(shared) for shared in ALIKE}
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
        "c6": correlation_by_parts(draws, "sigma"),
        "c7": correlation_by_parts(draws, "v"),
        "c8": Measurement(above, 0.0, f"none: counted over {len(closer)} draws"),
    }
    tables: dict[str, Any] = {
        "drawn_blocks": [_step_row(size, [step for step in draws if step.size == size]) for size in WEIGHT_SIZES],
        "built_blocks": {
            "heads": BUILT_HEADS,
            "s": BUILT,
            "stacks": {f"{shared:g}": [vars(step) for step in steps] for shared, steps in stacks.items()},
        },
    }
    return Results(measured, tables)


def _step_row(size: float, steps: Sequence[BlockStep]) -> dict[str, float]:
    return {
        "size": size,
        "least_v": min(step.v for step in steps),
        "share": max(step.kept / step.v for step in steps),
        **{name: median(getattr(step, name) for step in steps) for name in ("v", "kept", "sigma")},
        "correlation": rank_correlation_with_kept(steps, "v"),
    }


THEOREM_STUDY = Study("the theorem", THEOREM_CLAIMS, measure_theorem)


# ---- d: norms after the sums and in front ----


STACK_SEEDS = {True: 16, False: 24}
STACK_DEPTH, STACK_TOKENS, STACK_WIDTH, STACK_HEADS = 24, 32, 64, 4
GAINS = (0.3, 1.0)  # of what a sublayer adds, beside the tokens' size

NORM_PLACE_CLAIMS = (
    Claim(
        "d1", "With norms after the sums, tokens of a drawn model become all but equal",
        f"mean cosine after {STACK_DEPTH} layers, Gaussian weights that keep a token's size", "at least", 0.99, by="ours",
    ),
    Claim(
        "d2", "With norms in front they stay apart: the stream grows, and a layer changes less of it",
        "the same", "at most", 0.9, by="ours",
    ),
    Claim(
        "d3", "A causal mask keeps tokens apart",
        f"cosine after {STACK_DEPTH} layers with the mask less without, norms after the sums, sublayers that add 0.3", "at most", 0.0, by="ours",
    ),
    Claim(
        "d4", "Where sublayers add little (0.3), the place of the norm is worth less than 0.1 of cosine",
        f"cosine after {STACK_DEPTH} layers, norms after the sums less norms in front", "at most", 0.1, by="ours",
    ),
)  # fmt: skip


def cosines_by_depth(
    seed: int, post: bool, causal: bool = False, gain: float = 1.0, depth: int = STACK_DEPTH
) -> Float[Tensor, " states"]:
    """Mean cosine of tokens before the first layer and after each."""
    generator = torch.Generator().manual_seed(seed)

    def draw_normal(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    x = layer_norm(draw_normal(STACK_TOKENS, STACK_WIDTH))
    later = torch.ones(STACK_TOKENS, STACK_TOKENS, dtype=torch.bool).triu(1)
    states = [x]
    for _ in range(depth):
        W_QK, W_VO = (
            draw_normal(STACK_HEADS, STACK_WIDTH, STACK_WIDTH) / math.sqrt(STACK_WIDTH),
            gain * draw_normal(STACK_HEADS, STACK_WIDTH, STACK_WIDTH) / math.sqrt(STACK_WIDTH * STACK_HEADS),
        )
        W_in, W_out = (
            gain * draw_normal(STACK_WIDTH, 4 * STACK_WIDTH) / math.sqrt(STACK_WIDTH),
            gain * draw_normal(4 * STACK_WIDTH, STACK_WIDTH) / math.sqrt(2 * STACK_WIDTH),
        )
        for number in range(2):
            y = x if post else layer_norm(x)
            if number == 0:
                logits = y @ W_QK @ y.mT / math.sqrt(STACK_WIDTH)
                a = (logits.masked_fill(later, -math.inf) if causal else logits).softmax(-1)
                added = (a @ y @ W_VO).sum(0)
            else:
                added = (y @ W_in).relu() @ W_out
            x = layer_norm(x + added) if post else x + added
        states.append(x)
    return token_cosine(torch.stack(states))


def measure_norm_place(setting: Setting) -> Results:
    """Both places of the norm, both masks, two gains."""
    seeds = range(STACK_SEEDS[setting.quick])
    kinds = {
        _stack_name(post, causal, gain): torch.stack([cosines_by_depth(seed, post, causal, gain) for seed in seeds])
        for gain, post, causal in product(GAINS, (True, False), (False, True))
    }
    last = {name: states[:, -1] for name, states in kinds.items()}
    measured = {
        "d1": by_seed(last["post, 1"].tolist()),
        "d2": by_seed(last["pre, 1"].tolist()),
        "d3": by_seed((last["post, causal, 0.3"] - last["post, 0.3"]).tolist()),
        "d4": by_seed((last["post, 0.3"] - last["pre, 0.3"]).tolist()),
    }
    curves = {name: states.mean(0).tolist() for name, states in kinds.items()}
    table = {"curves": curves, "seeds": len(seeds), "tokens": STACK_TOKENS, "width": STACK_WIDTH, "layers": STACK_DEPTH}
    return Results(measured, {"cosine_by_depth": table})


def _stack_name(post: bool, causal: bool, gain: float) -> str:
    return f"{'post' if post else 'pre'}{', causal' * causal}, {gain:g}"


NORM_PLACE_STUDY = Study("norms after the sums and in front", NORM_PLACE_CLAIMS, measure_norm_place)


# ---- f: fusion in training ----


FUSIONS = {kind: arm(base=MASKED, fusion=kind) for kind in ("concat", "max", "gate")}
POST = at_lower_rates(arm(base=MASKED, norm="post"))
ARMS = (SOFTMAX_MASKED, *FUSIONS.values(), POST)
AT_MODEL_SIZE = "masked language model of this size"
VARIED = f"{AT_MODEL_SIZE}, variations at one rate"
AT_LOWER_RATES = f"{AT_MODEL_SIZE}, norms after the sums at the better of two lower rates"

FUSION_CLAIMS = (
    *(
        Claim(
            f"f{n}", f"Fusing all layers ({kind}) improves the model, as seen at this size",
            f"change of report loss by fusion, {VARIED}", "at most", 0.0, where="abstract",
        )
        for n, kind in enumerate(FUSIONS, 1)
    ),
    *(
        Claim(
            f"f{n}", f"Fusing all layers ({kind}) keeps tokens of the last layer apart, as seen at this size",
            f"change of their mean cosine, in front of fusion, {VARIED}", "at most", 0.0, by="ours",
        )
        for n, kind in enumerate(FUSIONS, 4)
    ),
    Claim(
        "f7", "With norms in front, too, tokens grow alike with depth, as seen at this size",
        f"rank correlation of depth with mean cosine, half-blocks of a {AT_MODEL_SIZE}", "at least", 0.8, by="ours",
    ),
    Claim(
        "f8", "With norms after the sums tokens of the last layer are more alike, as seen at this size",
        f"change of their mean cosine, {AT_LOWER_RATES}", "at least", 0.0, by="ours",
    ),
    Claim(
        "f9", "With norms after the sums it trains as well, as seen at this size",
        f"change of report loss, {AT_LOWER_RATES}", "at most", 0.02, by="ours",
    ),
)  # fmt: skip


def half_block_measures(line: Line, name: str) -> list[float]:
    """A measure of every half-block's states, embeddings first; empty where it was not taken."""
    states = (line.get("measures") or {}).get("halves") or []
    return [float(half[name]) for half in states if half.get(name) is not None]


def last_cosine(line: Line) -> float:
    return (half_block_measures(line, "cosine") or [math.nan])[-1]


def correlation_with_depth(line: Line) -> float:
    """Rank correlation of depth with mean cosine."""
    curve = torch.tensor(half_block_measures(line, "cosine"), dtype=torch.float64)
    correlation = spearman(torch.arange(len(curve)).double(), curve) if len(curve) > 2 else None
    return math.nan if correlation is None else correlation


def mean_curve(runs: Runs, one: Arm, name: str) -> list[float]:
    """Means over seeds, by half-block; empty where it was not measured."""
    lines = [states for line in one.lines_so_far(runs) if (states := half_block_measures(line, name))]
    return [fmean(values) for values in zip(*lines, strict=True)]


def judge_fusion(runs: Runs) -> Results:
    """Seed by seed against the same model without fusion."""
    measured: dict[str, Measurement | None] = {}
    for n, one in enumerate(FUSIONS.values(), 1):
        measured[f"f{n}"] = difference(runs, one, SOFTMAX_MASKED, "report_loss")
    for n, one in enumerate(FUSIONS.values(), 4):
        measured[f"f{n}"] = difference(runs, one, SOFTMAX_MASKED, last_cosine)
    measured["f7"] = mean_of_arm(runs, SOFTMAX_MASKED, correlation_with_depth)
    measured["f8"] = difference(runs, POST, SOFTMAX_MASKED, last_cosine)
    measured["f9"] = difference(runs, POST, SOFTMAX_MASKED, "report_loss")
    curves = {
        name: {one.name: curve for one in ARMS if (curve := mean_curve(runs, one, name))}
        for name in ("cosine", "centred_cosine")
    }
    return Results(
        measured, {"fusion_ends": table_of_arms(runs, ARMS), "fusion_curves": curves, "fusion_layers": MASKED.layers}
    )


FUSION_STUDY = study_of_arms("fusion in training", FUSION_CLAIMS, ARMS, judge_fusion)
