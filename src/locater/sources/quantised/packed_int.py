"""compressed-tensors "pack-quantized" (llm-compressor W4A16, W8A16): whole numbers in words of 32 bits, one scale for
each row or for each group of columns, with or without zero points.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from locater.sources.quantised.stored import (
    Settings,
    bad,
    expect_shape,
    joined_rows,
    read_scales,
    read_whole_numbers,
    schemes,
    unpacked,
)
from locater.sources.weights import Rows, Weights

# of other numbers of bits the packing differs between versions of compressed-tensors
BITS = (1, 2, 4, 8)


@dataclass(frozen=True)
class PackedInt:
    """(X.weight_packed - X.weight_zero_point) * X.weight_scale, in the dtype of the scales, as the library computes."""

    weights: Weights
    name: str
    settings: Settings

    @cached_property
    def parts(self) -> tuple[str, ...]:
        suffixes = ("packed", "scale", "shape", "zero_point", "g_idx")
        return tuple(f"{self.name}_{suffix}" for suffix in suffixes)

    def shape(self) -> tuple[int, ...]:
        return self._shape

    @cached_property
    def _shape(self) -> tuple[int, ...]:
        stored = f"{self.name}_shape"
        if stored not in self.weights.names():
            raise bad(self.weights, f"{self.name}_packed", f"is quantised, and {stored} is missing: incomplete")
        shape = tuple(int(size) for size in read_whole_numbers(self.weights, stored).flatten().tolist())
        packed = self.weights.shape(f"{self.name}_packed")
        if len(shape) != 2 or len(packed) != 2 or shape[0] != packed[0] or min(shape) < 1 or packed[1] > shape[1]:
            raise bad(self.weights, stored, f"says {list(shape)}, which does not fit {list(packed)} words: damaged")
        return shape

    @property
    def kind(self) -> str:
        """Without reading a shape: a model of experts has tens of thousands of maps."""
        said = _said_bits(self.settings)
        return f"int{said[0]}" if len(said) == 1 else "packed-int"

    @cached_property
    def _bits(self) -> int:
        """The packed width says it; config.json where several fit, as for very few columns."""
        words, columns = self.weights.shape(f"{self.name}_packed")[1], self._shape[1]
        fitting = [bits for bits in range(1, 9) if -(-columns * bits // 32) == words]
        said = _said_bits(self.settings)
        bits = fitting[0] if len(fitting) == 1 else next((b for b in said if b in fitting), None)
        if len(said) > 1 and len(fitting) > 1:
            bits = None
        if bits not in BITS or (said and bits not in said):  # seven bits are packed in as many words as eight
            also = f", and config.json says {' or '.join(map(str, said))} bits" if said else ""
            raise bad(
                self.weights,
                f"{self.name}_packed",
                f"has {words} words for {columns} columns{also}; read are packed numbers of "
                f"{', '.join(map(str, BITS))} bits: dequantise the checkpoint first (to bfloat16)",
            )
        return bits

    def read(self, rows: Rows | None = None) -> Tensor:
        if f"{self.name}_scale" not in self.weights.names():
            raise bad(
                self.weights, f"{self.name}_packed", f"is quantised, and {self.name}_scale is missing: incomplete"
            )
        return joined_rows(rows, self._shape[0], self._rows)

    def _rows(self, start: int, stop: int) -> Tensor:
        count, columns = self._shape
        stored = f"{self.name}_scale"
        scale_shape = self.weights.shape(stored)
        whole = scale_shape in ((), (1,), (1, 1))  # one scale for all
        scale = read_scales(self.weights, stored, None if whole else [(start, stop)])
        scale = scale.reshape(1, 1) if whole else scale.reshape(stop - start, -1)
        groups = scale.shape[1]
        if not whole and (scale_shape[0] != count or columns % groups):
            raise bad(
                self.weights, stored, f"has shape {list(scale_shape)}, and {self.name} {[count, columns]}: damaged"
            )
        words = read_whole_numbers(self.weights, f"{self.name}_packed", [(start, stop)])
        half = 2 ** (self._bits - 1)
        numbers = (unpacked(words, self._bits)[:, :columns] - half).to(scale.dtype)
        of_column = self._groups(columns, groups)
        if f"{self.name}_zero_point" in self.weights.names():
            numbers -= (self._zeros(start, stop, groups) - half).to(scale.dtype)[:, of_column]
        return numbers * scale[:, of_column]

    def _groups(self, columns: int, groups: int) -> Tensor:
        """The group of each column; those of `weight_g_idx` where columns were sorted by activations."""
        stored = f"{self.name}_g_idx"
        if stored in self.weights.names():
            expect_shape(self.weights, stored, (columns,))
            index = read_whole_numbers(self.weights, stored).long()
            if bool((index >= 0).all()) and int(index.max()) < groups:
                return index
            if not bool((index == -1).all()):  # -1 stands for columns in their own order
                raise bad(self.weights, stored, f"names groups beyond the {groups} that there are: damaged")
        return torch.arange(columns) // (columns // groups)

    def _zeros(self, start: int, stop: int, groups: int) -> Tensor:
        """Zero points, packed along the rows: a word holds those of consecutive rows."""
        stored, per = f"{self.name}_zero_point", 32 // self._bits
        expect_shape(self.weights, stored, (-(-self._shape[0] // per), groups))
        first, last = start // per, -(-stop // per)
        words = read_whole_numbers(self.weights, stored, [(first, last)])
        return unpacked(words.mT.contiguous(), self._bits).mT[start - first * per : stop - first * per]


def _said_bits(settings: Settings) -> list[int]:
    """Numbers of bits in the groups of config.json."""
    bits = [scheme.get("num_bits") for scheme in schemes(settings)]
    return sorted({b for b in bits if isinstance(b, int)})
