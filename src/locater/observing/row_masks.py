"""Which rows of an attention call count, and which key is the first of each row's sequence.

A key that no query may look at is padding. Where queries and keys are the same tokens, its row is padding too.

Layers of a pass have the same masks. Outside of graphs masks are known by their memory (`counted_rows`); a graph uses
memory again and leaves no trace of it. In compiled models what follows from the masks of a call alone is therefore an
operator of its own, before the one that adds the call up (`accumulate`): where the compiler splits a graph for training
into forward and backward, equal calls of an operator that changes nothing become one call.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import lru_cache
from itertools import cycle
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from locater.calls.call_and_masks import Call
from locater.calls.listeners import report_uncounted
from locater.kernels import Terms, has_spans, mask_spans
from locater.torch_private import disable_dynamo, write_count

Result = TypeVar("Result")
NOTHING: Any = object()
DRAWS = 64  # samples of rows that are drawn at a time; later ones are these again


class CountedRows(NamedTuple):
    """A call with its queries in place. `counted` (B, T) is True for rows that count; `first` (B, T) is the first key
    of the row's sequence, -1 where it is gone from the cache. Of a sample all of these are of its rows alone, and
    `sample` has their numbers and the queries and terms of all rows.
    """

    q: Tensor
    k: Tensor
    terms: Terms
    output: Tensor | None
    counted: Tensor
    first: Tensor
    sample: tuple[Tensor, Tensor, Terms] | None = None


def call_for_heads(call: Call, heads: Tensor) -> Call:
    """The call for some of its query heads."""
    group = call.query.shape[1] // call.key.shape[1]
    output = call.output if call.output is None or call.output.ndim < 4 else call.output[:, :, heads]
    return Call(call.query[:, heads], call.key[:, heads // group], call.terms.for_heads(heads), output, call.cut)


def counted_rows(call: Call, own: bool, again: bool = False) -> CountedRows:
    """The rows that count; `own`: queries and keys are the same tokens.

    `again`: layers of a pass have the same masks, and what follows from these is computed once.
    """
    (B, H, T, _), S = call.query.shape, call.key.shape[2]
    terms = call.terms.checked(B, H, T, S)
    positions, counted, first = _cached_for_masks(
        _placements, call, own, again, lambda: place_queries(terms, call.cut, own, B, T, S, call.query.device)
    )
    terms = terms if positions is None else replace(terms, positions=positions)
    return CountedRows(call.query, call.key, terms, call.output, counted, first)


# what follows from the masks of a call, by these masks. A mask is known by its memory: the key keeps that from being
# taken for the memory of another one, and not from being freed
_placements: dict[tuple[Any, ...], tuple[Tensor | None, Tensor, Tensor]] = {}
_spans: dict[tuple[Any, ...], tuple[Tensor, Tensor] | None] = {}


def spans(call: Call, own: bool, again: bool) -> tuple[Tensor, Tensor] | None:
    """`mask_spans` of a call; `again` as in `counted_rows`."""
    (B, H, T, _), S = call.query.shape, call.key.shape[2]
    return _cached_for_masks(_spans, call, own, again, lambda: mask_spans(call.terms.checked(B, H, T, S), B, T))


def _cached_for_masks(
    known: dict[tuple[Any, ...], Result], call: Call, own: bool, again: bool, make: Callable[[], Result]
) -> Result:
    """What was made for the same masks before, where `again` says that these can be told."""
    key = _masks_key(call, own) if again else None
    if key is None:
        return make()
    found = known.get(key, NOTHING)  # another thread may clear it meanwhile
    if found is NOTHING:
        if len(known) >= 8:
            known.clear()
        found = known[key] = make()
    return found


def forget_masks() -> None:
    """A new pass begins, whose masks may be the same tensors with other values."""
    _placements.clear()
    _spans.clear()


def _masks_key(call: Call, own: bool) -> tuple[Any, ...] | None:
    """None where changes of a mask do not show, in inference mode."""
    terms, (B, _, T, _) = call.terms, call.query.shape
    masks = (terms.padding, terms.documents, terms.mask, terms.bias, terms.positions, call.cut)
    if any(x is not None and x.is_inference() for x in masks):
        return None
    kind = (own, terms.causal, terms.window, B, T, call.key.shape[2], call.query.device)
    return *kind, *(None if x is None else _identity(x) for x in masks)


def _identity(x: Tensor) -> tuple[Any, ...]:
    return StorageWeakRef(x.untyped_storage()), x.storage_offset(), x.shape, x.stride(), x.dtype, write_count(x)


def place_queries(
    terms: Terms, cut: Tensor | None, own: bool, B: int, T: int, S: int, device: torch.device
) -> tuple[Tensor | None, Tensor, Tensor]:
    """Positions of the queries where these are not the last (None), the rows that count and their first keys.

    Among cached keys a query's own key is the last it sees, unless several queries see the same last key: a cache may
    have room left after it.
    """
    seen = _in_sight(terms)
    real = torch.ones(B, S, dtype=torch.bool, device=device) if seen is None else seen.any(1).expand(B, S)
    if terms.padding is not None:
        real = real & terms.padding
    first = real.to(torch.int8).argmax(-1)[:, None].expand(B, T)
    if not own or S < T:
        return terms.positions, torch.ones(B, T, dtype=torch.bool, device=device), first
    if T < S and seen is not None:
        last = torch.where(seen, torch.arange(S, device=device), -1).amax(-1).amax(0).expand(T)
        rising = ((last[1:] > last[:-1]) | (last[:-1] < 0)).all()
        terms = replace(terms, positions=torch.where(rising, last, terms.at(T, S, device)).clamp_min(0))
    if cut is not None:  # the oldest key of a window is not the first of its sequence
        first = torch.where(cut[:, None], -1, first)
    elif T == S:
        first = _first_of_document(terms, seen, first)
    return terms.positions, real[:, terms.at(T, S, device)], first


def _in_sight(terms: Terms) -> Tensor | None:
    """Keys (b, t, S) that mask and bias show to any head; None where there is neither."""
    parts = [] if terms.mask is None else [terms.mask.any(1)]
    if terms.bias is not None:
        parts.append((terms.bias > -torch.inf).any(1))
    return None if not parts else parts[0] if len(parts) == 1 else parts[0] & parts[1]


def _first_of_document(terms: Terms, seen: Tensor | None, first: Tensor) -> Tensor:
    """The first key (B, T) of each row's document: one begins at a token where neither it nor any later one looks
    back.
    """
    T = first.shape[1]
    at = torch.arange(T, device=first.device)
    if terms.documents is not None:
        begins = torch.nn.functional.pad(terms.documents.diff(dim=-1) != 0, (1, 0), value=True)
    elif seen is not None and seen.shape[1] == T > 1:
        shown = seen if terms.padding is None else seen & terms.padding[:, None]
        earliest = torch.where(shown.any(-1), shown.to(torch.int8).argmax(-1), T)
        begins = (earliest.flip(-1).cummin(-1).values.flip(-1) >= at) & shown.diagonal(dim1=-2, dim2=-1)
    else:
        return first
    begun = torch.where(begins, at, -1).cummax(-1).values
    return torch.where(begun < 0, first, begun)


def sample_rows(rows: CountedRows, at: Tensor) -> CountedRows:
    """The rows at `at` (R,)."""
    q, k, terms, output, counted, first, _ = rows
    T, S = q.shape[2], k.shape[2]
    some = terms.placed(T, S, q.device).for_queries(at)
    output = None if output is None else output[:, at]
    return CountedRows(q[:, :, at], k, some, output, counted[:, at], first[:, at], (at, q, terms))


def next_sample(rows: int, count: int, device: torch.device) -> Tensor:
    """The numbers (count,) of rows, one drawn out of each of `count` equal parts of `rows` rows.

    Samples are drawn on the device, many at a time, and used in turns: a copy from the host would wait for the device.
    The generator is our own, so that the random numbers of a run stay what they are.

    >>> [int(row) // 25 for row in next_sample(100, 4, torch.device("cpu"))]
    [0, 1, 2, 3]
    """
    return next(_samples(rows, count, device))


@lru_cache(maxsize=64)
def _samples(rows: int, count: int, device: torch.device) -> Iterator[Tensor]:
    with torch.inference_mode(False), torch.no_grad():
        generator = torch.Generator(device).manual_seed(rows)
        drawn = torch.arange(count, device=device) + torch.rand(DRAWS, count, generator=generator, device=device)
        return cycle((drawn * (rows / count)).long().clamp_max_(rows - 1).unbind())


class Placement(NamedTuple):
    """Operators return no None: (0,) stands for it."""

    positions: Tensor  # (T,) of the queries where a mask says that these are not the last, or (0,)
    counted: Tensor  # (B, T), as in `CountedRows`
    first: Tensor  # (B, T), likewise
    spans: Tensor  # (2, B, T) of `mask_spans`, or (0,)
    whole: Tensor  # () of `mask_spans`, or (0,)

    def both_spans(self) -> tuple[Tensor, Tensor]:
        """As `mask_spans` returns them."""
        return self.spans, self.whole


def traced_placement(call: Call, own: bool, heads: Tensor | None, spans: bool, mailbox: int) -> list[Tensor]:
    """The `Placement` of a call that torch.compile traces, with spans where asked for; empty where it has no masks."""
    terms, (B, H, T, _), S = call.terms, call.query.shape, call.key.shape[2]
    if not terms.has_masks and terms.positions is None and call.cut is None:
        return []
    if not any(x is not None and x.ndim == 4 and x.shape[1] != 1 for x in (terms.mask, terms.bias)):
        heads = None  # layers of which other heads are observed have the same placement
    terms = replace(terms, scale=None, softcap=None, first=1, alibi=None, sinks=None)  # none of which is a mask
    spans = spans and has_spans(terms) and not (own and T < S)  # rows that have positions are no rows of the kernels
    return list(_operator(*terms.flat(), call.cut, heads, [B, H, T, S], own, spans, mailbox))


def placed_rows(call: Call, placement: Placement) -> CountedRows:
    """`counted_rows` of a call whose placement is known."""
    (B, H, T, _), S = call.query.shape, call.key.shape[2]
    terms = call.terms.checked(B, H, T, S)
    if placement.positions.numel():
        terms = replace(terms, positions=placement.positions)
    return CountedRows(call.query, call.key, terms, call.output, placement.counted, placement.first)


SCHEMA = (
    f"mask_placement({Terms.SCHEMA}, Tensor? cut, Tensor? heads, SymInt[] sizes, bool own, bool spans, SymInt mailbox) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)"
)


def _run(*arguments: Any) -> Placement:
    """The operator. With a `mailbox`, no row counts under masks that cannot be read, and the reason is reported."""
    terms, (cut, heads, sizes, own, spans, mailbox) = _unpack(arguments)
    try:
        if 0 not in sizes:
            return _placement(terms, cut, heads, sizes, own, spans)
    except Exception as error:  # as in `accumulate`
        if not mailbox:
            raise
        report_uncounted(mailbox, error)
    return Placement(*(x.zero_() for x in _fake(*arguments)))


def _placement(
    terms: Terms, cut: Tensor | None, heads: Tensor | None, sizes: list[int], own: bool, spans: bool
) -> Placement:
    B, H, T, S = sizes
    if heads is not None:
        terms, H = terms.for_heads(heads), len(heads)
    terms = terms.checked(B, H, T, S)
    positions, counted, first = place_queries(terms, cut, own, B, T, S, _device(terms, cut))
    if positions is terms.positions:  # results share no memory with arguments
        positions = None
    both = mask_spans(terms, B, T) if spans else None
    return Placement(
        counted.new_empty(0, dtype=torch.int64) if positions is None else positions.contiguous(),
        counted.contiguous(),
        first.contiguous(),
        *((counted.new_empty(0, dtype=torch.int32) for _ in range(2)) if both is None else both),
    )


def _fake(*arguments: Any) -> tuple[Tensor, ...]:
    """The shapes and types of the results; a plain tuple, as operators return it."""
    terms, (cut, _, (B, _, T, S), own, spans, _) = _unpack(arguments)
    placed = own and T < S and not (terms.mask is None and terms.bias is None)
    shapes = ((T if placed else 0,), (B, T), (B, T), (2, B, T) if spans else (0,), () if spans else (0,))
    types, device = (torch.int64, torch.bool, torch.int64, torch.int32, torch.int32), _device(terms, cut)
    return tuple(torch.empty(shape, dtype=dtype, device=device) for shape, dtype in zip(shapes, types, strict=True))


def _unpack(arguments: tuple[Any, ...]) -> tuple[Terms, tuple[Any, ...]]:
    return Terms.from_flat(arguments[: Terms.ARGUMENTS]), arguments[Terms.ARGUMENTS :]


def _device(terms: Terms, cut: Tensor | None) -> torch.device:
    masks = (terms.padding, terms.documents, terms.mask, terms.bias, terms.positions, cut)
    return next(x.device for x in masks if x is not None)


_library = torch.library.Library("locater", "FRAGMENT")
_library.define(SCHEMA, tags=torch.Tag.pt2_compliant_tag)
_library.impl("mask_placement", disable_dynamo(_run), "CompositeExplicitAutograd")
_library.impl("mask_placement", torch.library.fallthrough_kernel, "Autograd")
_operator = torch.ops.locater.mask_placement.default
torch.library.register_fake("locater::mask_placement", _fake, lib=_library)
