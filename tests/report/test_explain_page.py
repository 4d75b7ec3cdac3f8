"""The page of explanations in a real browser."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from locater.explain.explanation import Explanation, Target
from locater.report.explanation import unpack_table
from locater.results.explanations import (
    DeletionCurve,
    Explanations,
    HeadShare,
    LengthShare,
    Pattern,
    Picture,
    Prediction,
    TokenStream,
)
from tests.report.visits import Visit, data_of, needs_browser

HOSTILE = "</script><img src=x onerror=alert(1)>@TITLE@"
LONG = 2048


def made(tokens: int, layers: int = 2, heads: int = 3, patterns: int = 6) -> Explanations:
    """Explanations of one stream with random numbers; causal, as of a language model."""
    draw = torch.Generator().manual_seed(0)
    words = ["<s>", *(f" w{i}" if i % 9 else " end.\n" for i in range(1, tokens))]
    target = Target(7, tokens - 1, 2.5)
    square = torch.rand(tokens, tokens, generator=draw).tril()
    signed = torch.randn(tokens, tokens, generator=draw).tril()
    maps = [square / square.sum(1, keepdim=True) for _ in range(patterns)]
    return Explanations(
        "models/made",
        [TokenStream("input", words, list(range(tokens)), [0])],
        target,
        " w7",
        [Prediction(7, " w7", 2.5, 0.5), Prediction(3, " w3", 1.5, 0.2)],
        [
            Explanation("operator", target, signed[-1], signed, offset=0.25, exact="scores and offset sum to the target"),
            Explanation("rollout", target, square[-1], square, exact="nothing about the target"),
            Explanation("integrated_gradients", target, signed[-1] * 2, exact="sums to a difference"),
        ],
        [{"layer": i, "name": f"model.layers.{i}", "kind": "self", "heads": heads} for i in range(layers)],
        [HeadShare(i // heads, i % heads, 0.1 * i, 0.04 * i) for i in range(layers * heads)],
        [LengthShare(0, 2.0, 0.8), LengthShare(1, 0.7, 0.28), LengthShare(2, -0.2, -0.08)],
        [Pattern(i // heads, i % heads, maps[i], "input", "input") for i in range(patterns)],
        {name: DeletionCurve([0.0, 0.5, 1.0], [2.5, 1.0, x], [2.5, 2.0, x], "target") for name, x in (("operator", 0.1), ("rollout", 0.4))},
        None,
        {"output_stream": "input", "patterns": "chosen", "deletion": "", "notes": []},
    )  # fmt: skip


def picture() -> Explanations:
    result = made(17)
    stream = replace(
        result.streams[0], tokens=["[CLS]", *(f"row {i // 4 + 1}, column {i % 4 + 1}" for i in range(16))], ids=None
    )
    pixels = torch.arange(32 * 32 * 3).view(32, 32, 3).remainder(255).to(torch.uint8)
    return replace(result, streams=[stream], picture=Picture(pixels, 4, 4, 1), target=Target(7, None, 2.5))


def pair() -> Explanations:
    """An encoder and a decoder, without shares of heads."""
    result = made(9)
    target = Target(7, 2, 2.5)
    streams = [
        replace(result.streams[0], name="encoder"),
        TokenStream("decoder", ["<pad>", " a", " b"], [0, 1, 2], [0]),
    ]
    rows = torch.rand(3, 9, generator=torch.Generator().manual_seed(1))
    method = Explanation("relevance", target, rows[2], rows, "encoder", {"decoder": torch.ones(3)})
    layers = [{"layer": 0, "name": "decoder.cross", "kind": "cross", "heads": 2}]
    patterns = [Pattern(0, head, rows, "decoder", "encoder") for head in range(2)]
    missing = {
        **result.assumptions,
        "output_stream": "decoder",
        "heads": "paths go through one stack.",
        "lengths": "Two stacks.",
    }
    return replace(result, streams=streams, target=target, methods=[method], layers=layers, heads=[], lengths=[],
                   patterns=patterns, deletion={}, assumptions=missing)  # fmt: skip


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("explained")
    short = made(18)
    hostile = replace(
        short,
        source=HOSTILE,
        target_name=HOSTILE,
        streams=[replace(short.streams[0], tokens=[HOSTILE] * 18)],
        methods=[replace(short.methods[0], exact=HOSTILE, how=HOSTILE)],
        predictions=[Prediction(7, HOSTILE, 1.0, 0.5)],
        assumptions={**short.assumptions, "notes": [HOSTILE]},
    )
    results = {"short": short, "picture": picture(), "pair": pair(), "hostile": hostile, "long": made(LONG, patterns=2)}
    for name, result in results.items():
        result.report(folder / f"{name}.html")
    return {path.stem: path for path in folder.iterdir()}


def test_the_page_stands_alone_and_carries_the_numbers(pages: dict[str, Path]) -> None:
    text, data, result = pages["short"].read_text(), data_of(pages["short"]), made(18)
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)
    assert len(re.findall(r"https?://", text)) == 1  # the name space of SVG
    method = data["methods"][0]
    assert method["scores"][0] == pytest.approx(result.methods[0].scores.tolist(), rel=1e-3, abs=1e-9)
    packed = re.search(rf'id="table-{method["table"]}">([^<]*)<', text)
    assert packed is not None
    matrix = result.methods[0].matrix
    assert matrix is not None
    error = abs(unpack_table(packed[1], 18, 18) - matrix.numpy()).max(1)
    assert (error <= abs(matrix.numpy()).max(1) / 254 * 1.001).all()
    assert "The model&#x27;s first choice is ‘ w7’ (50 %), then ‘ w3’ (20 %)." in text
    said = "On this input, removing tokens by score lowers the target fastest with operator (area 1.1), slowest with"
    assert said in text


def test_words_cannot_break_the_page(pages: dict[str, Path]) -> None:
    text = pages["hostile"].read_text()
    assert "<img" not in text
    assert text.count("</script>") == 9  # six patterns, a matrix, the data, the script
    assert data_of(pages["hostile"])["streams"][0]["tokens"][0] == HOSTILE


def test_a_notebook_shows_a_line_of_tokens_per_method() -> None:
    shown = made(18)._repr_html_()
    assert shown.count("<span") == 18 * 3
    assert "integrated gradients" in shown
    hostile = replace(made(18), streams=[replace(made(18).streams[0], tokens=[HOSTILE] * 18)])._repr_html_()
    assert "<img" not in hostile


def test_a_matrix_without_room_is_left_out_and_said(pages: dict[str, Path]) -> None:
    result = made(18)
    result = replace(result, assumptions={**result.assumptions, "without_matrix": ["rollout"]})
    page = result.page()
    assert len(page) < len(pages["short"].read_text())
    assert page.count("Its matrix has no room on this page.") == 1


def test_the_largest_part_by_length_is_the_largest_in_size() -> None:
    """Of a negative target too, whose parts are mostly negative."""
    lengths = [LengthShare(0, -2.0, -0.8), LengthShare(1, 0.3, 0.12), LengthShare(2, -0.8, -0.32)]
    page = replace(made(5), target=Target(7, 4, -2.5), lengths=lengths).page()
    assert "the largest part, -80 %, passes no head" in page


@needs_browser
@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [
        ("short", "light", 1320),
        ("short", "dark", 400),
        ("picture", "dark", 400),
        ("pair", "light", 1320),
        ("hostile", "dark", 400),
    ],
)
def test_the_page_is_drawn_without_a_word_on_the_console(
    browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int
) -> None:
    visit, data = Visit(browser, pages[name], scheme, width), data_of(pages[name])
    visit.page.wait_for_selector("#pattern canvas")
    heads = sum(layer["heads"] for layer in data["layers"])
    assert visit.page.locator("#heads .cell").count() == heads
    strips = visit.page.locator("#strips .strip")
    assert strips.count() == len(data["methods"])
    if name == "picture":
        assert visit.page.locator("#strips canvas").count() == len(data["methods"])
    else:
        streams = sum(len(stream["tokens"]) for stream in data["streams"])
        assert visit.page.locator("#strips .tok").count() == streams * len(data["methods"])
    for i in range(len(data["methods"])):
        visit.page.select_option("#method", str(i))
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert visit.console == []


@needs_browser
def test_a_token_shows_its_sources(browser: Any, pages: dict[str, Path]) -> None:
    visit, result = Visit(browser, pages["short"]), made(18)
    colours = "[...document.querySelectorAll('#strips .strip')].map(s => [...s.querySelectorAll('.tok')].map(t => t.style.background).join())"
    before = visit.page.evaluate(colours)
    visit.page.locator("#strips .tok[data-t='12']").first.hover()
    visit.until("document.getElementById('read-token').textContent.includes('its sources')")
    after = visit.page.evaluate(colours)
    assert [a != b for a, b in zip(before, after, strict=True)] == [True, True, False]  # the last has no matrix
    matrix = result.methods[0].matrix
    assert matrix is not None
    strongest = int(matrix[12].abs().argmax())
    word = result.streams[0].tokens[strongest].replace("\n", "↵")
    assert f"its sources: ‘{word}’" in visit.text("#read-token")
    visit.page.mouse.move(2, 2)
    visit.until("!document.getElementById('read-token').textContent.includes('its sources')")
    assert visit.page.evaluate(colours) == before
    assert visit.console == []


@needs_browser
def test_everything_works_from_the_keyboard(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["short"])
    visit.page.focus("#strips .tokens")
    for key, word in (
        ("ArrowRight", "token 0"),
        ("ArrowRight", "token 1"),
        ("End", "token 17"),
        ("ArrowLeft", "token 16"),
    ):
        visit.page.keyboard.press(key)
        visit.until(f"document.getElementById('read-token').textContent.includes('({word})')")
    visit.page.keyboard.press("Escape")
    visit.until("document.getElementById('read-token').textContent.includes('largest scores')")
    visit.page.focus("#heads")
    assert visit.text("#which").startswith("Layer 1, head 2")  # the largest share
    for key, which in (
        ("ArrowLeft", "Layer 1, head 1"),
        ("ArrowUp", "Layer 0, head 1"),
        ("ArrowUp", "Layer 0, head 1"),
    ):
        visit.page.keyboard.press(key)
        visit.until(f"document.getElementById('which').textContent.startsWith('{which}')")
    visit.page.focus("#pattern")
    visit.page.keyboard.press("ArrowDown")
    assert "‘<s>’ (token 0) gives 100 % of its attention to ‘<s>’" in visit.text("#read-pattern")
    visit.page.focus("#lengths")
    visit.page.keyboard.press("ArrowRight")
    visit.page.keyboard.press("ArrowRight")
    assert visit.text("#read-lengths") == "1 head · 28 % of the target"
    assert visit.console == []


@needs_browser
def test_two_thousand_tokens_do_not_stall(browser: Any, pages: dict[str, Path]) -> None:
    """Seconds are generous: they would be minutes with an element per pair of tokens."""
    visit = Visit(browser, pages["long"])
    assert visit.page.locator("#strips .tok").count() == LONG
    assert visit.page.evaluate("document.querySelectorAll('*').length") < LONG + 500
    took = visit.page.evaluate(
        """async () => { const start = performance.now();
        document.querySelector('.tok[data-t="1500"]').dispatchEvent(new PointerEvent('pointerover', { bubbles: true, pointerType: 'mouse' }));
        while (!document.getElementById('read-token').textContent.includes('its sources')) await new Promise(r => setTimeout(r, 5));
        return performance.now() - start; }"""
    )
    assert took < 5000
    assert pages["long"].stat().st_size < 20e6
    assert visit.console == []
