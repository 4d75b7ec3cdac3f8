"""The GPU part of benchmarks/observe.py: a forward pass of a Llama-1B shape, and training steps of GPT-2 small.

Everything that is compared takes turns in one run. A single turn is off by a few per cent.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from common import LLAMA_1B

LENGTH = 1024
SAMPLES = {"rows64": 64, "rows8": 8}
Parts = dict[str, tuple[Callable[[], AbstractContextManager[Any]], Callable[[], AbstractContextManager[Any]]]]


def model_of(implementation: str = "sdpa", **kw: Any) -> Any:
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    return GPT2LMHeadModel(GPT2Config(attn_implementation=implementation, **kw))


def gpu(out: Path, turns: int = 9, only: str | None = None, steps: int = 100, every: int = 50) -> dict[str, Any]:
    """The parts one after another; results are written after each, so that a part that fails loses no other."""
    results: dict[str, Any] = {
        "machine": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "every": every,
        "steps": steps,
        "shape": "GPT-2 small, batch 8, 1,024 tokens, bfloat16 autocast, AdamW",
    }
    for part in ("llama", "compiled", "eager"):
        if only not in (None, part):
            continue
        results[part] = llama() if part == "llama" else training(part == "compiled", turns, steps, every)
        out.write_text(json.dumps(results, indent=1) + "\n")
        torch._dynamo.reset()
        torch.cuda.empty_cache()
    return results


# A forward pass


def llama(turns: int = 15, tokens: int = 4096) -> dict[str, Any]:
    """One forward pass between two waits for the device: plain, with `observe` around it, and inside an observation
    that goes on; of all rows and of samples; and of a padded batch.
    """
    from transformers import LlamaConfig, LlamaModel

    config = LlamaConfig(**LLAMA_1B, attn_implementation="sdpa")
    torch.manual_seed(0)
    with torch.device("cuda"):
        model = LlamaModel(config).to(torch.bfloat16).eval()
        ids = torch.randint(0, config.vocab_size, (2, tokens))
    padding = torch.ones_like(ids)
    padding[1, : tokens // 8] = 0
    parts = _parts(model)
    padded = {name: parts[name] for name in ("plain", "inside", "rows64_inside")}
    inputs = {"input_ids": ids, "use_cache": False}
    whole = _compare(model, inputs, parts, turns)
    few = _compare(model, {"input_ids": ids[:1, :128], "use_cache": False}, padded, turns)
    layers = config.num_hidden_layers
    return {
        "shape": f"Llama-1B shape without its output map, {layers} layers, 2 x {tokens:,} tokens, bfloat16, SDPA",
        "turns": turns,
        **whole,
        "host_us_per_layer": {  # 128 tokens, for which the device has next to nothing to do
            name: 1e3 * (few["ms"][name] - few["ms"]["plain"]) / layers for name in ("inside", "rows64_inside")
        },
        "waits": {
            name: count_waits(lambda part=part: _inside(model, inputs, *part), 1) for name, part in parts.items()
        },
        "padded": _compare(model, inputs | {"attention_mask": padding}, padded, max(3, turns // 3)),
        "read_rows_ms": _reading(model, inputs),
    }


def _compare(model: Any, inputs: dict[str, Any], parts: Parts, turns: int) -> dict[str, Any]:
    """Median milliseconds of each part, and medians of the ratios to the plain pass of the same turn."""
    seconds: dict[str, list[float]] = {name: [] for name in parts}
    for turn in range(turns + 2):
        for name, part in parts.items():
            taken = _one_pass(model, inputs, *part)
            if turn >= 2:  # kernels are compiled, caches are filled
                seconds[name].append(taken)
    plain = seconds["plain"]
    others = {name: x for name, x in seconds.items() if name != "plain"}
    ratios = {name: [b / a for a, b in zip(plain, x, strict=True)] for name, x in others.items()}
    return {
        "plain_ms": 1e3 * statistics.median(plain),
        **{name: statistics.median(x) for name, x in ratios.items()},
        "ms": {name: 1e3 * statistics.median(x) for name, x in seconds.items()},
    }


def _parts(model: Any) -> Parts:
    """What is begun before the clock starts, and what is begun with it, by name."""
    from locater.observing import observe

    parts: Parts = {
        "plain": (nullcontext, nullcontext),
        "around": (nullcontext, lambda: observe(model)),
        "inside": (lambda: observe(model), nullcontext),
    }
    for name, rows in SAMPLES.items():
        parts[name] = (nullcontext, lambda rows=rows: observe(model, rows=rows))
        parts[f"{name}_inside"] = (lambda rows=rows: observe(model, rows=rows), nullcontext)
    parts["fused_inside"] = (lambda: observe(model, fused=True), nullcontext)
    return parts


@torch.no_grad()
def _one_pass(model: Any, inputs: dict[str, Any], outer: Any, inner: Any) -> float:
    """Seconds until the device is done."""
    with outer():
        torch.cuda.synchronize()
        began = time.perf_counter()
        with inner():
            model(**inputs)
        torch.cuda.synchronize()
        return time.perf_counter() - began


@torch.no_grad()
def _inside(model: Any, inputs: dict[str, Any], outer: Any, inner: Any) -> None:
    with outer(), inner():
        model(**inputs)


@torch.no_grad()
def _reading(model: Any, inputs: dict[str, Any]) -> float:
    """Milliseconds to read the rows after a pass: the device is waited for once, and numbers become records."""
    from locater.observing import observe

    taken = []
    for _ in range(5):
        with observe(model) as seen:
            model(**inputs)
        torch.cuda.synchronize()
        began = time.perf_counter()
        _ = seen.rows
        taken.append(time.perf_counter() - began)
    return 1e3 * statistics.median(taken)


def count_waits(step: Callable[[], Any], times: int = 3) -> int:
    """How often some steps wait for the device, by PyTorch's own count."""
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(times):
                step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return sum("synchronizing" in str(x.message) for x in caught)


# Training


def training(compiled: bool, turns: int, steps: int, every: int) -> dict[str, Any]:
    """Training steps of GPT-2 small in bfloat16, with the monitor and without, in turns."""
    from locater import Monitor

    model = model_of(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0).cuda().train()
    run = torch.compile(model) if compiled else model
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    ids = torch.randint(0, 50257, (8, LENGTH), device="cuda")

    def step() -> torch.Tensor:
        with torch.autocast("cuda", torch.bfloat16):
            loss = run(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss.detach()

    for _ in range(10):
        step()
    return _turns(step, run, Monitor, turns, steps, every) | _observe_once(step, run, Monitor)


def _turns(
    step: Callable[[], Any], model: Any, monitor_kind: Any, turns: int, steps: int, every: int
) -> dict[str, Any]:
    """Milliseconds per step, with the monitor and without, in turns; ratios of neighbouring turns."""
    with tempfile.TemporaryDirectory() as folder:
        plain, watched = [], []
        for turn in range(turns):
            plain.append(_time_steps(step, steps, None))
            monitor = monitor_kind(Path(folder) / f"{turn}.jsonl", every=every).attach(model)
            if turn == 0:
                _time_steps(step, 2, monitor)  # compile both graphs and the kernels
                monitor.step = 0
                monitor._arm()
            watched.append(_time_steps(step, steps, monitor))
            monitor.detach()
    ratios = [b / a for a, b in zip(plain, watched, strict=True)]
    return {
        "plain_ms": 1e3 * statistics.median(plain),
        "watched_ms": 1e3 * statistics.median(watched),
        "ratios": ratios,
        "ratio": statistics.median(ratios),
    }


def _time_steps(step: Callable[[], Any], steps: int, monitor: Any) -> float:
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        loss = step()
        if monitor is not None:
            monitor.after_step(loss=loss)
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def _observe_once(step: Callable[[], Any], model: Any, monitor_kind: Any) -> dict[str, Any]:
    """Milliseconds of one step between two waits for the device, plain and observed, and how often steps wait for the
    device: without the monitor, and with it between observed steps.
    """
    alone = count_waits(step)
    single = 1e3 * statistics.median(_time_steps(step, 1, None) for _ in range(10))
    with tempfile.TemporaryDirectory() as folder:
        monitor = monitor_kind(Path(folder) / "one.jsonl", every=1).attach(model)
        _time_steps(step, 2, monitor)
        observed = 1e3 * statistics.median(_time_steps(step, 1, monitor) for _ in range(10))
        monitor.every = 10**9
        monitor.step = 1
        monitor._arm()
        step()
        watched = count_waits(lambda: monitor.after_step(loss=step()))
        monitor.detach()
    return {"single_step_ms": single, "observed_step_ms": observed, "waits_alone": alone, "waits_watched": watched}
