"""Query and key maps of a layer in other forms than `effective`: as they are stored, and on tokens that were read."""

from __future__ import annotations

from dataclasses import replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.errors import LocaterError
from locater.families.effective import Effective, effective
from locater.families.layer import AttentionLayer, Projection
from locater.families.norm import Norm
from locater.families.normed import NormedProjection


def stored_maps(layer: AttentionLayer) -> Effective:
    """The query and key maps as the parameters are stored: no norm is folded in, and none of queries and keys.

    Refused for latent attention: a norm stands between its two matrices, so no product of them is in use.
    """
    return effective(replace(layer, query=_stored(layer, layer.query), key=_stored(layer, layer.key)), raw=True)


def _stored(layer: AttentionLayer, projection: Projection) -> Projection:
    if not isinstance(projection, NormedProjection):
        return projection
    if projection.up is not None:
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
    at_zero = replace(layer, norm=Norm(), memory_norm=None, rotary=None)
    query, key = (side(x[None])[0].mT for side in (at_zero.queries, at_zero.keys))  # (heads, h, n)
    if layer.rotary is not None and layer.rotary.amplitude != 1:
        turning = torch.ones(layer.head_dim, dtype=x.dtype, device=x.device)
        turning[: layer.rotary.channels] = layer.rotary.amplitude
        query, key = query * turning[:, None], key * turning[:, None]
    key = key - (key * counted).sum(-1, keepdim=True) / number
    query, key = query * (counted / number), key * counted
    return Effective(query, key, query.new_zeros(layer.heads, len(x)), layer.scale, layer.kind == "cross")
