"""Is LocAteR worth it in pretraining? Models of 10, 30 and 85 million parameters beside embeddings, text seen once,
every rival tuned.

docs/results/pretraining-plan.md was written before the runs and says what is judged and why. `plan.py` has the same as
data, `queue.py` makes the runs and says how long they take; here they are judged, from their lines alone.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import Any

from locater.errors import LocaterError
from locater.numerics import interval
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Paper, Results, Setting, Study
from locater_lab.engine.runs import Runs
from locater_lab.studies.pretraining import plan
from locater_lab.studies.pretraining.plan import BASES, Bases, Cell, final_loss

FEWEST = 4  # seeds that decide anything of training
STAGE_OF = {"a": "10M", "b": "30M", "c": "85M", "e": "masked", "f": "image"}
NAMES = {"10M": "10 M parameters", "30M": "30 M", "85M": "85 M", "masked": "a masked model of 10 M", "image": "an image classifier of 10 M"}  # fmt: skip
MEANS = ("entropy", "M", "concentration", "S/F", "sinks", "max_logit")  # of a line's heads
LOSS = "report loss, each at its own best rate, same seed"


def _claims() -> tuple[Claim, ...]:
    """Against no control, and against the best of the rivals; the form of LocAteR is the one that seeds beside those that
    judge have chosen.
    """
    found = []
    for letter, stage in STAGE_OF.items():
        positions = [plan.BEYOND[stage]] if stage in plan.BEYOND else list(plan.POSITIONS)
        for number, kind in enumerate(positions, 1):
            what = f"With {kind} positions, {NAMES[stage]}, LocAteR ends below"
            found.append(Claim(f"{letter}{number}", f"{what} no control", f"{LOSS}: LocAteR less none", "at most", 0.0, by="ours"))  # fmt: skip
        for number, kind in enumerate(positions if stage in plan.SIZES else (), len(positions) + 1):
            what = f"With {kind} positions, {NAMES[stage]}, LocAteR ends below"
            found.append(Claim(f"{letter}{number}", f"{what} the best rival", f"{LOSS}: LocAteR less the rival", "at most", 0.0, by="ours"))  # fmt: skip
    for number, kind in enumerate(plan.POSITIONS, 1):
        says = f"With {kind} positions, 10 M parameters, LocAteR is less sensitive to the rate than no control"
        quantity = "mean loss above the best over the five rates, LocAteR less none"
        found.append(Claim(f"d{number}", says, quantity, "at most", 0.0, by="ours"))
    return tuple(sorted(found, key=lambda claim: claim.id))


CLAIMS = _claims()


def measure(setting: Setting) -> Results:
    """Judge the lines that there are. `queue.py` makes them: they need a GPU, and sittings that can be cut off."""
    if setting.runs is None:
        return Results({})
    return found_in(Runs(setting.runs, setting.more_runs))


def found_in(runs: Runs, bases: Bases = BASES) -> Results:
    """A measurement for each claim that the runs can decide, and tables of all cells."""
    for stage in plan.STAGES:
        codes = {line["code"] for line in runs.lines.values() if line["claim"] == stage}
        if len(codes) > 1:
            raise LocaterError(f"{stage}: runs of several states of the code ({', '.join(sorted(codes))})")
    measured: dict[str, Measurement | None] = {}
    tables: dict[str, Any] = {"planned": plan.counted(), "made": {}}
    for letter, stage in STAGE_OF.items():
        cells = plan.cells_of(stage, runs, bases)
        if cells:
            measured |= _judged(letter, cells, runs)
    for number, positions in enumerate(plan.POSITIONS, 1):
        measured[f"d{number}"] = _sensitivity(positions, runs, bases)
    for stage in plan.STAGES:
        made = [line for line in runs.lines.values() if line["claim"] == stage]
        tables["made"][stage] = len(made)
        cells = [] if stage == "sensitivity" else plan.cells_of(stage, runs, bases) or []
        rows = [row for cell in cells if (row := _row(cell, cells, runs)) is not None]
        if rows:
            tables[f"cells of {stage}"] = rows
    tables["machines"] = sorted({f"{line['device']}, torch {line['torch']}" for line in runs.lines.values()})
    tables["commits"] = {s: sorted({x["commit"] for x in runs.lines.values() if x["claim"] == s}) for s in plan.STAGES}
    return Results({key: value for key, value in measured.items() if value is not None}, tables)


def _judged(letter: str, cells: Sequence[Cell], runs: Runs) -> dict[str, Measurement | None]:
    """LocAteR against no control and, at the sizes of language models, against the best rival, by positions."""
    ranking = plan.ranked(cells, runs)
    form = next((arm for _, arm in ranking or () if arm in plan.FORMS), None)
    kinds = list(dict.fromkeys(cell.positions for cell in cells))
    found: dict[str, Measurement | None] = {}
    if form is None:
        return found
    for number, positions in enumerate(kinds, 1):
        by_arm = {cell.arm: cell for cell in cells if cell.positions == positions}
        found[f"{letter}{number}"] = _difference(by_arm[form], by_arm[plan.NONE], runs)
        rival = best_rival(by_arm.values(), runs)
        if rival is not None and letter in "abc":
            found[f"{letter}{number + len(kinds)}"] = _difference(by_arm[form], rival, runs)
    return found


def best_rival(cells: Iterable[Cell], runs: Runs) -> Cell | None:
    """The rival, no control among them, with the least select loss of the choosing seeds; one at an edge is left out."""
    known = []
    for cell in cells:
        grid = cell.grid(runs)
        if cell.arm in (plan.NONE, *plan.RIVALS) and grid.end == "inside" and grid.best is not None:
            known.append((grid.losses[grid.best], cell.arm, cell))
    return min(known, key=lambda entry: entry[:2])[2] if known else None


def _difference(arm: Cell, against: Cell, runs: Runs) -> Measurement | None:
    """By the judging seeds, each cell at its own rate; None while one is not whole, at an edge, or has too few seeds."""
    of, base = arm.judged(runs), against.judged(runs)
    if of is None or base is None or len(of) < FEWEST:
        return None
    numbers = {"arm": arm.arm, "against": against.arm, "rates": [of[0]["options"]["rate"], base[0]["options"]["rate"]]}
    return by_seed([final_loss(a) - final_loss(b) for a, b in zip(of, base, strict=True)], numbers)


def sensitivity(losses: Sequence[float]) -> float:
    """How far losses at several rates are above the least of them, in the mean (Wortsman et al., arXiv 2309.14322).

    >>> round(sensitivity([3.0, 3.1, 3.5]), 9)
    0.2
    """
    return fmean(losses) - min(losses)


def _sensitivity(positions: str, runs: Runs, bases: Bases) -> Measurement | None:
    cells = plan.first_cells(bases)
    form = next((arm for _, arm in plan.ranked(cells, runs) or () if arm in plan.FORMS), None)
    by_arm = {cell.arm: cell for cell in cells if cell.positions == positions}
    if form is None:
        return None
    values = []
    for seed in by_arm[form].judging_seeds:
        ends = []
        for arm in (form, plan.NONE):
            lines = [runs.of(by_arm[arm].row(power, seed)) for power in plan.START]
            known = [final_loss(line) for line in lines if line is not None]
            if len(known) < len(lines):
                return None
            ends.append(sensitivity(known))
        values.append(ends[0] - ends[1])
    return by_seed(values, {"arm": form})


def steps_to(history: Sequence[Sequence[float]], loss: float) -> float | None:
    """The step at which a curve first has this loss, on a line between its points; None where it never has.

    >>> steps_to([(100, 4.0), (200, 3.0)], 3.5), steps_to([(100, 4.0)], 3.5)
    (150.0, None)
    """
    before: Sequence[float] | None = None
    for step, value in history:
        if value <= loss:
            if before is None:
                return float(step)
            return before[0] + (step - before[0]) * (before[1] - loss) / (before[1] - value)
        before = step, value
    return None


def _row(cell: Cell, cells: Sequence[Cell], runs: Runs) -> dict[str, Any] | None:
    """What the page says of a cell: its rates, and what its judging seeds ended with."""
    grid = cell.grid(runs)
    if not grid.losses:
        return None
    rates = {f"{plan.rate_of(power):g}": loss for power, loss in sorted(grid.losses.items())}
    row: dict[str, Any] = {"arm": cell.arm, "positions": cell.positions, "select": rates, "end": grid.end}
    row["rate"] = None if grid.best is None else plan.rate_of(grid.best)
    lines = cell.judged(runs)
    if lines is None:
        return row
    row |= {"losses": [final_loss(line) for line in lines], "diverged": sum(x["status"] != "done" for x in lines)}
    done = [line for line in lines if line["status"] == "done"]
    for name in MEANS:
        values = [line["means"][name] for line in done if line["means"].get(name) is not None]
        row[name] = fmean(values) if values else None
    sources = {name for line in done for name in line["by_source"]}
    row["by_source"] = {name: fmean(line["by_source"][name] for line in done) for name in sorted(sources)}
    (plain,) = (other for other in cells if (other.positions, other.arm) == (cell.positions, plan.NONE))
    base = plain.judged(runs)
    if base is not None and cell.arm != plan.NONE:
        changes = [final_loss(a) - final_loss(b) for a, b in zip(lines, base, strict=True)]
        row["change"], row["half"] = interval(changes)
    if base is not None and done:
        target = fmean(final_loss(line, "select_loss") for line in base)
        reached = [steps_to(line["history"], target) for line in done]
        known = [step for step in reached if step is not None]
        row["steps"] = median(known) / cell.base.steps if 2 * len(known) > len(lines) else None
    return row


# ---- what the page shows ----


def cells_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """A row for each cell that has its judging runs, the least loss first; then those that have none yet."""
    heading = ("positions", "arm", "rate", "report loss", "change", "steps to none's loss", "entropy", "M", "kappa", "S/F", "heads with a sink")  # fmt: skip
    lines = [f"| {' | '.join(heading)} |", "|---" * len(heading) + "|"]
    whole = sorted((row for row in rows if "losses" in row), key=lambda r: (r["positions"], fmean(r["losses"])))
    for row in (*whole, *(row for row in rows if "losses" not in row)):
        rate = "-" if row["rate"] is None else f"{row['rate']:g}"
        cells = [row["positions"], row["arm"], f"{rate}, at an edge" if row["end"] == "edge" else rate]
        if "losses" not in row:
            lines.append(f"| {' | '.join([*cells, *['-'] * (len(heading) - len(cells))])} |")
            continue
        cells.append(f"{fmean(row['losses']):.4f}" + (f", {row['diverged']} diverged" if row["diverged"] else ""))
        ends = [row["change"] + sign * row["half"] for sign in (-1, 1)] if "change" in row else []
        cells.append(f"{row['change']:+.4f} ({ends[0]:+.4f} to {ends[1]:+.4f})" if ends else "-")
        cells.append("-" if row.get("steps") is None else f"{row['steps']:.2f}")
        for name in ("entropy", "M", "concentration", "S/F", "sinks"):
            cells.append("-" if row[name] is None else f"{row[name]:.2f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


STUDY = Study(
    "runs of three sizes",
    CLAIMS,
    measure,
    "its training runs, which locater_lab.studies.pretraining.queue makes on a GPU: --runs FILE",
    on_runs=True,
)
PAPER = Paper(
    "pretraining",
    "Is LocAteR worth it in pretraining?",
    "Language models of 10, 30 and 85 million parameters on text seen once, every rival at its own best rate",
    (STUDY,),
    Path(__file__).parent,
    {"cells_table": cells_table, "STAGES": plan.STAGES},
    kept=("pretraining-runs.jsonl",),
    kinds={"experiment": "a b c d e f g h"},
    says="Does LocAteR lower the loss of language models of 10 to 85 million parameters on text seen once, against "
    "no control and against tuned rivals?",
    beliefs={
        "a1 a2 b1 b2 c1 c2": "LocAteR lowers the loss of pretraining",
        "a3 a4 b3 b4 c3 c4": "LocAteR ends below the best rival in pretraining",
        "d1 d2": "LocAteR makes the loss of pretraining less sensitive to the learning rate",
    },
)

__all__ = ["PAPER"]
