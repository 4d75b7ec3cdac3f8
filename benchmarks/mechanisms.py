"""Time of each attention mechanism beside PyTorch's fused attention, forward and backward, and how it grows with T.

python benchmarks/mechanisms.py            the CPU part, one thread, contenders in turns
python benchmarks/mechanisms.py --gpu      the same on a GPU, in bfloat16
python benchmarks/mechanisms.py --table    prints the results in benchmarks/results/mechanisms-*.json
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from locater_lab.mechanisms import mechanism, mechanisms

RESULTS = Path(__file__).parent / "results"


@dataclass(frozen=True)
class Setting:
    device: str
    dtype: torch.dtype
    heads: int
    lengths: tuple[int, int, int]
    rounds: int
    calls: int = 1  # in a round, one after the other: on a GPU the host has to run ahead
    size: int = 64
    long: int | None = None  # tokens at which SDPA and mechanisms of linear cost are timed too


CPU = Setting("cpu", torch.float32, 4, (512, 1024, 2048), 5)
GPU = Setting("cuda", torch.bfloat16, 16, (2048, 4096, 8192), 7, 5, long=32768)
EXTRA = {"fastmax, order 1": ("fastmax", {"order": 1})}


def contenders() -> dict[str, tuple[str, dict[str, Any]]]:
    """By label: the name of a mechanism, and options that are no tensors. SDPA is PyTorch's function itself."""
    sdpa: dict[str, tuple[str, dict[str, Any]]] = {"SDPA": ("", {"is_causal": True}), "SDPA, all keys": ("", {})}
    return sdpa | {m.name: (m.name, {}) for m in mechanisms()} | EXTRA


def options(name: str, heads: int, length: int, like: Tensor) -> dict[str, Any]:
    """The tensors that a mechanism needs; gates and gains take gradients as they would in a model."""
    tensors: dict[str, dict[str, Callable[[], Tensor]]] = {
        "learned_sink": {"sinks": lambda: torch.zeros(heads)},
        "hybrid_normalized": {"mix": lambda: torch.full((heads,), 0.5)},
        "differential": {"lam": lambda: torch.full((heads,), 0.5)},
        "delta": {"beta": lambda: torch.full((1, heads, length), 0.5)},
        "gated": {"gate": lambda: torch.full((1, heads, length), 0.5)},
        "multiformer": {
            name: lambda: torch.full((1, 1, 5, like.shape[3]), 0.2) for name in ("key_kernel", "value_kernel")
        },
        "gated_delta": {
            "beta": lambda: torch.full((1, heads, length), 0.5),
            "log_decay": lambda: torch.full((1, heads, length), -0.1),
        },
    }
    return {key: make().to(like.device).requires_grad_() for key, make in tensors.get(name, {}).items()}


def run_once(label: str, setting: Setting, length: int, backward: bool) -> float:
    """Seconds of a call, causal unless the mechanism refuses that."""
    name, fixed = contenders()[label]
    shape = (1, setting.heads, length, setting.size)
    q, k, v = (torch.randn(shape, device=setting.device, dtype=setting.dtype, requires_grad=backward) for _ in range(3))
    kw = fixed | (options(name, setting.heads, length, q) if name else {})
    call: Callable[..., Tensor] = scaled_dot_product_attention
    if name:
        call, kw["causal"] = mechanism(name), mechanism(name).is_causal_safe
    # processor time of the one thread leaves out other work on the machine
    clock = time.perf_counter if setting.device == "cuda" else time.process_time
    _wait(setting)
    began = clock()
    with torch.set_grad_enabled(backward):
        for _ in range(setting.calls):
            out = call(q, k, v, **kw)
            if backward:
                out.backward(torch.ones_like(out))
    _wait(setting)
    return (clock() - began) / setting.calls


def _wait(setting: Setting) -> None:
    if setting.device == "cuda":
        torch.cuda.synchronize()


def measure(setting: Setting) -> dict[str, Any]:
    """Medians over rounds; in each round every contender has its turn."""
    torch.manual_seed(0)
    seconds: dict[str, dict[str, dict[str, float]]] = {label: {} for label in contenders()}
    for length in setting.lengths:
        _add_times(seconds, setting, length, list(contenders()))
    if setting.long:
        _add_times(seconds, replace(setting, calls=1), setting.long, [x for x in contenders() if _is_linear(x)])
    machine = (
        torch.cuda.get_device_name()
        if setting.device == "cuda"
        else f"{_processor()}, {torch.get_num_threads()} thread"
    )
    kind = str(setting.dtype).removeprefix("torch.")
    shape = f"batch 1, {setting.heads} heads of {setting.size}, {kind}, causal where that is possible"
    return {
        "machine": machine,
        "torch": torch.__version__,
        "shape": shape,
        "rounds": setting.rounds,
        "clock": "wall time" if setting.device == "cuda" else "processor time",
        "lengths": list(setting.lengths),
        "long": setting.long,
        "seconds": seconds,
        "all_keys": [label for label in seconds if not _is_causal(label)],
    }


def _add_times(
    seconds: dict[str, dict[str, dict[str, float]]], setting: Setting, length: int, labels: list[str]
) -> None:
    for backward in (False, True):
        runs: dict[str, list[float]] = {label: [] for label in labels}
        for turn in range(setting.rounds + 1):  # the first is a warm-up
            for label in labels:
                elapsed = run_once(label, setting, length, backward)
                if turn:
                    runs[label].append(elapsed)
        for label, times in runs.items():
            seconds[label].setdefault(str(length), {})["both" if backward else "forward"] = statistics.median(times)


def _is_linear(label: str) -> bool:
    """Whether its cost is linear in T; and SDPA, to compare with."""
    name = contenders()[label][0]
    return mechanism(name).cost == "linear" if name else label == "SDPA"


def _processor() -> str:
    names = [
        line.split(":")[1].strip()
        for line in Path("/proc/cpuinfo").read_text().splitlines()
        if line.startswith("model name")
    ]
    return names[0] if names else platform.processor()


def _is_causal(label: str) -> bool:
    name, fixed = contenders()[label]
    return mechanism(name).is_causal_safe if name else "is_causal" in fixed


def table(results: dict[str, Any]) -> str:
    """Times at the longest T, in brackets as a multiple of SDPA with as many keys; growth from the shortest T. Where
    there are times at a still longer T, the multiples there.
    """
    short, *_, end = map(str, results["lengths"])
    ratio, far = results["lengths"][-1] // results["lengths"][0], results.get("long")
    names = ["", "forward", "forward and backward", f"growth for {ratio} times the tokens"]
    names += [f"forward, T = {far:,}", f"both, T = {far:,}"] if far else []
    lines = [
        f"{results['machine']}, torch {results['torch']}, {results['shape']}; T = {int(end):,}; "
        f"{results['clock']}, median of {results['rounds']} rounds.\n",
        f"|{'|'.join(f' {name} ' if name else ' ' for name in names)}|",
        "|---" * len(names) + "|",
    ]
    for label, times in results["seconds"].items():
        sdpa = results["seconds"]["SDPA, all keys" if label in results["all_keys"] else "SDPA"]
        cells = [
            f"{_ratio_text(1e3 * times[end][key])} ms ({times[end][key] / sdpa[end][key]:.2f})"
            for key in ("forward", "both")
        ]
        cells.append(f"{times[end]['both'] / times[short]['both']:.1f}")
        if far:
            there = times.get(str(far))
            cells += [f"({there[key] / sdpa[str(far)][key]:.2f})" if there else "-" for key in ("forward", "both")]
        lines.append(f"| {label} | {' | '.join(cells)} |")
    return "\n".join(lines)


def _ratio_text(x: float) -> str:
    return f"{x:,.0f}" if x >= 10 else f"{x:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--gpu", action="store_true")
    parser.add_argument("--table", action="store_true")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    if args.table:
        for path in sorted(RESULTS.glob("mechanisms-*.json")):
            print(table(json.loads(path.read_text())) + "\n")
        return
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    torch.set_num_threads(1)
    results = measure(GPU if args.gpu else CPU)
    out = args.out or RESULTS / f"mechanisms-{'gpu' if args.gpu else 'cpu'}.json"
    out.write_text(json.dumps(results, indent=1) + "\n")
    print(table(results))


if __name__ == "__main__":
    main()
