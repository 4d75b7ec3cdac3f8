"""Projections that are no single matrix: `NormedProjection` and `JoinedProjection`, rows of several maps of one stream.

A `NormedProjection` is a map with a norm inside: the latent of DeepSeek's attention, and norms of queries and keys with
gains per head.

Calling it is exact. `weight()` and `bias` are its mean field, as for query and key norms in `effective`: in place of
each token's own root mean square stands that over unit tokens, so that it can be used as a matrix.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch
from torch import Tensor

from locater.layers.layer import Fold, Projection
from locater.layers.norm import Norm
from locater.layers.norm_folding import centred, folded, mean_field_gain
from locater.layers.row_readers import RowReader, row_reader
from locater.numerics import upcast


@dataclass(frozen=True)
class NormedProjection(Projection):
    """up(inner(down(x))), with `shared(x)` put in front of each head's channels. Build it with `normed`."""

    down: Projection = field(kw_only=True)
    inner: Norm = field(kw_only=True)  # over each block of down's rows; gain (blocks, rows) or (rows,)
    blocks: int = field(kw_only=True)
    up: Projection | None = field(kw_only=True)
    shared: Projection | None = field(kw_only=True)  # keys: rotary channels that all heads have in common
    heads: int = field(kw_only=True)

    def __call__(self, x: Tensor) -> Tensor:
        y = self.inner(self.down(x).unflatten(-1, (self.blocks, -1))).flatten(-2)
        if self.up is not None:
            y = self.up(y)
        return y if self.shared is None else _fronted(self.shared(x), y, self.heads)

    def linear(self, fold: Fold) -> Projection:
        """Its mean field, with the root mean square over the tokens that `fold` folds in."""
        weight, bias = self._mean_field(fold)
        return Projection(lambda: weight, self.shape, bias)

    def _mean_field(self, fold: Fold) -> tuple[Tensor, Tensor]:
        """(weight, bias)."""
        weight, bias = self._latent(fold)
        if self.up is not None:
            high = upcast(self.up.weight()).to(weight)
            weight = self._raised(weight, self.up, lambda start, stop: high[start:stop])(0, self.shape[0])
            bias = high @ bias if self.up.bias is None else high @ bias + self.up.bias.to(weight)
        if self.shared is not None:
            first = bias.new_zeros(self.shared.shape[0]) if self.shared.bias is None else self.shared.bias.to(bias)
            bias = _fronted(first, bias, self.heads)
        return weight, bias

    def _raised(self, latent: Tensor, up: Projection, read: RowReader) -> RowReader:
        """Ranges of rows of the mean field, given that of the map in front of the norm; `read` reads rows of `up`."""
        if self.shared is None:
            return lambda start, stop: upcast(read(start, stop)).to(latent) @ latent
        shared, size = self.shared.weight().to(latent), up.shape[0] // self.heads
        whole = size + len(shared)  # rows of a head

        def rows(start: int, stop: int) -> Tensor:
            first, last = start // whole, -(-stop // whole)
            own = (upcast(read(first * size, last * size)).to(latent) @ latent).unflatten(0, (last - first, size))
            heads = torch.cat([shared.expand(last - first, *shared.shape), own], 1).flatten(0, 1)
            return heads[start - first * whole : stop - first * whole]

        return rows

    def _latent(self, fold: Fold) -> tuple[Tensor, Tensor]:
        """(weight, bias) of the map in front of the norm and the norm itself."""
        down, inner = self.down, self.inner
        weight = upcast(down.weight()).unflatten(0, (self.blocks, -1))
        seen, shift = (centred(part, inner) for part in fold(weight, down))
        gain = mean_field_gain(seen, shift, inner)  # (blocks, rows)
        bias = weight.new_zeros(weight.shape[:2]) if down.bias is None else down.bias.to(weight).view(weight.shape[:2])
        weight, bias = (centred(weight, inner) * gain[..., None]).flatten(0, 1), centred(bias, inner) * gain
        return weight, (bias if inner.bias is None else bias + inner.bias.to(weight)).flatten()


@dataclass(frozen=True)
class _MeanField:
    """The weight of a `NormedProjection`. Of a map behind a latent, ranges of rows can be read."""

    of: NormedProjection
    fold: Fold

    def __call__(self) -> Tensor:
        return self.of._mean_field(self.fold)[0]

    def by_rows(self) -> RowReader:
        latent, up = self.of._latent(self.fold)[0], self.of.up
        if up is None:
            return lambda start, stop: latent[start:stop]
        return self.of._raised(latent, up, row_reader(up.weight))


def _unread() -> Tensor:
    raise AssertionError("the weight of a NormedProjection is its mean field")


def normed(
    down: Projection,
    inner: Norm,
    before: Norm,
    *,
    blocks: int = 1,
    up: Projection | None = None,
    shared: Projection | None = None,
    heads: int = 1,
) -> NormedProjection:
    """`before` is the norm in front of attention: unit tokens pass through its gain before they reach `down`."""

    assert shared is None or up is not None, "channels that heads share stand beside those from a latent"
    parts = (down, up, shared)
    # its bias is computed now, from the matrices, and not when it is used; few checkpoints have one
    biased = inner.bias is not None or any(part is not None and part.bias is not None for part in parts)
    out = (up or down).shape[0] + (0 if shared is None else heads * shared.shape[0])
    fold = partial(folded, norm=before)
    bare = NormedProjection(
        _unread,
        (out, down.shape[1]),
        None,
        down=down,
        inner=inner,
        blocks=blocks,
        up=up,
        shared=shared,
        heads=heads,
    )
    projection = replace(bare, weight=_MeanField(bare, fold))
    return replace(projection, bias=bare._mean_field(fold)[1]) if biased else projection


def _fronted(shared: Tensor, own: Tensor, heads: int) -> Tensor:
    """Channels that all heads share, in front of each head's own; on the last axis."""
    own = own.unflatten(-1, (heads, -1))
    shared = shared.unsqueeze(-2).expand(*own.shape[:-1], -1)
    return torch.cat([shared, own], -1).flatten(-2)


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
