"""The numbers of an observation over the ranks of a distributed run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from locater.errors import LocaterError
from locater.observing.listening_site import Site
from locater.observing.residual_stream import StreamPoint


def combine_ranks(
    model: nn.Module, sites: Sequence[Site], streams: Sequence[StreamPoint], ask: bool, group: Any
) -> None:
    """Add the sums of all ranks and compare their maxima, in two collectives.

    With `ask` one more asks first whether all ranks have the same layers: those found by their calls may differ, and so
    do the stages of a pipeline. Of several ranks that computed the same heads of the same batch, one counts.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    if ask:
        _refuse_different_layers(model, sites, group)
    if not sites:
        return
    for site in sites:
        if not site.split.counts:
            for x in site.totals.added():
                x.zero_()
    added = [x for site in sites for x in site.totals.added()]
    added += [point.sums for point in streams]
    maxima = [site.totals.maxima for site in sites]
    for tensors, how in ((added, dist.ReduceOp.SUM), (maxima, dist.ReduceOp.MAX)):
        flat = torch.cat([x.flatten() for x in tensors])
        dist.all_reduce(flat, how, group)
        for x, part in zip(tensors, flat.split([x.numel() for x in tensors]), strict=True):
            x.copy_(part.view_as(x))


def _refuse_different_layers(model: nn.Module, sites: Sequence[Site], group: Any) -> None:
    """Raise, on every rank, where ranks found different layers: one may have had a batch with images."""
    layers = ";".join(f"{site.number} {site.name} {site.kind} {site.count}" for site in sites)
    if not ranks_agree(model, layers, group):
        raise LocaterError(
            f"{type(model).__name__}: ranks found different attention layers, whose numbers cannot be combined: read "
            "seen.rows on each rank, give every rank batches that reach the same towers, or reduce over the ranks of "
            "one stage of a pipeline, seen.reduce(group)"
        )


def ranks_agree(model: nn.Module, text: str, group: Any = None) -> bool:
    """Whether all ranks have the same text: one collective, which every rank calls."""
    if not (dist.is_available() and dist.is_initialized()):
        return True
    number = zlib.crc32(text.encode())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    ends = torch.tensor([number, -number], device=device)
    dist.all_reduce(ends, dist.ReduceOp.MAX, group)
    largest, smallest = ends.tolist()
    return bool(largest == -smallest)
