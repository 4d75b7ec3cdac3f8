"""From one attention call on a tape to its layout."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch
from torch import Tensor

from locater.discovery.attention_site import (
    AttentionSite,
    LatentMap,
    ProjectionTrace,
    call_logits,
    site_of,
    trace_projection,
)
from locater.discovery.linear_per_token import TapePath, Wiring, token_rows, wiring_of
from locater.discovery.logits import read_logits
from locater.discovery.masks import read_mask
from locater.discovery.norm_and_rotary_fit import HeadRows, Rotation, fit_norm, frequencies, head_rows, unwrapped_path
from locater.discovery.output_map import OutputMap, output_map_of
from locater.discovery.tape import Node, Tape
from locater.discovery.tape.linear_maps import LinearMap
from locater.discovery.taped_calls import TapedCall, mixed_values
from locater.errors import UnreadableError
from locater.layers.layer import FUNCTIONS
from locater.layers.layout import AttentionLayout, LogitsLayout, PairTermsLayout, RotaryLayout
from locater.layers.map_layouts import AnyMap, JoinedLayout, MapLayout, NormLayout, VectorLayout, runs_of

# From a place on the tape to a layout: rows of the stored maps, norms of queries and keys, rotation.


FACTOR_FUNCTIONS = ("identity", "softplus", "sigmoid")  # functions of stored numbers that are factors of channels
LARGEST_VECTOR = 16_384  # numbers of a stored tensor that may be a learned vector


@dataclass(frozen=True)
class ProjectedHeads:
    """Queries, keys or values of one layer. Rows are in the order of the model."""

    map: AnyMap
    count: int  # heads that differ
    size: int
    factor: float
    norm: NormLayout | None = None
    turn: Rotation | None = None
    norm_last: bool = False


def projected_heads(tape: Tape, part: ProjectionTrace, order: Tensor, tokens: Tensor) -> ProjectedHeads:
    """What is between the maps and queries, keys or values; `order` (B, H) and `tokens` (B, T) as in `wiring_of`."""
    wiring = wiring_of(part.passage, order, tokens)
    if not part.norms:
        return _unnormed_heads(tape, part, wiring)
    if len(part.norms) > 1:
        raise UnreadableError("more than one norm is between its map and its queries or keys")
    node = part.norms[0]
    made = tape.made[node]
    layout = fit_norm(made, made.source.value, node.value, node)
    if layout is None:
        raise UnreadableError(f"the norm {made.path} ({type(made.module).__name__}) follows no known formula")
    width, size = node.value.shape[-1], wiring.sources.shape[1]
    after = TapePath(part.node, (node,), (width,), (), part.passage.transposed)
    if width == len(part.maps[0].weight) != size:
        return _heads_normed_together(tape, part, wiring, layout, head_rows(wiring_of(after, order, tokens)))
    if width != size:
        raise UnreadableError(f"the norm {made.path} acts on {width} channels of heads of {size}")
    return _heads_normed_apart(tape, part, wiring, layout, after)


def _unnormed_heads(tape: Tape, part: ProjectionTrace, wiring: Wiring) -> ProjectedHeads:
    """Heads without a norm."""
    whole = head_rows(wiring)
    stored = _stored_rows_of_heads(tape, part, whole, wiring)
    return ProjectedHeads(stored, _count_groups(wiring.heads), whole.rows.shape[1], whole.factor, turn=whole.turn)


def _heads_normed_together(
    tape: Tape, part: ProjectionTrace, wiring: Wiring, layout: NormLayout, late: HeadRows
) -> ProjectedHeads:
    """Heads with one norm over all of them; `late` is what is behind it."""
    heads, whole, where = (
        _unnormed_heads(tape, part, wiring),
        head_rows(wiring),
        f"the norm {tape.made[part.norms[0]].path}",
    )
    if len(part.maps) > 1 or not torch.equal(late.rows, whole.rows) or not isinstance(heads.map, MapLayout):
        raise UnreadableError(f"{where} reads its channels in another order than the heads")
    if late.factors is not None or whole.factors is not None:
        raise UnreadableError(f"behind {where}, channels have factors of their own")
    channels = late.rows.flatten().tolist()
    if sorted(channels) != list(range(len(channels))) or len(channels) != len(part.maps[0].weight):
        raise UnreadableError(f"{where} reads channels that its heads do not")
    _refuse_split_rotation(whole, late, where)
    inner = layout.picked(channels)
    return replace(heads, map=replace(heads.map, inner=inner), factor=late.factor)


def _heads_normed_apart(
    tape: Tape, part: ProjectionTrace, wiring: Wiring, layout: NormLayout, after: TapePath
) -> ProjectedHeads:
    """Heads with a norm of each; `after` leads from the norm on."""
    where = f"the norm {tape.made[part.norms[0]].path}"
    rows = token_rows(after)
    late = head_rows(wiring_of(after, torch.arange(len(rows))[:, None], rows))
    behind = late.factor if late.factors is None else late.factors[0]  # (h,)
    if late.turn is None:
        wiring = replace(
            wiring,
            coefficients=wiring.coefficients / torch.as_tensor(behind)[..., None],
            shift=wiring.shift / torch.as_tensor(behind),
        )
        heads = _unnormed_heads(tape, part, wiring)
        if heads.turn is not None and abs(heads.turn.amplitude - 1) > 1e-6:
            raise UnreadableError(f"{where} reads channels that a rotation made larger")
        if abs(heads.factor - 1) > 1e-6 or (isinstance(heads.map, MapLayout) and heads.map.factors is not None):
            raise UnreadableError(f"{where} reads a multiple of its map")
    else:
        heads = _unnormed_heads(tape, part, wiring)
        _refuse_split_rotation(head_rows(wiring), late, where)
        if abs(heads.factor / late.factor - 1) > 1e-6:
            raise UnreadableError(f"{where} reads a multiple of its map")
    norm_last = late.turn is None and heads.turn is not None
    channels = late.rows[0].tolist()
    norm = layout.picked(channels)
    if late.factors is not None:
        norm = replace(norm, factors=_learned_factors(tape, after, late.factors[0]))
    return replace(heads, factor=late.factor, norm=norm, norm_last=norm_last)


def _refuse_split_rotation(whole: HeadRows, late: HeadRows, where: str) -> None:
    """Refuse a rotation of which a part is in front of the norm."""
    if whole.turn is None and late.turn is None:
        return
    if (
        whole.turn is None
        or late.turn is None
        or (whole.turn.first, whole.turn.second) != (late.turn.first, late.turn.second)
    ):
        raise UnreadableError(f"its channels rotate before and after {where}")
    if (torch.exp(1j * (whole.turn.angles - late.turn.angles)) - 1).abs().max() > 1e-6:
        raise UnreadableError(f"its channels rotate before and after {where}")


def _count_groups(heads: list[int]) -> int:
    """How many heads differ; neighbours are alike."""
    count = len(set(heads))
    group = len(heads) // count
    if len(heads) % count or heads != [head // group * group for head in range(len(heads))]:
        raise UnreadableError("its queries share keys, and not in groups of neighbours")
    return count


def _stored_rows_of_heads(tape: Tape, part: ProjectionTrace, whole: HeadRows, wiring: Wiring) -> AnyMap:
    """The stored rows of all heads, one head after the other."""
    channels = whole.rows.flatten()
    shift = wiring.shift
    if (shift - shift[:1, :1]).abs().max() > 1e-9 * max(1.0, float(shift.abs().max())):
        raise UnreadableError("a vector that changes with position is added to its queries, keys or values")
    added = shift[0, 0].flatten()
    starts = torch.tensor([0, *torch.tensor(part.passage.widths).cumsum(0).tolist()])
    owner = torch.bucketize(channels, starts[1:], right=True)
    layouts, places = [], torch.zeros_like(channels)
    offset = 0
    for number, (linear, latent) in enumerate(zip(part.maps, part.latents, strict=True)):
        own = (owner == number).nonzero().flatten()
        if not own.numel():
            continue
        rows, inverse = _without_repetitions((channels[own] - starts[number]).tolist())
        layouts.append(layout_of_map(tape, linear, rows, latent))
        places[own] = torch.tensor(inverse) + offset
        offset += len(rows)
    if len(layouts) == 1:
        layout = layouts[0].picked(places.tolist())
        if added.abs().max() > 0:
            layout = replace(layout, shift=_stored_vector(tape, part.passage, added / whole.factor))
        return (
            layout
            if whole.factors is None
            else replace(layout, factors=_learned_factors(tape, part.passage, whole.factors))
        )
    if added.abs().max() > 0 or whole.factors is not None:
        raise UnreadableError(
            "a vector is added to what several maps give, or their channels have factors of their own"
        )
    return JoinedLayout(tuple(layouts), runs_of(places.tolist()), len(whole.rows))


def _without_repetitions(rows: list[int]) -> tuple[list[int], list[int]]:
    """(rows without repetition, the place of each row among these)."""
    unique = list(dict.fromkeys(rows))
    site = {row: at for at, row in enumerate(unique)}
    return unique, [site[row] for row in rows]


def _stored_vectors(tape: Tape, passage: TapePath) -> Iterator[tuple[Tensor, str]]:
    """Stored tensors that take part between the cuts and the target, flattened, with their names."""
    todo, seen, names = [passage.target], set(passage.cuts), set()
    while todo:
        for node in todo.pop().inputs:
            if node in seen:
                continue
            seen.add(node)
            if node.moving:
                todo.append(node)
                continue
            name = tape.parameter(node)
            if name is not None and name not in names and 0 < tape.tensor(name).numel() <= LARGEST_VECTOR:
                names.add(name)
                yield tape.tensor(name).double().flatten(), name


def _stored_vector(tape: Tape, passage: TapePath, values: Tensor) -> VectorLayout:
    """The stored tensor that holds these numbers."""
    for stored, name in _stored_vectors(tape, passage):
        nearest = (stored - values[:, None]).abs().min(-1)
        if (nearest.values <= 1e-9 * values.abs().max()).all():
            return VectorLayout(unwrapped_path(name), runs_of(nearest.indices.tolist()))
    raise UnreadableError("a vector that is no parameter is added to its queries, keys or values")


def _learned_factors(tape: Tape, passage: TapePath, factors: Tensor) -> VectorLayout:
    """The stored tensor that these factors are a multiple of, or of a function of."""
    values = factors.flatten()
    for (stored, name), function in product(_stored_vectors(tape, passage), FACTOR_FUNCTIONS):
        made = FUNCTIONS[function](stored)
        for multiple in values[0] / made[made.abs() > 0]:
            nearest = (made * multiple - values[:, None]).abs().min(-1)
            if (nearest.values <= 1e-7 * values.abs().max()).all():
                return VectorLayout(unwrapped_path(name), runs_of(nearest.indices.tolist()), float(multiple), function)
    raise UnreadableError("channels of its queries, keys or values have factors of their own")


def layout_of_map(tape: Tape, linear: LinearMap, channels: list[int], latent: LatentMap | None = None) -> MapLayout:
    """The stored tensors of a map, with the stored row of each of `channels`."""
    name = tape.parameter(linear.constant)
    assert name is not None
    rows, transposed, axes = _stored_rows(tape, name, linear.weight)
    bias = None
    if linear.bias is not None:
        bias = _stored_bias(tape, linear.bias, rows)
        if bias is None:
            raise UnreadableError(f"the bias of {name} is computed")
    kept = runs_of(rows[channel] for channel in channels)
    shape, bias = tuple(tape.tensor(name).shape), None if bias is None else unwrapped_path(bias)
    layout = MapLayout(unwrapped_path(name), shape, kept, bias, transposed, axes=axes)
    if latent is None:
        return layout
    down, norm = _map_of_latent(tape, latent)
    return replace(layout, latent=down, latent_norm=norm)


def _stored_bias(tape: Tape, bias: Node, rows: list[int]) -> str | None:
    """The stored tensor that holds a bias in these rows; one that a call puts together is found by its numbers."""
    for name in tape.parameters(bias):
        stored = tape.tensor(name)
        if stored.ndim == 1 and len(stored) > max(rows) and torch.equal(stored[rows].to(bias.value), bias.value):
            return name
    return None


def _map_of_latent(tape: Tape, latent: LatentMap) -> tuple[MapLayout, NormLayout | None]:
    """The map of a latent and its norm."""
    rows = token_rows(latent.passage)
    wiring = wiring_of(latent.passage, torch.arange(len(rows))[:, None], rows)
    whole = head_rows(wiring)
    if whole.turn is not None or whole.factors is not None or whole.factor != 1 or wiring.shift.abs().max() > 0:
        raise UnreadableError("what is between its two maps is no norm")
    norm = None if latent.norm.kind == "none" else latent.norm
    return layout_of_map(tape, latent.map, whole.rows[0].tolist()), norm


def _stored_rows(tape: Tape, name: str, weight: Tensor) -> tuple[list[int], bool, int]:
    """(row of the stored tensor for each channel of the map, whether it is stored (in, out), how many of its axes are
    flattened into the first of two).
    """
    stored = tape.tensor(name)
    for transposed, axes in product((False, True), range(1, stored.ndim)):
        whole = stored.flatten(0, axes - 1).flatten(1)
        whole = whole.mT if transposed else whole
        if whole.shape[1] != weight.shape[1]:
            continue
        first = (whole == weight[0]).all(-1).nonzero().flatten().tolist()
        for start in first:
            if start + len(weight) <= len(whole) and torch.equal(whole[start : start + len(weight)], weight):
                return list(range(start, start + len(weight))), transposed, axes
    raise UnreadableError(f"its map is computed from {name}, and not a part of it")


def read_layout(tape: Tape, call: TapedCall) -> AttentionLayout:
    """The layout of one attention call; what is not known of it is said in the layout."""
    site = site_of(tape, call)
    grid = site.grid
    query = projected_heads(tape, site.query, grid.query_order, grid.queries)
    key = projected_heads(tape, site.key, grid.key_order, grid.keys)
    if query.size != key.size or query.count % key.count:
        raise UnreadableError(f"it has {query.count} queries of {query.size} and {key.count} keys of {key.size}")
    layout = AttentionLayout(
        name=unwrapped_path(call.path),
        heads=query.count,
        kv_heads=key.count,
        head_dim=query.size,
        query=query.map,
        key=key.map,
        logits=LogitsLayout(),
        norm=site.query.front,
        memory_norm=None if site.memory is None else site.key.front,
        query_norm=query.norm,
        key_norm=key.norm,
        kind="self" if site.memory is None else "cross",
        provenance="discovered",
        product_scale=query.factor * key.factor,
    )
    return _with_output(tape, site, _with_logits(tape, site, _with_rotation(tape, layout, query, key), query.factor))


def _with_logits(tape: Tape, site: AttentionSite, layout: AttentionLayout, factor: float) -> AttentionLayout:
    """The layout with what makes logits of its products, or with the reason why that is not known."""
    try:
        captured = call_logits(site)
        how, unknown = read_logits(tape, site, captured, site.queries / factor)
    except UnreadableError as error:
        return replace(layout, unknown_scale=str(error), unknown_logits=str(error), unknown_mask=str(error))
    scale = how.scale * layout.product_scale
    if isinstance(how.relative, PairTermsLayout):  # added before the scale
        how = replace(how, relative=replace(how.relative, factor=how.relative.factor / scale))
    how = replace(how, scale=scale)
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


def _with_output(tape: Tape, site: AttentionSite, layout: AttentionLayout) -> AttentionLayout:
    """The layout with values and output map, or with the reason why these are not known."""
    if layout.unknown_logits is not None:
        return replace(layout, unknown_output=layout.unknown_logits)
    try:
        mixed = mixed_values(tape, site.call)
        part = trace_projection(tape, mixed.values, "values", site.call.path, mixed.values_transposed)
        order, tokens = site.grid.value_places(part.rows, part.lead)
        same = torch.equal(part.stream[tokens], site.key.stream[site.grid.keys])
        own = None if same and part.front == site.key.front else part.front
        value = projected_heads(tape, part, order, tokens)
        if value.turn is not None:
            raise UnreadableError("its values rotate with position")
        if value.factor != 1:
            raise UnreadableError(f"its values are multiplied by {value.factor:.4g}")
        layout, value = _as_many_keys_as_values(layout, value)
        return replace(
            _with_output_map(tape, layout, output_map_of(tape, mixed.result, site)),
            value=value.map,
            value_stream_norm=own,
            head_value_norm=value.norm,
        )
    except UnreadableError as error:
        return replace(layout, unknown_output=str(error))


def _as_many_keys_as_values(layout: AttentionLayout, value: ProjectedHeads) -> tuple[AttentionLayout, ProjectedHeads]:
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


def _with_output_map(tape: Tape, layout: AttentionLayout, out: OutputMap) -> AttentionLayout:
    """The layout with its output map, and the norm or the gate in front of that."""
    stored = layout_of_map(tape, out.map, list(range(out.map.weight.shape[0])))
    layout = replace(
        layout, out=replace(stored, columns=out.columns), mixed_norm=out.norm, mixed_norm_apart=out.norm_apart
    )
    if out.gate is None:
        return layout
    return replace(layout, gate=layout_of_map(tape, out.gate.map, list(out.gate.rows)), gate_function=out.gate.function)


def _with_rotation(tape: Tape, layout: AttentionLayout, query: ProjectedHeads, key: ProjectedHeads) -> AttentionLayout:
    """The layout with rotary positions: rows of a head in the order first of each pair, second of each, the rest."""
    one, two = query.turn, key.turn
    if one is None and two is None:
        return layout
    if one is None or two is None or (one.first, one.second) != (two.first, two.second):
        raise UnreadableError("its queries rotate in other pairs of channels than its keys")
    if one.angles.shape != two.angles.shape or (one.angles - two.angles).abs().max() > 1e-6:
        raise UnreadableError("its queries rotate by other angles than its keys")
    if (query.norm or key.norm) and query.norm_last != key.norm_last:
        raise UnreadableError("of its queries and keys, one is normalised before its rotation and the other after")
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
        **_rotary_fields(one, known),
    )


def _rotary_fields(turn: Rotation, known: list[Tensor]) -> dict[str, Any]:
    """Frequencies, or a table of angles where these are not position times frequency."""
    steps = frequencies(turn, known)
    if steps is not None:
        return {"rotary": RotaryLayout(tuple(steps[0]), turn.amplitude, steps[1])}
    if abs(turn.amplitude - 1) > 1e-6:
        raise UnreadableError("its angles are not position times frequency, and rotation changes sizes")
    return {"angles": tuple(map(tuple, turn.angles.tolist()))}


def _ordered_rows(heads: ProjectedHeads, order: list[int]) -> AnyMap:
    """The map of these heads with the rows of each in `order`."""
    return heads.map.picked([head * heads.size + channel for head in range(heads.count) for channel in order])
