"""Where tensors come from: a live module, or files. Families read both through the same methods."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from locater.checkpoints.live_tensors import LiveTensor, live_tensors
from locater.errors import LocaterError

T = TypeVar("T")
Rows = Sequence[tuple[int, int]]  # half-open ranges of the first axis, in the order wanted


class Weights(Protocol):
    """Named tensors. `read` is the only method that touches data."""

    where: str  # for messages: a path or a class name

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, rows: Rows | None = None) -> Tensor: ...


class DictWeights:
    """Tensors already in memory, such as a `pytorch_model.bin` opened with weights_only=True."""

    def __init__(self, tensors: dict[str, Tensor], where: str) -> None:
        self._tensors = tensors
        self.where = where

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._tensors[name]
        if not plain(tensor):
            raise LocaterError(
                f"{self.where}: {name} holds no plain numbers ({tensor.layout}, {tensor.device}): save it dense, with its data"
            )
        claimed, backed = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if claimed > backed:
            raise LocaterError(
                f"{self.where}: {name} claims {claimed:,} bytes, of which {backed:,} are stored: save it again, contiguous"
            )
        return take_rows(tensor, rows)


def plain(tensor: Tensor) -> bool:
    """Whether a tensor has its numbers in memory, one beside the other: not sparse, not on the meta device."""
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def joined(
    parts: Iterable[tuple[Path, Mapping[str, T]]], where: str, places: Mapping[str, Path] | None
) -> dict[str, T]:
    """The tensors of several files under their names. One that is in two files, or not in the file that the index
    names, is refused.
    """
    whole: dict[str, T] = {}
    origin: dict[str, Path] = {}
    for path, tensors in parts:
        for name in tensors:
            if name in origin:
                raise LocaterError(
                    f"{where}: {name} is in {origin[name].name} and in {path.name}: name one of the files"
                )
            if places and places.get(name, path) != path:
                raise LocaterError(
                    f"{where}: {name} is in {path.name}, the index says {places[name].name}: fetch the checkpoint again"
                )
            origin[name] = path
        whole.update(tensors)
    return whole


WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


class ModuleWeights:
    """The tensors that a live model computes with, not copied and not detached: gradients flow through `read`.

    Wrappers that compile, checkpoint or shard a part put their own name into its path; it is taken out again here.
    Adapters, parametrizations and shards are looked through (`checkpoints/live_tensors.py`), at each `read` anew.
    """

    def __init__(self, module: nn.Module) -> None:
        tensors, modules = live_tensors(module)
        self.where = type(module).__name__
        self.module = module
        self._live = {WRAPPERS.sub("", tensor.name): tensor for tensor in tensors}
        self._modules = {WRAPPERS.sub("", f"{path}.").removesuffix("."): part for path, part in modules.items()}

    def names(self) -> Collection[str]:
        return self._live.keys()

    def live_tensor(self, name: str) -> LiveTensor:
        """The module that holds a tensor, and under which name."""
        return self._live[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._live[name].shape

    def modules(self) -> dict[str, nn.Module]:
        """Every module by its path without wrappers' names."""
        return self._modules

    def submodule(self, path: str) -> nn.Module:
        """The module at a path without wrappers' names; "" is the model."""
        return self._modules[path] if path else self.module

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._live[name].read()
        if tensor.device.type == "meta" or not tensor.numel():
            raise LocaterError(
                f"{self.where}: {name} holds no data (meta device, or sharded away): load or gather the weights first"
            )
        return take_rows(tensor, rows)


def take_rows(tensor: Tensor, rows: Rows | None) -> Tensor:
    if rows is None:
        return tensor
    parts = [tensor[a:b] for a, b in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def numbered(weights: Weights, pattern: str) -> Iterator[tuple[re.Match[str], str]]:
    """Names that match `pattern` in full, ordered by their `layer` group; yields (match, name)."""
    found = [(m, n) for n in weights.names() if (m := re.fullmatch(pattern, n))]
    padded = next((n for m, n in found if not re.fullmatch("0|[1-9][0-9]{0,8}", m["layer"])), None)
    if padded is not None:  # layers are asked for by number: 00 would be read as another 0
        raise LocaterError(
            f"{weights.where}: {padded} does not write the number of its layer as 0, 1, 2, ...: rename it"
        )
    yield from sorted(found, key=lambda pair: (pair[0].groupdict().get("prefix", ""), int(pair[0]["layer"])))


def natural(parts: Iterable[str]) -> list[tuple[int, str]]:
    """Sort key: parts that are numbers by their value, so that layer 10 comes after layer 9."""
    return [(int(part), "") if re.fullmatch("[0-9]{1,9}", part) else (-1, part) for part in parts]
