"""Which control to try first, what it costs and what it buys: docs/which-control.md, from kept results and benchmarks.

Losses and entropies are those of docs/results/bao2024.json (studies c, d, e and i to l), which judges most of what the
page says; what the page adds is judged here, a task that needs a sharp head in copying.py. Costs are those of benchmarks/results/controls-cpu.json and
controls-gpu.json, which benchmarks/controls.py makes.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from locater.errors import LocaterError
from locater_lab.engine.claims import Claim, Measurement, Relation, by_seed
from locater_lab.engine.reproduction import Paper, Results, Setting, Study
from locater_lab.papers.bao2024.training import mean_and_half
from locater_lab.studies.which_control import copying

PAGE = "which-control.md"
RESULTS = "bao2024.json"
COSTS = {"cpu": "controls-cpu.json", "gpu": "controls-gpu.json"}
HOT = (0.015, 0.1)
FEWEST = 3  # runs that an interval is made of
NOT_MEASURED = "not measured"


@dataclass(frozen=True)
class ControlRow:
    """A row of the table: where its numbers stand."""

    name: str
    cost: str  # its name in the benchmark, or words
    ordinary: str  # arm of the tuned runs; "" where there is none
    hot: str  # arm at hot rates; "" where there is none
    learned: str  # arm of study l, where the others are missing
    not_when: str
    rests_on: tuple[tuple[str, str], ...] = ()  # claims with the verdicts that `not_when` presupposes


CONTROLS = (
    ControlRow(
        "LocAteR, effective", "LocAteR, effective", "LocAteR", "effective", "",
        "hot rates: entropy collapses there (k2)",
        (("k2", "holds"),),
    ),
    ControlRow(
        "LocAteR, measured", "LocAteR, measured", "measured LocAteR: both, 0.001", "both, 0.001", "",
        "to lower the loss of models of several layers: it ends above the effective form at ordinary rates (k7) and hot ones (k3), and above no control with norms after the sums (k11)",
        (("k7", "fails"), ("k3", "fails"), ("k11", "fails")),
    ),
    ControlRow(
        "QK-norm", "QK-norm, built in", "QK-norm", "QK-norm", "",
        "`kind=\"layer\"` on rotary layers",
    ),
    ControlRow(
        "sigma-reparam", "sigma-reparam", "sigma-reparam", "sigma-reparam", "",
        "ordinary rates: it costs loss there. Sharded models",
    ),
    ControlRow(
        "QK-clip at 20", "QK-clip", "QK-clip at 20", "QK-clip at 20", "",
        "layers with query-key norms, position biases, soft-caps or adapters",
    ),
    ControlRow(
        "soft-cap at 20", "soft-cap", "soft-cap at 20", "soft-cap at 20", "",
        "long sequences: it builds T x T matrices. Layers that have one",
    ),
    ControlRow(
        "weight decay 0.3", "nothing: AdamW has it", "weight decay 0.3", "weight decay 0.3", "",
        "hot rates: entropy is near 0 there, as without it (one run)",
    ),
    ControlRow(
        "mimetic", "nothing: it acts before the first step", "mimetic", "mimetic", "",
        "hot rates, as weight decay. A trained model: it is an initialisation. Latent attention",
    ),
    ControlRow(
        "temperature, fixed at 8", "temperature", "", "", "temperature",
        "to lower the loss. Models outside the attention interface of transformers",
    ),
    ControlRow(
        "entropy penalty, floor 0.3", "entropy penalty", "", "", "entropy penalty",
        "to lower the loss: the more entropy at the same mean, the higher it was (l3). Reentrant checkpointing",
        (("l3", "fails"),),
    ),
)  # fmt: skip


class KeptResults:
    """What the table asks of the document of bao2024."""

    def __init__(self, document: Mapping[str, Any]) -> None:
        self.claims = {claim["id"]: claim for claim in document["claims"]}
        self.tables = {name: t for study in document["studies"].values() for name, t in study["tables"].items()}

    def change(self, arm: str, what: str) -> Sequence[float]:
        """By seed: loss or entropy of a tuned arm less that of none. Seed 0 chose the rates and is left out."""
        arms = (self.tables[name] for name in ("arms_main", "arms_rivals", "acting_ordinary"))
        (first, *_) = (row for rows in arms for row in rows if row["arm"] == arm)
        return first["change"][what]["by_seed"][1:]

    def at_edge(self, arm: str) -> bool:
        """Whether the best rate of a tuned rival is an edge of its grid, so that its best loss is not known."""
        (row,) = (row for row in self.tables["arms_rivals"] if row["arm"] == arm)
        return row["rate"] in (min(row["rates"]), max(row["rates"]))

    def learned_change(self, arm: str, what: str) -> list[float]:
        """The same of study l: learned positions, every arm at the plain one's rate."""
        by_arm = {
            name: {row["seed"]: row[what] for row in self.tables["cause_points"] if row["arm"] == name}
            for name in (arm, "none")
        }
        return [value - by_arm["none"][seed] for seed, value in by_arm[arm].items()]

    def hot_values(self, arm: str, rate: float) -> tuple[list[float], list[float]]:
        """Losses and entropies at a hot rate. Seed 0 chose between arms and is left out where eight others judge."""
        cells = [row for row in self.tables["acting_hot"]["rows"] if (row["arm"], row["rate"]) == (arm, rate)]
        if not cells:  # study i alone has it
            rows = self.tables["hot_rates"]["rows"]
            (row,) = (row for row in rows if (row["arm"], row["rate"]) == (arm, rate))
            return row["losses"], row["entropies"]
        (cell,) = cells
        keep = [n for n, seed in enumerate(cell["seeds"]) if seed or len(cell["seeds"]) <= FEWEST]
        return [cell["losses"][n] for n in keep], [cell["entropies"][n] for n in keep]

    def require_verdict(self, id: str, verdict: str) -> Mapping[str, Any]:
        """The claim, for words that hold only while it has this verdict."""
        claim = self.claims[id]
        if claim["verdict"] != verdict:
            raise LocaterError(f"{id} is {claim['verdict']} now: the words of {PAGE} around it presuppose {verdict}")
        return claim

    def interval(self, id: str, digits: int, verdict: str, sign: str = "+") -> str:
        """Of a claim, for a sentence that presupposes its verdict."""
        claim = self.require_verdict(id, verdict)
        return interval_text(claim["measured"], claim["spread"], digits, sign)

    def hot_difference(self, arm: str, other: str) -> list[float]:
        """By seed: loss of one arm less that of another, mean over the hot rates."""
        pairs = [zip(self.hot_values(arm, rate)[0], self.hot_values(other, rate)[0], strict=True) for rate in HOT]
        return [sum(a - b for a, b in same) / len(HOT) for same in zip(*pairs, strict=True)]


def interval_text(mean: float, half: float, digits: int, sign: str = "+") -> str:
    """
    >>> interval_text(-0.00557, 0.00532, 4)
    '-0.0056 (-0.0109 to -0.0003)'
    """
    return f"{mean:{sign}.{digits}f} ({mean - half:{sign}.{digits}f} to {mean + half:{sign}.{digits}f})"


def mean_text(values: Sequence[float], digits: int, sign: str = "") -> str:
    """Mean and 95 % interval; the mean and how many runs there are where they are fewer than `FEWEST`."""
    if len(values) < FEWEST:
        runs = "1 run" if len(values) == 1 else f"{len(values)} runs"
        return f"{sum(values) / len(values):{sign}.{digits}f} ({runs})"
    interval = mean_and_half(values)
    return interval_text(interval["mean"], interval["half"], digits, sign)


def cost_cell(control: ControlRow, costs: Mapping[str, Any] | None) -> str:
    if control.cost.startswith("nothing"):
        return control.cost
    if costs is None:
        return NOT_MEASURED
    ratio = costs["ratios"][control.cost]
    return f"{ratio['median']:.2f} ({ratio['least']:.2f} to {ratio['largest']:.2f})"


def ordinary_cells(control: ControlRow, results: KeptResults) -> list[str]:
    cells = []
    for what, digits in (("loss", 4), ("entropy", 2)):
        learned = bool(control.learned)
        values = results.learned_change(control.learned, what) if learned else results.change(control.ordinary, what)
        few = "" if len(values) >= 7 or len(values) < FEWEST else f", {len(values)} seeds"
        cells.append(mean_text(values, digits, "+") + few + (", learned positions" if learned else ""))
    return cells


def hot_cell(control: ControlRow, results: KeptResults, rate: float) -> str:
    if not control.hot:
        return "not run"
    losses, entropies = results.hot_values(control.hot, rate)
    return f"{mean_text(losses, 2)}, {mean_text(entropies, 2)}"


def table_rows(results: KeptResults, costs: Mapping[str, Mapping[str, Any] | None]) -> list[list[str]]:
    """The cells of the table, a row for each control, the plain model first."""
    plain = [", ".join(mean_text(values, 2) for values in results.hot_values("none", rate)) for rate in HOT]
    found = [["none", "1", "1", "0", "0", *plain, "hot rates"]]
    for control in CONTROLS:
        for claim in control.rests_on:
            results.require_verdict(*claim)
        cells = [*(cost_cell(control, costs[name]) for name in COSTS), *ordinary_cells(control, results)]
        cells += [hot_cell(control, results, rate) for rate in HOT]
        found.append([control.name, *cells, control.not_when])
    return found


def copying_cells(row: Mapping[str, Any]) -> list[str]:
    """The cells of an arm of the task of copies."""
    delay = "0" if row["arm"] == "none" else mean_text(row["delay"], 1, "+")
    return [row["arm"], mean_text(row["steps"], 1), delay, mean_text(row["end"], 4)]


def machine_text(name: str, costs: Mapping[str, Any] | None) -> str:
    """Where the costs of a column were measured, as an item of a list."""
    if costs is None:
        option = " --gpu" if name == "gpu" else ""
        return f"- {name.upper()}: not measured yet; `python benchmarks/controls.py{option}` does it."
    shape = costs["shape"]
    return (
        f"- {name.upper()}: {costs['machine']}, torch {costs['torch']}; {shape['layers']} layers of width {shape['width']}, "
        f"{costs['sequences']} sequences of {shape['length']} tokens. Median, least and largest of seven turns in one process."
    )


def advice(results: KeptResults) -> list[str]:
    """What to try first. A sentence names the claims that it rests on, and is refused where a verdict changes."""
    if (rival := results.claims["k4"]["numbers"]["against"]) != "sigma-reparam":
        raise LocaterError(f"the rival of study k is {rival} now: write the words of {PAGE} again")
    return [hot_advice(results), ordinary_advice(results), own_advice(results), *sharp_advice(results)]


def hot_advice(results: KeptResults) -> str:
    hot = results.tables["hot_rates"]
    (plain,) = (row for row in results.tables["arms_main"] if row["arm"] == "none")
    (tuned,) = (row for row in results.tables["arms_rivals"] if row["arm"] == "sigma-reparam")
    effective = mean_text(results.hot_difference("effective", "sigma-reparam"), 2)
    edge = ", the hottest that was tried over the full length" if tuned["rate"] == max(tuned["rates"]) else ""
    return (
        f"- **The run fails at its rate: lower the rate; where it has to be hot, sigma-reparam.** The plain model trains at {plain['rate']:g} and fails at "
        f"{min(hot['plain_fails_at']):g}. At 0.015 and 0.1, sigma-reparam ends {results.interval('k4', 2, 'fails', '')} nats below LocAteR on measured logits (k4) and {effective} below "
        f"the effective form. At the best of three ordinary rates ({tuned['rate']:g}{edge}) it ends {mean_text(results.change('sigma-reparam', 'loss'), 4)} nats above no control."
    )  # fmt: skip


def ordinary_advice(results: KeptResults) -> str:
    loss, entropy = results.change("weight decay 0.3", "loss"), results.change("weight decay 0.3", "entropy")
    return (
        f"- **The rate is ordinary and the loss matters: more weight decay.** A decay of 0.3, in place of 0.1, changes the loss by {mean_text(loss, 4, '+')} nats and entropy by "
        f"{mean_text(entropy, 2, '+')}, and a step takes no longer. LocAteR ends {results.interval('e5', 4, 'fails', '')} nats above it (e5)."
    )  # fmt: skip


def own_advice(results: KeptResults) -> str:
    weights, ours = (results.claims[id]["numbers"]["dose"] for id in ("j1", "j7"))
    return (
        f"- **One layer, norms after the sums, words: a penalty on W itself lowers the loss.** In the paper's experiment as it is rebuilt here, 3,000 updates and ten seeds, the one chosen after its results were known ({weights}) changes the loss by "
        f"{results.interval('j1', 4, 'holds')} nats and entropy by {results.interval('j2', 2, 'holds')} (j1, j2), the penalty on measured logits ({ours}) by {results.interval('j7', 4, 'holds')} and "
        f"{results.interval('j8', 2, 'holds')} (j7, j8). With six layers and norms after the sums the measured form ends {results.interval('k11', 4, 'fails', '')} above no control (k11)."
    )  # fmt: skip


def sharp_advice(results: KeptResults) -> list[str]:
    return [
        f"- **Attention is too sharp: weight decay again, or LocAteR, effective form.** LocAteR changes entropy by {results.interval('c2', 2, 'holds')} nats (c2), its scale part alone "
        f"(`hold=0`) by {results.interval('d9', 2, 'holds')} (d9). Its change of loss, {results.interval('c1', 4, 'undecided')}, is undecided among all claims (c1); with learned positions it "
        f"lowers the loss, {results.interval('d15', 4, 'holds')} (d15).",
        f"- **Entropy must not collapse at a hot rate, and the maps have to stay as they are: LocAteR, measured form.** Its entropy is {results.interval('k1', 2, 'holds', '')} nats at its worst "
        f"rate, that of the effective form {results.interval('k2', 2, 'holds', '')} (k1, k2). The price is loss: it ends {results.interval('k3', 2, 'fails', '')} nats above the effective form there (k3).",
    ]  # fmt: skip


# ---- the study ----


def _claim(id: str, says: str, quantity: str, relation: Relation) -> Claim:
    return Claim(id, says, quantity, relation, 0.0, by="ours")


CLAIMS = (
    _claim(
        "a1",
        "At hot rates LocAteR, effective form, ends above sigma-reparam",
        "its loss less that of sigma-reparam, mean of two rates",
        "at least",
    ),
    _claim("a2", "At its best of three ordinary rates sigma-reparam costs loss", "change of report loss", "at least"),
    _claim("a3", "At an ordinary rate a weight decay of 0.3 lowers the loss", "change of report loss", "at most"),
    _claim("a4", "And it raises entropy", "change of entropy, nats", "at least"),
)


def measure(setting: Setting) -> Results:
    """What the kept files say; nothing where this installation has none."""
    paths = {path.name: path for path in (*setting.more_runs, *filter(None, [setting.runs]))}
    if RESULTS not in paths:
        return Results({})
    documents = {name: path for name, path in paths.items() if name in (RESULTS, *COSTS.values())}
    held = {name: json.loads(path.read_text(encoding="utf-8")) for name, path in documents.items()}
    return results_of(held[RESULTS], {name: held.get(file) for name, file in COSTS.items()})


def _open_at_edge(results: KeptResults, arm: str, measured: Measurement) -> Measurement:
    if not results.at_edge(arm):
        return measured
    return replace(
        measured, spread=math.inf, sample=(), spread_of=f"unknown: the best rate is an edge of the grid: {arm}"
    )


def results_of(document: Mapping[str, Any], costs: Mapping[str, Mapping[str, Any] | None]) -> Results:
    """A measurement for each claim, and what stands on the page, from the document of bao2024 and the benchmarks."""
    results = KeptResults(document)
    measured = {
        "a1": by_seed(results.hot_difference("effective", "sigma-reparam")),
        "a2": _open_at_edge(results, "sigma-reparam", by_seed(results.change("sigma-reparam", "loss"))),
        "a3": by_seed(results.change("weight decay 0.3", "loss")),
        "a4": by_seed(results.change("weight decay 0.3", "entropy")),
    }
    machines = [machine_text(name, held) for name, held in costs.items()]
    return Results(measured, {"advice": advice(results), "rows": table_rows(results, costs), "machines": machines})


STUDY = Study(
    "kept results and benchmarks",
    CLAIMS,
    measure,
    "the results and benchmarks that the repository keeps",
    on_runs=True,
    needs_data=False,
)
PAPER = Paper(
    "which-control",
    "Which control to try first",
    "Controls on the same model, text and seeds: what each costs and what it buys",
    (STUDY, copying.STUDY),
    Path(__file__).parent,
    {"copying_cells": copying_cells},
    kinds={"experiment": "a b"},
    page="which-control",
    kept=(RESULTS, copying.COPY_RUNS, *(f"../../benchmarks/results/{file}" for file in COSTS.values())),
    says="Which control should a run try first?",
    beliefs={
        "a1": "at hot rates LocAteR in its effective form ends above sigma-Reparam",
        "a3 a4": "at an ordinary rate a weight decay of 0.3 lowers the loss and raises entropy",
        "b1 b2": "LocAteR delays learning to copy",
    },
)

__all__ = ["PAPER"]
