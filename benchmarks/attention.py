"""Attention statistics on a GPU: first checked against float64, then timed against attention itself, in one run.

    python benchmarks/attention.py --out benchmarks/results/attention.json          # needs CUDA and Triton
    python benchmarks/attention.py --tune --out benchmarks/results/attention-tuning.json      # tile sizes, fastest first

Contenders run in turns in the same process on the same q, k and v, and medians are reported: SDPA flash forward and
backward, SDPA cuDNN, FlexAttention with log-sum-exp and maximum (where torch offers them), and eager softmax with
entropy where its matrix fits. Statistics need no v and no output, which is half of the products of attention: a kernel
that is bound by products would take 0.5 of an ideal forward.
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

from locater.kernels import attention_entropy, attention_statistics
from locater.kernels.terms import Terms

HEADS = 32
TILES = {  # head size: BLOCK_M, BLOCK_N, warps, stages, limit of registers per thread
    64: [(64, 128, 4, 2, None), (64, 128, 4, 3, None), (64, 128, 4, 2, 128), (128, 128, 8, 2, 128), (128, 64, 4, 3, None),
         (128, 128, 4, 2, None)],
    128: [(64, 64, 4, 2, None), (64, 64, 4, 3, 128), (64, 128, 4, 2, None), (64, 128, 4, 2, 168), (128, 64, 4, 3, None),
          (128, 64, 8, 3, None), (128, 128, 4, 2, None), (128, 128, 8, 2, 128)],
}  # fmt: skip
CACHES = (12, 24, 1 << 20)  # MB of keys that programs running at the same time share; the last is no limit


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


def check() -> dict[str, float]:
    """Largest error against a float64 softmax, relative to max(1, |value|), on a bfloat16 and a float32 case."""
    worst: dict[str, float] = {}
    for dtype in (torch.bfloat16, torch.float32):
        q, k = (torch.randn(1, n, 1000, 128, device="cuda", dtype=dtype) for n in (4, 2))
        measured = attention_statistics(q, k, causal=True, per_key=True, backend="triton")
        expected = attention_statistics(q.double(), k.double(), causal=True, per_key=True, backend="torch")
        for name in (
            "log_sum_exp",
            "entropy",
            "max_logit",
            "sum_of_squares",
            "distance",
            "first_mass",
            "self_mass",
            "received",
        ):
            a, b = getattr(measured, name).double(), getattr(expected, name)
            worst[f"{name} {dtype}"] = float(((a - b).abs() / b.abs().clamp_min(1)).max())
    return worst


def contenders(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool) -> dict[str, Any]:
    """By name, functions of no argument; those that do not apply to the dtype or the length are left out."""
    statistics = partial(attention_statistics, q, k, causal=causal, backend="triton")
    runs: dict[str, Any] = {
        "statistics": partial(statistics, extended=False),
        "statistics, extended": partial(statistics, extended=True),
        "statistics, extended and per key": partial(statistics, extended=True, per_key=True),
        "entropy, forward and backward": entropy_backward(q, k, causal),
    }
    if q.dtype != torch.float32:
        runs["flash forward"] = partial(fused, SDPBackend.FLASH_ATTENTION, q, k, v, causal)
        runs["flash forward and backward"] = flash_backward(q, k, v, causal)
        runs["cudnn forward"] = partial(fused, SDPBackend.CUDNN_ATTENTION, q, k, v, causal)
        flex = flex_statistics(q, k, v, causal)
        if flex is not None:
            runs["flex forward with lse and max"] = flex
    else:
        runs["efficient forward"] = partial(fused, SDPBackend.EFFICIENT_ATTENTION, q, k, v, causal)
    if q.shape[2] <= 8192:
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
    try:
        from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention
    except ImportError:
        return None
    torch._dynamo.reset()  # after eight shapes it would give up, and run without a fused kernel
    compiled = torch.compile(flex_attention, dynamic=False)
    T = q.shape[2]
    mask = create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cuda") if causal else None
    return lambda: compiled(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True, max_scores=True))


def case(T: int, D: int, dtype: torch.dtype, causal: bool) -> dict[str, Any]:
    q, k, v = (torch.randn(1, HEADS, T, D, device="cuda", dtype=dtype) for _ in range(3))
    entry: dict[str, Any] = {
        "T": T,
        "D": D,
        "dtype": str(dtype).split(".")[1],
        "causal": causal,
        "ms": {},
        "peak_MB": {},
        "failed": {},
    }
    for name, run in contenders(q, k, v, causal).items():
        try:
            entry["ms"][name] = round(median_ms(run, 5 if T > 20_000 else 20), 4)
            entry["peak_MB"][name] = round(peak_mb(run), 1)
        except Exception as error:  # a contender that refuses this shape is part of the record
            entry["failed"][name] = str(error).splitlines()[0][:200]
    # products of q and k alone, at the card's measured bf16 rate
    floor = 2 * HEADS * T * T * D / (2 if causal else 1) / 790e12 * 1e3
    entry["floor_ms"] = round(floor, 4)
    flash = entry["ms"].get("flash forward")
    if flash:
        entry["of_flash"] = {name: round(ms / flash, 3) for name, ms in entry["ms"].items()}
    return entry


def table(result: dict[str, Any]) -> str:
    """The results as docs/kernels.md shows them."""
    lines = [
        "| T | D | | log-sum-exp, entropy, max | extended | entropy and gradient | flash | cuDNN | Flex with lse and max | memory |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for entry in result["cases"]:
        ms = entry["ms"]
        flash, cudnn, both = (ms.get(name) for name in ("flash forward", "cudnn forward", "flash forward and backward"))
        cells = [f"{entry['T']:,}", str(entry["D"]), f"{entry['dtype']} {'causal' if entry['causal'] else 'full'}"]
        cells += [
            f"{ms[n]:.2f} ms" + (f" ({ms[n] / flash:.2f}, {ms[n] / cudnn:.2f})" if flash else "")
            for n in ("statistics", "statistics, extended")
        ]
        backward = ms["entropy, forward and backward"]
        cells.append(f"{backward:.2f} ms" + (f" ({backward / both:.2f})" if both else ""))
        cells += [f"{x:.2f} ms" if x else "-" for x in (flash, cudnn, ms.get("flex forward with lse and max"))]
        cells.append(f"{entry['peak_MB']['statistics, extended']:.1f} MB")
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def tune(lengths: list[int], rounds: int = 3) -> list[dict[str, Any]]:
    """Milliseconds of every tile and order of heads, in turns, so that all see the clock of a warm card."""
    from locater.kernels import triton_kernels as kernels

    rows = []
    kernels.LONG_TILES.clear()
    for T, D, columns in itertools.product(lengths, (64, 128), ("plain", "extended")):
        q, k = (torch.randn(1, HEADS, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(2))
        terms = Terms(scale=D**-0.5, causal=True)
        samples: dict[tuple[Any, int], list[float]] = {}
        for _ in range(rounds):
            for tile, cache in itertools.product(TILES[D], CACHES if T > 4096 else CACHES[-1:]):
                kernels.TILES["half", D, columns], kernels.CACHE = tile, cache << 20
                kernels.LAUNCHES.clear()
                run = lambda: kernels.statistics(q, k, terms, columns == "extended", False)  # noqa: B023, E731
                samples.setdefault((tile, cache), []).append(median_ms(run, 3 if T < 20_000 else 1, 1))
        for (tile, cache), times in sorted(samples.items(), key=lambda item: sorted(item[1])[rounds // 2]):
            rows.append(
                {
                    "T": T,
                    "D": D,
                    "what": columns,
                    "tile": tile,
                    "cache_MB": cache,
                    "ms": round(sorted(times)[rounds // 2], 4),
                }
            )
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention.json")
    parser.add_argument("--tune", action="store_true")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384, 65536])
    parser.add_argument("--table", action="store_true", help="print the results in --out as a table")
    args = parser.parse_args()
    if args.table:
        print(table(json.loads(args.out.read_text())))
        return
    props = torch.cuda.get_device_properties(0)
    if args.tune:
        rows = tune(args.lengths)
        args.out.write_text("[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n")
        for _, group in itertools.groupby(rows, key=lambda row: (row["T"], row["D"], row["what"])):
            print(*itertools.islice(group, 4), sep="\n")
        return
    import triton

    result: dict[str, Any] = {
        "gpu": props.name,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "heads": HEADS,
        "errors": check(),
        "cases": [],
    }
    cases = [(T, D, torch.bfloat16, True) for T, D in itertools.product(args.lengths, (64, 128))]
    for one in [*cases, (8192, 128, torch.bfloat16, False), (4096, 128, torch.float32, True)]:
        result["cases"].append(case(*one))
        # after every case, so that an interrupted run loses no finished one
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    for entry in result["cases"]:
        print(
            entry["T"],
            entry["D"],
            entry["dtype"],
            "causal" if entry["causal"] else "full",
            entry["ms"],
            entry.get("failed"),
        )
    print("errors", result["errors"])


if __name__ == "__main__":
    main()
