"""Images with noise, as a denoising transformer reads them: the schedule, its inputs and targets, the noise level.

The level t runs from 0 (the image) to 1 (noise alone), by the cosine schedule: with a = cos(pi t / 2) and
s = sin(pi t / 2), the noisy image is z = a x + s e, where x is the image in -1..1 and e standard normal noise. The
model predicts the velocity v = a e - s x. From it follow the image, x = a z - s v, and the noise, e = s z + a v, at
every level.

An input is one tensor (B, height, width, channels + 1): the noisy image, and the level as a last plane.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

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
