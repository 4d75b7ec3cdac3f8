"""What was done to the heads of the base: rotary orders, heads in another order, copies, scales, queries as keys.

Rows of maps are known by their sketches.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import torch
from torch import Tensor

from locater.commands.doctor.heads import LayerHeads
from locater.commands.doctor.pairs import STRUCTURE, TRAINED, Beside, HeadPair
from locater.commands.doctor.places import heads_words
from locater.findings.causes import Severity, finding
from locater.layers.layout import AttentionLayout

ALIKE = 0.99  # cosine of two rows that are the same but for scale, rounding and little training
ROW_TRAINED = 0.8  # of a row with itself after training, where no other row is alike
RELATED = 0.1  # of a head that is another one times a factor: what else is in it
SCALED = 0.02  # a factor nearer to 1 than this is none
Order = Literal["interleaved", "halves"]


@dataclass
class MovedRows:
    """One map of one layer. Rows are (head, row) in the base; -1 where no row of the base is alike."""

    part: str
    heads: int
    rotary: Order | None = None  # the order that its rows are in now
    source: list[int] = field(default_factory=list)  # head of the base that each head is; -1: none
    factors: list[float] = field(default_factory=list)  # of each head, 1 where it is not scaled
    foreign: float = 0.0  # share of rows that are another map's
    lost: float = 0.0  # share of rows that are no row of the base
    inside: bool = False  # rows are in another order inside their heads, not a rotary one

    @property
    def permuted(self) -> bool:
        """Whether heads changed places, each still there once."""
        return sorted(self.source) == list(range(self.heads)) and self.source != list(range(self.heads))

    @property
    def copies(self) -> list[tuple[int, int]]:
        """(head, the head that it is a copy of) where some head of the base is there twice."""
        if self.permuted:
            return []
        return [(head, source) for head, source in enumerate(self.source) if source not in (-1, head)]

    @property
    def told(self) -> bool:
        """Whether what is known of the rows accounts for nearly all of them."""
        return self.lost < 0.1

    def scaled(self) -> list[tuple[int, float]]:
        return [(head, c) for head, c in enumerate(self.factors) if abs(c - 1) > SCALED]


def rotary_orders(size: int, channels: int) -> dict[Order, Tensor]:
    """For each order: the row of the other order that stands at each place.

    >>> rotary_orders(4, 4)["interleaved"].tolist()
    [0, 2, 1, 3]
    """
    rest = torch.arange(channels, size)
    turning = torch.arange(channels)
    return {
        "interleaved": torch.cat([turning.view(2, -1).mT.flatten(), rest]),
        "halves": torch.cat([turning.view(-1, 2).mT.flatten(), rest]),
    }


def moved_rows(own: LayerHeads, base: LayerHeads, part: str) -> MovedRows:
    """How the rows of one map are those of the base."""
    x, b = own.maps()[part], base.maps()[part]
    heads, size = x.shape[:2]
    result = MovedRows(part, heads)
    near = _alike(x.flatten(0, 1), b.flatten(0, 1))
    rows = torch.arange(heads * size)
    place = torch.where(near[0] >= ALIKE, near[1], torch.full_like(rows, -1))
    zero = x.flatten(0, 1).norm(dim=1) == 0
    place[zero] = rows[zero]
    source = torch.div(place, size, rounding_mode="floor").masked_fill(place < 0, -1).view(heads, size)
    inside = (place % size).masked_fill(place < 0, -1).view(heads, size)
    result.source = [
        int(head.mode().values) if float((head == head.mode().values).float().mean()) > 0.8 else -1 for head in source
    ]
    straight = (inside == torch.arange(size)) | (inside < 0)
    if float(straight.float().mean()) < 0.9:
        result.inside = True
        if own.channels and part in ("query", "key"):
            for name, order in rotary_orders(size, own.channels).items():
                moving = (order != torch.arange(size)) & (inside >= 0)
                if float((inside == order)[moving].float().mean()) > 0.95:
                    result.rotary, result.inside = name, False
    lost = place < 0
    if bool(lost.any()):
        others = [
            y.flatten(0, 1)
            for name, y in base.maps().items()
            if name not in (part, "out") and y.shape[-1] == x.shape[-1]
        ]
        if part != "out" and others:
            foreign = _alike(x.flatten(0, 1)[lost], torch.cat(others), of_own=False)[0] >= ALIKE
            result.foreign = float(foreign.sum()) / len(lost)
            result.lost = float((~foreign).sum()) / len(lost)
        else:
            result.lost = float(lost.float().mean())
    result.factors = _factors(x, b, result)
    return result


def _alike(x: Tensor, b: Tensor, of_own: bool = True) -> tuple[Tensor, Tensor]:
    """Cosine with the row of `b` that is most alike, and which it is; a row's own place comes first."""
    a, c = (t / t.norm(dim=1, keepdim=True).clamp_min(1e-30) for t in (x, b))
    cosine, place = torch.empty(len(a)), torch.empty(len(a), dtype=torch.long)
    for start in range(0, len(a), 2048):
        near = a[start : start + 2048] @ c.mT
        cosine[start : start + 2048], place[start : start + 2048] = near.max(1)
    if of_own and len(a) == len(c):
        own = (a * c).sum(1)
        stays = (own >= ALIKE) | ((own >= ROW_TRAINED) & (cosine < ALIKE))
        cosine[stays], place[stays] = own[stays].clamp_min(ALIKE), torch.arange(len(a))[stays]
    return cosine, place


def _factors(x: Tensor, b: Tensor, moved: MovedRows) -> list[float]:
    """The factor of each head on the head of the base that it is."""
    factors = []
    for head, source in enumerate(moved.source):
        if source < 0:
            factors.append(1.0)
            continue
        ours, theirs = x[head], b[source]
        if moved.inside:  # rows in an order that is not known
            factors.append(1.0)
            continue
        if moved.rotary:  # rows moved: sizes tell
            factors.append(float(ours.norm() / theirs.norm().clamp_min(1e-30)))
            continue
        factor = float((ours * theirs).sum() / theirs.square().sum().clamp_min(1e-30))
        beside = float((ours - factor * theirs).norm() / ours.norm().clamp_min(1e-30))
        related = beside < min(abs(factor - 1) / 3, RELATED) or not float(ours.norm())
        factors.append(factor if related else 1.0)
    return factors


# ---- findings ----


Scaled = dict[str, dict[tuple[int, int], float]]  # by map, then by head


def findings_of_heads(beside: Beside) -> None:
    """Reordered, scaled and copied heads; a layer that computes the same is equivalent."""
    same: list[int] = []
    rows: dict[int, dict[str, MovedRows]] = {}
    gains: dict[str, dict[int, float]] = {}
    for heads in beside.paired.heads:
        names = _names_of(beside, heads.number)
        changed = [beside.pairs[x] for x in names if x in beside.pairs and beside.pairs[x].changed]
        changed = [x for x in changed if not x.explained and x.difference > 2 * STRUCTURE]
        factors = _gain_factors(beside, heads.number)
        if not (changed or factors) or not heads.comparable:
            continue
        if heads.equivalent:
            same.append(heads.number)
            beside.explain([*names, *_vectors_of(beside, heads.number)], "equivalent")
            continue
        for part, factor in factors.items():
            gains.setdefault(part, {})[heads.number] = factor
        if changed:
            rows[heads.number] = {part: moved_rows(heads.own, heads.base, part) for part in heads.own.maps()}
    if same:
        orders = [x.order for x in beside.paired.heads if x.number in same]
        words = "computes the same: " + (
            "heads are in another order, with their outputs"
            if any(order != sorted(order) for order in orders)
            else "rows or scales of its maps changed together"
        )
        beside.found.append(finding("equivalent", beside.layers_words(same), words, layers=same))
    _fused(beside, rows)
    _rotary(beside, rows)
    _reordered(beside, rows)
    _scaled(beside, rows)
    for part, layers in gains.items():
        _scaled_layers(beside, layers, part, f"the gains behind its {part} map")
    _foreign_heads(beside, rows)


def _gain_factors(beside: Beside, number: int) -> dict[str, float]:
    """By map: the factor on the gains of a norm of queries or keys, where these are no more than scaled."""
    own, base = (
        next(layer for heads, layer in zip(x.heads, x.layers, strict=True) if heads.number == number)
        for x in (beside.paired.own, beside.paired.base)
    )
    factors: dict[str, float] = {}
    for part in ("query", "key"):
        a, b = (getattr(getattr(layer, f"{part}_norm"), "gain", None) for layer in (own, base))
        if a is None or b is None or a.shape != b.shape:
            continue
        x, y = a.detach().double().cpu(), b.detach().double().cpu()
        factor = float((x * y).sum() / y.square().sum().clamp_min(1e-30))
        if abs(factor - 1) > 2 * STRUCTURE and float((x - factor * y).norm()) < STRUCTURE * float(x.norm()):
            factors[part] = factor
            item, weights = _item(beside, number), beside.paired.own.model.weights
            norm = getattr(item, f"{part}_norm", None)
            if isinstance(item, AttentionLayout) and norm is not None:
                beside.explain([name for name, _ in norm.vectors(weights)], "scaled-queries")
    return factors


def _item(beside: Beside, number: int) -> Any:
    reading = beside.paired.own.model.reading
    assert reading is not None
    return reading.found[number]


def _names_of(beside: Beside, number: int, part: str = "") -> list[str]:
    """Tensors of the maps of a layer, or of one of them; with their biases."""
    item, weights = _item(beside, number), beside.paired.own.model.weights
    if not isinstance(item, AttentionLayout):
        return [name for name in beside.pairs if name.startswith(f"{item.name}.") or not item.name]
    names: dict[str, None] = {}
    for field_ in (part,) if part else ("query", "key", "value", "out"):
        layout = getattr(item, field_)
        if layout is not None:
            names |= {name: None for name, _ in layout.maps(weights)}
            names |= {f"{name.removesuffix('.weight')}.bias": None for name in [*names]}
    return [name for name in names if name in beside.pairs]


def _vectors_of(beside: Beside, number: int) -> list[str]:
    item, weights = _item(beside, number), beside.paired.own.model.weights
    return [name for name, _ in item.vectors(weights)] if isinstance(item, AttentionLayout) else []


def _told(beside: Beside, number: int, parts: Iterable[str], cause: str) -> None:
    """Explain the tensors of some maps of a layer."""
    for part in parts:
        beside.explain(_names_of(beside, number, part), cause)


def _fused(beside: Beside, rows: dict[int, dict[str, MovedRows]]) -> None:
    layers = {n: max(x.foreign for x in parts.values()) for n, parts in rows.items()}
    layers = {n: share for n, share in layers.items() if share > 0.25}
    if not layers:
        return
    for number in layers:
        _told(beside, number, rows.pop(number), "fused-order")
    share = max(layers.values())
    words = f"has rows of one of queries, keys and values in the place of another ({share:.0%} of the rows of a map)"
    found = finding("fused-order", beside.layers_words(layers), words, layers=sorted(layers), share=round(share, 3))
    beside.found.append(found)


def _rotary(beside: Beside, rows: dict[int, dict[str, MovedRows]]) -> None:
    by_parts: dict[tuple[str, ...], dict[str, list[int]]] = {}
    for number, parts in rows.items():
        turned = tuple(name for name, x in parts.items() if x.rotary)
        if turned:
            order = str(next(x.rotary for x in parts.values() if x.rotary))
            by_parts.setdefault(turned, {}).setdefault(order, []).append(number)
            _told(beside, number, turned, "rotary-order")
    for turned, orders in by_parts.items():
        for order, layers in orders.items():
            which = "queries and keys" if len(turned) > 1 else {"query": "queries", "key": "keys"}[turned[0]]
            other = "halves" if order == "interleaved" else "interleaved"
            words = f"rows of {which} are in another rotary order than in BASE ({order}, not {other})"
            found = finding(
                "rotary-order", beside.layers_words(layers), words, layers=layers, order=order, maps=list(turned)
            )
            beside.found.append(found)


def _reordered(beside: Beside, rows: dict[int, dict[str, MovedRows]]) -> None:
    for number, parts in rows.items():
        permuted = {name: x for name, x in parts.items() if x.permuted}
        for name, x in permuted.items():
            at = [head for head, source in enumerate(x.source) if source != head]
            cause = "swapped-heads" if len(at) == 2 else "permuted-heads"
            _told(beside, number, [name], cause)
            others = sorted({*parts} - {*permuted})
            words = f"{'exchanged places' if len(at) == 2 else 'are in another order'} in the {name} map"
            words += f", not in {' and '.join(others)}" if others else ", in another way than in other maps"
            places = [(number, head) for head in at]
            evidence: dict[str, Any] = {"heads": places, "map": name, "source": [x.source[head] for head in at]}
            beside.found.append(finding(cause, heads_words(places), words, **evidence))
        copies: dict[int, tuple[int, list[str]]] = {}
        for name, x in parts.items():
            for head, source in x.copies:
                copies.setdefault(head, (source, []))[1].append(name)
                _told(beside, number, [name], "copied-head")
        for head, (source, names) in copies.items():
            words = f"is a copy of {number}.{source} ({', '.join(names)})"
            found = finding(
                "copied-head", heads_words([(number, head)]), words, heads=[(number, head)], source=[number, source]
            )
            beside.found.append(found)


def _scaled(beside: Beside, rows: dict[int, dict[str, MovedRows]]) -> None:
    """Scales of single heads, and scales of all queries or keys."""
    single: Scaled = {}
    whole: dict[str, dict[int, float]] = {}
    for number, parts in rows.items():
        for name, x in parts.items():
            scaled = x.scaled()
            if not scaled:
                continue
            low, high = min(c for _, c in scaled), max(c for _, c in scaled)
            if (
                len(scaled) == x.heads
                and (x.heads > 1 or _others_scaled(rows, name))
                and abs(high - low) < STRUCTURE * abs(high)
            ):
                whole.setdefault(name, {})[number] = median(c for _, c in scaled)
                _told(beside, number, [name], "scaled-queries")
            else:
                dead = [head for head, c in scaled if abs(c) < 1e-6]
                alive = {(number, head): c for head, c in scaled if head not in dead}
                if alive:
                    single.setdefault(name, {}).update(alive)
                if x.told:
                    _told(beside, number, [name], "scaled-head")
    for name, layers in whole.items():
        _scaled_layers(beside, layers, name, f"its {name} maps")
    for name, factors in single.items():
        worst = max(factors.values(), key=lambda c: abs(math.log(abs(c))) if c else math.inf)
        words = f"has its {name} map times {worst:.4g}" + (" at most" if len(factors) > 1 else "")
        evidence: dict[str, Any] = {"heads": sorted(factors), "factor": round(worst, 5), "map": name}
        beside.found.append(finding("scaled-head", heads_words([*factors]), words, **evidence))


def _scaled_layers(beside: Beside, layers: dict[int, float], name: str, what: str) -> None:
    """A factor on all heads of some layers."""
    factor = median(layers.values())
    size = beside.paired.own.layers[0].head_dim if beside.paired.own.layers else 0
    root = size**0.5
    is_root = root and min(abs(factor / root - 1), abs(factor * root - 1)) < 0.03
    words = f"has {what} times {factor:.4g}{' (the square root of the head size)' if is_root else ''}"
    cause = "scaled-queries" if name in ("query", "key") else "unknown"
    evidence: dict[str, Any] = {"layers": sorted(layers), "factor": round(factor, 5), "map": name}
    severity: Severity | None = None if cause == "scaled-queries" else "fault"
    beside.found.append(finding(cause, beside.layers_words(layers), words, severity=severity, **evidence))


def _others_scaled(rows: dict[int, dict[str, MovedRows]], name: str) -> bool:
    """Whether other layers are scaled too, where a map has a single head."""
    return sum(bool(parts[name].scaled()) for parts in rows.values() if name in parts) > 1


def _foreign_heads(beside: Beside, rows: dict[int, dict[str, MovedRows]]) -> None:
    """Heads that are those of another layer of the base."""
    takes: dict[tuple[str, int, int], tuple[int, int]] = {}
    for number, parts in rows.items():
        heads = next(x for x in beside.paired.heads if x.number == number)
        for name, x in parts.items():
            for head, source in enumerate(x.source):
                if source == -1 and (place := _other_layer(beside, heads, name, head)) is not None:
                    takes[name, number, head] = place
    done: set[tuple[str, int, int]] = set()
    for (name, number, head), (layer, other) in takes.items():
        if (name, number, head) in done:
            continue
        _told(beside, number, [name], "moved-head")
        if takes.get((name, layer, other)) == (number, head):
            done |= {(name, number, head), (name, layer, other)}
            _told(beside, layer, [name], "moved-head")
            places = [(number, head), (layer, other)]
            words = f"exchanged places in the {name} map"
            beside.found.append(finding("swapped-heads", heads_words(places), words, heads=places, map=name))
        else:
            words = f"is a copy of {layer}.{other} of BASE ({name})"
            found = finding(
                "copied-head", heads_words([(number, head)]), words, heads=[(number, head)], source=[layer, other]
            )
            beside.found.append(found)


def _other_layer(beside: Beside, heads: HeadPair, part: str, head: int) -> tuple[int, int] | None:
    own = heads.own.maps()[part][head]
    size = float(own.norm())
    before = heads.base.maps()[part][head]
    if float((own * before).sum()) > TRAINED * size * float(before.norm()):
        return None  # the same head, trained further
    for other in beside.paired.base.heads:
        sketch = other.maps().get(part)
        if sketch is None or sketch.shape[1:] != own.shape or not size:
            continue
        apart = (sketch - own).flatten(1).norm(dim=1) / size
        if float(apart.min()) < 2 * STRUCTURE:
            return other.number, int(apart.argmin())
    return None
