"""Time and memory of discovery: of a live model of 1B shape without a record, and of the same model scanned from disk.

    .venv/bin/python benchmarks/discovery.py      # writes benchmarks/results/discovery.json

Each runs in a process of its own, one after the other:

    live     `locater.discover` of the model in memory, and once more
    first    `locater.scan` of the saved folder with an empty cache: it builds and verifies a small model first
    cached   the same again: layouts come from the cache
    named    the same scan with query and key maps named by hand (--query, --key): no search at all

Bytes are all that the process read while it scanned, the code of transformers that it imported among them.
"""

from __future__ import annotations

import json
import tempfile
import time
from pathlib import Path
from typing import Any

from common import bytes_read, command_line, in_process, machine, memory, peak, place, write

SHAPE = {"num_hidden_layers": 16, "hidden_size": 2048, "num_attention_heads": 32, "num_key_value_heads": 8,
         "intermediate_size": 8192, "vocab_size": 128_256}  # fmt: skip
MAPS = "model.layers.*.self_attn.{}_proj.weight"


def model() -> Any:
    """Random weights in bfloat16, of a type without a record."""
    import torch
    from transformers import SmolLM3Config, SmolLM3ForCausalLM

    torch.set_default_dtype(torch.bfloat16)
    built = SmolLM3ForCausalLM(SmolLM3Config(**SHAPE))
    torch.set_default_dtype(torch.float32)
    return built


def run_live() -> dict[str, Any]:
    """Two calls; memory over that of the model itself."""
    import locater

    built = model()
    base, calls = peak(), []
    for _ in range(2):
        began, processor = time.perf_counter(), time.process_time()
        layers = locater.discover(built).layers
        calls.append({"seconds": time.perf_counter() - began, "processor_seconds": time.process_time() - processor})
    return {"layers": len(layers), "first": calls[0], "second": calls[1], "peak_over_model": peak() - base}


def run_scan(folder: Path, **how: Any) -> dict[str, Any]:
    """One scan of a folder, in a process that has imported the package."""
    import locater

    base, read = memory(), bytes_read()
    began, processor = time.perf_counter(), time.process_time()
    rows = locater.scan(folder, **how).rows
    return {
        "heads": len(rows),
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - processor,
        "bytes_read": bytes_read() - read,
        "peak_over_import": peak() - base,
    }


def run_named(folder: Path) -> dict[str, Any]:
    return run_scan(folder, query=MAPS.format("q"), key=MAPS.format("k"), heads=SHAPE["num_attention_heads"])


def main() -> None:
    parser = command_line(__doc__, "discovery")
    parser.add_argument("--run", nargs=2, metavar=("NAME", "FOLDER"), help="one of them, in this process")
    args = parser.parse_args()
    if args.run:
        name, folder = args.run[0], Path(args.run[1])
        runs = {"live": run_live, "named": lambda: run_named(folder), "save": lambda: save(folder)}
        print(json.dumps(runs.get(name, lambda: run_scan(folder))()))
        return
    with tempfile.TemporaryDirectory() as parent:
        saved, cache = f"{parent}/model", {"LOCATER_CACHE": f"{parent}/cache"}
        results: dict[str, Any] = {"machine": machine(), "shape": SHAPE, **in_process(__file__, "--run", "save", saved)}
        for name in ("live", "first", "cached", "named"):
            results[name] = in_process(__file__, "--run", name, saved, environment=cache)
    write(results, place(args))


def save(folder: Path) -> dict[str, Any]:
    built = model()
    built.save_pretrained(folder)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    return {"parameters": sum(p.numel() for p in built.parameters()), "bytes_on_disk": sum(sizes)}


if __name__ == "__main__":
    main()
