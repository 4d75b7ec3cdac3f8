"""Mimetic initialisation: start each head with a mean self-logit like that of trained models. docs/theory.md section 8.

    W_K <- W_K + c W_Q    with c such that    M = s tr(W_Q^T W_K) = target

Most of what LocAteR gains on toy models comes from this start, so a comparison should include it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from torch import Tensor, nn

from locater.control.base import Control, Layers, self_layers
from locater.control.locater import traces
from locater.control.writing import check_weights_writable, rewrite
from locater.errors import LocaterError
from locater.layers import AttentionLayer, Projection, effective
from locater.layers.norm_folding import folded
from locater.layers.projection_with_norm import JoinedProjection, NormedProjection
from locater.numerics import is_number

STEPS = 100  # of Newton's method at most; without a norm on the keys the first step is exact


class Mimetic(Control):
    """Give every head the mean self-logit M = target when attached.

    This is an initialisation: `loss()` is zero, and `detach` leaves the weights as they are. M is that of the effective
    map at offset 0, norms folded in. Heads that share a key share c, and their mean M is the target. After Trockman and
    Kolter (2023), who copy a share of the spectrum; here c is what the target needs.

    >>> block = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> model = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
    >>> _ = Mimetic(target=2.0).attach(model)
    >>> layer = self_layers(model, None)[0]
    >>> [round(M, 4) for M in (layer.scale * effective(layer).moments().trace).tolist()]
    [2.0, 2.0]
    """

    def __init__(self, target: float = 2.0, layers: Layers = None) -> None:
        if not is_number(target):
            raise LocaterError(f"target={target!r}: must be a number")
        self.target, self.layers = target, layers

    def _check(self, model: nn.Module) -> list[tuple[AttentionLayer, Tensor]]:
        """Layers and their new keys, all of them before any is written."""
        layers = self_layers(model, self.layers)
        with torch.no_grad():
            for layer in layers:
                check_weights_writable(model, layer.name, _stored_map(layer.key, layer.name))
            return [(layer, self._key(layer)) for layer in layers]

    def _attach(self, model: nn.Module) -> None:
        for layer, weight in self._check(model):
            rewrite(model, layer.name, partial(_stored_map, layer.key, layer.name), weight)

    def _key(self, layer: AttentionLayer) -> Tensor:
        """The key map (K h, d) with which the mean self-logit of every group is the target."""
        query, key = (_stored_map(part, layer.name).weight().double() for part in (layer.query, layer.key))
        query = query.unflatten(0, (layer.kv_heads, layer.group, -1)).mean(1)  # (K, h, d)
        key = key.unflatten(0, (layer.kv_heads, -1))
        share = torch.zeros(layer.kv_heads, dtype=torch.float64, device=key.device)
        for _ in range(STEPS):
            with torch.enable_grad():
                share = share.detach().requires_grad_()
                M = _mean_logits(layer, (key + share[:, None, None] * query).flatten(0, 1))
                slope = torch.autograd.grad(M.sum(), share)[0]
            missing = (self.target - M).detach()
            if float(missing.abs().max()) <= 1e-9 * max(1.0, abs(self.target)):
                return (key + share.detach()[:, None, None] * query).flatten(0, 1)
            share = share.detach() + missing / slope
            if not bool(share.isfinite().all()):
                break
        limit = _mean_logits(layer, (key + (1e6 if self.target > 0 else -1e6) * query).flatten(0, 1))
        raise LocaterError(
            f"{layer.name}: norms on its queries and keys bound the self-logit that a share of the query map can give, "
            f"to {float(limit.abs().min()):.3g} here: target={self.target} is beyond it"
        )


def _mean_logits(layer: AttentionLayer, key: Tensor) -> Tensor:
    """M of each group (K,) with `key` (K h, d) as the key map; float64."""
    query = _stored_map(layer.query, layer.name).weight().double()
    maps = effective(
        replace(layer, query=_replace_weight(layer, layer.query, query), key=_replace_weight(layer, layer.key, key))
    )
    trace, _, _ = traces(maps.query, maps.key)
    return layer.scale * trace.unflatten(0, (layer.kv_heads, -1)).mean(1)


def _replace_weight(layer: AttentionLayer, projection: Projection, weight: Tensor) -> Projection:
    """A projection with another weight in place of the stored one."""
    new = replace(_stored_map(projection, layer.name), weight=lambda: weight)
    if isinstance(projection, NormedProjection):
        return replace(projection, down=new).linear(partial(folded, norm=layer.norm))
    return new


def _stored_map(projection: Projection, name: str) -> Projection:
    """The stored map: the one before the norm, where there is a norm on queries or keys."""
    if isinstance(projection, JoinedProjection):
        raise LocaterError(
            f"{name}: its heads are made of rows of several maps: leave this layer out with layers=[...]"
        )
    if not isinstance(projection, NormedProjection):
        return projection
    if projection.up is not None:
        raise LocaterError(
            f"{name}: its keys pass a narrow latent, to which a share of the query map cannot be added: "
            "leave this layer out"
        )
    return projection.down
