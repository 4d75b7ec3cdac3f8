"""The simplified two-layer model of the paper, on counts in place of sequences.

A sequence x_0 ... x_{L-1} is followed by an empty query token, and x_L is to be predicted. Head h of layer 1 (from 0)
looks at the H offsets h + 1 ... h + H before a token by a softmax of w[h], and its output v_h is scaled to length 1.
Layer 2 compares query and key t by products over subsets of heads,

    logit(t) = a sum_S c_S^2 prod_{h in S} <v_h(query), v_h(t)> / sum_S c_S^2,

and its output, p = sum_t softmax(logit)_t onehot(x_t), is the prediction.

The logit depends on the tokens at the 2 H - 1 offsets before query and key alone, and a chain repeats itself: the keys
of a sequence that have the same such tokens and the same x_t are counted once. Tokens are renamed in the order in which
the query sees them, which changes no loss and leaves fewer pairs of query and key to compute.

Axes: N sequences, U pairs of query and key, H heads, S tokens, B = S + 1 symbols (the last: before the sequence).

Once trained: which parents it compares (study c), and how it predicts beside its rivals, also where it was never
trained (study d).

**Parents (study c).** Chi-square mutual information, and why it has to be modified.

Of parents P (values z) and the next token y,

    I(P) = sum_z mu(z) D(z),            D(z) = sum_y mu(y | z)^2 / mu(y) - 1,
    J(P) = sum_z mu(z)^2 D(z).

I is the chi-square mutual information; more parents never have less. J is what the first step of training on -log p
rewards: with a = 0 and heads that copy, d(-loss)/da of the subset P is, sequence by sequence,

    n(z, y) / n(y) - n(z) / L

(z the query's parents, y the next token, n how often among the keys), whose expectation is J. A context that is met
half as often counts half as much, so parents that tell nothing new lose. The paper speaks of a modified chi-square
mutual information that trades information against the number of parents; its exact form was not available, so J is
ours.

**Rivals (study d).** Bayes, which knows parents and prior, and counting with fewer or more parents.

Counting with parents P: p(x) = (n_x + alpha) / (n + S alpha), where n_x of the n earlier tokens with the same parents
were x. With the source's own parents and prior this is the Bayes predictor.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from itertools import combinations, product
from statistics import fmean
from typing import Any, Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater_lab.data.synthetic import NgramSource, context_codes
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import map_parts
from locater_lab.engine.reproduction import Results, Setting, Study

Form = Literal["ce", "nll"]

HEADS, DEGREE = 3, 2
W_PLUS, W_MINUS, C_START, A_START = 3.0, 0.1, 0.01, 0.01
RATE = 1.0
EPS = 0.01  # of the loss -log(p + EPS); our choice
TRAINING_ROWS, HELD_OUT_ROWS = 9000, 1000  # sequences


def subsets(heads: int = HEADS, degree: int = DEGREE) -> list[tuple[int, ...]]:
    """Sets of offsets that layer 2 can compare, named by the offset that each head looks at first.

    >>> subsets(3, 2)
    [(), (1,), (2,), (3,), (1, 2), (1, 3), (2, 3)]
    """
    return [part for size in range(degree + 1) for part in combinations(range(1, heads + 1), size)]


@dataclass
class Counts:
    """What the model reads of N sequences: how often the query met each kind of key, and the token to predict."""

    tokens: int  # S
    heads: int
    targets: Int[Tensor, " N"]
    cell: Int[Tensor, " n"]  # sequence * S + token, of each kind of key
    pair: Int[Tensor, " n"]  # its pair of query and key
    count: Float[Tensor, " n"]
    at: list[tuple[Tensor, Tensor]]  # by head: (U,) patterns of query and of key in the head's table

    @classmethod
    def of(cls, rows: Int[Tensor, "N L+1"], tokens: int, heads: int = HEADS) -> Counts:
        """From sequences whose last token is the one to predict."""
        reach, B = 2 * heads - 1, tokens + 1
        rows = rename_tokens(rows, tokens, heads)
        N, T = rows.shape
        padded = torch.cat([torch.full((N, reach), tokens), rows], 1)
        codes = torch.zeros_like(rows)
        for offset in range(reach, 0, -1):  # digit `offset - 1` in base B
            codes = codes * B + padded[:, reach - offset : reach - offset + T]
        wide = B**reach
        kinds = (torch.arange(N)[:, None] * wide + codes[:, :-1]) * tokens + rows[:, :-1]
        kind, count = kinds.flatten().unique(return_counts=True)
        row, key, token = kind // (wide * tokens), kind // tokens % wide, kind % tokens
        pairs, pair = (codes[row, -1] * wide + key).unique(return_inverse=True)
        at = [tuple(code // B**h % B**heads for code in (pairs // wide, pairs % wide)) for h in range(heads)]
        return cls(tokens, heads, rows[:, -1], row * tokens + token, pair, count.double(), at)


def rename_tokens(rows: Int[Tensor, "N T"], tokens: int, heads: int = HEADS) -> Int[Tensor, "N T"]:
    """The same sequences with tokens numbered in the order of their last appearance before the query, latest first.
    Predictions of the model are in these names.

    >>> rename_tokens(torch.tensor([[0, 2, 1, 1, 0]]), 3).tolist()
    [[2, 1, 0, 0, 2]]
    """
    reach = 2 * heads - 1
    recent = rows[:, :-1].flip(1)[:, :reach]
    first = torch.stack([torch.where(recent == token, torch.arange(recent.shape[1]), reach + token).amin(1)
                         for token in range(tokens)], 1)  # fmt: skip
    return first.argsort(1).argsort(1).gather(1, rows)


@dataclass
class Model:
    """Parameters. `c` is in the order of `subsets`, w[h, j] the logit of offset h + 1 + j."""

    tokens: int = 3
    heads: int = HEADS
    degree: int = DEGREE
    w_plus: float = W_PLUS
    c: Tensor = field(init=False)
    w: Tensor = field(init=False)
    a: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.sets = subsets(self.heads, self.degree)
        self.c = torch.full((len(self.sets),), C_START, dtype=torch.float64)
        self.w = torch.full((self.heads, self.heads), W_MINUS, dtype=torch.float64)
        self.w[:, 0] = self.w_plus
        self.a = torch.tensor(A_START, dtype=torch.float64)
        symbols = torch.tensor(list(product(range(self.tokens + 1), repeat=self.heads))).flip(1)  # (B^H, H)
        self.symbols = symbols
        self.vectors = torch.eye(self.tokens + 1, dtype=torch.float64)[symbols][..., : self.tokens]  # (B^H, H, S)

    def shares(self) -> list[float]:
        """Of each subset in sum c^2."""
        return (self.c**2 / (self.c**2).sum()).tolist()

    def masses(self) -> list[float]:
        """Weight of each head of layer 1 on its first offset, all of its offsets in sight."""
        return self.w.softmax(1)[:, 0].tolist()

    def similarities(self, counts: Counts) -> list[Float[Tensor, " U"]]:
        """<v_h(query), v_h(key)> of every pair, by head."""
        missing = self.symbols == self.tokens
        similarities = []
        for h, (query, key) in enumerate(counts.at):
            logits = self.w[h].expand(len(missing), -1).masked_fill(missing, -1e9)
            p = logits.softmax(1).masked_fill(missing, 0.0)
            v = (p[..., None] * self.vectors).sum(1)
            v = v / v.norm(dim=1, keepdim=True).clamp_min(1e-12)
            similarities.append((v @ v.mT).flatten().index_select(0, query * len(v) + key))
        return similarities

    def logits(self, counts: Counts) -> Float[Tensor, " U"]:
        """Of every pair of query and key."""
        like, share = self.similarities(counts), self.c**2 / (self.c**2).sum()
        total = torch.zeros_like(like[0])
        for part, weight in zip(self.sets, share.unbind(), strict=True):
            total = total + reduce(torch.mul, (like[h - 1] for h in part), weight)
        return self.a * total

    def __call__(self, counts: Counts) -> Float[Tensor, "N S"]:
        """Predictions, in the names of `rename_tokens`."""
        weight = self.logits(counts).exp().index_select(0, counts.pair) * counts.count
        totals = weight.new_zeros(len(counts.targets) * counts.tokens).index_add(0, counts.cell, weight)
        totals = totals.view(-1, counts.tokens)
        return totals / totals.sum(1, keepdim=True)


def loss(p: Float[Tensor, "N S"], targets: Int[Tensor, " N"], form: Form) -> Tensor:
    """`ce`: probabilities go through cross-entropy as if they were logits, as in the published code; so the loss of a
    certain and right prediction is log(1 + (S - 1) / e), not 0. `nll`: -log(p + EPS), which the theory is about.
    """
    right = p.gather(1, targets[:, None])[:, 0]
    if form == "ce":
        return (p.exp().sum(1).log() - right).mean()
    return -torch.log(right + EPS).mean()


def fit(
    model: Model,
    counts: Counts,
    epochs: int,
    parts: Collection[str] = ("c", "w", "a"),
    form: Form = "ce",
    keep: Collection[int] = (),
    held_out: Counts | None = None,
) -> list[dict[str, Any]]:
    """Gradient descent on all sequences at once, of some of the parameters; what was seen before the epochs of `keep`."""
    trained = [getattr(model, name).requires_grad_() for name in parts]
    kept = []
    for epoch in range(epochs + 1):
        value = loss(model(counts), counts.targets, form)
        if epoch in keep:
            kept.append({"epoch": epoch, "loss": float(value.detach()), **state_of(model, held_out, form)})
        if epoch < epochs:
            gradients = torch.autograd.grad(value, trained)
            with torch.no_grad():
                for parameter, gradient in zip(trained, gradients, strict=True):
                    parameter -= RATE * gradient
    for parameter in trained:
        parameter.requires_grad_(False)
    return kept


@torch.no_grad()
def state_of(model: Model, held_out: Counts | None, form: Form) -> dict[str, Any]:
    """The parameters as numbers, and the loss on other sequences."""
    state: dict[str, Any] = {"a": float(model.a), "shares": model.shares(), "masses": model.masses()}
    if held_out is not None:
        state["held_out"] = float(loss(model(held_out), held_out.targets, form))
    return state


def chosen_subset(model: Model) -> tuple[int, ...]:
    """The subset with the largest share."""
    return model.sets[max(range(len(model.sets)), key=model.shares().__getitem__)]


def draw_sequences(
    seed: int, rows: int, length: int = 100, source: NgramSource | None = None
) -> Int[Tensor, "rows length+1"]:
    """Sequences of the paper's source, or of another."""
    source = source or SOURCE
    return source.sample(rows, length, torch.Generator().manual_seed(seed))


SOURCE = NgramSource(3, (1, 2), 0.1)


def at_epochs(curve: Sequence[Mapping[str, Any]], key: str) -> dict[int, Any]:
    """A column of a curve by epoch."""
    return {row["epoch"]: row[key] for row in curve}


# ---- c: which parents are chosen ----


SEEDS = 8
SOURCE_ROWS = {True: 800, False: 9000}
LONG_SEQUENCES = {True: (300, 400), False: (3000, 2000)}  # sequences and tokens that information is estimated on
SOURCE_EPOCHS = 40
SOURCES = (((1, 2), 0.1), ((1, 2), 1.0), ((1, 3), 0.1), ((2, 3), 0.1), ((1,), 0.1), ((2,), 0.1))
COPYING = 200.0  # w_plus of heads that copy one token: the others get exp(-200)

INFORMATION_CLAIMS = (
    Claim(
        "c1", "At a = 0, heads that copy and loss -log p, the gradient of each subset is n(z, y) / n(y) - n(z) / L",
        "largest difference from the gradient of the model, float64", "at most", 1e-10, by="ours",
    ),
    Claim(
        "c2", "Training chooses the subset of parents with the largest modified chi-square information",
        f"runs that chose another subset than that of the largest J, {len(SOURCES)} sources with {SEEDS} seeds each", "at most", 0.0, by="summary",
        bound="ours",
    ),
    Claim(
        "c3", "Chi-square information without a modification cannot choose: a third token that tells nothing adds to it",
        "I of tokens 1, 2 and 3 less I of the parents 1 and 2", "at least", 0.0, by="ours",
    ),
    Claim(
        "c4", "Given the subset of all three heads too, training still chooses the parents alone",
        f"share of c^2 on heads 1 and 2 after {SOURCE_EPOCHS} epochs, subsets of up to three heads", "at least", 0.99, by="ours",
    ),
    Claim(
        "c5", "and J says so",
        "J of the parents over J of all three tokens", "at least", 1.0, by="ours",
    ),
)  # fmt: skip


def joint_counts(rows: Int[Tensor, "N T"], parents: tuple[int, ...], tokens: int, reach: int = 3) -> Tensor:
    """How often each combination of parents was followed by each token: (N, contexts, S), over the same places for all
    parents within `reach`.
    """
    codes = context_codes(rows, parents, tokens)[:, reach - max((*parents, 0)) :]
    cells = codes * tokens + rows[:, reach:]
    wide = tokens ** (len(parents) + 1)
    counts = torch.zeros(len(rows), wide, dtype=torch.float64)
    counts.scatter_add_(1, cells, torch.ones_like(cells, dtype=torch.float64))
    return counts.view(len(rows), -1, tokens)


def chi_square_informations(counts: Float[Tensor, "N C S"]) -> tuple[float, float]:
    """I and J, means over sequences, each by its own frequencies."""
    joint = counts / counts.sum((1, 2), keepdim=True)
    context, token = joint.sum(2), joint.sum(1)
    given = joint / context[..., None].clamp_min(1e-300)
    spread = (given**2 / token[:, None].clamp_min(1e-300)).sum(2) - 1  # D(z); contexts that never came count nothing
    return float((context * spread).sum(1).mean()), float((context**2 * spread).sum(1).mean())


def first_gradient(counts: Counts, degree: int = 3) -> Float[Tensor, " sets"]:
    """d(-loss)/da of each subset alone, at a = 0 with heads that copy, loss -log p."""
    gradients = []
    for at in range(len(subsets(counts.heads, degree))):
        model = Model(tokens=counts.tokens, degree=degree, w_plus=COPYING)
        model.c = torch.zeros_like(model.c)
        model.c[at] = 1.0
        model.a = torch.zeros((), dtype=torch.float64, requires_grad=True)
        value = -torch.log(model(counts).gather(1, counts.targets[:, None])).mean()
        gradients.append(-torch.autograd.grad(value, model.a)[0])
    return torch.stack(gradients)


def counted_gradient(rows: Int[Tensor, "N L+1"], part: tuple[int, ...]) -> float:
    """n(z, y) / n(y) - n(z) / L, mean over sequences, by comparing every key with the query."""
    keys, y = rows[:, :-1], rows[:, -1:]
    L = keys.shape[1]
    at = torch.arange(L)
    same = torch.ones_like(keys, dtype=torch.bool)
    for offset in part:
        earlier = keys[:, (at - offset).clamp_min(0)]
        same &= (at >= offset) & (earlier == keys[:, L - offset, None])
    here = keys == y
    return float(((same & here).sum(1) / here.sum(1).double() - same.sum(1).double() / L).mean())


def choose_parents(setting: Setting, seed: int) -> dict[str, Any]:
    """Every source: information of every subset, and the one that training chose."""
    rows, length = LONG_SEQUENCES[setting.quick]
    sources = []
    for parents, prior in SOURCES:
        source = NgramSource(3, parents, prior)
        long = draw_sequences(20_000 + seed, rows, length, source)
        values = {part: chi_square_informations(joint_counts(long, part, 3)) for part in subsets(3, 3)[1:]}
        model = Model()
        fit(model, Counts.of(draw_sequences(seed, SOURCE_ROWS[setting.quick], source=source), 3), SOURCE_EPOCHS)
        allowed = [part for part in values if len(part) <= 2]
        best = max(allowed, key=lambda part: values[part][1])
        sources.append({"values": values, "best": best, "winner": chosen_subset(model)})
    deep = Model(degree=3)
    fit(deep, Counts.of(draw_sequences(seed, SOURCE_ROWS[setting.quick]), 3), SOURCE_EPOCHS)
    return {"sources": sources, "deep": deep.shares()}


def gradient_difference() -> float:
    """Largest distance of the model's first gradient from the formula, over subsets and seeds."""
    off = 0.0
    for seed in range(4):
        rows = draw_sequences(seed, 200, 40)
        rows = rows[(rows[:, :-1] == rows[:, -1:]).any(1)]  # -log p of a token that was not seen is infinite
        given = first_gradient(Counts.of(rows, 3))
        off = max(
            off, *(abs(float(g) - counted_gradient(rows, part)) for g, part in zip(given, subsets(3, 3), strict=True))
        )
    return off


def measure_information(setting: Setting) -> Results:
    runs = map_parts(choose_parents, list(range(SEEDS)), setting)
    first = [run["sources"][0]["values"] for run in runs]
    other = [s["best"] != s["winner"] for run in runs for s in run["sources"]]
    pair, triple = (1, 2), (1, 2, 3)
    measured = {
        "c1": Measurement(gradient_difference(), 0.0, "none: largest of 4 draws and 8 subsets"),
        "c2": Measurement(float(sum(other)), 0.0, f"none: counted over {len(other)} runs"),
        "c3": by_seed([values[triple][0] - values[pair][0] for values in first]),
        "c4": by_seed([run["deep"][subsets(3, 3).index(pair)] for run in runs]),
        "c5": by_seed([values[pair][1] / values[triple][1] for values in first]),
    }
    return Results(measured, {"information": _information(runs), "choices": _choices(runs)})


def _information(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """I and J of each subset on the paper's source."""
    parts = [part for size in (1, 2, 3) for part in combinations((1, 2, 3), size)]
    return [
        {
            "tokens": subset_name(part),
            "I": fmean(run["sources"][0]["values"][part][0] for run in runs),
            "J": fmean(run["sources"][0]["values"][part][1] for run in runs),
        }
        for part in parts
    ]


def _choices(runs: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """By source: the parents, the subset of the largest J, and what training chose, over seeds."""
    rows = []
    for at, (parents, prior) in enumerate(SOURCES):
        entries = [run["sources"][at] for run in runs]
        rows.append(
            {
                "parents": subset_name(parents),
                "prior": prior,
                "largest": _tally([e["best"] for e in entries]),
                "chosen": _tally([e["winner"] for e in entries]),
            }
        )
    return rows


def _tally(parts: list[tuple[int, ...]]) -> str:
    return ", ".join(f"{subset_name(part)} ({parts.count(part)})" for part in sorted(set(parts)))


def subset_name(part: tuple[int, ...]) -> str:
    """Offsets of a subset in words."""
    return " and ".join(map(str, part)) or "none"


INFORMATION_STUDY = Study("which parents are chosen", INFORMATION_CLAIMS, measure_information)


# ---- d: rivals, lengths and priors ----


RIVAL_ROWS = {True: 2000, False: 9000}
RIVAL_EPOCHS = {True: 200, False: 5000}
TESTED_ROWS = {True: 1000, False: 10_000}
LENGTHS = (10, 20, 50, 100, 200, 400)  # the model is trained on 100
PRIORS = (0.05, 0.1, 0.2, 0.5, 1.0)  # and on 0.1
RIVALS = {"unigram": (), "bigram": (1,), "trigram": (1, 2), "4-gram": (1, 2, 3)}

RIVALS_CLAIMS = (
    Claim(
        "d1", "The trained model counts what followed the same two tokens",
        "divergence of its predictions from trigram counting, less that from the nearer of unigram and bigram counting, in nats",
        "at most", 0.0, bound="ours",
    ),
    Claim(
        "d2", "It is close to Bayes where it was trained",
        "loss of (p + eps) / (1 + S eps) less that of Bayes, length 100, prior 0.1, in nats", "at most", 0.05, by="ours",
    ),
    Claim(
        "d3", "It works at lengths it was never trained on",
        f"largest of its loss less that of bigram counting over lengths {', '.join(map(str, LENGTHS))}", "at most", 0.0, bound="ours",
    ),
    Claim(
        "d4", "It works for priors it was never trained on",
        f"largest of its loss less that of bigram counting over priors {', '.join(f'{x:g}' for x in PRIORS)}", "at most", 0.0, bound="ours",
    ),
    Claim(
        "d5", "At another prior it is no longer close to Bayes: counting without a prior costs more where tables are even",
        "distance from Bayes at prior 1 less that at prior 0.1, in nats", "at least", 0.05, by="ours",
    ),
)  # fmt: skip


def counting_posterior(
    rows: Int[Tensor, "N L+1"], parents: Sequence[int], alpha: float, tokens: int
) -> Float[Tensor, "N S"]:
    """Probabilities of the last token by counting with these parents."""
    start = max((*parents, 0))
    codes = context_codes(rows, parents, tokens)  # of tokens from `start` on
    same = (codes[:, :-1] == codes[:, -1:]).double()
    counts = torch.zeros(len(rows), tokens, dtype=torch.float64)
    counts.scatter_add_(1, rows[:, start:-1], same)
    return (counts + alpha) / (counts.sum(1, keepdim=True) + tokens * alpha)


def smooth_probabilities(p: Float[Tensor, "N S"]) -> Float[Tensor, "N S"]:
    """(p + EPS) / (1 + S EPS): probabilities none of which is 0, so that every loss is finite."""
    return (p + EPS) / (1 + p.shape[1] * EPS)


def divergence(p: Float[Tensor, "N S"], q: Float[Tensor, "N S"]) -> float:
    """KL(p || q), mean over sequences, in nats."""
    return float((torch.special.xlogy(p, p) - p * q.log()).sum(1).mean())


@torch.no_grad()
def compare_with_rivals(model: Model, seed: int, rows: int, length: int, prior: float) -> dict[str, Any]:
    """Losses of model and rivals on new sequences, and divergences of the model from each rival."""
    sequences = rename_tokens(
        draw_sequences(seed, rows, length, NgramSource(3, SOURCE.parents, prior)), 3
    )  # as the model names tokens
    p, targets = smooth_probabilities(model(Counts.of(sequences, 3))), sequences[:, -1]
    rivals = {name: counting_posterior(sequences, parents, prior, 3) for name, parents in RIVALS.items()}

    def mean_loss(q: Tensor) -> float:
        return float(-q.gather(1, targets[:, None]).log().mean())

    losses = {"model": mean_loss(p), **{name: mean_loss(q) for name, q in rivals.items()}}
    return {"loss": losses, "divergence": {name: divergence(p, q) for name, q in rivals.items()}}


def train_and_test(setting: Setting, seed: int) -> dict[str, Any]:
    """One model, trained at length 100 and prior 0.1, everywhere."""
    quick = setting.quick
    model = Model()
    fit(model, Counts.of(draw_sequences(seed, RIVAL_ROWS[quick]), 3), RIVAL_EPOCHS[quick], form="nll")
    unseen = 10_000 + seed  # other sequences than those it was trained on
    return {
        "a": float(model.a),
        "lengths": {n: compare_with_rivals(model, unseen, TESTED_ROWS[quick], n, 0.1) for n in LENGTHS},
        "priors": {x: compare_with_rivals(model, unseen, TESTED_ROWS[quick], 100, x) for x in PRIORS},
    }


def measure_rivals(setting: Setting) -> Results:
    runs = map_parts(train_and_test, list(range(SEEDS)), setting)
    home = [run["lengths"][100] for run in runs]
    near = [h["divergence"]["trigram"] - min(h["divergence"]["unigram"], h["divergence"]["bigram"]) for h in home]

    def above(entry: dict[str, Any], rival: str) -> float:
        return float(entry["loss"]["model"] - entry["loss"][rival])

    measured = {
        "d1": by_seed(near),
        "d2": by_seed([above(h, "trigram") for h in home]),
        "d3": by_seed([max(above(x, "bigram") for x in run["lengths"].values()) for run in runs]),
        "d4": by_seed([max(above(x, "bigram") for x in run["priors"].values()) for run in runs]),
        "d5": by_seed([above(run["priors"][1.0], "trigram") - above(run["priors"][0.1], "trigram") for run in runs]),
    }
    tables = {
        "lengths": [{"length": n, **_means([run["lengths"][n] for run in runs])} for n in LENGTHS],
        "priors": [{"prior": x, **_means([run["priors"][x] for run in runs])} for x in PRIORS],
        "divergences": {name: fmean(h["divergence"][name] for h in home) for name in RIVALS},
        "rival_model": {"a": fmean(run["a"] for run in runs), "epochs": RIVAL_EPOCHS[setting.quick]},
    }
    return Results(measured, tables)


def _means(entries: list[dict[str, Any]]) -> dict[str, float]:
    return {name: fmean(entry["loss"][name] for entry in entries) for name in ("model", *RIVALS)}


RIVALS_STUDY = Study("rivals, lengths and priors", RIVALS_CLAIMS, measure_rivals)
