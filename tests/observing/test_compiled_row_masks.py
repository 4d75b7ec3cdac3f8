"""What follows from masks, in compiled models: once for all layers, the same as outside of graphs, never an old one."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from locater import LocaterError
from locater.calls.call_and_masks import Call
from locater.calls.listeners import ListeningSwitch
from locater.kernels import Terms
from locater.observing import accumulate, observe, row_masks
from locater.observing.accumulate import StatisticsOptions
from locater.observing.row_masks import Placement, traced_placement
from tests.kernels.test_statistics import NAMES, inputs, masks
from tests.observing.test_cost import Kernel, Operations, accumulators
from tests.observing.test_cost import kernels as kernels
from tests.observing.test_modes import BATCH, llama

CAUSAL = torch.ones(6, 6, dtype=torch.bool).tril()


def call_of(name: str, T: int, S: int) -> Call:
    q, k = inputs(T=T, S=S)
    terms = Terms(**masks(2, 4, T, S, "cpu")["mask" if name in ("cut", "positions") else name])
    if name == "positions":
        terms = replace(terms, positions=torch.arange(T) + (S - T) // 2)
    return Call(q, k, terms, torch.zeros(2, T, 4, 16), torch.tensor([True, False]) if name == "cut" else None)


def without_values(call: Call) -> Call:
    """The call as a compiler sees it."""
    mode = FakeTensorMode()

    def fake(x: Any) -> Any:
        return mode.from_tensor(x) if isinstance(x, Tensor) else x

    terms = Terms(**{f.name: fake(getattr(call.terms, f.name)) for f in fields(Terms)})
    return Call(fake(call.query), fake(call.key), terms, fake(call.output), fake(call.cut))


@pytest.mark.parametrize(("T", "S"), [(37, 50), (50, 50)])
@pytest.mark.parametrize("name", [*NAMES, "cut", "positions"])
def test_numbers_are_those_of_calls_outside_of_graphs(name: str, T: int, S: int) -> None:
    call = call_of(name, T, S)
    for own in (True, False):
        for heads in (None, torch.tensor([1, 3])):
            found = traced_placement(call, own, heads, True, False)
            described = traced_placement(without_values(call), own, None, True, False)
            assert [(x.shape, x.stride(), x.dtype) for x in found] == [
                (x.shape, x.stride(), x.dtype) for x in described
            ]
            into = [accumulators(4 if heads is None else 2) for _ in range(2)]
            for sums, known in zip(into, (None, Placement(*found) if found else None), strict=True):
                accumulate.add_call(call, sums, StatisticsOptions(rest=True), own, heads, placement=known)
            for a, b in zip(*into, strict=True):
                assert (a is None and b is None) or torch.equal(a, b)


def test_a_call_without_masks_has_no_operator() -> None:
    assert not traced_placement(call_of("causal-window", 50, 50), True, None, True, False)
    assert not traced_placement(call_of("sinks", 50, 50), True, None, True, False)


def test_spans_of_a_mask_come_with_it() -> None:
    q, _ = inputs(T=6, S=6)
    found = Placement(*traced_placement(Call(q, q, Terms(mask=CAUSAL)), True, None, True, False))
    assert found.spans[:, 1].tolist() == [[0] * 6, [1, 2, 3, 4, 5, 6]]
    assert int(found.whole) == 1
    assert not Placement(*traced_placement(Call(q, q, Terms(mask=CAUSAL)), True, None, False, False)).spans.numel()


def test_a_call_with_a_placement_looks_at_no_mask(kernels: list[Kernel], monkeypatch: pytest.MonkeyPatch) -> None:
    """Four launches, memory for what they write, and other views of tensors."""
    from locater.kernels import triton_sums

    sinks = Kernel(triton_sums.sink_kernel)
    monkeypatch.setattr(triton_sums, "sink_kernel", sinks)
    q, _ = inputs(T=6, S=6)
    call, into = Call(q, q, Terms(mask=CAUSAL), torch.zeros(2, 6, 4, 16)), accumulators(4)
    known = Placement(*traced_placement(call, True, None, True, 0))
    with Operations() as seen:
        accumulate.add_call(call, into, StatisticsOptions(), True, None, placement=known)
    assert [kernel.launches for kernel in (*kernels, sinks)] == [2, 1, 1]
    assert set(seen.names) <= {
        "aten.empty.memory_format",
        "aten.view.dtype",
        "aten.unsqueeze.default",
        "aten.detach.default",
    }


def test_masks_that_cannot_be_read() -> None:
    q, _ = inputs(T=6, S=6)
    call = Call(q, q, Terms(mask=CAUSAL[:, :5]))
    with pytest.raises(LocaterError, match="its axis S must be 6"):
        traced_placement(call, True, None, True, 0)
    switch = ListeningSwitch(lenient=True)
    assert not Placement(*traced_placement(call, True, None, True, switch.mailbox)).counted.any()
    assert "its axis S must be 6" in str(switch.missed.pop())


@pytest.mark.parametrize("checkpointing", [False, True])
def test_once_for_all_layers_of_a_compiled_pass(checkpointing: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two masks of one shape, one after the other: memory of a graph may be the same, numbers are not."""
    model, looks = llama().train(), []
    look = row_masks._placement

    def counted(*args: Any) -> Placement:
        looks.append(args)
        return look(*args)

    monkeypatch.setattr(row_masks, "_placement", counted)
    others = BATCH | {"attention_mask": BATCH["attention_mask"].flip(0)}
    wanted = []
    for batch in (BATCH, others):
        with observe(model) as seen:
            model(**batch, use_cache=False)
        wanted.append(seen.rows)
    assert not looks
    if checkpointing:
        model.gradient_checkpointing_enable()
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    for passes, (batch, rows) in enumerate(zip((BATCH, others), wanted, strict=True), 1):
        with observe(compiled) as seen:
            compiled(**batch, use_cache=False).logits.sum().backward()
        assert len(looks) == passes
        assert len(seen.sites) > 1
        assert [row.rows for row in seen.rows] == [row.rows for row in rows]
        for name in ("entropy", "sink", "max_logit"):
            assert [getattr(row, name) for row in seen.rows] == pytest.approx([getattr(row, name) for row in rows])
    assert [row.entropy for row in wanted[0]] != pytest.approx([row.entropy for row in wanted[1]])
    torch._dynamo.reset()
