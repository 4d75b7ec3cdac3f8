"""The cost of observing: memory and time of a forward pass on the CPU; a forward pass and training steps on a GPU.

python benchmarks/observe.py            the CPU part, each contender in a process of its own, in turns: seven minutes
python benchmarks/observe.py --quick    one round of a shorter sequence: half a minute
python benchmarks/observe.py --gpu      the GPU part (benchmarks/observe_gpu.py)
python benchmarks/observe.py --table    prints both from benchmarks/results/observe-*.json
"""

from __future__ import annotations

import json
import os
import time
from functools import partial
from typing import Any

import torch
from common import RESULTS, Run, command_line, in_process, in_turns, medians, memory, peak, place, processor, write

BATCH, LENGTH = 4, 1024
CONTENDERS = ("plain", "eager maps", "observe", "observe, 64 rows")


# CPU


def forward(contender: str, batch: int, length: int) -> Run:
    """Peak memory over that of the model, and time of a forward pass; all but "plain" compute the entropy of every
    head.
    """
    from observe_gpu import model_of

    from locater.observing import observe

    model = model_of("eager" if contender == "eager maps" else "sdpa").eval()
    ids = torch.randint(0, 50257, (batch, length), generator=torch.Generator().manual_seed(0))
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
    resident = memory()
    seconds = []
    for turn in range(3):
        began = time.perf_counter()
        once()
        seconds.append(time.perf_counter() - began)
        if turn == 0:
            over = peak() - resident
    return {"peak_mb": over / 2**20, "seconds": min(seconds)}


def cpu(quick: bool) -> dict[str, Any]:
    """Each contender in a process of its own, in turns. A quick run takes one short sequence."""
    rounds, batch, length = (1, 1, 256) if quick else (3, BATCH, LENGTH)
    contenders = {
        name: partial(in_process, __file__, "--one", name, "--batch", str(batch), "--length", str(length))
        for name in CONTENDERS
    }
    return {
        "machine": f"{processor()}, {os.cpu_count()} cores",
        "torch": torch.__version__,
        "rounds": rounds,
        "shape": f"GPT-2 small without its output map, batch {batch}, {length:,} tokens, float32",
        "contenders": medians(in_turns(contenders, rounds)),
    }


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
    parser = command_line(__doc__, "observe", ("cpu", "gpu"))
    parser.add_argument("--table", action="store_true", help="print the results that are kept, and run nothing")
    parser.add_argument("--one", choices=CONTENDERS, help="this contender alone, in this process")
    parser.add_argument("--batch", type=int, default=BATCH, help="with --one")
    parser.add_argument("--length", type=int, default=LENGTH, help="with --one")
    parser.add_argument("--only", choices=("llama", "eager", "compiled"), help="with --gpu: this part alone")
    parser.add_argument("--turns", type=int, help="with --gpu: of 100 steps, with the monitor and without (9)")
    args = parser.parse_args()
    if args.one:
        print(json.dumps(forward(args.one, args.batch, args.length)))
    elif args.table:
        table()
    elif args.gpu:
        from observe_gpu import gpu

        write(gpu(place(args), args.turns or (1 if args.quick else 9), args.only), place(args))
    else:
        write(cpu(args.quick), place(args))


if __name__ == "__main__":
    main()
