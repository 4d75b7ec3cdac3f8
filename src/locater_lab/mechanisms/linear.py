"""Attention of linear cost by features: linear attention (Katharopoulos et al. 2020), Fastmax (Gerami et al. 2024), and
how any map with finitely many features is applied without its matrix.

A_ij = f_ij / sum_j' f_ij' with f_ij = phi(q_i).phi(k_j) >= 0, so sum_j f_ij v_j = phi(q_i)^T sum_j phi(k_j) v_j^T: one
matrix of sums, of a size that does not grow with T, is read by every query. Causal: every chunk of tokens reads the
sums of those before it, and inside a chunk f is written out.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional

from locater.errors import LocaterError
from locater.kernels.dispatch import runs_on_kernel
from locater_lab.mechanisms.kernels.weighted import has_weighted_kernel
from locater_lab.mechanisms.mechanism_record import Inputs, unit_length, widen

CHUNK = 128  # tokens
Features = Callable[[Tensor], Tensor]  # (..., n, D) to (..., n, F)
Kernel = Callable[[Tensor, Tensor], Tensor]  # (..., n, D), (..., m, D) to (..., n, m)


def linear_attention(x: Inputs) -> Tensor:
    """phi(x) = elu(x) + 1 of scale q and of k; the scale is 1 unless given.

    >>> from locater_lab.mechanisms import mechanism
    >>> k = torch.tensor([[[[0.0, 0.0], [1.0, 3.0]]]])         # phi(k) sums to 2 and 6
    >>> mechanism("linear").map(torch.zeros(1, 1, 1, 2), k)
    tensor([[[[0.2500, 0.7500]]]])
    """
    if has_feature_kernel(x.q, x.v):
        return feature_kernel_attention(x, x.scale_or(1.0), unit=False)
    q, k, v, keep = x.grouped_by_key_head()
    q, k = elu_features(q * x.scale_or(1.0)), elu_features(k)
    return attend_with_features(q, k, v, keep, lambda y: y, _dot, x).to(x.v.dtype)


def feature_kernel_attention(x: Inputs, scale: float, unit: bool) -> Tensor:
    """By kernels that read q, k and v as they are; `unit` for 1 + x of vectors of length 1."""
    keys = x.real_keys()
    return feature_attention(
        x.q, x.k, x.v, scale=scale, unit=unit, keys=None if keys is None else keys[:, :, 0], causal=x.causal
    )


def linear_map(x: Inputs) -> Tensor:
    q, k = elu_features(widen(x.q) * x.scale_or(1.0)), elu_features(widen(x.per_query_head(x.k)))
    return kernel_map(x, _dot(q, k))


def elu_features(x: Tensor) -> Tensor:
    """elu(x) + 1, which is exp(x) below 0; that form keeps its digits.

    >>> elu_features(torch.tensor([-40.0, 0.0, 2.0]))
    tensor([4.2484e-18, 1.0000e+00, 3.0000e+00])
    """
    return torch.where(x > 0, x + 1, x.clamp_max(0).exp())


def _dot(q: Tensor, k: Tensor) -> Tensor:
    return q @ k.mT


def attend_with_features(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, features: Features, kernel: Kernel, x: Inputs
) -> Tensor:
    """sum_j f_ij v_j / sum_j f_ij (B, H, T, E), zero where the sum of weights is. q, k, v, keep are as `Inputs.grouped_by_key_head`
    gives them.

    `kernel(q, k)` is f written out, for the chunks on the diagonal; it must equal features(q) features(k)^T.
    """
    v = functional.pad(v, (0, 1), value=1.0)  # the last column sums up the weights
    if keep is not None:
        v = v * keep
    number = features(k[..., :0, :]).shape[-1]
    if number <= 2 * CHUNK:
        sums = _sums_by_chunk(q, k, v, features, kernel, x)
    else:  # a GPU waits for the next operation to be launched, a CPU for its memory
        sums = _sums_in_sequence(q, k, v, features, kernel, x, number if q.device.type == "cuda" else CHUNK)
    sums = sums.flatten(1, 2)
    size = x.v.shape[3]
    weight = sums[..., size:]
    none = weight <= 0
    return (sums[..., :size] / weight.masked_fill(none, 1.0)).masked_fill(none, 0.0)


def _sums_by_chunk(q: Tensor, k: Tensor, v: Tensor, features: Features, kernel: Kernel, x: Inputs) -> Tensor:
    """sum_j f_ij v_j with a matrix of sums for each chunk: of few features all of them together are smaller than the
    operands.
    """
    past = x.S - x.T if x.causal else x.S  # keys that every query sees
    state = features(k[..., :past, :]).mT @ v[..., :past, :]  # (..., F, E + 1)
    if not x.causal:
        return features(q) @ state
    chunk = min(CHUNK, x.T)
    short = -x.T % chunk
    q, k, v = (
        functional.pad(y, (0, 0, 0, short)).unflatten(-2, (-1, chunk)) for y in (q, k[..., past:, :], v[..., past:, :])
    )
    own = features(k).mT @ v  # (..., N, F, E + 1)
    before = (
        torch.cat([torch.zeros_like(own[..., :1, :, :]), own[..., :-1, :, :].cumsum(-3)], -3) + state[..., None, :, :]
    )
    sums = features(q) @ before + kernel(q, k).tril() @ v
    return sums.flatten(-3, -2)[..., : x.T, :]


def _sums_in_sequence(
    q: Tensor, k: Tensor, v: Tensor, features: Features, kernel: Kernel, x: Inputs, chunk: int
) -> Tensor:
    """The same, one chunk after the other: of many features one matrix of sums is all that is kept.

    Writing f out inside a chunk is cheap beside the features as long as there are more of these than tokens in it."""
    T, S = x.T, x.S
    past = S - T if x.causal else S
    state = features(k[..., :0, :]).mT @ v[..., :0, :]  # (..., F, E + 1), zeros
    for at in range(0, past, chunk):
        some = slice(at, min(at + chunk, past))
        state = state + features(k[..., some, :]).mT @ v[..., some, :]
    out = []
    for at in range(0, T, chunk):
        queries = q[..., at : at + chunk, :]
        sums = features(queries) @ state
        if x.causal:
            some = slice(past + at, min(past + at + chunk, S))
            sums = sums + kernel(queries, k[..., some, :]).tril() @ v[..., some, :]
            state = state + features(k[..., some, :]).mT @ v[..., some, :]
        out.append(sums)
    return torch.cat(out, -2)


def kernel_map(x: Inputs, scores: Tensor) -> Tensor:
    """f_ij / sum_j f_ij over the keys in view: the explicit, quadratic form."""
    scores = scores.masked_fill(~x.visible(), 0.0)
    weight = scores.sum(-1, keepdim=True)
    return scores / weight.masked_fill(weight <= 0, 1.0)


# ---- Fastmax (Gerami et al. 2024): the exponential of softmax replaced by its Taylor polynomial, which factorises ----
# f(x) = 1 + x (order 1) or 1 + x + x^2 / 2 (order 2) with x = q.k, A_ij = f(x_ij) / sum_j' f(x_ij'). Order 2 is at least
# 1/2 everywhere; order 1 needs |x| <= 1, or weights turn negative. With |x| <= 1 no weight of order 2 exceeds 5 / (n + 4)
# among n keys: normalised Fastmax cannot localise.
#
# At order 2 there are F = 1 + D + D (D + 8) / 2 features: they take T F numbers per head, and their sums F E. A GPU
# therefore computes f itself, tile by tile, unless the sequence is very long; order 1 is linear attention with D + 1
# features.


Norm = Literal["token", "sequence"]
# Keys up to which a GPU writes the polynomial out, tile by tile, sooner than it sums up features: for heads of 64 on an
# H200 both take as long at 225,000 tokens, at 450,000 if causal.
LONGEST = 262_144


def fastmax_attention(x: Inputs, *, order: int = 2, norm: Norm | None = "token") -> Tensor:
    """`norm` bounds |q.k| by 1 before the scale (1 unless given).

    "token" divides each query and key by its length. "sequence" takes off the mean over tokens and divides by the
    largest length: what a token becomes depends on the others, so it is for encoders. None leaves them; the scale is
    then 1 / sqrt(D) unless given.

    >>> from locater_lab.mechanisms import mechanism
    >>> q, k = 100 * torch.randn(1, 1, 1, 4), torch.randn(1, 1, 46, 4)
    >>> bool(mechanism("fastmax").map(q, k).max() <= 0.1)                   # 5 / (46 + 4), whatever the queries
    True
    """
    scale = _fastmax_scale(x, order, norm)
    if norm == "sequence":  # masks may differ by query head, and means with them
        x = replace(x, k=x.per_query_head(x.k), v=x.per_query_head(x.v))
    if order == 1 and norm == "token" and has_feature_kernel(x.q, x.v):
        return feature_kernel_attention(x, scale, unit=True)
    if norm != "sequence" and x.S <= LONGEST and has_weighted_kernel(x.q, x.v):
        keys = x.real_keys()
        seen = None if keys is None else keys[:, :, 0]
        return polynomial_attention(
            x.q, x.k, x.v, scale=scale, order=order, unit=norm == "token", keys=seen, causal=x.causal
        )
    q, k = _fastmax_operands(x, scale, norm)
    _, _, v, keep = x.grouped_by_key_head()
    q, k = q.unflatten(1, (k.shape[1], -1)), k[:, :, None]
    return attend_with_features(
        q, k, v, keep, partial(taylor_features, order=order), partial(_polynomial_weights, order=order), x
    ).to(x.v.dtype)


def fastmax_map(x: Inputs, *, order: int = 2, norm: Norm | None = "token") -> Tensor:
    q, k = _fastmax_operands(replace(x, k=x.per_query_head(x.k)), _fastmax_scale(x, order, norm), norm)
    return kernel_map(x, _polynomial_weights(q, k, order))


def taylor_features(x: Tensor, order: int) -> Tensor:
    """Numbers whose products sum up to f(q.k): 1, x_a, and at order 2 the products x_a x_b.

    x^2 / 2 is half the sum over all pairs (a, b): pairs in different blocks of 8 channels are taken once, those of one
    block in both orders and by 1 / sqrt(2).

    >>> q, k = torch.tensor([0.5, -1.0]), torch.tensor([2.0, 3.0])                    # q.k = -2
    >>> round(float(taylor_features(q, 2) @ taylor_features(k, 2)), 5)                # 1 - 2 + 4 / 2
    1.0
    """
    parts = [torch.ones_like(x[..., :1]), x]
    for at in range(0, x.shape[-1] if order == 2 else 0, 8):
        block = x[..., at : at + 8]
        after = torch.cat([block * 0.5**0.5, x[..., at + 8 :]], -1)
        parts.append((block[..., :, None] * after[..., None, :]).flatten(-2))
    return torch.cat(parts, -1)


def _polynomial_weights(q: Tensor, k: Tensor, order: int) -> Tensor:
    x = q @ k.mT
    return 1 + x if order == 1 else 1 + x + x.square() / 2


def _fastmax_scale(x: Inputs, order: int, norm: Norm | None) -> float:
    """The scale of a call whose options fit together."""
    if order not in (1, 2):
        raise LocaterError(f"order={order}: 1 or 2")
    if norm not in ("token", "sequence", None):
        raise LocaterError(f"norm={norm!r}: token, sequence or None")
    if norm == "sequence" and x.causal:
        raise LocaterError(
            "fastmax: norm='sequence' takes mean and maximum over later tokens too, so it cannot be causal; "
            "norm='token'"
        )
    scale = x.scale_or(1.0) if norm else x.usual_scale
    if order == 1 and (norm is None or abs(scale) > 1):
        raise LocaterError(
            "fastmax: order 1 has negative weights where |q.k| > 1; "
            "give it norm='token' and a scale of at most 1, or order=2"
        )
    return scale


def _fastmax_operands(x: Inputs, scale: float, norm: Norm | None) -> tuple[Tensor, Tensor]:
    """Scaled, normalised queries and normalised keys, float32 at least."""
    q, k = widen(x.q), widen(x.k)
    if norm == "token":
        q, k = unit_length(q), unit_length(k)
    elif norm == "sequence":
        keys = x.real_keys()
        q, k = _normalize_sequence(q, x.real_queries()), _normalize_sequence(k, None if keys is None else keys.mT)
    return q * scale, k


def _normalize_sequence(x: Tensor, real: Tensor | None) -> Tensor:
    """Centred over real tokens, and divided by the largest length of one."""
    weight = x.new_ones(1, 1, x.shape[2], 1) if real is None else real.to(x)
    x = x - (x * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp_min(1)
    x = x * weight  # what padding holds stays out of the maximum, and of |q.k| <= 1
    return x / x.norm(dim=-1, keepdim=True).amax(2, keepdim=True).clamp_min(torch.finfo(x.dtype).tiny)


# ---- The gradient of an operation ----


def register_gradient(operation: Any, gradient: Any) -> None:
    """Say that operation(q, k, v, keys, *numbers) -> (out, *kept) has gradient(q, k, v, out, *kept, grad, keys,
    *numbers) -> (dq, dk, dv); both are results of `torch.library.custom_op`.
    """

    def keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
        q, k, v, keys, *numbers = inputs
        ctx.mark_non_differentiable(*output[1:])
        ctx.set_materialize_grads(False)  # of what is kept for the gradient nobody needs one
        ctx.numbers = numbers
        ctx.save_for_backward(q, k, v, *output, keys)

    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        *saved, keys = ctx.saved_tensors
        return *gradient(*saved, grad, keys, *ctx.numbers), None, *[None] * len(ctx.numbers)

    gradient.register_fake(_empty_gradients)
    operation.register_autograd(backward, setup_context=keep)


def _empty_gradients(q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    dq, dk, dv = (torch.empty_like(x, memory_format=torch.contiguous_format) for x in (q, k, v))
    return dq, dk, dv


# ---- Weights of features ----


WIDEST = 128  # channels of queries and of values: the sums of a chunk are kept by one program


def has_feature_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether `feature_attention` can take them: on CUDA, up to 128 channels, not float64."""
    return runs_on_kernel(q, v, WIDEST)


def feature_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    scale: float,
    unit: bool,
    keys: Bool[Tensor, "b h S"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B H T E"]:
    """sum_j f_j v_j / sum_j f_j, zero for a row without keys, in time that grows as T + S.

    f = phi(scale q).phi(k) with phi = elu + 1; with `unit` f = 1 + scale (q / |q|).(k / |k|). `keys` is False for those
    that nobody sees. Products of bfloat16 operands are in TF32, of others in float32 (three TF32 products).
    """
    if keys is not None and keys.shape[1] > 1 and q.shape[1] != k.shape[1]:  # heads of a group see different keys
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
    out: Tensor = _features(q, k, v, keys, scale, unit, causal)[0]
    return out


@torch.library.custom_op("locater::feature_attention", mutates_args=())
def _features(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_features

    return triton_features.forward(q, k, v, keys, scale, unit, causal)


@_features.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_features

    B, K, S, D = k.shape
    chunks = -(-S // triton_features.chunk_for(q, v))
    running = q.new_empty((B * K, chunks + 1, D + int(unit), v.shape[3] + 1), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32), running


@torch.library.custom_op("locater::feature_attention_gradient", mutates_args=())
def _feature_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    running: Tensor,
    grad: Tensor,
    keys: Tensor | None,
    scale: float,
    unit: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_features

    return triton_features.backward(q, k, v, out, total, running, grad, keys, scale, unit, causal)


register_gradient(_features, _feature_gradient)


# ---- Weights of a polynomial ----


def polynomial_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B K S D"],
    v: Float[Tensor, "B K S E"],
    *,
    scale: float,
    order: int,
    unit: bool,
    keys: Bool[Tensor, "b h S"] | None = None,
    causal: bool = False,
) -> Float[Tensor, "B H T E"]:
    """sum_j f(x_j) v_j / sum_j f(x_j), f = 1 + x (order 1) or 1 + x + x^2 / 2 (order 2), zero for a row without keys.

    x = scale q.k, with `unit` of q / |q| and k / |k|; `keys` is False for those that nobody sees. Operands are those
    that `locater_lab.mechanisms.kernels.weighted.has_weighted_kernel` takes. Time grows as T S, memory as T + S.
    """
    out: Tensor = _polynomial(q, k, v, keys, scale, order, unit, causal)[0]
    return out


@torch.library.custom_op("locater::polynomial_attention", mutates_args=())
def _polynomial(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, order: int, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_polynomial

    return triton_polynomial.forward(q, k, v, keys, scale, order, unit, causal)


@_polynomial.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, order: int, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    B, K, S, D = k.shape
    rows = q.new_empty(q.shape[:3], dtype=torch.float32)
    ready = k.new_empty(B, K, S if unit else 0, D)
    return q.new_empty((*q.shape[:3], v.shape[3])), rows, ready, ready.new_empty(ready.shape[:3], dtype=torch.float32)


@torch.library.custom_op("locater::polynomial_attention_gradient", mutates_args=())
def _polynomial_gradient(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    total: Tensor,
    ready: Tensor,
    inverse: Tensor,
    grad: Tensor,
    keys: Tensor | None,
    scale: float,
    order: int,
    unit: bool,
    causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_polynomial

    return triton_polynomial.backward(q, k, v, out, total, ready, inverse, grad, keys, scale, order, unit, causal)


register_gradient(_polynomial, _polynomial_gradient)
