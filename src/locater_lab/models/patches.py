"""Images as rows of patches, and back."""

from __future__ import annotations

from jaxtyping import Shaped
from torch import Tensor


def to_patches(images: Shaped[Tensor, "B height width channels"], size: int) -> Shaped[Tensor, "B T numbers"]:
    """Square patches of `size` x `size` pixels, row by row; a patch is size * size * channels numbers.

    >>> import torch
    >>> to_patches(torch.arange(16).view(1, 4, 4, 1), 2)[0].tolist()
    [[0, 1, 4, 5], [2, 3, 6, 7], [8, 9, 12, 13], [10, 11, 14, 15]]
    """
    B, height, width, channels = images.shape
    x = images.reshape(B, height // size, size, width // size, size, channels).transpose(2, 3)
    return x.reshape(B, -1, size * size * channels)


def from_patches(
    patches: Shaped[Tensor, "B T numbers"], size: int, image: tuple[int, int, int]
) -> Shaped[Tensor, "B height width channels"]:
    """The images (height, width, channels) whose patches these are.

    >>> import torch
    >>> images = torch.rand(3, 8, 4, 2)
    >>> torch.equal(from_patches(to_patches(images, 2), 2, (8, 4, 2)), images)
    True
    """
    height, width, channels = image
    x = patches.reshape(len(patches), height // size, width // size, size, size, channels).transpose(2, 3)
    return x.reshape(len(patches), height, width, channels)
