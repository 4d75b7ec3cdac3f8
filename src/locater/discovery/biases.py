"""Learned terms of the logits beside products of queries and keys: a number per head and pair of positions, read from a
table; a vector per pair that queries meet; a sink.

Parameters are random in the pass that is read, so that no two rows of a table are alike: the row that a pair of
positions reads is the one with its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import permutations

import torch
from torch import Tensor

from locater.discovery.attention_site import AttentionSite
from locater.discovery.errors import UnreadableError
from locater.discovery.norm_fit import unwrapped_path
from locater.discovery.tape import Node, Tape
from locater.discovery.tape.linear_maps import linear_map
from locater.discovery.taped_calls import arguments_of_fused
from locater.layers.layout import TableLayout

CLOSE = 1e-8  # of the largest number
MOST_PAIRS = 2**18  # pairs of positions whose rows are kept
MOST_NODES = 500  # of the tape that are looked at for tables
MOST_TABLES = 6
MOST_SUMS = 2**16  # sums of rows of two tables that are tried


def table_of(tape: Tape, site: AttentionSite, bias: Tensor, seen: Tensor) -> TableLayout | None:
    """The parameter with bias[h, t, s] = table[row(t, s), h]; bias and seen are (B, H, T, S). None where there is
    none."""
    if bias[0, 0].numel() > MOST_PAIRS or (bias - bias[:1])[seen & seen[:1]].abs().max() > CLOSE * bias.abs().max():
        return None
    view = seen.any(0).all(0)  # pairs that are visible to all heads, in some sequence
    if not torch.equal(view, seen.any(0).any(0)):
        return None
    first = torch.where(seen, bias, -torch.inf).amax(0)  # (H, T, S)
    vectors = first[:, view].mT  # (pairs, H)
    for name in _parameters_behind(tape, site):
        tensor = tape.tensor(name)
        for axis in (axis for axis, size in enumerate(tensor.shape) if size == len(first)):
            rows = matching_rows(tensor.movedim(axis, -1).reshape(-1, len(first)).double(), vectors.double())
            if rows is not None:
                index = torch.full(view.shape, -1)
                index[view] = rows
                return TableLayout(unwrapped_path(name), _as_tuples(index), axis)
    return None


def content_tables_of(
    tape: Tape, site: AttentionSite, bias: Tensor, seen: Tensor, queries: Tensor
) -> tuple[TableLayout, ...] | None:
    """One or two parameters whose rows queries (B, H, T, h) meet: bias[b, h, t, s] = q[b, h, t] . (one[i(t, s)] +
    two[j(t, s)]). None where there are none.
    """
    length, size = queries.shape[-2:]
    if bias[0, 0].numel() > MOST_PAIRS or not torch.equal(seen, seen[:1, :1].expand(seen.shape)):
        return None
    names = [n for n in _parameters_behind(tape, site) if tape.tensor(n).ndim == 2 and tape.tensor(n).shape[1] == size]
    names = names[:MOST_TABLES]
    for chosen in [*permutations(names, 1), *permutations(names, 2)]:
        tables = [tape.tensor(name).double() for name in chosen]
        sizes = [len(table) for table in tables]
        if len(chosen) == 2 and sizes[0] * sizes[1] > MOST_SUMS:
            continue
        sums = tables[0] if len(tables) == 1 else (tables[0][:, None] + tables[1]).flatten(0, 1)
        index = torch.full(bias.shape[-2:], -1)
        for t in range(length):
            met = (queries[:, :, t].flatten(0, 1).double() @ sums.mT).mT  # (rows, B H)
            rows = matching_rows(met, bias[:, :, t, seen[0, 0, t]].flatten(0, 1).mT.double())
            if rows is None:
                break
            index[t, seen[0, 0, t]] = rows
        else:
            parts = [index] if len(chosen) == 1 else [index // sizes[1], index % sizes[1]]
            parts = [torch.where(index < 0, -1, part) for part in parts]
            return tuple(
                TableLayout(unwrapped_path(n), _as_tuples(part), 1) for n, part in zip(chosen, parts, strict=True)
            )
    return None


def sink_of(tape: Tape, site: AttentionSite) -> str | None:
    """The parameter (H,) whose numbers join the softmax of each row; None where nothing does."""
    node = site.call.sink
    if node is None:
        return None
    name = tape.parameter(node)
    heads = site.queries.shape[1]
    if name is None or tape.tensor(name).numel() != heads:
        raise UnreadableError("a logit that is not known joins its softmax")
    value = node.value.reshape(-1, site.queries.shape[2])[site.grid.order]  # (B, H, T)
    if (value - tape.tensor(name).reshape(-1)[:, None]).abs().max() > 0:
        raise UnreadableError(f"a logit that is computed from {name} joins its softmax")
    return unwrapped_path(name)


def matching_rows(table: Tensor, vectors: Tensor) -> Tensor | None:
    """The row of `table` (n, d) that each of `vectors` (m, d) is equal to; None where one is equal to none."""
    if not table.numel() or not vectors.numel() or table.shape[1] != vectors.shape[1]:
        return None
    direction = torch.randn(table.shape[1], generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    codes, order = (table @ direction).sort()
    wanted = vectors @ direction
    right = torch.searchsorted(codes, wanted).clamp(max=len(codes) - 1)
    left = (right - 1).clamp_min(0)
    closer = torch.where((codes[left] - wanted).abs() < (codes[right] - wanted).abs(), left, right)
    rows = order[closer]
    return rows if (table[rows] - vectors).abs().max() <= CLOSE * table.abs().max() else None


def _parameters_behind(tape: Tape, site: AttentionSite) -> list[str]:
    """Names of the parameters that the logits were computed from, apart from the products of queries and keys and what
    is in front of these.
    """
    names: dict[str, None] = {}
    seen: set[Node] = set()
    todo = list(_added_terms(site))
    while todo and len(seen) < MOST_NODES:
        node = todo.pop()
        if node in seen:
            continue
        seen.add(node)
        if node.func is None:
            name = tape.parameter(node, 0)
            if name is not None:
                names[name] = None
        elif node not in (site.call.product, site.query.node, site.key.node) and linear_map(tape, node) is None:
            todo += node.inputs
    return list(names)


def _added_terms(site: AttentionSite) -> Iterator[Node]:
    """Where to look for what is added to the products."""
    if site.call.logits is not None:
        yield site.call.logits
        return
    mask = arguments_of_fused(site.call.event).get("attn_mask")
    if isinstance(mask, Node):
        yield mask


def _as_tuples(index: Tensor) -> tuple[tuple[int, ...], ...]:
    return tuple(map(tuple, index.tolist()))
