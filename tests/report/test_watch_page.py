"""A run's log, what reads it back, where else records go, and the page: as a file and live, in a real browser."""

from __future__ import annotations

import json
import math
import re
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
import torch

from locater import LocaterError
from locater.runs.page_data import Curve, pack, thin
from locater.runs.record_sinks import JsonlSink, Sink, open_sink, read_run
from locater.runs.run_log import RunReader
from locater.runs.watch_page import Server, watch_page
from tests.conftest import Result
from tests.processes import hears_interrupts, python
from tests.report.visits import Visit, data_of, needs_browser

COLUMNS = ["entropy_ratio", "max_logit"]


def header(layers: int = 3, heads: int = 4, **more: Any) -> dict[str, Any]:
    entries = [{"layer": i, "name": f"blocks.{i}.attn", "heads": heads, "kind": "self"} for i in range(layers)]
    return {
        "kind": "run", "schema": 1, "locater": "0.1.0", "source": "Tiny", "every": 10, "layers": entries, "columns": COLUMNS, "time": 1.0,
        **more,
    }  # fmt: skip


def step(at: int, layers: int = 3, count: int = 4, **more: Any) -> dict[str, Any]:
    g = torch.Generator().manual_seed(at)
    numbers = {
        name: (torch.rand(layers, count, generator=g) * size).tolist()
        for name, size in zip(COLUMNS, (1, 20), strict=True)
    }
    return {
        "kind": "step",
        "step": at,
        "time": 1.0,
        "loss": 3.0 / (1 + at),
        "scalars": {"grad_norm": 1.5},
        "heads": numbers,
        **more,
    }


def warning(
    at: int, layer: int = 1, head: int = 2, flag: str = "exploding", value: float | None = 120.0
) -> dict[str, Any]:
    return {
        "kind": "warning", "step": at, "time": 1.0, "layer": layer, "head": head, "name": f"blocks.{layer}.attn", "flag": flag,
        "value": value, "threshold": 100.0, "message": f"layer {layer} head {head} explodes",
    }  # fmt: skip


def write(path: Path, *records: dict[str, Any], end: str = "") -> Path:
    sink = JsonlSink(path)
    for record in records:
        sink.write(record)
    sink.close()
    with path.open("a") as file:
        file.write(end)
    return path


# ---- the log ----


def test_a_log_comes_back_as_it_was_written(tmp_path: Path) -> None:
    records = [
        header(),
        step(0),
        {"kind": "loss", "step": 1, "loss": 2.5},
        step(10),
        warning(10),
        {"kind": "end", "step": 12, "time": 2.0},
    ]
    run = read_run(write(tmp_path / "run.jsonl", *records))
    assert run.header == records[0]
    assert run.steps == [records[1], records[3]]
    assert run.losses == [(0, 3.0), (1, 2.5), (10, 3.0 / 11)]
    assert (run.warnings, run.ended, run.resumed) == ([records[4]], True, ())
    assert read_run(tmp_path) == run  # the folder that holds it
    document = json.loads(run.to_json())
    assert document["schema"] == 1
    assert document["steps"] == run.steps


def test_numbers_that_are_none(tmp_path: Path) -> None:
    nan, inf = float("nan"), float("inf")
    heads = {"entropy_ratio": torch.tensor([[0.5, nan]]), "max_logit": [[inf, None]]}
    path = write(tmp_path / "run.jsonl", header(1, 2), step(0, 1, 2, loss=nan, heads=heads))
    assert json.loads(path.read_text().splitlines()[1], parse_constant=pytest.fail)["heads"]["max_logit"] == [
        [None, None]
    ]
    run = read_run(path)
    assert run.steps[0]["heads"]["entropy_ratio"] == [[0.5, None]]
    assert [(step, math.isnan(loss)) for step, loss in run.losses] == [(0, True)]
    assert "NaN" not in run.to_json()
    # as other writers may put what they do not know
    path.write_text(path.read_text().replace('"loss":"NaN"', '"loss":null'))
    assert read_run(path).losses == []
    path.write_text(path.read_text().replace('"loss":null', '"loss":NaN'))  # as some other writer may put it
    assert math.isnan(read_run(path).losses[0][1])


@pytest.mark.parametrize("cut", [1, 2, 30, 150])
def test_a_torn_last_line_costs_only_itself(tmp_path: Path, cut: int) -> None:
    path = write(tmp_path / "run.jsonl", header(), step(0), step(10))
    whole = path.read_bytes()
    path.write_bytes(whole[:-cut])
    assert [s["step"] for s in read_run(path).steps] == ([0, 10] if cut == 1 else [0])
    held = path.read_bytes()
    write(path, header(), step(10), step(20))  # resumed
    assert path.read_bytes().startswith(held)  # nothing that was there is lost
    run = read_run(path)
    assert [s["step"] for s in run.steps] == [0, 10, 20]
    assert run.resumed == (10,)


def test_what_a_resumed_run_left_behind_is_gone(tmp_path: Path) -> None:
    path = write(tmp_path / "run.jsonl", header(), *(step(at) for at in (0, 10, 20, 30)), warning(10), warning(30))
    again = step(20, loss=9.0)
    run = read_run(write(path, header(), again, step(30, loss=8.0)))
    assert [(s["step"], s["loss"]) for s in run.steps] == [(0, 3.0), (10, 3.0 / 11), (20, 9.0), (30, 8.0)]
    assert [w["step"] for w in run.warnings] == [10]
    assert not run.ended
    run = read_run(write(path, header(), step(0)))  # from the start again
    assert [s["step"] for s in run.steps] == [0]


BAD = [
    ("hello\nworld\n", "line 1 is not a JSON object"),
    (json.dumps(step(0)) + "\n", "line 1 comes before any run record"),
    (json.dumps(header(schema=7)) + "\n", "schema 7"),
    (json.dumps(header(layers=1) | {"layers": [{}]}) + "\n", "without layers"),
    (json.dumps(header()) + '\n{"kind": "st\n' + json.dumps(step(0)) + "\n", "line 2 is not a JSON object"),
    (json.dumps(header()) + "\n\n" + json.dumps({"kind": "dance", "step": 1}) + "\n", "line 3 has the kind 'dance'"),
    (
        json.dumps(header()) + "\n" + json.dumps({"kind": "loss", "step": "x", "loss": 1}) + "\n",
        "line 2 has the step 'x'",
    ),
    (json.dumps(header()) + "\n" + json.dumps({"kind": "step", "step": 1}) + "\n", "line 2 lacks 'heads'"),
    (json.dumps(header()) + "\n" + json.dumps(step(0, layers=2)) + "\n", "3 layers"),
    (json.dumps(header()) + "\n" + json.dumps(step(0, count=5)) + "\n", "'entropy_ratio' of layer 0 not as 4 numbers"),
    (json.dumps(header()) + "\n" + json.dumps(step(0, loss="low")) + "\n", "loss 'low'"),
    (json.dumps(header()) + "\n" + json.dumps(header(2)) + "\n", "other layers"),
    (json.dumps(header()) + "\n" + json.dumps(warning(0) | {"layer": [3]}) + "\n", "warning whose layer"),
    ("", "has no run yet"),
    ("\x00\x01\xff", "has no run yet"),
]


@pytest.mark.parametrize(("text", "what"), BAD)
def test_what_is_no_log_is_refused_in_one_line(
    tmp_path: Path, run: Callable[..., Result], text: str, what: str
) -> None:
    path = tmp_path / "run.jsonl"
    path.write_bytes(text.encode("latin-1"))
    with pytest.raises(LocaterError, match=re.escape(what)) as caught:
        read_run(path)
    assert str(path) in str(caught.value)
    result = run("watch", path, "--report", tmp_path / "page.html")
    assert (result.status, len(result.err.splitlines())) == (2, 1)
    assert not (tmp_path / "page.html").exists()


def test_a_folder_must_leave_no_doubt(tmp_path: Path) -> None:
    for problem in ("no run log there", None, "a.jsonl, b.jsonl"):
        if problem:
            with pytest.raises(LocaterError, match=problem):
                read_run(tmp_path)
        else:
            write(tmp_path / "a.jsonl", header())
            assert read_run(tmp_path).steps == []
            write(tmp_path / "b.jsonl", header())


# ---- sinks ----


def test_sinks_by_name(tmp_path: Path) -> None:
    sink = open_sink(tmp_path / "run.jsonl")
    assert isinstance(sink, JsonlSink)
    assert isinstance(sink, Sink)
    assert open_sink(sink) is sink
    sink.close()
    sink.close()
    for spec in ("comet", "run.json", "tensorboard:", "wandb:x"):
        with pytest.raises(LocaterError, match="tensorboard:FOLDER, wandb, trackio"):
            open_sink(spec)
    with pytest.raises(LocaterError, match="write"):
        open_sink(3)  # type: ignore[arg-type]
    with pytest.raises(LocaterError, match="cannot be written"):
        open_sink(tmp_path / "no" / "run.jsonl")


def test_a_file_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a corpus"}\n')
    with pytest.raises(LocaterError, match="is not a run log"):
        JsonlSink(tmp_path / "data.jsonl")
    assert (tmp_path / "data.jsonl").read_text() == '{"text": "a corpus"}\n'


# ---- the page ----


def fed(*records: dict[str, Any]) -> Any:
    reader = RunReader(Path("run.jsonl"))
    reader.feed(json.dumps(record).encode() for record in records)
    return reader.run()


def test_a_large_run_weighs_little_and_says_what_is_drawn() -> None:
    names = [f"column_{i}" for i in range(8)]
    g = torch.Generator().manual_seed(0)
    numbers = torch.randn(32, 32, generator=g).tolist()
    steps = [step(at * 50, 32, 32, heads=dict.fromkeys(names, numbers)) for at in range(500)]
    reader = RunReader(Path("run.jsonl"))
    reader._add_record(header(32, 32, columns=names))
    for record in [*steps, *(warning(at * 50, head=at % 32) for at in range(0, 500, 7))]:
        reader._add_record(record)
    run = reader.run()
    assert run is not None
    page = watch_page(run)
    assert len(page) < 6e6
    drawn, stride = thin(run)
    assert stride == 2
    assert drawn[0] is steps[0]
    assert drawn[-1] is steps[-1]
    assert {w["step"] for w in run.warnings[:10]} <= {record["step"] for record in drawn}


def test_thinned_losses_keep_spikes_and_gaps() -> None:
    losses = [(i, 1.0 + i % 3 / 100) for i in range(50_000)]
    losses[777], losses[30_001] = (777, 50.0), (30_001, math.nan)
    kept = Curve(losses).points()
    assert len(kept) < 2_000
    assert {losses[777], losses[30_001], losses[0], losses[-1]} <= set(kept)
    assert kept == sorted(kept)


def test_warnings_of_a_head_are_one_entry_with_its_beginnings() -> None:
    records = [
        header(),
        *(step(at) for at in range(0, 70, 10)),
        *(warning(at, value=100.0 + at) for at in (10, 20, 40, 50, 60)),
    ]
    run = fed(*records)
    (group,) = pack(run, *thin(run))["warnings"]
    assert (group["steps"], group["last"], group["count"], group["worst"]) == ([10, 40], 60, 5, 160.0)


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("watch")
    losses = [{"kind": "loss", "step": at, "loss": 3.0 / (1 + at)} for at in range(1, 100) if at % 10]
    usual = [
        header(),
        *(step(at) for at in range(0, 100, 10)),
        *losses,
        *(warning(at) for at in (30, 40, 70)),
        warning(50, 2, 0, "locked", 0.04),
    ]
    cross = header(2, 4)
    cross["layers"][1] |= {"kind": "cross", "name": "decoder.0.cross", "heads": 2}
    hostile = header(
        1, 2, source="</script><script>alert(1)</script>", columns=["<img src=x>", "constructor", "__proto__"]
    )
    hostile["layers"][0]["name"] = "<!--<script>@DATA@"
    empty = {"entropy_ratio": [[None, 0.5], None], "max_logit": [[None] * 2] * 2}
    mixed = {"entropy_ratio": [[0.1, 0.2, 0.3, 0.4], [0.5, 0.7]], "max_logit": [[-3.0] * 4, None]}
    odd = {"<img src=x>": [[1.0, 2.0]], "constructor": [[1.0, -2.0]]}
    headless = header()
    headless["layers"][1]["heads"] = 0
    without = {name: [[0.5] * 4, [], [0.25] * 4] for name in COLUMNS}
    alike = {
        "entropy_ratio": [[0.99991, 0.99992, 0.99993, 0.99994]] * 3,
        "max_logit": [[1000.0, 1000.25, 1000.5, 1000.75]] * 3,
    }
    huge = [step(at) for at in range(0, 40, 10)]
    huge[1]["heads"]["max_logit"][1][2], huge[2]["heads"]["max_logit"][1][2] = 1e39, 1.7e308
    huge[1]["loss"], huge[2]["loss"] = 1.7e308, -1.7976931348623157e308
    runs = {
        "usual": fed(*usual, {"kind": "end", "step": 99, "time": 2.0}),
        "resumed": fed(*usual, header(), step(50, loss=None), step(60)),
        "single": fed(header(1, 1), step(0, 1, 1)),
        "nulls": fed(header(2, 2), *(step(at, 2, 2, loss=None, heads=empty) for at in (0, 10))),
        "cross": fed(cross, *(step(at, heads=mixed) for at in (0, 10, 20))),
        "hostile": fed(hostile, step(0, 1, 2, heads=odd, scalars={"<b>": 1.0, "valueOf": 2.0}), warning(0, 0, 1, "<i>odd</i>", None)),
        "silent": fed(header()),
        "none": fed(header(0)),
        "headless": fed(headless, *(step(at, heads=without) for at in (0, 10))),
        "alike": fed(header(), *(step(at, loss=2.30258 + at / 1e6, heads=alike) for at in range(0, 100, 10))),
        "huge": fed(header(), *huge),
    }  # fmt: skip
    for name, run in runs.items():
        (folder / f"{name}.html").write_text(watch_page(run))
    return {p.stem: p for p in folder.iterdir()}


def test_page_stands_alone(pages: dict[str, Path]) -> None:
    for name, page in pages.items():
        text = page.read_text()
        assert text.count("</script>") == 2, name
        assert len(re.findall(r"https?://", text)) == 1, name  # the name space of SVG
    assert data_of(pages["hostile"])["layers"][0]["name"] == "<!--<script>@DATA@"


@needs_browser
@pytest.mark.parametrize(
    "name", ["usual", "resumed", "single", "nulls", "cross", "hostile", "silent", "none", "headless", "alike", "huge"]
)
@pytest.mark.parametrize(("width", "scheme"), [(1320, "light"), (400, "dark")])
def test_every_run_is_drawn_without_a_word_on_the_console(
    browser: Any, pages: dict[str, Path], name: str, width: int, scheme: str
) -> None:
    visit = Visit(browser, pages[name], scheme, width)
    asked: list[str] = []
    visit.page.on("request", lambda request: asked.append(request.url))
    visit.page.reload()
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    if name == "none":
        assert visit.text("#empty") == "This run observes no attention layer."
    else:
        assert visit.page.locator("#heatmap image").count() == (name != "silent")
        rows = visit.page.locator("#metric option").all_text_contents()
        assert len(rows) == len(data_of(pages[name])["columns"])
        for option in data_of(pages[name])["columns"]:
            visit.page.select_option("#metric", option)
        scales = "[...document.querySelectorAll('svg')].filter(s => s.firstChild && s.clientWidth).map(s => s.getScreenCTM().a)"
        assert visit.page.evaluate(scales) == pytest.approx([1.0] * 4, abs=0.01)
        beyond = """[...document.querySelectorAll('svg text')].filter(t => {
            const a = t.getBoundingClientRect(), card = t.closest('.card').getBoundingClientRect();
            return a.width && (a.left < card.left || a.right > card.right); }).map(t => t.textContent)"""
        assert visit.page.evaluate(beyond) == []
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.console == []


@needs_browser
def test_numbers_on_the_page_are_those_of_the_log(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["usual"], choice="#layer=1&head=2&step=30&metric=max_logit")
    numbers = step(30)["heads"]["max_logit"][1]
    want = [numbers[2], sum(numbers) / 4, min(numbers), max(numbers)]
    cells = visit.page.locator("#numbers tr.chosen td").all_text_contents()[1:]
    assert [float(cell) for cell in cells] == pytest.approx(want, abs=0.02)
    assert visit.text("#which") == "Layer 1, head 2, step 30"
    assert visit.text("#status") == "ended, last step 99"
    for how, value in (("mean", want[1]), ("min", want[2]), ("max", want[3])):
        assert visit.page.evaluate(f"over('max_logit', 3, 1, '{how}')") == pytest.approx(value, rel=1e-3)
    assert visit.page.locator("#lines .line").count() == 4
    assert "exploding: 100" in visit.text("#lines")


@needs_browser
def test_click_keys_and_pointer(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["usual"])
    assert visit.text("#which") == "Layer 1, head 2, step 90"  # the first head that was warned of, the last step
    box = visit.page.evaluate("""(() => {
        const c = charts.heatmap, a = c.svg.getBoundingClientRect();
        return [a.left + c.sx(40), a.top + c.box.top + 2.5 * c.cell]; })()""")
    visit.page.mouse.move(*box)
    assert visit.text("#read-heatmap").startswith("Layer 2, step 40: mean 0.")
    assert visit.page.locator("svg .cross").count() == 4
    visit.page.mouse.click(*box)
    assert visit.text("#which") == "Layer 2, head 2, step 40"
    visit.page.focus("#heatmap")
    for key in ("ArrowUp", "ArrowRight", "ArrowRight", "ArrowLeft"):
        visit.page.keyboard.press(key)
    assert visit.text("#which") == "Layer 1, head 2, step 50"
    visit.page.focus("#heads")
    for key in ("ArrowDown", "ArrowDown", "Home"):  # there is no head 4
        visit.page.keyboard.press(key)
    assert visit.text("#which") == "Layer 1, head 3, step 0"
    visit.page.select_option("#over", "max")
    visit.page.reload()
    assert visit.text("#which") == "Layer 1, head 3, step 0"
    assert visit.page.input_value("#over") == "max"
    visit.page.select_option("#curve", "grad_norm")
    assert "grad_norm" in visit.text("#loss")
    assert visit.console == []


@needs_browser
def test_warnings_are_marks_and_a_list(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["usual"])
    assert visit.page.locator("#loss .alarm").count() == 3  # 30, 50, 70: at 40 it went on
    assert visit.page.locator("#heatmap .mark").count() == 3
    assert visit.page.locator("#heads .mark").count() == 2
    assert visit.page.locator("button.flag").all_text_contents() == ["exploding · 1 head", "locked · 1 head"]
    assert "logits beyond 200 were observed" in visit.text("#warnings")
    assert "Clip or normalise queries and keys" in visit.text("#warnings")
    rows = visit.page.locator("#warnings tbody tr")
    assert [" ".join(text.split()) for text in rows.locator("td").all_text_contents()][:4] == [
        "30 to 70 (3 times)",
        "1",
        "2",
        "120 (100)",
    ]
    rows.nth(1).click()
    assert visit.text("#which") == "Layer 2, head 0, step 50"
    visit.page.click('button[data-flag="exploding"]')
    assert visit.page.input_value("#metric") == "max_logit"  # the number that raised it
    assert visit.text("#which") == "Layer 1, head 2, step 30"
    assert visit.page.locator("#heatmap .mark.dim").count() == 1
    assert visit.page.locator("#warnings tbody tr").count() == 1


@needs_browser
def test_what_is_missing_is_said(browser: Any, pages: dict[str, Path]) -> None:
    nulls = Visit(browser, pages["nulls"], choice="#layer=1&head=0&metric=max_logit")
    assert "this log holds no loss" in nulls.text("#loss")
    assert nulls.text("#lines-note") == "No number of this metric for this layer."
    assert "no step observed yet" in Visit(browser, pages["silent"]).text("#heatmap")
    cross = Visit(browser, pages["cross"], choice="#layer=1&head=1")
    assert "cross-attention · 2 heads" in cross.text("#where")
    assert cross.page.locator("#lines .line").count() == 2
    resumed = Visit(browser, pages["resumed"])
    assert "Resumed at step 50" in resumed.text("#counts")
    assert "had not ended" in resumed.text("#status")


@needs_browser
def test_a_loss_is_not_known_or_not_a_number(browser: Any, tmp_path: Path) -> None:
    records = [
        header(),
        step(0, loss=2.0),
        step(10, loss=None),
        step(20, loss="NaN"),
        step(30, loss="Infinity"),
        step(40, loss=1.0),
    ]
    (tmp_path / "page.html").write_text(watch_page(fed(*records)))
    visit = Visit(browser, tmp_path / "page.html", choice="#step=20&layer=0")
    marks = visit.page.locator("#loss .threshold title").all_text_contents()
    assert marks == ["step 20: loss is not a number", "step 30: loss is not a number"]  # nothing at step 10
    assert visit.text("#read-heatmap").endswith("loss NaN")
    assert "NaNloss" in visit.text("#facts")
    visit.page.keyboard.press("Tab")
    visit.page.focus("#heatmap")
    visit.page.keyboard.press("ArrowLeft")
    assert "loss" not in visit.text("#read-heatmap")


@needs_browser
def test_ticks_can_be_told_apart_and_numbers_keep_their_size(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["alike"])
    for metric in COLUMNS:
        visit.page.select_option("#metric", metric)
        for chart in ("loss", "lines"):
            beside = visit.page.locator(f"#{chart} text[text-anchor=end]").all_text_contents()
            assert len(beside) >= 3
            assert len(set(beside)) == len(beside), beside
    assert "from 2.302" in visit.text("#loss")
    assert visit.page.evaluate("run.values.entropy_ratio[3].slice(0, 4)[1]") == pytest.approx(0.99992, abs=1e-7)
    huge = Visit(browser, pages["huge"], choice="#layer=1&head=2&metric=max_logit&step=10")
    numbers = [step(10)["heads"]["max_logit"][1][head] for head in range(4)]
    assert huge.page.evaluate("run.values.max_logit[1].slice(4, 8)[3]") == pytest.approx(numbers[3], rel=1e-3)
    assert huge.page.evaluate("run.values.max_logit[2][6]") == pytest.approx(1.7e308)
    assert huge.text("#read-heads") == "Head 2, step 10: 1.00e+39"
    assert "NaN" not in huge.inside("#lines") + huge.inside("#loss")
    headless = Visit(browser, pages["headless"], choice="#layer=1&head=0")
    assert headless.text("#which") == "Layer 1, no heads, step 10"
    headless.page.focus("#heatmap")
    headless.page.keyboard.press("ArrowDown")
    assert headless.text("#which") == "Layer 2, head 0, step 10"
    assert visit.console + huge.console + headless.console == []


@needs_browser
def test_a_comparison_says_what_it_means(browser: Any, tmp_path: Path) -> None:
    (tmp_path / "page.html").write_text(
        watch_page(fed(header(), step(0), warning(0, flag="max_logit>50"), warning(0, flag="novel>1")))
    )
    visit = Visit(browser, tmp_path / "page.html")
    assert (
        "max_logit>50: the softmax saturates and passes on hardly any gradient. Lower the learning rate, or attach "
        "locater.SigmaReparam()." in visit.text("#warnings")
    )
    assert "novel>1: layer 1 head 2 explodes" in visit.text("#warnings")
    visit.page.click('button[data-flag="max_logit>50"]')
    assert visit.page.input_value("#metric") == "max_logit"


# ---- live ----


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Server]:
    with Server(tmp_path / "run.jsonl") as opened:
        thread = threading.Thread(target=opened.serve_forever, daemon=True)
        thread.start()
        yield opened
        opened.shutdown()


def ask(server: Server, after: int) -> dict[str, Any]:
    with urlopen(f"{server.address}run.json?after={after}") as answer:
        return dict(json.load(answer))


def test_a_page_gets_only_what_it_lacks(server: Server) -> None:
    path = server.follower.path
    assert ask(server, 0) == {"waiting": str(path)}
    write(path, header(), step(0), step(10), end=json.dumps(step(20))[:40])  # caught in the middle of a line
    first = ask(server, 0)
    assert (first["keep"], first["steps"]) == (0, [0, 10])
    assert set(ask(server, first["revision"])) == {"revision", "age"}
    with path.open("a") as file:
        file.write(json.dumps(step(20))[40:] + "\n")
    second = ask(server, first["revision"])
    assert (second["keep"], second["steps"]) == (2, [20])
    assert len(second["values"]["max_logit"][2]) == 32  # one step of 12 heads
    write(path, header(), step(10, loss=7.0))  # resumed from step 10
    third = ask(server, second["revision"])
    assert (third["keep"], third["steps"], third["resumed"]) == (1, [10], [10])
    assert ask(server, 12345)["keep"] == 0  # a page of another server
    path.unlink()
    write(path, header(1, 1), step(0, 1, 1))  # another run under the same name
    fresh = ask(server, third["revision"])
    assert (fresh["keep"], len(fresh["layers"])) == (0, 1)
    with path.open("a") as file:
        file.write("no record\nnor this\n")
    assert "line 3 is not a JSON object" in ask(server, 0)["error"]


def test_the_server_serves_its_own_machine_only(server: Server) -> None:
    assert server.server_address[0] == "127.0.0.1"
    for path, host, status in (("", "evil.example", 403), ("etc/passwd", "localhost:80", 404)):
        with pytest.raises(HTTPError) as caught:
            urlopen(Request(server.address + path, headers={"Host": host}))
        assert caught.value.code == status
        caught.value.close()
    with urlopen(server.address) as answer:
        assert "connect-src 'self'" in answer.headers["Content-Security-Policy"]
    with pytest.raises(LocaterError, match="--port"):
        Server(server.follower.path, server.server_address[1])


@needs_browser
def test_the_live_page_follows_the_run(browser: Any, server: Server) -> None:
    path = server.follower.path
    page = browser.new_context(viewport={"width": 1320, "height": 900}).new_page()
    console: list[str] = []
    asked: set[str] = set()
    page.on("console", lambda m: console.append(m.text))
    page.on("pageerror", lambda e: console.append(str(e)))
    page.on("request", lambda request: asked.add(request.url.partition("?")[0]))
    page.goto(server.address)
    page.wait_for_selector("#empty:has-text('Nothing in')")
    assert page.text_content("#status") == "waiting for the run to begin"
    write(path, header(), step(0), step(10), end='{"kind":"st')
    page.wait_for_selector("#status:has-text('live, last step 10, ')", timeout=30_000)
    assert page.text_content("h1") == "Tiny"
    assert page.text_content("#which") == "Layer 0, head 0, step 10"
    write(path, header(), step(20), warning(20), {"kind": "end", "step": 20})
    page.wait_for_selector("#status:has-text('ended, last step 20')", timeout=30_000)
    assert page.text_content("#which") == "Layer 0, head 0, step 20"  # it stays with the last step
    assert page.evaluate("run.values.max_logit.map(v => v[0])") == pytest.approx(
        [step(at)["heads"]["max_logit"][0][0] for at in (0, 10, 20)], rel=1e-3
    )
    assert page.locator("#heatmap .mark").count() == 1
    assert console == []
    assert {url for url in asked if not url.startswith("data:")} == {server.address, server.address + "run.json"}
    page.close()


def test_the_command_serves_and_stops(tmp_path: Path) -> None:
    write(tmp_path / "run.jsonl", header(), step(0))
    command = [python(), "-m", "locater", "watch", str(tmp_path)]
    pipes: dict[str, Any] = dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    with subprocess.Popen(command, preexec_fn=hears_interrupts, **pipes) as process:
        assert process.stdout is not None
        line = process.stdout.readline()
        address = re.search(r"http://127\.0\.0\.1:\d+/", line)
        assert address is not None, line
        with urlopen(address[0] + "run.json") as answer:
            assert json.load(answer)["steps"] == [0]
        time.sleep(0.2)
        process.send_signal(signal.SIGINT)
        try:
            out, err = process.communicate(timeout=60)
        finally:
            process.kill()
        assert (process.returncode, out, err) == (0, "", "")


def test_the_command_writes_a_page_and_data(run: Callable[..., Result], tmp_path: Path) -> None:
    log = write(tmp_path / "run.jsonl", header(), step(0), step(10), warning(10))
    result = run("watch", log, "--report", tmp_path / "page.html", "--json", tmp_path / "run.json")
    assert result.status == 0, result.err
    assert "3 attention layers, 2 steps observed, last step 10, not ended; exploding at 1 head" in " ".join(
        result.out.split()
    )
    assert f"Page written to {tmp_path / 'page.html'}" in result.out
    document = json.loads((tmp_path / "run.json").read_text())
    assert document == json.loads(run("watch", log, "--json", "-").out)
    assert [s["step"] for s in document["steps"]] == [0, 10]
    assert run("watch", tmp_path / "missing", "--json", "-").status == 2
    assert run("watch", log, "--port", "-1").status == 2
