"""`explanations()`: run a model on one input, and explain one number of its output by several methods."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from locater.errors import LocaterError, first_line
from locater.explain import METHODS
from locater.explain.explanation import Explanation
from locater.explain.targets import Target, vectors
from locater.observing.collecting import Progress
from locater.observing.inputs import run
from locater.verbs.explain_input import ExplainInput, Picture, TokenStream, read_input
from locater.verbs.explain_parts import parts_of
from locater.verbs.explain_result import Explanations
from locater.verbs.explain_target import entries_of, find_target, predictions
from locater.verbs.load import load_model

DEFAULT = ("operator", "relevance", "integrated_gradients", "rollout", "paths")  # those of them that apply
OPERATOR_TOKENS = 256  # up to which the operator's matrix is made: it takes a pass for every token
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
    progress: Progress | None = None,
) -> Explanations:
    """Explain what `model` makes of a prompt: how much each token counts, by which heads, along which paths.

    `model` is a module or the folder of a checkpoint. `text` is the prompt itself. `image` is a picture, for vision
    models. An encoder-decoder reads `text` in its encoder; `decoder_text` is what the decoder has written so far.
    `target` is a token as text, a class by its name, or a number; by default the model's first choice. `position` is
    the output token, by default the first [MASK] or the last one. A model without logits is explained along its own
    output.
    `methods` are names in `locater.explain.METHODS`; by default a few that apply to the model. `heads` are the
    (layer, head) whose patterns the page shows, where there is no room for all.
    """
    names = _known(methods)
    source = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    module = load_model(source) if isinstance(model, str | os.PathLike) else model
    read = read_input(module, text, decoder_text, image, tokenizer)
    output = _run(module, read)
    entries = entries_of(module, read.tokenizer, vectors(output)[0].shape[-1])
    chosen = find_target(output, entries, target, position, read.streams[-1].ids)
    results, skipped = _explained(module, read, chosen, names, methods is not None, progress)
    streams, picture = _fitted(read, results)
    results = [_in_streams(result, streams) for result in results]
    parts = parts_of(module, read.batch, streams, results, chosen, heads)
    assumptions = {
        "text": text,
        "decoder_text": decoder_text,
        "image": None if image is None else str(image),
        "output_stream": streams[-1].name if streams[-1].name == "decoder" else streams[0].name,
        "without_matrix": _without_matrix(results),
        **parts.reasons,
        "notes": [f"{name} was left out: {why}" for name, why in skipped.items()],
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
    )


def _known(methods: Sequence[str] | None) -> list[str]:
    names = list(dict.fromkeys(methods)) if methods is not None else [name for name in DEFAULT if name in METHODS]
    if not names:
        raise LocaterError(f"no method was named: use some of {', '.join(METHODS)}")
    for name in names:
        if name not in METHODS:
            raise LocaterError(f"method {name!r} is not known: use {', '.join(METHODS)}")
    return names


def _run(model: nn.Module, read: ExplainInput) -> Any:
    try:
        return run(model, read.batch)
    except LocaterError:
        raise
    except Exception as error:
        raise LocaterError(f"{type(model).__name__}: does not run on this input ({first_line(error)})") from error


def _explained(
    model: nn.Module, read: ExplainInput, target: Target, names: list[str], named: bool, progress: Progress | None
) -> tuple[list[Explanation], dict[str, str]]:
    """One explanation per method. Methods that the user did not name and that do not apply are left out, with the
    reason.
    """
    results: list[Explanation] = []
    skipped: dict[str, str] = {}
    for name in progress(names, len(names)) if progress else names:
        try:
            results.append(METHODS[name](model, read.batch, target=choice_of(target), **_options(name, read, target)))
        except LocaterError as error:
            skipped[name] = str(error)
    if named and skipped:
        name, why = next(iter(skipped.items()))
        others = ", ".join(result.method for result in results)
        raise LocaterError(f"method {name} does not apply: {why}" + (f"; {others} would apply" if others else ""))
    if not results:
        raise LocaterError(next(iter(skipped.values())))
    return results, skipped


def _options(name: str, read: ExplainInput, target: Target) -> dict[str, Any]:
    """The operator's matrix is made for short inputs, where more than one of its rows is read."""
    several_rows = target.index is None or target.position is not None
    short = len(read.streams[0].tokens) <= OPERATOR_TOKENS
    return {"matrix": True} if name == "operator" and several_rows and short else {}


def _fitted(read: ExplainInput, results: list[Explanation]) -> tuple[list[TokenStream], Picture | None]:
    """Streams with as many tokens as the model has: those of a picture also have tokens that are no patch."""
    if read.picture is None:
        return read.streams, None
    stream, picture = read.streams[0], read.picture
    count = len(results[0].scores)
    before = count - picture.rows * picture.columns
    if before < 0:
        raise LocaterError(
            f"{count} image tokens for {picture.rows} x {picture.columns} patches: not a grid of patches"
        )
    first = ["[CLS]", *(f"[extra {i}]" for i in range(1, before))][:before]
    fitted = replace(stream, tokens=[*first, *stream.tokens], special=list(range(before)))
    return [fitted, *read.streams[1:]], replace(picture, before=before)


def _in_streams(result: Explanation, streams: list[TokenStream]) -> Explanation:
    """The explanation with the names of these streams, checked."""
    if len(streams) == 1:
        result = replace(result, stream=streams[0].name, other_streams={})
    lengths = {stream.name: len(stream.tokens) for stream in streams}
    for name, scores in ((result.stream, result.scores), *result.other_streams.items()):
        if lengths.get(name) != len(scores):
            raise LocaterError(
                f"{result.method} has {len(scores)} scores of the stream {name!r}, and the input has "
                + ", ".join(f"{count} tokens in {stream!r}" for stream, count in lengths.items())
            )
    return result


def _without_matrix(results: list[Explanation]) -> list[str]:
    """Methods whose matrix the page has no room for."""
    left, without = MATRIX_CELLS, []
    for result in results:
        if result.matrix is not None:
            left -= result.matrix.numel()
            if left < 0:
                without.append(result.method)
    return without
