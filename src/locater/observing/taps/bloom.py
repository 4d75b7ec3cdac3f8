"""BLOOM: one fused map; ALiBi, mask and cache are arguments of the call."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import nn

from locater.attention.call import Call
from locater.attention.stand_ins import Passage, Undo, along, cached
from locater.kernels import Terms


def tap(module: nn.Module) -> Iterator[Undo]:
    yield from along(module, _described, outputs=["query_key_value"], inputs=["dense"])


def _described(module: Any, passage: Passage) -> Call:
    q, k, _ = module._reshape(passage.tensors["query_key_value"])
    alibi = passage.argument(2, "alibi").detach()
    k = cached(module, passage.argument(4, "layer_past"), k, alibi.shape[-1])
    terms = Terms(float(module.inv_norm_factor), bias=module.beta * alibi.view(q.shape[0], module.num_heads, 1, -1))
    call = Call(q, k, terms, passage.heads("dense", module.num_heads))  # not called with slow_but_exact
    mask = passage.argument(3, "attention_mask")
    return call if mask is None else call.masked(mask.detach())
