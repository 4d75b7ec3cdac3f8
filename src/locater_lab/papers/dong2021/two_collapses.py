"""Rank collapse and entropy collapse on the same heads: study h.

Heads are those of `planted_heads.py`, A = s W with M = tr A, F = ||A||^2, S = tr A^2. Over a grid of (M, F, S/F) and
several kinds of tokens every head is asked two things:

    residual kept     ||res(P X)|| / ||res(X)||, composite: under 1/2 its rank collapses
    entropy ratio     mean over queries of H / log(visible keys): under 1/2 its entropy collapses

What ties the two together (no mask, R the residual of X, D a row's distance log n - H from uniform):

    |(P X)_i - mean| = |sum_j (P_ij - 1/n) R_j| <= sqrt(2 D_i) max_j |R_j|                     Pinsker: residual is paid for in entropy
    log n - H = v / 2,  v = tr(A C A^T X^T X / n);   kept^2 = k^2 = tr(A C^2 A^T C) / tr C      to first order in A, C = cov of tokens

Both are A seen through the tokens' covariance. docs/theory.md sections 5 and 10.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.numerics import spearman
from locater.theory import localization
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.devices_and_processes import map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.dong2021.contraction import mean_over_draws
from locater_lab.papers.dong2021.planted_heads import (
    LENGTH,
    SHAPES,
    TOKENS,
    WIDTH,
    TokenBatch,
    attend_batch,
    draw_tokens,
    linear_response,
    mean_planes,
    phase_table,
    planted_head,
)

# How well one or two numbers of a head tell whether it has a label: rules with thresholds, and the order alone.


def interval_accuracy(score: Float[Tensor, " heads"], label: Tensor) -> float:
    """Mean of the two hit rates of the rule "score lies in [a, b]", at the best a and b.

    Sorted by score, a rule is a stretch of heads: the largest sum of +1/positives and -1/negatives over stretches, in
    one pass.

    >>> interval_accuracy(torch.tensor([0.0, 1.0, 2.0, 3.0]), torch.tensor([False, True, True, False]))
    1.0
    """
    values, inverse = score.unique(return_inverse=True)
    weight = torch.where(label, 1 / label.sum(), -1 / (~label).sum()).double()
    steps = torch.zeros(len(values), dtype=torch.float64).index_add(0, inverse, weight).tolist()
    best = at = 0.0
    for step in steps:
        at = max(0.0, at + step)
        best = max(best, at)
    return (1 + best) / 2


def best_corner(low: Tensor, high: Tensor, label: Tensor) -> tuple[float, float]:
    """The a and b for which "low at least a and high at most b" has the best balanced accuracy, among the values at
    hand.

    >>> best_corner(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.0, 1.0, 2.0]), torch.tensor([False, True, False]))
    (1.0, 1.0)
    """
    order = high.argsort(stable=True)
    low, high, label = low[order], high[order], label[order]
    last = torch.cat([high[1:] > high[:-1], torch.tensor([True])])  # a threshold takes all that are equal to it
    weight = torch.where(label, 1 / label.sum(), -1 / (~label).sum()).double()
    best, thresholds = -math.inf, (0.0, 0.0)
    for a in low.unique():
        score, at = (weight * (low >= a)).cumsum(0).masked_fill(~last, -math.inf).max(0)
        if float(score) > best:
            best, thresholds = float(score), (float(a), float(high[at]))
    return thresholds


def ordering_chance(score: Tensor, label: Tensor) -> float:
    """Chance that a head with the label has the higher score (the area under the curve); NaN where all are alike.

    >>> ordering_chance(torch.tensor([1.0, 2.0, 3.0]), torch.tensor([False, True, True]))
    1.0
    """
    yes, no = score[label], score[~label]
    if not len(yes) or not len(no):
        return math.nan
    return float(((yes[:, None] > no).double() + (yes[:, None] == no).double() / 2).mean())


SEEDS, SEQUENCES = 8, {True: 3, False: 16}
HALF = 0.5  # of residual or entropy: under it, collapsed
SIZES = tuple(2.0 ** (k / 2) for k in range(-6, 11))  # sqrt F
MEANS = (-16.0, -4.0, -1.0, 0.0, *(2.0 ** (k / 2) for k in range(-2, 13)))  # M
RATIOS = (1.0, 0.0, -0.5)  # S / F: 1 is symmetric, -1 antisymmetric
CONCENTRATIONS = (0.0, 0.125, 0.25, 0.5, 0.75, 1.0)  # M / sqrt(d F), symmetric maps: 1 is a multiple of the identity
SCALES = tuple(2.0 ** (k / 4) for k in range(-12, 25))  # sqrt F, for the width of the window
MAIN = TOKENS[0]

CLAIMS = (
    Claim(
        "h1", "The two collapses are ends of one axis: hardly any head has both",
        "share of heads with less than half of the residual and of the entropy, worst of three kinds of tokens with and without mask",
        "at most", 0.01, by="ours",
    ),
    Claim(
        "h2", "What attention keeps of the tokens' differences it pays for in entropy: kept <= sqrt(2 (log n - H)) max|R| / rms|R|",
        "largest of kept over that bound, every head, no mask", "at most", 1.0, by="ours",
    ),
    Claim(
        "h3", "Three moments of the spectrum, M, F and S, govern both",
        "share of the variance of residual kept and of entropy that they explain, the lesser, spectra of four shapes", "at least", 0.95,
        by="ours",
    ),
    Claim(
        "h4", "Entropy collapse is a matter of scale alone",
        "rank correlation of F with the entropy ratio, weakest of three kinds of tokens", "at most", -0.9, by="ours",
    ),
    Claim(
        "h5", "Rank collapse follows from the same map seen through the tokens' covariance, k^2 = tr(A C^2 A^T C) / tr C",
        "chance that k puts a head that keeps half of the residual above one that does not, worst kind of tokens", "at least", 0.95,
        by="ours",
    ),
    Claim(
        "h6", "Λ alone tells where neither happens",
        "balanced accuracy of the best interval of Λ, tokens of equal norm", "at least", 0.9, by="ours",
    ),
    Claim(
        "h7", "The concentration M^2 / F alone tells where neither happens",
        "balanced accuracy of the best interval of M^2 / F, tokens of equal norm", "at least", 0.9, by="ours",
    ),
    Claim(
        "h8", "There are heads with neither collapse for every kind of tokens",
        "share of the grid, scarcest kind of tokens, no mask", "at least", 0.05, by="ours",
    ),
    Claim(
        "h9", "The more concentrated the spectrum, the wider the window between the two collapses",
        "rank correlation of M / sqrt(d F) with the octaves of scale in which neither happens, tokens of equal norm", "at least", 0.9,
        by="ours",
    ),
    Claim(
        "h10", "Two numbers tell it: the scale F for entropy, and k for rank",
        "balanced accuracy of k at least a and F at most b, chosen on other seeds, tokens of equal norm", "at least", 0.9, by="ours",
    ),
)  # fmt: skip


# --- sweeps ---

Table = dict[str, Tensor]  # a column per number, a row per head
Rows = list[tuple[float, ...]]  # the same as it is measured
Grids = Mapping[tuple[str, int], Mapping[bool, Table]]  # by tokens and seed, then by mask


def measure_part(setting: Setting, part: tuple[str, int]) -> tuple[dict[bool, Rows], dict[str, float], list[float]]:
    """All that is measured on tokens of one kind and seed: a grid, shapes of spectra, a window."""
    count = SEQUENCES[setting.quick]
    return sweep_heads(*part, count), explained_variance(*part, count), window_widths(*part, count)


def sweep_heads(kind: str, seed: int, count: int) -> dict[bool, Rows]:
    """Every head of the grid on the same tokens, without mask and with."""
    batch = TokenBatch.of(draw_tokens(kind, count, seed))
    rows: dict[bool, Rows] = {False: [], True: []}
    for ratio, M in product(RATIOS, MEANS):
        maps = {size: A for size in SIZES if (A := planted_head(M, size, ratio, seed=seed)) is not None}
        if not maps:
            continue
        A = torch.stack(list(maps.values()))
        v, k = linear_response(batch, A)
        for causal, heads in rows.items():
            seen = attend_batch(batch, A, causal)
            columns = torch.stack([v, k, seen.kept, seen.entropy, seen.price], 1)
            heads += [(M, size, ratio, *row) for size, row in zip(maps, columns.tolist(), strict=True)]
    return rows


def _table(rows: Rows) -> Table:
    names = ("M", "size", "ratio", "v", "k", "kept", "entropy", "price")
    columns = dict(zip(names, torch.tensor(rows, dtype=torch.float64).unbind(1), strict=True))
    M, F = columns["M"], columns["size"] ** 2
    return {**columns, "F": F, "M^2/F": M**2 / F, "Λ": localization(M, columns["ratio"] * F, F)}


def has_neither_collapse(table: Table) -> Tensor:
    """Heads that keep half of both."""
    return _keeps_half(table["kept"], table["entropy"])


def _keeps_half(kept: Tensor, entropy: Tensor) -> Tensor:
    return (kept >= HALF) & (entropy >= HALF)


def explained_variance(kind: str, seed: int, count: int) -> dict[str, float]:
    """Share of the variance of kept and entropy, over heads of four shapes of spectrum, that is between cells of (M, F,
    S/F).
    """
    batch = TokenBatch.of(draw_tokens(kind, count, seed))
    cells = []
    for ratio, M, size in product(RATIOS[::2], MEANS[::2], SIZES[::2]):
        maps = [A for shape in SHAPES if (A := planted_head(M, size, ratio, shape, seed)) is not None]
        cells += [attend_batch(batch, torch.stack(maps))] if maps else []
    shares = {}
    for name in ("kept", "entropy"):
        values = torch.stack([getattr(cell, name) for cell in cells])  # (cells, shapes)
        shares[name] = 1 - float(values.var(1, correction=0).mean() / values.var(correction=0))
    return shares


def window_widths(kind: str, seed: int, count: int) -> list[float]:
    """Octaves of scale over which neither collapse happens, per concentration."""
    batch = TokenBatch.of(draw_tokens(kind, count, seed))
    widths = []
    for share in CONCENTRATIONS:
        maps = [A for size in SCALES if (A := planted_head(share * WIDTH**0.5 * size, size, 1.0)) is not None]
        seen = attend_batch(batch, torch.stack(maps))
        widths.append(int(_keeps_half(seen.kept, seen.entropy).sum()) * math.log2(SCALES[1] / SCALES[0]))
    return widths


# --- how well one number tells ---


def corner_accuracy(seen: Sequence[Table], judged: Table) -> float:
    """Mean of the two hit rates on `judged` of the rule on k and F that is best on `seen`."""
    a, b = best_corner(
        *(
            torch.cat([column(table) for table in seen])
            for column in (lambda t: t["k"], lambda t: t["F"], has_neither_collapse)
        )
    )
    predicted, true = (judged["k"] >= a) & (judged["F"] <= b), has_neither_collapse(judged)
    return float((predicted & true).sum() / true.sum() + (~predicted & ~true).sum() / (~true).sum()) / 2


# --- the study ---


def measure(setting: Setting) -> Results:
    """Grids, shapes and windows for every kind of tokens and every seed."""
    seeds = range(SEEDS)
    plan = [(kind, seed) for kind in TOKENS for seed in seeds]
    grids, shapes, windows = {}, {}, {}
    for each, (rows, shapes[each], windows[each]) in zip(plan, map_parts(measure_part, plan, setting), strict=True):
        grids[each] = {causal: _table(heads) for causal, heads in rows.items()}
    measured = _measure_kinds(grids, seeds) | _measure_equal_norm(grids, seeds)
    measured["h3"] = mean_over_draws(
        [min(shapes[MAIN, seed].values()) for seed in seeds], {"by_tokens": {k: shapes[k, 0] for k in TOKENS}}
    )
    measured["h9"] = mean_over_draws([_window_correlation(windows[MAIN, seed]) for seed in seeds])
    free = [grids[MAIN, seed][False] for seed in seeds]
    octaves = {kind: torch.tensor([windows[kind, seed] for seed in seeds]).mean(0).tolist() for kind in TOKENS}
    means = [M for M in MEANS if M > 0]
    rules = ("Λ", "M", "F", "M^2/F", "v", "k")
    causal = {
        kind: fmean(float(has_neither_collapse(grids[kind, s][True]).double().mean()) for s in seeds) for kind in TOKENS
    }
    tables = {
        "phases": phase_table(mean_planes(grids, seeds, means, SIZES), means, SIZES),
        "entropy_and_residual": _entropy_and_residual(free[0]),
        "one_number_rules": {name: fmean(_accuracy(table, name) for table in free) for name in rules},
        "two_number_rule": _corner(free),
        "neither_causal": causal,
        "window": window_table(list(CONCENTRATIONS), octaves),
    }
    return Results(measured, tables)


def _measure_kinds(grids: Grids, seeds: range) -> dict[str, Measurement]:
    """Claims on the worst of three kinds of tokens."""

    def over_kinds(one: Callable[[str, int], float], pick: Callable[[Sequence[float]], float]) -> Measurement:
        by_tokens = {kind: fmean(one(kind, seed) for seed in seeds) for kind in TOKENS}
        worst = [pick([one(kind, seed) for kind in TOKENS]) for seed in seeds]
        return mean_over_draws(worst, {"by_tokens": by_tokens})

    def both(kind: str, seed: int) -> float:
        tables = grids[kind, seed].values()
        return max(float(((t["kept"] < HALF) & (t["entropy"] < HALF)).double().mean()) for t in tables)

    def by_scale(kind: str, seed: int) -> float:
        table = grids[kind, seed][False]
        return spearman(table["F"], table["entropy"]) or 0.0

    def by_response(kind: str, seed: int) -> float:
        table = grids[kind, seed][False]
        return ordering_chance(table["k"], table["kept"] >= HALF)

    def has_neither(kind: str, seed: int) -> float:
        return float(has_neither_collapse(grids[kind, seed][False]).double().mean())

    prices = [float(by_mask[False]["price"].nan_to_num().max()) for by_mask in grids.values()]
    heads = len(prices) * len(grids[MAIN, 0][False]["M"])
    return {
        "h1": over_kinds(both, max),
        "h2": Measurement(max(prices), 0.0, f"none: the largest of {heads:,} heads"),
        "h4": over_kinds(by_scale, max),
        "h5": over_kinds(by_response, min),
        "h8": over_kinds(has_neither, min),
    }


def _measure_equal_norm(grids: Grids, seeds: range) -> dict[str, Measurement]:
    """Claims on rules that tell where neither collapse happens."""
    free = [grids[MAIN, seed][False] for seed in seeds]
    others = [[table for table in free if table is not judged] for judged in free]
    return {
        "h6": mean_over_draws([_accuracy(table, "Λ") for table in free]),
        "h7": mean_over_draws([_accuracy(table, "M^2/F") for table in free]),
        "h10": mean_over_draws([corner_accuracy(seen, judged) for seen, judged in zip(others, free, strict=True)]),
    }


def _accuracy(table: Table, name: str) -> float:
    return interval_accuracy(table[name], has_neither_collapse(table))


def _corner(tables: Sequence[Table]) -> dict[str, float]:
    """The rule on all seeds, and its accuracy where it was chosen, as that of the other rules."""
    a, b = (fmean(x) for x in zip(*(best_corner(t["k"], t["F"], has_neither_collapse(t)) for t in tables), strict=True))
    return {"k": a, "F": b, "chosen_here": fmean(corner_accuracy([t], t) for t in tables)}


def _window_correlation(widths: Sequence[float]) -> float:
    return spearman(torch.tensor(CONCENTRATIONS), torch.tensor(widths)) or 0.0


def window_table(concentration: Sequence[float], octaves: Mapping[str, Sequence[float]]) -> dict[str, Any]:
    """The window by kind of tokens, and which kinds it widens or narrows for as spectra become concentrated."""
    order = {kind: _window_correlation(widths) for kind, widths in octaves.items()}
    ways = {
        "widens": [kind for kind, r in order.items() if r >= 0.5],
        "narrows": [kind for kind, r in order.items() if r <= -0.5],
        "neither widens nor narrows": [kind for kind, r in order.items() if -0.5 < r < 0.5],
    }
    return {"concentration": list(concentration), "octaves": dict(octaves), "correlation": order, "ways": ways}


def _entropy_and_residual(table: Table) -> list[list[float]]:
    """Entropy lost in nats beside residual kept, a point per head."""
    lost = (1 - table["entropy"]) * math.log(LENGTH)
    return torch.stack([lost, table["kept"]], 1).tolist()


STUDY = Study("rank collapse and entropy collapse", CLAIMS, measure)
