"""EntropyPenalty: keep the entropy of every row of attention inside a band, through the kernels' O(T) gradient.

    penalty = weight * mean of  max(0, floor + margin - r)^2 + max(0, r - ceiling + margin)^2,      r = H / log(keys in sight)

Jha and Reagen (2025) compare the entropy of every row with the log of the context length. Row i of a causal map has at
most log(i + 1), so there early rows are always too low; here each row is compared with the keys it can see. Theirs also
jumps at the margin and is a sum over batch and tokens, so its weight must be tuned anew for every size; this one is
smooth and a mean.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.attention.changes import AttentionRequest
from locater.control.base import Layers, device_of
from locater.control.forward import MEASURE, ControlledLayer, ForwardChange, ForwardControl, Heads
from locater.control.rows import row_entropy
from locater.errors import LocaterError


class EntropyPenalty(ForwardControl):
    """A squared hinge on the entropy ratio of every row outside [floor, ceiling], as part of the loss.

    `margin` begins the pull that far inside the band. Rows of padding and rows that see one key do not count. With
    sinks, entropy is that of the weights as they act. Collected while the model trains with gradients; `loss()` gives
    the mean over all rows, heads and calls since it was last asked, and forgets them, so its size depends neither on
    batch nor length nor number of passes. Gradients go to queries and keys, and through them to other controls; a
    position bias gets none.

    Accumulating gradients, ask in every micro-batch and divide it like the loss:

        ((task_loss + control.loss()) / count).backward()

    With activation checkpointing (use_reentrant=False) the second forward pass is not counted; the reentrant kind,
    which cuts the graph, is refused when its backward pass comes. Compiled, it stays in one graph; compiled and
    checkpointed, the numbers are right and the graph breaks at every layer, since the penalty leaves the region that is
    run again.

    >>> EntropyPenalty(floor=0.2)
    EntropyPenalty(floor=0.2, ceiling=None, weight=0.1, margin=0.0, layers=None)
    """

    penalty_of_forward = True

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
                "EntropyPenalty: give floor, ceiling or both, as parts of the largest entropy a row can have"
            )
        low, high = 0.0 if floor is None else floor, 1.0 if ceiling is None else ceiling
        if not 0 <= low <= high <= 1:
            raise LocaterError(
                f"floor={floor}, ceiling={ceiling}: both between 0 and 1, the floor not above the ceiling"
            )
        if not (weight >= 0 and math.isfinite(weight)):
            raise LocaterError(f"weight={weight}: counts from 0")
        if margin < 0 or (floor is not None and ceiling is not None and 2 * margin > high - low):
            raise LocaterError(f"margin={margin}: from 0 to half of the band")
        self.floor, self.ceiling, self.weight, self.margin, self.layers = floor, ceiling, weight, margin, layers

    def _change(self, place: ControlledLayer) -> ForwardChange:
        low = None if self.floor is None else self.floor + self.margin
        high = None if self.ceiling is None else self.ceiling - self.margin
        return _Collected(place.of, place.device, low, high)

    def loss(self) -> Tensor:
        """The penalty of the forward passes since it was last asked, or since the last step; with its gradients,
        float32 at least.
        """
        device = device_of(self.attached)
        total = torch.stack(
            [change.taken().to(device) for _, change in self._made if isinstance(change, _Collected)]
        ).sum(0)
        return self.weight * total[0] / total[1].clamp_min(1)

    def after_step(self) -> None:
        super().after_step()
        for _, change in self._made:
            assert isinstance(change, _Collected)
            change.taken()
            change.calls = 0


class _Collected(ForwardChange):
    """Adds up what its module does: (sum of means, calls), one tensor, so that a compiled graph need not know how many
    there were.
    """

    order = MEASURE

    def __init__(self, of: Heads, device: torch.device, low: float | None, high: float | None) -> None:
        self.of, self.low, self.high = of, low, high
        self.none = torch.zeros(2, device=device)
        self.total = self.none
        self.calls = 0  # since the last step; only counted where nothing is compiled

    def __reduce__(self) -> tuple[type, tuple[()]]:
        """Nothing, in a copy of a model: it changes no output, and nobody would ask the copy for what it collects."""
        return type(None), ()

    def taken(self) -> Tensor:
        found, self.total = self.total, self.none
        return found

    def __call__(self, asked: AttentionRequest) -> AttentionRequest:
        if not (asked.module.training and torch.is_grad_enabled()):
            return asked
        penalty = self._penalty(asked)
        if not torch.compiler.is_compiling():
            if _again():
                self._refuse_reentrant()
                return asked
            self.calls += 1
        self.total = self.total.to(penalty.device) + torch.stack([penalty, torch.ones_like(penalty)])
        return asked

    def _penalty(self, asked: AttentionRequest) -> Tensor:
        """Mean over the rows that count."""
        entropy, visible = row_entropy(asked.call(), self.of.kind == "self")
        counted = visible > 1
        ratio = entropy / torch.log(visible.clamp_min(2).to(entropy))
        off = torch.zeros_like(ratio)
        if self.low is not None:
            off = off + torch.relu(self.low - ratio).square()
        if self.high is not None:
            off = off + torch.relu(ratio - self.high).square()
        return torch.where(counted, off, 0.0).sum() / counted.sum().clamp_min(1)

    def _refuse_reentrant(self) -> None:
        if not self.calls:
            raise LocaterError(
                f"{self.of.name}: EntropyPenalty cannot follow reentrant activation checkpointing: "
                "model.gradient_checkpointing_enable({'use_reentrant': False})"
            )


def _again() -> bool:
    """Whether this is the second forward pass of activation checkpointing, inside a backward pass."""
    return torch._C._current_graph_task_id() != -1
