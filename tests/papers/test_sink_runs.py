"""Claims about sinks by runs on the copy source: judged by lines that nobody trained, and one that is."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from locater_papers.claim import Claim, Measured, verdict_of
from locater_papers.qiu2025 import sinks as gates
from locater_papers.runs import Runs, train
from locater_papers.sink_runs import COPY, PLAIN, RATE, SEEDS, UNIFORM, arm_means, left_of, sink_arm, sinks_section
from locater_papers.sun2026 import sinks as blocks
from locater_papers.zoo import sinks as zoo
from tests import ROOT
from tests.papers.made_runs import fill

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
        fill(runs, arm, [2.2 + 0.001 * seed for seed in range(SEEDS)], EMPTY if arm.name in empty else FULL)
    return runs


def said(claims: tuple[Claim, ...], found: Any) -> dict[str, str]:
    return {c.id: verdict_of(c, found[c.id], "").verdict if found.get(c.id) else "unknown" for c in claims}


def test_a_sink_has_more_than_even_attention_gives() -> None:
    assert UNIFORM == 0.0741  # (1 + 1/2 + ... + 1/64) / 64
    assert len({arm.name for arm in zoo.ARMS.values()}) == len(zoo.ARMS)


def test_the_zoo_says_who_takes_a_sink_away() -> None:
    away = {"gated", "sigmoid", "linear", "delta", "gated_delta", zoo.ROTARY.name}
    found = zoo.judge(made_up((*zoo.ARMS.values(), zoo.ROTARY), away))
    verdicts = said(zoo.CLAIMS, found)
    assert {key for key, verdict in verdicts.items() if verdict == "fails"} == {"f4", "f5"}, (
        "the sinks inside a softmax have it still"
    )
    assert set(verdicts.values()) == {"holds", "fails"}
    one = zoo.judge(made_up((*zoo.ARMS.values(), zoo.ROTARY), away - {"gated_delta"}))
    assert said(zoo.CLAIMS, one)["f6"] == "fails", "one of three is enough"
    assert set(said(zoo.CLAIMS, zoo.judge(Runs())).values()) == {"unknown"}


def test_a_measure_that_is_missing_decides_nothing() -> None:
    runs = made_up((*zoo.ARMS.values(), zoo.ROTARY), {"gated"})
    fill(runs, zoo.ARMS["gated_delta"], [2.2] * SEEDS, {**EMPTY, "first_weight": None})
    found = zoo.judge(runs)
    assert found["f6"] is None
    assert "gated_delta" not in arm_means(
        {key: dict(value.numbers) for key, value in found.items() if value is not None}
    )
    fill(runs, PLAIN, [2.2] * SEEDS, {**FULL, "first_weight": None})
    assert left_of(runs, zoo.ARMS["gated"]) is None


def test_gates_that_close_and_gates_that_cannot() -> None:
    runs = made_up(gates.ARMS, {gates.HEAD.name, gates.ELEMENT.name})
    for arm in (gates.CONSTANT, gates.NS, gates.VALUES):  # they gate as well, and leave the sink
        fill(runs, arm, [2.2] * SEEDS, {**FULL, "gate": 0.5})
    verdicts = said(gates.CLAIMS, gates.judge(runs))
    assert set(verdicts.values()) == {"holds"}
    other = said(gates.CLAIMS, gates.judge(made_up(gates.ARMS, {gates.HEAD.name})))
    assert other["f10"] == "fails"
    assert other["f11"] == "holds"


@pytest.mark.parametrize(("spike", "open_"), [(2000.0, set()), (50.0, set(blocks.OF_SPIKES))])
def test_spikes_and_sinks_by_arm(spike: float, open_: set[str]) -> None:
    """Where there is no spike nothing is said of spikes."""
    runs = Runs()
    for arm in blocks.ARMS:
        small = arm.name in (blocks.SIZES[8].name, blocks.GATE.name)
        fill(runs, arm, [2.2] * SEEDS, EMPTY if small else {**FULL, "spike_ratio": spike})
    verdicts = said(blocks.CLAIMS, blocks.judge(runs))
    assert verdicts["f2"] == verdicts["f11"] == verdicts["f5"] == "holds"
    assert {key for key in blocks.OF_SPIKES if verdicts[key] == "undecided"} == open_
    assert open_ or verdicts["f12"] == "fails", "here the arms without a sink are those without a spike"


def test_a_source_that_was_not_learned_decides_nothing() -> None:
    runs = made_up(blocks.ARMS, {blocks.GATE.name})
    assert said(blocks.CLAIMS, blocks.judge(runs))["f8"] == "holds"
    fill(runs, blocks.NONE, [2.5] * SEEDS, FULL)
    assert said(blocks.CLAIMS, blocks.judge(runs))["f8"] == "undecided"


def test_the_section_has_a_row_per_arm_and_means() -> None:
    found: dict[str, Measured | None] = dict(zoo.judge(made_up((*zoo.ARMS.values(), zoo.ROTARY), {"gated"})))
    numbers = {key: dict(value.numbers) for key, value in found.items() if value is not None}
    lines, figures = sinks_section(numbers, "f", {"softmax": "plain"})
    assert sum(text.startswith("| ") for text in lines) == len(zoo.ARMS) + 2
    assert any(text.startswith("| plain | 0.006 | 2.2000, 2.2010") for text in lines)
    assert ">gated<" in figures["sink"]
    assert arm_means(numbers)["gated"] == pytest.approx(0.01)
    assert sinks_section({}, "f") == ([], {})


def test_the_readme_has_the_kept_figure() -> None:
    root = ROOT
    claims = json.loads((root / "docs/results/zoo.json").read_text())["claims"]
    weight = arm_means({entry["id"]: entry["numbers"] for entry in claims})["softmax"]
    assert f"softmax gives its first token {weight:.2f} of a row" in (root / "README.md").read_text()


def test_a_short_run_brings_what_is_judged(tmp_path: Any) -> None:
    """Trained here, a few steps: the measures that claims name are in its line."""
    line = train(replace(sink_arm("gated").row(RATE, 0).plan, steps=3, evaluate=0).to_dict(), str(tmp_path))
    assert line["status"] == "done"
    for name in EMPTY:
        assert isinstance(line["measures"][name], float), name
    assert 0 < line["measures"]["first_weight"] < line["measures"]["first_mass"], "a gate around 1/2 takes half of it"
    assert PLAIN.base == COPY
