"""A LoRA adapter for any model of the bench: rank 8 in the maps of queries and of values, one step down the gradient.

A step of the model's own loss is what training gives, so that merging it with the wrong sign or twice does what it does
to a trained adapter. Where there is no loss (tiny models) the two factors are drawn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from locater_lab.studies.verdicts.checkpoint import Checkpoint, NotHereError, generator

RANK, ALPHA = 8, 16
SIZES = (0.06, 0.03, 0.015, 0.0075)  # norms of the merged delta over those of its maps: steps that are tried
Gradient = Callable[[], Mapping[str, Tensor]]


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
