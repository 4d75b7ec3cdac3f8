"""Two runs on one page: the second dashed over the first, on the same axes, as a file and live."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import pytest

from locater.runs.page_data import VALUES, thin
from locater.runs.record_sinks import read_run
from locater.runs.watch_page import Server, watch_page
from tests.conftest import Result
from tests.report.test_watch_page import header, step, warning, write
from tests.report.visits import Visit, data_of, needs_browser


@pytest.fixture(scope="module")
def logs(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Ten observed steps with 3 layers of 4 heads, and six, farther apart, with 2 layers and larger losses."""
    folder = tmp_path_factory.mktemp("two")
    for name in ("small", "large"):
        (folder / name).mkdir()
    first = [header(), *(step(at) for at in range(0, 100, 10)), warning(30), {"kind": "end", "step": 99, "time": 2.0}]
    second = [header(2), *(step(at, 2, loss=50.0 - at / 10) for at in range(0, 180, 30))]
    return [
        write(folder / "small" / "run.jsonl", *first),
        write(folder / "large" / "run.jsonl", *second),
    ]


def test_the_command_takes_two_runs(run: Callable[..., Result], logs: list[Path], tmp_path: Path) -> None:
    result = run("watch", *logs, "--report", tmp_path / "page.html", "--json", tmp_path / "both.json")
    assert result.status == 0, result.err
    assert "10 steps observed" in result.out
    assert "6 steps observed" in result.out
    document = json.loads((tmp_path / "both.json").read_text())
    assert document["other"] == json.loads(run("watch", logs[1], "--json", "-").out)
    assert {**document, "other": None} == {**json.loads(run("watch", logs[0], "--json", "-").out), "other": None}
    assert data_of(tmp_path / "page.html")["names"] == ["small", "large"]
    missing = run("watch", logs[0], tmp_path / "nothing", "--report", tmp_path / "none.html")
    assert (missing.status, len(missing.err.splitlines())) == (2, 1)
    assert "nothing" in missing.err
    assert not (tmp_path / "none.html").exists()


def test_two_runs_share_the_room_of_a_page(logs: list[Path]) -> None:
    run = read_run(logs[0])
    heads, columns = 12, 2
    assert len(thin(run, room=heads * columns * 5)[0]) < len(thin(run, VALUES)[0]) == 10


@needs_browser
@pytest.mark.parametrize(("width", "scheme"), [(1320, "light"), (400, "dark")])
def test_curves_of_both_on_the_same_axes(
    browser: Any, logs: list[Path], tmp_path: Path, width: int, scheme: str
) -> None:
    (tmp_path / "page.html").write_text(watch_page(*map(read_run, logs[:1]), other=read_run(logs[1]), names=("a", "b")))
    visit = Visit(browser, tmp_path / "page.html", scheme, width, choice="#layer=1&head=2&metric=max_logit&step=30")
    assert visit.page.locator("#loss .curve").count() == 2
    assert visit.page.locator("#lines .line").count() == 8
    assert visit.page.locator("#lines .line.dashed").count() == 4
    dash = "e => getComputedStyle(e).strokeDasharray"
    assert [
        visit.page.locator(f"#loss .curve{kind}").evaluate(dash) != "none" for kind in (":not(.second)", ".second")
    ] == [False, True]
    # the loss of the second at its last step lies where both axes say
    assert visit.page.evaluate("axis().domain") == [-15, 165]
    last = visit.page.locator("#loss .curve.second").evaluate(
        "e => { const p = e.getPointAtLength(e.getTotalLength()); return p.x; }"
    )
    assert last == pytest.approx(visit.page.evaluate("charts.loss.sx(150)"), abs=0.2)
    numbers = visit.page.locator("#numbers tr.chosen td").all_text_contents()
    assert [float(x) for x in numbers[1:3]] == pytest.approx(
        [step(30)["heads"]["max_logit"][1][2], step(30, 2)["heads"]["max_logit"][1][2]], abs=0.02
    )
    assert "loss 0.10 (b 47.00)" in visit.text("#read-heatmap")
    visit.page.select_option("#run", "1")  # the maps of the second, at the same step
    assert visit.text("#which") == "Layer 1, head 2, step 30"
    assert visit.page.locator("#heatmap text[text-anchor=end]").all_text_contents()[:3] == ["layer", "0", "1"]
    assert "No warning so far." in visit.text("#warnings")
    assert visit.page.evaluate("location.hash").endswith("run=2")
    visit.page.reload()
    assert visit.page.input_value("#run") == "1"
    visit.page.select_option("#run", "0")
    visit.page.evaluate("change({layer: 2})")
    assert visit.text("#lines-note").endswith("b has no layer 2.")
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.console == []


@needs_browser
def test_both_runs_are_followed_live(browser: Any, tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one.jsonl", "two.jsonl")]
    write(paths[0], header(), step(0), step(10))
    with Server(paths[0], other=paths[1]) as server:
        assert "two.jsonl does not exist yet" in server.waiting
        threading.Thread(target=server.serve_forever, daemon=True).start()
        page = browser.new_context(viewport={"width": 1320, "height": 900}).new_page()
        errors: list[str] = []
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(server.address)
        page.wait_for_selector("#empty-other:has-text('two.jsonl')")
        page.wait_for_selector("#loss .curve")
        assert page.text_content("h1") == "one.jsonl and two.jsonl"
        write(paths[1], header(), step(0, loss=9.0), step(10), step(20))
        page.wait_for_selector("#lines .line.dashed", state="attached", timeout=30_000)
        assert page.locator("#lines .line.dashed").count() == 4
        assert page.locator("#empty-other").is_hidden()
        with urlopen(f"{server.address}other.json?after=0") as answer:
            assert json.load(answer)["steps"] == [0, 10, 20]
        assert errors == []
        page.close()
        server.shutdown()
