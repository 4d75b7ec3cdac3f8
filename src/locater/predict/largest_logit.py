"""The largest logit that a head can have on any text, from its weights alone."""

from __future__ import annotations

import torch
from torch import Tensor

from locater.layers import AttentionLayer, Norm, Projection
from locater.layers.joined_projection import norm_inside
from locater.layers.norm_folding import folded
from locater.numerics import one_thread


@torch.no_grad()
def logit_bound(layer: AttentionLayer) -> Tensor | None:
    """The largest size (H,) that a logit of each head can have on any text: scale * max |q| * max |k|; None where
    nothing bounds it.

    A norm in front makes |z| = sqrt(width), so |q| <= ||W_Q'||_2 sqrt(width) + |c_q|; a norm on the queries makes |q|
    <= sqrt(head_dim) max|gain| + |bias|. Rotation changes no length. Position terms are added to logits and not bounded
    here; a soft-cap bounds everything.
    """
    bound = _product_bound(layer)
    if layer.softcap is None:
        return bound
    cap = torch.full((layer.heads,), layer.softcap)
    return cap if bound is None else bound.clamp_max(layer.softcap)


def _product_bound(layer: AttentionLayer) -> Tensor | None:
    if layer.bias is not None or layer.relative is not None or layer.unknown_logits is not None:
        return None
    q = _longest(layer, layer.query, layer.heads, layer.norm, layer.query_norm)
    k = _longest(layer, layer.key, layer.kv_heads, layer.key_side_norm, layer.key_norm)
    if q is None or k is None:
        return None
    amplitude = 1.0 if layer.rotary is None else max(1.0, layer.rotary.amplitude) ** 2
    return abs(layer.scale) * amplitude * q * k.repeat_interleave(layer.group)


def _longest(
    layer: AttentionLayer, projection: Projection, heads: int, before: Norm, own: Norm | None
) -> Tensor | None:
    """Largest possible length of a head's queries or keys (heads,)."""
    if own is not None and own.kind != "none":
        gain = torch.ones(1) if own.gain is None else own.gain.float().abs().cpu()
        size = (layer.head_dim**0.5) * gain.reshape(-1, gain.shape[-1]).amax(-1)
        size = size if own.bias is None else size + own.bias.float().cpu().reshape(-1, own.bias.shape[-1]).norm(dim=-1)
        return size.expand(heads) if len(size) in (1, heads) else None
    if before.kind == "none" or norm_inside(projection):
        return None
    weight, shift = folded(projection.weight().unflatten(0, (heads, -1)), projection, before)
    finite = weight.isfinite().all(-1).all(-1)
    with one_thread():
        top = torch.linalg.matrix_norm(weight.where(finite[:, None, None], 0.0).cpu(), 2)
    top = top.where(finite.cpu(), torch.nan)
    return top * weight.shape[-1] ** 0.5 + shift.norm(dim=-1).cpu()
