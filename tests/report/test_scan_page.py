"""The page: what it weighs, that it stands alone, and that a real browser draws it and answers clicks."""

from __future__ import annotations

import io
import re
from copy import deepcopy
from dataclasses import replace
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from locater import Scan, compare, scan
from locater.theory import continuum
from tests.range_server import served
from tests.report.visits import Visit, data_of, needs_browser

DEMO = str(files("locater") / "demo")


def noted() -> Scan:
    """The demo with a note at two heads."""
    found = scan(DEMO, details=True)
    at = {(2, 1), (4, 3)}
    return replace(
        found, rows=[replace(r, flags=("antisymmetric",) if (r.layer, r.head) in at else ()) for r in found.rows]
    )


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    scan(DEMO).report(folder / "demo.html")
    torch.manual_seed(0)
    other = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, 64, batch_first=True), 3)
    scan(other).report(folder / "encoder.html")
    twin = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, 64, batch_first=True), 3)
    with torch.no_grad():
        for block in twin.layers[1:]:  # the first layer keeps its size, so that not every head is sharp
            block.self_attn.in_proj_weight *= 6
    compare(other, twin).report(folder / "twins.html")
    compare(DEMO, other).report(folder / "strangers.html")
    with torch.no_grad():
        twin = deepcopy(other)
        twin.layers[1].self_attn.in_proj_weight[:64] *= 1.5  # queries: spread grows, and Λ stays where it is
    compare(other, twin).report(folder / "wider.html")
    start = nn.TransformerEncoder(nn.TransformerEncoderLayer(64, 8, 64, batch_first=True), 3)
    with torch.no_grad():
        for block in start.layers:
            block.self_attn.in_proj_weight.normal_(0, 0.03)
    scan(start).report(folder / "untrained.html")
    with torch.no_grad():
        other.layers[1].self_attn.in_proj_weight[8 * 5] = torch.nan  # a row of head 5
    scan(other).report(folder / "broken.html")
    scan(DEMO).save(folder / "demo.json")
    noted().report(folder / "noted.html")
    Scan.load(folder / "demo.json").report(folder / "loaded.html")
    compare(folder / "demo.json", DEMO).report(folder / "half.html")
    (folder / "demo.json").unlink()
    Scan("nothing", {"tokens": "t", "weights": "w", "length": 256, "notes": []}, [], []).report(folder / "empty.html")
    return {p.stem: p for p in folder.iterdir()}


def test_page_stands_alone(pages: dict[str, Path]) -> None:
    for page in pages.values():
        text = page.read_text()
        assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
        assert "http://www.w3.org/2000/svg" in text
        assert len(re.findall(r"https?://", text)) == 1  # that name space, and nothing to fetch


@pytest.mark.parametrize(("layers", "heads", "size", "limit"), [(12, 12, 64, 1.5e6), (32, 32, 128, 4e6)])
def test_page_weighs_little(tmp_path: Path, layers: int, heads: int, size: int, limit: float) -> None:
    """With full-length numbers everywhere and drives for every head: weight does not depend on the values."""
    from locater.results.scan import HeadRow

    g = torch.Generator().manual_seed(0)

    def numbers(n: int) -> list[float]:
        return torch.randn(n, generator=g, dtype=torch.float64).tolist()

    def row(layer: int, head: int) -> HeadRow:
        names = "mean concentration spectral_norm stable_rank M S F skew key_bias localization expected_entropy trace".split()
        values = dict(zip(names, map(abs, numbers(12)), strict=True))
        drive = {"even": numbers(size // 2), "odd": numbers(size // 2), "still": 0.0}
        eigenvalues = tuple(zip(numbers(size), numbers(size), strict=True))
        return HeadRow(
            layer,
            head,
            head,
            "self",
            heads * size,
            size,
            size**-0.5,
            **values,
            flags=("sharp",),
            eigenvalues=eigenvalues,
            drive=drive,
        )

    entry = {"kind": "self", "heads": heads, "kv_heads": heads, "head_dim": size, "window": None, "positions": "rotary"}
    entries = [
        {**entry, "layer": i, "name": f"model.layers.{i}.self_attn", "frequencies": numbers(size // 2)}
        for i in range(layers)
    ]
    assumed = {"prediction": "prior", "tokens": "t", "weights": "w", "length": 256, "notes": []}
    Scan("wide", assumed, entries, [row(i, h) for i in range(layers) for h in range(heads)]).report(
        tmp_path / "wide.html"
    )
    assert (tmp_path / "wide.html").stat().st_size < limit


def test_data_agree_with_the_scan(pages: dict[str, Path]) -> None:
    rows = scan(DEMO, eigenvalues=True).rows
    heads = data_of(pages["demo"])["scans"][0]["heads"]
    assert len(heads) == len(rows)
    for head, row in zip(heads, rows, strict=True):
        assert head["M"] == pytest.approx(row.M, rel=1e-3)
        assert sum(re for re, _ in head["eigenvalues"]) == pytest.approx(row.trace, abs=0.02)
        assert sum(head["even"]) + head["still"] == pytest.approx(row.M, abs=0.01)  # the drive at offset 0


def test_rank_collapse_risk_is_on_the_page_and_in_the_terminal(pages: dict[str, Path]) -> None:
    found = scan(DEMO)
    heads = data_of(pages["demo"])["scans"][0]["heads"]
    assert [head["residual_kept"] for head in heads] == pytest.approx(
        [row.residual_kept for row in found.rows], rel=1e-3
    )
    kept = [entry["residual_kept"] for entry in found.layers]
    said = f"attention alone keeps {min(kept):.3f} (layer {kept.index(min(kept))}) to {max(kept):.3f} of the differences between tokens"
    assert said in pages["demo"].read_text()
    assert "Rank-collapse" not in pages["empty"].read_text()
    for width in (60, 120):
        out = io.StringIO()
        found.show(Console(file=out, width=width))
        lines = out.getvalue().splitlines()
        assert said in " ".join(out.getvalue().split())
        assert ("kept" in next(line for line in lines if line.startswith("layer")).split()) is (width == 120)


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
    from locater.results.scan import HeadRow

    Scan("<script>alert(1)</script>", assumed, [entry], [HeadRow(0, 0, 0, "self", 8, 4, 0.5)]).report(
        tmp_path / "x.html"
    )
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
        b.in_proj_weight *= 9
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


@needs_browser
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("demo", "light"),
        ("demo", "dark"),
        ("encoder", "dark"),
        ("twins", "light"),
        ("strangers", "dark"),
        ("broken", "light"),
    ],
)
def test_page_is_drawn_without_a_word_on_the_console(
    browser: Any, pages: dict[str, Path], name: str, scheme: str
) -> None:
    visit = Visit(browser, pages[name], scheme)
    cells = visit.page.locator("#heatmap .cell").count()
    assert cells == len(data_of(pages[name])["scans"][0]["heads"])
    assert (visit.page.locator("#plane .dot").count() > 0) == (name != "broken")  # it opens on the head without numbers
    assert visit.page.locator("#phases .dot").count() > 0
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.console == []


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


@needs_browser
def test_a_flag_dims_the_others_and_goes_to_its_first_head(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["noted"], choice="#layer=5&head=3")
    flagged = [r for r in noted().rows if "antisymmetric" in r.flags]
    assert visit.text("#which") == "Layer 5, head 3"
    button = visit.page.locator('button.flag[data-flag="antisymmetric"]')
    button.click()
    assert visit.page.locator("#heatmap .cell.dim").count() == 24 - len(flagged)
    assert visit.text("#which") == f"Layer {flagged[0].layer}, head {flagged[0].head}"
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    assert visit.page.locator("#heatmap .cell.dim").count() == 0


@needs_browser
def test_flags_of_a_comparison_are_those_of_the_scans_shown(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["twins"])
    counts = [sum("sharp" in h["flags"] for h in s["heads"]) for s in data_of(pages["twins"])["scans"]]
    assert counts[0] == 0 < counts[1] < 24  # else this test shows nothing
    button = visit.page.locator('button.flag[data-flag="sharp"]')
    assert button.text_content() == f"sharp · A 0 · B {counts[1]}"
    button.click()
    assert visit.page.locator("#heatmap .cell.dim").count() == 24 - counts[1]  # B - A: either of them
    for side, dim in (("0", 24), ("1", 24 - counts[1])):
        visit.page.select_option("#side", side)
        assert visit.page.locator("#heatmap .cell.dim").count() == dim
    visit.page.select_option("#side", "0")
    button.click()
    button.click()  # only B has it
    assert visit.page.input_value("#side") == "1"


@needs_browser
def test_an_untrained_model_opens_on_what_varies(browser: Any, pages: dict[str, Path]) -> None:
    """Λ of such heads is 0 and the map of it blank; on the map of heads all lay in one spot."""
    visit = Visit(browser, pages["untrained"])
    assert "this looks like an untrained model" in visit.text("header .verdict")
    assert visit.page.locator("button.flag:not(.calm)").count() == 0
    colours = visit.page.eval_on_selector_all("#heatmap .cell", "cells => cells.map(c => c.getAttribute('fill'))")
    assert len(set(colours)) > 12
    for axis, wide in (("cx", 200), ("cy", 60)):
        at = visit.page.eval_on_selector_all("#phases .dot", f"dots => dots.map(d => Number(d.getAttribute('{axis}')))")
        assert max(at) - min(at) > wide
    assert visit.text("#phases-note").startswith("Zoomed in")
    assert Visit(browser, pages["demo"]).page.locator("#phases-note").is_hidden()
    assert visit.console == []


@needs_browser
def test_a_comparison_opens_on_what_moved_most(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["wider"])
    assert visit.page.input_value("#metric") in ("sqrtF", "spectral_norm")
    assert visit.text("#which").startswith("Layer 1, head ")
    assert visit.page.input_value("#side") == "difference"


@needs_browser
def test_the_header_says_in_plain_words_where_numbers_come_from(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["demo"])
    assert visit.text("header summary") == "Predicted from weights alone, which is a prior; not measured on data."
    assert visit.text("header .verdict") == "No problems found."
    assumed = visit.page.locator("header details p")
    assert "unit tokens" in str(assumed.text_content())
    assert assumed.is_hidden()
    visit.page.click("header summary")
    assert assumed.is_visible()


@needs_browser
def test_harmless_flags_have_a_colour_of_their_own(browser: Any, pages: dict[str, Path]) -> None:
    def border(visit: Visit, selector: str) -> str:
        return str(visit.page.locator(selector).first.evaluate("e => getComputedStyle(e).borderLeftColor"))

    calm, alarm = Visit(browser, pages["noted"]), Visit(browser, pages["twins"])
    calm.page.click('button[data-flag="antisymmetric"]')
    alarm.page.click('button[data-flag="sharp"]')
    for selector in ("button.flag", "#findings .finding"):
        assert border(calm, selector) != border(alarm, selector)
    assert calm.page.locator("#heatmap .mark.calm").count() > 0


@needs_browser
@pytest.mark.parametrize("width", [400, 900, 1320])
@pytest.mark.parametrize("name", ["demo", "encoder", "twins"])
def test_text_in_charts_keeps_its_size(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    visit = Visit(browser, pages[name], width=width)
    scales = (
        "[...document.querySelectorAll('svg')].filter(s => s.firstChild && s.clientWidth).map(s => s.getScreenCTM().a)"
    )
    assert visit.page.evaluate(scales) == pytest.approx([1.0] * (5 if name == "demo" else 4), abs=0.01)
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    beyond = """[...document.querySelectorAll('svg text')].filter(t => {
        const a = t.getBoundingClientRect(), card = t.closest('.card').getBoundingClientRect();
        return a.width && (a.left < card.left || a.right > card.right || a.bottom > card.bottom); }).map(t => t.textContent)"""
    assert visit.page.evaluate(beyond) == []
    if width == 400:
        assert visit.page.locator("#heatmap .cell").first.evaluate("c => c.getBoundingClientRect().height") >= 22
    visit.page.set_viewport_size({"width": 640, "height": 900})
    visit.until(f"{scales}.every(a => Math.abs(a - 1) < 0.01)")
    assert visit.console == []


@needs_browser
def test_broken_heads_are_hatched_and_shown_first(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["broken"])
    assert visit.text("#which") == "Layer 1, head 5"
    hatched = visit.page.locator('#heatmap .cell[fill="url(#hatch-broken)"]')
    assert hatched.count() == 1
    assert (hatched.get_attribute("data-layer"), hatched.get_attribute("data-head")) == ("1", "5")
    assert "not finite" in visit.text("#plane-note")
    assert "1 head has no M" in visit.text("#phases-note")


@needs_browser
def test_what_the_data_lack_is_said(browser: Any, pages: dict[str, Path]) -> None:
    rows = scan(DEMO).rows
    mixed, plain = (next(r for r in rows if r.approximation == how) for how in ("mixture", "gaussian"))
    loaded, full = (
        Visit(browser, pages[name], choice=f"#layer={mixed.layer}&head={mixed.head}") for name in ("loaded", "demo")
    )
    assert "not in this data: scan the model, not its JSON, or add --eigenvalues" in loaded.text("#plane-note")
    assert "closed form is drawn instead" in loaded.text("#findings")
    assert "comes from the exact mixture, not" not in loaded.text("#findings")
    assert "not in this data" in loaded.text("#drive-note")
    assert "comes from the exact mixture, not" in full.text("#findings")
    assert full.page.locator("#plane-note").is_hidden()
    assert full.page.locator("#drive-note").is_hidden()
    assert "mixture" not in Visit(browser, pages["demo"], choice=f"#layer={plain.layer}&head={plain.head}").text(
        "#findings"
    )
    half = Visit(browser, pages["half"])
    assert half.text("#drive-note").startswith("A: its drive is not in this data")
    assert half.page.locator("#drive .curve").count() == 1
    assert half.text("#plane-note").startswith("A: not in this data")
    assert loaded.console == full.console == half.console == []


@needs_browser
def test_a_reload_keeps_what_was_chosen(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["twins"])
    assert visit.page.evaluate("location.hash") == ""
    visit.page.click("#guide summary")
    visit.page.select_option("#side", "1")
    visit.page.select_option("#metric", "expected_entropy")
    visit.page.click('#heatmap .cell[data-layer="2"][data-head="6"]')
    for _ in range(2):
        assert visit.text("#which") == "Layer 2, head 6"
        assert (visit.page.input_value("#side"), visit.page.input_value("#metric")) == ("1", "expected_entropy")
        assert not visit.page.evaluate("guide.open")
        visit.page.reload()
    assert visit.console == []
    stale = Visit(browser, pages["demo"], choice="#layer=99&head=7&metric=toString&side=Z")
    assert stale.page.locator("#plane .dot").count() > 0
    assert stale.console == []


@needs_browser
def test_the_guide_leaves_the_heat_map_in_view(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["demo"])
    assert visit.page.evaluate("guide.open")
    assert visit.page.evaluate("document.getElementById('heatmap').getBoundingClientRect().top") < 650
    assert not Visit(browser, pages["demo"], width=900).page.evaluate("guide.open")


@needs_browser
def test_a_scan_without_heads_is_a_page_too(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["empty"], "dark")
    assert "no heads" in visit.text("#heatmap")
    visit.page.select_option("#metric", "M")
    visit.page.focus("#heatmap")
    visit.page.keyboard.press("ArrowDown")
    assert visit.text("#which") == "No head"
    assert visit.console == []


@needs_browser
def test_axes_and_tints_are_explained(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["demo"])
    words = visit.page.locator("#profile text").all_text_contents()
    assert "far" in words
    assert "near" in words
    assert "-0.5" not in words
    assert visit.page.locator("#phases .tint-key").count() > 10
    outlined = "m => { const s = getComputedStyle(m); return s.stroke !== s.fill && s.stroke !== 'none'; }"
    assert visit.page.evaluate(f"[...document.querySelectorAll('#heatmap .mark')].every({outlined})")


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


@needs_browser
@pytest.mark.parametrize("guarded", [True, False])
def test_no_other_script_runs_and_nothing_is_loaded(
    browser: Any, pages: dict[str, Path], tmp_path: Path, guarded: bool
) -> None:
    """What would get past the escapes is stopped by the page's own policy, and runs where the policy is cut out."""
    with served(tmp_path) as server:
        injected = (
            f'<script>window.ran = 1</script><img src="{server.url}/x.png" onerror="window.ran = 2">'
            f'<link rel="stylesheet" href="{server.url}/x.css"><base href="{server.url}/">'
        )
        text = pages["demo"].read_text().replace("<main>", f"<main>{injected}", 1)
        policy = re.search("<meta http-equiv=.*>\n", text)
        assert policy is not None
        page = tmp_path / "page.html"
        page.write_text(text if guarded else text.replace(policy[0], ""))
        view = browser.new_context().new_page()
        view.goto(page.as_uri())
        sent = view.evaluate(f"fetch('{server.url}/y', {{mode: 'no-cors'}}).then(() => 1, () => 0)")
        asked = {request.path for request in server.requests}
        assert view.locator("#heatmap .cell").count() > 0
        ran, base = view.evaluate("[window.ran ?? 0, document.baseURI]")
    if guarded:
        assert (ran, sent, asked) == (0, 0, set())
        assert base.startswith("file:")
    else:
        assert (ran > 0, sent, asked) == (True, 1, {"/x.png", "/x.css", "/y"})
        assert base.startswith("http:")
