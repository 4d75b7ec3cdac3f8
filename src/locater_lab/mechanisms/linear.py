"""Linear attention (Katharopoulos et al. 2020), and how any map with finitely many features is applied without its
matrix.

A_ij = f_ij / sum_j' f_ij' with f_ij = phi(q_i).phi(k_j) >= 0, so sum_j f_ij v_j = phi(q_i)^T sum_j phi(k_j) v_j^T: one
matrix of sums, of a size that does not grow with T, is read by every query. Causal: every chunk of tokens reads the
sums of those before it, and inside a chunk f is written out.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from locater_lab.mechanisms.inputs import Inputs, widen
from locater_lab.mechanisms.kernels.features import feature_attention, has_feature_kernel

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
        return by_features(x, x.scale_or(1.0), unit=False)
    q, k, v, keep = x.grouped()
    q, k = elu_features(q * x.scale_or(1.0)), elu_features(k)
    return factorised(q, k, v, keep, lambda y: y, _dot, x).to(x.v.dtype)


def by_features(x: Inputs, scale: float, unit: bool) -> Tensor:
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


def factorised(
    q: Tensor, k: Tensor, v: Tensor, keep: Tensor | None, features: Features, kernel: Kernel, x: Inputs
) -> Tensor:
    """sum_j f_ij v_j / sum_j f_ij (B, H, T, E), zero where the sum of weights is. q, k, v, keep are as `Inputs.grouped`
    gives them.

    `kernel(q, k)` is f written out, for the chunks on the diagonal; it must equal features(q) features(k)^T.
    """
    v = functional.pad(v, (0, 1), value=1.0)  # the last column sums up the weights
    if keep is not None:
        v = v * keep
    number = features(k[..., :0, :]).shape[-1]
    if number <= 2 * CHUNK:
        sums = _at_once(q, k, v, features, kernel, x)
    else:  # a GPU waits for the next operation to be launched, a CPU for its memory
        sums = _one_by_one(q, k, v, features, kernel, x, number if q.device.type == "cuda" else CHUNK)
    sums = sums.flatten(1, 2)
    size = x.v.shape[3]
    weight = sums[..., size:]
    none = weight <= 0
    return (sums[..., :size] / weight.masked_fill(none, 1.0)).masked_fill(none, 0.0)


def _at_once(q: Tensor, k: Tensor, v: Tensor, features: Features, kernel: Kernel, x: Inputs) -> Tensor:
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


def _one_by_one(q: Tensor, k: Tensor, v: Tensor, features: Features, kernel: Kernel, x: Inputs, chunk: int) -> Tensor:
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
