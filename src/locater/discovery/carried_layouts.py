"""The layouts of a small model carried over to the layers of the full one.

A layer of the full model gets the layout of a layer of its kind (`layer_kinds`). Tensors of the layer itself get its
number. Tensors of other layers of the stack (the norm at the end of the one before; the position table of the first)
are told apart by two layers of the kind: what moves with the layer is relative, what stays is fixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from locater.calls.attention_like import attention_like
from locater.discovery.layer_kinds import Kinds, Stack
from locater.discovery.layout_json import nearly_equal, rename_tensors, tensor_names
from locater.discovery.verified_search import Refusal
from locater.layers.layout import AttentionLayout
from locater.sources.weights import ModuleWeights

UNLIKE = "it is built otherwise than the layers that were tried"
DIFFERENT = "layers that are built alike do not compute alike"
UNCLEAR = "it reads tensors of other layers, and which ones is not clear from the layers that were tried"
NO_SEARCH = "not searched"
T = TypeVar("T", AttentionLayout, Refusal)


@dataclass(frozen=True)
class SearchResult:
    """What a search found in a model, by names of its modules and tensors."""

    layouts: list[AttentionLayout]
    refused: list[Refusal]
    unreached: list[str]


def carry_layouts(searched: SearchResult, kinds: Kinds, small: ModuleWeights, full: ModuleWeights) -> SearchResult:
    """What was found in the small model, for the full one."""
    attention = attention_like(full)
    carrier = _Carrier(searched, kinds, small, full, attention)
    layouts: list[AttentionLayout] = []
    refused: list[Refusal] = []
    for item in carrier.expanded(searched.layouts, lambda layout: layout.name):
        (layouts if isinstance(item, AttentionLayout) else refused).append(item)  # type: ignore[arg-type]
    silent = [Refusal(name, "") for name in searched.unreached]
    refused += [item for item in carrier.expanded(searched.refused, _name) if isinstance(item, Refusal)]
    unreached = [item for item in carrier.expanded(silent, _name) if isinstance(item, Refusal)]
    refused += [item for item in unreached if item.reason]
    names = {*(layout.name for layout in layouts), *(item.name for item in (*refused, *unreached))}
    refused += [Refusal(path, UNLIKE) for path in attention if not _covered(path, names)]
    unique = list(dict.fromkeys(refused))
    return SearchResult(layouts, unique, [item.name for item in unreached if not item.reason])


def unlike_modules(kinds: Kinds, small: ModuleWeights, full: ModuleWeights) -> list[str]:
    """Attention modules of the full model that no module of the small one is like."""
    paths = [Refusal(path, NO_SEARCH) for path in attention_like(small)]
    refused = carry_layouts(SearchResult([], paths, []), kinds, small, full).refused
    return [refusal.name for refusal in refused if refusal.reason != NO_SEARCH]


class _Carrier:
    def __init__(
        self, searched: SearchResult, kinds: Kinds, small: ModuleWeights, full: ModuleWeights, attention: list[str]
    ) -> None:
        self._kinds, self._tensors, self._weights = kinds, set(small.names()), (small, full)
        self._small, self._full = self._by_layer(attention_like(small)), self._by_layer(attention)
        names = [layout.name for layout in searched.layouts]
        self._paths = self._by_layer([*names, *(item.name for item in searched.refused), *searched.unreached])
        self._read = self._by_layer(name for layout in searched.layouts for name in tensor_names(layout, self._tensors))
        self._matches: dict[tuple[Stack, int], list[int]] = {}

    def expanded(self, items: Sequence[T], name: Callable[[T], str]) -> list[T | Refusal]:
        """Items of the small model, in its order, with each stack in full where it is first met."""
        result: list[T | Refusal] = []
        done: set[Stack] = set()
        for item in items:
            stack = self._kinds.stack_of(name(item))
            if stack is None:
                result.append(self._outside(item, name(item)))
            elif stack not in done:
                done.add(stack)
                inside = [(stack.place(name(x)), x) for x in items if self._kinds.stack_of(name(x)) is stack]
                layers: list[list[tuple[str, T]]] = [[] for _ in range(stack.small)]
                for place, x in inside:
                    assert place is not None
                    layers[place[0]].append((place[1], x))
                for number in range(stack.full):
                    result += self._layer(stack, number, layers)
        return result

    def _outside(self, item: T, name: str) -> T | Refusal:
        if not self._kinds.same_module(name):
            return Refusal(name, UNLIKE)
        return self._moved([item], None, [0], 0, name)

    def _layer(self, stack: Stack, number: int, layers: list[list[tuple[str, T]]]) -> list[T | Refusal]:
        """The items of one layer of the full model."""
        matches = self._match(stack, number)
        if not matches:
            return []
        result: list[T | Refusal] = []
        turns = [_by_path(layers[at]) for at in matches]
        for rest, items in turns[0].items():
            name = f"{stack.path}.{number}.{rest}" if rest else f"{stack.path}.{number}"
            if any(len(others.get(rest, [])) != len(items) for others in turns):
                result.append(Refusal(name, DIFFERENT))
            else:
                columns = zip(*(others[rest] for others in turns), strict=True)
                result += [self._moved(list(column), stack, matches, number, name) for column in columns]
        return result

    def _match(self, stack: Stack, number: int) -> list[int]:
        """Layers of the small model of the same kind: the first one for the first, others for others if there are."""
        if (stack, number) not in self._matches:
            same = [at for at in range(stack.small) if self._same(stack, at, number)]
            later = [at for at in same if at]
            first = same[:1] if 0 in same else []
            self._matches[stack, number] = first if number == 0 else later or same
        return self._matches[stack, number]

    def _by_layer(self, paths: Iterable[str]) -> dict[tuple[Stack, int], set[str]]:
        """Paths inside each layer of each stack."""
        layers: dict[tuple[Stack, int], set[str]] = {}
        for path in paths:
            stack = self._kinds.stack_of(path)
            place = None if stack is None else stack.place(path)
            if stack is not None and place is not None:
                layers.setdefault((stack, place[0]), set()).add(place[1])
        return layers

    def _same(self, stack: Stack, at: int, number: int) -> bool:
        if self._small.get((stack, at)) != self._full.get((stack, number)):
            return False
        inside = self._paths.get((stack, at), set())
        beside = {name.rpartition(".")[0] for name in self._read.get((stack, at), set())}
        return self._kinds.same_layer(stack, at, number, inside, beside)

    def _moved(self, items: list[T], stack: Stack | None, places: list[int], number: int, name: str) -> T | Refusal:
        """An item under its name in the full model. `items` are those of the layers `places`, which are of its kind."""
        first = items[0]
        if isinstance(first, Refusal):
            return replace(first, name=name)
        layouts = [item for item in items if isinstance(item, AttentionLayout)]
        blank = [rename_tensors(replace(layout, name=""), self._tensors, lambda _: "?") for layout in layouts]
        if not all(nearly_equal(blank[0], other) for other in blank[1:]):
            return Refusal(name, DIFFERENT)
        names = [tensor_names(layout, self._tensors) for layout in layouts]
        new = [self._tensor(list(one), stack, places, number) for one in zip(*names, strict=True)]
        if None in new:
            return Refusal(name, UNCLEAR)
        if not self._same_shapes(names[0], new):
            return Refusal(name, UNLIKE)
        waiting = iter(x for x in new if x is not None)
        return replace(rename_tensors(replace(layouts[0], name=""), self._tensors, lambda _: next(waiting)), name=name)

    def _same_shapes(self, old: list[str], new: list[str | None]) -> bool:
        """Whether tensors of the full model have the shapes of those of the small one: rows mean the same only then."""
        small, full = self._weights
        known = full.names()
        return all(
            b in known and small.shape(a) == full.shape(b) for a, b in zip(old, new, strict=True) if b is not None
        )

    def _tensor(self, names: list[str], stack: Stack | None, places: list[int], number: int) -> str | None:
        """One tensor's name in the full model, from its names in layers `places`; None where it is not clear."""
        inside = None if stack is None else [stack.place(name) for name in names]
        if stack is None or inside is None or all(place is None for place in inside):
            only_first = stack is not None and places == [0] and number > 0  # what the first reads, others may not
            return None if only_first else self._from_outside(names)
        if any(place is None for place in inside):
            return None
        known = [place for place in inside if place is not None]
        if len({rest for _, rest in known}) > 1:
            return None
        rest = known[0][1]
        offsets = {layer - at for (layer, _), at in zip(known, places, strict=True)}
        if offsets == {0}:
            return f"{stack.path}.{number}.{rest}"
        if len(known) > 1 and len(offsets) == 1 and 0 <= number + min(offsets) < stack.full:
            return f"{stack.path}.{number + offsets.pop()}.{rest}"
        return names[0] if len(known) > 1 and {layer for layer, _ in known} == {0} else None

    def _from_outside(self, names: list[str]) -> str | None:
        """A tensor outside of the layer's stack: as it is. In another stack only the last layer is clear."""
        other = self._kinds.stack_of(names[0])
        if len(set(names)) > 1:
            return None
        if other is None:
            return names[0]
        place = other.place(names[0])
        assert place is not None
        return f"{other.path}.{other.full - 1}.{place[1]}" if place[0] == other.small - 1 else None


def _by_path(items: Iterable[tuple[str, T]]) -> dict[str, list[T]]:
    """Items by their path in a layer, in order: a module that attends in two ways has two."""
    paths: dict[str, list[T]] = {}
    for path, item in items:
        paths.setdefault(path, []).append(item)
    return paths


def _name(item: Refusal) -> str:
    return item.name


def _covered(path: str, names: set[str]) -> bool:
    """Whether a module, one around it or one inside it is among the names."""
    steps = path.split(".")
    around = {".".join(steps[:count]) for count in range(1, len(steps) + 1)}
    return bool(around & names) or any(name.startswith(f"{path}.") for name in names) or "" in names
