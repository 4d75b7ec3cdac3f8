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

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache

import torch
from jaxtyping import Float
from torch import Tensor

from locater.errors import LocaterError
from locater.measures import composite_norm, token_residual

NORM_EPS = 1e-12  # that of BERT: LayerNorm of a token with no spread is 0
STATED = 4.0  # the constant of the paper
STEP = 0.5  # of sums in place of integrals, in logits: e^-e^y is so smooth that six digits are right
LARGEST = 225.0  # variance of logits; beyond it rows are all but one-hot, and what is missing falls as 1 / sqrt v


@dataclass(frozen=True)
class Block:
    """Attention and what stands around it. Weights act from the right: a token is a row.

        Y = sum_h P_h X W_VO,h  (+ X if skip)        LayerNorm if norm        Z = mlp(Y)  (+ Y if mlp_skip)        LayerNorm if norm

    The norms have no gain. `scale` is usually 1 / sqrt(d_head).

    >>> uniform = Block(torch.zeros(1, 2, 2), torch.eye(2)[None], scale=1.0)
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

    def attention(self, x: Float[Tensor, "tokens width"]) -> Float[Tensor, "heads tokens tokens"]:
        """P_h for every head, in float64."""
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
        y = self._normed(y + x if self.skip else y)
        if self.mlp is None:
            return y
        z = self.mlp(y)
        return self._normed(z + y if self.mlp_skip else z)

    def _normed(self, x: Tensor) -> Tensor:
        return torch.nn.functional.layer_norm(x, x.shape[-1:], eps=NORM_EPS) if self.norm else x


# --- what happens -----------------------------------------------------------------------------------------------------


def hidden_states(x: Float[Tensor, "tokens width"], blocks: Sequence[Block]) -> Float[Tensor, "states tokens width"]:
    """The tokens before the first block and after each.

    >>> half = Block(torch.zeros(1, 1, 1), torch.full((1, 1, 1), 0.5), scale=1.0)          # half of the mean
    >>> hidden_states(torch.tensor([[1.0], [3.0]]), [half, half])[..., 0].tolist()
    [[1.0, 3.0], [1.0, 1.0], [0.5, 0.5]]
    """
    states = [x.double()]
    for block in blocks:
        states.append(block(states[-1]))
    return torch.stack(states)


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


# --- what a head keeps ------------------------------------------------------------------------------------------------


def residual_kept(
    variance: Float[Tensor, "*n"] | float, length: Sequence[int] | int, typical: bool = False
) -> Float[Tensor, "*n"]:
    """What a row of attention keeps of the differences between tokens, from the variance v of its logits across T keys.

    A row p takes residuals r_j to sum_j p_j r_j. Where these have nothing to do with the weights, that is sqrt(sum p^2)
    of their size in root mean square: 1 / sqrt T for uniform attention, 1 for a row with one key. For normal logits l,
    with f(t) = E e^(-t x), x = e^l,

        kept^2 = E sum p^2 = T integral t f''(t) f(t)^(T-1) dt

    exactly, at every v and T. It is exp(v) / T where v is well below log T, and tends to 1 - sqrt(2 log T / v) well
    above.

    `typical` is 1 / sqrt(E (1 / sum p^2)), of the mean participation that `observe` measures: a few sharp rows carry
    the mean of sum p^2 and hardly count here, so it is never more. `length` may name the keys of every row, for the
    mean over rows: range(1, T + 1) under a causal mask.

    This is attention alone, with no skip. Weights that depend on content keep more, about F / d more in the square for
    normal tokens in d directions, F the variance of the query-key part; and without a mask the mean over all rows, 1 /
    T in the square, is no residual.

    >>> [round(residual_kept(v, 256).item(), 4) for v in (0.0, 1.0, 4.0, 100.0)]
    [0.0625, 0.1017, 0.2696, 0.8487]
    >>> round(residual_kept(4.0, 256, typical=True).item(), 3)
    0.219
    """
    v = torch.as_tensor(variance, dtype=torch.float64)
    keys = _keys(length)
    found = torch.tensor([_kept_square(x, keys, typical) for x in v.flatten().tolist()], dtype=torch.float64)
    return found.sqrt().reshape(v.shape).to(v.device)


def kept_at_entropy(
    entropy: Float[Tensor, "*n"] | float, length: Sequence[int] | int, typical: bool = False
) -> Float[Tensor, "*n"]:
    """`residual_kept` where the mean entropy H of rows is known, in nats, and not the variance: that of normal logits
    with this entropy.

        E H = integral (e^-t - f^T) dt / t - T integral E[l x e^(-t x)] f^(T-1) dt        log T - v/2 where v is well below 2 log T

    >>> round(kept_at_entropy(math.log(256), 256).item(), 4)
    0.0625
    >>> round(kept_at_entropy(0.0, 256).item(), 4)
    1.0
    """
    H = torch.as_tensor(entropy, dtype=torch.float64)
    known, kept = _entropies(tuple(_keys(length).tolist()), typical)
    at = torch.searchsorted(known, H.cpu().nan_to_num().contiguous()).clamp(1, len(known) - 1)
    share = ((H.cpu() - known[at - 1]) / (known[at] - known[at - 1])).clamp(0, 1)
    return (kept[at - 1] + share * (kept[at] - kept[at - 1])).to(H.device)


@lru_cache(maxsize=64)
def _entropies(keys: tuple[float, ...], typical: bool) -> tuple[Tensor, Tensor]:
    """Entropy of normal logits and what they keep, from one-hot rows to uniform ones."""
    rows, largest = torch.tensor(keys, dtype=torch.float64), math.sqrt(LARGEST)
    # closer where they are small
    spreads = [x * x / largest for x in torch.linspace(largest, 0, 48, dtype=torch.float64).tolist()]
    table = [(0.0, 1.0), *((_entropy(x * x, rows), math.sqrt(_kept_square(x * x, rows, typical))) for x in spreads)]
    return torch.tensor([H for H, _ in table], dtype=torch.float64), torch.tensor(
        [kept for _, kept in table], dtype=torch.float64
    )


def _keys(length: Sequence[int] | int) -> Tensor:
    return torch.as_tensor([length] if isinstance(length, int) else list(length), dtype=torch.float64)


def _kept_square(variance: float, keys: Tensor, typical: bool) -> float:
    """E sum p^2, or 1 / E (1 / sum p^2), mean over rows with so many keys."""
    if not variance < math.inf:
        return 1.0 if variance > 0 else math.nan
    v = min(variance, LARGEST)
    found = float(_participation(v, keys).mean()) if typical else 1 - float(_squares(v, keys).mean())
    beyond = math.sqrt(v / variance) if variance > v else 1.0
    return 1 / (1 + (found - 1) * beyond) if typical else 1 - found * beyond


def _squares(v: float, keys: Tensor) -> Tensor:
    """E sum p^2 for each number of keys: T E[y^2 e^-y] f^(T-1), y = t e^l, over log t."""
    y, weight = _logits(math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    return STEP * keys * ((2 * y - y.exp()).exp() @ weight * _power(f, keys - 1)).sum(-1)


def _participation(v: float, keys: Tensor) -> Tensor:
    """E (sum e^l)^2 / sum e^2l for each number of keys, in the same way with y = t e^2l."""
    y, weight = _logits(2 * math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    one, two = ((k * y - y.exp()).exp() @ weight for k in (0.5, 1.0))
    return (
        STEP
        * keys
        * (two * _power(f, keys - 1) + (keys[:, None] - 1) * one.square() * _power(f, (keys - 2).clamp_min(0))).sum(-1)
    )


def _entropy(v: float, keys: Tensor) -> float:
    """Mean entropy of rows with so many keys, as log of the sum minus the mean logit."""
    y, weight = _logits(math.sqrt(v), float(keys.max()))
    f = torch.log1p((torch.expm1(-y.exp()) @ weight).clamp_min(-1))
    middle = y[:, len(weight) // 2]  # log t
    total = ((-middle.exp()).exp() - _power(f, keys)).sum(-1)
    mean = keys * (((y - middle[:, None]) * (y - y.exp()).exp()) @ weight * _power(f, keys - 1)).sum(-1)
    return STEP * float((total - mean).mean())


def _logits(spread: float, keys: float) -> tuple[Tensor, Tensor]:
    """log t + l for every log t (rows) and normal logit l (columns) of that spread, and the weights of the latter."""
    far = math.sqrt(2 * (2 * math.log(keys) + 36))  # standard deviations: no key of any row is farther out
    count = math.ceil(far * max(1.0, spread) / STEP)
    z = torch.linspace(-far, far, 2 * count + 1, dtype=torch.float64)
    weight = (-z.square() / 2).exp()
    log_t = torch.arange(-math.log(keys) - far * spread - 40, far * spread + 5, STEP, dtype=torch.float64)
    return log_t[:, None] + spread * z, weight / weight.sum()


def _power(log: Tensor, keys: Tensor) -> Tensor:
    """e^(keys log), 1 where keys is 0 and log -inf."""
    return torch.where(keys[:, None] > 0, keys[:, None] * log, 0.0).exp()


# --- what is bounded --------------------------------------------------------------------------------------------------


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
