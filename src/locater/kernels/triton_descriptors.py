"""Blocks of keys and values that the hardware fetches by a description of the tensor: TMA, from compute capability 9.0
on. One thread asks for a block, zeros come past the end, and no address is computed in the loop.
"""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor


@cache
def _capability(device: torch.device) -> int:
    return torch.cuda.get_device_capability(device)[0]


def is_hopper(x: Tensor) -> bool:
    """Whether kernels that were written for the H100 and its kind are for this tensor's device. Later cards have them
    too, but Triton 3.7 fails to compile the kernels for these (compute capability 10.0).
    """
    return x.device.type != "cuda" or _capability(x.device) == 9


def takes_descriptors(x: Tensor) -> bool:
    """Whether the tensor (B, H, S, D) lies so that it can be fetched by descriptors."""
    size, steps = x.element_size(), x.stride()
    return steps[3] == 1 and all(step > 0 and step * size % 16 == 0 for step in steps[:3]) and x.data_ptr() % 16 == 0


def descriptor(x: Tensor, rows: int, wide: int) -> TensorDescriptor:
    """Of x (B, H, S, D), in blocks of (rows, wide)."""
    return TensorDescriptor(x, list(x.shape), list(x.stride()), [1, 1, rows, wide])
