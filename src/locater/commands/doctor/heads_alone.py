"""Heads beside the heads around them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from itertools import pairwise
from statistics import median
from typing import Any

import torch
from torch import Tensor

from locater.commands.doctor.heads import LayerHeads
from locater.commands.doctor.layers_alone import NEAR, equal_sketches, times_words
from locater.commands.doctor.places import heads_words, layers_words
from locater.commands.doctor.reading import Examined
from locater.commands.doctor.tensors import place_of
from locater.commands.doctor.values_alone import of_attention
from locater.findings.causes import Finding, finding

HEAD_OFF = 6.0  # times the median of the heads around it: a map of a head
DEAD = 1e-4  # of the median of the heads around it
LOGITS_OFF = 12.0  # median spread of all heads; trained models have 0.5 to 2
ORDER_FITS, ORDER_BETTER = 0.3, 4.0


def dead_or_scaled_heads(seen: Examined, broken: set[str]) -> Iterator[Finding]:
    """Heads that are dead, or off the heads around them; of layers whose numbers are all weights."""
    unknown = {place_of(name).layer for name in broken if of_attention(name) and not seen.facts[name].zero}
    dead: list[tuple[int, int, str]] = []
    scaled: list[tuple[int, int, str, float]] = []
    for heads in seen.heads:
        if seen.heads_layer(heads.number) in unknown:
            continue
        near = [other for other in seen.heads if abs(other.number - heads.number) <= NEAR]
        for part, sketch in heads.maps().items():
            norms = sketch.square().sum((1, 2)).sqrt()
            if not bool((norms > 0).any()):
                continue  # said of the layer
            around = torch.cat([x.maps()[part].square().sum((1, 2)).sqrt() for x in near if part in x.maps()])
            usual = float(around[around > 0].median())  # most of them may be zero: the rest of a file is lost
            own = float(norms.median())
            for head, size in enumerate(norms.tolist()):
                for number in _query_heads(heads, part, head):
                    if size <= DEAD * usual:
                        dead.append((heads.number, number, part))
                    elif part not in heads.normed and (len(norms) > 1 or len(near) > 2):
                        ratio = min(
                            (size / usual, size / (own or usual)), key=lambda x: abs(math.log(x)) if x > 0 else math.inf
                        )
                        if not 1 / HEAD_OFF < ratio < HEAD_OFF and not _whole_layer(norms, head):
                            scaled.append((heads.number, number, part, ratio))
    if dead:
        places = sorted({(layer, head) for layer, head, _ in dead})
        parts = sorted({part for _, _, part in dead})
        yield finding(
            "dead-head",
            heads_words(places),
            f"does nothing: {' and '.join(parts)} {'is' if len(parts) == 1 else 'are'} zero",
            heads=places,
            maps=parts,
        )
    for part, ratio_of in _by_part(scaled).items():
        places = sorted(ratio_of)
        worst = max(ratio_of.values(), key=lambda x: abs(math.log(x)))
        yield finding(
            "scaled-head",
            heads_words(places),
            f"has a {part} map {times_words(worst)} those around it",
            heads=places,
            ratio=round(worst, 4),
            map=part,
        )


def logits(seen: Examined) -> Iterator[Finding]:
    """Logits of all heads that are too large by a common factor."""
    known = [x for heads in seen.heads for x in heads.spread.tolist() if math.isfinite(x)]
    if len(known) >= 8 and median(known) > LOGITS_OFF:
        words = f"has logits with a spread of {median(known):.3g} (median of heads; trained models have 0.5 to 2): "
        words += "the scale of queries was lost, or gains are off"
        yield finding("unknown", "every layer", words, severity="fault", spread=round(median(known), 3))


def _query_heads(heads: LayerHeads, part: str, head: int) -> range:
    """The query heads that use a head of a map."""
    if part in ("query", "out"):
        return range(head, head + 1)
    group = heads.heads // heads.kv_heads
    return range(head * group, (head + 1) * group)


def _whole_layer(norms: Tensor, head: int) -> bool:
    """Whether most heads of the layer are off as this one is: then it is said of the layer's tensor."""
    others = torch.cat([norms[:head], norms[head + 1 :]])
    return len(others) > 0 and float((others / norms[head]).log().abs().median()) < math.log(2)


def _by_part(scaled: Sequence[tuple[int, int, str, float]]) -> dict[str, dict[tuple[int, int], float]]:
    parts: dict[str, dict[tuple[int, int], float]] = {}
    for layer, head, part, ratio in scaled:
        parts.setdefault(part, {})[layer, head] = ratio
    return parts


def copied_heads(seen: Examined) -> Iterator[Finding]:
    """Heads whose queries, values or outputs equal those of another head."""
    pairs: dict[tuple[tuple[int, int], tuple[int, int]], list[str]] = {}
    for part in ("query", "value", "out"):
        places = [
            (heads.number, head)
            for heads in seen.heads
            if part in heads.maps()
            for head in range(len(heads.maps()[part]))
        ]
        by_shape: dict[tuple[int, ...], list[int]] = {}
        sketches = [
            heads.maps()[part][head]
            for heads in seen.heads
            if part in heads.maps()
            for head in range(len(heads.maps()[part]))
        ]
        for at, sketch in enumerate(sketches):
            by_shape.setdefault(tuple(sketch.shape), []).append(at)
        for members in by_shape.values():
            flat = torch.stack([sketches[at].flatten() for at in members])
            order = flat.norm(dim=1).argsort().tolist()
            for one, two in pairwise(order):
                if equal_sketches(flat[one], flat[two]):
                    a, b = sorted((places[members[one]], places[members[two]]))
                    pairs.setdefault((a, b), []).append(part)
    # layers that are copies of each other are said as such, and key heads that were repeated on purpose are not
    layers: dict[tuple[int, int], int] = {}
    for (a, b), parts in pairs.items():
        if "query" in parts or "out" in parts:
            layers[a[0], b[0]] = layers.get((a[0], b[0]), 0) + 1
    for (a, b), parts in pairs.items():
        whole = a[0] != b[0] and layers.get((a[0], b[0]), 0) > 1
        of_values = parts == ["value"] and sum(x[0] == a[0] and p == ["value"] for (x, _), p in pairs.items()) > 1
        if not whole and not of_values:
            words = f"is a copy of {a[0]}.{a[1]} ({', '.join(parts)})"
            yield finding("copied-head", heads_words([b]), words, heads=[b], source=list(a), maps=parts)


def gains(seen: Examined) -> Iterator[Finding]:
    """Gains that are mostly negative: one was subtracted from them, or is missing."""
    negative = []
    for layer in seen.layers:
        gain = layer.norm.gain
        if gain is not None and gain.numel() > 1 and float((gain.float() < 0).float().mean()) > 0.5:
            negative.append(layer.index)
    if seen.layers and len(negative) > len(seen.layers) / 2:
        words = "has gains in front of attention that are mostly negative, as if one had been subtracted"
        yield finding("shifted-gain", layers_words("", negative), words, layers=negative)


def rotary_order(seen: Examined) -> Iterator[Finding]:
    """Rows of queries and keys whose sizes follow the frequencies of the other rotary order, or of larger heads: their
    sizes do not tell these two apart.
    """
    for part in ("query", "key"):
        profiles = [x for heads in seen.heads if (x := _profile(heads, part)) is not None]
        if len({len(x) for x in profiles}) != 1 or len(profiles) < 2:
            return
        mean = torch.stack(profiles).mean(0)
        halves, neighbours = _order_fits(mean)
        if neighbours > ORDER_FITS or neighbours * ORDER_BETTER > halves:
            return
    words = "has rows of queries and keys as in the interleaved rotary order, or half as many heads as config.json says"
    evidence: dict[str, Any] = {"unexplained_as_halves": round(halves, 3), "as_neighbours": round(neighbours, 3)}
    yield finding("unknown", "every layer", words, severity="fault", **evidence)


def _profile(heads: LayerHeads, part: str) -> Tensor | None:
    """Mean over heads of the logarithm of row norms, less its mean, of the rotated channels."""
    rows = heads.query_rows if part == "query" else heads.key_rows
    if not heads.rotary or heads.channels < 8:
        return None
    logs = rows[:, : heads.channels].double()
    if not bool((logs > 0).all()):
        return None
    logs = logs.log()
    return (logs - logs.mean(1, keepdim=True)).mean(0)


def _order_fits(profile: Tensor) -> tuple[float, float]:
    """Unexplained shares of a profile, with channels (i, i + h/2), and with (2i, 2i + 1), turning together."""
    half, at = len(profile) // 2, torch.arange(len(profile)).double()
    shares = []
    for place in (at % half, torch.div(at, 2, rounding_mode="floor")):
        x = torch.stack([(place / half) ** power for power in range(4)], 1)
        left = profile - x @ torch.linalg.lstsq(x, profile).solution
        shares.append(float(left.square().sum() / profile.square().sum().clamp_min(1e-30)))
    return shares[0], shares[1]
