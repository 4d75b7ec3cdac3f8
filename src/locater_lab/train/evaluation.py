"""A model measured on a split of its data: loss, accuracy, and the entropy of its heads."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locater.observing import observe
from locater_lab.models.transformer import Transformer
from locater_lab.train.batches import Data
from locater_lab.train.health import why_unread
from locater_lab.train.measured import SEQUENCES, measure


@dataclass(frozen=True)
class Evaluation:
    """`half` computes in bfloat16 autocast, as training does then."""

    model: Transformer
    data: Data
    device: torch.device
    half: bool

    def autocast(self) -> Any:
        return torch.autocast(self.device.type, torch.bfloat16) if self.half else nullcontext()

    @torch.no_grad()
    def loss_and_accuracy(self, split: str, most: int | None = None) -> tuple[float, float | None]:
        """Mean loss over the targets of a split, and the share of them that the model ranks first; of the first `most`
        sequences, or of all. Targets that are no classes, of a model that denoises, have a squared error and no rank.
        """
        sums: list[tuple[Tensor, ...]] = []  # of each window: loss, targets, and how many are ranked first
        with _evaluating(self.model):
            for inputs, targets in self.data.windows(split, most):
                with self.autocast():
                    logits = self.model(inputs).float().flatten(0, -2)
                if self.model.shape.denoises:
                    error = nn.functional.mse_loss(logits, targets.flatten(0, -2), reduction="sum")
                    sums.append((error, torch.tensor(targets.numel())))
                    continue
                flat = targets.flatten()
                loss = nn.functional.cross_entropy(logits, flat, reduction="sum")
                sums.append((loss, (flat >= 0).sum(), (logits.argmax(-1) == flat).sum()))
        # the device is waited for once, and not after each window
        total, count, *right = (sum(torch.stack(column).tolist()) for column in zip(*sums, strict=True))
        return total / count, right[0] / count if right else None

    def report(self) -> tuple[float, float | None, list[float]]:
        """Loss and accuracy on the report split, and the entropy of each head; none where attention has none."""
        if why_unread(self.model) is not None:
            return *self.loss_and_accuracy("report"), []
        with observe(self.model) as seen:
            loss, accuracy = self.loss_and_accuracy("report")
        return loss, accuracy, [row.entropy for row in seen.rows if row.entropy is not None]

    def measures(self) -> dict[str, Any]:
        """Attention maps and residual stream on the first sequences of the report split."""
        inputs, _ = next(iter(self.data.windows("report", SEQUENCES)))
        with _evaluating(self.model):
            return measure(self.model, inputs)


@contextmanager
def _evaluating(model: Transformer) -> Iterator[None]:
    before = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(before)
