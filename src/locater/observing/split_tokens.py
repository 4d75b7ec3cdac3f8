"""Context parallelism: each rank has a part of the tokens of every sequence, and attends to all of them.

A rank has whole rows of attention once it has the keys of all ranks. They are gathered, as `context_parallel` itself
gathers keys and values, and put in order; so the rows of a rank are exact, and `reduce()` adds up those of all ranks.
Which tokens a rank has is known from the order in which `context_parallel` hands them out: by default two runs, one
from either end of the sequence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from locater.calls.call_and_masks import Call
from locater.errors import LocaterError
from locater.observing.layers_by_record import parts_of
from locater.torch_private import (
    gathers_keys,
    is_compiled_in_place,
    is_compiled_wrapper,
    sequence_mesh,
    sequence_order,
    splits_sequences,
)


def refuse_gathered_keys(model: nn.Module) -> None:
    """Under context parallelism of FlexAttention a call has all keys, in the order in which they came."""
    part = next((path for path, part in model.named_modules() if gathers_keys(part)), None)
    if part is not None:
        raise LocaterError(
            f"{type(model).__name__}: {part}: context parallelism of FlexAttention puts keys in an order of its own, "
            "in which distances are not known: observe the model without it"
        )


def mesh_of_split_tokens(model: nn.Module, more: str | None) -> Any:
    """The mesh over which the tokens of the pass that begins are split; None where they are not. Raises where rows
    could not be put together. `more` is what was asked for and needs whole sequences, if anything.
    """
    if not splits_sequences():
        return None
    mesh = sequence_mesh()
    why = more
    if mesh is None:
        why = "it is not the one of torch.distributed.tensor.experimental.context_parallel, whose order is known"
    elif any(is_compiled_in_place(x) or is_compiled_wrapper(x) for x in parts_of(model)):
        why = "the model is compiled, and keys are gathered outside of its graphs"
    if why is not None:
        raise LocaterError(
            f"{type(model).__name__}: context parallelism splits the tokens of a sequence over ranks, and whole rows "
            f"of attention cannot be put together: {why}: observe the model without it"
        )
    return mesh


@torch.no_grad()
def calls_of_whole_rows(call: Call, mesh: Any, name: str) -> Iterator[Call]:
    """The rows of a call on this rank with the keys of all ranks: a call for each run of tokens that it has."""
    terms, query, key = call.terms, call.query, call.key
    if terms.has_masks or terms.positions is not None or call.cut is not None or query.shape[2] != key.shape[2]:
        raise LocaterError(
            f"{name}: a mask or a cache came with tokens that are split over ranks (context parallelism), and which "
            "tokens it is about is not known: pass no attention mask"
        )
    count, size = key.shape[2], mesh.size()
    order = sequence_order(count * size, size)
    own = order.chunk(size)[mesh.get_local_rank()].tolist()
    parts = [torch.empty_like(key, memory_format=torch.contiguous_format) for _ in range(size)]
    dist.all_gather(parts, key.detach().contiguous(), mesh.get_group())
    keys = torch.cat(parts, 2)[:, :, order.argsort().to(key.device)]
    for start, stop in _runs(own):
        first, end = own[start], own[stop - 1] + 1
        output = None if call.output is None else call.output[:, start:stop]
        rows = replace(call, query=query[:, :, start:stop], output=output)
        if terms.causal:  # these rows are the last of the keys that they may see
            yield replace(rows, key=keys[:, :, :end])
        else:
            positions = torch.arange(first, end, device=key.device)
            yield replace(rows, key=keys, terms=replace(terms, positions=positions))


def _runs(positions: list[int]) -> Iterator[tuple[int, int]]:
    """Where runs of consecutive numbers begin and end.

    >>> list(_runs([0, 1, 2, 9, 10, 11]))
    [(0, 3), (3, 6)]
    """
    start = 0
    for at in range(1, len(positions) + 1):
        if at == len(positions) or positions[at] != positions[at - 1] + 1:
            yield start, at
            start = at


def refuse_part_of_heads(name: str) -> LocaterError:
    """A call of some heads at a time, or of other keys than those of its own tokens."""
    return LocaterError(
        f"{name}: tokens are split over ranks (context parallelism), and this layer attends to other tokens or some "
        "heads at a time, whose keys are not gathered: observe the model without it"
    )
