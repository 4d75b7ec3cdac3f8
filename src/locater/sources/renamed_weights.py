"""Tensors of a checkpoint under the names that they have in the model.

transformers renames tensors when it loads them, and splits, joins or reorders the rows of some. Its own rules are asked
here, with row numbers in place of weights: what they make of the numbers says where each row of the model is on disk.
"""

from __future__ import annotations

import copy
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError, first_line
from locater.sources.weights import Rows, Weights, quantised_names, row_ranges

MOST_SOURCES = 16  # tensors that one tensor of the model is made of; more are experts, which attention does not read


@dataclass(frozen=True)
class TensorOrigin:
    """Where a tensor of the model is stored."""

    names: tuple[str, ...]  # tensors of the checkpoint; the rows of several are counted one tensor after the other
    rows: tuple[int, ...] | None = None  # rows of these, in order; None: the one tensor as it is


@dataclass(frozen=True)
class Origins:
    """Where the tensors of a model are stored, by their names in the model."""

    stored: dict[str, TensorOrigin]
    changed: dict[str, str] = field(default_factory=dict)  # tensors whose rows cannot be followed, and the reason
    unused: list[str] = field(default_factory=list)  # tensors of the checkpoint that the model has no place for


class RenamedWeights:
    """A checkpoint by the names of the model. Only the rows that are asked for are read."""

    def __init__(self, stored: Weights, origins: Mapping[str, TensorOrigin]) -> None:
        self.where = stored.where
        self._stored, self._origins = stored, origins

    @property
    def quantised(self) -> dict[str, str]:
        """Formats of the tensors that are stored quantised."""
        kinds = quantised_names(self._stored)
        of_origin = ((name, {kinds[n] for n in x.names if n in kinds}) for name, x in self._origins.items())
        return {name: ", ".join(sorted(formats)) for name, formats in of_origin if formats}

    def names(self) -> Collection[str]:
        return self._origins.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        origin = self._origins[name]
        shape = self._stored.shape(origin.names[0])
        return shape if origin.rows is None else (len(origin.rows), *shape[1:])

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        origin = self._origins[name]
        if origin.rows is None:
            return self._stored.read(origin.names[0], rows)
        chosen = origin.rows
        if rows is not None:
            chosen = tuple(row for start, stop in rows for row in origin.rows[start:stop])
        return self._read_rows(origin.names, chosen)

    def _read_rows(self, names: Sequence[str], rows: Sequence[int]) -> Tensor:
        """Rows of several tensors, counted one tensor after the other."""
        ordered, start, parts = sorted(set(rows)), 0, []
        for name in names:
            stop = start + self._stored.shape(name)[0]
            inside = [row - start for row in ordered if start <= row < stop]
            if inside:
                parts.append(self._stored.read(name, row_ranges(inside)[0]))
            start = stop
        whole = torch.cat(parts) if len(parts) > 1 else parts[0]
        if list(rows) == ordered:
            return whole
        place = {row: at for at, row in enumerate(ordered)}
        return whole[[place[row] for row in rows]]


def origins_of(stored: Weights, model: Any) -> Origins:
    """Where each tensor of `model` (of transformers, may be on the meta device) is in a checkpoint, by the rules that
    transformers loads it with.
    """
    from transformers.conversion_mapping import get_model_conversion_mapping
    from transformers.core_model_loading import WeightConverter, WeightRenaming, dot_natural_key

    rules = get_model_conversion_mapping(model)
    renamings = [rule for rule in rules if isinstance(rule, WeightRenaming)]
    converters = [rule for rule in rules if isinstance(rule, WeightConverter)]
    state = model.state_dict()
    origins: dict[str, TensorOrigin] = {}
    sources: dict[str, tuple[Any, list[tuple[str, str]]]] = {}  # first target -> (rule, (pattern, name on disk))
    unused: list[str] = []
    for name in sorted(stored.names(), key=dot_natural_key):  # some rules depend on the order of the names
        target, pattern = _name_in_model(name, renamings, converters, model.base_model_prefix, state)
        if target not in state:
            unused.append(name)
        elif pattern is None:
            origins[target] = TensorOrigin((name,))
        else:
            rule = next(rule for rule in converters if pattern in rule.source_patterns)
            sources.setdefault(target, (rule, []))[1].append((pattern, name))
    changed: dict[str, str] = {}
    for target, (rule, names) in sources.items():
        try:
            origins.update(_follow_rows(stored, model, rule, target, names))
        except Exception as error:  # the rules raise whatever a product of shapes raises
            reason = str(error) if isinstance(error, LocaterError) else f"{type(error).__name__}: {first_line(error)}"
            changed |= {target.replace(rule.target_patterns[0], other): reason for other in rule.target_patterns}
    _add_tied(origins, getattr(model, "all_tied_weights_keys", None) or {})
    return Origins(origins, changed, unused)


def _name_in_model(name: str, renamings: Any, converters: Any, prefix: str, state: Any) -> tuple[str, str | None]:
    """The name in the model, and the pattern of the rule that changes the tensor."""
    from transformers.core_model_loading import rename_source_key

    target, pattern = rename_source_key(name, renamings, converters, prefix, state)
    if target not in state and name in state:
        target, pattern = rename_source_key(name, [], [], prefix, state)
    return target, pattern


def _follow_rows(
    stored: Weights, model: Any, rule: Any, target: str, names: list[tuple[str, str]]
) -> dict[str, TensorOrigin]:
    """Origins of all tensors that one rule makes of some: it is applied to row numbers."""
    if len(names) > MOST_SOURCES:
        raise LocaterError(f"it is made of {len(names)} tensors")
    rule, start = copy.deepcopy(rule), 0
    for pattern, name in names:
        shape = stored.shape(name)
        if len(shape) not in (1, 2):
            raise LocaterError(f"{name} has {len(shape)} axes")
        numbers = torch.arange(start, start + shape[0], dtype=torch.float64)
        rule.add_tensor(target, name, pattern, numbers if len(shape) == 1 else torch.stack([numbers, -numbers], 1))
        start += shape[0]
    made = rule.convert(target, model=model, config=model.config)
    return {live: TensorOrigin(tuple(name for _, name in names), _row_numbers(rows)) for live, rows in made.items()}


def _row_numbers(numbers: Any) -> tuple[int, ...]:
    numbers = numbers[0] if isinstance(numbers, list) else numbers
    rows = numbers if numbers.ndim == 1 else numbers[:, 0]
    if numbers.ndim > 1 and (numbers.shape[1] != 2 or not torch.equal(numbers, torch.stack([rows, -rows], 1))):
        raise LocaterError("its columns move")
    return tuple(int(row) for row in rows.tolist())


def _add_tied(origins: dict[str, TensorOrigin], tied: Mapping[str, str]) -> None:
    """A tensor that shares its numbers with another is stored once."""
    for one, other in tied.items():
        for name, shared in ((one, other), (other, one)):
            if name not in origins and shared in origins:
                origins[name] = origins[shared]
