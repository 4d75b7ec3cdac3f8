"""Which heads can do with less: taken away, windowed, with keys of few bits, attending evenly; and what tells it
beforehand (docs/tolerance.md).

The plan is docs/results/tolerance-plan.md. Each measurement leaves a line in docs/results/tolerance.jsonl.

    locater reproduce tolerance --models FOLDER --data FOLDER --runs LINES --jobs 1     # measures what LINES lacks
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater_lab.engine.provenance import SOURCES, check_commit, commit_of
from locater_lab.engine.reproduction import Paper, Results, Setting, Study, round_numbers
from locater_lab.studies.tolerance import measuring
from locater_lab.studies.tolerance.judging import (
    BUDGETS,
    CHANGES,
    CLAIMS,
    EVERY,
    FEWEST,
    FIRST,
    JUDGES,
    LEAST,
    list_of_rule,
    results_of,
    rules_of,
)
from locater_lab.studies.tolerance.measuring import LISTS, SECOND, SUBJECTS
from locater_lab.train.sweep import append_line, read_lines

DIGITS = 5


def measure(setting: Setting) -> Results:
    """Judge the lines that there are; with --jobs measure what is missing of the models of --models first."""
    if setting.runs is None:
        return Results({})
    lines = [line for path in (*setting.more_runs, setting.runs) for line in read_lines(path)]
    if setting.jobs:
        commit = commit_of(SOURCES)
        check_commit(setting.runs, commit)
        for line in missing_lines(setting, lines):
            whole = round_numbers({**line, "commit": commit}, DIGITS)
            append_line(setting.runs, whole)
            lines.append(whole)
            setting.log(f"{line['model']}: {line['part']} {line.get('sequence', '')} {line.get('change', '')}")
    return results_of(lines) if lines else Results({})


def missing_lines(setting: Setting, lines: list[Any]) -> Iterator[dict[str, Any]]:
    """Measure what `lines` lack: models that make rules whole, then the others, what claims need most first."""
    there = [name for name in SUBJECTS if measuring.folder_of(name, setting.models) is not None]
    rules, judges = ([name for name in there if SUBJECTS[name].judges == judging] for judging in (False, True))
    models = {name: _Model(name, setting, lines) for name in there}
    sequences = range(measuring.SEQUENCES)
    for name in rules:
        yield from models[name].predicted()
        yield from models[name].second()
        for sequence in sequences:
            yield from models[name].alone(sequence)
    for name in judges:
        yield from models[name].predicted()
        yield from models[name].second()
    for name, change, sequence in product(judges, FIRST[:1], range(FEWEST)):
        yield from models[name].alone(sequence, (change,))
    for sequence, name in product(sequences, (*judges, *rules)):
        yield from models[name].together(sequence)
    for change, sequence, name in product(FIRST[1:], range(FEWEST), judges):
        yield from models[name].alone(sequence, (change,))
    for sequence, name in product(sequences, judges):
        yield from models[name].alone(sequence)


class _Model:
    """One model and the lines that it has and lacks; loaded when it is needed."""

    def __init__(self, name: str, setting: Setting, lines: list[Any]) -> None:
        self.name, self.setting, self.lines, self.subject = name, setting, lines, SUBJECTS[name]

    def _load(self) -> Any:
        module = load_model(str(measuring.folder_of(self.name, self.setting.models)))
        return module, measuring.inputs_of(self.name, module, self.setting)

    def _lacks(self, **of: Any) -> bool:
        found = {"model": self.name, **of}
        return not any(all(line.get(key) == value for key, value in found.items()) for line in self.lines)

    def _line(self, part: str, inputs: measuring.Inputs, length: int, **values: Any) -> dict[str, Any]:
        return {"model": self.name, "part": part, "text": inputs.text, "length": length, **values}

    def predicted(self) -> Iterator[dict[str, Any]]:
        """What could tell it beforehand, over all heads."""
        if self._lacks(part="predictors"):
            module, inputs = self._load()
            heads = measuring.every_head(attention_layers(module))
            columns = measuring.predictors(module, self.subject, inputs.choose)
            yield self._line("predictors", inputs, self.subject.length, heads=heads, columns=columns)

    def second(self) -> Iterator[dict[str, Any]]:
        """What was added to it."""
        if self.subject.causal and self._lacks(part=SECOND):
            module, inputs = self._load()
            heads = measuring.every_head(attention_layers(module))
            columns = measuring.second_order(module, self.subject, inputs.choose)
            yield self._line(SECOND, inputs, self.subject.length, heads=heads, columns=columns)

    def alone(self, sequence: int, some: Sequence[str] | None = None) -> Iterator[dict[str, Any]]:
        """Heads one by one, under every change or some."""
        changes = measuring.changes_of_a_head(self.subject.length)
        lacking = [name for name in some or changes if self._lacks(part="alone", sequence=sequence, change=name)]
        if not lacking:
            return
        module, inputs = self._load()
        if sequence >= len(inputs.alone):
            return
        heads = measuring.drawn_heads(self.name, attention_layers(module))
        with measuring.judged(module, self.subject, inputs.alone[sequence]) as judged:
            for name in lacking:
                costs = judged.one_by_one(heads, changes[name])
                of = {"sequence": sequence, "change": name, "loss": judged.loss, "heads": heads, "costs": costs}
                yield self._line("alone", inputs, self.subject.length, **of)

    def together(self, sequence: int) -> Iterator[dict[str, Any]]:
        """Many heads at once: all, those of a rule, and as many at random."""
        rules = rules_of(self.lines)
        if not self._lacks(part="together", sequence=sequence) or set(LISTS) - set(rules["all"]):
            return
        module, inputs = self._load()
        if sequence >= len(inputs.together):
            return
        heads = measuring.every_head(attention_layers(module))
        costs: dict[str, dict[str, float]] = {"all": {}, "rule": {}, SECOND: {}, "random": {}}
        with measuring.judged(module, self.subject, inputs.together[sequence]) as judged:
            for name, how in measuring.changes_of_all(self.subject.long).items():
                costs["all"][name] = judged.change([measuring.together(heads)], how)[0]
            for name in LISTS:
                how, share = measuring.of_list(name, self.subject.long)
                count = round(share * len(heads))
                lists = {
                    "rule": list_of_rule(self.lines, self.name, rules["all"][name], name, count),
                    SECOND: list_of_rule(self.lines, self.name, (SECOND, 1), name, count),
                    "random": measuring.drawn_list(self.name, name, sequence, heads, count),
                }
                for kind, some in lists.items():
                    costs[kind][name] = judged.change([measuring.together(some)], how)[0]
            yield self._line("together", inputs, self.subject.long, sequence=sequence, loss=judged.loss, costs=costs)


STUDY = Study(
    "heads that can do with less",
    CLAIMS,
    measure,
    "figures of models: --runs FILE of earlier ones, with --jobs 1 --models FOLDER --data FOLDER to measure what it lacks",
    on_models=True,
    on_runs=True,
)
PAPER = Paper(
    "tolerance",
    "Which heads can do with less?",
    "Heads taken away, windowed, with keys of few bits; and what tells it beforehand",
    (STUDY,),
    Path(__file__).parent,
    {"CLASSES": EVERY, "CHANGES": CHANGES, "JUDGES": JUDGES, "LISTS": LISTS, "LEAST": LEAST, "BUDGETS": BUDGETS},
    page="tolerance",
    kept=("tolerance.jsonl",),
    kinds={"experiment": "a b c d e f"},
    says="Which heads of shipped models can be taken away, windowed or given keys of few bits, and what tells it beforehand?",
    beliefs={
        " ".join(f"a{i}" for i in range(1, 16)): "weights and surrogate order heads by what taking from them costs",
        " ".join(f"b{i}" for i in range(1, 16)): "one pass orders heads by what taking from them costs",
    },
)

__all__ = ["PAPER"]
