"""The plan of the runs at the published size as data: arms, what the paper has, claims and their bounds.

docs/results/amsel2024-plan.md is the same in words, written before the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from locater_lab.engine.claims import Claim
from locater_lab.papers.amsel2024.encoder import Encoder

WIDTH = 64
RANKS = (1, 2, 4, 8, 16, 32, 64)
POINTS = 1024  # of a step and a seed: 64 sets of 16
SHORT = "as seen after fewer steps"


def _arm(rank: int, points: int = 16, of_step: int = POINTS, **changes: Any) -> Encoder:
    return Encoder(rank=rank, points=points, batch=of_step // points, **changes)


LONG, BRIEF = 12_000, 3_000
ONE = (
    *(_arm(r, copies=1, steps=LONG) for r in RANKS),
    *(_arm(r, copies=WIDTH, steps=BRIEF) for r in reversed(RANKS)),
)
MORE = tuple(_arm(r, copies=WIDTH, steps=LONG) for r in (64, 32, 1))  # as long as with one copy
# Encoders of several layers as first planned. They learned to answer with the length 0, a loss of 1.
FIRST = {
    "e": tuple(_arm(r, copies=WIDTH, layers=3, steps=2_500, seeds=6) for r in (64, 4, 1)),
    "f": tuple(
        _arm(r, n, copies=WIDTH, layers=2, steps=1_500, seeds=6, rate=0.005) for r in (64, 1) for n in (4, 16, 64)
    ),
    "g": tuple(
        _arm(rank or WIDTH + positions, copies=8, layers=3, positions=positions, steps=2_000, seeds=6, rate=0.005)
        for positions in (0, 64)
        for rank in (0, 1)
    ),
}
# As planned anew: lengths begin at 8, the rate is lower and there are more steps.
DEEP: dict[str, Any] = {"steps": 4_000, "seeds": 5, "rate": 0.005, "length": math.sqrt(WIDTH)}
AGAIN = {
    "e": tuple(_arm(r, copies=WIDTH, layers=3, **DEEP) for r in (64, 4, 1)),
    "f": tuple(_arm(r, n, POINTS // 2, copies=WIDTH, layers=2, **DEEP) for r in (64, 1) for n in (4, 16, 64)),
    "g": tuple(
        _arm(rank or WIDTH + positions, copies=8, layers=3, positions=positions, **DEEP)
        for positions in (0, 64)
        for rank in (0, 1)
    ),
}
LOST = 0.99  # a loss from which on an encoder has learned nothing: the answer 0 has a loss of 1
UNTRAINED = "the encoders that it compares learned nothing: they answer with the length 0, at a loss of 1"
TOO_SHORT = (
    "the loss is higher than published, after fewer steps than the paper's 100,000: longer training may lower it"
)

# What the paper's figures show, read off the pictures: least loss of 5 seeds, by layers, copies, points and rank.
PUBLISHED: Mapping[tuple[int, int, int], Mapping[int, float]] = {
    (1, 1, 16): {1: 0.87, 2: 0.87, 4: 0.87, 8: 0.87, 16: 0.87, 32: 0.70, 64: 0.015},
    (1, 64, 16): {1: 0.65, 32: 0.31, 64: 0.002},
    (3, 64, 16): {1: 0.52, 2: 0.38, 4: 0.055, 8: 0.042, 16: 0.053, 32: 0.055, 64: 0.0008},
    (5, 64, 16): {1: 0.42, 32: 0.014, 64: 0.002},
    (2, 64, 4): {1: 0.02},
    (2, 64, 16): {1: 0.63},
    (2, 64, 64): {1: 0.81},
    (2, 64, 256): {1: 1.16},
}

ONE_LAYER = (
    Claim(
        "d1", f"With d^2 parameters full rank is far better than half of it, {SHORT}",
        "loss at rank 64 over loss at rank 32, one layer, one copy", "at most", 0.1, where="Figure 1", bound="ours",
    ),
    Claim(
        "d2", f"With d^3 parameters too, {SHORT}",
        "loss at rank 64 over loss at rank 32, one layer, 64 copies", "at most", 0.1, where="Figure 1", bound="ours",
    ),
    Claim(
        "d3", f"With d^2 parameters rank one is as bad as published, {SHORT}",
        "loss at rank 1, one layer, one copy", "about", 0.87, 0.05, where="Figure 1",
    ),
    Claim(
        "d4", f"With d^3 parameters rank one is as published, {SHORT}",
        "loss at rank 1, one layer, 64 copies", "about", 0.65, 0.05, where="Figure 1",
    ),
    Claim(
        "d5", f"One full-rank head beats rank one with d times its parameters, {SHORT}",
        "loss at rank 64 with one copy less loss at rank 1 with 64 copies", "at most", 0.0, where="Figure 1",
    ),
    Claim(
        "d6", f"More heads help rank one, {SHORT}",
        "loss at rank 1, 64 copies less one copy", "at most", 0.0, where="Figure 1",
    ),
    Claim(
        "d7", f"One full-rank head comes as near as published, {SHORT}",
        "loss at rank 64, one layer, one copy", "at most", 0.015, where="Figure 1",
    ),
    Claim(
        "d8", f"The W that one full-rank head learns is a multiple of -I, {SHORT}",
        "angle of W to the identity in degrees, rank 64, one copy", "at least", 175.0, where="", bound="ours",
    ),
    Claim(
        "d9", f"The W of 64 full-rank heads are near it, {SHORT}",
        "angle of W to the identity in degrees, rank 64, 64 copies", "about", 168.0, 5.0, where="", bound="ours",
    ),
)  # fmt: skip
DEPTH = (
    Claim(
        "e1", f"Three layers help rank one, {SHORT}",
        "loss at rank 1, 64 copies, three layers less one layer", "at most", 0.0, where="Figure 1",
    ),
    Claim(
        "e2", f"Three layers make rank 4 good, {SHORT}",
        "loss at rank 4 over loss at rank 1, three layers, 64 copies", "at most", 0.2, where="Figure 1", bound="ours",
    ),
    Claim(
        "e3", f"Full rank stays far better than rank one in three layers, {SHORT}",
        "loss at rank 64 over loss at rank 1, three layers, 64 copies", "at most", 0.1, where="Figure 1", bound="ours",
    ),
)  # fmt: skip
NUMBER = (
    Claim(
        "f1", f"Rank one gets worse with more points, {SHORT}",
        "loss at rank 1, two layers, 64 copies: N = 64 less N = 4", "at least", 0.3, where="", bound="ours",
    ),
    Claim(
        "f2", f"Full rank does not, {SHORT}",
        "loss at rank 64, two layers, 64 copies, N = 64", "at most", 0.04, where="",
    ),
)  # fmt: skip
POSITIONS = (
    Claim(
        "g1", f"Positions in channels of their own help rank one, {SHORT}",
        "loss at rank 1, three layers, 8 copies: with positions less without", "at most", 0.0, where="",
    ),
    Claim(
        "g2", f"Full rank with positions stays far better than rank one with them, {SHORT}",
        "loss at full rank over loss at rank 1, three layers, 8 copies, positions", "at most", 0.1, where="", bound="ours",
    ),
)  # fmt: skip
