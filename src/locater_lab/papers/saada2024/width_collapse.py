"""What the number of tokens does to stacks of attention: rank (study b), gradients (study c), and both under a causal
mask (study d).

**Rank (study b).** With the outlier, a stack of attention sends tokens to rank one as T grows; without it, no.

X_l = A_l X_{l-1} W_l from orthonormal tokens, Sigma_l = X_l X_l^T, and the stable rank of Sigma_l, sum s_i^4 / s_1^4
over the singular values of X_l. Its distance from 1 is summed without the first value, so that 1e-12 has all its
digits.

Value weights are Gaussian. That LayerNorm can keep tokens apart for some other value weights was shown by Wu and others
(arXiv 2405.18781).

**Gradients (study c).** Of X_L = A_L ... A_1 X_0 W_1 ... W_L the derivative by W_1 is (W_2 ... W_L)^T (x) A_L ... A_1
X_0, whose Frobenius norm is the product of those of the two factors. Autograd says the same of small stacks.

Which sizes of weights and skips keep tokens apart and gradients of one size at initialisation is worked out for whole
transformers by Giorlandino and Goldt (arXiv 2505.24333); these are powers of T of bare attention alone.

**A causal mask (study d).** The paper does not speak of it: no gap opens, and tokens do not collapse in width.

That masked attention collapses tokens exponentially with depth was shown by Wu and others (arXiv 2405.18781). The
causal form of taking the outlier off, the mean over each token's prefix, is ours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce
from itertools import product
from statistics import fmean
from typing import Any, Literal

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal, log_slope
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism
from locater_lab.papers.saada2024.map_spectrum import Map, orthonormal, random_map

# ---- b: rank collapse in width ----


LENGTHS = {True: (32, 64, 128, 256), False: (32, 64, 128, 256, 512)}
SEEDS = {True: 16, False: 16}
HELPED_SEEDS = 3
# layers of the growth with T; of the fall with depth; tokens of stacks with LayerNorm and skips
LAYERS, DEPTH, HELPED_TOKENS = 4, 8, 128
HELPERS = {
    "attention alone": (False, False),
    "LayerNorm": (True, False),
    "skip": (False, True),
    "LayerNorm and skip": (True, True),
}
Weights = Literal["unit", "usual"]
WEIGHTS: dict[Weights, str] = {"unit": "N(0, 1)", "usual": "N(0, 1/T)"}

WIDTH_CLAIMS = (
    Claim(
        "b1", "With more tokens the stable rank of their Gram matrix tends to 1: rank collapse in width, already after one layer",
        "exponent of T in stable rank - 1 after layer 1", "at most", 0.0, where="abstract",
    ),
    Claim(
        "b2", "Every layer adds two powers of T: stable rank - 1 falls as T (σ^2 / T)^(2 l), σ being the maps' own",
        f"what a layer adds to the exponent of T, layer {LAYERS} less layer 1 over {LAYERS - 1}, σ divided out", "about", -2.0, 0.3,
        by="ours",
    ),
    Claim(
        "b3", "Taking off the outlier (A less the uniform map) mitigates it: the stable rank grows with T",
        f"exponent of T in the stable rank, least of layers 1 to {LAYERS}", "at least", 0.3, where="abstract", bound="ours",
    ),
    Claim(
        "b4", "It does not cure collapse in depth",
        f"stable rank after layer {DEPTH} over that after layer 1, without the outlier", "at most", 0.5, by="ours",
    ),
    Claim(
        "b5", "What is left is the fall of a product of random weights: without any attention it is the same",
        "that ratio over the same ratio with the identity as attention map", "about", 1.0, 0.35, by="ours",
    ),
    Claim(
        "b6", "LayerNorm and skips, alone or both, do not cure it while the outlier is there",
        f"largest stable rank - 1 after layer {DEPTH}, {HELPED_TOKENS} tokens, weights of either size", "at most", 0.05, by="ours",
    ),
    Claim(
        "b7", "A - J = A (I - J): to take off the outlier is to centre values over tokens",
        "largest relative difference of the centred mechanism's output from explicit matrices", "at most", 1e-12, by="ours",
    ),
    Claim(
        "b8", "(I - J) A, which centres outputs, is another matrix",
        "norm of (I - J) A - A (I - J) over that of A (I - J)", "at least", 0.1, by="ours",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class AttentionStack:
    """How a stack of attention is made. Weights are N(0, 1), which is the paper's code, or N(0, 1/T), which keeps a
    token's size.
    """

    name: str = "softmax"  # the mechanism, or "identity"
    causal: bool = False
    norm: bool = False
    skip: bool = False
    weights: Weights = "unit"

    def map(self, T: int, seed: int) -> Map:
        return (
            torch.eye(T, dtype=torch.float64)
            if self.name == "identity"
            else random_map(T, seed, 1.0, self.name, self.causal)
        )

    def weight(self, T: int, seed: int) -> Float[Tensor, "T T"]:
        return draw_normal(T, T, seed=seed) * (1.0 if self.weights == "unit" else T**-0.5)


def excess_rank(x: Float[Tensor, "T d"]) -> float:
    """Stable rank of X X^T less 1: the sum of (s_i / s_1)^4 from the second singular value on.

    >>> round(excess_rank(torch.diag(torch.tensor([2.0, 1.0, 1.0]))), 6)
    0.125
    """
    s = torch.linalg.svdvals(x)
    return float((s[1:] / s[0]).pow(4).sum())


def excess_ranks(stack: AttentionStack, T: int, layers: int, seed: int) -> list[float]:
    """Stable rank - 1 after every layer."""
    x, ranks = orthonormal(T, seed + 900_000), []
    for layer in range(layers):
        y = stack.map(T, 1000 * seed + layer) @ x @ stack.weight(T, 1000 * seed + layer + 500)
        y = x + y if stack.skip else y
        x = torch.nn.functional.layer_norm(y, (T,)) if stack.norm else y
        # the size of all plays no part, and would leave the range of numbers
        x = x / x.norm() if not (stack.norm or stack.skip) else x
        ranks.append(excess_rank(x))
    return ranks


ByTokens = dict[int, list[list[float]]]  # by tokens: a list of layers for each seed


def ranks_by_tokens(stack: AttentionStack, setting: Setting, layers: int = LAYERS) -> ByTokens:
    """Stable rank - 1 by number of tokens, seed and layer."""
    seeds = range(SEEDS[setting.quick])
    return {T: [excess_ranks(stack, T, layers, seed) for seed in seeds] for T in LENGTHS[setting.quick]}


def rank_exponents(ranks: ByTokens, layer: int, add: int = 0) -> list[float]:
    """By seed: the exponent of T in stable rank - 1, or with add = 1 in the stable rank, after a layer (from 0)."""
    seeds = range(len(next(iter(ranks.values()))))
    return [log_slope(list(ranks), [draws[seed][layer] + add for draws in ranks.values()]) for seed in seeds]


def unevenness(T: int, seed: int) -> list[float]:
    """The product of sigma^4 over maps up to every layer of a plain stack; sigma^2 = |A|_F^2 - 1, under 1 while T is
    small.
    """
    maps = torch.stack([AttentionStack().map(T, 1000 * seed + layer) for layer in range(LAYERS)])
    return (maps.square().sum((1, 2)) - 1).square().cumprod(0).tolist()


def cure_error(T: int = 48, seed: int = 3) -> tuple[float, float, float]:
    """Of the centred mechanism from (A - J) v and A (I - J) v; of (I - J) A from A (I - J), of softmax and of a doubly
    stochastic map.
    """
    q, k, v = (draw_normal(1, 2, T, 8, seed=seed + n) for n in range(3))
    A = (q @ k.mT / math.sqrt(8)).softmax(-1)
    J = torch.full((T, T), 1 / T, dtype=torch.float64)
    eye = torch.eye(T, dtype=torch.float64)
    out = mechanism("centred")(q, k, v)
    error = max(float((out - other).abs().max() / out.abs().max()) for other in ((A - J) @ v, A @ (eye - J) @ v))
    S = A.clone()
    for _ in range(500):  # rows and columns in turn
        S = S / S.sum(-2, keepdim=True)
        S = S / S.sum(-1, keepdim=True)
    apart = [float(((eye - J) @ B - B @ (eye - J)).norm() / (B @ (eye - J)).norm()) for B in (A, S)]
    return error, apart[0], apart[1]


def with_norms_and_skips() -> list[dict[str, Any]]:
    """Stable rank - 1 after DEPTH layers of HELPED tokens, with LayerNorm and skips, of every draw."""
    rows = []
    for name, (norm, skip) in HELPERS.items():
        for weights in WEIGHTS:
            row: dict[str, Any] = {"stack": name, "weights": WEIGHTS[weights]}
            for kind in ("softmax", "centred"):
                stack = AttentionStack(kind, norm=norm, skip=skip, weights=weights)
                row[kind] = [excess_ranks(stack, HELPED_TOKENS, DEPTH, seed)[-1] for seed in range(HELPED_SEEDS)]
            rows.append(row)
    return rows


def measure_width(setting: Setting) -> Results:
    """Growth with T, fall with depth, LayerNorm and skips, and what taking the outlier off is."""
    parts = _ranks_against_tokens(setting), _ranks_against_depth(setting)
    helped = with_norms_and_skips()
    error, apart, same = cure_error()
    measured = {
        "b6": Measurement(max(max(row["softmax"]) for row in helped), 0.0, "none: largest of all draws"),
        "b7": Measurement(error, 0.0, "none: largest entry"),
        "b8": Measurement(apart, 0.0, "none: one map", {"doubly_stochastic": same}),
    }
    rows = [{**row, "softmax": fmean(row["softmax"]), "centred": fmean(row["centred"])} for row in helped]
    table = {"tokens": HELPED_TOKENS, "layers": DEPTH, "rows": rows}
    return Results(
        {**parts[0].measured, **parts[1].measured, **measured},
        {**parts[0].tables, **parts[1].tables, "norms_and_skips": table},
    )


def _ranks_against_tokens(setting: Setting) -> Results:
    plain, centred = ranks_by_tokens(AttentionStack(), setting), ranks_by_tokens(AttentionStack("centred"), setting)
    even = {
        T: [[x / u for x, u in zip(layers, unevenness(T, seed), strict=True)] for seed, layers in enumerate(draws)]
        for T, draws in plain.items()
    }
    slopes = [rank_exponents(plain, layer) for layer in range(LAYERS)]
    bare = [rank_exponents(even, layer) for layer in range(LAYERS)]
    steps = [(last - first) / (LAYERS - 1) for first, last in zip(bare[0], bare[-1], strict=True)]
    cured = [rank_exponents(centred, layer, add=1) for layer in range(LAYERS)]
    measured = {
        "b1": by_seed(slopes[0]),
        "b2": by_seed(steps),
        "b3": by_seed(min(cured, key=fmean), {"exponents": [fmean(x) for x in cured]}),
    }
    table = {
        "softmax": rank_table(plain),
        "centred": rank_table(centred, add=1),
        "exponents": [fmean(x) for x in slopes],
        "exponents_without_sigma": [fmean(x) for x in bare],
    }
    return Results(measured, {"stable_rank_by_tokens": table})


def _ranks_against_depth(setting: Setting) -> Results:
    """The longest sequences, with the outlier, without it, and with the identity as attention map."""
    seeds, T = range(SEEDS[setting.quick]), LENGTHS[setting.quick][-1]
    ranks = {
        name: [[1 + x for x in excess_ranks(AttentionStack(name), T, DEPTH, seed)] for seed in seeds]
        for name in ("softmax", "centred", "identity")
    }
    fall = {name: [layers[-1] / layers[0] for layers in draws] for name, draws in ranks.items()}
    over_identity = [a / b for a, b in zip(fall["centred"], fall["identity"], strict=True)]
    measured = {
        "b4": by_seed(fall["centred"]),
        "b5": by_seed(over_identity, {"identity": fmean(fall["identity"])}),
    }
    means = [
        {"layer": layer + 1, **{name: fmean(layers[layer] for layers in draws) for name, draws in ranks.items()}}
        for layer in range(DEPTH)
    ]
    return Results(measured, {"stable_rank_by_depth": {"tokens": T, "rows": means}})


def rank_table(ranks: ByTokens, add: int = 0) -> dict[str, Any]:
    """Means over seeds of stable rank - 1, or with add = 1 of the stable rank, by tokens and layer; and the powers of
    ten around them, for the axis of a figure.
    """
    layers = range(LAYERS)
    rows = [
        {"tokens": T, **{str(n + 1): add + fmean(draw[n] for draw in draws) for n in layers}}
        for T, draws in ranks.items()
    ]
    values = [row[str(n + 1)] for row in rows for n in layers]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return {"rows": rows, "layers": LAYERS, "limits": [10.0**low, 10.0 ** max(high, low + 1)]}


WIDTH_STUDY = Study("rank collapse in width", WIDTH_CLAIMS, measure_width)


# ---- c: gradients ----


DEPTHS = (1, 2, 3, 4)
GRADIENT_SEEDS = {True: 8, False: 12}
SMALL_TOKENS = 6  # tokens of the stacks whose whole Jacobian is compared

GRADIENT_CLAIMS = (
    Claim(
        "c1", "The norm of the derivative by the first weights is that of a product of maps times that of a product of weights",
        f"largest relative difference from autograd's Jacobian, stacks of {SMALL_TOKENS} tokens", "at most", 1e-12, by="ours",
    ),
    Claim(
        "c2", "Gradients explode with the number of tokens, the more the deeper, where the outlier is left in",
        "exponent of T, 4 layers less 1 layer, weights N(0, 1)", "at least", 1.0, where="abstract", bound="ours",
    ),
    Claim(
        "c3", "Without it they are tamed",
        "exponent of T, 4 layers less 1 layer, weights N(0, 1), outlier removed", "at most", 0.5, bound="ours",
    ),
    Claim(
        "c4", "The explosion is one of the weights' size: at N(0, 1/T), which keeps a token's size, depth adds no power of T",
        "exponent of T, 4 layers less 1 layer, weights N(0, 1/T)", "about", 0.0, 0.2, by="ours",
    ),
    Claim(
        "c5", "At that size of weights it is without the outlier that gradients go wrong: they vanish with T",
        "exponent of T, 4 layers less 1 layer, weights N(0, 1/T), outlier removed", "at most", -1.0, by="ours",
    ),
    Claim(
        "c6", "Under a causal mask taking the prefix mean off tames gradients too",
        "exponent of T, 4 layers less 1 layer, weights N(0, 1), causal, prefix mean removed", "at most", 0.5, by="ours",
    ),
)  # fmt: skip

STACK_KINDS = {
    "with the outlier": AttentionStack(),
    "without": AttentionStack("centred"),
    "with the outlier, N(0, 1/T)": AttentionStack(weights="usual"),
    "without, N(0, 1/T)": AttentionStack("centred", weights="usual"),
    "with the outlier, causal": AttentionStack(causal=True),
    "without, causal": AttentionStack("centred", causal=True),
}
GRADIENT_CLAIM_KINDS = {  # claims, each by what layers add to the exponent of one stack
    "c2": "with the outlier",
    "c3": "without",
    "c4": "with the outlier, N(0, 1/T)",
    "c5": "without, N(0, 1/T)",
    "c6": "without, causal",
}


def jacobian_norm(stack: AttentionStack, T: int, layers: int, seed: int) -> float:
    """||dX_L / dW_1||_F, from its two factors."""
    left = reduce(lambda x, layer: stack.map(T, 1000 * seed + layer) @ x, range(layers), orthonormal(T, seed + 900_000))
    eye = torch.eye(T, dtype=torch.float64)
    right = reduce(lambda x, layer: x @ stack.weight(T, 1000 * seed + layer + 500), range(1, layers), eye)
    return float(left.norm() * right.norm())


def autograd_norm(stack: AttentionStack, T: int, layers: int, seed: int) -> float:
    """The same from the whole Jacobian."""
    maps = [stack.map(T, 1000 * seed + layer) for layer in range(layers)]
    weights = [stack.weight(T, 1000 * seed + layer + 500) for layer in range(layers)]

    def run(first: torch.Tensor) -> torch.Tensor:
        x = orthonormal(T, seed + 900_000)
        for A, W in zip(maps, [first, *weights[1:]], strict=True):
            x = A @ x @ W
        return x

    return float(torch.autograd.functional.jacobian(run, weights[0]).norm())


def gradient_exponents(stack: AttentionStack, lengths: Sequence[int], seeds: Sequence[int]) -> dict[int, list[float]]:
    """The exponent of T in the norm of the derivative, by depth, for each seed."""
    return {
        layers: [log_slope(lengths, [jacobian_norm(stack, T, layers, seed) for T in lengths]) for seed in seeds]
        for layers in DEPTHS
    }


def measure_gradient(setting: Setting) -> Results:
    """Exponents of T by depth, for every kind of stack."""
    lengths, seeds = LENGTHS[setting.quick], range(GRADIENT_SEEDS[setting.quick])
    by_stack = {name: gradient_exponents(stack, lengths, seeds) for name, stack in STACK_KINDS.items()}
    off = max(
        abs(
            math.log(
                jacobian_norm(stack, SMALL_TOKENS, layers, seed) / autograd_norm(stack, SMALL_TOKENS, layers, seed)
            )
        )
        for stack, layers, seed in product(STACK_KINDS.values(), DEPTHS, range(2))
    )
    measured = {"c1": Measurement(off, 0.0, "none: largest of all stacks")}
    for key, name in GRADIENT_CLAIM_KINDS.items():
        shallow, deep = by_stack[name][DEPTHS[0]], by_stack[name][DEPTHS[-1]]
        measured[key] = by_seed([b - a for a, b in zip(shallow, deep, strict=True)])
    rows = [
        {"stack": name, **{str(layers): fmean(values) for layers, values in by_depth.items()}}
        for name, by_depth in by_stack.items()
    ]
    return Results(measured, {"gradient_exponents": {"depths": list(DEPTHS), "rows": rows}})


GRADIENT_STUDY = Study("gradients against the number of tokens", GRADIENT_CLAIMS, measure_gradient)


# ---- d: under a causal mask ----


CAUSAL_CLAIMS = (
    Claim(
        "d1", "Under a causal mask eigenvalues are the diagonal, and the second does not shrink with T",
        "exponent of T in the size of λ_2", "about", 0.0, 0.25, by="ours",
    ),
    Claim(
        "d2", "Nor does the second singular value: no gap opens",
        "exponent of T in s_2 / s_1", "at least", 0.0, by="ours",
    ),
    Claim(
        "d3", "So there is no rank collapse in width under a causal mask",
        "exponent of T in stable rank - 1 after layer 1", "at least", -0.25, by="ours",
    ),
    Claim(
        "d4", "There is one in depth",
        f"stable rank - 1 after layer {LAYERS} over that after layer 1, longest sequences", "at most", 0.1, by="ours",
    ),
    Claim(
        "d5", "Taking the prefix mean off, the causal form of the cure, makes the stable rank grow with T as it does without a mask",
        "exponent of T in the stable rank after layer 1", "at least", 0.5, by="ours",
    ),
    Claim(
        "d6", "It does not cure collapse in depth either",
        f"stable rank - 1 after layer {LAYERS} over that after layer 1, longest sequences", "at most", 0.5, by="ours",
    ),
)  # fmt: skip


def measure_causal(setting: Setting) -> Results:
    """Eigenvalues and singular values of causal maps, and stacks of them with and without the prefix mean."""
    lengths, seeds = LENGTHS[setting.quick], range(SEEDS[setting.quick])
    maps = {T: [random_map(T, seed, causal=True) for seed in seeds] for T in lengths}
    second = {T: [float(A.diagonal().sort(descending=True).values[1]) for A in some] for T, some in maps.items()}
    ratio = {T: [_second_over_first(A) for A in some] for T, some in maps.items()}
    check = max(
        float((torch.linalg.eigvals(A).abs().sort().values - A.diagonal().sort().values).abs().max())
        for A in maps[lengths[0]]
    )
    plain, centred = (ranks_by_tokens(AttentionStack(name, causal=True), setting) for name in ("softmax", "centred"))

    def slopes(values: Mapping[int, Sequence[float]]) -> list[float]:
        return [log_slope(lengths, [values[T][seed] for T in lengths]) for seed in seeds]

    def fall(ranks: ByTokens) -> list[float]:
        return [layers[-1] / layers[0] for layers in ranks[lengths[-1]]]

    measured = {
        "d1": by_seed(slopes(second), {"eigenvalues_off_diagonal": check}),
        "d2": by_seed(slopes(ratio)),
        "d3": by_seed(rank_exponents(plain, 0)),
        "d4": by_seed(fall(plain)),
        "d5": by_seed(rank_exponents(centred, 0, add=1)),
        "d6": by_seed(fall(centred)),
    }
    rows = [{"tokens": T, "lambda_2": fmean(second[T]), "ratio": fmean(ratio[T])} for T in lengths]
    ranks = {"softmax": rank_table(plain), "centred": rank_table(centred, add=1)}
    return Results(measured, {"causal_maps": rows, "causal_stable_rank": ranks})


def _second_over_first(A: Map) -> float:
    s = torch.linalg.svdvals(A)
    return float(s[1] / s[0])


CAUSAL_STUDY = Study("under a causal mask", CAUSAL_CLAIMS, measure_causal)
