"""A layer in blocks of heads: what is folded and multiplied at a time stays small, however wide the model is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import partial

from locater.layers.layer import AttentionLayer, Projection
from locater.layers.norm import Norm
from locater.layers.row_readers import RowReader, row_reader

ELEMENTS = 2**25  # of query and key maps in a block: 128 MiB in float32


def head_blocks(layer: AttentionLayer, elements: int = ELEMENTS) -> Iterator[AttentionLayer]:
    """Layers of consecutive heads of `layer`, for `effective` and the moments: their biases of positions and their
    values are those of the whole layer. A layer of at most `elements` numbers is returned as it is.

    A key head and its query heads stay together where they fit: then each product is that of the whole layer.

    >>> import torch
    >>> plain = Projection(lambda: torch.eye(4), (4, 4))
    >>> layer = AttentionLayer("attention", 0, 2, 2, 2, query=plain, key=plain, scale=1.0)
    >>> [(block.heads, block.query.weight().tolist()[0]) for block in head_blocks(layer, 16)]
    [(1, [1.0, 0.0, 0.0, 0.0]), (1, [0.0, 0.0, 1.0, 0.0])]
    """
    ranges = list(_ranges(layer, elements))
    if len(ranges) == 1:
        yield layer
        return
    query, key = row_reader(layer.query.weight), row_reader(layer.key.weight)
    for heads, kv_heads in ranges:
        yield replace(
            layer,
            heads=heads[1] - heads[0],
            kv_heads=kv_heads[1] - kv_heads[0],
            query=rows_of_heads(layer.query, query, heads, layer.heads),
            key=rows_of_heads(layer.key, key, kv_heads, layer.kv_heads),
            query_norm=norm_of_heads(layer.query_norm, heads),
            key_norm=norm_of_heads(layer.key_norm, kv_heads),
        )


Range = tuple[int, int]


def _ranges(layer: AttentionLayer, elements: int) -> Iterator[tuple[Range, Range]]:
    """(query heads, key heads) of each block."""
    query_head, key_head = (layer.head_dim * part.shape[1] for part in (layer.query, layer.key))
    group = layer.group
    groups = elements // (group * query_head + key_head)
    if groups:
        for first in range(0, layer.kv_heads, groups):
            last = min(first + groups, layer.kv_heads)
            yield (first * group, last * group), (first, last)
        return
    count = max(1, (elements - key_head) // query_head)  # query heads that share one key head
    for key in range(layer.kv_heads):
        for first in range(key * group, (key + 1) * group, count):
            yield (first, min(first + count, (key + 1) * group)), (key, key + 1)


def rows_of_heads(projection: Projection, read: RowReader, heads: Range, count: int) -> Projection:
    """The rows of some heads, of `count`, of a projection."""
    size = projection.shape[0] // count
    start, stop = heads[0] * size, heads[1] * size
    bias = None if projection.bias is None else projection.bias[start:stop]
    return Projection(partial(read, start, stop), (stop - start, projection.shape[1]), bias)


def norm_of_heads(norm: Norm | None, heads: Range) -> Norm | None:
    """The norm of some heads; one with a gain or a bias for each head has those of these."""
    if norm is None:
        return None
    gain, bias = (x if x is None or x.ndim < 2 else x[heads[0] : heads[1]] for x in (norm.gain, norm.bias))
    return replace(norm, gain=gain, bias=bias)
