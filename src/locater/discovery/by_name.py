"""Heads of an unknown architecture: the user names the query and key tensors. Gains are not folded.

A layer is cross-attention where its name says so: its queries and keys meet other tokens, so that traces and logits of
a token with itself mean nothing there.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from locater.calls.coverage import CROSS
from locater.errors import LocaterError
from locater.layers.build import matrix, optional
from locater.layers.layer import AttentionLayer
from locater.sources.weights import Weights, natural


def layers_by_name(
    weights: Weights, query: str, key: str, heads: int, kv_heads: int | None = None
) -> Iterator[AttentionLayer]:
    """Layers from patterns such as `blocks.*.attn.wq.weight`; `*` stands for the same text in both.

    Weights are taken as (heads x head_dim, width), the layout of nn.Linear. Key heads are counted from the rows.
    """
    queries, keys = _matches(weights, query, "--query"), _matches(weights, key, "--key")
    for index, (where, q_name) in enumerate(sorted(queries.items(), key=lambda item: natural(item[0]))):
        if where not in keys:
            raise LocaterError(f"{weights.where}: {q_name} has no partner that matches --key {key!r}")
        k_name = keys[where]
        q, k = (
            matrix(weights, name, optional(weights, f"{name.removesuffix('.weight')}.bias"))
            for name in (q_name, k_name)
        )
        if q.shape[0] % heads:
            raise LocaterError(
                f"{weights.where}: {q_name} has {q.shape[0]} rows, which {heads} heads do not divide: change --heads"
            )
        head_dim = q.shape[0] // heads
        groups = kv_heads or k.shape[0] // head_dim
        if groups == 0 or groups * head_dim != k.shape[0] or heads % groups or q.shape[1] != k.shape[1]:
            raise LocaterError(
                f"{weights.where}: {k_name} has shape {list(k.shape)}, "
                f"which does not fit {heads} query heads of size {head_dim} on width {q.shape[1]}: change --heads"
            )
        yield AttentionLayer(
            name=q_name.removesuffix(".weight"),
            index=index,
            heads=heads,
            kv_heads=groups,
            head_dim=head_dim,
            query=q,
            key=k,
            scale=head_dim**-0.5,
            kind="cross" if CROSS.search(q_name) else "self",
        )


def _matches(weights: Weights, pattern: str, option: str) -> dict[tuple[str, ...], str]:
    expression = "(.+?)".join(re.escape(part) for part in pattern.split("*"))
    names = {m.groups(): name for name in weights.names() if (m := re.fullmatch(expression, name))}
    if not names:
        raise LocaterError(f"{weights.where}: no tensor matches {option} {pattern!r}; there are {examples(weights)}")
    return names


def examples(weights: Weights, most: int = 6) -> str:
    """Some matrices of the source, the likeliest first, layer numbers folded: for error messages."""
    folded = {re.sub(r"\.\d+\.", ".*.", n): weights.shape(n) for n in weights.names() if len(weights.shape(n)) == 2}
    likely = sorted(
        folded,
        key=lambda n: (not re.search(r"(^|[._])(q|k|w[qk]|query|key|qkv|q_proj|k_proj|attn|attention)([._]|$)", n), n),
    )
    shown = [f"{name} {list(folded[name])}" for name in likely[:most]]
    return (
        ", ".join(shown) + (f" and {len(folded) - most} more" if len(folded) > most else "") if shown else "no matrices"
    )
