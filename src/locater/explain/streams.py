"""Streams of tokens: which one the queries of an attention call read, which one its keys; and where the target reads.

The layers of one stack read one stream, named by the part of the layer's path that tells stacks apart: `encoder` and
`decoder`, `text` and `image`. In cross-attention the keys are those of the other stack, or a `memory` that was given.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.explain.attention_event import AttentionEvent
from locater.layers import AttentionLayer

ONE, MEMORY = "input", "memory"
KNOWN = {"vision": "image", "visual": "image", "text": "text", "encoder": "encoder", "decoder": "decoder"}
StreamsOf = Mapping[str, tuple[str, str]]  # pattern of layer names -> (stream of queries, stream of keys)


@dataclass(frozen=True, eq=False)
class StreamStep:
    """One attention call: tokens of stream `reader` look at those of `read`. `at` counts steps; two directions of
    cross-attention with nothing between them are one step.
    """

    at: int
    reader: str
    read: str
    event: AttentionEvent

    @property
    def is_cross(self) -> bool:
        return self.reader != self.read


def stream_steps(events: Sequence[AttentionEvent], streams: StreamsOf | None = None) -> list[StreamStep]:
    """The calls of a run with their streams, in order."""
    names = _names([event.layer for event in events])
    steps: list[StreamStep] = []
    for event in events:
        reader, read = _streams(event.layer, names, streams)
        last = steps[-1] if steps else None
        mirrored = last is not None and last.is_cross and (last.reader, last.read) == (read, reader)
        at = 0 if last is None else last.at + (not mirrored)
        steps.append(StreamStep(at, reader, read, event))
    return steps


def stream_sizes(steps: Sequence[StreamStep]) -> dict[str, int]:
    """How many tokens each stream has."""
    sizes: dict[str, int] = {}
    for step in steps:
        call = step.event.call
        for name, size in ((step.reader, call.query.shape[2]), (step.read, call.key.shape[2])):
            if sizes.setdefault(name, size) != size:
                raise LocaterError(
                    f"{step.event.layer.name}: {size} tokens of the stream {name!r}, which had {sizes[name]} before: "
                    "give the whole input at once, without a cache, or name its streams with streams={...}"
                )
    return sizes


def last_steps(steps: Sequence[StreamStep]) -> dict[str, StreamStep]:
    """The last step of every stream."""
    return {step.reader: step for step in steps}


def end_steps(steps: Sequence[StreamStep]) -> dict[str, StreamStep]:
    """The last step of every stream that nothing reads afterwards: the target can only read there."""
    last = last_steps(steps)
    reads = [(step.read, step.at) for step in steps if step.is_cross]
    return {name: end for name, end in last.items() if not any(read == name and at > end.at for read, at in reads)}


def read_rows(gradient: Tensor | None, row: int) -> Tensor:
    """The tokens at which the target reads a stream: where its gradient is not zero after the last attention."""
    if gradient is None:
        return torch.zeros(0, dtype=torch.long)
    return (gradient[row] != 0).flatten(1).any(-1).nonzero().flatten()


def main_stream(names: Sequence[str], ends: Sequence[str]) -> str:
    """The stream whose scores come first: the encoder's, the image tower's, or the one that the target reads."""
    if "encoder" in names:
        return "encoder"
    return "image" if "image" in ends and len(ends) > 1 else ends[0]


def _streams(layer: AttentionLayer, names: Mapping[str, str], streams: StreamsOf | None) -> tuple[str, str]:
    for pattern, pair in (streams or {}).items():
        if re.fullmatch(pattern, layer.name):
            return pair
    reader = names[_stack(layer.name)]
    if layer.kind == "self":
        return reader, reader
    others = sorted(set(names.values()) - {reader})
    if len(others) > 1:
        raise LocaterError(
            f"{layer.name}: cross-attention, and there are the streams {', '.join(others)}: "
            "say which with streams={'pattern of layer names': (stream of queries, stream of keys)}"
        )
    return reader, others[0] if others else MEMORY


def _stack(name: str) -> str:
    """The path of a layer up to its number."""
    return re.split(r"(?:^|\.)\d+(?:\.|$)", name)[0]


def _names(layers: Sequence[AttentionLayer]) -> dict[str, str]:
    """A short name for every stack: the first part of its path that no other stack has."""
    stacks = list(dict.fromkeys(_stack(layer.name) for layer in layers))
    if len(stacks) == 1:
        return {stacks[0]: ONE}
    parts = {stack: stack.split(".") for stack in stacks}
    short = {}
    for stack in stacks:
        elsewhere = {part for other in stacks if other != stack for part in parts[other]}
        own = next((part for part in parts[stack] if part not in elsewhere), stack)
        short[stack] = next((name for word, name in KNOWN.items() if word in own), own)
    return short if len(set(short.values())) == len(stacks) else {stack: stack for stack in stacks}
