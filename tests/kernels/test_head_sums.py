"""Sampled rows, and sums over the rows of a head, against a float64 softmax; Triton in the interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError
from locater.kernels import SUMMED, Terms, row_statistics
from tests.kernels.test_statistics import compare, exact, inputs, masks
from tests.processes import interpreted

Backend = Any
CASES = ("plain", "causal", "window", "causal-window", "sinks", "softcap", "alibi")  # without masks that are tensors


def check_rows(backend: Backend, device: str, names: tuple[str, ...], lengths: tuple[tuple[int, int], ...]) -> None:
    """Some rows have the numbers that they have among all rows."""
    for name in names:
        for T, S in lengths:
            q, k = inputs(T=T, S=S, device=device)
            terms = masks(2, 4, T, S, device)[name]
            rows = torch.tensor(
                [row for row in (0, 1, 5, T // 2, T // 2 + 1, T - 1) if row < T], device=device
            ).unique()
            found = row_statistics(q, k, Terms(first=3, **terms), backend=backend, rows=rows)
            want = {n: x[:, :, rows] for n, x in exact(q, k, first=3, **terms).items() if n != "received"}
            compare(found, want, 1e-4)


def summed(q: Tensor, k: Tensor, terms: dict[str, Any], rows: Tensor) -> tuple[Tensor, Tensor]:
    """Sums (H, SUMMED) and largest logits (H,) of the rows, by their definitions, in float64."""
    x = {name: values[:, :, rows] for name, values in exact(q, k, **terms).items() if name != "received"}
    B, R, S, T = len(q), len(rows), k.shape[2], q.shape[2]
    wide, at = x["visible"] > 1, rows + S - T
    one = torch.ones_like(x["entropy"])
    look = (at < terms.get("window", S + T)).to(one).expand_as(one)
    columns = {
        "calls": one / (B * R),
        "rows": one,
        "wide_rows": wide.to(one),
        "first_rows": look,
        "entropy": x["entropy"],
        "row_mass": x["row_mass"],
        "max_probability": (x["max_logit"] - x["log_sum_exp"]).exp(),
        "participation": 1 / x["sum_of_squares"],
        "distance": x["distance"],
        "self_mass": x["self_mass"],
        "entropy_ratio": torch.where(wide, x["entropy"] / x["visible"].clamp_min(2).double().log(), 0),
        "sink": x["first_mass"],
    }
    return torch.stack([columns[name].sum((0, 2)) for name in SUMMED], 1), x["max_logit"].amax((0, 2))


def check_sums(device: str, names: tuple[str, ...], lengths: tuple[tuple[int, int], ...]) -> None:
    """Two calls, one of all rows and one of some, are added up; the sums are rows of a larger tensor."""
    from locater.kernels.triton_sums import add_sums

    for name in names:
        for T, S in lengths:
            q, k = inputs(T=T, S=S, device=device)
            terms = masks(2, 4, T, S, device)[name]
            every, some = torch.arange(T, device=device), torch.arange(T, device=device)[1::3]
            sums = torch.zeros(6, 17, dtype=torch.float64, device=device)[1:5]
            maxima = torch.full((4, 1), -torch.inf, device=device)
            output = torch.randn(2, T, 4, 24, device=device)
            output[0, 0, 2, 3] = torch.inf  # in a row that the sample does not have
            add_sums(q, k, Terms(**terms), some, output, sums, maxima)
            (want, top), (more, higher) = (summed(q, k, terms, rows) for rows in (some, every))
            judge(sums, maxima, want, top)
            add_sums(q, k, Terms(**terms), None, output, sums, maxima)
            want, top = want + more, torch.maximum(top, higher)
            bad = sums[2].isnan()
            assert bad[4:16].all(), sums[2]
            assert not bad[:4].any()
            assert not bad[16:].any()
            kept = [0, 1, 3]
            judge(sums[kept], maxima[kept], want[kept], top[kept])


def judge(sums: Tensor, maxima: Tensor, want: Tensor, top: Tensor) -> None:
    assert torch.equal(sums[:, :4], want[:, :4].round())
    error = (sums[:, : len(SUMMED)] - want).abs() / (1 + want.abs())
    assert error.max() < 1e-5, dict(zip(SUMMED, error.amax(0).tolist(), strict=True))
    assert (maxima[:, 0].double() - top).abs().max() < 1e-4


@pytest.mark.parametrize("name", [*CASES, "documents", "mask", "bias", "everything"])
def test_some_rows_in_pytorch(name: str) -> None:
    check_rows("torch", "cpu", (name,), ((37, 50), (50, 50)))


def test_the_weight_that_keys_receive_is_over_all_rows() -> None:
    q, k = inputs()
    with pytest.raises(LocaterError, match="over all rows"):
        row_statistics(q, k, Terms(), rows=torch.tensor([1]), per_key=True)


def test_triton_in_the_interpreter() -> None:
    rows = "t.check_rows('triton', 'cpu', ('causal-window', 'everything'), ((37, 50),)); t.check_rows('triton', 'cpu', ('window',), ((150, 181),))"
    interpreted(__name__, f"{rows}; t.check_sums('cpu', ('causal', 'window', 'causal-window'), ((37, 50), (50, 50)))")


@pytest.mark.slow
def test_triton_with_every_mask_in_the_interpreter() -> None:
    every = (*CASES, "documents", "mask", "bias", "everything")
    rows = f"t.check_rows('triton', 'cpu', {every!r}, ((37, 50), (50, 50), (129, 200)))"
    interpreted(__name__, f"{rows}; t.check_sums('cpu', {CASES!r}, ((37, 50), (129, 200), (700, 700)))")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, "documents", "mask", "bias", "everything"])
def test_some_rows_on_the_gpu(name: str) -> None:
    check_rows("triton", "cuda", (name,), ((37, 50), (50, 50), (129, 200), (700, 700)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_sums_on_the_gpu(name: str) -> None:
    check_sums("cuda", (name,), ((37, 50), (50, 50), (700, 700)))
