"""The shape that post-norm encoders share: BERT's, whatever its tensors are called.

Not a family: family files start from `encoder_layers` and `BERT_BLOCK` and replace the parts that differ. A layer's
input comes out of the norm before it: the embeddings' for layer 0, then the one that closed the layer before.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from locater.errors import LocaterError
from locater.families.record import Block
from locater.layers.build import expect_layers, integer, map_layout, norm_layout
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered


@dataclass(frozen=True)
class Names:
    """Paths under a block, which is `<prefix><stack>.<layer>`."""

    stack: str
    query: str
    key: str
    value: str
    out: str
    last_norm: str


BERT = Names(
    "encoder.layer",
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "output.LayerNorm",
)

BERT_BLOCK = Block(
    attention="attention.self",
    after_attention="attention.output.LayerNorm",
    after_mlp="output.LayerNorm",
    other_norms=("crossattention.output.LayerNorm",),
    up="intermediate.dense",
    down="output.dense",
)


def encoder_layers(weights: Weights, config: Config, names: Names, eps: float) -> Iterator[AttentionLayout]:
    """Self-attention layers: scale 1/sqrt(head_dim), every token in view, LayerNorm with `eps`."""
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise LocaterError(
            f"{weights.where}: position_embedding_type {config['position_embedding_type']!r} is not supported, "
            "only 'absolute'"
        )
    heads, width = (
        integer(config, weights, "num_attention_heads", "n_heads"),
        integer(config, weights, "hidden_size", "dim"),
    )
    head_dim = width // heads
    pattern = rf"(?P<prefix>(.*\.)?){re.escape(names.stack)}\.(?P<layer>\d+)\.{re.escape(names.query)}\.weight"
    matches = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, pattern)]
    expect_layers(weights, len(matches), config, "num_hidden_layers", "n_layers")
    for prefix, index in matches:
        stack = f"{prefix}{names.stack}"
        block = f"{stack}.{index}"
        shape, why = (heads * head_dim, width), "num_attention_heads x head_dim, hidden_size"
        query, key = (map_layout(weights, f"{block}.{x}", shape=shape, why=why) for x in (names.query, names.key))
        yield AttentionLayout(
            name=f"{block}.{names.query.rpartition('.')[0]}",
            index=index,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=query,
            key=key,
            logits=LogitsLayout(scale=head_dim**-0.5),
            value=map_layout(weights, f"{block}.{names.value}"),
            out=map_layout(weights, f"{block}.{names.out}"),
            norm=norm_layout(
                weights,
                f"{stack}.{index - 1}.{names.last_norm}" if index else f"{prefix}embeddings.LayerNorm",
                "layer",
                eps,
            ),
        )
