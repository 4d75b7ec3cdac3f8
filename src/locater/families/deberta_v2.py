"""DeBERTa-v2 and v3: distances have keys and queries of their own, so content meets position both ways.

    logit = scale * (q . k + q . key(p) + k . query(p)), p an embedding of the bucket that the distance falls into

The scale counts the terms. Where a convolution runs beside layer 0 (v2 xlarge), its norm makes layer 1's input.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.listeners import active_listeners
from locater.calls.patching import RecordedCall, Undo, record_parts, replace_method
from locater.families.record import Family
from locater.families.shared_shapes import BERT_BLOCK, Names, encoder_layers
from locater.kernels import Terms
from locater.layers.build import expect, integer, map_layout, norm_layout, shape_of
from locater.layers.layout import AttentionLayout, DistanceLayout, EmbeddingLayout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

NAMES = Names(
    "encoder.layer",
    "attention.self.query_proj",
    "attention.self.key_proj",
    "attention.self.value_proj",
    "attention.output.dense",
    "output.LayerNorm",
)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    eps = config.get("layer_norm_eps", 1e-7)
    terms = _listed(config.get("pos_att_type") or [])
    for layer in encoder_layers(weights, config, NAMES, eps):
        encoder = layer.name.removesuffix(f"layer.{layer.index}.attention.self")
        if layer.index == 1 and config.get("conv_kernel_size", 0) > 0:
            layer = replace(layer, norm=norm_layout(weights, f"{encoder}conv.LayerNorm", "layer", eps))
        yield layer.with_logits(
            scale=(layer.head_dim * (1 + ("c2p" in terms) + ("p2c" in terms))) ** -0.5,
            relative=_relative(weights, config, layer, encoder, terms) if config.get("relative_attention") else None,
        )


def _relative(
    weights: Weights, config: Config, layer: AttentionLayout, encoder: str, terms: list[str]
) -> DistanceLayout:
    shared = config.get("share_att_key", False)
    key, query = ("key_proj", "query_proj") if shared else ("pos_key_proj", "pos_query_proj")
    return DistanceLayout(
        _embedding(weights, config, encoder),
        key=map_layout(weights, f"{layer.name}.{key}") if "c2p" in terms else None,
        query=map_layout(weights, f"{layer.name}.{query}") if "p2c" in terms else None,
    )


def _embedding(weights: Weights, config: Config, encoder: str) -> EmbeddingLayout:
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
        (2 * span, integer(config, weights, "hidden_size")),
        "2 x position_buckets or max_relative_positions, hidden_size",
    )
    norm = NormLayout()
    if "layer_norm" in _listed(config.get("norm_rel_ebd", "none")):
        norm = norm_layout(weights, f"{encoder}LayerNorm", "layer", config.get("layer_norm_eps", 1e-7))
    return EmbeddingLayout(table, span, buckets, farthest, norm)


def _listed(setting: str | list[str]) -> list[str]:
    """Settings that are lists, or were once written as "c2p|p2c"."""
    return [part.strip() for part in setting.lower().split("|")] if isinstance(setting, str) else setting


def tap(module: nn.Module) -> Iterator[Undo]:
    """Position terms are taken from the module's own method: in training their table passes a dropout on the way."""
    positions: dict[str, Tensor] = {}
    yield from record_parts(module, partial(_described, positions), outputs=["query_proj", "key_proj"])
    yield replace_method(module, "disentangled_attention_bias", partial(_keep_terms, positions))


def _keep_terms(
    positions: dict[str, Tensor], module: nn.Module, method: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    terms = method(*args, **kwargs)
    if isinstance(terms, Tensor) and active_listeners(module):  # the number 0 where no kind of term is configured
        positions["bias"] = terms.detach()
    return terms


def _described(positions: dict[str, Tensor], module: Any, recorded: RecordedCall) -> Call:
    heads = module.num_attention_heads
    q, k = (recorded.tensors[name].unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("query_proj", "key_proj"))
    parts = 1 + ("c2p" in module.pos_att_type) + ("p2c" in module.pos_att_type)
    bias = positions.pop("bias", None)
    terms = Terms(
        (q.shape[-1] * parts) ** -0.5,
        bias=None if bias is None else bias.unflatten(0, (-1, heads)),
        mask=recorded.argument(1, "attention_mask").bool(),
    )
    return Call(q, k, terms, recorded.returned[0].detach().unflatten(-1, (heads, -1)))


FAMILY = Family(("deberta-v2",), layers, BERT_BLOCK, tap)
