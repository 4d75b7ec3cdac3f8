"""Results in notebooks and as plots: what they show are the numbers, whole, in any theme, and with nothing fetched."""

from __future__ import annotations

import io
import json
import re
import sys
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from rich.console import Console

from locater import Comparison, LocaterError, Moments, Probe, Scan, compare, moments, observe, scan
from locater.markup import LOW, heat_map
from locater.report.plots import map_of_comparison, map_of_measured, map_of_scan
from locater.results.probe import ProbeRow
from locater.spectrum import cross_moments
from tests.report.visits import Visit, needs_browser
from tests.test_findings import spread_out

DEMO = str(files("locater") / "demo")


@cache
def scanned() -> Scan:
    return scan(DEMO)


@cache
def compared() -> Comparison:
    return compare(scanned(), f"{DEMO}/twin")


@cache
def probed() -> Probe:
    """A probe as `probe` would return it for two layers of two heads, with numbers that are easy to recognize."""
    numbers = [
        dict(layer=0, head=0, entropy=1.25, previous=0.9, duplicate=0.1, induction=0.0, sink=0.1),
        dict(layer=0, head=1, entropy=2.5, previous=0.1, duplicate=0.1, induction=0.2, sink=0.6),
        dict(layer=1, head=0, entropy=0.5, previous=0.0, duplicate=0.0, induction=0.8, sink=0.1),
        dict(layer=1, head=1, entropy=3.0, previous=0.0, duplicate=0.0, induction=0.7, sink=0.7),
    ]
    rows = [ProbeRow(kv_head=0, kind="self", name="blocks.attn", rows=9, **entry) for entry in numbers]  # type: ignore[arg-type]
    about = dict(held_out=True, statistics_sequences=1, measured_sequences=2, length=64)
    return Probe("tiny", about, [{"layer": 0}, {"layer": 1}], [], rows, {})


def observed() -> Any:
    with observe(spread_out()) as seen:
        seen.model(torch.randn(2, 10, 32, generator=torch.Generator().manual_seed(0)))
    return seen


def cells(text: str) -> dict[tuple[str, str], str]:
    """What the cells of a heat map say when pointed at: number as text by layer and head."""
    said = re.findall(r"<title>(?:layer|row) (\S+), head (\S+): ([^<]*)</title>", text)
    return {(layer, head): value for layer, head, value in said}


# ---- what is shown ----


def test_every_result_shows_itself_and_fetches_nothing() -> None:
    for result in (scanned(), compared(), probed(), observed(), moments(torch.randn(3, 4, 8), torch.randn(3, 4, 8))):
        text = result._repr_html_()
        ElementTree.fromstring(text.replace("<br>", "<br/>"))  # every element is closed
        assert not re.search(r"<script|<link|<img|@import|url\(|src=|href=", text)
        assert re.findall(r"https?://[^\"]+", text) == ["http://www.w3.org/2000/svg"]
        assert len(text) < 40_000
        assert len(repr(result)) < 250
        assert "\n" not in repr(result)


def test_the_map_of_a_scan_has_the_numbers_of_its_rows() -> None:
    drawn, text = map_of_scan(scanned().to_dict()), scanned()._repr_html_()
    assert drawn.label == "M mean self-logit", "as the page opens"
    assert cells(text) == {(str(row.layer), str(row.head)): f"{row.M:.3g}" for row in scanned().rows}
    root = {(row.layer, row.head): row.F**0.5 for row in scanned().rows if row.F is not None}
    assert map_of_scan(scanned().to_dict(), "sqrtF").values == pytest.approx(root)
    assert map_of_scan(scanned().to_dict(), "trace").values == {
        (row.layer, row.head): row.trace for row in scanned().rows
    }


def test_the_map_of_a_comparison_is_b_minus_a() -> None:
    drawn = map_of_comparison(compared().to_dict(), compared().a.to_dict(), compared().b.to_dict(), "M")
    twin = scan(f"{DEMO}/twin")
    for a, b in zip(scanned().rows, twin.rows, strict=True):
        assert drawn.values[a.layer, a.head] == pytest.approx(b.M - a.M)
    assert "mean self-logit M: 3.0 from -0.24 to 1.92, " in compared()._repr_html_()


def test_an_observation_before_and_after_a_run() -> None:
    with observe(spread_out()) as seen:
        assert "Nothing observed yet" in seen._repr_html_()
        assert repr(seen) == "Observation(TransformerEncoder, 8 heads in 2 layers, 0 forward passes)"
        seen.model(torch.randn(1, 6, 32))
    assert len(cells(seen._repr_html_())) == 8
    with observe(spread_out(), layers=[1], heads=[2]) as seen:
        seen.model(torch.randn(1, 6, 32))
    drawn = map_of_measured("model", [vars(row) for row in seen.rows], "sink")
    assert list(drawn.values) == [(1, 2)]
    assert list(cells(seen._repr_html_())) == [("1", "0"), ("1", "1"), ("1", "2")], "heads left out have no number"
    assert [cells(seen._repr_html_())["1", head] for head in "01"] == ["-", "-"]


def test_moments_in_one_line() -> None:
    g = torch.Generator().manual_seed(0)
    W_Q, W_K = torch.randn(2, 3, 4, 16, generator=g), torch.randn(2, 3, 4, 16, generator=g)
    traces = (W_Q.mT @ W_K).diagonal(dim1=-2, dim2=-1).sum(-1)
    text = repr(moments(W_Q, W_K))
    assert text.startswith("Moments(2 x 3 heads of size 4, float32, trace ")
    assert f"trace {traces.min():.3g} to {traces.max():.3g}, frobenius_sq" in text
    assert len(cells(moments(W_Q, W_K)._repr_html_())) == 6
    cross = cross_moments(torch.randn(5, 4, 8), torch.randn(5, 4, 6))
    assert repr(cross).startswith("Moments(5 heads of size 4 of cross-attention, float32, frobenius_sq ")
    assert "trace" not in cross._repr_html_()
    meta = Moments(*(torch.empty(2, 4, 4, device="meta") for _ in range(3)))
    assert repr(meta) == "Moments(2 heads of size 4, float32 on meta)"
    assert "on meta" in meta._repr_html_()
    assert "<svg" in moments(W_Q[0, :0], W_K[0, :0])._repr_html_(), "no head at all"
    broken = moments(W_Q[0] * torch.tensor([1.0, torch.nan, 1.0])[:, None, None], W_K[0])
    assert cells(broken._repr_html_())["0", "1"] == "-"
    learnt = moments(W_Q.requires_grad_(), W_K)
    assert repr(learnt) == text, "also while a model is trained"


def test_numbers_that_are_missing_and_names_that_are_hostile() -> None:
    rows = [replace(row, M=None, localization=None, F=None) if row.head == 1 else row for row in scanned().rows]
    text = replace(scanned(), source="<img src=x>", rows=rows)._repr_html_()
    assert "<img" not in text
    none = heat_map([[None, 1.0], [-2.0]], "<b>odd</b>", names=["<i>", "b"])
    assert "<b>odd" not in none
    assert "<i>" not in none
    assert none.count("<path") == 1, "the cell without a number is struck through"
    assert LOW in none
    assert "<svg" in heat_map([], "nothing")
    many = heat_map([[0.5] * 64] * 80, "many")
    assert len(many) < 600_000
    assert "<title>layer 0, head" not in many


@needs_browser
@pytest.mark.parametrize(("paper", "ink"), [("#ffffff", "#111111"), ("#111111", "#dddddd")])
def test_text_has_the_colour_of_the_notebook(browser: Any, tmp_path: Path, paper: str, ink: str) -> None:
    page = tmp_path / "cell.html"
    page.write_text(f"<body style='background:{paper};color:{ink}'>{scanned()._repr_html_()}")
    visit = Visit(browser, page, width=400)
    want = tuple(int(ink[i : i + 2], 16) for i in (1, 3, 5))
    fills = visit.page.eval_on_selector_all("svg text", "all => all.map(e => getComputedStyle(e).fill)")
    assert {tuple(map(int, re.findall(r"\d+", fill))) for fill in fills} == {want}
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth"), "wide tables scroll by themselves"
    assert visit.console == []


# ---- roles ----


def test_heads_by_role() -> None:
    assert probed().roles == {
        "previous-token": [(0, 0)],
        "induction": [(1, 0), (1, 1)],
        "duplicate-token": [],
        "first-token": [(0, 1)],
    }, "one role per head, and none that was not measured: there is no distance here"
    document = json.loads(probed().to_json())
    assert document["roles"]["induction"] == [[1, 0], [1, 1]]
    line = "Roles (layer.head): previous-token: 0.0; induction: 1.0, 1.1; first-token: 0.1; none: duplicate-token."
    assert line in probed()._repr_html_()
    pictures = [replace(row, previous=None, duplicate=None, induction=None, sink=None) for row in probed().rows]
    assert replace(probed(), rows=pictures).roles == {}
    assert "Roles" not in replace(probed(), rows=pictures)._repr_html_()


def test_a_scan_says_that_weights_tell_no_role(tmp_path: Path) -> None:
    console = Console(width=200, record=True, file=io.StringIO())
    scanned().show(console)
    assert "the role of a head (induction, previous-token, ...) does not show in its weights" in console.export_text()
    scanned().report(tmp_path / "scan.html")
    assert "does not show in its weights: locater probe measures it." in (tmp_path / "scan.html").read_text()


# ---- plots ----


def test_a_plot_has_the_numbers(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    figure = scanned().plot("F")
    axes, bar = figure.axes
    table = axes.images[0].get_array()
    assert table.shape == (6, 4)
    assert [float(table[row.layer, row.head]) for row in scanned().rows] == [row.F for row in scanned().rows]
    assert (axes.get_xlabel(), axes.get_ylabel(), bar.get_ylabel()) == ("head", "layer", "F")
    assert figure._repr_png_().startswith(b"\x89PNG")
    difference = compared().plot()
    low, high = difference.axes[0].images[0].get_clim()
    assert low == -high
    assert observed().plot("max_logit").axes[1].get_ylabel() == "largest logit"
    assert probed().plot().axes[1].get_ylabel() == "entropy"


def test_altair_where_matplotlib_is_not_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("altair")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    document = scanned().plot("M").to_dict()
    values = next(iter(document["datasets"].values())) if "datasets" in document else document["data"]["values"]
    assert [entry["value"] for entry in values] == [row.M for row in scanned().rows]


def test_a_plot_that_cannot_be_drawn_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(LocaterError, match=r"column 'nope': there is none of this name; there are .*localization"):
        scanned().plot("nope")
    with pytest.raises(LocaterError, match=r"column 'nope'.*entropy_ratio"):
        observed().plot("nope")
    with pytest.raises(LocaterError, match="different heads"):
        compare(scanned(), scan(spread_out())).plot()
    for name in ("matplotlib", "altair"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(LocaterError, match=r"a plot needs matplotlib or altair: pip install 'locater\[plot\]'"):
        scanned().plot()
