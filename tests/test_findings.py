"""Which flags deserve a look: faults are counted and coloured, the rest are notes; a head with a role gets no advice
against it.
"""

from __future__ import annotations

import io
import json
import re
from functools import cache
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from torch import nn

from locater import Probe, Scan, compare, probe, scan
from locater.findings import FLAGS, ROLE_WEIGHT, ROLES, UNTRAINED, Verdict, is_untrained, judge
from locater.report.terminal import print_meanings
from locater.report.verdict_sentences import summary
from locater_lab.engine.trained_models import sentence_model, why_unavailable
from tests import ROOT

DEMO = str(files("locater") / "demo")
SHARED = ROOT.parent / "shared"
COLLAPSED = {"flags": ("sharp", "locked"), "entropy_ratio": 0.05, "distance": 60.0, "self_mass": 0.1}
WIDTHS = (20, 30, 40, 60, 80, 100, 140)


def gpt2(layers: int = 4, heads: int = 8, **changes: Any) -> Any:
    """A model of transformers as it starts, with nothing learnt."""
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    shape = dict(n_embd=64, n_positions=128, vocab_size=64, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(n_layer=layers, n_head=heads, **shape | changes)).eval()


def spread_out() -> nn.TransformerEncoder:
    """Two layers of four heads that look at everything a little: no flag but notes."""
    torch.manual_seed(0)
    return nn.TransformerEncoder(
        nn.TransformerEncoderLayer(32, 4, 32, batch_first=True), 2, enable_nested_tensor=False
    ).eval()


def scaled(model: nn.TransformerEncoder, layer: int, head: int, by: float) -> nn.TransformerEncoder:
    with torch.no_grad():
        model.layers[layer].self_attn.in_proj_weight[8 * head : 8 * head + 8] *= by
    return model


def printed(found: Any, width: int = 140) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    found.show(console)
    return console.export_text()


# ---- the table ----


def test_every_flag_has_a_severity_and_says_what_to_do() -> None:
    assert {flag.severity for flag in FLAGS} == {"fault", "note"}
    assert {flag.name for flag in FLAGS if flag.severity == "fault"} == {
        "nonfinite",
        "uniform",
        "sharp",
        "silent",
        "exploding",
        "locked",
    }
    for flag in FLAGS:
        assert ":" in flag.meaning, f"{flag.name}: what is seen, then what that means"
        assert len(flag.way_out.split()) > 4
        assert not flag.meaning.endswith(".")
        assert not flag.way_out.endswith(".")


@pytest.mark.parametrize("flag", FLAGS, ids=lambda flag: flag.name)
def test_the_documentation_states_the_severity(flag: Any) -> None:
    text = (ROOT / "docs" / "theory.md").read_text()
    assert any(line.startswith(f"| `{flag.name}` | {flag.severity} |") for line in text.splitlines())


@pytest.mark.parametrize("column", ["previous", "duplicate", "induction", "sink"])
def test_a_role_above_the_stated_weight_excuses_a_sharp_head(column: str) -> None:
    (above,), (below,) = (judge([{**COLLAPSED, column: ROLE_WEIGHT + step}], 256) for step in (0.01, -0.01))
    assert (above.faults, above.role) == ((), next(role.name for role in ROLES if role.needs[0] == column))
    assert all(above.role in reason and f"{ROLE_WEIGHT + 0.01:.2f}" in reason for reason in above.notes.values())
    assert (below.faults, below.role, below.notes) == (("sharp", "locked"), None, {})


def test_a_local_head_has_a_role_and_one_that_sees_itself_has_none() -> None:
    local = {**COLLAPSED, "distance": 1.9}
    assert judge([local], 256)[0].role == "local"
    assert judge([{**local, "distance": 2.1}], 256)[0].role is None
    assert judge([{**local, "self_mass": 0.9, "distance": 0.1}], 256)[0].faults == ("sharp", "locked")
    assert judge([local], 8)[0].role is None  # among eight tokens everything is near


def test_a_role_excuses_nothing_else() -> None:
    row = {"flags": ("nonfinite", "exploding"), "previous": 0.99}
    assert judge([row], 256)[0].faults == ("nonfinite", "exploding")


@pytest.mark.parametrize("flag", ["nonfinite", "silent"])
def test_a_head_that_writes_nothing_has_no_role(flag: str) -> None:
    row = {**COLLAPSED, "previous": 0.99}
    assert judge([row], 256)[0].role == "previous-token"
    (broken, *_) = judge([{**row, "flags": (flag, *COLLAPSED["flags"])}, row, row], 256)
    assert (broken.role, broken.notes) == (None, {})


def test_output_maps_that_begin_at_zero_are_no_fault_of_single_heads() -> None:
    rows = [{"flags": ("silent",)}] * 4 + [{"flags": ()}]
    assert [verdict.faults for verdict in judge(rows, 256)] == [()] * 5
    assert judge(rows[1:], 256)[0].faults == ("silent",)


def test_a_measurement_overrules_a_prediction() -> None:
    sharp, level = ({"flags": (name,), "entropy_ratio": ratio} for name, ratio in (("sharp", 0.4), ("uniform", 0.6)))
    for row in (sharp, level):
        (held,) = judge([row, *[{"flags": ()}] * 9], 256)[:1]
        assert held.faults == ()
        assert f"{row['entropy_ratio']:.2f}" in held.notes[row["flags"][0]]
    assert judge([{"flags": ("sharp",)}], 256)[0].faults == ("sharp",)  # nothing was measured
    assert judge([{"flags": ("uniform",), "entropy_ratio": 0.99}, *[{"flags": ()}] * 9], 256)[0].faults == ("uniform",)


def test_uniform_heads_are_faults_until_they_are_the_model() -> None:
    flat = {"flags": ("uniform",), "F": 0.005, "key_bias": 0.0, "expected_entropy": 5.5}
    few, many = ([flat] * n + [{**flat, "flags": (), "F": 0.5}] * (100 - n) for n in (3, int(100 * UNTRAINED)))
    assert sum(bool(v.faults) for v in judge(few, 256)) == 3
    assert not any(v.faults for v in judge(many, 256))


@pytest.mark.parametrize("width", [64, 256, 768])
def test_untrained_models_of_every_width_are_recognised(width: int) -> None:
    """At 256 the variance of logits lies about the threshold of `uniform` (0.0104): a fifth of the heads would be an
    alarm.
    """
    found = scan(gpt2(2, 8, n_embd=width))
    assert is_untrained([vars(row) for row in found.rows])
    assert not any(held.faults for held in found.verdicts)
    assert not is_untrained([vars(row) for row in scan(DEMO).rows])


# ---- models ----


def test_an_untrained_model_is_one_sentence() -> None:
    found = scan(gpt2(7))
    assert sum("uniform" in row.flags for row in found.rows) > 0.9 * len(found.rows)
    assert not any(held.faults for held in found.verdicts)
    text = " ".join(printed(found).split())
    assert "near uniform: this looks like an untrained model" in text
    assert text.count("uniform") < 5
    assert "look uniform" not in summary(found.records(), found.verdicts, "weights")


@pytest.mark.parametrize("name", ["demo", "stories260K", "MiniLM"])
def test_trained_models_raise_no_alarm(name: str) -> None:
    """On measured tokens MiniLM's head 0.2 is sharp; it looks at the token before."""
    if name == "MiniLM" and (why := why_unavailable()):
        pytest.skip(why)
    at_hand = {"demo": Path(DEMO), "stories260K": SHARED / "models" / name}
    folder = sentence_model() if name == "MiniLM" else at_hand[name]
    if folder is None or not folder.is_dir():
        pytest.skip(f"{folder} is not here")
    found = scan(str(folder))
    faults = [
        (row.layer, row.head, held.faults) for row, held in zip(found.rows, found.verdicts, strict=True) if held.faults
    ]
    assert faults == []
    seen = probe(
        str(folder), "The quick brown fox jumps over the lazy dog, and then it sleeps. " * 40, length=64, tokens=128
    )
    assert [(row.layer, row.head) for row, held in zip(seen.rows, seen.verdicts, strict=True) if held.faults] == []
    if name == "MiniLM":
        row, held = next((r, v) for r, v in zip(seen.rows, seen.verdicts, strict=True) if (r.layer, r.head) == (0, 2))
        assert "sharp" in row.flags, "--fail-on sharp still sees it"
        assert held.role == "previous-token"
        assert "previous-token" in held.notes["sharp"]


def test_a_head_that_collapsed_is_still_a_fault() -> None:
    """The opposite of crying wolf: one head blown up a hundredfold, on text, is the only one to look at."""
    model = gpt2(2, 4, initializer_range=0.2)
    with torch.no_grad():
        model.transformer.h[1].attn.c_attn.weight[:, 16:32] *= 100
    tokens = torch.randint(1, 64, (6, 64), generator=torch.Generator().manual_seed(0))
    found = probe(model, tokens)
    both = zip(found.rows, found.verdicts, strict=True)
    assert [(row.layer, row.head) for row, held in both if {"sharp", "locked"} & {*held.faults}] == [(1, 1)]
    text = printed(found)
    assert re.search(r"\. 1 of 8 heads is (sharp|locked): 1\.1\.", " ".join(text.split()))
    document = json.loads(found.to_json())
    assert [(h["layer"], h["head"]) for h in document["heads"] if h["faults"]] == [(1, 1)]
    assert all(set(h["faults"]) <= set(h["flags"]) and "role" in h for h in document["heads"])


def test_faults_stand_beside_the_flags_in_the_document(tmp_path: Path) -> None:
    found = scan(scaled(spread_out(), 1, 2, 300))
    found.save(tmp_path / "a.json")
    document = json.loads((tmp_path / "a.json").read_text())
    assert [(h["layer"], h["head"], h["faults"]) for h in document["heads"] if h["faults"]] == [(1, 2, ["sharp"])]
    assert [tuple(h["flags"]) for h in document["heads"]] == [row.flags for row in found.rows]
    again = Scan.load(tmp_path / "a.json")
    assert (again.rows, again.verdicts) == (found.rows, found.verdicts)
    for head in document["heads"]:
        del head["faults"]
    (tmp_path / "older.json").write_text(json.dumps(document))
    assert Scan.load(tmp_path / "older.json").verdicts == found.verdicts
    assert found.to_pandas()["faults"].tolist() == [held.faults for held in found.verdicts]


# ---- the terminal ----


def test_heads_whose_note_is_not_shown_are_counted() -> None:
    """Several heads may share a reason."""
    reasons = ["a", "b", "c", "d", "d", "e"]
    rows = [{"layer": 0, "head": head} for head in range(len(reasons))]
    text = io.StringIO()
    print_meanings(rows, [Verdict((), {"sharp": reason}, None) for reason in reasons], Console(file=text, width=200))
    assert "sharp: 3 more such heads." in text.getvalue()


@pytest.mark.parametrize("width", WIDTHS)
@pytest.mark.parametrize("layers", [2, 13], ids=["every head", "a line per layer"])
def test_a_fault_is_visible_at_any_width(width: int, layers: int) -> None:
    model = spread_out()
    model.layers.extend(spread_out().layers[0] for _ in range(layers - 2))
    lines = printed(scan(scaled(model, 1, 2, 300)), width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert "heads looks sharp (predicted from weights; measure" in " ".join(" ".join(lines[:9]).split())
    row = next(line for line in lines if line.split()[:2] == ["1", "2"])
    assert row.split()[-1] == "sharp"
    if layers > 12 and width >= 30:
        heading, counted = (
            next(line for line in lines if line.split()[:2] == words) for words in (["layer", "heads"], ["1", "4"])
        )
        assert counted[: heading.index("faults") + 6].split()[-1] == "1"


@cache
def collapsed() -> Probe:
    """The same model run on tokens: head 2 of layer 1 locks onto single ones."""
    tokens = torch.randn(3, 2, 32, 32, generator=torch.Generator().manual_seed(0))
    return probe(scaled(spread_out(), 1, 2, 300), [{"src": part} for part in tokens])


@pytest.mark.parametrize("width", WIDTHS)
def test_a_probe_shows_it_at_any_width(width: int) -> None:
    lines = printed(collapsed(), width).splitlines()
    assert all(len(line) <= width for line in lines)
    assert {"sharp", "locked"} & {*next(line for line in lines if line.split()[:2] == ["1", "2"]).split()[2:]}


def test_only_faults_are_coloured() -> None:
    console = Console(width=140, file=(out := io.StringIO()), force_terminal=True, color_system="standard")
    scan(DEMO).show(console)
    assert "No problems found." in out.getvalue()
    assert "\x1b[33m" not in out.getvalue()
    scan(scaled(spread_out(), 1, 2, 300)).show(console)
    assert "\x1b[33m" in out.getvalue()


def test_a_comparison_calls_a_thing_by_one_name() -> None:
    changed = spread_out()
    for layer, head in product(range(2), range(4)):
        scaled(changed, layer, head, 30 * (head + 1))
    text = printed(compare(spread_out(), changed))
    lines = text.splitlines()
    start = next(number for number, line in enumerate(lines) if line.split() == ["A", "B"]) + 1
    names = [line.split()[0] for line in lines[start : start + 4]]
    assert names == ["M", "√F", "H", "kept"], "in the medians"
    assert {*names} < {*next(line for line in lines if line.startswith("layer")).split()}, "of heads"
    assert not {"concentration", "localization", "expected_entropy", "residual_kept"} & {
        line.split(" ")[0] for line in lines
    }
    assert "8 heads gained a fault, none lost one" in " ".join(text.split())


# ---- notebooks ----


def test_results_render_in_a_notebook() -> None:
    scanned = scan(scaled(spread_out(), 1, 2, 300))
    for found in (scanned, collapsed()):
        text = found._repr_html_()
        assert ("heads looks sharp (predicted from weights" if found is scanned else "heads is locked: 1.2.") in text
        assert text.count("<tr") == 9, "a heading and eight heads"
        assert text.index("sharp") < text.index("<td>0</td>"), "faults come first"
        assert "<script" not in text
    hostile = Scan("<b>x", scanned.assumptions, scanned.layers, scanned.rows)
    assert "<b>x" not in hostile._repr_html_()
    many = Scan("many", scanned.assumptions, scanned.layers, scanned.rows * 20)
    assert many._repr_html_().count("<tr") <= 22
    assert "160 heads" in many._repr_html_()
