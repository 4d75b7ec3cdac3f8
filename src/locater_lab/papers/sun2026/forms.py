"""A SwiGLU MLP as a quadratic form, which it is where its gates are far above 0.

out_k = h^T S_k h with S_k = sum_m W_down[k, m] gate_m up_m^T, as silu(z) is z there. Far below 0 a neuron is shut: size
alone does not make the MLP quadratic.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn


def weights_of(mlp: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up (hidden, width), down (width, hidden), float64."""
    return tuple(mlp.get_parameter(f"{name}_proj.weight").detach().double() for name in ("gate", "up", "down"))  # type: ignore[return-value]


def form(mlp: nn.Module, channel: int) -> Float[Tensor, "width width"]:
    """sym(S_k)."""
    gate, up, down = weights_of(mlp)
    S = torch.einsum("m,ma,mb->ab", down[channel], gate, up)
    return (S + S.mT) / 2


def quadratic(mlp: nn.Module, h: Float[Tensor, "*n width"]) -> Float[Tensor, "*n width"]:
    """The MLP with silu the identity."""
    gate, up, down = weights_of(mlp)
    return ((h.double() @ gate.mT) * (h.double() @ up.mT)) @ down.mT


def form_error(mlp: nn.Module, h: Float[Tensor, "n width"]) -> float:
    """The quadratic MLP beside h^T S_k h, channel by channel."""
    out = quadratic(mlp, h)
    channels = range(0, out.shape[-1], max(1, out.shape[-1] // 8))
    forms = [torch.einsum("na,ab,nb->n", h.double(), form(mlp, k), h.double()) for k in channels]
    return max(float((f - out[:, k]).abs().max() / out[:, k].abs().max()) for f, k in zip(forms, channels, strict=True))


def dominance(S: Float[Tensor, "width width"]) -> float:
    """Largest lambda^2 over their sum: 1 for a form of rank one.

    >>> dominance(torch.diag(torch.tensor([2.0, -1.0, 0.0])))
    0.8
    """
    square = torch.linalg.eigvalsh(S.double()).square()
    return float(square.max() / square.sum())


def alignment(a: Tensor, b: Tensor) -> float:
    """Cosine of two sets of vectors taken as one."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))
