"""Words for places: layers, heads and tensors, in as few as they need."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from locater.commands.doctor.tensors import Facts, place_of

NAMED = 4


def runs_words(numbers: Iterable[int]) -> str:
    """`0, 3 to 5`.

    >>> runs_words([0, 3, 4, 5, 9])
    '0, 3 to 5, 9'
    """
    ordered = sorted(set(numbers))
    parts: list[str] = []
    at = 0
    while at < len(ordered):
        stop = at
        while stop + 1 < len(ordered) and ordered[stop + 1] == ordered[stop] + 1:
            stop += 1
        parts.append(f"{ordered[at]}" if at == stop else f"{ordered[at]} to {ordered[stop]}")
        at = stop + 1
    return ", ".join(parts)


def layers_words(stack: str, layers: Sequence[int], of: int | None = None) -> str:
    """`layers 3 to 5`, and the stack where it is not the usual one.

    >>> layers_words("model.layers", [3]), layers_words("", range(6), of=6)
    ('layer 3', 'every layer')
    """
    if of is not None and len(set(layers)) == of > 1:
        return "every layer"
    return f"layer{'s' * (len(set(layers)) > 1)} {runs_words(layers)}"


def heads_words(places: Sequence[tuple[int, int]]) -> str:
    """`heads 10.0 to 10.8, 12.3`.

    >>> heads_words([(10, 0), (10, 1), (10, 2), (12, 3)])
    'heads 10.0 to 10.2, 12.3'
    """
    by_layer: dict[int, list[int]] = {}
    for layer, head in sorted(set(places)):
        by_layer.setdefault(layer, []).append(head)
    parts: list[str] = []
    for layer, heads in by_layer.items():
        for run in runs_words(heads).split(", "):
            first, _, last = run.partition(" to ")
            parts.append(f"{layer}.{first} to {layer}.{last}" if last else f"{layer}.{first}")
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return f"head{'s' * (len(set(places)) > 1)} {', '.join(parts[:NAMED])}{more}"


def tensors_words(some: Sequence[Facts] | Sequence[str]) -> str:
    """The name of one tensor, or of several of one kind with their layers.

    >>> tensors_words(["h.0.mlp.weight", "h.1.mlp.weight", "h.2.mlp.weight"])
    'mlp.weight of layers 0 to 2'
    """
    names = [x if isinstance(x, str) else x.name for x in some]
    if len(names) == 1:
        return names[0]
    by_kind: dict[str, list[int]] = {}
    alone: list[str] = []
    for name in names:
        place = place_of(name)
        if place.layer is None:
            alone.append(name)
        else:
            by_kind.setdefault(place.kind, []).append(place.layer)
    by_layers: dict[str, list[str]] = {}
    for kind, layers in by_kind.items():
        by_layers.setdefault(layers_words("", layers), []).append(kind)
    parts = alone[:NAMED]
    for where, kinds in by_layers.items():
        shown = ", ".join(kinds[:2]) if len(kinds) <= 2 else f"{len(kinds)} kinds of tensors"
        parts.append(f"{shown} of {where}")
    more = f" and {len(parts) - NAMED} more" if len(parts) > NAMED else ""
    return f"{'; '.join(parts[:NAMED])}{more}"
