"""What the Gaussian surrogate says of every head: the head itself on normal tokens with the measured mean and covariance."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from locater.heads import AttentionLayer, Norm, Projection
from locater.heads.effective import folded
from locater.heads.normed import NormedProjection
from locater.kernels import attention_statistics
from locater.probing.statistics import Input
from locater.spectrum import one_thread
from locater.theory.surrogate import gaussian_tokens

SEQUENCES = 8


@torch.no_grad()
def predict(layer: AttentionLayer, given: Input | None, length: int, sequences: int = SEQUENCES, seed: int = 0) -> dict[str, Tensor]:
    """Per head (H,): entropy and entropy_ratio with the measured first token in its place, rest_entropy and rest_entropy_ratio
    without it, and sink, its weight. Without statistics (`given` None) tokens are standard normal: weights alone.

    Cross-attention has no first token: rest_entropy is its entropy.
    """
    layer = layer if given is None else replace(layer, norm=Norm(), memory_norm=None)
    x, memory = _tokens(layer, given, length, sequences, seed)
    normalized = given is None
    q, k = layer.queries(x, None, normalized), layer.keys(x if memory is None else memory, None, normalized)
    terms = dict(
        scale=layer.scale, causal=layer.causal and layer.kind == "self", window=layer.window if layer.kind == "self" else None,
        softcap=layer.softcap, sinks=None if layer.sinks is None else layer.sinks.float(), bias=_bias(layer, q, k),
    )  # fmt: skip
    whole = attention_statistics(q, k, **terms)  # type: ignore[arg-type]
    if layer.kind == "cross":
        found = {name: whole.reduced()[name] for name in ("entropy", "entropy_ratio")}
        return {**found, **{f"rest_{name}": value for name, value in found.items()}}
    later = torch.ones(len(x), length, dtype=torch.bool)
    later[:, 0] = False
    rest = attention_statistics(q, k, padding=later, extended=False, **{**terms, "sinks": None}).reduced()  # type: ignore[arg-type]
    full = whole.reduced()
    names = {"entropy": full["entropy"], "entropy_ratio": full["entropy_ratio"], "sink": full["first_mass"]}
    return {**names, "rest_entropy": rest["entropy"], "rest_entropy_ratio": rest["entropy_ratio"]}


def _tokens(layer: AttentionLayer, given: Input | None, length: int, sequences: int, seed: int) -> tuple[Tensor, Tensor | None]:
    if given is not None:
        x = gaussian_tokens(given.mean, given.covariance, sequences, length, None if layer.kind == "cross" else given.first, seed)
        if given.memory_mean is None or given.memory_covariance is None:
            return x, None
        return x, gaussian_tokens(given.memory_mean, given.memory_covariance, sequences, length, None, seed + 1)
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(sequences, length, layer.width, generator=generator)
    if layer.kind == "self":
        return x, None
    return x, torch.randn(sequences, length, layer.key.shape[1], generator=generator)


def _bias(layer: AttentionLayer, q: Tensor, k: Tensor) -> Tensor | None:
    """Position terms (1 or B, H, T, S): a table's, or those that meet content."""
    at, to = torch.arange(q.shape[2]), torch.arange(k.shape[2])
    bias = None if layer.bias is None else layer.bias(at, to).to(q)
    if layer.relative is not None:
        met = layer.scale * layer.relative(q, k.repeat_interleave(layer.group, 1), at, to)
        bias = met if bias is None else bias + met
    return None if bias is None else bias if bias.ndim == 4 else bias[None]


@torch.no_grad()
def logit_bound(layer: AttentionLayer) -> Tensor | None:
    """No logit of a head (H,) can exceed this in size, whatever the text: scale * max |q| * max |k|; None where nothing bounds it.

    A norm in front makes |z| = sqrt(width), so |q| <= ||W_Q'||_2 sqrt(width) + |c_q|; a norm on the queries makes |q| <=
    sqrt(head_dim) max|gain| + |bias|. Rotation changes no length. Position terms are added to logits and not bounded here.
    """
    if layer.bias is not None or layer.relative is not None:
        return None
    q = _longest(layer, layer.query, layer.heads, layer.norm, layer.query_norm)
    k = _longest(layer, layer.key, layer.kv_heads, layer.key_side_norm, layer.key_norm)
    if q is None or k is None:
        return None
    amplitude = 1.0 if layer.rotary is None else max(1.0, layer.rotary.amplitude) ** 2
    bound = abs(layer.scale) * amplitude * q * k.repeat_interleave(layer.group)
    return bound if layer.softcap is None else bound.clamp_max(layer.softcap)


def _longest(layer: AttentionLayer, projection: Projection, heads: int, before: Norm, own: Norm | None) -> Tensor | None:
    """Largest possible length of a head's queries or keys (heads,)."""
    if own is not None and own.kind != "none":
        gain = torch.ones(1) if own.gain is None else own.gain.float().abs()
        size = (layer.head_dim**0.5) * gain.reshape(-1, gain.shape[-1]).amax(-1)
        size = size if own.bias is None else size + own.bias.float().reshape(-1, own.bias.shape[-1]).norm(dim=-1)
        return size.expand(heads) if len(size) in (1, heads) else None
    if before.kind == "none" or isinstance(projection, NormedProjection):
        return None
    weight, shift = folded(projection.weight().unflatten(0, (heads, -1)), projection, before)
    sound = weight.isfinite().all(-1).all(-1)
    with one_thread():
        top = torch.linalg.matrix_norm(weight.where(sound[:, None, None], 0.0).cpu(), 2)
    top = top.where(sound.cpu(), torch.nan)
    return top * weight.shape[-1] ** 0.5 + shift.norm(dim=-1).cpu()
