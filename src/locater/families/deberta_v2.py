"""DeBERTa-v2 and v3: distances have keys and queries of their own, so content meets position both ways.

    logit = scale * (q . k + q . key(p) + k . query(p)), p an embedding of the bucket that the distance falls into

The scale counts the terms. Where a convolution runs beside layer 0 (v2 xlarge), its norm makes layer 1's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

import torch
from torch import Tensor

from locater.checkpoints.sources import Config
from locater.checkpoints.weights import Weights
from locater.families.build import expect, integer, norm, projection, shape_of
from locater.families.encoder import Names, encoder_layers
from locater.families.layer import AttentionLayer
from locater.families.norm import Norm
from locater.families.relative import RelativeTerms
from locater.numerics import upcast

MODEL_TYPES = ("deberta-v2",)
NAMES = Names(
    "encoder.layer",
    "attention.self.query_proj",
    "attention.self.key_proj",
    "attention.self.value_proj",
    "attention.output.dense",
    "output.LayerNorm",
)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    eps = config.get("layer_norm_eps", 1e-7)
    terms = _listed(config.get("pos_att_type") or [])
    for layer in encoder_layers(weights, config, NAMES, eps):
        encoder = layer.name.removesuffix(f"layer.{layer.index}.attention.self")
        beside = layer.index == 1 and config.get("conv_kernel_size", 0) > 0
        yield replace(
            layer,
            scale=(layer.head_dim * (1 + ("c2p" in terms) + ("p2c" in terms))) ** -0.5,
            norm=norm(weights, f"{encoder}conv.LayerNorm", "layer", eps) if beside else layer.norm,
            relative=_relative(weights, config, layer, encoder, terms) if config.get("relative_attention") else None,
        )


def _relative(weights: Weights, config: Config, layer: AttentionLayer, encoder: str, terms: list[str]) -> RelativeTerms:
    shared = config.get("share_att_key", False)
    key, query = ("key_proj", "query_proj") if shared else ("pos_key_proj", "pos_query_proj")
    return RelativeTerms(
        code=_code(weights, config, encoder, layer.width),
        key=projection(weights, f"{layer.name}.{key}") if "c2p" in terms else None,
        query=projection(weights, f"{layer.name}.{query}") if "p2c" in terms else None,
    )


def _code(weights: Weights, config: Config, encoder: str, width: int) -> Callable[[Tensor], Tensor]:
    table = f"{encoder}rel_embeddings.weight"
    farthest = config.get("max_relative_positions", -1)
    if farthest < 1:
        farthest = integer(config, weights, "max_position_embeddings")
    buckets = config.get("position_buckets", -1)
    span = buckets if buckets > 0 else farthest
    expect(
        weights,
        table,
        shape_of(weights, table),
        (2 * span, width),
        "2 x position_buckets or max_relative_positions, hidden_size",
    )
    normed = "layer_norm" in _listed(config.get("norm_rel_ebd", "none"))
    after = norm(weights, f"{encoder}LayerNorm", "layer", config.get("layer_norm_eps", 1e-7)) if normed else Norm()

    def code(distances: Tensor) -> Tensor:
        place = (bucket(distances, buckets, farthest) if buckets > 0 else distances) + span
        rows = weights.read(table).to(distances.device)[place.clamp(0, 2 * span - 1)]
        return after(upcast(rows))

    return code


def bucket(distances: Tensor, buckets: int, farthest: int) -> Tensor:
    """Near distances exactly, those beyond half the buckets by logarithm up to `farthest`; float32 as in the model, for
    equal rounding.
    """
    half = buckets // 2
    reach = torch.log(torch.tensor((farthest - 1) / half, device=distances.device))
    far = (torch.log(distances.abs().clamp_min(1) / half) / reach * (half - 1)).ceil() + half
    return torch.where(distances.abs() <= half, distances, (far * distances.sign()).long())


def _listed(setting: str | list[str]) -> list[str]:
    """Settings that are lists, or were once written as "c2p|p2c"."""
    return [part.strip() for part in setting.lower().split("|")] if isinstance(setting, str) else setting
