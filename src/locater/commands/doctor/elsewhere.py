"""Tensors that are those of another place of the base: layers that moved, names that were exchanged, means of layers.

Equal numbers are known by sketches, so nothing here has a threshold but rounding.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from locater.commands.doctor.pairs import STRUCTURE, Beside, Pair, by_place
from locater.commands.doctor.places import layers_words
from locater.commands.doctor.tensors import Facts, place_of
from locater.findings.causes import finding

SAME_VECTOR = 0.005  # of its norm: gains of layers are near each other
SHIFTED = 0.7  # share of layers with one offset that makes it a shift
MIXED = 0.05  # share of another layer from which a mean is one
Signed = dict[tuple[str, str], dict[int, Tensor]]  # sketches by stack and kind, then by layer
Moves = dict[int, tuple[int, list[str]]]  # layer: the layer of the base that it is, and the tensors that say so


def moved_tensors(beside: Beside) -> None:
    bases = _sketches(beside)
    _moved_layers(beside, bases, maps=True)
    _exchanged(beside)
    _moved_layers(beside, bases, maps=False)
    _means(beside, bases)


def sketch_of(facts: Facts | None) -> Tensor | None:
    """64 numbers of a map, or a vector itself."""
    return None if facts is None else facts.signature if facts.is_map else facts.values


def _sketches(beside: Beside) -> Signed:
    table: Signed = {}
    for pair in beside.pairs.values():
        place, sketch = place_of(pair.name), sketch_of(pair.base_facts)
        if place.layer is not None and sketch is not None:
            table.setdefault((place.stack, place.kind), {})[place.layer] = sketch
    return table


def _equal(own: Tensor | None, other: Tensor | None, within: float = STRUCTURE) -> bool:
    if own is None or other is None or own.shape != other.shape:
        return False
    return 0 < float(own.norm()) and float((own - other).norm()) < within * float(own.norm())


# ---- layers ----


def _moved_layers(beside: Beside, bases: Signed, maps: bool) -> None:
    """Layers whose maps (or, where these stayed, vectors) are those of another layer of the base."""
    moved: dict[str, Moves] = {}
    for (stack, layer), pairs in by_place(beside.pairs).items():
        sources: dict[int, list[str]] = {}
        changed = [x for x in pairs if x.changed and not x.explained and x.is_map == maps and not x.other_shape]
        changed = [x for x in changed if maps or (x.numbers > 2 and x.difference > 2 * SAME_VECTOR)]
        for pair in changed:
            for source in _equal_layers(pair, bases.get((stack, place_of(pair.name).kind), {}), maps):
                sources.setdefault(source, []).append(pair.name)
        sources.pop(layer, None)
        if sources:
            source, names = max(sources.items(), key=lambda item: len(item[1]))
            if len(names) >= 2 or len(changed) == 1 or not maps:
                moved.setdefault(stack, {})[layer] = (source, names)
    for stack, layers in moved.items():
        _name_moves(beside, stack, layers, maps)


def _equal_layers(pair: Pair, bases: Mapping[int, Tensor], maps: bool) -> list[int]:
    own = sketch_of(pair.facts)
    if own is None or (not maps and float(own.std()) == 0):
        return []
    return [at for at, other in bases.items() if _equal(own, other, STRUCTURE if maps else SAME_VECTOR)]


def _name_moves(beside: Beside, stack: str, layers: Moves, maps: bool) -> None:
    kinds = {place_of(name).kind for _, names in layers.values() for name in names}
    of = f" ({len(kinds)} kinds of maps)" if maps else f" ({', '.join(sorted(kinds)[:2])})"
    rest = dict(layers)
    offsets = [source - at for at, (source, _) in layers.items()]
    usual = max(sorted(set(offsets)), key=offsets.count)
    kept = sum(source not in layers for source, _ in layers.values())  # layers that are where they were, and copied
    shifted = kept <= 0.5 * len(layers) and offsets.count(usual) >= SHIFTED * len(layers) and abs(usual) <= 4
    if len(layers) > 2 and shifted:
        ats = sorted(at for at, offset in zip(layers, offsets, strict=True) if offset == usual)
        words = f"holds the weights of the layer {abs(usual)} {'after' if usual > 0 else 'before'} it in BASE{of}"
        beside.found.append(finding("shifted-layers", layers_words(stack, ats), words, layers=ats, offset=usual))
        rest = {at: x for at, x in layers.items() if at not in ats}
        if {x[0] for x in rest.values()} <= {*layers}:
            rest = {}  # what was shifted out at one end came in at the other
    swapped = [(a, source) for a, (source, _) in rest.items() if rest.get(source, (None,))[0] == a and a < source]
    ordered = {x[0] for x in rest.values()} == {*rest}
    if ordered and len(swapped) <= 2 and 2 * len(swapped) == len(rest):
        for a, b in swapped:
            words = f"exchanged places{of}"
            beside.found.append(finding("swapped-layers", layers_words(stack, [a, b]), words, layers=[a, b]))
        rest = {}
    if ordered and rest:
        sources = [rest[at][0] for at in sorted(rest)]
        words = f"stand in another order{of}: those of BASE are {', '.join(map(str, sources[:12]))}"
        where = layers_words(stack, sorted(rest))
        beside.found.append(finding("swapped-layers", where, words, layers=sorted(rest), source=sources))
        rest = {}
    copies: dict[int, list[int]] = {}
    for at, (source, _) in rest.items():
        copies.setdefault(source, []).append(at)
    for source, ats in copies.items():
        words = f"{'holds' if len(ats) == 1 else 'hold'} the weights of layer {source} of BASE{of}"
        found = finding("duplicated-layer", layers_words(stack, sorted(ats)), words, layers=sorted(ats), source=source)
        beside.found.append(found)
    for at, (_, names) in layers.items():
        beside.explain(names, "moved")
        if maps:
            others = [n for n in beside.pairs if place_of(n)[:2] == (stack, at) and not beside.pairs[n].is_map]
            beside.explain(others, "moved")  # their vectors went along, or are too few to say


# ---- names ----


def _exchanged(beside: Beside) -> None:
    """Tensors of a layer that have each other's numbers, or those of a third one."""
    moves: dict[tuple[str, str], list[int]] = {}
    maps: dict[str, bool] = {}
    for (_, layer), pairs in by_place(beside.pairs).items():
        table = [(place_of(x.name).kind, sketch_of(x.base_facts), x) for x in pairs]
        for pair in pairs:
            if not pair.changed or pair.explained or pair.other_shape or pair.numbers < 3:
                continue
            own, kind = sketch_of(pair.facts), place_of(pair.name).kind
            within = STRUCTURE if pair.is_map else SAME_VECTOR
            found = [k for k, b, x in table if k != kind and x.is_map == pair.is_map and _equal(own, b, within)]
            if found and pair.difference > 2 * within and (own is None or float(own.std()) > 0):
                moves.setdefault((kind, found[0]), []).append(layer)
                maps[kind] = pair.is_map
    done: set[tuple[str, str]] = set()
    for (kind, source), layers in moves.items():
        if (kind, source) in done:
            continue
        both = (source, kind) in moves
        done |= {(kind, source), (source, kind)}
        names = [n for n in beside.pairs if place_of(n).kind in ({kind, source} if both else {kind})]
        names = [n for n in names if place_of(n).layer in layers]
        beside.explain(names, "exchanged")
        where = layers_words("", sorted({*layers}))
        cause = "fused-order" if both and maps[kind] else "unknown"
        words = f"{kind} has the numbers of {source}"
        if both:
            words = f"has parts in each other's place: {kind} and {source} have each other's numbers"
        evidence: dict[str, Any] = {"layers": sorted({*layers}), "tensors": names}
        beside.found.append(finding(cause, where, words, severity="fault", **evidence))


def _means(beside: Beside, bases: Signed) -> None:
    """Maps that are a part of their own and a part of another layer's."""
    mixed: dict[tuple[str, int, int], list[tuple[str, float, float]]] = {}
    for pair in beside.left():
        place, own = place_of(pair.name), sketch_of(pair.facts)
        if place.layer is None or not pair.is_map or own is None or pair.difference < MIXED:
            continue
        table = bases.get((place.stack, place.kind), {})
        mean = _mean_of_two(own, place.layer, {at: x for at, x in table.items() if x.shape == own.shape})
        if mean is not None:
            other, a, b = mean
            mixed.setdefault((place.stack, place.layer, other), []).append((pair.name, a, b))
    for (stack, layer, other), some in mixed.items():
        names = [name for name, _, _ in some]
        if len(names) < 2:
            continue
        beside.explain(names, "mixed")
        _, a, b = some[0]
        words = (
            f"has maps that are {a:.2g} of its own in BASE and {b:.2g} of those of layer {other} ({len(names)} maps)"
        )
        evidence: dict[str, Any] = {"tensors": names, "layers": [layer], "source": other, "share": round(b, 3)}
        beside.found.append(finding("unknown", layers_words(stack, [layer]), words, severity="fault", **evidence))


def _mean_of_two(own: Tensor, layer: int, table: Mapping[int, Tensor]) -> tuple[int, float, float] | None:
    """(other layer, share of this one, share of the other), where nothing else is in a map."""
    others = [at for at in table if at != layer]
    if layer not in table or not others:
        return None
    x = torch.stack([torch.stack([table[layer], table[at]], 1) for at in others]).double()
    y = own.double()[None, :, None].expand(len(others), -1, -1)
    shares = torch.linalg.pinv(x) @ y
    apart = (x @ shares - y).flatten(1).norm(dim=1) / own.norm().clamp_min(1e-30)
    best = int(apart.argmin())
    a, b = (float(v) for v in shares[best].flatten())
    return (others[best], a, b) if float(apart[best]) < STRUCTURE and abs(b) > MIXED else None
