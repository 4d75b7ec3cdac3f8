"""Which layers of a large model are of the same kind as a layer of its small version.

Two layers are of one kind where the code that runs and everything it is built with are the same: the classes of their
attention modules and of the modules around them, the plain attributes of these (window, scale, kind of positions, ...),
the shapes of their tensors, and the entries of lists that the configuration or the model keeps for each layer.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from locater.discovery.small_config import OTHER_PARTS
from locater.torch_private import own_buffers, own_parameters

INDEX = re.compile(r"(layer|block|attn)?_?(idx|id|index|num|number)|layer")  # attributes that number a layer
INDICES = re.compile(r".*(indices|indexes|idxs|layer_ids|layers|blocks)")  # lists of numbers of layers
IGNORED = re.compile(r"_.*|training|.*drop.*|gradient_checkpointing.*")
Facts = dict[tuple[str, str], Any]  # (path inside a layer, attribute) -> value


@dataclass(frozen=True)
class Stack:
    """A list of layers that is shorter in the small model."""

    path: str
    small: int  # layers
    full: int

    def place(self, name: str) -> tuple[int, str] | None:
        """(number of the layer, rest of the name) of a name inside; None for others."""
        if not name.startswith(f"{self.path}."):
            return None
        number, _, rest = name[len(self.path) + 1 :].partition(".")
        return (int(number), rest) if number.isdigit() else None


class Kinds:
    """The modules of a small and a full model of one class, and how they correspond."""

    def __init__(self, small: Mapping[str, nn.Module], full: Mapping[str, nn.Module], changed: set[str]) -> None:
        self.small, self.full, self.changed = small, full, changed
        self.stacks = [
            Stack(path, len(part), len(full[path]))  # type: ignore[arg-type]
            for path, part in small.items()
            if isinstance(part, nn.ModuleList) and len(full.get(path, ())) > len(part)  # type: ignore[arg-type]
        ]

    def stack_of(self, name: str) -> Stack | None:
        """The innermost stack that a name is in."""
        inside = [stack for stack in self.stacks if stack.place(name) is not None]
        return max(inside, key=lambda stack: len(stack.path), default=None)

    def same_layer(self, stack: Stack, at: int, to: int, inside: Iterable[str], beside: Iterable[str]) -> bool:
        """Whether layer `at` of the small model is of the kind of layer `to` of the full one. `inside` are paths of
        attention in the layer, `beside` those of modules whose tensors attention reads.
        """
        one, two = f"{stack.path}.{at}", f"{stack.path}.{to}"
        for path in inside:
            if self._facts(self.small, one, path, at, True) != self._facts(self.full, two, path, to, True):
                return False
        around = {above for path in inside for above in _above(path)}
        for path in {*beside, *around}:
            if self._facts(self.small, one, path, at, False) != self._facts(self.full, two, path, to, False):
                return False
        return self._entries(stack, at, to)

    def same_module(self, path: str) -> bool:
        """The same for attention outside of stacks."""
        return self._facts(self.small, "", path, -1, True) == self._facts(self.full, "", path, -1, True)

    def _facts(self, modules: Mapping[str, nn.Module], start: str, path: str, number: int, deep: bool) -> Facts | None:
        """Class, plain attributes and shapes of a module; `deep`: of all modules in it too. None: no such module."""
        whole = ".".join(part for part in (start, path) if part)
        if whole not in modules:
            return None
        facts: Facts = {}
        for inner, module in modules[whole].named_modules(remove_duplicate=False) if deep else [("", modules[whole])]:
            facts[inner, "class"] = type(module).__qualname__
            for name, value in _attributes(module):
                if name not in self.changed:
                    same = type(value) is int and value == number and INDEX.fullmatch(name)
                    facts[inner, name] = "its number" if same else value
            if deep or inner == "":
                shapes = {**own_parameters(module), **own_buffers(module)}
                facts.update({(inner, f"{name}: shape"): _shape(x) for name, x in shapes.items() if deep or _small(x)})
        return facts

    def _entries(self, stack: Stack, at: int, to: int) -> bool:
        """Whether the entries of two layers agree in all lists that have one for each layer, or that name layers."""
        for path in _above(stack.path):
            small, full = (_lists(modules.get(path)) for modules in (self.small, self.full))
            for name in small.keys() & full.keys():
                one, two = small[name], full[name]
                if OTHER_PARTS.search(name):
                    continue
                if (len(one), len(two)) == (stack.small, stack.full):
                    if repr(one[at]) != repr(two[to]):
                        return False
                elif INDICES.fullmatch(name) and (at in one) != (to in two):
                    return False
        return True


def _above(path: str) -> Iterator[str]:
    """Every path on the way to a module, from "" on, without the module itself."""
    steps = path.split(".") if path else []
    yield from (".".join(steps[:count]) for count in range(len(steps)))


def _attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    for name, value in vars(module).items():
        if not IGNORED.fullmatch(name) and _is_plain(value):
            yield name, value


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(x) for x in value)
    return isinstance(value, int | float | str | torch.dtype | None)


def _lists(module: nn.Module | None) -> dict[str, Any]:
    """Lists among the attributes of a module and of its configuration."""
    owners = [] if module is None else [module, getattr(module, "config", None)]
    return {
        f"{type(owner).__name__}.{name}": value
        for owner in owners
        if owner is not None
        for name, value in vars(owner).items()
        if isinstance(value, list | tuple) and value
    }


def _shape(tensor: torch.Tensor | None) -> tuple[int, ...] | None:
    return None if tensor is None else tuple(tensor.shape)


def _small(tensor: torch.Tensor | None) -> bool:
    """Whether a tensor beside attention is a gain or a bias."""
    return tensor is None or tensor.ndim < 2
