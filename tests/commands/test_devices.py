"""Columns are computed where the moments are: no tensor on another device, and the numbers of the CPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from locater import scan, theory
from locater.commands.layer_moments import LayerMoments, Work, layer_moments
from locater.commands.scan_rows import ScanOptions, head_rows
from locater.discovery import attention_layers
from locater.results.scan import NUMERIC_COLUMNS, HeadRow
from locater.spectrum import Moments
from locater.theory import entropy as attenuation


def llama(**changes: Any) -> Any:
    """Three layers of eight heads: spreads of logits from below 1 to above 15, and heads that one direction decides."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {"hidden_size": 64, "num_hidden_layers": 3, "num_attention_heads": 8, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(vocab_size=50, intermediate_size=64, **{**shape, **changes}))
    with torch.no_grad():
        for number, block in enumerate(model.model.layers):
            block.input_layernorm.weight.uniform_(0.5, 1.5)
            sizes = torch.linspace(0.05, 0.4, 8)[:, None, None] * 2**number
            query, key = block.self_attn.q_proj.weight, block.self_attn.k_proj.weight
            query.normal_(0, 3 * query.shape[1] ** -0.5).unflatten(0, (8, -1)).mul_(sizes)
            key.normal_(0, 1.6 * key.shape[1] ** -0.5)
        for part in (model.model.layers[1].self_attn.q_proj, model.model.layers[1].self_attn.k_proj):
            part.weight[:1] *= 30
    return model


def with_a_broken_head() -> Any:
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight[8] = torch.nan
    return model


def with_a_deficient_head() -> Any:
    """Two rows of a query map are equal, which is exact in its Gram matrix: it has no Cholesky root."""
    model = llama()
    with torch.no_grad():
        weight = model.model.layers[2].self_attn.q_proj.weight
        weight[1] = weight[0]
        model.model.layers[0].self_attn.k_proj.weight[:8] = 0  # and two heads of zeros
    return model


def with_a_layer_for_float64() -> Any:
    """In one layer queries and keys use nearly separate channels: W is much smaller than its factors."""
    model = llama()
    with torch.no_grad():
        model.model.layers[1].self_attn.q_proj.weight.view(8, 8, 64)[:, 4:] *= 1e-5
        model.model.layers[1].self_attn.k_proj.weight.view(4, 8, 64)[:, :4] *= 1e-5
    return model


def in_half_precision() -> Any:
    """Heads of 64, in bfloat16."""
    return llama(hidden_size=512).to(torch.bfloat16)


def encoder_and_decoder() -> nn.Module:
    torch.manual_seed(0)
    return nn.Transformer(32, 4, 2, 2, 48, batch_first=True)


def model_parts() -> list[LayerMoments]:
    pairs = list(enumerate(attention_layers(with_a_broken_head())))
    return list(layer_moments(pairs, [layer for _, layer in pairs], Work()))


def test_no_tensor_is_made_on_the_default_device() -> None:
    """A tensor without a device of its own would be without data here."""
    options, parts = ScanOptions(eigenvalues=True, details=True), model_parts()
    attenuation._share_by_entropy.cache_clear()
    wanted = [row for part in parts for row in head_rows(part, options)]
    with torch.device("meta"):
        rows = [row for part in parts for row in head_rows(part, options)]
        kept = theory.kept_at_entropy(torch.ones(3, device="cpu"), 64)
    assert rows == wanted
    assert kept.device.type == "cpu"
    assert {row.approximation for row in rows} == {"gaussian", "mixture", None}


MOMENTS = (
    "trace trace_of_square frobenius_sq symmetric_sq mean variance concentration skew spectral_norm stable_rank effective_rank"
).split()
INTEGRALS = (attenuation._squares, attenuation._participation, attenuation._entropy)


def columns_of(m: Moments, spread: Tensor) -> Iterator[tuple[str, Tensor]]:
    yield from ((name, getattr(m, name)) for name in MOMENTS)
    yield "localization", theory.localization(*theory.unit_moments(m, 0.5))
    yield "signal_propagation", theory.signal_propagation(*theory.unit_moments(m, 0.5), 64)
    keys = attenuation._keys([8, 64], spread.device)
    for ends in ((0.5, 0.5), (0.5, 4.0)):  # one grid, and one for each spread
        yield from ((f.__name__, f(attenuation._grid(spread, 64.0, *ends), keys)) for f in INTEGRALS)


def test_columns_stay_on_the_device_of_the_moments() -> None:
    """On a device without data, where an operation with a tensor of the CPU is an error."""
    m = Moments(*(torch.empty(3, 8, 8, device="meta") for _ in range(3)))
    vars(m)["_singular_values"] = torch.empty(3, 8, device="meta")  # computed on the CPU, and brought back
    for name, column in columns_of(m, torch.empty(3, dtype=torch.float64, device="meta")):
        assert column.device.type == "meta", name


@pytest.mark.parametrize("typical", [False, True])
@pytest.mark.parametrize("keys", [4, 256, 10**9, (1, 8, 64)])
def test_large_batches_of_spreads_have_the_numbers_of_small_ones(
    keys: Any, typical: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a GPU spreads of all sizes share a batch, and each keeps its own grid."""
    v = torch.tensor([0.0, 1e-3, 0.5, 1.0, 1.7, 4.0, 30.0, 224.0, 225.0, 1e4, math.inf, math.nan], dtype=torch.float64)
    wanted = theory.residual_kept(v, keys, typical)
    monkeypatch.setattr(attenuation, "_batches_in_cache", attenuation._large_batches)
    for numbers in (attenuation.ON_GPU, 2**17):
        monkeypatch.setattr(attenuation, "ON_GPU", numbers)
        torch.testing.assert_close(
            theory.residual_kept(v, keys, typical), wanted, rtol=1e-12, atol=1e-14, equal_nan=True
        )


MODELS = [
    *(llama, in_half_precision, with_a_broken_head, with_a_deficient_head, with_a_layer_for_float64),
    encoder_and_decoder,
]


@pytest.mark.gpu
@pytest.mark.parametrize("build", MODELS, ids=lambda build: build.__name__)
def test_a_scan_on_the_gpu_has_all_columns_of_the_cpu(build: Callable[[], Any]) -> None:
    model = build()
    wanted = scan(model, details=True)
    found = scan(model.cuda(), details=True)
    assert [asdict(row).keys() for row in found.rows] == [asdict(row).keys() for row in wanted.rows]
    for row, other in zip(found.rows, wanted.rows, strict=True):
        assert_same_head(row, other)
    for entry, other_entry in zip(found.layers, wanted.layers, strict=True):
        assert entry["residual_kept"] == pytest.approx(other_entry["residual_kept"], rel=1e-4)


def assert_same_head(row: HeadRow, other: HeadRow) -> None:
    """All columns; moments of products in float32, so numbers that cancel are known to a part of the size of W."""
    exact = ("layer", "head", "kv_head", "kind", "width", "head_dim", "scale", "approximation", "flags", "quantised")
    where = (row.layer, row.head)
    assert [row[name] for name in exact] == [other[name] for name in exact], where
    size = math.sqrt(other.frobenius_sq or 0.0)
    absolute = {"trace": 1e-4 * size, "mean": 1e-4 * size, "M": 1e-4 * size}
    absolute |= dict.fromkeys(("trace_of_square", "symmetric_sq", "variance", "S"), 1e-4 * size**2)
    absolute["effective_rank"] = 0.02  # a singular value of 0 is the root of a rounding error
    for name in NUMERIC_COLUMNS:
        assert (row[name] is None) == (other[name] is None), (where, name)
        assert (row[name] or 0.0) == pytest.approx(other[name] or 0.0, rel=1e-4, abs=absolute.get(name, 1e-4)), (
            where,
            name,
        )
    assert (row.eigenvalues is None) == (other.eigenvalues is None)
    for one, two in ((row, other), (other, row)):  # near moduli may change places
        for value in one.eigenvalues or ():
            nearest = min(abs(complex(*value) - complex(*x)) for x in two.eigenvalues or ())
            assert nearest <= 2e-3 * size, (where, value)
    assert (row.profile is None) == (other.profile is None)
    assert (row.profile or ()) == pytest.approx(other.profile or (), abs=1e-3)
    assert (row.drive is None) == (other.drive is None)
    for name in row.drive or {}:
        assert row.drive[name] == pytest.approx(other.drive[name], rel=1e-4, abs=1e-4 * size), (where, name)
