"""What a plan learns from: text, images, or sequences that are made as they are needed."""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch
from torch import Tensor

from locater.errors import LocaterError, first_line
from locater_lab.data.synthetic import CopySource, NgramSource, copy_source
from locater_lab.models.noise_and_patches import noisy_images, to_patches
from locater_lab.train.batches import Batch, Data, draw, next_token_pair
from locater_lab.train.plan import Plan
from locater_lab.train.streams import is_stream, open_stream
from locater_lab.train.text_data import read_classes, read_text_data

# Training data that is generated rather than read: numbers to sort, sequences to copy from, n-gram chains.


Source = TypeVar("Source", CopySource, NgramSource)
HELD_OUT = 2048  # sequences in each of the select and report splits


@dataclass
class SortData:
    """Numbers below `vocabulary` in random order, and the same sorted; drawn batch by batch."""

    plan: Plan
    facts: dict[str, Any]
    device: torch.device

    def batch(self, index: int) -> Batch:
        return self._pair(self.plan.batch, draw(self.plan.seed, index))

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        """Sequences of the split, drawn by seeds that no plan can have."""
        count, size = min(HELD_OUT, most or HELD_OUT), self.plan.batch
        for index, begin in enumerate(range(0, count, size)):
            yield self._pair(min(size, count - begin), draw(-1 - ("select", "report").index(name), index))

    def _pair(self, rows: int, rng: torch.Generator) -> Batch:
        numbers = torch.randint(self.plan.vocabulary, (rows, self.plan.length), generator=rng).to(self.device)
        return numbers, numbers.sort(-1).values


@dataclass
class SourceData(Generic[Source]):
    """Sequences of a source that is the same for every seed. Those to train on are drawn batch by batch; the other
    splits are fixed.
    """

    plan: Plan
    source: Source
    splits: dict[str, Tensor]
    facts: dict[str, Any]

    def batch(self, index: int) -> Batch:
        rows = self.source.sample(self.plan.batch, self.plan.length, draw(self.plan.seed, index))
        return next_token_pair(rows.to(self.splits["select"].device, non_blocking=True))

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        for rows in self.splits[name][:most].split(self.plan.batch):
            yield next_token_pair(rows)


def make_numbers(plan: Plan, device: torch.device) -> SortData:
    """Numbers to sort."""
    facts = {"numbers": plan.vocabulary, "vocabulary": plan.vocabulary, "sha256": "made by the seed"}
    return SortData(plan, facts, device)


def make_copies(plan: Plan, device: torch.device) -> SourceData[CopySource]:
    """Sequences for --task copy. The held-out ones are drawn by seeds that no plan can have. `least_loss` is the loss
    of the source itself on them.
    """
    source = copy_source(plan.vocabulary)
    splits = {
        name: source.sample(HELD_OUT, plan.length, draw(-1 - at, 0)) for at, name in enumerate(("select", "report"))
    }
    facts = {
        "text": "locater_lab.data.synthetic.copy_source",
        "vocabulary": plan.vocabulary + 1,
        "triggers": source.triggers.tolist(),
        "entropy": source.entropy(plan.length),
        "least_loss": {name: float(source.surprise(rows).mean()) for name, rows in splits.items()},
        "sha256": hashlib.sha256(splits["report"].numpy().tobytes()).hexdigest(),
    }
    return SourceData(plan, source, {name: rows.to(device) for name, rows in splits.items()}, facts)


def make_ngrams(plan: Plan, device: torch.device) -> SourceData[NgramSource]:
    """Sequences for --task ngram, each with a table of its own. `least_loss` is the loss of the Bayes predictor, which
    knows parents and prior; `counting_loss` that of counting with fewer parents, on the report split.
    """
    source = NgramSource(plan.vocabulary, plan.distances, plan.concentration)
    splits = {
        name: source.sample(HELD_OUT, plan.length, draw(-1 - at, 0)) for at, name in enumerate(("select", "report"))
    }
    facts = {
        "text": "locater_lab.data.synthetic.NgramSource",
        "vocabulary": plan.vocabulary,
        "parents": list(source.parents),
        "concentration": source.concentration,
        "least_loss": {name: float(source.surprise(rows)[:, 1:].mean()) for name, rows in splits.items()},
        "counting_loss": source.rivals(splits["report"]),
        "sha256": hashlib.sha256(splits["report"].numpy().tobytes()).hexdigest(),
    }
    return SourceData(plan, source, {name: rows.to(device) for name, rows in splits.items()}, facts)


# Images and labels as training data, from an .npz file.


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
        rows = _epoch_order(self.plan.seed, epoch, len(images))[at * size : (at + 1) * size].to(images.device)
        return images[rows], labels[rows]

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        images, labels = self.splits[name]
        yield from zip(images[:most].split(self.plan.batch), labels[:most].split(self.plan.batch), strict=True)


@lru_cache(maxsize=2)
def _epoch_order(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=draw(seed, epoch))


def read_images(plan: Plan, path: Path, device: torch.device) -> ImageData:
    """Images of an .npz with train_images, train_labels, test_images and test_labels. The test images are the report
    split, a tenth of the others the select split.
    """
    arrays = _load_arrays(path)
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


def _load_arrays(path: Path) -> list[np.ndarray]:
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


# Images with noise as training data: the model predicts from a noisy image and its noise level what was added.


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


def open_data(plan: Plan, folder: Path, device: torch.device) -> Data:
    """The data of a plan. Nothing is written; a tokenizer that `folder` holds already is used again."""
    if plan.task == "diffusion" and plan.images is not None:
        return read_noisy_images(plan, Path(plan.images), device)
    if plan.images is not None:
        return read_images(plan, Path(plan.images), device)
    if plan.task == "sort":
        return make_numbers(plan, device)
    if plan.task == "copy":
        return make_copies(plan, device)
    if plan.task == "classify":
        return read_classes(plan, folder, device)
    if plan.task == "ngram":
        return make_ngrams(plan, device)
    if is_stream(plan):
        return open_stream(plan, device)
    return read_text_data(plan, folder, device)
