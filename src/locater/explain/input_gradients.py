"""Methods that take gradients with respect to the embedded input: gradient times input, and integrated gradients."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.explain.attention_flow import Inputs
from locater.explain.embedded_inputs import EmbeddedInputs
from locater.explain.explanation import Explanation
from locater.explain.streams import main_stream
from locater.explain.targets import Target, TargetChoice, choose_target
from locater.numerics import upcast


@torch.inference_mode(False)
def gradient_input(model: nn.Module, inputs: Inputs, target: TargetChoice = None) -> Explanation:
    """Gradient of the target times the input, summed over channels: exact where the model is linear.

    The input of a token is its embedding, that of a patch what the patch embedding returns.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=16, layers=1, width=16, heads=2, kv_heads=2, hidden=16), scale=0.3)
    >>> gradient_input(model, torch.arange(6)[None]).scores.shape
    torch.Size([6])
    """
    embedded = EmbeddedInputs(model, inputs)
    chosen = choose_target(embedded.output, target)
    features = {name: x.clone().requires_grad_(True) for name, x in embedded.features.items()}
    with torch.enable_grad():
        number = chosen.number(embedded.run(features))
        slopes = torch.autograd.grad(number, list(features.values()), allow_unused=True)
    products = {
        name: torch.zeros_like(x) if slope is None else upcast(slope) * upcast(x.detach())
        for (name, x), slope in zip(features.items(), slopes, strict=True)
    }
    exact = "first order around the input: scores add up to the target only where the model is linear in its embeddings"
    return _explained("gradient_input", embedded, chosen, products, exact, "two forward passes and one backward pass")


@torch.inference_mode(False)
def integrated_gradients(
    model: nn.Module, inputs: Inputs, target: TargetChoice = None, *, steps: int = 50, baseline: int | None = None
) -> Explanation:
    """Gradients integrated along the line from a baseline to the input, times their difference (Sundararajan, Taly and
    Yan 2017), by captum with `steps` Gauss-Legendre points. The baseline is a zero embedding, or that of the token id
    `baseline`. Scores add up to the target less its value there, but for the gap that `exact` states.
    """
    try:
        from captum.attr import IntegratedGradients
    except ImportError:
        raise LocaterError("integrated_gradients needs captum: pip install 'locater[explain]'") from None
    if not isinstance(steps, int) or steps < 1:
        raise LocaterError(f"steps={steps}: at least 1 point of the line from zero to the input")
    embedded = EmbeddedInputs(model, inputs)
    chosen, names = choose_target(embedded.output, target), list(embedded.features)

    def number(*features: Tensor) -> Tensor:  # each with an axis of length 1 in front, which captum takes for a batch
        return chosen.number(embedded.run({name: x[0] for name, x in zip(names, features, strict=True)}))[None]

    whole = tuple(x[None] for x in embedded.features.values())
    start = tuple(x[None] for x in embedded.baseline(baseline).values())
    with torch.enable_grad():
        integrated = IntegratedGradients(number, multiply_by_inputs=True).attribute(
            whole, start, n_steps=steps, method="gausslegendre", internal_batch_size=1
        )
    with torch.no_grad():
        offset = float(number(*start))
    products = {name: x[0].detach() for name, x in zip(names, integrated, strict=True)}
    gap = chosen.value - offset - float(sum(x.sum() for x in products.values()))
    exact = f"scores add up to the target less its value at the baseline, {offset:.4g}, but for a gap of {gap:.1e}"
    how = f"captum, {steps} forward and backward passes"
    return _explained("integrated_gradients", embedded, chosen, products, exact, how, offset)


def _explained(
    method: str,
    embedded: EmbeddedInputs,
    target: Target,
    products: Mapping[str, Tensor],
    exact: str,
    how: str,
    offset: float | None = None,
) -> Explanation:
    scores: dict[str, Any] = {}
    for name, x in products.items():
        row = target.index if len(x) > 1 and name == "text" and target.index is not None else 0
        scores[name] = embedded.by_token(name, x, row).cpu()
    main = main_stream(list(scores), list(scores))
    return Explanation(
        method, target, scores.pop(main), stream=main, other_streams=scores, offset=offset, exact=exact, how=how
    )
