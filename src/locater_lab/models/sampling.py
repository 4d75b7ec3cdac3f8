"""Draw images from a denoising transformer."""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import UInt8
from torch import Tensor

from locater.errors import LocaterError
from locater_lab.models.noise import append_level, signal_and_noise
from locater_lab.models.patches import from_patches
from locater_lab.models.transformer import Transformer


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
