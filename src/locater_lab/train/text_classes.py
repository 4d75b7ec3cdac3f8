"""Text by class as training data: each corpus of the plan is one class, and a sequence has the class of its text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.files import write_whole
from locater.inputs.corpus import fingerprint, read_documents
from locater.inputs.tokenizer import FILE, Tokenizer
from locater_lab.train.batches import Batch, draw
from locater_lab.train.plan import Plan
from locater_lab.train.text_data import Text, encoded, tokenizer_of_plan


@dataclass
class ClassData:
    """Token streams by split and class. Every class is drawn equally often."""

    plan: Plan
    tokenizer: Tokenizer
    splits: dict[str, list[Tensor]]
    facts: dict[str, Any]
    device: torch.device

    def keep_tokenizer(self, folder: Path) -> None:
        """Save it in the run's folder, for checkpoints and for a run that resumes."""
        write_whole(folder / FILE, self.tokenizer.to_json())

    def batch(self, index: int) -> Batch:
        """Sequences that start anywhere in the training text of classes drawn at random."""
        streams, length, rng = self.splits["train"], self.plan.length, draw(self.plan.seed, index)
        labels = torch.randint(len(streams), (self.plan.batch,), generator=rng)
        starts = [int(torch.randint(len(streams[label]) - length + 1, (), generator=rng)) for label in labels.tolist()]
        rows = [streams[label][at : at + length] for label, at in zip(labels.tolist(), starts, strict=True)]
        return torch.stack(rows).long(), labels.to(self.device)

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        """Windows that do not overlap, as many of each class, the classes in turn."""
        streams, length = self.splits[name], self.plan.length
        each = min(len(tokens) // length for tokens in streams)
        rows = torch.stack([tokens[: each * length].unflatten(0, (each, length)) for tokens in streams], 1).flatten(
            0, 1
        )
        labels = torch.arange(len(streams), device=self.device).repeat(each)
        yield from zip(rows[:most].long().split(self.plan.batch), labels[:most].split(self.plan.batch), strict=True)


def read_classes(plan: Plan, folder: Path, device: torch.device) -> ClassData:
    """Each corpus of the plan as one class. Documents are split as for language models; nothing is written."""
    texts = tuple(Text(read_documents([path])) for path in plan.corpus)
    _check_distinct(plan, texts)
    tokenizer = tokenizer_of_plan(plan, folder, texts)
    tokens_of = encoded(tokenizer, texts)
    splits = {name: [tokens[name].to(device) for tokens in tokens_of] for name in ("train", "select", "report")}
    for name, streams in splits.items():
        for path, tokens in zip(plan.corpus, streams, strict=True):
            if len(tokens) < plan.length:
                raise LocaterError(
                    f"{path}: its {name} split has {len(tokens)} tokens, too few for a sequence of {plan.length}: "
                    "give more text, or a smaller --length"
                )
    facts = {
        "text": list(plan.corpus),
        "classes": len(texts),
        "sha256": fingerprint(" ".join(text.sha256 for text in texts)),
        "documents": [text.count for text in texts],
        "tokens": {name: [len(x) for x in streams] for name, streams in splits.items()},
        "vocabulary": tokenizer.size,
    }
    return ClassData(plan, tokenizer, splits, facts, device)


def _check_distinct(plan: Plan, texts: tuple[Text, ...]) -> None:
    seen: dict[str, str] = {}
    for path, text in zip(plan.corpus, texts, strict=True):
        if text.sha256 in seen:
            raise LocaterError(f"{path}: the same text as {seen[text.sha256]}, and each corpus is a class")
        seen[text.sha256] = path
