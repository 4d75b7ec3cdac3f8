"""EntropyPenalty: keep the entropy of every row of attention inside a band, through the kernels' O(T) gradient.

    penalty = weight * mean of  max(0, floor + margin - r)^2 + max(0, r - ceiling + margin)^2
    r       = H / log(number of keys that the row can see)

Jha and Reagen (2025) compare the entropy of every row with the log of the context length. Row i of a causal map has at
most log(i + 1), so there early rows are always too low; here each row is compared with the keys it can see. Theirs also
jumps at the margin and is a sum over batch and tokens, so its weight must be tuned again for every size; this one is
smooth and a mean.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater.calls.interceptors import AttentionRequest
from locater.control.base import Layers, device_of
from locater.control.forward_controls import MEASURE, ControlledLayer, ForwardChange, ForwardControl, Heads
from locater.control.row_entropy import row_entropy
from locater.errors import LocaterError
from locater.numerics import is_number
from locater.torch_private import in_backward_pass


class EntropyPenalty(ForwardControl["_PenaltySum"]):
    """A squared hinge on the entropy ratio of every row outside [floor, ceiling], as part of the loss.

    With `margin` the pull begins that far inside the band. Rows of padding and rows that see one key do not count. With
    sinks, entropy is that of the weights in use. Rows are collected while the model trains with gradients. `loss()`
    returns their mean over rows, heads and calls and starts again, so its size depends neither on batch nor length nor
    number of passes. Gradients go to queries and keys, and through them to other controls; a position bias gets none.

    With accumulated gradients, add it in every micro-batch and divide it like the loss:

        ((task_loss + control.loss()) / count).backward()

    With activation checkpointing (use_reentrant=False) the second forward pass is not counted. Reentrant checkpointing,
    which cuts the graph, is refused when its backward pass comes. A compiled model stays one graph. Compiled and
    checkpointed, the numbers are right and the graph breaks at every layer, since the penalty leaves the region that is
    recomputed.

    >>> EntropyPenalty(floor=0.2)
    EntropyPenalty(floor=0.2, ceiling=None, weight=0.1, margin=0.0, layers=None)
    """

    needs_softmax = True
    loss_needs_forward_graph = True

    def __init__(
        self,
        floor: float | None = None,
        ceiling: float | None = None,
        weight: float = 0.1,
        margin: float = 0.0,
        layers: Layers = None,
    ) -> None:
        if floor is None and ceiling is None:
            raise LocaterError(
                "EntropyPenalty: give floor, ceiling or both, as fractions of the largest entropy a row can have"
            )
        low, high = 0.0 if floor is None else floor, 1.0 if ceiling is None else ceiling
        if not (is_number(low) and is_number(high) and 0 <= low <= high <= 1):
            raise LocaterError(
                f"floor={floor}, ceiling={ceiling}: both must be between 0 and 1, the floor not above the ceiling"
            )
        if not (is_number(weight) and weight >= 0):
            raise LocaterError(f"weight={weight!r}: must be a number from 0 on")
        most = (high - low) / 2 if floor is not None and ceiling is not None else 1.0
        if not (is_number(margin) and 0 <= margin <= most):
            raise LocaterError(f"margin={margin!r}: must be from 0 to half of the band")
        self.floor, self.ceiling, self.weight, self.margin, self.layers = floor, ceiling, weight, margin, layers

    def _change(self, controlled: ControlledLayer) -> _PenaltySum:
        if controlled.split.parts > 1:
            raise LocaterError(
                f"{controlled.layer.name}: its heads are split over ranks, and EntropyPenalty is a mean over all of "
                "them: it does not support tensor parallelism; LocAteR does"
            )
        low = None if self.floor is None else self.floor + self.margin
        high = None if self.ceiling is None else self.ceiling - self.margin
        return _PenaltySum(controlled.heads, controlled.device, low, high)

    def loss(self) -> Tensor:
        """The penalty of the forward passes since the last call of `loss` or `after_step`; float32 at least."""
        device = device_of(self.attached)
        total = torch.stack([change.take_total().to(device) for _, change in self._changes]).sum(0)
        return self.weight * total[0] / total[1].clamp_min(1)

    def after_step(self) -> None:
        super().after_step()
        for _, change in self._changes:
            change.take_total()
            change.calls = 0


class _PenaltySum(ForwardChange):
    """Adds up the penalty of its module as (sum of means, number of calls).

    That is one tensor, so that a compiled graph does not depend on the number of calls.
    """

    order = MEASURE

    def __init__(self, heads: Heads, device: torch.device, low: float | None, high: float | None) -> None:
        self.heads, self.low, self.high = heads, low, high
        self.zero = torch.zeros(2, device=device)
        self.total = self.zero
        self.calls = 0  # since the last step; counted only when not compiled

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """A copy of a model goes without it: it changes no output, and a copy has no control to read the penalty."""
        return type(None), ()

    def take_total(self) -> Tensor:
        """The total so far, which then starts again from zero."""
        total, self.total = self.total, self.zero
        return total

    def __call__(self, request: AttentionRequest) -> AttentionRequest:
        if not (request.module.training and torch.is_grad_enabled()):
            return request
        penalty = self._penalty(request)
        if not torch.compiler.is_compiling():
            if in_backward_pass():
                self._refuse_reentrant()
                return request
            self.calls += 1
        self.total = self.total.to(penalty.device) + torch.stack([penalty, torch.ones_like(penalty)])
        return request

    def _penalty(self, request: AttentionRequest) -> Tensor:
        """Mean over the rows that see more than one key."""
        entropy, visible = row_entropy(request.call(), self.heads.kind == "self")
        counted = visible > 1
        ratio = entropy / torch.log(visible.clamp_min(2).to(entropy))
        excess = torch.zeros_like(ratio)
        if self.low is not None:
            excess = excess + torch.relu(self.low - ratio).square()
        if self.high is not None:
            excess = excess + torch.relu(ratio - self.high).square()
        return torch.where(counted, excess, 0.0).sum() / counted.sum().clamp_min(1)

    def _refuse_reentrant(self) -> None:
        if not self.calls:
            raise LocaterError(
                f"{self.heads.name}: EntropyPenalty cannot follow reentrant activation checkpointing: "
                "model.gradient_checkpointing_enable({'use_reentrant': False})"
            )
