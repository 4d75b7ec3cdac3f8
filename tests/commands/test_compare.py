"""`compare`: what changed most, in words and as data, and conditions on changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from locater import ComparisonSeries, LocaterError, Scan, compare, scan
from locater.report.columns import quantity_words
from locater.report.comparison import changes_sentences, fault_sentence, series_sentences
from locater.report.verdict_sentences import number
from locater.results.comparison import ComparedTensors
from tests.conftest import Result

Run = Callable[..., Result]
DEMO = Path(str(files("locater") / "demo"))


def one_head_larger(by: float = 60.0) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """Two layers of four heads that are the same, but for the queries of head 2."""
    torch.manual_seed(0)
    a, b = nn.MultiheadAttention(32, 4), nn.MultiheadAttention(32, 4)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.in_proj_weight[16:24] *= by
    return a, b


def said_of(comparison: Comparison) -> list[str]:
    return changes_sentences(comparison.to_dict(), comparison.a.to_dict(), comparison.b.to_dict())


def test_what_changed_most() -> None:
    a, b = one_head_larger(20.0)
    comparison = compare(a, b)
    first = comparison.head_changes()[0]
    assert (first.layer, first.head) == (0, 2)
    row_a, row_b = scan(a).rows[2], scan(b).rows[2]
    assert {x.head for x in comparison.head_changes() if x.size > 1e-6} == {2}, "no other head changed"
    for change in comparison.changes:
        if change.column == "sqrtF" and change.head == 2:
            assert change.after / change.before == pytest.approx(20, rel=1e-4)
            largest = max(row.F**0.5 for x in (a, b) for row in scan(x).rows)  # type: ignore[operator]
            assert change.size == pytest.approx((change.after - change.before) / largest)
    words = " ".join(said_of(comparison))
    change = f"{quantity_words()[first.column]}: 0.2 from {number(first.before)} to {number(first.after)}"
    assert words.endswith(f"Heads that changed most (layer.head): {change}.")
    assert {(row_a[first.column], row_b[first.column])} == {(first.before, first.after)}
    document = comparison.to_dict()["changes"]
    assert document["heads"][0]["head"] == 2
    assert set(document["columns"]) == {change.column for change in comparison.changes}


def test_nothing_changed_and_shapes_that_differ() -> None:
    same = compare(DEMO, DEMO)
    assert said_of(same) == ["Identical: all 56 tensors have equal bytes."]
    assert max(same.column_changes().values()) == 0
    other = compare(DEMO, one_head_larger()[0])
    assert (other.changes, other.column_changes(), said_of(other)) == ([], {}, [])
    assert json.loads(other.to_json())["changes"] == {"columns": {}, "heads": []}
    with pytest.raises(LocaterError, match="different heads"):
        other.condition_rows()


UNREAD = "Compared are queries, keys and norms; values, output maps, MLPs and embeddings were not read."


def test_equal_heads_are_told_from_equal_models(run: Run, tmp_path: Path) -> None:
    """What a scan does not read is compared where its numbers are equal, or is said not to be."""
    tensors = load_file(DEMO / "model.safetensors")
    shutil.copy(DEMO / "config.json", tmp_path)
    save_file({name: tensor.clone() for name, tensor in reversed(tensors.items())}, tmp_path / "model.safetensors")
    shown = run("compare", DEMO, tmp_path).out
    assert "Identical: all 56 tensors have equal bytes." in shown
    assert "B - A" not in shown, "a table of zeros"

    name = "model.layers.3.self_attn.v_proj.weight"
    tensors[name][5, 11] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    (said,) = said_of(compare(DEMO, tmp_path))
    assert said.endswith(f"which says nothing of values, output maps and MLPs. 1 of 56 tensors differs: {name}.")
    document = json.loads(run("compare", DEMO, tmp_path, "--json", "-").out)
    assert document["equal"]
    assert document["tensors"] == {"compared": 56, "different": [name], "only_a": [], "only_b": []}

    apart = {**tensors, "extra": torch.zeros(2)}
    del apart["model.norm.weight"]
    save_file(apart, tmp_path / "model.safetensors")
    assert compare(DEMO, tmp_path).tensors == ComparedTensors(55, [name], ["model.norm.weight"], ["extra"])

    scans = scan(DEMO), scan(tmp_path)
    assert said_of(compare(*scans)) == [f"Every number of every head is equal. {UNREAD}"]
    tensors["model.layers.0.self_attn.q_proj.weight"][0] *= 1.01
    save_file(tensors, tmp_path / "model.safetensors")
    close = compare(DEMO, tmp_path)
    assert not close.equal
    assert close.tensors is None
    assert said_of(close) == [f"No number of any head changed by more than 1% of its range. {UNREAD}"]


def test_a_head_that_breaks_comes_first() -> None:
    a, b = one_head_larger(float("nan"))
    comparison = compare(a, b)
    rows = {row["head"]: row for row in comparison.condition_rows()}
    assert rows[2]["flags"] == ("nonfinite", "fault")
    assert rows[2]["change_F"] is None
    assert [head for head, row in rows.items() if "fault" in row["flags"]] == [2]
    assert compare(b, b).condition_rows()[2]["flags"] == (), "it was broken before"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, Path]:
    """Scans on disk: of a model, of the same with one head sixty times as large, and of another shape."""
    folder = tmp_path_factory.mktemp("compared")
    paths = folder / "a.json", folder / "b.json", folder / "other.json"
    for model, path in zip((*one_head_larger(), nn.MultiheadAttention(32, 2)), paths, strict=True):
        scan(model).save(path)
    return paths


@pytest.mark.parametrize(
    ("conditions", "status"),
    [
        ("sharp", 1),
        ("fault", 1),
        ("nonfinite", 0),
        ("change_F>1", 1),
        ("change_F<-1", 0),
        ("change_expected_entropy<-1", 1),
        ("nonfinite, change_M>1e6", 0),
        ("sharpp", 2),
        ("M>1", 2),
        ("locked", 2),
        ("change_F>many", 2),
        ("", 2),
    ],
)
def test_fail_on_what_is_new(
    run: Callable[..., Result], saved: tuple[Path, Path, Path], conditions: str, status: int
) -> None:
    result = run("compare", *saved[:2], "--fail-on", conditions)
    assert result.status == status, result.err
    assert len(result.err.splitlines()) == (status != 0)
    if status == 1:
        assert "0.2" in result.err
        assert ("1 head is newly sharp: 0.2 (H ratio 0.0" in result.err) == (conditions == "sharp")
    assert run("compare", saved[0], saved[0], "--fail-on", conditions).status == (2 if status == 2 else 0)


def test_fail_on_refuses_models_of_two_shapes(
    run: Callable[..., Result], saved: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    assert run("compare", saved[0], saved[2]).status == 0
    result = run("compare", saved[0], saved[2], "--fail-on", "sharp", "--json", tmp_path / "x.json")
    assert (result.status, len(result.err.splitlines())) == (2, 1)
    assert "different heads" in result.err
    assert not (tmp_path / "x.json").exists()


# ---- more than two ----


def growing(factors: tuple[float, ...]) -> list[nn.MultiheadAttention]:
    """Layers of four heads that are the same, but for the queries of head 2, each so many times the one before."""
    torch.manual_seed(0)
    models = [nn.MultiheadAttention(32, 4)]
    for factor in factors:
        models.append(nn.MultiheadAttention(32, 4))
        models[-1].load_state_dict(models[-2].state_dict())
        with torch.no_grad():
            models[-1].in_proj_weight[16:24] *= factor
    return models


def test_a_series_says_what_changed_and_between_which() -> None:
    models = growing((1.0, 60.0, 1.0))
    series = compare(*models)
    assert isinstance(series, ComparisonSeries)
    first = series.head_changes()[0]
    assert (first.layer, first.head, first.start, first.end) == (0, 2, 1, 2)
    assert {(x.head, x.start) for x in series.changes if x.size > 1e-6} == {(2, 1)}
    scans = [scan(model) for model in models]
    assert first.before == pytest.approx(getattr(scans[1].rows[2], first.column))
    assert first.after == pytest.approx(getattr(scans[2].rows[2], first.column))
    words = " ".join(series_sentences(series.to_dict(), [scan.to_dict() for scan in series.scans]))
    assert "Hardly anything changed from A to B, C to D." in words
    assert f"from {first.before:.2f} in B to {first.after:.2f} in C" in words
    assert (
        fault_sentence([scan.to_dict() for scan in series.scans])
        == "Heads that gained a fault: 1 from B to C. Heads that lost one: none."
    )
    document = json.loads(series.to_json())
    two = compare(models[0], models[3]).to_dict()
    assert {*two} == {*document}
    assert {*two["heads"][0]} | {"between"} == {*document["heads"][0]}
    for row, other in zip(document["heads"], json.loads(json.dumps(two["heads"])), strict=True):
        assert {key: row[key] for key in other} == other, "the last against the first"
        total = sum(step["difference"]["F"] for step in row["between"])
        assert total == pytest.approx(row["difference"]["F"], rel=1e-6, abs=1e-9)
    assert [step["gained"] for step in document["heads"][2]["between"]] == [[], ["sharp"], []]
    assert document["medians"]["F"] == pytest.approx([median(row.F for row in x.rows) for x in scans])
    assert len(document["source"]) == len(document["layers"]) == 4


def test_changes_of_a_series_have_one_range() -> None:
    models = growing((4.0, 4.0))
    largest = max(row.F**0.5 for model in models for row in scan(model).rows)  # type: ignore[operator]
    assert largest > 0.5, "above the least range"
    sizes = {x.start: x for x in compare(*models).changes if (x.column, x.head) == ("sqrtF", 2)}
    assert [sizes[at].size for at in (0, 1)] == pytest.approx(
        [(sizes[at].after - sizes[at].before) / largest for at in (0, 1)]
    )
    assert sizes[1].size == pytest.approx(4 * sizes[0].size, rel=1e-4)


def test_the_page_of_a_series_has_its_steps(tmp_path: Path) -> None:
    scans = [replace(scan(model), source=f"runs/x/step-{at}0") for at, model in enumerate(growing((2.0, 2.0)))]
    document = compare(*scans).trajectory()
    assert [x["step"] for x in document["runs"][0]["steps"]] == [0, 10, 20]
    assert [x["source"] for x in document["runs"][0]["steps"]] == ["step-00", "step-10", "step-20"]
    assert document["runs"][0]["name"] == "x"
    unnamed = [replace(x, source=name) for x, name in zip(scans, ("base", "tuned", "base"), strict=True)]
    run = compare(*unnamed).trajectory()["runs"][0]
    assert (run["numbered"], [x["source"] for x in run["steps"]]) == (False, ["base (A)", "tuned", "base (C)"])
    for at, result in enumerate(scans):
        assert run["values"]["F"][at][0] == pytest.approx([row.F for row in result.rows], rel=1e-5)


@pytest.fixture(scope="module")
def saved_series(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Scans of a head that grows eightfold twice, then falls back: F by 64 each time."""
    folder = tmp_path_factory.mktemp("series")
    paths = [folder / f"step-{at}.json" for at in range(4)]
    for model, path in zip(growing((8.0, 8.0, 1 / 64)), paths, strict=True):
        scan(model).save(path)
    return paths


def test_many_from_the_command_line(run: Callable[..., Result], saved_series: list[Path], tmp_path: Path) -> None:
    result = run("compare", *saved_series, "--json", tmp_path / "x.json", "--report", tmp_path / "x.html")
    assert result.status == 0, result.err
    assert f"D: {saved_series[3]} (4 heads)" in result.out
    assert "Heads that changed most (layer.head): 0.2 " in " ".join(result.out.split())
    assert len(json.loads((tmp_path / "x.json").read_text())["source"]) == 4
    assert "4 checkpoints of 4 heads in 1 layer" in (tmp_path / "x.html").read_text()


@pytest.mark.parametrize(
    ("conditions", "pair"),
    [("sharp", "B to C"), ("fault", "B to C"), ("change_F<-1", "C to D"), ("change_F>1e6", None), ("nonfinite", None)],
)
def test_fail_on_along_a_series(
    run: Callable[..., Result], saved_series: list[Path], conditions: str, pair: str | None
) -> None:
    result = run("compare", *saved_series, "--fail-on", conditions)
    assert result.status == (0 if pair is None else 1), result.err
    if pair is not None:
        assert result.err.startswith("locater: --fail-on: ")
        assert f" 0.2 from {pair}" in result.err
        assert "2 heads" not in result.err, "one head, which crosses between two and over all"


def test_small_changes_that_add_up(run: Callable[..., Result], saved_series: list[Path]) -> None:
    rows = compare(*(Scan.load(path) for path in saved_series[:3])).condition_rows()
    changes = {row["where"]: row["change_F"] for row in rows if row["head"] == 2}
    assert changes["A to C"] == pytest.approx(changes["A to B"] + changes["B to C"])
    bound = (changes["B to C"] + changes["A to C"]) / 2
    result = run("compare", *saved_series[:3], "--fail-on", f"change_F>{bound}")
    assert (result.status, "at 0.2 from A to C (" in result.err) == (1, True)


def test_a_series_refuses_what_it_cannot_compare(
    run: Callable[..., Result], saved: tuple[Path, Path, Path], saved_series: list[Path], tmp_path: Path
) -> None:
    for args, culprit in (
        ((*saved_series[:2], saved[2]), "has other heads than"),
        ((*saved_series, saved_series[0]), f"{saved_series[0]} is given more than once"),
        ((*saved_series[:2], tmp_path / "nothing"), "nothing"),
        ((saved_series[0],), "B"),
    ):
        result = run("compare", *args, "--json", tmp_path / "x.json")
        assert (result.status, len(result.err.splitlines())) == (2, 1), result.err
        assert culprit in result.err
        assert not (tmp_path / "x.json").exists()
    a = scan(growing(())[0])
    with pytest.raises(LocaterError, match="length is 256 in the first and 128"):
        compare(a, scan(growing(())[0]), scan(growing(())[0], length=128))
