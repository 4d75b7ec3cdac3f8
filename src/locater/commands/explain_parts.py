"""What stands beside the scores of an explanation: shares of heads and path lengths, patterns of heads, deletion."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from typing import Any

from torch import Tensor, nn

from locater.commands.explain_target import choice_of
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.explain import deletion, paths
from locater.explain.explanation import Explanation
from locater.explain.targets import Target
from locater.inputs.text import Batch
from locater.layers import AttentionLayer
from locater.observing import attention_pattern
from locater.observing.collecting import Progress
from locater.report.tables import counted
from locater.results.explanations import DeletionCurve, HeadShare, LengthShare, Pattern, TokenStream

FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)  # of tokens removed
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
    delete: bool = True,
    progress: Progress | None = None,
) -> Parts:
    """All of them. `delete` runs the model again without some tokens, sixteen times for each method."""
    layers = [
        {"layer": number, "name": layer.name, "kind": layer.kind, "heads": layer.heads}
        for number, layer in enumerate(attention_layers(model))
    ]
    split, why = _split(model, batch, results, target)
    shares, lengths = head_shares(split, target), length_shares(split, target)
    patterns, which = head_patterns(model, batch, streams, layers, shares, heads)
    curves, how = deletion_curves(model, batch, streams, results, progress) if delete else ({}, "Left out.")
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
    ends = {entry["layer"]: streams_of(entry, streams) for entry in layers}
    chosen, which = every, "all of them."
    if heads is not None:
        chosen, which = list(heads), "those chosen with --patterns."
    elif (most := _with_room(every, ends, shares)) != every:
        largest = "those with the largest shares" if shares else "those of the last layers"
        chosen = most
        which = (
            f"{largest}, up to {PATTERN_CELLS / 1e6:.0f} million numbers. Choose others with --patterns LAYER.HEAD,..."
        )
    try:
        maps = _maps(model, batch, chosen, len(chosen) == len(every))
    except LocaterError as error:
        return [], f"no attention was recorded: {error}"
    patterns = []
    for (layer, head), weights in sorted(maps.items()):
        queries, keys = ends[layer]
        if weights.shape == (len(queries.tokens), len(keys.tokens)):
            patterns.append(Pattern(layer, head, weights, queries.name, keys.name))
    if missing := len(maps) - len(patterns):
        which += f" Those of {counted(missing, 'head')} are left out: their maps are not token by token."
    return patterns, which


def _with_room(
    every: list[tuple[int, int]], ends: Mapping[int, tuple[TokenStream, TokenStream]], shares: Sequence[HeadShare]
) -> list[tuple[int, int]]:
    """Heads whose patterns have at most PATTERN_CELLS numbers together, the largest shares first; at least one."""
    sizes = {layer: len(queries.tokens) * len(keys.tokens) for layer, (queries, keys) in ends.items()}
    if sum(sizes[layer] for layer, _ in every) <= PATTERN_CELLS:
        return every
    order = [(row.layer, row.head) for row in sorted(shares, key=lambda row: -abs(row.share))] or every[::-1]
    chosen = order[:1]
    for layer, head in order[1:]:
        if sum(sizes[at] for at, _ in chosen) + sizes[layer] > PATTERN_CELLS:
            break
        chosen.append((layer, head))
    return chosen


def _maps(
    model: nn.Module, batch: Batch, chosen: Sequence[tuple[int, int]], every: bool
) -> dict[tuple[int, int], Tensor]:
    """(T, S) of each head; one run of the model, or one for each layer that has some of the heads."""
    if every:
        return {at: weights[0].cpu() for at, weights in attention_pattern(model, batch).items()}
    maps: dict[tuple[int, int], Tensor] = {}
    for layer in sorted({layer for layer, _ in chosen}):
        heads = [head for at, head in chosen if at == layer]
        maps |= {at: weights[0].cpu() for at, weights in attention_pattern(model, batch, [layer], heads).items()}
    return maps


def checked_heads(heads: Any, layers: Sequence[AttentionLayer]) -> list[tuple[int, int]]:
    """(layer, head) that a user chose; refused where there is no such head."""
    try:
        pairs = [(index(layer), index(head)) for layer, head in heads]
    except (TypeError, ValueError):
        raise LocaterError(f"heads={heads!r:.60}: give pairs of layer and head, such as [(3, 1)]") from None
    for layer, head in pairs:
        if not 0 <= layer < len(layers) or not 0 <= head < layers[layer].heads:
            last = len(layers) - 1
            raise LocaterError(f"head {layer}.{head}: there are layers 0 to {last}, and no such head in them")
    return pairs


def streams_of(entry: Mapping[str, Any], streams: Sequence[TokenStream]) -> tuple[TokenStream, TokenStream]:
    """The streams of a layer's queries and keys."""
    first, last = streams[0], streams[-1]
    if entry["kind"] == "cross":
        return last, first
    second = "decoder" in entry["name"] if last.name == "decoder" else "text" in entry["name"]
    here = last if len(streams) > 1 and second else first
    return here, here


def deletion_curves(
    model: nn.Module,
    batch: Batch,
    streams: Sequence[TokenStream],
    results: Sequence[Explanation],
    progress: Progress | None = None,
) -> tuple[dict[str, DeletionCurve], str]:
    """By method, and what was removed or why nothing was. Special tokens and the explained one stay."""
    by_name = {stream.name: stream for stream in streams}
    curves: dict[str, DeletionCurve] = {}
    for result in progress(results, len(results)) if progress else results:
        stream = by_name[result.stream]
        at = result.target.position if len(streams) == 1 and stream.ids is not None else None
        try:
            curves[result.method] = _curve(model, batch, stream, result, at)
        except LocaterError as error:
            return {}, f"Not tried: {error}."
    return curves, "Special tokens stay, and so does the token whose output is explained."


def _curve(
    model: nn.Module, batch: Batch, stream: TokenStream, result: Explanation, explained: int | None
) -> DeletionCurve:
    """`explained` is the token whose output is explained, where it is one of the stream."""
    scored = ~result.scores.isnan()  # the first tokens of a picture may have no score
    first = len(scored) - int(scored.sum())
    keep = {t - first for t in stream.special if t >= first} | ({explained} if explained is not None else set())
    removable = int(scored.sum()) - len(keep)
    # a text without special tokens keeps one
    fractions = [x for x in FRACTIONS if keep or stream.ids is None or round(x * removable) < removable]
    tests = deletion(model, batch, replace(result, scores=result.scores[scored]), fractions, keep=sorted(keep))
    sides = (tests.positive, tests.negative)
    probabilities = [side.probabilities.tolist() for side in sides if side.probabilities is not None]
    if not probabilities:
        return DeletionCurve(fractions, sides[0].values.tolist(), sides[1].values.tolist(), "target")
    return DeletionCurve(fractions, probabilities[0], probabilities[1], "probability")
