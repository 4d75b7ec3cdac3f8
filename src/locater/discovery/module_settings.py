"""Plain numbers and words that modules keep: as attributes, and inside configurations, dictionaries and lists."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

PLAIN = (int, float, bool, str, type(None), torch.dtype)
OF_EVERY_MODULE = frozenset(vars(nn.Module()))
LONGEST = 256  # entries of a list or a dictionary that are looked at
DEEPEST = 4


@dataclass(frozen=True)
class Setting:
    """One value, and the way to change it."""

    path: str  # where it is, from its module
    name: str  # of the attribute or key; entries of a list have that of the list
    value: Any
    put: Callable[[Any], None]
    owner: Any  # the module or configuration that has it


def settings_of(module: nn.Module, seen: set[int]) -> Iterator[Setting]:
    """Every setting of a module itself, and those of its tensors that are no parameters or buffers. `seen` are objects
    that were walked before, so that a configuration of many modules is walked once.
    """
    for name, value in list(vars(module).items()):
        if name not in OF_EVERY_MODULE:
            yield from _walk(value, name, name, partial(_put_attribute, module, name), seen, DEEPEST, module)


def _walk(
    value: Any, path: str, name: str, put: Callable[[Any], None], seen: set[int], depth: int, owner: Any
) -> Iterator[Setting]:
    if isinstance(value, (*PLAIN, Tensor)):
        yield Setting(path, name, value, put, owner)
        return
    if depth == 0 or id(value) in seen:
        return
    if isinstance(value, dict):
        inner = [(key, x, partial(value.__setitem__, key)) for key, x in value.items() if isinstance(key, str | int)]
    elif isinstance(value, list):
        inner = [(name, x, partial(value.__setitem__, place)) for place, x in enumerate(value)]
    elif isinstance(value, tuple) and type(value) is tuple:
        inner = [(name, x, partial(_put_entry, value, place, put)) for place, x in enumerate(value)]
    elif _is_record(value):
        inner = [(key, x, partial(_put_attribute, value, key)) for key, x in vars(value).items()]
    else:
        return
    if not isinstance(value, tuple):
        seen.add(id(value))
    owner = value if hasattr(value, "__dict__") else owner
    for place, (key, x, put_inner) in enumerate(inner[:LONGEST]):
        step = place if isinstance(value, list | tuple) else key
        yield from _walk(x, f"{path}.{step}", str(key), put_inner, seen, depth - 1, owner)


def _is_record(value: Any) -> bool:
    """Whether an object is one that holds settings, and no part of the model or of a library."""
    if isinstance(value, nn.Module | type | ModuleType) or callable(value) or not hasattr(value, "__dict__"):
        return False
    return not type(value).__module__.startswith("torch")


def _put_attribute(owner: Any, name: str, value: Any) -> None:
    try:
        vars(owner)[name] = value
    except TypeError:
        object.__setattr__(owner, name, value)


def _put_entry(whole: tuple[Any, ...], place: int, put: Callable[[Any], None], value: Any) -> None:
    put((*whole[:place], value, *whole[place + 1 :]))
