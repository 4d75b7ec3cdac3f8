"""Kernels of single mechanisms (polynomial weights, features, the delta rule, doubly normalized, windows): output and every
gradient against the formula written out in float64.

Triton runs on the CPU in its interpreter, in a process of its own; on a GPU the same checks run compiled.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import normalize

from locater_lab.mechanisms import delta, doubly_normalized, linear
from locater_lab.mechanisms.kernels import weighted
from tests.processes import interpreted

# batch, query heads, key heads, queries, keys, channels of queries and of values, whether keys are padded
SHAPES = {
    "plain": (1, 2, 2, 140, 140, 16, 16, False),
    "padded, groups, odd sizes": (1, 2, 1, 70, 70, 24, 16, True),
    "two samples": (2, 4, 2, 70, 70, 16, 40, True),
    "kept keys": (1, 2, 1, 20, 150, 16, 16, False),
}
WIDE = {  # heads as models have them: other tiles and more warps, too slow for the interpreter
    "heads of 64": (1, 2, 1, 140, 140, 64, 64, False),
    "heads of 128": (1, 2, 2, 140, 140, 128, 128, True),
    "wide values": (1, 2, 2, 70, 70, 64, 128, False),
}


def seen_keys(q: Tensor, k: Tensor, keys: Tensor | None, causal: bool) -> Tensor:
    T, S = q.shape[2], k.shape[2]
    seen = torch.ones(T, S, dtype=torch.bool).tril(S - T if causal else S).expand(*q.shape[:2], T, S)
    return seen if keys is None else seen & keys[:, :, None]


def divided(f: Tensor, seen: Tensor, v: Tensor) -> Tensor:
    f = f * seen
    total = f.sum(-1, keepdim=True)
    return f @ v / total.masked_fill(total <= 0, 1.0)


def polynomial_formula(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, order: int, unit: bool, scale: float
) -> Tensor:
    x = scale * (normalize(q, dim=-1) @ normalize(k, dim=-1).mT if unit else q @ k.mT)
    return divided(1 + x if order == 1 else 1 + x + x.square() / 2, seen, v)


def feature_formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, unit: bool, scale: float) -> Tensor:
    if unit:
        return polynomial_formula(q, k, v, seen, order=1, unit=True, scale=scale)
    phi = [torch.nn.functional.elu(x) + 1 for x in (scale * q, k)]
    return divided(phi[0] @ phi[1].mT, seen, v)


def doubly_formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float, mix: Tensor | None = None) -> Tensor:
    logits = scale * q @ k.mT
    xi = logits.exp() * seen / (logits.exp() * seen).sum(2, keepdim=True).clamp_min(1e-300)
    first = xi / xi.sum(3, keepdim=True).clamp_min(1e-300)
    second = logits.exp() * seen / (logits.exp() * seen).sum(3, keepdim=True).clamp_min(1e-300)
    u = 1.0 if mix is None else mix[:, None, None]
    return (u * first + (1 - u) * second) @ v


def window_formula(q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float, window: int) -> Tensor:
    T, S = seen.shape[2:]
    near = (torch.arange(S) - torch.arange(S - T, S)[:, None]).abs() <= window
    weights = (scale * q @ k.mT).masked_fill(~(seen & near), -1e300).softmax(-1) * (seen & near)
    return weights @ v


def delta_formula(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, *, scale: float, beta: Tensor, log_decay: Tensor | None = None
) -> Tensor:
    """Token by token."""
    q, k = normalize(q, dim=-1), normalize(k, dim=-1)
    T, S = seen.shape[2:]
    group = q.shape[1] // beta.shape[1]
    beta, decay = (
        x.repeat_interleave(group, 1) for x in (beta, torch.zeros_like(beta) if log_decay is None else log_decay)
    )
    memory, out = torch.zeros(*q.shape[:2], q.shape[3], v.shape[3], dtype=q.dtype), []
    for t in range(S):
        counts = seen[:, :, -1, t]
        decayed = torch.where(counts, decay[:, :, t], 0.0).exp()[..., None, None] * memory
        share = torch.where(counts, beta[:, :, t], 0.0)[..., None]
        found = torch.einsum("bhde,bhd->bhe", decayed, k[:, :, t])
        memory = decayed + k[:, :, t, :, None] * (share * (v[:, :, t] - found))[:, :, None]
        if t >= S - T:
            out.append(scale * torch.einsum("bhde,bhd->bhe", memory, q[:, :, t - (S - T)]))
    return torch.stack(out, 2)


@dataclass(frozen=True)
class Case:
    call: Callable[..., Tensor]
    formula: Callable[..., Tensor]
    options: dict[str, Any] = field(default_factory=dict)
    gates: tuple[str, ...] = ()  # tensors that take gradients: of a head ("mix"), or of a key
    causal: bool = True
    only_causal: bool = False  # the call does not take `causal`


def delta_call(*operands: Tensor, **options: Any) -> Tensor:
    return delta.delta_rule(*operands, unit=True, **{"log_decay": None} | options)


FEATURES = {"unit": False, "scale": 0.7}
CASES = {
    "polynomial": Case(linear.polynomial_attention, polynomial_formula, {"order": 2, "unit": True, "scale": 0.9}),
    "polynomial, all keys, no norm": Case(
        linear.polynomial_attention, polynomial_formula, {"order": 2, "unit": False, "scale": 0.3}, causal=False
    ),
    "polynomial, order 1": Case(
        linear.polynomial_attention, polynomial_formula, {"order": 1, "unit": True, "scale": 0.9}
    ),
    "features": Case(linear.feature_attention, feature_formula, FEATURES),
    "features, all keys": Case(linear.feature_attention, feature_formula, FEATURES, causal=False),
    "features with a constant": Case(linear.feature_attention, feature_formula, {"unit": True, "scale": 0.9}),
    "delta": Case(delta_call, delta_formula, {"scale": 0.8}, ("beta",), only_causal=True),
    "gated delta": Case(delta_call, delta_formula, {"scale": 0.8}, ("beta", "log_decay"), only_causal=True),
    "doubly": Case(doubly_normalized.doubly_attention, doubly_formula, {"scale": 0.5}, causal=False, only_causal=True),
    "doubly, mixed": Case(doubly_normalized.doubly_attention, doubly_formula, {"scale": 0.5}, ("mix",), False, True),
    "window": Case(weighted.weighted_attention, window_formula, {"scale": 0.5, "window": 9}, causal=False),
}


def drawn(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def gate(name: str, B: int, H: int, K: int, S: int, device: str) -> Tensor:
    share = torch.rand((H,) if name == "mix" else (B, K, S), generator=torch.Generator().manual_seed(9))
    return (-0.3 * share if name == "log_decay" else share).to(device)


def check(name: str, shape: str, device: str, dtype: torch.dtype, tolerance: float) -> None:
    case, (B, H, K, T, S, D, E, padded) = CASES[name], (SHAPES | WIDE)[shape]
    sizes = [(B, H, T, D), (B, K, S, D), (B, K, S, E)]
    tensors = [drawn(*size, seed=n, device=device, dtype=dtype) for n, size in enumerate(sizes)]
    gates = {label: gate(label, B, H, K, S, device) for label in case.gates}
    leaves = [x.requires_grad_() for x in (*tensors, *gates.values())]
    keys = (torch.arange(S) >= torch.arange(B)[:, None] * 2 + 3)[:, None] if padded else None  # (B, 1, S)
    more = {} if case.only_causal else {"causal": case.causal}
    seen_by = None if keys is None else keys.to(device)
    out = case.call(*leaves[:3], keys=seen_by, **more, **case.options, **dict(zip(gates, leaves[3:], strict=True)))
    grad = drawn(B, H, T, E, seed=8, device=device, dtype=dtype)
    found = torch.autograd.grad(out, leaves, grad)
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    q, k, v = exact[0], *(x.repeat_interleave(H // K, 1) for x in exact[1:3])
    options = case.options | dict(zip(gates, exact[3:], strict=True))
    want = case.formula(q, k, v, seen_keys(q, k, keys, case.causal), **options)
    wanted = torch.autograd.grad(want, exact, grad.double().cpu())
    for label, a, b in zip(("out", "q", "k", "v", *gates), (out, *found), (want, *wanted), strict=True):
        worst = (a.double().cpu() - b).abs().max() / b.abs().max()
        assert worst < tolerance, f"{name}, {shape}, {label}: {worst:.2e}"


def check_all(device: str, dtype: torch.dtype, tolerance: float, shapes: tuple[str, ...] = tuple(SHAPES)) -> None:
    for name in CASES:
        for shape in shapes:
            check(name, shape, device, dtype, tolerance)


def check_repeated_keys(device: str) -> None:
    """Every key the same and replaced by the next: powers of what a chunk inverts would grow to 1e17."""
    k = torch.ones(1, 1, 130, 16, device=device)
    v = drawn(1, 1, 130, 16, seed=0, device=device, dtype=torch.float32)
    out = delta_call(k, k, v, beta=torch.ones(1, 1, 130, device=device), scale=1.0)
    assert (out - v).abs().max() < 1e-5


def check_faint_rows(device: str) -> None:
    """A row whose weights are far below those of all others: less than float32 has before they are divided."""
    q, k, v = (drawn(1, 1, 80, 16, seed=n, device=device, dtype=torch.float32).mul(2).round() for n in range(3))
    q[:, :, 5] = 0
    out = doubly_normalized.doubly_attention(q, k, v, scale=6.0)
    exact = [x.double().cpu() for x in (q, k, v)]
    assert (6 * exact[0] @ exact[1].mT).log_softmax(2).logsumexp(3)[0, 0, 5] < -50
    want = doubly_formula(*exact, seen_keys(*exact[:2], None, False), scale=6.0)
    assert (out.double().cpu() - want).abs().max() < 1e-3 * want.abs().max()


def check_operations(device: str) -> None:
    """What PyTorch asks of an operation: shapes without data, gradients, no input changed."""
    q, k, v = (drawn(1, 2, 40, 16, seed=n, device=device, dtype=torch.float32).requires_grad_() for n in range(3))
    beta, mix = (torch.rand(*shape, device=device).requires_grad_() for shape in ((1, 2, 40), (2,)))
    torch.library.opcheck(linear._polynomial, (q, k, v, None, 0.5, 2, True, True))
    torch.library.opcheck(linear._features, (q, k, v, None, 0.5, True, True))
    torch.library.opcheck(delta._rule, (q, k, v, beta, None, None, 0.5, True))
    torch.library.opcheck(doubly_normalized._doubly, (q, k, v, mix, None, None, 0.5))
    torch.library.opcheck(weighted._weighted, (q, k, v, None, None, 0.5, 0.0, False, 7))


def test_kernels_in_the_interpreter() -> None:
    padded = tuple(SHAPES)[1:2]
    extremes = "t.check_repeated_keys('cpu'); t.check_faint_rows('cpu')"
    interpreted(__name__, f"t.check_all('cpu', torch.float32, 1e-5, {padded!r}); {extremes}")


@pytest.mark.slow
def test_every_shape_in_the_interpreter() -> None:
    half = "t.check_all('cpu', torch.float16, 6e-3, ('plain',))"
    interpreted(__name__, f"t.check_all('cpu', torch.float32, 1e-5); {half}; t.check_operations('cpu')")


DTYPES = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 6e-3}
ON_GPU = [
    (dtype, shape)
    for dtype in DTYPES
    for shape in (SHAPES if dtype == torch.float16 else SHAPES | WIDE)  # float16 has kernels of one of the others
]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize(
    ("dtype", "shape"), ON_GPU
)  # apart: compiling takes long, and an error leaves the others alone
def test_kernels_on_the_gpu(dtype: torch.dtype, shape: str, name: str) -> None:
    check(name, shape, "cuda", dtype, DTYPES[dtype])


@pytest.mark.gpu
def test_operations_on_the_gpu() -> None:
    check_operations("cuda")
    check_repeated_keys("cuda")
    check_faint_rows("cuda")
