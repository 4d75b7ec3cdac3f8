"""How the simplified model learns: all parameters together, beside the published run (study a), and stage by stage
(study b).

**Together (study a).** The published numbers are those of the file that the official code keeps of its run with c, W
and a trained jointly (S = 3, L = 100, prior 0.1, 9,000 sequences, 50,000 epochs at rate 1).

**Stages (study b).** Those of the theory: c, then W, then a; and the order in which they come when nobody orders them.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import map_parts
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.papers.chen2024.simplified_model import (
    HELD_OUT_ROWS,
    SOURCE,
    TRAINING_ROWS,
    Counts,
    Model,
    at_epochs,
    counting_posterior,
    draw_sequences,
    fit,
    loss,
)

# ---- a: all parameters trained together ----


SEEDS = 8
JOINT_ROWS = {True: 2000, False: TRAINING_ROWS}
JOINT_EPOCHS = {True: 500, False: 50_000}
PAIR = 4  # place of the subset (1, 2) among the shares
SAVED = "saved run of the official code"
# epoch: share of (1, 2), a, loss on the sequences trained on, loss on others. Its losses on others are of weights after
# a step, ours before it: they are moved by one epoch.
PUBLISHED: dict[int, tuple[float | None, ...]] = {
    0: (0.1429, 0.0100, 0.9031, None),
    1: (0.2631, 0.0641, 0.8996, 0.9003),
    2: (0.4500, 0.1280, 0.8978, 0.8986),
    3: (0.6366, 0.1735, 0.8936, 0.8943),
    4: (0.8449, 0.2321, 0.8862, 0.8872),
    5: (0.8894, 0.3080, 0.8802, 0.8812),
    6: (0.9277, 0.3854, 0.8740, 0.8751),
    7: (0.9592, 0.4636, 0.8677, 0.8689),
    8: (0.9804, 0.5425, 0.8613, 0.8626),
    9: (0.9919, 0.6217, 0.8550, 0.8564),
    10: (0.9959, 0.7011, 0.8487, 0.8502),
    11: (0.9896, 0.7804, 0.8429, 0.8444),
    12: (0.9319, 0.8588, 0.8407, 0.8423),
    13: (0.7805, 0.9325, 0.8464, 0.8479),
    14: (0.9426, 0.9945, 0.8299, 0.8316),
    15: (0.9980, 1.0684, 0.8198, 0.8216),
    16: (0.9999, 1.1455, 0.8137, 0.8156),
    17: (1.0000, 1.2220, 0.8079, 0.8098),
    18: (1.0000, 1.2976, 0.8022, 0.8042),
    19: (1.0000, 1.3722, 0.7966, 0.7987),
    20: (1.0000, 1.4457, 0.7912, 0.7933),
    30: (1.0000, 2.1110, 0.7469, 0.7493),
    40: (1.0000, 2.6425, 0.7185, 0.7211),
    50: (1.0000, 3.0617, 0.7007, 0.7034),
    70: (1.0000, 3.6739, 0.6815, 0.6843),
    100: (1.0000, 4.2781, 0.6690, 0.6717),
    125: (1.0000, 4.6311, 0.6639, 0.6666),
    150: (1.0000, 4.9061, 0.6608, 0.6635),
    200: (1.0000, 5.3179, 0.6572, 0.6600),
    250: (1.0000, 5.6207, 0.6554, 0.6581),
    350: (1.0000, 6.0542, 0.6534, 0.6562),
    500: (1.0000, 6.4888, 0.6521, 0.6548),
    1_000: (1.0000, 7.2811, 0.6507, 0.6535),
    2_000: (1.0000, 8.0294, 0.6501, 0.6529),
    5_000: (1.0000, 8.9825, 0.6498, 0.6525),
    10_000: (1.0000, 9.6901, 0.6497, 0.6524),
    20_000: (1.0000, 10.3954, 0.6496, 0.6524),
    50_000: (1.0000, 11.3512, None, 0.6523),
}
PUBLISHED_MASSES = {"before": (0.901, 0.901, 0.901), "after": (0.940, 0.980, 0.901)}  # published, after 50,000 epochs
SHOWN_EPOCHS = tuple(PUBLISHED)

JOINT_CLAIMS = (
    Claim(
        "a1", "Layer 2 comes to compare the two parents and nothing else, within ten epochs",
        "first epoch with more than 0.99 of c^2 on the subset of heads 1 and 2 (9 in the saved run)", "at most", 10.0,
        where=SAVED,
    ),
    Claim(
        "a2", "The scale a follows the published curve",
        "largest relative distance from it at epochs 10, 50, 100 and 500", "at most", 0.05, where=SAVED, bound="ours",
    ),
    Claim(
        "a3", "a goes on to grow as the logarithm of the epochs",
        "a(500) - a(250) over a(250) - a(125): 1 is a logarithm, 0 an end of growth (0.877 in the saved run)", "at least", 0.8,
        where=SAVED, bound="ours",
    ),
    Claim(
        "a4", "The heads of both parents sharpen",
        "least gain of heads 1 and 2 in weight on their own offset, last epoch (0.04 and 0.08 after 50,000 in the saved run)",
        "at least", 0.02, where=SAVED, bound="ours",
    ),
    Claim(
        "a5", "The third head, whose token tells nothing, stays as it was",
        "largest change of its weight on its own offset", "at most", 0.002, where=SAVED, bound="ours",
    ),
    Claim(
        "a6", "Head 2 sharpens more than head 1",
        "weight of head 2 on its offset less that of head 1, last epoch (0.04 after 50,000 in the saved run)", "at least", 0.0,
        where=SAVED, bound="ours",
    ),
    Claim(
        "a7", "Probabilities that go through cross-entropy as if they were logits have a floor of log(1 + (S - 1) / e)",
        "distance from it of the least loss over a grid of predictions, S = 3", "at most", 1e-12, by="ours",
    ),
    Claim(
        "a8", "What is left of the published loss is the form of the loss, not something to learn",
        "loss on other sequences at the last epoch, less the least that any probabilities have in this form, given the "
        "Bayes posterior", "at most", 0.01, by="ours",
    ),
    Claim(
        "a9", "Trained on -log(p + eps), which the theory is about, layer 2 chooses the same subset",
        "seeds with less than 0.99 of c^2 on heads 1 and 2 at epoch 100", "at most", 0.0, bound="ours",
    ),
)  # fmt: skip


def train_seed(setting: Setting, seed: int) -> dict[str, Any]:
    """One seed: the curve, with the losses of Bayes on the same other sequences."""
    count = JOINT_ROWS[setting.quick]
    rows = draw_sequences(seed, count + HELD_OUT_ROWS)
    counts, others = Counts.of(rows[:count], 3), Counts.of(rows[count:], 3)
    model = Model()
    curve = fit(model, counts, JOINT_EPOCHS[setting.quick], keep=SHOWN_EPOCHS, held_out=others)
    with_nll = Model()
    nll = fit(with_nll, counts, 100, form="nll", keep=(0, 10, 20, 50, 100), held_out=others)
    bayes = counting_posterior(rows[count:], (1, 2), SOURCE.concentration, 3)
    targets = rows[count:, -1]
    return {
        "curve": curve,
        "nll": nll,
        "bayes_ce": float(loss(bayes, targets, "ce")),
        "least_ce": float(loss(best_in_simplex(bayes), targets, "ce")),
        "bayes_nll": float(-torch.log(bayes.gather(1, targets[:, None])).mean()),
    }


def best_in_simplex(p: Float[Tensor, "N S"]) -> Float[Tensor, "N S"]:
    """The probabilities q with the least expected cross-entropy -p.q + log sum exp q, where tokens follow p.

    Every number of entries above 0, those of the largest p, is tried: their q is stationary on that face.

    >>> best_in_simplex(torch.tensor([[0.98, 0.01, 0.01]], dtype=torch.float64)).tolist()
    [[1.0, 0.0, 0.0]]
    """
    S = p.shape[1]
    order = p.argsort(1, descending=True)
    sorted_p = p.gather(1, order)
    best, value = None, None
    for kept in range(1, S + 1):  # the largest `kept` entries are free, the others 0
        q = torch.zeros_like(p)
        q[:, :kept] = _free_entries(sorted_p, kept)
        cost = -(sorted_p * q).sum(1) + q.logsumexp(1)
        cost = torch.where((q >= -1e-12).all(1), cost, torch.inf)
        if best is None or value is None:
            best, value = q, cost
        else:
            better = cost < value
            best, value = torch.where(better[:, None], q, best), torch.where(better, cost, value)
    assert best is not None
    return torch.zeros_like(p).scatter(1, order, best)


def _free_entries(p: Tensor, kept: int) -> Tensor:
    """The stationary q of the first `kept` entries with sum 1, the others 0: p_i - e^{q_i} / Z is equal for all i.

    e^{q_i} = Z (p_i - m), so that sum log(Z (p_i - m)) = 1 with Z = (S - kept) / (1 - sum(p_i - m)): by bisection on m.
    """
    rest = p.shape[1] - kept
    head = p[:, :kept]
    if kept == 1:
        return torch.ones_like(head)
    if rest == 0:  # m = 0, since sum(p - m) = 1
        q = head.log()
        return q + (1 - q.sum(1, keepdim=True)) / kept
    top = head.amin(1, keepdim=True)
    low, high = (head.sum(1, keepdim=True) - 1) / kept, top  # between these Z is positive and so are the logarithms
    for _ in range(200):
        middle = (low + high) / 2
        Z = rest / (1 - (head - middle).sum(1, keepdim=True)).clamp_min(1e-300)
        total = torch.log((Z * (head - middle)).clamp_min(1e-300)).sum(1, keepdim=True)
        low, high = torch.where(total > 1, middle, low), torch.where(total > 1, high, middle)
    Z = rest / (1 - (head - high).sum(1, keepdim=True)).clamp_min(1e-300)
    return torch.log((Z * (head - high)).clamp_min(1e-300))


def floor_of_ce(steps: int = 100) -> float:
    """Least cross-entropy of probabilities taken as logits, over a grid of the simplex and every token, S = 3."""
    grid = torch.tensor(
        [(i / steps, j / steps, 1 - (i + j) / steps) for i in range(steps + 1) for j in range(steps + 1 - i)],
        dtype=torch.float64,
    )
    return min(float(-grid.log_softmax(1)[:, token].max()) for token in range(3))


def measure_joint(setting: Setting) -> Results:
    """Eight seeds, each with sequences of its own."""
    runs = map_parts(train_seed, list(range(SEEDS)), setting)
    curves = [run["curve"] for run in runs]
    shares = [{row["epoch"]: row["shares"][PAIR] for row in curve} for curve in curves]
    scales = [at_epochs(curve, "a") for curve in curves]
    first = [
        min((e for e, share in each.items() if share > 0.99), default=JOINT_EPOCHS[setting.quick]) for each in shares
    ]
    off = [max(abs(a[e] / (PUBLISHED[e][1] or math.nan) - 1) for e in (10, 50, 100, 500)) for a in scales]
    growth = [(a[500] - a[250]) / (a[250] - a[125]) for a in scales]
    ends = [curve[-1] for curve in curves]
    gains = [[after - before for after, before in zip(end["masses"], curve[0]["masses"], strict=True)]
             for end, curve in zip(ends, curves, strict=True)]  # fmt: skip
    left = [end["held_out"] - run["least_ce"] for end, run in zip(ends, runs, strict=True)]
    nll = [run["nll"][-1] for run in runs]
    measured = {
        "a1": by_seed([float(e) for e in first]),
        "a2": by_seed(off),
        "a3": by_seed(growth),
        "a4": by_seed([min(gain[:2]) for gain in gains]),
        "a5": by_seed([abs(gain[2]) for gain in gains]),
        "a6": by_seed([end["masses"][1] - end["masses"][0] for end in ends]),
        "a7": Measurement(abs(floor_of_ce() - math.log(1 + 2 / math.e)), 0.0, "none: listed"),
        "a8": by_seed(left),
        "a9": Measurement(
            float(sum(end["shares"][PAIR] < 0.99 for end in nll)), 0.0, f"none: counted over {len(nll)} seeds"
        ),
    }
    floors = {name: fmean(run[name] for run in runs) for name in ("bayes_ce", "least_ce", "bayes_nll")}
    forms = {"floor": math.log(1 + 2 / math.e), **floors, "ce": fmean(end["held_out"] for end in ends),
             "nll": fmean(end["held_out"] for end in nll), "nll_a": fmean(end["a"] for end in nll)}  # fmt: skip
    tables = {
        "trajectory": [_trajectory_row(epoch, curves) for epoch in SHOWN_EPOCHS if epoch in at_epochs(curves[0], "a")],
        "masses": {
            "published": PUBLISHED_MASSES,
            "ours": [fmean(x) for x in zip(*(end["masses"] for end in ends), strict=True)],
            "epochs": JOINT_EPOCHS[setting.quick],
            "rows": JOINT_ROWS[setting.quick],
        },
        "loss_forms": forms,
    }
    return Results(measured, tables)


def _trajectory_row(epoch: int, curves: list[list[dict[str, Any]]]) -> dict[str, Any]:
    """One epoch: means over seeds beside the published numbers, None where none are known."""
    rows = [next(row for row in curve if row["epoch"] == epoch) for curve in curves]
    share, a, train, held_out = PUBLISHED.get(epoch, (None,) * 4)
    ours = {
        "share": fmean(row["shares"][PAIR] for row in rows),
        "a": fmean(row["a"] for row in rows),
        "loss": fmean(row["loss"] for row in rows),
        "held_out": fmean(row["held_out"] for row in rows),
    }
    heads = {f"head{h + 1}": fmean(row["masses"][h] for row in rows) for h in range(3)}
    published = {"published_share": share, "published_a": a, "published_loss": train, "published_held_out": held_out}
    return {"epoch": epoch, **ours, **heads, **published}


JOINT_STUDY = Study("all parameters trained together", JOINT_CLAIMS, measure_joint)


# ---- b: three stages ----


STAGE_ROWS = {True: 800, False: TRAINING_ROWS}
STAGE_EPOCHS = {True: (40, 150, 60), False: (2000, 50_000, 5000)}  # of c, W and a; the full ones are the paper's
TOGETHER_EPOCHS = {True: 200, False: 2000}

STAGES_CLAIMS = (
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
        f"epoch of half of the change of W less that of a, within {TOGETHER_EPOCHS[True]} epochs ({TOGETHER_EPOCHS[False]} in full)", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


def train_in_stages(setting: Setting, seed: int) -> dict[str, Any]:
    """One seed through the three stages, and another model through all of it at once."""
    counts = Counts.of(draw_sequences(seed, STAGE_ROWS[setting.quick]), 3)
    model = Model()
    states: list[dict[str, Any]] = []
    for part, epochs in zip(("c", "w", "a"), STAGE_EPOCHS[setting.quick], strict=True):
        kept = fit(model, counts, epochs, (part,), keep=(0, epochs))
        states += kept if not states else kept[1:]
    joint = fit(Model(), counts, TOGETHER_EPOCHS[setting.quick], keep=range(TOGETHER_EPOCHS[setting.quick] + 1))
    return {"states": states, "halves": half_way_epochs(joint)}


def half_way_epochs(curve: list[dict[str, Any]]) -> dict[str, int]:
    """The epoch by which c (share of the parents), W (weight of head 1 on its offset) and a have made half of their
    change over the curve.
    """
    columns = {
        "c": [row["shares"][PAIR] for row in curve],
        "W": [row["masses"][0] for row in curve],
        "a": [row["a"] for row in curve],
    }
    return {name: half_way(values) for name, values in columns.items()}


def half_way(values: Sequence[float]) -> int:
    """The first place at which a curve has made half of its way from its first to its last value, up or down.

    >>> half_way([0.0, 0.4, 0.6, 1.0]), half_way([1.0, 0.6, 0.4, 0.0])
    (2, 2)
    """
    way = values[-1] - values[0]
    return next(place for place, x in enumerate(values) if (x - values[0]) * way >= way**2 / 2)


def measure_stages(setting: Setting) -> Results:
    runs = map_parts(train_in_stages, list(range(SEEDS)), setting)
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
        "stage_epochs": list(STAGE_EPOCHS[setting.quick]),
        "halves": {**order, "epochs": TOGETHER_EPOCHS[setting.quick]},
    }
    return Results(measured, tables)


STAGES_STUDY = Study("three stages", STAGES_CLAIMS, measure_stages)
