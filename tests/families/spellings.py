"""The same steps of attention in the ways that people write them in PyTorch, by the code that they are.

Queries and keys are (B, H, T, h), logits (B, H, T, S). `hidden` is True where a query may not look.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

FUSED = "functional.scaled_dot_product_attention(q, k, v, mask)"
FUSED_NUMBERS = "functional.scaled_dot_product_attention(q, k, v, mask of 0 and -inf)"
FUSED_CAUSAL = "functional.scaled_dot_product_attention(q, k, v, is_causal=True)"
BADDBMM = "torch.baddbmm(empty, q, k.mT, beta=0, alpha=c)"
BY_GROUPS = "einsum by groups, nothing repeated"
SHARED_BY_FUSED = "enable_gqa=True"
STRIDED = "k.repeat(1, n, 1, 1)"  # query head h meets key head h % G: no neighbours share one


def _per_head(q: Tensor, k: Tensor) -> Tensor:
    return torch.stack([q[:, head] @ k[:, head].mT for head in range(q.shape[1])], 1)


PRODUCTS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "q @ k.mT": lambda q, k: q @ k.mT,
    "q @ k.transpose(-2, -1)": lambda q, k: q @ k.transpose(-2, -1),
    "torch.matmul(q, k.transpose(2, 3))": lambda q, k: torch.matmul(q, k.transpose(2, 3)),
    "q.matmul(k.mT)": lambda q, k: q.matmul(k.mT),
    "torch.bmm(q, k.mT)": lambda q, k: torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).unflatten(0, q.shape[:2]),
    "einsum bhqd,bhkd->bhqk": lambda q, k: torch.einsum("bhqd,bhkd->bhqk", q, k),
    "einsum bqhd,bkhd->bhqk": lambda q, k: torch.einsum("bqhd,bkhd->bhqk", q.transpose(1, 2), k.transpose(1, 2)),
    "einsum ...id,...jd->...ij": lambda q, k: torch.einsum("...id,...jd->...ij", q, k),
    "(k @ q.mT).mT": lambda q, k: (k @ q.mT).mT,
    "(q[..., None, :] * k[..., None, :, :]).sum(-1)": lambda q, k: (q[..., None, :] * k[..., None, :, :]).sum(-1),
    "torch.stack([q[:, h] @ k[:, h].mT for h in heads], 1)": _per_head,
    "torch.linalg.matmul(q, k.mT)": lambda q, k: torch.linalg.matmul(q, k.mT),
    "einsum abid,abjd": lambda q, k: torch.einsum("abid,abjd->abij", q, k),
    "torch.linalg.vecdot(q[..., None, :], k[..., None, :, :])": lambda q, k: torch.linalg.vecdot(q[..., None, :], k[..., None, :, :]),
    "torch.matmul(q, k.mT, out=L)": lambda q, k: torch.matmul(q, k.mT, out=q.new_empty(*q.shape[:-1], k.shape[-2])),
    "k.mT.__rmatmul__(q)": lambda q, k: k.mT.__rmatmul__(q),
    BADDBMM: lambda q, k: q @ k.mT,  # the model multiplies by c in the same call
    **dict.fromkeys((FUSED, FUSED_NUMBERS, FUSED_CAUSAL), torch.matmul),  # the model mixes values in the same call
}  # fmt: skip

SCALINGS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "L * c": lambda x, c: x * c,
    "c * L": lambda x, c: c * x,
    "L.mul(c)": lambda x, c: x.mul(c),
    "L.mul_(c)": lambda x, c: x.mul_(c),
    "L *= c": lambda x, c: x.__imul__(c),
    "torch.mul(L, c)": torch.mul,
    "L.multiply(c)": lambda x, c: x.multiply(c),
    "L / r": lambda x, c: x / (1 / c),
    "L.div(r)": lambda x, c: x.div(1 / c),
    "torch.div(L, r)": lambda x, c: torch.div(x, 1 / c),
    "L.div_(r)": lambda x, c: x.div_(1 / c),
    "torch.divide(L, r)": lambda x, c: torch.divide(x, 1 / c),
    "torch.true_divide(L, r)": lambda x, c: torch.true_divide(x, 1 / c),
    "L / torch.tensor(r)": lambda x, c: x / torch.tensor(1 / c, dtype=x.dtype),
    "L * torch.full_like(L, c)": lambda x, c: x * torch.full_like(x, c),
    "torch.addcmul(zeros, L, full)": lambda x, c: torch.addcmul(torch.zeros_like(x), x, torch.full_like(x, c)),
    "torch.lerp(zeros, L, c)": lambda x, c: torch.lerp(torch.zeros_like(x), x, c),
    "operator.mul(L, c)": operator.mul,
    "L.multiply_(c)": lambda x, c: x.multiply_(c),
    "L.divide_(r)": lambda x, c: x.divide_(1 / c),
    "torch.mul(L, c, out=other)": lambda x, c: torch.mul(x, torch.tensor(c, dtype=x.dtype), out=torch.empty_like(x)),
    "torch.ops.aten.mul.Tensor(L, c)": lambda x, c: torch.ops.aten.mul.Tensor(x, c),
    "torch.add(zeros, L, alpha=c)": lambda x, c: torch.add(torch.zeros_like(x), x, alpha=c),
}

# between scaled logits and what is added to them: nothing that changes a number
MOVES: dict[str, Callable[[Tensor], Tensor]] = {
    "L": lambda x: x,
    "L.contiguous().clone()": lambda x: x.contiguous().clone(),
    "L.flatten(0, 1).view_as(L)": lambda x: x.flatten(0, 1).view(x.shape),
    "L.swapaxes(1, 2).swapaxes(1, 2)": lambda x: x.swapaxes(1, 2).swapaxes(1, 2),
    "torch.cat(L.chunk(2, 1), 1)": lambda x: torch.cat(x.chunk(2, 1), 1),
    "torch.stack(L.unbind(1), 1)": lambda x: torch.stack(x.unbind(1), 1),
    "L.flip(-1).flip(-1)": lambda x: x.flip(-1).flip(-1),
    "L.ravel().view_as(L)": lambda x: x.ravel().view(x.shape),
    "L.reshape_as(L)": lambda x: x.reshape_as(x),
    "L.moveaxis(1, 2).moveaxis(2, 1)": lambda x: x.moveaxis(1, 2).moveaxis(2, 1),
    "L.type(L.dtype).to(L)": lambda x: x.type(x.dtype).to(x),
    "L.squeeze(0).unsqueeze(0)": lambda x: x.unsqueeze(0).squeeze(0),
    "torch.broadcast_to(L, L.shape)": lambda x: torch.broadcast_to(x, x.shape),
    "+L": lambda x: x.positive(),
    "L.neg().neg()": lambda x: x.neg().neg(),
    "L.nan_to_num()": lambda x: x.nan_to_num(),
    "torch.stack([L[:, h] for h in heads], 1)": lambda x: torch.stack([x[:, head] for head in range(x.shape[1])], 1),
    "L.clamp(min=least)": lambda x: x.clamp(min=LEAST),
    "torch.hstack(L.split(1, 1))": lambda x: torch.hstack(x.split(1, 1)),
    "L.tile(1, 1, 1, 1)": lambda x: x.tile(1, 1, 1, 1),
}

CAPS: dict[str, Callable[[Tensor, float], Tensor]] = {
    "c * torch.tanh(L / c)": lambda x, c: c * torch.tanh(x / c),
    "(L / c).tanh() * c": lambda x, c: (x / c).tanh() * c,
    "L.div_(c).tanh_().mul_(c)": lambda x, c: x.div_(c).tanh_().mul_(c),
    "functional.tanh(L / c) * c": lambda x, c: functional.tanh(x / c) * c,
    "c * (2 * torch.sigmoid(2 * L / c) - 1)": lambda x, c: c * (2 * torch.sigmoid(2 * x / c) - 1),
}


LEAST = torch.finfo(torch.float32).min


def _assigned(x: Tensor, hidden: Tensor) -> Tensor:
    x[hidden.expand_as(x)] = LEAST
    return x


MASKINGS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "L.masked_fill(hidden, -inf)": lambda x, hidden: x.masked_fill(hidden, -torch.inf),
    "torch.masked_fill(L, hidden, least)": lambda x, hidden: torch.masked_fill(x, hidden, LEAST),
    "L.masked_fill_(hidden, -1e9)": lambda x, hidden: x.masked_fill_(hidden, -1e9),
    "L + (-inf where hidden)": lambda x, hidden: x + torch.zeros_like(hidden, dtype=x.dtype).masked_fill(hidden, -torch.inf),
    "L + hidden * least": lambda x, hidden: x + hidden.to(x) * LEAST,
    "L + (1 - seen) * -10000": lambda x, hidden: x + (1.0 - (~hidden).to(x)) * -10000.0,
    "L.add(hidden * -1e9)": lambda x, hidden: x.add(hidden.to(x) * -1e9),
    "L += hidden * least": lambda x, hidden: x.__iadd__(hidden.to(x) * LEAST),
    "torch.where(hidden, -inf, L)": lambda x, hidden: torch.where(hidden, -torch.inf, x),
    "torch.where(seen, L, tensor(-1e9))": lambda x, hidden: torch.where(~hidden, x, torch.tensor(-1e9, dtype=x.dtype)),
    "L * seen - 1e9 * hidden": lambda x, hidden: x * (~hidden).to(x) - 1e9 * hidden.to(x),
    "L[hidden] = least": _assigned,
    "L - hidden * 1e9": lambda x, hidden: x - hidden.to(x) * 1e9,
    "-(hidden * 1e9) + L": lambda x, hidden: -(hidden.to(x) * 1e9) + x,
    "torch.where(hidden, least, L)": lambda x, hidden: torch.where(hidden, LEAST, x),
    "torch.ops.aten.masked_fill(L, hidden, -1e9)": lambda x, hidden: torch.ops.aten.masked_fill(x, hidden, -1e9),
    "torch.subtract(L, hidden * 1e9)": lambda x, hidden: torch.subtract(x, hidden.to(x) * 1e9),
}  # fmt: skip
# rows of padding that see no key are NaN with these
INFINITE = {"L.masked_fill(hidden, -inf)", "L + (-inf where hidden)", "torch.where(hidden, -inf, L)"}


def _powers(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    return powers / powers.sum(-1, keepdim=True)


def _powers_in_place(x: Tensor) -> Tensor:
    powers = x.sub(x.max(-1, keepdim=True).values).exp()
    powers /= powers.sum(dim=-1, keepdim=True)
    return powers


def _powers_over_rows(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.amax(-1, keepdim=True))
    return powers / powers.sum(-1)[..., None]


def _plain_powers(x: Tensor) -> Tensor:
    powers = x.exp()
    return torch.div(powers, torch.sum(powers, [-1], keepdim=True))


def _hidden_powers(x: Tensor) -> Tensor:
    powers = torch.exp(x - x.amax(-1, keepdim=True)) * (x > -1e4)
    return powers / powers.sum(-1, keepdim=True)


SOFTMAXES: dict[str, Callable[[Tensor], Tensor]] = {
    "functional.softmax(L, dim=-1)": lambda x: functional.softmax(x, dim=-1),
    "torch.softmax(L, -1)": lambda x: torch.softmax(x, -1),
    "L.softmax(dim=3)": lambda x: x.softmax(dim=3),
    "nn.Softmax(-1)(L)": lambda x: nn.Softmax(-1)(x),
    "functional.softmax(L, -1, dtype=float64).type_as(L)": lambda x: functional.softmax(x, -1, dtype=torch.float64).type_as(x),
    "torch.softmax(input=L, dim=-1)": lambda x: torch.softmax(input=x, dim=-1),
    "torch.special.softmax(L, -1)": lambda x: torch.special.softmax(x, -1),
    "torch.log_softmax(L, -1).exp()": lambda x: torch.log_softmax(x, -1).exp(),
    "functional.log_softmax(L, -1).exp()": lambda x: functional.log_softmax(x, -1).exp(),
    "torch.exp(torch.special.log_softmax(L, -1))": lambda x: torch.exp(torch.special.log_softmax(x, -1)),
    "(L - L.logsumexp(-1, True)).exp()": lambda x: (x - x.logsumexp(-1, keepdim=True)).exp(),
    "functional.softmin(-L, -1)": lambda x: functional.softmin(-x, -1),
    "(L - L.amax(-1, True)).softmax(-1)": lambda x: (x - x.amax(-1, keepdim=True)).softmax(-1),
    "exp(L - max) / sum": _powers,
    "exp(L - max) * (L > least) / sum": _hidden_powers,
    "exp(L - max) /= sum": _powers_in_place,
    "exp(L - max) / sum[..., None]": _powers_over_rows,
    "(L - L.logsumexp(-1).unsqueeze(-1)).exp()": lambda x: (x - x.logsumexp(-1).unsqueeze(-1)).exp(),
    "torch.div(exp(L), sum)": _plain_powers,
    "torch.ops.aten.softmax(L, -1)": lambda x: torch.ops.aten.softmax(x, -1),
    "torch.softmax(L, -1, out=P)": lambda x: torch.softmax(x, -1, out=torch.empty_like(x)),
    "L.sub(L.logsumexp(-1, True)).exp_()": lambda x: x.sub(x.logsumexp(-1, keepdim=True)).exp_(),
    "torch.softmax(L.movedim(-1, 1), 1).movedim(1, -1)": lambda x: torch.softmax(x.movedim(-1, 1), 1).movedim(1, -1),
    "L.mT.softmax(-2).mT": lambda x: x.mT.softmax(-2).mT,
}  # fmt: skip

# softmaxes that are not recognised: keys are hidden after the exponential, which no logit tells
OVER_ANOTHER_AXIS = ("L.mT.softmax(-2).mT", "torch.softmax(L.movedim(-1, 1), 1).movedim(1, -1)")
NO_SOFTMAXES = ("exp(L - max) * (L > least) / sum",)

MIXES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "P @ v": lambda p, v: p @ v,
    "torch.matmul(P, v)": torch.matmul,
    "torch.bmm(P, v)": lambda p, v: torch.bmm(p.flatten(0, 1), v.flatten(0, 1)).unflatten(0, p.shape[:2]),
    "einsum bhqk,bhkd->bhqd": lambda p, v: torch.einsum("bhqk,bhkd->bhqd", p, v),
    "einsum bhqk,bkhd->bqhd": lambda p, v: torch.einsum("bhqk,bkhd->bqhd", p, v.transpose(1, 2)).transpose(1, 2),
    "dropout(P) @ v": lambda p, v: functional.dropout(p, 0.3, training=False) @ v,
    "(v.mT @ P.mT).mT": lambda p, v: (v.mT @ p.mT).mT,
    "torch.linalg.matmul(P, v)": torch.linalg.matmul,
    "einsum ...qk,...kd": lambda p, v: torch.einsum("...qk,...kd->...qd", p, v),
    "torch.stack([P[:, h] @ v[:, h] for h in heads], 1)": lambda p, v: torch.stack([p[:, head] @ v[:, head] for head in range(p.shape[1])], 1),
    "P.type_as(v).clone() @ v": lambda p, v: p.type_as(v).clone() @ v,
    "(P[..., None] * v[:, :, None]).sum(-2)": lambda p, v: (p[..., None] * v[:, :, None]).sum(-2),
}  # fmt: skip

# (B, T, H h) to (B, H, T, h), and back
SPLITS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "x.view(B, T, H, h).transpose(1, 2)": lambda x, n: x.view(*x.shape[:2], n, -1).transpose(1, 2),
    "x.unflatten(-1, (H, h)).permute(0, 2, 1, 3)": lambda x, n: x.unflatten(-1, (n, -1)).permute(0, 2, 1, 3),
    "torch.stack(x.chunk(H, -1), 1)": lambda x, n: torch.stack(x.chunk(n, -1), 1),
    "torch.cat(x[:, None].split(h, -1), 1)": lambda x, n: torch.cat(x[:, None].split(x.shape[-1] // n, -1), 1),
    "x.reshape(B, T, H, h).movedim(2, 1)": lambda x, n: x.reshape(*x.shape[:2], n, -1).movedim(2, 1),
}
JOINS: dict[str, Callable[[Tensor], Tensor]] = {
    "y.transpose(1, 2).flatten(2)": lambda y: y.transpose(1, 2).flatten(2),
    "y.permute(0, 2, 1, 3).contiguous().view(B, T, -1)": lambda y: y.permute(0, 2, 1, 3).contiguous().view(y.shape[0], y.shape[2], -1),
    "y.transpose(1, 2).reshape(B, T, -1)": lambda y: y.transpose(1, 2).reshape(y.shape[0], y.shape[2], -1),
    "torch.cat(y.unbind(1), -1)": lambda y: torch.cat(y.unbind(1), -1),
    "torch.cat([y[:, h] for h in heads], -1)": lambda y: torch.cat([y[:, head] for head in range(y.shape[1])], -1),
}  # fmt: skip

# keys or values of G heads for groups of n neighbours
REPEATS: dict[str, Callable[[Tensor, int], Tensor]] = {
    "k.repeat_interleave(n, 1)": lambda k, n: k.repeat_interleave(n, 1),
    "k[:, :, None].expand(...).reshape(...)": lambda k, n: k[:, :, None].expand(-1, -1, n, -1, -1).reshape(k.shape[0], -1, *k.shape[2:]),
    "k[:, [0, 0, 1, 1]]": lambda k, n: k[:, [head // n for head in range(n * k.shape[1])]],
    "torch.stack([k] * n, 2).flatten(1, 2)": lambda k, n: torch.stack([k] * n, 2).flatten(1, 2),
    STRIDED: lambda k, n: k.repeat(1, n, 1, 1),
    BY_GROUPS: lambda k, n: k,
    SHARED_BY_FUSED: lambda k, n: k,
}  # fmt: skip


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, -1)
    return torch.cat([-second, first], -1)


def _halves(x: Tensor, angles: Tensor) -> Tensor:
    cos, sin = (torch.cat([f(angles)] * 2, -1).to(x) for f in (torch.cos, torch.sin))
    return x * cos + _rotate_half(x) * sin


def _two_halves(x: Tensor, angles: Tensor) -> Tensor:
    (first, second), cos, sin = x.chunk(2, -1), angles.cos().to(x), angles.sin().to(x)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def _neighbours(x: Tensor, angles: Tensor) -> Tensor:
    first, second, cos, sin = x[..., ::2], x[..., 1::2], angles.cos().to(x), angles.sin().to(x)
    return torch.stack([first * cos - second * sin, first * sin + second * cos], -1).flatten(-2)


def _complex(x: Tensor, angles: Tensor) -> Tensor:
    turn = torch.polar(torch.ones_like(angles), angles).to(torch.complex128)
    return torch.view_as_real(torch.view_as_complex(x.unflatten(-1, (-1, 2)).contiguous()) * turn).flatten(-2)


# turns of the channels of x (..., T, 2 n) by angles (T, n): of halves, or of neighbours
ROTATIONS: dict[str, dict[str, Callable[[Tensor, Tensor], Tensor]]] = {
    "half": {"x * cos + rotate_half(x) * sin": _halves, "torch.cat of two halves": _two_halves},
    "interleaved": {"torch.stack of neighbours": _neighbours, "torch.view_as_complex(x) * turn": _complex},
}

Bias = Tensor | None


def _plus(y: Tensor, bias: Bias) -> Tensor:
    return y if bias is None else y + bias


# x (B, T, d) by a stored weight (out, d)
MAPPINGS: dict[str, Callable[[Tensor, Tensor, Bias], Tensor]] = {
    "functional.linear(x, W, b)": functional.linear,
    "x @ W.mT + b": lambda x, weight, bias: _plus(x @ weight.mT, bias),
    "torch.matmul(x, W.t()) + b": lambda x, weight, bias: _plus(torch.matmul(x, weight.t()), bias),
    "b + x @ W.transpose(0, 1)": lambda x, weight, bias: x @ weight.transpose(0, 1) if bias is None else bias + x @ weight.transpose(0, 1),
    "(x @ W.mT).add_(b)": lambda x, weight, bias: x @ weight.mT if bias is None else (x @ weight.mT).add_(bias),
    "(x.flatten(0, 1) @ W.mT).view(B, T, -1) + b": lambda x, weight, bias: _plus((x.flatten(0, 1) @ weight.mT).view(*x.shape[:2], -1), bias),
    "einsum btd,ed->bte, + b": lambda x, weight, bias: _plus(torch.einsum("btd,ed->bte", x, weight), bias),
    "torch.nn.functional.conv1d(x.mT, W[..., None], b).mT": lambda x, weight, bias: functional.conv1d(x.mT, weight[..., None], bias).mT,
    "torch.inner(x, W) + b": lambda x, weight, bias: _plus(torch.inner(x, weight), bias),
    "torch.addmm(b, x, W.t())": lambda x, weight, bias: torch.addmm(bias, x.flatten(0, 1), weight.t()).view(*x.shape[:2], -1) if bias is not None else x @ weight.t(),
    "torch.tensordot(x, W, ([-1], [1])) + b": lambda x, weight, bias: _plus(torch.tensordot(x, weight, ([-1], [1])), bias),
}  # fmt: skip


SPELLINGS: dict[str, dict[str, Any]] = {
    "mapping": MAPPINGS,
    "product": PRODUCTS,
    "scaling": SCALINGS,
    "moving": MOVES,
    "capping": CAPS,
    "masking": MASKINGS,
    "softmax": SOFTMAXES,
    "mixing": MIXES,
    "splitting": SPLITS,
    "joining": JOINS,
    "repeating": REPEATS,
    "turning": {**ROTATIONS["half"], **ROTATIONS["interleaved"]},
}
