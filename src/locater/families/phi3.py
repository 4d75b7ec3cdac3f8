"""Phi 3, 3.5 and 4: the plain decoder with one fused map, all queries first, then keys, then values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK
from locater.layers.build import expect, expect_layers, integer, map_layout, norm_layout, shape_of
from locater.layers.layout import AttentionLayout, LogitsLayout, rotary_layout
from locater.sources.open_source import Config
from locater.sources.weights import Rows, Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)layers\.(?P<layer>\d+)\.self_attn\.qkv_proj\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    heads, width = integer(config, weights, "num_attention_heads"), integer(config, weights, "hidden_size")
    kv_heads = config.get("num_key_value_heads") or heads
    head_dim = config.get("head_dim") or width // heads
    ends = [0, heads * head_dim, (heads + kv_heads) * head_dim, (heads + 2 * kv_heads) * head_dim]
    matches = [(m["prefix"], int(m["layer"]), name) for m, name in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    for prefix, index, name in matches:
        block = f"{prefix}layers.{index}"
        stem = f"{block}.self_attn"
        why = "(query heads + 2 x key heads) x head size, hidden_size"
        expect(weights, name, shape_of(weights, name), (ends[3], width), why)
        parts: list[Rows] = [[(ends[i], ends[i + 1])] for i in range(3)]
        q, k, v = (map_layout(weights, f"{stem}.qkv_proj", rows) for rows in parts)
        yield AttentionLayout(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query=q,
            key=k,
            logits=LogitsLayout(scale=head_dim**-0.5, causal=True, window=config.get("sliding_window")),
            value=v,
            out=map_layout(weights, f"{stem}.o_proj"),
            norm=norm_layout(weights, f"{block}.input_layernorm", "rms", config.get("rms_norm_eps", 1e-5)),
            rotary=rotary_layout(_renamed(config), head_dim),
        )


def _renamed(config: Config) -> Config:
    """Early checkpoints call the channelwise factors "su" or "yarn"; in this family both mean longrope."""
    scaling = config.get("rope_scaling")
    if scaling and scaling.get("rope_type", scaling.get("type")) in ("su", "yarn"):
        return {**config, "rope_scaling": {**scaling, "rope_type": "longrope"}}
    return config


BLOCK = replace(LLAMA_BLOCK, up="mlp.gate_up_proj", gate_first=True)
FAMILY = Family(("phi3",), layers, BLOCK)
