"""The page: what it weighs, that it stands alone, and that a real browser draws it and answers clicks."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from locater import Scan, compare, scan
from locater.theory import continuum

DEMO = str(files("locater") / "demo")
CHROMIUM = next((p for name in ("chromium", "chromium-browser", "google-chrome") if (p := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium on this machine (make browser installs Debian's)")


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    scan(DEMO).report(folder / "demo.html")
    torch.manual_seed(0)
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, 64, batch_first=True), 3)
    scan(other).report(folder / "encoder.html")
    twin = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, 64, batch_first=True), 3)
    with torch.no_grad():
        for block in twin.layers:
            block.self_attn.in_proj_weight *= 3
    compare(other, twin).report(folder / "twins.html")
    compare(DEMO, other).report(folder / "strangers.html")
    return {p.stem: p for p in folder.iterdir()}


def data_of(page: Path) -> dict[str, Any]:
    found = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_page_stands_alone(pages: dict[str, Path]) -> None:
    for page in pages.values():
        text = page.read_text()
        assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
        assert "http://www.w3.org/2000/svg" in text
        assert len(re.findall(r"https?://", text)) == 1  # that name space, and nothing to fetch


@pytest.mark.parametrize(("layers", "heads", "size", "limit"), [(12, 12, 64, 1.5e6), (32, 32, 128, 4e6)])
def test_page_weighs_little(tmp_path: Path, layers: int, heads: int, size: int, limit: float) -> None:
    """With full-length numbers everywhere and drives for every head: weight does not depend on the values."""
    from locater.result import HeadRow

    g = torch.Generator().manual_seed(0)

    def numbers(n: int) -> list[float]:
        return torch.randn(n, generator=g, dtype=torch.float64).tolist()

    def row(layer: int, head: int) -> HeadRow:
        names = "mean concentration spectral_norm stable_rank M S F skew key_bias localization expected_entropy trace".split()
        values = dict(zip(names, map(abs, numbers(12)), strict=True))
        drive = {"even": numbers(size // 2), "odd": numbers(size // 2), "still": 0.0}
        eigenvalues = tuple(zip(numbers(size), numbers(size), strict=True))
        return HeadRow(
            layer, head, head, "self", heads * size, size, size**-0.5, **values, flags=("sharp",), eigenvalues=eigenvalues, drive=drive
        )

    entry = {"kind": "self", "heads": heads, "kv_heads": heads, "head_dim": size, "window": None, "positions": "rotary"}
    entries = [{**entry, "layer": i, "name": f"model.layers.{i}.self_attn", "frequencies": numbers(size // 2)} for i in range(layers)]
    assumed = {"prediction": "prior", "tokens": "t", "weights": "w", "length": 256, "notes": []}
    Scan("wide", assumed, entries, [row(i, h) for i in range(layers) for h in range(heads)]).report(tmp_path / "wide.html")
    assert (tmp_path / "wide.html").stat().st_size < limit


def test_data_agree_with_the_scan(pages: dict[str, Path]) -> None:
    rows = scan(DEMO, eigenvalues=True).rows
    heads = data_of(pages["demo"])["scans"][0]["heads"]
    assert len(heads) == len(rows)
    for head, row in zip(heads, rows, strict=True):
        assert head["M"] == pytest.approx(row.M, rel=1e-3)
        assert sum(re for re, _ in head["eigenvalues"]) == pytest.approx(row.trace, abs=0.02)
        assert sum(head["even"]) + head["still"] == pytest.approx(row.M, abs=0.01)  # the drive at offset 0


def test_names_cannot_break_the_page(tmp_path: Path) -> None:
    entry = {
        "layer": 0,
        "name": "</script><b>x",
        "kind": "self",
        "heads": 1,
        "kv_heads": 1,
        "head_dim": 4,
        "window": None,
        "positions": None,
    }
    assumed = {"prediction": "prior", "tokens": "t", "weights": "w", "length": 256, "notes": ["<i>"]}
    from locater.result import HeadRow

    Scan("<script>alert(1)</script>", assumed, [entry], [HeadRow(0, 0, 0, "self", 8, 4, 0.5)]).report(tmp_path / "x.html")
    text = (tmp_path / "x.html").read_text()
    assert "<script>alert" not in text
    assert text.count("</script>") == 2
    assert data_of(tmp_path / "x.html")["scans"][0]["layers"][0]["name"] == "</script><b>x"


def test_a_saved_scan_can_be_compared(tmp_path: Path) -> None:
    scan(DEMO).save(tmp_path / "a.json")
    found = compare(tmp_path / "a.json", DEMO)
    assert found.aligned
    assert all(change.difference["M"] == 0 and not change.gained and not change.lost for change in found.rows)


def test_comparison_subtracts_b_minus_a() -> None:
    torch.manual_seed(0)
    a, b = nn.MultiheadAttention(32, 4), nn.MultiheadAttention(32, 4)
    with torch.no_grad():
        b.in_proj_weight *= 8
    found = compare(a, b)
    for change, x, y in zip(found.rows, scan(a).rows, scan(b).rows, strict=True):
        assert change.difference["F"] == pytest.approx(y.F - x.F)
        assert change.gained == tuple(f for f in y.flags if f not in x.flags)
    assert any("sharp" in change.gained for change in found.rows)


def test_shards_join_to_the_whole() -> None:
    whole = scan(DEMO)
    parts = [scan(DEMO, shard=(i, 4)) for i in (1, 2, 3, 4)]
    assert sum(len(p.rows) for p in parts) == len(whole.rows)
    joined = Scan.join(reversed(parts))
    assert joined.rows == whole.rows
    assert joined.layers == whole.layers
    from locater import LocaterError

    with pytest.raises(LocaterError, match="do not make one model"):
        Scan.join(parts[1:])


# ---- in a real browser ----


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = play.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, "--disable-gpu"])
        yield opened
        opened.close()


class Visit:
    """A page opened offline; everything on its console is kept."""

    def __init__(self, browser: Any, page: Path, scheme: str = "light") -> None:
        self.context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": 1320, "height": 900})
        self.page = self.context.new_page()
        self.console: list[str] = []
        self.page.on("console", lambda m: self.console.append(m.text))
        self.page.on("pageerror", lambda e: self.console.append(str(e)))
        self.page.goto(page.as_uri())

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))

    def inside(self, selector: str) -> str:
        return str(self.page.inner_html(selector))


@needs_browser
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("name", ["demo", "encoder", "twins", "strangers"])
def test_page_is_drawn_without_a_word_on_the_console(browser: Any, pages: dict[str, Path], name: str, scheme: str) -> None:
    visit = Visit(browser, pages[name], scheme)
    cells = visit.page.locator("#heatmap .cell").count()
    assert cells == len(data_of(pages[name])["scans"][0]["heads"])
    assert visit.page.locator("#plane .dot").count() > 0
    assert visit.page.locator("#phases .dot").count() > 0
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.console == []
    visit.context.close()


@needs_browser
def test_choosing_a_head_changes_every_panel(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["demo"])
    before = {part: visit.inside(part) for part in ("#facts", "#plane", "#profile", "#drive", "#which")}
    visit.page.click('#heatmap .cell[data-layer="3"][data-head="1"]')
    assert visit.text("#which") == "Layer 3, head 1"
    assert all(visit.inside(part) != was for part, was in before.items())
    visit.page.focus("#heatmap")
    visit.page.keyboard.press("ArrowUp")
    assert visit.text("#which") == "Layer 2, head 1"
    assert visit.console == []


@needs_browser
def test_metric_and_flag_choices_change_the_map(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["demo"])
    before = visit.inside("#heatmap")
    visit.page.select_option("#metric", "sqrtF")
    assert visit.inside("#heatmap") != before
    assert "rank collapse" in visit.text("#explain")
    assert visit.page.locator("#heatmap .cell.dim").count() == 0
    visit.page.click("button.flag")
    flagged = sum("few-directions" in r.flags for r in scan(DEMO).rows)
    assert visit.page.locator("#heatmap .cell.dim").count() == 24 - flagged


@needs_browser
def test_encoder_has_no_drive(browser: Any, pages: dict[str, Path]) -> None:
    assert Visit(browser, pages["encoder"]).page.locator("#drive-card").is_hidden()
    assert Visit(browser, pages["demo"]).page.locator("#drive-card").is_visible()


@needs_browser
def test_differences_only_between_twins(browser: Any, pages: dict[str, Path]) -> None:
    twins, strangers = Visit(browser, pages["twins"]), Visit(browser, pages["strangers"])
    assert twins.page.input_value("#side") == "difference"
    assert strangers.page.locator("#side option").count() == 2
    before = strangers.page.locator("#heatmap .cell").count()
    strangers.page.select_option("#side", "1")
    assert strangers.page.locator("#heatmap .cell").count() == 24 == before
    assert strangers.page.locator('#heatmap .cell[data-head="7"]').count() == 3  # now the encoder: 3 layers of 8 heads
    assert strangers.console == twins.console == []


@needs_browser
def test_profiles_computed_in_the_page_are_the_theory_s(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["demo"])
    for M, S, F in [(2.0, 0.1, 0.4), (-4.0, -0.2, 1.0), (16.0, 4.0, 4.0)]:
        u = torch.linspace(-0.5, 0.5, 9, dtype=torch.float64)
        theirs = visit.page.evaluate(f"[...Array(9).keys()].map(i => rho({M}, {S}, {F}, i / 8 - 0.5))")
        assert theirs == pytest.approx(continuum(M, S, F, u).tolist(), abs=1e-6)
