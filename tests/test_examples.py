"""Notebooks in examples/ run from top to bottom, and their results show themselves."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests import ROOT

NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))


def test_there_are_notebooks() -> None:
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_is_stored(path: Path) -> None:
    """Outputs would make a diff unreadable, and go out of date."""
    nbformat = pytest.importorskip("nbformat")
    book = nbformat.read(path, as_version=4)
    nbformat.validate(book)
    code = [cell for cell in book.cells if cell.cell_type == "code"]
    assert [cell.id for cell in code if cell.outputs or cell.execution_count] == []
    assert path.stat().st_size < 20_000


def executed(path: Path) -> dict[str, list[dict[str, Any]]]:
    """The outputs of each cell, by the cell's id."""
    import nbformat
    from nbclient import NotebookClient

    book = nbformat.read(path, as_version=4)
    NotebookClient(book, timeout=120, kernel_name="python3", resources={"metadata": {"path": ROOT}}).execute()
    return {cell.id: cell.outputs for cell in book.cells if cell.cell_type == "code"}


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
