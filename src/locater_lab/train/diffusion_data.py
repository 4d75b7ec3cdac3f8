"""Images with noise as training data: the model predicts from a noisy image and its noise level what was added.

The schedule is in `models.noise`. Levels are uniform between 0 and 1. In training, noise and level are drawn anew for
every image of a batch. Of an image of the select or report split they are always the same, whatever the seed, the batch
size and the model: losses compare over runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater_lab.models.noise import noisy_images
from locater_lab.models.patches import to_patches
from locater_lab.train.batches import Batch, draw
from locater_lab.train.image_data import ImageData, read_images
from locater_lab.train.plan import Plan

GOLDEN = 0.5 * (5**0.5 - 1)  # multiples of it, modulo 1, fill the levels evenly, however many there are
FIXED = {"select": 1, "report": 2}  # number of each split's noise


@dataclass
class DiffusionData:
    """`noise` of a split is (N, height, width, channels), for each of its images."""

    images: ImageData
    noise: dict[str, Tensor]
    facts: dict[str, Any]

    def batch(self, index: int) -> Batch:
        images, _ = self.images.batch(index)
        numbers = draw(self.images.plan.seed, index)
        levels = torch.rand(len(images), generator=numbers).to(images.device)
        noise = torch.randn(images.shape, generator=numbers).to(images.device)
        return self._pair(images, noise, levels)

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        size, at = self.images.plan.batch, 0
        for images, _ in self.images.windows(name, most):
            levels = fixed_levels(at, len(images)).to(images.device)
            yield self._pair(images, self.noise[name][at : at + len(images)], levels)
            at += size

    def _pair(self, images: Tensor, noise: Tensor, levels: Tensor) -> Batch:
        inputs, velocity = noisy_images(images.float() / 127.5 - 1.0, noise, levels)
        return inputs, to_patches(velocity, self.images.plan.patch)


def fixed_levels(first: int, count: int) -> Tensor:
    """Noise levels of the images of a split, from number `first` on.

    >>> [round(x, 3) for x in fixed_levels(0, 3).tolist()]
    [0.309, 0.927, 0.545]
    """
    numbers = torch.arange(first, first + count, dtype=torch.float64) + 0.5
    return (numbers * GOLDEN).remainder(1.0).float()


def read_noisy_images(plan: Plan, path: Path, device: torch.device) -> DiffusionData:
    """Images of an .npz as for --task image; their labels are not used."""
    images = read_images(plan, path, device)
    noise = {
        name: torch.randn(images.splits[name][0].shape, generator=draw(0, number)).to(device)
        for name, number in FIXED.items()
    }
    facts = {name: value for name, value in images.facts.items() if name != "classes"}
    return DiffusionData(images, noise, facts)
