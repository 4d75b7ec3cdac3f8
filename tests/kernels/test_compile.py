"""Every Triton kernel compiles for a GPU, with the arguments that it is launched with; none is needed for that.

The interpreter checks what kernels compute and knows nothing of layouts, shared memory or registers; tests marked `gpu`
run them.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

triton = pytest.importorskip("triton", reason="Triton is only made for Linux")

from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402
from triton.tools.tensor_descriptor import TensorDescriptor  # noqa: E402

from locater.kernels import triton_forward, triton_kept_kernels, triton_launches, triton_sums  # noqa: E402
from locater.kernels.dispatch import mask_spans  # noqa: E402
from locater.kernels.terms import Terms  # noqa: E402
from locater_lab.mechanisms.kernels import (  # noqa: E402
    triton_delta,
    triton_doubly,
    triton_features,
    triton_polynomial,
    triton_recurrence,
    triton_weighted,
)

CARDS = {
    80: 163 * 1024,
    90: 227 * 1024,
    100: 227 * 1024,
}  # compute capability: bytes of shared memory that a block can have
OTHERS = [pytest.param(card, marks=pytest.mark.slow) for card in CARDS if card != 90]
KINDS = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.int8: "i8",
    torch.int32: "i32",
    torch.int64: "i64",
}
Launch = tuple[Any, dict[str, Any], dict[str, Any]]  # kernel, arguments by name, options


@pytest.fixture(params=[90, *OTHERS], ids=lambda card: f"sm_{card}")
def card(request: pytest.FixtureRequest) -> int:
    return request.param


def launches(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch) -> list[Launch]:
    """What `call` launches; nothing is run."""
    found: list[Launch] = []

    def record(kernel: Any, *args: Any, grid: Any, warmup: bool, **more: Any) -> None:
        named = dict(zip(kernel.arg_names, args, strict=False)) | {
            name: x for name, x in more.items() if name in kernel.arg_names
        }
        found.append((kernel, named, {name: x for name, x in more.items() if name not in kernel.arg_names}))

    with monkeypatch.context() as patch:
        patch.setattr(JITFunction, "run", record)
        call()
    assert found
    return found


def compiled(launch: Launch, card: int) -> Any:
    kernel, named, options = launch
    assert list(named) == kernel.arg_names or set(named) == set(kernel.arg_names)
    signature, fixed, attributes = {}, {}, {}
    for at, parameter in enumerate(kernel.params):
        value = named[parameter.name]
        if isinstance(value, Tensor):
            signature[parameter.name] = "*" + KINDS[value.dtype]
            attributes[(at,)] = [["tt.divisibility", 16]]
        elif isinstance(value, TensorDescriptor):
            block = ",".join(str(size) for size in value.block_shape)
            signature[parameter.name] = f"tensordesc<{KINDS[value.base.dtype]}[{block}]>"
        elif parameter.is_constexpr or value is None:
            signature[parameter.name], fixed[(at,)] = "constexpr", value
        else:
            signature[parameter.name] = "fp32" if isinstance(value, float) else "i32"
    return triton.compile(
        ASTSource(kernel, signature, fixed, attributes), target=GPUTarget("cuda", card, 32), options=options
    )


def check(call: Callable[[], Any], monkeypatch: pytest.MonkeyPatch, kernels: int, card: int) -> None:
    held = launches(call, monkeypatch)
    assert len(held) == kernels
    for launch in held:
        made = compiled(launch, card)
        assert len(made.asm["cubin"]) > 1000
        assert made.metadata.shared <= CARDS[card], launch[0].__name__


def drawn(*shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randn(*shape).to(dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "size"), [("softcap", 128), ("sigmoid", 64)])
def test_weights(kind: str, size: int, monkeypatch: pytest.MonkeyPatch, card: int) -> None:
    q, k, v = (drawn(1, 2, 128, size, dtype=torch.bfloat16) for _ in range(3))
    shift = torch.zeros(1, 2, 128) if kind == "sigmoid" else None
    keys = torch.ones(1, 1, 128, dtype=torch.bool) if size == 64 else None

    def call() -> None:
        out, row = triton_weighted.forward(q, k, v, shift, keys, 0.125, 50.0, True)
        triton_weighted.backward(q, k, v, out, row, out, keys, 0.125, 50.0, True, kind == "sigmoid")

    check(call, monkeypatch, 3, card)


@pytest.mark.slow
def test_weights_in_float32(monkeypatch: pytest.MonkeyPatch, card: int) -> None:
    q, k, v = (drawn(1, h, 100, 80, dtype=torch.float32) for h in (4, 2, 2))

    def call() -> None:
        out, row = triton_weighted.forward(q, k, v, None, None, 0.125, 50.0, False)
        triton_weighted.backward(q, k, v, out, row, out, None, 0.125, 50.0, False, False)

    check(call, monkeypatch, 3, card)


def test_the_recurrence(monkeypatch: pytest.MonkeyPatch, card: int) -> None:
    own, carried, keys = (drawn(2, 3, 64, size, dtype=torch.float32) for size in (96, 128, 128))
    kept = torch.ones(2, 3)

    def call() -> None:
        states, new = triton_recurrence.forward(own, carried, keys, kept)
        triton_recurrence.backward(carried, keys, kept, states, new)

    check(call, monkeypatch, 2, card)


def polynomial_weights(q: Tensor, k: Tensor, v: Tensor) -> None:
    kept = triton_polynomial.forward(q, k, v, None, 1.0, 2, True, True)
    triton_polynomial.backward(q, k, v, *kept, v, None, 1.0, 2, True, True)


def features(q: Tensor, k: Tensor, v: Tensor) -> None:
    kept = triton_features.forward(q, k, v, None, 1.0, False, True)
    triton_features.backward(q, k, v, *kept, v, None, 1.0, False, True)


def doubly_normalized(q: Tensor, k: Tensor, v: Tensor) -> None:
    mix = torch.ones(2)
    triton_doubly.forward(q, k, v, None, None, None, 1.0)
    kept = triton_doubly.forward(q, k, v, None, None, mix, 1.0)
    triton_doubly.backward(q, k, v, kept, v, None, None, mix, 1.0)


def delta_rule(q: Tensor, k: Tensor, v: Tensor) -> None:
    gate = torch.ones(1, 2, 256)
    kept = triton_delta.forward(q, k, v, gate, gate, None, 1.0, True)[1]
    triton_delta.backward(q, k, v, gate, gate, None, kept, v, 1.0, True)


def window(q: Tensor, k: Tensor, v: Tensor) -> None:
    out, row = triton_weighted.forward(q, k, v, None, None, 0.125, 0.0, False, 32)
    triton_weighted.backward(q, k, v, out, row, v, None, 0.125, 0.0, False, False, 32)


MECHANISMS = [
    *((features, 6, 128), (polynomial_weights, 4, 128), (doubly_normalized, 7, 128), (delta_rule, 6, 64)),
    (window, 3, 128),
]


@pytest.mark.slow
@pytest.mark.parametrize(("call", "kernels", "widest"), MECHANISMS)
@pytest.mark.parametrize(("dtype", "size"), [(torch.bfloat16, 64), (torch.float32, None), (torch.half, None)])
def test_mechanisms(
    call: Callable[[Tensor, Tensor, Tensor], None],
    kernels: int,
    widest: int,
    dtype: torch.dtype,
    size: int | None,
    monkeypatch: pytest.MonkeyPatch,
    card: int,
) -> None:
    q, k, v = (drawn(1, 2, 256, size or widest, dtype=dtype) for _ in range(3))
    check(lambda: call(q, k, v), monkeypatch, kernels, card)


@pytest.mark.parametrize("extended", [pytest.param(False, marks=pytest.mark.slow), True])
def test_statistics(extended: bool, monkeypatch: pytest.MonkeyPatch, card: int) -> None:
    q, k = drawn(1, 2, 256, 64, dtype=torch.bfloat16), drawn(1, 1, 256, 64, dtype=torch.bfloat16)
    terms = Terms(0.125, causal=True, softcap=30.0 if extended else None)
    triton_launches.LAUNCHES.clear()
    check(lambda: triton_launches.statistics(q, k, terms, extended, per_key=extended), monkeypatch, 1 + extended, card)
    triton_launches.LAUNCHES.clear()


@pytest.mark.parametrize(
    "rows", [pytest.param("all", marks=pytest.mark.slow), "some", pytest.param("masked", marks=pytest.mark.slow)]
)
def test_sums_over_the_rows_of_heads(rows: str, monkeypatch: pytest.MonkeyPatch, card: int) -> None:
    q, k = drawn(1, 2, 256, 64, dtype=torch.bfloat16), drawn(1, 1, 256, 64, dtype=torch.bfloat16)
    output, places = drawn(1, 256, 2, 64, dtype=torch.bfloat16), None if rows == "all" else torch.arange(0, 256, 16)
    sums, maxima = torch.zeros(2, 17, dtype=torch.float64), torch.zeros(2, 1)
    terms = Terms(0.125, causal=True)
    triton_launches.LAUNCHES.clear()
    if rows != "masked":
        check(lambda: triton_sums.add_sums(q, k, terms, places, output, sums, maxima), monkeypatch, 2, card)
    else:  # of all rows the kernel with masks takes a minute to compile
        counted, first = torch.ones(1, 256, dtype=torch.bool), torch.zeros(1, 256, dtype=torch.long)
        masked = Terms(0.125, mask=torch.ones(1, 1, 256, 256, dtype=torch.bool))
        masked_call = (q, k, masked, places, output, sums, maxima, counted, first, None, mask_spans(masked, 1, 256))
        check(lambda: triton_sums.add_sums(*masked_call), monkeypatch, 4, card)
    triton_launches.LAUNCHES.clear()


def test_the_gradient_of_the_entropy(monkeypatch: pytest.MonkeyPatch, card: int) -> None:
    q, k = drawn(1, 2, 256, 128, dtype=torch.bfloat16), drawn(1, 2, 256, 128, dtype=torch.bfloat16)
    row = torch.ones(1, 2, 256)
    padding = torch.ones(1, 256, dtype=torch.bool)
    check(
        lambda: triton_launches.entropy_gradient(q, k, Terms(0.1, padding=padding), row, row, row, row),
        monkeypatch,
        2,
        card,
    )


def test_few_rows(monkeypatch: pytest.MonkeyPatch, card: int) -> None:
    q, k = drawn(1, 8, 1, 128, dtype=torch.bfloat16), drawn(1, 2, 2048, 128, dtype=torch.bfloat16)
    check(lambda: triton_launches.statistics(q, k, Terms(0.1, causal=True), True, False), monkeypatch, 2, card)


def test_attention_with_statistics(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the H100 and its kind alone: Triton 3.7 fails to compile it for sm_100."""
    q, k, v = (drawn(1, h, 256, 64, dtype=torch.bfloat16) for h in (2, 1, 1))
    triton_kept_kernels.LAUNCHES.clear()
    check(lambda: triton_forward.forward(q, k, v, Terms(0.1, causal=True), True), monkeypatch, 1, 90)
    triton_kept_kernels.LAUNCHES.clear()


# past Triton's dispatch


class ByDispatch:
    """Stands for the kernel that both ways are compared with: its numbers, and what a direct call of it does."""

    def __init__(self, directly: Callable[..., None]) -> None:
        self.directly = directly

    def __getitem__(self, grid: Any) -> Callable[..., Any]:
        return self.launch

    def launch(self, x: Tensor, y: Tensor, nothing: None, one: int, count: int, factor: float, **fixed: Any) -> Any:
        assert (nothing, one, fixed) == (None, 1, {"SIZE": 16, "TWICE": True})
        y.copy_(torch.where(torch.arange(16) < count, 2 * factor * x, 0.0))
        return {(1, 1, 1): self.directly}


def right(x: Tensor, y: Tensor, *others: Any) -> None:
    y.copy_(torch.where(torch.arange(16) < 13, x, 0.0))


def shifted(x: Tensor, y: Tensor, *others: Any) -> None:
    """As of a calling convention that has one argument more in front."""
    right(y, x)


def refused(*arguments: Any) -> None:
    raise TypeError("function takes exactly 14 arguments (11 given)\nmore")


@pytest.mark.parametrize(
    ("directly", "said"),
    [(right, None), (shifted, "gave other numbers"), (refused, "failed .TypeError: function takes")],
)
def test_kernels_are_called_directly_only_where_both_ways_agree(
    directly: Callable[..., None], said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    device, key = torch.device("cpu"), ("some", torch.device("cpu"))
    for name in ("_launches_compared", "LAUNCHES"):
        monkeypatch.setattr(triton_kept_kernels, name, {})
    monkeypatch.setattr(triton_kept_kernels, "compared_kernel", ByDispatch(directly))
    monkeypatch.setattr(triton, "__version__", "3.6.0")
    function = type("Function", (), {"arg_names": ["x", "n", "SIZE"]})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for _ in range(2):
            triton_kept_kernels.keep_kernel(key, function, object(), (1, 1, 1), [3], 1, {"SIZE": 16})
    assert [bool(re.search(said or "", str(w.message))) for w in caught] == [True] * (said is not None)  # once
    assert (key in triton_kept_kernels.LAUNCHES) is (said is None)
    assert triton_kept_kernels.launches_directly(device) is (said is None)


def test_other_versions_of_triton_launch_by_its_dispatch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton_kept_kernels, "_launches_compared", {torch.device("cpu"): True})
    for version, direct in (
        ("3.6.0", True),
        ("3.6.2+git", True),
        ("3.5.1", False),
        ("3.60.0", False),
        ("4.0.0", False),
    ):
        monkeypatch.setattr(triton, "__version__", version)
        assert triton_kept_kernels.launches_directly(torch.device("cpu")) is direct, version


def test_the_kernel_of_the_comparison(monkeypatch: pytest.MonkeyPatch, card: int) -> None:
    x, y = torch.zeros(2, 16)

    def launch() -> None:
        triton_kept_kernels.compared_kernel[(1, 1, 1)](x, y, None, 1, 13, 0.5, SIZE=16, TWICE=True)

    check(launch, monkeypatch, 1, card)


@pytest.mark.gpu
def test_both_ways_agree_on_this_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    device = torch.device("cuda", torch.cuda.current_device())
    monkeypatch.setattr(triton_kept_kernels, "_launches_compared", {})
    assert triton_kept_kernels._launches_agree(device)
