"""`compare`: what changed most, in words and as data, and conditions on changes."""

from __future__ import annotations

import json
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from torch import nn

from locater import LocaterError, compare, scan
from locater.report.change_words import changes_sentences
from tests.conftest import Result

DEMO = Path(str(files("locater") / "demo"))


def one_head_larger(by: float = 20.0) -> tuple[nn.MultiheadAttention, nn.MultiheadAttention]:
    """Two layers of four heads that are the same, but for the queries of head 2."""
    torch.manual_seed(0)
    a, b = nn.MultiheadAttention(32, 4), nn.MultiheadAttention(32, 4)
    b.load_state_dict(a.state_dict())
    with torch.no_grad():
        b.in_proj_weight[16:24] *= by
    return a, b


def test_what_changed_most() -> None:
    a, b = one_head_larger()
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
    words = " ".join(changes_sentences(comparison))
    fall = f"from {row_a.expected_entropy:.2f} to {row_b.expected_entropy:.2f}"
    assert words.endswith(f"Heads that changed most (layer.head): expected entropy (nats): 0.2 {fall}.")
    document = comparison.to_dict()["changes"]
    assert document["heads"][0]["head"] == 2
    assert set(document["columns"]) == {change.column for change in comparison.changes}


def test_nothing_changed_and_shapes_that_differ() -> None:
    same = compare(DEMO, DEMO)
    assert changes_sentences(same) == ["No number of any head changed by more than 1% of its range."]
    assert max(same.column_changes().values()) == 0
    other = compare(DEMO, one_head_larger()[0])
    assert (other.changes, other.column_changes(), changes_sentences(other)) == ([], {}, [])
    assert json.loads(other.to_json())["changes"] == {"columns": {}, "heads": []}
    with pytest.raises(LocaterError, match="different heads"):
        other.condition_rows()


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
    """Scans on disk: of a model, of the same with one head twenty times as large, and of another shape."""
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
        assert "1 head crosses --fail-on" in result.err
        assert "layer 0 head 2" in result.err
    assert run("compare", saved[0], saved[0], "--fail-on", conditions).status == (2 if status == 2 else 0)


def test_fail_on_refuses_models_of_two_shapes(
    run: Callable[..., Result], saved: tuple[Path, Path, Path], tmp_path: Path
) -> None:
    assert run("compare", saved[0], saved[2]).status == 0
    result = run("compare", saved[0], saved[2], "--fail-on", "sharp", "--json", tmp_path / "x.json")
    assert (result.status, len(result.err.splitlines())) == (2, 1)
    assert "different heads" in result.err
    assert not (tmp_path / "x.json").exists()
