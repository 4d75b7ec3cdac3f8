"""The published layouts as data, and what they cost: study b.

A score is one product q.k. A full head of T tokens has T^2 of them, a local one T w less the edges, a compressed one T
T' with T' = ceil((T + 2 (stride // 2) - taps) / stride) + 1, about T / stride. All lengths are of the encoder's input,
after it was shortened.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.mechanisms import mechanism

LAYERS, HEADS, WINDOW = 12, 4, 64
LENGTHS = (64, 250, 1000, 4000, 16000)


@dataclass(frozen=True)
class Group:
    """Equal layers: how many, a letter per head, and the kernel of compressed heads."""

    layers: int
    kinds: str
    taps: int = 5
    stride: int = 2


LAYOUTS: dict[str, tuple[Group, ...]] = {
    "lc": (Group(12, "llcc"),),
    "v1": (Group(6, "lccc"), Group(6, "llcc")),
    "v2": (Group(3, "lccc"), Group(5, "lllc"), Group(4, "llcc")),
    "full mix": (Group(2, "cccc"), Group(6, "llcc"), Group(4, "ffcc", 7, 3)),
}
ALONE: dict[str, tuple[Group, ...]] = {
    "full": (Group(12, "ffff"),),
    "local": (Group(12, "llll"),),
    "compressed": (Group(12, "cccc"),),
}

CLAIMS = (
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


def shortened(T: int, taps: int, stride: int) -> int:
    """T', by placing the kernel: first at -(stride // 2), then every stride, until it has met the last token and the
    padding behind it.

    >>> shortened(1000, 5, 2), shortened(10, 7, 3), shortened(4, 1, 1)
    (500, 3, 4)
    """
    front = stride // 2
    count, start = 1, -front
    while start + taps < T + front:
        count, start = count + 1, start + stride
    return count


def scores(kind: str, T: int, taps: int = 5, stride: int = 2, window: int = WINDOW) -> int:
    """Scores of one head.

    >>> scores("f", 10), scores("l", 10, window=2), scores("c", 10)
    (100, 28, 50)
    """
    if kind == "f":
        return T * T
    if kind == "c":
        return T * shortened(T, taps, stride)
    half = min(window // 2, T - 1)
    return T * (2 * half + 1) - half * (half + 1)


def layout_scores(groups: Sequence[Group], T: int) -> int:
    return sum(group.layers * scores(kind, T, group.taps, group.stride) for group in groups for kind in group.kinds)


def multiplied(T: int, taps: int, stride: int, size: int = 8) -> int:
    """Multiplications of one compressed head, forward; those of the convolution are no matrix product and not
    counted.
    """
    x, kernel = torch.zeros(1, 1, T, size, device="meta"), torch.zeros(1, 1, taps, 1, device="meta")
    with FlopCounterMode(display=False) as counter, sdpa_kernel(SDPBackend.MATH):
        mechanism("multiformer")(x, x, x, kinds="c", stride=stride, key_kernel=kernel, value_kernel=kernel)
    return int(counter.get_total_flops()) // 2


def adds_up(groups: Sequence[Group]) -> bool:
    """Whether a layout has 12 layers of 4 heads, of known kinds."""
    known = all(len(group.kinds) == HEADS and set(group.kinds) <= set("flc") for group in groups)
    return known and sum(group.layers for group in groups) == LAYERS


def cost_row(name: str, groups: Sequence[Group]) -> dict[str, Any]:
    """Heads of each kind, scores as a share of full attention's by length, and growth at the longest."""
    longest = LENGTHS[-1]
    return {
        "layout": name,
        "kinds": {k: sum(group.layers * group.kinds.count(k) for group in groups) for k in "flc"},
        "share": {str(T): layout_scores(groups, T) / layout_scores(ALONE["full"], T) for T in LENGTHS},
        "growth": math.log2(layout_scores(groups, longest) / layout_scores(groups, longest // 2)),
        "mixed": name in LAYOUTS,
    }


def measure(setting: Setting) -> Results:
    """Counts, all exact."""
    cases = [(T, taps, stride) for T in (7, 64, 250, 1001) for taps, stride in ((5, 2), (7, 3), (1, 1))]
    off = max(abs(multiplied(*case) / (2 * case[0] * shortened(*case) * 8) - 1) for case in cases)
    rows = [cost_row(name, groups) for name, groups in {**ALONE, **LAYOUTS}.items()]
    mixed = [row for row in rows if row["mixed"]]
    values = {
        "b1": float(sum(not adds_up(groups) for groups in LAYOUTS.values())),
        "b2": scores("c", 1000) / scores("f", 1000),
        "b3": off,
        "b4": max(row["share"]["1000"] for row in mixed),
        "b5": min(row["growth"] for row in mixed),
    }
    settings = {"lengths": list(LENGTHS), "layers": LAYERS, "heads": HEADS, "window": WINDOW}
    measured = {key: Measurement(value, 0.0, "none: counted") for key, value in values.items()}
    return Results(measured, {"layout_costs": {"rows": rows, **settings}})


STUDY = Study("layouts and their cost", CLAIMS, measure)
