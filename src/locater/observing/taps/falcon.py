"""Falcon, eager, fused and flash: one fused map, queries and keys rotated after it, keys cached after that.

The rotation is done again here, which costs two products per channel. What the mask says depends on the way: the fused
function reads a boolean one, the plain way adds whatever it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor, nn

from locater.attention.call import Call
from locater.attention.stand_ins import Passage, Undo, along, cached
from locater.kernels import Terms


def tap(module: nn.Module) -> Iterator[Undo]:
    from transformers.models.falcon.modeling_falcon import apply_rotary_pos_emb

    yield from along(module, partial(_described, apply_rotary_pos_emb), outputs=["query_key_value"], inputs=["dense"])


def _described(rotate: Callable[..., Any], module: Any, passage: Passage) -> Call:
    q, k = (part.transpose(1, 2) for part in module._split_heads(passage.tensors["query_key_value"])[:2])
    alibi, mask, past = (
        passage.argument(1, "alibi"),
        passage.argument(2, "attention_mask"),
        passage.argument(4, "layer_past"),
    )
    if alibi is None:
        cos, sin = passage.argument(7, "position_embeddings")
        q, k = rotate(q, k, cos.detach(), sin.detach())
    k = cached(module, past, k, None if mask is None else mask.shape[-1])
    call = Call(q, k, Terms(float(module.inv_norm_factor)), passage.heads("dense", module.num_heads))
    if "Flash" in type(module).__name__:
        return call.masked(mask).with_terms(causal=module.is_causal)
    if module.config._attn_implementation == "sdpa" and not passage.argument(6, "output_attentions"):
        return call.masked(mask.detach()) if mask is not None else _causal(call, module)
    return _added(call, mask, None if alibi is None else alibi.detach() * module.inv_norm_factor)


def _causal(call: Call, module: Any) -> Call:
    """The fused function counts from the first key: what a cache holds beyond the queries is not looked at."""
    queries = call.query.shape[2]
    if not module.is_causal or queries == 1:
        return call
    return replace(call.with_terms(causal=True), key=call.key[:, :, :queries])


def _added(call: Call, mask: Tensor | None, alibi: Tensor | None) -> Call:
    """The plain way. ALiBi is in the mask already and comes once more; a boolean mask is added too, and then hides
    nothing.
    """
    terms = [] if mask is None else [mask.detach().to(call.query)]
    if alibi is not None:
        terms.append(alibi.view(call.query.shape[0], call.query.shape[1], 1, -1))
    return call.masked(sum(terms[1:], terms[0])) if terms else call
