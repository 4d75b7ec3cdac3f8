"""A scan of a live model of 1B shape (16 layers, width 2048, 32 query and 8 key heads of 64, bfloat16), with eigenvalues.

    python benchmarks/live.py               # on the CPU: writes benchmarks/results/live-cpu.json
    python benchmarks/live.py --gpu         # the model on a GPU: benchmarks/results/live-gpu.json

First one layer is checked against float64 of the stored numbers, then scans are timed; nothing else is imported or
built while they run. `seconds` is the median.
"""

from __future__ import annotations

import cProfile
import os
import pstats
import statistics
import time
from typing import Any

from common import command_line, device_and_torch, place, write
from random_checkpoint import HEADS, KEY_HEADS, LAYERS, SIZE, WIDTH

ROUNDS = 9
CHECKED = 3  # layer
PARTS = ("layer_moments", "eigenvalues", "singular_values", "residual_kept", "lost_in_float32", "flags_of")


def model(device: str) -> Any:
    """The package's own model, by names and numbers a Llama: random weights whose logits have a spread near 1, gains
    away from 1. The MLPs, which are not read, are small.
    """
    import torch

    from locater_lab.models.shape import Shape
    from locater_lab.models.transformer import Transformer

    torch.manual_seed(0)
    heads: dict[str, Any] = {"layers": LAYERS, "width": WIDTH, "heads": HEADS, "kv_heads": KEY_HEADS}
    with torch.device(device):
        built = Transformer(Shape(vocabulary=1024, hidden=256, length=256, **heads)).to(torch.bfloat16)
    with torch.no_grad():
        for name, p in built.named_parameters():
            if "layernorm" in name:
                p.copy_(1 + 0.1 * torch.randn(p.shape))
            elif "q_proj" in name or "k_proj" in name:
                p.normal_(0, WIDTH**-0.5)
    return built


def errors(built: Any, rows: list[Any]) -> dict[str, float]:
    """Largest errors over the heads of one layer, of the size of W, against float64."""
    layer = built.model.layers[CHECKED]
    gain = layer.input_layernorm.weight.double()
    q, k = (
        (part.weight.double() * gain).view(-1, SIZE, WIDTH) for part in (layer.self_attn.q_proj, layer.self_attn.k_proj)
    )
    k = k.repeat_interleave(HEADS // KEY_HEADS, 0)
    sizes = ((q @ q.mT) * (k @ k.mT)).sum((-2, -1)).tolist()
    traces = (k @ q.mT).diagonal(dim1=-2, dim2=-1).sum(-1).tolist()
    heads = [row for row in rows if row.layer == CHECKED]
    sums = [sum(real for real, _ in row.eigenvalues) for row in heads]
    return {
        "trace": max(abs(row.trace - t) / s**0.5 for row, t, s in zip(heads, traces, sizes, strict=True)),
        "sum of eigenvalues": max(abs(e - t) / s**0.5 for e, t, s in zip(sums, traces, sizes, strict=True)),
        "frobenius_sq": max(abs(row.frobenius_sq - s) / s for row, s in zip(heads, sizes, strict=True)),
    }


def measure(gpu: bool, rounds: int) -> dict[str, Any]:
    import torch

    import locater

    built = model("cuda" if gpu else "cpu")
    results: dict[str, Any] = {**device_and_torch(gpu, torch.get_num_threads()), "cores": os.cpu_count()}
    rows = locater.scan(built, eigenvalues=True).rows
    results |= {"heads": len(rows), "errors": errors(built, rows), "rounds": rounds}
    for name, eigenvalues in (("seconds", True), ("seconds_without_eigenvalues", False)):
        times = []
        for _ in range(rounds):
            if gpu:
                torch.cuda.synchronize()
            began = time.perf_counter()
            locater.scan(built, eigenvalues=eigenvalues)
            times.append(time.perf_counter() - began)
        results |= {name: statistics.median(times), f"all_{name}": sorted(times)}
    return results | {"profile": profile(built), "load": os.getloadavg()[0]}


def profile(built: Any) -> dict[str, float]:
    """Seconds in some functions of one scan with one thread, each with what it calls."""
    import torch

    import locater

    profiler, before = cProfile.Profile(), torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        profiler.runcall(locater.scan, built, eigenvalues=True)
    finally:
        torch.set_num_threads(before)
    entries = pstats.Stats(profiler).stats.items()  # type: ignore[attr-defined]
    return {name: round(entry[3], 4) for (_, _, name), entry in entries if name in PARTS}


def main() -> None:
    args = command_line(__doc__, "live", ("cpu", "gpu")).parse_args()
    write(measure(args.gpu, 2 if args.quick else ROUNDS), place(args))


if __name__ == "__main__":
    main()
