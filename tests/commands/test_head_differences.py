"""Differences of heads against dense products in float64, and heads found in other places."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from locater.commands import differences
from locater.commands.differences import OFFSETS, HeadDifference, Move, head_differences, moved_heads, responses
from locater.discovery import attention_layers
from locater.layers import AttentionLayer, Projection, output_maps_and_written_norms
from locater.layers.norm_folding import logit_maps
from locater.layers.output_maps_and_written_norms import written_norms
from tests.families import CASES
from tests.parity import model_of

BILINEAR = ["llama", "gpt2", "qwen2", "gpt_neox", "phi3", "falcon"]  # no norm on queries, keys or values
SMALL = 600  # numbers at a time: fewer than a layer of these models has


def case_of(label: str) -> Any:
    return next(case for case in CASES if case.label == label)


def two_of(label: str, by: float = 0.3) -> tuple[AttentionLayer, AttentionLayer]:
    """The first layer of a model, and of the same with all parameters changed."""
    models = [model_of(case_of(label)) for _ in range(2)]
    draw = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in models[1].parameters():
            size = parameter.std() if parameter.numel() > 1 else parameter.abs()
            parameter += by * size * torch.randn(parameter.shape, generator=draw, dtype=parameter.dtype)
    first, second = (attention_layers(model)[0] for model in models)
    return first, second


def dense_logits(layer: AttentionLayer, offset: int) -> Tensor:
    """W of every head (H, d + 1, d + 1) with the constant parts of queries and keys, from logits of unit vectors."""
    width = layer.width
    tokens = torch.cat([torch.eye(width, dtype=torch.float64), torch.zeros(1, width, dtype=torch.float64)])
    places = (torch.full((width + 1,), at) for at in (offset, 0))
    kept = replace(layer, relative=None, bias=None, softcap=None)
    f = kept.logits(
        *(tokens[None],) * 2, **dict(zip(("query_positions", "key_positions"), places, strict=True)), normalized=True
    )[0]
    last = f[:, -1:, -1:]
    corner = f - f[:, :, -1:] - f[:, -1:, :] + last
    corner[:, -1, :-1], corner[:, :-1, -1] = (f[:, -1, :-1] - last[:, 0]), (f[:, :-1, -1] - last[:, 0])
    corner[:, -1:, -1:] = last
    if layer.norm.kind == "layer":  # of tokens whose mean is removed
        P = torch.eye(width + 1, dtype=torch.float64)
        P[:-1, :-1] -= 1 / width
        corner = P @ corner @ P
    return corner


def relative(a: Tensor, b: Tensor) -> list[float]:
    return ((b - a).flatten(1).norm(dim=1) / a.flatten(1).norm(dim=1)).tolist()


def dense_written(layer: AttentionLayer) -> Tensor:
    """O_h V_h of every head with the constant part as the last column, from tokens one at a time."""
    assert layer.value is not None
    assert layer.out is not None
    tokens = torch.cat([torch.eye(layer.width), torch.zeros(1, layer.width)]).double()
    values = layer.value(layer.norm.affine(tokens)).unflatten(-1, (layer.kv_heads, -1))
    values = values.repeat_interleave(layer.group, 1)  # (tokens, H, v)
    out = layer.out.weight().double().unflatten(1, (layer.heads, -1))
    written = torch.einsum("rhv,thv->hrt", out, values)
    written[..., :-1] -= written[..., -1:].clone()
    if layer.norm.kind == "layer":
        written[..., :-1] -= written[..., :-1].mean(-1, keepdim=True)
    return written


@pytest.mark.parametrize("label", BILINEAR)
def test_differences_are_those_of_dense_maps(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a, b = two_of(label)
    found = head_differences(a, b)
    still = [dense_logits(x, 0)[:, :, :-1] for x in (a, b)]
    assert [x.qk for x in found] == pytest.approx(relative(*still), rel=1e-5)
    assert [x.ov for x in found] == pytest.approx(relative(*(dense_written(x) for x in (a, b))), rel=1e-5)
    if a.rotary is None:
        assert {x.qk_rotated for x in found} == {None}
    else:
        turned = [torch.cat([dense_logits(x, offset) for offset in OFFSETS], -1) for x in (a, b)]
        assert [x.qk_rotated for x in found] == pytest.approx(relative(*turned), rel=1e-5)
    assert min(x.largest or 0.0 for x in found) > 0.1

    monkeypatch.setattr(differences, "MAPS_AT_ONCE", SMALL // 8)  # and less than a group of heads has
    monkeypatch.setattr(output_maps_and_written_norms, "AT_ONCE", SMALL)
    assert [y for x in head_differences(a, b) for y in x] == [
        y if y is None else pytest.approx(y, rel=1e-9) for x in found for y in x
    ]
    for one, other in zip(responses(a), monkeypatch_free(monkeypatch, lambda: responses(a)), strict=True):
        torch.testing.assert_close(one, other)


def monkeypatch_free(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    """What a function returns without the patches."""
    monkeypatch.undo()
    return call()


@pytest.mark.parametrize("label", ["qwen3", "gemma3", "deepseek_v3"])
def test_norms_of_queries_are_their_mean_field(label: str) -> None:
    a, b = two_of(label)
    dense = []
    for layer in (a, b):
        maps = logit_maps(layer)
        query = torch.cat([maps.query, maps.query_shift[..., None]], -1).double()
        dense.append(layer.scale * query.mT @ maps.key.double().repeat_interleave(layer.group, 0))
    assert [x.qk for x in head_differences(a, b)] == pytest.approx(relative(*dense), rel=1e-5)


def test_stored_parameters_alone() -> None:
    a, b = two_of("qwen2")
    dense = [
        layer.query.weight().double().unflatten(0, (layer.heads, -1)).mT
        @ layer.key.weight().double().unflatten(0, (layer.kv_heads, -1)).repeat_interleave(layer.group, 0)
        for layer in (a, b)
    ]
    assert [x.qk for x in head_differences(a, b, raw=True)] == pytest.approx(relative(*dense), rel=1e-6)


@pytest.mark.parametrize("label", [*BILINEAR, "t5", "deepseek_v3"])
def test_what_heads_write_is_the_norm_of_values_and_outputs(label: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Against O_h V_h itself, in float64; of stored parameters where a norm is inside the map."""
    layer = attention_layers(model_of(case_of(label)))[0]
    assert layer.value is not None
    assert layer.out is not None
    raw = label == "deepseek_v3"
    norms = written_norms(layer, raw)
    if raw:
        value, out = layer.value.weight().double(), layer.out.weight().double().unflatten(1, (layer.heads, -1))
        products = [out[:, head] @ v for head, v in enumerate(value.unflatten(0, (layer.heads, -1)))]
        assert norms == pytest.approx([float(x.detach().norm()) for x in products], rel=1e-5)
    else:
        assert norms == pytest.approx(dense_written(layer).flatten(1).norm(dim=1).tolist(), rel=1e-5)
    monkeypatch.setattr(output_maps_and_written_norms, "AT_ONCE", 100)
    assert written_norms(layer, raw) == pytest.approx(norms, rel=1e-9)


def with_maps(layer: AttentionLayer, **changes: Callable[[Tensor], Tensor]) -> AttentionLayer:
    """The layer with some of its maps changed."""
    parts = {}
    for name, change in changes.items():
        part = getattr(layer, name)
        weight = change(part.weight().detach().clone())
        parts[name] = Projection(lambda weight=weight: weight, part.shape, part.bias)
    return replace(layer, **parts)  # type: ignore[arg-type]


def test_small_changes_are_not_lost_and_equal_products_are_equal() -> None:
    layer = attention_layers(model_of(case_of("llama")))[0]
    assert {y for x in head_differences(layer, layer) for y in x} == {0.0}
    for by in (1e-6, 1e-3, 49.0):
        larger = with_maps(layer, query=lambda w, by=by: w * (1 + by))
        assert {round(x.qk / by, 6) for x in head_differences(layer, larger)} == {1.0}  # type: ignore[operator]
        assert {x.ov for x in head_differences(layer, larger)} == {0.0}
    gauge = with_maps(layer, query=lambda w: w * 4, key=lambda w: w / 4, value=lambda w: w * 3, out=lambda w: w / 3)
    assert max(y or 0.0 for x in head_differences(layer, gauge) for y in x) < 1e-6


def test_another_rotary_order_shows_above_offset_0() -> None:
    layer = attention_layers(model_of(case_of("llama")))[0]

    def interleaved(w: Tensor) -> Tensor:
        return w.unflatten(0, (-1, 2, layer.head_dim // 2)).transpose(1, 2).reshape(w.shape)

    for x in head_differences(layer, with_maps(layer, query=interleaved, key=interleaved)):
        assert (x.qk, x.ov) == (0.0, 0.0)
        assert x.qk_rotated is not None
        assert x.qk_rotated > 0.1
    slower = replace(layer, rotary=replace(layer.rotary, frequencies=layer.rotary.frequencies / 2))  # type: ignore[union-attr, type-var]
    for x in head_differences(layer, slower):
        assert x.qk == 0.0
        assert x.qk_rotated is not None
        assert x.qk_rotated > 0.1


def test_numbers_that_do_not_exist() -> None:
    layer = attention_layers(model_of(case_of("llama")))[0]
    size = layer.head_dim

    def broken(w: Tensor) -> Tensor:
        w[0] = math.nan
        return w

    found = head_differences(layer, with_maps(layer, query=broken, out=lambda w: broken(w.T).T))
    assert found[0] == HeadDifference(None, None, None)
    assert {y for x in found[1:] for y in x} == {0.0}
    assert found[0].largest is None

    def emptied(w: Tensor) -> Tensor:
        w[:size] = 0
        return w

    empty = with_maps(layer, query=emptied)
    for pair in ((layer, empty), (empty, layer)):
        assert [x.qk for x in head_differences(*pair)] == pytest.approx([1.0] + [0.0] * (layer.heads - 1))
    assert {x.qk for x in head_differences(empty, empty)} == {0.0}
    unknown = replace(layer, value=None)
    assert {x.ov for x in head_differences(layer, unknown)} == {None}


def test_heads_in_other_places() -> None:
    layers = [*attention_layers(model_of(case_of("gpt2")))]
    a = layers[0]

    def rolled(w: Tensor) -> Tensor:
        return w.unflatten(0, (a.heads, -1)).roll(1, 0).flatten(0, 1)

    def moved(layer: AttentionLayer) -> AttentionLayer:
        whole = with_maps(layer, query=rolled, key=rolled, value=rolled, out=lambda w: rolled(w.T).T)
        parts = {n: replace(getattr(whole, n), bias=rolled(getattr(layer, n).bias)) for n in ("query", "key", "value")}
        return replace(whole, **parts)

    base = {at: responses(layer) for at, layer in enumerate(layers)}
    places = [(0, head) for head in range(a.heads)]
    expected = {(0, head): Move("head", 0, (head - 1) % a.heads) for head in range(a.heads)}
    assert moved_heads(base, {0: responses(moved(a))}, places) == expected
    assert moved_heads(base, {0: base[0]}, places) == {}, "in its own place"
    assert moved_heads(base, {0: responses(moved(a))}, places[:1]) == {(0, 0): expected[0, 0]}
    queries = {0: responses(with_maps(a, query=rolled))}
    assert moved_heads(base, queries, places) == {at: move._replace(part="queries") for at, move in expected.items()}
    other = with_maps(a, query=lambda w: layers[1].query.weight().detach().clone())
    assert moved_heads(base, {0: responses(other)}, places) == {at: Move("queries", 1, at[1]) for at in places}
    assert moved_heads(base, {0: responses(two_of("gpt2")[1])}, places) == {}
    halved = {0: responses(moved(with_maps(a, **dict.fromkeys(("query", "out"), lambda w: w.bfloat16().double()))))}
    assert moved_heads(base, halved, places) == expected, "rounded to another type"
    zero = {0: responses(with_maps(a, query=torch.zeros_like, key=torch.zeros_like))}
    assert moved_heads(zero, zero, places) == {}, "all heads of zeros are alike"
