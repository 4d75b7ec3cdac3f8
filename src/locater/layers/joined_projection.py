"""`JoinedProjection`: rows of several maps of one stream, as one map."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from locater.layers.layer import Fold, Projection
from locater.layers.projection_with_norm import NormedProjection


@dataclass(frozen=True)
class JoinedProjection(Projection):
    """The rows of `parts`, one after the other, in the order `places`. Build it with `joined_maps`."""

    parts: tuple[Projection, ...] = field(kw_only=True)
    places: Tensor = field(kw_only=True)  # (out,)

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([part(x) for part in self.parts], -1)[..., self.places.to(x.device)]

    def linear(self, fold: Fold) -> Projection:
        """The same with the mean field of parts that have a norm inside."""
        return joined_maps([part.linear(fold) for part in self.parts], self.places)


def joined_maps(parts: Sequence[Projection], places: Tensor) -> JoinedProjection:
    """One map of the rows `places` of several maps.

    >>> one, two = (Projection(lambda n=n: torch.full((1, 2), n), (1, 2)) for n in (1.0, 2.0))
    >>> joined_maps([one, two], torch.tensor([1, 0])).weight()
    tensor([[2., 2.],
            [1., 1.]])
    """
    shape = (len(places), parts[0].shape[1])
    whole = JoinedProjection(lambda: _weight(parts, places), shape, None, parts=tuple(parts), places=places)
    if all(part.bias is None for part in parts):
        return whole
    biases = [torch.zeros(part.shape[0]) if part.bias is None else part.bias for part in parts]
    kind = next(part.bias for part in parts if part.bias is not None)
    return replace(whole, bias=torch.cat([bias.to(kind) for bias in biases])[places.to(kind.device)])


def norm_inside(projection: Projection) -> bool:
    """Whether a norm stands between what a map reads and its rows: as a matrix it is a mean field."""
    if isinstance(projection, JoinedProjection):
        return any(map(norm_inside, projection.parts))
    return isinstance(projection, NormedProjection)


def _weight(parts: Sequence[Projection], places: Tensor) -> Tensor:
    weights = [part.weight() for part in parts]
    precise = torch.promote_types(weights[0].dtype, weights[-1].dtype)
    return torch.cat([weight.to(weights[0].device, precise) for weight in weights])[places.to(weights[0].device)]
