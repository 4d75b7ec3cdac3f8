"""Predict the attention of each head: run the head on normal tokens with the measured mean and covariance (the
Gaussian surrogate).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.kernels import attention_statistics
from locater.layers import AttentionLayer, Norm, Projection
from locater.layers.norm_folding import folded
from locater.layers.projection_with_norm import norm_inside
from locater.numerics import one_thread
from locater.predict.statistics_file import Input
from locater.theory.gaussian_tokens_and_covariance_root import gaussian_tokens

SEQUENCES = 8


@torch.no_grad()
def predict(
    layer: AttentionLayer,
    statistics: Input | None,
    length: int,
    keys: int | None = None,
    sequences: int = SEQUENCES,
    seed: int = 0,
) -> dict[str, Tensor]:
    """Per head (H,): entropy and entropy_ratio with the measured first token in its place, rest_entropy and
    rest_entropy_ratio without it, and sink, the weight on it where it is in view. Without `statistics` tokens are
    standard normal, so that the prediction rests on weights alone.

    Cross-attention, where a row looks at `keys` tokens, has no first token that was measured apart, and so no sink.
    """
    x, memory = _tokens(layer, statistics, length, keys or length, sequences, seed)
    if statistics is None:
        return on_tokens(layer, x, memory, normalized=True)
    return on_tokens(replace(layer, norm=Norm(), memory_norm=None), x, memory)


def on_tokens(
    layer: AttentionLayer, x: Tensor, memory: Tensor | None = None, normalized: bool = False
) -> dict[str, Tensor]:
    """The columns of `predict`, for the heads run on tokens (B, T, d)."""
    unknown = layer.unknown_logits or layer.unknown_mask
    if unknown is not None:
        raise LocaterError(f"{layer.name}: its attention weights cannot be computed: {unknown}")
    q, k = layer.queries(x, None, normalized), layer.keys(x if memory is None else memory, None, normalized)
    is_self = layer.kind == "self"
    terms = dict(
        scale=layer.scale,
        causal=layer.causal and is_self,
        window=layer.window if is_self else None,
        documents=_runs(layer, x) if is_self else None,
        softcap=layer.softcap,
        sinks=None if layer.sinks is None else layer.sinks.to(q),
        bias=_bias(layer, q, k),
    )
    whole = attention_statistics(q, k, **terms)  # type: ignore[arg-type]
    means = whole.reduced()
    columns = {name: means[name] for name in ("entropy", "entropy_ratio")}
    if is_self:
        in_view = layer.visible(x.shape[1], x.shape[1])[0, 0, :, 0]
        columns["sink"] = whole.first_mass[..., in_view].mean((0, 2))  # type: ignore[index]
    later = torch.ones(len(x), k.shape[2], dtype=torch.bool)
    later[:, 0] = False
    rest = attention_statistics(q, k, padding=later, extended=False, **{**terms, "sinks": None}).reduced()  # type: ignore[arg-type]
    return {**columns, "rest_entropy": rest["entropy"], "rest_entropy_ratio": rest["entropy_ratio"]}


def _runs(layer: AttentionLayer, x: Tensor) -> Tensor | None:
    """Number (B, T) of the run of tokens that each token is in; None where the layer has no such runs."""
    if layer.chunk is None:
        return None
    return (torch.arange(x.shape[1], device=x.device) // layer.chunk).expand(x.shape[:2])


def _tokens(
    layer: AttentionLayer, statistics: Input | None, length: int, keys: int, sequences: int, seed: int
) -> tuple[Tensor, Tensor | None]:
    """Tokens (B, T, d) for the queries and, in cross-attention, others for the keys."""
    if statistics is not None:
        mean, covariance = statistics.mean, statistics.covariance
        first = None if layer.kind == "cross" else statistics.first
        x = gaussian_tokens(mean, covariance, sequences, length, first, seed)
        if statistics.memory_mean is None or statistics.memory_covariance is None:
            return x, None
        memory = statistics.memory_mean, statistics.memory_covariance
        return x, gaussian_tokens(*memory, sequences, keys, None, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences, length, layer.width, generator=generator)
    if layer.kind == "self":
        return _unit(x, layer.norm), None
    return _unit(x, layer.norm), _unit(
        torch.randn(sequences, keys, layer.key.shape[1], generator=generator), layer.key_side_norm
    )


def _unit(x: Tensor, norm: Norm) -> Tensor:
    """Without the mean over channels, which LayerNorm removes: covariance I - 11^T/d."""
    return x - x.mean(-1, keepdim=True) if norm.kind == "layer" else x


def _bias(layer: AttentionLayer, q: Tensor, k: Tensor) -> Tensor | None:
    """Position terms (1 or B, H, T, S) that are added to logits, from a table or from queries and keys."""
    at, to = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    bias = None if layer.bias is None else layer.bias(at, to).to(q)
    if layer.relative is not None:
        relative = layer.scale * layer.relative(q, k.repeat_interleave(layer.group, 1), at, to)
        bias = relative if bias is None else bias + relative
    return None if bias is None else bias if bias.ndim == 4 else bias[None]


@torch.no_grad()
def logit_bound(layer: AttentionLayer) -> Tensor | None:
    """The largest size (H,) that a logit of each head can have on any text: scale * max |q| * max |k|; None where
    nothing bounds it.

    A norm in front makes |z| = sqrt(width), so |q| <= ||W_Q'||_2 sqrt(width) + |c_q|; a norm on the queries makes |q|
    <= sqrt(head_dim) max|gain| + |bias|. Rotation changes no length. Position terms are added to logits and not bounded
    here; a soft-cap bounds everything.
    """
    bound = _product_bound(layer)
    if layer.softcap is None:
        return bound
    cap = torch.full((layer.heads,), layer.softcap)
    return cap if bound is None else bound.clamp_max(layer.softcap)


def _product_bound(layer: AttentionLayer) -> Tensor | None:
    if layer.bias is not None or layer.relative is not None or layer.unknown_logits is not None:
        return None
    q = _longest(layer, layer.query, layer.heads, layer.norm, layer.query_norm)
    k = _longest(layer, layer.key, layer.kv_heads, layer.key_side_norm, layer.key_norm)
    if q is None or k is None:
        return None
    amplitude = 1.0 if layer.rotary is None else max(1.0, layer.rotary.amplitude) ** 2
    return abs(layer.scale) * amplitude * q * k.repeat_interleave(layer.group)


def _longest(
    layer: AttentionLayer, projection: Projection, heads: int, before: Norm, own: Norm | None
) -> Tensor | None:
    """Largest possible length of a head's queries or keys (heads,)."""
    if own is not None and own.kind != "none":
        gain = torch.ones(1) if own.gain is None else own.gain.float().abs().cpu()
        size = (layer.head_dim**0.5) * gain.reshape(-1, gain.shape[-1]).amax(-1)
        size = size if own.bias is None else size + own.bias.float().cpu().reshape(-1, own.bias.shape[-1]).norm(dim=-1)
        return size.expand(heads) if len(size) in (1, heads) else None
    if before.kind == "none" or norm_inside(projection):
        return None
    weight, shift = folded(projection.weight().unflatten(0, (heads, -1)), projection, before)
    finite = weight.isfinite().all(-1).all(-1)
    with one_thread():
        top = torch.linalg.matrix_norm(weight.where(finite[:, None, None], 0.0).cpu(), 2)
    top = top.where(finite.cpu(), torch.nan)
    return top * weight.shape[-1] ** 0.5 + shift.norm(dim=-1).cpu()
