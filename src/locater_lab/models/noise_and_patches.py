"""Images with noise, as a denoising transformer reads them: the schedule, its inputs and targets, the noise level; images
drawn from one; and images as rows of patches, and back.

The level t runs from 0 (the image) to 1 (noise alone), by the cosine schedule: with a = cos(pi t / 2) and
s = sin(pi t / 2), the noisy image is z = a x + s e, where x is the image in -1..1 and e standard normal noise. The
model predicts the velocity v = a e - s x. From it follow the image, x = a z - s v, and the noise, e = s z + a v, at
every level.

An input is one tensor (B, height, width, channels + 1): the noisy image, and the level as a last plane.
"""

from __future__ import annotations

import math
from itertools import pairwise
from typing import TYPE_CHECKING

import torch
from jaxtyping import Float, Shaped, UInt8
from torch import Tensor, nn
from torch.nn import functional

from locater.errors import LocaterError

if TYPE_CHECKING:
    from locater_lab.models.transformer import Transformer

Images = Float[Tensor, "B height width channels"]
Levels = Float[Tensor, " B"]
FREQUENCIES, HIGHEST = 32, 100.0  # of the sines and cosines of the level: from 1 to this many radians


def signal_and_noise(levels: Levels) -> tuple[Tensor, Tensor]:
    """a and s, the amounts of image and of noise, shaped (B, 1, 1, 1); a^2 + s^2 = 1.

    >>> [x.flatten().tolist() for x in signal_and_noise(torch.tensor([0.0]))]
    [[1.0], [0.0]]
    """
    angle = levels.view(-1, 1, 1, 1) * (math.pi / 2)
    return angle.cos(), angle.sin()


def noisy_images(images: Images, noise: Images, levels: Levels) -> tuple[Tensor, Images]:
    """The input of a model, and the velocity that it should predict."""
    a, s = signal_and_noise(levels)
    return append_level(a * images + s * noise, levels), a * noise - s * images


def append_level(noisy: Images, levels: Levels) -> Tensor:
    """Noisy images with their levels as a last plane."""
    return torch.cat([noisy, levels.view(-1, 1, 1, 1).expand(*noisy.shape[:3], 1)], -1)


class NoiseLevel(nn.Module):
    """The level as a vector (B, 1, width) that is added to every token: sines and cosines through a small MLP."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(2 * FREQUENCIES, width, bias=False)
        self.out_proj = nn.Linear(width, width, bias=False)

    def forward(self, levels: Levels) -> Tensor:
        powers = torch.linspace(0, 1, FREQUENCIES, device=levels.device)
        angles = levels[:, None] * HIGHEST**powers
        waves = torch.cat([angles.sin(), angles.cos()], -1).to(self.up_proj.weight.dtype)  # (B, 2 FREQUENCIES)
        return self.out_proj(functional.silu(self.up_proj(waves)))[:, None]


# ---- images as rows of patches, and back ----


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


# ---- images drawn from a model that denoises ----


@torch.no_grad()
def sample_images(
    model: Transformer, count: int, steps: int = 50, seed: int = 0
) -> UInt8[Tensor, "count height width channels"]:
    """Images drawn by DDIM, without noise of its own: equal seeds give equal images from equal weights.

    From noise alone (level 1) the level falls to 0 in `steps` equal steps. Each takes image and noise from the
    predicted velocity, cuts the image to the range of pixels, and puts the two together at the next level.
    """
    if not model.shape.denoises or model.shape.image is None:
        raise LocaterError("sample_images needs a model of --task diffusion: this one does not predict noise")
    if count < 1 or steps < 1:
        raise LocaterError(f"count={count}, steps={steps}: both must be at least 1")
    image, device = model.shape.image, model.lm_head.weight.device
    z = torch.randn(count, *image, generator=torch.Generator().manual_seed(seed)).to(device)
    levels = torch.linspace(1, 0, steps + 1, device=device)
    clean = z
    for now, following in pairwise(levels):
        level = now.expand(count)
        a, s = signal_and_noise(level)
        velocity = from_patches(model(append_level(z, level)).float(), model.shape.patch, image)
        clean = (a * z - s * velocity).clamp(-1, 1)
        noise = (z - a * clean) / s  # in keeping with the image that was cut
        a, s = signal_and_noise(following.expand(count))
        z = a * clean + s * noise
    return ((clean + 1) * 127.5).round().to(torch.uint8).cpu()
