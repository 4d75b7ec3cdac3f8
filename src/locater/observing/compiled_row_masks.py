"""What follows from the masks of a call alone, in compiled models: an operator of its own before the one that adds the
call up (`accumulate`).

Layers of a pass have the same masks. Outside of graphs masks are known by their memory (`counted_rows`); a graph uses
memory again and leaves no trace of it. There it is the compiler that knows which masks are the same: where it splits a
graph for training into forward and backward, equal calls of an operator that changes nothing become one call.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from locater.calls.call import Call
from locater.calls.listeners import report_uncounted
from locater.kernels import Terms, has_spans, mask_spans
from locater.observing.row_masks import CountedRows, place_queries
from locater.torch_private import disable_dynamo


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
