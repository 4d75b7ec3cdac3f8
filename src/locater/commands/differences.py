"""What differs between two models of one shape. Every tensor: equal, equal but for its type, or changed; by how much,
of what rank. Every head: its logits at offset 0 and above, and what it writes. And which heads of one are heads of the
other in another place.

A difference of W = W_Q^T W_K (docs/theory.md section 2) is that of two products of thin matrices, and is computed from
their small products without cancellation: with Q' = Q + dQ and K' = K + dK,

    W' - W = dQ^T K' + Q^T dK = [dQ; Q]^T [K'; dK],

whose norm is that of (2h x 2h) Gram matrices. No d x d matrix is formed.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from locater.layers import AttentionLayer
from locater.layers.head_blocks import head_blocks
from locater.layers.norm_folding import logit_maps
from locater.layers.output_maps_and_written_norms import OutputMaps, column_gram, output_maps
from locater.layers.rotary import Rotary
from locater.numerics import finite_or_none, one_thread
from locater.sources.weights import Weights

SKETCH = 128  # rows and columns that a difference is folded into before its rank is taken
HIGHEST = SKETCH // 2  # rank that is told from a full one
COPIES = 4  # rows of the sketch that a row is added to, so that no two rows of a few coincide
NUMBERS_AT_ONCE = 2**22  # numbers of a tensor that are in memory as floats at a time
# singular values of rounding noise lie below this many times what noise of the same size and no structure has
ABOVE_NOISE = 2.0
NOISE_LEFT = 1.5  # times the squared norm of all rounding, at most, is what small singular values may hold


class TensorDifference(NamedTuple):
    """One tensor that both sources have, by its name. `kind` is "equal" (bytes), "dtype" (numbers equal once either is
    rounded to the type of the other), "shape" or "changed".
    """

    name: str
    kind: str
    relative: float | None = None  # norm of the difference over that of the first; None where either is not finite
    rank: int | None = None  # of the difference of a matrix; None where it is full or above HIGHEST, or no matrix
    nonfinite: int = 0  # numbers that are finite in the first alone

    @property
    def module(self) -> str:
        """The kind of module: its name without the numbers of layers."""
        return kind_of_module(self.name)


def kind_of_module(name: str) -> str:
    """The name of a tensor with its layer left open.

    >>> kind_of_module("model.layers.3.self_attn.q_proj.weight")
    'model.layers.*.self_attn.q_proj.weight'
    """
    return re.sub(r"(?<=\.)\d+(?=\.)|^\d+(?=\.)", "*", name)


def tensor_differences(
    first: Weights, second: Weights, progress: Callable[[Iterable[Any], int], Iterable[Any]] | None = None
) -> Iterator[TensorDifference]:
    """The tensors that both have, one at a time, in the order of their names."""
    both = sorted({*first.names()} & {*second.names()})
    for name in progress(both, len(both)) if progress else both:
        if first.shape(name) != second.shape(name):
            yield TensorDifference(name, "shape")
        else:
            yield difference(name, *(weights.read(name).detach().cpu() for weights in (first, second)))


@torch.no_grad()
def difference(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    """Two tensors of one shape.

    >>> difference("w", torch.ones(4, 4), torch.ones(4, 4) + torch.eye(4)[:1])
    TensorDifference(name='w', kind='changed', relative=0.5, rank=1, nonfinite=0)
    """
    if a.dtype == b.dtype:
        if _equal_bytes(a, b):
            return TensorDifference(name, "equal")
    elif a.is_floating_point() == b.is_floating_point() and any(
        all(_equal_bytes(x.to(y.dtype), y) for x, y in _tensor_blocks(*pair)) for pair in ((a, b), (b, a))
    ):
        return TensorDifference(name, "dtype")
    with one_thread():
        return _changed(name, a, b)


def _tensor_blocks(a: Tensor, b: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Some rows of both at a time; a vector is a column."""
    rows = (x.flatten(1) if x.ndim > 1 else x.reshape(-1, 1) for x in (a, b))
    step = max(1, NUMBERS_AT_ONCE // max(1, math.prod(a.shape[1:])))
    yield from zip(*(x.split(step) for x in rows), strict=True)


def _equal_bytes(a: Tensor, b: Tensor) -> bool:
    return torch.equal(*(x.contiguous().view(-1).view(torch.uint8) for x in (a, b)))


def _changed(name: str, a: Tensor, b: Tensor) -> TensorDifference:
    """The norm and rank of a difference, from blocks of rows."""
    matrix = a.ndim > 1 and min(len(a), math.prod(a.shape[1:])) > 1
    draw = torch.Generator().manual_seed(0)
    change, sizes, lost, sketch = 0.0, [0.0, 0.0], 0, torch.zeros(())
    for x, y in _tensor_blocks(a, b):
        x, y = _as_floats(x), _as_floats(y)
        lost += int((x.isfinite() & ~y.isfinite()).sum())
        change += _squared_norm(y - x)
        sizes = [size + _squared_norm(part) for size, part in zip(sizes, (x, y), strict=True)]
        if matrix and math.isfinite(change):
            sketch = sketch + _folded((y - x).float(), draw)
    if not (math.isfinite(change) and math.isfinite(sizes[0])):
        return TensorDifference(name, "changed", nonfinite=lost)
    relative, rank = math.sqrt(change / sizes[0]) if sizes[0] else None, None
    if matrix:
        rounding = max(_rounding(x.dtype) * math.sqrt(size) for x, size in zip((a, b), sizes, strict=True))
        rank = _rank(_folded(sketch.mT, draw), rounding, (len(a), math.prod(a.shape[1:])))
    return TensorDifference(name, "changed", relative, rank, lost)


def _squared_norm(x: Tensor) -> float:
    return float(torch.linalg.vector_norm(x, dtype=torch.float64)) ** 2


def _rounding(dtype: torch.dtype) -> float:
    """Root mean square of the rounding of numbers, at most, over their own."""
    return torch.finfo(dtype).eps / 12**0.5 if dtype.is_floating_point else 0.0


def _as_floats(x: Tensor) -> Tensor:
    return x if x.dtype in (torch.float32, torch.float64) else x.float()


def _folded(matrix: Tensor, draw: torch.Generator) -> Tensor:
    """Rows added up into SKETCH rows, each into several with random signs, so that the singular values of a matrix of
    low rank stay what they were, nearly.
    """
    folded = torch.zeros(SKETCH, matrix.shape[1])
    for _ in range(COPIES):
        signs = torch.randint(0, 2, (len(matrix), 1), generator=draw) * 2 - 1
        places = torch.randint(0, SKETCH, (len(matrix),), generator=draw)
        folded.index_add_(0, places, matrix * signs)
    return folded / COPIES**0.5


def _rank(sketch: Tensor, rounding: float, shape: tuple[int, int]) -> int | None:
    """How many singular values stand out of noise, `rounding` in norm; None where these are all of them, or too many
    to be counted in a sketch, or where what is left is more than noise.
    """
    values = torch.linalg.svdvals(sketch.double())
    noise = 2 * rounding / SKETCH**0.5  # largest singular value of a sketch of noise without structure
    exact = float(values[0]) * max(shape) * torch.finfo(torch.float32).eps
    above = values > max(ABOVE_NOISE * noise, exact)
    rank, left = int(above.sum()), float(values[~above].square().sum())
    explained = left <= NOISE_LEFT * rounding**2 + SKETCH * exact**2
    return rank if explained and rank <= HIGHEST and rank < min(shape) else None


OFFSETS = (1, 4, 16, 64)  # distances in tokens over which the logits of rotated heads are compared
MAPS_AT_ONCE = 2**21  # numbers of the query and key maps of one model that are folded at a time
PROBES = 8  # random directions that a head is recognised by
ALIKE = 1e-2  # relative difference of two heads' responses to these, under which they are one head
NO_DIFFERENCE = 1e-7  # relative: below it a difference is the rounding of maps folded in float32


class HeadDifference(NamedTuple):
    """One head of a model beside the same head of its base, each number relative to the norm of the base's map (to that
    of the other where the base's is zero). None is a number that does not exist: maps that are not known or not finite,
    no rotation.
    """

    qk: float | None  # of the logits of two tokens at the same position
    qk_rotated: float | None  # of those of tokens some positions apart, root mean square over OFFSETS
    ov: float | None  # of what the head writes, O_h V_h

    @property
    def largest(self) -> float | None:
        """The largest of the three; None where none is known."""
        return max((x for x in self if x is not None), default=None)


def same_head_shapes(base: AttentionLayer, other: AttentionLayer) -> bool:
    """Whether the heads of two layers can be subtracted."""
    shapes = [(x.kind, x.heads, x.kv_heads, x.head_dim, x.query.shape, x.key.shape) for x in (base, other)]
    return shapes[0] == shapes[1]


@torch.no_grad()
def head_differences(base: AttentionLayer, other: AttentionLayer, raw: bool = False) -> list[HeadDifference]:
    """The difference of every head of two layers of the same shape. `raw` takes parameters as they are stored.

    >>> from locater.layers import Projection
    >>> def layer(factor):
    ...     maps = (Projection(lambda x=x: x, (4, 4)) for x in (factor * torch.eye(4), torch.eye(4)))
    ...     return AttentionLayer("attention", 0, 1, 1, 4, *maps, scale=0.5)
    >>> head_differences(layer(1), layer(3))
    [HeadDifference(qk=2.0, qk_rotated=None, ov=None)]
    """
    assert same_head_shapes(base, other), "heads of other shapes have no difference"
    with one_thread():
        logits = [row for pair in _head_blocks(base, other) for row in _logit_differences(*pair, raw)]
        written = _written_differences(base, other, raw)
    return [HeadDifference(*pair, ov) for pair, ov in zip(logits, written, strict=True)]


def _head_blocks(base: AttentionLayer, other: AttentionLayer) -> Iterator[tuple[AttentionLayer, AttentionLayer]]:
    """The same heads of both, a few at a time."""
    group = base.head_dim * (base.group * base.query.shape[1] + base.key.shape[1])
    most = max(MAPS_AT_ONCE, min(group, 4 * MAPS_AT_ONCE))  # a key head and its query heads, where they fit
    return zip(head_blocks(base, most), head_blocks(other, most), strict=True)


class _Maps(NamedTuple):
    """Queries with their constant part as one more column and times the scale, and keys with theirs; float64."""

    query: Float[Tensor, "H h e"]
    key: Float[Tensor, "K h e"]


def _maps(layer: AttentionLayer, raw: bool) -> _Maps:
    maps = logit_maps(layer, raw)
    query, query_shift, key, key_shift = (x.detach().cpu().double() for x in maps)
    scale = 1.0 if layer.unknown_scale is not None else layer.scale
    return _Maps(scale * torch.cat([query, query_shift[..., None]], -1), torch.cat([key, key_shift[..., None]], -1))


def _logit_differences(
    base: AttentionLayer, other: AttentionLayer, raw: bool
) -> list[tuple[float | None, float | None]]:
    """For each head, that at offset 0 and that above it."""
    A, B = _maps(base, raw), _maps(other, raw)
    turns = _turns(base) and _turns(other)
    if all(map(torch.equal, A, B)) and _equal_rotation(base, other):
        return [(0.0, 0.0 if turns else None)] * base.heads
    query = _gram(B.query - A.query, A.query)
    # a constant part of keys is the same for all keys at offset 0, and drops out of the softmax
    varying = [x.key[..., :-1] for x in (A, B)]
    squared = _inner(query, _gram(varying[1], varying[1] - varying[0]))
    sizes = [_inner(x.query @ x.query.mT, key @ key.mT) for x, key in zip((A, B), varying, strict=True)]
    still = _relative(squared, *sizes)
    turned: list[float | None] = [None] * base.heads
    if turns:
        turned = _turned_differences(A, B, query, (base.rotary, other.rotary))  # type: ignore[arg-type]
    return list(zip(still, turned, strict=True))


def _turns(layer: AttentionLayer) -> bool:
    """Whether logits at an offset are known from maps: gains that act after the rotation do not commute with it."""
    norms = (layer.query_norm, layer.key_norm)
    return layer.rotary is not None and not (
        layer.norm_last and any(x is not None and x.gain is not None for x in norms)
    )


def _equal_rotation(base: AttentionLayer, other: AttentionLayer) -> bool:
    one, two = base.rotary, other.rotary
    if one is None or two is None:
        return one is two
    return len(one.frequencies) == len(two.frequencies) and torch.equal(one.frequencies.cpu(), two.frequencies.cpu())


def _gram(first: Tensor, second: Tensor) -> Float[Tensor, "n 2h 2h"]:
    stacked = torch.cat([first, second], 1)
    return stacked @ stacked.mT


def _inner(of_queries: Float[Tensor, "H n n"], of_keys: Float[Tensor, "K n n"]) -> Float[Tensor, " H"]:
    """tr(X Y) of symmetric matrices, each key head for its group of query heads."""
    return (of_queries.unflatten(0, (len(of_keys), -1)) * of_keys.unsqueeze(1)).sum((-2, -1)).flatten()


def _turned_differences(
    A: _Maps, B: _Maps, query: Float[Tensor, "H 2h 2h"], rotary: tuple[Rotary, Rotary]
) -> list[float | None]:
    """Root mean square over OFFSETS. Keys at an offset are R K, so [K'; dK] becomes M [K'; dK] with

    M = [[R', 0], [R' - R, R]] for the rotations of both models, which may have other frequencies.
    """
    size, key = A.query.shape[1], _gram(B.key, B.key - A.key)
    grams = [(x.query @ x.query.mT, x.key @ x.key.mT) for x in (A, B)]
    squared, base, other = (torch.zeros(len(query), dtype=torch.float64) for _ in range(3))
    for offset in OFFSETS:
        R, R_other = (_rotation(x, size, offset) for x in rotary)
        M = torch.cat([torch.cat([R_other, 0 * R], 1), torch.cat([R_other - R, R], 1)])
        squared += _inner(query, M @ key @ M.mT)
        base += _inner(grams[0][0], R @ grams[0][1] @ R.mT)
        other += _inner(grams[1][0], R_other @ grams[1][1] @ R_other.mT)
    return _relative(squared, base, other)


def _rotation(rotary: Rotary, size: int, offset: int) -> Float[Tensor, "h h"]:
    """What keys turn by as queries `offset` positions later meet them: `Rotary.rotate` backwards, without its
    amplitude, which is folded into the maps.
    """
    plain = replace(rotary, amplitude=1.0, first=0)
    return plain.rotate(torch.eye(size, dtype=torch.float64), torch.full((size,), offset))


def _relative(squared: Tensor, base: Tensor, other: Tensor) -> list[float | None]:
    """Root of `squared` over that of `base`, or of `other` where that is zero; 0 where both are."""
    base = torch.where(base > 0, base, other)
    ratio = (squared.clamp_min(0) / base).sqrt().where(base != 0, 0.0)
    ratio = ratio.where(~(ratio < NO_DIFFERENCE), 0.0)
    return [finite_or_none(x) for x in ratio.tolist()]


def _written_differences(base: AttentionLayer, other: AttentionLayer, raw: bool) -> list[float | None]:
    """Of O_h V_h: O'V' - OV = [dO, O] [V'; dV]."""
    a, b = output_maps(base, raw), output_maps(other, raw)
    if a is None or b is None or _shape(a) != _shape(b):
        return [None] * base.heads
    if all(map(torch.equal, a.values(), b.values())) and all(map(torch.equal, a.out_rows(), b.out_rows())):
        return [0.0] * base.heads
    out = column_gram(torch.cat([y - x, x], -1) for x, y in zip(a.out_rows(), b.out_rows(), strict=True))
    grams = [(_gram(y, y - x), x @ x.mT, y @ y.mT) for x, y in zip(a.values(), b.values(), strict=True)]
    values, of_a, of_b = (torch.cat(parts) for parts in zip(*grams, strict=True))
    n = a.size
    out_a = out[:, n:, n:]
    out_b = out_a + out[:, :n, :n] + out[:, :n, n:] + out[:, n:, :n]
    return _relative(_inner(out, values), _inner(out_a, of_a), _inner(out_b, of_b))


def _shape(maps: OutputMaps) -> tuple[tuple[int, int], ...]:
    value, out = maps.layer.value, maps.layer.out
    assert value is not None
    assert out is not None
    return value.shape, out.shape


# ---- heads in other places ----

Place = tuple[int, int]  # layer and head


class Responses(NamedTuple):
    """What each head of a layer answers to PROBES random vectors: equal for heads that are equal, in whatever place,
    and different for any others. A part that is not known is None.
    """

    acts: Float[Tensor, "H n"] | None  # effective logits, at an offset too, and what is written
    stored: Float[Tensor, "H n"] | None  # parameters of queries, keys, values and outputs
    queries: Float[Tensor, "H n"]  # parameters of queries alone


class Move(NamedTuple):
    """A head that is one of the base in another place, or has its queries; `part` is "head" or "queries"."""

    part: str
    layer: int
    head: int


@torch.no_grad()
def responses(layer: AttentionLayer) -> Responses:
    """The responses of one layer, float64."""
    draw = torch.Generator().manual_seed(0)
    with one_thread():
        tokens, others = _random(layer.query.shape[1] + 1, draw), _random(layer.key.shape[1] + 1, draw)
        channels, ends = _random(layer.head_dim, draw), _random(layer.query.shape[1], draw)
        logits, stored = [], []
        for block in head_blocks(layer, MAPS_AT_ONCE):
            maps = _maps(block, raw=False)
            logits.append(_logit_responses(block, maps.query @ tokens, maps.key @ others))
            query, key = (
                (part.weight().detach().cpu().double() @ x[:-1]).unflatten(0, (-1, layer.head_dim))
                for part, x in ((block.query, tokens), (block.key, others))
            )
            pair = (query * channels).sum(1), (key * channels).sum(1).repeat_interleave(block.group, 0)
            stored.append(torch.stack(pair))
        queries, keys = torch.cat(stored, 1)
        parts = [_written_responses(maps, ends) for maps in map(partial(output_maps, layer), (False, True)) if maps]
    if len(parts) < 2:
        return Responses(None, None, queries)
    (written, _), (_, apart) = parts
    return Responses(torch.cat([torch.cat(logits), written], 1), torch.cat([queries, keys, apart], 1), queries)


def _random(size: int, draw: torch.Generator) -> Float[Tensor, "size n"]:
    return torch.randn(size, PROBES, dtype=torch.float64, generator=draw)


def _logit_responses(layer: AttentionLayer, queries: Tensor, keys: Tensor) -> Float[Tensor, "H n"]:
    """Logits of pairs of tokens, from their queries and keys (heads, h, n)."""
    turned = keys
    if _turns(layer):
        turned = _rotation(layer.rotary, layer.head_dim, OFFSETS[1]) @ keys  # type: ignore[arg-type]
    return torch.cat([(queries * k.repeat_interleave(layer.group, 0)).sum(1) for k in (keys, turned)], 1)


def _written_responses(maps: OutputMaps, ends: Tensor) -> tuple[Tensor, Tensor]:
    """For each head, that of its product O V, and those of both."""
    draw = torch.Generator().manual_seed(1)
    values = list(maps.values())
    tokens, channels = _random(values[0].shape[-1], draw), _random(maps.size, draw)
    V = torch.cat([part @ tokens for part in values]).repeat_interleave(maps.layer.group, 0)  # (H, v, n)
    start, columns = 0, torch.zeros((), dtype=torch.float64)
    for rows in maps.out_rows():
        columns = columns + torch.einsum("rhv,rn->hvn", rows, ends[start : start + len(rows)])
        start += len(rows)
    apart = torch.cat([(part * channels).sum(1) for part in (V, columns)], 1)
    return (columns * V).sum(1), apart


def moved_heads(
    base: Mapping[int, Responses], other: Mapping[int, Responses], places: Collection[Place]
) -> dict[Place, Move]:
    """Which heads of `other`, among `places`, are heads of `base` from another place, by layer number."""
    found: dict[Place, Move] = {}
    for part, name in (("acts", "head"), ("stored", "head"), ("queries", "queries")):
        table, at = _table(base, part, None)
        wanted, heads = _table(other, part, {*places} - {*found})
        for size in {x.shape[0] for x in wanted}:
            mine = [i for i, x in enumerate(wanted) if len(x) == size]
            theirs = [i for i, x in enumerate(table) if len(x) == size]
            if not theirs:
                continue
            rows, columns = (torch.stack([x[i] for i in some]) for x, some in ((wanted, mine), (table, theirs)))
            least, nearest = torch.cdist(rows, columns, compute_mode="donot_use_mm_for_euclid_dist").min(1)
            alike = (least <= ALIKE * rows.norm(dim=1)) & (rows.norm(dim=1) > 0)
            for i, near in zip(alike.nonzero()[:, 0].tolist(), nearest[alike].tolist(), strict=True):
                place, origin = heads[mine[i]], at[theirs[near]]
                if origin != place:
                    found[place] = Move(name, *origin)
    return found


def _table(
    responses: Mapping[int, Responses], part: str, chosen: Collection[Place] | None
) -> tuple[list[Tensor], list[Place]]:
    """A part of the responses of the finite heads among `chosen` (None: of all), and their places."""
    rows = [
        (row, (layer, head))
        for layer, of_layer in responses.items()
        if getattr(of_layer, part) is not None
        for head, row in enumerate(getattr(of_layer, part))
        if (chosen is None or (layer, head) in chosen) and bool(row.isfinite().all())
    ]
    return [row for row, _ in rows], [place for _, place in rows]
