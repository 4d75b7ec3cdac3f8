"""Linear attention over features, as one operation that compiles and has gradients: Triton on CUDA."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from locater.kernels.dispatch import on_a_kernel
from locater_lab.mechanisms.kernels.own_gradient import has_gradient

WIDEST = 128  # channels of queries and of values: the sums of a chunk are kept by one program


def has_feature_kernel(q: Tensor, v: Tensor) -> bool:
    """Whether `feature_attention` can take them: on CUDA, up to 128 channels, not float64."""
    return on_a_kernel(q, v, WIDEST)


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
    out: Tensor = _attend(q, k, v, keys, scale, unit, causal)[0]
    return out


@torch.library.custom_op("locater::feature_attention", mutates_args=())
def _attend(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_features

    return triton_features.forward(q, k, v, keys, scale, unit, causal)


@_attend.register_fake
def _(
    q: Tensor, k: Tensor, v: Tensor, keys: Tensor | None, scale: float, unit: bool, causal: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from locater_lab.mechanisms.kernels import triton_features

    B, K, S, D = k.shape
    chunks = -(-S // triton_features.chunk_for(q, v))
    running = q.new_empty((B * K, chunks + 1, D + int(unit), v.shape[3] + 1), dtype=torch.float32)
    return q.new_empty((*q.shape[:3], v.shape[3])), q.new_empty(q.shape[:3], dtype=torch.float32), running


@torch.library.custom_op("locater::feature_attention_gradient", mutates_args=())
def _gradient(
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


has_gradient(_attend, _gradient)
