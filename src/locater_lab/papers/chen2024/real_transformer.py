"""A real attention-only transformer of two layers on bigram chains, watched while an induction head forms. Study e.

The paper trains no such model. Ours has one head per layer, learned positions, tied embeddings and norms. Every few
steps the instrument reads it: from weights alone (moments of W = W_Q^T W_K in logit units, `locater.scan`), and from
what its heads do (weight on the previous token, induction score, entropy). Which number moves first?

When a number has made half of its way from its first to its last value is compared with the step at which the loss is
half way from counting tokens to Bayes. That needs the end of the run: it is an order of events, not a forecast.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean, pstdev
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from locater import observe, scan
from locater.numerics import interval
from locater.observing.head_roles import match_scores
from locater_lab.data.synthetic import NgramSource
from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.devices_and_processes import map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.papers.chen2024.simplified_model import divergence

SEEDS = {True: 8, False: 16}
STEPS = {True: 400, False: 2000}
EVERY = {True: 20, False: 20}  # steps between two readings
BATCH, RATE, WARMUP, SCALE = 32, 1e-2, 20, 0.3
LENGTH = 32
BIGRAM = NgramSource(3, (1,), 0.2)
SHAPE = Shape(
    vocabulary=3, layers=2, width=32, heads=1, kv_heads=1, hidden=8, length=LENGTH, positions="learned", mlp="none"
)  # `hidden` is of no MLP here
LATE = 8  # predictions are compared from this token on: before it, counting knows little
NOISE = 3.0
SIGNS = {  # what is read, and in which words
    "M1": "M of layer 1, weights alone",
    "F1": "F of layer 1, weights alone",
    "M2": "M of layer 2, weights alone",
    "F2": "F of layer 2, weights alone",
    "rank1": "stable rank of W, layer 1",
    "rank2": "stable rank of W, layer 2",
    "entropy1": "entropy of layer 1, share of uniform",
    "entropy2": "entropy of layer 2, share of uniform",
    "previous": "weight of layer 1 on the previous token",
    "induction": "induction score of layer 2",
}

CLAIMS = (
    Claim(
        "e1", "Token counts come first: half way to the loss of unigram counting, predictions are nearer to it than to bigram counting",
        "divergence of predictions from unigram counting less that from bigram counting, in nats", "at most", 0.0, by="ours",
    ),
    Claim(
        "e2", "Bigrams come next: at the end, predictions are nearer to bigram counting",
        "divergence from bigram counting less that from unigram counting, in nats", "at most", 0.0, by="ours",
    ),
    Claim(
        "e3", "An induction head forms",
        "induction score of layer 2 at the end: weight on tokens that followed the same token, less that of uniform attention",
        "at least", 0.2, by="ours",
    ),
    Claim(
        "e4", "The previous-token head announces it",
        "steps from half of the change of layer 1's weight on the previous token to half of the way of the loss from unigram to Bayes",
        "at least", 0.0, by="ours",
    ),
    Claim(
        "e5", "The induction score announces it",
        "steps from half of the change of layer 2's score to half of the way of the loss", "at least", 0.0, by="ours",
    ),
    Claim(
        "e6", "Weights alone announce the previous-token head before its score does",
        "steps from half of the change of F of layer 1 to half of that of its weight on the previous token", "at least", 0.0, by="ours",
    ),
    Claim(
        "e7", "Weights alone announce the induction head before its score does",
        "steps from half of the change of F of layer 2 to half of that of its induction score", "at least", 0.0, by="ours",
    ),
)  # fmt: skip


def counting_probabilities(
    rows: Int[Tensor, "B T"], parents: tuple[int, ...], source: NgramSource = BIGRAM
) -> Float[Tensor, "B T-1 S"]:
    """Probabilities of the token after each one, by counting with no parents or with the last token."""
    onehot = nn.functional.one_hot(rows, source.tokens).double()
    if parents:  # keys s whose parent is the current token: x[s - 1] = x[t], s <= t
        same = rows[:, :-1, None] == rows[:, None, :-1]  # (B, t, s - 1)
        counts = same.double().tril(-1) @ onehot[:, 1:]
    else:
        counts = onehot[:, :-1].cumsum(1)
    return (counts + source.concentration) / (counts.sum(2, keepdim=True) + source.tokens * source.concentration)


@torch.no_grad()
def read_instrument(model: Transformer, rows: Int[Tensor, "B T+1"], rivals: Sequence[Tensor]) -> dict[str, float]:
    """Everything that is followed, on held-out sequences."""
    inputs, targets = rows[:, :-1], rows[:, 1:]
    with observe(model, offsets=(1,)) as seen:
        logits = model(inputs)
    p = logits.double().softmax(-1)
    first, second = scan(model).rows
    score = match_scores(model, inputs[:64], [(1,)])[1, 0][1,]
    near = [divergence(p[:, LATE:].flatten(0, 1), rival[:, LATE:].flatten(0, 1)) for rival in rivals]
    values: dict[str, float | None] = {
        "loss": float(nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())),
        "unigram": near[0],
        "bigram": near[1],
        "previous": seen.rows[0].offsets[1],
        "induction": score.excess,
        "entropy1": seen.rows[0].entropy_ratio,
        "entropy2": seen.rows[1].entropy_ratio,
        "M1": first.M,
        "F1": first.F,
        "rank1": first.stable_rank,
        "M2": second.M,
        "F2": second.F,
        "rank2": second.stable_rank,
    }
    return {name: math.nan if value is None else value for name, value in values.items()}


def train_and_read(setting: Setting, seed: int) -> dict[str, Any]:
    """One seed: the readings, and the steps at which each number was half way."""
    held_out = BIGRAM.sample(128, LENGTH, torch.Generator().manual_seed(-1))
    rivals = [counting_probabilities(held_out, parents) for parents in ((), (1,))]
    levels = BIGRAM.rivals(held_out)
    torch.manual_seed(seed)
    model = Transformer(SHAPE, scale=SCALE)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.0)
    rng, curve = torch.Generator().manual_seed(1000 + seed), []
    for step in range(STEPS[setting.quick] + 1):
        if step % EVERY[setting.quick] == 0:
            curve.append({"step": step, **read_instrument(model, held_out, rivals)})
        rows = BIGRAM.sample(BATCH, LENGTH, rng)
        optimizer.param_groups[0]["lr"] = RATE * min(1.0, (step + 1) / WARMUP)
        optimizer.zero_grad()
        model(rows[:, :-1], rows[:, 1:]).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    uniform, counts, bayes = math.log(3), levels[""], levels["1"]
    return {
        "curve": curve,
        "levels": {"uniform": uniform, "unigram": counts, "bayes": bayes},
        "to_unigram": first_step_below(curve, (uniform + counts) / 2),
        "to_bayes": first_step_below(curve, (counts + bayes) / 2),
        "halves": {name: half_way(curve, name) for name in SIGNS},
    }


def first_step_below(curve: Sequence[dict[str, float]], level: float) -> float:
    """The first step with a loss at or below this level; NaN where there is none."""
    return next((row["step"] for row in curve if row["loss"] <= level), math.nan)


def half_way(curve: Sequence[dict[str, float]], name: str) -> float:
    """The first step at which a number has made half of its way from its first to its last value, the mean of the last
    quarter of its readings. NaN where that way is less than NOISE standard deviations of those readings: a number that
    hardly moves is half way by chance.

    >>> half_way([{"step": 0, "x": 1.0}, {"step": 5, "x": 0.4}, {"step": 9, "x": 0.0}], "x")
    5
    """
    values = [row[name] for row in curve]
    last = values[-max(1, len(values) // 4) :]
    start, end = values[0], fmean(last)
    if not math.isfinite(start + end) or abs(end - start) <= NOISE * pstdev(last):
        return math.nan
    return next(row["step"] for row in curve if (row[name] - start) / (end - start) >= 0.5)


def measure(setting: Setting) -> Results:
    runs = map_parts(train_and_read, list(range(SEEDS[setting.quick])), setting)
    ends = [run["curve"][-1] for run in runs]
    done = [run for run in runs if math.isfinite(run["to_bayes"])]  # the others never came half way
    early = [row for run in runs for row in run["curve"] if row["step"] == run["to_unigram"]]

    def steps(later: Sequence[float], sooner: Sequence[float]) -> list[float]:
        return [a - b for a, b in zip(later, sooner, strict=True) if math.isfinite(a - b)]

    def halves(name: str) -> list[float]:
        return [run["halves"][name] for run in done]

    onset = [run["to_bayes"] for run in done]
    unigram = [run["to_unigram"] for run in runs if math.isfinite(run["to_unigram"])]
    samples = {
        "e1": [row["unigram"] - row["bigram"] for row in early],
        "e2": [row["bigram"] - row["unigram"] for row in ends],
        "e3": [row["induction"] for row in ends],
        "e4": steps(onset, halves("previous")),
        "e5": steps(onset, halves("induction")),
        "e6": steps(halves("previous"), halves("F1")),
        "e7": steps(halves("induction"), halves("F2")),
    }
    measured = {name: by_seed(values) if len(values) > 1 else None for name, values in samples.items()}
    leads = {name: steps(onset, halves(name)) for name in SIGNS}
    tables = {
        "leads": sorted((_lead(name, values, runs) for name, values in leads.items() if len(values) > 1), key=_by_lead),
        "watched_curve": _means(runs),
        "watched_levels": runs[0]["levels"],
        "watched": {"seeds": len(runs), "half_way": len(done), "steps": STEPS[setting.quick], "every": EVERY[setting.quick],
                    "onset": fmean(onset) if onset else None, "unigram": fmean(unigram) if unigram else None},
        "trained_maps": _maps(runs),
    }  # fmt: skip
    return Results(measured, tables)


def _lead(name: str, values: Sequence[float], runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How early a number was half way; and its change where the loss came half way to Bayes, and where it did not: a
    number that changes alike in both announces nothing.
    """
    mean, half = interval(values)
    changes: dict[bool, list[float]] = {True: [], False: []}
    for run in runs:
        change = run["curve"][-1][name] - run["curve"][0][name]
        changes[math.isfinite(run["to_bayes"])].append(change)
    there, elsewhere = (fmean(some) if some else None for some in (changes[True], changes[False]))
    return {"sign": SIGNS[name], "lead": mean, "spread": half, "seeds": len(values), "change": there,
            "change_without": elsewhere}  # fmt: skip


def _by_lead(row: dict[str, Any]) -> float:
    return -float(row["lead"])


def _means(runs: Sequence[dict[str, Any]]) -> list[dict[str, float]]:
    """The readings, means over seeds."""
    names = runs[0]["curve"][0]
    return [{name: fmean(row[name] for row in rows) for name in names}
            for rows in zip(*(run["curve"] for run in runs), strict=True)]  # fmt: skip


def _maps(runs: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Rank, mean and scale of W at the start and at the end, means over seeds, with what the head does."""
    return [
        {
            "when": when,
            "layer": layer,
            "rank": fmean(run["curve"][at][f"rank{layer}"] for run in runs),
            "mean": fmean(run["curve"][at][f"M{layer}"] for run in runs),
            "scale": fmean(math.sqrt(run["curve"][at][f"F{layer}"]) for run in runs),
            "entropy": fmean(run["curve"][at][f"entropy{layer}"] for run in runs),
            "role": fmean(run["curve"][at]["previous" if layer == 1 else "induction"] for run in runs),
        }
        for when, at in (("start", 0), ("end", -1))
        for layer in (1, 2)
    ]


STUDY = Study("a transformer, watched", CLAIMS, measure)
