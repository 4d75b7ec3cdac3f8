"""Attention statistics on a GPU: first checked against float64, then timed against attention itself, in one run.

    python benchmarks/attention.py --out benchmarks/results/attention.json          # needs CUDA and Triton
    python benchmarks/attention.py --table                                          # the tables of docs/results/kernels.md

Contenders run in turns in the same process on the same q, k and v, and medians are reported: SDPA flash forward and
backward, SDPA cuDNN, FlexAttention with log-sum-exp and maximum (with --flex; it compiles for every shape), attention
with statistics in one kernel, and eager softmax with entropy where its matrix fits. Statistics need no v and no output,
which is half of the products of attention: a kernel that is bound by products would take 0.5 of an ideal forward.
benchmarks/attention_tuning.py chooses the tiles.
"""

from __future__ import annotations

import argparse
import itertools
import json
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from locater.kernels import attention_entropy, attention_statistics, attention_with_statistics
from locater.kernels.fused import WIDEST

HEADS = 32
STATISTICS = ("log_sum_exp", "entropy", "max_logit", "sum_of_squares", "distance", "first_mass", "self_mass")
BOTH, BOTH_EXTENDED = "attention with statistics", "attention with statistics, extended"


def median_ms(function: Any, rounds: int = 20, warm: int = 3) -> float:
    for _ in range(warm):
        function()
    torch.cuda.synchronize()
    times = []
    for _ in range(rounds):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        function()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[len(times) // 2]


def peak_mb(function: Any) -> float:
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 1e6


def check(T: int = 1000) -> dict[str, float]:
    """Largest error against a float64 softmax, relative to max(1, |value|), on a bfloat16 and a float32 case; and of
    attention with statistics in one pass, in bfloat16.
    """
    worst: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        q, k = (torch.randn(1, n, T, 128, device="cuda", dtype=dtype) for n in (4, 2))
        expected = attention_statistics(q.double(), k.double(), causal=True, per_key=True, backend="torch")
        per_key = attention_statistics(q, k, causal=True, per_key=True, backend="triton")
        _compare(worst, f"{dtype}", per_key, expected, (*STATISTICS, "received"))
    q, k, v = (torch.randn(1, 2, 5 * 1024, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    expected = attention_statistics(q.double(), k.double(), causal=True, backend="torch")
    out, stats = attention_with_statistics(q, k, v, causal=True)
    _compare(worst, "one pass", stats, expected, STATISTICS)
    exactly = scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    worst["output, one pass"] = float((out - exactly).abs().max())
    flash = fused(SDPBackend.FLASH_ATTENTION, q, k, v, True)
    worst["output, flash"] = float((flash - exactly).abs().max())
    return worst


def _compare(into: dict[str, float], label: str, found: Any, expected: Any, names: tuple[str, ...]) -> None:
    for name in names:
        a, b = getattr(found, name).double(), getattr(expected, name)
        into[f"{name} {label}"] = float(((a - b).abs() / b.abs().clamp_min(1)).max())


def contenders(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, flex: bool) -> dict[str, Any]:
    """By name, functions of no argument; those that do not apply to the dtype or the length are left out."""
    statistics = partial(attention_statistics, q, k, causal=causal, backend="triton")
    runs: dict[str, Any] = {
        "statistics": partial(statistics, extended=False),
        "statistics, extended": partial(statistics, extended=True),
        "statistics, extended and per key": partial(statistics, extended=True, per_key=True),
        "entropy, forward and backward": entropy_backward(q, k, causal),
    }
    if q.dtype != torch.float32:
        both = partial(attention_with_statistics, q, k, v, causal=causal)
        if q.shape[3] <= WIDEST:
            runs[BOTH], runs[BOTH_EXTENDED] = partial(both, extended=False), partial(both, extended=True)
        runs["flash forward"] = partial(fused, SDPBackend.FLASH_ATTENTION, q, k, v, causal)
        runs["flash forward and backward"] = flash_backward(q, k, v, causal)
        runs["cudnn forward"] = partial(fused, SDPBackend.CUDNN_ATTENTION, q, k, v, causal)
        if flex:
            runs["flex forward with lse and max"] = flex_statistics(q, k, v, causal)
    else:
        runs["efficient forward"] = partial(fused, SDPBackend.EFFICIENT_ATTENTION, q, k, v, causal)
    if q.shape[0] * q.shape[2] <= 8192:
        runs["eager softmax and entropy"] = partial(eager, q, k, causal)
    return runs


def fused(backend: SDPBackend, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> torch.Tensor:
    with sdpa_kernel(backend):
        return scaled_dot_product_attention(q, k, v, is_causal=causal)


def flash_backward(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k, v)]
    grad = torch.randn_like(q)
    return lambda: torch.autograd.grad(fused(SDPBackend.FLASH_ATTENTION, *leaves, causal), leaves, grad)


def entropy_backward(q: torch.Tensor, k: torch.Tensor, causal: bool) -> Any:
    leaves = [x.detach().clone().requires_grad_() for x in (q, k)]
    grad = torch.randn(q.shape[:3], device="cuda")
    return lambda: torch.autograd.grad(attention_entropy(*leaves, causal=causal, backend="triton"), leaves, grad)


def eager(q: torch.Tensor, k: torch.Tensor, causal: bool) -> None:
    logits = (q @ k.mT).float() * q.shape[-1] ** -0.5
    if causal:
        logits.masked_fill_(torch.ones(logits.shape[-2:], dtype=torch.bool, device="cuda").triu_(1), -torch.inf)
    p = logits.softmax(-1)
    torch.special.entr(p).sum(-1)
    logits.amax(-1)


def flex_statistics(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> Any:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    torch._dynamo.reset()  # after eight shapes it would give up, and run without a fused kernel
    compiled = torch.compile(flex_attention, dynamic=False)
    T = q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda") if causal else None
    return lambda: compiled(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True, max_scores=True))


def case(
    T: int, D: int, dtype: torch.dtype, causal: bool, batch: int = 1, rounds: int = 20, flex: bool = False
) -> dict[str, Any]:
    q, k, v = (torch.randn(batch, HEADS, T, D, device="cuda", dtype=dtype) for _ in range(3))
    entry: dict[str, Any] = {
        "T": T,
        "D": D,
        "dtype": str(dtype).split(".")[1],
        "causal": causal,
        "batch": batch,
        "ms": {},
        "peak_MB": {},
        "failed": {},
    }
    few = T > 20_000
    for name, run in contenders(q, k, v, causal, flex).items():
        try:
            entry["ms"][name] = round(median_ms(run, max(3, rounds // 4) if few else rounds, 1 if few else 3), 4)
            entry["peak_MB"][name] = round(peak_mb(run), 1)
        except Exception as error:  # a contender that refuses this shape is part of the record
            entry["failed"][name] = str(error).splitlines()[0][:200]
    # products of q and k alone, at the card's measured bf16 rate
    floor = 2 * batch * HEADS * T * T * D / (2 if causal else 1) / 790e12 * 1e3
    entry["floor_ms"] = round(floor, 4)
    flash = entry["ms"].get("flash forward")
    if flash:
        entry["of_flash"] = {name: round(ms / flash, 3) for name, ms in entry["ms"].items()}
    return entry


def decoding(batch: int, key_heads: int, D: int, keys: int, rounds: int = 20) -> dict[str, Any]:
    """One query against a cache, as a graph: without the host's time, which is named apart."""
    import time

    q, k, v = (
        torch.randn(batch, h, t, D, device="cuda", dtype=torch.bfloat16)
        for h, t in ((HEADS, 1), (key_heads, keys), (key_heads, keys))
    )
    runs = {
        "SDPA": lambda: scaled_dot_product_attention(q, k, v, enable_gqa=True),
        "statistics": lambda: attention_statistics(q, k, causal=True, extended=False),
        "statistics, extended": lambda: attention_statistics(q, k, causal=True),
    }
    entry: dict[str, Any] = {"batch": batch, "key_heads": key_heads, "D": D, "keys": keys, "ms": {}, "host_us": {}}
    for name, run in runs.items():
        run()
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(50):
            run()
        entry["host_us"][name] = round((time.perf_counter() - begin) / 50 * 1e6, 1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        entry["ms"][name] = round(median_ms(graph.replay, rounds), 4)
    entry["floor_ms"] = round(batch * key_heads * keys * D * 2 / 4.8e12 * 1e3, 4)  # reading the keys at 4.8 TB/s
    return entry


def table(result: dict[str, Any]) -> str:
    """The results as docs/results/kernels.md shows them: statistics beside attention, then decoding."""
    cases, flex = result["cases"], "flex forward with lse and max"
    batches = any(entry.get("batch", 1) > 1 for entry in cases)
    one_pass, flexed = (any(name in entry["ms"] for entry in cases) for name in (BOTH_EXTENDED, flex))
    heads = ["batch x T" if batches else "T", "D", "", "log-sum-exp, entropy, max", "extended"]
    heads += ["with attention, one pass"] * one_pass + ["entropy and gradient", "flash", "cuDNN"]
    heads += ["Flex with lse and max"] * flexed + ["memory"]
    lines = [_line(heads), "|---" * len(heads) + "|"]
    for entry in cases:
        ms = entry["ms"]
        flash, cudnn, both = (ms.get(name) for name in ("flash forward", "cudnn forward", "flash forward and backward"))
        cells = [f"{entry['batch']} x {entry['T']:,}" if batches else f"{entry['T']:,}", str(entry["D"])]
        cells.append(f"{entry['dtype']} {'causal' if entry['causal'] else 'full'}")
        cells += [
            f"{ms[n]:.2f} ms" + (f" ({ms[n] / flash:.2f}, {ms[n] / cudnn:.2f})" if flash else "") if n in ms else "-"
            for n in ("statistics", "statistics, extended", *[BOTH_EXTENDED] * one_pass)
        ]
        backward = ms["entropy, forward and backward"]
        cells.append(f"{backward:.2f} ms" + (f" ({backward / both:.2f})" if both else ""))
        cells += [f"{x:.2f} ms" if x else "-" for x in (flash, cudnn, *[ms.get(flex)] * flexed)]
        lines.append(_line([*cells, f"{entry['peak_MB']['statistics, extended']:.1f} MB"]))
    if result.get("decoding"):
        heads = ["batch", "key heads", "D", "keys", "statistics", "extended", "SDPA", "reading the keys"]
        lines += ["", _line(heads), "|---" * len(heads) + "|"]
        for entry in result["decoding"]:
            cells = [str(entry["batch"]), str(entry["key_heads"]), str(entry["D"]), f"{entry['keys']:,}"]
            cells += [f"{entry['ms'][n] * 1e3:.0f} µs" for n in ("statistics", "statistics, extended", "SDPA")]
            lines.append(_line([*cells, f"{entry['floor_ms'] * 1e3:.0f} µs"]))
    return "\n".join(lines)


def _line(cells: list[str]) -> str:
    return ("| " + " | ".join(cells) + " |").replace("|  |", "| |")


def cases(lengths: list[int]) -> list[tuple[int, int, torch.dtype, bool, int]]:
    """T, D, dtype, causal, batch: long sequences, all keys, float32, heads of 256, and the short ones of training."""
    half = torch.bfloat16
    some = [(T, D, half, True, 1) for T, D in itertools.product(lengths, (64, 128))]
    some += [(8192, 128, half, False, 1), (8192, 256, half, True, 1), (4096, 128, torch.float32, True, 1)]
    return some + [(T, D, half, True, 32) for T, D in itertools.product((512, 1024, 2048), (64, 128))]


def measure(out: Path, lengths: list[int], rounds: int, flex: bool) -> dict[str, Any]:
    import triton

    result: dict[str, Any] = {
        "gpu": torch.cuda.get_device_properties(0).name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "heads": HEADS,
        "errors": check(),
        "cases": [],
        "decoding": [],
    }
    for T, D, dtype, causal, batch in cases(lengths):
        result["cases"].append(case(T, D, dtype, causal, batch, rounds, flex and T == 16384))
        # after every case, so that an interrupted run loses no finished one
        out.write_text(json.dumps(result, indent=1) + "\n")
    for shape in ((1, 8, 128, 32768), (8, 8, 128, 32768), (1, 8, 64, 32768), (1, 8, 128, 4096)):
        result["decoding"].append(decoding(*shape, rounds))
    out.write_text(json.dumps(result, indent=1) + "\n")
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 65536])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--flex", action="store_true", help="FlexAttention at 16,384 tokens too")
    parser.add_argument("--table", action="store_true", help="print the results in --out as tables")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    result = measure(args.out, args.lengths, args.rounds, args.flex)
    print(table(result))
    print("errors", result["errors"])
    print("failed", [(entry["T"], entry["D"], entry["failed"]) for entry in result["cases"] if entry["failed"]])


if __name__ == "__main__":
    main()
