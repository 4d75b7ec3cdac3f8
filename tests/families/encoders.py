"""Tiny encoders: BERT and ViT."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.parity import EPS, Case, Site, tokens

SHAPE = dict(hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48, layer_norm_eps=EPS)


def bert(**kw: object) -> nn.Module:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**SHAPE, vocab_size=64, max_position_embeddings=64, **kw), add_pooling_layer=False)


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTModel

    return ViTModel(ViTConfig(**SHAPE, image_size=8, patch_size=4))


def pixels() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(2, 3, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(1))}


BERT_SITES = [
    Site(
        f"encoder.layer.{i}.attention.self",
        f"encoder.layer.{i - 1}.output.LayerNorm" if i else "embeddings.LayerNorm",
        f"encoder.layer.{i}.attention.output.dense",
    )
    for i in range(2)
]

CASES = [
    Case("bert", bert, tokens, BERT_SITES),
    Case("bert-decoder", lambda: bert(is_decoder=True), tokens, BERT_SITES),
    Case(
        "vit",
        vit,
        pixels,
        [
            Site(f"layers.{i}.attention", f"layers.{i}.layernorm_before", f"layers.{i}.attention.o_proj")
            for i in range(2)
        ],
    ),
]
