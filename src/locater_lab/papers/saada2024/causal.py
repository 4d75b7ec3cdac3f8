"""Under a causal mask, of which the paper does not speak: no gap opens, and tokens do not collapse in width. Study d.

That masked attention collapses tokens exponentially with depth was shown by Wu and others (arXiv 2405.18781). The causal
form of taking the outlier off, the mean over each token's prefix, is ours.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean

import torch

from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.saada2024.maps import Map, random_map
from locater_lab.papers.saada2024.width import (
    LAYERS,
    LENGTHS,
    SEEDS,
    ByTokens,
    Stack,
    by_tokens,
    exponent,
    exponents,
    rank_table,
)

CLAIMS = (
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


def measure(setting: Setting) -> Results:
    """Eigenvalues and singular values of causal maps, and stacks of them with and without the prefix mean."""
    lengths, seeds = LENGTHS[setting.quick], range(SEEDS[setting.quick])
    maps = {T: [random_map(T, seed, causal=True) for seed in seeds] for T in lengths}
    second = {T: [float(A.diagonal().sort(descending=True).values[1]) for A in some] for T, some in maps.items()}
    ratio = {T: [_second_over_first(A) for A in some] for T, some in maps.items()}
    check = max(
        float((torch.linalg.eigvals(A).abs().sort().values - A.diagonal().sort().values).abs().max())
        for A in maps[lengths[0]]
    )
    plain, centred = (by_tokens(Stack(name, causal=True), setting) for name in ("softmax", "centred"))

    def slopes(values: Mapping[int, Sequence[float]]) -> list[float]:
        return [exponent(lengths, [values[T][seed] for T in lengths]) for seed in seeds]

    def fall(ranks: ByTokens) -> list[float]:
        return [layers[-1] / layers[0] for layers in ranks[lengths[-1]]]

    measured = {
        "d1": by_seed(slopes(second), {"eigenvalues_off_diagonal": check}),
        "d2": by_seed(slopes(ratio)),
        "d3": by_seed(exponents(plain, 0)),
        "d4": by_seed(fall(plain)),
        "d5": by_seed(exponents(centred, 0, add=1)),
        "d6": by_seed(fall(centred)),
    }
    rows = [{"tokens": T, "lambda_2": fmean(second[T]), "ratio": fmean(ratio[T])} for T in lengths]
    ranks = {"softmax": rank_table(plain), "centred": rank_table(centred, add=1)}
    return Results(measured, {"causal_maps": rows, "causal_stable_rank": ranks})


def _second_over_first(A: Map) -> float:
    s = torch.linalg.svdvals(A)
    return float(s[1] / s[0])


STUDY = Study("under a causal mask", CLAIMS, measure)
