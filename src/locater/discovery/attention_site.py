"""The parts of one attention call on a tape: queries, keys and values back to their maps and to the streams that these
read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.discovery.linear_per_token import TapePath, as_rows, token_rows
from locater.discovery.norm_and_rotary_fit import fit_norm, may_be_norm
from locater.discovery.tape import Node, Tape, replay
from locater.discovery.tape.linear_maps import LinearMap, linear_map, moved_from, upstream
from locater.discovery.taped_calls import TapedCall, arguments_of_fused
from locater.errors import UnreadableError
from locater.layers.map_layouts import NormLayout

# Which leading index of an attention call is which sequence and head, however its axes are ordered: told by the
# tokens that meet.


@dataclass(frozen=True)
class HeadGrid:
    """Where the B sequences and H heads of a call are on the leading axes of its products, and which tokens meet."""

    order: Tensor  # (B, H): on the leading axes of the products
    query_order: Tensor  # (B, H): on those of the queries, which products may repeat
    key_order: Tensor
    queries: Tensor  # (B, T): row of the query map
    keys: Tensor  # (B, S): row of the key map
    lead: tuple[int, ...]  # the leading axes of the products

    def products_by_head(self, x: Tensor) -> Tensor:
        """(B, H, T, S) of products or logits."""
        shape = (self.queries.shape[1], self.keys.shape[1])
        if x.shape[-2:] != shape or x[..., 0, 0].numel() != self.order.numel():
            raise UnreadableError(
                f"its logits have the shape {list(x.shape)} for {shape[0]} queries and {shape[1]} keys"
            )
        return x.reshape(-1, *shape)[self.order]

    def in_model_order(self, x: Tensor, lead: Sequence[int] | None = None) -> Tensor:
        """The reverse: (B, H, T, S) on the axes that the model has, or on other leading ones in the same order."""
        flat = torch.empty_like(x.flatten(0, 1))
        flat[self.order.flatten()] = x.flatten(0, 1)
        return flat.view(*(self.lead if lead is None else lead), *x.shape[-2:])

    def value_places(self, rows: Tensor, lead: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(order (B, H) on the axes `lead`, tokens (B, S)) of values with the tokens `rows`."""
        if math.prod(lead) == math.prod(self.lead):  # one axis for batch and heads, or two
            order = self.order
        else:
            order = _repeated_places(_pad_lead(lead, len(self.lead)), self.lead)[self.order]
        tokens = rows[order]
        if (tokens != tokens[:, :1]).any():
            raise UnreadableError("heads of one sequence have values of different tokens")
        return order, tokens[:, 0]


def head_grid(query_rows: Tensor, key_rows: Tensor, query_lead: Sequence[int], key_lead: Sequence[int]) -> HeadGrid:
    """From the token of each row, (M, T) and (N, S), and the leading axes of queries and keys."""
    axes = max(len(query_lead), len(key_lead))
    query_lead, key_lead = _pad_lead(query_lead, axes), _pad_lead(key_lead, axes)
    lead = _common_lead(query_lead, key_lead)
    of_query, of_key = _repeated_places(query_lead, lead), _repeated_places(key_lead, lead)
    tokens = torch.cat([query_rows[of_query], key_rows[of_key]], -1)
    _, label, counts = tokens.unique(dim=0, return_inverse=True, return_counts=True)
    if (counts != counts[0]).any():
        raise UnreadableError("its sequences have different numbers of heads")
    first = torch.full((len(counts),), len(label)).scatter_reduce(0, label, torch.arange(len(label)), "amin")
    order = first[label].argsort(stable=True).view(len(counts), -1)
    queries, keys = query_rows[of_query[order[:, 0]]], key_rows[of_key[order[:, 0]]]
    return HeadGrid(order, of_query[order], of_key[order], queries, keys, tuple(lead))


def _pad_lead(lead: Sequence[int], axes: int) -> list[int]:
    return [*(1 for _ in range(axes - len(lead))), *lead]


def _common_lead(query: list[int], key: list[int]) -> list[int]:
    """Leading axes of the products: those of queries and keys, one of them repeated where they differ."""
    if query == key:
        return query
    if len(query) == len(key) and all(max(a, b) % min(a, b) == 0 for a, b in zip(query, key, strict=True)):
        return [max(a, b) for a, b in zip(query, key, strict=True)]
    raise UnreadableError(f"queries on axes {query} meet keys on axes {key}")


def _repeated_places(lead: Sequence[int], common: Sequence[int]) -> Tensor:
    """The place on the axes `lead` of each place on the axes `common`: neighbours are repeated."""
    if len(lead) != len(common) or any(whole % own for own, whole in zip(lead, common, strict=True)):
        raise UnreadableError(f"values on axes {list(lead)} meet weights on axes {list(common)}")
    places = torch.arange(math.prod(lead)).view(*lead)
    for axis, (own, whole) in enumerate(zip(lead, common, strict=True)):
        places = places.repeat_interleave(whole // own, axis)
    return places.flatten()


LOWERED, UNMASKED = -90.0, -50.0  # a weight of e^-90 is none


@dataclass(frozen=True)
class LatentMap:
    """The map in front of another map, inside one attention, and the norm between the two."""

    map: LinearMap
    passage: TapePath  # from this map to what the other one reads
    norm: NormLayout


@dataclass(frozen=True)
class ProjectionTrace:
    """Queries, keys or values, back to their maps and to the stream that these read."""

    node: Node
    maps: list[LinearMap]
    latents: list[LatentMap | None]  # in front of each map
    norms: list[Node]  # between the maps and `node`, the earliest first
    front: NormLayout  # the norm in front of the maps
    stream: Tensor  # (N, d), for each row of the maps: what that norm read; what the map reads, where none is in front
    passage: TapePath  # from the maps to `node`, without its norms
    rows: Tensor  # (M, T): row of the maps of each row of `node`

    @property
    def lead(self) -> torch.Size:
        return self.node.value.shape[:-2]


@dataclass(frozen=True)
class AttentionSite:
    """The parts of one attention call on a tape."""

    call: TapedCall
    query: ProjectionTrace
    key: ProjectionTrace
    grid: HeadGrid
    queries: Tensor  # (B, H, T, h)
    keys: Tensor  # (B, H, S, h)
    x: Tensor  # (B, T, d): the stream that queries read
    memory: Tensor | None  # (B, S, d): the stream that keys read, where it is another one


def site_of(tape: Tape, call: TapedCall) -> AttentionSite:
    """Walk back from queries and keys to their maps and streams."""
    query = trace_projection(tape, call.query, "queries", call.path, call.query_transposed)
    key = trace_projection(tape, call.key, "keys", call.path, call.key_transposed)
    grid = head_grid(query.rows, key.rows, query.lead, key.lead)
    queries = as_rows(query.node.value, call.query_transposed)[grid.query_order]
    keys = as_rows(key.node.value, call.key_transposed)[grid.key_order]
    x, memory = query.stream[grid.queries], key.stream[grid.keys]
    same = x.shape == memory.shape and torch.equal(x, memory)
    return AttentionSite(call, query, key, grid, queries, keys, x, None if same else memory)


def trace_projection(tape: Tape, node: Node, what: str, path: str, transposed: bool = False) -> ProjectionTrace:
    """Walk back from queries, keys or values to their maps and the one stream of these."""
    if not node.moving:
        raise UnreadableError(f"its {what} are learned, not computed from tokens")
    before = upstream(tape, node, lambda n: may_be_norm(tape, n))
    if not before.maps:
        raise UnreadableError(f"no map by a parameter is in front of its {what}")
    if before.loose:
        raise UnreadableError(f"tokens that pass no map join its {what}")
    maps = sorted(before.maps, key=lambda linear: linear.node.order)
    made = {linear.node for linear in maps}
    norms = [(norm, tape.made[norm].source) for norm in reversed(before.norms) if norm not in made]
    passage = TapePath(
        node,
        tuple(linear.node for linear in maps),
        tuple(len(linear.weight) for linear in maps),
        tuple(norms),
        transposed,
    )
    latents, streams, fronts = zip(*(_source_of_map(tape, linear, path) for linear in maps), strict=True)
    if not all(bool(stream.isfinite().all()) for stream in streams):
        raise UnreadableError(f"what its {what} are computed from has infinite numbers or none (NaN)")
    if any(
        front != fronts[0] or not torch.equal(stream, streams[0]) for stream, front in zip(streams, fronts, strict=True)
    ):
        names = ", ".join(tape.parameter(linear.constant) or "?" for linear in maps[:3])
        raise UnreadableError(f"its {what} are made of {len(maps)} maps that read different streams ({names})")
    rows = token_rows(passage)
    return ProjectionTrace(node, maps, list(latents), [norm for norm, _ in norms], fronts[0], streams[0], passage, rows)


def nearest_map(tape: Tape, node: Node, what: str, path: str) -> tuple[LinearMap, NormLayout, Tensor]:
    """(the one map that a value is computed from, the norm in front of it, the stream (N, d) that this reads)."""
    before = upstream(tape, node, lambda n: may_be_norm(tape, n))
    if len(before.maps) != 1 or before.loose:
        raise UnreadableError(f"its {what} is not computed from one map")
    latent, stream, front = _source_of_map(tape, before.maps[0], path)
    if latent is not None:
        raise UnreadableError(f"its {what} is computed from two maps")
    return before.maps[0], front, stream


def _source_of_map(tape: Tape, linear: LinearMap, path: str) -> tuple[LatentMap | None, Tensor, NormLayout]:
    """(the latent that a map reads, the stream behind that, the norm of this stream)."""
    latent = _latent(tape, linear, path)
    if latent is None:
        front, stream = _front_norm(tape, linear)
        return None, stream.reshape(-1, stream.shape[-1]), front
    rows = token_rows(latent.passage).flatten()
    front, stream = _front_norm(tape, latent.map)
    return latent, stream.reshape(-1, stream.shape[-1])[rows], front


def _latent(tape: Tape, linear: LinearMap, path: str) -> LatentMap | None:
    """The map inside the attention module `path` whose result a map reads, through a norm or directly."""
    if not path:
        return None

    def is_map(n: Node) -> bool:
        return path in n.modules and linear_map(tape, n) is not None

    start = moved_from(linear.source, lambda n: may_be_norm(tape, n) or is_map(n))
    if start is None:
        return None
    norm = NormLayout()
    norms: tuple[tuple[Node, Node], ...] = ()
    if not is_map(start):
        made = tape.made[start]
        low = moved_from(made.source, is_map)
        if low is None:
            return None
        layout = fit_norm(made, made.source.value, start.value, start)
        if layout is None:
            raise UnreadableError(f"the norm {made.path} ({type(made.module).__name__}) follows no known formula")
        norm, norms, start = layout, ((start, made.source),), low
    down = linear_map(tape, start)
    assert down is not None
    passage = TapePath(linear.source, (down.node,), (len(down.weight),), norms)
    return LatentMap(down, passage, norm)


def _front_norm(tape: Tape, linear: LinearMap) -> tuple[NormLayout, Tensor]:
    """(the norm in front of a map, the stream that it reads). Between the two, tokens may be moved, or multiplied by a
    mask that hides none of them. What is no norm, a sum with positions for example, or follows no known formula, is
    left to the stream.
    """
    norm = moved_from(linear.source, lambda n: may_be_norm(tape, n), unchanged=True)
    if norm is not None:
        made = tape.made[norm]
        stream = replay(linear.source, {norm: made.source.value})
        layout = fit_norm(made, stream, linear.source.value, norm)
        if layout is not None:
            return layout, stream
    return NormLayout(), linear.source.value


def call_logits(site: AttentionSite) -> tuple[Tensor, Tensor, Tensor]:
    """(products, logits, constant part of the logits), all (B, H, T, S), of a call as it ran. Masked entries have a
    constant part below MASKED.
    """
    call, grid, products = site.call, site.grid, site.queries @ site.keys.mT
    if call.product is None:
        logits, constant = (_fused_logits(call, grid.in_model_order(x)) for x in (products, torch.zeros_like(products)))
    else:
        assert call.logits is not None
        logits, constant = call.logits.value, with_products(call, 0.0)
    return products, grid.products_by_head(logits), _with_hidden_keys(grid.products_by_head(constant))


def _with_hidden_keys(constant: Tensor) -> Tensor:
    """Constant parts with -inf in place of numbers of LOWERED or less, if none is between these and UNMASKED: Swin
    hides keys of other windows with -100. Biases that grow with distance have numbers in between.
    """
    low = constant <= LOWERED
    between = ~low & (constant < UNMASKED)
    return constant if between.any() else constant.masked_fill(low, -torch.inf)


def with_products(call: TapedCall, factor: float) -> Tensor:
    """Logits of a call that is not fused, if all products of its queries and keys were multiplied by `factor`."""
    assert call.logits is not None
    assert call.product is not None
    # this function also scales its product and adds to it
    start = call.product.inputs[-1] if call.product.name == "baddbmm" else call.product
    return replay(call.logits, {start: factor * start.value})


def _fused_logits(call: TapedCall, products: Tensor) -> Tensor:
    arguments = arguments_of_fused(call.event)
    scale = arguments.get("scale")
    logits = products * (call.query.value.shape[-1] ** -0.5 if scale is None else scale)
    mask = arguments.get("attn_mask")
    if mask is not None:
        mask = mask.value
        logits = logits.masked_fill(~mask, -torch.inf) if mask.dtype == torch.bool else logits + mask.to(logits)
    if arguments.get("is_causal"):
        seen = torch.ones(logits.shape[-2:], dtype=torch.bool).tril()
        logits = logits.masked_fill(~seen, -torch.inf)
    return logits
