"""LocAteR in training, judged by runs: against no penalty (study c), the parts of the penalty in a small model and by
tuned runs (study d), rivals (e), other tasks (f) and hot learning rates (i).

Runs are those of `arms.py`, in the file of `Setting.runs`, or made when asked for. Differences are taken within a seed;
a run counts with its report loss, on text that neither trained it nor chose its learning rate.

The small model is small enough for a CPU and trained at one learning rate. What it says of the two claims of the paper
on training (c1, c2) is a second measurement in another setting, which the page shows beside the first; it has no
verdict of its own.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.scanning import scan
from locater.control import register_control
from locater.control.base import Control
from locater.control.locater import LocAteR
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.layers import effective
from locater.numerics import one_thread
from locater.observing.observation import observe
from locater.observing.run_model import evaluation_mode
from locater_lab.engine.arms import Line, difference, study_of_runs, table_of_arms
from locater_lab.engine.claims import Claim, by_seed, verdict_of
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Arm, Runs
from locater_lab.papers.bao2024.arms import (  # fmt: skip
    BOTH,
    ELSEWHERE,
    LEARNED,
    PARTS,
    PLAIN,
    RIVALS,
    SHORT,
    rows_of,
    stability_rows,
)

SURVIVED = 0.5  # nats above the plain run at the coolest of the hot rates
TUNED = "each at its best of three rates"

# The paper says both of its own experiment, which is study j; here they are asked of a larger model.
LOWER_LOSS = Claim(
    "c1", "LocAteR lowers validation perplexity", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours"
)  # fmt: skip
MORE_ENTROPY = Claim(
    "c2", "LocAteR raises attention entropy", f"change of mean attention entropy by LocAteR, {TUNED}", "at least", 0.0, by="ours"
)  # fmt: skip
PARTS_CLAIMS = (
    Claim(
        "d8", "Holding the mean alone lowers the loss",
        f"change of report loss by mean only, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "d9", "Shrinking the scale alone raises entropy",
        f"change of entropy by scale only, {TUNED}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d10", "Shrinking the scale alone does not lower the loss",
        f"change of report loss by scale only, {TUNED}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d13", "Raw tr W^2 lets the map grow without bound",
        "log10 of Frobenius^2 under it over that without", "at least", 1.0, by="ours",
    ),
    Claim(
        "d14", "With learned positions, holding the mean alone lowers the loss",
        f"change of report loss by mean only, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "d15", "With learned positions, LocAteR lowers the loss",
        f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "d16", "With learned positions, shrinking the scale alone does not lower the loss",
        f"change of report loss by scale only, {TUNED}", "at least", 0.0, by="ours",
    ),
)  # fmt: skip
RIVAL_CLAIMS = (
    Claim(
        "e1", "LocAteR does better than an initialisation with the same mean",
        f"report loss of LocAteR less that of mimetic initialisation, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e2", "LocAteR does better than QK-norm",
        f"report loss of LocAteR less that of QK-norm, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e3", "LocAteR adds to mimetic initialisation",
        f"change of report loss by LocAteR on top of it, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e4", "LocAteR adds to QK-norm",
        f"change of report loss by LocAteR on top of it, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e5", "No rival does better than LocAteR",
        f"report loss of LocAteR less that of the best rival, {TUNED}", "at most", 0.0, by="ours",
    ),
    Claim(
        "e6", "LocAteR adds to more weight decay",
        f"change of report loss by LocAteR on top of a decay of 0.3, {TUNED}", "at most", 0.0, by="ours",
    ),
)  # fmt: skip
TASK_CLAIMS = (
    Claim("f1", "A masked language model gains too", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours"),
    Claim("f2", "An image classifier gains too", f"change of test accuracy by LocAteR, {TUNED}", "at least", 0.0, by="ours"),
    Claim("f3", "Sorting gains too", f"change of report loss by LocAteR, {TUNED}", "at most", 0.0, by="ours"),
)  # fmt: skip
HOT_CLAIMS = (
    Claim(
        "i1", "With LocAteR a model trains at rates at which the plain one fails",
        "highest rate survived with LocAteR over the lowest at which the plain model fails", "at least", 2.0, by="ours",
    ),
    Claim(
        "i2", "It trains there as well as with QK-norm",
        "report loss of LocAteR less that of QK-norm, at the hottest rate", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


# --- c: LocAteR against no penalty ---


def judge_against_plain(runs: Runs) -> Results:
    measured = {
        "c1": difference(runs, BOTH, PLAIN, "report_loss"),
        "c2": difference(runs, BOTH, PLAIN, "entropy"),
    }
    return Results(measured, {"arms_main": arm_rows(runs, (PLAIN, BOTH), PLAIN)})


def other_setting_row(claim: Claim, values: Sequence[float], setting: str) -> dict[str, Any]:
    """A second measurement of a claim, in another setting: a row for the page. The verdict is that of these seeds by
    themselves.
    """
    verdict = verdict_of(claim, by_seed(values), "")
    return {"claim": claim.id, "setting": setting, "by_seed": list(values), **mean_and_half(values),
            "p": verdict.p, "verdict": verdict.verdict}  # fmt: skip


# --- d: the parts of the penalty ---


def judge_parts(runs: Runs) -> Results:
    """Mean, scale and raw tr W^2 with rotary positions; mean, scale and both with learned ones."""
    mean, scale, raw = PARTS["mean only"], PARTS["scale only"], PARTS["raw tr W^2"]
    learned = LEARNED["none"]
    measured = {
        "d8": difference(runs, mean, PLAIN, "report_loss"),
        "d9": difference(runs, scale, PLAIN, "entropy"),
        "d10": difference(runs, scale, PLAIN, "report_loss"),
        "d13": difference(runs, raw, PLAIN, lambda line: math.log10(line["heads"]["F"])),
        "d14": difference(runs, LEARNED["mean only"], learned, "report_loss"),
        "d15": difference(runs, LEARNED["LocAteR"], learned, "report_loss"),
        "d16": difference(runs, LEARNED["scale only"], learned, "report_loss"),
    }
    tables = {
        "arms_parts": arm_rows(runs, PARTS.values(), PLAIN),
        "arms_learned": arm_rows(runs, LEARNED.values(), learned),
    }
    return Results(measured, tables)


# --- e: rivals ---


def judge_rivals(runs: Runs) -> Results:
    """LocAteR against each of them, on top of three, and against the one with the least report loss."""
    mimetic, normed, decay = (RIVALS[name] for name in ("mimetic", "QK-norm", "weight decay 0.3"))
    rivals = [(arm, ends) for arm in RIVALS.values() if "LocAteR" not in arm.name and (ends := arm.final_lines(runs))]
    best = min(rivals, key=lambda pair: float(pair[1][0]["select_loss"]), default=(None, []))[
        0
    ]  # by the seed that does not judge
    measured = {
        "e1": difference(runs, BOTH, mimetic, "report_loss"),
        "e2": difference(runs, BOTH, normed, "report_loss"),
        "e3": difference(runs, RIVALS["mimetic + LocAteR"], mimetic, "report_loss"),
        "e4": difference(runs, RIVALS["QK-norm + LocAteR"], normed, "report_loss"),
        "e5": None if best is None else difference(runs, BOTH, best, "report_loss", {"best": best.name}),
        "e6": difference(runs, RIVALS["weight decay 0.3 + LocAteR"], decay, "report_loss"),
    }
    return Results(measured, {"arms_rivals": arm_rows(runs, RIVALS.values(), PLAIN)})


# --- f: other tasks ---


def judge_tasks(runs: Runs) -> Results:
    measured, rows = {}, []
    for id, task, quantity in (("f1", "masked", "report_loss"), ("f2", "image", "accuracy"), ("f3", "sort", "report_loss")):  # fmt: skip
        plain, ours = ELSEWHERE[task]
        measured[id] = difference(runs, ours, plain, quantity)
        rows += arm_rows(runs, (plain, ours), plain)
    return Results(measured, {"arms_tasks": rows})


# --- i: hot learning rates ---


def judge_hot_rates(runs: Runs) -> Results:
    losses = hot_losses(runs)
    if not {"none", "LocAteR", "QK-norm"} <= losses.keys():
        return Results({})
    survived, limits = rates_survived(losses)
    fails = [
        min((rate for rate, values in losses["none"].items() if values[seed] >= limit), default=None)
        for seed, limit in enumerate(limits)
    ]
    ratios = [best / rate for best, rate in zip(survived["LocAteR"], fails, strict=True) if rate is not None]
    hottest = max(losses["none"])
    ahead = [a - b for a, b in zip(losses["LocAteR"][hottest], losses["QK-norm"][hottest], strict=True)]
    measured = {"i1": by_seed(ratios) if len(ratios) == len(limits) else None, "i2": by_seed(ahead)}
    rows = [
        {"arm": name, "rate": rate, "losses": values, "entropies": [_entropy(runs.of(row)) for row in rows]}
        for name, by_rate in stability_rows().items() if name in losses
        for (rate, rows), values in zip(by_rate.items(), losses[name].values(), strict=True)
    ]  # fmt: skip
    ends = {name: fmean(by_rate[hottest]) for name, by_rate in losses.items()}
    best = min(ends, key=ends.__getitem__)
    table = {
        "rows": rows,
        "survived": survived,
        "plain_fails_at": fails,
        "limits": limits,
        "steps": SHORT,
        "best_at_hottest": {"arm": best, "loss": ends[best], "LocAteR": ends["LocAteR"]},
    }
    return Results(measured, {"hot_rates": table})


def hot_losses(runs: Runs) -> dict[str, dict[float, list[float]]]:
    """Report losses at hot rates, by seed, of the arms all of whose runs are there; infinite where one diverged."""
    return {
        name: {rate: [_loss(runs.of(row)) for row in rows] for rate, rows in by_rate.items()}
        for name, by_rate in stability_rows().items()
        if all(runs.of(row) is not None for rows in by_rate.values() for row in rows)
    }


def rates_survived(losses: Mapping[str, Mapping[float, Sequence[float]]]) -> tuple[dict[str, list[float]], list[float]]:
    """The highest rate that each arm survives, by seed, and up to which loss: `SURVIVED` above the plain run at the
    coolest.

    >>> rates_survived({"none": {1.0: [3.0], 2.0: [9.0]}, "other": {1.0: [3.1], 2.0: [3.2]}})
    ({'none': [1.0], 'other': [2.0]}, [3.5])
    """
    limits = [loss + SURVIVED for loss in losses["none"][min(losses["none"])]]
    best = {
        name: [
            max((rate for rate in by_rate if by_rate[rate][seed] < limits[seed]), default=0.0)
            for seed in range(len(limits))
        ]
        for name, by_rate in losses.items()
    }
    return best, limits


# --- rows for the page ---


def end_of_line(line: Line) -> dict[str, Any]:
    """A finished run as tables show it."""
    return {"loss": line["report_loss"], "entropy": line["entropy"], "M": line["heads"]["M"], "F": line["heads"]["F"]}


def arm_rows(runs: Runs, arms: Iterable[Arm], plain: Arm) -> list[dict[str, Any]]:
    """Arms with the ends of the seeds that there are, and their changes against the plain arm within a seed."""
    by_name = {arm.name: arm for arm in arms}
    rows = table_of_arms(runs, by_name.values(), lambda line: {**end_of_line(line), "accuracy": line["accuracy"]})
    for row in rows:
        row["perplexity"] = math.exp(fmean(end["loss"] for end in row["ends"]))
        row["change"] = _changes(runs, by_name[row["arm"]], plain)
    return rows


def _changes(runs: Runs, arm: Arm, plain: Arm) -> dict[str, Any]:
    """Loss and entropy less those of the plain arm, for the seeds that both have finished."""
    rates = arm.rate(runs), plain.rate(runs)
    if rates[0] is None or rates[1] is None or arm is plain:
        return {}
    lines = [
        (runs.of(arm.row(rates[0], seed)), runs.of(plain.row(rates[1], seed)))
        for seed in range(min(arm.seeds, plain.seeds))
    ]
    pairs = [(a, b) for a, b in lines if a and b and a["status"] == b["status"] == "done"]
    changes = {"loss": "report_loss", "entropy": "entropy"}
    values = {name: [a[key] - b[key] for a, b in pairs] for name, key in changes.items()}
    return {name: {"by_seed": each, **mean_and_half(each)} for name, each in values.items() if each}


def mean_and_half(values: Sequence[float]) -> dict[str, float]:
    """Mean and half-width of the 95 % interval."""
    measured = by_seed(values)
    return {"mean": measured.value, "half": measured.spread}


def _loss(line: Line | None) -> float:
    return float(line["report_loss"]) if line is not None and line["status"] == "done" else math.inf


def _entropy(line: Line | None) -> float | None:
    return float(line["entropy"]) if line is not None and line["status"] == "done" else None


MAIN_STUDY = study_of_runs(
    "LocAteR against no penalty", (LOWER_LOSS, MORE_ENTROPY), partial(rows_of, "c"), judge_against_plain
)
RIVALS_STUDY = study_of_runs("rivals, each at its best rate", RIVAL_CLAIMS, partial(rows_of, "e"), judge_rivals)
TASKS_STUDY = study_of_runs("other tasks", TASK_CLAIMS, partial(rows_of, "f"), judge_tasks)
HOT_STUDY = study_of_runs("hot learning rates", HOT_CLAIMS, partial(rows_of, "i"), judge_hot_rates)


# ---- d, first part: parts of the penalty in a small model ----


STEPS, SEEDS = {True: 200, False: 800}, {True: 4, False: 8}
BATCH, LENGTH, RATE, WARM = 8, 64, 3e-3, 40
STRENGTH, TARGET = 0.01, 2.0  # LocAteR's defaults, for every arm
LETTERS = 96
SHAPE = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4)
CHECKED = 32  # sequences of validation


@register_control
class RawSquare(Control):
    """The trap: strength * s^2 tr W^2, which a rotation takes below zero without bound."""

    def __init__(self, strength: float = STRENGTH) -> None:
        self.strength = strength

    def loss(self) -> Tensor:
        layers = [effective(layer) for layer in attention_layers(self.attached)]
        squares = [layer.scale**2 * layer.moments().trace_of_square.sum() for layer in layers]
        return self.strength * torch.stack(squares).sum()


SMALL_ARMS: dict[str, Any] = {
    "no penalty": None,
    "mean only": lambda: LocAteR(shrink=0.0, hold=STRENGTH, target=TARGET),
    "scale only": lambda: LocAteR(shrink=STRENGTH, hold=0.0),
    "both": lambda: LocAteR(shrink=STRENGTH, hold=STRENGTH, target=TARGET),
    "raw tr W^2": RawSquare,
}
SMALL_MODEL = f"a model of {SHAPE['num_hidden_layers']} layers, width {SHAPE['hidden_size']}, at one learning rate"
SMALL_CLAIMS = (
    Claim(
        "d1", "In a small model, holding a positive mean alone lowers the loss",
        f"change of validation loss by the mean-only penalty, {SMALL_MODEL}", "at most", 0.0, by="ours",
    ),
    Claim(
        "d2", "In a small model, shrinking the scale alone raises attention entropy",
        f"change of mean attention entropy by the scale-only penalty, {SMALL_MODEL}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d3", "In a small model, shrinking the scale alone does not lower the loss",
        f"change of validation loss by the scale-only penalty, {SMALL_MODEL}", "at least", 0.0, by="ours",
    ),
    Claim(
        "d6", "LocAteR holds the mean of the spectrum while it shrinks the scale",
        f"mean self-logit M over heads at the end, target {TARGET:g}, {SMALL_MODEL}", "about", TARGET, 0.5,
        by="ours",
    ),
    Claim(
        "d7", "Raw tr W^2 is no penalty on the scale: it grows the antisymmetric part",
        f"change of tr W^2 / Frobenius^2 by the raw penalty, {SMALL_MODEL}", "at most", 0.0, by="ours",
    ),
)  # fmt: skip


@dataclass(frozen=True)
class RunEnd:
    """A run at its end: means over heads, loss and entropy on held-out text in nats."""

    loss: float
    entropy: float
    M: float
    trace: float
    trace_of_square: float
    frobenius_sq: float


def letters_of(text: str) -> Tensor:
    """Characters as numbers, the most frequent ones; all others share the last."""
    common = [c for c, _ in Counter(text).most_common(LETTERS - 1)]
    known = {c: i for i, c in enumerate(common)}
    return torch.tensor([known.get(c, LETTERS - 1) for c in text])


def build_llama(seed: int) -> nn.Module:
    """A Llama of this shape, freshly drawn: rotary positions, so that a few hundred steps get beyond pairs of
    letters.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise LocaterError("training needs the transformers package: pip install 'locater[hf]'") from None
    torch.manual_seed(seed)
    plain = dict(bos_token_id=None, eos_token_id=None, use_cache=False)
    return LlamaForCausalLM(LlamaConfig(vocab_size=LETTERS, max_position_embeddings=LENGTH, **SHAPE, **plain))


def loss_of(model: nn.Module, rows: Tensor) -> Tensor:
    logits = model(input_ids=rows).logits[:, :-1]
    return nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())


def train(data: Tensor, arm: str, seed: int, steps: int) -> RunEnd:
    """One run: AdamW, warm-up and cosine decay, gradients clipped at 1; every arm sees the same batches and starts the
    same.
    """
    model = build_llama(seed)
    control: Control = Control() if SMALL_ARMS[arm] is None else SMALL_ARMS[arm]()
    control.attach(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, betas=(0.9, 0.95), weight_decay=0.1)
    for step, rows in enumerate(letter_batches(data[: -len(data) // 20], steps, seed)):
        share = min(1.0, (step + 1) / WARM) * 0.5 * (1 + math.cos(math.pi * step / steps))
        for group in optimizer.param_groups:
            group["lr"] = RATE * share
        (loss_of(model, rows) + control.loss()).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        control.after_step()
    control.detach()
    return end_of_model(model, data[-len(data) // 20 :])


def letter_batches(data: Tensor, steps: int, seed: int) -> Iterator[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        starts = torch.randint(len(data) - LENGTH, (BATCH,), generator=generator)
        yield data[starts[:, None] + torch.arange(LENGTH)]


def end_of_model(model: nn.Module, unseen: Tensor) -> RunEnd:
    """Loss, entropy and spectrum on the first sequences of text that was not trained on."""
    count = min(CHECKED * 8, len(unseen) // LENGTH)
    rows = unseen[: count * LENGTH].view(count, LENGTH)
    with evaluation_mode(model), observe(model) as seen:
        loss = sum(float(loss_of(model, part)) * len(part) for part in rows.split(CHECKED)) / count
    heads = scan(model).rows
    M, trace, square, size = (
        sum(float(getattr(row, name) or 0.0) for row in heads) / len(heads)
        for name in ("M", "trace", "trace_of_square", "frobenius_sq")
    )
    return RunEnd(loss, sum(row.entropy or 0.0 for row in seen.rows) / len(seen.rows), M, trace, square, size)


def measure_small_model(setting: Setting) -> Results:
    """Every arm with every seed; differences are taken within a seed."""
    data, seeds = letters_of(setting.text), range(SEEDS[setting.quick])
    plan = [(arm, seed) for arm in SMALL_ARMS for seed in seeds]
    with one_thread():  # operations this small only wait for each other in a team
        ends = {(arm, seed): train(data, arm, seed, STEPS[setting.quick]) for arm, seed in setting.each(plan)}

    def change(arm: str, name: str) -> list[float]:
        return [getattr(ends[arm, s], name) - getattr(ends["no penalty", s], name) for s in seeds]

    def symmetry(arm: str) -> list[float]:
        return [ends[arm, s].trace_of_square / ends[arm, s].frobenius_sq for s in seeds]

    measured = {
        "d1": by_seed(change("mean only", "loss")),
        "d2": by_seed(change("scale only", "entropy")),
        "d3": by_seed(change("scale only", "loss")),
        "d6": by_seed([ends["both", s].M for s in seeds]),
        "d7": by_seed([a - b for a, b in zip(symmetry("raw tr W^2"), symmetry("no penalty"), strict=True)]),
    }
    tables = {
        "small_model": {
            "runs": {arm: [vars(ends[arm, seed]) for seed in seeds] for arm in SMALL_ARMS},
            "settings": {
                "steps": STEPS[setting.quick],
                "rate": RATE,
                "batch": BATCH,
                "length": LENGTH,
                "strength": STRENGTH,
            },
        },
        "other_setting": [
            other_setting_row(LOWER_LOSS, change("both", "loss"), SMALL_MODEL),
            other_setting_row(MORE_ENTROPY, change("both", "entropy"), SMALL_MODEL),
        ],
    }
    return Results(measured, tables)


SMALL_STUDY = Study("parts of the penalty in a small model", SMALL_CLAIMS, measure_small_model)
