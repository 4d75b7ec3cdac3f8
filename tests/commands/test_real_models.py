"""Verdicts of a scan on real trained models, held against a probe: no false alarm, no planted head missed.

The folder LOCATER_MODELS (default: ../shared/models) has all-minilm-l6-v2, antiberty, gemma3-270m and
smollm2-135m-instruct; stories260K is looked for there and in ../shared/models.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from scipy import stats

from locater import ablate, cache_plan, probe, probe_lengths, scan
from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater.findings import RETIRED
from locater.findings.flags import ROLE_WEIGHT
from locater.observing.head_roles import circuit_scores
from locater.results.scan import SCAN_FLAGS
from locater_lab.studies import flags
from tests import ROOT
from tests.conftest import Result

SHARED = ROOT.parent / "shared"
FOLDER = Path(os.environ.get("LOCATER_MODELS", SHARED / "models"))
PROSE = SHARED / "data" / "wikitext-2" / "test.txt.xz"


def folder_of(name: str) -> Path:
    found = [path / flags.FOLDERS[name] for path in (FOLDER, SHARED / "models")]
    here = [path for path in found if (path / "model.safetensors").is_file()]
    if not here:
        pytest.skip(f"{name}: no {flags.FOLDERS[name]} in {FOLDER} (LOCATER_MODELS names the folder)")
    return here[0]


def sharp(found: Any) -> set[tuple[int, int]]:
    return {(row.layer, row.head) for row in found.rows if "sharp" in row.flags}


@pytest.mark.slow
@pytest.mark.parametrize("name", flags.FOLDERS)
def test_no_sound_head_is_called_sharp(name: str) -> None:
    """Unless a probe finds it below an entropy ratio of 0.15 on what the model was made for."""
    folder = folder_of(name)
    called = sharp(scan(str(folder)))
    data = flags.model_inputs(name, PROSE)
    measured = {(row.layer, row.head): row.entropy_ratio for row in probe(str(folder), data, tokens=1024).rows}
    assert len(measured) == len(scan(str(folder)).rows)
    assert [place for place in sorted(called) if not (measured[place] or 1) < flags.SHARP] == []
    read = scan(str(folder), values=True)
    assert not any({*row.flags} & {"nonfinite", "uniform", "silent"} for row in read.rows)


@pytest.mark.slow
@pytest.mark.parametrize("name", flags.FOLDERS)
def test_every_planted_head_is_called_sharp_and_no_other(name: str) -> None:
    """Queries of one head times 50, one head after the other, at every depth; in Gemma 3 the gain of the norm of a
    layer's queries.
    """
    module = load_model(str(folder_of(name)))
    kept = {key: value.clone() for key, value in module.state_dict().items()}
    layers = attention_layers(module)
    normed = layers[0].query_norm is not None
    for layer in range(0, len(layers), max(1, len(layers) // 8)):
        for head in [0] if normed else range(layers[layer].heads)[:: max(1, layers[layer].heads // 3)]:
            planted = flags.plant_fault(module, "sharp", layer, head)
            assert sharp(scan(module)) == set(planted), (layer, head)
            module.load_state_dict(kept)


@pytest.mark.slow
def test_a_factor_on_queries_that_are_normalised_raises_nothing() -> None:
    module = load_model(str(folder_of("Gemma-3-270M")))
    before = scan(module)
    for one in attention_layers(module):
        with torch.no_grad():
            one.query.weight()[: one.head_dim] *= 50
    after = scan(module)
    assert [row.flags for row in after.rows] == [row.flags for row in before.rows]
    for row, other in zip(after.rows, before.rows, strict=True):
        assert row.F == pytest.approx(other.F, rel=1e-3)


# ---- the page of how often flags are right ----


def kept() -> list[dict[str, Any]]:
    return [json.loads(line) for line in (ROOT / "docs/results/flags-heads.jsonl").read_text().splitlines()]


def test_the_kept_counts_are_those_of_the_heads() -> None:
    document = json.loads((ROOT / "docs" / flags.PAPER.document_file).read_text())
    found = flags.results_of(kept())
    assert document["studies"][flags.STUDY.title]["tables"] == json.loads(json.dumps(found.tables))
    assert set(found.tables["models"]) == set(flags.FOLDERS)


def test_every_flag_of_a_scan_is_right_where_it_was_tried() -> None:
    """One that is right at fewer than 0.8 of its heads has to be a column."""
    sound = [x for model in kept() for x in model["heads"]]
    for name in SCAN_FLAGS:
        planted = [x for model in kept() for x in model["planted"][name]]
        raised, right, _ = flags.count_flagged(sound, name)
        assert raised - right == 0, f"{name}: a false alarm on a sound model"
        raised, right, true = flags.count_flagged(planted, name)
        assert right >= 0.8 * raised > 0
        assert right >= 0.8 * true > 0
    for name in RETIRED:
        raised, right, _ = flags.count_flagged(sound, name)
        assert right < 0.8 * raised


def test_intervals_are_those_of_scipy() -> None:
    for hits, of in ((0, 5), (4, 35), (35, 35), (1, 1)):
        low, high = stats.binomtest(hits, of).proportion_ci(method="wilson")
        assert flags.wilson(hits, of) == pytest.approx((low, high), abs=1e-6)


# ---- heads taken away ----


@pytest.mark.slow
def test_induction_heads_are_those_that_repeated_tokens_need() -> None:
    """Of the layers where a probe names induction heads, those that hurt most on random tokens that are repeated are
    named ones. The first time around, where nothing can be copied, they do not matter.
    """
    module = load_model(str(folder_of("SmolLM2-135M-Instruct")))
    scores = circuit_scores(module)
    named = {place for place, score in scores.items() if (score.induction or 0.0) > ROLE_WEIGHT}
    assert len(named) >= 4
    layers = sorted({layer for layer, _ in named})
    once = torch.randint(100, 40_000, (4, 24), generator=torch.Generator().manual_seed(0))
    ids = torch.cat([once, once], 1)
    batch = {"input_ids": ids, "labels": ids.clone()}
    batch["labels"][:, :25] = -100
    some = [(layer, head) for layer in layers for head in range(attention_layers(module)[layer].heads)]
    change = ablate(module, [batch], some).by_head
    assert set(sorted(some, key=lambda place: -(change[place] or 0.0))[:4]) <= named
    assert all((change[place] or 0.0) > 0 for place in named)
    others = [change[place] or 0.0 for place in some if place not in named]
    assert sum(change[place] or 0.0 for place in named) / len(named) > 3 * max(0.0, sum(others) / len(others))
    strongest = max(named, key=lambda place: change[place] or 0.0)
    first_time = ablate(module, [{"input_ids": once}], [strongest]).by_head
    assert abs(first_time[strongest] or 0.0) < 0.2 * (change[strongest] or 0.0)


@pytest.mark.slow
def test_the_guide_runs_from_start_to_end(run: Callable[..., Result], tmp_path: Path) -> None:
    """Its commands on SmolLM2: keys of 8 bits are free, those of 2 bits and a window are not, in the order it says."""
    page = (ROOT / "docs" / "guides" / "which-heads.md").read_text()
    commands = re.findall(r"^    locater (ablate MODEL .+)$", page, re.MULTILINE)
    assert len(commands) == 6
    model, other = folder_of("SmolLM2-135M-Instruct"), tmp_path / "other.txt"
    other.write_text("\n".join(str(vars(str)[name].__doc__) for name in sorted(vars(str))))
    found = []
    for number, words in enumerate(commands):
        path, given = tmp_path / f"{number}.json", {"MODEL": str(model), "other.txt": str(other)}
        done = run(*[given.get(word, word) for word in words.split()], "--json", path)
        assert done.status == 0, done.err
        found.append(json.loads(path.read_text()))
    eight, four, window = ([row["change"] for row in one["removals"]] for one in found[:3])
    assert abs(eight[0]) < 0.005 < four[0] < window[0]
    layers, heads, chosen = (one["removals"] for one in found[3:])
    assert [row["name"] for row in layers] == [f"layer {n}" for n in range(30)]
    assert [row["name"] for row in heads] == [f"10.{n}" for n in range(9)]
    alone = [row["change"] for row in heads]
    assert max(alone) == alone[0] > 3 * sorted(alone)[-2]
    assert chosen[0]["heads"] == [[10, n] for n in range(1, 9)]


@pytest.mark.slow
def test_a_list_of_key_heads_that_holds_on_prose_is_tried_where_text_stands_twice() -> None:
    """Windows in some key heads of a real model, on the documentation of Python."""
    plan = cache_plan(str(folder_of("SmolLM2-135M-Instruct")), window=32, sinks=4, loss=0.1, length=128, tokens=1024)
    assert plan.judged is not None
    assert plan.judged["high"] <= 0.1
    assert len(plan.windowed) == plan.judged["heads"] >= 5
    assert plan.other is not None
    assert plan.other["change"] > plan.judged["change"]
    found = {row["layer"] for row in plan.sinks if row["first_heads"] * 2 >= row["heads"]}
    assert found, "half of the heads of some layers have the first token as a sink"
    massive = [row for row in plan.massive if row["massive"]]
    assert massive
    assert all(0 in row["places"] for row in massive)


@pytest.mark.slow
def test_attention_of_a_sound_real_model_does_not_fall_apart() -> None:
    folder = str(folder_of("SmolLM2-135M-Instruct"))
    found = probe_lengths(load_model(folder), None, [64, 512], tokenizer=folder, tokens=2048)
    assert found.apart is None
