"""The page of checkpoints: its packed numbers, and what a browser shows of steps, gaps, repeats and two runs."""

from __future__ import annotations

import json
import math
from io import StringIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from rich.console import Console

from locater.report.trajectory import VALUES, pack_numbers, print_trajectory, trajectory_page, unpack_numbers
from locater.results.scan import NUMERIC_COLUMNS
from locater.results.trajectory import trajectory
from tests.report.visits import Visit, data_of, needs_browser

STEPS = [step for step in range(0, 1001, 50) if step not in (300, 350, 700)]
ALL = set(range(0, 1001, 50))


def made_rows(
    run: str, steps: list[int], layers: int = 3, heads: int = 4, repeats: int | None = None
) -> list[dict[str, Any]]:
    """Heads whose numbers follow from their place. `repeats` has the weights of step 100."""
    table = []
    for step in steps:
        weights = 100 if step == repeats else step
        for layer in range(layers):
            for head in range(heads):
                M = math.sin(layer + 2.5 * head + weights / 300) * weights / 250
                F = (layer + head + 1) * weights**2 / 4e5 + 0.04
                numbers = {name: (at + 1) * 0.1 + weights / 1000 for at, name in enumerate(NUMERIC_COLUMNS)}
                numbers |= {"M": M, "F": F, "S": F / 3, "scale": 0.25}
                sharp = ["sharp"] if F > 10 else []
                table.append(
                    {
                        "layer": layer,
                        "head": head,
                        "kind": "self",
                        "width": 32,
                        "head_dim": 8,
                        **numbers,
                        "flags": sharp + ["antisymmetric"] * (M < -1),
                        "faults": sharp,
                        "source": f"runs/{run}/step-{step}",
                        "run": run,
                        "step": step,
                        "digest": f"{run}{weights}",
                        "layer_name": f"blocks.{layer}.attn",
                    }
                )
    return table


@pytest.fixture(scope="module")
def document() -> dict[str, Any]:
    """Two runs. `first` lacks steps 300 and 350, step 700 failed, and step 150 has the weights of step 100."""
    table = made_rows("first", STEPS, repeats=150) + made_rows("second", list(range(0, 1001, 100)))
    return trajectory(table, {"runs/first/step-700": "the file is <b>cut</b> short", "elsewhere": "not found"})


@pytest.fixture(scope="module")
def page(document: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("trajectory") / "page.html"
    path.write_text(trajectory_page(document), encoding="utf-8")
    return path


def opened(browser: Any, page: Path, choice: str = "", **options: Any) -> Visit:
    visit = Visit(browser, page, choice=choice, **options)
    visit.page.wait_for_selector("html[data-ready]")
    return visit


def test_numbers_are_packed_to_six_digits() -> None:
    x = np.concatenate([10.0 ** np.linspace(-300, 300, 500), -np.geomspace(1e-9, 1e9, 500), [0.0, 1.7e308, -5e-324]])
    assert np.all(np.abs(unpack_numbers(pack_numbers(x)) - x) <= 2.0**-21 * np.abs(x) + 1e-320)
    assert np.isnan(unpack_numbers(pack_numbers([math.nan, math.inf, None]))).all()


def test_the_data_of_the_page(document: dict[str, Any], page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "src=" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")
    data = data_of(page)
    first = data["runs"][0]
    assert (len(first["steps"]), max(first["rows"]) + 1) == (18, 17), "equal weights are stored once"
    assert first["rows"][STEPS.index(150)] == first["rows"][STEPS.index(100)]
    values = unpack_numbers(first["values"]["M"]).reshape(12, 17)
    for at, layers in enumerate(document["runs"][0]["values"]["M"]):
        assert values[:, first["rows"][at]] == pytest.approx(np.concatenate(layers), rel=1e-6)
    assert data["opening"]["two"]
    assert data["unplaced"] == ["elsewhere (not found)"]


def test_columns_without_room_are_named(document: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    assert VALUES > 150 * 1024 * 20, "150 checkpoints of 1,024 heads have all columns of a scan that a page explains"
    monkeypatch.setattr("locater.report.trajectory.VALUES", 1)
    text = trajectory_page(document)
    assert "Only in the data, to keep this page small: scale, trace, trace_of_square" in text
    assert '"residual_kept":{"label"' in text


def test_fifty_checkpoints_of_64_heads_are_small() -> None:
    table = made_rows("run", list(range(0, 1000, 20)), layers=8, heads=8)
    assert len(trajectory_page(trajectory(table, {}))) < 400_000


def test_the_terminal_tells_the_same(document: dict[str, Any]) -> None:
    console = Console(file=StringIO(), width=100)
    print_trajectory(document, console)
    text = " ".join(console.file.getvalue().split())  # type: ignore[attr-defined]
    assert "2 runs. first: 18 checkpoints of 12 heads in 3 layers, steps 0 to 1,000" in text
    assert "2 steps are missing: 300 to 350." in text
    assert "runs/first/step-700 (the file is <b>cut</b> short)" in text
    assert "1 of 29 checkpoints has the queries, keys and norms of another: first 100 = first 150." in text
    assert "first: medians over heads at 6 of 18 checkpoints" in text


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1320, "light"), (800, "dark"), (400, "dark")])
def test_the_slider_moves_the_map(browser: Any, document: dict[str, Any], page: Path, width: int, scheme: str) -> None:
    visit = opened(browser, page, "#a=0&b=none&layer=1&head=2&metric=M&step=1000", width=width, scheme=scheme)
    assert visit.page.evaluate("slots") == sorted(ALL)
    before = visit.page.get_attribute("#map-a image", "href")
    values = document["runs"][0]["values"]["M"]
    for step in (1000, 450, 0):
        visit.page.locator("#slot").fill(str(sorted(ALL).index(step)))
        expected = values[STEPS.index(step)]
        shown = visit.page.evaluate(
            "RUNS[0].layers.map((l, y) => Array.from({length: l.heads}, (_, h) => number(RUNS[0], 'M', indexOf(RUNS[0]), y, h)))"
        )
        assert np.array(shown) == pytest.approx(np.array(expected), rel=1e-6, abs=1e-12)
        assert f"step {step:,}" in visit.text("#title-a")
        number = float(visit.page.locator("#read-a b").nth(2).text_content() or "")
        assert number == pytest.approx(expected[1][2], abs=0.006)
        chosen = visit.page.locator("#numbers tr.chosen td").all_text_contents()
        assert [float(x) for x in chosen[1:]] == pytest.approx(
            [expected[1][2], 0.0, expected[1][2] - values[0][1][2]], abs=0.006
        )
    assert visit.page.get_attribute("#map-a image", "href") != before
    visit.page.locator("#slot").press("ArrowRight")
    assert "step 50," in visit.text("#when").replace("</b>", "")
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.console == []


@needs_browser
def test_gaps_failures_and_repeats_are_shown_and_not_filled(browser: Any, page: Path) -> None:
    visit = opened(browser, page, "#a=0&b=none&layer=0&head=0&metric=M&step=700")
    assert visit.text("#note-a") == "step 700: could not be read: the file is <b>cut</b> short"
    assert "no checkpoint" in visit.text("#when")
    assert "no checkpoint" in visit.text("#map-a")
    route = visit.page.get_attribute("#lines .line.chosen", "d") or ""
    assert route.count("M") == 3, "broken at the gap and at the failed source"
    assert (visit.page.locator("#lines .band").count(), visit.page.locator("#lines .cross-mark").count()) == (2, 1)
    assert visit.page.evaluate("cells(RUNS[0])[5]") == [225, 275]  # up to the gap, which begins at 300
    assert visit.page.evaluate("cells(RUNS[0])[6]") == [375, 425]
    visit.page.click("#missing button:has-text('steps 300 to 350')")
    assert visit.text("#note-a").startswith("step 300: missing: the run has a checkpoint every 50 steps")
    assert "elsewhere (not found)" in visit.text("#missing")
    visit.page.click("#missing button:has-text('150')")
    assert visit.text("#note-a").endswith("the same queries, keys and norms as step 100")
    assert "(= 100)" in visit.text("#when")
    assert visit.page.locator("#lines .repeat").count() == 1
    for place in ("#note-a", "#missing"):
        assert visit.page.locator(f"{place} b").count() == 0, "reasons are text and not markup"
    assert visit.console == []


@needs_browser
def test_first_flags_heads_and_keys(browser: Any, document: dict[str, Any], page: Path) -> None:
    visit = opened(browser, page, "#a=0&b=none")
    first = min((x for x in document["runs"][0]["findings"] if x["first_fault"]), key=lambda x: x["first_fault"])
    assert visit.text("#which").startswith(f"Layer {first['layer']}, head {first['head']} ")  # opens on the first fault
    visit.page.evaluate("change({layer: 0, head: 0, step: 0})")
    visit.page.locator("#firsts button[data-at]").first.click()
    assert f"step {first['first_fault']:,}" in visit.text("#title-a")
    assert visit.text("#which").startswith(f"Layer {first['layer']}, head {first['head']} ")
    assert "sharp" in visit.text("#read-a")
    assert visit.page.locator("#map-a .mark:not(.calm)").count() >= 2, "a dot on the map, and one in its legend"
    visit.page.locator("#map-a").focus()
    visit.page.keyboard.press("ArrowUp")
    visit.page.keyboard.press("ArrowLeft")
    visit.page.keyboard.press("PageUp")
    visit.until(f"state.step < {first['first_fault']}")
    assert visit.text("#which").startswith(f"Layer {first['layer'] - 1}, head {first['head'] - 1} ")
    box = visit.page.locator("#map-a").bounding_box()
    cell = visit.page.evaluate("charts['map-a']")
    visit.page.mouse.click(box["x"] + cell["left"] + 1.5 * cell["cellW"], box["y"] + cell["top"] + 2.5 * cell["cellH"])
    assert visit.text("#which").startswith("Layer 2, head 1 ")
    visit.page.locator("#lines .hit[data-head='3']").dispatch_event("click")
    assert visit.text("#which").startswith("Layer 2, head 3 ")
    visit.until("location.hash.includes('layer=2&head=3')")
    visit.page.select_option("#metric", "sqrtF")
    visit.until("RUNS[0].tables.sqrtF")
    at = visit.page.evaluate("indexOf(RUNS[0])")
    F = document["runs"][0]["values"]["F"][at][2][3]
    assert visit.page.evaluate("number(RUNS[0], 'sqrtF', indexOf(RUNS[0]), 2, 3)") == pytest.approx(F**0.5, rel=1e-6)
    visit.page.reload()
    visit.page.wait_for_selector("html[data-ready]")
    assert visit.text("#which").startswith("Layer 2, head 3 over steps: √F")
    assert visit.console == []


@needs_browser
def test_two_runs_side_by_side_on_one_scale(browser: Any, document: dict[str, Any], page: Path) -> None:
    visit = opened(browser, page, "#layer=2&head=1&metric=F&step=500")
    assert (visit.text("#title-a"), visit.text("#title-b")) == ("A: first, step 500", "B: second, step 500")
    boxes = [visit.page.locator(f"#map-{x}").bounding_box() for x in "ab"]
    assert boxes[0]["y"] == boxes[1]["y"]
    assert boxes[0]["x"] + boxes[0]["width"] < boxes[1]["x"]
    legends = [visit.page.locator(f"#map-{x} text").all_text_contents() for x in "ab"]
    assert legends[0] == legends[1], "the same layers, heads and ends of the colours"
    a, b = (
        document["runs"][i]["values"]["F"][[x["step"] for x in document["runs"][i]["steps"]].index(500)][2][1]
        for i in (0, 1)
    )
    numbers = visit.page.locator("#numbers tr.chosen td").all_text_contents()
    assert [float(x) for x in numbers[1:]] == pytest.approx([a, b, b - a], abs=0.006)
    assert visit.page.locator("#lines .line.second").count() == 4
    visit.page.evaluate("change({step: 450})")
    assert visit.text("#note-b") == "step 450: no checkpoint of this run at this step"
    visit.page.select_option("#run-b", "")
    visit.page.wait_for_selector("#card-b", state="hidden")
    assert visit.page.locator("#lines .line").count() == 4
    visit.page.select_option("#run-a", "1")
    visit.until("document.getElementById('title-a').textContent.startsWith('second')")
    assert visit.page.locator("#lines .band").count() == 0, "the second run has no gap"
    assert visit.console == []


@needs_browser
def test_a_page_of_nothing_and_of_one_checkpoint(browser: Any, tmp_path: Path) -> None:
    empty, single = tmp_path / "empty.html", tmp_path / "single.html"
    empty.write_text(trajectory_page(trajectory([], {"a": "not found"})))
    visit = Visit(browser, empty)
    assert visit.page.locator("#empty").is_visible()
    assert "a (not found)" in visit.text("header")
    assert visit.console == []
    table = made_rows("one", [0], layers=1, heads=1)
    table[0] |= dict.fromkeys(NUMERIC_COLUMNS) | {
        "flags": ["nonfinite"],
        "faults": ["nonfinite"],
        "step": None,
    }
    table.append({**table[0], "source": "runs/one/other", "M": 1.0, "flags": [], "faults": []})
    table += [{**table[1], "run": "none", "step": 0, "source": x, "digest": x, "length": None} for x in ("p", "q")]
    single.write_text(trajectory_page(trajectory(table, {})))
    visit = opened(browser, single, width=400)
    assert "p (step 0 exists more than once with different weights: p, q)" in visit.text("header")
    assert visit.page.evaluate("RUNS.length") == 1, "a run without a checkpoint to show is named, and not drawn"
    assert visit.text("#title-a") == "one, other"
    visit.page.locator("#back").click()
    assert visit.page.locator("#map-a .broken").count() >= 1
    assert json.loads(visit.page.evaluate("JSON.stringify(slots)")) == [0, 1]
    assert visit.console == []
