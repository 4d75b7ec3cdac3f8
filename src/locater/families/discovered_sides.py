"""From a place on the tape to a layout: rows of the stored maps, norms of queries and keys, rotation."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from locater.families.discovered_calls import Side, UnreadableError, split_heads
from locater.families.discovered_layout import MapLayout
from locater.families.discovered_norms import NormLayout, fitted, plain
from locater.families.discovered_probing import Canonical, Turning, probing, routing, turning
from locater.tape import Tape
from locater.tape.walking import LinearMap


@dataclass(frozen=True)
class Heads:
    """Queries, keys or values of one layer. Rows are in the order of the model."""

    map: MapLayout
    count: int  # heads that differ
    size: int
    factor: float
    norm: NormLayout | None = None
    turn: Turning | None = None
    norm_last: bool = False


def heads_of(tape: Tape, part: Side, transposed: bool = False) -> Heads:
    """What is between a map and queries, keys or values; `transposed`: their last axis is that of tokens."""
    tokens = part.map.node.value.numel() // part.map.node.value.shape[-1]

    def canonical(x: Tensor) -> Tensor:
        return split_heads(x.mT if transposed else x, tokens)

    if len(part.norms) > 1:
        raise UnreadableError("more than one norm is between its map and its queries or keys")
    if part.norms:
        return _normed_heads(tape, part, canonical, tokens)
    channels = part.map.node.value.shape[-1]
    probe = probing(part.node, part.map.node, canonical)
    route = routing(probe, channels)
    turn = turning(probe, route.sources, channels, route.factor)
    count, kept = _different(route.sources)
    stored = stored_map(tape, part.map, kept, route.shift)
    return Heads(stored, count, route.sources.shape[1], route.factor, turn=turn)


def _normed_heads(tape: Tape, part: Side, canonical: Canonical, tokens: int) -> Heads:
    """The same, with a norm in between: of each head, or of all heads at once."""
    norm = part.norms[0]
    made = tape.made[norm]
    layout = fitted(made, made.source.value, norm.value)
    if layout is None:
        raise UnreadableError(f"the norm {made.path} ({type(made.module).__name__}) follows no known formula")
    batch, _, _, size = canonical(part.node.value).shape
    width, channels = norm.value.shape[-1], part.map.node.value.shape[-1]
    after = probing(part.node, norm, canonical)
    late = routing(after, width)
    late_turn = turning(after, late.sources, width, late.factor)
    if width == channels != size:
        count, kept = _different(late.sources)
        if sorted(kept) != list(range(channels)):
            raise UnreadableError(f"the norm {made.path} reads channels that its heads do not")
        stored = replace(stored_map(tape, part.map, kept, late.shift), inner=replace(layout, channels=tuple(kept)))
        return Heads(stored, count, size, late.factor, turn=late_turn)
    if width != size or (late.sources != torch.arange(size)).any():
        raise UnreadableError(f"the norm {made.path} acts on {width} channels of heads of {size}")
    before = probing(made.source, part.map.node, lambda x: _heads_before(x, batch, tokens))
    early = routing(before, channels)
    early_turn = turning(before, early.sources, channels, early.factor)
    if early_turn is not None and late_turn is not None:
        raise UnreadableError(f"its channels turn before and after the norm {made.path}")
    if early.factor != 1:
        raise UnreadableError(f"the norm {made.path} reads a multiple of its map")
    count, kept = _different(early.sources)
    stored = stored_map(tape, part.map, kept, early.shift)
    return Heads(stored, count, size, late.factor, layout, early_turn or late_turn, early_turn is not None)


def _heads_before(x: Tensor, batch: int, tokens: int) -> Tensor:
    """(B, H, T, h) of what a norm of heads reads: (B, T, H, h) or (B, H, T, h)."""
    length = tokens // batch
    if x.ndim == 4 and x.shape[1] == length and x.shape[2] != length:
        return x.transpose(1, 2)
    if x.ndim == 3:
        return split_heads(x, tokens)
    if x.ndim == 4 and x.shape[2] == length:
        return x
    raise UnreadableError(f"its norm of queries or keys reads the shape {list(x.shape)}")


def _different(sources: Tensor) -> tuple[int, list[int]]:
    """(heads that differ, their channels one head after the other); `sources` (H, h) are channels of a map."""
    different = len(sources.unique(dim=0))
    group = len(sources) // different
    if len(sources) % different or (sources != sources[::group].repeat_interleave(group, 0)).any():
        raise UnreadableError("its queries share keys otherwise than in groups of neighbours")
    return different, sources[::group].flatten().tolist()


def stored_map(tape: Tape, linear: LinearMap, channels: list[int], shift: Tensor) -> MapLayout:
    """The stored tensors of a map, with the stored row of each of `channels`."""
    name = tape.parameter(linear.constant)
    assert name is not None
    rows, transposed = _stored_rows(tape, name, linear.weight)
    bias = None
    if linear.bias is not None:
        bias = tape.parameter(linear.bias)
        if bias is None:
            raise UnreadableError(f"the bias of {name} is computed")
    if shift.abs().max() > 0:
        raise UnreadableError(f"a vector is added to what {name} gives, apart from its bias")
    kept = tuple(rows[channel] for channel in channels)
    return MapLayout(plain(name), kept, None if bias is None else plain(bias), transposed)


def _stored_rows(tape: Tape, name: str, weight: Tensor) -> tuple[list[int], bool]:
    """(row of the stored tensor for each channel of the map, whether it is stored (in, out))."""
    stored = tape.tensor(name)
    for transposed in (False, True):
        whole = stored.mT if transposed else stored
        if whole.ndim != 2 or whole.shape[1] != weight.shape[1]:
            continue
        first = (whole == weight[0]).all(-1).nonzero().flatten().tolist()
        for start in first:
            if start + len(weight) <= len(whole) and torch.equal(whole[start : start + len(weight)], weight):
                return list(range(start, start + len(weight))), transposed
    raise UnreadableError(f"its map is computed from {name}, and not a part of it")
