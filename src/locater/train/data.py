"""Batches. The batch of a step is decided by the seed and the step's number alone, so the step is the whole position in
the data.
"""

from __future__ import annotations

import hashlib
import zipfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from locater.data.copying import CopySource, copy_source
from locater.data.corpus import JOINT, embedded_documents, fingerprint, read_documents, split
from locater.data.tokenizer import FILE, Tokenizer, make_tokenizer, tokenizer_of_run
from locater.errors import LocaterError, first_line
from locater.files import write_whole
from locater.train.plan import Plan

Batch = tuple[Tensor, Tensor]  # inputs and targets; -100 marks a target that does not count
IGNORED = -100
HELD_OUT = 2048  # sequences of a split that is made rather than read
NAMES = ("train_images", "train_labels", "test_images", "test_labels")


class Data(Protocol):
    """What the loop asks of data. `facts` goes into the result."""

    facts: dict[str, Any]

    def batch(self, index: int) -> Batch: ...

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]: ...


def draw(seed: int, index: int) -> torch.Generator:
    """Random numbers of one batch."""
    return torch.Generator().manual_seed(seed * 1_000_003 + index)


@dataclass
class TextData:
    """Token streams of the three splits."""

    plan: Plan
    tokenizer: Tokenizer
    splits: dict[str, Tensor]
    facts: dict[str, Any]
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @property
    def mask(self) -> int:
        """The token that hides another."""
        return self.tokenizer.size

    def keep_tokenizer(self, folder: Path) -> None:
        """For models that are saved there, and for a run that goes on."""
        write_whole(folder / FILE, self.tokenizer.to_json())

    def batch(self, index: int) -> Batch:
        """Sequences from anywhere in the training text."""
        tokens, length, rng = self.splits["train"], self.plan.length, draw(self.plan.seed, index)
        starts = torch.randint(len(tokens) - length, (self.plan.batch, 1), generator=rng)
        at = (starts + torch.arange(length + 1)).to(self.device, non_blocking=True)
        return self._pair(tokens[at].long(), rng)

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        """A split from its beginning, window by window; each token is a target once. Of the last window only a whole
        one counts.
        """
        tokens, length = self.splits[name], self.plan.length
        count = (len(tokens) - 1) // length
        starts = torch.arange(count if most is None else min(count, most))[:, None] * length
        for index, part in enumerate(starts.split(self.plan.batch)):
            at = (part + torch.arange(length + 1)).to(self.device)
            yield self._pair(tokens[at].long(), draw(0, index))  # one choice of hidden tokens, whatever the seed

    def _pair(self, rows: Tensor, rng: torch.Generator) -> Batch:
        if self.plan.task == "causal":
            return _shifted(rows)
        rows = rows[:, :-1]
        hidden = (torch.rand(rows.shape, generator=rng) < self.plan.masked).to(rows.device)
        hidden[:, 0] |= ~hidden.any(1)  # at least one, or there would be no loss
        return rows.masked_fill(hidden, self.mask), rows.masked_fill(~hidden, IGNORED)


@dataclass
class ImageData:
    """Images (N, height, width, channels) and labels (N,) of the three splits."""

    plan: Plan
    splits: dict[str, Batch]
    facts: dict[str, Any]

    def batch(self, index: int) -> Batch:
        """The next images; each epoch has an order of its own, and its last images wait for another where they fill no
        batch.
        """
        images, labels = self.splits["train"]
        size = self.plan.batch
        epoch, at = divmod(index, len(images) // size)
        rows = _order(self.plan.seed, epoch, len(images))[at * size : (at + 1) * size].to(images.device)
        return images[rows], labels[rows]

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        images, labels = self.splits[name]
        yield from zip(images[:most].split(self.plan.batch), labels[:most].split(self.plan.batch), strict=True)


@dataclass
class SortData:
    """Numbers below `vocabulary` in random order, and the same in order; made as they are asked for."""

    plan: Plan
    facts: dict[str, Any]
    device: torch.device

    def batch(self, index: int) -> Batch:
        return self._pair(self.plan.batch, draw(self.plan.seed, index))

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        """Sequences that belong to the split; no seed of a plan draws them."""
        left, size = min(HELD_OUT, most or HELD_OUT), self.plan.batch
        for index, begin in enumerate(range(0, left, size)):
            yield self._pair(min(size, left - begin), draw(-1 - ("select", "report").index(name), index))

    def _pair(self, rows: int, rng: torch.Generator) -> Batch:
        numbers = torch.randint(self.plan.vocabulary, (rows, self.plan.length), generator=rng).to(self.device)
        return numbers, numbers.sort(-1).values


@dataclass
class CopyData:
    """Sequences of a source that is the same for every seed: training ones made as they are asked for, the others
    kept.
    """

    plan: Plan
    source: CopySource
    splits: dict[str, Tensor]
    facts: dict[str, Any]

    def batch(self, index: int) -> Batch:
        rows = self.source.sample(self.plan.batch, self.plan.length, draw(self.plan.seed, index))
        return _shifted(rows.to(self.splits["select"].device, non_blocking=True))

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        for rows in self.splits[name][:most].split(self.plan.batch):
            yield _shifted(rows)


def _shifted(rows: Tensor) -> Batch:
    return rows[:, :-1], rows[:, 1:]


@lru_cache(maxsize=2)
def _order(seed: int, epoch: int, count: int) -> Tensor:
    return torch.randperm(count, generator=draw(seed, epoch))


def open_data(plan: Plan, folder: Path, device: torch.device) -> Data:
    """What a plan learns from. Nothing is written; the tokenizer is that in `folder`, where there is one."""
    if plan.images is not None:
        return read_images(plan, Path(plan.images), device)
    if plan.task == "sort":
        return SortData(
            plan, {"numbers": plan.vocabulary, "vocabulary": plan.vocabulary, "sha256": "made by the seed"}, device
        )
    if plan.task == "copy":
        return make_copies(plan, device)
    text = Text(read_documents(plan.corpus) if plan.corpus else _embedded())
    tokenizer = tokenizer_of_run(folder, plan.vocabulary, partial(_learned, plan.vocabulary, text))
    splits = {name: tokens.to(device) for name, tokens in _encoded(tokenizer, text).items()}
    for name, tokens in splits.items():
        if len(tokens) <= plan.length:
            raise LocaterError(
                f"{', '.join(plan.corpus)}: its {name} split has {len(tokens)} tokens, too few for sequences of {plan.length}: "
                "give more text, or a smaller --length"
            )
    facts = {
        "text": list(plan.corpus) or "locater.data.corpus.embedded_text",
        "sha256": text.sha256, "documents": text.count,
        "characters": {name: len(x) for name, x in text.joined.items()}, "bytes": {n: len(x.encode()) for n, x in text.joined.items()},
        "tokens": {name: len(x) for name, x in splits.items()}, "vocabulary": tokenizer.size,
    }  # fmt: skip
    return TextData(plan, tokenizer, splits, facts, device)


def make_copies(plan: Plan, device: torch.device) -> CopyData:
    """Held-out sequences are drawn by seeds that no plan has. `least_loss` is what the source itself would lose on
    them.
    """
    source = copy_source(plan.vocabulary)
    splits = {
        name: source.sample(HELD_OUT, plan.length, draw(-1 - at, 0)) for at, name in enumerate(("select", "report"))
    }
    facts = {
        "text": "locater.data.copying.copy_source", "vocabulary": plan.vocabulary + 1, "triggers": source.triggers.tolist(),
        "entropy": source.entropy(plan.length), "least_loss": {name: float(source.surprise(rows).mean()) for name, rows in splits.items()},
        "sha256": hashlib.sha256(splits["report"].numpy().tobytes()).hexdigest(),
    }  # fmt: skip
    return CopyData(plan, source, {name: rows.to(device) for name, rows in splits.items()}, facts)


class Text:
    """Documents by split; two of the same text are equal, so that the runs of a sweep learn its tokens and encode it
    once.
    """

    def __init__(self, documents: Sequence[str]) -> None:
        self.sha256, self.count, self.parts = fingerprint(JOINT.join(documents)), len(documents), split(documents)
        self.joined = {name: JOINT.join(self.parts[name]) for name in ("train", "select", "report")}

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


@lru_cache(maxsize=1)
def _learned(vocabulary: int, text: Text) -> Tokenizer:
    return make_tokenizer(vocabulary, text.parts["train"])


@lru_cache(maxsize=1)
def _encoded(tokenizer: Tokenizer, text: Text) -> dict[str, Tensor]:
    return {name: tokenizer.encode(joined) for name, joined in text.joined.items()}


@lru_cache(maxsize=1)
def _embedded() -> list[str]:
    """Kept for the next run of a sweep: it takes a few seconds."""
    return embedded_documents()


def read_images(plan: Plan, path: Path, device: torch.device) -> ImageData:
    """An .npz with train_images, train_labels, test_images and test_labels: the test split is reported, a tenth of the
    rest selects.
    """
    try:
        with np.load(path, allow_pickle=False) as held:
            missing = [name for name in NAMES if name not in held]
            if missing:
                raise LocaterError(f"{path}: holds no {missing[0]}; it should hold {', '.join(NAMES)}")
            arrays = [held[name] for name in NAMES]
    except (OSError, ValueError, TypeError, zipfile.BadZipFile) as error:
        raise LocaterError(f"{path}: cannot be read as an .npz of images ({first_line(error)})") from None
    digest = hashlib.sha256(b"".join(np.ascontiguousarray(x).tobytes() for x in arrays)).hexdigest()
    images, labels, test_images, test_labels = (torch.from_numpy(x) for x in arrays)
    for x, y in ((images, labels), (test_images, test_labels)):
        _check_images(path, x, y, plan.patch)
    order = torch.randperm(len(images), generator=draw(0, 0))
    held_out = len(images) // 10
    parts = {"select": order[:held_out], "train": order[held_out:]}
    splits = {name: (images[at], labels[at]) for name, at in parts.items()} | {"report": (test_images, test_labels)}
    ready = {n: ((x if x.ndim == 4 else x[..., None]).to(device), y.long().to(device)) for n, (x, y) in splits.items()}
    if len(ready["train"][1]) < plan.batch:
        raise LocaterError(
            f"{path}: {len(ready['train'][1])} images to train on fill no batch of {plan.batch}: give a smaller --batch"
        )
    shape, classes = list(ready["train"][0].shape[1:]), int(max(labels.max(), test_labels.max())) + 1
    facts = {
        "images": str(path),
        "sha256": digest,
        "shape": shape,
        "classes": classes,
        "count": {n: len(y) for n, (_, y) in ready.items()},
    }
    return ImageData(plan, ready, facts)


def _check_images(path: Path, images: Tensor, labels: Tensor, patch: int) -> None:
    if (
        images.ndim not in (3, 4)
        or images.dtype != torch.uint8
        or len(images) != len(labels)
        or labels.ndim != 1
        or len(images) < 10
    ):
        raise LocaterError(
            f"{path}: images must be (N, height, width) or (N, height, width, channels) of uint8, N >= 10, and labels (N,)"
        )
    if images.shape[1] % patch or images.shape[2] % patch:
        raise LocaterError(
            f"{path}: images of {images.shape[1]} x {images.shape[2]} do not divide into patches of {patch}: change --patch"
        )
