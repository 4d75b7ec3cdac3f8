"""No part of a model is read as the whole: what looks like attention and is not read is named, and nothing is given."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.calls.attention_like import NUMBER, attention_like
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.sources.open_source import open_source
from locater.sources.weights import ModuleWeights
from tests.families import CASES
from tests.families.vision_and_pairs import LAYER, Block
from tests.parity import model_of

SIZES = {
    "hidden_size": 64, "d_model": 32, "embed_dim": 32, "hidden_dim": 32, "mask_feature_size": 32, "feature_size": 32, "projection_dim": 32,
    "intermediate_size": 48, "encoder_feedforward_dim": 48, "dim_feedforward": 48, "moe_intermediate_size": 16, "vocab_size": 160,
    "num_attention_heads": 4, "num_heads": 4, "encoder_attention_heads": 4, "decoder_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "num_blocks": 2, "num_hidden_layers": 2, "num_layers": 2, "encoder_layers": 2, "decoder_layers": 2,
    "text_encoder_num_layers": 2, "text_encoder_width": 64, "text_encoder_vocab_size": 160, "class_dec_layers": 2,
    "image_size": 32, "patch_size": 8, "num_queries": 4,
    "moe_num_experts": 2, "moe_topk": 1, "max_position_embeddings": 64, "num_experts": 2, "conv_dim": 32,
}  # fmt: skip


def shrink(config: Any) -> Any:
    """A configuration and those inside it, made small."""
    held = vars(config)
    for name, value in list(held.items()):
        if isinstance(value, int) and not isinstance(value, bool) and value > SIZES.get(name, value):
            held[name] = SIZES[name]
        elif hasattr(value, "model_type"):
            shrink(value)
        elif name == "layer_types" and value:
            held[name] = (list(dict.fromkeys(value)) * 2)[:2]
        elif name == "depths":
            held[name] = [1] * len(value)
        elif name.endswith(("token_id", "token_index")) and isinstance(value, int):
            held[name] = min(value, 150)
    return config


def tiny(name: str, device: str = "meta") -> nn.Module:
    """An untrained model of a type in small; on "meta" it has no numbers, which a refusal does not need."""
    import transformers

    stem, _, model = name.partition(".")
    config = shrink(getattr(transformers, f"{stem}Config")())
    if stem in WITH_HEAD:  # pooling by nn.MultiheadAttention, as in the checkpoints of their vision towers
        config.vision_config.vision_use_head = True
    with torch.device(device):
        return getattr(transformers, f"{stem}{model or 'Model'}")(config)


WITH_HEAD = ("PaliGemma", "LlavaOnevision")
IN_PART = ["PaliGemma", "LlavaOnevision", "Siglip2", "Siglip2Vision", "T5Gemma2", "BridgeTower", "Mask2Former"]
IN_PART_TOO = ["OneFormer", "Aria", "ShieldGemma2.ForImageClassification", "ColPali.ForRetrieval", "ModernVBert", "Lfm2Vl",
               "Phi4Multimodal", "Phi4MultimodalVision", "DeepseekVLHybrid"]  # fmt: skip


def refusal(source: Any) -> str:
    with pytest.raises(LocaterError) as error:
        locater.scan(source)
    assert "\n" not in str(error.value)
    return str(error.value)


@pytest.mark.parametrize("name", [*IN_PART, *(pytest.param(name, marks=pytest.mark.slow) for name in IN_PART_TOO)])
def test_a_type_of_which_a_part_is_known_is_refused(name: str) -> None:
    model = tiny(name)
    line = refusal(model)
    assert f"model_type {model.config.model_type!r} is not a known architecture" in line
    if name != "ColPali.ForRetrieval":  # whose vision tower has no such head by default
        assert "Not read: " in line
    assert "locater.register()" in line
    with locater.observe(model) as seen:  # needs no record: every attention module is there, and none ran
        assert seen.silent == attention_like(ModuleWeights(model))


def test_paligemma_alive_and_on_disk_names_what_is_missing(tmp_path: Path) -> None:
    model = tiny("PaliGemma", "cpu")
    model.save_pretrained(tmp_path)
    for source in (model, tmp_path):
        result = locater.scan(source)
        names = {layer["name"] for layer in result.layers}
        notes = " ".join(result.assumptions["notes"])
        assert "language_model.layers.1.self_attn" in names
        for path in attention_like(ModuleWeights(model)):  # a row or a note: nothing is left out unsaid
            assert path in names or NUMBER.sub("*", path) in notes
    assert len(locater.scan(model.vision_tower).rows) == 3 * 4


class Diffusing(nn.Module):
    """Attention as diffusion models name it."""

    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k, self.to_v = (nn.Linear(32, 32) for _ in range(3))
        self.to_out = nn.ModuleList([nn.Linear(32, 32)])


class Fused(nn.Module):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.register_module(name, nn.Linear(32, 96))


class OddlyNamedAttention(nn.Module):
    """Only its class says what it is."""

    def __init__(self) -> None:
        super().__init__()
        self.num_heads = 4
        self.left, self.right = nn.Linear(32, 32), nn.Linear(32, 32)


class Split(nn.Module):
    def __init__(self, query: str, key: str) -> None:
        super().__init__()
        for name in (query, key):
            self.register_module(name, nn.Sequential(nn.Linear(32, 32)))


def block() -> nn.Module:
    return Block(32, 4, LAYER, nn.Identity, scaled=False)


@pytest.mark.parametrize("known", [lambda: nn.TransformerEncoderLayer(32, 4), block], ids=["torch", "timm"])
@pytest.mark.parametrize(
    "other",
    [
        Diffusing(),
        Fused("to_qkv"),
        Fused("Wqkv"),
        OddlyNamedAttention(),
        Split("wq", "wk"),
        Split("q", "kv"),
        Split("Query", "Key"),
    ],
    ids=["to_q", "to_qkv", "Wqkv", "class", "wq", "kv", "Query"],
)
def test_other_attention_beside_a_known_kind_is_named(known: Any, other: nn.Module) -> None:
    model = nn.ModuleDict({"text": nn.ModuleList([known()]), "image": nn.ModuleList([other])})
    line = refusal(model)
    assert "Not read: image.0" in line
    assert "locater.scan(model.text)" in line
    assert locater.scan(model.text).rows


def test_two_architectures_in_one_model() -> None:
    """The configuration that is found first is that of the first model."""
    bert, vit = (model_of(next(case for case in CASES if case.label == label)) for label in ("bert", "vit"))
    line = refusal(nn.ModuleDict({"words": bert, "pixels": vit}))
    assert "Not read: pixels.layers.*.attention (2)" in line
    assert "locater.scan(model.words) (likewise pixels)" in line


def test_cross_attention_of_gpt2_is_not_left_out_in_silence() -> None:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=2, n_head=4, n_embd=32, vocab_size=64, n_positions=32, add_cross_attention=True)
    line = refusal(GPT2LMHeadModel(config))
    assert "Not read: transformer.h.*.crossattention (2)" in line
    assert "on its own" not in line, "every part of it is refused too"


class Pooled(nn.Module):
    """A known model among parts that only sound like attention."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.attention = nn.Linear(32, 1)  # additive pooling
        self.query = nn.Parameter(torch.zeros(32, 32))
        self.encoder_q, self.encoder_k = nn.Linear(32, 8), nn.Linear(32, 8)  # contrastive learning
        self.channel_attention = ChannelAttention()
        self.in_proj = nn.Linear(32, 64)  # state-space models


class ChannelAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(32, 4), nn.Linear(4, 32)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(self.fc1(x)).sigmoid()


@pytest.mark.parametrize("label", ["bert", "llama", "torch-encoder-pre", "timm"])
def test_what_only_sounds_like_attention_is_no_reason_to_refuse(label: str) -> None:
    model = model_of(next(case for case in CASES if case.label == label))
    assert len(attention_layers(Pooled(model))) == len(attention_layers(model)) == 2


def test_one_module_under_two_names_is_one() -> None:
    attention = nn.MultiheadAttention(32, 4)
    odd = OddlyNamedAttention()
    odd.inner = attention
    model = nn.ModuleDict({"a": odd, "b": nn.ModuleDict({"same": attention})})
    assert set(attention_like(open_source(model)[0])) == {"a.inner", "b.same"}
    assert [layer.name for layer in attention_layers(model)] == ["a.inner", "b.same"]


def test_a_compiled_model_is_no_part_of_itself() -> None:
    model = nn.Sequential(block())
    expected = [row.trace for row in locater.scan(model).rows]
    assert [row.trace for row in locater.scan(torch.compile(model)).rows] == expected
