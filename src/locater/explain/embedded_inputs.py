"""What the first embedding of a model returns: the input that gradients are taken with respect to.

Token ids have no gradient. The input of a token is its row of the token embedding, before positions are added; the
input of an image's patch is what the patch embedding makes of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.patching import instead
from locater.errors import LocaterError
from locater.explain.attention_record import frozen
from locater.observing.inputs import as_keywords, run_checked

NOT_TOKENS = ("attention_mask", "decoder_attention_mask", "token_type_ids", "position_ids", "labels", "targets")


class EmbeddedInputs:
    """Runs a model from the output of its embeddings. `features` are those of the inputs, by stream."""

    def __init__(self, model: nn.Module, inputs: Mapping[str, Any] | Tensor) -> None:
        self.model = getattr(model, "_orig_mod", model)
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
        with frozen(self.model), self._replaced(features):
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

    def by_token(self, stream: str, x: Tensor, row: int = 0) -> Tensor:
        """Sums over the channels of each token or patch of a tensor that is shaped like the features."""
        # a convolution returns (B, d, rows, columns), every other embedding (B, T, d)
        return x[row].sum(0).flatten() if x.ndim == 4 else x[row].sum(-1)

    @contextmanager
    def _replaced(self, features: Mapping[str, Tensor] | None) -> Iterator[None]:
        met: set[str] = set()
        with ExitStack() as stack:
            for path, module in self.model.named_modules():
                if _embeds(path, module):
                    stack.callback(instead(module, "forward", partial(self._embed, features, met)))
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
