"""From one attention call on a tape to its layout."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from locater.families.discovered_calls import (
    Call,
    Side,
    UnreadableError,
    by_batch,
    captured_logits,
    mixed_values,
    out_map,
    side,
    split_heads,
)
from locater.families.discovered_layout import AttentionLayout, MapLayout
from locater.families.discovered_logits import read_logits, read_mask
from locater.families.discovered_norms import plain
from locater.families.discovered_probing import Turning, frequencies
from locater.families.discovered_sides import Heads, heads_of, stored_map
from locater.tape import Node, Tape, replay
from locater.tape.walking import LinearMap


@dataclass(frozen=True)
class Place:
    """The parts of one attention call on a tape."""

    call: Call
    query: Side
    key: Side
    queries: Tensor  # (B, H, T, h)
    keys: Tensor  # (B, H, S, h)
    x: Tensor  # (B, T, d): the stream that queries read
    memory: Tensor | None  # (B, S, d): the stream that keys read, where it is another one


def place_of(tape: Tape, call: Call) -> Place:
    """Walk back from queries and keys to their maps and streams."""
    query, key = side(tape, call.query, "queries"), side(tape, call.key, "keys")
    queries = split_heads(call.query.value, _tokens(query.map))
    keys = split_heads(call.key.value.mT if call.key_transposed else call.key.value, _tokens(key.map))
    if queries.shape[0] != keys.shape[0] or queries.shape[1] % keys.shape[1]:
        raise UnreadableError(f"queries {list(queries.shape)} meet keys {list(keys.shape)}")
    x = by_batch(query.stream, queries.shape[0], queries.shape[2])
    memory = by_batch(key.stream, keys.shape[0], keys.shape[2])
    same = x.shape == memory.shape and torch.equal(x, memory)
    keys = keys.repeat_interleave(queries.shape[1] // keys.shape[1], 1)
    return Place(call, query, key, queries, keys, x, None if same else memory)


def read_layout(tape: Tape, call: Call) -> AttentionLayout:
    """The layout of one attention call; what is not known of it is said in the layout."""
    place = place_of(tape, call)
    query, key = heads_of(tape, place.query), heads_of(tape, place.key, call.key_transposed)
    if query.size != key.size or query.count % key.count:
        raise UnreadableError(f"it has {query.count} queries of {query.size} and {key.count} keys of {key.size}")
    products, logits, constant = captured_logits(call, place.queries, place.keys)
    how, unknown = read_logits(call, products, logits, constant)
    how = replace(how, scale=how.scale * query.factor * key.factor)
    layout = AttentionLayout(
        name=plain(call.path),
        heads=query.count,
        kv_heads=key.count,
        head_dim=query.size,
        query=query.map,
        key=key.map,
        logits=how,
        norm=place.query.front,
        memory_norm=None if place.memory is None else place.key.front,
        query_norm=query.norm,
        key_norm=key.norm,
        kind="self" if place.memory is None else "cross",
        product_scale=query.factor * key.factor,
    )
    layout = _turned(tape, layout, query, key)
    if unknown is not None:
        return replace(layout, unknown_logits=unknown, unknown_output=unknown)
    return _with_output(tape, place, layout, constant)


def _with_output(tape: Tape, place: Place, layout: AttentionLayout, constant: Tensor) -> AttentionLayout:
    """The layout with mask, values and output map, or with the reason why these are not known."""
    try:
        how = read_mask(layout.logits, constant)
        mixed, values = mixed_values(tape, place.call)
        part = side(tape, values, "values")
        if not torch.equal(part.stream, place.key.stream):
            raise UnreadableError("its values read another stream than its keys")
        value = heads_of(tape, part)
        if value.norm is not None or value.turn is not None or value.map.inner is not None:
            raise UnreadableError("its values are normalised or turned")
        if value.count != layout.kv_heads or value.factor != 1:
            raise UnreadableError(f"it has {value.count} values for {layout.kv_heads} keys")
        out = out_map(tape, mixed)
        columns = _columns(out, mixed, place)
        stored = stored_map(tape, out, list(range(out.weight.shape[0])), torch.zeros(1))
        return replace(layout, logits=how, value=value.map, out=replace(stored, columns=columns))
    except UnreadableError as error:
        return replace(layout, unknown_output=str(error))


def _turned(tape: Tape, layout: AttentionLayout, query: Heads, key: Heads) -> AttentionLayout:
    """The layout with rotary positions: rows of a head in the order first of each pair, second of each, the rest."""
    one, two = query.turn, key.turn
    if one is None and two is None:
        return layout
    if one is None or two is None or (one.first, one.second) != (two.first, two.second):
        raise UnreadableError("its queries turn otherwise than its keys")
    if one.angles.shape != two.angles.shape or (one.angles - two.angles).abs().max() > 1e-6:
        raise UnreadableError("its queries turn by other angles than its keys")
    if (query.norm or key.norm) and query.norm_last != key.norm_last:
        raise UnreadableError("of its queries and keys, one is normalised before it turns and the other after")
    still = [channel for channel in range(query.size) if channel not in {*one.first, *one.second}]
    order = [*one.first, *one.second, *still]
    known = [tensor for tensor in tape.buffers() if tensor.is_floating_point() and tensor.numel() >= len(one.first)]
    return replace(
        layout,
        query=_ordered_rows(query, order),
        key=_ordered_rows(key, order),
        query_norm=None if query.norm is None else replace(query.norm, channels=tuple(order)),
        key_norm=None if key.norm is None else replace(key.norm, channels=tuple(order)),
        norm_last=query.norm_last or key.norm_last,
        **_positions(one, known),
    )


def _positions(turn: Turning, known: list[Tensor]) -> dict[str, Any]:
    """Frequencies, or a table of angles where these are not position times frequency."""
    steps = frequencies(turn, known)
    if steps is not None:
        return {"frequencies": tuple(steps), "amplitude": turn.amplitude}
    if abs(turn.amplitude - 1) > 1e-6:
        raise UnreadableError("its angles are not position times frequency, and rotation changes sizes")
    return {"angles": tuple(map(tuple, turn.angles.tolist()))}


def _ordered_rows(heads: Heads, order: list[int]) -> MapLayout:
    """The map of these heads with the rows of each in `order`."""
    whole = heads.map
    places = [head * heads.size + channel for head in range(heads.count) for channel in order]
    inner = whole.inner
    if inner is not None and inner.channels is not None:
        inner = replace(inner, channels=tuple(inner.channels[place] for place in places))
    return replace(whole, rows=tuple(whole.rows[place] for place in places), inner=inner)


def _columns(out: LinearMap, mixed: Node, place: Place) -> tuple[int, ...] | None:
    """Where the output map reads each channel of each head; None where it reads them in order."""
    shape = split_heads(mixed.value, place.queries.shape[0] * place.queries.shape[2]).shape
    codes = torch.arange(shape[1] * shape[3]).view(1, shape[1], 1, shape[3]).expand(shape)
    read = replay(out.source, {mixed: codes.to(mixed.value).reshape(mixed.value.shape)})
    read = read.reshape(-1, read.shape[-1])
    if (read != read[:1]).any() or read.shape[-1] != shape[1] * shape[3]:
        raise UnreadableError("its output map reads other numbers than its mixed values")
    order = read[0].long()
    if torch.equal(order, torch.arange(len(order))):
        return None
    if not torch.equal(order.sort().values, torch.arange(len(order))):
        raise UnreadableError("its output map does not read each channel once")
    return tuple(order.argsort().tolist())


def _tokens(linear: LinearMap) -> int:
    return linear.node.value.numel() // linear.node.value.shape[-1]
