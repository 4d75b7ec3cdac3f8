"""Whether the heads of a model can be measured, and which layer to blame when a run diverges."""

from __future__ import annotations

import math

import torch

from locater.observing import observe
from locater_lab.mechanisms.registry import why_unmeasurable
from locater_lab.mechanisms.swap import acting_mechanism
from locater_lab.models.transformer import Attention, Transformer
from locater_lab.train.batches import Batch


def why_unread(model: Transformer) -> str | None:
    """Why the heads of a model, with its controls attached, cannot be measured; None where they can."""
    reasons = (
        why_unmeasurable(acting_mechanism(module)) for module in model.modules() if isinstance(module, Attention)
    )
    return next((reason for reason in reasons if reason is not None), None)


@torch.no_grad()
def culprit(model: Transformer, batches: list[Batch]) -> str:
    """Names the first layer whose logits are not finite on these batches; where all are finite, the layer with the
    largest.
    """
    if why_unread(model) is not None:
        return _first_output(model, batches)
    with observe(model) as seen:
        for inputs, _ in batches:
            model(inputs)
    for row in seen.rows:
        if "nonfinite" in row.flags:
            return f"the logits of {row.name} went first (head {row.head})"
    top = max(seen.rows, key=lambda row: row.max_logit or -math.inf)
    return f"all attention logits are finite, the largest {top.max_logit:.4g} in {top.name} head {top.head}"


def _first_output(model: Transformer, batches: list[Batch]) -> str:
    """The same for attention without logits to measure: names the first layer whose output is not finite."""
    wrong: list[str] = []
    hooks = [
        module.register_forward_hook(
            lambda *call, name=name: None if bool(call[-1].isfinite().all()) else wrong.append(name)
        )
        for name, module in model.named_modules()
        if isinstance(module, Attention)
    ]
    try:
        for inputs, _ in batches:
            model(inputs)
    finally:
        for hook in hooks:
            hook.remove()
    return f"the outputs of {wrong[0]} went first" if wrong else "all outputs of attention are finite"
