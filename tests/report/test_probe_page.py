"""The page of a probe in a real browser, the table in the terminal, and `locater probe` as a user meets it."""

from __future__ import annotations

import io
import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from locater import LocaterError, Probe, Statistics, probe
from locater.report.columns import COLUMNS
from locater.report.probe import collapse
from locater.report.verdict_sentences import summary
from locater.results.probe import PROBE_COLUMNS, ProbeRow
from tests.conftest import Result
from tests.report.visits import Visit, data_of, needs_browser

Run = Callable[..., Result]
HOSTILE = "</script><img src=x onerror=alert(1)>@TITLE@"


def ids(*shape: int) -> torch.Tensor:
    return torch.randint(3, 60, shape, generator=torch.Generator().manual_seed(0))


def llama(layers: int = 3) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = dict(hidden_size=32, intermediate_size=48, num_attention_heads=4, num_key_value_heads=2, vocab_size=64)
    return LlamaForCausalLM(
        LlamaConfig(**shape, num_hidden_layers=layers, max_position_embeddings=64, initializer_range=0.3)
    ).eval()


@pytest.fixture(scope="module")
def probes() -> dict[str, Probe]:
    from transformers import T5Config, T5Model

    torch.manual_seed(0)
    t5 = T5Model(T5Config(d_model=32, d_kv=8, d_ff=64, num_layers=2, num_heads=4, vocab_size=64)).eval()
    tiny = nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 1, 8, batch_first=True), 1, enable_nested_tensor=False)
    broken = llama()
    broken.model.layers[1].self_attn.q_proj.weight.data[8:16] = torch.nan
    found = {
        "llama": probe(llama(), ids(12, 40)),
        "cross": probe(t5, ids(12, 24)),
        "tiny": probe(tiny, [{"src": torch.randn(1, 4, 8)}]),
        "broken": probe(broken, ids(6, 24)),
    }
    row = replace(found["tiny"].rows[0], name=HOSTILE, flags=("locked",))
    notes = {**found["tiny"].assumptions, "notes": [HOSTILE], "data": HOSTILE}
    entry = {**found["tiny"].layers[0], "name": HOSTILE}
    streams = [replace(x, stack=HOSTILE, name=HOSTILE) for x in found["tiny"].streams]
    return {**found, "hostile": Probe(HOSTILE, notes, [entry], streams, [row], {})}


@pytest.fixture(scope="module")
def pages(probes: dict[str, Probe], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("probes")
    for name, found in probes.items():
        found.report(folder / f"{name}.html")
    return {p.stem: p for p in folder.iterdir()}


# ---- the file ----


def test_page_stands_alone(pages: dict[str, Path]) -> None:
    for page in pages.values():
        text = page.read_text()
        assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text.replace("src=x", ""))
        assert len(re.findall(r"https?://", text)) == 1  # the name space of SVG, and nothing to fetch


def test_data_agree_with_the_probe(pages: dict[str, Path], probes: dict[str, Probe]) -> None:
    data, found = data_of(pages["llama"]), probes["llama"]
    assert [(h[0], h[1]) for h in data["heads"]] == [(row.layer, row.head) for row in found.rows]
    for column in ("entropy", "predicted_entropy", "prior_entropy", "logit_bound"):
        assert data["values"][column] == pytest.approx([row[column] for row in found.rows], rel=1e-3)


def test_every_column_has_a_kind_and_a_meaning(pages: dict[str, Path]) -> None:
    assert {c.name for c in COLUMNS} == set(PROBE_COLUMNS)
    kinds = {c["name"]: c["kind"] for c in data_of(pages["llama"])["columns"]}
    assert [kinds[name] for name in ("entropy", "predicted_entropy", "prior_entropy", "logit_bound")] == [
        "exact",
        "predicted",
        "prior",
        "bound",
    ]
    assert all(c.meaning.endswith(".") for c in COLUMNS)


@pytest.mark.parametrize(
    ("residuals", "said"),
    [
        ((0.9, 0.88, 0.85), "Tokens stay apart: {share} from 0.90 to 0.85 over the blocks; 0 is rank collapse."),
        ((0.9, 0.8, 0.4), "Tokens come closer: {share} from 0.90 to 0.40 over the blocks, and block 1 keeps least of it, 0.50; "
         "0 is rank collapse."),
        ((0.05, 0.6, 0.7), "Tokens stay apart: {share} from 0.05 to 0.70 over the blocks; 0 is rank collapse."),
        ((0.9, 0.05, 0.6), "Tokens become alike: {share} from 0.90 to 0.60 over the blocks, and block 0 keeps least of it, 0.06 "
         "(least 0.05, after block 0); 0 is rank collapse."),
        ((0.9, None, None), ""),
    ],
)  # fmt: skip
def test_the_verdict_on_rank_collapse(probes: dict[str, Probe], residuals: tuple[float | None, ...], said: str) -> None:
    found = probes["llama"]
    streams = [replace(point, residual=r) for point, r in zip(found.streams[:3], residuals, strict=True)]
    share = "the share of the stream that differs between them goes"
    assert collapse(replace(found, streams=streams).to_dict()) == said.format(share=share)


def test_rank_collapse_is_on_the_page_and_in_the_terminal(pages: dict[str, Path], probes: dict[str, Probe]) -> None:
    found, data = probes["llama"], data_of(pages["llama"])
    assert collapse(found.to_dict()) in pages["llama"].read_text()
    for point, entry in zip(data["streams"][0]["points"][1:], found.layers, strict=True):
        assert point[-2:] == pytest.approx([entry["typical_kept"], entry["predicted_typical_kept"]], rel=1e-3)
    assert data["streams"][0]["points"][0][-2:] == [None, None]
    out = io.StringIO()
    found.show(Console(file=out, width=100))
    shown = " ".join(out.getvalue().split())
    assert collapse(found.to_dict()) in shown
    entry = found.layers[1]
    keys = ("residual_before", "residual_after", "typical_kept", "predicted_typical_kept", "prior_typical_kept")
    assert " ".join(["1", *(f"{entry[key]:.2f}" for key in keys), entry["name"]]) in shown


def test_page_weighs_little(probes: dict[str, Probe]) -> None:
    """1,024 heads with full-length numbers everywhere."""
    found = probes["llama"]
    values = (
        torch.rand(1024, len(PROBE_COLUMNS), generator=torch.Generator().manual_seed(0), dtype=torch.float64) * 100
        + 0.012345
    )
    rows = [
        ProbeRow(i // 32, i % 32, i % 32, "self", f"model.layers.{i // 32}.self_attn", 8192, **dict(zip(PROBE_COLUMNS, line, strict=True)),
                 flags=("sharp", "antisymmetric"))
        for i, line in enumerate(values.tolist())
    ]  # fmt: skip
    layers = [{**found.layers[0], "layer": i, "name": f"model.layers.{i}.self_attn", "heads": 32} for i in range(32)]
    streams = [replace(found.streams[0], block=i, name=f"model.layers.{i}") for i in range(32)]
    assert len(replace(found, rows=rows, layers=layers, streams=streams).page()) < 1e6


def test_names_cannot_break_the_page(pages: dict[str, Path]) -> None:
    text = pages["hostile"].read_text()
    assert "<img" not in text
    assert text.count("</script>") == 2
    assert data_of(pages["hostile"])["layers"][0]["name"] == HOSTILE


def test_the_summary_says_what_was_found(pages: dict[str, Path], probes: dict[str, Probe]) -> None:
    text, found = pages["llama"].read_text(), probes["llama"]
    assert "12 heads in 3 attention layers, measured on 8 sequences of 40 tokens" in text
    assert "taken from 4 other sequences" in text
    assert f"Spearman correlation of {found.agreement['predicted_entropy']['spearman']:.2f}" in text
    assert "Too few heads" in pages["tiny"].read_text()
    assert "there were no others" in pages["tiny"].read_text()
    assert "heads are nonfinite: 1.1" in pages["broken"].read_text()


def test_the_headline_is_about_the_model_and_not_the_prediction(
    pages: dict[str, Path], probes: dict[str, Probe]
) -> None:
    found = probes["broken"]
    header = re.search(r"<header>(.*?)</header>", pages["broken"].read_text(), re.DOTALL)
    assert header is not None
    assert (
        summary(found.records(), found.verdicts) in header[1].partition('<p class="verdict">')[2].partition("</p>")[0]
    )
    assert header[1].index("are nonfinite") < header[1].index("Predicted entropy is off by")
    text = " ".join(printed(found).split())
    assert text.index("are nonfinite") < text.index("Predicted entropy is off by")


# ---- in a real browser ----


@needs_browser
@pytest.mark.parametrize(
    ("name", "scheme"),
    [
        ("llama", "light"),
        ("llama", "dark"),
        ("cross", "dark"),
        ("tiny", "light"),
        ("broken", "dark"),
        ("hostile", "light"),
    ],
)
def test_page_is_drawn_without_a_word_on_the_console(
    browser: Any, pages: dict[str, Path], name: str, scheme: str
) -> None:
    visit = Visit(browser, pages[name], scheme)
    asked: list[str] = []
    visit.page.on("request", lambda r: asked.append(r.url))
    visit.page.reload()
    data = data_of(pages[name])
    both = sum(
        m is not None and p is not None
        for m, p in zip(data["values"]["entropy"], data["values"]["predicted_entropy"], strict=True)
    )
    assert visit.page.locator("#heatmap .cell").count() == len(data["heads"])
    assert visit.page.locator("#scatter .point").count() == both > 0
    assert visit.page.locator("#streams .curve").count() == 8 * len(data["streams"])
    for column in data["columns"]:
        visit.page.select_option("#metric", column["name"])
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert [url for url in asked if not url.startswith(("file:", "data:"))] == []
    assert visit.console == []


@needs_browser
@pytest.mark.parametrize("where", ["#heatmap .cell", "#scatter .point", "#layers .point"])
def test_choosing_a_head_changes_every_panel(browser: Any, pages: dict[str, Path], where: str) -> None:
    visit = Visit(browser, pages["llama"], choice="#layer=0&head=0")
    assert visit.text("#which") == "Layer 0, head 0"
    parts = ("#which", "#numbers", "#input", "#scatter", "#heatmap", "#layers", "#stream-0-0", "#read-scatter")
    before = {part: visit.inside(part) for part in parts}
    visit.page.locator(f'{where}[data-at="9"]').dispatch_event("click")
    assert visit.text("#which") == "Layer 2, head 1"
    assert [part for part, was in before.items() if visit.inside(part) == was] == []
    assert visit.console == []


@needs_browser
def test_arrow_keys_move_between_heads(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["llama"], choice="#layer=1&head=1")
    visit.page.focus("#heatmap")
    for key, which in (("ArrowDown", "Layer 2, head 1"), ("ArrowDown", "Layer 2, head 1"), ("ArrowRight", "Layer 2, head 2"),
                       ("ArrowLeft", "Layer 2, head 1"), ("ArrowLeft", "Layer 2, head 0"), ("ArrowLeft", "Layer 2, head 0"),
                       ("ArrowUp", "Layer 1, head 0")):  # fmt: skip
        visit.page.keyboard.press(key)
        assert visit.text("#which") == which
    visit.page.focus("#scatter")
    visit.page.keyboard.press("ArrowRight")
    assert visit.text("#which") == "Layer 1, head 1"


@needs_browser
def test_pointing_at_a_head_shows_it_in_every_chart(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["llama"], choice="#layer=0&head=0")
    visit.page.locator('#heatmap .cell[data-at="6"]').hover()
    for chart in ("#heatmap", "#scatter", "#layers"):
        assert visit.page.locator(f'{chart} .hover[data-at="6"]').count() >= 1
        assert visit.text(chart.replace("#", "#read-")).startswith("Layer 1, head 2")
    visit.page.mouse.move(5, 5)
    assert visit.page.locator(".hover").count() == 0
    assert visit.text("#read-scatter").startswith("Layer 0, head 0")


@needs_browser
def test_metrics_say_what_kind_they_are(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["llama"])
    for metric, kind in (
        ("sink", "exact"),
        ("predicted_localization", "predicted"),
        ("prior_entropy", "prior"),
        ("logit_bound", "bound"),
    ):
        before = visit.inside("#heatmap")
        visit.page.select_option("#metric", metric)
        assert visit.inside("#heatmap") != before
        assert visit.text("#explain .kind") == kind
    visit.page.locator('#numbers [data-metric="distance"]').click()
    assert visit.page.input_value("#metric") == "distance"


@needs_browser
def test_weights_alone_can_be_hidden(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["llama"])
    assert visit.page.locator("#scatter .ring").count() == 12
    visit.page.uncheck("#prior")
    assert visit.page.locator("#scatter .ring").count() == 0
    visit.page.select_option("#pair", label="weight on the first token")
    assert visit.page.locator("#prior-label").is_hidden()
    assert "less weight there than predicted" in visit.page.locator("#scatter text").all_text_contents()
    visit.page.reload()
    assert visit.page.input_value("#pair") == "3"
    assert visit.console == []


@needs_browser
def test_a_flag_dims_the_others(browser: Any, pages: dict[str, Path], probes: dict[str, Probe]) -> None:
    visit = Visit(browser, pages["broken"])
    first = next(row for row in probes["broken"].rows if "nonfinite" in row.flags)
    assert visit.text("#which") == f"Layer {first.layer}, head {first.head}"  # it opens on what is broken
    assert "Restore an earlier checkpoint" in visit.text("#findings")
    raised = sum("nonfinite" in row.flags for row in probes["broken"].rows)
    visit.page.click('button[data-flag="nonfinite"]')
    assert visit.page.locator("#heatmap .cell.dim").count() == 12 - raised
    visit.page.click('button[data-flag="nonfinite"]')
    assert visit.page.locator("#heatmap .cell.dim").count() == 0


@needs_browser
def test_cross_attention_has_two_stacks_and_gaps(browser: Any, pages: dict[str, Path]) -> None:
    visit = Visit(browser, pages["cross"])
    assert visit.page.locator("#streams section").count() == 2
    visit.page.select_option("#metric", "distance")
    # two cross-attention layers of four heads
    assert visit.page.locator('#heatmap .cell[fill="url(#hatch-none)"]').count() == 8


@needs_browser
@pytest.mark.parametrize("width", [400, 900, 1320])
@pytest.mark.parametrize("name", ["llama", "cross", "tiny"])
def test_text_in_charts_keeps_its_size(browser: Any, pages: dict[str, Path], name: str, width: int) -> None:
    visit = Visit(browser, pages[name], width=width)
    scales = "[...document.querySelectorAll('svg')].filter(s => s.firstChild && s.clientWidth >= 260).map(s => s.getScreenCTM().a)"
    assert all(abs(a - 1) < 0.01 for a in visit.page.evaluate(scales))
    assert visit.page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    beyond = """[...document.querySelectorAll('svg text')].filter(t => {
        const a = t.getBoundingClientRect(), card = t.closest('.card').getBoundingClientRect();
        return a.width && (a.left < card.left || a.right > card.right || a.bottom > card.bottom); }).map(t => t.textContent)"""
    assert visit.page.evaluate(beyond) == []
    assert visit.console == []


# ---- the terminal ----


def printed(found: Probe, width: int = 140) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    found.show(console)
    return console.export_text()


def test_terminal_shows_heads_flags_and_kinds(probes: dict[str, Probe]) -> None:
    text = printed(probes["broken"])
    assert "every head, faults first" in text
    assert "Restore an earlier checkpoint" in text
    for kind in ("exact (", "predicted (", "prior (", "bound ("):
        assert kind in text
    assert "[" not in printed(replace(probes["llama"], rows=probes["llama"].rows[:2])).replace("[0", "")


def test_terminal_sums_up_many_heads(probes: dict[str, Probe]) -> None:
    found = probes["llama"]
    rows = [replace(row, head=row.head + 4 * i) for i in range(5) for row in found.rows]
    text = printed(replace(found, rows=rows))
    assert "medians by layer" in text
    assert "every head" not in text
    assert HOSTILE.split("@")[0][:9] in printed(probes["hostile"])


# ---- the command ----


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny model with a tokenizer of words."""
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    folder = tmp_path_factory.mktemp("model")
    llama().save_pretrained(folder)
    vocabulary = {"[UNK]": 0, **{f"w{i}": i for i in range(1, 64)}}
    words = Tokenizer(models.WordLevel(vocabulary, unk_token="[UNK]"))
    words.pre_tokenizer = pre_tokenizers.Whitespace()
    PreTrainedTokenizerFast(tokenizer_object=words, unk_token="[UNK]").save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def words(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("text") / "words.txt"
    path.write_text(" ".join(f"w{i}" for i in ids(1200).tolist()))
    return path


SMALL = ("--length", 32, "--tokens", 256)


def test_probe_writes_what_it_prints(run: Run, saved: Path, words: Path, tmp_path: Path) -> None:
    kept = {name: tmp_path / f"found.{name}" for name in ("json", "html", "pt")}
    result = run(
        "probe",
        saved,
        "--text",
        words,
        *SMALL,
        "--json",
        kept["json"],
        "--report",
        kept["html"],
        "--save-statistics",
        kept["pt"],
    )
    assert (result.status, result.err) == (0, "")
    assert f"measured on 8 sequences of 32 tokens of {words}" in " ".join(result.out.split())
    assert all(str(path) in result.out for path in kept.values())
    document = json.loads(kept["json"].read_text())
    assert len(document["heads"]) == 12
    assert kept["html"].read_text().startswith("<!doctype html>")
    again = run("probe", saved, "--text", words, *SMALL, "--json", "-")
    assert json.loads(again.out)["heads"] == document["heads"]
    assert len(Statistics.load(kept["pt"]).inputs) == 3
    scanned = run("scan", saved, "--statistics", kept["pt"], "--report", tmp_path / "scan.html")
    said = "Predicted from weights and statistics of what the layers read; not measured."
    assert said in scanned.out
    assert said.replace("'", "&#x27;") in (tmp_path / "scan.html").read_text()


def test_the_default_text_is_named(run: Run, saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("locater.inputs.corpus.embedded_text", lambda: "w1 w2 w3 w4 " * 300)
    assert "the documentation that comes with Python (the default; --text FILE for yours)" in " ".join(
        run("probe", saved, *SMALL).out.split()
    )
    assert "sampled (" in run("probe", saved, *SMALL, "--rows", 4).out


def test_text_from_standard_input_and_fail_on(
    run: Run, saved: Path, words: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("caf\udce9"))
    assert run("probe", saved, "--text", "-").err == "locater: standard input: not UTF-8 text (at 3): convert it\n"
    monkeypatch.setattr(sys, "stdin", io.StringIO(words.read_text()))
    result = run("probe", saved, "--text", "-", *SMALL, "--fail-on", "entropy>=0")
    assert result.status == 1
    assert "--fail-on: entropy " in result.err
    assert " has reached 0 at " in result.err
    assert " and 6 more: " in result.err
    assert run("probe", saved, "--text", words, *SMALL, "--fail-on", "locked, exploding, max_logit>1e9").status == 0


def test_bad_input_is_one_line(run: Run, saved: Path, saved_llama: Path, words: Path, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "broken.xz").write_bytes(b"no archive")
    (tmp_path / "junk.pt").write_bytes(b"junk")
    (tmp_path / "latin.txt").write_bytes("caf\u00e9 au lait".encode("latin-1"))
    (tmp_path / "zero.txt").write_bytes(b"some\0thing")
    cases: list[tuple[list[object], str]] = [
        (["probe", saved, "--text", tmp_path / "empty.txt"], "the text is empty"),
        (["probe", saved, "--text", tmp_path / "broken.xz"], "cannot be read as text"),
        (["probe", saved, "--text", tmp_path / "none.txt"], "none.txt: no such file"),
        (["probe", saved, "--text", tmp_path / "latin.txt"], "latin.txt: not UTF-8 text (byte 3)"),
        (["probe", saved, "--text", tmp_path / "zero.txt"], "zero.txt: not text: it contains a zero byte"),
        (["probe", saved_llama, "--text", words], "--tokenizer PATH"),
        (["probe", saved, "--text", words, "--tokenizer", tmp_path / "none"], "no tokenizer there"),
        (["probe", saved, "--text", words, "--length", 100], "the model has 64 positions"),
        (["probe", saved / "model.safetensors", "--text", words], "a weights file alone cannot be run"),
        (["probe", tmp_path / "none", "--text", words], "none: no such file or folder"),
        (["probe", saved, "--text", words, "--images", tmp_path], "exclude each other"),
        (["probe", saved, "--images", tmp_path / "none"], "names no image size"),
        (["probe", saved, "--text", words, "--fail-on", "flying"], "neither a flag"),
        (["probe", saved, "--text", words, "--json", "a.json", "--save-statistics", "a.json"], "file of their own"),
        (["probe", saved, "--text", words, "--save-statistics", tmp_path / "no" / "a.pt"], "does not exist"),
        (["scan", saved, "--statistics", tmp_path / "junk.pt"], "not statistics that this version reads"),
        (["scan", saved, "--statistics", tmp_path / "none.pt"], "cannot be read"),
    ]
    for command, said in cases:
        result = run(*command)
        assert (result.status, result.out) == (2, ""), command
        assert said in result.err, (command, result.err)
        assert result.err.count("\n") == 1, (command, result.err)


def test_the_default_text_in_python_too(saved: Path, words: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the command has it, and the result says so; a path is called by its name, a `Path` to the model is one."""
    monkeypatch.setattr("locater.inputs.corpus.embedded_text", lambda: "w1 w2 w3 w4 " * 300)
    small: dict[str, Any] = dict(length=32, tokens=128)
    found = probe(saved, **small)
    assert found.assumptions["data"] == "the documentation that comes with Python (the default; text= for yours)"
    assert probe(str(saved), str(words), **small).assumptions["data"] == str(words)
    assert probe(str(saved), [words, words], **small).assumptions["data"] == f"2 files, the first {words}"


def test_text_or_images_and_not_for_every_model(words: Path) -> None:
    with pytest.raises(LocaterError, match="text and images exclude each other"):
        probe(llama(1), "some text", images=words)
    eye = llama(1)
    eye.main_input_name = "pixel_values"
    for text in ("some text", ["some", "text"], None):
        with pytest.raises(LocaterError, match="--images PATH"):
            probe(eye, text)


def test_the_command_line_does_not_import_transformers() -> None:
    code = "import sys, locater.cli; print('transformers' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()
        == "False"
    )
