"""BERT: post-norm, so a layer's input comes out of the norm before it; also RoBERTa, XLM-RoBERTa, CamemBERT and
ELECTRA.

As an encoder or a decoder, with cross-attention where it was added. A small ELECTRA widens its embeddings after their
norm, so no norm stands right before its layer 0: there `x` is the input of attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from locater.families.record import Family
from locater.families.shared_shapes import BERT, BERT_BLOCK, encoder_layers
from locater.layers.build import map_layout, norm_layout
from locater.layers.layout import AttentionLayout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    eps = config.get("layer_norm_eps", 1e-12)
    for layer in encoder_layers(weights, config, BERT, eps):
        block = layer.name.removesuffix(".attention.self")
        widened = f"{block.removesuffix(f'encoder.layer.{layer.index}')}embeddings_project.weight" in weights.names()
        layer = layer.with_logits(causal=bool(config.get("is_decoder")))
        if widened and not layer.index:
            layer = replace(layer, norm=NormLayout())
        yield layer
        cross = f"{block}.crossattention"
        if f"{cross}.self.query.weight" in weights.names():
            yield replace(
                layer,
                name=f"{cross}.self",
                query=map_layout(weights, f"{cross}.self.query"),
                key=map_layout(weights, f"{cross}.self.key"),
                value=map_layout(weights, f"{cross}.self.value"),
                out=map_layout(weights, f"{cross}.output.dense"),
                norm=norm_layout(weights, f"{block}.attention.output.LayerNorm", "layer", eps),
                kind="cross",
            )


FAMILY = Family(("bert", "camembert", "electra", "roberta", "xlm-roberta"), layers, BERT_BLOCK)
