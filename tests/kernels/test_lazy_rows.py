"""The kernel of long rows, whose reference stays that of the first keys: against float64, in the interpreter.

Its sums are relative to the first tile's maximum, so what can go wrong is growth after that tile.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from locater.kernels import attention_statistics
from tests.kernels.test_statistics import compare, exact, inputs
from tests.processes import interpreted

TERMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"causal": True},
    "capped": {"causal": True, "softcap": 3.0, "scale": 1.0},
    "slopes": {"causal": True, "alibi": torch.tensor([0.1, 0.5, 0.0, 1.0])},
    "sinks": {"causal": True, "sinks": torch.tensor([0.0, 9.0, -3.0, 2.0])},
}


def grown(q: Tensor, k: Tensor, by: float) -> Tensor:
    """Keys that grow after the first 150, so that logits do."""
    k = k.clone()
    k[:, :, 150:] *= by
    return k


def check_lazy(device: str, dtype: torch.dtype, tolerance: float, names: list[str], size: int = 16) -> None:
    from locater.kernels import triton_lazy

    triton_lazy.LEAST_KEYS = 1
    for name in names:
        for T, S in ((70, 200), (150, 150))[: 1 if size == 16 else 2]:
            for by in (1.0, 4.0, 40.0):  # within the reach of the first tile, at its end, and far beyond
                q, k = inputs(B=1, T=T, S=S, D=size, dtype=dtype, device=device)
                k = grown(q, k, by)
                terms = {n: x.to(device) if isinstance(x, Tensor) else x for n, x in TERMS[name].items()}
                found = attention_statistics(q, k, first=3, per_key=by == 1.0, backend="triton", **terms)
                want = exact(q, k, first=3, **terms)
                if by > 1:
                    del want["received"]
                compare(found, want, tolerance)


def check_growth() -> None:
    """Beyond its reach a block of rows is computed again: with a reach without end the numbers would be wrong."""
    from locater.kernels import triton_lazy

    triton_lazy.LEAST_KEYS = 1
    q, k = inputs(B=1, T=150, S=333, D=16, dtype=torch.float16)
    k = grown(q, k, 200.0)
    want = exact(q, k, causal=True)["entropy"]
    assert torch.allclose(attention_statistics(q, k, causal=True, backend="triton").entropy.double(), want, atol=1e-4)
    triton_lazy.REACH = triton_lazy.tl.constexpr(1e30)
    found = attention_statistics(q, k, causal=True, backend="triton").entropy.double()
    assert not torch.allclose(found, want, atol=1e-4)  # or the reach is not what decides


def test_lazy_rows_in_the_interpreter() -> None:
    interpreted(__name__, "t.check_lazy('cpu', torch.float16, 1e-4, ['causal', 'sinks']); t.check_growth()")


@pytest.mark.slow
def test_lazy_rows_with_every_term_in_the_interpreter() -> None:
    interpreted(__name__, "t.check_lazy('cpu', torch.float16, 1e-4, list(t.TERMS), 80)")


@pytest.mark.gpu
@pytest.mark.parametrize("name", TERMS)
@pytest.mark.parametrize("size", [64, 80, 128])
def test_lazy_rows_on_the_gpu(name: str, size: int) -> None:
    check_lazy("cuda", torch.bfloat16, 1e-4, [name], size)


def test_short_rows_masks_and_full_precision_keep_the_running_maximum() -> None:
    pytest.importorskip("triton", reason="Triton is only made for Linux")
    from locater.kernels.terms import Terms
    from locater.kernels.triton_lazy import LEAST_KEYS, takes_lazy

    q = torch.empty(1, 2, LEAST_KEYS, 64, dtype=torch.bfloat16, device="meta")
    assert takes_lazy(q, q, Terms(causal=True), True)
    assert not takes_lazy(q[:, :, 1:], q[:, :, 1:], Terms(causal=True), True)
    assert not takes_lazy(q[:, :, :1], q, Terms(causal=True), True)
    assert not takes_lazy(q.float(), q.float(), Terms(causal=True), True)
    assert not takes_lazy(q, q, Terms(causal=True, window=5), True)
    assert not takes_lazy(q, q, Terms(padding=torch.ones(1, LEAST_KEYS, dtype=torch.bool)), True)
