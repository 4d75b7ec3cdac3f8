"""The product of the stream with the output embedding, at a width that matrix units like."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional

ALIGNED = 64  # columns; rows of bfloat16 then begin at multiples of 128 bytes


def vocabulary_logits(x: Tensor, weight: Tensor, aligned: int = ALIGNED) -> Tensor:
    """x Wᵀ (..., V), computed with rows of zeros below W up to a multiple of `aligned` and cut to V again.

    A vocabulary of words has any size, 32,543 say. Rows of logits that begin at odd addresses take the slow kernels of
    a GPU, forward and backward.

    >>> import torch
    >>> vocabulary_logits(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    tensor([[ 3.,  7., 11.]])
    """
    words = weight.shape[0]
    missing = -words % aligned
    if not missing:
        return functional.linear(x, weight)
    return functional.linear(x, functional.pad(weight, (0, 0, 0, missing)))[..., :words]


class Unembedding(nn.Linear):
    """From the stream to logits of words; a linear map that pads its product on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        return vocabulary_logits(input, self.weight) if input.is_cuda else super().forward(input)
