"""`trajectory`: numbers over the steps of runs, and what is missing, repeated or of another shape, named."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from locater import LocaterError, scan
from locater.report.trajectory import first_faults, irregularities, overview
from locater.results.trajectory import gaps, trajectory


def row(run: str, step: int | None, head: int = 0, source: str | None = None, **more: Any) -> dict[str, Any]:
    """A head of one layer, with little more than what a trajectory needs."""
    place = {"source": source or f"{run}/step-{step}", "run": run, "step": step, "layer_name": "attn"}
    numbers = {"M": (step or 0) / 100 + head, "F": 2.0, "digest": f"{run}{step}"}
    kind = {"kind": "self", "width": 16, "head_dim": 8}
    return {"layer": 0, "head": head, **kind, **numbers, "flags": (), "faults": (), **place, **more}


def rows(run: str, steps: Iterable[int], heads: int = 2, **more: Any) -> list[dict[str, Any]]:
    return [row(run, step, head, **more) for step in steps for head in range(heads)]


def test_numbers_are_those_of_the_scans() -> None:
    torch.manual_seed(0)
    model, table, scans = nn.MultiheadAttention(32, 4), [], {}
    for step in (0, 10, 20):
        with torch.no_grad():
            model.in_proj_weight *= 3.0
        scans[step] = scan(model)
        more = {"source": f"x/{step}", "run": "x", "step": step, "digest": str(step), "layer_name": "attn"}
        table += [{**record, **more} for record in scans[step].records()]
    random.Random(0).shuffle(table)
    document = json.loads(json.dumps(trajectory(table, {}), allow_nan=False))
    run = document["runs"][0]
    assert [x["step"] for x in run["steps"]] == [0, 10, 20]
    assert [x["source"] for x in run["steps"]] == ["x/0", "x/10", "x/20"]
    assert {"M", "F", "expected_entropy", "stable_rank", "scale"} <= {*document["columns"]}
    assert not {"layer", "head", "step", "width", "head_dim", "kv_head"} & {*document["columns"]}
    for at, step in enumerate(scans):
        for name in document["columns"]:
            for head, number in enumerate(run["values"][name][at][0]):
                assert number == pytest.approx(scans[step].rows[head][name], rel=1e-5, nan_ok=True), (step, name)
    raised = {(x["head"], x["flag"]): x for x in run["findings"]}
    for step, result in scans.items():
        for entry, verdict in zip(result.rows, result.verdicts, strict=True):
            for key, names in (("spans", entry.flags), ("fault_spans", verdict.faults)):
                spans = {f: x[key] for (h, f), x in raised.items() if h == entry.head}
                assert {f for f, pairs in spans.items() if any(a <= step <= b for a, b in pairs)} == {*names}
    assert any(scans[20].rows[0].flags), "the last step is sharp: something was tested"


@pytest.mark.parametrize(
    ("steps", "missing"),
    [
        ([0, 10, 20, 30], []),
        ([0, 10, 30, 40], [(10, 30, 1)]),
        ([0, 10, 20, 60, 70, 80, 100, 110], [(20, 60, 3), (80, 100, 1)]),
        ([0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1000, 2000, 3000], []),
        ([1, 2, 4, 8, 1000, 2000, 4000, 5000], [(2000, 4000, 1)]),
        ([0, 100, 200, 300, 1300, 2300, 3300], []),
        ([0, 1, 4, 5, 8, 9], []),
        ([0, 10, 25, 35], []),
        ([5], []),
        ([], []),
    ],
)
def test_gaps_are_steps_missing_from_a_regular_sequence(steps: list[int], missing: list[tuple[int, int, int]]) -> None:
    assert [(x["after"], x["before"], x["missing"]) for x in gaps(steps)] == missing


def test_failed_sources_stand_where_their_names_say() -> None:
    table = rows("a", (100, 200, 400, 500)) + rows("b", (100, 200))
    errors = {"a/step-300": "cut short", "a/step-200-old": "not found", "b/step-900": "HTTP 404", "a/step-0100": "x"}
    document = trajectory(table, errors)
    places = {x["source"]: (x["run"], x["step"], x["reason"]) for x in document["failed"]}
    assert places == {
        "a/step-300": ("a", 300, "cut short"),
        "a/step-200-old": (None, None, "not found"),
        "b/step-900": ("b", 900, "HTTP 404"),
        "a/step-0100": (None, None, "x"),  # that step was read from another source
    }
    assert document["runs"][0]["gaps"] == [], "300 failed, which is said once"
    assert any("4 sources could not be read: a/step-300 (cut short)" in text for text in irregularities(document))


def test_a_gap_beside_a_failed_source() -> None:
    document = trajectory(rows("a", (0, 10, 20, 50, 60, 70)), {"a/step-40": "cut short"})
    assert document["runs"][0]["gaps"] == [{"after": 20, "before": 40, "every": 10, "missing": 1}]
    assert "1 step is missing: 30." in irregularities(document)


def test_equal_weights_are_named_within_runs_and_across() -> None:
    table = rows("a", (0, 10), digest="same") + rows("a", (20,)) + rows("b", (0,), digest="same")
    document = trajectory(table, {})
    assert [x["same_as"] for x in document["runs"][0]["steps"]] == [None, 0, None]
    assert [[(x["run"], x["step"]) for x in group] for group in document["duplicates"]] == [
        [("a", 0), ("a", 10), ("b", 0)]
    ]
    repeats = "2 of 4 checkpoints have the queries, keys and norms of another: a 0 = a 10 = b 0."
    assert repeats in irregularities(document)
    unknown = trajectory(rows("a", (0, 10), digest=None), {})
    assert unknown["duplicates"] == [], "without a digest nothing is known to be equal"
    # one layer that differs is another checkpoint
    mixed = [{**x, "digest": f"{x['step'] if x['head'] else 0}"} for x in rows("a", (0, 10))]
    assert trajectory(mixed, {})["duplicates"] == []


def test_a_step_that_two_sources_claim() -> None:
    twice = rows("a", (0, 10)) + [row("a", 10, head, source="copy/10") for head in range(2)]
    same = trajectory(twice, {})["runs"][0]
    assert [x["source"] for x in same["steps"]] == ["a/step-0", "a/step-10"]
    assert same["aside"] == [
        {"source": "copy/10", "step": 10, "reason": "the same step, with the queries, keys and norms of a/step-10"}
    ]
    other = trajectory([{**x, "digest": x["source"]} for x in twice], {})
    assert [x["step"] for x in other["runs"][0]["steps"]] == [0]
    assert {x["source"] for x in other["runs"][0]["aside"]} == {"a/step-10", "copy/10"}
    assert any(text.startswith("2 checkpoints not shown") for text in irregularities(other))


def test_words_are_short() -> None:
    document = trajectory(
        rows("/data/x/a", (0, 10)) + rows("/data/x/b", (0, 10)),
        {"/data/x/a/step-20": "/data/x/a/step-20/model.bin: cut"},
    )
    assert overview(document).startswith("2 runs. a: 2 checkpoints of 2 heads in 1 layer, steps 0 to 10, every 10; b: ")
    assert irregularities(document) == ["1 source could not be read: /data/x/a/step-20/model.bin: cut."]


def test_checkpoints_without_a_step() -> None:
    unnumbered = trajectory([row("a", None, source=x) for x in ("base", "tuned")], {})["runs"][0]
    assert (unnumbered["numbered"], [x["step"] for x in unnumbered["steps"]]) == (False, [0, 1])
    table = [*rows("a", (0, 10), heads=1), row("a", None, source="main", digest="a10")]
    mixed = trajectory(table, {})["runs"][0]
    assert [x["step"] for x in mixed["steps"]] == [0, 10]
    assert mixed["aside"][0]["reason"] == "no step is known of it; its queries, keys and norms are those of step 10"


def test_a_change_of_shape_is_two_parts() -> None:
    document = trajectory(rows("a", (0, 10)) + rows("a", (20, 30), heads=4), {"a/step-40": "cut short"})
    small, large = document["runs"]
    assert (small["name"], large["name"]) == ("a (1 layer, 2 heads of 8)", "a (1 layer, 4 heads of 8)")
    assert [len(x["values"]["M"][0][0]) for x in (small, large)] == [2, 4]
    assert document["shapes"] == [{"run": "a", "parts": [small["name"], large["name"]]}]
    assert document["failed"][0]["run"] == large["name"], "beside step 30"
    assert any("changes its shape and is shown in parts" in text for text in irregularities(document))


def test_a_failure_in_a_run_with_a_part_that_has_no_steps() -> None:
    """run/final of another shape has no step: the failed step belongs to the part that has some."""
    final = row("run", None, source="run/final", head_dim=99)
    document = trajectory([*rows("run", [100, 200]), final], {"run/step-300": "cut short"})
    steps = {run["name"]: [entry["source"] for entry in run["steps"]] for run in document["runs"]}
    [failed] = document["failed"]
    assert failed["step"] == 300
    assert len(steps[failed["run"]]) == 2


def test_first_step_of_each_flag() -> None:
    sharp = {"flags": ["sharp"], "faults": ["sharp"]}
    table = [row("a", step, 0, **(sharp if step in (10, 20, 40) else {})) for step in (0, 10, 20, 30, 40)]
    table += [row("a", step, 1, flags=["sharp"] if step == 0 else None, faults=None) for step in (0, 10, 20, 30, 40)]
    document = trajectory(table, {})
    fault, note = sorted(document["runs"][0]["findings"], key=lambda x: x["head"])
    assert (fault["spans"], fault["first"], fault["first_fault"]) == ([[10, 20], [40, 40]], 10, 10)
    assert (note["spans"], note["fault_spans"], note["first_fault"]) == ([[0, 0]], [], None)
    assert document["runs"][0]["first"] == [
        {"flag": "sharp", "step": 0, "heads": 2, "fault_step": 10, "layer": 0, "head": 1}
    ]
    assert first_faults(document) == "First faults: sharp from step 10."
    assert overview(document) == "5 checkpoints of 2 heads in 1 layer, steps 0 to 40, every 10."


def test_rows_that_do_not_make_a_checkpoint_are_refused() -> None:
    table = rows("a", (0,), heads=3)
    with pytest.raises(LocaterError, match=r"a/step-0: layer 0 has rows for heads 0, 2\]"):
        trajectory(table[:1] + table[2:], {})
    with pytest.raises(LocaterError, match=r"a/step-0: layer 0 has rows for heads 0, 0, 1"):
        trajectory(table + table, {})
    with pytest.raises(LocaterError, match="name several steps"):
        trajectory([row("a", 0, 0, source="x"), row("a", 1, 1, source="x")], {})
    with pytest.raises(LocaterError, match="different numbers of tokens in view"):
        trajectory(rows("a", (0,), length=256) + rows("a", (10,), length=512), {})


def test_nothing_was_read() -> None:
    document = trajectory([], {"a": "not found"})
    assert (document["runs"], overview(document)) == ([], "No checkpoint was read.")
    assert irregularities(document) == ["1 source could not be read: a (not found)."]


def test_a_head_with_nan_weights_has_no_numbers() -> None:
    table = rows("a", (0, 10))
    table[2] |= {"M": None, "F": float("nan"), "flags": ["nonfinite"], "faults": ["nonfinite"]}
    run = trajectory(table, {})["runs"][0]
    assert (run["values"]["M"][1], run["values"]["F"][1]) == ([[None, 1.1]], [[None, 2.0]])
