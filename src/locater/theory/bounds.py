"""Rank collapse: attention alone makes tokens equal, at a rate that triples its exponent with every layer (Dong,
Cordonnier, Loukas 2021).

Tokens are rows, X = 1 v^T + R, and head h maps X to P_h X W_h with P_h = softmax(s X Q_h X^T), Q = W_Q W_K^T, W = W_V
W_O. Rows of logits may be shifted, so P = softmax(1 b^T + s R Q R^T): queries see the keys alike but for a term of
second order in R, and P R is equal over rows but for one of third order. Sizes are `composite_norm`, beta is what
||Q||_1 ||W|| does not exceed, no mask anywhere.

The bounds are as stated there. They are loose, and the constant 4 has not been proved for more than 8 tokens: see
`layer_bound`, which is. Skips end the collapse; so do masks (the order is then 1, not 3). docs/theory.md section 10.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import LocaterError
from locater.measures import composite_norm, token_residual
from locater.theory.blocks import Block

STATED = 4.0  # the constant of the paper


def beta(
    W_QK: Float[Tensor, "*n width width"], W_VO: Float[Tensor, "*n width width"], apart: bool = False
) -> Float[Tensor, ""]:
    """The largest ||W_QK||_1 ||W_VO||_{1,inf} over all heads and layers given.

    Bounds of several heads add ||.||_1 and ||.||_inf over heads one by one, and `composite_norm` has no triangle
    inequality. `apart` takes the largest ||W_QK||_1 ||W_VO||_1 and the largest ||W_QK||_1 ||W_VO||_inf, perhaps of
    different heads, and the root of their product: never smaller, the same for one head, and what the proof for H > 1
    needs.

    >>> Q, W = torch.eye(2).expand(2, 2, 2), torch.tensor([[[1.0, 0.0], [1.0, 0.0]], [[1.0, 1.0], [0.0, 0.0]]])
    >>> [round(beta(Q, W, apart).item() ** 2, 6) for apart in (False, True)]
    [2.0, 4.0]
    """
    key = _columns(W_QK)
    if apart:
        return ((key * _columns(W_VO)).amax() * (key * _rows(W_VO)).amax()).sqrt()
    return (key * composite_norm(W_VO)).amax()


def mlp_lipschitz(
    W_in: Float[Tensor, "width hidden"], W_out: Float[Tensor, "hidden width"], slope: float = 1.0
) -> Float[Tensor, ""]:
    """A lambda with ||res(mlp(X))|| <= lambda ||res(X)|| for x -> act(x W_in + a) W_out + b: slope ||W_in|| ||W_out||.

    `slope` is the steepest of the activation: 1 for ReLU and tanh, 1.13 for GELU. The residual is the best one, over
    all 1 v^T.

    >>> mlp_lipschitz(2 * torch.eye(3), torch.eye(3)).item()
    2.0
    """
    return slope * composite_norm(W_in) * composite_norm(W_out)


def attention_bound(
    residual: Float[Tensor, "*n"] | float,
    beta: Float[Tensor, ""] | float,
    scale: float,
    depth: int = 1,
    heads: int = 1,
    lipschitz: Float[Tensor, ""] | float = 1.0,
    constant: float = STATED,
    log: bool = False,
) -> Float[Tensor, "*n"]:
    """Residual after L layers of H heads, without skips or masks, with MLPs that are `lipschitz` (1: none).

        ||res(X_L)|| <= c^((3^L - 1)/2) ||res(X)||^(3^L) = r (||res(X)|| / r)^(3^L)        c = 4 beta H s lambda,  r = 1 / sqrt c

    It says something only where ||res(X)|| < r. The constant 4 is the paper's. We can prove sqrt(2 n) for n tokens
    (`layer_bound`), hence 4 for n <= 8, for the best residual over all 1 v^T and with beta `apart`; there are inputs of
    8,001 tokens and more on which 4 is too small. The place of lambda is from memory of the paper; it follows from one
    layer at a time.

    `log` gives the logarithm: 3^L leaves the range of float64 after a few layers.

    >>> round(attention_bound(0.1, beta=1.0, scale=1.0).item(), 12)
    0.004
    >>> attention_bound(0.1, beta=1.0, scale=1.0, depth=4, log=True).round().item()
    -131.0
    """
    r = torch.as_tensor(residual, dtype=torch.float64)
    c = torch.as_tensor(constant * scale * heads * lipschitz * beta, dtype=torch.float64, device=r.device)
    found = torch.special.xlogy((3.0**depth - 1) / 2, c) + 3.0**depth * r.log()
    return found if log else found.exp()


def skip_bound(
    residual: Float[Tensor, "*n"] | float,
    beta: Float[Tensor, ""] | float,
    scale: float,
    depth: int = 1,
    heads: int = 1,
    constant: float = STATED,
    log: bool = False,
) -> Float[Tensor, "*n"]:
    """The same with skips, X + sum_h P_h X W_h: the largest over 0 <= l <= L, where l = 0 does not vanish with
    ||res(X)||^3.

        max_l (8 beta H s)^((3^l - 1)/2) (2 H)^(3^l (L - l)) ||res(X)||^(3^l)

    Constants are from memory of the paper. They follow from r' <= r + c r^3 <= 2 max(r, c r^3) with c = 4 beta H s,
    which needs 2 in the place of 2 H. Nothing under ||res(X)|| could bound them all: W_VO = 0 leaves X as it is at
    every depth.

    >>> round(skip_bound(0.01, beta=1.0, scale=1.0, depth=3).item(), 12)
    0.08
    """
    r = torch.as_tensor(residual, dtype=torch.float64)
    c = torch.as_tensor(2 * constant * scale * heads * beta, dtype=torch.float64, device=r.device)
    terms = [
        torch.special.xlogy((3.0**visited - 1) / 2, c)
        + 3.0**visited
        * ((depth - visited) * torch.log(torch.tensor(2.0 * heads, dtype=torch.float64)).to(r.device) + r.log())
        for visited in range(depth + 1)
    ]
    found = torch.stack(terms).amax(0)
    return found if log else found.exp()


def layer_bound(x: Float[Tensor, "tokens width"], block: Block, centre: str = "mean") -> Float[Tensor, ""]:
    """A proved bound on the best residual of sum_h P_h X W_h, from the attention itself. Only attention: the rest of
    the block is not used.

    With e = s ||Q||_1 ||R||^2, which no |s R_i Q R_j^T| exceeds, b the weights of a query at the centre, sum_j |P_ij - b_j| <= e and
    |P_ij - b_j| <= 2 e max(P_ij, b_j). Hence, with g = max_j sum_i max(P_ij, b_j), between 1 and n,

        ||res||_inf <= sum_h e_h ||R||_inf ||W_h||_inf        ||res||_1 <= sum_h 2 g_h e_h ||R||_1 ||W_h||_1

    For one head that is sqrt(2 g) beta s ||R||^3 in all. g is the load of the busiest key, 1 where attention is doubly
    stochastic.

    >>> block = Block(torch.eye(2)[None], torch.eye(2)[None], scale=1.0)
    >>> layer_bound(torch.tensor([[0.1, 0.0], [0.0, 0.1]]), block).item() < attention_bound(0.1, beta=1.0, scale=1.0).item()
    True
    """
    if block.causal or centre == "svd":
        raise LocaterError(
            "layer_bound is for attention without a mask, and a centre that all tokens share: mean or midrange"
        )
    x = x.double()
    rest = token_residual(x, centre=centre)
    middle = (x - rest)[:1]
    shared = (block.scale * (middle @ block.W_QK.double() @ x.mT)).softmax(-1)  # (heads, 1, tokens)
    load = torch.maximum(block.attention(x), shared).sum(-2).amax(-1)
    e = block.scale * _columns(block.W_QK) * composite_norm(rest).square()
    return (
        (2 * load * e * _columns(block.W_VO)).sum().sqrt() * (e * _rows(block.W_VO)).sum().sqrt() * composite_norm(rest)
    )


def _columns(x: Tensor) -> Tensor:
    """||.||_1, the largest column abs-sum."""
    return x.double().abs().sum(-2).amax(-1)


def _rows(x: Tensor) -> Tensor:
    """||.||_inf, the largest row abs-sum."""
    return x.double().abs().sum(-1).amax(-1)
