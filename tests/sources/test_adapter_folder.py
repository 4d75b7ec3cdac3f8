"""Folders of LoRA adapters: a scan of the folder equals a scan of the live model that peft builds from it."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import locater
from locater.commands.load_model import load_model
from locater.errors import LocaterError
from locater.sources.adapter_folder import _Alphas
from locater.sources.listing import files_of
from locater.sources.open_source import open_source
from locater.sources.weights import ModuleWeights
from tests.families.plain_models import MODELS
from tests.sources.test_adapters import trained

peft = pytest.importorskip("peft")
transformers = pytest.importorskip("transformers")
SIZES: dict[str, Any] = dict(
    hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, intermediate_size=48,
    vocab_size=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
GPT2 = dict(n_embd=32, n_layer=2, n_head=4, vocab_size=64, n_positions=64, bos_token_id=1, eos_token_id=2)
BOTH = ["q_proj", "k_proj"]
KINDS: dict[str, tuple[str, dict[str, Any]]] = {
    "lora": ("Llama", dict(target_modules=BOTH)),
    "no record": ("SmolLM3", dict(target_modules=BOTH)),
    "dora": ("Llama", dict(target_modules=BOTH, use_dora=True)),
    "patterns": (
        "Llama",
        dict(
            target_modules=[*BOTH, "down_proj"],
            use_rslora=True,
            alpha_pattern={"q_proj": 7},
            rank_pattern={"k_proj": 2},
        ),
    ),
    "transposed": (
        "GPT2",
        dict(target_modules=["c_attn"], fan_in_fan_out=True, bias="lora_only", modules_to_save=["ln_1"]),
    ),
    "lora_bias": ("GPT2", dict(target_modules=["c_attn"], fan_in_fan_out=True, lora_bias=True)),
    "transposed dora": ("GPT2", dict(target_modules=["c_attn"], fan_in_fan_out=True, use_dora=True)),
}


SLOW = ("no record", "lora_bias", "transposed dora")


def base_model(stem: str) -> nn.Module:
    torch.manual_seed(0)
    config = getattr(transformers, f"{stem}Config")(**(GPT2 if stem == "GPT2" else SIZES))
    return getattr(transformers, "GPT2LMHeadModel" if stem == "GPT2" else f"{stem}ForCausalLM")(config)


def saved(folder: Path, kind: str) -> Any:
    """The live model under a trained adapter; its base and its adapter are in `folder`."""
    stem, settings = KINDS[kind]
    model: Any = base_model(stem)
    model.save_pretrained(folder / "base")
    model = peft.get_peft_model(model, peft.LoraConfig(r=3, lora_alpha=5, **settings))
    trained(model)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if not p.requires_grad:
                continue
            if "ln_1.modules_to_save" in name or name.endswith(("base_layer.bias", "lora_B.default.bias")):
                p.add_(0.3)
    model.save_pretrained(folder / "adapter")
    rewrite(folder, base_model_name_or_path="../base")
    return model.eval()


def rewrite(folder: Path, **settings: Any) -> None:
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **settings}))


@pytest.mark.parametrize("kind", [pytest.param(k, marks=[pytest.mark.slow] * (k in SLOW)) for k in KINDS])
def test_a_folder_is_read_as_its_live_model(kind: str, tmp_path: Path) -> None:
    model = saved(tmp_path, kind)
    weights, _ = open_source(tmp_path / "adapter")
    live = ModuleWeights(model)
    changed = 0
    base, _ = open_source(tmp_path / "base")
    for name in weights.names():
        path = next(n for n in live.names() if n.endswith(f".{name}"))
        ours, theirs = weights.read(name), live.read(path)
        assert weights.shape(name) == tuple(theirs.shape)
        assert torch.allclose(ours.float(), theirs.detach().float(), atol=1e-6), name
        rows = [(1, 3), (5, 6)]
        assert torch.allclose(weights.read(name, rows).float(), torch.cat([ours[1:3], ours[5:6]]).float(), atol=1e-6)
        changed += not torch.equal(ours.float(), base.read(name).float())
    assert changed >= 2
    ours_rows, live_rows = locater.scan(tmp_path / "adapter").rows, locater.scan(model).rows
    assert len(ours_rows) == 8
    for one, two in zip(ours_rows, live_rows, strict=True):
        numbers = {name: value for name, value in asdict(two).items() if isinstance(value, float)}
        assert {name: asdict(one)[name] for name in numbers} == pytest.approx(numbers, rel=1e-4, abs=1e-6)


def test_files_that_are_pickled(tmp_path: Path) -> None:
    saved(tmp_path, "lora")
    before = [asdict(row) for row in locater.scan(tmp_path / "adapter").rows]
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    from safetensors.torch import load_file

    torch.save(load_file(file), file.with_suffix(".bin"))
    file.unlink()
    assert [asdict(row) for row in locater.scan(tmp_path / "adapter").rows] == before


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"peft_type": "IA3"}, "of the kind 'IA3' is not read: merge it"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights = 'pissa' is not read"),
        ({"use_qalora": True}, "use_qalora = True is not read"),
        ({"base_model_name_or_path": None}, "base_model_name_or_path is None: write the base model's folder there"),
        ({"base_model_name_or_path": "./nowhere/at/all"}, "its base model cannot be opened"),
        ({"lora_alpha": "five"}, "lora_alpha is 'five'"),
    ],
)
def test_settings_that_are_not_read(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    saved(tmp_path, "lora")
    rewrite(tmp_path, **settings)
    refused(tmp_path / "adapter", says)


def refused(folder: Path, says: str) -> None:
    with pytest.raises(LocaterError) as error:
        locater.scan(folder)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


def edited(folder: Path, change: Any) -> None:
    """The adapter's tensors with some replaced."""
    from safetensors.torch import load_file, save_file

    file = folder / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    save_file({**tensors, **change(tensors)}, file)


QUERY = "base_model.model.model.layers.0.self_attn.q_proj"


def test_an_adapter_in_float64(tmp_path: Path) -> None:
    """More precise than its base: each map is what the live model computes with, in the precision of the base."""
    saved(tmp_path, "lora")
    before = {row.head: row.M for row in locater.scan(tmp_path / "adapter").rows}
    edited(tmp_path, lambda tensors: {name: tensor.double() for name, tensor in tensors.items()})
    assert {row.head: row.M for row in locater.scan(tmp_path / "adapter").rows} == pytest.approx(before, rel=1e-5)
    weights, _ = open_source(tmp_path / "adapter")
    assert weights.read("model.layers.0.self_attn.q_proj.weight").dtype == torch.float32


@pytest.mark.parametrize(
    ("name", "tensor", "says"),
    [
        ("lora_A.weight", torch.tensor(1.0), "lora_A and lora_B of model.layers.0.self_attn.q_proj.weight are [] and [32, 3]"),
        ("lora_A.weight", torch.ones(32), "are [32] and [32, 3], which make no map"),
        ("lora_B.weight", torch.ones(32, 2), "are [3, 32] and [32, 2], which make no map"),
        ("lora_B.weight", torch.ones(32, 3, 1), "which make no map"),
        ("lora_A.weight", torch.ones(3, 32).to(torch.int8), "lora_A.weight is stored as torch.int8"),
        ("lora_magnitude_vector", torch.ones(1), "has lora_magnitude_vector, and use_dora is False"),
        ("lora_B.bias", torch.ones(5), "which its base model"),
    ],
)  # fmt: skip
def test_tensors_that_make_no_adapter(name: str, tensor: torch.Tensor, says: str, tmp_path: Path) -> None:
    saved(tmp_path, "lora")
    edited(tmp_path, lambda tensors: {f"{QUERY}.{name}": tensor})
    refused(tmp_path / "adapter", says)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"target_modules": ["q_proj"]}, "has tensors for model.layers.0.self_attn.k_proj, which target_modules does not name"),
        ({"target_modules": None}, "target_modules is None, not a list of names, or a pattern"),
        ({"use_dora": True}, "has no lora_magnitude_vector, and use_dora is True"),
    ],
)  # fmt: skip
def test_settings_of_another_adapter(settings: dict[str, Any], says: str, tmp_path: Path) -> None:
    """peft leaves such tensors out, or begins from its own: other numbers than those of a sum."""
    saved(tmp_path, "lora")
    rewrite(tmp_path, **settings)
    refused(tmp_path / "adapter", says)


def test_two_tensors_for_one_place(tmp_path: Path) -> None:
    saved(tmp_path, "lora")
    edited(tmp_path, lambda tensors: {f"other.{QUERY}.lora_A.weight": torch.ones(3, 32)})
    refused(tmp_path / "adapter", "are of one place in its base model: remove one")


def test_square_maps_are_turned_by_the_kind_of_layer(tmp_path: Path) -> None:
    """peft corrects fan_in_fan_out where the layer is an nn.Linear."""
    saved(tmp_path, "lora")
    expected = [row.M for row in locater.scan(tmp_path / "adapter").rows]
    rewrite(tmp_path, fan_in_fan_out=True)
    assert [row.M for row in locater.scan(tmp_path / "adapter").rows] == expected


def test_a_replaced_tensor_of_another_shape(tmp_path: Path) -> None:
    saved(tmp_path, "lora")
    edited(tmp_path, lambda tensors: {"base_model.model.model.layers.0.input_layernorm.weight": torch.ones(1)})
    refused(tmp_path / "adapter", "layers.0.input_layernorm.weight has the shape [1], the base has [32]")


PATHS = [f"model.layers.{i}.self_attn.{name}" for i in (0, 1, 10) for name in ("q_proj", "k_proj", "o_proj")] + [
    "lm_head",
    "layersx1.q_proj",
]


@pytest.mark.parametrize(
    "key",
    ["q_proj", "layers.1.self_attn.q_proj", "layers.1.q_proj", "self_attn.q", r"layers\.\d+\.self_attn\.q_proj", ".*layers.[01]..*", "(q|k)_proj",
     "^model.layers.0.self_attn.k_proj", r"model\.layers\.(0|10)\..*_proj$", "lm_head", "(?:model.)?layers.0.*", "[^q]_proj", "q_proj|k_proj", "", "."],
)  # fmt: skip
def test_keys_of_alpha_pattern_match_as_those_of_peft(key: str) -> None:
    from peft.utils.other import get_pattern_key

    alphas = _Alphas({"lora_alpha": 1, "alpha_pattern": {key: 2}}, "here")
    for path in PATHS:
        assert alphas[path] == (2 if get_pattern_key([key], path) == key else 1), path


@pytest.mark.parametrize(
    ("key", "says"),
    [
        ("(a+)+b", "a group that is repeated"), ("(.*)*", "a group that is repeated"), ("(a|aa)+$", "a group that is repeated"),
        ("a?" * 60 + "a" * 60, "would take too long"), (".*" * 30 + "x", "would take too long"), ("(a|a)" * 40, "would take too long"),
        (r"(a)\1", "which is not read here"), ("(?=a)b", "which is not read here"), ("(", "is no regular expression"),
    ],
)  # fmt: skip
def test_keys_of_alpha_pattern_that_would_not_end(key: str, says: str) -> None:
    settings = {"lora_alpha": 1, "alpha_pattern": {key: 2}}
    with pytest.raises(LocaterError, match=says):
        _ = _Alphas(settings, "here")["a" * 60]


def test_a_folder_with_such_a_key(tmp_path: Path) -> None:
    saved(tmp_path, "lora")
    rewrite(tmp_path, alpha_pattern={"(a+)+b": 2.0})
    refused(tmp_path / "adapter", "adapter_config.json: the key (a+)+b of alpha_pattern has a group that is repeated")
    rewrite(tmp_path, alpha_pattern={"x" * 2000: 2.0})
    refused(tmp_path / "adapter", "not a table of numbers by the names of maps")


def test_adapters_on_one_another(tmp_path: Path) -> None:
    """Two that name each other are refused; one on another is read as the sum of both."""
    saved(tmp_path, "lora")
    shutil.copytree(tmp_path / "adapter", tmp_path / "second")
    rewrite(tmp_path, base_model_name_or_path=str(tmp_path / "second"))
    path = tmp_path / "second" / "adapter_config.json"
    twice = locater.scan(tmp_path / "adapter")
    assert twice.assumptions["base"] == f"{tmp_path / 'second'} (an adapter on {tmp_path / 'second' / '../base'})"
    name = "model.layers.0.self_attn.q_proj.weight"
    plain, once, both = (open_source(tmp_path / place)[0].read(name) for place in ("base", "second", "adapter"))
    assert torch.allclose(both - once, once - plain, atol=1e-6)
    files = {path.name for path in files_of(tmp_path / "adapter")}
    assert files == {"adapter_config.json", "adapter_model.safetensors", "config.json", "model.safetensors"}
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "../adapter"}))
    refused(tmp_path / "adapter", "an adapter on adapters that name each other, and no model below them")
    assert len(files_of(tmp_path / "adapter")) == 4


def test_a_base_that_the_user_names(tmp_path: Path, run: Any) -> None:
    saved(tmp_path, "lora")
    expected = [asdict(row) for row in locater.scan(tmp_path / "adapter").rows]
    for address in ("https://127.0.0.1:9/base", "s3://bucket/base", "http:/127.0.0.1:9/base", "gs://bucket/base"):
        rewrite(tmp_path, base_model_name_or_path=address)
        refused(
            tmp_path / "adapter", "an address that the adapter chose, so it is not asked: give it yourself with --base"
        )
    shutil.copy(tmp_path / "base" / "config.json", tmp_path / "adapter")
    with pytest.raises(LocaterError, match="which is not opened for it: load both with peft, merge them"):
        load_model(str(tmp_path / "adapter"))
    scan = locater.scan(tmp_path / "adapter", base=str(tmp_path / "base"))
    assert [asdict(row) for row in scan.rows] == expected
    assert scan.assumptions["base"] == str(tmp_path / "base")
    shown = run("scan", tmp_path / "adapter", "--base", tmp_path / "base")
    assert "an adapter, read on its base model" in shown.out
    assert "not an adapter, so it has no base" in run("scan", tmp_path / "base", "--base", tmp_path / "base").err


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    saved(tmp_path, "lora")
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "base", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "hidden_size": 64})).save_pretrained(other)
    rewrite(tmp_path, base_model_name_or_path=str(other))
    refused(tmp_path / "adapter", "is for [16, 32], the base has [32, 64]")
    rewrite(tmp_path, base_model_name_or_path="../base")
    shutil.copy(tmp_path / "base" / "model.safetensors", tmp_path / "adapter")
    refused(tmp_path / "adapter", "holds both adapter_config.json and model.safetensors")
    (tmp_path / "adapter" / "model.safetensors").unlink()
    (tmp_path / "adapter" / "adapter_model.safetensors").unlink()
    refused(tmp_path / "adapter", "adapter_model.safetensors is missing")


@pytest.mark.parametrize("name", ["UNet", "timm"])
def test_live_adapters_on_plain_models(name: str) -> None:
    """Discovered as what acts: the outputs of the merged model."""
    torch.manual_seed(0)
    plain = MODELS[name]
    maps = ["to_q", "to_k", "to_v", "to_out.0"] if name == "UNet" else ["qkv", "proj"]
    model = peft.get_peft_model(plain.build(), peft.LoraConfig(r=3, lora_alpha=5, target_modules=maps)).eval()
    trained(model)
    layers = locater.discover(model, plain.example).layers
    outputs = [layer.output(torch.ones(1, 3, 32), *_text(layer)) for layer in layers]
    with locater.observe(model) as seen, torch.no_grad():
        model(**plain.example)
    assert len(seen.rows) == len(locater.scan(model, example=plain.example).rows) == plain.layers * plain.heads
    merged = locater.discover(model.merge_and_unload(), plain.example).layers
    assert len(layers) == len(merged) == plain.layers
    for ours, layer in zip(outputs, merged, strict=True):
        assert torch.allclose(ours, layer.output(torch.ones(1, 3, 32), *_text(layer)), atol=1e-5)


def _text(layer: Any) -> list[torch.Tensor]:
    return [torch.linspace(-1, 1, 48).view(1, 2, 24)] if layer.kind == "cross" else []


def test_other_adapters_are_refused_by_name() -> None:
    model = peft.get_peft_model(
        base_model("SmolLM3"), peft.IA3Config(target_modules=["k_proj"], feedforward_modules=[])
    )
    with pytest.raises(LocaterError, match="adapters of kind ia3 Linear are not read: merge_and_unload"):
        locater.scan(model)
