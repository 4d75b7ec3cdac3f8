"""Attention by its definition: one pair of tokens after the other, in float64, with nothing of the package.

It is the reference of drawn models (`drawn_models.py`). A layer is described by what is done to one token: a norm, maps, norms
of queries and keys, a rotation. Axes: B batch, H query heads, T tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import torch

Array = np.ndarray


@dataclass(frozen=True)
class Map:
    """W x + b."""

    weight: Array  # (out, in)
    bias: Array | None = None

    def __call__(self, x: Array) -> Array:
        y = self.weight @ x
        return y if self.bias is None else y + self.bias


@dataclass(frozen=True)
class Norm:
    """Each of `parts` of a vector is normalised by itself; numbers in none of them pass as they are."""

    kind: str  # "layer" or "rms"
    eps: float
    gain: Array
    bias: Array
    parts: tuple[range, ...]

    def __call__(self, x: Array) -> Array:
        y = x.copy()
        for part in self.parts:
            own = x[part] - (x[part].mean() if self.kind == "layer" else 0.0)
            y[part] = self.gain[part] * own / math.sqrt((own * own).mean() + self.eps) + self.bias[part]
        return y


Steps = Sequence[Map | Norm]


@dataclass(frozen=True)
class Layer:
    """Self-attention with everything that decides its logits and its output."""

    name: str  # of the attention module
    reads: str  # the module whose first argument is the stream x
    writes: str  # the module whose result is the layer's output
    heads: int
    kv_heads: int
    size: int  # channels of a query
    front: Norm | None  # of the stream
    query: Steps
    key: Steps
    value: Steps
    out: Map
    scale: float
    turns: tuple[tuple[int, int, float], ...] = ()  # two channels of a head that turn together, radians per position
    bias: Callable[[int, int, int], float] | None = None  # of (head, position of the query, of the key)
    softcap: float | None = None
    sinks: Array | None = None  # (H,)
    causal: bool = False
    window: int | None = None  # keys at a distance below this are visible
    strided: bool = False  # query head h reads key head h % kv_heads, in place of neighbours that share one
    shift_free: bool = False  # a number is added to whole rows of logits, which no softmax sees

    def key_head(self, head: int) -> int:
        return head % self.kv_heads if self.strided else head // (self.heads // self.kv_heads)


def through(steps: Steps, x: Array) -> Array:
    for step in steps:
        x = step(x)
    return x


def heads_of(layer: Layer, steps: Steps, x: Array, count: int) -> Array:
    """(B, T, count, channels) of a stream (B, T, d)."""
    front = [] if layer.front is None else [layer.front]
    return np.array([[through([*front, *steps], token).reshape(count, -1) for token in tokens] for tokens in x])


@cache
def turn(position: int, frequency: float) -> tuple[float, float]:
    """(cos, sin) of the angle at a position; all of these are float32, as in models."""
    angle = torch.tensor(float(position)) * torch.tensor(frequency, dtype=torch.float32)
    return float(angle.cos()), float(angle.sin())


def turned(layer: Layer, x: Array, position: int) -> Array:
    """A query or key at its position."""
    y = x.copy()
    for a, b, frequency in layer.turns:
        cos, sin = turn(position, frequency)
        y[a], y[b] = x[a] * cos - x[b] * sin, x[a] * sin + x[b] * cos
    return y


def logits_of(layer: Layer, x: Array) -> Array:
    """(B, H, T, T) of a stream (B, T, d), before masks."""
    queries, keys = heads_of(layer, layer.query, x, layer.heads), heads_of(layer, layer.key, x, layer.kv_heads)
    for side in (queries, keys):
        for b, t, head in np.ndindex(side.shape[:3]):
            side[b, t, head] = turned(layer, side[b, t, head], t)
    logits = np.empty((len(x), layer.heads, x.shape[1], x.shape[1]))
    for b, head, i, j in np.ndindex(logits.shape):
        number = layer.scale * float(queries[b, i, head] @ keys[b, j, layer.key_head(head)])
        number += 0.0 if layer.bias is None else layer.bias(head, i, j)
        logits[b, head, i, j] = number if layer.softcap is None else layer.softcap * math.tanh(number / layer.softcap)
    return logits


def visible(layer: Layer, real: Array) -> Array:
    """(B, T, T): which keys a query sees; `real` (B, T) is False for padding."""
    seen = np.zeros((*real.shape, real.shape[1]), dtype=bool)
    for b, i, j in np.ndindex(seen.shape):
        near = layer.window is None or abs(i - j) < layer.window
        seen[b, i, j] = real[b, j] and near and (j <= i or not layer.causal)
    return seen


def weights_of(layer: Layer, logits: Array, seen: Array) -> Array:
    """(B, H, T, T): softmax over the keys in sight; rows that see none are 0."""
    weights = np.zeros_like(logits)
    for b, head, i in np.ndindex(logits.shape[:3]):
        at = np.flatnonzero(seen[b, i])
        row = [*logits[b, head, i, at], *([] if layer.sinks is None else [layer.sinks[head]])]
        if len(at):
            powers = np.exp(np.array(row) - max(row))
            weights[b, head, i, at] = (powers / powers.sum())[: len(at)]
    return weights


def output_of(layer: Layer, x: Array, weights: Array) -> Array:
    """(B, T, d): what the layer returns."""
    values = heads_of(layer, layer.value, x, layer.kv_heads)
    return np.array(
        [
            [
                layer.out(np.concatenate([w[head, i] @ v[:, layer.key_head(head)] for head in range(layer.heads)]))
                for i in range(x.shape[1])
            ]
            for w, v in zip(weights, values, strict=True)
        ]
    )


# ---- what a scan says: the map of a head on unit tokens


def mean_field(layer: Layer, steps: Steps) -> tuple[Array, Array]:
    """(W, c) with W z + c for unit tokens z; in place of each token's own norm stands its root mean square over them."""
    width = next(step.weight.shape[1] for step in steps if isinstance(step, Map))
    W, c = np.eye(width), np.zeros(width)
    if layer.front is not None:
        W, c = np.diag(layer.front.gain), layer.front.bias
        W = W @ (np.eye(width) - 1 / width) if layer.front.kind == "layer" else W
    for step in steps:
        if isinstance(step, Map):
            W, c = step.weight @ W, step(c)
            continue
        W, c = W.copy(), c.copy()
        for part in step.parts:
            if step.kind == "layer":
                W[part], c[part] = W[part] - W[part].mean(0), c[part] - c[part].mean()
            energy = ((W[part] ** 2).sum() + (c[part] ** 2).sum()) / len(part)
            W[part] = step.gain[part][:, None] * W[part] / math.sqrt(energy)
            c[part] = step.gain[part] * c[part] / math.sqrt(energy) + step.bias[part]
    return W, c


def moments_of(layer: Layer) -> list[dict[str, float]]:
    """Columns of a scan for each head, from W = W_Q^T W_K written out."""
    (queries, shift), (keys, _) = mean_field(layer, layer.query), mean_field(layer, layer.key)
    rows = []
    for head in range(layer.heads):
        own, other = (slice(n * layer.size, (n + 1) * layer.size) for n in (head, layer.key_head(head)))
        W = queries[own].T @ keys[other]
        trace, square, size = np.trace(W), np.trace(W @ W), (W * W).sum()
        rows.append(
            {
                "scale": layer.scale,
                "trace": trace,
                "trace_of_square": square,
                "frobenius_sq": size,
                "M": layer.scale * trace,
                "S": layer.scale**2 * square,
                "F": layer.scale**2 * size,
                "key_bias": layer.scale * float(np.linalg.norm(keys[other].T @ shift[own])),
            }
        )
    return rows


# ---- what an observation says: means over rows of real tokens that see a key


def measures_of(logits: Array, weights: Array, seen: Array, real: Array) -> list[dict[str, float | None]]:
    """Columns of an observation for each head."""
    return [_measures(logits[:, head], weights[:, head], seen, real) for head in range(logits.shape[1])]


def _measures(logits: Array, weights: Array, seen: Array, real: Array) -> dict[str, float | None]:
    columns: dict[str, list[float]] = {
        name: []
        for name in "entropy entropy_ratio max_probability participation row_mass distance self_mass sink".split()
    }
    top = -math.inf
    for b, i in np.ndindex(real.shape):
        at = np.flatnonzero(seen[b, i])
        if not real[b, i] or not len(at):
            continue
        p, first = weights[b, i, at], int(np.flatnonzero(real[b])[0])
        entropy = -sum(float(w * math.log(w)) for w in p if w > 0)
        columns["entropy"].append(entropy)
        columns["max_probability"].append(p.max())
        columns["participation"].append(1 / (p * p).sum())
        columns["row_mass"].append(p.sum())
        columns["distance"].append((p * abs(at - i)).sum())
        columns["self_mass"].append(weights[b, i, i])
        if len(at) > 1:
            columns["entropy_ratio"].append(entropy / math.log(len(at)))
        if seen[b, i, first]:
            columns["sink"].append(weights[b, i, first])
        top = max(top, logits[b, i, at].max())
    means = {name: float(np.mean(values)) if values else None for name, values in columns.items()}
    return {"rows": len(columns["entropy"]), "max_logit": top, **means}
