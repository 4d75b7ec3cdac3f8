"""Quantised layers of a live model: the map that such a module stands for, read by the same code as its checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from locater.sources.quantised.bitsandbytes import FourBit, LLMInt8
from locater.sources.quantised.packed_int import PackedInt
from locater.sources.quantised.scaled import KINDS, NAMES, ScaledWeight
from locater.sources.quantised.stored import Stored
from locater.sources.weights import DictWeights, Rows, take_rows
from locater.torch_private import own_buffers, own_parameters

REPACKED = 32  # rows in a block of codes that are packed anew
PACKED = (torch.uint8, *KINDS)


def live_map(module: nn.Module) -> Stored | None:
    """The quantised weight of a layer of bitsandbytes, transformers (FP8) or compressed-tensors; None for others.

    `parts` are names of the module's own tensors.
    """
    own = {**own_parameters(module), **own_buffers(module)}
    tensors = {name: x for name, x in own.items() if isinstance(x, Tensor) and not is_lazy(x)}
    weight = tensors.get("weight")
    where = type(module).__name__
    if weight is not None and getattr(weight, "quant_state", None) is not None:
        return _four_bit(where, weight)
    if weight is not None and weight.dtype == torch.int8 and hasattr(weight, "SCB"):
        return _int8(where, weight, getattr(module, "state", None))
    if "weight_packed" not in tensors and (weight is None or weight.dtype not in PACKED):
        return None
    weights = DictWeights({name: x.detach() for name, x in tensors.items()}, where)
    if "weight_packed" in tensors:
        return PackedInt(weights, "weight", _settings(module))
    scale = next((name for name in NAMES if name in tensors), None)
    if scale is None:
        return None
    return ScaledWeight(
        weights, "weight", _settings(module), scale, "weight_zero_point" if "weight_zero_point" in tensors else None
    )


def _four_bit(where: str, weight: Any) -> Stored:
    state = weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        return _RepackedFourBit(weight.data, state)
    beside = {f"weight.{name}": x.detach() for name, x in state.as_dict(packed=True).items()}
    return FourBit(DictWeights({"weight": weight.data, **beside}, where), "weight", state.quant_type)


@dataclass(frozen=True)
class _RepackedFourBit:
    """Four-bit codes as bitsandbytes packs them anew at the first pass on a processor with AVX512-BF16: a byte holds
    the codes of two rows that are 16 apart in their block of 32, and scales are rounded to bfloat16.
    """

    packed: Tensor  # (out, in / 2)
    state: Any
    name: str = "weight"
    parts: tuple[str, ...] = ("weight",)

    @property
    def kind(self) -> str:
        return str(self.state.quant_type)

    def shape(self) -> tuple[int, ...]:
        return tuple(self.state.shape)

    def read(self, rows: Rows | None = None) -> Tensor:
        count, width = self.shape()
        halves = self.packed.reshape(-1, REPACKED)
        codes = torch.cat([halves & 15, halves >> 4], 1).view(count // REPACKED, width // 2, REPACKED, 2)
        codes = codes.transpose(1, 2).reshape(count, width)
        scales = self.state.absmax.mT.float().repeat_interleave(self.state.blocksize, 1)
        return take_rows((self.state.code.float()[codes.int()] * scales).to(self.state.dtype), rows)


def _int8(where: str, weight: Any, state: Any) -> Stored | None:
    scale = weight.SCB if weight.SCB is not None else getattr(state, "SCB", None)
    if scale is None:
        return None
    return LLMInt8(DictWeights({"weight": weight.data, "SCB": scale.detach()}, where), "weight")


def _settings(module: nn.Module) -> Mapping[str, Any]:
    """What a configuration would say of this module: the size of its blocks, the bits of its numbers."""
    size = getattr(module, "block_size", None)
    if size is not None:
        return {"weight_block_size": list(size)}
    scheme = getattr(getattr(module, "quantization_scheme", None), "weights", None)
    if scheme is None:
        return {}
    said = {"num_bits": scheme.num_bits, "block_structure": getattr(scheme, "block_structure", None)}
    return {"config_groups": {"own": {"weights": said}}}
