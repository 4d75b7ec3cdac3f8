"""The three stages of the theory: c, then W, then a; and the order in which they come when nobody orders them. Study b."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Any

from locater_lab.engine.claims import Claim, by_seed
from locater_lab.engine.compute import map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.chen2024.joint import PAIR
from locater_lab.papers.chen2024.simplified import TRAINED, Counts, Model, drawn, fit

SEEDS = 8
ROWS = {True: 800, False: TRAINED}
EPOCHS = {True: (40, 150, 60), False: (2000, 50_000, 5000)}  # of c, W and a; the full ones are the paper's
JOINT = {True: 200, False: 2000}

CLAIMS = (
    Claim(
        "b1", "Stage one: c alone chooses the parents, with attention still close to uniform",
        "share of c^2 on heads 1 and 2 after the first stage", "at least", 0.99, bound="ours",
    ),
    Claim(
        "b2", "Stage two: W alone sharpens the heads of the parents more than the third",
        "least gain of heads 1 and 2 in weight on their own offset, less that of head 3", "at least", 0.0, bound="ours",
    ),
    Claim(
        "b3", "Stage three: a alone grows, and the loss falls only now",
        "share of the whole fall of the loss that comes in the third stage", "at least", 0.9, bound="ours",
    ),
    Claim(
        "b4", "Trained together, c has made half of its change first",
        "epoch of half of the change of c over that of a or W, whichever is earlier", "at most", 0.5, by="ours",
    ),
    Claim(
        "b5", "Trained together, W comes before a, as in the theory",
        f"epoch of half of the change of W less that of a, within {JOINT[True]} epochs ({JOINT[False]} in full)", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


def staged(setting: Setting, seed: int) -> dict[str, Any]:
    """One seed through the three stages, and another model through all of it at once."""
    counts = Counts.of(drawn(seed, ROWS[setting.quick]), 3)
    model = Model()
    states: list[dict[str, Any]] = []
    for part, epochs in zip(("c", "w", "a"), EPOCHS[setting.quick], strict=True):
        kept = fit(model, counts, epochs, (part,), keep=(0, epochs))
        states += kept if not states else kept[1:]
    joint = fit(Model(), counts, JOINT[setting.quick], keep=range(JOINT[setting.quick] + 1))
    return {"states": states, "halves": halves(joint)}


def halves(curve: list[dict[str, Any]]) -> dict[str, int]:
    """The epoch by which c (share of the parents), W (weight of head 1 on its offset) and a have made half of their
    change over the curve.
    """
    columns = {
        "c": [row["shares"][PAIR] for row in curve],
        "W": [row["masses"][0] for row in curve],
        "a": [row["a"] for row in curve],
    }
    return {name: half(values) for name, values in columns.items()}


def half(values: Sequence[float]) -> int:
    """The first place at which a curve has made half of its way from its first to its last value, up or down.

    >>> half([0.0, 0.4, 0.6, 1.0]), half([1.0, 0.6, 0.4, 0.0])
    (2, 2)
    """
    way = values[-1] - values[0]
    return next(place for place, x in enumerate(values) if (x - values[0]) * way >= way**2 / 2)


def measure(setting: Setting) -> Results:
    runs = map_parts(staged, list(range(SEEDS)), setting)
    states = [run["states"] for run in runs]
    gains = [[after - before for after, before in zip(s[2]["masses"], s[1]["masses"], strict=True)] for s in states]
    falls = [(s[2]["loss"] - s[3]["loss"]) / (s[0]["loss"] - s[3]["loss"]) for s in states]
    early = [run["halves"] for run in runs]
    measured = {
        "b1": by_seed([s[1]["shares"][PAIR] for s in states]),
        "b2": by_seed([min(gain[:2]) - gain[2] for gain in gains]),
        "b3": by_seed(falls),
        "b4": by_seed([h["c"] / min(h["a"], h["W"]) for h in early]),
        "b5": by_seed([float(h["W"] - h["a"]) for h in early]),
    }
    rows = [
        {
            "after": name,
            "share": fmean(s[at]["shares"][PAIR] for s in states),
            "head1": fmean(s[at]["masses"][0] for s in states),
            "head2": fmean(s[at]["masses"][1] for s in states),
            "head3": fmean(s[at]["masses"][2] for s in states),
            "a": fmean(s[at]["a"] for s in states),
            "loss": fmean(s[at]["loss"] for s in states),
        }
        for at, name in enumerate(("the start", "c", "W", "a"))
    ]
    order = {name: fmean(h[name] for h in early) for name in ("c", "W", "a")}
    tables = {
        "stages": rows,
        "stage_epochs": list(EPOCHS[setting.quick]),
        "halves": {**order, "epochs": JOINT[setting.quick]},
    }
    return Results(measured, tables)


STUDY = Study("three stages", CLAIMS, measure)
