"""Rank collapse: attention alone makes tokens equal, with an exponent that triples with every layer (Dong, Cordonnier,
Loukas 2021). Blocks, how fast a stack of them collapses, and bounds.

Tokens are the rows of X = 1 v^T + R, with R the residual. Head h maps X to P_h X W_h, with P_h = softmax(s X Q_h X^T),
Q = W_Q W_K^T and W = W_V W_O. docs/theory.md section 10.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.measures import composite_norm, token_residual
from locater.theory.gaussian_tokens_and_covariance_root import symmetric_root

# ---- A transformer block as a function on tokens, and a stack of such blocks ----


NORM_EPS = 1e-12  # the value of BERT; LayerNorm maps a token whose channels are all equal to 0


@dataclass(frozen=True)
class FunctionalBlock:
    """Attention, then an optional MLP, each with an optional skip and LayerNorm. Weights act from the right.

        Y = sum_h P_h X W_VO,h  (+ X if skip)          then LayerNorm if norm
        Z = mlp(Y)              (+ Y if mlp_skip)      then LayerNorm if norm

    The norms have no gain. `scale` is usually 1 / sqrt(d_head).

    >>> uniform = FunctionalBlock(torch.zeros(1, 2, 2), torch.eye(2)[None], scale=1.0)
    >>> uniform(torch.tensor([[0.0, 2.0], [4.0, 0.0]])).tolist()
    [[2.0, 1.0], [2.0, 1.0]]
    """

    W_QK: Float[Tensor, "heads width width"]
    W_VO: Float[Tensor, "heads width width"]
    scale: float
    skip: bool = False
    mlp: Callable[[Tensor], Tensor] | None = None
    mlp_skip: bool = False
    norm: bool = False
    causal: bool = False

    __repr__ = brief

    def attention(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "heads tokens tokens"]:
        """The attention maps P_h of all heads, in float64."""
        x = x.double()
        logits = self.scale * (x @ self.W_QK.double() @ x.mT)
        if self.causal:
            later = torch.ones_like(logits[0], dtype=torch.bool).triu(1)
            logits = logits.masked_fill(later, -torch.inf)
        return logits.softmax(-1)

    def __call__(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "tokens width"]:
        """The tokens after this block, in float64."""
        x = x.double()
        y = (self.attention(x) @ x @ self.W_VO.double()).sum(0)
        y = self._normalize(y + x if self.skip else y)
        if self.mlp is None:
            return y
        z = self.mlp(y)
        return self._normalize(z + y if self.mlp_skip else z)

    def _normalize(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS) if self.norm else x


def hidden_states(
    x: Float[Tensor, "tokens width"], blocks: Sequence[FunctionalBlock]
) -> Float[Tensor, "states tokens width"]:
    """The tokens before the first block and after each block.

    >>> half = FunctionalBlock(torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.5), scale=1.0)          # half of the mean
    >>> hidden_states(torch.tensor([[1.0], [3.0]]), [half, half])[..., 0].tolist()
    [[1.0, 3.0], [1.0, 1.0], [0.5, 0.5]]
    """
    states = [x.double()]
    for block in blocks:
        states.append(block(states[-1]))
    return torch.stack(states)


# ---- Measured: residuals by depth, their rate and their order ----


def depth_residuals(
    x: Float[Tensor, "tokens width"], blocks: Sequence[FunctionalBlock], centre: str = "mean", relative: bool = False
) -> Float[Tensor, " states"]:
    """||res(X_l)|| at l = 0 ... L (Dong, Cordonnier, Loukas 2021). `relative` divides by ||X_l||, as in their figures.

    A residual below about 1e-15 of the tokens' size is rounding error of float64, or 0. For `centre` see
    `locater.measures.token_residual`.

    >>> import torch
    >>> x = torch.tensor([[1.0, 0.0], [0.0, 1.0]])
    >>> pure = FunctionalBlock(torch.eye(2)[None], torch.eye(2)[None], scale=1.0)
    >>> depth_residuals(x, [pure] * 3).log10().round(decimals=1).tolist()
    [0.0, -0.3, -1.3, -4.2]
    >>> with_skip = FunctionalBlock(torch.eye(2)[None], torch.eye(2)[None], scale=1.0, skip=True)
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


# ---- Bounds on the residual ----
# Adding a constant to a row of logits changes nothing, so P = softmax(1 b^T + s R Q R^T). All queries therefore weigh the
# keys alike up to terms of second order in R, and the rows of P R are equal up to terms of third order. Sizes are
# measured by `composite_norm`; beta is an upper bound of ||Q||_1 ||W|| over all heads and layers.
#
# `attention_bound` and `skip_bound` are as the paper states them. They are loose, and their constant 4 is proved here
# only for up to 8 tokens; `layer_bound` is proved for any number. Skips end the collapse, and so do masks, where the
# order is 1 and not 3.


STATED = 4.0  # the constant in the paper's bounds


def beta(
    W_QK: Float[Tensor, "*n width width"], W_VO: Float[Tensor, "*n width width"], apart: bool = False
) -> Float[Tensor, ""]:
    """The largest ||W_QK||_1 ||W_VO||_{1,inf} over all heads and layers.

    With several heads a bound has to add ||.||_1 and ||.||_inf over heads separately, because `composite_norm` has no
    triangle inequality. `apart` therefore takes the largest ||W_QK||_1 ||W_VO||_1 and the largest
    ||W_QK||_1 ||W_VO||_inf, possibly of different heads, and returns the root of their product. It is never smaller,
    it is the same for one head, and the proof for more than one head needs it.

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
    """lambda = slope ||W_in|| ||W_out||: ||res(mlp(X))|| <= lambda ||res(X)|| for mlp(x) = act(x W_in + a) W_out + b.

    `slope` is the largest slope of the activation: 1 for ReLU and tanh, 1.13 for GELU. The residual is the smallest one
    over all 1 v^T.

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
    """Upper bound on the residual after L layers of H heads without skips or masks (Dong, Cordonnier, Loukas 2021).

        ||res(X_L)|| <= c^((3^L - 1)/2) ||res(X)||^(3^L) = r (||res(X)|| / r)^(3^L)

        c = 4 beta H s lambda,   r = 1 / sqrt c

    lambda is `lipschitz`, the Lipschitz constant of the MLPs; 1 stands for no MLP. The bound is below ||res(X)|| only
    where ||res(X)|| < r. The constant 4 is the paper's. For n tokens sqrt(2 n) can be proved (`layer_bound`), hence 4
    for n <= 8, with the smallest residual over all 1 v^T and beta `apart`. There are inputs of 8,001 tokens and more
    for which 4 is too small. The place of lambda is quoted from memory of the paper; it follows from one layer at a
    time.

    `log` returns the logarithm, because 3^L leaves the range of float64 after a few layers.

    >>> round(attention_bound(0.1, beta=1.0, scale=1.0).item(), 12)
    0.004
    >>> attention_bound(0.1, beta=1.0, scale=1.0, depth=4, log=True).round().item()
    -131.0
    """
    r = torch.as_tensor(residual, dtype=torch.float64)
    c = torch.as_tensor(constant * scale * heads * lipschitz * beta, dtype=torch.float64, device=r.device)
    bound = torch.special.xlogy((3.0**depth - 1) / 2, c) + 3.0**depth * r.log()
    return bound if log else bound.exp()


def skip_bound(
    residual: Float[Tensor, "*n"] | float,
    beta: Float[Tensor, ""] | float,
    scale: float,
    depth: int = 1,
    heads: int = 1,
    constant: float = STATED,
    log: bool = False,
) -> Float[Tensor, "*n"]:
    """`attention_bound` for layers with skips, X + sum_h P_h X W_h: the largest term over 0 <= l <= L.

        max_l (8 beta H s)^((3^l - 1)/2) (2 H)^(3^l (L - l)) ||res(X)||^(3^l)

    The term l = 0 is linear in ||res(X)||, so no collapse follows. The constants are quoted from memory of the paper.
    They follow from r' <= r + c r^3 <= 2 max(r, c r^3) with c = 4 beta H s, which needs only 2 in place of 2 H. No
    bound below ||res(X)|| can hold for all weights: W_VO = 0 leaves X unchanged at every depth.

    >>> round(skip_bound(0.01, beta=1.0, scale=1.0, depth=3).item(), 12)
    0.08
    """
    r = torch.as_tensor(residual, dtype=torch.float64)
    c = torch.as_tensor(2 * constant * scale * heads * beta, dtype=torch.float64, device=r.device)
    per_layer = torch.log(torch.tensor(2.0 * heads, dtype=torch.float64)).to(r.device)
    terms = [
        torch.special.xlogy((3.0**visited - 1) / 2, c) + 3.0**visited * ((depth - visited) * per_layer + r.log())
        for visited in range(depth + 1)
    ]
    bound = torch.stack(terms).amax(0)
    return bound if log else bound.exp()


def layer_bound(x: Float[Tensor, "tokens width"], block: FunctionalBlock, centre: str = "mean") -> Float[Tensor, ""]:
    """A proved bound on the smallest residual of sum_h P_h X W_h, computed from the attention maps themselves.

    Only the attention of the block is used, not its skip, MLP or norms. Let b be the weights of a query at the centre
    and e = s ||Q||_1 ||R||^2, which bounds all |s R_i Q R_j^T|. Then sum_j |P_ij - b_j| <= e and
    |P_ij - b_j| <= 2 e max(P_ij, b_j). Hence, with g = max_j sum_i max(P_ij, b_j), between 1 and n,

        ||res||_inf <= sum_h e_h ||R||_inf ||W_h||_inf        ||res||_1 <= sum_h 2 g_h e_h ||R||_1 ||W_h||_1

    For one head this gives sqrt(2 g) beta s ||R||^3. g is the total weight on the key with the most weight; it is 1
    where attention is doubly stochastic.

    >>> block = FunctionalBlock(torch.eye(2)[None], torch.eye(2)[None], scale=1.0)
    >>> proved = layer_bound(torch.tensor([[0.1, 0.0], [0.0, 0.1]]), block)
    >>> bool(proved < attention_bound(0.1, beta=1.0, scale=1.0))
    True
    """
    if block.causal or centre == "svd":
        raise LocaterError(
            "layer_bound needs attention without a mask and a centre that all tokens share: use mean or midrange"
        )
    x = x.double()
    rest = token_residual(x, centre=centre)
    middle = (x - rest)[:1]
    shared = (block.scale * (middle @ block.W_QK.double() @ x.mT)).softmax(-1)  # (heads, 1, tokens)
    load = torch.maximum(block.attention(x), shared).sum(-2).amax(-1)
    e = block.scale * _columns(block.W_QK) * composite_norm(rest).square()
    columns, rows = (2 * load * e * _columns(block.W_VO)).sum(), (e * _rows(block.W_VO)).sum()
    return columns.sqrt() * rows.sqrt() * composite_norm(rest)


def _columns(x: Float[Tensor, "*n rows columns"]) -> Float[Tensor, "*n"]:
    """||.||_1, the largest column abs-sum."""
    return x.double().abs().sum(-2).amax(-1)


def _rows(x: Float[Tensor, "*n rows columns"]) -> Float[Tensor, "*n"]:
    """||.||_inf, the largest row abs-sum."""
    return x.double().abs().sum(-1).amax(-1)


@dataclass(frozen=True)
class Walks:
    """Averages over simulated walks, per position i = 1 ... T of the key."""

    propagated: Float[Tensor, " T"]  # share of walks in which token i is in the linear part of clipped softmax
    clipped: Float[Tensor, " T"]  # mean of clip((1 + delta_i)/T, 0, 1)
    softmax: Float[Tensor, " T"]  # mean of the true softmax weight
    error: Float[Tensor, " T"]  # standard error of `propagated`
    walks: int

    __repr__ = brief


def simulate(
    W_Q: Float[Tensor, "h d"],
    W_K: Float[Tensor, "h d"],
    scale: float,
    length: int,
    walks: int = 20_000,
    covariance: Float[Tensor, "d d"] | None = None,
    seed: int = 0,
    chunk: int = 2_000,
) -> Walks:
    """Draw walks x_1 ... x_T with step covariance C/T and apply the head to the last token, with both softmaxes.

    >>> W = torch.eye(4)
    >>> averages = simulate(W, W, scale=1.0, length=8, walks=2000)
    >>> bool(averages.softmax[-1] > averages.softmax[0])
    True
    """
    generator = torch.Generator().manual_seed(seed)
    d = W_Q.shape[-1]
    q, k = W_Q.double(), W_K.double()
    root = None if covariance is None else symmetric_root(covariance.double())
    total = torch.zeros(3, length, dtype=torch.float64)
    for start in range(0, walks, chunk):
        n = min(chunk, walks - start)
        steps = torch.randn(n, length, d, dtype=torch.float64, generator=generator)
        steps = steps if root is None else steps @ root.mT
        query = scale / length * (steps.sum(1) @ q.mT @ k)  # (n, d): the last token through q and k, for a step to meet
        omega = (steps @ query[..., None])[..., 0].cumsum(1)  # logits add up along a walk as its steps do
        delta = omega - omega.mean(1, keepdim=True)
        total[0] += ((delta > -1) & (delta < length - 1)).double().sum(0)
        total[1] += ((1 + delta) / length).clamp(0, 1).sum(0)
        total[2] += omega.softmax(1).sum(0)
    propagated, clipped, softmax = total / walks
    error = (propagated * (1 - propagated) / walks).sqrt()
    return Walks(propagated, clipped, softmax, error, walks)
