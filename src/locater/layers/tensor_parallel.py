"""Heads that are split over ranks. Under tensor parallelism each rank computes a part of the heads of every layer.

How a parameter is split in the forward pass is read from its placements (DTensor). FSDP2 shards parameters over ranks
that have different batches and gathers them for the forward pass, so its dimensions of the mesh are left out.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.sources.live_tensors import is_a
from locater.sources.weights import WRAPPERS
from locater.torch_private import fsdp_parameters, own_parameters, placement_of

EXPERTS = "expert"  # experts are spread over ranks that have different batches: their placements say nothing of heads


@dataclass(frozen=True)
class Split:
    """What this rank computes of the heads of one attention module.

    Heads are cut into `parts` equal runs, and this rank has the one of number `part`. `copies` ranks compute the same
    heads of the same batch; `counts` is true on one of them.
    """

    part: int = 0
    parts: int = 1
    copies: int = 1
    counts: bool = True

    def run(self, heads: int) -> tuple[int, int]:
        """The first head of this rank, and the one after its last, of a module with this many heads.

        >>> Split(part=1, parts=2).run(8)
        (4, 8)
        """
        return self.part * heads // self.parts, (self.part + 1) * heads // self.parts


WHOLE = Split()


@dataclass(frozen=True)
class _Placed:
    """How one parameter is placed in the forward pass: the ranks of its mesh, and the axis that each dimension cuts."""

    name: str
    ranks: Tensor  # as the mesh: one axis per dimension
    cuts: tuple[bool, ...]  # whether each dimension cuts the parameter

    def own_place(self) -> list[int]:
        """The coordinates of this rank."""
        here = (self.ranks == torch.distributed.get_rank()).nonzero()
        if not len(here):
            raise LocaterError(f"{self.name}: its mesh does not have this rank, so its heads cannot be counted here")
        return [int(x) for x in here[0]]


class SplitHeads:
    """Of one model, as its parameters are placed now."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._placed = list(_placements(model)) if _is_distributed() else []
        self._together = self._same_batch()

    @property
    def is_any(self) -> bool:
        """Whether several ranks compute parts of this model on the same batch."""
        return len(self._together) > 1

    def of(self, name: str, heads: int | None = None) -> Split:
        """Of the attention module of this name, whose number of heads has to be a multiple of the parts."""
        if not self._together:
            return WHOLE
        cuts = {}
        for placed in self._near(name):
            place = placed.own_place()
            for axis, cut in enumerate(placed.cuts):
                if cut:
                    others = placed.ranks[tuple(slice(None) if i == axis else x for i, x in enumerate(place))]
                    cuts[tuple(others.tolist())] = place[axis]
        if len(cuts) > 1:
            raise LocaterError(
                f"{name}: its parameters are split over several dimensions of the mesh, so the heads of this rank are "
                "not known: split them over one"
            )
        parts, part = next(((len(ranks), place) for ranks, place in cuts.items()), (1, 0))
        if heads is not None and heads % parts:
            raise LocaterError(f"{name}: {heads} heads cannot be split evenly over {parts} ranks")
        copies, rank = len(self._together) // parts, torch.distributed.get_rank()
        if parts > 1 and copies > 1:
            raise LocaterError(
                f"{name}: its heads are split over {parts} of the {len(self._together)} ranks that have the same "
                "batch: split them over all or over none"
            )
        return Split(part, parts, copies, parts > 1 or rank == min(self._together))

    def _near(self, name: str) -> list[_Placed]:
        """Parameters of a module; of the one around it, where it has none (a part that only attends)."""
        while True:
            within = [x for x in self._placed if not name or x.name.startswith(f"{name}.")]
            if within or not name or _has_parameters(self.model, name):
                return within
            name = name.rpartition(".")[0]

    def _same_batch(self) -> frozenset[int]:
        """The ranks that have the batch of this one; empty where parameters are split over none."""
        together: frozenset[int] = frozenset()
        for placed in self._placed:
            ranks = frozenset(placed.ranks.flatten().tolist())
            if not (ranks <= together or together <= ranks):
                raise LocaterError(
                    f"{placed.name}: it is placed on other ranks than parameters before it, so which ranks have the "
                    "same batch is not known: split the model over one mesh"
                )
            together |= ranks
        return together


def _is_distributed() -> bool:
    return torch.distributed.is_available() and torch.distributed.is_initialized()


def _has_parameters(model: nn.Module, name: str) -> bool:
    return any(WRAPPERS.sub("", path).startswith(f"{name}.") for path, _ in model.named_parameters())


def _placements(model: nn.Module) -> Iterator[_Placed]:
    gathered = _before_fsdp(model)
    for path, module in model.named_modules():
        if EXPERTS in path:
            continue
        for name, p in own_parameters(module).items():
            spec, data = gathered.get((id(module), name), (placement_of(p), frozenset()))
            if spec is None:
                continue
            mesh = spec.mesh
            names = mesh.mesh_dim_names or [None] * mesh.ndim
            kept = [axis for axis in range(mesh.ndim) if mesh.size(axis) > 1 and names[axis] not in data]
            if kept:
                yield _Placed(
                    WRAPPERS.sub("", f"{path}.{name}"),
                    _own_part(mesh, kept),
                    tuple(spec.placements[axis].is_shard() for axis in kept),
                )


def _own_part(mesh: Any, kept: list[int]) -> Tensor:
    """The ranks of a mesh (one axis for each of `kept`) that share the other coordinates of this rank."""
    place = mesh.get_coordinate()
    if place is None:
        return mesh.mesh.flatten()[:0].reshape([0] * len(kept))
    ranks: Tensor = mesh.mesh[tuple(slice(None) if axis in kept else place[axis] for axis in range(mesh.ndim))]
    return ranks


def _before_fsdp(model: nn.Module) -> dict[tuple[int, str], tuple[Any, frozenset[str]]]:
    """How parameters of FSDP2 are placed once it has gathered them (None: plain tensors), and the names of dimensions
    of the mesh over which batches differ, by module and name.
    """
    found: dict[tuple[int, str], tuple[Any, frozenset[str]]] = {}
    for part in model.modules():
        if not is_a(part, "torch.distributed.fsdp", "FSDPModule"):
            continue
        try:
            for parameter in fsdp_parameters(part):
                dims = getattr(parameter.mesh_info, "dp_mesh_dims", None)
                data = frozenset() if dims is None else frozenset([*dims.shard_names, *dims.replicate_names])
                for module, name in parameter.uses:
                    found[id(module), name] = parameter.gathered, data
        except AttributeError as error:
            raise LocaterError(
                f"{type(model).__name__}: FSDP2 of torch {torch.__version__} does not tell how parameters were placed "
                f"before it ({error}), so heads that are split over ranks cannot be told from heads that are not"
            ) from None
    return found
