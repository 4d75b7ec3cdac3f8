"""What the benchmarks share: one command line, shapes of models, the name of the machine, processes of their own, turns,
results as JSON.

    python benchmarks/NAME.py              the part for the CPU
    python benchmarks/NAME.py --gpu        the part for a GPU, where there is one
    ... --quick                            fewer rounds: it shows that the benchmark runs, not how fast the code is
    ... --out PATH                         results somewhere else than in benchmarks/results

`python benchmarks/run.py` runs all of them and compares with the last results.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
Run = dict[str, Any]  # what one run of a contender measured

# Shapes of models, as transformers configures them

SMOLLM2 = dict(
    vocab_size=49_152,
    hidden_size=576,
    num_hidden_layers=30,
    num_attention_heads=9,
    num_key_value_heads=3,
    intermediate_size=1536,
    tie_word_embeddings=True,
)
LLAMA_1B = dict(
    vocab_size=128_256,
    hidden_size=2048,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    intermediate_size=8192,
    tie_word_embeddings=True,
)
MINILM = dict(vocab_size=30_522, hidden_size=384, num_hidden_layers=6, num_attention_heads=12, intermediate_size=1536)


def command_line(description: str | None, name: str, devices: Sequence[str] = ("cpu",)) -> argparse.ArgumentParser:
    """The options that every benchmark has. Results go to NAME.json, or NAME-cpu.json and NAME-gpu.json where there are
    two parts: `place` says it.
    """
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--gpu", action="store_true", help="the part for a GPU" if "gpu" in devices else "none here")
    parser.add_argument("--quick", action="store_true", help="fewer rounds, to see whether it runs")
    parser.add_argument("--out", type=Path, help="where results are written")
    parser.set_defaults(name=name, devices=devices)
    return parser


def place(options: argparse.Namespace) -> Path:
    """Where the results of a run with these options go."""
    if options.gpu and "gpu" not in options.devices:
        raise SystemExit(f"{options.name}: it has no part for a GPU")
    if options.out is not None:
        return Path(options.out)
    device = f"-{'gpu' if options.gpu else 'cpu'}" if len(options.devices) > 1 else ""
    return RESULTS / f"{options.name}{device}.json"


def write(results: Mapping[str, Any], path: Path, shown: str | None = None) -> None:
    """Write results as JSON, and print them or a summary of them."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(results, indent=1) + "\n")
    print(json.dumps(results, indent=1) if shown is None else shown)
    print(f"written to {path}")


# The machine


def processor() -> str:
    """The name of the processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def machine() -> dict[str, Any]:
    """Processor, cores and versions."""
    import torch

    return {
        "cpu": processor(),
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "memory_GB": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9),
    }


def device_and_torch(gpu: bool, threads: int = 1) -> dict[str, str]:
    """The device that a part ran on, in words, and the version of torch."""
    import torch

    words = f"{processor()}, {threads} thread{'s' * (threads != 1)}"
    return {"machine": torch.cuda.get_device_name() if gpu else words, "torch": torch.__version__}


def memory() -> int:
    """Bytes that this process has in memory."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def peak() -> int:
    """Peak memory of this process; that of getrusage survives exec, and would be the parent's."""
    return _counter("/proc/self/status", "VmHWM") * 1024


def bytes_read() -> int:
    """Bytes that this process has read, from files and elsewhere."""
    return _counter("/proc/self/io", "rchar")


def _counter(path: str, name: str) -> int:
    return next(int(line.split()[1]) for line in Path(path).read_text().splitlines() if line.startswith(name))


# Runs


def in_process(script: str, *arguments: str, environment: Mapping[str, str] | None = None) -> Run:
    """What a run of a script prints last, in a process of its own: peak memory is that of a process."""
    done = subprocess.run(
        [sys.executable, script, *arguments],
        env={**os.environ, **(environment or {})},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        last = (done.stderr.strip() or "it says nothing").splitlines()[-1]
        raise SystemExit(f"{Path(script).name} {' '.join(arguments)} did not run: {last}")
    return dict(json.loads(done.stdout.splitlines()[-1]))


def in_turns(contenders: Mapping[str, Callable[[], Run]], rounds: int) -> dict[str, list[Run]]:
    """Every contender once in each round: what slows the machine down for a while slows all of them down."""
    runs: dict[str, list[Run]] = {name: [] for name in contenders}
    for _ in range(rounds):
        for name, run in contenders.items():
            runs[name].append(run())
    return runs


def median_run(runs: Sequence[Run], key: str, *others: str) -> Run:
    """The run with the median of a figure, and that figure of all runs (`all_...`), of other figures too."""
    ordered = sorted(runs, key=lambda run: float(run[key]))
    every = {f"all_{name}": [run[name] for run in ordered] for name in (key, *others)}
    return {**ordered[len(ordered) // 2], **every}


def medians(runs: Mapping[str, Sequence[Run]]) -> dict[str, dict[str, float]]:
    """The median of each figure, by contender."""
    return {
        name: {key: statistics.median(run[key] for run in of_name) for key in of_name[0]}
        for name, of_name in runs.items()
    }
