"""Images and labels as training data, from an .npz file."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locater.errors import LocaterError, first_line
from locater_lab.train.batches import Batch, draw
from locater_lab.train.plan import Plan

NAMES = ("train_images", "train_labels", "test_images", "test_labels")


@dataclass
class ImageData:
    """Images (N, height, width, channels) and labels (N,) of the three splits."""

    plan: Plan
    splits: dict[str, Batch]
    facts: dict[str, Any]

    def batch(self, index: int) -> Batch:
        """The next images. Each epoch has an order of its own; images at its end that fill no batch are left out."""
        images, labels = self.splits["train"]
        size = self.plan.batch
        epoch, at = divmod(index, len(images) // size)
        rows = _order(self.plan.seed, epoch, len(images))[at * size : (at + 1) * size].to(images.device)
        return images[rows], labels[rows]

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        images, labels = self.splits[name]
        yield from zip(images[:most].split(self.plan.batch), labels[:most].split(self.plan.batch), strict=True)


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=draw(seed, epoch))


def read_images(plan: Plan, path: Path, device: torch.device) -> ImageData:
    """Images of an .npz with train_images, train_labels, test_images and test_labels. The test images are the report
    split, a tenth of the others the select split.
    """
    arrays = _load(path)
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)).hexdigest()
    images, labels, test_images, test_labels = (torch.from_numpy(x) for x in arrays)
    for x, y in ((images, labels), (test_images, test_labels)):
        _check_images(path, x, y, plan.patch)
    order = torch.randperm(len(images), generator=draw(0, 0))
    tenth = len(images) // 10
    parts = {"select": order[:tenth], "train": order[tenth:]}
    splits = {name: (images[at], labels[at]) for name, at in parts.items()} | {"report": (test_images, test_labels)}
    splits = {n: ((x if x.ndim == 4 else x[..., None]).to(device), y.long().to(device)) for n, (x, y) in splits.items()}
    if len(splits["train"][1]) < plan.batch:
        count = len(splits["train"][1])
        raise LocaterError(f"{path}: {count} images to train on fill no batch of {plan.batch}: give a smaller --batch")
    facts = {
        "images": str(path),
        "sha256": digest,
        "shape": list(splits["train"][0].shape[1:]),
        "classes": int(max(labels.max(), test_labels.max())) + 1,
        "count": {name: len(y) for name, (_, y) in splits.items()},
    }
    return ImageData(plan, splits, facts)


def _load(path: Path) -> list[np.ndarray]:
    """The four arrays of the file, in the order of NAMES."""
    try:
        with np.load(path, allow_pickle=False) as file:
            missing = [name for name in NAMES if name not in file]
            if missing:
                raise LocaterError(f"{path}: holds no {missing[0]}; it should hold {', '.join(NAMES)}")
            return [file[name] for name in NAMES]
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise LocaterError(f"{path}: cannot be read as an .npz of images ({first_line(error)})") from None


def _check_images(path: Path, images: Tensor, labels: Tensor, patch: int) -> None:
    if (
        images.ndim not in (3, 4)
        or images.dtype != torch.uint8
        or len(images) != len(labels)
        or labels.ndim != 1
        or len(images) < 10
    ):
        raise LocaterError(
            f"{path}: images must be (N, height, width) or (N, height, width, channels) of uint8, N >= 10, "
            "and labels (N,)"
        )
    if images.shape[1] % patch or images.shape[2] % patch:
        raise LocaterError(
            f"{path}: images of {images.shape[1]} x {images.shape[2]} do not divide into patches of {patch}: "
            "change --patch"
        )
