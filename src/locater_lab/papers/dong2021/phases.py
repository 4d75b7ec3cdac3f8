"""The phase diagrams of study h: residual kept and entropy over the plane of a head's scale and self-logit."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from statistics import fmean
from typing import Any

from torch import Tensor

from locater_lab.papers.dong2021.planted import TOKENS

Table = Mapping[str, Tensor]  # a column per number, a row per head
Plane = list[list[float | None]]  # rows by M, columns by sqrt F; None where there is no such head
Word = tuple[float, float, str]  # where it stands in a diagram

NONE = (0.6, 26.0, "no such head")
SHARP = [(15.0, 2.0, "entropy"), (15.0, 1.5, "collapse")]
WORDS: dict[str, list[Word]] = {
    "equal norm": [(0.42, 0.9, "rank collapse"), (2.9, 8.0, "neither"), *SHARP, NONE, (0.5, 2.2, "Λ = 0.1")],
    "raw walk": [(0.8, 0.9, "rank collapse"), (10.0, 4.0, "neither"), NONE],
    "independent": [(0.42, 0.9, "rank collapse"), *SHARP, NONE],
    "equal norm, causal": [(0.9, 2.6, "neither"), *SHARP, NONE],
    "raw walk, causal": [(2.0, 3.4, "neither"), NONE],
    "independent, causal": [(0.36, 0.8, "rank collapse"), *SHARP, NONE],
}
MEANT: dict[str, Callable[[float], bool]] = {  # the sign of `collapse`
    "rank collapse": lambda value: value < 0,
    "neither": lambda value: value == 0,
    "entropy": lambda value: value > 0,
    "collapse": lambda value: value > 0,
}
TITLES = {"equal norm": "walk, tokens of equal norm", "raw walk": "raw walk", "independent": "independent tokens"}


def planes(
    grids: Mapping[tuple[str, int], Mapping[bool, Table]], seeds: range, means: Sequence[float], sizes: Sequence[float]
) -> dict[str, dict[str, Plane]]:
    """Residual kept, entropy and Λ for two values of S/F, mean over seeds, by tokens and mask."""
    by_name: dict[str, dict[str, Plane]] = {}
    for kind, causal, ratio in product(TOKENS, (False, True), (1.0, 0.0)):
        name = f"{kind}{', causal' if causal else ''}, S/F = {ratio:g}"
        by_name[name] = {
            column: _mean([_plane(grids[kind, seed][causal], column, ratio, means, sizes) for seed in seeds])
            for column in ("kept", "entropy", "Λ")
        }
    return by_name


def _plane(table: Table, column: str, ratio: float, means: Sequence[float], sizes: Sequence[float]) -> Plane:
    heads = zip(table["M"].tolist(), table["size"].tolist(), table["ratio"].tolist(), strict=True)
    row_of = {head: row for row, head in enumerate(heads)}
    values = table[column]
    return [
        [float(values[row_of[M, size, ratio]]) if (M, size, ratio) in row_of else None for size in sizes] for M in means
    ]


def _mean(by_seed: Sequence[Plane]) -> Plane:
    return [
        [None if None in cell else fmean(x for x in cell if x is not None) for cell in zip(*rows, strict=True)]
        for rows in zip(*by_seed, strict=True)
    ]


def phase_table(
    by_name: Mapping[str, Mapping[str, Plane]], means: Sequence[float], sizes: Sequence[float]
) -> dict[str, Any]:
    """Planes, and for each diagram its title, the colour of its cells and the words that fit them."""
    diagrams = []
    for causal, kind in product((False, True), ("equal norm", "raw walk", "independent")):
        name = f"{kind}{', causal' if causal else ''}"
        whole = by_name[f"{name}, S/F = 1"]
        values = [
            [collapse(k, e) for k, e in zip(*rows, strict=True)]
            for rows in zip(whole["kept"], whole["entropy"], strict=True)
        ]
        title = f"{TITLES[kind]}, {'causal mask' if causal else 'no mask'}"
        words = fitting(WORDS[name], values, means, sizes)
        diagrams.append({"name": name, "title": title, "values": values, "words": words})
    return {"M": list(means), "size": list(sizes), "planes": dict(by_name), "diagrams": diagrams}


def collapse(kept: float | None, entropy: float | None) -> float | None:
    """0 where neither happens; towards -1 as the residual goes, towards 1 as the entropy does.

    >>> collapse(0.25, 1.0), collapse(1.0, 0.0), collapse(0.6, 0.6), collapse(None, None)
    (-0.5, 1.0, 0.0, None)
    """
    if kept is None or entropy is None:
        return None
    rank, sharp = max(0.0, 1 - 2 * kept), max(0.0, 1 - 2 * entropy)
    return -rank if rank > sharp else sharp


def fitting(words: Sequence[Word], values: Plane, means: Sequence[float], sizes: Sequence[float]) -> list[Word]:
    """Those words of a diagram whose cell is as they say."""

    def nearest(grid: Sequence[float], at: float) -> int:
        return min(range(len(grid)), key=lambda n: abs(math.log(grid[n] / at)))

    def fits(x: float, y: float, text: str) -> bool:
        value = values[nearest(means, y)][nearest(sizes, x)]
        if text == NONE[2]:
            return value is None
        return text.startswith("Λ") or (value is not None and MEANT[text](value))

    return [word for word in words if fits(*word)]
