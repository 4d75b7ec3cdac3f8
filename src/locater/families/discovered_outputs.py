"""From mixed values to the output map of an attention call: which channels it reads, and which tokens."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from locater.families.discovered_calls import out_map
from locater.families.discovered_errors import UnreadableError
from locater.families.discovered_grid import Grid
from locater.tape import Node, Tape, replay
from locater.tape.walking import LinearMap


@dataclass(frozen=True)
class Output:
    """The output map of a call and what it returned."""

    map: LinearMap
    columns: tuple[int, ...] | None  # where it reads each channel of each head; None: in order
    rows: Tensor  # (n,): rows of its result that belong to this call
    tokens: Tensor  # (n,): number of the token, over B sequences of T, of each of these rows

    @property
    def value(self) -> Tensor:
        """(n, d)."""
        return self.map.node.value.reshape(-1, self.map.node.value.shape[-1])[self.rows]

    def rows_of(self, x: Tensor) -> Tensor:
        """(n, d) of (B, T, d)."""
        return x.flatten(0, 1)[self.tokens]


def output_of(tape: Tape, mixed: Node, grid: Grid) -> Output:
    """The one map that reads the mixed values."""
    out = out_map(tape, mixed)
    lead, (length, size) = mixed.value.shape[:-2], mixed.value.shape[-2:]
    batch, heads = grid.order.shape
    if tuple(lead) != grid.lead or length != grid.queries.shape[1]:
        raise UnreadableError(f"its mixed values have the shape {list(mixed.value.shape)}")
    token = (torch.arange(batch)[:, None] * length + torch.arange(length))[:, None, :, None]
    channel = (torch.arange(heads)[:, None] * size + torch.arange(size))[None, :, None, :]
    shape = (batch, heads, length, size)

    def read(code: Tensor) -> Tensor:  # what arrives at the output map
        given = grid.raw(code.expand(shape).to(mixed.value))
        return replay(out.source, {mixed: given}).reshape(-1, out.weight.shape[1])

    own = read(token) != read(torch.full((1, 1, 1, 1), -1))  # other rows come from other calls
    rows = own.all(-1).nonzero().flatten()
    tokens, columns = (read(code)[rows].long() for code in (token, channel))
    if not len(rows) or (own.any(-1) != own.all(-1)).any():
        raise UnreadableError("its output map reads other numbers beside its mixed values")
    if columns.shape[1] != heads * size or (columns != columns[:1]).any() or (tokens != tokens[:, :1]).any():
        raise UnreadableError("its output map reads other numbers than its mixed values")
    order = columns[0]
    in_order = torch.arange(len(order))
    if not torch.equal(order.sort().values, in_order):
        raise UnreadableError("its output map does not read each channel once")
    columns_read = None if torch.equal(order, in_order) else tuple(order.argsort().tolist())
    return Output(out, columns_read, rows, tokens[:, 0])
