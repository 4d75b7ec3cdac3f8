"""From mixed values to the output map of an attention call: which channels it reads, which tokens, and what is between:
a norm of all channels, or a gate.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locater.calls.function_table import KEEPING, MULTIPLIES
from locater.discovery.attention_site import AttentionSite, nearest_map
from locater.discovery.norm_and_rotary_fit import fit_norm, may_be_norm
from locater.discovery.tape import Node, Tape, replay
from locater.discovery.tape.linear_maps import LinearMap, linear_map, with_bias
from locater.errors import UnreadableError
from locater.layers.layer import FUNCTIONS
from locater.layers.map_layouts import NormLayout


@dataclass(frozen=True)
class GateMap:
    """The map of a gate: the row of each channel of each head."""

    map: LinearMap
    rows: tuple[int, ...]
    function: str


@dataclass(frozen=True)
class OutputMap:
    """The output map of a call and what it returned."""

    map: LinearMap
    columns: tuple[int, ...] | None  # where it reads each channel of each head; None: in order
    rows: Tensor  # (n,): rows of its result that belong to this call
    tokens: Tensor  # (n,): number of the token, over B sequences of T, of each of these rows
    norm: NormLayout | None = None  # of the mixed values
    norm_apart: bool = False  # of each head, and not of all channels together
    gate: GateMap | None = None

    @property
    def value(self) -> Tensor:
        """(n, d)."""
        return self.map.node.value.reshape(-1, self.map.node.value.shape[-1])[self.rows]

    def rows_of(self, x: Tensor) -> Tensor:
        """(n, d) of (B, T, d)."""
        return x.flatten(0, 1)[self.tokens]


@dataclass(frozen=True)
class _OutputPath:
    """From mixed values to the map that reads them."""

    map: LinearMap
    norms: list[Node]
    gates: list[Node]  # what the mixed values are multiplied by
    gated: list[Node]  # the products


def output_map_of(tape: Tape, mixed: Node, site: AttentionSite) -> OutputMap:
    """The one map that reads the mixed values of a call."""
    way, grid = _path_to_output(tape, mixed), site.grid
    lead, (length, size) = mixed.value.shape[:-2], mixed.value.shape[-2:]
    batch, heads = grid.order.shape
    if lead.numel() != len(grid.order.flatten()) or length != grid.queries.shape[1]:
        raise UnreadableError(f"its mixed values have the shape {list(mixed.value.shape)}")
    width = way.map.weight.shape[1]
    shape = (batch, heads, length, size)

    def read(code: Tensor) -> Tensor:  # what arrives at the output map, where a norm passes what it reads
        given = {mixed: grid.in_model_order(code.expand(shape).to(mixed.value), lead)}
        for norm in way.norms:
            given[norm] = replay(tape.made[norm].source, given)
        return replay(way.map.source, given).reshape(-1, width)

    token = (torch.arange(batch)[:, None] * length + torch.arange(length) + 1)[:, None, :, None]
    channel = (torch.arange(heads)[:, None] * size + torch.arange(size) + 1)[None, :, None, :]
    zero, factors = read(torch.zeros(1, 1, 1, 1)), read(torch.ones(1, 1, 1, 1))
    own = factors != zero  # other rows come from other calls
    rows = own.all(-1).nonzero().flatten()
    if not len(rows) or (own.any(-1) != own.all(-1)).any() or (zero[rows] != 0).any():
        raise UnreadableError("its output map reads other numbers beside its mixed values")
    factors = factors[rows]
    tokens, columns = (read(code)[rows] / factors - 1 for code in (token, channel))
    tokens, columns = _round_codes(tokens), _round_codes(columns)
    if width != heads * size or (columns != columns[:1]).any() or (tokens != tokens[:, :1]).any():
        raise UnreadableError("its output map reads other numbers than its mixed values")
    in_order = torch.arange(width)
    if not torch.equal(columns[0].sort().values, in_order):
        raise UnreadableError("its output map does not read each channel once")
    order = columns[0].argsort()
    if len(way.norms) > 1 or len(way.gates) > 1:
        raise UnreadableError("more than a norm and a gate is between its mixed values and its output map")
    norm, each_head = _norm(tape, way, order, size)
    gate = _gate(tape, way, site, factors[:, order], tokens[:, 0])
    columns_read = None if torch.equal(order, in_order) else tuple(order.tolist())
    return OutputMap(way.map, columns_read, rows, tokens[:, 0], norm, each_head, gate)


def _round_codes(codes: Tensor) -> Tensor:
    rounded = codes.round()
    if (codes - rounded).abs().max() > 1e-3:
        raise UnreadableError("its output map reads other numbers than its mixed values")
    return rounded.long()


def _path_to_output(tape: Tape, mixed: Node) -> _OutputPath:
    """Forward from the mixed values, through calls that move numbers, norms and gates, to the one map."""
    maps: list[LinearMap] = []
    norms: list[Node] = []
    gates: list[Node] = []
    gated: list[Node] = []
    others: set[str] = set()
    todo, seen = [mixed], {mixed}
    while todo and len(seen) < 200:
        node = todo.pop()
        norm = next((n for n in tape.made_from(node) if may_be_norm(tape, n)), None)
        if norm is not None:
            norms.append(norm)
        for after in [norm] if norm is not None else tape.consumers(node):
            if after in seen:
                continue
            seen.add(after)
            linear = linear_map(tape, after)
            factors = [x for x in after.inputs if x is not node and x.moving] if after.name in MULTIPLIES else []
            if linear is not None:
                maps.append(with_bias(tape, linear))
            elif after is norm or after.name in KEEPING:
                todo.append(after)
            elif len(factors) == 1:
                gates.append(factors[0])
                gated.append(after)
                todo.append(after)
            elif after.value.ndim:
                others.add(after.name)
    if others:
        raise UnreadableError(f"between its mixed values and an output map is {', '.join(sorted(others)[:3])}")
    if len(maps) != 1:
        raise UnreadableError(f"its mixed values are read by {len(maps)} maps")
    return _OutputPath(maps[0], norms, gates, gated)


def _norm(tape: Tape, way: _OutputPath, order: Tensor, size: int) -> tuple[NormLayout | None, bool]:
    """(the norm of the mixed values, its channels in the order of heads; whether it acts on each head of `size`)."""
    if not way.norms:
        return None, False
    node = way.norms[0]
    made = tape.made[node]
    layout, width = fit_norm(made, made.source.value, node.value, node), node.value.shape[-1]
    if layout is None:
        raise UnreadableError(f"the norm {made.path} ({type(made.module).__name__}) follows no known formula")
    if way.gated and way.gated[0].order < node.order:
        raise UnreadableError(f"a gate is in front of the norm {made.path} of its mixed values")
    in_order = torch.equal(order, torch.arange(len(order)))
    if width == size and width != len(order) and in_order:
        return layout, True
    if width != len(order) or not _reads_in_order(way, node):
        raise UnreadableError(f"the norm {made.path} of its mixed values reads them in another order")
    return (layout if in_order else layout.picked(order.tolist())), False


def _reads_in_order(way: _OutputPath, norm: Node) -> bool:
    """Whether the output map reads the channels of a norm in the norm's order."""
    codes = torch.arange(norm.value.shape[-1]).to(norm.value) + 1
    read, ones = (
        replay(way.map.source, {norm: given.expand(norm.value.shape)}) for given in (codes, torch.ones_like(codes))
    )
    return read.shape[-1] == len(codes) and bool(((read / ones - codes).abs() < 1e-3).all())


def _gate(tape: Tape, way: _OutputPath, site: AttentionSite, factors: Tensor, tokens: Tensor) -> GateMap | None:
    """The gate that gives these factors (n, H v)."""
    if not way.gates:
        if (factors != 1).any():
            raise UnreadableError("its mixed values are multiplied by something")
        return None
    part = _gate_map(tape, way.gates[0], site)
    given = part.node.value.reshape(-1, len(part.weight))[site.grid.queries.flatten()[tokens]]  # (n, C)
    for name, function in FUNCTIONS.items():
        values = function(given)
        nearest = (values[:1].mT - factors[:1]).abs().argmin(0)
        if (values[:, nearest] - factors).abs().max() <= 1e-9 * factors.abs().max():
            return GateMap(part, tuple(nearest.tolist()), name)
    raise UnreadableError("the gate of its mixed values follows no known formula")


def _gate_map(tape: Tape, gate: Node, site: AttentionSite) -> LinearMap:
    """The one map that a gate is computed from; it reads what the queries read."""
    linear, front, stream = nearest_map(tape, gate, "gate", site.call.path)
    if front != site.query.front or not torch.equal(stream, site.query.stream):
        raise UnreadableError("the gate of its mixed values reads another stream than its queries")
    return linear
