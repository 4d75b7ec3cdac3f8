"""The shape that most decoders share: separate q, k, v and o maps, RMSNorm in front, rotary positions, grouped keys.

Not a family: family files start from `decoder_layers` and `LLAMA_BLOCK` and replace the parts that differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block
from locater.layers.build import expect_layers, integer, map_layout, norm_layout
from locater.layers.layout import AttentionLayout, LogitsLayout, rotary_layout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)layers\.(?P<layer>\d+)\.self_attn\.q_proj\.weight"
LLAMA_BLOCK = Block(
    attention="self_attn",
    norm="rms",
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    mlp="mlp",
    up="mlp.up_proj",
    down="mlp.down_proj",
    experts="mlp.experts",
    final="norm",
)


def decoder_layers(
    weights: Weights,
    config: Config,
    *,
    gain_offset: float = 0.0,
    pattern: str = PATTERN,
    out: str = "o_proj",
    normed: bool = True,
) -> Iterator[AttentionLayout]:
    """Layers with the configuration's own defaults: scale 1/sqrt(head_dim), causal, no window."""
    heads = integer(config, weights, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    width = integer(config, weights, "hidden_size")
    head_dim = config.get("head_dim") or width // heads
    matches = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, pattern)]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    rotary = rotary_layout(config, head_dim)
    for prefix, index in matches:
        block = f"{prefix}layers.{index}"
        stem = f"{block}.self_attn"
        query, key = (
            map_layout(
                weights,
                f"{stem}.{part}_proj",
                shape=(count * head_dim, width),
                why=f"{setting} x head_dim, hidden_size",
            )
            for part, count, setting in (("q", heads, "num_attention_heads"), ("k", kv_heads, "num_key_value_heads"))
        )
        yield AttentionLayout(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query=query,
            key=key,
            logits=LogitsLayout(scale=head_dim**-0.5, causal=True),
            value=map_layout(weights, f"{stem}.v_proj"),
            out=map_layout(weights, f"{stem}.{out}"),
            norm=norm_layout(weights, f"{block}.input_layernorm", "rms", config.get("rms_norm_eps", 1e-6), gain_offset)
            if normed
            else NormLayout(),
            rotary=rotary,
        )


def window_of(config: Config, index: int) -> int | None:
    """The sliding window of a layer, where `layer_types` marks it as sliding."""
    types = config.get("layer_types") or []
    return config.get("sliding_window") if index < len(types) and types[index] == "sliding_attention" else None
