"""How far the numbers of a scan move when the weights are quantised: the demo model, quantised by the libraries.

    make study STUDY=quantised_weights     # prints the table of docs/quantised.md

Each format is written as a checkpoint and scanned as one, so that the table also runs the readers. Weights are rounded
to the nearest code, without calibration data.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from locater import scan

StoredTensors = dict[str, Tensor]
BLOCK = 128


def quantise_fp8(weight: Tensor) -> StoredTensors:
    """E4M3, one scale for each block of 128 x 128, as DeepSeek stores it."""
    scale = torch.stack(
        [torch.stack([part.abs().max() / 448 for part in rows.split(BLOCK, 1)]) for rows in weight.float().split(BLOCK)]
    )
    spread = scale.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)[: weight.shape[0], : weight.shape[1]]
    return {"weight": (weight.float() / spread).to(torch.float8_e4m3fn), "weight_scale_inv": scale}


def quantise_4bit(weight: Tensor, kind: str, nested: bool) -> StoredTensors:
    from bitsandbytes import functional

    packed, state = functional.quantize_4bit(weight, quant_type=kind, compress_statistics=nested)
    return {"weight": packed, **{f"weight.{name}": tensor for name, tensor in state.as_dict(packed=True).items()}}


def quantise_int8(weight: Tensor) -> StoredTensors:
    from bitsandbytes import functional

    codes, largest, _ = functional.int8_vectorwise_quant(weight.half())
    return {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0, dtype=torch.uint8)}


def pack_int(weight: Tensor, bits: int, group: int) -> StoredTensors:
    from compressed_tensors.compressors import PackedQuantizationCompressor  # type: ignore[import-untyped]
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme  # type: ignore[import-untyped]

    args = QuantizationArgs(num_bits=bits, type="int", strategy="group", group_size=group)
    scale = weight.unflatten(1, (-1, group)).abs().amax(2) / (2 ** (bits - 1) - 0.5)
    scheme = QuantizationScheme(targets=["Linear"], weights=args)
    stored: StoredTensors = PackedQuantizationCompressor.compress({"weight": weight, "weight_scale": scale}, scheme)
    return stored


def compressed_tensors_config(bits: int) -> dict[str, Any]:
    return {"quant_method": "compressed-tensors", "config_groups": {"group_0": {"weights": {"num_bits": bits}}}}


FORMATS: dict[str, tuple[Callable[[Tensor], StoredTensors], dict[str, Any]]] = {
    "FP8, blocks of 128 x 128": (quantise_fp8, {"quant_method": "fp8", "weight_block_size": [BLOCK, BLOCK]}),
    "LLM.int8": (quantise_int8, {"quant_method": "bitsandbytes"}),
    "INT8, groups of 128": (lambda weight: pack_int(weight, 8, 128), compressed_tensors_config(8)),
    "INT4, groups of 32": (lambda weight: pack_int(weight, 4, 32), compressed_tensors_config(4)),
    "INT4, groups of 128": (lambda weight: pack_int(weight, 4, 128), compressed_tensors_config(4)),
    "nf4": (lambda weight: quantise_4bit(weight, "nf4", nested=False), {"quant_method": "bitsandbytes"}),
    "nf4, double": (lambda weight: quantise_4bit(weight, "nf4", nested=True), {"quant_method": "bitsandbytes"}),
    "fp4": (lambda weight: quantise_4bit(weight, "fp4", nested=False), {"quant_method": "bitsandbytes"}),
}


def write_quantised(folder: Path, name: str) -> None:
    """The demo model with every map of its blocks quantised."""
    demo = Path(str(files("locater") / "demo"))
    change, settings = FORMATS[name]
    tensors = load_file(demo / "model.safetensors")
    for stored, weight in list(tensors.items()):
        if "_proj.weight" in stored:
            del tensors[stored]
            stem = stored.removesuffix("weight")
            tensors |= {f"{stem}{part}": tensor.contiguous() for part, tensor in change(weight).items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((demo / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": settings}))


def comparison_table() -> list[str]:
    """Rows of Markdown."""
    plain = scan(Path(str(files("locater") / "demo")))
    lines = [
        "| format | `quantised` | change of F: median | worst | change of M: median | worst | heads with other flags |",
        "|---|---|---|---|---|---|---|",
    ]
    for name in FORMATS:
        with tempfile.TemporaryDirectory() as place:
            write_quantised(Path(place), name)
            quantised = scan(Path(place))
        pairs = list(zip(plain.rows, quantised.rows, strict=True))
        of_F = [abs(new.F / old.F - 1) for old, new in pairs]  # type: ignore[operator]
        of_M = [abs(new.M - old.M) for old, new in pairs]  # type: ignore[operator]
        flags = sum(old.flags != new.flags for old, new in pairs)
        lines.append(
            f"| {name} | {quantised.rows[0].quantised} | {median(of_F):.1%} | {max(of_F):.1%} "
            f"| {median(of_M):.3f} | {max(of_M):.3f} | {flags} of {len(pairs)} |"
        )
    return lines


if __name__ == "__main__":
    print("\n".join(comparison_table()))
