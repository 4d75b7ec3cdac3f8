"""The cost of observing while a model generates: one token after caches of several lengths, and continuous batching.

python benchmarks/generation.py            the CPU part: processor time on one thread, four minutes
python benchmarks/generation.py --quick    one round of short caches: half a minute
python benchmarks/generation.py --gpu      the GPU part: time between two waits for the device
python benchmarks/generation.py --table    prints what is kept in benchmarks/results/generation-*.json

A step is one forward pass of one new token for each sequence; the cache is filled with random keys and cut back after
each step, so that its length stays. Contenders take turns: only their ratios are meant, the times are of the machine.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from common import RESULTS, command_line, device_and_torch, place, write
from torch import nn

from locater.observing import observe

LENGTHS = {"cpu": (128, 1024, 4096, 16384), "gpu": (128, 1024, 4096, 16384, 32768)}
BATCH = 4
CACHES = ("dynamic", "static")
OBSERVERS: dict[str, dict[str, Any]] = {
    "observed": {},
    "of 1 layer in 4": {"layers": 4},
    "by request": {"by_request": True},
}


@dataclass(frozen=True)
class Device:
    """Where it runs, and the clock that is right there."""

    name: str
    dtype: torch.dtype
    shape: dict[str, int]
    turns: int
    steps: int

    def clock(self) -> float:
        if self.name == "cuda":
            torch.cuda.synchronize()
            return time.perf_counter()
        return time.process_time()

    def model(self) -> Any:
        from transformers import LlamaConfig, LlamaForCausalLM

        torch.manual_seed(0)
        with torch.device(self.name):
            config = LlamaConfig(**self.shape, vocab_size=4096, max_position_embeddings=65536, pad_token_id=0)
            return LlamaForCausalLM(config).to(self.dtype).eval()


DEVICES = {
    "cpu": Device(
        "cpu",
        torch.float32,
        dict(
            hidden_size=576, intermediate_size=1536, num_hidden_layers=12, num_attention_heads=9, num_key_value_heads=3
        ),
        turns=5,
        steps=4,
    ),
    "gpu": Device(
        "cuda",
        torch.bfloat16,
        dict(
            hidden_size=2048,
            intermediate_size=8192,
            num_hidden_layers=16,
            num_attention_heads=32,
            num_key_value_heads=8,
        ),
        turns=15,
        steps=20,
    ),
}


def filled_cache(model: Any, kind: str, batch: int, length: int) -> Any:
    """A cache with random keys and values for `length` tokens, and room for one more."""
    from transformers import DynamicCache, StaticCache

    config, weight = model.config, next(model.parameters())
    heads, size = config.num_key_value_heads, config.hidden_size // config.num_attention_heads
    cache = DynamicCache(config=config) if kind == "dynamic" else StaticCache(config=config, max_cache_len=length + 1)
    generator = torch.Generator(weight.device).manual_seed(0)
    for layer in range(config.num_hidden_layers):
        keys = torch.randn(2, batch, heads, length, size, generator=generator, device=weight.device, dtype=weight.dtype)
        cache.update(keys[0], keys[1], layer)
    return cache


def steps_of(model: Any, kind: str, batch: int, length: int, count: int) -> Callable[[], None]:
    """Passes of one new token for each sequence, the cache as long at each."""
    cache = filled_cache(model, kind, batch, length)
    device = next(model.parameters()).device
    token = torch.randint(1, 4096, (batch, 1), device=device)
    at = torch.full((batch, 1), length, device=device)

    @torch.no_grad()
    def steps() -> None:
        for _ in range(count):
            model(token, past_key_values=cache, position_ids=at, use_cache=True)
            if kind == "dynamic":
                cache.crop(-1)
            else:
                for layer in cache.layers:
                    layer.cumulative_length.fill_(length)

    return steps


def compare(
    device: Device, model: Any, run: Callable[[], None], observers: dict[str, dict[str, Any]]
) -> dict[str, Any]:
    """Milliseconds of a run, and the ratio of each contender to the plain one beside it: medians over turns."""
    contexts: dict[str, Callable[[], AbstractContextManager[Any]]] = {"plain": nullcontext}
    contexts |= {name: lambda options=options: observe(model, **options) for name, options in observers.items()}  # type: ignore[misc]
    seconds: dict[str, list[float]] = {name: [] for name in contexts}
    for turn in range(device.turns + 1):
        for name, context in contexts.items():
            with context():
                began = device.clock()
                run()
                took = device.clock() - began
            if turn:  # the first is a warm-up
                seconds[name].append(took)
    ratios = {name: [a / b for a, b in zip(x, seconds["plain"], strict=True)] for name, x in seconds.items()}
    return {
        "ms": {name: 1e3 * statistics.median(x) for name, x in seconds.items()},
        "ratio": {name: statistics.median(x) for name, x in ratios.items() if name != "plain"},
        "range": {name: [min(x), max(x)] for name, x in ratios.items() if name != "plain"},
    }


def per_step(found: dict[str, Any], count: int) -> dict[str, Any]:
    return {**found, "ms": {name: x / count for name, x in found["ms"].items()}}


def continuous(device: Device, model: Any, requests: int, prompt: int, new: int) -> dict[str, Any]:
    """A whole run of generate_batch(), plain and observed."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    generator = torch.Generator().manual_seed(0)
    prompts = torch.randint(1, 4096, (requests, prompt), generator=generator).tolist()
    settings = GenerationConfig(max_new_tokens=new, do_sample=False, eos_token_id=-1, pad_token_id=0)
    config = ContinuousBatchingConfig(use_cuda_graph=False, max_blocks_per_request=0, max_batch_tokens=512)
    if device.name == "cpu":  # its default takes most of the memory
        config.num_blocks = 160

    def run() -> None:
        model.generate_batch(inputs=prompts, generation_config=settings, continuous_batching_config=config)

    some = {name: {**options, "any_thread": True} for name, options in OBSERVERS.items()}
    return {"requests": requests, "prompt": prompt, "new": new, **compare(device, model, run, some)}


def statistics_alone(device: Device) -> dict[str, Any]:
    """Microseconds of the statistics of one query over cached keys, and of SDPA on the same."""
    from locater.kernels import Terms, row_statistics

    found: dict[str, Any] = {}
    heads, groups, size = (9, 3, 64) if device.name == "cpu" else (32, 8, 64)
    for length in (128, 1024, 4096, 32768):
        k, v = torch.randn(2, 1, groups, length, size, device=device.name, dtype=device.dtype)
        q = torch.randn(1, heads, 1, size, device=device.name, dtype=device.dtype)
        works: dict[str, Callable[[], Any]] = {
            "statistics": lambda q=q, k=k: row_statistics(q, k, Terms(causal=True)),  # type: ignore[misc]
            "SDPA": lambda q=q, k=k, v=v: nn.functional.scaled_dot_product_attention(q, k, v, enable_gqa=True),  # type: ignore[misc]
        }
        seconds: dict[str, list[float]] = {name: [] for name in works}
        for _ in range(device.turns + 1):
            for name, work in works.items():
                work()
                began = device.clock()
                for _ in range(50):
                    work()
                seconds[name].append((device.clock() - began) / 50)
        found[f"{length}"] = {name: 1e6 * statistics.median(x) for name, x in seconds.items()}
    return {"heads": heads, "key_heads": groups, "size": size, "us": found}


PARTS = ("caches", "continuous", "alone")


def measure(name: str, quick: bool, only: str | None, out: Path) -> dict[str, Any]:
    """The parts one after another; results are written after each. `only` one of them replaces its results alone."""
    device = DEVICES[name]
    if quick:
        device = Device(device.name, device.dtype, device.shape, 1, 2)
    torch.set_num_threads(1)
    model = device.model()
    shape = ", ".join(f"{key} {value}" for key, value in device.shape.items())
    results: dict[str, Any] = {
        **device_and_torch(name == "gpu"),
        "model": f"Llama with random weights: {shape}, vocabulary 4,096, {str(device.dtype).removeprefix('torch.')}, SDPA",
        "turns": device.turns,
        "steps": device.steps,
        "clock": "processor time of one thread" if name == "cpu" else "time between two waits for the device",
    }
    if only and out.exists():
        results = json.loads(out.read_text()) | results
    if only in (None, "alone"):
        results["alone"] = statistics_alone(device)
    if only in (None, "caches"):
        results["caches"] = after_caches(name, device, model, quick)
        write(results, out, "")
    if only in (None, "continuous"):
        sizes = (4, 32, 8) if quick else (8, 128, 24)
        results["continuous"] = continuous(device, model, *sizes)
    return results


def after_caches(name: str, device: Device, model: Any, quick: bool) -> dict[str, Any]:
    """One token after caches of each kind and length."""
    results: dict[str, Any] = {}
    for kind in CACHES:
        for batch in (1, BATCH):
            lengths = LENGTHS[name][:2] if quick else LENGTHS[name]
            for length in (x for x in lengths if batch == 1 or x <= 4096):
                run = steps_of(model, kind, batch, length, device.steps)
                some = OBSERVERS if batch > 1 else {k: v for k, v in OBSERVERS.items() if k != "by request"}
                key = f"{kind}, {batch} sequence{'s' * (batch > 1)}"
                found = per_step(compare(device, model, run, some), device.steps)
                results.setdefault(key, {})[f"{length}"] = found
                print(key, length, {k: round(v, 3) for k, v in found["ratio"].items()}, flush=True)
    return results


def table(name: str) -> None:
    path = RESULTS / f"generation-{name}.json"
    if not path.exists():
        return
    x = json.loads(path.read_text())
    print(
        f"{x['model']}. {x['machine']}, torch {x['torch']}; {x['clock']}, median of {x['turns']} turns of {x['steps']} steps.\n"
    )
    print(
        "| cache | tokens in it | a step, plain | observed | of 1 layer in 4 | by request |\n|---|---|---|---|---|---|"
    )
    for cache, lengths in x["caches"].items():
        for length, found in lengths.items():
            cells = [f"{found['ratio'][k]:.2f}" if k in found["ratio"] else "-" for k in OBSERVERS]
            print(f"| {cache} | {int(length):,} | {found['ms']['plain']:.1f} ms | {' | '.join(cells)} |")
    for length, us in x.get("alone", {}).get("us", {}).items():
        print(f"one query over {int(length):,} keys: statistics {us['statistics']:,.0f} us, SDPA {us['SDPA']:,.0f} us")
    if "continuous" not in x:
        return
    found = x["continuous"]
    cells = [f"{found['ratio'][k]:.2f}" for k in OBSERVERS]
    what = f"continuous batching, {found['requests']} requests"
    print(
        f"| {what} | {found['prompt']} + {found['new']} | {found['ms']['plain']:,.0f} ms (all) | {' | '.join(cells)} |\n"
    )


def main() -> None:
    parser = command_line(__doc__, "generation", ("cpu", "gpu"))
    parser.add_argument("--table", action="store_true", help="print the results that are kept, and run nothing")
    parser.add_argument("--only", choices=PARTS, help="this part alone; the results of the others stay")
    options = parser.parse_args()
    if options.table:
        for name in DEVICES:
            table(name)
        return
    out = place(options)
    write(measure("gpu" if options.gpu else "cpu", options.quick, options.only, out), out, "")


if __name__ == "__main__":
    main()
