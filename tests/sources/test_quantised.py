"""Quantised tensors against the library of each format: equal bits, or equal after the library's own rounding.

GPTQ and AWQ have no library that installs beside this torch: their files are packed here number by number, from the
description of the format.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from locater.errors import LocaterError
from locater.sources.quantised import dequantised_view
from locater.sources.safetensors_file import SafetensorsWeights
from locater.sources.weights import DictWeights, Weights, quantised_names
from tests.sources.packing import awq, gptq

RANGES = [(1, 3), (5, 6), (2, 4)]
NAME = "m.weight"


def seen(tensors: dict[str, Tensor], settings: dict[str, Any] | None = None) -> Weights:
    weights = DictWeights({f"m.{name}": tensor for name, tensor in tensors.items()}, "here")
    return dequantised_view(weights, {} if settings is None else {"quantization_config": settings})


def check_rows(weights: Weights) -> Tensor:
    """The whole map, after ranges of it were found to be its rows."""
    whole = weights.read(NAME)
    assert tuple(whole.shape) == weights.shape(NAME)
    assert list(weights.names()) == [NAME]
    assert torch.equal(weights.read(NAME, RANGES), torch.cat([whole[a:b] for a, b in RANGES]))
    return whole


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


# --- FP8 and INT8 with scales


@pytest.mark.parametrize("name", ["weight_scale_inv", "weight_scale"])
@pytest.mark.parametrize("kind", ["blocks", "exponents", "bytes"])
def test_fp8_blocks_are_what_transformers_dequantises(name: str, kind: str) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight, scale = random(256, 384).to(torch.float8_e4m3fn), random(2, 3, seed=1).abs() + 0.1
    if kind != "blocks":
        scale = scale.to(torch.float8_e8m0fnu)
    if kind == "bytes":
        scale = scale.view(torch.uint8)
    expected = Fp8Dequantize(None)._dequantize_one(weight, scale, torch.float32)
    weights = seen({"weight": weight, name: scale})
    assert quantised_names(weights) == {NAME: "fp8"}
    assert torch.equal(check_rows(weights), expected)


def test_the_last_block_may_be_smaller() -> None:
    """As in DeepSeek-V3, whose latents have 576 = 4.5 x 128 rows."""
    from transformers.integrations.finegrained_fp8 import _dequantize_fp8_weight

    weight, scale = random(72, 50).to(torch.float8_e4m3fn), random(5, 4, seed=1).abs() + 0.1
    expected = _dequantize_fp8_weight(weight, scale, [16, 16], torch.float32)
    weights = seen({"weight": weight, "weight_scale_inv": scale}, {"weight_block_size": [16, 16]})
    assert torch.equal(check_rows(weights), expected)


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.int8])
@pytest.mark.parametrize("shape", [(), (1,), (1, 1), (8,), (8, 1)])
def test_scales_of_all_and_of_each_row(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    weight, scale = (4 * random(8, 6)).to(dtype), random(*shape, seed=1).abs() + 0.1
    expected = weight.double() * scale.double().reshape(-1, 1)
    weights = seen({"weight": weight, "weight_scale": scale, "input_scale": torch.ones(1)})
    torch.testing.assert_close(check_rows(weights).double(), expected, rtol=1e-7, atol=0)
    assert quantised_names(weights) == {NAME: "int8" if dtype == torch.int8 else "fp8"}


@pytest.mark.parametrize(("kind", "symmetric"), [("float", True), ("int", True), ("int", False)])
def test_compressed_tensors_of_eight_bits(kind: str, symmetric: bool) -> None:
    """The library rounds to the bfloat16 of its scales; FP8 kernels do not, so neither is done here before the end."""
    from compressed_tensors.compressors import NaiveQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=8, type=kind, strategy="channel", symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    scale = (random(8, 1, seed=1).abs() * 0.02 + 0.01).bfloat16()
    zero = torch.arange(8, dtype=torch.int8)[:, None]
    given = {"weight": random(8, 32).bfloat16(), "weight_scale": scale} | (
        {} if symmetric else {"weight_zero_point": zero}
    )
    stored = NaiveQuantizationCompressor.compress(given, scheme)
    expected = NaiveQuantizationCompressor.decompress(stored, scheme)["weight"]
    assert torch.equal(check_rows(seen(stored)).bfloat16(), expected)


# --- packed whole numbers


@pytest.mark.parametrize(
    ("strategy", "size", "bits", "symmetric"),
    [
        *(("group", 16, 4, symmetric) for symmetric in (True, False)),
        *(("channel", None, 4, symmetric) for symmetric in (True, False)),
        *(("group", 32, 8, symmetric) for symmetric in (True, False)),
        *(("channel", None, 2, symmetric) for symmetric in (True, False)),
        ("tensor", None, 4, True),
    ],
)
def test_packed_numbers_are_what_compressed_tensors_unpacks(
    strategy: str, size: int | None, bits: int, symmetric: bool
) -> None:
    from compressed_tensors.compressors import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

    args = QuantizationArgs(num_bits=bits, type="int", strategy=strategy, group_size=size, symmetric=symmetric)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    shape = {"group": (9, 96 // (size or 1)), "channel": (9, 1), "tensor": (1,)}[strategy]
    scale = (random(*shape, seed=1).abs() * 0.2 + 0.05).bfloat16()
    given = {"weight": random(9, 96).bfloat16(), "weight_scale": scale}
    if not symmetric:
        given["weight_zero_point"] = torch.randint(-(2 ** (bits - 1)), 2 ** (bits - 1), shape).to(torch.int8)
    stored = PackedQuantizationCompressor.compress(given, scheme)
    expected = PackedQuantizationCompressor.decompress(stored, scheme)["weight"]
    weights = seen(stored, {"config_groups": {"group_0": {"weights": {"num_bits": bits}}}})
    got = check_rows(weights)
    assert got.dtype == expected.dtype
    assert torch.equal(got, expected)
    assert quantised_names(weights) == {NAME: f"int{bits}"}


def test_columns_sorted_by_activations() -> None:
    """`weight_g_idx`: the group of a column. Version 0.20 of the library no longer reads it: unpacked here by hand."""
    numbers = torch.randint(-8, 8, (4, 16), generator=torch.Generator().manual_seed(0))
    words = torch.zeros(4, 2, dtype=torch.int64)
    for row in range(4):
        for column in range(16):
            words[row, column // 8] |= (int(numbers[row, column]) + 8) << 4 * (column % 8)
    packed = torch.where(words >= 2**31, words - 2**32, words).int()
    scale, group = random(4, 2, seed=1), torch.tensor([0, 1] * 8)
    stored = {"weight_packed": packed, "weight_scale": scale, "weight_shape": torch.tensor([4, 16])}
    expected = torch.tensor([[float(numbers[r, c] * scale[r, c % 2]) for c in range(16)] for r in range(4)])
    settings = {"config_groups": {"group_0": {"weights": {"num_bits": 4}}}}  # two words can also be 16 x 3 bits
    weights = seen({**stored, "weight_g_idx": group.int()}, settings)
    assert torch.equal(weights.read(NAME), expected)
    assert torch.equal(weights.read(NAME, [(2, 4)]), expected[2:])
    plain = seen({**stored, "weight_g_idx": torch.full((16,), -1, dtype=torch.int32)}, settings)
    assert torch.equal(plain.read(NAME), numbers * scale.repeat_interleave(8, 1))


# --- bitsandbytes


@pytest.mark.parametrize("nested", [False, True])
@pytest.mark.parametrize("kind", ["nf4", "fp4"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("shape", [(24, 64), (300, 128), (7, 33), (24, 40), (32, 48)])
def test_four_bits_are_what_bitsandbytes_dequantises(
    shape: tuple[int, int], dtype: torch.dtype, kind: str, nested: bool
) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    with torch.compiler.set_stance("force_eager"):  # compiling three kernels takes longer than all of this file
        packed, state = functional.quantize_4bit(random(*shape).to(dtype), quant_type=kind, compress_statistics=nested)
    stored = {"weight": packed, **{f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}}
    weights = seen(stored, {"quant_method": "bitsandbytes"})
    # on a CPU, bitsandbytes 0.50.2 scales rows that are no whole number of blocks of 64 by the scales of other blocks;
    # the format is a flat list, and as a list of rows of 64 its own code reads it right
    numbers = shape[0] * shape[1]
    state.shape = torch.Size((numbers // 64, 64) if numbers % 64 == 0 else (1, numbers))
    with torch.compiler.set_stance("force_eager"):
        expected = functional.dequantize_4bit(packed, state).reshape(shape)
    got = check_rows(weights)
    assert got.dtype == expected.dtype == dtype
    assert torch.equal(got, expected)
    assert quantised_names(weights) == {NAME: kind}


def test_codes_stored_as_wider_numbers() -> None:
    """`bnb_4bit_quant_storage=bfloat16`, as sharded training needs it."""
    functional = pytest.importorskip("bitsandbytes").functional
    weight = random(24, 64).bfloat16()
    packed, state = functional.quantize_4bit(weight, quant_type="nf4", quant_storage=torch.bfloat16)
    assert packed.dtype == torch.bfloat16
    stored = {"weight": packed, **{f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}}
    assert torch.equal(check_rows(seen(stored)), functional.dequantize_4bit(packed, state))


def test_eight_bits_are_what_bitsandbytes_dequantises() -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    codes, largest, _ = functional.int8_vectorwise_quant(random(24, 40).half())
    stored = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}
    weights = seen(stored)
    assert torch.equal(check_rows(weights), functional.int8_vectorwise_dequant(codes, largest))
    assert quantised_names(weights) == {NAME: "int8"}


# --- GPTQ and AWQ, packed by hand


@pytest.mark.parametrize("form", ["gptq", "gptq_v2"])
@pytest.mark.parametrize("sorted_by_activations", [False, True])
@pytest.mark.parametrize("bits", [2, 4, 8])
def test_gptq(bits: int, sorted_by_activations: bool, form: str) -> None:
    stored, expected = gptq(bits, sorted_by_activations, minus_one=form == "gptq")
    settings = {"quant_method": "gptq", "bits": bits, "group_size": 16, "checkpoint_format": form}
    weights = seen(stored, {**settings, "desc_act": sorted_by_activations})
    assert torch.equal(check_rows(weights), expected)
    assert quantised_names(weights) == {NAME: f"gptq-int{bits}"}


def test_gptq_without_indices_takes_groups_in_order() -> None:
    stored, expected = gptq(4, False, minus_one=True)
    del stored["g_idx"]
    assert torch.equal(check_rows(seen(stored, {"quant_method": "gptq", "bits": 4, "group_size": 16})), expected)


def test_awq() -> None:
    stored, expected = awq()
    weights = seen(stored, {"quant_method": "awq", "bits": 4, "group_size": 16, "version": "gemm"})
    assert torch.equal(check_rows(weights), expected)
    assert quantised_names(weights) == {NAME: "awq-int4"}


# --- bytes


def test_a_range_of_rows_reads_its_bytes_alone(tmp_path: Path) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    packed, state = functional.quantize_4bit(random(128, 128), quant_type="nf4")
    four = {"weight": packed, **{f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}}
    eight = {"weight": random(128, 128).to(torch.float8_e4m3fn), "weight_scale_inv": random(8, 8)}
    words = {
        "weight_packed": torch.zeros(128, 16, dtype=torch.int32),
        "weight_scale": random(128, 8),
        "weight_zero_point": torch.zeros(16, 8, dtype=torch.int32),
        "weight_shape": torch.tensor([128, 128]),
    }
    for number, stored in enumerate((four, eight, words)):
        file = tmp_path / f"{number}.safetensors"
        save_file({f"m.{name}": tensor.contiguous() for name, tensor in stored.items()}, file)
        inner = SafetensorsWeights([file], str(file))
        weights = dequantised_view(inner, {"quantization_config": {"weight_block_size": [16, 16]}})
        whole = weights.read(NAME)
        before = inner.bytes_read
        assert torch.equal(weights.read(NAME, [(16, 24)]), whole[16:24])
        assert inner.bytes_read - before < 0.2 * before, number


# --- refused


def gptq_settings(**changes: Any) -> dict[str, Any]:
    return {"quant_method": "gptq", "bits": 4, "group_size": 16, **changes}


FP8 = {"weight": torch.zeros(256, 256).to(torch.float8_e4m3fn)}
PACKED = {
    "weight_packed": torch.zeros(8, 4, dtype=torch.int32),
    "weight_scale": torch.ones(8, 2),
    "weight_shape": torch.tensor([8, 32]),
}
BAD: dict[str, tuple[dict[str, Tensor], dict[str, Any], str]] = {
    "FP8 without a scale": (FP8, {"quant_method": "fp8"}, "m.weight is stored as torch.float8_e4m3fn"),
    "FP8 alone": (FP8, {}, "its scale is missing"),
    "FP8 with a scale of another name": ({**FP8, "scale_weight": torch.ones(())}, {}, "perhaps m.scale_weight"),
    "INT8 alone": ({"weight": torch.ones(4, 4, dtype=torch.int8)}, {}, "stored as torch.int8 (quantised)"),
    "blocks that do not fit": (
        {**FP8, "weight_scale_inv": torch.ones(3, 2)},
        {},
        "m.weight_scale_inv has shape [3, 2]",
    ),
    "two sizes fit": (
        {"weight": torch.zeros(300, 128).to(torch.float8_e4m3fn), "weight_scale": torch.ones(3, 1)},
        {},
        "m.weight_scale has shape [3, 1]",
    ),
    "scales of whole numbers": ({**FP8, "weight_scale": torch.ones(2, 2, dtype=torch.int32)}, {}, "m.weight_scale is"),
    "a scale of floats": ({"weight": torch.zeros(4, 4), "weight_scale": torch.ones(1)}, {}, "stored as torch.float32"),
    "four-bit floats": (
        {"weight": torch.zeros(4, 4, dtype=torch.uint8), "weight_scale": torch.ones(4, 1)},
        {},
        "stored as torch.uint8, which is not read",
    ),
    "two scales": ({**FP8, "weight_scale": torch.ones(1), "weight_scale_inv": torch.ones(1)}, {}, "two scales"),
    "three axes": ({"weight": torch.zeros(2, 2, 2).to(torch.int8), "weight_scale": torch.ones(1)}, {}, "not two axes"),
    "no shape": ({k: v for k, v in PACKED.items() if k != "weight_shape"}, {}, "m.weight_shape is missing"),
    "no packed scale": ({k: v for k, v in PACKED.items() if k != "weight_scale"}, {}, "m.weight_scale is missing"),
    "another shape": ({**PACKED, "weight_shape": torch.tensor([9, 32])}, {}, "m.weight_shape says [9, 32]"),
    "three bits": (
        {**PACKED, "weight_packed": torch.zeros(8, 3, dtype=torch.int32)},
        {},
        "m.weight_packed has 3 words",
    ),
    "seven bits in the words of eight": (
        {**PACKED, "weight_packed": torch.zeros(8, 8, dtype=torch.int32)},
        {"config_groups": {"group_0": {"weights": {"num_bits": 7}}}},
        "m.weight_packed has 8 words for 32 columns, and config.json says 7 bits",
    ),
    "groups that do not fit": ({**PACKED, "weight_scale": torch.ones(8, 3)}, {}, "m.weight_scale has shape [8, 3]"),
    "zeros that do not fit": (
        {**PACKED, "weight_zero_point": torch.zeros(2, 2, dtype=torch.int32)},
        {},
        "m.weight_zero_point has shape [2, 2]",
    ),
    "groups beyond": (
        {**PACKED, "weight_g_idx": torch.full((32,), 2, dtype=torch.int32)},
        {},
        "m.weight_g_idx names groups beyond the 2",
    ),
    "GPTQ of three bits": (gptq(4, False, True)[0], gptq_settings(bits=3), "quantised to 3 bits"),
    "GPTQ said to be AWQ": (gptq(4, False, True)[0], gptq_settings(quant_method="awq"), "config.json says 'awq'"),
    "GPTQ for Marlin": (gptq(4, False, True)[0], gptq_settings(checkpoint_format="marlin"), "'gptq (marlin)'"),
    "GPTQ without zeros": (
        {k: v for k, v in gptq(4, False, True)[0].items() if k != "qzeros"},
        gptq_settings(),
        "m.qzeros is missing",
    ),
    "GPTQ sorted, without indices": (
        {k: v for k, v in gptq(4, False, True)[0].items() if k != "g_idx"},
        gptq_settings(desc_act=True),
        "m.g_idx is missing",
    ),
    "GPTQ with groups beyond": (
        {**gptq(4, False, True)[0], "g_idx": torch.full((48,), 3, dtype=torch.int32)},
        gptq_settings(),
        "m.g_idx names groups beyond the 3",
    ),
    "a zero point of 0": (
        {**gptq(4, False, True)[0], "qzeros": torch.full((3, 2), -1, dtype=torch.int32)},
        gptq_settings(),
        "m.qzeros holds a zero point of 0",
    ),
    "AWQ for GEMV": (awq()[0], {"quant_method": "awq", "bits": 4, "version": "gemv"}, "'awq (gemv)'"),
    "MLX": (
        {"weight": torch.zeros(4, 4, dtype=torch.int32), "scales": torch.ones(4, 1), "biases": torch.ones(4, 1)},
        {},
        "m.weight is quantised (MLX; m.biases is there), which is not read",
    ),
    "NVFP4": (
        {**FP8, "weight_scale": torch.ones(256, 16), "weight_scale_2": torch.ones(())},
        {"quant_method": "modelopt"},
        "(NVFP4; m.weight_scale_2 is there)",
    ),
    "HQQ": ({"W_q": torch.zeros(4, 4, dtype=torch.uint8)}, {"quant_method": "hqq"}, "(HQQ; m.W_q is there)"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_read_is_one_line_that_names_the_tensor(name: str) -> None:
    tensors, settings, words = BAD[name]
    weights = seen(tensors, settings)
    with pytest.raises(LocaterError) as error:
        weights.read(NAME)
    assert words in str(error.value)
    assert str(error.value).startswith("here: m.")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("part", "damage"),
    [
        *((part, "cut") for part in ("absmax", "quant_map", "nested_absmax", "quant_state.bitsandbytes__nf4", "")),
        ("absmax", "gone"),
        ("quant_map", "gone"),
        ("nested_absmax", "gone"),
    ],
)
def test_damaged_four_bits_are_refused(part: str, damage: str) -> None:
    functional = pytest.importorskip("bitsandbytes").functional
    packed, state = functional.quantize_4bit(random(24, 64), quant_type="nf4", compress_statistics=True)
    stored = {"weight": packed, **{f"weight.{name}": x for name, x in state.as_dict(packed=True).items()}}
    name = f"weight.{part}" if part else "weight"
    if damage == "cut":
        stored[name] = stored[name][: max(1, len(stored[name]) - 7)] if part != "nested_absmax" else torch.ones(9)
    else:
        del stored[name]
    with pytest.raises(LocaterError, match=r"here: m\.weight"):
        seen(stored).read(NAME)
