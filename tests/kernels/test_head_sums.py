"""Sampled rows, and sums over the rows of a head, against a float64 softmax; Triton in the interpreter and on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError
from locater.kernels import SUMMED, Terms, mask_spans, row_statistics
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


def summed(
    q: Tensor,
    k: Tensor,
    terms: dict[str, Any],
    rows: Tensor,
    counted: Tensor | None = None,
    first: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Sums (H, SUMMED) and largest logits (H,) of the rows, by their definitions, in float64: of all, or of those that
    count (B, T), with the weight on the `first` key (B, T) of each.
    """
    x = {name: values[:, :, rows] for name, values in exact(q, k, **terms).items() if name != "received"}
    look = x["first_mass"] > 0
    if first is not None:
        x["first_mass"] = weights_at(q, k, terms, first)[:, :, rows]
        masks_alone = {name: term for name, term in terms.items() if name in SEEING}
        look = (
            weights_at(torch.zeros_like(q), k, masks_alone, first)[:, :, rows] > 1e-6
        )  # equal weights on what is seen
    shown = x["visible"] > 0
    if counted is not None:
        shown = shown & counted[:, None, rows]
    wide = x["visible"] > 1
    one = torch.ones_like(x["entropy"])
    columns = {
        "calls": one / shown.sum((0, 2))[:, None],
        "rows": one,
        "wide_rows": wide.to(one),
        "first_rows": look.to(one),
        "entropy": x["entropy"],
        "row_mass": x["row_mass"],
        "max_probability": (x["max_logit"] - x["log_sum_exp"]).exp(),
        "participation": 1 / x["sum_of_squares"],
        "distance": x["distance"],
        "self_mass": x["self_mass"],
        "entropy_ratio": torch.where(wide, x["entropy"] / x["visible"].clamp_min(2).double().log(), 0),
        "sink": x["first_mass"],
    }
    kept = [columns[name].masked_fill(~shown, 0).sum((0, 2)) for name in SUMMED]
    return torch.stack(kept, 1), x["max_logit"].masked_fill(~shown, -torch.inf).amax((0, 2))


def weights_at(q: Tensor, k: Tensor, terms: dict[str, Any], keys: Tensor) -> Tensor:
    """The weight of each row on the key (B, T) of its own, 0 where that is hidden or negative."""
    up_to = [torch.zeros(q.shape[:3], dtype=torch.float64, device=q.device)]
    up_to += [exact(q, k, first=end, **terms)["first_mass"] for end in range(1, k.shape[2] + 1)]
    each = torch.stack(up_to).diff(dim=0)  # (S, B, H, T)
    at = keys.to(q.device).clamp_min(0)[None, :, None].expand(1, *q.shape[:3])
    return each.gather(0, at)[0].masked_fill((keys.to(q.device) < 0)[:, None], 0)


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


def check_masked_sums(device: str, names: tuple[str, ...], lengths: tuple[tuple[int, int], ...]) -> None:
    """Rows that do not count, and a first key of their own."""
    from locater.kernels.triton_sums import add_sums

    g = torch.Generator().manual_seed(2)
    for name in names:
        for T, S in lengths:
            q, k = inputs(T=T, S=S, device=device)
            terms = masks(2, 4, T, S, device)[name]
            counted = (torch.rand(2, T, generator=g) > 0.3).to(device)
            first = torch.randint(-1, S // 2, (2, T), generator=g).to(device)
            output = torch.randn(2, T, 4, 24, device=device)
            output[:, :, 1][~counted] = torch.nan  # where nobody looks
            for rows in (torch.arange(T, device=device), torch.arange(T, device=device)[1::3]):
                sums, maxima = torch.zeros(4, 17, dtype=torch.float64, device=device), torch.full((4, 1), -torch.inf)
                maxima, some = maxima.to(device), None if len(rows) == T else rows
                add_sums(q, k, Terms(**terms).checked(2, 4, T, S), some, output, sums, maxima, counted, first)
                judge(sums, maxima, *summed(q, k, terms, rows, counted, first))


def check_spans(device: str) -> None:
    """Masks whose rows see one run of keys are known by its ends; the others are not taken for such."""
    from locater.kernels.triton_launches import rows_of_statistics

    T = 150
    causal = torch.ones(T, T, dtype=torch.bool).tril()
    padded = causal.expand(2, 1, T, T).clone()
    padded[0, :, :, :21], padded[1, :, :, 100:] = False, False
    window = (causal & torch.ones(T, T, dtype=torch.bool).triu(-40)).view(1, 1, T, T)
    hole = padded.clone()
    hole[1, 0, 70, 33] = False
    cross = (torch.arange(T) < 77).view(1, 1, 1, T)
    for mask, whole in ((padded, 1), (window, 1), (hole, 0), (cross, 1)):
        q, k = inputs(H=2, K=1, T=T, S=T, device=device)
        terms = Terms(0.4, mask=mask.to(device))
        ends = mask_spans(terms, 2, T)
        assert ends is not None
        assert int(ends[1]) == whole
        want = {name: x for name, x in exact(q, k, scale=0.4, mask=mask.to(device)).items() if name != "received"}
        for rows in (None, torch.arange(0, T, 7, device=device)):
            numbers, count = rows_of_statistics(q, k, terms, True, False, rows, ends)
            at = slice(None) if rows is None else rows
            assert count is not None
            assert torch.equal(count.long(), want["visible"][:, :, at].long())
            for column, name in enumerate(NAMES):
                got, right = numbers[column].double(), want[name][:, :, at]
                assert torch.allclose(got, right, atol=1e-4, rtol=1e-4), (name, whole)


NAMES = (
    *("log_sum_exp", "entropy", "max_logit", "row_mass"),
    *("sum_of_squares", "distance", "first_mass", "self_mass"),
)


def check_counts(backend: Backend, device: str) -> None:
    """Keys that a bias of -inf hides are not in view."""
    q, k = inputs(T=37, S=50, device=device)
    hidden = torch.rand(2, 1, 37, 50, generator=torch.Generator().manual_seed(4)) > 0.3
    hidden[0, :, 5] = True
    bias = torch.zeros(2, 1, 37, 50).masked_fill(hidden, -torch.inf).to(device)
    for terms in (Terms(bias=bias), Terms(bias=bias, causal=True)):
        found = row_statistics(q, k, terms, backend=backend).visible
        seen = bias == 0
        if terms.causal:
            seen = seen & torch.ones(37, 50, dtype=torch.bool, device=device).tril(13)
        assert torch.equal(found, seen.sum(-1).expand(2, 4, 37).to(found))


def judge(sums: Tensor, maxima: Tensor, want: Tensor, top: Tensor) -> None:
    assert torch.equal(sums[:, :4], want[:, :4].round())
    error = (sums[:, : len(SUMMED)] - want).abs() / (1 + want.abs())
    assert error.max() < 1e-5, dict(zip(SUMMED, error.amax(0).tolist(), strict=True))
    assert (maxima[:, 0].double() - top).abs().max() < 1e-4


SEEING = ("causal", "window", "padding", "documents", "mask")  # terms that hide keys
MASKED = ("padding", "left-padding", "documents", "mask", "bias", "sinks-mask", "everything")


@pytest.mark.parametrize("name", [*CASES, *MASKED])
def test_some_rows_in_pytorch(name: str) -> None:
    check_rows("torch", "cpu", (name,), ((37, 50), (50, 50)))


def test_keys_in_view_in_pytorch() -> None:
    check_counts("torch", "cpu")


def test_the_weight_that_keys_receive_is_over_all_rows() -> None:
    q, k = inputs()
    with pytest.raises(LocaterError, match="over all rows"):
        row_statistics(q, k, Terms(), rows=torch.tensor([1]), per_key=True)


def test_triton_in_the_interpreter() -> None:
    rows = "t.check_rows('triton', 'cpu', ('causal-window', 'everything'), ((37, 50),)); t.check_rows('triton', 'cpu', ('window',), ((150, 181),))"
    sums = "t.check_sums('cpu', ('causal', 'window', 'causal-window'), ((37, 50),)); t.check_counts('triton', 'cpu')"
    masked = "t.check_masked_sums('cpu', ('left-padding', 'everything'), ((37, 50),)); t.check_spans('cpu')"
    interpreted(__name__, f"{rows}; {sums}; {masked}")


@pytest.mark.slow
def test_triton_with_every_mask_in_the_interpreter() -> None:
    rows = f"t.check_rows('triton', 'cpu', {(*CASES, *MASKED)!r}, ((37, 50), (50, 50), (129, 200)))"
    sums = f"t.check_sums('cpu', {CASES!r}, ((37, 50), (129, 200), (700, 700)))"
    interpreted(__name__, f"{rows}; {sums}; t.check_masked_sums('cpu', {(*CASES, *MASKED)!r}, ((37, 50), (50, 50)))")


@pytest.mark.gpu
@pytest.mark.parametrize("name", [*CASES, *MASKED])
def test_some_rows_on_the_gpu(name: str) -> None:
    check_rows("triton", "cuda", (name,), ((37, 50), (50, 50), (129, 200), (700, 700)))
    check_masked_sums("cuda", (name,), ((37, 50), (50, 50)))


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_sums_on_the_gpu(name: str) -> None:
    check_sums("cuda", (name,), ((37, 50), (50, 50), (700, 700)))


@pytest.mark.gpu
def test_keys_in_view_on_the_gpu() -> None:
    check_counts("triton", "cuda")
    check_spans("cuda")
