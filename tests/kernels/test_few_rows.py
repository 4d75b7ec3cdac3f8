"""Statistics of few queries over many keys, whose keys are split over programs: against float64, in the interpreter."""

from __future__ import annotations

import pytest
import torch

from locater.kernels import attention_statistics
from tests.kernels.test_statistics import NAMES, compare, exact, inputs, masks
from tests.processes import interpreted

SHAPES = ((4, 2, 1, 600), (6, 2, 5, 1030), (6, 2, 3, 521))  # query heads, key heads, queries, keys


def check_few(device: str, names: list[str], shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
    """Several parts, a last one that is not full, groups of heads that share keys."""
    from locater.kernels import triton_key_parts

    for H, K, T, S in shapes:
        for name in names:
            q, k = inputs(B=2, H=H, K=K, T=T, S=S, device=device)
            assert triton_key_parts.count_parts(q, k) > 1
            terms = masks(2, H, T, S, device)[name]
            found = attention_statistics(q, k, first=3, per_key=True, backend="triton", **terms)
            compare(found, exact(q, k, first=3, **terms), 1e-4)


def check_growing(device: str) -> None:
    """A cache that grows by one key at a time: kernels are launched again with other numbers."""
    for S in range(1020, 1060):
        q, k = inputs(B=1, H=4, K=1, T=1, S=S, device=device)
        compare(attention_statistics(q, k, causal=True, per_key=True, backend="triton"), exact(q, k, causal=True), 1e-4)


def test_few_rows_in_the_interpreter() -> None:
    interpreted(__name__, "t.check_few('cpu', ['left-padding', 'sinks'], t.SHAPES[2:])")


@pytest.mark.slow
def test_few_rows_with_every_mask_in_the_interpreter() -> None:
    interpreted(__name__, f"t.check_few('cpu', {NAMES!r}, t.SHAPES[:1])")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_few_rows_on_the_gpu(name: str) -> None:
    check_few("cuda", [name])


@pytest.mark.gpu
def test_a_growing_cache_on_the_gpu() -> None:
    check_growing("cuda")


def test_kernels_are_told_apart_as_triton_tells_them_apart() -> None:
    pytest.importorskip("triton", reason="Triton is only made for Linux")
    from locater.kernels.triton_kept_kernels import _kind

    assert _kind(1) != _kind(2) == _kind(7) != _kind(32) == _kind(48) != _kind(1 << 32)
    x = torch.zeros(9)
    assert _kind(x) != _kind(x[1:]) != _kind(x.double())
    assert _kind(0.5) == _kind(2.0) != _kind(None)
