"""FP8 and INT8 weights with scales beside them: one for all, one for each row, or one for each block.

DeepSeek, Qwen3-FP8, Kimi, GLM and MiniMax call the scales of 128 x 128 blocks `weight_scale_inv`, compressed-tensors
and Quark `weight_scale`; either name can hold any of the three. The shape of the scales says which it is.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, partial

import torch
from torch import Tensor

from locater.sources.quantised.stored_map import (
    Settings,
    expect_shape,
    joined_rows,
    quantised_error,
    read_scales,
    read_whole_numbers,
    schemes,
)
from locater.sources.weights import Rows, Weights

NAMES = ("weight_scale_inv", "weight_scale")
KINDS = {
    torch.float8_e4m3fn: "fp8",
    torch.float8_e5m2: "fp8",
    torch.float8_e4m3fnuz: "fp8",
    torch.float8_e5m2fnuz: "fp8",
    torch.int8: "int8",
}
USUAL = 128  # rows and columns of a block, where config.json does not say


@dataclass(frozen=True)
class ScaledWeight:
    """X.weight times X.weight_scale (or X.weight_scale_inv), in float32."""

    weights: Weights
    name: str
    settings: Settings
    scale: str
    zero: str | None = None  # INT8 with zero points

    @cached_property
    def parts(self) -> tuple[str, ...]:
        stem = self.name.removesuffix("weight")
        beside = (f"{stem}input_scale", f"{stem}activation_scale", f"{stem}output_scale", f"{stem}input_zero_point")
        return tuple(x for x in (self.name, self.scale, self.zero, *beside) if x)

    @property
    def kind(self) -> str:
        if not self.shape():
            return "scaled"
        dtype = self.weights.read(self.name, [(0, 0)]).dtype  # no row: its type alone
        return KINDS.get(dtype, str(dtype).removeprefix("torch."))

    def shape(self) -> tuple[int, ...]:
        return self.weights.shape(self.name)

    def read(self, rows: Rows | None = None) -> Tensor:
        shape = self.shape()
        if len(shape) != 2:
            raise quantised_error(
                self.weights, self.name, f"is quantised and has shape {list(shape)}, not two axes: not read"
            )
        scale = _Grid.of(self.weights, self.name, self.scale, shape, self.settings)
        zero = None
        if self.zero is not None:
            expect_shape(self.weights, self.zero, self.weights.shape(self.scale))
            zero = read_whole_numbers(self.weights, self.zero).reshape(scale.values.shape).float()
        return joined_rows(rows, shape[0], partial(self._rows, scale, zero))

    def _rows(self, scale: _Grid, zero: Tensor | None, start: int, stop: int) -> Tensor:
        stored = self.weights.read(self.name, [(start, stop)])
        if stored.dtype not in KINDS:
            raise quantised_error(
                self.weights,
                self.name,
                f"is quantised ({self.scale} scales it) and stored as {stored.dtype}, which is not read: "
                "dequantise the checkpoint first (to bfloat16)",
            )
        floats = stored.float()
        if zero is not None:
            floats -= scale.spread(zero, start, stop, floats.shape[1])
        floats *= scale.spread(scale.values, start, stop, floats.shape[1])
        return floats


@dataclass(frozen=True)
class _Grid:
    """Scales (blocks of rows, blocks of columns) and the size of a block."""

    values: Tensor
    rows: int
    columns: int

    @classmethod
    def of(cls, weights: Weights, name: str, scale: str, shape: tuple[int, ...], settings: Settings) -> _Grid:
        values = read_scales(weights, scale).float()
        rows, columns = shape
        if values.numel() == 1:
            return cls(values.reshape(1, 1), rows, columns)
        if values.shape in ((rows,), (rows, 1)):
            return cls(values.reshape(-1, 1), 1, columns)
        if values.ndim == 2:
            sizes = [
                _block(axis, count, given)
                for axis, count, given in zip(shape, values.shape, _given(settings), strict=True)
            ]
            if None not in sizes:
                return cls(values, *(size for size in sizes if size is not None))
        raise quantised_error(
            weights,
            scale,
            f"has shape {list(values.shape)}, which is neither one scale, nor one for each row, nor one for each block "
            f"of {name} {list(shape)} (blocks of {list(_given(settings))}): the checkpoint is damaged, or "
            "weight_block_size of config.json is wrong",
        )

    def spread(self, values: Tensor, start: int, stop: int, width: int) -> Tensor:
        """The value of each number in rows start to stop; broadcasts over columns where there is one for a row."""
        of_rows = values[torch.arange(start, stop) // self.rows] if len(values) > 1 else values
        return of_rows.repeat_interleave(self.columns, 1)[:, :width] if values.shape[1] > 1 else of_rows


def _given(settings: Settings) -> tuple[int | None, int | None]:
    """The size of a block in config.json: of transformers, or of compressed-tensors."""
    structures = [scheme.get("block_structure") for scheme in schemes(settings)]
    for size in (settings.get("weight_block_size"), *structures):
        if isinstance(size, list | tuple) and len(size) == 2 and all(isinstance(x, int) and x > 0 for x in size):
            return size[0], size[1]
    return None, None


def _block(axis: int, count: int, given: int | None) -> int | None:
    """The size of a block along an axis that has `count` of them; None where no size, or more than one, fits. The last
    block may be smaller than others of a known size.
    """
    if count == 1:
        return axis
    if given is not None and -(-axis // given) == count:
        return given
    even = axis // count if axis % count == 0 else None
    usual = USUAL if -(-axis // USUAL) == count else None
    if given is not None:
        return even  # another tensor of the checkpoint has the size that config.json says
    return even if usual is None else usual if even in (None, usual) else None
