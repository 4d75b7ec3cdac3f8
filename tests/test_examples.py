"""Notebooks in examples/ run from top to bottom and hold the outputs of their code; the script runs on several ranks."""

from __future__ import annotations

import base64
import json
import re
import runpy
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import ROOT
from tests.fuzz.dcp import loaded
from tests.processes import ranks

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
SCRIPT: dict[str, Any] = runpy.run_path(str(ROOT / "scripts" / "notebooks.py"))
QUICK = "a-trajectory-of-checkpoints"  # of the tutorials, the one that make test runs
SHARDED: dict[str, Any] = runpy.run_path(str(ROOT / "examples" / "sharded_run.py"))
TUTORIALS = [
    pytest.param(path, marks=[] if path.stem == QUICK else [pytest.mark.slow], id=path.stem)
    for path in NOTEBOOKS
    if path.stem != "head-to-output"  # has a test of its own
]


def test_there_are_notebooks() -> None:
    assert QUICK in [path.stem for path in NOTEBOOKS]
    listed = re.findall(r"\.\./examples/([\w-]+)\.ipynb", (ROOT / "docs" / "tutorials.md").read_text())
    assert sorted(listed) == [path.stem for path in NOTEBOOKS]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_stored_outputs_are_those_of_the_code_and_small(path: Path) -> None:
    """A notebook that was changed has to be executed again: make notebooks."""
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    assert book.metadata["locater"]["executed"] == SCRIPT["code_hash"](book), "make notebooks"
    assert path.stat().st_size < SCRIPT["MOST_BYTES"]
    outputs = [output for cell in book.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [x for x in outputs if x.output_type == "error" or x.get("name") == "stderr"]
    pictures = [base64.b64decode(x.data["image/png"]) for x in outputs if "image/png" in x.get("data", {})]
    assert pictures
    assert max(map(len, pictures)) < SCRIPT["MOST_PICTURE"]
    assert not re.search(r"(?<![\w.])/(?:home|root|tmp|work|Users)/", json.dumps(outputs)), "a path of one machine"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_begins_with_what_is_learned_and_ends_with_something_to_change(path: Path) -> None:
    book = json.loads(path.read_text(encoding="utf-8"))
    first, *_, last = ("".join(cell["source"]) for cell in book["cells"])
    assert "You will learn" in first
    assert "**Try it:**" in last


@pytest.mark.parametrize("path", TUTORIALS)
def test_a_tutorial_runs(path: Path) -> None:
    """Its cells assert what its sentences say; a cell that fails raises."""
    pytest.importorskip("nbclient")
    book = SCRIPT["execute"](path)
    shown = [cell.id for cell in book.cells if cell.cell_type == "code" and cell.outputs]
    stored = json.loads(path.read_text(encoding="utf-8"))["cells"]
    assert {cell["id"] for cell in stored if cell.get("outputs")} <= {*shown}


def executed(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The outputs of each cell, by the cell's id."""
    book = SCRIPT["execute"](path)
    return {
        cell.id: [x for x in cell.outputs if x.get("name") != "stderr"]
        for cell in book.cells
        if cell.cell_type == "code"
    }


@pytest.mark.slow
def test_from_all_heads_to_the_output() -> None:
    pytest.importorskip("nbclient")
    outputs = executed(ROOT / "examples" / "head-to-output.ipynb")
    for cell in ("scan", "probe"):
        shown = outputs[cell][0]["data"]
        assert "<svg" in shown["text/html"]
        assert len(shown["text/plain"]) < 200
    assert len(outputs["plot"]) == 1, "a figure is shown once"
    assert "image/png" in outputs["plot"][0]["data"]
    printed = {cell: "".join(x.get("text", "") for x in found) for cell, found in outputs.items()}
    assert "previous-token" in printed["choose"]
    weights = [float(line.split()[2]) for line in printed["where"].splitlines()]
    assert len(weights) == 6
    assert 0 < sum(weights) <= 1
    assert printed["pattern"].count(" looks at ") == 6
    assert "of the output passes layer" in printed["shares"]
    assert "<svg" in outputs["why"][-1]["data"]["text/html"]
    assert "less likely: [" in printed["tokens"]


def sharded(folder: Path, steps: int, tensor: int, rank: int) -> None:
    """The script on one of several ranks; its losses go into a file."""
    torch.set_num_threads(1)
    (folder / f"losses-{rank}-{steps}.json").write_text(json.dumps(SHARDED["main"](folder, steps, tensor)))


def flat(state: Any, name: str = "") -> dict[str, Any]:
    """Numbers and tensors of a nested state, by their place."""
    if isinstance(state, dict | list):
        pairs = state.items() if isinstance(state, dict) else enumerate(state)
        return {key: value for i, part in pairs for key, value in flat(part, f"{name}.{i}").items()}
    return {name: state}


def compare(ours: Path, theirs: Path) -> None:
    """Two checkpoints: weights, moments, controls and monitor, as PyTorch reads them."""
    for key in ("model", "optimizer", "control", "control_optimizer", "monitor"):
        found, expected = flat(loaded(ours, key), key), flat(loaded(theirs, key), key)
        assert found.keys() == expected.keys()
        for name, value in expected.items():
            if isinstance(value, Tensor):
                assert torch.allclose(found[name], value, rtol=1e-3, atol=1e-5), name
            else:
                assert found[name] == value, name
    assert any(name.endswith("log_t") and float(x.abs().max()) > 0 for name, x in flat(loaded(ours, "control")).items())


def resumed(folder: Path, counts: tuple[int, int], tensor: int) -> None:
    """Three steps in one go and saved after two, resumed on another number of ranks."""
    import locater

    whole, cut = folder / "whole", folder / "cut"
    for path, steps, count, split in ((whole, 3, counts[0], 1), (cut, 2, counts[0], 1), (cut, 3, counts[1], tensor)):
        path.mkdir(exist_ok=True)
        ranks(partial(sharded, path, steps, split), path, count)
    first, second = (json.loads((cut / f"losses-0-{steps}.json").read_text()) for steps in (2, 3))
    assert len(second) == 1, "the checkpoint was not resumed"
    assert first + second == pytest.approx(json.loads((whole / "losses-0-3.json").read_text()), rel=1e-5)
    compare(cut / "step-3", whole / "step-3")
    names = dict(query="model.layers.*.self_attn.q_proj.weight", key="model.layers.*.self_attn.k_proj.weight", heads=4)
    rows = [locater.scan(path / "step-3", **names).rows for path in (cut, whole)]
    assert [row.M for row in rows[0]] == pytest.approx([row.M for row in rows[1]], abs=1e-4)
    assert len(rows[0]) == 8


@pytest.mark.filterwarnings("ignore")
def test_a_sharded_run_is_resumed_by_another_number_of_ranks(tmp_path: Path) -> None:
    resumed(tmp_path, (2, 1), 1)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_sharded_run_is_resumed_with_heads_split(tmp_path: Path) -> None:
    resumed(tmp_path, (2, 4), 2)
