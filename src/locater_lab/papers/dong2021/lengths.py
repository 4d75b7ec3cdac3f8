"""How long the paths through a transformer are, and how little the long ones weigh: study e."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from typing import Any

import torch

from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.theory import length_contributions, length_weights, path_counts, path_lengths


@dataclass(frozen=True)
class Stated:
    """A row of the published counts: mean to three digits, shares to four."""

    model: str
    depth: int
    heads: int
    mean: float
    modes: tuple[int, ...]
    at_mode: float
    longest: float


TABLE = (
    Stated("DistilBERT", 6, 12, 5.538, (6,), 0.6186, 0.6186),
    Stated("MobileBERT", 12, 4, 9.600, (10,), 0.2835, 0.0687),
    Stated("DeiT-T", 12, 3, 9.000, (9,), 0.2581, 0.0317),
    Stated("BERT-base, ViT-B", 12, 12, 11.077, (11, 12), 0.3827, 0.3827),
    Stated("BERT-large, ViT-L", 24, 16, 22.588, (23,), 0.3501, 0.2334),
    Stated("ViT-H", 32, 16, 30.118, (31,), 0.2874, 0.1437),
    Stated("T5-3B", 24, 32, 23.273, (24,), 0.4778, 0.4778),
    Stated("T5-11B", 24, 128, 23.814, (24,), 0.8296, 0.8296),
    Stated("GPT-3", 96, 96, 95.010, (95, 96), 0.3698, 0.3698),
)
# alpha of a trained model of 6 layers, as its plotting code keeps them
SKIPS = (0.901, 0.905, 0.907, 0.889, 0.856, 0.778)
RATE, START = 1.0491046, 400.0  # c and R_0 there
LISTED = ((1, 1), (2, 3), (4, 2), (5, 3), (6, 2))  # (layers, heads) small enough to list every path

CLAIMS = (
    Claim(
        "e1", "Mean length, most frequent length's share and longest length's share of nine models, as counted",
        "largest distance of a printed figure from ours, in units of its last digit", "at most", 0.5,
        where="its notebook of path counts",
    ),
    Claim(
        "e2", "Which lengths are the most frequent: one, or two that tie",
        "models of nine whose most frequent lengths, compared as integers, are others than counted", "at most", 0.0,
        where="its notebook of path counts",
    ),
    Claim(
        "e3", "Of L layers with H heads and a skip, C(L, k) H^k paths have length k",
        f"largest difference from counting every path, {len(LISTED)} small stacks", "at most", 0.0,
        where="path decomposition",
    ),
    Claim(
        "e4", "Most paths are long; the weight is on the short ones",
        "weight of paths through at most one attention layer, with the skip weights of a trained model of 6 layers",
        "at least", 0.5, where="weights of its plotting code", bound="ours",
    ),
)  # fmt: skip


def row(depth: int, heads: int) -> dict[str, Any]:
    """Mean, most frequent lengths, and the shares of these and of the longest.

    >>> row(12, 12)["modes"], round(row(12, 12)["at_mode"], 4)
    ([11, 12], 0.3827)
    """
    counts, shares = path_counts(depth, heads), path_lengths(depth, heads)
    top = max(counts)
    modes = [k for k, count in enumerate(counts) if count == top]
    mean = sum(k * count for k, count in enumerate(counts)) / sum(counts)
    return {"mean": mean, "modes": modes, "at_mode": float(shares[modes[0]]), "longest": float(shares[-1])}


def distance(stated: Stated) -> float:
    """Of the three printed figures from ours, the largest, in units of the last digit: 1/2 is rounding."""
    own = row(stated.depth, stated.heads)
    off = [abs(own["mean"] - stated.mean) / 1e-3]
    off += [abs(own[name] - getattr(stated, name)) / 1e-4 for name in ("at_mode", "longest")]
    return max(off)


def listed(depth: int, heads: int) -> list[int]:
    """Paths per length, by writing down every one: a head or the skip in each layer.

    >>> listed(3, 2)
    [1, 6, 12, 8]
    """
    counts = [0] * (depth + 1)
    for path in product(range(heads + 1), repeat=depth):
        counts[sum(choice < heads for choice in path)] += 1
    return counts


def measure(setting: Setting) -> Results:
    """Exact numbers: no spread."""
    exact = "none: exact"
    rows = [
        {"model": s.model, "layers": s.depth, "heads": s.heads, **row(s.depth, s.heads), "stated": vars(s)}
        for s in TABLE
    ]
    wrong = sum(tuple(r["modes"]) != s.modes for r, s in zip(rows, TABLE, strict=True))
    off = max(abs(a - b) for size in LISTED for a, b in zip(listed(*size), path_counts(*size), strict=True))
    alpha = torch.tensor(SKIPS, dtype=torch.float64)
    weights = length_weights(alpha)
    contributions = length_contributions(alpha, START, RATE)
    measured = {
        "e1": Measurement(max(distance(s) for s in TABLE), 0.0, exact),
        "e2": Measurement(float(wrong), 0.0, exact),
        "e3": Measurement(float(off), 0.0, exact),
        "e4": Measurement(float(weights[:2].sum()), 0.0, exact),
    }
    trained = {
        "weights": weights.tolist(),
        "shares": path_lengths(len(SKIPS), 2).tolist(),
        "contributions": (contributions / contributions.sum()).tolist(),
        "mean_skip": float(alpha.mean()),
        "mean_length": float((1 - alpha).sum()),
    }
    tables = {"path_lengths": rows, "bert_path_lengths": path_lengths(12, 12).tolist(), "length_weights": trained}
    return Results(measured, tables)


STUDY = Study("path lengths", CLAIMS, measure)
