"""Golden files: commands still give the numbers they gave, names still mean what they meant, old files are still read.

docs/golden.md says how the files are made, and what to write where a key is renamed on purpose.
"""

from __future__ import annotations

import copy
import io
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

import locater
from locater.theory import expected_entropy
from tests.golden import code, comparing, keys
from tests.golden.documents import DOCUMENTS, FILES, FOLDER, NAMES, PAPER_RUNS, Document, make, names

PLAIN = next(document for document in DOCUMENTS if document.name == "train-plain")
KEPT = {"bao2024": 514, "mechanisms": 461}


def checked(document: Document, now: Any) -> None:
    found = comparing.problems(document.golden(), now, document.kind, document.name)
    assert not found, comparing.report(document.name, found)


@pytest.mark.parametrize("document", [pytest.param(d, id=d.name, marks=[pytest.mark.slow] * d.slow) for d in DOCUMENTS])
def test_a_command_gives_what_it_gave(document: Document) -> None:
    if why := document.lacks():
        pytest.skip(why)
    checked(document, make(document))


def test_no_golden_file_is_left_over_and_all_are_small() -> None:
    assert {path.stem for path in FOLDER.glob("*.json")} == {d.name for d in DOCUMENTS} | {NAMES.stem}
    assert sum(path.stat().st_size for path in FOLDER.glob("*.json")) < 1_500_000
    assert sum(path.stat().st_size for path in FILES.rglob("*") if path.is_file()) < 400_000


# ---- the comparison itself ----


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda document: document.name)
def test_one_percent_is_seen(document: Document, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every number, but for those that measure rounding errors and the few as good as 0. Means of digests have a
    test below.
    """
    golden = document.golden()
    for table in ("RENAMED", "CHANGED"):
        monkeypatch.setattr(keys, table, {})  # a golden document has its old keys and values
    assert comparing.problems(golden, copy.deepcopy(golden), document.kind, document.name) == []
    leaves = [
        (path, leaf, comparing.tolerance_of(path, document.kind, document.name))
        for path, leaf in comparing.leaves(golden)
    ]
    numbers = [held for held in leaves if isinstance(held[1].value, float) and held[1].value and not held[1].scale]
    blind = [
        held for held in numbers if not comparing.difference(held[1], comparing.Leaf(held[1].value * 1.01), held[2])
    ]
    small = [path for path, leaf, allowed in blind if abs(leaf.value) < 101 * allowed.absolute]
    assert [path for path, _, allowed in blind if path not in small and allowed.relative < 0.01] == []
    assert len(small) <= max(3, 0.03 * len(numbers)), f"{len(small)} of {len(numbers)}: {small}"


@pytest.fixture
def scan() -> Any:
    return json.loads((FOLDER / "scan-demo.json").read_text())


def test_what_changed_is_named(scan: Any) -> None:
    now = copy.deepcopy(scan)
    now["heads"][9]["M"] *= 1.01
    now["heads"][2]["flags"] = ["sharp"]
    now["heads"][3]["width"] += 1
    now["assumptions"]["weights"] = "others"
    found = comparing.problems(scan, now, "scan")
    assert [line.split(":")[0] for line in found] == [
        "assumptions.weights",
        "heads[0.2].flags",
        "heads[0.3].width",
        "heads[2.1].M",
    ]
    assert "9.9e-03 apart, 0.0001 is allowed" in found[-1]


def test_a_row_or_key_that_is_gone_or_new_is_named(scan: Any) -> None:
    now = copy.deepcopy(scan)
    del now["heads"][5], now["assumptions"]["length"], now["heads"][0]["M"]
    now["heads"][1]["more"] = 1.0
    found = comparing.problems(scan, now, "scan")
    assert [line.split(";")[0] for line in found] == [
        "assumptions.length: is gone", "heads[0.0].M: is gone", "heads[0.1].more: is new", "heads[1.1]: is gone"
    ]  # fmt: skip
    assert comparing.report("scan-demo", found).startswith(
        "scan-demo differs from tests/golden/scan-demo.json at 4 places:\n"
    )


def test_what_is_written_down_is_excused(scan: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    now = copy.deepcopy(scan)
    now["rows"] = [{"logit_mean": head.pop("M"), **head, "more": 1} for head in now.pop("heads")]
    now["assumptions"]["weights"] = "others"
    del now["assumptions"]["length"]
    monkeypatch.setattr(keys, "RENAMED", {"scan": {"heads[*].M": "rows[*].logit_mean", "heads": "rows"}})
    monkeypatch.setattr(keys, "NEW", {"scan": ("rows[*].more",)})
    monkeypatch.setattr(keys, "GONE", {"scan": ("assumptions.length",)})
    monkeypatch.setattr(keys, "REWORDED", {"scan-demo": ("assumptions.weights",)})
    monkeypatch.setattr(keys, "CHANGED", {"scan": {"schema": 7}})
    now["schema"] = 7
    assert comparing.problems(scan, now, "scan", "scan-demo") == []
    now["rows"][0]["logit_mean"] *= 1.01
    now["assumptions"]["weights"] = None
    now["schema"] = 8
    assert [line.split(":")[0] for line in comparing.problems(scan, now, "scan", "scan-demo")] == [
        "assumptions.weights", "rows[0.0].logit_mean", "schema"
    ]  # fmt: skip


def test_a_digest_sees_a_change_and_an_order() -> None:
    values = [0.5 + (7 * n % 100) for n in range(100)]
    stored = comparing.compact({"x": values, "y": 1.23456789}, "scan")
    assert stored["x"][comparing.DIGEST] == 100
    assert stored["y"] == 1.234568
    for other in ([*values[:-1], values[-1] * 1.5], sorted(values), values[1:]):
        assert comparing.problems(stored, comparing.compact({"x": other, "y": 1.234568}, "scan"), "scan")


# ---- names that are data ----


def test_no_name_disappears() -> None:
    """Claims with what they state, controls and mechanisms with their defaults, plan fields, commands and options,
    columns, flags.
    """
    found = comparing.problems(json.loads(NAMES.read_text()), json.loads(json.dumps(names())), "names")
    assert not found, comparing.report("names", found)


@pytest.mark.parametrize("name", PAPER_RUNS)
def test_every_kept_run_is_found_by_its_key(name: str) -> None:
    lines = [json.loads(text) for text in PAPER_RUNS[name].read_text().splitlines()]
    runs, seen = code.Runs(PAPER_RUNS[name]), set()
    for number, line in enumerate(lines, 1):
        row = code.Row(line["claim"], line["arm"], code.Plan.from_dict(line["options"]))
        assert row.options == line["options"], f"{PAPER_RUNS[name]}: line {number} is another plan now"
        assert runs.of(row) == line, f"{PAPER_RUNS[name]}: line {number} is not found by its key, or is there twice"
        seen.add(row.key)
    assert len(lines) == len(seen) == len(runs.lines) == KEPT[name]


# ---- files that an earlier version left ----


def test_an_old_scan_is_compared() -> None:
    found = locater.compare(str(FILES / "scan.json"), str(FILES / "scan.json"))
    assert found.aligned
    assert len(found.rows) == 4
    assert {value for row in found.rows for value in row.difference.values()} <= {0.0, None}
    again = locater.compare(str(FILES / "scan.json"), str(FILES / "run" / "step-00000010"))
    assert max(abs(value) for row in again.rows for value in row.difference.values() if value is not None) < 1e-5


def test_old_statistics_are_read() -> None:
    found = locater.Statistics.load(FILES / "statistics.pt")
    assert [(x.layer, x.name, x.covariance.shape) for x in found.inputs] == [
        (n, f"model.layers.{n}.self_attn", (16, 16)) for n in range(2)
    ]  # fmt: skip
    assert locater.scan(FILES / "run" / "step-00000010", statistics=found).assumptions["prediction"] == "predicted"


def test_an_old_log_is_read() -> None:
    found, golden = code.read_run(FILES / "run"), PLAIN.golden()["log"]
    assert [step for step, _ in found.losses] == list(range(1, 13))
    assert found.last == 12
    assert [loss for _, loss in found.losses] == pytest.approx([loss for _, loss in golden["losses"][:12]], rel=1e-3)


def test_an_old_run_goes_on_where_it_was_cut_off(tmp_path: Path) -> None:
    """To the numbers of a run that was not cut off; its log says where it went on."""
    shutil.copytree(FILES / "run", tmp_path / "run")
    checked(PLAIN, make(PLAIN, tmp_path / "run"))
    assert code.read_run(tmp_path / "run").resumed == (11,)


def test_an_old_result_is_read_back(tmp_path: Path) -> None:
    """A finished run is not trained again."""
    shutil.copytree(FILES / "finished", tmp_path / "run")
    code.command(
        "train", "--plan", tmp_path / "run" / "plan.json", "--out", tmp_path / "run", "--json", tmp_path / "result.json"
    )
    golden, now = (
        comparing.compact({"result": x}, "train")
        for x in (PLAIN.golden()["result"], json.loads((tmp_path / "result.json").read_text()))
    )
    assert comparing.problems(golden, now, "train") == []
    assert not (tmp_path / "run" / "model").exists()


def test_an_old_checkpoint_is_probed(tmp_path: Path) -> None:
    code.command(
        "probe",
        FILES / "run" / "step-00000010",
        "--text",
        "LICENSE",
        "--length",
        32,
        "--tokens",
        256,
        "--json",
        tmp_path / "x.json",
    )
    assert len(json.loads((tmp_path / "x.json").read_text())["heads"]) == 4


def test_old_pages_can_be_made(tmp_path: Path) -> None:
    """`watch` of a log, `compare` and a page of scans."""
    code.command("watch", FILES / "run", "--report", tmp_path / "run.html", "--json", tmp_path / "run.json")
    assert "locater" in (tmp_path / "run.html").read_text()
    assert json.loads((tmp_path / "run.json").read_text())["schema"] == 1
    found = locater.Scan.load(FILES / "scan.json")
    found.report(tmp_path / "scan.html")
    assert found.verdicts
    assert "plane" in (tmp_path / "scan.html").read_text()


def test_statistics_of_a_file_from_the_command_line(tmp_path: Path) -> None:
    said = code.command(
        *("scan", FILES / "run" / "step-00000010", "--statistics", FILES / "statistics.pt"),
        "--json",
        tmp_path / "x.json",
    )
    assert json.loads((tmp_path / "x.json").read_text())["assumptions"]["prediction"] == "predicted", said


def test_an_old_fleet_is_read_and_goes_on(tmp_path: Path) -> None:
    """Shown, asked, one scan of it compared with the scan of today; a new checkpoint is added to it."""
    pytest.importorskip("pyarrow")
    shutil.copytree(FILES / "fleet", tmp_path / "fleet")
    fleet = locater.Fleet(tmp_path / "fleet")
    done = {Path(entry.source).name: entry for entry in fleet.sources()}
    assert {entry.status for entry in done.values()} == {"done"}
    assert [done[name].heads for name in ("step-00000010", "demo", "twin")] == [4, 24, 24]
    assert done["demo"].digest != done["twin"].digest
    again = locater.compare(fleet.scan(done["demo"].source), locater.scan(code.MODELS["demo"]))
    for row in again.rows:  # 0.2 drew Λ of heads with few directions at random, within 0.004
        apart = {name: abs(x) for name, x in row.difference.items() if x is not None}
        assert apart.pop("localization") < 4e-3
        assert max(apart.values()) < 1e-5
    fleet.report(tmp_path / "fleet.html")
    code.command("fleet", tmp_path / "fleet", "--json", tmp_path / "fleet.json")
    shown = json.loads((tmp_path / "fleet.json").read_text())
    assert [len(run["flags"]) > 0 for run in shown["runs"]]
    code.command(
        "fleet", FILES / "run" / "step-00000010", "--out", tmp_path / "fleet", "--workers", 0, "--json", tmp_path / "y"
    )
    assert len(locater.Fleet(tmp_path / "fleet").sources()) == 4


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("scan", ("scan", "--eigenvalues")),
        ("probe", ("probe", "--text", "LICENSE", "--length", 32, "--tokens", 256)),
        ("explain", ("explain", "--prompt", "the licence")),
    ],
)
def test_a_document_of_today_has_all_keys_of_an_old_one(name: str, command: tuple[Any, ...], tmp_path: Path) -> None:
    """As long as `schema` stays, a reader that was written for 0.2 finds what it reads."""
    first, *options = command
    code.command(first, FILES / "run" / "step-00000010", *options, "--json", tmp_path / "now.json")
    before, now = json.loads((FILES / f"{name}.json").read_text()), json.loads((tmp_path / "now.json").read_text())
    if before["schema"] == now["schema"]:
        assert key_paths(before) <= key_paths(now)
    else:
        assert now["schema"] > before["schema"]


def key_paths(document: Any, path: str = "") -> set[str]:
    """`heads[].flags` and the like; the names of columns inside `changes` and of roles are data too. A list of texts or
    numbers, such as notes, has no keys and may be empty.
    """
    if isinstance(document, list):
        inner = (item for item in document if isinstance(item, dict | list))
        return {found for item in inner for found in key_paths(item, f"{path}[]")}
    if not isinstance(document, dict):
        return {path}
    return {found for key, item in document.items() for found in {f"{path}.{key}", *key_paths(item, f"{path}.{key}")}}


def test_old_files_of_results_are_no_scans() -> None:
    """A comparison, a probe or an explanation in the place of a scan is named."""
    for name in ("compare", "probe", "explain"):
        with pytest.raises(locater.LocaterError, match=rf"{name}\.json"):
            locater.compare(str(FILES / f"{name}.json"), str(FILES / "scan.json"))


# ---- files of version 0.2, whose scans have another expected entropy ----


def test_a_scan_of_version_0_2_is_read_with_its_numbers_and_a_label(tmp_path: Path) -> None:
    """Its H is log T - v/2, and everything that shows the scan says so; saved again it keeps the label."""
    stored = json.loads((FILES / "scan.json").read_text())
    found = locater.Scan.load(FILES / "scan.json")
    assert [row.expected_entropy for row in found.rows] == [head["expected_entropy"] for head in stored["heads"]]
    assert [list(row.flags) for row in found.rows] == [head["flags"] for head in stored["heads"]]
    assert found.old
    found.save(tmp_path / "again.json")
    assert json.loads((tmp_path / "again.json").read_text())["schema"] == 2
    assert locater.Scan.load(tmp_path / "again.json") == found
    found.report(tmp_path / "page.html")
    assert "by the old formula log T - v/2" in (tmp_path / "page.html").read_text()
    assert "by the old formula" not in locater.scan(code.MODELS["demo"]).page()
    both = locater.compare(found, locater.Scan.load(tmp_path / "again.json"))
    assert both.a.old, "two of one kind stay as they are"
    assert max(abs(x) for row in both.rows for x in row.difference.values() if x is not None) == 0


def test_an_old_scan_beside_a_new_one_has_its_entropy_and_flags_computed_again(tmp_path: Path) -> None:
    """So that a difference is one of models and not of formulas."""
    new = locater.scan(code.MODELS["demo"])
    document = new.to_dict() | {"schema": 1}
    for head in document["heads"]:
        v = head["F"] + head["key_bias"] ** 2
        head["expected_entropy"] = max(0.0, math.log(256) - v / 2)
        head["flags"] = ["few-directions"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    for first, second in ((tmp_path / "old.json", new), (new, tmp_path / "old.json")):
        found = locater.compare(first, second)
        assert {x for row in found.rows for x in (*row.difference.values(), *row.gained, *row.lost)} <= {0.0, None}
        assert [found.a.old, found.b.old] == [False, False]
        said = io.StringIO()
        found.show(Console(file=said, width=400))
        assert "of version 0.2 or before: expected entropy and flags computed again" in said.getvalue()
    series = locater.compare(tmp_path / "old.json", code.MODELS["demo"], new)
    assert {x for pair in series.pairs for row in pair.rows for x in (*row.gained, *row.lost)} == set()


def test_a_fleet_of_version_0_2_means_what_a_new_one_means(tmp_path: Path) -> None:
    """Rows, frames, queries and scans of its parts have the entropy and flags of this version."""
    pytest.importorskip("pyarrow")
    shutil.copytree(FILES / "fleet", tmp_path / "fleet")
    fleet = locater.Fleet.open(tmp_path / "fleet")
    rows, frame = list(fleet.records()), fleet.to_arrow().to_pylist()
    queried = fleet.sql("select expected_entropy, flags from heads order by source, layer, head").fetchall()
    assert len(rows) == len(frame) == len(queried) > 0
    for row, same in zip(rows, frame, strict=True):
        v = row["F"] + row["key_bias"] ** 2
        assert row["expected_entropy"] == pytest.approx(expected_entropy(v, fleet.settings.length).item(), abs=1e-9)
        assert (same["expected_entropy"], same["flags"]) == (row["expected_entropy"], row["flags"])
        assert not {"few-directions", "repels-itself"} & {*row["flags"]}
    at = sorted(rows, key=lambda row: (row["source"], row["layer"], row["head"]))
    assert [x[0] for x in queried] == [row["expected_entropy"] for row in at]
    source = rows[0]["source"]
    kept = [row.expected_entropy for row in fleet.scan(source).rows]
    assert kept == [row["expected_entropy"] for row in rows if row["source"] == source]
    assert "expected entropy" in next(iter(fleet.scan(source).assumptions["notes"]))
