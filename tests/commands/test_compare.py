"""`compare`: what changed most, in words and as data, and conditions on changes."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from importlib.resources import files
from itertools import pairwise
from pathlib import Path
from statistics import median

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

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
    assert (same.verdict, said_of(same)) == ("Identical: all 56 tensors have equal bytes.", [])
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
    assert not any(word in shown for word in ("B - A", "medians", "fault")), "no table of zeros"

    name = "model.layers.3.self_attn.v_proj.weight"
    tensors[name][5, 11] = torch.nan
    save_file(tensors, tmp_path / "model.safetensors")
    found = compare(DEMO, tmp_path)
    assert found.verdict == (
        f"NaN or infinite numbers in {name}, where A has finite ones. 1 of 56 tensors changed: v_proj."
    )
    document = json.loads(run("compare", DEMO, tmp_path, "--json", "-").out)
    assert [row["gained"] for row in document["heads"][12:16]] == [["nonfinite"], ["nonfinite"], [], []]
    assert document["weights"]["nonfinite"] == document["weights"]["different"] == [name]
    assert run("compare", DEMO, tmp_path, "--fail-on", "fault").status == 1

    mlp = "model.layers.3.mlp.up_proj.weight"
    tensors[mlp][2, 3] = torch.inf
    save_file(tensors, tmp_path / "model.safetensors")
    broken = run("compare", DEMO, tmp_path, "--fail-on", "nonfinite, fault")
    assert (broken.status, broken.err.count(f"NaN or infinite numbers in {mlp}")) == (1, 1)
    tensors[mlp] = load_file(DEMO / "model.safetensors")[mlp]
    tensors[mlp][2, 3] += 0.5
    tensors[name] = load_file(DEMO / "model.safetensors")[name]
    save_file(tensors, tmp_path / "model.safetensors")
    document = json.loads(run("compare", DEMO, tmp_path, "--json", "-").out)
    assert document["equal"]
    assert document["tensors"] == {"compared": 56, "different": [mlp], "only_a": [], "only_b": []}
    assert document["verdict"]["sentence"].startswith("1 of 56 tensors changed: up_proj (rank 1, by ")
    assert document["verdict"]["sentence"].endswith("of its norm). No head changed.")

    apart = {**tensors, "extra": torch.zeros(2)}
    del apart["model.norm.weight"]
    save_file(apart, tmp_path / "model.safetensors")
    found = compare(DEMO, tmp_path)
    assert found.tensors == ComparedTensors(55, [mlp], ["model.norm.weight"], ["extra"])
    assert "only A has model.norm.weight; only B has extra. No head changed." in found.verdict

    scans = scan(DEMO), scan(tmp_path)
    assert compare(*scans).verdict == (
        "Every number of every head is equal; queries, keys and norms were read, and nothing is known of the rest."
    )
    tensors["model.layers.0.self_attn.q_proj.weight"][0] *= 1.01
    save_file(tensors, tmp_path / "model.safetensors")
    close = compare(DEMO, tmp_path)
    assert not close.equal
    assert close.tensors is None
    assert "No head changed: at most by " in close.verdict
    assert said_of(close) == []
    assert said_of(compare(*(scan(x) for x in (DEMO, tmp_path)))) == [
        f"No number of any head changed by more than 1% of its range. {UNREAD}"
    ]


def test_a_head_that_breaks_comes_first() -> None:
    a, b = one_head_larger(float("nan"))
    comparison = compare(a, b)
    rows = {row["head"]: row for row in comparison.condition_rows()}
    assert rows[2]["flags"] == ("nonfinite", "fault")
    assert rows[2]["change_F"] is None
    assert [head for head, row in rows.items() if "fault" in row["flags"]] == [2]
    assert compare(b, b).condition_rows()[2]["flags"] == (), "it was broken before"


# ---- weights: what differs, in one sentence ----

SIZE, HEADS, KEYS, LAYERS = 32, 4, 2, 6  # of the demo
Tensors = dict[str, Tensor]


def part(layer: int, name: str) -> str:
    return f"model.layers.{layer}.self_attn.{name}_proj.weight"


def demo_with(folder: Path, change: Callable[[Tensors], object], **settings: object) -> Path:
    """The demo with its tensors changed, and settings of its config.json."""
    tensors, config = load_file(DEMO / "model.safetensors"), json.loads((DEMO / "config.json").read_text())
    change(tensors)
    (folder / "config.json").write_text(json.dumps(config | settings))
    save_file({name: x.contiguous() for name, x in tensors.items()}, folder / "model.safetensors")
    return folder


def times_fifty(tensors: Tensors) -> None:
    tensors[part(2, "q")][SIZE : 2 * SIZE] *= 50


def in_another_dtype(tensors: Tensors) -> None:
    tensors |= {name: x.float() for name, x in tensors.items()}


def in_another_rotary_order(tensors: Tensors) -> None:
    for layer in range(LAYERS):
        for name in ("q", "k"):
            w = tensors[part(layer, name)]
            tensors[part(layer, name)] = w.unflatten(0, (-1, 2, SIZE // 2)).transpose(1, 2).reshape(w.shape)


def with_queries_rolled(tensors: Tensors) -> None:
    tensors[part(1, "q")] = tensors[part(1, "q")].roll(SIZE, 0)


def with_heads_in_another_order(tensors: Tensors) -> None:
    """The two groups change places, with their outputs."""
    for name in ("q", "k", "v"):
        tensors[part(1, name)] = tensors[part(1, name)].roll(len(tensors[part(1, name)]) // 2, 0)
    tensors[part(1, "o")] = tensors[part(1, "o")].roll(HEADS * SIZE // 2, 1)


def with_scales_moved(tensors: Tensors) -> None:
    for layer in range(LAYERS):
        tensors[part(layer, "q")] *= 4
        tensors[part(layer, "k")] /= 4


def merged(tensors: Tensors) -> None:
    draw = torch.Generator().manual_seed(0)
    for layer in range(LAYERS):
        for name in ("q", "v"):
            w = tensors[part(layer, name)]
            change = torch.randn(len(w), 4, generator=draw) @ torch.randn(4, w.shape[1], generator=draw)
            tensors[part(layer, name)] = (w + 0.2 * change * w.float().norm() / change.norm()).to(w.dtype)


def drawn_again(tensors: Tensors) -> None:
    draw = torch.Generator().manual_seed(0)
    for name, x in tensors.items():
        tensors[name] = (torch.randn(x.shape, generator=draw) * x.float().std()).to(x.dtype) if x.ndim > 1 else x


def with_layer_zeroed(tensors: Tensors) -> None:
    for name in ("v", "o"):
        tensors[part(3, name)].zero_()


VERDICTS = {
    in_another_dtype: ("dtype", "Another dtype alone: 56 of 56 tensors have the same numbers, rounded to another type"),
    in_another_rotary_order: (
        "rotary-order",
        "24 of 24 heads have equal products for tokens at one position, and other",
    ),
    with_queries_rolled: (
        "moved-heads",
        "4 of 24 heads have the queries of other heads of A: 1.0 from 1.3, 1.1 from 1.0",
    ),
    with_heads_in_another_order: ("permuted-heads", "4 of 24 heads are other heads of A, which changes nothing that"),
    with_scales_moved: ("equivalent", "No head changed, so what changed cancels: these weights do the same. 12 of 56"),
    merged: (
        "low-rank",
        "12 of 56 tensors changed: q_proj and v_proj (6 each, rank 4, by 20 % of their norm). 24 of 24",
    ),
    times_fifty: ("changed", "1 of 56 tensors changed: q_proj (rank 32, by "),
    drawn_again: ("another-model", "Another model: heads differ by 127 % (median)"),
    with_layer_zeroed: (
        "changed",
        "2 of 56 tensors changed: o_proj and v_proj (by 100 % of their norm). 4 of 24 heads differ by more than 1 % ",
    ),
}


@pytest.mark.parametrize("change", VERDICTS, ids=lambda x: x.__name__)
def test_the_verdict_says_what_was_done(change: Callable[[Tensors], object], tmp_path: Path, run: Run) -> None:
    name, words = VERDICTS[change]
    found = compare(DEMO, demo_with(tmp_path, change))
    document = json.loads(found.to_json())
    assert document["verdict"]["name"] == name
    assert words in document["verdict"]["sentence"] == found.verdict
    assert found.whole_conditions() == {"changed": f"changed: {found.verdict.rstrip('.')}"}
    shown = run("compare", DEMO, tmp_path)
    assert found.verdict in " ".join(shown.out.split())
    rows = [line.split()[2:] for line in shown.out.splitlines() if line.split()[:1] and line.split()[0].isdecimal()]
    assert not any({*row} == {"0.00"} for row in rows), "a row of zeros"


@pytest.mark.parametrize(
    ("change", "conditions", "status"),
    [
        (dict, "identical", 1),
        (dict, "changed, difference>0, fault", 0),
        (merged, "identical", 0),
        (merged, "changed", 1),
        (merged, "difference>0.5", 0),
        (merged, "difference_ov>0.1", 1),
        (in_another_rotary_order, "difference>0.5", 1),
        (in_another_rotary_order, "difference_qk_rotated>0.5", 1),
        (in_another_rotary_order, "difference_qk>0, difference_ov>0, fault", 0),
        (with_layer_zeroed, "silent", 1),
        (with_layer_zeroed, "fault", 1),
        (times_fifty, "fault", 1),
        (with_heads_in_another_order, "difference>0.01, difference_ov>0.01, fault", 0),
        (with_scales_moved, "difference>0.01, fault", 0),
        (in_another_dtype, "difference>0.5, fault, identical", 0),
    ],
)
def test_conditions_on_weights(
    change: Callable[[Tensors], object], conditions: str, status: int, tmp_path: Path, run: Run
) -> None:
    result = run("compare", DEMO, demo_with(tmp_path, change), "--fail-on", conditions)
    assert result.status == status, result.err
    assert len(result.err.splitlines()) == status


def test_whole_conditions_are_of_two(run: Run, tmp_path: Path) -> None:
    result = run("compare", DEMO, DEMO / "twin", demo_with(tmp_path, merged), "--fail-on", "identical")
    assert (result.status, "of two models alone, and these are 3" in result.err) == (2, True)


def test_another_setting_is_not_identical(tmp_path: Path) -> None:
    found = compare(DEMO, demo_with(tmp_path, dict, rope_parameters={"rope_type": "default", "rope_theta": 1e6}))
    assert found.verdict == "All 56 tensors have equal bytes, and config.json differs: rope_parameters."
    assert {(row.weights["qk"], row.weights["ov"]) for row in found.rows if row.weights} == {(0.0, 0.0)}
    assert min(row.weights["qk_rotated"] or 0 for row in found.rows if row.weights) > 0.1
    assert found.whole_conditions().keys() == {"changed"}


def test_a_fault_that_grew_tenfold_is_new(tmp_path: Path) -> None:
    def sharper(factor: float) -> Callable[[Tensors], object]:
        def change(tensors: Tensors) -> None:
            tensors |= {name: x.float() for name, x in tensors.items()}
            tensors[part(2, "q")][SIZE : 2 * SIZE] *= factor

        return change

    folders = [tmp_path / str(at) for at in range(3)]
    for folder, factor in zip(folders, (100.0, 950.0, 1050.0), strict=True):
        folder.mkdir()
        demo_with(folder, sharper(factor))
    for folder, new in zip(folders[1:], (False, True), strict=True):
        rows = compare(folders[0], folder).condition_rows()
        assert [row["head"] for row in rows if row["flags"]] == [1] * new
        assert {flag for row in rows for flag in row["flags"]} <= {"fault"}
    assert not any(row["flags"] for row in compare(folders[2], folders[0]).condition_rows())


def test_a_series_has_differences_from_the_one_before_and_from_the_first(tmp_path: Path, run: Run) -> None:
    folders = [DEMO]
    for at, change in enumerate((merged, in_another_rotary_order)):
        (tmp_path / f"step-{at}").mkdir()
        folders.append(demo_with(tmp_path / f"step-{at}", change))
    series = compare(*folders)
    pairs = [compare(a, b) for a, b in pairwise(folders)]
    ends = compare(folders[0], folders[2])
    for at, row in enumerate(series.records()):
        assert row["weights"] == ends.rows[at].weights
        assert [step["weights"] for step in row["between"]] == [pair.rows[at].weights for pair in pairs]
    values = series.trajectory()["runs"][0]["values"]["difference"]
    assert [step[2][1] for step in values] == pytest.approx(
        [0.0, pairs[0].rows[9].largest, ends.rows[9].largest], rel=1e-5
    )
    failed = run("compare", *folders, "--fail-on", "difference_qk_rotated>0.5")
    assert (failed.status, " from B to C" in failed.err) == (1, True)


def test_scans_with_values_and_without(tmp_path: Path) -> None:
    with_values, without = scan(DEMO, values=True), scan(demo_with(tmp_path, with_layer_zeroed))
    assert not any(row.gained for row in compare(with_values, without).rows)
    zeroed = scan(tmp_path, values=True)
    assert [row.gained for row in compare(with_values, zeroed).rows].count(("silent",)) == 4
    assert not any(row.gained or row.lost for row in compare(without, zeroed).rows)


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
