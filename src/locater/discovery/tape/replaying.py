"""Computing a part of a tape again, with other values for some of its nodes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from locater.discovery.tape.recording import Node
from locater.torch_private import tree_map


def replay(node: Node, given: Mapping[Node, Tensor]) -> Tensor:
    """The value of `node` if the nodes of `given` had these values; everything else is as it was."""
    start = min(n.order for n in given)
    values: dict[Node, Tensor] = dict(given)
    for step in _between(node, given, start):
        args, kwargs = tree_map(
            lambda x: values.get(x, x.value) if isinstance(x, Node) else x, (step.args, step.kwargs)
        )
        values[step] = _called(step, args, kwargs)
    return values.get(node, node.value)


def _called(step: Node, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    assert step.func is not None
    if step.in_place:
        args = (args[0].clone(), *args[1:])
    out = step.func(*args, **kwargs)
    if step.name == "__setitem__":
        return args[0]
    return out if step.part is None else out[step.part]


def _between(node: Node, given: Mapping[Node, Tensor], start: int) -> list[Node]:
    """The nodes on the way from `given` to `node`, in the order of their calls."""
    reached: set[Node] = set()
    todo = [node]
    while todo:
        n = todo.pop()
        if n not in reached and n not in given and n.func is not None and n.order > start:
            reached.add(n)
            todo += n.inputs
    changed: set[Node] = set(given)
    steps = []
    for n in sorted(reached, key=lambda n: n.order):
        if any(x in changed for x in n.inputs):
            changed.add(n)
            steps.append(n)
    return steps
