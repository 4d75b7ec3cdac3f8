"""Does attention of signs (one bit a channel) gain from products that use the bits? On a GPU, forward pass.

    python benchmarks/binary_products.py --out benchmarks/results/binary.json          # needs CUDA 9.0 and Triton
    python benchmarks/binary_products.py --table                                       # the table of docs/results/kernels.md

Four ways to the same exact logits: tensor cores on signs as bfloat16, float8 or int8, and exclusive or and population
count on words of 32 signs. Beside them PyTorch's fused attention on signs as bfloat16, which
`locater_lab.mechanisms` uses. Values stay bfloat16 in all of them.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
from attention import HEADS, fused, median_ms
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.nn.functional import scaled_dot_product_attention
from triton.language.extra.cuda import libdevice
from triton.tools.tensor_descriptor import TensorDescriptor

from locater.kernels.triton_parts import EMPTY, LOG2E, descriptor, key_span, load_rows
from locater.kernels.triton_rows import LEAST

KINDS = {"bfloat16": torch.bfloat16, "float8": torch.float8_e4m3fn, "int8": torch.int8}
TENSOR = [(128, 128, 8, 2), (128, 64, 8, 3), (64, 128, 4, 2)]  # BLOCK_M, BLOCK_N, warps, stages
TILES = {"bfloat16": TENSOR, "float8": TENSOR, "int8": TENSOR, "popcount": [(64, 32, 4, 2)]}


WIDEST = tl.constexpr(100.0)  # units of log 2 between the largest logit that there can be and the smallest


@triton.jit
def _products(q, Kd, i, n, b, hk, start, T, S, CAUSAL: tl.constexpr, EDGE: tl.constexpr, BLOCK_N: tl.constexpr,
              BLOCK_D: tl.constexpr):  # fmt: skip
    k = Kd.load([b.to(tl.int32), hk.to(tl.int32), start, 0]).reshape([BLOCK_N, BLOCK_D])
    x = tl.dot(q, tl.trans(k)).to(tl.float32)
    if EDGE:
        seen = (start + n < S)[None, :] & (i >= 0)[:, None]
        if CAUSAL:
            seen = seen & ((start + n)[None, :] <= (i + (S - T))[:, None])
        x = tl.where(seen, x, EMPTY)
    return x


@triton.jit(do_not_specialize=["heads"])
def signs_kernel(Q, Kd, Vd, Unit, Out, qb, qh, qt, ob, oh, ot, H, GROUP, heads, T, S, D: tl.constexpr,
                 E: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
                 BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr):  # fmt: skip
    """Unit is (B, H, T), not negative."""
    blocks = tl.cdiv(T, BLOCK_M)
    head = (tl.program_id(0) % heads).to(tl.int64)
    block = blocks - 1 - tl.program_id(0) // heads  # the longest rows of a causal mask start first
    b, h = head // H, head % H
    hk = h // GROUP
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    c = tl.arange(0, BLOCK_E)
    q = load_rows(Q + b * qb + h * qh + i[:, None].to(tl.int64) * qt + d[None, :], d, i < T, D, BLOCK_D, True)
    unit = tl.load(Unit + head * T + i, mask=i < T, other=0.0) * LOG2E
    m = unit * D
    s = tl.zeros([BLOCK_M], tl.float32)
    out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    _, high, plain = key_span(block, T, S, 0, CAUSAL, False, False, BLOCK_M, BLOCK_N)
    for EDGE in tl.static_range(2):
        for start in range(plain if EDGE else 0, high if EDGE else plain, BLOCK_N):
            x = _products(q, Kd, i, n, b, hk, start, T, S, CAUSAL, EDGE, BLOCK_N, BLOCK_D)
            y = x * unit[:, None] - m[:, None]
            if EDGE:  # of a unit of 0 too
                y = tl.where(x > EMPTY, y, EMPTY)
            e = tl.exp2(y)
            s += tl.sum(e, 1)
            v = Vd.load([b.to(tl.int32), hk.to(tl.int32), start, 0]).reshape([BLOCK_N, BLOCK_E])
            out = tl.dot(e.to(v.dtype), v, out)
    if tl.max(m, 0) * 2 > WIDEST:
        m = tl.full([BLOCK_M], LEAST, tl.float32)
        s = tl.zeros([BLOCK_M], tl.float32)
        out = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
        for start in range(0, high, BLOCK_N):
            x = _products(q, Kd, i, n, b, hk, start, T, S, CAUSAL, True, BLOCK_N, BLOCK_D)
            y = tl.where(x > EMPTY, x * unit[:, None], EMPTY)
            new = tl.maximum(m, tl.max(y, 1))
            e = tl.exp2(y - new[:, None])
            alpha = tl.exp2(m - new)
            m = new
            s = s * alpha + tl.sum(e, 1)
            v = Vd.load([b.to(tl.int32), hk.to(tl.int32), start, 0]).reshape([BLOCK_N, BLOCK_E])
            out = tl.dot(e.to(v.dtype), v, out * alpha[:, None])
    where = Out + b * ob + h * oh + i[:, None].to(tl.int64) * ot + c[None, :]
    tl.store(where, (out / s[:, None]).to(Out.dtype.element_ty), mask=(i < T)[:, None] & (c < E)[None, :])


@triton.jit
def popcount_kernel(Q, K, Vd, Out, T, scale, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Causal; T is a multiple of both blocks; Q and K (heads, T, D / 32) words."""
    blocks = tl.cdiv(T, BLOCK_M)
    heads = tl.num_programs(0) // blocks
    head = tl.program_id(0) % heads
    block = blocks - 1 - tl.program_id(0) // heads
    i = block * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, D)
    W: tl.constexpr = D // 32
    out = tl.zeros([BLOCK_M, D], tl.float32)
    s = tl.zeros([BLOCK_M], tl.float32)
    Q += head.to(tl.int64) * T * W
    K += head.to(tl.int64) * T * W
    unit = scale * 1.4426950408889634
    for EDGE in tl.static_range(2):
        plain = block * BLOCK_M // BLOCK_N * BLOCK_N
        for start in range(plain if EDGE else 0, (block + 1) * BLOCK_M if EDGE else plain, BLOCK_N):
            z = tl.zeros([BLOCK_M, BLOCK_N], tl.int32)
            for w in tl.static_range(W):
                z += libdevice.popc(tl.load(Q + i * W + w)[:, None] ^ tl.load(K + (start + n) * W + w)[None, :])
            y = z.to(tl.float32) * (-2 * unit)
            if EDGE:
                y = tl.where((start + n)[None, :] <= i[:, None], y, -1e30)
            e = tl.exp2(y)
            s += tl.sum(e, 1)
            v = Vd.load([head, start, 0]).reshape([BLOCK_N, D])
            out = tl.dot(e.to(v.dtype), v, out)
    where = Out + head.to(tl.int64) * T * D + i[:, None] * D + d[None, :]
    tl.store(where, (out / s[:, None]).to(Out.dtype.element_ty))


def pack_bits(x: Tensor) -> Tensor:
    """Signs as words of 32 bits, 1 for plus."""
    bits = (x >= 0).unflatten(-1, (-1, 32)).long()
    words = (bits << torch.arange(32, device=x.device)).sum(-1)
    return torch.where(words >= 1 << 31, words - (1 << 32), words).int()


def signs(x: Tensor, kind: str) -> Tensor:
    return pack_bits(x) if kind == "popcount" else ((x >= 0).float() * 2 - 1).to(KINDS[kind])


def by_tensor_cores(q: Tensor, k: Tensor, v: Tensor, unit: Tensor, causal: bool, tile: tuple[int, ...]) -> Tensor:
    """q (B, H, T, D) and k (B, K, S, D) signs of one type, v (B, K, S, E), unit (B, H, T) float32."""
    (B, H, T, D), (K, S, E) = q.shape, v.shape[1:]
    wide, deep = (max(32, triton.next_power_of_2(x)) for x in (D, E))
    m, n, warps, stages = tile
    out = torch.empty(B, T, H, E, dtype=v.dtype, device=v.device).transpose(1, 2)
    signs_kernel[(B * H * triton.cdiv(T, m),)](
        q, descriptor(k, n, wide), descriptor(v, n, deep), unit, out, *q.stride()[:3], *out.stride()[:3], H, H // K,
        B * H, T, S, D=D, E=E, CAUSAL=causal, BLOCK_M=m, BLOCK_N=n, BLOCK_D=wide, BLOCK_E=deep, num_warps=warps,
        num_stages=stages)  # fmt: skip
    return out


def attend(q: Tensor, k: Tensor, v: Tensor, kind: str, scale: float, tile: tuple[int, int, int, int]) -> Tensor:
    """q and k (heads, T, D), or (heads, T, D / 32) words; v (heads, T, D)."""
    heads, T, D = v.shape
    if kind != "popcount":
        unit = torch.full((1, heads, T), scale, device=v.device)
        return by_tensor_cores(q[None], k[None], v[None], unit, True, tile)[0]
    m, n, warps, stages = tile
    out = torch.empty_like(v)
    values = TensorDescriptor(v, list(v.shape), list(v.stride()), [1, n, D])
    popcount_kernel[(heads * triton.cdiv(T, m),)](
        q, k, values, out, T, scale, D=D, BLOCK_M=m, BLOCK_N=n, num_warps=warps, num_stages=stages
    )
    return out


def case(T: int, D: int, rounds: int) -> dict[str, Any]:
    q, k, v = (torch.randn(HEADS, T, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    scale, entry = 0.8 * D**-0.5, {"T": T, "D": D, "ms": {}, "errors": {}}
    plain = [x[None] for x in (signs(q, "bfloat16"), signs(k, "bfloat16"), v)]
    for name, backend in (("flash", SDPBackend.FLASH_ATTENTION), ("cuDNN", SDPBackend.CUDNN_ATTENTION)):
        entry["ms"][name] = round(median_ms(lambda: fused(backend, *plain, True), rounds), 4)  # noqa: B023
    few = [x[:, :2, :512].double() for x in plain]
    want = scaled_dot_product_attention(*few, is_causal=True, scale=scale)[0]
    for kind, tiles in TILES.items():
        a, b = signs(q, kind), signs(k, kind)
        times = [median_ms(lambda: attend(a, b, v, kind, scale, tile), rounds) for tile in tiles]  # noqa: B023
        entry["ms"][kind] = round(min(times), 4)
        found = attend(
            a[:2, :512].contiguous(), b[:2, :512].contiguous(), v[:2, :512].contiguous(), kind, scale, tiles[0]
        )
        entry["errors"][kind] = float((found - want).abs().max())
    return entry


def table(result: dict[str, Any]) -> str:
    names = ("bfloat16", "float8", "int8", "popcount", "flash", "cuDNN")
    lines = [f"| T | D | {' | '.join(names)} |", "|---|" + "---|" * (len(names) + 1)]
    for entry in result["cases"]:
        cells = [f"{entry['T']:,}", str(entry["D"]), *(f"{entry['ms'][name]:.2f} ms" for name in names)]
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results" / "binary.json")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--table", action="store_true", help="print the results in --out as a table")
    args = parser.parse_args()
    if not args.table:
        result = {"gpu": torch.cuda.get_device_properties(0).name, "torch": torch.__version__, "heads": HEADS}
        result |= {
            "triton": triton.__version__,
            "cases": [case(T, D, args.rounds) for T in (8192, 16384) for D in (64, 128)],
        }
        args.out.write_text(json.dumps(result, indent=1) + "\n")
    print(table(json.loads(args.out.read_text())))


if __name__ == "__main__":
    main()
