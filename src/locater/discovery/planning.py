"""Which bytes of a remote checkpoint a scan will read, in which order: found by reading it once without data.

Families only name tensors, so their own code says what they read. Inside `recorded`, tensors of remote files stand in
for the real ones, and every range that is asked for is listed. Where that fails, for code that looks at numbers, the
plan is shorter, and what is not in it is read when it is needed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator

import torch

from locater.discovery.record_or_discovery import Reading
from locater.layers.effective import effective
from locater.layers.layer import AttentionLayer
from locater.sources.remote.prefetch import Read, Record, recorded

Choice = Callable[[list[AttentionLayer]], Iterable[tuple[int, AttentionLayer]]]
SMALL = 1 << 18  # bytes of a gain or a bias


@torch.no_grad()
def planned_reads(read: Callable[[], Reading], choose: Choice, raw: bool) -> list[list[Read]]:
    """What `read` reads, then what the maps of each layer that `choose` takes read. Nothing is fetched.

    First gains and biases are zeros, and maps are read and not used: arithmetic on tensors without data makes torch
    import its compiler, which takes a second. Where maps are computed from several tensors that does not do, and all
    tensors are without data.
    """
    with recorded(SMALL) as record, contextlib.suppress(Exception):
        return list(_steps(record, read, choose, _stored_maps))
    steps: list[list[Read]] = []
    with (
        recorded() as record,
        contextlib.suppress(Exception),
    ):  # the same error comes again, or it was of the plan alone
        for step in _steps(record, read, choose, lambda layer: _effective_maps(layer, raw)):
            steps.append(step)  # what came before an error is kept
    return steps


def _steps(
    record: Record, read: Callable[[], Reading], choose: Choice, maps: Callable[[AttentionLayer], None]
) -> Iterator[list[Read]]:
    try:
        layers = [layer for _, layer in choose(read().layers)]
    finally:
        yield record.taken()
    for layer in layers:
        maps(layer)
        yield record.taken()


def _stored_maps(layer: AttentionLayer) -> None:
    layer.query.weight()
    layer.key.weight()


def _effective_maps(layer: AttentionLayer, raw: bool) -> None:
    """Read what the folded maps need; as much of it as can be, where the folding looks at numbers."""
    try:
        effective(layer, raw)
    except Exception:
        for part in (layer.query, layer.key):
            with contextlib.suppress(Exception):
                part.weight()
