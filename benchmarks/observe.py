"""The cost of observing: memory and time of a forward pass on the CPU; a forward pass and training steps on a GPU.

python benchmarks/observe.py            the CPU part, each contender in a process of its own, in turns
python benchmarks/observe.py --gpu      the GPU part (benchmarks/observe_gpu.py)
python benchmarks/observe.py --table    prints both from benchmarks/results/observe-*.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
BATCH, LENGTH = 4, 1024
CONTENDERS = ("plain", "eager maps", "observe", "observe, 64 rows")


# CPU


def forward(contender: str) -> dict[str, float]:
    """Peak memory over that of the model, and time of a forward pass; all but "plain" compute the entropy of every
    head.
    """
    from observe_gpu import model_of

    from locater.observing import observe

    model = model_of("eager" if contender == "eager maps" else "sdpa").eval()
    ids = torch.randint(0, 50257, (BATCH, LENGTH), generator=torch.Generator().manual_seed(0))
    inner = model.transformer  # the logits over 50,257 words would hide everything else
    rows = 64 if "rows" in contender else None

    @torch.no_grad()
    def once() -> None:
        if contender == "plain":
            inner(ids, use_cache=False)
        elif contender == "eager maps":
            maps = inner(ids, use_cache=False, output_attentions=True).attentions
            _ = [torch.special.entr(p).sum(-1).mean((0, 2)) for p in maps]
        else:
            with observe(inner, rows=rows) as seen:
                inner(ids, use_cache=False)
            _ = seen.rows

    with torch.no_grad():
        inner(ids[:1, :32], use_cache=False)
    resident = _status("VmRSS")
    began = time.perf_counter()
    once()
    seconds = [time.perf_counter() - began]
    peak = _status("VmHWM") - resident
    for _ in range(2):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
    return {"peak_mb": peak / 1024, "seconds": min(seconds)}


def _status(name: str) -> int:
    return next(
        int(line.split()[1]) for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(name)
    )


def cpu(rounds: int) -> dict[str, Any]:
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in CONTENDERS}
    for _ in range(rounds):
        for name in CONTENDERS:
            done = subprocess.run(
                [sys.executable, __file__, "--one", name], capture_output=True, text=True, check=True, env=os.environ
            )
            runs[name].append(json.loads(done.stdout.splitlines()[-1]))
    medians = {
        name: {key: statistics.median(run[key] for run in of_name) for key in of_name[0]}
        for name, of_name in runs.items()
    }
    return {
        "machine": f"{_processor()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "rounds": rounds,
        "shape": "GPT-2 small without its output map, batch 4, 1,024 tokens, float32",
        "contenders": medians,
    }


def _processor() -> str:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def table() -> None:
    results = json.loads((RESULTS / "observe-cpu.json").read_text())
    print(f"{results['shape']}, {results['machine']}, torch {results['torch']}, median of {results['rounds']} rounds\n")
    print("| | peak memory over the model | time | against plain |\n|---|---|---|---|")
    plain = results["contenders"]["plain"]
    for name, x in results["contenders"].items():
        more, slower = x["peak_mb"] / plain["peak_mb"], x["seconds"] / plain["seconds"]
        print(f"| {name} | {x['peak_mb']:,.0f} MB ({more:.2f}) | {x['seconds']:.2f} s | {slower:.2f} |")
    if (RESULTS / "observe-gpu.json").exists():
        results = json.loads((RESULTS / "observe-gpu.json").read_text())
        if "llama" in results:
            forward_table(results)
        where = f"{results['shape']}, {results['machine']}, torch {results['torch']}"
        print(f"\n{where}, every {results['every']}th step observed\n")
        print("| | step | with the monitor | ratio | an observed step |\n|---|---|---|---|---|")
        for how in sorted({"eager", "compiled"} & set(results), reverse=True):
            x = results[how]
            print(
                f"| {how} | {x['plain_ms']:.2f} ms | {x['watched_ms']:.2f} ms | {x['ratio']:.4f} | {x['observed_step_ms']:.1f} ms |"
            )


LABELS = {
    "plain": "plain",
    "around": "`with observe(model)` around the pass",
    "inside": "inside an observation that goes on",
    "rows64": "`rows=64`, around the pass",
    "rows64_inside": "`rows=64`, inside",
    "rows8": "`rows=8`, around the pass",
    "rows8_inside": "`rows=8`, inside",
    "fused_inside": "`fused=True`, inside",
}


def forward_table(results: dict[str, Any]) -> None:
    """A forward pass on a GPU."""
    x = results["llama"]
    print(f"\n{x['shape']}, {results['machine']}, torch {results['torch']}, median of {x['turns']} turns\n")
    print("| a forward pass | time | against plain | waits for the device |\n|---|---|---|---|")
    for name, ms in x["ms"].items():
        print(f"| {LABELS[name]} | {ms:.1f} ms | {1.0 if name == 'plain' else x[name]:.3f} | {x['waits'][name]} |")
    padded = x["padded"]
    for name, ms in padded["ms"].items():
        ratio = 1.0 if name == "plain" else padded[name]
        print(f"| a padded batch, {LABELS[name]} | {ms:.1f} ms | {ratio:.3f} | |")
    host = ", ".join(f"{LABELS[name]} {us:.0f}" for name, us in x["host_us_per_layer"].items())
    print(f"\nMicroseconds of the host per layer: {host}. Reading the rows: {x['read_rows_ms']:.1f} ms.")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", choices=CONTENDERS)
    parser.add_argument("--only", choices=("llama", "eager", "compiled"), help="with --gpu: this part alone")
    parser.add_argument("--turns", type=int, default=9, help="with --gpu: of 100 steps, with the monitor and without")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(forward(args.one)))
    elif args.table:
        table()
    else:
        from observe_gpu import gpu

        out = args.out or RESULTS / f"observe-{'gpu' if args.gpu else 'cpu'}.json"
        results = gpu(out, args.turns, args.only) if args.gpu else cpu(args.rounds)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
