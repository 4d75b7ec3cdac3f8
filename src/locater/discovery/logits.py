"""From products of queries and keys to logits, read from one call: scale, soft-cap, position terms, and learned terms
beside the products (a number per head and pair of positions, a vector per pair that queries meet, a sink).

Parameters are random in the pass that is read, so that no two rows of a table are alike: the row that a pair of
positions reads is the one with its numbers.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor

from locater.discovery.attention_site import AttentionSite, with_products
from locater.discovery.norm_and_rotary_fit import relative_difference, unwrapped_path
from locater.discovery.tape import Node, Tape
from locater.discovery.tape.linear_maps import linear_map
from locater.discovery.taped_calls import MASKED, arguments_of_fused
from locater.errors import UnreadableError
from locater.layers.layout import AlibiLayout, LogitsLayout, PairTermsLayout, SinksLayout, TableLayout

CLOSE = 1e-9


def read_logits(
    tape: Tape, site: AttentionSite, captured: tuple[Tensor, Tensor, Tensor], queries: Tensor
) -> tuple[LogitsLayout, str | None]:
    """(the layout, why more than products and scale is not known). `captured` are products, logits and their constant
    part, `queries` those of the map, before any factor; all (B, H, T, S).
    """
    products, logits, constant = captured
    seen = constant > MASKED
    if not seen.any():
        raise UnreadableError("all its logits are masked")
    shifted, sinks = False, sink_of(tape, site)
    try:
        scale, cap = _scale_and_cap(site, products, logits, constant, seen)
    except UnreadableError:  # the same without what a row has in common, which a sink would see
        if sinks is not None:
            raise
        shifted = True
        scale, cap = _scale_of_differences(site, products, logits, constant, seen), None
    layout = LogitsLayout(scale, cap, sinks=None if sinks is None else SinksLayout(sinks), shifted=shifted)
    bias = centred_logits(constant, seen) if shifted else constant.masked_fill(~seen, 0.0)
    if bias.abs().max() <= CLOSE:
        return layout, None
    if sinks is None and centred_logits(bias, seen).abs().max() <= CLOSE * bias.abs().max():
        return replace(layout, shifted=True), None
    slopes = _alibi_slopes(bias, seen)
    if slopes is not None:
        return replace(layout, bias=AlibiLayout(slopes)), None
    table = table_of(tape, site, bias, seen)
    if table is not None:
        return replace(layout, bias=table), None
    own = float(site.queries.flatten()[0] / queries.flatten()[0])  # factor of the queries
    for factor in dict.fromkeys((1.0, own, scale, own * scale)):
        tables = content_tables_of(tape, site, bias, seen, factor * queries)
        if tables is not None:
            return replace(layout, relative=PairTermsLayout(tables, factor)), None
    return layout, "a bias that is not known is added to its logits"


def _scale_and_cap(
    site: AttentionSite, products: Tensor, logits: Tensor, constant: Tensor, seen: Tensor
) -> tuple[float, float | None]:
    call = site.call
    if call.product is None:  # a fused call has a scale and no cap
        return _ratio(logits - constant, products, seen), None

    def of(factor: float) -> Tensor:
        return site.grid.products_by_head(with_products(call, factor)) - constant

    small, large = of(1e-6), of(1e6)
    scale = _ratio(small, 1e-6 * products, seen, 1e-6)
    straight = relative_difference(logits - constant, scale * products, seen)
    if straight < 1e-6 and relative_difference(large, 1e6 * scale * products, seen) < 1e-6:
        return _ratio(logits - constant, products, seen), None
    cap = float(large[seen].abs().max())
    sizes = ((1.0, logits - constant), (1e6, large))
    if any(
        relative_difference(ours, cap * torch.tanh(factor * scale * products / cap), seen) > 1e-6
        for factor, ours in sizes
    ):
        raise UnreadableError("its logits are a nonlinear function of the products that is no soft-cap")
    return scale, cap


def _scale_of_differences(
    site: AttentionSite, products: Tensor, logits: Tensor, constant: Tensor, seen: Tensor
) -> float:
    """The factor from products to logits without what a row has in common, the same for products of any size."""
    start, products = centred_logits(constant, seen), centred_logits(products, seen)
    scale = _ratio(centred_logits(logits, seen) - start, products, seen)
    for factor in (1e-6, 1e6) if site.call.product is not None else ():
        ours = centred_logits(site.grid.products_by_head(with_products(site.call, factor)), seen) - start
        if relative_difference(ours, factor * scale * products, seen) > 1e-6:
            raise UnreadableError("its logits are a nonlinear function of the products that is no soft-cap")
    return scale


def _ratio(ours: Tensor, products: Tensor, seen: Tensor, close: float = CLOSE) -> float:
    """The one factor from products to logits."""
    factor = float((ours[seen] * products[seen]).sum() / products[seen].square().sum())
    if relative_difference(ours, factor * products, seen) > max(close, 1e-6):
        raise UnreadableError("its logits are not one multiple of the products of queries and keys")
    return factor


def _alibi_slopes(bias: Tensor, seen: Tensor) -> tuple[float, ...] | None:
    """Slopes with bias = -slope |distance| plus what a row has in common, wherever a query may look."""
    length, keys = bias.shape[-2:]
    distance = (torch.arange(length)[:, None] + (keys - length) - torch.arange(keys)).abs().to(bias)
    distance, bias = centred_logits(distance.expand(bias.shape), seen), centred_logits(bias, seen)
    slopes = -(bias * distance).sum((0, 2, 3)) / distance.square().sum((0, 2, 3)).clamp_min(1e-30)
    rest = bias + slopes[:, None, None] * distance
    return tuple(slopes.tolist()) if rest.abs().max() < 1e-6 * bias.abs().max() else None


def centred_logits(logits: Tensor, seen: Tensor) -> Tensor:
    """Logits without what a row has in common, which softmax does not see; 0 where masked."""
    logits = logits.masked_fill(~seen, 0.0)
    return (logits - logits.sum(-1, keepdim=True) / seen.sum(-1, keepdim=True).clamp_min(1)).masked_fill(~seen, 0.0)


# ---- biases ----


CLOSEST = 1e-8  # of the largest number
MOST_PAIRS = 2**18  # pairs of positions whose rows are kept
MOST_NODES = 500  # of the tape that are looked at for tables
MOST_TABLES = 6
MOST_SUMS = 2**16  # sums of rows of two tables that are tried


def table_of(tape: Tape, site: AttentionSite, bias: Tensor, seen: Tensor) -> TableLayout | None:
    """The parameter with bias[h, t, s] = table[row(t, s), h]; bias and seen are (B, H, T, S). None where there is
    none."""
    if bias[0, 0].numel() > MOST_PAIRS or (bias - bias[:1])[seen & seen[:1]].abs().max() > CLOSEST * bias.abs().max():
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
    return rows if (table[rows] - vectors).abs().max() <= CLOSEST * table.abs().max() else None


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
