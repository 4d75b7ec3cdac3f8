"""Softmax attention, fused; and the same with its map written out. Most mechanisms are one of the two with other operands.
And softmax attention with one change: to its operands (QK-norm, binary), its logits (softcap), its normalisation (sinks,
sigmoid) or its output (centred, differential).

Each mechanism is a pair of functions: `..._attention` gives the output, `..._map` writes the map out.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from locater.control.qk_norm import NormKind, qk_norm
from locater.control.softcap import softcap_attention
from locater.errors import LocaterError
from locater.kernels.terms import LARGEST_CAP
from locater_lab.mechanisms.kernels.weighted import has_weighted_kernel, weighted_attention
from locater_lab.mechanisms.mechanism_record import Inputs, head_values, widen

ROWS = 128  # queries at a time, where no fused kernel does it


def softmax_attention(x: Inputs) -> Tensor:
    """softmax(scale q k^T) v, by PyTorch's fused function.

    >>> from locater_lab.mechanisms import mechanism
    >>> q = k = torch.zeros(1, 1, 3, 4)
    >>> one_hot = torch.eye(3)[None, None]                     # with these values the output is the map
    >>> mechanism("softmax")(q, k, one_hot, causal=True)[0, 0]
    tensor([[1.0000, 0.0000, 0.0000],
            [0.5000, 0.5000, 0.0000],
            [0.3333, 0.3333, 0.3333]])
    """
    return fused_attention(x, x.usual_scale)


def softmax_map(x: Inputs) -> Tensor:
    return masked_softmax(x, logits(x, x.usual_scale))


def fused_attention(x: Inputs, scale: float, bias: Tensor | None = None) -> Tensor:
    """`scaled_dot_product_attention` with this package's masks; `bias` (b, h, t, S) is added to scaled logits.

    Fused kernels want queries and values of one size: the smaller is filled up with zeros. They know causal masks for T
    = S only: with keys before the queries, rows are put in front of these where that is cheap. Any other mask is
    written out as booleans. A row that sees no key is zero, with a gradient of zero.
    """
    T, S, size = x.T, x.S, x.v.shape[3]
    q, k, v = _pad_to_one_size(x.q, x.k, x.v)
    plain = bias is None and x.mask is None and x.padding is None
    flag = plain and x.causal and 1 < T and S <= 2 * T
    front, mask, empty = (S - T if flag else 0), None, None
    if front:
        q = functional.pad(q, (0, 0, front, 0))
    if not flag and (not plain or (x.causal and T > 1)):
        keys = x.real_keys()
        seen = (
            x.visible()
            if x.has_row_mask or x.causal
            else q.new_ones(1, 1, 1, S, dtype=torch.bool)
            if keys is None
            else keys
        )
        empty = ~seen.any(-1, keepdim=True)
        # a softmax over nothing is not a number on some devices: such rows see all, and are taken out again
        seen = seen | empty
        mask = seen if bias is None else bias.to(q).masked_fill(~seen, -torch.inf)
    if mask is not None:  # grouped keys and a mask at once are not fused on a GPU
        k, v = x.per_query_head(k), x.per_query_head(v)
    out = functional.scaled_dot_product_attention(
        q, k, v, mask, is_causal=flag, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    out = out[:, :, front:, :size]
    return out if empty is None else out.masked_fill(empty, 0.0)


def _pad_to_one_size(*tensors: Tensor) -> list[Tensor]:
    """Filled up with zeros to one size, a multiple of 8 where that takes a copy anyway."""
    sizes = {y.shape[3] for y in tensors}
    width = max(sizes) if len(sizes) == 1 else -(-max(sizes) // 8) * 8
    return [y if y.shape[3] == width else functional.pad(y, (0, width - y.shape[3])) for y in tensors]


def add_logit_term(x: Inputs, of_queries: Tensor, of_keys: Tensor) -> Inputs:
    """Operands for which of_queries * of_keys is added to q.k, before the scale: one more channel, so any fused kernel
    can do it.

    `of_queries` is (b, h, T or 1, 1) and `of_keys` (b, h, S or 1, 1). In half precision a number takes two channels:
    its rounded value, and what rounding left.
    """
    pairs = [(a, b) for a in _split_precision(of_queries, x.q.dtype) for b in _split_precision(of_keys, x.q.dtype)]
    q = torch.cat([x.q, *(a.expand(*x.q.shape[:3], 1) for a, _ in pairs)], -1)
    k = torch.cat([x.k, *(b.expand(*x.k.shape[:3], 1) for _, b in pairs)], -1)
    return replace(x, q=q, k=k)


def _split_precision(values: Tensor, dtype: torch.dtype) -> list[Tensor]:
    first = values.to(dtype)
    if first.dtype == values.dtype or dtype.itemsize >= 4:
        return [first]
    return [first, (values - first).to(dtype)]


def logits(x: Inputs, scale: float) -> Tensor:
    """scale q k^T (B, H, T, S), float32 at least."""
    return widen(x.q) @ widen(x.per_query_head(x.k)).mT * scale


def masked_softmax(x: Inputs, scores: Tensor, sinks: Tensor | None = None) -> Tensor:
    """softmax over the keys in view; a row that sees none is zero. `sinks` (H,) are logits that take weight and give
    none.
    """
    hidden = ~x.visible()
    # not -inf: the gradient of an empty row would be NaN
    scores = scores.masked_fill(hidden, torch.finfo(scores.dtype).min)
    if sinks is not None:
        scores = torch.cat([scores, sinks.to(scores)[:, None, None].expand(*scores.shape[:3], 1)], -1)
    return scores.softmax(-1)[..., : x.S].masked_fill(hidden, 0.0)


def attend_by_rows(x: Inputs, run: Callable[[Inputs], Tensor]) -> Tensor:
    """run(x), some queries at a time, for maps that no fused kernel knows. Causal ones look no further than they need
    to.

    The result of a block is computed again for the gradient, so no T x S matrix is ever stored.
    """
    out = []
    for at in range(0, x.T, ROWS):
        end = min(at + ROWS, x.T)
        keys = x.S - x.T + end if x.causal else x.S
        terms = x.terms.for_queries(slice(at, end)).up_to(keys)
        some = replace(x, q=x.q[:, :, at:end], k=x.k[:, :, :keys], v=x.v[:, :, :keys], terms=terms)
        out.append(recompute_in_backward(run, some) if x.T > ROWS else run(some))
    return torch.cat(out, 2)


def recompute_in_backward(run: Callable[[Inputs], Tensor], x: Inputs) -> Tensor:
    """run(x), with nothing but x stored for the gradient."""
    if not torch.is_grad_enabled():
        return run(x)
    return checkpoint(run, x, use_reentrant=False, preserve_rng_state=False)


# ---- Operands: queries and keys of a fixed length ----
# QK-norm bounds logits by the gains (Dehghani et al. 2023; Qwen3, Gemma 3).


def qk_norm_attention(
    x: Inputs,
    *,
    query_gain: Tensor | None = None,
    key_gain: Tensor | None = None,
    kind: NormKind = "rms",
    eps: float = 1e-6,
) -> Tensor:
    """Softmax attention of normalised queries and keys; gains (H,) and (K,) are 1 unless given."""
    return softmax_attention(_with_qk_norm(x, query_gain, key_gain, kind, eps))


def qk_norm_map(
    x: Inputs,
    *,
    query_gain: Tensor | None = None,
    key_gain: Tensor | None = None,
    kind: NormKind = "rms",
    eps: float = 1e-6,
) -> Tensor:
    return softmax_map(_with_qk_norm(x, query_gain, key_gain, kind, eps))


def _with_qk_norm(x: Inputs, query_gain: Tensor | None, key_gain: Tensor | None, kind: NormKind, eps: float) -> Inputs:
    if kind not in ("rms", "layer"):
        raise LocaterError(f"kind={kind!r}: choose rms or layer")
    out = []
    for name, y, gain in (("query_gain", x.q, query_gain), ("key_gain", x.k, key_gain)):
        if gain is None:
            gain = y.new_ones(y.shape[1])
        elif tuple(gain.shape) != (y.shape[1],):
            raise LocaterError(f"{name} has shape {list(gain.shape)}, not [{y.shape[1]}] (one per head)")
        out.append(qk_norm(y, gain, kind, eps))
    return replace(x, q=out[0], k=out[1])


# ---- Operands: queries and keys of one bit per channel (Xiao, Zhang, Zhang 2026) ----
# Logits are scale mu_q mu_k sign(q).sign(k) + bias, where sign(0) = 1 and mu is the mean of |q| or |k|. They take at
# most D + 1 levels, 2 scale mu_q mu_k apart. The gradient of the sign is that of the clipped identity (1 where
# |x| <= 1), and mu has its own.
#
# mu is one number per sample and head, over all its real tokens: that would tell a query of later ones. Where rows see
# different keys (causal, or a mask with a row per query) mu_q is the query's own and mu_k the mean over the keys it
# sees; both scale whole rows, so logits are still counts of equal bits. Emulated here: signs are multiplied as floating
# numbers.


def binary_attention(x: Inputs, *, bias: Tensor | None = None) -> Tensor:
    """softmax(scale mu_q mu_k sign(q) sign(k)^T + bias) v; `bias` (b, h, t, S) is what a model learns, axes of size 1
    are shared.

    >>> import torch
    >>> from locater_lab.mechanisms import mechanism
    >>> q, k = torch.randn(1, 1, 50, 4), torch.randn(1, 1, 50, 4)
    >>> weights = mechanism("binary").map(q, k)[0, 0, 0]
    >>> len(weights.log().mul(1e4).round().unique()) <= 5      # four bits agree in 0 to 4 places
    True
    """
    return fused_attention(_one_bit(x), x.usual_scale, _checked_bias(x, bias))


def binary_map(x: Inputs, *, bias: Tensor | None = None) -> Tensor:
    scores = logits(_one_bit(x), x.usual_scale)
    added = _checked_bias(x, bias)
    return masked_softmax(x, scores if added is None else scores + added)


def sign(x: Tensor) -> Tensor:
    """+1 or -1, +1 at zero; its gradient is passed on where |x| <= 1.

    >>> import torch
    >>> x = torch.tensor([-2.0, -0.5, 0.0, 1.0], requires_grad=True)
    >>> sign(x).tolist(), torch.autograd.grad(sign(x).sum(), x)[0].tolist()
    ([-1.0, -1.0, 1.0, 1.0], [0.0, 1.0, 1.0, 1.0])
    """
    soft = x.clamp(-1, 1)
    return (x >= 0).to(x) * 2 - 1 + (soft - soft.detach())


def _one_bit(x: Inputs) -> Inputs:
    """Signs, with both mu on the queries."""
    size = widen(x.q).abs().mean(-1, keepdim=True)  # (B, H, T, 1)
    if not (x.causal or x.has_row_mask):
        real = x.real_queries()
        weight = size.new_ones(1, 1, 1, 1).expand(1, 1, x.T, 1) if real is None else real.to(size)
        size = (size * weight).sum(2, keepdim=True) / weight.sum(2, keepdim=True).clamp_min(1)
    of_keys = x.mean_in_view(widen(x.k).abs().mean(-1, keepdim=True))
    return replace(x, q=(size * x.per_query_head(of_keys)).to(x.q.dtype) * sign(x.q), k=sign(x.k))


def _checked_bias(x: Inputs, bias: Tensor | None) -> Tensor | None:
    if bias is None:
        return None
    while bias.ndim < 4:
        bias = bias[None]
    for got, want in zip(bias.shape, (x.q.shape[0], x.heads, x.T, x.S), strict=True):
        if got not in (1, want):
            raise LocaterError(
                f"bias has shape {list(bias.shape)}, "
                f"not [{x.q.shape[0]}, {x.heads}, {x.T}, {x.S}] with axes of 1 shared"
            )
    return bias


# ---- Logits: c tanh(logits / c) before mask and softmax (Gemma 2) ----


DEFAULT_CAP = 50.0


def capped_attention(x: Inputs, *, cap: float = DEFAULT_CAP) -> Tensor:
    """`softcap_attention` as a mechanism of the registry: one kernel on a GPU, elsewhere some rows at a time."""
    x = _with_cap(x, cap)
    if x.has_row_mask or cap > LARGEST_CAP or not has_weighted_kernel(x.q, x.v):
        return attend_by_rows(x, lambda some: softcap_attention(some.q, some.k, some.v, some.terms)[0])
    keys = x.real_keys()
    return weighted_attention(
        x.q, x.k, x.v, scale=x.usual_scale, cap=cap, keys=None if keys is None else keys[:, :, 0], causal=x.causal
    )


def capped_map(x: Inputs, *, cap: float = DEFAULT_CAP) -> Tensor:
    return softcap_attention(x.q, x.k, x.v, _with_cap(x, cap).terms)[1]


def _with_cap(x: Inputs, cap: float) -> Inputs:
    if not isinstance(cap, int | float) or not math.isfinite(cap):  # a word, such as nan, comes as a text
        raise LocaterError(f"cap={cap}: give a finite number above 0")
    if cap <= 0:
        raise LocaterError(f"cap={cap}: a number above 0")
    return x.with_terms(softcap=cap)


# ---- Normalisation: a key of zero value takes weight, so that a row sums to less than 1 ----
# softmax_plus_one (its sink has logit 0): p_j = exp(x_j) / (1 + sum_j' exp(x_j')). learned_sink (gpt-oss): the 1 is
# exp(s_h), one number per query head, not multiplied by the scale. No mask covers the sink.


def softmax_plus_one_attention(x: Inputs) -> Tensor:
    """One zero key in front of the others, with a zero value: its logit is 0 for every query."""
    return fused_attention(_with_zero_key(x), x.usual_scale)


def softmax_plus_one_map(x: Inputs) -> Tensor:
    return masked_softmax(x, logits(x, x.usual_scale), x.q.new_zeros(x.heads))


def learned_sink_attention(x: Inputs, *, sinks: Tensor) -> Tensor:
    """`sinks` (H,) are logits: they come as one more channel of the queries, which only the sink's key has too.

    >>> from locater_lab.mechanisms import mechanism
    >>> q = k = v = torch.ones(1, 2, 3, 4)
    >>> sinks = torch.tensor([-100.0, 100.0])                               # nothing taken, everything taken
    >>> mechanism("learned_sink")(q, k, v, sinks=sinks)[0, :, 0, 0].round()
    tensor([1., 0.])
    """
    _check_sinks(x, sinks)
    on_sink = functional.pad(x.k.new_ones(1, 1, 1, 1), (0, 0, 0, x.S))  # 1, 0, 0, ...
    of_queries = widen(sinks)[None, :, None, None] / x.usual_scale
    return fused_attention(add_logit_term(_with_zero_key(x), of_queries, on_sink), x.usual_scale)


def learned_sink_map(x: Inputs, *, sinks: Tensor) -> Tensor:
    _check_sinks(x, sinks)
    return masked_softmax(x, logits(x, x.usual_scale), sinks)


def _with_zero_key(x: Inputs) -> Inputs:
    """One more key and value at the front, zero and always seen."""
    mask, padding = (None if y is None else functional.pad(y, (1, 0), value=True) for y in (x.mask, x.padding))
    k, v = (functional.pad(y, (0, 0, 1, 0)) for y in (x.k, x.v))
    return replace(x.with_terms(mask=mask, padding=padding), k=k, v=v)


def _check_sinks(x: Inputs, sinks: Tensor) -> None:
    if not isinstance(sinks, torch.Tensor) or tuple(sinks.shape) != (x.heads,):
        shape = list(sinks.shape) if isinstance(sinks, torch.Tensor) else sinks
        raise LocaterError(f"sinks={shape}: a tensor of one logit per query head [{x.heads}]")


# ---- Normalisation: none; every weight is a sigmoid of its own logit (Ramapuram et al. 2025) ----


def sigmoid_attention(x: Inputs, *, bias: float | Tensor | None = None) -> Tensor:
    """sigmoid(scale q k^T + b) v. Unless given, b = -ln n with n the keys that a query sees, row by row.

    With b = -ln n and logits of 0 a row sums to n / (n + 1). It is not bounded by 1: each weight can be 1, so a row by
    n.

    >>> from locater_lab.mechanisms import mechanism
    >>> q = k = v = torch.ones(1, 1, 4, 4)
    >>> mechanism("sigmoid")(0 * q, k, v, causal=True)[0, 0, :, 0]
    tensor([0.5000, 0.6667, 0.7500, 0.8000])
    >>> mechanism("sigmoid")(9 * q, k, v, causal=True)[0, 0, :, 0].round()
    tensor([1., 2., 3., 4.])
    """

    if x.has_row_mask or not has_weighted_kernel(x.q, x.v):
        return attend_by_rows(
            x, lambda some: sigmoid_map(some, bias=bias).to(some.v.dtype) @ some.per_query_head(some.v)
        )
    keys = x.real_keys()
    shift = _sigmoid_bias(x, bias)
    rows = (
        shift.expand(*x.q.shape[:3], 1)[..., 0]
        if isinstance(shift, Tensor)
        else x.q.new_full(x.q.shape[:3], shift, dtype=torch.float32)
    )
    return weighted_attention(
        x.q, x.k, x.v, scale=x.usual_scale, shift=rows, keys=None if keys is None else keys[:, :, 0], causal=x.causal
    )


def sigmoid_map(x: Inputs, *, bias: float | Tensor | None = None) -> Tensor:
    scores = logits(x, x.usual_scale)
    return torch.sigmoid(scores + _sigmoid_bias(x, bias)).masked_fill(~x.visible(), 0.0)


def _sigmoid_bias(x: Inputs, bias: float | Tensor | None) -> float | Tensor:
    """The bias given, or -ln of the keys that each row sees (b, h, t, 1)."""
    return head_values(bias, x, "bias") if bias is not None else -x.keys_in_view().clamp_min(1).log()


# ---- Output: without its mean (Nait Saada, Naderi, Tanner 2025) ----
# A - U, with U uniform over the keys in view. The rows of A and U sum to 1, so (A - U) v = A (v - mean of v): values are
# centred, and the kernel of attention stays as it is. Where rows see different keys (causal, or a mask with a row per
# query) the mean is that of the keys each row sees: U_ij = 1/i for j <= i, a prefix sum. Rows sum to 0. (I - U) A would
# be another matrix.


def centred_attention(x: Inputs) -> Tensor:
    """softmax(scale q k^T) v minus the mean value in view.

    >>> import torch
    >>> from locater_lab.mechanisms import mechanism
    >>> q, k, v = torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4), torch.randn(1, 1, 3, 4)
    >>> both = [mechanism("centred")(q, k, v + shared, causal=True) for shared in (0, 5)]
    >>> torch.allclose(*both, atol=1e-5)                       # what all values share is lost
    True
    >>> both[0][0, 0, 0].tolist()                              # the first token sees itself
    [0.0, 0.0, 0.0, 0.0]
    """
    mean = x.mean_in_view(x.v)
    if mean.shape[1:3] == (x.v.shape[1], 1):  # the same for all rows: nothing large is subtracted afterwards
        return fused_attention(replace(x, v=(x.v - mean).to(x.v.dtype)), x.usual_scale)
    return (fused_attention(x, x.usual_scale) - x.per_query_head(mean)).to(x.v.dtype)


def centred_map(x: Inputs) -> Tensor:
    seen = x.visible()
    weights = softmax_map(x)
    return weights - seen.to(weights) / seen.sum(-1, keepdim=True).clamp_min(1)


# ---- Output: the difference of two softmax maps, which cancels what both look at (Ye et al. 2025) ----
# A = softmax(scale q1 k1^T) - lam softmax(scale q2 k2^T), where q1, q2 are the halves of a query's channels and k1, k2
# those of a key's; scale is 1 / sqrt(D / 2) unless given. Rows sum to 1 - lam and entries may be negative. The norm of
# heads and the factor 1 - lam_init that follow in the paper belong to a module.


def differential_attention(x: Inputs, *, lam: float | Tensor) -> Tensor:
    """Two fused calls. `lam` is a number, or one per query head (H,).

    >>> import torch
    >>> from locater_lab.mechanisms import mechanism
    >>> q, k, v = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 3, 4), torch.ones(1, 2, 3, 1)
    >>> mechanism("differential")(q, k, v, lam=torch.tensor([0.2, 0.8]))[0, :, 0, 0]     # rows sum to 1 - lam
    tensor([0.8000, 0.2000])
    """
    first, second, scale, weight = _halves(x, lam)
    return fused_attention(first, scale) - weight * fused_attention(second, scale)


def differential_map(x: Inputs, *, lam: float | Tensor) -> Tensor:
    first, second, scale, weight = _halves(x, lam)
    return masked_softmax(first, logits(first, scale)) - weight * masked_softmax(second, logits(second, scale))


def _halves(x: Inputs, lam: float | Tensor) -> tuple[Inputs, Inputs, float, float | Tensor]:
    size = x.q.shape[3]
    if size % 2:
        raise LocaterError(f"differential: queries of {size} channels have no two halves; an even size")
    (q1, q2), (k1, k2) = x.q.chunk(2, -1), x.k.chunk(2, -1)
    weight = head_values(lam, x, "lam")
    weight = weight.to(x.q.dtype) if isinstance(weight, Tensor) else weight
    return replace(x, q=q1, k=k1), replace(x, q=q2, k=k2), x.scale_or((size // 2) ** -0.5), weight
