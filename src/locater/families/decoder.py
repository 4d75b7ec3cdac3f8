"""The shape that most decoders share: separate q, k, v and o maps, RMSNorm in front, rotary positions, grouped keys.

Not a family: family files start from `decoder_layers` and `LLAMA_BLOCK` and replace the parts that differ.
"""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block
from locater.layers.build import expect, expect_layers, integer, norm, projection
from locater.layers.layer import AttentionLayer
from locater.layers.norm import Norm
from locater.layers.rotary import rotary_from_config
from locater.sources.sources import Config
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
) -> Iterator[AttentionLayer]:
    """Layers with the configuration's own defaults: scale 1/sqrt(head_dim), causal, no window."""
    heads = integer(config, weights, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    width = integer(config, weights, "hidden_size")
    head_dim = config.get("head_dim") or width // heads
    matches = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, pattern)]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    for prefix, index in matches:
        block = f"{prefix}layers.{index}"
        stem = f"{block}.self_attn"
        query, key = projection(weights, f"{stem}.q_proj"), projection(weights, f"{stem}.k_proj")
        expect(
            weights,
            f"{stem}.q_proj.weight",
            query.shape,
            (heads * head_dim, width),
            "num_attention_heads x head_dim, hidden_size",
        )
        expect(
            weights,
            f"{stem}.k_proj.weight",
            key.shape,
            (kv_heads * head_dim, width),
            "num_key_value_heads x head_dim, hidden_size",
        )
        yield AttentionLayer(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=kv_heads,
            head_dim=head_dim,
            query=query,
            key=key,
            value=projection(weights, f"{stem}.v_proj"),
            out=projection(weights, f"{stem}.{out}"),
            scale=head_dim**-0.5,
            norm=norm(weights, f"{block}.input_layernorm", "rms", config.get("rms_norm_eps", 1e-6), gain_offset)
            if normed
            else Norm(),
            rotary=rotary_from_config(config, head_dim),
            causal=True,
        )


def window_of(config: Config, index: int) -> int | None:
    """The sliding window of a layer, where `layer_types` marks it as sliding."""
    types = config.get("layer_types") or []
    return config.get("sliding_window") if index < len(types) and types[index] == "sliding_attention" else None
