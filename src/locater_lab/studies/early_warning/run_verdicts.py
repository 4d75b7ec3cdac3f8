"""How often the verdict of a run is right (`monitor.verdict()`, `locater doctor run/`): docs/results/run-verdicts.md.

    make study STUDY='early_warning.run_verdicts --jobs 2'

docs/results/run-verdicts-plan.md was written before the runs. Runs that docs/results/run-verdicts.jsonl lacks are
trained first; those of the early-warning record are judged from their kept lines.
"""

from __future__ import annotations

import argparse
import math
import random
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from locater import Monitor
from locater.files import write_whole
from locater.inputs.corpus import embedded_text
from locater.runs import verdict as verdicts
from locater.runs.run_log import read_run
from locater.version import __version__
from locater_lab.studies.early_warning import plan
from locater_lab.studies.early_warning.judging import (
    OUTSIDE,
    first_wrong_step,
    judge_runs,
    share_interval,
    usual_losses,
)
from locater_lab.studies.early_warning.training import draw_batches
from locater_lab.train.sweep import append_line, read_lines

RESULTS = Path("docs/results")  # from the root of the repository, where make runs
LINES, PAGE, UNSEEN = "run-verdicts.jsonl", "run-verdicts.md", "early-warning-unseen.jsonl"
STEPS, BATCH, LENGTH, EVERY = 200, 16, 64, 10
STUCK, PLANTED = "cannot learn", "planted head"
GROWTH, ONSET = 1.1, 60  # of the queries of a planted head, at each step from this one on
SIZES: dict[str, Any] = dict(layers=2, width=64, heads=4, text="docs", optimizer="adamw", dtype="float32", warmup=20)
KINDS = tuple(
    plan.ModelKind(f"small {build}", build, rate=rate, **SIZES)
    for build, rate in (("GPT2", 3e-3), ("Llama", 3e-3), ("Qwen3", 3e-3), ("OPT", 2e-3), ("GPTNeoX", 2e-3))
)
RISES, STAYS, NEARS = (0.2, 0.3, 0.5, 1.0), (10, 20, 30, 50), (0.005, 0.01, 0.02, 0.05)
Line = dict[str, Any]


def planned_runs() -> list[plan.TrainingRun]:
    """All new runs. How a run cannot learn is its `data`: labels, rate, gradient."""
    runs = []
    for kind in KINDS:
        changes: list[dict[str, Any]] = [dict(rate=rate) for rate in (1.0, 1.0, 0.8, 1.25)]
        changes += [dict(cause="hot rate", rate=rate) for rate in (30.0, 100.0)]
        changes += [dict(cause=PLANTED, onset=ONSET)] * (0 if kind.build == "Qwen3" else 3)
        drawn = random.Random(kind.name)
        changes += [dict(cause=OUTSIDE, data=x, onset=drawn.randrange(80, 120)) for x in ("shuffled", "relabelled")]
        changes += [dict(cause=STUCK, data=x) for x in ("labels", "rate", "gradient")]
        runs += [
            plan.TrainingRun(
                kind.name, f"{kind.name} {number} {change.get('cause', '')}".strip(), 300 + number, **change
            )
            for number, change in enumerate(changes)
        ]
    return runs


def query_of(model: nn.Module, layer: int, head: int) -> Tensor:
    """The part of the weights that makes the queries of one head."""
    for name, module in model.named_modules():
        size = SIZES["width"] // SIZES["heads"]
        if f".{layer}." not in name:
            continue
        if name.endswith("attn.c_attn"):  # GPT-2 stores (in, out)
            return module.weight.data[:, head * size : (head + 1) * size]
        if name.endswith("attention.query_key_value"):
            return module.weight.data[3 * head * size : (3 * head + 1) * size]
        if name.endswith("self_attn.q_proj"):
            return module.weight.data[head * size : (head + 1) * size]
    raise AssertionError(f"no queries in layer {layer}")


def train_run(run: plan.TrainingRun, ids: Any) -> dict[str, Any]:
    """The line of one run, from the log that its monitor wrote."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    kind = next(kind for kind in KINDS if kind.name == run.kind)
    model = plan.build_model(kind, run).train()
    optimizer = torch.optim.AdamW(model.parameters(), kind.rate, betas=(0.9, 0.95), weight_decay=0.1)
    drawn = random.Random(run.name)
    place = (drawn.randrange(SIZES["layers"]), drawn.randrange(SIZES["heads"])) if run.cause == PLANTED else None
    labels = torch.Generator().manual_seed(run.seed + 2)
    batches = draw_batches(run, torch.from_numpy(ids), 256, (BATCH, LENGTH))
    began = time.time()
    with tempfile.TemporaryDirectory() as folder:
        monitor = Monitor(f"{folder}/run.jsonl", every=EVERY).attach(model)
        for step, (inputs, targets) in zip(range(1, STEPS + 1), batches, strict=False):
            for group in optimizer.param_groups:
                group["lr"] = 0.0 if run.data == "rate" else plan.rate_at(kind, run, step)
            if run.data == "labels":
                targets = torch.randint(256, targets.shape, generator=labels)
            logits = model(input_ids=inputs, use_cache=False).logits
            logits = 0 * logits if run.data == "gradient" else logits
            loss = functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), run.clip)
            optimizer.step()
            if place is not None and run.onset is not None and step >= run.onset:
                query_of(model, *place).mul_(GROWTH)
            monitor.after_step(loss=loss)
        monitor.detach()
        log = read_run(f"{folder}/run.jsonl")
    about = {"locater": __version__, "torch": torch.__version__, "seconds": round(time.time() - began, 1)}
    return {
        "name": run.name,
        "run": {"kind": run.kind, "cause": run.cause, "data": run.data, "onset": run.onset, "seed": run.seed},
        "planted": place,
        "losses": [round(loss, 3) if math.isfinite(loss) else None for _, loss in log.losses],
        "warnings": [{name: w[name] for name in ("step", "flag", "layer", "head")} for w in log.warnings],
        "outputs": next(record["outputs"] for record in log.steps if "outputs" in record),
        **about,
    }


def train_missing(path: Path, jobs: int) -> None:
    done = {line["name"] for line in read_lines(path)}
    missing = [run for run in planned_runs() if run.name not in done]
    ids = np.frombuffer(embedded_text().encode(), np.uint8)
    with ProcessPoolExecutor(max(1, jobs), get_context("spawn")) as pool:
        for line in pool.map(train_run, missing, [ids] * len(missing)):
            append_line(path, line)
            print(f"{line['name']}: {verdict_of_line(line).verdict}", flush=True)


# ---- judging ----


def verdict_of_line(
    line: Line, rise: float = verdicts.RISE, stay: int = verdicts.LASTING, near: float = verdicts.NEAR
) -> verdicts.RunVerdict:
    """The verdict of a kept line. The lines of the early-warning record have one warning for each step and flag."""
    course = verdicts.LossCourse(rise, stay, near)
    course.extend((step, math.nan if x is None else x) for step, x in enumerate(line["losses"], 1))
    kind = plan.BY_NAME.get(line["run"]["kind"])
    outputs = line["outputs"] if kind is None else plan.vocabulary_size(kind)
    return verdicts.verdict_of(course, line["warnings"], outputs)


def groups_of(lines: Sequence[Line], wrong: Sequence[int | None]) -> dict[str, list[Line]]:
    """Lines by what is right of them."""
    groups: dict[str, list[Line]] = {"ordinary": [], "wrong": [], OUTSIDE: [], STUCK: [], PLANTED: [], "survived": []}
    for line, step in zip(lines, wrong, strict=True):
        cause = line["run"]["cause"]
        if cause in (STUCK, PLANTED):
            groups[cause].append(line)
        elif step is None:
            groups["survived" if cause else "ordinary"].append(line)
        else:
            groups[OUTSIDE if cause == OUTSIDE else "wrong"].append(line)
    return groups


def is_right(group: str, line: Line, **bounds: Any) -> bool:
    """Whether the verdict of a line is the right one of its group."""
    found = verdict_of_line(line, **bounds)
    if group == OUTSIDE:
        return found.state in ("failed", "recovered") and not found.stressed_before
    if group == PLANTED:
        return tuple(line["planted"]) in first_named(line)
    wanted: dict[str, Callable[[str], bool]] = {
        "ordinary": lambda state: state == "healthy",
        "wrong": lambda state: state not in ("healthy", "too short"),
        STUCK: lambda state: state == "stuck",
    }
    return wanted[group](found.state)


def first_named(line: Line) -> list[tuple[int, int]]:
    """The heads of the first step with a warning."""
    since = min((w["step"] for w in line["warnings"]), default=None)
    return list(dict.fromkeys((w["layer"], w["head"]) for w in line["warnings"] if w["step"] == since))


def choose_rise(groups: Mapping[str, Sequence[Line]]) -> dict[str, Any]:
    """How far the loss has to rise, and for how long, by the rule of the plan."""

    def shares(bounds: Mapping[str, Any]) -> float:
        bad = [*groups["wrong"], *groups[OUTSIDE]]
        good = groups["ordinary"]
        found = sum(is_right("wrong", line, **bounds) for line in bad) / len(bad)
        return found + sum(is_right("ordinary", line, **bounds) for line in good) / len(good)

    every = [{"rise": rise, "stay": stay} for rise, stay in product(RISES, STAYS)]
    return max(every, key=lambda bounds: (round(shares(bounds), 9), bounds["rise"], bounds["stay"]))


def choose_near(groups: Mapping[str, Sequence[Line]]) -> float:
    """How near log V counts as stuck; of equal ones the smallest."""
    others = [line for name, lines in groups.items() if name != STUCK for line in lines]

    def share(near: float) -> float:
        right = sum(verdict_of_line(line, near=near).state == "stuck" for line in groups[STUCK])
        return right - sum(verdict_of_line(line, near=near).state == "stuck" for line in others)

    return max(NEARS, key=lambda near: (share(near), -near))


# ---- the page ----

CLAIMS = {  # by group: the claim, its bound, and what its runs are
    "ordinary": ("v1", 0.9, "ordinary runs, called healthy"),
    "wrong": ("v2", 0.8, "runs that went wrong without bad data, not called healthy"),
    OUTSIDE: ("v3", 0.8, "runs that went wrong by bad data, called failed or recovered, no head named before"),
    STUCK: ("v4", 0.9, "runs that cannot learn, called stuck"),
    PLANTED: ("v5", 0.9, "runs with a planted head, which is among the first that are named"),
}


def wrong_steps(lines: Sequence[Line]) -> list[int | None]:
    """Of the new runs, by the rule of the early-warning plan: the step at which each went wrong."""
    return [
        first_wrong_step(line["losses"], usual_losses(lines, line["run"]["kind"], without=line["name"]))
        for line in lines
    ]


def merged(*parts: Mapping[str, Sequence[Line]]) -> dict[str, list[Line]]:
    return {name: [line for part in parts for line in part[name]] for name in parts[0]}


def count_text(count: int, total: int) -> str:
    if not total:
        return "-"
    low, high = share_interval(count, total)
    return f"{count} of {total} ({low:.2f} to {high:.2f})"


def judgement(count: int, total: int, bound: float) -> str:
    low, high = share_interval(count, total)
    return "holds" if low >= bound else "fails" if high < bound else "undecided"


def page_text(unseen: Sequence[Line], new: Sequence[Line]) -> str:
    """The page: thresholds as chosen, and what they do on the runs that had no part in it."""
    judged = judge_runs(unseen)
    halves = {
        half: groups_of(
            [line for line, run in zip(unseen, judged, strict=True) if run["half"] == half],
            [run["wrong"] for run in judged if run["half"] == half],
        )
        for half in "AB"
    }
    steps = dict(zip((line["name"] for line in new), wrong_steps(new), strict=True))
    even, odd = (
        groups_of(part, [steps[line["name"]] for line in part])
        for part in ([x for x in new if x["run"]["seed"] % 2 == odd] for odd in (0, 1))
    )
    chosen, near = choose_rise(halves["A"]), choose_near(even)
    bounds = {**chosen, "near": near}
    rest, released = merged(halves["B"], odd), {"rise": verdicts.RISE, "stay": verdicts.LASTING, "near": verdicts.NEAR}
    rows = []
    for group, (claim, bound, about) in CLAIMS.items():
        counts = [sum(is_right(group, line, **how) for line in rest[group]) for how in (bounds, released)]
        total = len(rest[group])
        cells = [claim, about, f"{bound}", count_text(counts[0], total), judgement(counts[0], total, bound)]
        rows.append(f"| {' | '.join(cells)} | {count_text(counts[1], total)} |")
    every = merged(halves["A"], halves["B"], even, odd)
    others = [line for name in rest if name != STUCK for line in rest[name]]
    alone = sum(first_named(line) == [tuple(line["planted"])] for line in rest[PLANTED])
    return PAGE_TEXT.format(
        rise=chosen["rise"],
        stay=chosen["stay"],
        near=near,
        rows="\n".join(rows),
        stuck=count_text(sum(verdict_of_line(line, **bounds).state == "stuck" for line in others), len(others)),
        alone=count_text(alone, len(rest[PLANTED])),
        survived=count_text(sum(verdict_of_line(x, **bounds).state != "healthy" for x in rest["survived"]), len(rest["survived"])),
        states="\n".join(states_row(group, every[group], bounds) for group in every),
        heading=" | ".join(STATES),
        unseen=len(unseen),
        new=len(new),
        planned=len(planned_runs()),
        released=verdicts.LASTING,
    )  # fmt: skip


STATES = ("healthy", "stressed", "recovered", "failed", "stuck", "too short")


def states_row(group: str, lines: Sequence[Line], bounds: Mapping[str, Any]) -> str:
    found: list[str] = [verdict_of_line(line, **bounds).state for line in lines]
    return f"| {group} | {len(lines)} | {' | '.join(str(found.count(state)) for state in STATES)} |"


PAGE_TEXT = """# Is the verdict of a run right?

[`monitor.verdict()`](../monitor.md#the-verdict-of-a-run) and `locater doctor run/` say of a run, in three lines, whether it is healthy, which heads were under stress since when, what the loss did, and
what to try. The [plan](run-verdicts-plan.md) was written before the {new} new runs (of {planned}); the other {unseen} are those of [early-warning-unseen](early-warning-unseen.md).

Made by `make study STUDY=early_warning.run_verdicts`, which also trains the runs that [run-verdicts.jsonl](run-verdicts.jsonl) lacks.

Chosen on half A of the kinds: the loss has risen where it is {rise} nats above its best for {stay} steps. Chosen on new runs of even seeds: stuck is never further than {near:.1%} below log V.
All of this table is about the others: half B, and new runs of odd seeds. Released is {released} steps, the rule of the early-warning record: 30 and 50 are equal on half A, the plan takes the longer, and bad data is then missed
more often. That choice was made after these runs were seen, so the last column is a description and no test for bad data.

| | what is right | stated: at least | right | verdict | right with the thresholds as released |
|---|---|---|---|---|---|
{rows}

- Called stuck, of runs that are not: {stuck}.
- A planted head is the only one that is named first: {alone}.
- Forced runs that the rule does not call wrong, not called healthy: {survived}.

All runs, those on which thresholds were chosen among them, by their verdict:

| runs | all | {heading} |
|---|---|---|---|---|---|---|---|
{states}

Brackets are Clopper and Pearson's intervals of 95 %. These are small models; the share of runs that go wrong without a warning, and of causes, is that of the plans.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=1)
    given = parser.parse_args(arguments)
    train_missing(RESULTS / LINES, given.jobs)
    page = page_text(list(read_lines(RESULTS / UNSEEN)), list(read_lines(RESULTS / LINES)))
    write_whole(RESULTS / PAGE, page)
    print(page)


if __name__ == "__main__":
    main()
