"""Query and key maps of a layer in other forms than `effective`: for tokens of a known size in place of unit tokens, as
stored, and on tokens that were read.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.errors import LocaterError
from locater.layers.joined_projection import JoinedProjection, norm_inside
from locater.layers.layer import AttentionLayer, Projection
from locater.layers.norm import Norm
from locater.layers.norm_folding import Effective, effective, folded
from locater.layers.projection_with_norm import NormedProjection


def size_counts(layer: AttentionLayer) -> bool:
    """Whether the logits of a self-attention layer depend on the size of the tokens that it reads: no norm in front of
    it fixes this size, and none of both queries and keys undoes it.

    >>> plain = Projection(lambda: torch.eye(2), (2, 2))
    >>> layer = AttentionLayer("attention", 0, 1, 1, 2, query=plain, key=plain, scale=1.0)
    >>> size_counts(layer), size_counts(replace(layer, norm=Norm("rms")))
    (True, False)
    >>> size_counts(replace(layer, query_norm=Norm("rms"), key_norm=Norm("rms")))
    False
    """
    sides = ((layer.query, layer.query_norm), (layer.key, layer.key_norm))
    return layer.norm.kind == "none" and not all(_undoes_size(*side) for side in sides)


def _undoes_size(projection: Projection, norm: Norm | None) -> bool:
    """Whether a norm behind the map makes the same of tokens of any size. A bias in front of that norm does not grow
    with the tokens, and rotary channels beside a latent do not pass through it.
    """
    if isinstance(projection, NormedProjection):
        return projection.down.bias is None and projection.shared is None
    if isinstance(projection, JoinedProjection):
        return all(_undoes_size(part, norm) for part in projection.parts)
    return norm is not None and projection.bias is None


def sized_maps(layer: AttentionLayer, mean_square: Float[Tensor, " 1"] | None = None) -> Effective:
    """The effective maps; given r^2 = E |z|^2 / d of the tokens that the layer reads, those of tokens of this size in
    place of unit tokens: M = s r^2 tr W and V = s^2 r^4 tr W_sym^2.

    r is a gain in front of the maps, so a norm behind one of them has its mean field over tokens of this size.
    """
    if mean_square is None:
        return effective(layer)
    norm = Norm(gain=mean_square.sqrt().expand(layer.width))
    query, key = (side.linear(partial(folded, norm=norm)) for side in (layer.query, layer.key))
    return effective(replace(layer, norm=norm, query=query, key=key))


def stored_maps(layer: AttentionLayer) -> Effective:
    """The query and key maps as the parameters are stored: no norm is folded in, and none of queries and keys.

    Refused for latent attention: a norm stands between its two matrices, so no product of them is in use.
    """
    return effective(
        replace(layer, query=_stored_projection(layer, layer.query), key=_stored_projection(layer, layer.key)), raw=True
    )


def _stored_projection(layer: AttentionLayer, projection: Projection) -> Projection:
    if not norm_inside(projection):
        return projection
    if not isinstance(projection, NormedProjection) or projection.up is not None:
        raise LocaterError(
            f"{layer.name}: latent attention has no query-key map as stored, since a norm stands between its two "
            "matrices: use the effective or the measured form"
        )
    return projection.down


def token_maps(layer: AttentionLayer, x: Float[Tensor, "n d"], real: Bool[Tensor, " n"]) -> Effective:
    """Queries and keys of n tokens that a layer reads, as maps from the numbers of the tokens.

    `x` is the input of the attention module itself, behind the norm in front of it. Tokens that are not `real` do not
    count. Column i of `query` (H, h, n) is the query of token i divided by the number of tokens; column j of `key`
    (K, h, n) is the key of token j minus the mean key. So with L_ij = s q_i . (k_j - mean k) over N real tokens,

        s tr(Q^T K) = sum_i L_ii / N            the mean logit of a token with itself
        s^2 ||Q^T K||_F^2 = sum_ij L_ij^2 / N^2     the mean square over all pairs

    Norms and biases of queries and keys are exact. There is no rotation, so these are logits at distance zero;
    position terms and soft-caps are left out.

    >>> x = torch.eye(2)
    >>> plain = Projection(lambda: torch.eye(2), (2, 2))
    >>> layer = AttentionLayer("attention", 0, 1, 1, 2, query=plain, key=plain, scale=1.0)
    >>> maps = token_maps(layer, x, torch.tensor([True, True]))
    >>> maps.query[0].mT @ maps.key[0] * 2                             # L: the mean key is (1/2, 1/2)
    tensor([[ 0.5000, -0.5000],
            [-0.5000,  0.5000]])
    """
    counted = real.to(x.dtype)
    number = counted.sum().clamp_min(1)
    at_zero = replace(layer, norm=Norm(), memory_norm=None, rotary=None, rotary_table=None)
    query, key = (side(x[None])[0].mT for side in (at_zero.queries, at_zero.keys))  # (heads, h, n)
    if layer.rotary is not None and layer.rotary.amplitude != 1:
        turning = torch.ones(layer.head_dim, dtype=x.dtype, device=x.device)
        turning[: layer.rotary.channels] = layer.rotary.amplitude
        query, key = query * turning[:, None], key * turning[:, None]
    key = key - (key * counted).sum(-1, keepdim=True) / number
    query, key = query * (counted / number), key * counted
    return Effective(query, key, query.new_zeros(layer.heads, len(x)), layer.scale, layer.kind == "cross")
