"""Kernels for weights that no fused attention knows, and for the delta rule's recurrence: against float64, written out.

Triton runs on the CPU in its interpreter, in a process of its own; on a GPU the same checks run compiled.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from locater.kernels.dispatch import default_backend
from locater.kernels.terms import LARGEST_CAP, Terms
from locater_lab.mechanisms import delta
from locater_lab.mechanisms.delta import chunk_scan
from locater_lab.mechanisms.kernels import weighted
from tests.processes import interpreted

# what is seen, batch, query heads, key heads, queries, keys, channels of queries and of values
SHAPES = {
    "causal": (True, 2, 2, 2, 70, 70, 16, 16),
    "all keys": (False, 1, 2, 2, 45, 70, 16, 16),
    "kept keys": (True, 1, 2, 1, 20, 150, 16, 16),
    "odd sizes, groups": (True, 1, 4, 2, 131, 131, 24, 40),
    "one query": (True, 1, 2, 2, 1, 33, 16, 16),
}
KINDS = ("softcap", "sigmoid")


def drawn(*shape: int, seed: int, device: str, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype).requires_grad_()


def written_out(
    kind: str, q: Tensor, k: Tensor, v: Tensor, row: Tensor, seen: Tensor, scale: float, cap: float
) -> Tensor:
    group = q.shape[1] // k.shape[1]
    z = scale * q @ k.repeat_interleave(group, 1).mT
    if kind == "sigmoid":
        weights = torch.sigmoid(z + row[..., None])
    else:
        weights = (cap * torch.tanh(z / cap)).masked_fill(~seen, -1e300).softmax(-1)
    return (weights * seen) @ v.repeat_interleave(group, 1)


def check_weights(name: str, kind: str, padded: bool, device: str, dtype: torch.dtype, tolerance: float) -> None:
    """Output and every gradient; with padding a row may see nothing."""
    from locater_lab.mechanisms.kernels import triton_weighted

    causal, B, H, K, T, S, D, E = SHAPES[name]
    scale, cap = 0.7, 2.5
    q, k, v = (
        drawn(B, h, t, d, seed=n, device=device, dtype=dtype)
        for n, (h, t, d) in enumerate([(H, T, D), (K, S, D), (K, S, E)])
    )
    row = drawn(B, H, T, seed=3, device=device, dtype=torch.float32)
    grad = drawn(B, H, T, E, seed=4, device=device, dtype=dtype).detach()
    keys = (torch.arange(S) >= torch.arange(B)[:, None] * 2 + 3)[:, None].to(device) if padded else None  # (B, 1, S)
    shift = row.detach() if kind == "sigmoid" else None
    with torch.no_grad():
        out, kept = triton_weighted.forward(q, k, v, shift, keys, scale, cap, causal)
        found = triton_weighted.backward(q, k, v, out, kept, grad, keys, scale, cap, causal, kind == "sigmoid")
    exact = [x.detach().double().cpu().requires_grad_() for x in (q, k, v, row)]
    seen = torch.ones(B, H, T, S, dtype=torch.bool)
    if causal:
        seen = seen.tril(S - T)
    if keys is not None:
        seen = seen & keys.cpu()[:, :, None]
    want = written_out(kind, *exact, seen, scale, cap)
    grads = torch.autograd.grad(want, exact, grad.double().cpu(), allow_unused=True)
    for label, a, b in zip("out q k v shift".split(), (out, *found), (want, *grads), strict=True):
        if b is not None:
            worst = (a.double().cpu() - b).abs().max() / (b.abs().max() + 1e-9)
            assert worst < tolerance, f"{name}, {kind}, padded {padded}, {label}: {worst:.2e}"


def check_all(device: str, dtype: torch.dtype, tolerance: float, names: tuple[str, ...] = tuple(SHAPES)) -> None:
    for name in names:
        for kind in KINDS:
            for padded in (False, True):
                check_weights(name, kind, padded, device, dtype, tolerance)


def check_extremes(device: str) -> None:
    """A key that is not a number is not hidden from those that see it, on the edge of a mask either; others do not see
    it.
    """
    from locater_lab.mechanisms.kernels import triton_weighted

    q, k, v = (drawn(1, 1, 40, 16, seed=n, device=device, dtype=torch.float32).detach() for n in range(3))
    k[0, 0, 5] = float("nan")
    for shift in (None, torch.zeros(1, 1, 40, device=device)):
        out = triton_weighted.forward(q, k, v, shift, None, 0.25, 30.0, True)[0]
        assert out[0, 0, 5:].isnan().all()
        assert out[0, 0, :5].isfinite().all()


def check_operations(device: str) -> None:
    """What PyTorch asks of an operation: shapes without data, gradients, no input changed; and that gradients are those
    of the loop.
    """
    q, k, v = (drawn(1, 2, 20, 16, seed=n, device=device, dtype=torch.float32) for n in range(3))
    row = drawn(1, 2, 20, seed=3, device=device, dtype=torch.float32)
    for shift in (None, row):
        torch.library.opcheck(weighted._weighted, (q, k, v, shift, None, 0.25, 30.0, True))
    leaves = [0.3 * drawn(*shape, seed=n, device=device, dtype=torch.float32).detach() for n, shape in enumerate(
        [(2, 3, 16, 16), (2, 3, 16, 16), (2, 3, 16, 16), (2, 3)])]  # fmt: skip
    leaves = [x.requires_grad_() for x in leaves]
    torch.library.opcheck(delta._scan, tuple(leaves))
    weight = [drawn(2, 3, 16, 16, seed=n, device=device, dtype=torch.float32).detach() for n in (7, 8)]
    exact = [x.detach().double().cpu().requires_grad_() for x in leaves]
    grads = torch.autograd.grad(delta._scan(*leaves), leaves, weight)
    wanted = torch.autograd.grad(chunk_scan(*exact), exact, [x.double().cpu() for x in weight])
    for a, b in zip(grads, wanted, strict=True):
        assert (a.cpu() - b).abs().max() < 1e-5 * (1 + b.abs().max())


def check_scan(device: str) -> None:
    """States, corrections and gradients, over sizes that are no powers of two."""
    from locater_lab.mechanisms.kernels import triton_recurrence

    for heads, N, C, D, E in ((3, 4, 16, 16, 16), (2, 3, 11, 24, 40)):
        shapes = [(heads, N, C, E), (heads, N, C, D), (heads, N, C, D), (heads, N)]
        leaves = [
            0.3 * drawn(*shape, seed=n, device=device, dtype=torch.float32).detach() for n, shape in enumerate(shapes)
        ]
        given = [drawn(heads, N, a, E, seed=5 + a, device=device, dtype=torch.float32).detach() for a in (D, C)]
        states, new = triton_recurrence.forward(*leaves)
        down = triton_recurrence.backward(*leaves[1:], *given)[1]
        exact = [x.double().cpu().requires_grad_() for x in leaves]
        want = chunk_scan(*exact)  # in float64 on a CPU, the loop as it is written
        for a, b in zip((states, new), want, strict=True):
            assert (a.cpu() - b).abs().max() < 1e-5
        wanted = torch.autograd.grad(want, exact[0], [x.double().cpu() for x in given])[0]
        assert (down.cpu() - wanted).abs().max() < 1e-5 * (1 + wanted.abs().max())


def test_the_recurrence_by_hand() -> None:
    """One channel: M doubles its way to what the key holds."""
    own, keys = torch.tensor([3.0, 5.0, 7.0]), torch.tensor([1.0, 2.0, 1.0])
    carried, kept = torch.tensor([1.0, 0.5, 2.0]), torch.tensor([1.0, 0.5, 1.0])
    states, new = chunk_scan(own.view(1, 3, 1, 1), carried.view(1, 3, 1, 1), keys.view(1, 3, 1, 1), kept.view(1, 3))
    assert states.flatten().tolist() == [0.0, 3.0, 0.5 * 3 + 2 * 3.5]
    assert new.flatten().tolist() == [3.0, 5 - 1.5, 7 - 2 * 8.5]


def test_kernels_in_the_interpreter() -> None:
    weights = f"t.check_all('cpu', torch.float32, 1e-5, {tuple(SHAPES)[:1]!r})"
    interpreted(__name__, f"{weights}; t.check_scan('cpu'); t.check_operations('cpu')")


@pytest.mark.slow
def test_every_shape_in_the_interpreter() -> None:
    weights = f"t.check_all('cpu', torch.float32, 1e-5, {tuple(SHAPES)[1:]!r})"
    half = "t.check_all('cpu', torch.float16, 4e-3, ('causal',))"
    interpreted(__name__, f"{weights}; {half}; t.check_extremes('cpu')")


def test_a_cap_that_hardly_caps_is_left_to_pytorch() -> None:
    """cap tanh(x / cap) by one exponential loses its digits as the cap grows."""
    pytest.importorskip("triton", reason="Triton is only made for Linux")
    on_gpu: Any = SimpleNamespace(device=torch.device("cuda"), dtype=torch.float32)
    assert default_backend(on_gpu, Terms(1.0, softcap=50.0)) == "triton"
    assert default_backend(on_gpu, Terms(1.0, softcap=1e6)) == "torch"
    for cap, most in ((50.0, 1e-5), (LARGEST_CAP, 1e-4)):
        x = torch.linspace(-5, 5, 11)
        by_one = cap * (1 - 2 / (1 + torch.exp2(x * (2 * 1.4426950408889634 / cap))))
        assert (by_one - cap * torch.tanh(x.double() / cap)).abs().max() < most


@pytest.mark.gpu
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2), (torch.float16, 4e-3)])
def test_weights_on_the_gpu(dtype: torch.dtype, tolerance: float) -> None:
    check_all("cuda", dtype, tolerance)


@pytest.mark.gpu
def test_the_recurrence_and_operations_on_the_gpu() -> None:
    check_scan("cuda")
    check_operations("cuda")
    check_extremes("cuda")
