"""Checkpoints without a record, discovered from config.json: against the live model, against records, broken, cached."""

from __future__ import annotations

import copy
import json
import resource
import sys
import time
from collections.abc import Collection
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import locater
from locater.discovery import from_config_json as discovered_disk
from locater.discovery import from_config_json as small_models
from locater.discovery import record_or_discovery
from locater.discovery.carried_layouts import DIFFERENT, UNCLEAR, SearchResult, carry_layouts
from locater.discovery.layer_kinds import Kinds
from locater.discovery.record_or_discovery import layers_of
from locater.discovery.small_config import CUTS, changed_settings, small_config
from locater.discovery.verified_search import search
from locater.errors import LocaterError
from locater.layers.map_layouts import numbers_in, runs_of
from locater.sources.open_source import open_source
from locater.sources.weights import ModuleWeights, Rows, Weights
from tests.conftest import Result
from tests.discovery.test_discovered import BASE, GPT, HEAD, build
from tests.reach.on_disk import differences, discovered_from, with_gains

pytest.importorskip("transformers")
DEEP = {"num_hidden_layers": 7}
PATCHES = dict(image_size=32, patch_size=8, intermediate_size=48, hidden_size=32, num_attention_heads=4)
SOUND = dict(conv_dim=(8,), conv_kernel=(8,), conv_stride=(4,), num_feat_extract_layers=1, num_conv_pos_embeddings=8,
             num_conv_pos_embedding_groups=2)  # fmt: skip
EXPERTS = dict(num_experts=6, num_experts_per_tok=2, moe_intermediate_size=24, shared_expert_intermediate_size=24)
SEVERAL: dict[str, Any] = dict(  # a tower for pictures and one for text, each deeper than the small model
    vision_config={"model_type": "siglip_vision_model", **PATCHES, "num_hidden_layers": 5, "vision_use_head": False},
    text_config={"model_type": "gemma", **BASE, **HEAD, "num_hidden_layers": 6},
    projection_dim=32, hidden_size=32, image_token_index=60,
)  # fmt: skip
WITHOUT_RECORD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "gemma": ("Gemma", "ForCausalLM", {**BASE, **HEAD, **DEEP, "intermediate_size": 300, "vocab_size": 700}),
    "smollm3": ("SmolLM3", "ForCausalLM", {**BASE, **DEEP, "no_rope_layer_interval": 3}),
    "paligemma": ("PaliGemma", "ForConditionalGeneration", SEVERAL),
    "nomic_bert": ("NomicBert", "Model", {**BASE, **DEEP, "num_key_value_heads": 4}),  # one map on disk, three alive
    "glm4": ("Glm4", "ForCausalLM", {**BASE, **HEAD, **DEEP}),
    "olmo": ("Olmo", "ForCausalLM", {**BASE, **DEEP}),
    "modernbert": ("ModernBert", "Model", {**BASE, **DEEP, "global_attn_every_n_layers": 3}),
    "qwen2_moe": ("Qwen2Moe", "ForCausalLM", {**BASE, **EXPERTS, **DEEP}),
    # full layers have settings of their own, and wider heads
    "gemma4": (
        "Gemma4Text",
        "Model",
        {**BASE, **DEEP, "head_dim": 8, "global_head_dim": 16, "num_kv_shared_layers": 0},
    ),
    "wav2vec2": ("Wav2Vec2", "Model", {**BASE, **SOUND, "num_hidden_layers": 5}),
}
WITH_RECORD: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("Llama", "ForCausalLM", {**BASE, **DEEP}),
    "bert": ("Bert", "Model", {**BASE, **DEEP}),
    "gpt2": ("GPT2", "LMHeadModel", {**GPT, "n_layer": 6}),
    "qwen3": ("Qwen3", "ForCausalLM", {**BASE, **HEAD, **DEEP}),
    "t5": (
        "T5",
        "ForConditionalGeneration",
        dict(d_model=32, d_kv=8, d_ff=48, num_heads=4, num_layers=5, vocab_size=64),
    ),
}
QUICK = ("gemma", "smollm3", "nomic_bert", "bert")


def cases(models: Collection[str]) -> list[Any]:
    return [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in models]


def stirred(model: nn.Module) -> nn.Module:
    """Every parameter away from its initial value: gains of 1 and biases of 0 hide mistakes."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.2 * torch.randn(p.shape, generator=generator))
    return model


def saved(folder: Path, stem: str, kind: str, settings: dict[str, Any], **how: Any) -> Path:
    stirred(build(stem, kind, **settings)).save_pretrained(folder, **how)  # type: ignore[operator]
    return folder


@pytest.fixture
def gemma(tmp_path: Path) -> Path:
    """A saved model without a record, to break."""
    return saved(tmp_path / "model", "Gemma", "ForCausalLM", {**BASE, **HEAD, "num_hidden_layers": 4})


@pytest.mark.parametrize("name", cases(WITHOUT_RECORD))
def test_layers_from_disk_are_those_of_the_live_model(name: str, tmp_path: Path) -> None:
    import transformers

    stem, kind, settings = WITHOUT_RECORD[name]
    model = stirred(build(stem, kind, **settings)).bfloat16()
    for how in ({"max_shard_size": "20KB"}, {})[: 1 if name in QUICK else 2]:
        model.save_pretrained(tmp_path, **how)  # type: ignore[operator]
        assert (tmp_path / "model.safetensors.index.json").exists() == bool(how)
        live = getattr(transformers, f"{stem}{kind}").from_pretrained(tmp_path, dtype=torch.bfloat16)
        one, other = locater.discover(live), discovered_from(tmp_path)
        assert [layer.name for layer in one.layers] == [layer.name for layer in other.layers]
        assert len(one.layers) >= 5
        for a, b in zip(one.layers, other.layers, strict=True):
            assert not differences(a, b), a.name
            assert b.provenance == "discovered"
        assert one.gaps == other.gaps
        for path in tmp_path.iterdir():
            path.unlink()


def test_a_scan_from_disk_has_the_rows_of_a_live_scan(gemma: Path) -> None:
    import transformers

    live = locater.scan(transformers.GemmaForCausalLM.from_pretrained(gemma))
    stored = locater.scan(gemma)
    assert len(stored.rows) == 16
    for a, b in zip(live.rows, stored.rows, strict=True):
        for column in ("M", "F", "S", "trace", "spectral_norm", "localization"):
            assert a[column] == pytest.approx(b[column], rel=1e-6), column
    assert {layer["provenance"] for layer in stored.layers} == {"discovered"}


def test_modules_with_other_names_on_disk_are_not_said_to_be_left_out(tmp_path: Path) -> None:
    scan = locater.scan(saved(tmp_path, *WITHOUT_RECORD["nomic_bert"]))
    assert len(scan.rows) == 7 * 4
    assert not [note for note in scan.assumptions["notes"] if "not read" in note]
    assert "unread" not in scan.assumptions


@pytest.mark.parametrize("model_type", ["bamba", "big_bird"])
def test_numbers_that_json_has_not_and_modules_that_a_pass_replaces(model_type: str) -> None:
    """Bamba's config.json has an infinity, as an object; BigBird changes to full attention in its first pass."""
    from tests.reach import on_disk
    from tests.reach.tiny import tiny

    model = tiny(model_type).model
    with on_disk.saved(copy.deepcopy(model)) as folder:
        assert ("__float__" in Path(folder, "config.json").read_text()) == (model_type == "bamba")
        counts = on_disk.from_disk(folder, locater.discover(model))
    assert counts["layers"] == counts["verified"] == counts["same"] > 0, counts


@pytest.mark.parametrize("name", cases(WITH_RECORD))
def test_rows_from_disk_are_those_of_the_record(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = saved(tmp_path, *WITH_RECORD[name])
    by_record = locater.scan(folder)
    monkeypatch.setattr(record_or_discovery, "BY_TYPE", {})
    discovered = locater.scan(folder)
    assert {layer["provenance"] for layer in discovered.layers} == {"discovered"}
    rows = {(by_record.layers[row.layer]["name"], row.head): row for row in by_record.rows}
    assert len(discovered.rows) == len(rows)
    for row in discovered.rows:
        other = rows[discovered.layers[row.layer]["name"], row.head]
        size = other["frobenius_sq"]  # float32 sums of both signs are exact to 1e-6 of the norm, not of themselves
        for column, unit in {"trace": size**0.5, "trace_of_square": size, "frobenius_sq": size}.items():
            a, b = row[column], other[column]
            assert a is b is None or abs(a - b) < 1e-6 * unit, (row.layer, row.head, column)


def test_layers_that_are_built_otherwise_have_a_layout_of_their_own(tmp_path: Path) -> None:
    """Each layer of this GPT-2 divides its logits by its number, which no small model of three layers shows."""
    settings = {**GPT, "n_layer": 6, "scale_attn_by_inverse_layer_idx": True}
    discovered = discovered_from(saved(tmp_path, "GPT2", "LMHeadModel", settings))
    scales = [layer.scale for layer in discovered.layers]
    assert scales == pytest.approx([8**-0.5 / number for number in range(1, 7)], rel=1e-6)


@pytest.fixture(scope="module")
def small_and_full() -> tuple[SearchResult, Kinds, ModuleWeights, ModuleWeights]:
    """What a search finds in a Gemma of three layers, and a Gemma of seven."""
    import transformers

    settings = transformers.GemmaConfig(**{**BASE, **HEAD, **DEEP})
    full = ModuleWeights(transformers.GemmaForCausalLM(settings))
    config = small_config(settings, CUTS[0])
    small = ModuleWeights(transformers.GemmaForCausalLM(config))
    kinds = Kinds(small.modules(), full.modules(), changed_settings(settings, config))
    return SearchResult(*search(small.module, small, None)), kinds, small, full


def test_layouts_are_carried_over_to_all_layers(small_and_full: Any) -> None:
    searched, kinds, small, full = small_and_full
    assert len(searched.layouts) == 3
    result = carry_layouts(searched, kinds, small, full)
    assert [layout.name for layout in result.layouts] == [f"model.layers.{n}.self_attn" for n in range(7)]
    assert result.layouts[6].query.weight == "model.layers.6.self_attn.q_proj.weight"
    assert not result.refused


@pytest.mark.parametrize("fault", ["scale", "rows", "tensor"])
def test_layers_of_one_kind_that_disagree_are_refused(fault: str, small_and_full: Any) -> None:
    searched, kinds, small, full = small_and_full
    layout = searched.layouts[2]
    if fault == "scale":
        layout = replace(layout, logits=replace(layout.logits, scale=layout.logits.scale * 1.0001))
    elif fault == "rows":
        layout = replace(layout, query=replace(layout.query, rows=runs_of(reversed(numbers_in(layout.query.rows)))))
    else:
        layout = replace(layout, key=replace(layout.key, weight="model.layers.1.self_attn.k_proj.weight"))
    result = carry_layouts(replace(searched, layouts=[*searched.layouts[:2], layout]), kinds, small, full)
    assert [layout.name for layout in result.layouts] == ["model.layers.0.self_attn"]
    assert {refusal.name for refusal in result.refused} == {f"model.layers.{n}.self_attn" for n in range(1, 7)}
    assert {refusal.reason for refusal in result.refused} == {UNCLEAR if fault == "tensor" else DIFFERENT}


@pytest.mark.parametrize("fault", ["attribute", "class", "list"])
def test_a_layer_of_another_kind_is_refused(fault: str, small_and_full: Any) -> None:
    searched, kinds, small, full = small_and_full
    odd = copy.deepcopy(full.module)
    layer = odd.model.layers[5]
    if fault == "attribute":
        layer.self_attn.scaling = 0.5
    elif fault == "class":
        layer.input_layernorm = nn.LayerNorm(32)
    else:
        odd.model.windows = [None, None, None, None, None, 4, None]
        small.module.model.windows = [None, None, None]
    odd_kinds = Kinds(small.modules(), ModuleWeights(odd).modules(), kinds.changed)
    result = carry_layouts(searched, odd_kinds, small, ModuleWeights(odd))
    assert [refusal.name for refusal in result.refused] == ["model.layers.5.self_attn"]
    assert len(result.layouts) == 6


def test_a_module_that_attends_in_two_ways_has_both_on_disk(tmp_path: Path) -> None:
    """LXMERT's from words to boxes and back, with one set of weights behind two norms. With fresh gains all are alike."""
    import transformers

    torch.manual_seed(0)
    sizes = dict(hidden_size=32, num_attention_heads=4, intermediate_size=32, vocab_size=60)
    model = with_gains(transformers.LxmertModel(transformers.LxmertConfig(**sizes, l_layers=1, r_layers=1, x_layers=4)))
    model.save_pretrained(tmp_path)
    live, stored = locater.scan(model), locater.scan(tmp_path)
    names = [str(entry["name"]) for entry in live.layers]
    assert names == [entry["name"] for entry in stored.layers]
    twice = [number for number, name in enumerate(names) if name == "encoder.x_layers.3.visual_attention.att"]
    assert len(twice) == 2
    sizes_of = [[row.frobenius_sq for row in scan.rows] for scan in (live, stored)]
    assert sizes_of[1] == pytest.approx(sizes_of[0], rel=1e-5)
    one, two = ([row.frobenius_sq for row in stored.rows if row.layer == number] for number in twice)
    assert min(abs(a / b - 1) for a, b in zip(one, two, strict=True)) > 1e-3


def test_calls_of_a_module_that_layers_of_one_kind_have_not_alike_are_refused(small_and_full: Any) -> None:
    searched, kinds, small, full = small_and_full
    result = carry_layouts(replace(searched, layouts=[*searched.layouts, searched.layouts[2]]), kinds, small, full)
    assert [layout.name for layout in result.layouts] == ["model.layers.0.self_attn"]
    assert {refusal.reason for refusal in result.refused} == {DIFFERENT}


class Counting:
    """A checkpoint that counts the numbers read from it."""

    def __init__(self, weights: Weights) -> None:
        self.where, self._weights, self.numbers = weights.where, weights, 0

    def names(self) -> Collection[str]:
        return self._weights.names()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._weights.shape(name)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._weights.read(name, rows)
        self.numbers += tensor.numel()
        return tensor


@pytest.mark.parametrize("stem", ["Gemma", "NomicBert"])
def test_only_queries_keys_and_gains_are_read(stem: str, tmp_path: Path) -> None:
    """Also where queries, keys and values are one tensor on disk."""
    kind = "ForCausalLM" if stem == "Gemma" else "Model"
    weights, config = open_source(saved(tmp_path, stem, kind, {**BASE, **HEAD, **DEEP, "num_key_value_heads": 4}))
    counting = Counting(weights)
    layers = layers_of(counting, config)
    for layer in layers:
        layer.query.weight(), layer.key.weight()
    vectors = sum(len(weights.shape(name)) == 1 for name in weights.names()) * 3 * 32
    assert counting.numbers <= 7 * 2 * 32 * 32 + vectors


def without(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors.pop(name)
    save_file(tensors, folder / "model.safetensors")


def narrow(folder: Path, name: str) -> None:
    tensors = load_file(folder / "model.safetensors")
    tensors[name] = tensors[name][1:].contiguous()
    save_file(tensors, folder / "model.safetensors")


def truncate(folder: Path) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])


def configure(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))


KEY = "model.layers.3.self_attn.k_proj.weight"
NORM = "model.layers.2.input_layernorm.weight"
BAD = {
    "a map is missing": (lambda f: without(f, KEY), f"the tensor {KEY} is missing"),
    "a gain is missing": (lambda f: without(f, NORM), f"the tensor {NORM} is missing"),
    "a map has other rows": (lambda f: narrow(f, KEY), f"{KEY} has shape [15, 32] but the configuration says [16, 32]"),
    "a file is cut": (truncate, "model.safetensors"),
    "another type": (lambda f: configure(f, model_type="unheard_of"), "has no model_type 'unheard_of'"),
    "own code": (lambda f: configure(f, auto_map={"AutoModel": "m.M"}), "trust_remote_code=True"),
    "quantised": (lambda f: configure(f, quantization_config={"quant_method": "fp8"}), "quantised"),
    "no model": (lambda f: configure(f, hidden_size=-3), "no gemma model can be built from config.json"),
    "other heads": (lambda f: configure(f, num_attention_heads=8), "q_proj.weight has shape [32, 32] but"),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_checkpoint_is_one_line(name: str, gemma: Path, run: Any) -> None:
    spoil, words = BAD[name]
    spoil(gemma)
    result: Result = run("scan", gemma)
    assert result.status == 2, result
    assert len(result.err.splitlines()) == 1, result.err
    assert words in result.err
    assert str(gemma) in result.err


def test_without_transformers_the_line_says_what_to_install(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "transformers"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "transformers", None)
    with pytest.raises(LocaterError, match=r"install locater\[hf\]"):
        locater.scan(gemma)


def test_tensors_that_the_model_has_no_place_for_are_named(gemma: Path) -> None:
    configure(gemma, num_hidden_layers=3)
    notes = " ".join(locater.scan(gemma).assumptions["notes"])
    assert "model.layers.3.self_attn: not read, because the model that config.json describes has no place" in notes


def test_what_was_discovered_is_kept(gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "kept"
    monkeypatch.setenv("LOCATER_CACHE", str(folder))
    before = discovered_from(gemma)
    (path,) = folder.iterdir()  # one file, and no leftover of writing it
    path.write_text(path.read_text()[:-40])  # broken: ignored, and made again
    discovered_from(gemma)
    monkeypatch.setattr(discovered_disk, "_search_checkpoint", lambda *_: pytest.fail("searched again"))
    after = discovered_from(gemma)
    for one, other in zip(before.layers, after.layers, strict=True):
        assert not differences(one, other)
    configure(gemma, rms_norm_eps=1e-3)  # another configuration is searched anew
    with pytest.raises(pytest.fail.Exception):
        discovered_from(gemma)
    monkeypatch.setenv("LOCATER_CACHE", "off")
    with pytest.raises(pytest.fail.Exception):
        discovered_from(gemma)


def test_a_folder_that_cannot_be_written_is_no_error(
    gemma: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("LOCATER_CACHE", str(tmp_path / "file" / "inside"))
    assert len(discovered_from(gemma).layers) == 4


HOSTILE = {
    "llama4": ({"model_type": "llama4"}, "self_attn.q_proj.weight is missing"),
    "biogpt": ({"model_type": "biogpt", "hidden_size": 8192, "num_attention_heads": 64}, "weight is missing"),
    "wide": (
        {"model_type": "gemma", "hidden_size": 16384, "intermediate_size": 65536, "num_hidden_layers": 1},
        "self_attn.q_proj.weight has shape [100, 110] but the configuration says",
    ),
    "deep": ({"model_type": "gemma", "num_hidden_layers": 10**9}, "num_hidden_layers = 1,000,000,000"),
    "tensors": ({"model_type": "gemma", "num_hidden_layers": 900}, "tensors, and the checkpoint has far fewer"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_nothing_runs_that_the_file_does_not_hold(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A config.json beside a file of 44 kB that describes a large model: names and shapes are compared first."""
    config, reason = HOSTILE[name]
    save_file({"model.layers.0.self_attn.q_proj.weight": torch.zeros(100, 110)}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(config))
    monkeypatch.setattr(small_models, "search", lambda *_: pytest.fail("a model ran"))
    started, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(LocaterError) as error:
        locater.scan(tmp_path)
    assert reason in str(error.value)
    assert time.process_time() - started < 10
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 600_000  # kB


def test_a_small_model_much_larger_than_the_checkpoint_is_not_run(gemma: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention is as config.json says, and its MLP has no place in the file."""
    configure(gemma, intermediate_size=500_000)
    monkeypatch.setattr(small_models, "CUTS", [cut for cut in CUTS if not cut.mlp])
    with pytest.raises(LocaterError, match=r"has [\d,]+ numbers, and the checkpoint holds [\d,]+: correct config.json"):
        locater.scan(gemma)


@pytest.mark.parametrize("limit", ["MOST_BYTES", "MOST_SECONDS"])
def test_a_pass_that_computes_without_end_is_ended(limit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One number of a config.json makes VITS speak so slowly that 0.4 MB of weights are gigabytes of sound."""
    import transformers

    sizes = dict(hidden_size=16, num_hidden_layers=1, num_attention_heads=2, ffn_dim=16, flow_size=16, spectrogram_bins=9,
                 vocab_size=40, wavenet_dilation_rate=1, upsample_initial_channel=8, upsample_rates=[8], upsample_kernel_sizes=[16],
                 prior_encoder_num_flows=1, posterior_encoder_num_wavenet_layers=1, prior_encoder_num_wavenet_layers=1)  # fmt: skip
    transformers.VitsModel(transformers.VitsConfig(**sizes, speaking_rate=0.05)).save_pretrained(tmp_path)
    monkeypatch.setattr(discovered_disk, limit, {"MOST_BYTES": 20_000_000, "MOST_SECONDS": 0.05}[limit])
    monkeypatch.setattr(discovered_disk, {"MOST_BYTES": "BYTES_EACH", "MOST_SECONDS": "SECONDS_EACH"}[limit], 0)
    with pytest.raises(LocaterError, match="a small model of its class takes more than"):
        discovered_from(tmp_path)


def test_a_configuration_of_many_bytes_is_refused(gemma: Path) -> None:
    (gemma / "config.json").write_text('{"model_type": "gemma", "x": [' + ",".join(["[[[]]]"] * 700_000) + "]}")
    with pytest.raises(LocaterError, match="too large for a configuration"):
        locater.scan(gemma)
