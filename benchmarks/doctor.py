"""Reading a whole checkpoint of 2 GB with `locater doctor`, beside `sha256sum` of the same files in the same minute.

    python benchmarks/doctor.py             # writes benchmarks/results/doctor.json

    sha256sum           of the files: what any look at every byte costs
    doctor              after the import, in a process of its own; `peak_over_import` is VmHWM less the memory before
    doctor, with base   the same, beside a base in which every number is another
    doctor command      `locater doctor`, its start and imports too, to be held against the next two
    weightlens          `lens analyze`, file by file: statistics of every tensor
    weightscope         `weightscope diff` of model and base

The last two are those of .venv-rivals (make bench-rivals), measured once, and left out where they are not installed. The
others take turns, ROUNDS times, with one thread each; medians count. Processor time is kept beside the clock.
"""

from __future__ import annotations

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

from common import command_line, in_process, in_turns, machine, median_run, memory, peak, place, write
from random_checkpoint import write_checkpoint

ROOT = Path(__file__).parents[1]
RIVALS = ROOT / ".venv-rivals" / "bin"
ROUNDS = 3


def write_tuned(folder: Path, base: Path) -> None:
    """The base after a fine-tune: every number moved by a hundredth of the size of its tensor."""
    import torch
    from safetensors.torch import load_file, save_file

    generator = torch.Generator().manual_seed(1)
    for path in sorted(base.glob("*.safetensors")):
        tensors = load_file(path)
        for name, stored in tensors.items():
            x = stored.float()
            noise = torch.randn(x.shape, generator=generator)
            tensors[name] = (x + 0.01 * x.square().mean().sqrt() * noise).to(stored.dtype)
        save_file(tensors, folder / path.name, {"format": "pt"})
    for path in base.glob("*.json"):
        (folder / path.name).write_bytes(path.read_bytes())


def examine(model: str, base: str | None) -> dict[str, Any]:
    """A diagnosis in this process, after the import."""
    from locater.commands.doctor.diagnosing import doctor

    before, began, processor = memory(), time.perf_counter(), time.process_time()
    found = doctor(model, base)
    return {
        "seconds": time.perf_counter() - began,
        "processor_seconds": time.process_time() - processor,
        "peak_over_import": peak() - before,
        "verdict": found.verdict,
    }


def time_commands(*every: list[str]) -> dict[str, Any]:
    """Seconds and processor seconds of processes, one after the other; a status of 1 is an answer too."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    for words in every:
        done = subprocess.run(words, env=environment, capture_output=True, text=True, check=False)
        if done.returncode not in (0, 1):
            raise SystemExit(f"{' '.join(words)} did not run: {(done.stderr.strip() or '?').splitlines()[-1]}")
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    used = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return {"seconds": seconds, "processor_seconds": used}


def rivals(model: str, base: str, files: list[str]) -> dict[str, Any]:
    """Those that are installed."""
    there = {
        "weightlens": [[str(RIVALS / "lens"), "analyze", path] for path in files],
        "weightscope": [[str(RIVALS / "weightscope"), "diff", base, model]],
    }
    return {name: partial(time_commands, *every) for name, every in there.items() if Path(every[0][0]).is_file()}


def main() -> None:
    parser = command_line(__doc__, "doctor")
    parser.add_argument("--run", nargs="+", metavar="FOLDER", help="examine one folder, in this process; or two")
    parser.add_argument(
        "--within", metavar="FOLDER", help="write both checkpoints here, or take those of an earlier run"
    )
    args = parser.parse_args()
    if args.run:
        print(json.dumps(examine(*args.run, *[None] * (2 - len(args.run)))))
        return
    with tempfile.TemporaryDirectory() as folder:
        base, model = Path(args.within or folder) / "base", Path(args.within or folder) / "model"
        if not model.is_dir():
            base.mkdir(), model.mkdir()
            write_checkpoint(base)
            write_tuned(model, base)
        files = sorted(map(str, model.glob("*.safetensors")))
        size = sum(Path(path).stat().st_size for path in files)
        contenders = {
            "sha256sum": partial(time_commands, ["sha256sum", *files]),
            "doctor": partial(in_process, __file__, "--run", str(model)),
            "doctor, with base": partial(in_process, __file__, "--run", str(model), str(base)),
            "doctor command": partial(time_commands, [sys.executable, "-m", "locater", "doctor", str(model)]),
        }
        runs = in_turns(contenders, 1 if args.quick else ROUNDS)
        runs |= in_turns({} if args.quick else rivals(str(model), str(base), files), 1)
    results: dict[str, Any] = {"machine": machine(), "load": os.getloadavg()[1], "bytes": size}
    results |= {name: median_run(of_name, "processor_seconds", "seconds") for name, of_name in runs.items()}
    floor, lines = results["sha256sum"], []
    for name in runs:
        run = results[name]
        ratio = run["processor_seconds"] / floor["processor_seconds"]
        more = f", {run['peak_over_import'] / 1e6:.0f} MB" if "peak_over_import" in run else ""
        lines.append(
            f"{name}: {run['processor_seconds']:.1f} s of processor time ({ratio:.2f} x), {run['seconds']:.1f} s{more}"
        )
    write(results, place(args), "\n".join(lines))


if __name__ == "__main__":
    main()
