"""BERT: post-norm, so a layer's input comes out of the norm before it: the embeddings' for layer 0, then each layer's last."""

from __future__ import annotations

from collections.abc import Iterator

from locater.errors import LocaterError
from locater.heads.build import expect, expect_layers, integer, norm, projection
from locater.heads.layer import AttentionLayer
from locater.heads.readers import Config
from locater.heads.weights import Weights, numbered

MODEL_TYPES = ("bert",)
PATTERN = r"(?P<prefix>(.*\.)?)encoder\.layer\.(?P<layer>\d+)\.attention\.self\.query\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise LocaterError(
            f"{weights.where}: position_embedding_type {config['position_embedding_type']!r} is not supported, only 'absolute'"
        )
    heads, width = integer(config, weights, "num_attention_heads"), integer(config, weights, "hidden_size")
    head_dim, eps = width // heads, config.get("layer_norm_eps", 1e-12)
    found = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, PATTERN)]
    expect_layers(weights, len(found), config, "num_hidden_layers")
    for prefix, index in found:
        block = f"{prefix}encoder.layer.{index}"
        stem = f"{block}.attention.self"
        before = f"{prefix}encoder.layer.{index - 1}.output.LayerNorm" if index else f"{prefix}embeddings.LayerNorm"
        query = projection(weights, f"{stem}.query")
        expect(weights, f"{stem}.query.weight", query.shape, (width, width), "hidden_size, hidden_size")
        yield AttentionLayer(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=query,
            key=projection(weights, f"{stem}.key"),
            value=projection(weights, f"{stem}.value"),
            out=projection(weights, f"{block}.attention.output.dense"),
            scale=head_dim**-0.5,
            norm=norm(weights, before, "layer", eps),
            causal=bool(config.get("is_decoder")),
        )
