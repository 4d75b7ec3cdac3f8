"""`attention_with_statistics`: output, statistics and gradients against float64, by one kernel and in two passes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError
from locater.kernels import attention_with_statistics
from locater.kernels.fused import is_fused
from locater.kernels.terms import Terms
from tests.kernels.test_statistics import NAMES, compare, exact, inputs, masks
from tests.processes import interpreted

ONE_PASS = ("plain", "causal", "window", "causal-window", "alibi", "sinks", "softcap")


def output(q: Tensor, k: Tensor, v: Tensor, **terms: Any) -> Tensor:
    """The whole map in float64, then the product with the values."""
    q, k, v = (x.double() for x in (q, k, v))
    (B, H, T, D), S = q.shape, k.shape[2]
    group = H // k.shape[1]
    logits = q @ k.repeat_interleave(group, 1).mT * (terms.get("scale") or D**-0.5)
    at, to = torch.arange(S - T, S, device=q.device)[:, None], torch.arange(S, device=q.device)
    if terms.get("alibi") is not None:
        logits = logits - terms["alibi"].double().view(-1, 1, 1) * (at - to).abs()
    if terms.get("bias") is not None:
        logits = logits + terms["bias"].double()
    if terms.get("softcap"):
        logits = terms["softcap"] * torch.tanh(logits / terms["softcap"])
    seen = torch.ones(B, H, T, S, dtype=torch.bool, device=q.device)
    seen = seen & (to <= at) if terms.get("causal") else seen
    seen = seen & ((at - to).abs() < terms["window"]) if terms.get("window") else seen
    if terms.get("padding") is not None:
        seen = seen & terms["padding"][:, None, None]
    if terms.get("documents") is not None:
        seen = seen & (terms["documents"][:, None, S - T :, None] == terms["documents"][:, None, None, :])
    seen = seen & terms["mask"] if terms.get("mask") is not None else seen
    logits = logits.masked_fill(~seen, -1e30)
    if terms.get("sinks") is not None:
        logits = torch.cat([logits, terms["sinks"].double().view(1, -1, 1, 1).expand(B, H, T, 1)], -1)
    return (logits.softmax(-1)[..., :S] * seen) @ v.repeat_interleave(group, 1)


def drawn(
    T: int, S: int, device: str = "cpu", dtype: torch.dtype = torch.float32, D: int = 16, E: int = 24
) -> list[Tensor]:
    q, k = inputs(T=T, S=S, device=device, dtype=dtype, D=D)
    v = torch.randn(*k.shape[:3], E, generator=torch.Generator().manual_seed(9)).to(device, dtype)
    return [q, k, v]


def check(
    names: tuple[str, ...],
    device: str,
    dtype: torch.dtype,
    tolerance: float,
    backend: Any,
    by: float,
    sizes: tuple[int, int] = (16, 24),
) -> None:
    for name in names:
        for T, S in ((37, 50), (150, 150)):
            q, k, v = drawn(T, S, device, dtype, *sizes)
            k[:, :, 40:] *= by  # at 40 far beyond what the first keys have
            terms = masks(2, 4, T, S, device)[name]
            out, stats = attention_with_statistics(q, k, v, first=3, backend=backend, **terms)
            want = exact(q, k, first=3, **terms)
            del want["received"]
            compare(stats, want, tolerance)
            reference = output(q, k, v, **terms)
            room = tolerance * 10 if dtype == torch.float32 else 2e-2
            assert (out.double() - reference).abs().max() < room * (1 + reference.abs().max()), name


@pytest.mark.parametrize("name", NAMES)
def test_in_two_passes(name: str) -> None:
    check((name,), "cpu", torch.float32, 1e-4, None, 1.0)


@pytest.mark.parametrize("name", ["plain", "causal", "left-padding", "softcap", "mask", "sinks"])
def test_gradients_in_two_passes(name: str) -> None:
    """Of the output; rows that see nothing have none."""
    leaves = [x.double().requires_grad_() for x in drawn(21, 30)]
    terms = masks(2, 4, 21, 30, "cpu")[name]
    weight = torch.randn(2, 4, 21, 24, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    ours = torch.autograd.grad(attention_with_statistics(*leaves, **terms)[0], leaves, weight)
    wanted = torch.autograd.grad(output(*leaves, **terms), leaves, weight)
    for a, b in zip(ours, wanted, strict=True):
        assert (a - b).abs().max() < 1e-9 * b.abs().max()


def test_what_one_kernel_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Half precision on an H100, heads of up to 128, no masks but causal and window, no gradients."""
    pytest.importorskip("triton", reason="Triton is only made for Linux")
    from locater.kernels import triton_parts

    cards = {"cuda:0": 9, "cuda:1": 8}
    monkeypatch.setattr(triton_parts, "_capability", lambda device: cards[str(device)])

    def like(dtype: torch.dtype, T: int = 64, size: int = 64, grad: bool = False, card: int = 0) -> Any:
        device = torch.device("cuda", card)
        return SimpleNamespace(device=device, dtype=dtype, shape=(1, 2, T, size), requires_grad=grad)

    half, full = like(torch.bfloat16), like(torch.float32)
    assert is_fused(half, half, half, Terms(causal=True))
    assert is_fused(half, half, half, Terms(causal=True, window=7, softcap=30.0))
    larger = like(torch.bfloat16, size=128)
    assert is_fused(larger, larger, larger, Terms(causal=True))
    assert not is_fused(full, full, full, Terms(causal=True))
    older = like(torch.bfloat16, card=1)
    assert not is_fused(older, older, older, Terms(causal=True))
    assert not is_fused(half, half, half, Terms(causal=True, padding=torch.ones(1, 64, dtype=torch.bool)))
    assert not is_fused(half, half, half, Terms(causal=True, scale=-1.0))
    wide, trained = like(torch.bfloat16, size=256), like(torch.bfloat16, grad=True)
    assert not is_fused(wide, wide, wide, Terms())
    assert not is_fused(trained, trained, trained, Terms(causal=True))
    with torch.no_grad():
        assert is_fused(trained, trained, trained, Terms(causal=True))


def test_what_does_not_fit_is_named() -> None:
    q, k, v = drawn(5, 7)
    with pytest.raises(LocaterError, match="v has shape"):
        attention_with_statistics(q, k, v[:, :, :3])
    with pytest.raises(LocaterError, match="leave the backend out"):
        attention_with_statistics(q.requires_grad_(), k, v, backend="triton")


# ---- Triton ----


def test_one_pass_in_the_interpreter() -> None:
    """float16 stands for half precision, since the interpreter cannot multiply bfloat16."""
    few = "t.check(('causal', 'causal-window', 'sinks'), 'cpu', torch.float16, 1e-4, 'triton', 1.0)"
    far = "t.check(('plain',), 'cpu', torch.float16, 1e-4, 'triton', 40.0)"
    interpreted(__name__, f"{few}; {far}")


@pytest.mark.slow
def test_one_pass_with_every_term_in_the_interpreter() -> None:
    both = (f"t.check({ONE_PASS!r}, 'cpu', torch.float32, 1e-4, 'triton', {by})" for by in (1.0, 40.0))
    interpreted(__name__, "; ".join(both))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ONE_PASS)
def test_one_pass_on_the_gpu(name: str) -> None:
    for dtype in (torch.bfloat16, torch.float16):
        for by in (1.0, 4.0, 40.0):
            check((name,), "cuda", dtype, 1e-4, None, by)
    for sizes in ((64, 64), (128, 128), (128, 64)):
        check((name,), "cuda", torch.bfloat16, 1e-4, None, 4.0, sizes)
