"""What `locater.explain.operator` costs, relative to a forward pass of the same model; and how good its probes are.

python benchmarks/explain.py --gpu      a Llama of 1B, 1,024 tokens -> benchmarks/results/explain-gpu.json
python benchmarks/explain.py            the same on a tiny Llama -> benchmarks/results/explain-cpu.json
python benchmarks/explain.py --table    prints both
"""

from __future__ import annotations

import gc
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from common import LLAMA_1B, RESULTS, command_line, device_and_torch, place, write

TINY = dict(
    LLAMA_1B, vocab_size=1024, hidden_size=128, num_hidden_layers=4, num_attention_heads=8, num_key_value_heads=2,
    intermediate_size=512,
)  # fmt: skip
TURNS = 15


def llama(shape: dict[str, Any], device: str, dtype: torch.dtype) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device(device):
        model = LlamaForCausalLM(LlamaConfig(**shape))
    return model.to(dtype).eval()


def cost(shape: dict[str, Any], device: str, dtype: torch.dtype, tokens: int) -> dict[str, Any]:
    """Times of a forward pass and of backward passes through the frozen model, in turns, and peak memory."""
    from locater.explain import operator
    from locater.explain.linear_operator import FrozenOperator, frozen_with_readout

    model = llama(shape, device, dtype)
    ids = torch.randint(shape["vocab_size"], (1, tokens), generator=torch.Generator().manual_seed(0)).to(device)
    _reset(device)

    @torch.no_grad()
    def forward() -> None:
        model(input_ids=ids, use_cache=False)

    forward()
    forward_peak = _peak(device)
    _reset(device)
    whole = [_seconds(lambda: operator(model, ids, target=7), device) for _ in range(2)][-1]
    peak = _peak(device)
    paths, readout = frozen_with_readout(model, ids, 7, "linear")
    T = FrozenOperator(paths)
    at_once = min(T.at_once(), tokens)
    covectors = readout.covector.expand(at_once, -1, -1).contiguous()

    @torch.no_grad()
    def one() -> None:
        T.pull_back(covectors[:1])

    @torch.no_grad()
    def several() -> None:
        T.pull_back(covectors)

    works: dict[str, Callable[[], None]] = {"forward": forward, "one_row": one, "rows": several}
    times: dict[str, list[float]] = {name: [] for name in works}
    for work in works.values():
        work()
    for _ in range(TURNS):
        for name, work in works.items():
            times[name].append(_seconds(work, device))
    medians = {name: statistics.median(seconds) for name, seconds in times.items()}
    total = (readout.covector * T.y).sum() + readout.constant
    scores = T.along(readout.covector).double().sum() + (readout.covector * T.constants()).double().sum()
    result: dict[str, Any] = {
        "dtype": str(dtype).removeprefix("torch."),
        "parameters": sum(p.numel() for p in model.parameters()),
        "tokens": tokens,
        "forward_ms": 1e3 * medians["forward"],
        "one_row_ms": 1e3 * medians["one_row"],
        "one_row_over_forward": medians["one_row"] / medians["forward"],
        "rows_at_once": at_once,
        "row_of_several_over_forward": medians["rows"] / at_once / medians["forward"],
        "spread_of_ratio": [
            min(times["one_row"]) / max(times["forward"]),
            max(times["one_row"]) / min(times["forward"]),
        ],
        "operator_call_over_forward": whole / medians["forward"],
        "backward_passes": {"logit, one target": 1, "logit, matrix": tokens, "norm, 16 probes": 16},
        "peak_gb": peak,
        "forward_peak_gb": forward_peak,
        "gap_of_frozen_model": paths.gap,
        "miss_of_sum": abs(float(scores + readout.constant - total)) / abs(float(total)),
    }
    del model, paths, readout, T, covectors
    gc.collect()
    return result


def probes(device: str) -> dict[str, Any]:
    """Norms from 16 random probes against the exact ones, on a small model in float64: 40 seeds."""
    from locater.explain import operator

    model = llama({**TINY, "num_hidden_layers": 2}, device, torch.float64)
    ids = torch.randint(1024, (1, 24), generator=torch.Generator().manual_seed(0)).to(device)
    exact = operator(model, ids, collapse="norm", probes=0).scores
    estimates = [operator(model, ids, collapse="norm", probes=16, seed=seed) for seed in range(40)]
    errors = torch.stack([(e.scores - exact).abs() / exact for e in estimates])
    inside = torch.stack([(e.interval[0] <= exact) & (exact <= e.interval[1]) for e in estimates])  # type: ignore[index]
    first = estimates[0]
    assert first.interval is not None
    widths = [float(end) for end in (first.interval[:, 0] / first.scores[0])]
    return {
        "shape": "2 layers, width 128, 24 tokens, float64",
        "probes": 16,
        "seeds": len(estimates),
        "median_relative_error": float(errors.median()),
        "largest_relative_error": float(errors.max()),
        "interval_relative": widths,
        "share_inside_interval": float(inside.double().mean()),
    }


def _seconds(work: Callable[[], Any], device: str) -> float:
    _wait(device)
    began = time.perf_counter()
    work()
    _wait(device)
    return time.perf_counter() - began


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


def _reset(device: str) -> None:
    if device == "cuda":
        gc.collect()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


def _peak(device: str) -> float | None:
    return torch.cuda.max_memory_allocated() / 1e9 if device == "cuda" else None


def measure_shape(device: str, out: Path, again: bool) -> dict[str, Any]:
    """All parts; those that `out` has already only where they are asked for again."""
    results: dict[str, Any] = json.loads(out.read_text()) if out.exists() and not again else {}
    results |= device_and_torch(device == "cuda")
    shape, tokens = (LLAMA_1B, 1024) if device == "cuda" else (TINY, 128)
    results["shape"] = dict(shape)
    parts: dict[str, Callable[[], dict[str, Any]]] = {
        "float32": lambda: cost(shape, device, torch.float32, tokens),
        "bfloat16": lambda: cost(shape, device, torch.bfloat16, tokens),
        "probes": lambda: probes(device),
    }
    for name, part in parts.items():
        if name not in results:
            results[name] = part()
            write(results, out, f"{name} {json.dumps(results[name])}")  # after each: a part that fails loses no other
    return results


def table() -> str:
    lines = [
        "| machine | precision | tokens | row / forward | row of several / forward | whole call / forward | peak memory |",
        "|---|---|---|---|---|---|---|",
    ]
    for path in sorted(RESULTS.glob("explain-*.json")):
        results = json.loads(path.read_text())
        for name in ("float32", "bfloat16"):
            if name in results:
                row = results[name]
                peak = "" if row["peak_gb"] is None else f"{row['peak_gb']:.1f} GB"
                lines.append(
                    f"| {results['machine']} | {name} | {row['tokens']:,} | {row['one_row_over_forward']:.2f} | "
                    f"{row['row_of_several_over_forward']:.2f} | {row['operator_call_over_forward']:.1f} | {peak} |"
                )
    return "\n".join(lines)


def main() -> None:
    parser = command_line(__doc__, "explain", ("cpu", "gpu"))
    parser.add_argument(
        "--table", action="store_true", help="print the table of docs/results/kernels.md from the results"
    )
    parser.add_argument("--missing", action="store_true", help="measure only the parts that the results do not have")
    args = parser.parse_args()
    if args.table:
        print(table())
        return
    if not args.gpu:
        torch.set_num_threads(1)
    measure_shape("cuda" if args.gpu else "cpu", place(args), again=not args.missing)


if __name__ == "__main__":
    main()
