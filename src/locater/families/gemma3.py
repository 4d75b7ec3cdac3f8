"""Gemma 3: gains stored as w for 1 + w, normalised queries and keys, five sliding layers to one full, two rotary bases.

The model that also sees images holds a SigLIP vision tower, read last. Its text tower lets the tokens of one image look
at each other both ways, which depends on the input: `causal` here is the mask of text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.errors import LocaterError
from locater.families.clip import sub_config, tower_layers
from locater.families.gemma2 import GEMMA_BLOCK
from locater.families.record import Block, Family
from locater.families.shared_shapes import decoder_layers
from locater.families.siglip import TOWER
from locater.layers.build import norm_layout
from locater.layers.layout import AttentionLayout, RotaryLayout, rotary_layout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

# a vision tower is not this family
PATTERN = r"(?P<prefix>((?!.*vision).*\.)?)layers\.(?P<layer>\d+)\.self_attn\.q_proj\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    yield from _text_layers(weights, config.get("text_config", config))
    if any(".vision_tower." in f".{name}" for name in weights.names()):
        vision = sub_config(config, "vision", TOWER)
        yield from tower_layers(weights, vision, r"(.*\.)?vision_tower\.(vision_model\.)?", causal=False)


def _text_layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    smallest = {
        "hidden_size": 2304,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
    }
    config = {**smallest, **config}
    eps = config.get("rms_norm_eps", 1e-6)
    both_ways = bool(config.get("use_bidirectional_attention"))
    for layer in decoder_layers(weights, config, gain_offset=1.0, pattern=PATTERN):
        kind = _kind(config, layer.index)
        window = config.get("sliding_window", 4096) if kind == "sliding_attention" else None
        layer = replace(
            layer,
            query_norm=norm_layout(weights, f"{layer.name}.q_norm", "rms", eps, 1.0),
            key_norm=norm_layout(weights, f"{layer.name}.k_norm", "rms", eps, 1.0),
            rotary=_rotary(config, layer.head_dim, kind),
        )
        yield layer.with_logits(
            scale=config.get("query_pre_attn_scalar", 256) ** -0.5,
            causal=not both_ways,
            window=window // 2 + 1 if window is not None and both_ways else window,
        )


def _kind(config: Config, index: int) -> str:
    types = config.get("layer_types")
    if types:
        return str(types[index])
    every = config.get("sliding_window_pattern") or config.get("_sliding_window_pattern") or 6
    return "sliding_attention" if (index + 1) % every else "full_attention"


def _rotary(config: Config, head_dim: int, kind: str) -> RotaryLayout:
    if config.get("rope_parameters"):
        return rotary_layout(config, head_dim, kind)
    if kind == "sliding_attention":  # configurations written before the two bases shared one entry
        return rotary_layout({"rope_theta": config.get("rope_local_base_freq")}, head_dim)
    return rotary_layout({"rope_theta": 1_000_000.0, **config}, head_dim)


def block(config: Config) -> Block:
    if config.get("model_type") == "gemma3":
        raise LocaterError("gemma3 has two towers with blocks of their own: pass model.model.language_model")
    return GEMMA_BLOCK


FAMILY = Family(("gemma3_text", "gemma3"), layers, block)
