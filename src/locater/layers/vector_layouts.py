"""Layouts of learned vectors: which numbers of which stored tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from torch import Tensor

from locater.layers.build import read_floats
from locater.layers.gate import FUNCTIONS
from locater.numerics import upcast
from locater.sources.weights import Weights


@dataclass(frozen=True)
class VectorLayout:
    """Numbers of a stored tensor, flattened."""

    name: str
    places: tuple[int, ...]
    factor: float = 1.0
    function: str = "identity"  # of the stored numbers, before the factor

    def picked(self, places: Sequence[int]) -> VectorLayout:
        """The same with these of its numbers."""
        return replace(self, places=tuple(self.places[place] for place in places))

    def build(self, weights: Weights) -> Tensor:
        return (
            FUNCTIONS[self.function](upcast(read_floats(weights, self.name)).flatten()[list(self.places)]) * self.factor
        )
