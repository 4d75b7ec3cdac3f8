"""LocAteR: shrink the scale of each head's query-key spectrum while its mean is held. docs/theory.md section 8.

    penalty = sum over heads of   shrink * V + hold * (M - target)^2

M = s tr W is the mean logit of a unit token with itself and V the scale of the spectrum in the same units, s^2 tr W_sym^2
(`part="symmetric"`, the paper's) or s^2 (2 ||W||_F^2 + tr W^2) / 3 (`part="full"`, which charges the antisymmetric part too and is
what the variance of the paper's delta, averaged over positions, asks for). W is the effective map, norms folded in, so one
setting fits every width and head size, and scaling W_Q where a norm follows changes nothing. Raw tr W^2 is no such penalty: it
has no lower bound, since a rotation makes it negative.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

from locater.control.base import Control, Layers, self_layers
from locater.errors import LocaterError
from locater.heads import Effective, effective
from locater.spectrum import Moments

Schedule = Callable[[int], float]  # of the step, from 0; multiplies the penalty


class LocAteR(Control):
    """The regularizer of Bao, Hataya and Karakida (2024) in logit units.

    `target="free"` asks for concentration at whatever mean there is: shrink * (V - M^2 / d_head), never negative. `layers` are
    numbers as in a scan; cross-attention has no mean and is left out. A layer that several depths share counts once.

    >>> block = nn.TransformerEncoderLayer(16, 2, batch_first=True)
    >>> control = LocAteR(target=2.0).attach(nn.TransformerEncoder(block, 2, enable_nested_tensor=False))
    >>> bool(control.loss() > 0), control.loss().requires_grad
    (True, True)
    """

    def __init__(
        self,
        shrink: float = 0.01,
        hold: float = 0.01,
        target: float | Literal["free"] = 2.0,
        part: Literal["symmetric", "full"] = "symmetric",
        layers: Layers = None,
        schedule: Schedule | None = None,
    ) -> None:
        if part not in ("symmetric", "full"):
            raise LocaterError(f"part={part!r}: choose symmetric or full")
        if isinstance(target, str) and target != "free":
            raise LocaterError(f"target={target!r}: a number, or free")
        if shrink < 0 or hold < 0:
            raise LocaterError(f"shrink={shrink}, hold={hold}: both count from 0, or the penalty would reward what it should charge")
        self.shrink, self.hold, self.target, self.part, self.layers, self.schedule = shrink, hold, target, part, layers, schedule
        self.step = 0

    def _attach(self, model: nn.Module) -> None:
        layers = self_layers(model, self.layers)
        if not any(w.requires_grad for layer in layers for w in (layer.query.weight(), layer.key.weight())):
            raise LocaterError(f"{type(model).__name__}: none of its query and key maps is trained, so a penalty would change nothing")
        self.step = 0

    def loss(self) -> Tensor:
        """The penalty of this step, in float32 at least, whatever autocast is on."""
        model = self.attached
        strength = 1.0 if self.schedule is None else float(self.schedule(self.step))
        with torch.autocast(next(model.parameters()).device.type, enabled=False):
            parts = [self.of(moments, scale).sum() for moments, scale in grouped(self_layers(model, self.layers))]
        return strength * torch.stack(parts).sum()

    def of(self, m: Moments, scale: Tensor) -> Tensor:
        """The penalty of every head, from its moments and logit scales."""
        M = scale * m.trace
        square = m.symmetric_sq if self.part == "symmetric" else (2 * m.frobenius_sq + m.trace_of_square) / 3
        V = scale**2 * square
        if self.target == "free":
            return self.shrink * (V - M**2 / m.head_dim)
        assert not isinstance(self.target, str)
        return self.shrink * V + self.hold * (M - self.target) ** 2

    def after_step(self) -> None:
        self.step += 1


def grouped(layers: list) -> list[tuple[Moments, Tensor]]:  # type: ignore[type-arg]
    """Moments of all heads with their scales, layers of one shape together: a few large products in place of many small ones."""
    folded = [effective(layer) for layer in layers]
    shapes: dict[tuple[torch.Size, torch.Size], list[Effective]] = {}
    for held in folded:
        shapes.setdefault((held.query.shape, held.key.shape), []).append(held)
    found = []
    for same in shapes.values():
        query, key = torch.stack([x.query for x in same]), torch.stack([x.key for x in same])  # (L, H, h, d)
        flat = Effective(query.flatten(0, 1), key.flatten(0, 1), query.new_zeros(0), 1.0).moments()
        scales = torch.tensor([x.scale for x in same], device=query.device, dtype=query.dtype)
        found.append((flat, scales.repeat_interleave(query.shape[1])))
    return found
