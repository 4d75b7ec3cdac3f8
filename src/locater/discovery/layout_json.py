"""Layouts written as JSON and read back; their tensors listed and renamed; two layouts compared."""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Callable, Collection
from typing import Any, TypeVar, get_args, get_type_hints

from locater.layers.layout import AttentionLayout
from locater.layers.map_layouts import numbers_in, runs_of

T = TypeVar("T")
CLOSE = 1e-9  # of a number: two layers of one kind were measured on different inputs


def rename_tensors(tree: T, tensors: Collection[str], rename: Callable[[str], str]) -> T:
    """The same layout with every name of a tensor changed."""
    if isinstance(tree, str):
        return rename(tree) if tree in tensors else tree  # type: ignore[return-value]
    if isinstance(tree, tuple):
        return tuple(rename_tensors(x, tensors, rename) for x in tree) if _may_hold_names(tree) else tree  # type: ignore[return-value]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {f.name: rename_tensors(getattr(tree, f.name), tensors, rename) for f in dataclasses.fields(tree)}
        return dataclasses.replace(tree, **values)
    return tree


def tensor_names(tree: Any, tensors: Collection[str]) -> list[str]:
    """Names of the tensors of a layout, in the order of its fields, each as often as it is there."""
    names: list[str] = []
    rename_tensors(tree, tensors, lambda name: names.append(name) or name)  # type: ignore[func-returns-value]
    return names


def nearly_equal(one: Any, other: Any) -> bool:
    """Whether two layouts are the same, numbers within 1e-9."""
    if isinstance(one, float) and isinstance(other, float):
        return one == other or math.isclose(one, other, rel_tol=CLOSE, abs_tol=CLOSE)
    if isinstance(one, tuple) and isinstance(other, tuple):
        return len(one) == len(other) and all(nearly_equal(a, b) for a, b in zip(one, other, strict=True))
    if dataclasses.is_dataclass(one) and type(one) is type(other):
        return all(nearly_equal(getattr(one, f.name), getattr(other, f.name)) for f in dataclasses.fields(one))
    return type(one) is type(other) and one == other


def to_json(tree: Any) -> Any:
    """A layout as JSON: dataclasses as objects with their class, whole numbers in runs."""
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        values = {f.name: to_json(getattr(tree, f.name)) for f in dataclasses.fields(tree)}
        return {"class": type(tree).__name__, **values}
    if isinstance(tree, tuple):
        if len(tree) > 4 and all(type(x) is int for x in tree):
            return {"runs": [[run.start, run.stop, run.step] for run in runs_of(tree)]}
        return [to_json(x) for x in tree]
    if isinstance(tree, range):
        return {"run": [tree.start, tree.stop, tree.step]}
    if tree is None or isinstance(tree, str | int | float):
        return tree
    raise TypeError(f"{type(tree).__name__} is no part of a layout")


def from_json(document: Any) -> Any:
    """What `to_json` wrote. Anything else raises ValueError, TypeError or LookupError."""
    if isinstance(document, list):
        return tuple(from_json(x) for x in document)
    if not isinstance(document, dict):
        return document
    if "runs" in document:
        return tuple(numbers_in(tuple(range(*run) for run in document["runs"])))
    if "run" in document:
        return range(*document["run"])
    values = {name: from_json(value) for name, value in document.items() if name != "class"}
    return _classes()[document["class"]](**values)


def _may_hold_names(values: tuple[Any, ...]) -> bool:
    return any(isinstance(x, str | tuple) or dataclasses.is_dataclass(x) for x in values[:1])


def _classes() -> dict[str, type]:
    """`AttentionLayout` and every dataclass in its fields."""
    classes: dict[str, type] = {}
    waiting: list[Any] = [AttentionLayout]
    while waiting:
        kind = waiting.pop()
        if isinstance(kind, types.UnionType) or get_args(kind):
            waiting += get_args(kind)
        elif dataclasses.is_dataclass(kind) and isinstance(kind, type) and kind.__name__ not in classes:
            classes[kind.__name__] = kind
            waiting += get_type_hints(kind).values()
    return classes
