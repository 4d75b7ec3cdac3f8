"""Sources of tensors behind one interface: tensors in memory, and live modules. Files have modules of their own."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn

from locater.errors import DamagedError, LocaterError
from locater.sources.live_tensors import LiveTensor, live_tensors


class Named(Protocol):
    """A file with a name, such as a Path."""

    @property
    def name(self) -> str: ...


T = TypeVar("T")
F = TypeVar("F", bound=Named)
Rows = Sequence[tuple[int, int]]  # half-open ranges of the first axis; the result has them in this order


class Weights(Protocol):
    """Tensors by name. Only `read` touches their data."""

    where: str  # a path or a class name, for messages

    def names(self) -> Collection[str]: ...

    def shape(self, name: str) -> tuple[int, ...]: ...

    def read(self, name: str, rows: Rows | None = None) -> Tensor: ...


def quantised_names(weights: Weights) -> Mapping[str, str]:
    """The tensors that are stored in fewer bits and read as floats, and the format of each: "fp8", "nf4"."""
    names: Mapping[str, str] = getattr(weights, "quantised", {})
    return names


def quantised_modules(weights: Weights) -> dict[str, str]:
    """The formats of the quantised tensors inside each module, by its path. The path of the model itself is "".

    >>> class Stored(DictWeights):
    ...     quantised = {"attention.q.weight": "nf4", "attention.k.weight": "fp8"}
    >>> quantised_modules(Stored({}, "here"))
    {'': 'fp8, nf4', 'attention': 'fp8, nf4', 'attention.q': 'nf4', 'attention.k': 'fp8'}
    """
    formats: dict[str, set[str]] = {}
    for name, kind in quantised_names(weights).items():
        parts = name.split(".")
        for depth in range(len(parts)):
            formats.setdefault(".".join(parts[:depth]), set()).add(kind)
    return {path: ", ".join(sorted(kinds)) for path, kinds in formats.items()}


class DictWeights:
    """Tensors in memory, such as those of a `pytorch_model.bin` opened with weights_only=True."""

    def __init__(self, tensors: dict[str, Tensor], where: str) -> None:
        self._tensors = tensors
        self.where = where

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self._tensors[name].shape)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._tensors[name]
        if not has_dense_data(tensor):
            kind = f"{tensor.layout}, {tensor.device}"
            raise LocaterError(f"{self.where}: {name} is not a dense tensor with data ({kind}): save it as one")
        if rows is not None and not tensor.ndim:
            raise LocaterError(f"{self.where}: {name} is a single number, where rows of a map belong")
        claimed, backed = tensor.numel() * tensor.element_size(), tensor.untyped_storage().nbytes()
        if claimed > backed:
            raise LocaterError(
                f"{self.where}: {name} claims {claimed:,} bytes, of which {backed:,} are stored: save it contiguous"
            )
        return take_rows(tensor, rows)


def has_dense_data(tensor: Tensor) -> bool:
    """Whether a tensor is dense and has data: not sparse, not on the meta device."""
    return tensor.layout == torch.strided and tensor.device.type != "meta"


def join_files(parts: Iterable[tuple[F, Mapping[str, T]]], where: str, file_of: Mapping[str, F] | None) -> dict[str, T]:
    """The tensors of several files in one dictionary.

    A tensor that is in two files, or in another file than the index says (`file_of`), is refused.
    """
    whole: dict[str, T] = {}
    origin: dict[str, F] = {}
    every = [*parts]
    for path, tensors in every:
        for name in tensors:
            if name in origin:
                raise DamagedError(
                    "duplicate-names",
                    f"{where}: {name} is in {origin[name].name} and in {path.name}: name one of the files",
                )
            if file_of and file_of.get(name, path) != path:
                if any(other == file_of[name] and name in held for other, held in every):
                    raise DamagedError(
                        "duplicate-names",
                        f"{where}: {name} is in {path.name} and in {file_of[name].name}: download it again",
                    )
                raise DamagedError(
                    "stale-index",
                    f"{where}: {name} is in {path.name}, the index says {file_of[name].name}: download it again",
                )
            origin[name] = path
        whole.update(tensors)
    return whole


def row_ranges(rows: Sequence[int]) -> tuple[Rows, Tensor | None]:
    """Ranges that hold these rows, in ascending order; and where each row is in them, unless they are in order."""
    ranges: list[tuple[int, int]] = []
    ordered = sorted(set(rows))
    for row in ordered:
        if ranges and ranges[-1][1] == row:
            ranges[-1] = (ranges[-1][0], row + 1)
        else:
            ranges.append((row, row + 1))
    if list(rows) == ordered:
        return ranges, None
    place = {row: at for at, row in enumerate(ordered)}
    return ranges, torch.tensor([place[row] for row in rows])


WRAPPERS = re.compile(r"(^|(?<=\.))(_orig_mod|_checkpoint_wrapped_module|_fsdp_wrapped_module)\.")


def without_wrappers(path: str) -> str:
    """A path without the names of wrappers. Few paths have one, and every name of a model is asked for."""
    return WRAPPERS.sub("", path) if "_module." in path or "_orig_mod." in path else path


class ModuleWeights:
    """The tensors that a live model computes with, neither copied nor detached: gradients flow through `read`.

    Wrappers that compile, checkpoint or shard a module add their own name to its path; it is removed here. Each `read`
    applies adapters and parametrizations and gathers shards (`live_tensors.py`).
    """

    def __init__(self, module: nn.Module) -> None:
        tensors, modules = live_tensors(module)
        self.where = type(module).__name__
        self.module = module
        self._live = {without_wrappers(tensor.name): tensor for tensor in tensors}
        self._modules = {without_wrappers(f"{path}.").removesuffix("."): part for path, part in modules.items()}

    @property
    def quantised(self) -> dict[str, str]:
        """Formats of the weights that the model stores quantised."""
        kinds = ((name, tensor.quantised) for name, tensor in self._live.items() if tensor.packed)
        return {name: kind for name, kind in kinds if kind is not None}

    def names(self) -> Collection[str]:
        return self._live.keys()

    def live_tensor(self, name: str) -> LiveTensor:
        """The tensor with its module and attribute."""
        return self._live[name]

    def shape(self, name: str) -> tuple[int, ...]:
        return self._live[name].shape

    def modules(self) -> dict[str, nn.Module]:
        """Every module by its path without the names of wrappers."""
        return self._modules

    def submodule(self, path: str) -> nn.Module:
        """The module at a path without the names of wrappers; "" is the model."""
        return self._modules[path] if path else self.module

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        tensor = self._live[name].read()
        if tensor.device.type == "meta" or not tensor.numel():
            raise LocaterError(
                f"{self.where}: {name} has no data (meta device, or on another rank): load or gather the weights first"
            )
        return take_rows(tensor, rows)


def take_rows(tensor: Tensor, rows: Rows | None) -> Tensor:
    """The rows of a tensor, or all of it where `rows` is None."""
    if rows is None:
        return tensor
    parts = [tensor[a:b] for a, b in rows]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def numbered(weights: Weights, pattern: str) -> Iterator[tuple[re.Match[str], str]]:
    """Names that match `pattern` in full, ordered by their `layer` group; yields (match, name)."""
    matches = [(m, n) for n in weights.names() if (m := re.fullmatch(pattern, n))]
    padded = next((n for m, n in matches if not re.fullmatch("0|[1-9][0-9]{0,8}", m["layer"])), None)
    if padded is not None:  # layers are addressed by number: 00 would be a second layer 0
        raise LocaterError(
            f"{weights.where}: {padded} does not write the number of its layer as 0, 1, 2, ...: rename it"
        )
    yield from sorted(matches, key=lambda pair: (pair[0].groupdict().get("prefix", ""), int(pair[0]["layer"])))


def natural_sort_key(parts: Iterable[str]) -> list[tuple[int, str]]:
    """Sort key for the parts of a name: numbers by their value, so that layer 10 comes after layer 9."""
    return [(int(part), "") if re.fullmatch("[0-9]{1,9}", part) else (-1, part) for part in parts]
