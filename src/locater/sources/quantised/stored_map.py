"""What the files of this folder share: the interface of a format, and checks that name the tensor."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.sources.weights import Rows, Weights

Settings = Mapping[str, Any]  # quantization_config of config.json; empty where there is none
SCALES = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


class Stored(Protocol):
    """One quantised map: `X.weight` of the model, stored under other names or with scales beside it."""

    @property
    def name(self) -> str:
        """X.weight."""

    @property
    def kind(self) -> str:
        """Such as "fp8", "int4", "nf4"."""

    @property
    def parts(self) -> tuple[str, ...]:
        """The stored tensors that it is made of; they are hidden."""

    def shape(self) -> tuple[int, ...]: ...

    def read(self, rows: Rows | None = None) -> Tensor: ...


def schemes(settings: Settings) -> list[Mapping[str, Any]]:
    """What compressed-tensors says of the weights of each group of modules."""
    groups = settings.get("config_groups")
    parts = groups.values() if isinstance(groups, Mapping) else ()
    found = [part.get("weights") for part in parts if isinstance(part, Mapping)]
    return [scheme for scheme in found if isinstance(scheme, Mapping)]


def quantised_error(weights: Weights, name: str, what: str) -> LocaterError:
    """The one line for a quantised tensor that cannot be read."""
    return LocaterError(f"{weights.where}: {name} {what}")


def read_scales(weights: Weights, name: str, rows: Rows | None = None) -> Tensor:
    """Scales as they are stored; exponents alone (F8_E8M0, also as bytes) and FP8 become float32."""
    scales = weights.read(name, rows)
    if scales.dtype == torch.uint8:  # E8M0 under the name of its bytes
        scales = scales.view(torch.float8_e8m0fnu)
    if scales.dtype in SCALES:
        return scales
    if not scales.is_floating_point():
        raise quantised_error(
            weights, name, f"is stored as {scales.dtype}, and scales are floats: the checkpoint is damaged"
        )
    return scales.float()


def read_whole_numbers(weights: Weights, name: str, rows: Rows | None = None) -> Tensor:
    """Packed numbers, zero points, indices."""
    numbers = weights.read(name, rows)
    if numbers.is_floating_point():
        raise quantised_error(
            weights, name, f"is stored as {numbers.dtype}, where packed whole numbers belong: damaged"
        )
    return numbers


def expect_shape(weights: Weights, name: str, *allowed: Sequence[int]) -> None:
    """Refuse a tensor of another shape than its map needs."""
    shape = weights.shape(name)
    if shape not in {tuple(each) for each in allowed}:
        wanted = " or ".join(str(list(each)) for each in allowed)
        raise quantised_error(
            weights, name, f"has shape {list(shape)}, and its map needs {wanted}: the checkpoint is damaged"
        )


def joined_rows(rows: Rows | None, count: int, part: Callable[[int, int], Tensor]) -> Tensor:
    """`part(start, stop)` of each range that is asked for, one below the other; of all rows where none are named."""
    parts = [part(start, stop) for start, stop in ([(0, count)] if rows is None else rows)]
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def unpack_words(words: Tensor, bits: int, order: Sequence[int] | None = None) -> Tensor:
    """The unsigned numbers of `bits` bits in the words of the last axis, lowest bits first; `order` is where in its
    word each number is.

    >>> unpack_words(torch.tensor([[0x76543210]], dtype=torch.int32), 4)
    tensor([[0, 1, 2, 3, 4, 5, 6, 7]], dtype=torch.int32)
    """
    places = torch.tensor(range(32 // bits) if order is None else order, dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> places * bits) & (2**bits - 1)).flatten(-2)
