"""`Terms`, the one record of an attention call: packed for operators and unpacked, checked, cut to rows, keys and heads."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from locater import LocaterError
from locater.control import row_entropy
from locater.kernels import Terms, attention_statistics, row_statistics
from locater.observing import accumulate
from locater_lab.mechanisms import modules

B, H, T, S, D = 2, 4, 3, 5, 8


def every_term() -> Terms:
    generator = torch.Generator().manual_seed(0)
    return Terms(
        scale=0.3,
        causal=True,
        window=4,
        softcap=20.0,
        first=2,
        padding=torch.tensor([[False, True, True, True, True], [True] * 5]),
        documents=torch.tensor([[0, 0, 0, 1, 1], [0] * 5]),
        mask=torch.rand(1, H, T, S, generator=generator) > 0.2,
        bias=torch.randn(B, 1, T, S, generator=generator),
        alibi=torch.rand(H, generator=generator),
        sinks=torch.randn(H, generator=generator),
        positions=torch.tensor([1, 2, 4]),
    )


def operands() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(B, H, T, D, generator=generator), torch.randn(B, 2, S, D, generator=generator)


def test_terms_are_unpacked_as_they_were_packed() -> None:
    terms = every_term()
    again = Terms.from_flat(terms.flat())
    assert all(getattr(again, f.name) is getattr(terms, f.name) for f in fields(Terms))
    assert Terms.from_flat(Terms().flat()) == Terms()
    numbers, tensors = terms.flat()[: Terms.NUMBERS], terms.flat()[Terms.NUMBERS :]
    assert not any(isinstance(x, Tensor) for x in numbers)
    assert all(isinstance(x, Tensor) for x in tensors)


def test_the_schema_names_the_fields_in_their_order() -> None:
    names = [argument.split()[-1] for argument in Terms.SCHEMA.split(", ")]
    assert names == [f.name for f in fields(Terms)]
    assert len(names) == Terms.ARGUMENTS == len(every_term().flat())
    for operator in (
        accumulate._operator,
        row_entropy._row_entropy_op._opoverload,
        row_entropy._entropy_gradient_op._opoverload,
    ):
        arguments = [argument.name for argument in operator._schema.arguments]
        start = arguments.index("scale")
        assert arguments[start : start + Terms.ARGUMENTS] == names


def test_statistics_of_a_record_are_those_of_its_fields() -> None:
    (q, k), terms = operands(), every_term()
    named = {f.name: getattr(terms, f.name) for f in fields(Terms)}
    one, other = row_statistics(q, k, terms, per_key=True), attention_statistics(q, k, per_key=True, **named)
    for f in fields(one):
        assert torch.equal(getattr(one, f.name), getattr(other, f.name)), f.name


def test_statistics_of_some_queries_and_heads_are_those_of_the_whole() -> None:
    (q, k), terms = operands(), every_term()
    whole = row_statistics(q, k, terms).entropy
    some = torch.tensor([0, 2])
    assert torch.equal(row_statistics(q[:, :, some], k, terms.for_queries(some)).entropy, whole[:, :, some])
    heads = torch.tensor([1, 3])
    assert torch.equal(row_statistics(q[:, heads], k, terms.for_heads(heads)).entropy, whole[:, heads])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"padding": torch.ones(B, T, dtype=torch.bool)}, r"padding has shape \[2, 3\], not \[2, 5\] \(batch, keys\)"),
        ({"positions": torch.zeros(2, dtype=torch.long)}, r"positions has shape \[2\], not \[3\] \(queries\)"),
        ({"sinks": torch.zeros(3)}, r"sinks has shape \[3\], not \[4\] \(heads\)"),
        ({"mask": torch.ones(T, T, dtype=torch.bool)}, r"mask has shape \[1, 1, 3, 3\]; its axis S must be 5$"),
        ({"bias": torch.ones(2, T, S)}, r"bias has shape \[1, 2, 3, 5\]; its axis H must be 4 or 1$"),
    ],
)
def test_a_shape_that_does_not_fit_is_named(change: dict[str, Tensor], message: str) -> None:
    with pytest.raises(LocaterError, match=message):
        replace(every_term(), **change).checked(B, H, T, S)  # type: ignore[arg-type]


def test_the_module_of_qk_norm_has_a_gain_per_head() -> None:
    module = modules.attention_module("qk_norm", width=16, heads=4, size=4, kv_heads=2)
    assert type(module) is modules.QKNormAttention
    assert sorted(module.state_dict()) == ["key_gain", "query_gain"]
