"""`explanations()`: run a model on one input, and explain one number of its output by several methods."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from operator import index
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.explain_input_and_target import (
    ExplainInput,
    choice_of,
    entries_of,
    find_target,
    predictions,
    read_input,
)
from locater.commands.load_model import load_model
from locater.defaults import Progress
from locater.errors import LocaterError, first_line
from locater.explain import METHODS, Run, deletion, paths
from locater.explain.attention_flow import head_estimates
from locater.explain.explanation import Explanation, Target, vectors
from locater.explain.replayed_pass import head_effects
from locater.inputs.text import Batch
from locater.inputs.token_groups import GROUPS, token_groups
from locater.layers import AttentionLayer
from locater.observing.observation import observe
from locater.observing.run_model import run_model
from locater.report.verdict_sentences import amount
from locater.results.explanations import (
    DeletionCurve,
    Explanations,
    HeadShare,
    LengthShare,
    Pattern,
    Picture,
    TokenStream,
)

# What accompanies the scores of an explanation: shares of heads and path lengths, patterns of heads, deletion.

MEASURED = 12  # heads that are removed
FRACTIONS = (0.0, 0.1, 0.2, 0.3, 0.4, 0.6, 0.8, 1.0)  # of tokens removed
PATTERN_CELLS = 16_000_000  # numbers in the patterns of heads on one page


@dataclass(frozen=True, eq=False)
class Parts:
    """What accompanies the scores; `reasons` says what each part is, or why it is missing."""

    layers: list[dict[str, Any]]
    heads: list[HeadShare]
    lengths: list[LengthShare]
    patterns: list[Pattern]
    deletion: dict[str, DeletionCurve]
    reasons: dict[str, str]


def parts_of(
    run: Run,
    streams: Sequence[TokenStream],
    results: Sequence[Explanation],
    target: Target,
    heads: Sequence[tuple[int, int]] | None,
    delete: bool = True,
    progress: Progress | None = None,
) -> Parts:
    """All parts. `delete` runs the model again without some tokens, sixteen times for each method."""
    layers = [
        {"layer": number, "name": layer.name, "kind": layer.kind, "heads": layer.heads}
        for number, layer in enumerate(run.layers)
    ]
    split, why = _split(run, results, target)
    shares, missing = with_effects(run, head_shares(split, target), target)
    why = " ".join(filter(None, (why, missing)))
    lengths = length_shares(split, target)
    patterns, which = head_patterns(run, streams, layers, shares, heads)
    curves, how = deletion_curves(run.model, run.keywords, streams, results, progress) if delete else ({}, "Left out.")
    reasons = {"heads": why, "lengths": why, "patterns": which, "deletion": how}
    return Parts(layers, shares, lengths, patterns, curves, reasons)


def _split(run: Run, results: Sequence[Explanation], target: Target) -> tuple[Mapping[str, Tensor], str]:
    """The target by head and by path length, or why it cannot be split."""
    if target.value == 0:
        return {}, "The target is 0, so nothing has a share of it."
    for result in results:
        if {"head", "length"} <= result.parts.keys():
            return result.parts, ""
    try:
        return paths(run, target=choice_of(target)).parts, ""
    except LocaterError as error:
        return {}, f"No shares of heads and path lengths: {error}."


def head_shares(split: Mapping[str, Tensor], target: Target) -> list[HeadShare]:
    """The part of the target through each head; by layer, then by head."""
    return [
        HeadShare(layer, head, value, value / abs(target.value))
        for layer, row in enumerate(split["head"].tolist() if split else [])
        for head, value in enumerate(row)
    ]


def with_effects(run: Run, shares: list[HeadShare], target: Target) -> tuple[list[HeadShare], str]:
    """The same with estimates of what the target loses without each head, and with what it does lose without the heads
    whose estimates (or shares) are largest; or why that is not known.
    """
    estimates = head_estimates(run, target) if shares else {}
    shares = [replace(share, estimate=estimates.get((share.layer, share.head))) for share in shares]
    first = sorted(range(len(shares)), key=lambda at: -abs(largest_by(shares[at])))[:MEASURED]
    if not first:
        return shares, ""
    try:
        effects = head_effects(run.model, run.keywords, target, [(shares[at].layer, shares[at].head) for at in first])
    except LocaterError as error:
        return shares, f"The effect of removing heads was not measured: {error}."
    found = dict(zip(first, effects, strict=True))
    return [replace(share, effect=found.get(at)) for at, share in enumerate(shares)], ""


def largest_by(share: HeadShare) -> float:
    """What heads are ordered by."""
    return share.value if share.estimate is None else share.estimate


def length_shares(split: Mapping[str, Tensor], target: Target) -> list[LengthShare]:
    """The part of the target along paths of each length."""
    values = split["length"].tolist() if split else []
    return [LengthShare(length, value, value / abs(target.value)) for length, value in enumerate(values)]


def head_patterns(
    run: Run,
    streams: Sequence[TokenStream],
    layers: Sequence[Mapping[str, Any]],
    shares: Sequence[HeadShare],
    heads: Sequence[tuple[int, int]] | None,
) -> tuple[list[Pattern], str]:
    """Patterns of all heads, or of those with the largest shares if there is no room for all; and which they are."""
    every = [(entry["layer"], head) for entry in layers for head in range(entry["heads"])]
    ends = {entry["layer"]: streams_of(entry, streams) for entry in layers}
    chosen, which = every, "all of them."
    if heads is not None:
        chosen, which = list(heads), "those chosen with --patterns."
    elif (most := _heads_that_fit(every, ends, shares)) != every:
        largest = "those with the largest shares" if shares else "those of the last layers"
        chosen = most
        which = (
            f"{largest}, up to {PATTERN_CELLS / 1e6:.0f} million numbers. Choose others with --patterns LAYER.HEAD,..."
        )
    try:
        maps = _maps(run, chosen)
    except LocaterError as error:
        return [], f"no attention was recorded: {error}"
    patterns = []
    for (layer, head), weights in sorted(maps.items()):
        queries, keys = ends[layer]
        if weights.shape == (len(queries.tokens), len(keys.tokens)):
            patterns.append(Pattern(layer, head, weights, queries.name, keys.name))
    if missing := len(maps) - len(patterns):
        which += f" Those of {amount(missing, 'head')} are left out: their maps are not token by token."
    return patterns, which


def _heads_that_fit(
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


def _maps(run: Run, chosen: Sequence[tuple[int, int]]) -> dict[tuple[int, int], Tensor]:
    """(T, S) of each head, a layer at a time."""
    maps: dict[tuple[int, int], Tensor] = {}
    for layer in sorted({layer for layer, _ in chosen}):
        heads = [head for at, head in chosen if at == layer]
        maps |= {(layer, head): x for head, x in zip(heads, run.maps(layer, heads).cpu(), strict=True)}
    return maps


def check_heads(heads: Any, layers: Sequence[AttentionLayer]) -> list[tuple[int, int]]:
    """The (layer, head) pairs that a user chose; an error if there is no such head."""
    try:
        pairs = [(index(layer), index(head)) for layer, head in heads]
    except (TypeError, ValueError):
        raise LocaterError(f"heads={heads!r:.60}: give pairs of layer and head, such as [(3, 1)]") from None
    for layer, head in pairs:
        if not 0 <= layer < len(layers) or not 0 <= head < layers[layer].heads:
            last = len(layers) - 1
            raise LocaterError(f"head {layer}.{head}: there is no such head in layers 0 to {last}")
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
    """Deletion curves by method, and what was removed or why nothing was. Special tokens and the explained one stay."""
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


# The command: which methods run, on which input, and what is said of those that do not apply.

DEFAULT = ("operator", "relevance", "integrated_gradients", "rollout", "paths")  # the first of them that applies
OPERATOR_TOKENS = 256  # up to which the matrix of the operator is computed, which takes a pass for every token
LARGEST_GAP = 0.05  # of the target: largest difference between it and scores that should sum to it
MATRIX_CELLS = 16_000_000  # numbers in the matrices of all methods on one page


def explanations(
    model: nn.Module | str | os.PathLike[str],
    text: str | None = None,
    *,
    image: str | Path | None = None,
    decoder_text: str | None = None,
    target: str | int | None = None,
    position: int | None = None,
    methods: Sequence[str] | None = None,
    heads: Sequence[tuple[int, int]] | None = None,
    tokenizer: Any = None,
    deletion: bool = True,
    chat: bool = False,
    progress: Progress | None = None,
) -> Explanations:
    """Explain the output of `model` for a prompt: how much each token contributes, through which heads and paths.

    `model` is a module or the folder of a checkpoint. `text` is the prompt itself. `image` is a picture, for vision
    models. An encoder-decoder reads `text` in its encoder; `decoder_text` is what the decoder has written so far.
    `target` is a token as text, a class by its name, or a number; by default the model's first choice. `position` is
    the output token, by default the first [MASK] or the last one. A model without logits is explained along its own
    output. `methods` are names in `locater.explain.METHODS`; by default `operator`, or where that does not apply
    `relevance` or another that does. `heads` are the
    (layer, head) whose patterns the page shows, where there is no room for all. `deletion` also runs the model without
    the tokens of largest and smallest score, to see how far the scores can be trusted. `chat` writes the prompt as the
    message of a user, by the chat template.
    """
    names = _check_methods(methods)
    if not isinstance(model, nn.Module | str | os.PathLike):
        raise LocaterError(f"{model!r:.60} is no model: give a module, the folder of a checkpoint, or a hub id")
    source = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    module = load_model(source) if isinstance(model, str | os.PathLike) else model
    read = read_input(module, text, decoder_text, image, tokenizer, chat)
    output, run = _output(module, read), Run(module, read.batch)
    entries = entries_of(module, read.tokenizer, vectors(output)[0], None if image is None else text)
    if heads is not None:
        heads = check_heads(heads, run.layers)  # before the slow part
    chosen = find_target(output, entries, target, position, read.streams[-1].ids)
    results, skipped = _explain(run, read, chosen, names, methods is not None, progress)
    streams, picture = _fit_streams(read, results)
    results = [_name_streams(result, streams, picture) for result in results]
    parts = parts_of(run, streams, results, chosen, heads, deletion, progress)
    assumptions = {
        "text": text,
        "decoder_text": decoder_text,
        "image": None if image is None else str(image),
        "output_stream": streams[-1].name if streams[-1].name == "decoder" else streams[0].name,
        "without_matrix": _without_matrix(results),
        **parts.reasons,
        "notes": _skipped_notes(skipped),
    }
    return Explanations(
        source,
        streams,
        chosen,
        "the output along itself" if chosen.index is None else entries.name(chosen.index),
        predictions(output, chosen, entries),
        results,
        parts.layers,
        parts.heads,
        parts.lengths,
        parts.patterns,
        parts.deletion,
        picture,
        assumptions,
        _groups(module, read),
    )


def _groups(module: nn.Module, read: ExplainInput) -> dict[str, Any]:
    """The group of each token, and what all heads together give to each group; {} where there is one group alone, or
    the input is no single text.
    """
    if len(read.streams) != 1 or read.streams[0].ids is None:
        return {}
    groups = token_groups(module, read.tokenizer)
    labels = [GROUPS[number] for number in groups.labels(read.batch["input_ids"])[0].tolist()]
    if len(set(labels)) < 2:
        return {}
    try:
        with observe(module, groups=groups, rows=1) as seen:
            run_model(module, read.batch)
        heads = seen.groups
    except LocaterError:
        return {"labels": labels, "attention": {}, "even": {}}
    names = list(heads[0].shares)
    attention = {name: sum(head.shares[name] for head in heads) / len(heads) for name in names}
    return {"labels": labels, "attention": attention, "even": {name: heads[0].even[name] for name in names}}


def _check_methods(methods: Sequence[str] | None) -> list[str]:
    methods = methods.split(",") if isinstance(methods, str) else methods
    names = list(dict.fromkeys(methods)) if methods is not None else [name for name in DEFAULT if name in METHODS]
    if not names:
        raise LocaterError(f"no method was given: use some of {', '.join(METHODS)}")
    for name in names:
        if name not in METHODS:
            raise LocaterError(f"method {name!r} is not known: use {', '.join(METHODS)}")
    return names


def _output(model: nn.Module, read: ExplainInput) -> Any:
    try:
        return run_model(model, read.batch)
    except LocaterError:
        raise
    except Exception as error:  # raised by the code of a foreign model
        raise LocaterError(f"{type(model).__name__}: does not run on this input ({first_line(error)})") from error


def _explain(
    run: Run, read: ExplainInput, target: Target, names: list[str], named: bool, progress: Progress | None
) -> tuple[list[Explanation], dict[str, str]]:
    """One explanation per method that the user named; without any, of the first that applies, with the reasons why
    those before it do not.
    """
    results: list[Explanation] = []
    skipped: dict[str, str] = {}
    for name in progress(names, len(names)) if progress else names:
        try:
            options = _options(name, read, target)
            result = METHODS[name](run, target=choice_of(target), **options)
            if not named:
                _check_sum(result)
            results.append(_with_baseline(result, read, options))
            if not named:
                break
        except LocaterError as error:
            skipped[name] = str(error)
    if named and skipped:
        name, why = next(iter(skipped.items()))
        others = ", ".join(result.method for result in results)
        raise LocaterError(f"method {name} does not apply: {why}" + (f"; {others} would apply" if others else ""))
    if not results:
        raise LocaterError(next(iter(skipped.values())))
    return results, skipped


def _with_baseline(result: Explanation, read: ExplainInput, options: dict[str, Any]) -> Explanation:
    """Says which token the baseline is."""
    if "baseline" not in options:
        return result
    token = read.tokenizer.convert_ids_to_tokens([options["baseline"]])[0]
    return replace(result, how=f"{result.how}; the baseline has {token} in place of every token")


def _check_sum(result: Explanation) -> None:
    """Refuse scores that should add up to the target and do not."""
    if result.offset is None:
        return
    total = result.offset + sum(float(x.nansum()) for x in (result.scores, *result.other_streams.values()))
    if abs(total - result.target.value) > LARGEST_GAP * abs(result.target.value):
        raise LocaterError(
            f"its scores and offset sum to {total:.3g}, and the target is {result.target.value:.3g}; "
            f"--method {result.method} shows them all the same"
        )


def _skipped_notes(skipped: dict[str, str]) -> list[str]:
    """One note for each reason."""
    reasons: dict[str, list[str]] = {}
    for name, why in skipped.items():
        reasons.setdefault(why, []).append(name)
    return [f"left out: {', '.join(names)} ({why})" for why, names in reasons.items()]


def _options(name: str, read: ExplainInput, target: Target) -> dict[str, Any]:
    """The operator's matrix is computed for short inputs, where more than one of its rows is read. Integrated gradients
    of a text start at a token that means nothing: from zero they do not converge in models with RMSNorm.
    """
    if name == "operator":
        several_rows = target.index is None or target.position is not None
        return {"matrix": several_rows and len(read.streams[0].tokens) <= OPERATOR_TOKENS}
    tok = read.tokenizer
    empty = (
        [number for number in (tok.pad_token_id, tok.unk_token_id, tok.eos_token_id) if number is not None]
        if tok
        else []
    )
    return {"baseline": empty[0]} if name == "integrated_gradients" and empty else {}


def _fit_streams(read: ExplainInput, results: list[Explanation]) -> tuple[list[TokenStream], Picture | None]:
    """Streams with as many tokens as the model has: those of a picture also have tokens that are no patch."""
    if read.picture is None:
        return read.streams, None
    stream, picture = read.streams[0], read.picture
    count = max(len(result.scores) for result in results)
    before = count - picture.rows * picture.columns
    if before < 0:
        raise LocaterError(
            f"{count} image tokens for {picture.rows} x {picture.columns} patches: not one token per patch"
        )
    first = ["[CLS]", *(f"[extra {i}]" for i in range(1, before))][:before]
    fitted = replace(stream, tokens=[*first, *stream.tokens], special=list(range(before)))
    return [fitted, *read.streams[1:]], replace(picture, before=before)


def _name_streams(result: Explanation, streams: list[TokenStream], picture: Picture | None) -> Explanation:
    """The explanation with the names of these streams, checked. Tokens without a score get NaN: a method that scores
    patches has none for the class token.
    """
    if len(streams) == 1:
        result = replace(result, stream=streams[0].name, other_streams={})
    lengths = {stream.name: len(stream.tokens) for stream in streams}
    if picture is not None and len(result.scores) == picture.rows * picture.columns:
        none = result.scores.new_full((picture.before,), torch.nan)
        result = replace(
            result, scores=torch.cat([none, result.scores]), matrix=None if picture.before else result.matrix
        )
    for name, scores in ((result.stream, result.scores), *result.other_streams.items()):
        if lengths.get(name) != len(scores):
            raise LocaterError(
                f"{result.method} has {len(scores)} scores of the stream {name!r}, and the input has "
                + ", ".join(f"{count} tokens in {stream!r}" for stream, count in lengths.items())
            )
    return result


def _without_matrix(results: list[Explanation]) -> list[str]:
    """Methods whose matrix does not fit on the page."""
    left, without = MATRIX_CELLS, []
    for result in results:
        if result.matrix is not None:
            left -= result.matrix.numel()
            if left < 0:
                without.append(result.method)
    return without
