"""Pages, tables and notebook displays are made of documents: a saved JSON file is shown as the result that wrote it."""

from __future__ import annotations

import io
import json
import shutil
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

import locater
from locater.report import comparison as comparisons
from locater.report import explanation as explained
from locater.report import fleet as fleets
from locater.report import probe as probes
from locater.report import scan as scans
from locater.report.trajectory import print_trajectory, trajectory_page
from locater.results.document import Document
from locater.results.trajectory import trajectory
from tests.report.test_explain_page import made, pair, picture

DEMO = str(files("locater") / "demo")
TWIN = f"{DEMO}/twin"
Loaded = dict[str, Any]


def printed(show: Callable[[Console], None], width: int = 100) -> str:
    text = io.StringIO()
    show(Console(file=text, width=width))
    assert len(text.getvalue()) > 200, "something is shown"
    return text.getvalue()


def loaded(result: Document, folder: Path, **options: Any) -> Loaded:
    """What a reader finds in the file that `save` wrote."""
    result.save(folder / "saved.json", **options)
    document: Loaded = json.loads((folder / "saved.json").read_text())
    return document


def reported(result: Document, folder: Path) -> str:
    result.report(folder / "page.html")
    return (folder / "page.html").read_text(encoding="utf-8")


def html_of(result: Any) -> str:
    return str(result._repr_html_())


@pytest.mark.parametrize("details", [False, True])
def test_a_scan(tmp_path: Path, details: bool) -> None:
    live = locater.scan(DEMO, details=details)
    saved = loaded(live, tmp_path)
    assert printed(lambda console: scans.print_scan(saved, console)) == printed(live.show)
    assert scans.scan_in_notebook(saved) == html_of(live)
    if details:  # without, the page reads the model again for eigenvalues
        assert scans.scan_page(saved) == reported(live, tmp_path)
    else:
        assert "eigenvalues" not in saved["heads"][0]
        assert scans.scan_page(saved) != reported(live, tmp_path)


def test_a_probe(tmp_path: Path) -> None:
    text = torch.randint(0, 256, (6, 48), generator=torch.Generator().manual_seed(0))
    live = locater.probe(DEMO, text, tokens=256)
    saved = loaded(live, tmp_path)
    assert probes.probe_page(saved) == reported(live, tmp_path)
    assert printed(lambda console: probes.print_probe(saved, console)) == printed(live.show)
    assert probes.probe_in_notebook(saved) == html_of(live)


@pytest.mark.parametrize("other", ["twin", "another shape"])
def test_a_comparison(tmp_path: Path, other: str) -> None:
    b: Any = TWIN if other == "twin" else torch.nn.MultiheadAttention(32, 4)
    live = locater.compare(locater.scan(DEMO, details=True), locater.scan(b, details=True))
    documents = [loaded(x, tmp_path) for x in (live, live.a, live.b)]
    assert documents[0]["aligned"] == (other == "twin")
    assert comparisons.comparison_page(*documents) == reported(live, tmp_path)
    assert printed(lambda console: comparisons.print_comparison(*documents, console)) == printed(live.show)
    assert comparisons.comparison_in_notebook(*documents) == html_of(live)


def test_a_series(tmp_path: Path) -> None:
    live = locater.compare(DEMO, TWIN, locater.scan(DEMO))
    saved, parts = loaded(live, tmp_path), [loaded(scan, tmp_path) for scan in live.scans]
    assert printed(lambda console: comparisons.print_series(saved, parts, console)) == printed(live.show)


@pytest.mark.parametrize("input_of", [lambda: made(18), picture, pair], ids=["text", "picture", "two streams"])
def test_explanations(tmp_path: Path, input_of: Callable[[], locater.Explanations]) -> None:
    live = input_of()
    saved = loaded(live, tmp_path)
    assert printed(lambda console: explained.print_explanations(saved, console)) == printed(live.show)
    assert explained.explanations_in_notebook(saved) == html_of(live)
    assert "patterns" not in saved
    whole = loaded(live, tmp_path, matrices=True)
    assert explained.explanations_page(whole) == reported(live, tmp_path)


def test_a_fleet_and_its_trajectory(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    for step, folder in ((100, DEMO), (200, TWIN), (300, DEMO)):
        shutil.copytree(folder, tmp_path / "run" / f"step-{step}", ignore=shutil.ignore_patterns("twin"))
    (tmp_path / "run" / "step-300" / "model.safetensors").write_bytes(b"cut short")
    live = locater.Fleet.run([str(tmp_path / "run" / "step-*")], tmp_path / "heads", workers=1)
    assert len(live.errors) == 1
    saved = loaded(live, tmp_path)
    assert printed(lambda console: fleets.print_fleet(saved, console)) == printed(live.show)
    assert fleets.fleet_in_notebook(saved) == html_of(live)
    document = trajectory(live.records(), live.errors, length=live.settings.length)
    again = json.loads(json.dumps(document, allow_nan=False))
    assert trajectory_page(again) == reported(live, tmp_path)
    assert printed(lambda console: print_trajectory(again, console)) == printed(
        lambda console: print_trajectory(document, console)
    )
