"""MPNet: BERT's layers, plus one table of relative position biases that all layers share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.checkpoints.sources import Config
from locater.checkpoints.weights import Weights
from locater.families.bias import RelativeBias
from locater.families.build import expect, shape_of
from locater.families.encoder import Names, encoder_layers
from locater.families.layer import AttentionLayer

MODEL_TYPES = ("mpnet",)
# the model's code uses these many whatever relative_attention_num_buckets says: further rows are never read
BUCKETS = 32
NAMES = Names(
    "encoder.layer",
    "attention.attn.q",
    "attention.attn.k",
    "attention.attn.v",
    "attention.attn.o",
    "output.LayerNorm",
)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    for layer in encoder_layers(weights, config, NAMES, config.get("layer_norm_eps", 1e-12)):
        table = f"{layer.name.removesuffix(f'layer.{layer.index}.attention.attn')}relative_attention_bias.weight"
        rows = config.get("relative_attention_num_buckets", BUCKETS)
        expect(
            weights,
            table,
            shape_of(weights, table),
            (rows, layer.heads),
            "relative_attention_num_buckets, num_attention_heads",
        )
        yield replace(layer, bias=RelativeBias(weights.read(table, [(0, BUCKETS)]), both_ways=True))
