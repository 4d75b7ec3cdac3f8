"""From one attention call on a tape to its layout."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from locater.discovery.calls import Call, mixed_values
from locater.discovery.errors import UnreadableError
from locater.discovery.logits import read_logits
from locater.discovery.masks import read_mask
from locater.discovery.norms import plain
from locater.discovery.outputs import Output, output_of
from locater.discovery.place import Place, captured_logits, place_of, side
from locater.discovery.sides import Heads, heads_of, stored_map
from locater.discovery.tape import Tape
from locater.discovery.turning import Turning, frequencies
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.layers.map_layouts import AnyMap, MapLayout


def read_layout(tape: Tape, call: Call) -> AttentionLayout:
    """The layout of one attention call; what is not known of it is said in the layout."""
    place = place_of(tape, call)
    grid = place.grid
    query = heads_of(tape, place.query, grid.query_order, grid.queries)
    key = heads_of(tape, place.key, grid.key_order, grid.keys)
    if query.size != key.size or query.count % key.count:
        raise UnreadableError(f"it has {query.count} queries of {query.size} and {key.count} keys of {key.size}")
    layout = AttentionLayout(
        name=plain(call.path),
        heads=query.count,
        kv_heads=key.count,
        head_dim=query.size,
        query=query.map,
        key=key.map,
        logits=LogitsLayout(),
        norm=place.query.front,
        memory_norm=None if place.memory is None else place.key.front,
        query_norm=query.norm,
        key_norm=key.norm,
        kind="self" if place.memory is None else "cross",
        product_scale=query.factor * key.factor,
    )
    return _with_output(tape, place, _with_logits(tape, place, _turned(tape, layout, query, key), query.factor))


def _with_logits(tape: Tape, place: Place, layout: AttentionLayout, factor: float) -> AttentionLayout:
    """The layout with what makes logits of its products, or with the reason why that is not known."""
    try:
        captured = captured_logits(place)
        how, unknown = read_logits(tape, place, captured, place.queries / factor)
    except UnreadableError as error:
        return replace(layout, unknown_scale=str(error), unknown_logits=str(error), unknown_mask=str(error))
    how = replace(how, scale=how.scale * layout.product_scale)
    return _with_mask(replace(layout, logits=how, unknown_logits=unknown), captured[2])


def _with_mask(layout: AttentionLayout, constant: Tensor) -> AttentionLayout:
    """The layout with its mask, or with the reason why that is not known."""
    try:
        if layout.kind == "self" and constant.shape[-2] < 2:
            raise UnreadableError("the example has one token, which shows no mask")
        how = read_mask(layout.logits, constant)
        if layout.kind == "cross" and (how.causal or how.window or how.chunk):  # keys of an earlier layer
            raise UnreadableError("its keys are those of another stream, and hidden by their distance")
        return replace(layout, logits=how)
    except UnreadableError as error:
        return replace(layout, unknown_mask=str(error))


def _with_output(tape: Tape, place: Place, layout: AttentionLayout) -> AttentionLayout:
    """The layout with values and output map, or with the reason why these are not known."""
    if layout.unknown_logits is not None:
        return replace(layout, unknown_output=layout.unknown_logits)
    try:
        mixed, values = mixed_values(tape, place.call)
        part = side(tape, values, "values", place.call.path)
        order, tokens = place.grid.others(part.rows, part.lead)
        same = torch.equal(part.stream[tokens], place.key.stream[place.grid.keys])
        own = None if same and part.front == place.key.front else part.front
        value = heads_of(tape, part, order, tokens)
        if value.turn is not None:
            raise UnreadableError("its values turn with position")
        if value.factor != 1:
            raise UnreadableError(f"its values are multiplied by {value.factor:.4g}")
        layout, value = _as_many_keys_as_values(layout, value)
        return replace(
            _with_map(tape, layout, output_of(tape, mixed, place)),
            value=value.map,
            value_stream_norm=own,
            head_value_norm=value.norm,
        )
    except UnreadableError as error:
        return replace(layout, unknown_output=str(error))


def _as_many_keys_as_values(layout: AttentionLayout, value: Heads) -> tuple[AttentionLayout, Heads]:
    """The same with as many keys as values: of the two, the fewer heads are repeated."""
    keys, values = layout.kv_heads, value.count
    if keys == values:
        return layout, value
    if max(keys, values) % min(keys, values):
        raise UnreadableError(f"it has {values} values for {keys} keys")
    if keys > values:
        return layout, replace(value, map=_repeated_heads(value.map, values, value.size, keys // values), count=keys)
    key = _repeated_heads(layout.key, keys, layout.head_dim, values // keys)
    return replace(layout, key=key, kv_heads=values), value


def _repeated_heads(whole: AnyMap, heads: int, size: int, times: int) -> AnyMap:
    """Each head `times` times."""
    if isinstance(whole, MapLayout) and whole.inner is not None:
        raise UnreadableError("heads that share keys or values have a norm in common")
    return whole.picked([head * size + row for head in range(heads) for _ in range(times) for row in range(size)])


def _with_map(tape: Tape, layout: AttentionLayout, out: Output) -> AttentionLayout:
    """The layout with its output map, and the norm or the gate in front of that."""
    stored = stored_map(tape, out.map, list(range(out.map.weight.shape[0])))
    layout = replace(
        layout, out=replace(stored, columns=out.columns), mixed_norm=out.norm, mixed_norm_apart=out.norm_apart
    )
    if out.gate is None:
        return layout
    return replace(layout, gate=stored_map(tape, out.gate.map, list(out.gate.rows)), gate_function=out.gate.function)


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
        query_norm=None if query.norm is None else query.norm.picked(order),
        key_norm=None if key.norm is None else key.norm.picked(order),
        norm_last=query.norm_last or key.norm_last,
        **_positions(one, known),
    )


def _positions(turn: Turning, known: list[Tensor]) -> dict[str, Any]:
    """Frequencies, or a table of angles where these are not position times frequency."""
    steps = frequencies(turn, known)
    if steps is not None:
        return {"frequencies": tuple(steps[0]), "first_position": steps[1], "amplitude": turn.amplitude}
    if abs(turn.amplitude - 1) > 1e-6:
        raise UnreadableError("its angles are not position times frequency, and rotation changes sizes")
    return {"angles": tuple(map(tuple, turn.angles.tolist()))}


def _ordered_rows(heads: Heads, order: list[int]) -> AnyMap:
    """The map of these heads with the rows of each in `order`."""
    return heads.map.picked([head * heads.size + channel for head in range(heads.count) for channel in order])
