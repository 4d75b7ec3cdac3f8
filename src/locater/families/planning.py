"""Which bytes of a remote checkpoint a scan will read, in which order: found by reading it once without data.

Families only name tensors, so their own code says what they read. Inside `recorded`, tensors of remote files have
shapes and no data, and every range that is asked for is listed. Where that fails, for code that looks at numbers, the
plan is shorter, and what is not in it is read when it is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable

import torch

from locater.checkpoints.remote.ahead import Read
from locater.checkpoints.remote.session import recorded
from locater.families.effective import effective
from locater.families.layer import AttentionLayer
from locater.families.reading import Reading


@torch.no_grad()
def planned_reads(
    read: Callable[[], Reading],
    choose: Callable[[list[AttentionLayer]], Iterable[tuple[int, AttentionLayer]]],
    raw: bool,
) -> list[list[Read]]:
    """What `read` reads, then what the effective maps of each layer that `choose` takes read. Nothing is fetched."""
    steps: list[list[Read]] = []
    with recorded() as reads:
        layers: list[AttentionLayer] = []
        with contextlib.suppress(Exception):  # the same error comes again when it is read, or it was one of the plan
            layers = [layer for _, layer in choose(read().layers)]
        steps.append(_taken(reads))
        for layer in layers:
            try:
                effective(layer, raw)
            except Exception:
                for part in (layer.query, layer.key):
                    with contextlib.suppress(Exception):
                        part.weight()
            steps.append(_taken(reads))
    return steps


def _taken(reads: list[Read]) -> list[Read]:
    taken = list(reads)
    reads.clear()
    return taken
