"""QKNorm: queries and keys of every head at a learned length."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from locater.calls.interceptors import AttentionRequest
from locater.control.base import Layers
from locater.control.forward_controls import (
    NORM,
    ControlledLayer,
    ForwardChange,
    ForwardControl,
    Heads,
    add_over_ranks,
    per_head,
)
from locater.control.row_entropy import real_tokens
from locater.errors import LocaterError
from locater.layers import AttentionLayer
from locater.layers.norm import Norm
from locater.layers.norm_folding import Effective
from locater.layers.projection_with_norm import normed
from locater.numerics import is_number

NormKind = Literal["rms", "layer"]


def qk_norm(
    x: Float[Tensor, "B H T D"], gain: Float[Tensor, " H"], kind: NormKind = "rms", eps: float = 1e-6
) -> Float[Tensor, "B H T D"]:
    """g_h x / sqrt(mean_c x_c^2 + eps) for every head vector x; `kind="layer"` subtracts the mean over channels first.

    One gain per head, not per channel: it commutes with rotation, and a rotation keeps lengths, so "rms" gives the same
    logits after rotary embedding as before it. Subtracting the mean does not commute with rotation. Lengths are at most
    |g| sqrt(D), so |scale q.k| <= scale D |g_q g_k|, which is sqrt(D) |g_q g_k| for the usual scale. Computed in
    float32 at least.

    >>> x = torch.randn(1, 2, 3, 16)
    >>> qk_norm(x, torch.tensor([1.0, 2.0])).norm(dim=-1).mean((0, 2)).round().tolist()     # sqrt(16) times the gain
    [4.0, 8.0]
    """
    return (unit(x, kind, eps) * gain.to(x.device)[:, None, None]).to(x.dtype)


def unit(x: Tensor, kind: NormKind, eps: float) -> Tensor:
    """Head vectors with root mean square 1."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    if kind == "layer":
        wide = wide - wide.mean(-1, keepdim=True)
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)


class QKNorm(ForwardControl["_NormChange"]):
    """q and k become g_q q / rms(q) and g_k k / rms(k), with one learned gain per query head and per key head.

    So |logit| <= scale head_dim |g_q g_k|, which is sqrt(head_dim) |g_q g_k| for the usual scale: `bounds()`. It acts
    on queries and keys after rotation. One gain per head commutes with rotation, and rotation keeps lengths, so the
    logits are those of a norm before it; gains per channel would not commute. For the same reason `kind="layer"`, which
    subtracts the mean over channels first, is refused where there is rotation: it would make logits depend on absolute
    positions.

    `init="keep"` starts from the lengths in the first call of each layer (root mean square over its tokens, those of
    all ranks, without padding), so that the scale of logits stays; that needs attention by a softmax. A number starts
    every gain there, 1.0 as in Qwen3. Keys are normalised at every call, those from a cache too. Where a model scales
    its queries before the call (OPT, Whisper), the normalised queries are scaled in the same way.

    >>> QKNorm(init=1.0)
    QKNorm(kind='rms', learn=True, eps=1e-06, init=1.0, layers=None)
    """

    precedes_mechanism = True
    softmax_remedy = "give it init=1.0"

    def __init__(
        self,
        kind: NormKind = "rms",
        learn: bool = True,
        eps: float = 1e-6,
        init: float | Literal["keep"] = "keep",
        layers: Layers = None,
    ) -> None:
        if kind not in ("rms", "layer"):
            raise LocaterError(f"kind={kind!r}: choose rms or layer")
        if init != "keep" and not (is_number(init) and init > 0):
            raise LocaterError(f"init={init!r}: must be a number above 0, or keep")
        if not (is_number(eps) and eps >= 0):
            raise LocaterError(f"eps={eps!r}: must be 0 or a little above")
        self.kind, self.learn, self.eps, self.init, self.layers = kind, learn, eps, init, layers
        self.needs_softmax = init == "keep"

    def _change(self, controlled: ControlledLayer) -> _NormChange:
        layer, kind = controlled.layer, self.kind
        if kind == "layer" and layer.rotary is not None:
            raise LocaterError(
                f"{layer.name}: kind='layer' after rotation would break relative positions; kind='rms' commutes with it"
            )
        start = 1.0 if isinstance(self.init, str) else self.init
        gains = [controlled.parameter(torch.full((n,), start), self.learn) for n in (layer.heads, layer.kv_heads)]
        return _NormChange(controlled.heads, kind, self.eps, gains[0], gains[1], not isinstance(self.init, str))

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        super().load_state_dict(state)
        for _, change in self._changes:
            change.ready = True

    def bounds(self) -> dict[str, list[float]]:
        """The largest possible |logit| of every head, by layer; with `init="keep"` gains are 1 at first."""
        _ = self.attached
        return {change.heads.name: change.bound().tolist() for _, change in self._changes}


class _NormChange(ForwardChange):
    order = NORM

    def __init__(
        self, heads: Heads, kind: NormKind, eps: float, query_gain: nn.Parameter, key_gain: nn.Parameter, ready: bool
    ) -> None:
        self.heads, self.kind, self.eps = heads, kind, eps
        self.ready = ready  # whether gains are set; otherwise the first call sets them
        self.query_gain, self.key_gain = query_gain, key_gain

    def parameters_by_name(self) -> dict[str, nn.Parameter]:
        return {"query_gain": self.query_gain, "key_gain": self.key_gain}

    def bound(self) -> Tensor:
        layer = self.heads
        gains = self.query_gain.detach() * self.key_gain.detach().repeat_interleave(layer.group)
        return abs(layer.scale) * layer.head_dim * gains.abs()

    def fold(self, layer: AttentionLayer, fold: Callable[[AttentionLayer], Effective]) -> Effective:
        """In mean field, like the norms of a model itself; a factor of the rotation before it is undone."""
        if not self.ready:
            return fold(layer)
        gains = (gain.detach()[:, None] for gain in (self.query_gain, self.key_gain))  # (heads, 1)
        query_norm, key_norm = (Norm(self.kind, gain, eps=self.eps) for gain in gains)
        query, key = layer.query, layer.key
        if layer.query_norm is not None:
            query = normed(query, layer.query_norm, layer.norm, blocks=layer.heads)
        if layer.key_norm is not None:
            key = normed(key, layer.key_norm, layer.key_side_norm, blocks=layer.kv_heads)
        return fold(replace(layer, query=query, key=key, query_norm=query_norm, key_norm=key_norm, rotary=None))

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        layer, q, k = self.heads, request.query, request.key
        query_gain = per_head(self.query_gain, q.shape[1], "query", layer)
        key_gain = per_head(self.key_gain, k.shape[1], "key", layer)
        prescale = layer.scale / request.scale  # by which the model has multiplied its queries; the norm undoes it
        if not self.ready:
            with torch.no_grad():
                call = request.call()
                rows, keys = real_tokens(call, layer.kind == "self")
                self.query_gain.copy_(self._length(q, rows, self.query_gain) / prescale)
                self.key_gain.copy_(self._length(call.key, keys, self.key_gain))
            self.ready = True
        return replace(
            request,
            query=qk_norm(q, query_gain * prescale, self.kind, self.eps),
            key=qk_norm(k, key_gain, self.kind, self.eps),
        )

    def _length(self, x: Tensor, real: Tensor, gain: Tensor) -> Tensor:
        """Root mean square (H,) of x (B, H, T, D) over channels and real tokens (B, T). In a distributed run x has the
        batch of this rank, and perhaps a part of the heads; the result is that of all, like `gain`.
        """
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.kind == "layer":
            wide = wide - wide.mean(-1, keepdim=True)
        real = real[:, None, :, None].to(wide)
        sums = torch.zeros(2, len(gain), dtype=wide.dtype, device=wide.device)  # of squares, and how many
        here = sums[:, slice(*self.heads.split.run(len(gain)))]
        here[0] = (wide.square() * real).sum((0, 2, 3))
        here[1] = real.sum() * x.shape[-1]
        add_over_ranks(sums)
        return (sums[0] / sums[1].clamp_min(1)).sqrt()
