"""`Dequantised`: a checkpoint with quantised maps, as if all were floats; and `live_map`, the same for a live layer."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from locater.sources.quantised import bitsandbytes, scaled_floats
from locater.sources.quantised.bitsandbytes import FourBit, LLMInt8
from locater.sources.quantised.grouped_integers import GroupedInt, PackedInt
from locater.sources.quantised.scaled_floats import KINDS, NAMES, ScaledWeight
from locater.sources.quantised.stored_map import Settings, Stored, quantised_error
from locater.sources.weights import DictWeights, Rows, Weights, take_rows
from locater.torch_private import own_buffers, own_parameters

# Formats that are known by their tensors and not read: each is refused by its name when one of its maps is needed.

# what stands behind the module's path, and the format
MARKS = {
    "biases": "MLX",
    "weight_scale_2": "NVFP4",
    "weight_global_scale": "NVFP4",
    "W_q": "HQQ",
    "codebooks": "AQLM",
    "Qidxs": "QuIP#",
    "centroids.weight": "VPTQ",
    "weight._data": "Quanto",
    "qweight_type": "EETQ",
    "B": "Marlin",
    "tile_packed": "QTIP",
}


@dataclass(frozen=True)
class RefusedMap:
    """A map of a format that is not read."""

    weights: Weights
    name: str
    kind: str
    parts: tuple[str, ...]

    def shape(self) -> tuple[int, ...]:
        raise self._error()

    def read(self, rows: Rows | None = None) -> Tensor:
        raise self._error()

    def _error(self) -> Exception:
        return quantised_error(
            self.weights,
            self.name,
            f"is quantised ({self.kind}; {self.parts[0]} is there), which is not read: "
            "dequantise the checkpoint first (to bfloat16)",
        )


# Checkpoints.


def dequantised_view(weights: Weights, config: Mapping[str, Any]) -> Weights:
    """The weights with quantised maps read as floats. Other tensors are as they are, but for those of eight bits: their
    scales have other names than are known here, or are missing, and without them the numbers would be wrong.

    >>> import torch
    >>> from locater.sources.weights import DictWeights
    >>> stored = {"q.weight": torch.ones(2, 2).to(torch.float8_e4m3fn), "q.weight_scale_inv": torch.tensor([[0.5]])}
    >>> weights = dequantised_view(DictWeights(stored, "here"), {})
    >>> list(weights.names()), weights.read("q.weight", [(1, 2)])
    (['q.weight'], tensor([[0.5000, 0.5000]]))
    """
    if hasattr(weights, "quantised"):  # they say it themselves: adapters on such weights, GGUF
        return weights
    settings = _settings(config)
    maps = {stored.name: stored for stored in _find_quantised_maps(weights, settings)}
    return Dequantised(weights, maps)


class Dequantised:
    """Tensors by the names that they have in the model. A quantised map is `X.weight`; what it is stored as, and its
    scales, are hidden. Only the bytes of the rows asked for are read where the packing allows it.
    """

    def __init__(self, weights: Weights, maps: Mapping[str, Stored]) -> None:
        self.where = weights.where
        self._weights, self._maps = weights, maps
        hidden = {part for stored in maps.values() for part in stored.parts}
        self._names = dict.fromkeys([*(name for name in weights.names() if name not in hidden), *maps])

    @cached_property
    def quantised(self) -> dict[str, str]:
        """The format of each quantised map."""
        return {name: stored.kind for name, stored in self._maps.items()}

    def names(self) -> Collection[str]:
        return self._names.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        stored = self._maps.get(name)
        return self._weights.shape(name) if stored is None else stored.shape()

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        stored = self._maps.get(name)
        if stored is not None:
            return stored.read(rows)
        tensor = self._weights.read(name, rows)
        if tensor.dtype in scaled_floats.KINDS:
            raise quantised_error(
                self._weights, name, f"is stored as {tensor.dtype} (quantised), and {self._no_scale(name)}"
            )
        return tensor

    def _no_scale(self, name: str) -> str:
        stem = name.removesuffix("weight")
        other = next((x for x in self._weights.names() if x.startswith(stem) and "scale" in x[len(stem) :]), None)
        if other is None:
            return "its scale is missing: the checkpoint is incomplete, or was cast: save it in bfloat16"
        return f"its scale is perhaps {other}, of a format that is not read: dequantise it first (to bfloat16)"

    def __getattr__(self, name: str) -> Any:
        """What a kind of weights has beside the interface, such as `bytes_read`."""
        if name == "_weights":  # not yet there, while a copy is made
            raise AttributeError(name)
        return getattr(self._weights, name)


def _settings(config: Mapping[str, Any]) -> Settings:
    """What config.json says of quantisation; of a model of text and pictures, the part about its text may say it."""
    inner = config.get("text_config")
    for part in (config, inner if isinstance(inner, Mapping) else {}):
        for key in ("quantization_config", "compression_config"):
            settings = part.get(key)
            if isinstance(settings, Mapping) and settings:
                return settings
    return {}


def _find_quantised_maps(weights: Weights, settings: Settings) -> Iterator[Stored]:
    """The quantised maps of a checkpoint, by the tensors beside them. A mark of a format that is not read counts more
    than scales, which many formats have.
    """
    held = set(weights.names())
    refused: set[str] = set()
    for name in held:
        for mark, kind in MARKS.items():
            stem = name.removesuffix(f".{mark}")
            if stem != name and (mark not in ("B", "biases") or f"{stem}.s" in held or f"{stem}.scales" in held):
                refused.add(stem)
                yield RefusedMap(weights, f"{stem}.weight", kind, (name,))
    for name in weights.names():
        stem, _, last = name.rpartition(".")
        if stem in refused:
            continue
        stored = _map_of(weights, settings, held, stem, last, name)
        if stored is not None:
            yield stored


def _map_of(weights: Weights, settings: Settings, held: set[str], stem: str, last: str, name: str) -> Stored | None:
    """The quantised map that a stored tensor marks, or None."""
    weight = f"{stem}.weight" if stem else "weight"
    if last == "weight_packed":
        return PackedInt(weights, weight, settings)
    if last in scaled_floats.NAMES and weight in held:
        both = [f"{stem}.{other}" for other in scaled_floats.NAMES if f"{stem}.{other}" in held]
        if len(both) > 1:
            return RefusedMap(weights, weight, "two scales", tuple(both))
        zero = f"{weight}_zero_point"
        return ScaledWeight(weights, weight, settings, name, zero if zero in held else None)
    if last == "qweight":
        return GroupedInt(weights, weight, settings)
    if last == "SCB" and weight in held:
        return LLMInt8(weights, weight)
    if name.count(f".{bitsandbytes.STATE}") == 1:
        weight, _, kind = name.partition(f".{bitsandbytes.STATE}")
        if weight in held and kind in ("nf4", "fp4"):
            return FourBit(weights, weight, kind)
    return None


# Layers of live models.

REPACKED = 32  # rows in a block of codes that are repacked
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
        return PackedInt(weights, "weight", _settings_of_module(module))
    scale = next((name for name in NAMES if name in tensors), None)
    if scale is None:
        return None
    return ScaledWeight(
        weights,
        "weight",
        _settings_of_module(module),
        scale,
        "weight_zero_point" if "weight_zero_point" in tensors else None,
    )


def _four_bit(where: str, weight: Any) -> Stored:
    state = weight.quant_state
    if getattr(state, "packing_format_for_cpu", False):
        return _RepackedFourBit(weight.data, state)
    beside = {f"weight.{name}": x.detach() for name, x in state.as_dict(packed=True).items()}
    return FourBit(DictWeights({"weight": weight.data, **beside}, where), "weight", state.quant_type)


@dataclass(frozen=True)
class _RepackedFourBit:
    """Four-bit codes as bitsandbytes repacks them at the first pass on a processor with AVX512-BF16: a byte holds
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


def _settings_of_module(module: nn.Module) -> Mapping[str, Any]:
    """What a configuration would say of this module: the size of its blocks, the bits of its numbers."""
    size = getattr(module, "block_size", None)
    if size is not None:
        return {"weight_block_size": list(size)}
    scheme = getattr(getattr(module, "quantization_scheme", None), "weights", None)
    if scheme is None:
        return {}
    said = {"num_bits": scheme.num_bits, "block_structure": getattr(scheme, "block_structure", None)}
    return {"config_groups": {"own": {"weights": said}}}
