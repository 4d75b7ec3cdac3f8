"""How fast a stack of blocks makes tokens equal: residuals by depth, their rate and their order, all measured.

docs/theory.md section 10.
"""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from locater.measures import composite_norm, token_residual
from locater_lab.theory.blocks import Block, hidden_states


def depth_residuals(
    x: Float[Tensor, "tokens width"], blocks: Sequence[Block], centre: str = "mean", relative: bool = False
) -> Float[Tensor, " states"]:
    """||res(X_l)|| at l = 0 ... L (Dong, Cordonnier, Loukas 2021). `relative` divides by ||X_l||, as in their figures.

    A residual below about 1e-15 of the tokens' size is rounding error of float64, or 0. For `centre` see
    `locater.measures.token_residual`.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> pure = Block(torch.eye(2)[None], torch.eye(2)[None], scale=1.0)
    >>> depth_residuals(x, [pure] * 3).log10().round(decimals=1).tolist()
    [0.0, -0.3, -1.3, -4.2]
    >>> with_skip = Block(torch.eye(2)[None], torch.eye(2)[None], scale=1.0, skip=True)
    >>> bool((depth_residuals(x, [with_skip] * 3) >= 1).all())
    True
    """
    states = hidden_states(x, blocks)
    sizes = composite_norm(token_residual(states, centre=centre))
    return sizes / composite_norm(states) if relative else sizes


def contraction_rate(residuals: Float[Tensor, "*n states"]) -> Float[Tensor, "*n layers"]:
    """r_(l+1) / r_l: the share of the residual that is left after one more layer. Below 1 tokens come closer.

    >>> import torch
    >>> contraction_rate(torch.tensor([8.0, 4.0, 1.0])).tolist()
    [0.5, 0.25]
    """
    return residuals[..., 1:] / residuals[..., :-1]


def contraction_order(before: Float[Tensor, "*n sizes"], after: Float[Tensor, "*n sizes"]) -> Float[Tensor, "*n steps"]:
    """d log(after) / d log(before) between neighbouring sizes: the order p of a layer that takes a residual r to C r^p.

    As tokens approach each other, p is 3 for attention without a mask and 1 with a causal mask. Under a mask, queries
    average different sets of keys, so rows of P differ even for equal tokens, and P R is of first order. Measure one
    layer at several sizes: along one trajectory through depth, C differs between layers.

    >>> import torch
    >>> r = torch.tensor([0.1, 0.01, 0.001], dtype=torch.float64)
    >>> contraction_order(r, 5 * r**3).round(decimals=6).tolist()
    [3.0, 3.0]
    """
    return after.log().diff(dim=-1) / before.log().diff(dim=-1)
