"""Tiles of the attention kernels on a GPU, timed in turns, fastest first, beside SDPA flash and cuDNN.

    python benchmarks/attention_tuning.py --out benchmarks/results/attention-variants.json          # CUDA and Triton
    python benchmarks/attention_tuning.py --table                                   # the second table of docs/results/kernels.md

Three kinds: statistics of rows ("rows"), attention with statistics in one pass ("forward"), and few queries over many
keys ("few"). The kernels' modules hold what was fastest. benchmarks/results/attention-tuning.json has the tiles of "rows"
from the run that chose them.
"""

from __future__ import annotations

import argparse
import itertools
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from attention import HEADS, fused, median_ms
from torch.nn.attention import SDPBackend

from locater.kernels import Terms, attention_statistics, attention_with_statistics

Tile = tuple[Any, ...]  # BLOCK_M, BLOCK_N, warps, stages, limit of registers per thread, and more
ROWS: dict[int, list[Tile]] = {
    64: [
        (64, 128, 4, 2, 128),
        (64, 128, 4, 3, None),
        (128, 128, 4, 2, None),
        (64, 64, 4, 3, None),
        (128, 64, 4, 3, None),
        (64, 128, 4, 2, 168),
    ],
    128: [(64, 64, 4, 2, None), (128, 128, 4, 2, None), (128, 64, 4, 2, None)],
}
FORWARD: dict[int, list[Tile]] = {
    64: [(128, 128, 8, 2, None), (128, 64, 8, 3, 128), (64, 64, 4, 3, None), (128, 64, 4, 3, None), (64, 128, 4, 2, None),
         (64, 64, 4, 3, 128), (64, 128, 4, 2, 168)],
    128: [(128, 128, 8, 2, None), (128, 64, 8, 3, None), (128, 64, 8, 2, None), (64, 64, 4, 3, None),
          (64, 64, 4, 2, None)],
}  # fmt: skip
FEW: list[tuple[Tile, int]] = [(tile, programs) for tile in ((64, 4, 3), (128, 4, 3), (128, 8, 3), (64, 2, 4))
                               for programs in (264, 528, 1056)]  # fmt: skip


def draw_operands(T: int, D: int, batch: int = 1) -> list[torch.Tensor]:
    return [torch.randn(batch, HEADS, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(3)]


def candidates(D: int) -> Iterator[tuple[str, Tile]]:
    for kind, tiles in (("rows", ROWS), ("forward", FORWARD)):
        for tile in tiles[D]:
            yield kind, tile


def runner(
    kind: str, tile: Tile, extended: bool, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor
) -> Callable[[], Any]:
    """Puts a tile into its table and returns what uses it."""
    from locater.kernels import fused as one_pass
    from locater.kernels import triton_forward, triton_kept_kernels, triton_launches

    D, columns = q.shape[3], "extended" if extended else "plain"
    terms = Terms(D**-0.5, causal=True)

    def run() -> Any:
        if kind == "forward":
            return attention_with_statistics(q, k, v, causal=True, extended=extended)
        return triton_launches.statistics(q, k, terms, extended, False)

    triton_kept_kernels.LAUNCHES.clear()
    triton_launches.LONG_TILES.clear()
    one_pass.WIDEST = max(one_pass.WIDEST, D)
    if kind == "rows":
        triton_launches.TILES["half", D, columns] = tile
    else:
        triton_forward.TILES[D, extended] = tile  # type: ignore[assignment]
    return run


def compare(T: int, D: int, extended: bool, rounds: int = 2) -> list[dict[str, Any]]:
    """Milliseconds of every candidate, in turns, so that all see the clock of a warm card."""
    q, k, v = draw_operands(T, D)
    flash, cudnn = (
        round(median_ms(lambda: fused(backend, q, k, v, True), 3), 4)  # noqa: B023
        for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    )
    samples: dict[tuple[str, Tile], list[float]] = {}
    for _, (kind, tile) in itertools.product(range(rounds), list(candidates(D))):
        run = runner(kind, tile, extended, q, k, v)
        try:
            samples.setdefault((kind, tile), []).append(median_ms(run, 3 if T < 20_000 else 1, 1))
        except Exception as error:  # a tile that does not fit is part of the record
            print(kind, tile, D, extended, str(error).splitlines()[0][:120])
    case = {"T": T, "D": D, "extended": extended, "flash": flash, "cudnn": cudnn}
    rows = [case | {"kind": kind, "tile": tile, "ms": round(min(times), 4)} for (kind, tile), times in samples.items()]
    return sorted(rows, key=lambda row: row["ms"])


def compare_few(batch: int, key_heads: int, D: int, keys: int) -> list[dict[str, Any]]:
    from locater.kernels import triton_key_parts

    q, k = (
        torch.randn(batch, h, t, D, device="cuda", dtype=torch.bfloat16) for h, t in ((HEADS, 1), (key_heads, keys))
    )
    rows = []
    for tile, programs in FEW:
        triton_key_parts.TILE, triton_key_parts.PROGRAMS = tile, programs  # type: ignore[assignment]
        attention_statistics(q, k, causal=True)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            attention_statistics(q, k, causal=True)
        row = {"batch": batch, "key_heads": key_heads, "D": D, "keys": keys, "kind": "few", "tile": (tile, programs)}
        rows.append(row | {"ms": round(median_ms(graph.replay, 9), 4)})
    return sorted(rows, key=lambda row: row["ms"])


def table(result: dict[str, Any]) -> str:
    """Attention with statistics beside what it stands for: the fastest tile, attention, and the statistics alone."""
    lines = [
        "| T | D | statistics | both in one pass | alone | flash | cuDNN | in one pass: of flash | of cuDNN and statistics |",
        "|---" * 9 + "|",
    ]
    for group in _by_case(result["rows"]):
        best = {kind: min(row["ms"] for row in group if row["kind"] == kind) for kind in ("rows", "forward")}
        flash, cudnn = group[0]["flash"], group[0]["cudnn"]
        cells = [f"{group[0]['T']:,}", str(group[0]["D"]), "extended" if group[0]["extended"] else "plain"]
        cells += [f"{ms:.2f} ms" for ms in (best["forward"], best["rows"], flash, cudnn)]
        cells += [f"{best['forward'] / flash:.2f}", f"{best['forward'] / (cudnn + best['rows']):.2f}"]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def _by_case(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        if row["kind"] != "few":
            groups.setdefault((row["T"], row["D"], row["extended"]), []).append(row)
    return list(groups.values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "attention-variants.json")
    parser.add_argument("--lengths", type=int, nargs="+", default=[4096, 8192, 16384])
    parser.add_argument("--table", action="store_true", help="print the results in --out as a table")
    args = parser.parse_args()
    if not args.table:
        import triton

        result: dict[str, Any] = {"gpu": torch.cuda.get_device_properties(0).name, "torch": torch.__version__}
        result |= {"triton": triton.__version__, "heads": HEADS, "rows": []}
        for T, D, extended in itertools.product(args.lengths, (64, 128), (False, True)):
            result["rows"] += compare(T, D, extended)
            args.out.write_text(json.dumps(result, indent=1) + "\n")  # so that an interrupted run loses little
        result["rows"] += compare_few(1, 8, 128, 32768)
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
