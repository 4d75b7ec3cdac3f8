"""Gradients of a stack of attention against the number of tokens, with and without the outlier. Study c.

Of X_L = A_L ... A_1 X_0 W_1 ... W_L the derivative by W_1 is (W_2 ... W_L)^T (x) A_L ... A_1 X_0, whose Frobenius norm
is the product of those of the two factors. Autograd says the same of small stacks.

Which sizes of weights and skips keep tokens apart and gradients of one size at initialisation is worked out for whole
transformers by Giorlandino and Goldt (arXiv 2505.24333); these are powers of T of bare attention alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import reduce
from itertools import product
from statistics import fmean

import torch

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.saada2024.maps import orthonormal
from locater_lab.papers.saada2024.width import LENGTHS, Stack, exponent

DEPTHS = (1, 2, 3, 4)
SEEDS = {True: 8, False: 12}
SMALL = 6  # tokens of the stacks whose whole Jacobian is compared

CLAIMS = (
    Claim(
        "c1", "The norm of the derivative by the first weights is that of a product of maps times that of a product of weights",
        f"largest relative difference from autograd's Jacobian, stacks of {SMALL} tokens", "at most", 1e-12, by="ours",
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

KINDS = {
    "with the outlier": Stack(),
    "without": Stack("centred"),
    "with the outlier, N(0, 1/T)": Stack(weights="usual"),
    "without, N(0, 1/T)": Stack("centred", weights="usual"),
    "with the outlier, causal": Stack(causal=True),
    "without, causal": Stack("centred", causal=True),
}
DECIDING = {  # claims, each by what layers add to the exponent of one stack
    "c2": "with the outlier",
    "c3": "without",
    "c4": "with the outlier, N(0, 1/T)",
    "c5": "without, N(0, 1/T)",
    "c6": "without, causal",
}


def jacobian_norm(stack: Stack, T: int, layers: int, seed: int) -> float:
    """||dX_L / dW_1||_F, from its two factors."""
    left = reduce(lambda x, layer: stack.map(T, 1000 * seed + layer) @ x, range(layers), orthonormal(T, seed + 900_000))
    eye = torch.eye(T, dtype=torch.float64)
    right = reduce(lambda x, layer: x @ stack.weight(T, 1000 * seed + layer + 500), range(1, layers), eye)
    return float(left.norm() * right.norm())


def autograd_norm(stack: Stack, T: int, layers: int, seed: int) -> float:
    """The same from the whole Jacobian."""
    maps = [stack.map(T, 1000 * seed + layer) for layer in range(layers)]
    weights = [stack.weight(T, 1000 * seed + layer + 500) for layer in range(layers)]

    def run(first: torch.Tensor) -> torch.Tensor:
        x = orthonormal(T, seed + 900_000)
        for A, W in zip(maps, [first, *weights[1:]], strict=True):
            x = A @ x @ W
        return x

    return float(torch.autograd.functional.jacobian(run, weights[0]).norm())


def exponents(stack: Stack, lengths: Sequence[int], seeds: Sequence[int]) -> dict[int, list[float]]:
    """The exponent of T in the norm of the derivative, by depth, for each seed."""
    return {
        layers: [exponent(lengths, [jacobian_norm(stack, T, layers, seed) for T in lengths]) for seed in seeds]
        for layers in DEPTHS
    }


def measure(setting: Setting) -> Results:
    """Exponents of T by depth, for every kind of stack."""
    lengths, seeds = LENGTHS[setting.quick], range(SEEDS[setting.quick])
    by_stack = {name: exponents(stack, lengths, seeds) for name, stack in KINDS.items()}
    off = max(
        abs(math.log(jacobian_norm(stack, SMALL, layers, seed) / autograd_norm(stack, SMALL, layers, seed)))
        for stack, layers, seed in product(KINDS.values(), DEPTHS, range(2))
    )
    measured = {"c1": Measurement(off, 0.0, "none: largest of all stacks")}
    for key, name in DECIDING.items():
        shallow, deep = by_stack[name][DEPTHS[0]], by_stack[name][DEPTHS[-1]]
        measured[key] = by_seed([b - a for a, b in zip(shallow, deep, strict=True)])
    rows = [
        {"stack": name, **{str(layers): fmean(values) for layers, values in by_depth.items()}}
        for name, by_depth in by_stack.items()
    ]
    return Results(measured, {"gradient_exponents": {"depths": list(DEPTHS), "rows": rows}})


STUDY = Study("gradients against the number of tokens", CLAIMS, measure)
