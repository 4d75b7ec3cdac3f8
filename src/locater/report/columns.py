"""Columns of scans and probes: what their numbers are called, what they mean, and which of them say most."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from locater.errors import LocaterError
from locater.findings import EXPLODING
from locater.markup import quantile

Row = Any  # a head of a document; the row of a result, which also gives its columns by name
Read = Callable[[Row], float | None]
VARIES = 0.25  # of the colours: a map that uses less of them is blank
# columns that say which head a row is, and of what
IDENTITY = frozenset(("layer", "head", "kv_head", "width", "head_dim", "rows"))


class HeadQuantity(NamedTuple):
    """A number per head, as it is drawn. `least` is the smallest end of the colour scale, so that noise stays pale."""

    name: str
    symbol: str
    words: str
    diverging: bool
    least: float
    meaning: str
    read: Read

    @property
    def label(self) -> str:
        return f"{self.symbol} {self.words}".strip()


def column_reader(name: str) -> Read:
    return lambda row: row[name]


def root_of_F(row: Row) -> float | None:
    return None if row["F"] is None else row["F"] ** 0.5


def symmetry(row: Row) -> float | None:
    return row["S"] / row["F"] if row["S"] is not None and row["F"] else None


# Headings of tables, and how their numbers are read from a row. Where there is no room, the last columns are left out
# first.
SCAN_HEADINGS: dict[str, Read] = {
    "M": column_reader("M"),
    "√F": root_of_F,
    "H": column_reader("expected_entropy"),
    "Λ": column_reader("localization"),
    "κ": column_reader("concentration"),
    "S/F": symmetry,
    "key bias": column_reader("key_bias"),
    "kept": column_reader("residual_kept"),
}
VALUE_HEADINGS: dict[str, Read] = {"writes": lambda row: row.get("written_share")}  # of scans that read values
PROBE_HEADINGS: dict[str, Read] = {
    "H": column_reader("entropy"),
    "first": column_reader("sink"),
    "max logit": column_reader("max_logit"),
    "pred. H": column_reader("predicted_entropy"),
    "prior H": column_reader("prior_entropy"),
    "distance": column_reader("distance"),
    "top": column_reader("max_probability"),
    "Λ": column_reader("predicted_localization"),
    "pred. first": column_reader("predicted_sink"),
}


def quantities(length: int) -> dict[str, HeadQuantity]:
    """By name, in the order of the page's menu, for `length` tokens in view. Names are columns of a scan, and `sqrtF`
    and `symmetry`, which are computed from them.
    """
    uniform = f"{length**-0.5:.3g}"
    table = (
        (
            *("localization", "Λ", "localization by position", True, 0.1),
            "How much of whether a token's signal gets through is explained by its position. 0: position does not "
            "matter. Towards 1: near tokens win. Negative: far tokens win.",
        ),
        (
            *("M", "M", "mean self-logit", True, 1.0),
            "Mean logit of a token with itself. Around 2 and above, the theory lets attention localize; below -1 a "
            "token looks away from tokens like itself.",
        ),
        (
            *("sqrtF", "√F", "spread of logits", False, 0.5),
            "How far logits spread over keys. Near 0 attention is uniform (rank collapse); far above √(2 log T) "
            "each row locks onto single tokens (entropy collapse).",
        ),
        (
            *("concentration", "κ", "concentration of the spectrum", True, 0.1),
            "1 or -1: all eigenvalues are equal. 0: they spread around zero, or the map only rotates.",
        ),
        (
            *("symmetry", "S/F", "symmetry", True, 0.2),
            "1: the query-key map is symmetric, tokens look at each other. -1: antisymmetric, one-way. "
            "Trained maps sit near 0.",
        ),
        (
            *("expected_entropy", "", "expected entropy (nats)", False, math.log(length)),
            "Entropy of a row of attention if logits were normal over keys. 0 is one-hot.",
        ),
        (
            *("residual_kept", "", "differences kept by attention", False, 0.2),
            "Share of the differences between tokens that attention alone passes on. "
            f"Near {uniform}, as uniform attention over {length} tokens, the head mixes them into one: layer upon "
            "layer, that is rank collapse. 1: each row copies one token. Skip connections keep the stream itself; "
            "this is about what the head adds to it.",
        ),
        (
            *("key_bias", "", "key bias", False, 0.2),
            "Spread of the part of a logit that depends on the key alone: every query is drawn to the same keys.",
        ),
        (
            *("stable_rank", "", "stable rank", False, 4.0),
            "How many directions carry the map, each by its square against that of the largest: 1 is a single one, the "
            "head size is all of them.",
        ),
        (
            *("effective_rank", "", "effective rank", False, 4.0),
            "How many directions the map has, each counted by its share of all singular values: never less than the "
            "stable rank, and near the head size where all count alike.",
        ),
        (
            *("spectral_norm", "", "spectral norm of W", False, 1.0),
            "Largest stretch of the query-key map, before the logit scale.",
        ),
        (
            *("skew", "", "skew g₁", True, 0.75),
            "Beyond 0.75 a few directions dominate and the exact mixture replaces the closed form.",
        ),
    )
    derived = {"sqrtF": root_of_F, "symmetry": symmetry}
    return {entry[0]: HeadQuantity(*entry, derived.get(entry[0]) or column_reader(entry[0])) for entry in table}


def quantity_words() -> dict[str, str]:
    """What a quantity is called in a sentence, by its name: words, and the symbol of the tables."""
    return {x.name: f"{x.words} {x.symbol}".strip() for x in quantities(2).values()}


def quantity_named(name: str, length: int, columns: Sequence[str]) -> HeadQuantity:
    """A quantity of the page, or any other of the scan's numeric `columns`."""
    known = quantities(length)
    if name in known:
        return known[name]
    if name not in columns:
        derived = [x for x in known if x not in columns]
        raise LocaterError(f"column {name!r}: there is none of this name; there are {', '.join([*columns, *derived])}")
    return HeadQuantity(name, "", name.replace("_", " "), False, 0.0, "", column_reader(name))


def opening_quantity(rows: Sequence[Row], length: int) -> HeadQuantity:
    """The quantity to open on: the first whose map is not blank, or the one that varies most."""
    spans = {name: _span(rows, quantity) for name, quantity in quantities(length).items()}
    best = next((name for name, span in spans.items() if span >= VARIES), max(spans, key=lambda name: spans[name]))
    return quantities(length)[best]


def numeric_columns(rows: Sequence[Row]) -> list[str]:
    """Columns with a number for some head, in their order, without those that say which head it is."""
    found: dict[str, bool] = {}
    for row in rows:
        for name, value in row.items():
            found[name] = found.get(name, False) or (isinstance(value, int | float) and not isinstance(value, bool))
    return [name for name, number in found.items() if number and name not in IDENTITY]


def _span(rows: Sequence[Row], quantity: HeadQuantity) -> float:
    numbers = known_numbers(rows, quantity)
    return (quantile(numbers, 0.98) - quantile(numbers, 0.02)) / range_of(numbers, quantity)


def known_numbers(rows: Sequence[Row], quantity: HeadQuantity) -> list[float]:
    """The number of each row that has one."""
    return [x for x in map(quantity.read, rows) if x is not None]


def range_of(numbers: Sequence[float], quantity: HeadQuantity) -> float:
    """Where the colours of a quantity end, which is what a change of it is divided by."""
    return max(quantity.least, quantile([abs(x) for x in numbers], 0.98))


# ---- columns of a probe ----


class Column(NamedTuple):
    """How a column of a probe is shown.

    Columns with the same `scale` share their colours. `least` is the smallest end of the colour scale, so that noise
    stays pale.
    """

    name: str
    label: str
    scale: str
    least: float
    meaning: str


COLUMNS = (
    Column(
        "entropy",
        "entropy",
        "entropy",
        1.0,
        "How widely a token spreads its attention, in nats, mean over tokens. 0: all on one token. "
        "It grows with the number in view.",
    ),
    Column(
        "entropy_ratio",
        "entropy ratio",
        "share",
        1.0,
        "Entropy over the log of the number of tokens in view. 1: the same weight on all. "
        "Towards 0: one token takes all.",
    ),
    Column(
        "rest_entropy",
        "entropy without the first token",
        "entropy",
        1.0,
        "Entropy without the first token, which often takes weight that has nothing to do with content. "
        "The other weights are rescaled to sum to 1.",
    ),
    Column(
        "sink",
        "weight on the first token",
        "sink",
        0.1,
        "Share of attention on the first token. Above 0.9 the head is idle on this input.",
    ),
    Column(
        "max_logit",
        "largest logit",
        "max_logit",
        5.0,
        f"Largest score of any pair before the softmax. Beyond {EXPLODING} half precision is near its limits.",
    ),
    Column(
        "max_probability",
        "strongest token",
        "share",
        0.2,
        "Weight of the token that gets most, mean over tokens. 1 is one-hot.",
    ),
    Column(
        "participation",
        "tokens that share the weight",
        "participation",
        4.0,
        "1 over the sum of squared weights: how many tokens effectively share a token's attention.",
    ),
    Column(
        "typical_kept",
        "differences kept",
        "kept",
        0.2,
        "Share of the differences between tokens that a typical row of attention passes on: 1 over the root of how "
        "many tokens share its weight. Near 0: the head gives every token the same average. "
        "1: each token copies one other.",
    ),
    Column(
        "distance",
        "distance (tokens)",
        "distance",
        4.0,
        "Mean distance in tokens to what is attended to, weighted by attention.",
    ),
    Column("self_mass", "weight on itself", "share", 0.1, "Attention that a token pays to itself."),
    Column(
        "row_mass",
        "sum of weights",
        "share",
        1.0,
        "Sum of a token's weights. It is 1, unless a learned sink takes a part.",
    ),
    Column(
        "output_stable_rank",
        "stable rank of the output",
        "rank",
        2.0,
        "How many directions dominate the head's output. 1: every token gets the same output up to its size.",
    ),
    Column(
        "output_effective_rank",
        "effective rank of the output",
        "rank",
        2.0,
        "How many directions the head's output has, weak ones included; at most the head size.",
    ),
    Column(
        "previous",
        "previous-token score",
        "circuit",
        0.1,
        "Weight on the token just before, on random tokens that repeat once. High: a previous-token head.",
    ),
    Column(
        "duplicate",
        "duplicate-token score",
        "circuit",
        0.1,
        "Weight on the earlier copy of the same token, on random tokens that repeat once. "
        "High: a duplicate-token head.",
    ),
    Column(
        "induction",
        "induction score",
        "circuit",
        0.1,
        "Weight on the token after the earlier copy, on random tokens that repeat once. "
        "High: an induction head, which continues patterns.",
    ),
    Column(
        "skip_induction",
        "skip-induction score",
        "circuit",
        0.1,
        "Weight on tokens two after an earlier copy of the token before the current one, less that of uniform "
        "attention, on random tokens of a small alphabet. High: it continues patterns with a gap.",
    ),
    Column(
        "pair_induction",
        "pair-induction score",
        "circuit",
        0.1,
        "Weight on tokens that followed the same two tokens, less that of uniform attention, on random tokens of a "
        "small alphabet. High: it continues patterns of two tokens.",
    ),
    Column(
        "predicted_entropy",
        "predicted entropy",
        "entropy",
        1.0,
        "Entropy of this head on normal tokens with the mean and covariance of its real input. "
        "The first token is the real one.",
    ),
    Column(
        "predicted_rest_entropy",
        "predicted entropy without the first token",
        "entropy",
        1.0,
        "Predicted entropy without the first token.",
    ),
    Column(
        "predicted_sink",
        "predicted weight on the first token",
        "sink",
        0.1,
        "Weight on the first token for the same normal tokens.",
    ),
    Column(
        "predicted_typical_kept",
        "predicted differences kept",
        "kept",
        0.2,
        "Share of the differences that rows with the predicted entropy pass on, if their scores are normal.",
    ),
    Column(
        "predicted_M",
        "M, mean self-logit",
        "M",
        1.0,
        "Mean score of a token with itself, from the measured mean and covariance. "
        "Around 2 and above attention can localize.",
    ),
    Column(
        "predicted_F",
        "F, variance of logits",
        "F",
        0.25,
        "Variance of scores over the measured tokens. Near 0 all tokens get the same weight; "
        "above 2 log(length) each token locks onto one.",
    ),
    Column(
        "predicted_localization",
        "Λ, localization by position",
        "localization",
        0.1,
        "How much position decides whose signal gets through, for the measured tokens. 0: not at all. "
        "Towards 1: near tokens win. Negative: far ones.",
    ),
    Column(
        "prior_entropy",
        "entropy from weights alone",
        "entropy",
        1.0,
        "Entropy of this head on standard normal tokens: what its weights say when nothing is known of its input.",
    ),
    Column(
        "prior_typical_kept",
        "differences kept, from weights alone",
        "kept",
        0.2,
        "Share of the differences that rows with the entropy from weights alone pass on.",
    ),
    Column(
        "prior_localization",
        "Λ from weights alone",
        "localization",
        0.1,
        "Localization for unit tokens, as `locater scan` gives it.",
    ),
    Column(
        "logit_bound",
        "bound on logits",
        "logit_bound",
        5.0,
        "No score of this head can exceed this, whatever the input: product of the largest possible query and key.",
    ),
)
KINDS = {
    "exact": "measured, with every row of attention counted",
    "sampled": "measured on a sample of the rows of attention",
    "predicted": "the head run on normal tokens that share mean and covariance with the real ones, and nothing else",
    "prior": "from weights alone, for tokens of mean zero and unit covariance",
    "bound": "from weights alone, and no input can exceed it",
}


class MeasuredAndPredicted(NamedTuple):
    """A measured column and its predictions in one chart, with words for both sides of the diagonal."""

    measured: str
    predicted: str
    prior: str | None
    above: str
    below: str


_SELECTIVE = ("more selective than predicted", "less selective than predicted")
PAIRS = (
    MeasuredAndPredicted("entropy", "predicted_entropy", "prior_entropy", *_SELECTIVE),
    MeasuredAndPredicted("rest_entropy", "predicted_rest_entropy", None, *_SELECTIVE),
    MeasuredAndPredicted(
        "typical_kept",
        "predicted_typical_kept",
        "prior_typical_kept",
        "keeps less than predicted",
        "keeps more than predicted",
    ),
    MeasuredAndPredicted(
        "sink", "predicted_sink", None, "less weight there than predicted", "more weight there than predicted"
    ),
)
