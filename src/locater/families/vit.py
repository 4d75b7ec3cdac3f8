"""ViT: pre-norm encoder on image patches. Its tensors have one set of names on disk and another in a live model."""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.layers.build import expect, expect_layers, integer, norm, projection
from locater.layers.layer import AttentionLayer
from locater.sources.sources import Config
from locater.sources.weights import Weights, numbered

STEMS = {  # names of q, k, v and o under a block
    "attention.attention.query": ("attention.attention.key", "attention.attention.value", "attention.output.dense"),
    "attention.q_proj": ("attention.k_proj", "attention.v_proj", "attention.o_proj"),
}
PATTERN = (
    r"(?P<block>(?P<prefix>(.*\.)?)(encoder\.layer|layers)\.(?P<layer>\d+))\."
    r"(?P<query>attention\.attention\.query|attention\.q_proj)\.weight"
)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    yield from vit_layers(weights, config, "layernorm_before")


def vit_layers(weights: Weights, config: Config, before: str) -> Iterator[AttentionLayer]:
    """ViT's layers; `before` names the norm in front of attention."""
    heads, width = integer(config, weights, "num_attention_heads"), integer(config, weights, "hidden_size")
    head_dim = width // heads
    matches = [m for m, _ in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    for match in matches:
        block, stem = match["block"], match["query"]
        key, value, out = STEMS[stem]
        query = projection(weights, f"{block}.{stem}")
        expect(weights, f"{block}.{stem}.weight", query.shape, (width, width), "hidden_size, hidden_size")
        yield AttentionLayer(
            name=f"{block}.{stem.rpartition('.')[0]}",
            index=int(match["layer"]),
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=query,
            key=projection(weights, f"{block}.{key}"),
            value=projection(weights, f"{block}.{value}"),
            out=projection(weights, f"{block}.{out}"),
            scale=head_dim**-0.5,
            norm=norm(weights, f"{block}.{before}", "layer", config.get("layer_norm_eps", 1e-12)),
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
