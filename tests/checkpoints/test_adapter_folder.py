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
from locater.checkpoints.sources import open_source
from locater.checkpoints.weights import ModuleWeights
from locater.errors import LocaterError
from tests.checkpoints.test_adapters import trained
from tests.families.plain_models import MODELS

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


def test_folders_that_are_not_whole(tmp_path: Path) -> None:
    saved(tmp_path, "lora")
    other = tmp_path / "other"
    shutil.copytree(tmp_path / "base", other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "hidden_size": 64}))
    transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**SIZES, "hidden_size": 64})).save_pretrained(other)
    rewrite(tmp_path, base_model_name_or_path=str(other))
    refused(tmp_path / "adapter", "is for [32, 32], the base has [64, 64]")
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
