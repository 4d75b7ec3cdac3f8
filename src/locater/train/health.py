"""What is seen of attention during a run, and which layer to name when it fails."""

from __future__ import annotations

import math
from typing import Any

import torch

from locater.probing import observe
from locater.train.data import Batch
from locater.train.model import Transformer


class LastSeen:
    """A sink that keeps the mean entropy of the last observed step, for the live line."""

    entropy: float | None = None

    def write(self, record: dict[str, Any]) -> None:
        if record["kind"] == "step":
            known = [x for row in record["heads"]["entropy"] for x in row if x is not None]
            self.entropy = sum(known) / len(known) if known else None

    def close(self) -> None:
        """Nothing to close."""


@torch.no_grad()
def culprit(model: Transformer, batches: list[Batch]) -> str:
    """The first layer whose logits are not finite on these batches, in words; where all are, the layer with the largest."""
    with observe(model) as seen:
        for inputs, _ in batches:
            model(inputs)
    for row in seen.rows:
        if "nonfinite" in row.flags:
            return f"the logits of {row.name} went first (head {row.head})"
    top = max(seen.rows, key=lambda row: row.max_logit or -math.inf)
    return f"all attention logits are finite, the largest {top.max_logit:.4g} in {top.name} head {top.head}"
