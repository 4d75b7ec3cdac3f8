"""Claims about sinks by runs on the copy source: judged by lines that nobody trained, and one that is."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from locater_lab.engine.claims import Claim, verdict_of
from locater_lab.engine.mechanism_runs import (
    COPY,
    COPY_RATE,
    COPY_SEEDS,
    PLAIN,
    UNIFORM,
    sink_arm,
    sink_tables,
    weight_left,
)
from locater_lab.engine.pages import page
from locater_lab.engine.reproduction import Paper, Results
from locater_lab.engine.runs import Arm, Runs, train
from locater_lab.papers.qiu2025 import training as gates
from locater_lab.papers.sun2026 import training as blocks
from locater_lab.studies.zoo import sinks as zoo
from tests.lab.made_runs import fill, made_line

EMPTY = {
    "first_weight": 0.01,
    "first_mass": 0.05,
    "first_value": 0.9,
    "row_mass": 0.1,
    "spike_ratio": 10.0,
    "gate": 0.1,
}
FULL = {"first_weight": 0.7, "first_mass": 0.7, "first_value": 0.2, "row_mass": 1.0, "spike_ratio": 50.0, "gate": None}


def made_up(arms: Any, empty: set[str]) -> Runs:
    runs = Runs()
    for arm in arms:
        add(runs, arm, EMPTY if arm.name in empty else FULL)
    return runs


def add(runs: Runs, arm: Arm, measures: dict[str, Any], loss: float = 2.2) -> None:
    """Eight seeds, their measures up to 2 % apart."""
    for seed in range(COPY_SEEDS):
        factor = 1 + random.Random(f"{arm.name} {seed}").uniform(-0.02, 0.02)
        noisy = {name: None if value is None else factor * value for name, value in measures.items()}
        runs.add(arm.row(COPY_RATE, seed), made_line(loss + 0.001 * seed, measures=noisy))


def verdicts_of(claims: tuple[Claim, ...], results: Any) -> dict[str, str]:
    measured = results.measured if isinstance(results, Results) else results
    return {c.id: verdict_of(c, measured[c.id], "").verdict if measured.get(c.id) else "unknown" for c in claims}


def test_a_sink_has_more_than_even_attention_gives() -> None:
    assert UNIFORM == 0.0741  # (1 + 1/2 + ... + 1/64) / 64
    assert len({arm.name for arm in zoo.ARMS.values()}) == len(zoo.ARMS)


def test_the_zoo_says_who_takes_a_sink_away() -> None:
    away = {"gated", "sigmoid", "linear", "delta", "gated_delta", zoo.ROTARY.name}
    verdicts = verdicts_of(zoo.CLAIMS, zoo.judge(made_up((*zoo.ARMS.values(), zoo.ROTARY), away)))
    assert {key for key, verdict in verdicts.items() if verdict == "fails"} == {"f4", "f5"}, (
        "the sinks inside a softmax have it still"
    )
    same = {key for key, verdict in verdicts.items() if verdict == "undecided"}
    assert same == {"f10", "f11"}, "losses that are equal in five seeds: by signs p = 1/16"
    one = zoo.judge(made_up((*zoo.ARMS.values(), zoo.ROTARY), away - {"gated_delta"}))
    assert verdicts_of(zoo.CLAIMS, one)["f6"] == "fails", "one of three is enough"
    assert set(verdicts_of(zoo.CLAIMS, zoo.judge(Runs())).values()) == {"unknown"}


def test_a_measure_that_is_missing_decides_nothing() -> None:
    runs = made_up((*zoo.ARMS.values(), zoo.ROTARY), {"gated"})
    fill(runs, zoo.ARMS["gated_delta"], [2.2] * COPY_SEEDS, {**EMPTY, "first_weight": None})
    assert verdicts_of(zoo.CLAIMS, zoo.judge(runs))["f6"] == "unknown"
    means = sink_tables(runs, zoo.ARMS.values())["sinks"]["means"]["first_weight"]
    assert means["gated"] == pytest.approx(0.01, rel=0.02)
    assert "gated_delta" not in means
    fill(runs, PLAIN, [2.2] * COPY_SEEDS, {**FULL, "first_weight": None})
    assert weight_left(runs, zoo.ARMS["gated"]) is None


def test_gates_that_close_and_gates_that_cannot() -> None:
    runs = made_up(gates.COPY_ARMS, {gates.COPY_HEAD.name, gates.COPY_ELEMENT.name})
    for arm in (
        gates.COPY_CONSTANT,
        gates.COPY_NS,
        gates.COPY_VALUES,
    ):  # they gate as well, and leave the sink
        add(runs, arm, {**FULL, "gate": 0.5})
    verdicts = verdicts_of(gates.SINK_CLAIMS, gates.judge_copy_sinks(runs))
    assert {key for key, verdict in verdicts.items() if verdict != "holds"} == {"f9"}, (
        "one order of variants in five seeds: p = 1/16"
    )
    other = verdicts_of(gates.SINK_CLAIMS, gates.judge_copy_sinks(made_up(gates.COPY_ARMS, {gates.COPY_HEAD.name})))
    assert other["f10"] == "fails"
    assert other["f11"] == "holds"


@pytest.mark.parametrize(("spike", "open_"), [(2000.0, set()), (50.0, set(blocks.COPY_OF_SPIKES))])
def test_spikes_and_sinks_by_arm(spike: float, open_: set[str]) -> None:
    """Where there is no spike nothing is said of spikes."""
    runs = Runs()
    factors = {
        blocks.COPY_SANDWICH.name: 0.5,
        blocks.COPY_POST.name: 0.5,
        blocks.COPY_NONE.name: 0.5,
        blocks.COPY_NO_DECAY.name: 2.0,
    }
    for arm in blocks.COPY_ARMS:
        small = arm.name in (blocks.COPY_SIZES[8].name, blocks.COPY_GATE.name)
        factor = factors.get(arm.name, 1.0)
        add(runs, arm, EMPTY if small else {**FULL, "spike_ratio": spike * factor, "first_weight": 0.7 * factor**0.2})
    verdicts = verdicts_of(blocks.SINK_CLAIMS, blocks.judge_copy_sinks(runs))
    assert verdicts["f2"] == verdicts["f11"] == verdicts["f5"] == "holds"
    assert {key for key in blocks.COPY_OF_SPIKES if verdicts[key] == "undecided"} - {"f12"} == open_ - {"f12"}
    correlation = blocks.judge_copy_sinks(runs).measured["f12"]
    assert correlation is not None
    assert correlation.value > 0.5, "here arms have more of both or less of both"


def test_a_source_that_was_not_learned_decides_nothing() -> None:
    runs = made_up(blocks.COPY_ARMS, {blocks.COPY_GATE.name})
    add(runs, blocks.COPY_NONE, {**FULL, "first_weight": 0.9})
    assert verdicts_of(blocks.SINK_CLAIMS, blocks.judge_copy_sinks(runs))["f8"] == "holds"
    add(runs, blocks.COPY_NONE, {**FULL, "first_weight": 0.9}, loss=2.5)
    assert verdicts_of(blocks.SINK_CLAIMS, blocks.judge_copy_sinks(runs))["f8"] == "undecided"


def test_the_section_has_a_row_per_arm_and_a_picture(tmp_path: Path) -> None:
    """The macro that papers' pages import, by itself."""
    (tmp_path / "page.md.j2").write_text(
        '{% extends "base.md.j2" %}{% import "sinks.md.j2" as sinks %}'
        '{% block sections %}{% if has("sinks") %}{{ sinks.section("f", {"softmax": "plain"}) }}{% endif %}{% endblock %}'
    )
    paper = Paper("made", "Made up", "Nobody", (), tmp_path)
    runs = made_up(gates.COPY_ARMS, {"gated"})
    add(runs, gates.COPY_VALUES, FULL, loss=2.5)
    assumptions = {"quick": True, "seconds": {}, "processor_seconds": {}, "torch": "", "python": "", "threads": 1}
    document: dict[str, Any] = {"claims": [], "assumptions": assumptions, "studies": {}}
    text, figures = page(document, paper)
    assert "## f." not in text
    assert figures == {}
    tables = sink_tables(runs, gates.COPY_ARMS)
    text, figures = page({**document, "studies": {"sinks": {"tables": tables}}}, paper)
    section = text[text.index("## f. Where a head has nothing to add") :]
    assert section.count("\n| ") == len(gates.COPY_ARMS) + 1
    assert "| plain | 0.006 | 2.2000, 2.2010" in section
    assert (
        f"more than 0.1 nat above the plain arm: gated(position=value, per=element) ({COPY_SEEDS} of {COPY_SEEDS})"
        in section
    )
    assert ">gated<" in figures["sink"]
    assert "![sink](figure:sink)" in section
    assert sink_tables(Runs(), gates.COPY_ARMS) == {}


def test_a_short_run_brings_what_is_judged(tmp_path: Any) -> None:
    """Trained here, a few steps: the measures that claims name are in its line."""
    line = train(replace(sink_arm("gated").row(COPY_RATE, 0).plan, steps=3, evaluate=0).to_dict(), str(tmp_path))
    assert line["status"] == "done"
    for name in EMPTY:
        assert isinstance(line["measures"][name], float), name
    assert 0 < line["measures"]["first_weight"] < line["measures"]["first_mass"], "a gate around 1/2 takes half of it"
    assert PLAIN.base == COPY
