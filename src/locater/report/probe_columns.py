"""What the columns of a probe are called on its page, what they mean, and which of them are compared."""

from __future__ import annotations

from typing import NamedTuple

from locater.findings import EXPLODING


class Column(NamedTuple):
    """How a column is shown.

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


class Pair(NamedTuple):
    """A measured column and its predictions in one chart, with words for both sides of the diagonal."""

    measured: str
    predicted: str
    prior: str | None
    above: str
    below: str


_SELECTIVE = ("more selective than predicted", "less selective than predicted")
PAIRS = (
    Pair("entropy", "predicted_entropy", "prior_entropy", *_SELECTIVE),
    Pair("rest_entropy", "predicted_rest_entropy", None, *_SELECTIVE),
    Pair(
        "typical_kept",
        "predicted_typical_kept",
        "prior_typical_kept",
        "keeps less than predicted",
        "keeps more than predicted",
    ),
    Pair("sink", "predicted_sink", None, "less weight there than predicted", "more weight there than predicted"),
)
