"""What the trained model is: which parents it compares (study c), and how it predicts beside its rivals, also where it
was never trained (study d).

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

from collections.abc import Sequence
from itertools import combinations
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater_lab.data.synthetic import NgramSource, context_codes
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.chen2024.simplified_model import (
    EPS,
    SOURCE,
    Counts,
    Model,
    chosen_subset,
    draw_sequences,
    fit,
    rename_tokens,
    subsets,
)

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
