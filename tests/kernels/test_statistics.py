"""Attention statistics against a float64 softmax, for every mask and addition, in PyTorch and in Triton.

Triton runs on the CPU through its interpreter here (in a process of its own, because the switch is read at import) and
on the GPU where there is one (make test-gpu).
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from locater import LocaterError
from locater.kernels import AttentionStatistics, attention_entropy, attention_statistics
from tests.processes import interpreted

Backend = Any
SIZES = (8, 64, 80, 128, 256)


def exact(q: Tensor, k: Tensor, first: int = 1, **terms: Any) -> dict[str, Tensor]:
    """The whole matrix in float64, one formula a line: what everything else is judged by."""
    q, k = q.double(), k.double()
    B, H, T, D = q.shape
    S = k.shape[2]
    logits = torch.einsum("bhtd,bhsd->bhts", q, k.repeat_interleave(H // k.shape[1], 1)) * (
        terms.get("scale") or D**-0.5
    )
    at = torch.arange(S - T, S)[:, None].to(q.device)
    to = torch.arange(S)[None].to(q.device)
    if terms.get("alibi") is not None:
        logits = logits - terms["alibi"].double().view(-1, 1, 1) * (at - to).abs()
    if terms.get("bias") is not None:
        logits = logits + terms["bias"].double()
    if terms.get("softcap"):
        logits = terms["softcap"] * torch.tanh(logits / terms["softcap"])
    seen = torch.ones(B, H, T, S, dtype=torch.bool, device=q.device)
    if terms.get("causal"):
        seen = seen & (to <= at)
    if terms.get("window"):
        seen = seen & ((at - to).abs() < terms["window"])
    if terms.get("padding") is not None:
        seen = seen & terms["padding"][:, None, None]
    if terms.get("documents") is not None:
        docs = terms["documents"]
        seen = seen & (docs[:, None, S - T :, None] == docs[:, None, None, :])
    if terms.get("mask") is not None:
        seen = seen & terms["mask"]
    none = ~seen.any(-1)
    wide = masked = logits.masked_fill(~seen, -1e30)
    if terms.get("sinks") is not None:
        wide = torch.cat([masked, terms["sinks"].double().view(1, -1, 1, 1).expand(B, H, T, 1)], -1)
    log_p = wide.log_softmax(-1)[..., :S].masked_fill(~seen, 0)
    p = log_p.exp() * seen
    return {
        "log_sum_exp": wide.logsumexp(-1).masked_fill(none, -torch.inf),
        "entropy": -(p * log_p).sum(-1),
        "max_logit": masked.amax(-1).masked_fill(none, -torch.inf),
        "visible": seen.sum(-1).double(),
        "row_mass": p.sum(-1),
        "sum_of_squares": (p * p).sum(-1),
        "distance": (p * (at - to).abs()).sum(-1),
        "first_mass": p[..., :first].sum(-1),
        "self_mass": (p * (at == to)).sum(-1),
        "received": p.sum(2) / seen.sum(2).clamp_min(1),
    }


def compare(found: AttentionStatistics, want: dict[str, Tensor], tolerance: float) -> None:
    for name, reference in want.items():
        ours = getattr(found, name).double().expand(reference.shape)
        empty = reference == -torch.inf
        assert torch.equal(empty, ours == -torch.inf), name
        scale = reference[~empty].abs().clamp_min(1)
        error = (ours - reference)[~empty].abs() / scale
        assert not error.numel() or error.max() <= tolerance, f"{name}: {error.max():.2e}"


def inputs(
    B: int = 2,
    H: int = 4,
    K: int = 2,
    T: int = 37,
    S: int = 50,
    D: int = 16,
    dtype: torch.dtype = torch.float32,
    device: str = "cpu",
    size: float = 1.0,
) -> tuple[Tensor, Tensor]:
    g = torch.Generator().manual_seed(T * 1000 + S + D)
    q, k = (torch.randn(B, n, length, D, generator=g) * size for n, length in ((H, T), (K, S)))
    return q.to(device, dtype), k.to(device, dtype)


def masks(B: int, H: int, T: int, S: int, device: str) -> dict[str, dict[str, Any]]:
    g = torch.Generator().manual_seed(0)
    padding = torch.rand(B, S, generator=g) > 0.3
    left = torch.arange(S).expand(B, S) >= torch.randint(0, S // 2 + 1, (B, 1), generator=g)
    documents = torch.randint(0, 3, (B, S), generator=g).sort(1).values
    some = torch.rand(B, 1, T, S, generator=g) > 0.5
    some[:, :, 0] = False  # a row that sees nothing
    found: dict[str, dict[str, Any]] = {
        "plain": {},
        "causal": {"causal": True},
        "window": {"window": 5},
        "causal-window": {"causal": True, "window": 7},
        "padding": {"padding": padding},
        "left-padding": {"padding": left, "causal": True},
        "documents": {"documents": documents, "causal": True},
        "mask": {"mask": some},
        "bias": {"bias": torch.randn(1, H, T, S, generator=g), "causal": True},
        "shared-bias": {"bias": torch.randn(1, S, generator=g)},
        "alibi": {"alibi": torch.rand(H, generator=g), "causal": True},
        "sinks": {"sinks": torch.randn(H, generator=g) * 3, "causal": True},
        "sinks-mask": {"sinks": torch.randn(H, generator=g), "mask": some},
        "softcap": {"softcap": 2.0, "scale": 1.0, "causal": True},
        "everything": {
            "causal": True, "window": 20, "softcap": 5.0, "padding": padding, "documents": documents, "sinks": torch.randn(H, generator=g),
            "alibi": torch.rand(H, generator=g), "bias": torch.randn(B, H, T, S, generator=g),
            "mask": torch.rand(1, H, T, S, generator=g) > 0.2,
        },
    }  # fmt: skip
    return {
        name: {k: v.to(device) if isinstance(v, Tensor) else v for k, v in terms.items()}
        for name, terms in found.items()
    }


NAMES = list(masks(1, 1, 2, 2, "cpu"))


def check_masks(
    backend: Backend, device: str, names: list[str], sizes: tuple[tuple[int, int], ...] = ((37, 50), (50, 50))
) -> None:
    for name in names:
        for T, S in sizes:
            q, k = inputs(T=T, S=S, device=device)
            terms = masks(2, 4, T, S, device)[name]
            found = attention_statistics(q, k, first=3, per_key=True, backend=backend, **terms)
            compare(found, exact(q, k, first=3, **terms), 1e-4)


LENGTHS = ((1, 1), (1, 70), (70, 70), (128, 128), (129, 200))


def check_sizes(
    backend: Backend,
    device: str,
    sizes: tuple[int, ...],
    half: tuple[torch.dtype, ...],
    lengths: tuple[tuple[int, int], ...] = LENGTHS,
) -> None:
    for D in sizes:
        for T, S in lengths:
            q, k = inputs(B=1, H=2, K=1, T=T, S=S, D=D, device=device)
            compare(
                attention_statistics(q, k, causal=True, per_key=True, backend=backend), exact(q, k, causal=True), 1e-4
            )
    for dtype in half:
        q, k = inputs(B=1, T=70, S=70, D=64, dtype=dtype, device=device)
        compare(attention_statistics(q, k, causal=True, per_key=True, backend=backend), exact(q, k, causal=True), 2e-2)


def check_extremes(backend: Backend, device: str) -> None:
    """Logits of +-1e4: the running maximum must carry them, and the entropy must not drown in their rounding.

    Entries are halves of whole numbers, so that products and their sums are exact in float32 in whatever order a
    processor adds them.
    """
    q, k = (x.mul(2).round().div(2) for x in inputs(B=1, D=16, size=50.0, device=device))
    found = attention_statistics(q, k, scale=1.0, per_key=True, backend=backend)
    want = exact(q, k, scale=1.0)
    assert want["max_logit"].max() > 1e4
    compare(found, want, 1e-4)
    flat = torch.full((1, 1, 9, 16), 25.0, device=device)  # equal logits of 1e4: entropy log(keys), though lse is 1e4
    assert torch.allclose(
        attention_statistics(flat, flat, scale=1.0, causal=True, backend=backend).entropy.exp().cpu(),
        torch.arange(1.0, 10),
        rtol=1e-5,
    )


def check_gradients(backend: Backend, device: str, names: list[str]) -> None:
    for name in names:
        q, k = inputs(T=21, S=30, device=device)
        terms = masks(2, 4, 21, 30, device)[name]
        weight = torch.randn(2, 4, 21, generator=torch.Generator().manual_seed(1)).to(device)
        ours = [x.clone().requires_grad_() for x in (q, k)]
        (attention_entropy(*ours, backend=backend, **terms) * weight).sum().backward()
        theirs = [x.double().requires_grad_() for x in (q, k)]
        (exact(*theirs, **terms)["entropy"] * weight).sum().backward()
        for a, b in zip(ours, theirs, strict=True):
            assert a.grad is not None
            assert b.grad is not None
            error = (a.grad.double() - b.grad).abs().max() / b.grad.abs().max()
            assert error < 1e-4, f"{name}: {error:.2e}"


def check_layouts(backend: Backend, device: str) -> None:
    """Masks and biases that are views, biases that are -inf, long rows without a mask (their own key lies in a tile
    that needs none).
    """
    q, k = inputs(T=37, S=50, device=device)
    g = torch.Generator().manual_seed(5)
    big = (torch.rand(2, 4, 90, 120, generator=g) > 0.4).to(device)
    turned = torch.randn(1, 4, 50, 37, generator=g).to(device)
    closed = torch.zeros(1, 1, 37, 50, device=device).masked_fill(
        torch.rand(1, 1, 37, 50, generator=g).to(device) > 0.5, -torch.inf
    )
    for terms in ({"mask": big[:, :, 3:40, 7:57]}, {"bias": turned.mT}):
        compare(attention_statistics(q, k, per_key=True, backend=backend, **terms), exact(q, k, **terms), 1e-4)
    for scale in (-0.3, 2.0):
        compare(
            attention_statistics(q[:1, :2], k[:1, :1], scale=scale, causal=True, per_key=True, backend=backend),
            exact(q[:1, :2], k[:1, :1], scale=scale, causal=True),
            1e-4,
        )
    q = q[:, :2]
    want = exact(q, k, mask=closed == 0)
    names = ("entropy", "row_mass", "max_logit", "log_sum_exp", "sum_of_squares")  # `visible` counts what masks allow
    compare(attention_statistics(q, k, bias=closed, backend=backend), {name: want[name] for name in names}, 1e-4)
    for T, S, causal in ((150, 150, False), (150, 181, True), (150, 181, False)):  # three tiles: the second is inside
        q, k = inputs(B=1, H=1, K=1, T=T, S=S, device=device)
        compare(
            attention_statistics(q, k, causal=causal, backend=backend),
            {n: v for n, v in exact(q, k, causal=causal).items() if n != "received"},
            1e-4,
        )


# ---- PyTorch ----


@pytest.mark.parametrize("name", NAMES)
def test_every_mask(name: str) -> None:
    check_masks("torch", "cpu", [name])


def test_every_size_and_precision() -> None:
    check_sizes("torch", "cpu", SIZES, (torch.bfloat16, torch.float16))


def test_extreme_logits() -> None:
    check_extremes("torch", "cpu")


def test_layouts() -> None:
    check_layouts("torch", "cpu")


@pytest.mark.parametrize("name", NAMES)
def test_gradients_of_the_entropy(name: str) -> None:
    check_gradients("torch", "cpu", [name])


def test_gradcheck() -> None:
    q, k = (x.double().requires_grad_() for x in inputs(B=1, H=2, K=1, T=4, S=5, D=3))
    assert torch.autograd.gradcheck(lambda q, k: attention_entropy(q, k, causal=True, softcap=3.0), (q, k))


def test_chunks_do_not_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """A few rows at a time give what all rows at once give."""
    from locater.kernels import reference

    q, k = inputs()
    whole = attention_statistics(q, k, causal=True, per_key=True)
    monkeypatch.setattr(reference, "CACHED", 2 * 4 * 50 * 3)
    parts = attention_statistics(q, k, causal=True, per_key=True)
    for name in ("log_sum_exp", "entropy", "max_logit", "received", "distance"):
        assert torch.allclose(getattr(whole, name), getattr(parts, name), atol=1e-6), name


def test_per_head_numbers() -> None:
    q, k = inputs(T=20, S=20)
    terms = {"mask": masks(2, 4, 20, 20, "cpu")["mask"]["mask"]}
    found = attention_statistics(q, k, **terms)
    head = found.reduced()
    want = exact(q, k, **terms)
    rows = want["visible"] > 0
    assert (~rows).any()
    for h in range(4):
        here = rows[:, h]
        assert head["entropy"][h] == pytest.approx(want["entropy"][:, h][here].mean().item(), abs=1e-5)
        assert head["max_logit"][h] == pytest.approx(want["max_logit"][:, h].max().item(), abs=1e-5)
        many = want["visible"][:, h] >= 2
        ratio = (want["entropy"][:, h] / want["visible"][:, h].log())[many].mean()
        assert head["entropy_ratio"][h] == pytest.approx(ratio.item(), abs=1e-5)
    assert torch.allclose(found.participation[rows].double(), 1 / want["sum_of_squares"][rows], rtol=1e-4)
    assert torch.allclose(
        found.max_probability.double(),
        torch.where(rows, (want["max_logit"] - want["log_sum_exp"]).exp(), 0.0),
        atol=1e-5,
    )


def test_uniform_attention_has_ratio_one_at_any_length() -> None:
    zeros = torch.zeros(1, 1, 30, 8)
    ratio = attention_statistics(zeros, zeros, causal=True).entropy_ratio
    assert ratio[0, 0, 0].isnan()
    assert torch.allclose(ratio[0, 0, 1:], torch.ones(29), atol=1e-6)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"padding": torch.ones(2, 9, dtype=torch.bool)}, "padding has shape"),
        ({"mask": torch.ones(2, 1, 37, 9, dtype=torch.bool)}, "its axis S must be 50"),
        ({"bias": torch.zeros(3, 1, 37, 50)}, "its axis B must be 2 or 1"),
        ({"alibi": torch.zeros(3)}, "alibi has shape"),
    ],
)
def test_wrong_shapes_are_named(change: dict[str, Any], says: str) -> None:
    with pytest.raises(LocaterError, match=says):
        attention_statistics(*inputs(), **change)


def test_wrong_queries_and_keys_are_named() -> None:
    q, k = inputs()
    with pytest.raises(LocaterError, match="both have four axes"):
        attention_statistics(q[0], k)
    with pytest.raises(LocaterError, match="does not fit"):
        attention_statistics(q, k[..., :8])
    with pytest.raises(LocaterError, match="cannot be causal"):
        attention_statistics(q, k[:, :, :9], causal=True)
    with pytest.raises(LocaterError, match="extended=True"):
        _ = attention_statistics(q, k, extended=False).participation


# ---- Triton ----


SOME = ["left-padding", "everything"]


def test_triton_in_the_interpreter() -> None:
    """float16 stands for half precision: the interpreter multiplies bfloat16 as if its bits were integers. The GPU test
    has both.
    """
    masks = f"t.check_masks('triton', 'cpu', {SOME!r}, ((37, 50),)); t.check_gradients('triton', 'cpu', {SOME!r})"
    sizes = "t.check_sizes('triton', 'cpu', (8,), (torch.float16,)); t.check_sizes('triton', 'cpu', (80,), (), ((129, 200),))"
    interpreted(__name__, f"{masks}; {sizes}; t.check_extremes('triton', 'cpu'); t.check_layouts('triton', 'cpu')")


@pytest.mark.slow
def test_triton_with_every_mask_and_size_in_the_interpreter() -> None:
    names = [name for name in NAMES if name not in SOME]
    masks = f"t.check_masks('triton', 'cpu', {NAMES!r}); t.check_gradients('triton', 'cpu', {names!r})"
    interpreted(__name__, f"{masks}; t.check_sizes('triton', 'cpu', (64, 80, 256), (torch.float16,))")


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_triton_on_the_gpu(name: str) -> None:
    check_masks("triton", "cuda", [name])
    check_gradients("triton", "cuda", [name])


@pytest.mark.gpu
def test_triton_sizes_on_the_gpu() -> None:
    check_sizes("triton", "cuda", SIZES, (torch.bfloat16, torch.float16))
    check_extremes("triton", "cuda")
    check_layouts("triton", "cuda")


def check_bf16_padding() -> None:
    """Padding in bfloat16: loaded masks move the compiler to another layout of a tile than float32 does."""
    q, k = inputs(B=2, H=4, K=2, T=300, S=300, D=64, dtype=torch.bfloat16, device="cuda")
    padding = torch.ones(2, 300, dtype=torch.bool, device="cuda")
    padding[1, :70] = False
    for terms in ({"padding": padding}, {"mask": padding[:, None, None, :].expand(2, 1, 300, 300)}):
        a, b = (attention_statistics(q, k, causal=True, backend=x, **terms) for x in ("triton", "torch"))
        for name in ("log_sum_exp", "entropy", "distance", "sum_of_squares", "self_mass"):
            assert torch.allclose(getattr(a, name), getattr(b, name), rtol=1e-3, atol=1e-4), name


@pytest.mark.gpu
def test_padding_in_bfloat16_on_the_gpu() -> None:
    check_bf16_padding()


@pytest.mark.gpu
def test_long_rows_on_the_gpu_against_the_reference() -> None:
    q, k = inputs(B=1, H=4, K=2, T=3000, S=3000, D=128, dtype=torch.bfloat16, device="cuda")
    a, b = (attention_statistics(q, k, causal=True, per_key=True, backend=x) for x in ("triton", "torch"))
    for name in (
        "log_sum_exp",
        "entropy",
        "max_logit",
        "distance",
        "first_mass",
        "self_mass",
        "sum_of_squares",
        "received",
    ):
        assert torch.allclose(getattr(a, name), getattr(b, name), rtol=1e-3, atol=1e-4), name
