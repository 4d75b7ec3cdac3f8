"""Methods that take gradients with respect to the embedded input: gradient times input, and integrated gradients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.patching import replace_method
from locater.errors import LocaterError
from locater.explain.explanation import Explanation, Target, TargetChoice, choose_target
from locater.explain.recorded_run import Inputs, Run, as_run, without_parameter_gradients
from locater.explain.streams import main_stream
from locater.numerics import upcast
from locater.observing.run_model import as_keywords, run_checked
from locater.torch_private import unwrap_compiled

# What the first embedding of a model returns: the input that gradients are taken with respect to.

NOT_TOKENS = ("attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids", "labels", "targets")


class EmbeddedInputs:
    """Runs a model from the output of its embeddings. `features` are those of the inputs, by stream."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> None:
        self.model = unwrap_compiled(model)
        self.keywords = as_keywords(self.model, inputs)
        self.features: dict[str, Tensor] = {}
        self.names = _names(self.keywords)
        with torch.no_grad():
            self.output = self.run(None)
        if not self.features:
            raise LocaterError(
                f"{type(self.model).__name__}: no embedding of its inputs was found, so there is nothing to take "
                "gradients of: use relevance or rollout"
            )

    def run(self, features: Mapping[str, Tensor] | None) -> Any:
        """The model's output, with these features in the place of its own; None keeps its own and records them."""
        with without_parameter_gradients(self.model), self._replace_embeddings(features):
            return run_checked(self.model, self.keywords, torch.is_grad_enabled())

    def baseline(self, token: int | None) -> dict[str, Tensor]:
        """Features to start from: zeros, or for tokens those of one token id everywhere."""
        zeros = {stream: torch.zeros_like(x) for stream, x in self.features.items()}
        if token is None:
            return zeros
        ids = {name: self.keywords[name] for name in self.names.values() if self.keywords[name].ndim == 2}
        if not ids:
            raise LocaterError(f"baseline={token}: the input has no tokens; leave it out for a baseline of zeros")
        same = {name: torch.full_like(x, token) for name, x in ids.items()}
        there = EmbeddedInputs(self.model, {**self.keywords, **same}).features
        return {stream: there[stream] if self.names[stream] in ids else x for stream, x in zeros.items()}

    @contextmanager
    def _replace_embeddings(self, features: Mapping[str, Tensor] | None) -> Iterator[None]:
        met: set[str] = set()
        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                if _embeds(path, module):
                    stack.callback(replace_method(module, "forward", partial(self._embed, features, met)))
            yield

    def _embed(
        self,
        features: Mapping[str, Tensor] | None,
        met: set[str],
        module: nn.Module,
        forward: Callable[..., Tensor],
        x: Tensor,
        *args: Any,
        **kw: Any,
    ) -> Tensor:
        stream = next((s for s, name in self.names.items() if s not in met and self._is(name, module, x)), None)
        if stream is None:
            return forward(x, *args, **kw)
        met.add(stream)
        if features is not None:
            return features[stream]
        self.features[stream] = forward(x, *args, **kw).detach()
        return self.features[stream]

    def _is(self, name: str, module: nn.Module, x: Tensor) -> bool:
        """Whether a module is called with the input `name`, or with its patches."""
        given = self.keywords[name]
        if isinstance(module, nn.Embedding):
            return (
                not given.is_floating_point()
                and x.numel() == given.numel()
                and bool((x.flatten() == given.to(x.device).flatten()).all())
            )
        return given.ndim == 4 and x.shape[0] == given.shape[0]


def _names(keywords: Mapping[str, Any]) -> dict[str, str]:
    """The inputs that are tokens or pixels, by the name of their stream."""
    tensors = {name: x for name, x in keywords.items() if isinstance(x, Tensor) and name not in NOT_TOKENS}
    pixels = [name for name, x in tensors.items() if x.ndim == 4]
    ids = [name for name, x in tensors.items() if x.ndim == 2 and not x.is_floating_point()]
    decoded = [name for name in ids if name.startswith("decoder_")]
    streams = {
        ("decoder" if name in decoded else "encoder" if decoded else "text" if pixels else "input"): name
        for name in ids
    }
    return streams | {("image" if ids else "input"): name for name in pixels}


def _embeds(path: str, module: nn.Module) -> bool:
    if isinstance(module, nn.Conv2d):
        return tuple(module.kernel_size) == tuple(module.stride) and module.kernel_size[0] > 1
    return isinstance(module, nn.Embedding) or (isinstance(module, nn.Linear) and path.endswith("embed_tokens"))


# The methods.


@torch.inference_mode(False)
def gradient_input(model: nn.Module | Run, inputs: Inputs | None = None, target: TargetChoice = None) -> Explanation:
    """Gradient of the target times the input, summed over channels: exact where the model is linear.

    The input of a token is its embedding, that of a patch what the patch embedding returns.

    >>> from locater_lab.train import Shape, Transformer
    >>> _ = torch.manual_seed(0)
    >>> model = Transformer(Shape(vocabulary=16, layers=1, width=16, heads=2, kv_heads=2, hidden=16), scale=0.3)
    >>> gradient_input(model, torch.arange(6)[None]).scores.shape
    torch.Size([6])
    """
    run = as_run(model, inputs)
    embedded = EmbeddedInputs(run.model, run.keywords)
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
    return _explanation_from("gradient_input", chosen, products, exact, "two forward passes and one backward pass")


@torch.inference_mode(False)
def integrated_gradients(
    model: nn.Module | Run,
    inputs: Inputs | None = None,
    target: TargetChoice = None,
    *,
    steps: int = 50,
    baseline: int | None = None,
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
        raise LocaterError(f"steps={steps}: give at least 1 point of the line from the baseline to the input")
    run = as_run(model, inputs)
    embedded = EmbeddedInputs(run.model, run.keywords)
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
    return _explanation_from("integrated_gradients", chosen, products, exact, how, offset)


def _explanation_from(
    method: str,
    target: Target,
    products: Mapping[str, Tensor],
    exact: str,
    how: str,
    offset: float | None = None,
) -> Explanation:
    scores: dict[str, Any] = {}
    for name, x in products.items():
        row = target.index if len(x) > 1 and name == "text" and target.index is not None else 0
        scores[name] = _sum_by_token(x, row).cpu()
    main = main_stream(list(scores), list(scores))
    return Explanation(
        method, target, scores.pop(main), stream=main, other_streams=scores, offset=offset, exact=exact, how=how
    )


def _sum_by_token(x: Tensor, row: int) -> Tensor:
    """Sums over the channels of each token or patch of a tensor that is shaped like an embedding."""
    # a convolution returns (B, d, rows, columns), every other embedding (B, T, d)
    return x[row].sum(0).flatten() if x.ndim == 4 else x[row].sum(-1)
