"""QK-Clip (Kimi K2, arXiv 2507.20534): after a step, scale down the maps of heads whose logits grew past a limit.

    gamma = limit / max logit        W_Q <- gamma^alpha W_Q        W_K <- gamma^(1 - alpha) W_K        biases alike

Only heads over the limit are touched, and on the same batch their largest logit is then the limit itself. The maximum
is that of the forward passes since the last step, over all ranks; it is of the weights before the optimizer's step, as
in the paper.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from locater.control.base import Control
from locater.control.writing import check_weights_writable, rewrite
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.layers import AttentionLayer, Projection
from locater.layers.projection_with_norm import JoinedProjection, NormedProjection
from locater.numerics import is_number
from locater.observing.accumulate import StatisticsOptions
from locater.observing.observation import Observation

Part = Callable[[AttentionLayer], Projection]


class QKClip(Control):
    """Keep every head's largest logit at or below `limit`, by its weights. Acts in `after_step`, on every `every`-th
    step.

    Heads that share a key are clipped through their queries alone, which reaches the limit without touching the others.
    Latent attention (DeepSeek): sqrt(gamma) for the channels without rotation, gamma for the query's rotary channels,
    and the rotary key that all heads share is left as it is. Models with norms on queries and keys are refused: the
    norm undoes the scaling. So are logits with a position bias, relative terms or a soft cap, where scaling the maps
    does not scale the logit. `clipped` counts the heads scaled so far. The optimizer's moments are left as they are.
    `detach` leaves the weights as they are.

    >>> block = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> model = nn.TransformerEncoder(block, 1, enable_nested_tensor=False)
    >>> control = QKClip(limit=0.01).attach(model)
    >>> _ = model(torch.randn(1, 8, 16)); control.after_step(); control.clipped
    2
    >>> control.detach()
    """

    needs_softmax = True
    state_attributes = ("clipped", "step")

    def __init__(self, limit: float = 100.0, alpha: float = 0.5, every: int = 1) -> None:
        if not (is_number(limit) and limit > 0):
            raise LocaterError(f"limit={limit!r}: must be a number above 0")
        if not (is_number(alpha) and 0 <= alpha <= 1):
            raise LocaterError(f"alpha={alpha!r}: the share of the queries in the scaling must be from 0 to 1")
        if not (isinstance(every, int) and every >= 1):
            raise LocaterError(f"every={every!r}: must be a whole number from 1 (each step) on")
        self.limit, self.alpha, self.every = limit, alpha, every
        self.clipped = self.step = 0

    def _check(self, model: nn.Module) -> Observation:
        for layer in attention_layers(model):
            _refuse(layer)
            for part in (_query, _key):
                check_weights_writable(model, layer.name, part(layer))
        return Observation(model, StatisticsOptions(0), every=0)

    def _attach(self, model: nn.Module) -> None:
        self.observation = self._check(model)
        self.clipped = self.step = 0
        self.observation.__enter__()
        self.observation.switch.on = True

    def _detach(self, model: nn.Module) -> None:
        self.observation.close()
        del self.observation

    def after_step(self) -> None:
        model = self.attached
        if self.observation.switch.on:
            for number, largest in enumerate(self._largest_logits()):
                # scaling cannot repair a head whose largest logit is not finite
                over = largest.isfinite() & (largest > self.limit)
                if bool(over.any()):
                    gamma = torch.where(over, self.limit / largest, torch.ones_like(largest)).double()
                    self._clip(model, number, gamma)
                    self.clipped += int(over.sum())
        self.step += 1
        self._observe_if_due()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the state of an attached control: `attach` starts counting from zero."""
        _ = self.attached
        super().load_state_dict(state)
        self._observe_if_due()

    def _observe_if_due(self) -> None:
        self.observation.switch.on = self.step % self.every == 0

    def _largest_logits(self) -> list[Tensor]:
        """Since the last step: (H,) of each layer, -inf where it was not called."""
        model, observation = self.attached, self.observation
        observation.reduce()
        largest = [site.maxima[:, 0].cpu().clone() for site in observation.sites]
        if all(bool((top == -torch.inf).all()) for top in largest):
            raise LocaterError(f"{type(model).__name__}: no training pass since the last step, so no logits are known")
        observation.clear()
        return largest

    def _clip(self, model: nn.Module, number: int, gamma: Tensor) -> None:
        """Scale the maps of one layer; `gamma` (H,) is 1 for heads that stay as they are."""
        layer = _layer(model, number)
        rotated = 0 if layer.rotary is None else layer.rotary.channels
        if isinstance(layer.key, NormedProjection):  # latent attention: rotary channels come first
            query = gamma.sqrt()[:, None].repeat(1, layer.head_dim)
            query[:, :rotated] = gamma[:, None]
            _scale(model, number, _query, query.flatten())
            _scale(model, number, _key, gamma.sqrt().repeat_interleave(layer.head_dim - rotated))
        elif layer.group > 1:
            _scale(model, number, _query, gamma.repeat_interleave(layer.head_dim))
        else:
            _scale(model, number, _query, (gamma**self.alpha).repeat_interleave(layer.head_dim))
            _scale(model, number, _key, (gamma ** (1 - self.alpha)).repeat_interleave(layer.head_dim))


def _scale(model: nn.Module, number: int, part: Part, factors: Tensor) -> None:
    """Multiply the rows of a map and its bias."""
    layer = _layer(model, number)
    old = part(layer)
    factors = factors.to(old.weight().device)
    weight = (old.weight().detach().double() * factors[:, None]).to(old.weight().dtype)
    bias = None if old.bias is None else (old.bias.detach().double() * factors).to(old.bias.dtype)
    rewrite(model, layer.name, lambda: part(_layer(model, number)), weight, bias)


def _layer(model: nn.Module, number: int) -> AttentionLayer:
    return list(attention_layers(model))[number]


def _query(layer: AttentionLayer) -> Projection:
    return _last(layer.query)


def _key(layer: AttentionLayer) -> Projection:
    return _last(layer.key)


def _last(projection: Projection) -> Projection:
    """The map after the latent, where there is one."""
    if isinstance(projection, NormedProjection):
        assert projection.up is not None
        return projection.up
    return projection


def _refuse(layer: AttentionLayer) -> None:
    """Raise for a layer whose logits do not scale with its query and key maps."""
    normed = [part for part in (layer.query, layer.key) if isinstance(part, NormedProjection) and part.up is None]
    if layer.query_norm is not None or layer.key_norm is not None or normed:
        raise LocaterError(
            f"{layer.name}: a norm follows its queries and keys, so scaling their maps changes nothing: "
            "QK-Clip does not apply"
        )
    if any(isinstance(part, JoinedProjection) for part in (layer.query, layer.key)):
        raise LocaterError(f"{layer.name}: its heads are made of rows of several maps: QK-Clip does not apply")
    if isinstance(layer.key, NormedProjection):
        turning = 0 if layer.rotary is None else layer.rotary.channels
        shared = 0 if layer.key.shared is None else layer.key.shared.shape[0]
        if layer.rotary_table is not None or turning != shared:
            raise LocaterError(
                f"{layer.name}: its latent keys rotate in channels that heads do not share: QK-Clip does not apply"
            )
    if layer.unknown_logits is not None:
        raise LocaterError(
            f"{layer.name}: how its logits are computed is not known ({layer.unknown_logits}): QK-Clip does not apply"
        )
    others = {"a position bias": layer.bias, "relative terms": layer.relative, "a soft cap": layer.softcap}
    for name, term in others.items():
        if term is not None:
            raise LocaterError(
                f"{layer.name}: its logits have {name}, so scaling its maps does not scale them: QK-Clip does not apply"
            )
