"""Names in files, folders and answers may hold what a terminal acts on: commands show it escaped, whatever they print."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import unicodedata
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

import locater
from locater.cli.shell import _Console
from locater.errors import LocaterError
from locater.redacted_and_escaped_text import escaped_output, one_line
from locater_lab.cli.train import ProgressLine
from tests import ROOT
from tests.commands.fleet_folders import checkpoint
from tests.conftest import Result
from tests.processes import python

Run = Callable[..., Result]
# colours, a link, a title, a bell, the start of the line, C1, writing directions, a command of GitHub, markup of rich
HOSTILE = "a\x1b[31m\x1b]8;;x:y\x07b\x1b]0;t\x07\r\x9b2J\x7f\u202e\u2066\u2028\n::error::c[/red][link=x]:cat:d"
DIRECTIONS = {"LRE", "RLE", "LRO", "RLO", "PDF", "LRI", "RLI", "FSI", "PDI"}


def acted_on(text: str) -> list[str]:
    """What a terminal would act on, by the tables of Unicode."""
    kinds = {c: (unicodedata.category(c), unicodedata.bidirectional(c)) for c in set(text) - set("\n\t")}
    return [c for c, (kind, way) in kinds.items() if kind in ("Cc", "Zl", "Zp", "Cs") or way in DIRECTIONS]


def assert_harmless(result: Result) -> None:
    printed = result.out + result.err
    assert "Traceback" not in printed
    assert "this is a bug" not in printed
    assert not acted_on(printed), printed
    joined = "".join(printed.split("\n"))  # long lines are folded anywhere
    assert not re.search(r"(?<!\\n)(?<!\\x0a)(?<! )::error", joined), f"a line of its own: {printed}"


@pytest.fixture
def folder(saved_llama: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(saved_llama, tmp_path / HOSTILE))


def test_folders(run: Run, folder: Path, saved_llama: Path, tmp_path: Path) -> None:
    for arguments in (
        ["scan", folder],
        ["scan", folder, "--json", tmp_path / f"{HOSTILE}.json"],
        ["scan", folder, "--fail-on", "M>-100"],
        ["compare", folder, folder],
        ["compare", folder, folder, folder],
        ["scan", folder / "missing"],
        ["probe", folder / "missing", "--text", folder / "missing"],
        ["probe", folder, "--text", tmp_path / HOSTILE / "missing"],
        ["explain", folder / "missing", "text"],
        ["explain", folder, "text"],
        ["watch", folder, "--json", "-"],
        ["fleet", folder / "missing", "--out", tmp_path / "out" / HOSTILE],
        ["scan", f"hf://{HOSTILE}"],
        ["scan", f"https://{HOSTILE}/x"],
        [HOSTILE],
        ["scan", folder, f"--{HOSTILE}"],
    ):
        result = run(*arguments)
        assert result.out or result.err, arguments
        assert_harmless(result)
    assert "\\u001b[31m" in run("scan", folder).out, "shown, and not left out"
    printed = run("compare", folder, saved_llama).out
    assert printed.startswith("A: ")
    assert "\nB: " in printed


def test_json_on_standard_output_keeps_the_names(run: Run, folder: Path) -> None:
    result = run("scan", folder, "--json", "-")
    assert_harmless(result)
    assert json.loads(result.out)["source"] == str(folder)


def test_names_in_weights(run: Run, folder: Path, tmp_path: Path) -> None:
    """Of tensors, of shards, of the base model of an adapter, of layers in a table."""
    tensors = load_file(folder / "model.safetensors")
    odd, index, adapter, many = (tmp_path / name for name in ("odd", "index", "adapter", "many"))
    for place in (odd, index, adapter, many):
        place.mkdir()
    save_file({**tensors, HOSTILE: torch.zeros(2)}, odd / "model.safetensors")
    raw = (odd / "model.safetensors").read_bytes()
    (odd / "cut.safetensors").write_bytes(raw[:-3])
    (odd / "dtype.safetensors").write_bytes(raw.replace(b'"F32"', b'"F99"', 1))
    (index / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {HOSTILE: f"{HOSTILE}.safetensors"}}))
    (adapter / "adapter_config.json").write_text(
        json.dumps({"peft_type": "LORA", "base_model_name_or_path": HOSTILE, "r": 1, "target_modules": ["q_proj"]})
    )
    save_file({HOSTILE: torch.zeros(2)}, adapter / "adapter_model.safetensors")
    torch.manual_seed(0)
    pairs = {f"{HOSTILE}.{i}.{x}": torch.randn(16, 16) for i in range(60) for x in "qk"}
    save_file(pairs, many / "model.safetensors")
    torch.save(pairs, many / f"{HOSTILE.replace(chr(47), chr(58))}.bin")
    for arguments in (
        [odd / "cut.safetensors"],
        [odd / "dtype.safetensors"],
        [odd / "model.safetensors"],
        [index],
        [adapter],
        [many],
        [many, "--query", f"{HOSTILE}.*.q", "--key", f"{HOSTILE}.*.k", "--heads", "2"],
        [
            many / f"{HOSTILE.replace(chr(47), chr(58))}.bin",
            "--query",
            f"{HOSTILE}.*.q",
            "--key",
            f"{HOSTILE}.*.k",
            "--heads",
            "2",
        ],
    ):
        assert_harmless(run("scan", *arguments))
    assert run("scan", *arguments).status == 0


def test_colours_are_sent_and_names_are_not(run: Run, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    printed = run("compare", folder, folder).out
    assert "\x1b[1m" in printed, "bold, for a terminal"
    assert not {"\x07", "\r", "\x9b", "\x7f", "\u202e", "\u2066"} & {*printed}
    assert "\x1b]" not in printed


def test_documents(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    """What scan --json wrote may come from elsewhere."""
    path = tmp_path / "scan.json"
    document = locater.scan(saved_llama).to_dict()
    document["source"] = HOSTILE
    document["assumptions"]["notes"] = [HOSTILE]
    for layer in document["layers"]:
        layer["name"] = HOSTILE
    path.write_text(json.dumps(document))
    changed = json.loads(path.read_text())
    for head in changed["heads"]:
        head["M"] = head["M"] + 1 if isinstance(head.get("M"), float) else head.get("M")
    (tmp_path / "b.json").write_text(json.dumps(changed))
    (tmp_path / "c.json").write_text(path.read_text().replace(":cat:", ":dog:"))
    for others in ([tmp_path / "b.json"], [tmp_path / "b.json", tmp_path / "c.json"]):
        result = run("compare", path, *others)
        assert result.status == 0, result
        assert_harmless(result)


def test_fleets(run: Run, tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    assert_harmless(run("fleet", checkpoint(tmp_path / HOSTILE / "step-0", seed=0), "--out", tmp_path / "none"))
    place = tmp_path / "[/red][link=x]:cat:"  # a fleet refuses what cannot be printed, but this can
    steps = [checkpoint(place / f"step-{i}", seed=i) for i in range(3)]
    save_file({HOSTILE: torch.zeros(2)}, steps[2] / "model.safetensors")
    raw = (steps[2] / "model.safetensors").read_bytes()
    (steps[2] / "model.safetensors").write_bytes(raw.replace(b'"F32"', b'"F99"'))
    out = tmp_path / f"heads{HOSTILE}"
    for arguments in (
        [*steps, "--out", out, "--workers", "0"],
        [*steps, "--out", out, "--workers", "0", "--fail-on", "M>-100"],
        [out],
        [out, "--status"],
        [out, "--report", tmp_path / "heads.html"],
    ):
        result = run("fleet", *arguments)
        assert result.out, result
        assert_harmless(result)
    damaged = next(out.glob("*.parquet"))
    damaged.write_bytes(damaged.read_bytes()[:-9])
    assert_harmless(run("fleet", out))


def test_the_log_of_a_run(run: Run, tmp_path: Path) -> None:
    log = tmp_path / "run.jsonl"
    lines = next((ROOT / "tests/golden/files-0.2/run").glob("*.jsonl")).read_text().splitlines()
    header = json.loads(lines[0])
    header["source"] = HOSTILE
    log.write_text("\n".join([json.dumps(header), *lines[1:]]) + "\n")
    for others in ([], [log]):
        result = run("watch", log, *others, "--json", tmp_path / "out.json")
        assert result.status == 0, result
        assert_harmless(result)


def test_what_is_warned_of_and_logged() -> None:
    """In a process of its own: pytest keeps warnings for itself."""
    code = (
        "import logging, sys, warnings\n"
        "from locater.redacted_and_escaped_text import escaped_output\n"
        "with escaped_output():\n"
        "    warnings.warn(sys.argv[1])\n"
        "    logging.getLogger('locater').warning(sys.argv[1])\n"
        "    print(sys.argv[1])\n"
    )
    environment = {"PYTHONPATH": str(ROOT / "src"), "PYTHONUTF8": "1"}
    command = [python(), "-c", code, HOSTILE]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, encoding="utf-8", check=True)
    assert not acted_on(done.stdout + done.stderr)
    assert (done.stdout + done.stderr).count("\\u001b[31m") == 3
    assert "\n" not in one_line(HOSTILE)


def test_progress_still_rewrites_its_line(capsys: pytest.CaptureFixture[str]) -> None:
    with escaped_output():
        live = ProgressLine(label=HOSTILE)
        live.terminal = True
        live.clear()
    assert capsys.readouterr().err == "\r\x1b[K"


def test_text_of_tables(capsys: pytest.CaptureFixture[str]) -> None:
    from rich.table import Table
    from rich.text import Text

    table = Table(HOSTILE.replace("[/red]", ""), title=HOSTILE.replace("[/red]", ""))
    table.add_row(Text(HOSTILE))
    _Console(width=300).print(table)
    assert not acted_on(capsys.readouterr().out)


def test_a_traceback_is_escaped_too(folder: Path) -> None:
    command = [python(), "-m", "locater", "--debug", "scan", str(folder / "missing")]
    done = subprocess.run(command, env={"PYTHONPATH": str(ROOT / "src")}, capture_output=True, text=True)
    assert "Traceback" in done.stderr
    assert not acted_on(done.stderr)
    assert LocaterError.__name__ in done.stderr
