"""A checkpoint in memory, where its heads are, and an adapter for it: what faults are planted in.

Tensors are those of the file and are never written to: `edit` puts a copy in their place, so that what is planted is
known by identity. A part of a layer is read and written in the order of the model's channels, head by head, whatever
the file's is: fused, transposed (Conv1D), interleaved.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import torch
from safetensors.torch import save_file
from torch import Tensor

from locater.errors import LocaterError
from locater.families.registry import BY_TYPE
from locater.layers.layout import AttentionLayout
from locater.layers.map_layouts import MapLayout, NormLayout, numbers_in
from locater.sources.open_source import open_source
from locater.sources.weights import DictWeights

SHARDS = 3
Part = Literal["query", "key", "value", "out"]
RANK, ALPHA = 8, 16
SIZES = (0.06, 0.03, 0.015, 0.0075, 0.004, 0.002, 0.001)  # norms of the delta over those of its maps, as tried
Gradient = Callable[[], Mapping[str, Tensor]]
GATE, UP, DOWN = "mlp.gate_proj.weight", "mlp.up_proj.weight", "mlp.down_proj.weight"
INNER = (GATE, UP, "intermediate.dense.weight", "intermediate.dense.bias")  # by neurons, as the maps out of them
OUTER = (DOWN, ".output.dense.weight")
WRITES = ("o_proj.weight", "down_proj.weight", "output.dense.weight")  # maps into the residual stream


class NotHereError(LocaterError):
    """This model has no such part, so the fault cannot be planted in it."""


@dataclass(frozen=True)
class Place:
    """Where a fault is planted, and how strong. `name` says it in the lines of the bench."""

    layer: int
    head: int
    strength: float
    name: str = "middle"


@dataclass
class Checkpoint:
    """Tensors by name, settings, and what the files have besides."""

    name: str
    folder: Path  # whose other files (tokenizer) belong to it
    tensors: dict[str, Tensor]
    config: dict[str, Any]
    packed: dict[str, Any] = field(default_factory=dict)  # bytes that a GGUF file has in place of a tensor's numbers

    @classmethod
    def open(cls, folder: Path, name: str) -> Checkpoint:
        weights, _ = open_source(str(folder))
        tensors = {key: weights.read(key) for key in sorted(weights.names())}
        return cls(name, folder, tensors, json.loads((folder / "config.json").read_text()))

    def copied(self) -> Checkpoint:
        """The same tensors under a dictionary of its own."""
        settings = json.loads(json.dumps(self.config))
        made = replace(self, tensors=dict(self.tensors), config=settings, packed=dict(self.packed))
        made.__dict__["stack"] = self.stack  # what is planted does not move heads
        return made

    @cached_property
    def stack(self) -> list[AttentionLayout]:
        """The layers of self-attention of the longest stack of blocks."""
        family = BY_TYPE.get(self.config.get("model_type", ""))
        if family is None:
            raise LocaterError(f"{self.folder}: {self.config.get('model_type')} is no family of the package")
        found = family.layers(DictWeights(self.tensors, str(self.folder)), self.config)
        stacks: dict[str, list[AttentionLayout]] = {}
        for layer in found:
            if isinstance(layer, AttentionLayout) and layer.kind == "self":
                stacks.setdefault(re.sub(r"\d+", "#", layer.name), []).append(layer)
        if not stacks:
            raise LocaterError(f"{self.folder}: no layers whose heads are known as rows of tensors")
        return max(stacks.values(), key=len)

    @cached_property
    def blocks(self) -> list[str]:
        """The path of each block, with a dot behind it."""
        names = [layer.name.split(".") for layer in self.stack]
        at = next((i for i, parts in enumerate(zip(*names, strict=False)) if len(set(parts)) > 1), None)
        if at is None:
            raise NotHereError(f"{self.name}: all layers share one block")
        return [".".join(parts[: at + 1]) + "." for parts in names]

    def in_block(self, layer: int) -> list[str]:
        """The names of the tensors of a block."""
        return [name for name in self.tensors if name.startswith(self.blocks[layer])]

    def shard_of(self, layer: int) -> int:
        """The shard that a block is written to, where there are several."""
        return layer * SHARDS // len(self.stack)

    def changed(self, base: Checkpoint) -> list[str]:
        """Tensors that are not those of the base: planted, lost, or new."""
        names = {*self.tensors, *base.tensors}
        return sorted(name for name in names if self.tensors.get(name) is not base.tensors.get(name))

    def digest(self, base: Checkpoint) -> str:
        """Of what is planted: equal digests are equal models."""
        told = hashlib.sha256(json.dumps(self.config, sort_keys=True).encode())
        for name in self.changed(base):
            told.update(name.encode())
            if name in self.tensors:
                told.update(bytes_of(self.tensors[name]))
        return told.hexdigest()[:16]

    # ---- editing ----

    def edit(self, name: str) -> Tensor:
        """A copy of a tensor, which is in its place from now on."""
        if name not in self.tensors:
            raise NotHereError(f"{self.name}: no tensor {name}")
        self.tensors[name] = self.tensors[name].clone()
        return self.tensors[name]

    def put(self, name: str, numbers: Tensor) -> None:
        """Numbers in the type that the tensor is stored in."""
        self.tensors[name] = numbers.to(self.tensors[name].dtype).contiguous()

    def part(self, layer: int, part: Part) -> MapLayout:
        found = getattr(self.stack[layer], part)
        if not isinstance(found, MapLayout):
            raise NotHereError(f"{self.name}: {part} is no map of its own")
        return found

    def heads_of(self, layer: int, part: Part) -> int:
        one = self.stack[layer]
        return one.kv_heads if part in ("key", "value") else one.heads

    def rows(self, layer: int, part: Part) -> Tensor:
        """A map as (heads, rows of a head, inputs), with the bias as the last input; `out` by columns, without it."""
        layout = self.part(layer, part)
        matrix = self._matrix(layout)
        if part == "out":
            columns = matrix if layout.columns is None else matrix[:, list(layout.columns)]
            return columns.mT.unflatten(0, (self.heads_of(layer, part), -1)).float().clone()
        whole = matrix[numbers_in(layout.rows)].float()
        if layout.bias is not None:
            bias = self.tensors[layout.bias].flatten()[numbers_in(layout.rows)].float()
            whole = torch.cat([whole, bias[:, None]], 1)
        return whole.unflatten(0, (self.heads_of(layer, part), -1))

    def put_rows(self, layer: int, part: Part, rows: Tensor) -> None:
        """What `rows` gave, changed. Numbers that are equal to what is stored keep their bytes."""
        layout = self.part(layer, part)
        stored = self.edit(layout.weight)
        matrix = self._matrix(layout)
        if part == "out":
            columns = list(range(matrix.shape[1])) if layout.columns is None else list(layout.columns)
            matrix[:, columns] = rows.flatten(0, 1).mT.to(stored.dtype)
            return
        whole, places = rows.flatten(0, 1).to(stored.dtype), numbers_in(layout.rows)
        matrix[places] = whole[:, : matrix.shape[1]]
        if layout.bias is not None:
            bias = self.edit(layout.bias)
            bias.view(-1)[places] = rows.flatten(0, 1)[:, -1].to(bias.dtype)

    def _matrix(self, layout: MapLayout) -> Tensor:
        """A view of the stored tensor as (all rows, inputs)."""
        stored = self.tensors[layout.weight]
        matrix = stored.view(-1, *stored.shape[layout.axes :]).flatten(1)
        return matrix.mT if layout.transposed else matrix

    def norm(self, layer: int) -> NormLayout:
        """The norm in front of attention."""
        return self.stack[layer].norm

    def gains(self) -> list[tuple[str, float]]:
        """The gains in front of attention, and what is added to each when it acts."""
        found: dict[str, float] = {}
        for layer in self.stack:
            if isinstance(layer.norm.gain, str):
                found.setdefault(layer.norm.gain, layer.norm.offset)
        return list(found.items())

    def mlp(self, layer: int) -> str:
        """The largest matrix of the block beside attention."""
        own = {getattr(getattr(self.stack[layer], part), "weight", "") for part in ("query", "key", "value", "out")}
        rest = [n for n in self.in_block(layer) if n not in own and self.tensors[n].ndim >= 2]
        if not rest:
            raise NotHereError(f"{self.name}: block {layer} has no map beside attention")
        return max(rest, key=lambda name: (self.tensors[name].numel(), name))

    def ending(self, ends: Iterable[str], layer: int | None = None) -> list[str]:
        """Tensors of a block, or of all blocks, whose names end so."""
        layers = range(len(self.stack)) if layer is None else [layer]
        found = [n for each in layers for n in self.in_block(each) if n.endswith(tuple(ends))]
        if not found:
            raise NotHereError(f"{self.name}: no tensors {', '.join(ends)}")
        return found

    def neurons(self, layer: int) -> tuple[list[str], str]:
        """The maps into the neurons of an MLP, and the one out of them."""
        inner = self.ending(INNER, layer)
        (outer,) = (n for n in self.ending(OUTER, layer) if "attention" not in n)
        return inner, outer

    def require(self, *types: str) -> None:
        """Refuse a model of another type: what is planted knows the names of these."""
        if self.config.get("model_type") not in types:
            raise NotHereError(f"{self.name}: planted by the names of {', '.join(types)}")

    def embedding(self) -> str:
        size = self.config.get("vocab_size")
        names = [n for n, x in self.tensors.items() if x.ndim == 2 and x.shape[0] == size and "head" not in n]
        if not names:
            raise NotHereError(f"{self.name}: no embedding of tokens")
        return names[0]

    def maps_of_blocks(self) -> list[str]:
        """Every matrix of every block."""
        return [n for layer in range(len(self.stack)) for n in self.in_block(layer) if self.tensors[n].ndim == 2]


def bytes_of(tensor: Tensor) -> bytes:
    whole = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    return whole.numpy().tobytes()


def generator(*words: object) -> torch.Generator:
    """The same numbers for the same words, in any process."""
    seed = hashlib.sha256(" ".join(map(str, words)).encode()).digest()[:6]
    return torch.Generator().manual_seed(int.from_bytes(seed, "big"))


def quantised(numbers: Tensor, bits: int, block: int = 32, zero_points: bool = False) -> tuple[Tensor, Tensor, Tensor]:
    """(whole numbers, scales, zero points) of runs of `block` numbers: numbers are about (whole - zero) * scale.

    >>> whole, scale, zero = quantised(torch.tensor([[-1.0, 0.0, 0.5, 1.0]]), bits=8, block=4)
    >>> whole.tolist(), zero.tolist()
    ([[-127.0, 0.0, 64.0, 127.0]], [[0.0]])
    """
    runs = numbers.float().reshape(-1, block)
    if zero_points:
        low, high = runs.amin(1, keepdim=True), runs.amax(1, keepdim=True)
        scale = ((high - low) / (2**bits - 1)).clamp_min(1e-12)
        zero = torch.round(-low / scale)
        return torch.clamp(torch.round(runs / scale) + zero, 0, 2**bits - 1), scale, zero
    top = max(1, 2 ** (bits - 1) - 1)
    scale = (runs.abs().amax(1, keepdim=True) / top).clamp_min(1e-12)
    return torch.clamp(torch.round(runs / scale), -top, top), scale, torch.zeros_like(scale)


def run_length(tensor: Tensor, block: int = 32) -> int:
    """The longest run of at most `block` numbers that divides a tensor."""
    return next(size for size in range(min(block, tensor.numel()), 0, -1) if tensor.numel() % size == 0)


# ---- an adapter for any model of the bench: LoRA in the maps of queries and of values ----
# One step down the gradient of the model's own loss is what training gives, so that merging it with the wrong sign or twice does
# what it does to a trained adapter. Where there is no loss (tiny models) the two factors are drawn.


@dataclass(frozen=True)
class LoraAdapter:
    """For each stored map (its name in the file) the factors A (r, in) and B (out, r)."""

    factors: Mapping[str, tuple[Tensor, Tensor]]
    transposed: bool  # maps are stored (in, out)

    def delta(self, name: str) -> Tensor:
        """What merging adds to a stored map."""
        a, b = self.factors[name]
        whole = (ALPHA / RANK) * (b @ a)
        return whole.mT if self.transposed else whole

    def shortened(self, share: float) -> LoraAdapter:
        """The same with a delta of this share."""
        return replace(self, factors={name: (a, share * b) for name, (a, b) in self.factors.items()})

    def merge(
        self, checkpoint: Checkpoint, times: float = 1.0, only: Callable[[str], bool] = lambda name: True
    ) -> None:
        for name in filter(only, self.factors):
            stored = checkpoint.tensors[name]
            checkpoint.put(name, stored.float() + times * self.delta(name).view(stored.shape))

    def save(self, folder: Path, base: Path, alpha: float = ALPHA) -> Path:
        """The folder that peft writes."""
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {}
        for name, factors in self.factors.items():
            path = f"base_model.model.{name.removesuffix('.weight')}"
            for letter, factor in zip("AB", factors, strict=True):
                tensors[f"{path}.lora_{letter}.weight"] = factor.contiguous()
        save_file(tensors, folder / "adapter_model.safetensors", metadata={"format": "pt"})
        ends = sorted({name.removesuffix(".weight").rpartition(".")[2] for name in self.factors})
        settings = {
            "peft_type": "LORA", "r": RANK, "lora_alpha": alpha, "target_modules": ends, "lora_dropout": 0.0,
            "bias": "none", "base_model_name_or_path": str(base), "fan_in_fan_out": self.transposed,
            "inference_mode": True, "task_type": None,
        }  # fmt: skip
        (folder / "adapter_config.json").write_text(json.dumps(settings, indent=1))
        return folder


def adapter_for(checkpoint: Checkpoint, gradient: Gradient | None) -> LoraAdapter:
    """The adapter of a model: of every layer the maps that hold queries and values."""
    names: dict[str, bool] = {}
    for layer in range(len(checkpoint.stack)):
        for part in ("query", "value"):
            layout = checkpoint.part(layer, part)
            if layout.axes != 1 or len(layout.shape) != 2:
                raise NotHereError(f"{checkpoint.name}: {layout.weight} is no matrix, as LoRA needs")
            names[layout.weight] = layout.transposed
    downhill = {} if gradient is None else gradient()
    factors = {}
    for name, transposed in names.items():
        stored = checkpoint.tensors[name].float()
        matrix = stored.mT if transposed else stored
        a, b = _drawn(matrix, name) if name not in downhill else _step(downhill[name], transposed)
        size = SIZES[0] * matrix.norm() / ((ALPHA / RANK) * (b @ a).norm())
        factors[name] = a * size.sqrt(), b * size.sqrt()
    return LoraAdapter(factors, any(names.values()))


def _drawn(matrix: Tensor, name: str) -> tuple[Tensor, Tensor]:
    g = generator("adapter", name)
    return torch.randn(RANK, matrix.shape[1], generator=g), torch.randn(matrix.shape[0], RANK, generator=g)


def _step(gradient: Tensor, transposed: bool) -> tuple[Tensor, Tensor]:
    """The factors of the best step of this rank down a gradient."""
    whole = -(gradient.mT if transposed else gradient).float()
    u, s, v = torch.linalg.svd(whole, full_matrices=False)
    root = s[:RANK].sqrt()
    return root[:, None] * v[:RANK], u[:, :RANK] * root
