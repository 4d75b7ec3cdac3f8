"""Tiny models of many types: they build, run on guessed inputs, and give a row of the table of docs/families.md."""

from __future__ import annotations

import json
import runpy
import sys
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from locater.errors import LocaterError
from locater.version import code_version
from tests import ROOT
from tests.reach.heads import checked, heads_met, left_out, observed, scanned
from tests.reach.met import attention_met
from tests.reach.on_disk import scans_of, with_gains
from tests.reach.row import row
from tests.reach.tiny import MOST_PARAMETERS, model_types, not_reached, tiny

QUICK = ("gemma", "bert", "vit", "paligemma")
# Of all kinds, and all of them ran when they were chosen: text, hybrids, pictures, sounds, several towers
SAMPLE = """albert apertus arcee audio-spectrogram-transformer bart beit big_bird biogpt bitnet blenderbot bloom canine
    clip clipseg cohere2 convbert ctrl data2vec-text deberta deepseek_v3 deit dinov2 distilbert dots1 electra ernie esm
    exaone4 falcon flaubert funnel gemma2 gemma3_text git glm glm4 glm4_moe gpt2 gpt_bigcode gpt_neo gpt_neox gptj granite
    hubert ijepa llama longformer marian mixtral modernbert mpt olmo2 opt phi3 pixtral qwen2 qwen2_moe qwen3 siglip
    smollm3 t5 wav2vec2 whisper""".split()


@pytest.mark.parametrize("model_type", QUICK)
def test_a_row_of_the_table(model_type: str) -> None:
    result = row(model_type)
    assert result["built"], result
    assert result["ran"], result
    assert result["met"] == {"interface": result["modules"]}, "every attention module ran, through the interface"
    assert result["parameters"] < 200_000
    assert not any("error" in result[step] for step in ("record", "discovered", "observed")), result
    json.dumps(result)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", [name for name in SAMPLE if name not in QUICK])
def test_a_sample_of_types(model_type: str) -> None:
    result = row(model_type)
    assert result["ran"], result.get("why")
    assert sum(result["met"].values()) > 0
    assert not any("error" in result[step] for step in ("record", "discovered", "observed")), result


# vision and language, sound and language, encoder and decoder, detectors
COMPOSITE = """blip-2 clap detr florence2 gemma3 grounding-dino idefics3 internvl kosmos-2 llama4 llava llava_next llava_onevision
    mllama musicgen qwen2_audio qwen2_vl qwen3_vl sam speecht5 voxtral whisper""".split()


def test_the_inputs_of_a_picture_and_a_text_fit_each_other() -> None:
    """As many placeholders as the merged patches, in a text around them; more columns of patches than rows."""
    made = tiny("qwen2_5_vl")
    assert made.inputs is not None
    assert not_reached(made) == 0
    frames, rows, columns = made.inputs["image_grid_thw"][0].tolist()
    assert rows != columns
    assert made.inputs["pixel_values"].shape[0] == 2 * frames * rows * columns
    ids = made.inputs["input_ids"]
    assert (ids == made.model.config.image_token_id).sum(1).tolist() == [rows * columns // 4] * 2
    assert torch.equal(made.inputs["mm_token_type_ids"].bool(), ids == made.model.config.image_token_id)


@pytest.mark.slow
@pytest.mark.parametrize("model_type", COMPOSITE)
def test_every_tower_is_reached(model_type: str) -> None:
    made = tiny(model_type)
    assert made.inputs is not None, made.problem
    assert not_reached(made) == 0


def test_every_type_of_the_sample_is_known() -> None:
    assert {*SAMPLE, *COMPOSITE} <= set(model_types())


def test_a_layer_of_each_kind_is_kept() -> None:
    made = tiny("gemma2")
    assert made.model.config.layer_types == ["sliding_attention", "full_attention"]
    assert sum(parameter.numel() for parameter in made.model.parameters()) < MOST_PARAMETERS


class Attention(nn.Module):
    """Two maps, and attention in one of the ways of writing it; a router's softmax is none."""

    def __init__(self, way: str) -> None:
        super().__init__()
        self.query, self.key, self.way = nn.Linear(8, 8), nn.Linear(8, 8), way

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k = self.query(x), self.key(x)
        if self.way == "fused":
            return nn.functional.scaled_dot_product_attention(q, k, x)
        if self.way == "softmax":
            return ((q @ k.transpose(-1, -2)) * 8**-0.5).masked_fill(torch.eye(5).bool(), -9.0).softmax(-1) @ x
        return self.query(x).softmax(-1) * x


@pytest.mark.parametrize(("way", "met"), [("fused", {"fused": 1}), ("softmax", {"softmax": 1}), ("router", {})])
def test_attention_is_met_where_it_is(way: str, met: dict[str, int]) -> None:
    assert attention_met(Attention(way), {"x": torch.randn(2, 5, 8)}) == met


def test_a_model_that_collects_hidden_states_is_discovered_after_it_ran() -> None:
    """The hooks that collect them are made in the first pass, and have to be in the copy too."""
    result = row("depth_anything")
    assert result["ran"]
    assert result["discovered"] == {"layers": 4, "verified": 4}


def test_a_type_that_is_a_part_of_another_runs_in_it() -> None:
    result = row("sam_mask_decoder")
    assert (result["part_of"], result["part"]) == ("sam", "mask_decoder")
    assert sum(result["met"].values()) == result["modules"] > 0
    assert result["observed"]["layers"] == result["modules"]


def test_a_type_that_cannot_be_built_says_why() -> None:
    result = row("timm_backbone")
    assert not result["built"]
    assert result["why"]


@pytest.mark.slow
def test_the_command_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line of the same code is kept; a line of other code and a type without a line are measured."""
    lines = tmp_path / "reach.jsonl"
    script = runpy.run_path(str(ROOT / "scripts" / "reach.py"))
    code = code_version(*script["ROOMS"])[: script["DIGITS"]]
    kept = [{"model_type": "gpt2", "code": code}, {"model_type": "vit", "code": "of other code"}]
    lines.write_text("".join(json.dumps(line) + "\n" for line in kept))
    monkeypatch.setattr(sys, "argv", ["reach", "--only", "gpt2,bert,vit", "--lines", str(lines)])
    runpy.run_path(str(ROOT / "scripts" / "reach.py"), run_name="__main__")
    rows = [json.loads(line) for line in lines.read_text().splitlines()]
    assert [line["model_type"] for line in rows] == ["bert", "gpt2", "vit"]
    assert rows[1] == kept[0]
    assert [rows[at]["observed"]["heads"] for at in (0, 2)] == [8, 8]


@pytest.mark.parametrize("model_type", ["gemma", "paligemma"])
def test_no_head_is_left_out_without_a_word(model_type: str) -> None:
    made = tiny(model_type)
    assert made.inputs is not None
    heads = heads_met(made.model, made.inputs)
    assert sum(heads.values()) >= 8
    assert checked(heads, partial(observed, made.model, made.inputs)) == {"rows": sum(heads.values())}
    assert checked(heads, partial(scanned, made.model, made.inputs)) == {"rows": sum(heads.values())}


# of the sample, and types of which a part is refused, read in part, or has several attentions in one module
PARTLY = ("deit", "diffusion_gemma", "gemma4_text", "grounding-dino", "levit", "lilt", "mllama", "nemotron_h", "sam2")


@pytest.mark.slow
@pytest.mark.parametrize("model_type", sorted({*SAMPLE, *PARTLY}))
def test_no_head_of_the_sample_is_left_out_without_a_word(model_type: str) -> None:
    """Live, from disk and observed: rows, or a line that names the module, also in a refusal."""
    heads = row(model_type)["heads"]
    assert heads["met"] > 0
    ways = [heads[way] for way in ("scan", "observe", "disk") if way in heads]
    assert len(ways) >= 2
    assert not any("silent" in way or "error" in way for way in ways), heads


def test_two_attentions_of_one_module_are_two_layers() -> None:
    """LiLT has a map of contents and one of positions in one module: no row may be a mean of both."""
    made = tiny("lilt")
    assert made.inputs is not None
    heads = heads_met(made.model, made.inputs)
    layer = made.model.encoder.layer[0].attention.self
    assert heads["encoder.layer.0.attention.self"] == 2 * layer.num_attention_heads
    assert checked(heads, partial(observed, made.model, made.inputs)) == {"rows": sum(heads.values())}


def test_what_is_left_out_is_counted() -> None:
    """The check itself: of two modules of 4 heads one has rows, and the other only a line."""
    heads = {"layers.0.attn": 4, "layers.1.attn": 4}
    assert left_out(heads, ["layers.0.attn"] * 4, []) == ["layers.1.attn: 0 of 4 heads"]
    assert left_out(heads, ["layers.0.attn"] * 3, ["not measured: layers.1.attn"]) == ["layers.0.attn: 3 of 4 heads"]
    assert left_out(heads, ["layers.0.attn"] * 4, ["attention modules that never ran: layers.*.attn"]) == []
    assert left_out(heads, [], ["not read: layers.*.attn (2)"]) == []
    assert left_out(heads, [], ["not read: layers.*.attn"]) == ["layers.1.attn: 0 of 4 heads"], "one is named, two miss"
    assert left_out({"layers.1.attn": 4}, [], ["not read: layers.10.attn and 3 more kinds"]) != []
    assert left_out(heads, ["layers.0"] * 8, ["layers.1.attn.q_proj.weight is missing"]) == []


def test_a_refusal_has_to_name_what_it_leaves_out() -> None:
    def refuse(line: str) -> Any:
        raise LocaterError(line)

    heads = {"layers.0.attn": 4}
    assert checked(heads, lambda: refuse("some/folder: it cannot be read"))["silent"] == 1
    assert "silent" not in checked(heads, lambda: refuse("some/folder: not read: layers.*.attn"))
    assert "silent" not in checked(heads, lambda: refuse("some/folder: not read: model.layers.*.attn"), renamed=True)
    assert checked(heads, lambda: refuse("some/folder: not read: model.layers.*.mlp"), renamed=True)["silent"] == 1
    two = {"layers.0.self_attn": 4, "layers.1.self_attn": 4}
    assert "silent" not in checked(two, lambda: refuse("Discovery: no; not read: layers.*.attn (2)"), renamed=True)
    assert checked(two, lambda: refuse("Discovery: no; not read: layers.*.attn"), renamed=True)["silent"] == 2


def test_a_map_that_is_never_used_is_no_attention() -> None:
    class Unused(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            (self.query(x) @ self.key(x).transpose(-1, -2)).softmax(-1).to(x.dtype)
            return super().forward(x)

    assert attention_met(Unused("fused"), {"x": torch.randn(2, 5, 8)}) == {"fused": 1}


@pytest.mark.parametrize("model_type", ["tipsv2_text_model", "xlm"])
def test_a_scan_of_the_saved_folder_has_the_numbers_of_the_live_scan(model_type: str) -> None:
    """As a user reads both, with gains redrawn: on disk one has PyTorch's names for attention, and no PyTorch's block."""
    scans = row(model_type)["scans"]
    assert scans == {"rows": 8, "stored": 8, "same": 8}


def test_scans_that_differ_are_counted(tmp_path: Path) -> None:
    """The check itself: a gain that changes after saving shows, in its layer alone, and no line names it."""
    made = tiny("gemma")
    model = with_gains(made.model)
    model.save_pretrained(tmp_path)
    assert made.inputs is not None
    with torch.no_grad():
        model.layers[1].input_layernorm.weight.add_(0.01)
    scans = scans_of(model, made.inputs, str(tmp_path))
    assert scans["apart"] == ["layers.1.self_attn"]
    assert scans["silent"] == 1
    assert 0 < scans["same"] < scans["rows"] == scans["stored"]
