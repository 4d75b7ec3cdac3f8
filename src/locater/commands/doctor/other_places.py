"""A map without relation to the base's may have its numbers in other places: it is read again, and orders are tried."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from locater.commands.doctor.pairs import STRUCTURE, Pair, Paired
from locater.commands.doctor.tensors import Reader, as_matrix, blocks, place_of, probes
from locater.sources.weights import Weights

SAMPLED = 512  # rows whose place is looked for
WHOLE = 2**26  # numbers of a map that is read as a whole
NEAR = 64  # places that a map may have been read too early or too late


def same_numbers(pair: Pair) -> bool:
    """Whether a tensor seems to have the base's numbers, in whatever order."""
    a, b = pair.facts, pair.base_facts
    if a is None or b is None:
        return False
    extremes = math.isclose(a.least, b.least, rel_tol=1e-3) and math.isclose(a.most, b.most, rel_tol=1e-3)
    mean = abs(a.mean - b.mean) < 1e-3 * b.rms
    return extremes and mean and math.isclose(a.rms, b.rms, rel_tol=1e-3)


def other_order(paired: Paired, pair: Pair) -> tuple[str, str]:
    """(cause, words) of the order in which a map has the base's numbers; empty where it is none that is known."""
    rows = moved_rows(paired, pair)
    if rows > 0.5:
        return "unknown", f"has rows of BASE in other places ({rows:.0%} of those that were looked for)"
    if pair.numbers <= WHOLE and pair.facts is not None:
        own, base = (
            x.read(n).detach().cpu()
            for x, n in ((paired.own.model.weights, pair.name), (paired.base.model.weights, pair.base_name))
        )
        if own.shape == base.shape and own.ndim == 2:
            return _of_whole(own.float(), base.float())
    return "", ""


def _of_whole(own: Tensor, base: Tensor) -> tuple[str, str]:
    rows, columns = own.shape
    flat = own.flatten()
    for turned in (base.mT.reshape(rows, columns), base.reshape(columns, rows).mT):
        if _near(own, turned):
            return "transposed", "has the transposed map of BASE, brought into shape without being turned back"
    for k in range(1, NEAR + 1):
        for shift in (k, -k):
            if _near(flat[NEAR : 4096 + NEAR], base.flatten().roll(shift)[NEAR : 4096 + NEAR]):
                return "unknown", f"has its numbers {k} place{'s' * (k > 1)} too {'late' if shift > 0 else 'early'}"
    a, b = (x.mT @ probes(rows) for x in (own, base))
    share = _elsewhere(a, b)
    if share > 0.5:
        return "unknown", f"has columns of BASE in other places ({share:.0%} of them)"
    return "", ""


def _near(own: Tensor, other: Tensor) -> bool:
    return float((own - other).norm()) < STRUCTURE * float(own.norm())


def moved_rows(paired: Paired, pair: Pair) -> float:
    """Share of rows that are another row of the base."""
    own, base = paired.own.model.weights, paired.base.model.weights
    if len(own.shape(pair.name)) < 2 or own.shape(pair.name)[1:] != base.shape(pair.base_name)[1:]:
        return 0.0
    return _elsewhere(map_sketch(own, pair.name), map_sketch(base, pair.base_name))


def rows_of_others(paired: Paired, pair: Pair) -> str:
    """The other map of the same layer of the base whose rows stand in this one; empty where there is none."""
    place, shape = place_of(pair.name), paired.own.model.weights.shape(pair.name)
    own = map_sketch(paired.own.model.weights, pair.name)
    for other in paired.pairs.values():
        if other is pair or not other.is_map or place_of(other.name)[:2] != place[:2]:
            continue
        if paired.base.model.weights.shape(other.base_name)[1:] == shape[1:]:
            found = _elsewhere(own, map_sketch(paired.base.model.weights, other.base_name), of_own=False)
            if found > 0.25:
                return other.name
    return ""


def map_sketch(weights: Weights, name: str, axis: int = 0, factors: Tensor | None = None) -> Tensor:
    """W R for the rows of a map, or R^T W, turned, for its columns, read in blocks; `factors` are on the columns."""
    shape = weights.shape(name)
    reader, width = Reader(weights, name), math.prod(shape[1:])
    parts, total = [], torch.zeros(width, probes(shape[0]).shape[1])
    for start, stop in blocks(weights, name):
        part = as_matrix(reader(start, stop)).float()
        part = part if factors is None else part * factors.float()
        if axis == 0:
            parts.append(part @ probes(width))
        else:
            total += part.mT @ probes(shape[0])[start:stop]
    return total if axis else torch.cat(parts)


def _elsewhere(own: Tensor, base: Tensor, of_own: bool = True) -> float:
    """Share of the rows of `own` that changed (`of_own`), or of all, that are another row of `base`."""
    both = min(len(own), len(base))
    at = torch.arange(len(own))
    if of_own:
        sizes = own[:both].norm(dim=1)
        at = ((own[:both] - base[:both]).norm(dim=1) > 2 * STRUCTURE * sizes).nonzero().flatten()
    at = at[:: max(1, len(at) // SAMPLED)]
    some = own[at]
    some, at = some[some.norm(dim=1) > 0], at[some.norm(dim=1) > 0]
    if not len(some):
        return 0.0
    best, place = torch.full((len(some),), math.inf), torch.zeros(len(some), dtype=torch.long)
    for start in range(0, len(base), 16_384):
        near = torch.cdist(some, base[start : start + 16_384]).min(1)
        nearer = near.values < best
        best[nearer], place[nearer] = near.values[nearer], near.indices[nearer] + start
    found = best < STRUCTURE * some.norm(dim=1)
    return float((found & (place != at) if of_own else found).float().mean())
