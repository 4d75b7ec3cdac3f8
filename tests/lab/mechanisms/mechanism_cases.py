"""Attention mechanisms read plainly, for the tests: per case its options, and its map for one head with loops or dense
formulas in float64.

A mechanism joins the tests by a row of CASES.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locater_lab.mechanisms import Mechanism

B, H, K, D, E = 2, 4, 2, 6, 5  # batch, query heads, key heads, size of queries and of values


@dataclass(frozen=True)
class Head:
    """What the map of one head is made of, float64: q (T, D), k (S, D), who sees whom (T, S), real queries and keys."""

    q: Tensor
    k: Tensor
    seen: Tensor
    scale: float | None
    rows: Tensor  # (T,)
    rows_differ: bool
    options: dict[str, Any]
    number: int = 0

    @property
    def kind(self) -> str:
        """Of a head among others, by letters that repeat."""
        return (self.options["kinds"] * H)[self.number]

    @property
    def x(self) -> Tensor:
        return self.q @ self.k.T * (self.scale or self.q.shape[1] ** -0.5)


def row_softmax(x: Tensor, seen: Tensor, extra: float = 0.0) -> Tensor:
    e = torch.where(seen, x.exp(), torch.zeros_like(x))
    total = e.sum(1, keepdim=True) + extra
    return torch.where(total > 0, e / total, torch.zeros_like(e))


def rms(x: Tensor) -> Tensor:
    return x / (x.square().mean(1, keepdim=True) + 1e-6).sqrt()


def sigmoid(h: Head) -> Tensor:
    out = torch.zeros_like(h.x)
    for i, j in h.seen.nonzero().tolist():
        out[i, j] = 1 / (1 + int(h.seen[i].sum()) * math.exp(-h.x[i, j]))
    return out


def centred(h: Head) -> Tensor:
    out = row_softmax(h.x, h.seen)
    for i in range(len(out)):
        out[i][h.seen[i]] -= 1 / max(1, int(h.seen[i].sum()))
    return out


def doubly(h: Head) -> Tensor:
    xi, e = torch.zeros_like(h.x), h.x.exp()
    for i, j in h.seen.nonzero().tolist():
        column = e[:, j][h.seen[:, j] & h.rows]
        xi[i, j] = e[i, j] / (column.sum() if len(column) else 1.0)
    total = xi.sum(1, keepdim=True)
    return torch.where(total > 0, xi / total, xi)


def fastmax(h: Head) -> Tensor:
    order, norm, scale = h.options.get("order", 2), h.options.get("norm", "token"), h.scale
    q, k = h.q, h.k
    if norm == "token":
        q, k = q / q.norm(dim=1, keepdim=True), k / k.norm(dim=1, keepdim=True)
    if norm == "sequence":
        q, k = (y - y[real].mean(0) for y, real in ((q, h.rows), (k, h.seen[0])))
        q, k = (
            torch.where(real[:, None], y / y[real].norm(dim=1).max().clamp_min(1e-300), 0 * y)
            for y, real in ((q, h.rows), (k, h.seen[0]))
        )
    x = q @ k.T * (scale or (1.0 if norm else D**-0.5))
    f = sum(x**n / math.factorial(n) for n in range(order + 1)) * h.seen
    total = f.sum(1, keepdim=True)
    return torch.where(total > 0, f / total, f)


def linear(h: Head) -> Tensor:
    q, k = (torch.nn.functional.elu(y) + 1 for y in (h.q * (h.scale or 1.0), h.k))
    f = (q @ k.T) * h.seen
    total = f.sum(1, keepdim=True)
    return torch.where(total > 0, f / total, f)


def delta(h: Head) -> Tensor:
    """The recurrence, with one unit value per key: what is read is the row of the map."""
    T, S = h.seen.shape
    beta, decay = h.options["beta"], h.options.get("log_decay", torch.zeros(S, dtype=torch.float64))
    memory, rows = torch.zeros(h.q.shape[1], S, dtype=torch.float64), []
    for t in range(S):
        key = h.k[t] / h.k[t].norm()
        if h.seen[-1, t]:  # the last query sees every real key
            memory = memory * decay[t].exp()
            value = torch.eye(S, dtype=torch.float64)[t]
            memory = memory + torch.outer(key, beta[t] * (value - memory.T @ key))
        if t >= S - T:
            query = h.q[t - S + T]
            rows.append(memory.T @ (query / query.norm()) * (h.scale or 1.0))
    return torch.stack(rows)


def binary(h: Head) -> Tensor:
    T, S = h.seen.shape
    out = torch.zeros(T, S, dtype=torch.float64)
    for i in range(T):
        mine = h.q[i] if h.rows_differ else h.q[h.rows]
        mu_q, mu_k = mine.abs().mean(), h.k[h.seen[i]].abs().mean()
        for j in range(S):
            equal = int(((h.q[i] >= 0) == (h.k[j] >= 0)).sum())
            out[i, j] = mu_q * mu_k * (2 * equal - D) * (h.scale or D**-0.5)
    return row_softmax(out + h.options.get("bias", 0.0), h.seen)


def differential(h: Head) -> Tensor:
    scale, d = h.scale or (D // 2) ** -0.5, D // 2
    first, second = (row_softmax(h.q[:, some] @ h.k[:, some].T * scale, h.seen) for some in (slice(d), slice(d, None)))
    return first - h.options["lam"] * second


def gated(h: Head) -> Tensor:
    T, ones = len(h.seen), torch.ones(h.seen.shape[1], dtype=torch.float64)
    of = {name: h.options.get(name, ones) for name in ("gate", "value_gate", "key_gate", "query_gate")}
    rows = {name: of[name][len(of[name]) - T :, None] for name in ("gate", "query_gate")}
    x = (rows["query_gate"] * h.q) @ (of["key_gate"][:, None] * h.k).T * (h.scale or D**-0.5)
    return rows["gate"] * row_softmax(x, h.seen) * of["value_gate"]


def multiformer(h: Head) -> Tensor:
    """Convolutional heads token by token: what is hidden is left out first, and the map is found from unit values."""
    T, S = h.seen.shape
    if h.kind == "f":
        return row_softmax(h.x, h.seen)
    if h.kind == "l":
        near = torch.tensor([[abs(i + S - T - j) <= h.options["window"] // 2 for j in range(S)] for i in range(T)])
        return row_softmax(h.x, h.seen & near)
    stride, key_kernel, value_kernel = h.options["stride"], h.options["key_kernel"], h.options["value_kernel"][:, 0]
    real, taps = h.seen[0].nonzero()[:, 0].tolist(), len(key_kernel)
    keys, shares, start = [], [], -(stride // 2)
    while not keys or start - stride + taps < len(real) + stride // 2:
        keys.append(h.options.get("key_bias", torch.zeros(1, D))[0].double().clone())
        shares.append(torch.zeros(S, dtype=torch.float64))
        for t in range(taps):
            if 0 <= start + t < len(real):
                keys[-1] += key_kernel[t] * h.k[real[start + t]]
                shares[-1][real[start + t]] += value_kernel[t]
        start += stride
    if not real:
        return torch.zeros(T, S, dtype=torch.float64)
    x = h.q @ torch.stack(keys).T * (h.scale or D**-0.5)
    return x.softmax(1) @ torch.stack(shares)


@dataclass(frozen=True)
class Case:
    name: str
    reference: Callable[[Head], Tensor]
    options: Callable[[int, int], dict[str, Any]] = lambda T, S: {}
    label: str = ""
    smooth: bool = True  # finite differences see its gradient
    encoder: bool = False  # these options are refused when causal
    rows: bool = True  # takes a mask with a row per query


def gates(T: int, S: int) -> dict[str, Any]:
    return {"beta": draw(B, K, S, seed=5).sigmoid()}


def every_gate(T: int, S: int) -> dict[str, Any]:
    heads = {"gate": H, "query_gate": H, "value_gate": K, "key_gate": K}
    return {name: draw(B, many, S, seed=5 + i).sigmoid() for i, (name, many) in enumerate(heads.items())}


def convolutions(T: int, S: int) -> dict[str, Any]:
    kernels = {
        "key_kernel": draw(1, H, 5, D, seed=5),
        "value_kernel": draw(1, H, 5, 1, seed=6),
        "key_bias": draw(1, H, 1, D, seed=7),
    }
    return {"kinds": "clf", "window": 4, "stride": 2} | kernels


CASES = [
    Case("softmax", lambda h: row_softmax(h.x, h.seen)),
    Case("softcap", lambda h: row_softmax(2 * torch.tanh(h.x / 2), h.seen), lambda T, S: {"cap": 2.0}),
    Case(
        "qk_norm",
        lambda h: row_softmax(
            rms(h.q) @ rms(h.k).T * (h.scale or D**-0.5) * h.options["query_gain"] * h.options["key_gain"], h.seen
        ),
        lambda T, S: {"query_gain": 1 + draw(H, seed=7) ** 2, "key_gain": 1 + draw(K, seed=8) ** 2},
    ),
    Case("sigmoid", sigmoid),
    Case("softmax_plus_one", lambda h: row_softmax(h.x, h.seen, 1.0)),
    Case(
        "learned_sink",
        lambda h: row_softmax(h.x, h.seen, math.exp(h.options["sinks"])),
        lambda T, S: {"sinks": draw(H, seed=7)},
    ),
    Case("centred", centred),
    Case("doubly_normalized", doubly),
    Case(
        "hybrid_normalized",
        lambda h: h.options["mix"] * doubly(h) + (1 - h.options["mix"]) * row_softmax(h.x, h.seen),
        lambda T, S: {"mix": draw(H, seed=7).sigmoid()},
    ),
    Case("fastmax", fastmax),
    Case("fastmax", fastmax, lambda T, S: {"order": 1}, "order 1"),
    Case("fastmax", fastmax, lambda T, S: {"norm": None}, "as it is"),
    Case("fastmax", fastmax, lambda T, S: {"norm": "sequence"}, "sequence", encoder=True),
    Case("linear", linear),
    Case("delta", delta, gates),
    Case("gated_delta", delta, lambda T, S: gates(T, S) | {"log_decay": -draw(B, K, S, seed=6).exp()}),
    Case("binary", binary, lambda T, S: {"bias": draw(1, H, 1, S, seed=7)}, smooth=False),
    Case("binary", binary, label="no bias", smooth=False),
    Case("differential", differential, lambda T, S: {"lam": 0.3 + 0.1 * draw(H, seed=7).abs()}),
    Case("gated", gated, lambda T, S: {"gate": draw(B, H, S, seed=5).sigmoid()}),
    Case("gated", gated, every_gate, "everywhere"),
    Case("multiformer", multiformer, convolutions, rows=False),
]


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def operands(T: int, S: int, heads: int = H, kv: int = K) -> tuple[Tensor, Tensor, Tensor]:
    return draw(B, heads, T, D, seed=1), draw(B, kv, S, D, seed=2), draw(B, kv, S, E, seed=3)


def padding_of(S: int) -> Tensor:
    """The second sample is padded on the left by two, and lacks one token inside."""
    out = torch.ones(B, S, dtype=torch.bool)
    out[1, :2] = out[1, 5] = False
    return out


def part(value: Any, b: int, h: int) -> Any:
    """An option for one head: (H,), (B, K, S) or (b, h, t, S)."""
    if not isinstance(value, Tensor) or value.ndim == 0:
        return value
    if value.ndim == 1:
        return value[h * len(value) // H]
    if value.ndim == 3:
        return value[b, h * value.shape[1] // H]
    return value[b if len(value) > 1 else 0, h if value.shape[1] > 1 else 0]


def expected(
    case: Case, q: Tensor, k: Tensor, seen: Tensor, rows: Tensor, differ: bool, scale: float | None, options: Any
) -> Tensor:
    out = torch.empty(B, H, q.shape[2], k.shape[2], dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            of_head = {name: part(value, b, h) for name, value in options.items()}
            out[b, h] = case.reference(
                Head(q[b, h], k[b, h // (H // K)], seen[b, h], scale, rows[b], differ, of_head, h)
            )
    return out


def views(T: int, S: int) -> dict[str, tuple[dict[str, Any], Tensor]]:
    """Arguments and the (B, H, T, S) booleans that they stand for."""
    everything = torch.ones(B, H, T, S, dtype=torch.bool)
    causal = everything.tril(S - T)
    padding = padding_of(S)
    of_keys = padding[:, None, None].expand(B, H, T, S)
    rows = draw(B, H, T, S, seed=4) > -0.3
    rows[0, 1, 2] = False  # a row that sees nothing
    keys = (draw(1, H, 1, S, seed=4) > -0.8).clone()
    keys[0, :, 0, :3] = True
    return {
        "all": ({}, everything),
        "causal": (dict(causal=True), causal),
        "padded": (dict(padding=padding, query_padding=padding[:, S - T :]), of_keys),
        "padded and causal": (dict(padding=padding, causal=True), of_keys & causal),
        "keys per head": (dict(mask=keys), keys.expand(B, H, T, S)),
        "keys per head, causal": (dict(mask=keys, causal=True), keys & causal),
        "rows": (dict(mask=rows), rows),
        "rows, causal": (dict(mask=rows, causal=True), rows & causal),
    }


def takes(case: Case, m: Mechanism, causal: bool, has_rows: bool) -> bool:
    if has_rows and (m.cost == "linear" or not case.rows):
        return False
    return m.is_causal_safe and not case.encoder if causal else m.causal != "only"


def case_id(case: Case) -> str:
    return f"{case.name} {case.label}".strip()
