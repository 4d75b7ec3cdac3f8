"""What parity does not show of vision models and pairs: names on the hub, parts taken out of a model, and what is
refused.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater.errors import LocaterError
from tests.families.vision_and_pairs import CASES, LAYER, Attention, Block, Blocks
from tests.parity import model_of


def built(label: str) -> Any:
    return model_of(next(case for case in CASES if case.label == label))


def written(label: str, folder: Path, rename: Callable[[str], str] = str, **config: Any) -> Path:
    """A checkpoint with tensors renamed and settings replaced."""
    case = next(case for case in CASES if case.label == label)
    model = model_of(case)
    case.save(model, folder) if case.save else model.save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({rename(name): tensor for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**json.loads((folder / "config.json").read_text()), **config}))
    return folder


def same(ours: Any, theirs: Any) -> None:
    ours, theirs = list(attention_layers(ours)), list(attention_layers(theirs))
    assert len(ours) == len(theirs) > 0
    for a, b in zip(ours, theirs, strict=True):
        x = torch.randn(1, 5, a.width, dtype=torch.float64)
        torch.testing.assert_close(a.output(x), b.output(x))


@pytest.mark.parametrize(
    ("label", "rename"),
    [
        ("clip-text", lambda n: f"text_model.{n}"),
        ("clip-vision", lambda n: f"vision_model.{n}"),
        ("siglip-vision", lambda n: f"vision_model.{n}"),
        ("dinov2", lambda n: f"dinov2.{n}"),
        ("gemma3-composite", lambda n: n.replace("vision_tower.", "vision_tower.vision_model.")),
        ("t5", lambda n: f"transformer.{n}"),
        ("whisper", lambda n: f"model.{n}"),
        ("bart", lambda n: f"model.{n}"),
        ("timm", lambda n: f"trunk.{n}"),
    ],
)  # fmt: skip
def test_names_of_the_hub(label: str, rename: Callable[[str], str], tmp_path: Path) -> None:
    same(written(label, tmp_path, rename), built(label))


@pytest.mark.parametrize(
    ("label", "part"),
    [
        ("clip", "text_model"), ("siglip", "vision_model"), ("t5", "encoder"), ("t5", "decoder"), ("whisper", "encoder"),
        ("bart", "decoder"), ("timm", "blocks.1"), ("timm", "blocks.1.attn"),
    ],
)  # fmt: skip
def test_a_part_taken_out_of_its_model(label: str, part: str) -> None:
    model = built(label)
    whole = {layer.name: layer for layer in attention_layers(model)}
    taken = list(attention_layers(model.get_submodule(part)))
    assert [f"{part}.{x.name}".rstrip(".") for x in taken] == [
        name for name in whole if f"{name}.".startswith(f"{part}.")
    ]
    for layer in taken:
        other = whole[f"{part}.{layer.name}".rstrip(".")]
        assert (layer.causal, layer.kind, layer.heads) == (other.causal, other.kind, other.heads)
        assert (layer.bias is None) == (other.bias is None)


def test_old_settings_of_clip_rule_whole(tmp_path: Path) -> None:
    held = {"hidden_size": 32, "num_attention_heads": 4, "num_hidden_layers": 2}
    layers = list(attention_layers(written("clip", tmp_path, text_config_dict=held)))
    assert layers[0].norm.eps == 1e-5  # text_config says otherwise, and the old entry does not mention it
    assert layers[2].norm.eps == 0.05


def test_table_stored_with_cross_attention_is_not_used(tmp_path: Path) -> None:
    folder = written("t5", tmp_path)
    tensors = load_file(folder / "model.safetensors")
    name = "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight"
    save_file({**tensors, name: torch.randn(8, 4)}, folder / "model.safetensors")
    assert all(layer.bias is None for layer in attention_layers(folder) if layer.kind == "cross")


@pytest.mark.parametrize(
    ("label", "settings"),
    [
        ("dinov2", {"num_hidden_layers": 3}),
        ("clip-vision", {"hidden_size": 48}),
        ("clip-vision", {"num_attention_heads": 5}),
        ("clip-text", {"num_hidden_layers": 3}),
        ("siglip-text", {"num_attention_heads": 5}),
        ("t5", {"num_heads": 2}),
        ("t5", {"num_decoder_layers": 2}),
        ("whisper", {"decoder_attention_heads": 5}),
        ("bart", {"encoder_layers": 3}),
        ("timm", {"num_heads": 5}),
        ("timm-head-norms", {"num_heads": 2}),
    ],
)
def test_settings_that_do_not_fit_are_refused(label: str, settings: dict[str, int], tmp_path: Path) -> None:
    with pytest.raises(LocaterError) as error:
        list(attention_layers(written(label, tmp_path, **settings)))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("label", ["clip", "siglip", "t5", "whisper", "bart", "timm", "dinov2"])
def test_no_attention_at_all_is_refused(label: str, tmp_path: Path) -> None:
    folder = written(label, tmp_path)
    save_file({"something.weight": torch.zeros(2, 2)}, folder / "model.safetensors")
    with pytest.raises(LocaterError):
        list(attention_layers(folder))


def test_gradients_reach_the_parameters() -> None:
    for label in ("t5", "dinov2", "timm", "siglip"):
        model = built(label)
        layers = list(attention_layers(model))
        sum(
            layer.output(torch.randn(1, 3, layer.width, dtype=torch.float64)).square().sum() for layer in layers
        ).backward()
        touched = [n for n, p in model.named_parameters() if p.grad is not None]
        assert any("relative_attention_bias" in n for n in touched) == (label == "t5")
        assert any("lambda1" in n or "gamma" in n for n in touched) == (label in ("dinov2", "timm"))
        assert len(touched) >= 4 * len(layers)


# timm


def refusal(source: Any, **options: Any) -> str:
    with pytest.raises(LocaterError) as error:
        list(attention_layers(source, **options))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_heads_are_asked_for(tmp_path: Path) -> None:
    assert "--heads" in refusal(written("timm-architecture", tmp_path))
    assert "--heads" in refusal(written("timm-architecture", tmp_path), heads=5)
    folder = written("timm-architecture", tmp_path, model_args={"num_heads": 4})
    assert attention_layers(folder)[0].heads == 4
    (folder / "config.json").unlink()
    assert "--heads" in refusal(folder)
    assert attention_layers(folder, heads=4)[0].heads == 4


@pytest.mark.parametrize(
    "name", ["vit_pe_core_base_patch16_224", "vit_base_patch16_dinov3", "eva02_base_patch14_224", "davit_base"]
)
def test_architectures_that_only_look_alike_are_refused(name: str, tmp_path: Path) -> None:
    assert name in refusal(written("timm-architecture", tmp_path, architecture=name), heads=4)


def test_attention_with_more_parts_is_not_read_by_the_record(tmp_path: Path) -> None:
    """Discovery sees that the forward pass does not use the part; a file cannot say so."""
    model = Blocks(LAYER)
    model.blocks[0].attn.relative_position_bias_table = nn.Parameter(torch.zeros(9, 4))
    assert {layer.provenance for layer in attention_layers(model)} == {"discovered"}
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    assert "relative_position_bias_table" in refusal(tmp_path / "model.safetensors", heads=4)


def test_rotary_attention_is_refused() -> None:
    class Turning(Attention):
        def forward(self, x: Tensor, rope: Tensor | None = None) -> Tensor:  # type: ignore[override]
            return x

    assert "Turning" in refusal(Turning(32, 4, nn.Identity, bias=True))


def test_conditioned_blocks_are_refused() -> None:
    model = Blocks(LAYER)
    model.blocks[1].adaLN_modulation = nn.Linear(8, 8)
    assert "adaLN" in refusal(model)


def test_modules_of_several_kinds_are_all_read() -> None:
    both = nn.ModuleDict(
        {"text": nn.TransformerEncoderLayer(32, 4), "image": Block(32, 4, LAYER, nn.Identity, scaled=False)}
    )
    assert [layer.name for layer in attention_layers(both)] == ["text.self_attn", "image.attn"]


def test_norm_after_attention() -> None:
    class ResPostBlock(Block):
        def forward(self, x: Tensor) -> Tensor:
            return x + self.norm1(self.attn(x))

    layer = attention_layers(ResPostBlock(32, 4, LAYER, nn.Identity, scaled=False))[0]
    assert layer.norm.kind == "none"


def test_norm_before_the_projection_leaves_the_output_out() -> None:
    model = Blocks(LAYER)
    model.blocks[0].attn.norm = nn.LayerNorm(32)
    first, second = attention_layers(model)
    assert first.out is None
    assert second.out is not None
