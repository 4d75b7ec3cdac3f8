"""The normalisation in front of attention, or of its queries and keys."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from locater.brief import brief
from locater.numerics import upcast

NormKind = Literal["layer", "rms", "none"]


@dataclass(frozen=True)
class Norm:
    """y = gain * z + bias with z the standardised input: mean removed for "layer", scale removed for "layer" and "rms".

    `gain` is the factor itself, so a family that stores w for a gain of 1 + w adds the 1 when it reads.
    """

    kind: NormKind = "none"
    gain: Tensor | None = None  # (d,)
    bias: Tensor | None = None  # (d,)
    eps: float = 0.0

    __repr__ = brief

    def standardize(self, x: Tensor) -> Tensor:
        """z: the theory's unit token, |z|^2 = d."""
        if self.kind == "none":
            return x
        if self.kind == "layer":
            x = x - x.mean(-1, keepdim=True)
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps)

    def affine(self, z: Tensor) -> Tensor:
        """gain * z + bias."""
        if self.gain is not None:
            z = z * self.gain.to(z)
        return z if self.bias is None else z + self.bias.to(z)

    def __call__(self, x: Tensor) -> Tensor:
        """In float32 at least, as in the models; the result has the dtype of `x`."""
        return self.affine(self.standardize(upcast(x))).to(x.dtype)
