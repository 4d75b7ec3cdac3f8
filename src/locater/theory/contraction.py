"""How fast a stack of blocks makes tokens equal, measured."""

from __future__ import annotations

from collections.abc import Sequence

from jaxtyping import Float
from torch import Tensor

from locater.measures import composite_norm, token_residual
from locater.theory.blocks import Block, hidden_states


def depth_residuals(
    x: Float[Tensor, "tokens width"], blocks: Sequence[Block], centre: str = "mean", relative: bool = False
) -> Float[Tensor, " states"]:
    """||res(X_l)|| at l = 0 ... L, or, `relative`, its share of ||X_l||, which is what the paper's figures show.

    float64 ends near 1e-15 of the tokens' size: under that a residual is rounding, or 0. Centres:
    `locater.measures.token_residual`.

    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> pure = Block(torch.eye(2)[None], torch.eye(2)[None], scale=1.0)
    >>> depth_residuals(x, [pure] * 3).log10().round(decimals=1).tolist()
    [0.0, -0.3, -1.3, -4.2]
    >>> kept = Block(torch.eye(2)[None], torch.eye(2)[None], scale=1.0, skip=True)
    >>> bool((depth_residuals(x, [kept] * 3) >= 1).all())
    True
    """
    states = hidden_states(x, blocks)
    sizes = composite_norm(token_residual(states, centre=centre))
    return sizes / composite_norm(states) if relative else sizes


def contraction_rate(residuals: Float[Tensor, "*n states"]) -> Float[Tensor, "*n layers"]:
    """r_(l+1) / r_l: what one more layer leaves of the residual. Below 1 tokens come closer.

    >>> contraction_rate(torch.tensor([8.0, 4.0, 1.0])).tolist()
    [0.5, 0.25]
    """
    return residuals[..., 1:] / residuals[..., :-1]


def contraction_order(before: Float[Tensor, "*n sizes"], after: Float[Tensor, "*n sizes"]) -> Float[Tensor, "*n steps"]:
    """d log(after) / d log(before) between neighbours: 3 for attention without mask as tokens approach each other, 1
    with a causal one.

    A layer of order p takes a small residual r to about C r^p. With a mask, queries average different sets of keys, so
    rows of P differ at order zero and P R is of the first. Do not read the order off one trajectory: beta differs
    between layers.

    >>> r = torch.tensor([0.1, 0.01, 0.001], dtype=torch.float64)
    >>> contraction_order(r, 5 * r**3).round(decimals=6).tolist()
    [3.0, 3.0]
    """
    return after.log().diff(dim=-1) / before.log().diff(dim=-1)
