"""What a small training run costs beside its steps, and what a step waits for: the recipe of the papers' runs.

python benchmarks/training.py           # a tiny model, one thread: writes benchmarks/results/training-cpu.json
python benchmarks/training.py --gpu     # 6 layers of width 256, 32 x 256 tokens, bfloat16, compiled: training-gpu.json

imports         of a process that trains
tokens          reading and tokenising the text for the first run of a plan; `again` is what later runs pay
first_step      the first step, compiling where the plan says so; `again` of a second run of this kind in the process
step            seconds of a step; `host` is the part in which Python and the driver queue it
end             evaluation on both splits, measures, weights, and the scan of them
"""

from __future__ import annotations

import os
import sys
import tempfile
import time

BEGAN = time.perf_counter()

from collections.abc import Callable  # noqa: E402 - the imports are part of what is measured
from dataclasses import replace  # noqa: E402
from pathlib import Path  # noqa: E402
from typing import Any  # noqa: E402

import torch  # noqa: E402

from locater_lab.engine.mechanism_runs import BASE  # noqa: E402
from locater_lab.engine.runs import mean_moments  # noqa: E402
from locater_lab.train.loop import Training  # noqa: E402
from locater_lab.train.optimizer_and_learning_rate import deterministic_algorithms, seeded_randomness  # noqa: E402
from locater_lab.train.plan import Plan  # noqa: E402

IMPORTED = time.perf_counter() - BEGAN

from common import command_line, device_and_torch, place, write  # noqa: E402

ROOT = Path(__file__).parents[1]
STEPS = 1500  # of a run of the papers


class Clock:
    """Seconds of parts, the device waited for."""

    def __init__(self, gpu: bool) -> None:
        self.wait: Callable[[], None] = torch.cuda.synchronize if gpu else lambda: None
        self.seconds: dict[str, float] = {}

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        self.wait()
        began = time.perf_counter()
        made = work()
        self.wait()
        self.seconds[name] = time.perf_counter() - began
        print(f"{name}: {self.seconds[name]:.3f} s", file=sys.stderr, flush=True)
        return made


def plan_of(gpu: bool, folder: Path) -> Plan:
    """The papers' plan on this project's own pages, which every machine has."""
    text = folder / "text"
    text.mkdir()
    for number, page in enumerate(sorted((ROOT / "docs").rglob("*.md"))):
        (text / f"{number}.txt").write_text(page.read_text(encoding="utf-8"), encoding="utf-8")
    plan = replace(BASE, corpus=(str(text),), out=str(folder / "run"), steps=10**6, device="cuda" if gpu else "cpu")
    return (
        plan if gpu else replace(plan, compile=False, layers=2, width=64, heads=2, length=64, batch=8, vocabulary=512)
    )


def step(training: Training) -> None:
    """One step of the loop, with what it waits for."""
    batches = training._batches(training.step)
    loss = training._backward(batches)
    norm = torch.nn.utils.clip_grad_norm_(training.trainable, training.plan.clip)
    float(loss), float(norm)
    training.optimizer.step()
    training.optimizer.zero_grad(set_to_none=True)
    training.controls.after_step()
    training.step += 1


def queue_seconds(training: Training, count: int) -> float:
    """Seconds that the host needs to queue a step, the device not waited for."""
    batches = training._batches(training.step)
    began = time.perf_counter()
    for _ in range(count):
        training._backward(batches)
        torch.nn.utils.clip_grad_norm_(training.trainable, training.plan.clip)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=True)
    return (time.perf_counter() - began) / count


def measure(gpu: bool, count: int) -> dict[str, Any]:
    clock, device = Clock(gpu), torch.device("cuda" if gpu else "cpu")
    clock.seconds["imports"] = IMPORTED
    with tempfile.TemporaryDirectory() as name, seeded_randomness(0, device), deterministic_algorithms(device):
        plan = plan_of(gpu, Path(name))
        begin: Callable[..., Training] = lambda plan: Training.begin(plan, Path(plan.out), device, lambda event: None)  # noqa: E731
        clock.time("tokens", lambda: begin(plan)).end()
        training = clock.time("tokens again", lambda: begin(plan))
        training.model.train()
        clock.time("first step", lambda: step(training))
        for _ in range(5):
            step(training)
        clock.time("steps", lambda: [step(training) for _ in range(count)])
        host = queue_seconds(training, 10 if gpu else 1)
        clock.time("end", lambda: finish_run(training, Path(name)))
        training.end()
        second = begin(replace(plan, seed=1))
        second.model.train()
        clock.time("first step again", lambda: step(second))
        second.end()
    seconds = clock.seconds
    one = seconds.pop("steps") / count
    each = seconds["tokens again"] + seconds["first step again"] + STEPS * one + seconds["end"]
    return {
        **device_and_torch(gpu),
        "shape": f"{plan.layers} layers of width {plan.width}, {plan.batch} x {plan.length} tokens",
        "seconds": seconds,
        "step": one,
        "host": host,
        "host_share": host / one,
        "seconds_of_a_run": each,
        "runs_per_minute": 60 / each,
        "load": os.getloadavg()[0],
    }


def finish_run(training: Training, folder: Path) -> None:
    """What follows the last step: as `Training.finish` and the papers' runs do it."""
    from locater_lab.train import checkpoint

    training.evaluation.report()
    training.evaluation.loss_and_accuracy("select")
    training.evaluation.measures()
    mean_moments(str(checkpoint.save(folder, "model", training.model)))


def main() -> None:
    args = command_line(__doc__, "training", ("cpu", "gpu")).parse_args()
    if not args.gpu:
        torch.set_num_threads(1)
    write(measure(args.gpu, 5 if args.quick else 200 if args.gpu else 50), place(args))


if __name__ == "__main__":
    main()
