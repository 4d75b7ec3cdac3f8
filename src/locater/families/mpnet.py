"""MPNet: BERT's layers, plus one table of relative position biases that all layers share."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

from torch import nn

from locater.calls.call_and_masks import Call
from locater.calls.patching import RecordedCall, Undo, record_parts
from locater.families.record import Family
from locater.families.shared_shapes import BERT_BLOCK, Names, encoder_layers
from locater.kernels import Terms
from locater.layers.build import expect, shape_of
from locater.layers.layout import AttentionLayout, BucketLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights

# the model's code uses so many whatever relative_attention_num_buckets says, and reads no further rows
BUCKETS = 32
NAMES = Names(
    "encoder.layer",
    "attention.attn.q",
    "attention.attn.k",
    "attention.attn.v",
    "attention.attn.o",
    "output.LayerNorm",
)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    for layer in encoder_layers(weights, config, NAMES, config.get("layer_norm_eps", 1e-12)):
        table = f"{layer.name.removesuffix(f'layer.{layer.index}.attention.attn')}relative_attention_bias.weight"
        rows, why = config.get("relative_attention_num_buckets", BUCKETS), "relative_attention_num_buckets"
        expect(weights, table, shape_of(weights, table), (rows, layer.heads), f"{why}, num_attention_heads")
        yield layer.with_logits(bias=BucketLayout(table, both_ways=True, buckets=BUCKETS))


BLOCK = replace(BERT_BLOCK, attention="attention.attn", after_attention="attention.LayerNorm")


def tap(module: nn.Module) -> Iterator[Undo]:
    """Queries and keys are the outputs of two maps; bias and mask are arguments of the call."""
    yield from record_parts(module, _described, outputs=["q", "k"], inputs=["o"])


def _described(module: Any, recorded: RecordedCall) -> Call:
    heads = module.num_attention_heads
    q, k = (recorded.tensors[name].unflatten(-1, (heads, -1)).transpose(1, 2) for name in ("q", "k"))
    mask, bias = recorded.argument(1, "attention_mask"), recorded.argument(2, "position_bias")
    bias = None if bias is None else bias.detach()
    call = Call(q, k, Terms(module.attention_head_size**-0.5, bias=bias), recorded.heads("o", heads))
    return call if mask is None else call.masked(mask.detach(), added=True)


FAMILY = Family(("mpnet",), layers, BLOCK, tap)
