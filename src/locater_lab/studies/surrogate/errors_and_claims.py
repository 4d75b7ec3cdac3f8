"""Errors of predicted entropies, with bootstrap intervals over heads, and the figures that decide the claims of docs/results/surrogate-plan.md.

An entry is the record of one model (`head_predictions.measure_heads`). Samples are arrays (DRAWS,) of a figure on heads drawn
with replacement, always within a model.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

DRAWS = 4000
Numbers = NDArray[np.float64]
Entry = dict[str, Any]
PARTS = {"text": ("covariance", "own"), "shape": ("own", "shuffled"), "order": ("shuffled", None)}
SIZES = ("causal 4x128", "causal 6x256", "causal 8x384", "causal 12x512")
QUANTITIES = {  # column of a head or of its layer: words
    "sink": "weight on the first token",
    "previous": "weight on the previous token",
    "induction": "induction score",
    "identity": "variance of row entropy that the query's token explains",
    "skew": "skew of logits within a row, absolute",
    "kurtosis": "excess kurtosis of logits within a row",
    "spread": "standard deviation of logits within a row",
    "layer_kurtosis": "median excess kurtosis of the layer's channels",
    "normality": "distance of the layer's input from normal",
    "mean_share": "share of the energy in the layer's mean",
    "rank": "effective rank of the head over its size",
    "entropy_ratio": "measured entropy over its largest value",
}


@dataclass(frozen=True)
class Estimate:
    """A figure on all heads, and the same on heads drawn with replacement, which `draw` computes when it is needed."""

    value: float
    draw: Callable[[], Numbers]

    @cached_property
    def samples(self) -> Numbers:
        return self.draw()

    @property
    def interval(self) -> tuple[float, float]:
        low, high = np.quantile(self.samples, (0.025, 0.975))
        return float(low), float(high)

    def p_value(self, bound: float) -> float:
        """Two-sided: how often the drawn figure is on the other side of the bound."""
        beyond = min(int((self.samples <= bound).sum()), int((self.samples >= bound).sum()))
        return min(1.0, 2 * (beyond + 1) / (len(self.samples) + 1))

    def __sub__(self, other: Estimate) -> Estimate:
        return Estimate(self.value - other.value, lambda: self.samples - other.samples)


def head_draws(entry: Entry, heads: int | None = None) -> Numbers:
    """How often each head of a model, or each of some, is drawn (DRAWS, heads). The same in every call, so that
    differences are paired.
    """
    return _draws(len(entry["heads"]["entropy"]) if heads is None else heads, zlib.crc32(entry["model"].encode()))


@cache
def _draws(heads: int, seed: int) -> Numbers:
    rng = np.random.default_rng(seed)
    places = rng.integers(heads, size=(DRAWS, heads)) + heads * np.arange(DRAWS)[:, None]
    return np.bincount(places.ravel(), minlength=DRAWS * heads).reshape(DRAWS, heads).astype(np.float64)


def mean_over_heads(values: Numbers, counts: Numbers) -> Estimate:
    """The mean over heads."""
    return Estimate(float(values.mean()), lambda: counts @ values / counts.sum(1))


def rank_correlation(x: Numbers, y: Numbers, counts: Numbers) -> Estimate:
    """Spearman's correlation over heads. Heads that are drawn several times are ties, and share their mean rank.

    >>> x, once = np.array([1.0, 2.0, 3.0]), np.ones((1, 3))
    >>> round(rank_correlation(x, np.array([10.0, 20.0, 15.0]), once).value, 6)
    0.5
    """
    whole = np.ones((1, len(x)))
    value = weighted_correlation(drawn_ranks(x, whole), drawn_ranks(y, whole), whole)[0]
    return Estimate(float(value), lambda: weighted_correlation(drawn_ranks(x, counts), drawn_ranks(y, counts), counts))


def drawn_ranks(values: Numbers, counts: Numbers) -> Numbers:
    """Mean rank of each head (DRAWS, heads) among the heads drawn."""
    distinct, inverse = np.unique(values, return_inverse=True)
    of_value = counts @ np.eye(len(distinct))[inverse]  # (DRAWS, distinct values)
    return (of_value.cumsum(1) - (of_value - 1) / 2)[:, inverse]


def weighted_correlation(x: Numbers, y: Numbers, weights: Numbers) -> Numbers:
    """Pearson's correlation (DRAWS,) of x and y (DRAWS, heads); 0 where one is constant."""
    total = weights.sum(1, keepdims=True)
    x, y = (z - (weights * z).sum(1, keepdims=True) / total for z in (x, y))
    size = np.sqrt((weights * x * x).sum(1) * (weights * y * y).sum(1))
    return (weights * x * y).sum(1) / np.where(size > 0, size, np.inf)


def prediction_errors(entry: Entry, kind: str = "covariance", column: str = "entropy") -> Numbers:
    """Predicted less measured, per head."""
    return np.array(entry["predicted"][kind][column]) - np.array(entry["heads"][column])


def error_parts(entry: Entry) -> dict[str, Numbers]:
    """The error of each head as a sum of three: another text, tokens that are not normal, order."""
    predicted = {kind: np.array(columns["entropy"]) for kind, columns in entry["predicted"].items()}
    measured = np.array(entry["heads"]["entropy"])
    return {name: predicted[a] - (measured if b is None else predicted[b]) for name, (a, b) in PARTS.items()}


def mean_error(entry: Entry, kind: str = "covariance", column: str = "entropy") -> Estimate:
    return mean_over_heads(np.abs(prediction_errors(entry, kind, column)), head_draws(entry))


def order_of_heads(entry: Entry, kind: str = "covariance", column: str = "entropy") -> Estimate:
    return rank_correlation(
        np.array(entry["predicted"][kind][column]), np.array(entry["heads"][column]), head_draws(entry)
    )


def part_size(entry: Entry, name: str) -> Estimate:
    return mean_over_heads(np.abs(error_parts(entry)[name]), head_draws(entry))


def part_share(entry: Entry, name: str) -> Estimate:
    """E(error * part) / E(error^2): shares of the three parts sum to 1."""
    error, part, counts = prediction_errors(entry), error_parts(entry)[name], head_draws(entry)
    value = float((error * part).sum() / (error**2).sum())
    return Estimate(value, lambda: counts @ (error * part) / (counts @ error**2))


def slope_with_width(entries: Sequence[Entry]) -> Estimate:
    """Least-squares slope of heads' absolute errors on log2 of the width of their model."""
    width = np.log2([e["width"] for e in entries])
    heads = np.array([len(e["heads"]["entropy"]) for e in entries], dtype=np.float64)
    lever = heads * (width - (heads * width).sum() / heads.sum())
    means = [mean_error(e) for e in entries]
    total = (lever * width).sum()
    value = sum(w * m.value for w, m in zip(lever, means, strict=True)) / total
    return Estimate(float(value), lambda: np.sum([w * m.samples for w, m in zip(lever, means, strict=True)], 0) / total)


def head_quantity(entry: Entry, name: str) -> Numbers | None:
    """One number per head; None where a model has no such number for some head."""
    by_layer = {facts["layer"]: facts for facts in entry["layers"]}
    column = {"layer_kurtosis": "kurtosis", "signed_skew": "skew"}.get(name, name)
    if name in ("layer_kurtosis", "normality", "mean_share"):
        values = [by_layer[layer][column] for layer in entry["heads"]["layer"]]
    else:
        values = entry["heads"][column]
    if any(x is None for x in values):
        return None
    return np.abs(np.array(values)) if name == "skew" else np.array(values)


def correlation_with_error(
    entries: Sequence[Entry], name: str, target: Callable[[Entry], Numbers] = lambda e: np.abs(prediction_errors(e))
) -> tuple[Estimate, int, int]:
    """Correlation of absolute errors, or another `target`, with a quantity, by ranks within each model; in how many
    models it has the same sign, and how many there are.
    """
    pairs, alike = [], []
    for entry in entries:
        values = head_quantity(entry, name)
        if values is None or len(np.unique(values)) < 2:
            continue
        x, y = (_centred_ranks(z) for z in (values, target(entry)))
        pairs.append((x, y, head_draws(entry)))
        alike.append(float(x @ y) > 0)
    x, y = (np.concatenate([pair[i] for pair in pairs]) for i in range(2))
    value = float(np.corrcoef(x, y)[0, 1])
    same = sum(alike) if value > 0 else len(alike) - sum(alike)
    return Estimate(value, lambda: _drawn_correlation(x, y, [counts for _, _, counts in pairs])), same, len(alike)


def _drawn_correlation(x: Numbers, y: Numbers, counts: Sequence[Numbers]) -> Numbers:
    """Pearson's correlation (DRAWS,) of x and y (heads,), whose heads are drawn model by model."""
    columns = np.stack([np.ones_like(x), x, y, x * x, y * y, x * y], 1)
    parts_of = np.split(columns, np.cumsum([c.shape[1] for c in counts])[:-1])
    count, sx, sy, sxx, syy, sxy = np.sum([c @ part for c, part in zip(counts, parts_of, strict=True)], 0).T
    return (sxy - sx * sy / count) / np.sqrt((sxx - sx**2 / count) * (syy - sy**2 / count))


def _centred_ranks(values: Numbers) -> Numbers:
    """Ranks within a model, centred and over the number of heads."""
    ranks = drawn_ranks(values, np.ones((1, len(values))))[0]
    return (ranks - ranks.mean()) / len(values)


# ---- reasons that the available models suggested ----


REASONS: dict[str, tuple[str, str, Callable[[Entry], Numbers]]] = {  # claim: words, quantity, part of the error
    "tails": (
        'part "not normal", signed, with excess kurtosis of logits within a row',
        "kurtosis",
        lambda e: error_parts(e)["shape"],
    ),
    "skew": (
        'part "not normal", signed, with skew of logits within a row',
        "signed_skew",
        lambda e: error_parts(e)["shape"],
    ),
    "previous": (
        'size of the part "order" with weight on the previous token',
        "previous",
        lambda e: np.abs(error_parts(e)["order"]),
    ),
}


def reason_correlations(entries: Sequence[Entry]) -> dict[str, tuple[Estimate, int, int]]:
    """By claim: correlation, models of the same sign, models."""
    return {claim: correlation_with_error(entries, name, part) for claim, (_, name, part) in REASONS.items()}


def learned_order(entries: Sequence[Entry]) -> Estimate | None:
    """Mean size of the part "order", learned positions less rotary ones; None where one was not trained."""
    by_name = {entry["model"]: entry for entry in entries}
    if not {"learned 6x256", "causal 6x256"} <= by_name.keys():
        return None
    return part_size(by_name["learned 6x256"], "order") - part_size(by_name["causal 6x256"], "order")


# ---- claims ----


@dataclass(frozen=True)
class ClaimFigure:
    """A figure that decides a claim, in one model or over several."""

    claim: str
    model: str
    estimate: Estimate
    bound: float


CLAIMS: dict[str, tuple[str, Callable[[Entry], Estimate], float, bool]] = {
    "order": ("Mean and covariance order the heads: rank correlation at least 0.85", order_of_heads, 0.85, False),
    "error": ("They predict entropy: mean error at most 0.35 nats", mean_error, 0.35, True),
    "covariance": (
        "The covariance is worth more than its diagonal: it lowers the mean error",
        lambda e: mean_error(e, "diagonal") - mean_error(e),
        0.0,
        False,
    ),
    "text": (
        "Statistics of the measured text itself would predict better",
        lambda e: mean_error(e) - mean_error(e, "own"),
        0.0,
        False,
    ),
    "shape": (
        "More error comes from taking tokens as normal than from forgetting their order",
        lambda e: part_size(e, "shape") - part_size(e, "order"),
        0.0,
        False,
    ),
}
DECIDED_BY = {
    "order": "rank correlation over heads of predicted with measured entropy",
    "error": "mean absolute error of predicted entropy over heads, nats",
    "covariance": "that error with the diagonal alone, less with the covariance",
    "text": "that error, less with statistics of the measured text itself",
    "shape": "error from taking tokens as normal, less that from forgetting their order, nats",
    "size": "slope of the error over the logarithm of the width, nats per doubling",
    "positions": "error with learned positions less with rotary ones, nats",
    "head size": "error with heads of 16 less with heads of 64, nats",
}
BETWEEN = {
    "size": "The error grows with the width of causal models (nats per doubling)",
    "positions": "Learned positions are predicted worse than rotary ones, 6 x 256 (difference of errors, nats)",
    "head size": "Heads of 16 are predicted worse than heads of 64, 6 x 256 (difference of errors, nats)",
}


def claim_figures(entries: Sequence[Entry]) -> list[ClaimFigure]:
    """The figure of every claim in every model, then those between models."""
    items = [
        ClaimFigure(claim, entry["model"], figure(entry), bound)
        for claim, (_, figure, bound, _) in CLAIMS.items()
        for entry in entries
    ]
    by_name = {entry["model"]: entry for entry in entries}
    plain = by_name.get("causal 6x256")
    if all(name in by_name for name in SIZES):
        items.append(ClaimFigure("size", "causal models", slope_with_width([by_name[name] for name in SIZES]), 0.0))
    for claim, name in (("positions", "learned 6x256"), ("head size", "small heads 6x256")):
        if plain is not None and name in by_name:
            items.append(ClaimFigure(claim, name, mean_error(by_name[name]) - mean_error(plain), 0.0))
    return items
