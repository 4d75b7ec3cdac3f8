"""Statistics of few queries over many keys, whose keys are split over programs: against float64, in the interpreter."""

from __future__ import annotations

import pytest

from locater.kernels import attention_statistics
from tests.kernels.test_statistics import NAMES, compare, exact, inputs, masks
from tests.processes import interpreted

SHAPES = ((4, 2, 1, 600), (6, 2, 5, 1030), (3, 1, 1, 513))  # query heads, key heads, queries, keys


def check_few(device: str, names: list[str], shapes: tuple[tuple[int, ...], ...] = SHAPES) -> None:
    """Several parts, a last one that is not full, groups of heads that share keys."""
    from locater.kernels import triton_split

    for H, K, T, S in shapes:
        for name in names:
            q, k = inputs(B=2, H=H, K=K, T=T, S=S, device=device)
            assert triton_split.parts_of(q, k) > 1
            terms = masks(2, H, T, S, device)[name]
            found = attention_statistics(q, k, first=3, per_key=True, backend="triton", **terms)
            compare(found, exact(q, k, first=3, **terms), 1e-4)


def test_few_rows_in_the_interpreter() -> None:
    interpreted(__name__, "t.check_few('cpu', ['plain', 'left-padding', 'sinks'], t.SHAPES[1:2])")


@pytest.mark.slow
def test_few_rows_with_every_mask_in_the_interpreter() -> None:
    interpreted(__name__, f"t.check_few('cpu', {NAMES!r}, t.SHAPES[:1])")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_few_rows_on_the_gpu(name: str) -> None:
    check_few("cuda", [name])
