"""The effective maps: those that act on the standardised residual stream z, with norms folded in. docs/theory.md
section 2.

    z -> gain * z + bias -> W_Q . + b_q -> (query norm) -> (rotation)

Folding gives q = W_Q' z + c_q and k = W_K' z + c_k, so a logit is s (z_q^T W z_k + e . z_k + terms without z_k), with
W = W_Q'^T W_K' and the key-only term e = W_K'^T c_q.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.layers.layer import AttentionLayer, Fold, Projection
from locater.layers.norm import Norm
from locater.numerics import upcast
from locater.spectrum import Moments, cross_moments, moments
from locater.theory.gaussian_tokens_and_covariance_root import root


@dataclass(frozen=True)
class Effective:
    """Folded maps of one layer, float32 (float64 for a float64 model)."""

    query: Float[Tensor, "H h d"]
    key: Float[Tensor, "K h d"]
    key_term: Float[Tensor, "H d"]  # e: what every query adds to the logit of key z, before the scale
    scale: float
    cross: bool = False

    __repr__ = brief

    def moments(self) -> Moments:
        """Moments of every query head, shape (H,)."""
        groups = self.query.unflatten(0, (self.key.shape[0], -1))
        grouped = (cross_moments if self.cross else moments)(groups, self.key.unsqueeze(1))
        flat = (None if x is None else x.flatten(0, 1) for x in (grouped.query_gram, grouped.key_gram, grouped.cross))
        return Moments(*flat)  # type: ignore[arg-type]

    @property
    def key_bias(self) -> Float[Tensor, " H"]:
        """Spread of the key-only term over unit tokens, in logits: s |e|."""
        return self.scale * self.key_term.norm(dim=-1)


@dataclass(frozen=True)
class Tokens:
    """Mean and covariance of a layer's input, after the norm in front of it; `memory` is the input of the keys of
    cross-attention.
    """

    mean: Float[Tensor, " d"]
    covariance: Float[Tensor, "d d"]
    memory: Tokens | None = None

    __repr__ = brief


class LogitMaps(NamedTuple):
    """What the logits of a layer are made of, before its rotation and its scale: q = query z + query_shift, and keys
    alike. `amplitude` of rotary positions is folded in.
    """

    query: Float[Tensor, "H h d"]
    query_shift: Float[Tensor, "H h"]
    key: Float[Tensor, "K h d"]
    key_shift: Float[Tensor, "K h"]


def effective(layer: AttentionLayer, raw: bool = False, tokens: Tokens | None = None) -> Effective:
    """Fold a layer's norms into its query and key maps; `raw` takes the parameters as stored, without biases.

    With measured `tokens` the stream is mean + R z with R R^T its covariance, in place of gain * z + bias: the same
    folding with another affine map, after which traces are those of W C and norms those of C^(1/2) W C^(1/2).
    """
    if layer.unknown_scale is not None:
        raise LocaterError(f"{layer.name}: the scale of its logits is not known: {layer.unknown_scale}")
    maps = logit_maps(layer, raw, tokens)
    if raw:
        term = maps.query.new_zeros(layer.heads, maps.key.shape[-1])
    else:
        shift = maps.query_shift.unflatten(0, (layer.kv_heads, -1))
        term = torch.einsum("ghd,gnh->gnd", maps.key, shift).flatten(0, 1)
    return Effective(maps.query, maps.key, term, layer.scale, layer.kind == "cross")


def logit_maps(layer: AttentionLayer, raw: bool = False, tokens: Tokens | None = None) -> LogitMaps:
    """The folded maps of queries and keys with their constant parts; see `effective`."""
    if raw:
        query, key = upcast(_heads(layer.query, layer.heads)), upcast(_heads(layer.key, layer.kv_heads))
        query_shift, key_shift = query.new_zeros(query.shape[:2]), key.new_zeros(key.shape[:2])
        return _in_one_dtype(query, query_shift, key, key_shift)
    if tokens is None:
        query, query_shift = folded(_heads(layer.query, layer.heads), layer.query, layer.norm)
        key, key_shift = folded(_heads(layer.key, layer.kv_heads), layer.key, layer.key_side_norm)
    else:
        read = _fold(tokens)
        query, query_shift = _measured(layer.query, layer.heads, read)
        key, key_shift = _measured(layer.key, layer.kv_heads, read if tokens.memory is None else _fold(tokens.memory))
    if layer.query_norm is not None:
        query, query_shift = mean_field(query, query_shift, layer.query_norm)
    if layer.key_norm is not None:
        key, key_shift = mean_field(key, key_shift, layer.key_norm)
    if layer.rotary is not None and layer.rotary.amplitude != 1:
        turning = torch.ones(layer.head_dim, dtype=query.dtype, device=query.device)
        turning[: layer.rotary.channels] = layer.rotary.amplitude
        query, query_shift = query * turning[:, None], query_shift * turning
        key, key_shift = key * turning[:, None], key_shift * turning
    return _in_one_dtype(query, query_shift, key, key_shift)


def _in_one_dtype(query: Tensor, query_shift: Tensor, key: Tensor, key_shift: Tensor) -> LogitMaps:
    """Queries and keys may be stored in different types."""
    precise = torch.promote_types(query.dtype, key.dtype)
    return LogitMaps(*(x.to(precise) for x in (query, query_shift, key, key_shift)))


def _heads(projection: Projection, heads: int) -> Tensor:
    return projection.weight().unflatten(0, (heads, -1))


def folded(weight: Tensor, projection: Projection, norm: Norm) -> tuple[Tensor, Tensor]:
    """(W diag(gain) P, W bias + b), with P the projection off the mean direction that LayerNorm removes."""
    heads, head_dim, _ = weight.shape
    precise = torch.promote_types(weight.dtype, torch.float32)
    shift = weight.new_zeros(heads, head_dim, dtype=precise)
    if norm.bias is not None:
        shift = shift + upcast(weight) @ norm.bias.to(weight.device, precise)
    if projection.bias is not None:
        shift = shift + projection.bias.to(shift).view(heads, head_dim)
    # a half-precision weight times a float32 gain is one pass and float32: no copy in between
    weight = upcast(weight) if norm.gain is None else weight * norm.gain.to(weight.device, precise)
    if norm.kind == "layer":
        weight = weight - weight.mean(-1, keepdim=True)
    return weight, shift


def _fold(tokens: Tokens) -> Fold:
    """What takes W to (W R, W mean + b)."""
    R = root(tokens.covariance)

    def fold(weight: Tensor, projection: Projection) -> tuple[Tensor, Tensor]:
        weight, shift = folded(weight, projection, Norm())
        return weight @ R.to(weight), shift + weight @ tokens.mean.to(weight)

    return fold


def _measured(projection: Projection, heads: int, fold: Fold) -> tuple[Tensor, Tensor]:
    projection = projection.linear(fold)
    return fold(_heads(projection, heads), projection)


def mean_field(weight: Tensor, shift: Tensor, norm: Norm) -> tuple[Tensor, Tensor]:
    """A norm on queries or keys, with the root mean square over unit tokens in place of each token's own.

    E |W z + c|^2 / d_head = (||W||_F^2 + |c|^2) / d_head, so scaling W and c together changes nothing.
    """
    weight, shift = centred(weight, norm), centred(shift, norm)
    gain = mean_field_gain(weight, shift, norm)
    shift = shift * gain
    return weight * gain[..., None], shift if norm.bias is None else shift + norm.bias.to(weight)


def centred(x: Tensor, norm: Norm) -> Tensor:
    """Without the mean over each head's rows (axis 1), where the norm removes it."""
    return x - x.mean(1, keepdim=True) if norm.kind == "layer" else x


def mean_field_gain(weight: Tensor, shift: Tensor, norm: Norm) -> Tensor:
    """What the norm multiplies (centred) queries or keys by, in mean field: (heads, head_dim), or (heads, 1) without a
    gain.
    """
    energy = weight.square().sum((1, 2)) + shift.square().sum(-1)
    factor = math.sqrt(weight.shape[1]) * torch.rsqrt(energy.clamp_min(torch.finfo(weight.dtype).tiny))
    # 1 / sqrt(inf) would make a head of zeros of weights that are too large
    factor = torch.where(energy.isinf(), torch.nan, factor)
    return factor[:, None] if norm.gain is None else factor[:, None] * norm.gain.to(weight)
