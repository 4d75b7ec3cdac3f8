"""What the attention calls are that a module makes from one place of its code in one run: parts of the tokens, heads
one at a time, or layers that have no module of their own.

Calls are told apart by the weights that made their queries and keys, and by the channels that these were taken from.
Calls of the same weights and channels are one thing, as layers are that share their weights: another step, or other
tokens. Calls of others are heads of one layer where they read the same input, and other layers where they do not. What
cannot be told is refused: heads that are added to each other are the numbers of no head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from locater.calls.call_and_masks import Call
from locater.calls.function_listener import DirectCall
from locater.calls.head_axes import BASE, MemoryRegion, TensorStep, labels_of, source_maps
from locater.errors import LocaterError


@dataclass(frozen=True)
class RepeatedLayer:
    """Calls of one layer: `parts` are its heads, each with the numbers of its calls. `key` distinguishes it from other
    layers of the same place; None where there is one alone.
    """

    parts: list[list[int]]
    key: Any = None


@dataclass(frozen=True)
class _Source:
    """Which weights and channels made the queries and keys of a call, of which input and tokens."""

    made: tuple[Any, ...]
    fed: tuple[MemoryRegion, ...]
    read: tuple[MemoryRegion, ...]
    tokens: tuple[bytes, bytes]

    @property
    def weights(self) -> list[MemoryRegion]:
        return [memory for side in self.made for memory in side[0]]


def split_into_layers(
    calls: Sequence[tuple[DirectCall, Call]], tokens: int | None, model: nn.Module
) -> list[RepeatedLayer]:
    """The layers of calls with equally many heads, in a run of a module that was given this many tokens."""
    everything = [list(range(len(calls)))]
    if len(calls) > 1 and tokens == sum(call.query.shape[0] * call.query.shape[2] for _, call in calls):
        return [RepeatedLayer(everything)]  # each token is in one of them
    sources = [_source(direct) for direct, _ in calls]
    known = [source for source in sources if source is not None]
    if len(known) < len(calls):
        raise LocaterError(
            f"it attends {len(calls)} times from one place of its code, by heads or by parts of the tokens, and which "
            "of them is not known"
        )
    fed = all(source.fed for source in known)
    heads: dict[Any, list[int]] = {}
    for at, source in enumerate(known):
        heads.setdefault((source.made, source.fed if fed else ()), []).append(at)
    for same in heads.values():
        if len({(known[at].read, known[at].tokens[0]) for at in same}) < len(same):
            raise LocaterError(
                f"it attends {len(calls)} times from one place of its code, more than once from the same queries: what "
                "distinguishes these calls is not known"
            )
    together: dict[Any, list[tuple[Any, list[int]]]] = {}
    for made, same in heads.items():
        together.setdefault(known[same[0]].read, []).append((made, same))
    learned = {StorageWeakRef(p.untyped_storage()) for p in model.parameters()}
    stable = all(memory.storage in learned for source in known for memory in source.weights)
    return [
        RepeatedLayer([same for _, same in parts], tuple(made for made, _ in parts) if stable else (at, len(together)))
        for at, parts in enumerate(together.values())
    ]


def _source(direct: DirectCall) -> _Source | None:
    """None where the weights, channels or tokens of a call are not known."""
    if direct.query is None or direct.key is None:
        return None
    sides, tokens = [], []
    for step in (direct.query, direct.key):
        made = tuple(memory for base in source_maps(step) for memory in base.made)
        channels, rows = _labels(step) or (None, None)
        if not made or channels is None or rows is None:
            return None
        sides.append((made, channels))
        tokens.append(rows)
    first = source_maps(direct.query)
    fed, read = ([memory for base in first for memory in getattr(base, name)] for name in ("fed", "read"))
    return _Source(tuple(sides), tuple(fed), tuple(read), (tokens[0], tokens[1]))


def _labels(step: TensorStep) -> tuple[tuple[int, ...], bytes] | None:
    """The channels and the tokens that the rows of a tensor come from."""
    try:
        labels = labels_of(step)
    except Exception:  # a step may not fit labels: whole numbers, on the CPU, of one key
        return None
    channels = torch.unique(labels % BASE)
    return tuple(channels.tolist()), (labels // BASE).unique().numpy().tobytes()
