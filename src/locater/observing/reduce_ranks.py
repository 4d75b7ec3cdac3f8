"""The numbers of an observation over the ranks of a distributed run."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.observing.listening_site import Site
from locater.observing.residual_stream import StreamPoint
from locater.torch_private import is_partitioned, own_children, own_parameters

TELLS_APART = 1e-3  # of the size of a layer's weights: copies of one model have equal sums, up to rounding


def combine_ranks(
    model: nn.Module, sites: Sequence[Site], streams: Sequence[StreamPoint], ask: bool, first: bool, group: Any
) -> None:
    """Add the sums of all ranks and compare their maxima, in two collectives.

    With `ask` one more asks whether all ranks have the same layers: those found by their calls may differ, and so do
    the stages of a pipeline; the `first` time one more asks whether they have the same weights. Of several ranks that
    computed the same heads of the same batch, one counts.
    """
    if not (dist.is_available() and dist.is_initialized()):
        return
    if ask:
        _refuse_different_layers(model, sites, first, group)
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


def _refuse_different_layers(model: nn.Module, sites: Sequence[Site], first: bool, group: Any) -> None:
    """Raise, on every rank, where ranks found different layers: one may have had a batch with images. And the `first`
    time, where layers of one name are of different models.
    """
    layers = ";".join(f"{site.number} {site.name} {site.kind} {site.count}" for site in sites)
    if not ranks_agree(model, layers, group):
        raise LocaterError(
            f"{type(model).__name__}: ranks found different attention layers, whose numbers cannot be combined: read "
            "seen.rows on each rank, give every rank batches that reach the same towers, or say which ranks are the "
            "stages of a pipeline: observe(model, pipeline=group), Monitor(pipeline=group)"
        )
    name = _differing_layer(sites, group) if first and sites else None
    if name is not None:
        raise LocaterError(
            f"{type(model).__name__}: {name} has other weights on other ranks, so they are of different models: "
            "say which ranks are the stages of a pipeline (observe(model, pipeline=group), Monitor(pipeline=group)), "
            "or reduce over ranks that train one model, seen.reduce(group)"
        )


def _differing_layer(sites: Sequence[Site], group: Any) -> str | None:
    """The first layer with another sum of its weights on some rank; shards are not compared, nor what one rank has
    alone.
    """
    sums = torch.stack([_sum_of_weights(site) for site in sites])
    dist.all_reduce(sums, dist.ReduceOp.MAX, group)
    for site, (largest, smallest, size) in zip(sites, sums.tolist(), strict=True):
        if largest + smallest > TELLS_APART * size:
            return site.name
    return None


@torch.no_grad()
def _sum_of_weights(site: Site) -> Tensor:
    """The sum of the matrices of a layer, its negative, and their size: the root of the sum of squares (3,)."""
    whole = _whole_matrices(site.module)
    none = torch.tensor([-torch.inf, -torch.inf, 0.0], dtype=site.sums.dtype, device=site.sums.device)
    if not whole:
        return none
    entries = torch.cat([p.flatten() for p in whole]).to(none)
    return torch.stack((entries.sum(), -entries.sum(), entries.norm()))


def _whole_matrices(module: nn.Module) -> list[nn.Parameter]:
    """Matrices of an attention module that are on this rank as they are: neither sharded nor partitioned."""
    every = [p for part in (module, *own_children(module).values()) if part for p in own_parameters(part).values()]
    return [p for p in every if type(p) is nn.Parameter and p.ndim > 1 and p.numel() and not is_partitioned(p)]


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
