"""action.yml: parsed, and its shell steps run as GitHub runs them. tests/test_workflows.py has the workflows."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

import locater
from tests.processes import python

ROOT = Path(__file__).parents[2]
ACTION = yaml.safe_load((ROOT / "action.yml").read_text())
DEMO = Path(str(locater.__file__)).parent / "demo"


def filled(text: str, inputs: dict[str, str]) -> str:
    """`${{ inputs.NAME }}` replaced, and nothing else accepted."""
    text = re.sub(r"\$\{\{ inputs\.([\w-]+) \}\}", lambda found: inputs[found[1]], text)
    assert "${{" not in text, text
    return text


def run_action(folder: Path, **given: str) -> subprocess.CompletedProcess[str]:
    """The steps with `install: false`, each in bash as composite actions run it; the last one's result."""
    defaults = {name: entry["default"] for name, entry in ACTION["inputs"].items() if "default" in entry}
    inputs = {**defaults, "install": "false", **{name.replace("_", "-"): value for name, value in given.items()}}
    steps = [step for step in ACTION["runs"]["steps"] if inputs["install"] == "true" or "if" not in step]
    assert [step["name"] for step in steps] == ["Doctor and scan"]
    runner = {
        "GITHUB_STEP_SUMMARY": folder / "summary.md",
        "GITHUB_OUTPUT": folder / "output.txt",
        "RUNNER_TEMP": folder,
        "GITHUB_ACTION_PATH": ROOT,
        "PYTHONPATH": ROOT / "src",
        "PATH": f"{Path(python()).parent}{os.pathsep}{os.environ['PATH']}",
        "OMP_NUM_THREADS": "1",
    }
    step = steps[-1]
    env = {**os.environ, **{name: str(value) for name, value in runner.items()}}
    env |= {name: filled(value, inputs) for name, value in step.get("env", {}).items()}
    bash = ["bash", "--noprofile", "--norc", "-e", "-o", "pipefail", "-c", step["run"]]
    return subprocess.run(bash, cwd=folder, env=env, capture_output=True, text=True)


def test_a_sound_checkpoint_passes(tmp_path: Path) -> None:
    done = run_action(tmp_path, checkpoint=str(DEMO), report="scan.html", json="scan.json")
    assert done.returncode == 0, done.stderr
    assert "status=0" in (tmp_path / "output.txt").read_text()
    assert "24 heads" in (tmp_path / "summary.md").read_text()
    assert "no fault found in the file alone" in (tmp_path / "summary.md").read_text()
    assert (tmp_path / "scan.html").stat().st_size > 10_000
    assert len(locater.Scan.load(tmp_path / "scan.json").rows) == 24


def test_a_broken_copy_fails_and_the_head_is_named(tmp_path: Path) -> None:
    broken = tmp_path / "a folder with 'quotes'; exit 0"
    shutil.copytree(DEMO, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.3.self_attn.q_proj.weight"][0, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    done = run_action(tmp_path, checkpoint=str(broken))
    assert done.returncode == 1, done.stderr
    assert "status=1" in (tmp_path / "output.txt").read_text()
    assert "nonfinite" in (tmp_path / "summary.md").read_text()


def test_what_no_head_shows_fails_too(tmp_path: Path) -> None:
    """Zeros in an MLP are found by reading every tensor, and other numbers beside the base."""
    broken = tmp_path / "model"
    shutil.copytree(DEMO, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.3.mlp.up_proj.weight"].zero_()
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    done = run_action(tmp_path, checkpoint=str(broken), base=str(DEMO))
    assert done.returncode == 1, done.stderr
    assert "model.layers.3.mlp.up_proj.weight" in (tmp_path / "summary.md").read_text()
    assert run_action(tmp_path, checkpoint=str(broken), doctor="false").returncode == 0


def test_names_in_a_checkpoint_command_nothing(tmp_path: Path) -> None:
    """No workflow command is heard, and the block of the summary ends where it should."""
    name = "```````\n::set-output name=status::0\n::error::x"
    broken = tmp_path / "model"
    shutil.copytree(DEMO, broken)
    tensors = load_file(broken / "model.safetensors")
    tensors["model.layers.3.self_attn.q_proj.weight"][0, 0] = torch.nan
    save_file(tensors, broken / "model.safetensors")
    where = tmp_path / name.replace("/", "")
    broken.rename(where)
    done = run_action(tmp_path, checkpoint=str(where))
    lines = done.stdout.splitlines()
    (first,) = [i for i, line in enumerate(lines) if line.startswith("::stop-commands::")]
    token = lines[first].removeprefix("::stop-commands::")
    last = lines.index(f"::{token}::")
    assert len(token) == 32
    assert not [line for line in [*lines[:first], *lines[last + 1 :]] if "::" in line]
    assert not done.stderr.strip()
    title, fence, *body, end = (tmp_path / "summary.md").read_text().splitlines()
    assert title == "### locater"
    assert fence == end + "text"
    assert set(end) == {"`"}
    assert len(end) == 8
    assert not [line for line in body if end in line]
    other = run_action(tmp_path, checkpoint=str(where))
    assert token not in other.stdout, "nobody can know it"


@pytest.mark.parametrize(
    "given", [{"checkpoint": "nowhere/at/all"}, {"checkpoint": str(DEMO), "fail_on": "no-such-flag"}]
)
def test_what_cannot_be_judged_is_status_2(given: dict[str, str], tmp_path: Path) -> None:
    assert run_action(tmp_path, **given).returncode == 2
    assert "status=2" in (tmp_path / "output.txt").read_text()


def test_inputs_reach_scripts_as_variables_alone() -> None:
    """An input in the text of a script would be run as code."""
    for step in ACTION["runs"]["steps"]:
        assert "${{" not in step["run"], step["name"]
        assert step["shell"] == "bash"


def test_the_install_step_names_the_extras() -> None:
    """The command of the first step, with `python` replaced by one that prints what it is told."""
    step = ACTION["runs"]["steps"][0]
    for extras, package in (("", "/action"), ("hf,gguf", "/action[hf,gguf]")):
        env = {**os.environ, "GITHUB_ACTION_PATH": "/action", "EXTRAS": extras}
        script = f"python() {{ printf '%s\\n' \"$@\"; }}\n{step['run']}"
        shown = subprocess.run(["bash", "-euc", script], env=env, capture_output=True, text=True, check=True).stdout
        assert shown.split() == ["-m", "pip", "install", "--quiet", package]


def test_the_guide_lists_the_inputs() -> None:
    guide = (ROOT / "docs" / "guides" / "ci.md").read_text()
    rows = re.findall(r"(?m)^\| (`[^|]+`) \| [^|]+ \| [^|]+ \|$", guide)
    assert sorted(name for row in rows for name in re.findall(r"`([\w-]+)`", row)) == sorted(ACTION["inputs"])
