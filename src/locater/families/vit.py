"""ViT: pre-norm encoder on image patches. Its tensors have one set of names on disk and another in a live model."""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.layers.build import expect_layers, integer, map_layout, norm_layout
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

STEMS = {  # names of q, k, v and o under a block
    "attention.attention.query": ("attention.attention.key", "attention.attention.value", "attention.output.dense"),
    "attention.q_proj": ("attention.k_proj", "attention.v_proj", "attention.o_proj"),
}
PATTERN = (
    r"(?P<block>(?P<prefix>(.*\.)?)(encoder\.layer|layers)\.(?P<layer>\d+))\."
    r"(?P<query>attention\.attention\.query|attention\.q_proj)\.weight"
)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    yield from vit_layers(weights, config, "layernorm_before")


def vit_layers(weights: Weights, config: Config, before: str) -> Iterator[AttentionLayout]:
    """ViT's layers; `before` names the norm in front of attention."""
    heads, width = integer(config, weights, "num_attention_heads"), integer(config, weights, "hidden_size")
    head_dim = width // heads
    matches = [m for m, _ in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    for match in matches:
        block, stem = match["block"], match["query"]
        key, value, out = STEMS[stem]
        query = map_layout(weights, f"{block}.{stem}", shape=(width, width), why="hidden_size, hidden_size")
        yield AttentionLayout(
            name=f"{block}.{stem.rpartition('.')[0]}",
            index=int(match["layer"]),
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=query,
            key=map_layout(weights, f"{block}.{key}"),
            logits=LogitsLayout(scale=head_dim**-0.5),
            value=map_layout(weights, f"{block}.{value}"),
            out=map_layout(weights, f"{block}.{out}"),
            norm=norm_layout(weights, f"{block}.{before}", "layer", config.get("layer_norm_eps", 1e-12)),
        )


BLOCK = Block(
    attention="attention",
    before_attention="layernorm_before",
    before_mlp="layernorm_after",
    mlp="mlp",
    up="mlp.fc1",
    down="mlp.fc2",
    final="layernorm",
)
FAMILY = Family(("vit",), layers, BLOCK)
