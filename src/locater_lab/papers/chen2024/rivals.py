"""The trained model beside its rivals: Bayes, which knows parents and prior, and counting with fewer or more parents.
Lengths and priors that it was never trained on. Study d.

Counting with parents P: p(x) = (n_x + alpha) / (n + S alpha), where n_x of the n earlier tokens with the same parents
were x. With the source's own parents and prior this is the Bayes predictor.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from locater_lab.data.ngrams import NgramSource, contexts
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.compute import map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.chen2024.simplified import EPS, SOURCE, Counts, Model, drawn, fit, renamed

SEEDS = 8
ROWS = {True: 2000, False: 9000}
EPOCHS = {True: 200, False: 5000}
TESTED = {True: 1000, False: 10_000}
LENGTHS = (10, 20, 50, 100, 200, 400)  # the model is trained on 100
PRIORS = (0.05, 0.1, 0.2, 0.5, 1.0)  # and on 0.1
RIVALS = {"unigram": (), "bigram": (1,), "trigram": (1, 2), "4-gram": (1, 2, 3)}

CLAIMS = (
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


def posterior(rows: Int[Tensor, "N L+1"], parents: Sequence[int], alpha: float, tokens: int) -> Float[Tensor, "N S"]:
    """Probabilities of the last token by counting with these parents."""
    start = max((*parents, 0))
    codes = contexts(rows, parents, tokens)  # of tokens from `start` on
    same = (codes[:, :-1] == codes[:, -1:]).double()
    counts = torch.zeros(len(rows), tokens, dtype=torch.float64)
    counts.scatter_add_(1, rows[:, start:-1], same)
    return (counts + alpha) / (counts.sum(1, keepdim=True) + tokens * alpha)


def proper(p: Float[Tensor, "N S"]) -> Float[Tensor, "N S"]:
    """(p + EPS) / (1 + S EPS): probabilities none of which is 0, so that every loss is finite."""
    return (p + EPS) / (1 + p.shape[1] * EPS)


def divergence(p: Float[Tensor, "N S"], q: Float[Tensor, "N S"]) -> float:
    """KL(p || q), mean over sequences, in nats."""
    return float((torch.special.xlogy(p, p) - p * q.log()).sum(1).mean())


@torch.no_grad()
def compared(model: Model, seed: int, rows: int, length: int, prior: float) -> dict[str, Any]:
    """Losses of model and rivals on new sequences, and divergences of the model from each rival."""
    sequences = renamed(
        drawn(seed, rows, length, NgramSource(3, SOURCE.parents, prior)), 3
    )  # as the model names tokens
    p, targets = proper(model(Counts.of(sequences, 3))), sequences[:, -1]
    rivals = {name: posterior(sequences, parents, prior, 3) for name, parents in RIVALS.items()}

    def mean_loss(q: Tensor) -> float:
        return float(-q.gather(1, targets[:, None]).log().mean())

    losses = {"model": mean_loss(p), **{name: mean_loss(q) for name, q in rivals.items()}}
    return {"loss": losses, "divergence": {name: divergence(p, q) for name, q in rivals.items()}}


def tested(setting: Setting, seed: int) -> dict[str, Any]:
    """One model, trained at length 100 and prior 0.1, everywhere."""
    quick = setting.quick
    model = Model()
    fit(model, Counts.of(drawn(seed, ROWS[quick]), 3), EPOCHS[quick], form="nll")
    unseen = 10_000 + seed  # other sequences than those it was trained on
    return {
        "a": float(model.a),
        "lengths": {n: compared(model, unseen, TESTED[quick], n, 0.1) for n in LENGTHS},
        "priors": {x: compared(model, unseen, TESTED[quick], 100, x) for x in PRIORS},
    }


def measure(setting: Setting) -> Results:
    runs = map_parts(tested, list(range(SEEDS)), setting)
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
        "rival_model": {"a": fmean(run["a"] for run in runs), "epochs": EPOCHS[setting.quick]},
    }
    return Results(measured, tables)


def _means(entries: list[dict[str, Any]]) -> dict[str, float]:
    return {name: fmean(entry["loss"][name] for entry in entries) for name in ("model", *RIVALS)}


STUDY = Study("rivals, lengths and priors", CLAIMS, measure)
