"""bitsandbytes: nf4 and fp4 (also with scales that are quantised themselves), and LLM.int8.

A map of four-bit codes is a flat list: two codes in a byte, the first in the upper half; `quant_map` is the value of
each code, `absmax` the scale of each run of `blocksize` numbers. With double quantisation `absmax` holds bytes: codes
of `nested_quant_map`, scaled by `nested_absmax`, around `nested_offset`.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from locater.sources.quantised.stored_map import expect_shape, joined_rows, quantised_error, read_scales
from locater.sources.weights import Rows, Weights

STATE = "quant_state.bitsandbytes__"  # followed by the name of the format
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
SUFFIXES = ("absmax", "quant_map", "nested_absmax", "nested_quant_map")
STEP = 7.874015718698502e-3  # 1 / 127 as the library writes it


@dataclass(frozen=True)
class FourBit:
    """X.weight as packed codes, in the dtype that the model computes with."""

    weights: Weights
    name: str
    kind: str  # nf4 or fp4

    @cached_property
    def parts(self) -> tuple[str, ...]:
        beside = tuple(f"{self.name}.{suffix}" for suffix in (*SUFFIXES, f"{STATE}{self.kind}"))
        return self.name, *beside

    def shape(self) -> tuple[int, ...]:
        return tuple(self._state["shape"])

    @cached_property
    def _state(self) -> dict[str, Any]:
        stored = f"{self.name}.{STATE}{self.kind}"
        try:
            state = json.loads(bytes(self.weights.read(stored).flatten().tolist()))
            shape, block = state["shape"], state["blocksize"]
            sizes = [*shape, block, *([state["nested_blocksize"]] if self._nested else [])]
            if len(shape) != 2 or not all(isinstance(x, int) and x > 0 for x in sizes) or state["dtype"] not in DTYPES:
                raise ValueError("its shape, block size or dtype is not one")
            if self._nested and not math.isfinite(state["nested_offset"]):
                raise ValueError("nested_offset is no number")
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise quantised_error(
                self.weights, stored, f"is not the state of a quantised map ({error}): damaged"
            ) from None
        return dict(state)

    @property
    def _nested(self) -> bool:
        return f"{self.name}.nested_absmax" in self.weights.names()

    def read(self, rows: Rows | None = None) -> Tensor:
        count, width = self._state["shape"]
        self._check(count * width)
        code = read_scales(self.weights, f"{self.name}.quant_map").float()

        def part(start: int, stop: int) -> Tensor:
            numbers = code[self._codes(start * width, stop * width)]
            scaled = numbers * self._scales(start * width, stop * width)
            return scaled.view(stop - start, width).to(DTYPES[self._state["dtype"]])

        return joined_rows(rows, count, part)

    def _check(self, numbers: int) -> None:
        needed = SUFFIXES if "nested_blocksize" in self._state else SUFFIXES[:2]
        missing = next((x for x in needed if f"{self.name}.{x}" not in self.weights.names()), None)
        if missing is not None:
            raise quantised_error(
                self.weights, self.name, f"is quantised ({self.kind}), and its {missing} is missing: incomplete"
            )
        expect_shape(self.weights, f"{self.name}.quant_map", (16,))
        blocks = -(-numbers // self._state["blocksize"])
        expect_shape(self.weights, f"{self.name}.absmax", (blocks,))
        if self._nested:
            expect_shape(self.weights, f"{self.name}.nested_absmax", (-(-blocks // self._state["nested_blocksize"]),))
            expect_shape(self.weights, f"{self.name}.nested_quant_map", (256,))

    def _codes(self, first: int, last: int) -> Tensor:
        """Codes number `first` to `last`. The bytes may be stored as wider numbers, for sharding."""
        per = 2 * self.weights.read(self.name, [(0, 0)]).element_size()  # codes in a stored number
        if math.prod(self.weights.shape(self.name)) != -(-math.prod(self.shape()) // per):
            raise quantised_error(
                self.weights, self.name, f"has {list(self.weights.shape(self.name))} bytes for {list(self.shape())}"
            )
        begin, end = first // per, -(-last // per)
        stored = self.weights.read(self.name, [(begin, end)] if self.weights.shape(self.name)[0] > 1 else None)
        packed = stored.flatten().view(torch.uint8) if stored.dtype != torch.uint8 else stored.flatten()
        if self.weights.shape(self.name)[0] == 1:  # (1, n), as older versions store it
            packed = packed[begin * per // 2 : end * per // 2]
        codes = torch.stack((packed >> 4, packed & 15), 1).flatten()
        return codes[first - begin * per : last - begin * per].int()

    def _scales(self, first: int, last: int) -> Tensor:
        """The scale of each of the numbers `first` to `last`."""
        block = self._state["blocksize"]
        begin, end = first // block, -(-last // block)
        stored = self.weights.read(f"{self.name}.absmax", [(begin, end)])
        if self._nested:
            outer = self._state["nested_blocksize"]
            if stored.dtype != torch.uint8:
                raise quantised_error(
                    self.weights, f"{self.name}.absmax", f"is stored as {stored.dtype}, and not as bytes: damaged"
                )
            values = read_scales(self.weights, f"{self.name}.nested_quant_map").float()[stored.int()]
            sizes = read_scales(self.weights, f"{self.name}.nested_absmax").float()
            values = values * sizes[torch.arange(begin, end) // min(outer, max(end, 1))] + self._state["nested_offset"]
        else:
            values = read_scales(self.weights, f"{self.name}.absmax", [(begin, end)]).float()
        # a block may be said to be longer than all numbers
        return values.repeat_interleave(min(block, last))[first - begin * block : last - begin * block]


@dataclass(frozen=True)
class LLMInt8:
    """X.weight as bytes, X.SCB the largest value of each row, in float32."""

    weights: Weights
    name: str
    kind: str = "int8"

    @cached_property
    def parts(self) -> tuple[str, ...]:
        stem = self.name.removesuffix("weight")
        return self.name, f"{stem}SCB", f"{stem}weight_format"

    def shape(self) -> tuple[int, ...]:
        return self.weights.shape(self.name)

    def read(self, rows: Rows | None = None) -> Tensor:
        name, layout = self.parts[1:]
        if len(self.shape()) != 2:
            raise quantised_error(
                self.weights, self.name, f"is quantised and has shape {list(self.shape())}, not two axes: damaged"
            )
        expect_shape(self.weights, name, (self.shape()[0],), (1, self.shape()[0]))
        if layout in self.weights.names() and self.weights.read(layout).flatten().tolist() != [0]:
            raise quantised_error(
                self.weights, layout, "is not 0 (rows): other orders of LLM.int8 are not read, save it again"
            )
        largest = read_scales(self.weights, name).float().flatten()

        def part(start: int, stop: int) -> Tensor:
            stored = self.weights.read(self.name, [(start, stop)])
            if stored.dtype != torch.int8:
                raise quantised_error(
                    self.weights, self.name, f"is scaled by {name} and stored as {stored.dtype}, not as int8"
                )
            return stored * largest[start:stop, None] * STEP

        return joined_rows(rows, self.shape()[0], part)
