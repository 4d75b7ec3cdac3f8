"""Tiny vision models, pairs of towers and pairs of stacks: DINOv2, CLIP, SigLIP, Gemma 3 with images, timm, T5,
Whisper, BART.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tests.families import torch_modules
from tests.families.encoders import pixels
from tests.parity import EPS, Case, Record, Site, decoder_sites, interface_tap, tokens

STACK = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48)
TEXT = dict(
    STACK, layer_norm_eps=EPS, vocab_size=64, max_position_embeddings=64, eos_token_id=1, bos_token_id=0, pad_token_id=0
)
# another width than the text tower
VISION = dict(STACK, hidden_size=24, layer_norm_eps=EPS, image_size=8, patch_size=4)


def build(config: str, model: str, **kw: Any) -> nn.Module:
    import transformers

    return getattr(transformers, model)(getattr(transformers, config)(**kw))


def words_and_pixels() -> dict[str, Tensor]:
    return {**tokens(), **pixels()}


# Towers


def tower(prefix: str, padding: str | None = None) -> list[Site]:
    stems = [f"{prefix}encoder.layers.{i}" for i in range(2)]
    return [Site(f"{s}.self_attn", f"{s}.layer_norm1", f"{s}.self_attn.out_proj", padding=padding) for s in stems]


def pooling(prefix: str) -> Site:
    return Site(f"{prefix}head.attention", None, f"{prefix}head.attention", f"{prefix}post_layernorm", padding=None)


@contextlib.contextmanager
def tap_with_pooling(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    """SigLIP's last step is nn.MultiheadAttention, which asks for maps and so never takes the fused function."""
    with interface_tap(model, implementation, records), torch_modules.tap(model, "eager", records):
        yield


def see_then_read(model: nn.Module, batch: dict[str, Tensor]) -> None:
    """Each tower of Gemma 3 alone: tokens of an image would look at each other both ways."""
    model.get_image_features(batch["pixel_values"])  # type: ignore[operator]
    model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"])


GEMMA = dict(STACK, num_key_value_heads=2, head_dim=8, vocab_size=64, rms_norm_eps=EPS, query_pre_attn_scalar=24, sliding_window=4,
             layer_types=["sliding_attention", "full_attention"])  # fmt: skip


def gemma() -> nn.Module:
    vision = dict(VISION, model_type="siglip_vision_model", vision_use_head=False)
    return build(
        "Gemma3Config", "Gemma3ForConditionalGeneration",
        text_config=GEMMA, vision_config=vision, mm_tokens_per_image=4, image_token_index=60, boi_token_index=61, eoi_token_index=62,
    )  # fmt: skip


def dino(name: str) -> Case:
    shape = {k: v for k, v in STACK.items() if k != "intermediate_size"}
    stems = [f"encoder.layer.{i}" for i in range(2)]
    return Case(
        {"Dinov2": "dinov2", "Dinov2WithRegisters": "dinov2_with_registers"}[name],
        lambda: build(
            f"{name}Config", f"{name}Model", **shape, layer_norm_eps=EPS, mlp_ratio=2, image_size=8, patch_size=4
        ),
        pixels,
        [Site(f"{s}.attention", f"{s}.norm1", f"{s}.layer_scale1") for s in stems],
    )


TOWERS = [
    dino("Dinov2"),
    dino("Dinov2WithRegisters"),
    Case(
        "clip",
        lambda: build("CLIPConfig", "CLIPModel", text_config=TEXT, vision_config=VISION, projection_dim=16),
        words_and_pixels,
        [*tower("text_model.", "attention_mask"), *tower("vision_model.")],
    ),
    Case("clip-text", lambda: build("CLIPTextConfig", "CLIPTextModel", **TEXT), tokens, tower("", "attention_mask")),
    Case(
        "clip-text-projected",
        lambda: build("CLIPTextConfig", "CLIPTextModelWithProjection", **TEXT),
        tokens,
        tower("text_model.", "attention_mask"),
    ),
    Case("clip-vision", lambda: build("CLIPVisionConfig", "CLIPVisionModel", **VISION), pixels, tower("")),
    Case(
        "clip-classifier",
        lambda: build("CLIPConfig", "CLIPForImageClassification", text_config=TEXT, vision_config=VISION),
        pixels,
        tower("vision_model."),
    ),
    Case(
        "siglip",
        lambda: build("SiglipConfig", "SiglipModel", text_config=dict(TEXT, projection_size=24), vision_config=VISION),
        words_and_pixels,
        [*tower("text_model.", "attention_mask"), *tower("vision_model."), pooling("vision_model.")],
        tap=tap_with_pooling,
        spread=0.9,
    ),
    Case(
        "siglip-text", lambda: build("SiglipTextConfig", "SiglipTextModel", **TEXT), tokens, tower("", "attention_mask")
    ),
    Case(
        "siglip-vision",
        lambda: build("SiglipVisionConfig", "SiglipVisionModel", **VISION),
        pixels,
        [*tower(""), pooling("")],
        tap=tap_with_pooling,
    ),
    Case(
        "gemma3-composite",
        gemma,
        words_and_pixels,
        [*decoder_sites(2, "model.language_model.layers"), *tower("model.vision_tower.")],
        call=see_then_read,
    ),
]


# Pairs of stacks


def asked_and_answered() -> dict[str, Tensor]:
    """Both sides padded on the left, by different lengths."""
    answer = tokens(length=7, pads=2)
    return {**tokens(), "decoder_input_ids": answer["input_ids"], "decoder_attention_mask": answer["attention_mask"]}


def heard() -> dict[str, Tensor]:
    batch = asked_and_answered()
    sound = torch.randn(2, 4, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    return {"input_features": sound, **{k: v for k, v in batch.items() if k.startswith("decoder")}}


def t5_sites(kinds: str = "both") -> list[Site]:
    def site(stack: str, i: int, part: int, name: str, memory: str | None, padding: str) -> Site:
        layer = f"{stack}.block.{i}.layer.{part}"
        return Site(f"{layer}.{name}", f"{layer}.layer_norm", f"{layer}.{name}.o", memory, padding)

    encoder = [site("encoder", i, 0, "SelfAttention", None, "attention_mask") for i in range(2)]
    decoder = [
        s
        for i in range(3)
        for s in (
            site("decoder", i, 0, "SelfAttention", None, "decoder_attention_mask"),
            site("decoder", i, 1, "EncDecAttention", "encoder.final_layer_norm", "decoder_attention_mask"),
        )
    ]
    return encoder if kinds == "encoder" else [*encoder, *decoder]


T5 = dict(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_decoder_layers=3, num_heads=4, vocab_size=64, layer_norm_epsilon=EPS,
          relative_attention_num_buckets=8, relative_attention_max_distance=12, decoder_start_token_id=0)  # fmt: skip
BART = dict(d_model=32, vocab_size=64, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4, decoder_attention_heads=2,
            encoder_ffn_dim=48, decoder_ffn_dim=48, pad_token_id=1, bos_token_id=0, eos_token_id=2, decoder_start_token_id=2)  # fmt: skip


def sharpen(*parts: Any) -> None:
    """Twice the logits."""
    for part in parts:
        for p in part.parameters():
            p.mul_(2)


def t5(label: str, name: str, spread: float) -> Case:
    return Case(
        label, lambda: build(f"{name}Config", f"{name}Model", **T5), asked_and_answered, t5_sites(),
        spread=spread, memory_padding="attention_mask",
    )  # fmt: skip


def whisper_sites() -> list[Site]:
    """Norms in front of a step; Whisper masks no sound."""
    answer = "decoder_attention_mask"
    encoder = [f"encoder.layers.{i}.self_attn" for i in range(2)]
    found = []
    for i in range(2):
        own, cross = f"decoder.layers.{i}.self_attn", f"decoder.layers.{i}.encoder_attn"
        found.append(Site(own, f"{own}_layer_norm", f"{own}.out_proj", padding=answer))
        found.append(Site(cross, f"{cross}_layer_norm", f"{cross}.out_proj", "encoder.layer_norm", answer))
    return [*(Site(s, f"{s}_layer_norm", f"{s}.out_proj", padding=None) for s in encoder), *found]


def bart_sites() -> list[Site]:
    """Norms after a step, so x enters the norm before it."""
    found = []
    for i in range(2):
        before = f"encoder.layers.{i - 1}.final_layer_norm" if i else "encoder.layernorm_embedding"
        found.append(Site(f"encoder.layers.{i}.self_attn", before, f"encoder.layers.{i}.self_attn.out_proj"))
    for i in range(2):
        own, cross = f"decoder.layers.{i}.self_attn", f"decoder.layers.{i}.encoder_attn"
        before = f"decoder.layers.{i - 1}.final_layer_norm" if i else "decoder.layernorm_embedding"
        found.append(Site(own, before, f"{own}.out_proj", padding="decoder_attention_mask"))
        found.append(
            Site(
                cross,
                f"{own}_layer_norm",
                f"{cross}.out_proj",
                "encoder.layers.1.final_layer_norm",
                "decoder_attention_mask",
            )
        )
    return found


WHISPER = dict(BART, num_mel_bins=4, max_source_positions=6, max_target_positions=16)

PAIRS = [
    t5("t5", "T5", 0.7),
    t5("mt5", "MT5", 0.7),
    t5("umt5", "UMT5", 0.7),
    Case("t5-encoder", lambda: build("T5Config", "T5EncoderModel", **T5), tokens, t5_sites("encoder"), spread=0.7),
    Case("whisper", lambda: build("WhisperConfig", "WhisperModel", **WHISPER), heard, whisper_sites(), spread=1.1),
    Case(
        "bart",
        lambda: build("BartConfig", "BartModel", **BART, max_position_embeddings=64),
        asked_and_answered,
        bart_sites(),
        memory_padding="attention_mask",
        redraw_more=lambda model: sharpen(model.decoder.layers[1].self_attn.q_proj),
    ),
]


# timm: it is no dependency, so this is a module of its contract


class Attention(nn.Module):
    def __init__(self, width: int, heads: int, head_norm: Callable[[int], nn.Module], bias: bool) -> None:
        super().__init__()
        self.num_heads, self.scale, self.fused_attn = heads, (width // heads) ** -0.5, True
        self.qkv, self.proj = nn.Linear(width, 3 * width, bias=bias), nn.Linear(width, width)
        self.q_norm, self.k_norm = head_norm(width // heads), head_norm(width // heads)
        self.attn_drop = nn.Dropout(0.0)

    def forward(self, x: Tensor, attn_mask: Tensor | None = None) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.num_heads, -1)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        q, k = self.q_norm(q), self.k_norm(k)
        if self.fused_attn:
            mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, attn_mask)
        else:
            mixed = self.attn_drop((self.scale * q @ k.mT).softmax(-1)) @ v
        return self.proj(mixed.transpose(1, 2).flatten(2))


class LayerScale(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gamma = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.gamma


class Block(nn.Module):
    def __init__(
        self,
        width: int,
        heads: int,
        norm: Callable[[int], nn.Module],
        head_norm: Callable[[int], nn.Module],
        scaled: bool,
    ) -> None:
        super().__init__()
        self.norm1, self.attn = norm(width), Attention(width, heads, head_norm, bias=scaled)
        self.ls1 = LayerScale(width) if scaled else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.ls1(self.attn(self.norm1(x)))


class Blocks(nn.Module):
    def __init__(
        self,
        norm: Callable[[int], nn.Module],
        head_norm: Callable[[int], nn.Module] = nn.Identity,
        scaled: bool = False,
    ) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*(Block(32, 4, norm, head_norm, scaled) for _ in range(2)))

    def forward(self, x: Tensor) -> Tensor:
        return self.blocks(x)


@contextlib.contextmanager
def timm_tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    """sdpa: read what the fused function is given. eager: the maps pass through `attn_drop`."""
    fused = torch.nn.functional.scaled_dot_product_attention
    running: list[Record] = []
    handles = []

    def see(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any) -> Tensor:
        running[-1].calls += 1
        running[-1].logits = q @ k.mT * q.shape[-1] ** -0.5
        return fused(q, k, v, *args, **kw)

    def keep(here: Record, module: nn.Module, args: Any, maps: Tensor) -> None:
        here.calls += 1
        here.maps = maps

    for path, module in model.named_modules():
        if isinstance(module, Attention):
            module.fused_attn = implementation == "sdpa"
            handles.append(module.register_forward_pre_hook(lambda _, args, here=records[path]: running.append(here)))
            handles.append(module.attn_drop.register_forward_hook(partial(keep, records[path])))
    torch.nn.functional.scaled_dot_product_attention = see  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.nn.functional.scaled_dot_product_attention = fused
        for handle in handles:
            handle.remove()


def save_timm(model: nn.Module, folder: Path, **config: Any) -> None:
    from safetensors.torch import save_file

    save_file({k: v.contiguous() for k, v in model.state_dict().items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))


def timm(
    label: str,
    make: Callable[[], nn.Module],
    heads: int | None = None,
    more: Callable[[Any], None] | None = None,
    **config: Any,
) -> Case:
    return Case(
        label, make, lambda: {"x": torch_modules.stream()},
        [Site(f"blocks.{i}.attn", f"blocks.{i}.norm1", f"blocks.{i}.ls1") for i in range(2)],
        tap=timm_tap, save=partial(save_timm, **config), options={} if heads is None else {"heads": heads}, redraw_more=more,
    )  # fmt: skip


LAYER, RMS = partial(nn.LayerNorm, eps=EPS), partial(nn.RMSNorm, eps=EPS)
OURS = dict(model_type="timm", num_heads=4, layer_norm_eps=EPS)
TIMM = [
    timm("timm", lambda: Blocks(LAYER, scaled=True), **OURS),
    timm("timm-head-norms", lambda: Blocks(LAYER, LAYER), **OURS),
    timm(
        "timm-rms",
        lambda: Blocks(RMS, RMS, scaled=True),
        more=lambda model: sharpen(*(b.attn.q_norm for b in model.blocks)),
        **OURS,
    ),
    timm("timm-architecture", lambda: Blocks(partial(nn.LayerNorm, eps=1e-6)), 4, architecture="vit_tiny_patch16_224"),
]

CASES = [*TOWERS, *PAIRS, *TIMM]
