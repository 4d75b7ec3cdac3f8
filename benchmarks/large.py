"""Peak memory and time of scanning one layer of a very large model, eigenvalues included.

    python benchmarks/large.py                      # writes benchmarks/results/large.json

One layer of each shape is written to a temporary folder with random weights, as a safetensors file whose values and
output maps are holes: a scan does not read them. Each file is then scanned in a fresh process, so that peak memory
(VmHWM) is that of the scan.
"""

from __future__ import annotations

import json
import os
import struct
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from common import command_line, in_process, machine, memory, peak, place, write

BLOCK = 128  # rows and columns of a block of FP8 weights
LLAMA = {
    "model_type": "llama",
    "hidden_size": 16_384,
    "num_hidden_layers": 1,
    "num_attention_heads": 128,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500_000.0,
    "max_position_embeddings": 131_072,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "num_hidden_layers": 1,
    "num_attention_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 163_840,
}
QUANTISED = {"quantization_config": {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [BLOCK, BLOCK]}}
LLAMA_MAPS = {
    "q_proj": (16_384, 16_384),
    "k_proj": (1024, 16_384),
    "v_proj": (1024, 16_384),
    "o_proj": (16_384, 16_384),
}
DEEPSEEK_MAPS = {
    "q_a_proj": (1536, 7168),
    "q_b_proj": (24_576, 1536),
    "kv_a_proj_with_mqa": (576, 7168),
    "kv_b_proj": (32_768, 512),
    "o_proj": (7168, 16_384),
}
DEEPSEEK_GAINS = {"self_attn.q_a_layernorm": 1536, "self_attn.kv_a_layernorm": 512, "input_layernorm": 7168}
UNREAD = ("v_proj", "o_proj")
SHAPES: dict[str, tuple[dict[str, Any], dict[str, tuple[int, int]], dict[str, int], bool]] = {
    "Llama-405B": (LLAMA, LLAMA_MAPS, {"input_layernorm": 16_384}, False),
    "DeepSeek-V3": (DEEPSEEK, DEEPSEEK_MAPS, DEEPSEEK_GAINS, False),
    "DeepSeek-V3, FP8 blocks": (DEEPSEEK | QUANTISED, DEEPSEEK_MAPS, DEEPSEEK_GAINS, True),
}


def write_layer(folder: Path, shape: str) -> None:
    """One layer of a shape as `model.safetensors`, one tensor in memory at a time."""
    import torch

    config, maps, gains, fp8 = SHAPES[shape]
    (folder / "config.json").write_text(json.dumps(config))
    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Any:
        return torch.randn(rows, columns, generator=generator) / (1 if fp8 else columns**0.5)

    def gain(size: int) -> Any:
        return (1 + 0.1 * torch.randn(size, generator=generator)).bfloat16()

    tensors: dict[str, tuple[str, tuple[int, ...], Callable[[], Any] | None]] = {}
    for name, size in gains.items():
        tensors[f"model.layers.0.{name}.weight"] = ("BF16", (size,), lambda size=size: gain(size))
    for name, (rows, columns) in maps.items():
        weight = f"model.layers.0.self_attn.{name}.weight"
        make = None if name in UNREAD else lambda rows=rows, columns=columns: matrix(rows, columns)
        tensors[weight] = ("F8_E4M3" if fp8 else "BF16", (rows, columns), make)
        if fp8:
            blocks = (-(-rows // BLOCK), -(-columns // BLOCK))
            scales = lambda blocks=blocks, size=columns**-0.5: size * (0.5 + torch.rand(blocks, generator=generator))  # noqa: E731
            tensors[f"{weight}_scale_inv"] = ("F32", blocks, scales)
    _write(folder / "model.safetensors", tensors)


def _write(path: Path, tensors: dict[str, tuple[str, tuple[int, ...], Callable[[], Any] | None]]) -> None:
    import torch

    dtypes = {"BF16": torch.bfloat16, "F32": torch.float32, "F8_E4M3": torch.float8_e4m3fn}
    header, end = {}, 0
    for name, (dtype, shape, _) in tensors.items():
        size = torch.Size(shape).numel() * dtypes[dtype].itemsize
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": (end, end + size)}
        end += size
    text = json.dumps(header).encode()
    with open(path, "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text)
        for name, (dtype, _, make) in tensors.items():
            begin, stop = header[name]["data_offsets"]
            file.seek(8 + len(text) + begin)
            if make is not None:
                file.write(make().to(dtypes[dtype]).flatten().view(torch.uint8).numpy().tobytes())
        file.truncate(8 + len(text) + stop)


def measure(folder: Path) -> dict[str, Any]:
    """The scan of a folder, in this process."""
    import locater
    import locater.commands.scanning  # torch and what a scan imports

    base, began, processor = memory(), time.perf_counter(), time.process_time()
    scan = locater.scan(folder, eigenvalues=True)
    seconds, processor = time.perf_counter() - began, time.process_time() - processor
    heads = [row.F for row in scan.rows]
    return {
        "heads": len(heads),
        "seconds": round(seconds, 2),
        "processor_seconds": round(processor, 2),  # of all threads
        "peak_over_import": peak() - base,
        "mean_F": sum(heads) / len(heads),
    }


def main() -> None:
    parser = command_line(__doc__, "large")
    parser.add_argument("--run", metavar="FOLDER", type=Path, help="scan one folder, in this process")
    args = parser.parse_args()
    if args.run:
        print(json.dumps(measure(args.run)))
        return
    # other work on the machine changes the seconds, not the memory
    results: dict[str, Any] = {"machine": machine(), "load_average": os.getloadavg()}
    lines = []
    for shape in list(SHAPES)[:1] if args.quick else SHAPES:
        with tempfile.TemporaryDirectory() as folder:
            write_layer(Path(folder), shape)
            results[shape] = run = in_process(__file__, "--run", folder)
        lines.append(f"{shape}: {run['heads']} heads in {run['seconds']} s, {run['peak_over_import'] / 1e6:.0f} MB")
    write(results, place(args), "\n".join(lines))


if __name__ == "__main__":
    main()
