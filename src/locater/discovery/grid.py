"""Sequences and heads of one attention call, however its axes are ordered: told by the tokens that meet."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.discovery.errors import UnreadableError


@dataclass(frozen=True)
class Grid:
    """Places of the B sequences and H heads of a call on the leading axes of its products, flattened; and tokens."""

    order: Tensor  # (B, H): on the leading axes of the products
    query_order: Tensor  # (B, H): on those of the queries, which products may repeat
    key_order: Tensor
    queries: Tensor  # (B, T): row of the query map
    keys: Tensor  # (B, S): row of the key map
    lead: tuple[int, ...]  # the leading axes of the products

    def products(self, x: Tensor) -> Tensor:
        """(B, H, T, S) of products or logits."""
        shape = (self.queries.shape[1], self.keys.shape[1])
        if x.shape[-2:] != shape or x[..., 0, 0].numel() != self.order.numel():
            raise UnreadableError(
                f"its logits have the shape {list(x.shape)} for {shape[0]} queries and {shape[1]} keys"
            )
        return x.reshape(-1, *shape)[self.order]

    def raw(self, x: Tensor) -> Tensor:
        """The reverse: (B, H, T, S) on the axes that the model has."""
        flat = torch.empty_like(x.flatten(0, 1))
        flat[self.order.flatten()] = x.flatten(0, 1)
        return flat.view(*self.lead, *x.shape[-2:])

    def others(self, rows: Tensor, lead: Sequence[int]) -> tuple[Tensor, Tensor]:
        """(order (B, H) on the axes `lead`, tokens (B, S)) of values with the tokens `rows`."""
        order = _repeated_places(_padded(lead, len(self.lead)), self.lead)[self.order]
        tokens = rows[order]
        if (tokens != tokens[:, :1]).any():
            raise UnreadableError("heads of one sequence have values of different tokens")
        return order, tokens[:, 0]


def grid_of(query_rows: Tensor, key_rows: Tensor, query_lead: Sequence[int], key_lead: Sequence[int]) -> Grid:
    """From the token of each row, (M, T) and (N, S), and the leading axes of queries and keys."""
    axes = max(len(query_lead), len(key_lead))
    query_lead, key_lead = _padded(query_lead, axes), _padded(key_lead, axes)
    lead = _common(query_lead, key_lead)
    of_query, of_key = _repeated_places(query_lead, lead), _repeated_places(key_lead, lead)
    tokens = torch.cat([query_rows[of_query], key_rows[of_key]], -1)
    _, label, counts = tokens.unique(dim=0, return_inverse=True, return_counts=True)
    if (counts != counts[0]).any():
        raise UnreadableError("its sequences have different numbers of heads")
    first = torch.full((len(counts),), len(label)).scatter_reduce(0, label, torch.arange(len(label)), "amin")
    order = first[label].argsort(stable=True).view(len(counts), -1)
    queries, keys = query_rows[of_query[order[:, 0]]], key_rows[of_key[order[:, 0]]]
    return Grid(order, of_query[order], of_key[order], queries, keys, tuple(lead))


def _padded(lead: Sequence[int], axes: int) -> list[int]:
    return [*(1 for _ in range(axes - len(lead))), *lead]


def _common(query: list[int], key: list[int]) -> list[int]:
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
