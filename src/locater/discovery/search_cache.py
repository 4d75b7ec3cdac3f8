"""What discovery found in a model, kept with the model while nothing that it rests on changes.

That is: names and shapes of tensors, the configuration, the numbers in buffers, and settings of modules such as a
window or a scale. Numbers of parameters do not count: a layout has none of them. Facts that a forward pass changes by
itself, such as counters, do not count either.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from types import ModuleType
from typing import Any, Generic, TypeVar
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from locater.errors import LocaterError
from locater.sources.open_source import config_of
from locater.torch_private import is_batch_norm, tree_flatten, whole_shape, without_dispatch_modes

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


Facts = dict[str, Any]
Result = TypeVar("Result")
LARGEST = 2**22  # numbers of a tensor that are read


def facts_of(model: nn.Module) -> Facts:
    """Everything that a layout may rest on, by name."""
    facts: Facts = {"configuration": repr(sorted(config_of(model).items(), key=lambda item: item[0]))}
    for name, parameter in model.named_parameters():
        facts[f"parameter {name}"] = None if is_lazy(parameter) else tuple(whole_shape(parameter))
    seen: set[int] = set()
    for path, module in model.named_modules():
        if not is_batch_norm(module):  # statistics of batches are no part of attention
            for name, buffer in module.named_buffers(recurse=False):
                facts[f"buffer {path}.{name}"] = _numbers(buffer)
        for setting in settings_of(module, seen):
            value = setting.value
            facts[f"{path}.{setting.path}"] = _numbers(value) if isinstance(value, Tensor) else repr(value)
    return facts


def changed_facts(before: Facts, after: Facts) -> frozenset[str]:
    """Names of the facts that differ."""
    return frozenset(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))


def example_signature(example: Mapping[str, Any] | None) -> str | None:
    """Names, shapes and numbers of an example; None where none is given."""
    if example is None:
        return None
    leaves, shape = tree_flatten(dict(example))
    return repr(([_numbers(x) if isinstance(x, Tensor) else repr(x) for x in leaves], str(shape)))


@dataclass(frozen=True)
class CachedSearch(Generic[Result]):
    """One search: its result, or why the inputs for it could not be guessed."""

    facts: Facts
    volatile: frozenset[str]  # names of facts that a forward pass changes
    result: Result | LocaterError

    def holds(self, facts: Facts) -> bool:
        return not changed_facts(self.facts, facts) - self.volatile


class SearchCache(Generic[Result]):
    """Searches by model and signature of the example. Models are not kept alive."""

    def __init__(self) -> None:
        self._entries: WeakKeyDictionary[nn.Module, dict[str | None, CachedSearch[Result]]] = WeakKeyDictionary()

    def get(self, model: nn.Module, key: str | None, facts: Facts) -> Result | LocaterError | None:
        entry = self._entries.get(model, {}).get(key)
        return entry.result if entry is not None and entry.holds(facts) else None

    def with_any_example(self, model: nn.Module, facts: Facts) -> Result | None:
        """The latest search with an example that still holds."""
        for key, entry in reversed(self._entries.get(model, {}).items()):
            if key is not None and entry.holds(facts) and not isinstance(entry.result, LocaterError):
                return entry.result
        return None

    def put(
        self,
        model: nn.Module,
        key: str | None,
        facts: Facts,
        result: Result | LocaterError,
        volatile: Collection[str] = (),
    ) -> None:
        entries = self._entries.setdefault(model, {})
        entries.pop(key, None)
        entries[key] = CachedSearch(facts, frozenset(volatile), result)


def _numbers(x: Tensor) -> tuple[Any, ...]:
    """What changes when a tensor does. Of a very large one the numbers are not read."""
    kind = (tuple(x.shape), str(x.dtype))
    if x.is_meta or x.layout != torch.strided or x.is_quantized or type(x) not in (Tensor, nn.Parameter, nn.Buffer):
        return kind
    if x.numel() > LARGEST:
        return (*kind, x.data_ptr())
    with without_dispatch_modes():  # maps are also read while a graph of them is recorded
        flat = x.detach().cpu().contiguous().reshape(-1)
        return (*kind, zlib.crc32(flat.view(torch.uint8).numpy().tobytes()) if flat.numel() else 0)
