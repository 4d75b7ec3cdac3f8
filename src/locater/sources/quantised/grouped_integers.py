"""Whole numbers of a few bits in words of 32, with scales and zero points for groups: GPTQ, AWQ, and compressed-tensors
"pack-quantized" (llm-compressor W4A16, W8A16).

GPTQ and AWQ store (in, out), and pack along different axes; the shapes say which it is: GPTQ packs inputs into a word,
AWQ outputs, these in the order 0, 2, 4, 6, 1, 3, 5, 7. GPTQ stores zero points minus 1, its version 2 as they are. A
range of rows (outputs) is a range of columns on disk, so all bytes of a map are read for it. compressed-tensors has one
scale for each row or for each group of columns, with or without zero points.
"""

from __future__ import annotations

import reprlib
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.sources.quantised.stored_map import (
    Settings,
    expect_shape,
    joined_rows,
    quantised_error,
    read_scales,
    read_whole_numbers,
    schemes,
    unpack_words,
)
from locater.sources.weights import Rows, Weights, take_rows

SUFFIXES = ("qweight", "qzeros", "scales", "g_idx")
AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # where in its word the number of each output is
MINUS_ONE = {"gptq", None}  # formats of config.json's checkpoint_format whose zero points are stored minus 1


class _Layout(NamedTuple):
    kind: str
    bits: int
    inputs: int
    outputs: int
    groups: int


@dataclass(frozen=True)
class GroupedInt:
    """(q - zero) * scale, in float32: a product of a 16-bit scale and a small whole number is exact there."""

    weights: Weights
    name: str
    settings: Settings

    @cached_property
    def parts(self) -> tuple[str, ...]:
        stem = self.name.removesuffix("weight")
        return tuple(f"{stem}{suffix}" for suffix in SUFFIXES)

    @property
    def kind(self) -> str:
        try:
            layout = self._layout()
        except LocaterError:  # said when the map is read
            return "grouped-int"
        return f"{layout.kind}-int{layout.bits}"

    def shape(self) -> tuple[int, ...]:
        layout = self._layout()
        return layout.outputs, layout.inputs

    def _layout(self) -> _Layout:
        packed, zeros, scales, _ = self.parts
        missing = next((x for x in (zeros, scales) if x not in self.weights.names()), None)
        if missing is not None:
            raise quantised_error(
                self.weights, packed, f"is quantised, and {missing} is missing: the checkpoint is incomplete"
            )
        first, second = self._two_axes(packed)
        groups, outputs = self._two_axes(scales)
        bits = self._bits()
        per = 32 // bits
        if second == outputs:
            layout = _Layout("gptq", bits, first * per, outputs, groups)
        elif second * per == outputs and bits == 4:
            layout = _Layout("awq", bits, first, outputs, groups)
        else:
            raise quantised_error(
                self.weights,
                packed,
                f"has shape {[first, second]} and {scales} {[groups, outputs]}: neither GPTQ nor AWQ (GEMM) of {bits} "
                "bits packs so; dequantise the checkpoint first (to bfloat16)",
            )
        self._check_method(layout)
        expect_shape(self.weights, zeros, (groups, outputs // per))
        return layout

    def _two_axes(self, name: str) -> tuple[int, int]:
        shape = self.weights.shape(name)
        if len(shape) != 2 or min(shape) < 1:
            raise quantised_error(
                self.weights, name, f"has shape {list(shape)}, not two axes: the checkpoint is damaged"
            )
        return shape[0], shape[1]

    def _bits(self) -> int:
        bits = self.settings.get("bits", self.settings.get("w_bit", 4))
        if bits not in (2, 4, 8):
            raise quantised_error(
                self.weights, self.parts[0], f"is quantised to {bits!r:.20} bits; read are 2, 4 and 8"
            )
        return int(bits)

    def _check_method(self, layout: _Layout) -> None:
        method = self.settings.get("quant_method", layout.kind)
        form = self.settings.get("checkpoint_format", self.settings.get("version"))
        known = {"gptq": (None, "gptq", "gptq_v2"), "awq": (None, "gemm", "GEMM")}[layout.kind]
        if method != layout.kind or form not in known:
            words = [x if isinstance(x, str) else reprlib.repr(x) for x in (method, form)]
            said = words[0] if form is None else f"{words[0]} ({words[1]})"
            raise quantised_error(
                self.weights,
                self.parts[0],
                f"is packed as {layout.kind.upper()} packs, and config.json says {said!r:.60}: "
                "dequantise the checkpoint first (to bfloat16)",
            )

    def read(self, rows: Rows | None = None) -> Tensor:
        layout = self._layout()
        packed, zeros, scales, _ = self.parts
        words, order = read_whole_numbers(self.weights, packed), AWQ_ORDER if layout.kind == "awq" else None
        scale = read_scales(self.weights, scales).float().mT  # (outputs, groups)
        zero = self._zeros(layout, read_whole_numbers(self.weights, zeros), order)
        group = self._groups(layout)
        if layout.kind == "gptq":
            numbers = unpack_words(take_rows(words.mT, rows).contiguous(), layout.bits)  # (rows, inputs)
        else:
            numbers = take_rows(unpack_words(words, layout.bits, order).mT, rows)
        zero, scale = take_rows(zero, rows), take_rows(scale, rows)
        return (numbers - zero[:, group]).float() * scale[:, group]

    def _zeros(self, layout: _Layout, words: Tensor, order: tuple[int, ...] | None) -> Tensor:
        """Zero points (outputs, groups)."""
        zero = unpack_words(words, layout.bits, order).mT
        if layout.kind == "awq" or self.settings.get("checkpoint_format") not in MINUS_ONE:
            return zero
        if bool((zero == 2**layout.bits - 1).any()):  # 0 - 1 in few bits: libraries read it as 0 or as 16
            raise quantised_error(
                self.weights,
                self.parts[1],
                "holds a zero point of 0, which libraries of GPTQ read in two ways: save it as gptq_v2",
            )
        return zero + 1

    def _groups(self, layout: _Layout) -> Tensor:
        """The group of each input; `g_idx` says it where inputs were sorted by activations."""
        stored = self.parts[3]
        if stored in self.weights.names():
            expect_shape(self.weights, stored, (layout.inputs,))
            index = read_whole_numbers(self.weights, stored).long()
            if int(index.min()) < 0 or int(index.max()) >= layout.groups:
                raise quantised_error(
                    self.weights, stored, f"names groups beyond the {layout.groups} that there are: damaged"
                )
            return index
        if self.settings.get("desc_act"):
            raise quantised_error(
                self.weights, self.parts[0], f"was sorted by activations (desc_act), and {stored} is missing"
            )
        size = self.settings.get("group_size", self.settings.get("q_group_size"))
        if not isinstance(size, int) or size < 1:
            size = -(-layout.inputs // layout.groups)
        if -(-layout.inputs // size) != layout.groups:
            raise quantised_error(
                self.weights,
                self.parts[2],
                f"has {layout.groups} groups, and {layout.inputs} inputs in groups of {size} are not as many: damaged",
            )
        return torch.arange(layout.inputs) // min(size, layout.inputs)


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
            raise quantised_error(
                self.weights, f"{self.name}_packed", f"is quantised, and {stored} is missing: incomplete"
            )
        shape = tuple(int(size) for size in read_whole_numbers(self.weights, stored).flatten().tolist())
        packed = self.weights.shape(f"{self.name}_packed")
        if len(shape) != 2 or len(packed) != 2 or shape[0] != packed[0] or min(shape) < 1 or packed[1] > shape[1]:
            raise quantised_error(
                self.weights, stored, f"says {list(shape)}, which does not fit {list(packed)} words: damaged"
            )
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
            raise quantised_error(
                self.weights,
                f"{self.name}_packed",
                f"has {words} words for {columns} columns{also}; read are packed numbers of "
                f"{', '.join(map(str, BITS))} bits: dequantise the checkpoint first (to bfloat16)",
            )
        return bits

    def read(self, rows: Rows | None = None) -> Tensor:
        if f"{self.name}_scale" not in self.weights.names():
            raise quantised_error(
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
            raise quantised_error(
                self.weights, stored, f"has shape {list(scale_shape)}, and {self.name} {[count, columns]}: damaged"
            )
        words = read_whole_numbers(self.weights, f"{self.name}_packed", [(start, stop)])
        half = 2 ** (self._bits - 1)
        numbers = (unpack_words(words, self._bits)[:, :columns] - half).to(scale.dtype)
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
                raise quantised_error(self.weights, stored, f"names groups beyond the {groups} that there are: damaged")
        return torch.arange(columns) // (columns // groups)

    def _zeros(self, start: int, stop: int, groups: int) -> Tensor:
        """Zero points, packed along the rows: a word holds those of consecutive rows."""
        stored, per = f"{self.name}_zero_point", 32 // self._bits
        expect_shape(self.weights, stored, (-(-self._shape[0] // per), groups))
        first, last = start // per, -(-stop // per)
        words = read_whole_numbers(self.weights, stored, [(first, last)])
        return unpack_words(words.mT.contiguous(), self._bits).mT[start - first * per : stop - first * per]


def _said_bits(settings: Settings) -> list[int]:
    """Numbers of bits in the groups of config.json."""
    bits = [scheme.get("num_bits") for scheme in schemes(settings)]
    return sorted({b for b in bits if isinstance(b, int)})
