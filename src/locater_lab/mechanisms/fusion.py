"""Layer fusion (Shi et al. 2022), against over-smoothing: the last output is computed from the outputs of all layers.

With H_1 .. H_L the hidden states of L layers (B, T, width):
    concat  H = [H_1 .. H_L] W^T + b, W (width, L width); at first W = [I .. I] / L, the mean
    max     H = max_l H_l, element by element; nothing to learn
    gate    H = sum_l g_l H_l, g = softmax_l(w.H_l) token by token; at first w = 0, the mean
The paper names the three; the softmax over layers is a choice made here. All act on tokens one by one, so the fusion is
as causal as the layers are.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from locater.errors import LocaterError

Fusion = Literal["concat", "max", "gate"]


class LayerFusion(nn.Module):
    """Hidden states of `layers` layers to one; `weights` says what each layer counts for, where that is one number per
    token.
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__()
        if layers < 1:
            raise LocaterError(f"layers={layers}: at least one to fuse")
        self.layers, self.width = layers, width

    def stack_states(self, states: Sequence[Tensor]) -> Tensor:
        """(L, B, T, width), checked."""
        if len(states) != self.layers:
            raise LocaterError(
                f"{len(states)} hidden states for a fusion of {self.layers} layers; "
                "transformers lists the embedding first"
            )
        for state in states:
            if state.shape != states[0].shape or state.shape[-1] != self.width:
                raise LocaterError(
                    f"hidden states of shapes {list(states[0].shape)} and {list(state.shape)}; "
                    f"all (batch, tokens, {self.width})"
                )
        return torch.stack(tuple(states))

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        raise NotImplementedError


class ConcatFusion(LayerFusion):
    """A linear map of all layers' outputs side by side.

    >>> fuse = ConcatFusion(2, 3)
    >>> fuse([torch.zeros(1, 2, 3), torch.ones(1, 2, 3)])[0, 0].tolist(), sum(p.numel() for p in fuse.parameters())
    ([0.5, 0.5, 0.5], 21)
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, width)
        self.weight = nn.Parameter(torch.eye(width).repeat(1, layers) / layers)
        self.bias = nn.Parameter(torch.zeros(width))

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        return nn.functional.linear(torch.cat(self.stack_states(states).unbind(), -1), self.weight, self.bias)


class MaxFusion(LayerFusion):
    """The largest of all layers, element by element.

    >>> MaxFusion(2, 2)([torch.tensor([[[1.0, 5.0]]]), torch.tensor([[[2.0, 4.0]]])])
    tensor([[[2., 5.]]])
    """

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        return self.stack_states(states).amax(0)


class GateFusion(LayerFusion):
    """A mean of layers, weighted token by token.

    >>> fuse, states = GateFusion(3, 4), torch.randn(3, 2, 5, 4)
    >>> torch.allclose(fuse(states.unbind()), states.mean(0), atol=1e-6), fuse.weights(states.unbind()).shape
    (True, torch.Size([3, 2, 5]))
    """

    def __init__(self, layers: int, width: int) -> None:
        super().__init__(layers, width)
        self.weight = nn.Parameter(torch.zeros(width))

    def weights(self, states: Sequence[Tensor]) -> Tensor:
        """softmax_l(w.H_l) (L, B, T)."""
        return (self.stack_states(states) @ self.weight).softmax(0)

    def forward(self, states: Sequence[Tensor]) -> Tensor:
        stacked = self.stack_states(states)
        return (self.weights(states)[..., None] * stacked).sum(0)


def layer_fusion(kind: Fusion, layers: int, width: int) -> LayerFusion:
    """The fusion called `kind`.

    >>> layer_fusion("max", 2, 4)
    MaxFusion()
    """
    known = {"concat": ConcatFusion, "max": MaxFusion, "gate": GateFusion}
    if kind not in known:
        raise LocaterError(f"no layer fusion {kind!r}; there are {', '.join(known)}")
    return known[kind](layers, width)
