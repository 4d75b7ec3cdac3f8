"""What stands beside the scores of an explanation: shares of heads and path lengths, patterns of heads, deletion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from locater.data.text import Batch
from locater.errors import LocaterError
from locater.explain import paths
from locater.explain.explanation import Explanation
from locater.explain.targets import Target
from locater.families import attention_layers
from locater.observing import attention_pattern
from locater.verbs.explain_input import TokenStream
from locater.verbs.explain_result import DeletionCurve, HeadShare, LengthShare, Pattern
from locater.verbs.explain_target import choice_of

PATTERN_CELLS = 16_000_000  # numbers in the patterns of heads on one page


@dataclass(frozen=True, eq=False)
class Parts:
    """Beside the scores; `reasons` says in words what each part is or why it is missing."""

    layers: list[dict[str, Any]]
    heads: list[HeadShare]
    lengths: list[LengthShare]
    patterns: list[Pattern]
    deletion: dict[str, DeletionCurve]
    reasons: dict[str, str]


def parts_of(
    model: nn.Module,
    batch: Batch,
    streams: Sequence[TokenStream],
    results: Sequence[Explanation],
    target: Target,
    heads: Sequence[tuple[int, int]] | None,
) -> Parts:
    layers = [
        {"layer": number, "name": layer.name, "kind": layer.kind, "heads": layer.heads}
        for number, layer in enumerate(attention_layers(model))
    ]
    split, why = _split(model, batch, results, target)
    shares, lengths = head_shares(split, target), length_shares(split, target)
    patterns, which = head_patterns(model, batch, streams, layers, shares, heads)
    curves, how = deletion_curves(model, batch, results)
    reasons = {"heads": why, "lengths": why, "patterns": which, "deletion": how}
    return Parts(layers, shares, lengths, patterns, curves, reasons)


def _split(
    model: nn.Module, batch: Batch, results: Sequence[Explanation], target: Target
) -> tuple[Mapping[str, Tensor], str]:
    """The target by head and by path length, and why there is none."""
    if target.value == 0:
        return {}, "The target is 0, so nothing has a share of it."
    for result in results:
        if {"head", "length"} <= result.parts.keys():
            return result.parts, ""
    try:
        return paths(model, batch, target=choice_of(target)).parts, ""
    except LocaterError as error:
        return {}, f"No shares of heads and path lengths: {error}."


def head_shares(split: Mapping[str, Tensor], target: Target) -> list[HeadShare]:
    """The part of the target through each head; by layer, then by head."""
    return [
        HeadShare(layer, head, value, value / abs(target.value))
        for layer, row in enumerate(split["head"].tolist() if split else [])
        for head, value in enumerate(row)
    ]


def length_shares(split: Mapping[str, Tensor], target: Target) -> list[LengthShare]:
    """The part of the target along paths of each length."""
    values = split["length"].tolist() if split else []
    return [LengthShare(length, value, value / abs(target.value)) for length, value in enumerate(values)]


def head_patterns(
    model: nn.Module,
    batch: Batch,
    streams: Sequence[TokenStream],
    layers: Sequence[Mapping[str, Any]],
    shares: Sequence[HeadShare],
    heads: Sequence[tuple[int, int]] | None,
) -> tuple[list[Pattern], str]:
    """Patterns of all heads, or of those with the largest shares where there is no room; and which they are."""
    every = [(entry["layer"], head) for entry in layers for head in range(entry["heads"])]
    _check_heads(heads or (), every)
    ends = {entry["layer"]: streams_of(entry, streams) for entry in layers}
    sizes = {at: len(q.tokens) * len(k.tokens) for at, (q, k) in ends.items()}
    chosen, which = list(heads) if heads else every, "chosen with --heads."
    if heads is None and sum(sizes[layer] for layer, _ in every) > PATTERN_CELLS:
        order = [(row.layer, row.head) for row in sorted(shares, key=lambda row: -abs(row.share))] or every[::-1]
        chosen, left = [], PATTERN_CELLS
        for layer, head in order:
            left -= sizes[layer]
            if left < 0 and chosen:
                break
            chosen.append((layer, head))
        largest = "those with the largest shares" if shares else "the last ones"
        which = f"{largest}, up to {PATTERN_CELLS / 1e6:.0f} million numbers. Choose others with --heads LAYER.HEAD,..."
    try:
        maps = _maps(model, batch, chosen, len(chosen) == len(every))
    except LocaterError as error:
        return [], f"no attention was recorded: {error}"
    patterns = []
    for (layer, head), weights in sorted(maps.items()):
        queries, keys = ends[layer]
        if weights.shape == (len(queries.tokens), len(keys.tokens)):
            patterns.append(Pattern(layer, head, weights, queries.name, keys.name))
    return patterns, which


def _maps(
    model: nn.Module, batch: Batch, chosen: Sequence[tuple[int, int]], every: bool
) -> dict[tuple[int, int], Tensor]:
    """(T, S) of each head; one run of the model, or one for each layer that has some of the heads."""
    if every:
        found = attention_pattern(model, batch)
        return {at: weights[0].cpu() for at, weights in found.items()}
    maps: dict[tuple[int, int], Tensor] = {}
    for layer in sorted({layer for layer, _ in chosen}):
        heads = [head for at, head in chosen if at == layer]
        maps |= {at: weights[0].cpu() for at, weights in attention_pattern(model, batch, [layer], heads).items()}
    return maps


def _check_heads(heads: Sequence[tuple[int, int]], every: Sequence[tuple[int, int]]) -> None:
    for layer, head in heads:
        if (layer, head) not in every:
            last = max(layer for layer, _ in every)
            raise LocaterError(f"head {layer}.{head}: there are layers 0 to {last}, and no such head in them")


def streams_of(entry: Mapping[str, Any], streams: Sequence[TokenStream]) -> tuple[TokenStream, TokenStream]:
    """The streams of a layer's queries and keys."""
    first, last = streams[0], streams[-1]
    if entry["kind"] == "cross":
        return last, first
    second = "decoder" in entry["name"] if last.name == "decoder" else "text" in entry["name"]
    here = last if len(streams) > 1 and second else first
    return here, here


def deletion_curves(model, batch, results):
    return {}, ""
