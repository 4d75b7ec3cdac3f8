"""`Gate`: factors of mixed values that are computed from the stream of the queries."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.layers.layer import Projection

FUNCTIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "sigmoid": torch.sigmoid,
    "silu": torch.nn.functional.silu,
    "tanh": torch.tanh,
    "softplus": torch.nn.functional.softplus,
    "relu": torch.relu,
    "identity": lambda x: x,
}


@dataclass(frozen=True)
class Gate:
    """function(map(x)), one factor for each channel of each head."""

    map: Projection
    function: str

    def __call__(self, x: Tensor) -> Tensor:
        return FUNCTIONS[self.function](self.map(x))
