"""Pipelines: each rank has a stage, with layers of its own. Together their layers are those of one model.

Every rank learns of the layers of the others, and has rows for them in its table, which stay empty until `reduce()`
adds up the tables of all ranks: as for heads that are split over ranks.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch.distributed as dist
from torch import nn

from locater.calls.listeners import ListeningSwitch
from locater.observing.accumulate import StatisticsOptions
from locater.observing.layers_by_record import KnownLayer
from locater.observing.listening_site import Site, clear, device_of


@dataclass(frozen=True)
class StageLayer:
    """A layer of some stage."""

    name: str
    kind: str
    group: int
    count: int
    heads: list[int]
    output_size: int | None
    placed: bool
    layer: KnownLayer | None


class PipelineStages:
    """The stages of one pipeline, in order: the ranks of `group` (a process group, or a mesh of one dimension)."""

    def __init__(self, group: Any) -> None:
        self.group = group.get_group() if hasattr(group, "get_group") else group
        self.first = 0  # the number of this stage's first layer
        self.joined = False

    def join(self, model: nn.Module, sites: list[Site], switch: ListeningSwitch, options: StatisticsOptions) -> None:
        """Put the layers of the other stages around those of this one in `sites`: a collective."""
        own = [StageLayer(*(getattr(site, each.name) for each in fields(StageLayer))) for site in sites]
        stages: list[list[StageLayer]] = self.gathered(own)
        here, names = dist.get_rank(self.group), [layer.name for stage in stages for layer in stage]
        alike = len({*names}) < len(names)  # each stage counts its layers from 0
        self.first = sum(map(len, stages[:here]))
        every: list[Site] = []
        others: list[Site] = []
        for at, stage in enumerate(stages):
            for place, layer in enumerate(stage):
                if at == here:
                    site = sites[place]
                else:
                    site = Site(
                        number=0,
                        module=_Elsewhere(),
                        switch=switch,
                        options=options,
                        device=device_of(model),
                        **vars(layer),
                    )
                    others.append(site)
                site.name, site.number = f"stages.{at}.{layer.name}" if alike else layer.name, len(every)
                every.append(site)
        clear(others)
        sites[:] = every
        self.joined = True

    def gathered(self, own: Any) -> list[Any]:
        """What each stage has, in their order: a collective."""
        stages: list[Any] = [None] * dist.get_world_size(self.group)
        dist.all_gather_object(stages, own, self.group)
        return stages

    def is_own(self, site: Site) -> bool:
        """Whether a layer is of this stage."""
        return type(site.module) is not _Elsewhere

    def share_columns(
        self, table: Mapping[Any, dict[str, Any]], names: Sequence[str], outputs: int | None
    ) -> int | None:
        """Give the columns that each stage computed for its own heads to all, and return the `outputs` of the last."""
        own = {place: {name: row[name] for name in names if name in row} for place, row in table.items()}
        stages = self.gathered((own, outputs))
        for columns, _ in stages:
            for place, row in columns.items():
                if place in table:
                    table[place].update(row)
        last: int | None = stages[-1][1]
        return last


class _Elsewhere(nn.Module):
    """In place of the module of a layer that another stage has."""
