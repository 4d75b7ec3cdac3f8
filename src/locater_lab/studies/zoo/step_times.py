"""How long a training step of each arm takes: alone on the device, in turns, forward, backward and optimizer.

On CUDA a step is captured as a graph, so that launching kernels from Python costs nothing; it runs PyTorch's own
kernels, not compiled ones. On a CPU a smaller model is timed by processor time.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping

import torch

from locater_lab.engine.claims import Claim, half_range
from locater_lab.engine.devices_and_processes import as_cuda_graph
from locater_lab.engine.mechanism_runs import BASE
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.runs import Arm
from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer
from locater_lab.studies.zoo.losses import BOTH_WAYS, CAUSAL
from locater_lab.train.optimizer_and_learning_rate import hidden_of

TURNS, STEPS = 5, 20
FEW = 4  # sequences of a batch on a CPU
FUSED = ("softmax_plus_one", "learned_sink", "centred", "qk_norm", "gated")
LINEAR = ("linear", "fastmax", "delta", "gated_delta")

CLAIMS = (
    Claim(
        "e1",
        "What runs on fused attention costs little",
        f"slowest of {', '.join(FUSED)}: step over that of softmax",
        "at most",
        1.25,
        by="ours",
    ),
    Claim(
        "e2",
        "At this length linear cost saves nothing",
        f"fastest of {', '.join(LINEAR)}: step over that of softmax",
        "at least",
        1.0,
        by="ours",
    ),
)


def shape_of(arm: Arm, small: bool) -> Shape:
    """Of the model that is timed: the arm's own, or a small one."""
    plan = arm.base
    width, layers, length = (128, 2, 128) if small else (plan.width, plan.layers, plan.length)
    return Shape(
        vocabulary=512 if small else plan.vocabulary,
        layers=layers,
        width=width,
        heads=plan.heads,
        kv_heads=plan.heads,
        hidden=hidden_of(width, plan.mlp),
        length=length,
        causal=plan.task == "causal",
        attention="hybrid(layout=1:1)" if small and "hybrid(" in plan.attention else plan.attention,
    )


def make_step(shape: Shape, batch: int, device: torch.device) -> Callable[[], None]:
    """A function that takes one step; on CUDA a replay of a captured one."""
    torch.manual_seed(0)
    model = Transformer(shape).to(device)
    ids = torch.randint(shape.vocabulary, (batch, shape.length), device=device)
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-4, fused=device.type == "cuda", capturable=device.type == "cuda"
    )

    def step() -> None:
        with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda", cache_enabled=False):
            loss = model(ids, ids)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    if device.type != "cuda":
        step()
        return step
    return as_cuda_graph(step)


def time_steps(step: Callable[[], None], steps: int, device: torch.device) -> float:
    """Milliseconds of one step."""
    if device.type != "cuda":
        began = time.process_time()
        for _ in range(steps):
            step()
        return 1000 * (time.process_time() - began) / steps
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(steps):
        step()
    end.record()
    torch.cuda.synchronize()
    return float(begin.elapsed_time(end)) / steps


def step_times(arms: Mapping[str, Arm], setting: Setting) -> dict[str, list[float]]:
    """Milliseconds of a step by arm and turn."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    small = device.type == "cpu"
    steps = {
        name: make_step(shape_of(arm, small), FEW if small else arm.base.batch, device)
        for name, arm in setting.each(list(arms.items()))
    }
    turns, each = (3, 2) if small else (TURNS, STEPS)
    for step in steps.values():
        time_steps(step, each, device)
    by_turn = [{name: time_steps(step, each, device) for name, step in steps.items()} for _ in range(turns)]
    return {name: [turn[name] for turn in by_turn] for name in steps}


def measure(setting: Setting) -> Results:
    """Steps of all arms in turns, each over that of softmax in the same turn."""
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        causal, masked = step_times(CAUSAL, setting), step_times(BOTH_WAYS, setting)
    cuda = torch.cuda.is_available()
    shape = shape_of(CAUSAL["softmax"], small=not cuda)
    batch = BASE.batch if cuda else FEW
    ratios = {name: [x / y for x, y in zip(ms, causal["softmax"], strict=True)] for name, ms in causal.items()}
    middle = {name: statistics.median(x) for name, x in ratios.items()}
    slowest, fastest = max(FUSED, key=middle.__getitem__), min(LINEAR, key=middle.__getitem__)
    of = "half the range of turns"
    measured = {
        "e1": half_range(ratios[slowest], of, {"slowest": slowest}),
        "e2": half_range(ratios[fastest], of, {"fastest": fastest}),
    }
    table = {
        "causal": {name: statistics.median(x) for name, x in causal.items()},
        "masked": {name: statistics.median(x) for name, x in masked.items()},
        "device": torch.cuda.get_device_name() if cuda else f"CPU, threads: {torch.get_num_threads()}",
        "model": f"{shape.layers} layers of {shape.width}, {batch} sequences of {shape.length} tokens",
    }
    return Results(measured, {"step_times": table})


STUDY = Study("time of a step", CLAIMS, measure)
