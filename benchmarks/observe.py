"""The cost of observing: memory and time of a forward pass on the CPU, and time of training with a monitor on a GPU.

python benchmarks/observe.py            the CPU part, each contender in a process of its own, in turns
python benchmarks/observe.py --gpu      the GPU part
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
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

RESULTS = Path(__file__).parent / "results"
BATCH, LENGTH = 4, 1024
TURNS = 9  # of 100 steps, with the monitor and without: a single turn is off by a few per cent
CONTENDERS = ("plain", "eager maps", "observe", "observe, 64 rows")


def model_of(implementation: str = "sdpa", **kw: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(attn_implementation=implementation, **kw))


# CPU


def forward(contender: str) -> dict[str, float]:
    """Peak memory over that of the model, and time of a forward pass; all but "plain" compute the entropy of every
    head.
    """
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


# GPU


def gpu(out: Path, steps: int = 100, every: int = 50, hows: tuple[str, ...] = ("eager", "compiled")) -> dict[str, Any]:
    """Training steps of GPT-2 small in bfloat16, with the monitor and without, in turns; eager and compiled."""
    from locater.monitor import Monitor

    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "every": every,
        "steps": steps,
    }
    results["shape"] = "GPT-2 small, batch 8, 1,024 tokens, bfloat16 autocast, AdamW"
    for how in hows:
        model = model_of(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).cuda().train()
        run = torch.compile(model) if how == "compiled" else model
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
        ids = torch.randint(0, 50257, (8, LENGTH), device="cuda")

        def step(run: Any = run, optimizer: Any = optimizer, ids: Any = ids) -> torch.Tensor:
            with torch.autocast("cuda", torch.bfloat16):
                loss = run(input_ids=ids, labels=ids, use_cache=False).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        for _ in range(10):
            step()
        results[how] = _turns(step, run, Monitor, steps, every) | _one_observed(step, run, Monitor)
        out.write_text(json.dumps(results, indent=1) + "\n")  # after each: a part that fails loses no other
        torch._dynamo.reset()
    return results


def _turns(step: Callable[[], Any], model: Any, monitor_kind: Any, steps: int, every: int) -> dict[str, Any]:
    """Milliseconds per step, with the monitor and without, in turns; ratios of neighbouring turns."""
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = [], []
        for turn in range(TURNS):
            plain.append(_timed(step, steps, None))
            monitor = monitor_kind(Path(folder) / f"{turn}.jsonl", every=every).attach(model)
            if turn == 0:
                _timed(step, 2, monitor)  # compile both graphs and the kernels
                monitor.step = 0
                monitor._arm()
            watched.append(_timed(step, steps, monitor))
            monitor.detach()
    ratios = [b / a for a, b in zip(plain, watched, strict=True)]
    return {
        "plain_ms": 1e3 * statistics.median(plain),
        "watched_ms": 1e3 * statistics.median(watched),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def _timed(step: Callable[[], Any], steps: int, monitor: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
        if monitor is not None:
            monitor.after_step(loss=loss)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def _one_observed(step: Callable[[], Any], model: Any, monitor_kind: Any) -> dict[str, Any]:
    """Milliseconds of an observed step, and how often steps wait for the device: without the monitor, and with it
    between observed steps.
    """
    alone = _waits(step)
    with tempfile.TemporaryDirectory() as folder:
        monitor = monitor_kind(Path(folder) / "one.jsonl", every=1).attach(model)
        observed = 1e3 * statistics.median(_timed(step, 1, monitor) for _ in range(10))
        monitor.every = 10**9
        monitor.step = 1
        monitor._arm()
        step()
        watched = _waits(lambda: monitor.after_step(loss=step()))
        monitor.detach()
    return {"observed_step_ms": observed, "waits_alone": alone, "waits_watched": watched}


def _waits(step: Callable[[], Any]) -> int:
    """How often three steps wait for the device, by PyTorch's own count."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(3):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(x.message) for x in caught)


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
        where = f"{results['shape']}, {results['machine']}, torch {results['torch']}"
        print(f"\n{where}, every {results['every']}th step observed\n")
        print("| | step | with the monitor | ratio | an observed step |\n|---|---|---|---|---|")
        for how in sorted({"eager", "compiled"} & set(results), reverse=True):
            x = results[how]
            print(
                f"| {how} | {x['plain_ms']:.2f} ms | {x['watched_ms']:.2f} ms | {x['ratio']:.4f} | {x['observed_step_ms']:.1f} ms |"
            )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--one", choices=CONTENDERS)
    parser.add_argument("--only", choices=("eager", "compiled"), help="with --gpu: this part alone")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.one:
        print(json.dumps(forward(args.one)))
    elif args.table:
        table()
    else:
        out = args.out or RESULTS / f"observe-{'gpu' if args.gpu else 'cpu'}.json"
        hows = (args.only,) if args.only else ("compiled", "eager")
        results = gpu(out, hows=hows) if args.gpu else cpu(args.rounds)
        out.write_text(json.dumps(results, indent=1) + "\n")
        print(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
