"""The table of benchmarks and its page: made by the command, from the results that are kept."""

from __future__ import annotations

import ast
import json
import re
from typing import Any

import pytest

from tests import ROOT, benchmark

RUN, PAGE, LINES = benchmark("run"), benchmark("performance_page"), benchmark("lines")
RESULTS = RUN["read"](ROOT / "benchmarks" / "results")


def test_the_page_is_what_the_command_makes() -> None:
    way = "python benchmarks/run.py --page"
    assert (ROOT / "docs" / "performance.md").read_text(encoding="utf-8") == PAGE["page"](RESULTS), way
    picture = (ROOT / "docs" / "images" / "performance-length.svg").read_text(encoding="utf-8")
    assert picture == PAGE["picture"](RESULTS["attention"]), way


def test_every_aim_is_met_or_says_what_stands_in_the_way() -> None:
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    for line in (line for lines in LINES["LINES"].values() for line in lines):
        value = line.value(RESULTS.get(line.results))
        if line.met(value) is False:
            (entry,) = [x for x in text.splitlines() if x.startswith(f"- **{line.what}**") and line.aim_words() in x]
            assert re.search(r"\d", entry.split(line.aim_words())[1]), "a measurement"


def test_every_benchmark_has_lines_results_and_the_same_options() -> None:
    """Its options are those of `common.command_line`, or a part for each device and --out."""
    for one in RUN["BENCHMARKS"]:
        source = (ROOT / "benchmarks" / f"{one.name}.py").read_text()
        assert "command_line(__doc__" in source or '"--out"' in source, one.name
        if "gpu" in one.devices and one.flag:
            assert "--gpu" in source, one.name
    scripts = {path.stem for path in (ROOT / "benchmarks").glob("*.py") if "def main()" in path.read_text()}
    others = {
        "attention_tuning",
        "rivals",
    }  # variants of a kernel; other people's packages, in an environment of their own
    assert scripts - others == {one.name for one in RUN["BENCHMARKS"]} | {"run"}
    files = {one.results(device) for one in RUN["BENCHMARKS"] for device in one.devices}
    files |= {"checkpoint-busy", "checkpoint-one-thread"}  # other options
    assert {line.results for lines in LINES["LINES"].values() for line in lines} <= files


def test_results_name_the_machine_and_torch() -> None:
    for one in RUN["BENCHMARKS"]:
        for device in one.devices:
            found = RESULTS.get(one.results(device))
            if found is not None:
                machine = found.get("machine", found.get("gpu"))
                assert "torch" in (machine if isinstance(machine, dict) else found), one.name
                words = machine["cpu"] if isinstance(machine, dict) else machine
                assert words, one.name


def test_the_table_shows_last_now_and_change() -> None:
    Line = LINES["Line"]
    line = Line("a scan", "-", "scan", lambda r: r["seconds"], "s", 1.0)
    other = Line("another", "this", "other", lambda r: r["missing"], aim=2, at_least=True)
    rows = RUN["table"]([line, other], {"scan": {"seconds": 2.0}}, {"scan": {"seconds": 1.0}, "other": {}})
    assert rows == [
        ("a scan", "-", "at most 1.00 s", "2.00 s", "1.00 s", "-50 %"),
        ("another", "this", "at least 2.00", "-", "-", "-"),
    ]
    assert line.met(1.004)
    assert line.met(1.01) is False
    assert other.met(1.99) is False
    assert other.met(None) is None
    assert RUN["align_columns"]([RUN["HEADER"], *rows]).splitlines()[2].startswith("a scan")


def test_a_benchmark_that_fails_is_named_and_stops_no_other(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "good.py").write_text(
        "import json, sys\nopen(sys.argv[-1], 'w').write(json.dumps({'seconds': 3.0, 'options': sys.argv[1:-2]}))\n"
    )
    (tmp_path / "bad.py").write_text("raise SystemExit('no such card')\n")
    one = RUN["Benchmark"]
    run = RUN["run"]
    monkeypatch.setitem(run.__globals__, "HERE", tmp_path)
    monkeypatch.setitem(run.__globals__, "BENCHMARKS", (one("bad", ("gpu",)), one("good", ("cpu", "gpu"))))
    out = tmp_path / "out"
    out.mkdir()
    assert run("gpu", [], True, out) == ["bad: no such card"]
    assert json.loads((out / "good-gpu.json").read_text()) == {"seconds": 3.0, "options": ["--gpu", "--quick"]}
    assert not (out / "bad.json").exists()
    assert "good: done" in capsys.readouterr().err


def test_no_script_has_helpers_of_its_own_for_what_is_shared() -> None:
    """Names of `common.py` are defined once; attention and mechanisms stand by themselves."""
    shared = {node.name for node in _functions("common")}
    for path in (ROOT / "benchmarks").glob("*.py"):
        if path.stem not in (
            "common",
            "attention",
            "attention_tuning",
            "binary_products",
            "mechanisms",
        ):
            assert not shared & {node.name for node in _functions(path.stem)} - {"peak", "machines"}, path.name


def _functions(name: str) -> list[ast.FunctionDef]:
    tree = ast.parse((ROOT / "benchmarks" / f"{name}.py").read_text())
    return [node for node in tree.body if isinstance(node, ast.FunctionDef)]
