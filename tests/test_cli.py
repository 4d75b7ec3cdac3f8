"""The commands as a user meets them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from locater.findings import FLAGS, flags_of
from tests.conftest import Result

Run = Callable[..., Result]


def test_demo(run: Run) -> None:
    result = run("demo")
    assert result.status == 0, result.err
    assert "24 heads in 6 attention layers" in result.out
    assert "From weights only; not measured on data." in result.out


def test_the_demo_sets_its_model_beside_a_twin(run: Run, tmp_path: Path) -> None:
    page = tmp_path / "twin.html"
    result = run("demo", "--twin", str(page))
    assert result.status == 0
    assert "its twin, python scripts/train_demo.py --control" in result.out
    assert page.is_file()
    only = run("demo", "--json", "-")
    assert "twin" not in only.out
    assert (
        run("demo", "--report", str(page), "--twin", str(page)).err == f"locater: --twin {page}: give the page of both a file of its own\n"
    )


def test_scan_writes_what_it_prints(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    result = run("scan", saved_llama, "--json", tmp_path / "a.json")
    assert result.status == 0
    assert f"Data written to {tmp_path / 'a.json'}" in result.out
    document = json.loads((tmp_path / "a.json").read_text())
    assert document == json.loads(run("scan", saved_llama, "--json", "-").out)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["a.json"]


def test_flagged_heads_come_first(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    tensors = load_file(saved_llama / "model.safetensors")
    tensors["model.layers.2.self_attn.q_proj.weight"][8:16] *= 100  # head 1 of the last layer
    (tmp_path / "config.json").write_text((saved_llama / "config.json").read_text())
    save_file(tensors, tmp_path / "model.safetensors")
    result = run("scan", tmp_path, "--fail-on", "sharp")
    assert result.status == 1
    assert "1 heads cross --fail-on, first sharp at layer 2 head 1" in result.err
    lines = [line.split() for line in result.out.splitlines()]
    first = lines[next(i for i, line in enumerate(lines) if line[:2] == ["layer", "head"]) + 1]
    assert first[:2] == ["2", "1"]
    assert "sharp" in first


def test_fail_on_a_bound(run: Run, saved_llama: Path) -> None:
    assert run("scan", saved_llama, "--fail-on", "stable_rank<0").status == 0
    assert run("scan", saved_llama, "--fail-on", "stable_rank>=1, nonfinite").status == 1


def test_a_line_per_layer_when_wide(run: Run, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 16, 64, batch_first=True), 4)
    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, tmp_path / "model.safetensors")
    out = run("scan", tmp_path, "--heads", 16).out
    assert "medians by layer" in out
    assert "layers.3.self_attn" in out
    assert "every head" not in out


def test_help_names_every_option(run: Run) -> None:
    text = run("scan", "--help").out
    for option in ("--json", "--eigenvalues", "--raw", "--length", "--fail-on", "--query", "--key", "--heads"):
        assert option in text


def test_version_and_usage(run: Run) -> None:
    from locater import __version__

    assert run("--version").out == f"locater {__version__}\n"
    assert run("scan").status == 2
    assert run("fly").status == 2


def test_installed_command_and_broken_pipe_of_json(saved_llama: Path) -> None:
    """The real entry point in its own process: clean JSON on standard output, nothing on standard error."""
    done = subprocess.run(
        [sys.executable, "-m", "locater.cli", "scan", str(saved_llama), "--json", "-"], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (0, "")
    assert len(json.loads(done.stdout)["heads"]) == 12


def test_importing_needs_no_extra() -> None:
    """`import locater` must not pull the libraries of the extras, nor the command line's."""
    code = "import sys, locater; print([m for m in ('transformers', 'rich', 'typer', 'pandas', 'scipy') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


ROWS = {
    "nonfinite": {"finite": False},
    "uniform": {"F": 0.004, "key_bias": 0.05},
    "sharp": {"F": 4.0, "key_bias": 3.0},
    "repels-itself": {"M": -1.01},
    "antisymmetric": {"S": -0.6, "F": 1.0},
    "few-directions": {"skew": -0.8},
    "exploding": {"max_logit": 201.0},
    "locked": {"entropy_ratio": 0.09},
    "sink": {"sink": 0.91},
}
JUST_NOT = {
    "nonfinite": {"finite": True},
    "uniform": {"F": 0.006, "key_bias": 0.07},
    "sharp": {"F": 4.0, "key_bias": 2.6},
    "repels-itself": {"M": -0.99},
    "antisymmetric": {"S": -0.49, "F": 1.0},
    "few-directions": {"skew": 0.74},
    "exploding": {"max_logit": 199.0},
    "locked": {"entropy_ratio": 0.11},
    "sink": {"sink": 0.89},
}


@pytest.mark.parametrize("flag", FLAGS, ids=lambda f: f.name)
def test_flags_are_raised_on_their_side_of_the_threshold(flag) -> None:  # type: ignore[no-untyped-def]
    assert flag.name in flags_of(ROWS[flag.name], length=256)
    assert flag.name not in flags_of(JUST_NOT[flag.name], length=256)
    assert flags_of({}, length=256) == ()


def test_interruption_leaves_nothing_behind(run: Run, saved_llama: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C in the middle of a scan, and in the middle of writing: status 130, no traceback, no file and no half of one."""
    import os

    from locater import scan as module_function

    def stop(*args: object, **kwargs: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(sys.modules[module_function.__module__], "effective", stop)
        result = run("scan", saved_llama, "--json", tmp_path / "a.json", "--report", tmp_path / "a.html")
    assert result.status == 130
    assert "Traceback" not in result.err
    with monkeypatch.context() as patch:
        patch.setattr(os, "replace", stop)
        result = run("scan", saved_llama, "--report", tmp_path / "a.html")
    assert result.status == 130
    assert list(tmp_path.iterdir()) == []


def test_report_and_compare_from_the_command_line(run: Run, saved_llama: Path, tmp_path: Path) -> None:
    assert run("scan", saved_llama, "--report", tmp_path / "a.html", "--json", tmp_path / "a.json").status == 0
    assert (tmp_path / "a.html").read_text().startswith("<!doctype html>")
    result = run("compare", tmp_path / "a.json", saved_llama, "--report", tmp_path / "b.html", "--json", "-")
    assert result.status == 0, result.err
    document = json.loads(result.out)
    assert document["aligned"]
    assert all(head["difference"]["trace"] == 0 for head in document["heads"])
    assert run("compare", tmp_path / "a.html", saved_llama).status == 2


def test_shards_from_the_command_line(run: Run, saved_llama: Path) -> None:
    found = [json.loads(run("scan", saved_llama, "--shard", f"{i}/2", "--json", "-").out) for i in (1, 2)]
    assert [len(part["heads"]) for part in found] == [4, 8]
    for wrong in ("0/2", "3/2", "2", "a/b"):
        assert run("scan", saved_llama, "--shard", wrong).status == 2


def test_importing_the_package_stays_light() -> None:
    import subprocess
    import sys

    code = "import sys, locater; print(sorted({'torch._dynamo', 'transformers', 'lightning', 'pandas', 'triton'} & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
