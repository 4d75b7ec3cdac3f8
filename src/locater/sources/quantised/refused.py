"""Formats that are known by their tensors and not read: each is refused by its name when one of its maps is needed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from locater.sources.quantised.stored import bad
from locater.sources.weights import Rows, Weights

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
class Refused:
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
        return bad(
            self.weights,
            self.name,
            f"is quantised ({self.kind}; {self.parts[0]} is there), which is not read: "
            "dequantise the checkpoint first (to bfloat16)",
        )
