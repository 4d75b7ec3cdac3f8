"""GPT-NeoX and Pythia: one fused map whose rows are ordered head by head (q, k, v of head 0, then of head 1), partial
rotary.
"""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.layers.build import expect, expect_layers, integer, map_layout, norm_layout, shape_of
from locater.layers.layout import AttentionLayout, LogitsLayout, rotary_layout
from locater.sources.open_source import Config
from locater.sources.weights import Rows, Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)layers\.(?P<layer>\d+)\.attention\.query_key_value\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    heads, width = integer(config, weights, "num_attention_heads"), integer(config, weights, "hidden_size")
    head_dim = width // heads
    config = {"rope_theta": config.get("rotary_emb_base") or 10_000, **config}
    matches = [(m["prefix"], int(m["layer"]), name) for m, name in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    for prefix, index, name in matches:
        block = f"{prefix}layers.{index}"
        stem = f"{block}.attention"
        expect(weights, name, shape_of(weights, name), (3 * width, width), "3 x hidden_size, hidden_size")
        q, k, v = (map_layout(weights, f"{stem}.query_key_value", per_head(heads, head_dim, 3, i)) for i in range(3))
        yield AttentionLayout(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=q,
            key=k,
            logits=LogitsLayout(scale=head_dim**-0.5, causal=True),
            value=v,
            out=map_layout(weights, f"{stem}.dense"),
            norm=norm_layout(weights, f"{block}.input_layernorm", "layer", config.get("layer_norm_eps", 1e-5)),
            rotary=rotary_layout(config, head_dim, share=config.get("rotary_pct", 0.25)),
        )


def per_head(heads: int, head_dim: int, parts: int, part: int) -> Rows:
    """Rows of one part (0 query, 1 key, 2 value) of a map fused head by head."""
    return [((h * parts + part) * head_dim, (h * parts + part + 1) * head_dim) for h in range(heads)]


def block(config: Config) -> Block:
    return Block(
        attention="attention",
        before_attention="input_layernorm",
        before_mlp="post_attention_layernorm",
        mlp="mlp",
        up="mlp.dense_h_to_4h",
        down="mlp.dense_4h_to_h",
        parallel=config.get("use_parallel_residual", True),
        final="final_layer_norm",
    )


FAMILY = Family(("gpt_neox",), layers, block)
