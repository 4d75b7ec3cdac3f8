"""Heads of several kinds beside plain references (study a), and the published layouts with what they cost (study b).

    full        softmax over all keys
    local       softmax over keys in a window
    compressed  softmax over keys that a strided convolution over tokens has shortened, on values shortened likewise

**Layouts.** A score is one product q.k. A full head of T tokens has T^2 of them, a local one T w less the edges, a
compressed one T T' with T' = ceil((T + 2 (stride // 2) - taps) / stride) + 1, about T / stride. All lengths are of the
encoder's input, after it was shortened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.devices_and_processes import draw_normal
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

# ---- a: kinds of heads ----


DRAWS = {True: 30, False: 200}
KIND_HEADS, KIND_SIZE, KIND_WINDOW = 4, 6, 64
TAPS = ((5, 2), (7, 3), (3, 1))  # (taps, stride): the two of the paper, and one that only blurs

KINDS_CLAIMS = (
    Claim(
        "a1",
        "A layer whose heads are all full is multi-head attention",
        "largest difference from PyTorch's own layer, weights shared",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a2",
        "A local head does not see keys outside its window",
        "largest change of outputs when those keys and values are drawn anew",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "a3",
        "A compressed head of one tap, stride 1 and kernel 1 is a full head",
        "largest difference of outputs",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a4",
        "A compressed head is a strided convolution of keys and values, then attention",
        "largest difference from conv1d channel by channel and softmax, three pairs of taps and stride",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "a5",
        f"A published window of {KIND_WINDOW} lets every token see {KIND_WINDOW // 2} tokens on either side",
        "least reach to a side of a token in the middle, windows aligned to blocks as in the public code",
        "at least",
        KIND_WINDOW // 2,
        by="ours",
    ),
    Claim(
        "a6",
        "What a compressed head gives is a weighted mean of values: the rows of its map sum to 1",
        "mean distance of a row's sum from 1, kernels as they are at first",
        "at most",
        0.1,
        by="ours",
    ),
)


def draw_operands(seed: int, T: int) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = (draw_normal(1, KIND_HEADS, T, KIND_SIZE, seed=10 * seed + i) for i in range(3))
    return q, k, v


def full_error(seed: int) -> float:
    """Against `nn.MultiheadAttention`."""
    width, T = KIND_HEADS * KIND_SIZE, 7
    torch.manual_seed(seed)
    layer = nn.MultiheadAttention(width, KIND_HEADS, bias=False, batch_first=True, dtype=torch.float64)
    x = draw_normal(2, T, width, seed=seed)
    q, k, v = (
        y.unflatten(2, (KIND_HEADS, KIND_SIZE)).transpose(1, 2) for y in (x @ layer.in_proj_weight.mT).chunk(3, -1)
    )
    heads = mechanism("multiformer")(q, k, v, kinds="ffff")
    with torch.no_grad():
        joined = heads.transpose(1, 2).flatten(2) @ layer.out_proj.weight.mT
        return (joined - layer(x, x, x, need_weights=False)[0]).abs().max().item()


def local_change(seed: int, window: int = 6) -> tuple[float, float]:
    """Change of a token's output by keys outside its window, and by those inside."""
    T = 24
    q, k, v = draw_operands(seed, T)
    at = seed % T
    inside = (torch.arange(T) - at).abs() <= window // 2
    attend = partial(mechanism("multiformer"), kinds="l", window=window)
    plain = attend(q, k, v)[:, :, at]
    changes = []
    for chosen in (~inside, inside):
        others = [torch.where(chosen[:, None], draw_normal(*x.shape, seed=seed + 999), x) for x in (k, v)]
        changes.append((attend(q, *others)[:, :, at] - plain).abs().max().item())
    return changes[0], changes[1]


def identity_error(seed: int) -> float:
    q, k, v = draw_operands(seed, 11)
    one = torch.ones(1, 1, 1, 1, dtype=torch.float64)
    got = mechanism("multiformer")(q, k, v, kinds="c", stride=1, key_kernel=one, value_kernel=one)
    return (got - functional.scaled_dot_product_attention(q, k, v)).abs().max().item()


def convolution_error(seed: int) -> float:
    """Against conv1d with a group per channel; the end filled up with zeros until the last token has been met."""
    taps, stride = TAPS[seed % 3]
    T = 9 + seed % 7
    q, k, v = draw_operands(seed, T)
    kernels = [draw_normal(1, KIND_HEADS, taps, KIND_SIZE, seed=seed + i) for i in (50, 51)]
    biases = [draw_normal(1, KIND_HEADS, 1, KIND_SIZE, seed=seed + i) for i in (52, 53)]
    short = []
    for x, kernel, bias in zip((k, v), kernels, biases, strict=True):
        heads = []
        for h in range(KIND_HEADS):
            padded = functional.pad(x[:, h].mT, (stride // 2, stride // 2))
            while (padded.shape[-1] - taps) % stride or padded.shape[-1] < taps:
                padded = functional.pad(padded, (0, 1))
            weight = kernel[0, h].mT[:, None]
            heads.append(functional.conv1d(padded, weight, bias[0, h, 0], stride=stride, groups=KIND_SIZE).mT)
        short.append(torch.stack(heads, 1))
    want = (q @ short[0].mT / KIND_SIZE**0.5).softmax(-1) @ short[1]
    options: dict[str, Any] = dict(
        key_kernel=kernels[0], value_kernel=kernels[1], key_bias=biases[0], value_bias=biases[1]
    )
    return (mechanism("multiformer")(q, k, v, kinds="c", stride=stride, **options) - want).abs().max().item()


def block_window(T: int, window: int = KIND_WINDOW) -> Bool[Tensor, "T T"]:
    """Which keys a query sees with windows aligned to blocks: blocks of window // 3, its own and one to either side.

    >>> block_window(9, 9).sum(1).tolist()
    [6, 6, 6, 9, 9, 9, 6, 6, 6]
    """
    block = torch.arange(T) // (window // 3)
    return (block[:, None] - block).abs() <= 1


def window_reach(T: int = 210) -> dict[str, int | float]:
    """How far the tokens in the middle see to a side, and what the two windows have in common."""
    seen, at = block_window(T), torch.arange(T)
    centred = (at[:, None] - at).abs() <= KIND_WINDOW // 2
    rows = range(KIND_WINDOW, T - KIND_WINDOW)
    back = [int((i - at[seen[i]]).max()) for i in rows]
    ahead = [int((at[seen[i]] - i).max()) for i in rows]
    common = (seen & centred)[KIND_WINDOW : T - KIND_WINDOW].sum() / (seen | centred)[
        KIND_WINDOW : T - KIND_WINDOW
    ].sum()
    return {
        "window": KIND_WINDOW,
        "least": min(back + ahead),
        "most": max(back + ahead),
        "keys": int(seen[T // 2].sum()),
        "common": common.item(),
    }


def row_sums(seed: int) -> Float[Tensor, " rows"]:
    """Of maps of compressed heads, taps shared by channels, drawn as the module draws them."""
    taps, stride = TAPS[seed % 2]
    q, k, _ = draw_operands(seed, 40)
    generator = torch.Generator().manual_seed(seed)
    kernels = [
        (2 * torch.rand(1, 1, taps, 1, generator=generator, dtype=torch.float64) - 1) / taps**0.5 for _ in range(2)
    ]
    weights = mechanism("multiformer").map(
        q, k, kinds="c", stride=stride, key_kernel=kernels[0], value_kernel=kernels[1]
    )
    return weights.sum(-1).flatten()


def measure_kinds(setting: Setting) -> Results:
    """All draws."""
    seeds = range(DRAWS[setting.quick])
    largest = f"none: the largest of {len(seeds)} draws"
    local = [local_change(seed) for seed in seeds]
    window = window_reach()
    sums = [row_sums(seed) for seed in seeds]
    off = [(x - 1).abs().mean().item() for x in sums]
    measured = {
        "a1": Measurement(max(full_error(seed) for seed in seeds), 0.0, largest),
        "a2": Measurement(max(x[0] for x in local), 0.0, largest),
        "a3": Measurement(max(identity_error(seed) for seed in seeds), 0.0, largest),
        "a4": Measurement(max(convolution_error(seed) for seed in seeds), 0.0, largest),
        "a5": Measurement(float(window["least"]), 0.0, "none: counted"),
        "a6": by_seed(off, of="kernels"),
    }
    rows = torch.cat(sums)
    tables = {
        "published_window": window,
        "least_change_inside": min(x[1] for x in local),
        "compressed_row_sums": {"least": rows.min().item(), "most": rows.max().item()},
    }
    return Results(measured, tables)


KINDS_STUDY = Study("kinds of heads", KINDS_CLAIMS, measure_kinds)


# ---- b: layouts and their cost ----


LAYERS, HEADS, WINDOW = 12, 4, 64
LENGTHS = (64, 250, 1000, 4000, 16000)


@dataclass(frozen=True)
class LayerGroup:
    """Equal layers: how many, a letter per head, and the kernel of compressed heads."""

    layers: int
    kinds: str
    taps: int = 5
    stride: int = 2


LAYOUTS: dict[str, tuple[LayerGroup, ...]] = {
    "lc": (LayerGroup(12, "llcc"),),
    "v1": (LayerGroup(6, "lccc"), LayerGroup(6, "llcc")),
    "v2": (LayerGroup(3, "lccc"), LayerGroup(5, "lllc"), LayerGroup(4, "llcc")),
    "full mix": (LayerGroup(2, "cccc"), LayerGroup(6, "llcc"), LayerGroup(4, "ffcc", 7, 3)),
}
SINGLE_KINDS: dict[str, tuple[LayerGroup, ...]] = {
    "full": (LayerGroup(12, "ffff"),),
    "local": (LayerGroup(12, "llll"),),
    "compressed": (LayerGroup(12, "cccc"),),
}

LAYOUT_CLAIMS = (
    Claim(
        "b1",
        "Four layouts of 12 layers with 4 heads",
        "layouts of four that do not add up",
        "at most",
        0.0,
        by="ours",
    ),
    Claim(
        "b2",
        "A compressed head of stride 2 has half of the scores",
        "scores over those of a full head, 1,000 tokens, counted by placing the kernel",
        "about",
        0.5,
        0.01,
        by="ours",
    ),
    Claim(
        "b3",
        "What is multiplied here is what is counted",
        "largest relative difference of counted multiplications from 2 T T' D, compressed heads",
        "at most",
        1e-12,
        by="ours",
    ),
    Claim(
        "b4",
        "Layouts that mix cost half of full attention or less, at 1,000 tokens",
        "scores over those of full attention, dearest of four layouts",
        "at most",
        0.5,
        by="ours",
    ),
    Claim(
        "b5",
        "The mix makes attention cheap for long inputs: cost grows as that of local heads",
        "log2 of scores when T doubles to 16,000, least of four layouts",
        "at most",
        1.1,
        by="ours",
    ),
)


def shortened_length(T: int, taps: int, stride: int) -> int:
    """T', by placing the kernel: first at -(stride // 2), then every stride, until it has met the last token and the
    padding behind it.

    >>> shortened_length(1000, 5, 2), shortened_length(10, 7, 3), shortened_length(4, 1, 1)
    (500, 3, 4)
    """
    front = stride // 2
    count, start = 1, -front
    while start + taps < T + front:
        count, start = count + 1, start + stride
    return count


def head_scores(kind: str, T: int, taps: int = 5, stride: int = 2, window: int = WINDOW) -> int:
    """Scores of one head.

    >>> head_scores("f", 10), head_scores("l", 10, window=2), head_scores("c", 10)
    (100, 28, 50)
    """
    if kind == "f":
        return T * T
    if kind == "c":
        return T * shortened_length(T, taps, stride)
    half = min(window // 2, T - 1)
    return T * (2 * half + 1) - half * (half + 1)


def layout_scores(groups: Sequence[LayerGroup], T: int) -> int:
    return sum(
        group.layers * head_scores(kind, T, group.taps, group.stride) for group in groups for kind in group.kinds
    )


def multiplications(T: int, taps: int, stride: int, size: int = 8) -> int:
    """Multiplications of one compressed head, forward; those of the convolution are no matrix product and not
    counted.
    """
    x, kernel = torch.zeros(1, 1, T, size, device="meta"), torch.zeros(1, 1, taps, 1, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        mechanism("multiformer")(x, x, x, kinds="c", stride=stride, key_kernel=kernel, value_kernel=kernel)
    return int(counter.get_total_flops()) // 2


def is_whole(groups: Sequence[LayerGroup]) -> bool:
    """Whether a layout has 12 layers of 4 heads, of known kinds."""
    known = all(len(group.kinds) == HEADS and set(group.kinds) <= set("flc") for group in groups)
    return known and sum(group.layers for group in groups) == LAYERS


def cost_row(name: str, groups: Sequence[LayerGroup]) -> dict[str, Any]:
    """Heads of each kind, scores as a share of full attention's by length, and growth at the longest."""
    longest = LENGTHS[-1]
    return {
        "layout": name,
        "kinds": {k: sum(group.layers * group.kinds.count(k) for group in groups) for k in "flc"},
        "share": {str(T): layout_scores(groups, T) / layout_scores(SINGLE_KINDS["full"], T) for T in LENGTHS},
        "growth": math.log2(layout_scores(groups, longest) / layout_scores(groups, longest // 2)),
        "mixed": name in LAYOUTS,
    }


def measure_layout(setting: Setting) -> Results:
    """Counts, all exact."""
    cases = [(T, taps, stride) for T in (7, 64, 250, 1001) for taps, stride in ((5, 2), (7, 3), (1, 1))]
    off = max(abs(multiplications(*case) / (2 * case[0] * shortened_length(*case) * 8) - 1) for case in cases)
    rows = [cost_row(name, groups) for name, groups in {**SINGLE_KINDS, **LAYOUTS}.items()]
    mixed = [row for row in rows if row["mixed"]]
    values = {
        "b1": float(sum(not is_whole(groups) for groups in LAYOUTS.values())),
        "b2": head_scores("c", 1000) / head_scores("f", 1000),
        "b3": off,
        "b4": max(row["share"]["1000"] for row in mixed),
        "b5": min(row["growth"] for row in mixed),
    }
    settings = {"lengths": list(LENGTHS), "layers": LAYERS, "heads": HEADS, "window": WINDOW}
    measured = {key: Measurement(value, 0.0, "none: counted") for key, value in values.items()}
    return Results(measured, {"layout_costs": {"rows": rows, **settings}})


LAYOUT_STUDY = Study("layouts and their cost", LAYOUT_CLAIMS, measure_layout)
