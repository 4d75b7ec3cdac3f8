"""Text as training data: tokens of three splits, for causal and masked models, and for classifiers."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.files import write_whole
from locater.inputs.corpus import JOINT, embedded_documents, fingerprint, read_documents
from locater.inputs.tokenizer import (
    BYTES,
    FILE,
    PairTokenizer,
    StartTokenizer,
    Tokenizer,
    make_tokenizer,
    tokenizer_of_run,
)
from locater_lab.data.word_tokenizer import WordTokenizer, load_or_make
from locater_lab.train.batches import IGNORED, Batch, draw, next_token_pair
from locater_lab.train.plan import Plan

SHARE = 0.05  # of the text that goes to select, and to report
FEW = 40  # fewer documents than this are cut into pieces


def split(documents: Sequence[str], share: float = SHARE) -> dict[str, list[str]]:
    """Documents by split: shuffled with a fixed seed, then `share` of the characters to report, the same to select, the
    rest to train.

    >>> {name: len(part) for name, part in split([f"document {n:4}" for n in range(100)]).items()}
    {'report': 5, 'select': 5, 'train': 90}
    """
    pieces = list(documents)
    if len(documents) < FEW:
        pieces = [piece for text in documents for piece in _split_document(text, documents)]
    random.Random(0).shuffle(pieces)
    target, splits, at = share * sum(map(len, pieces)), {}, 0
    for name in ("report", "select"):
        begin, size = at, 0
        while size < target and at < len(pieces):
            size += len(pieces[at])
            at += 1
        splits[name] = pieces[begin:at]
    return {**splits, "train": pieces[at:]}


def _split_document(text: str, documents: Sequence[str]) -> Iterator[str]:
    """Pieces of a document, cut at blank lines, or at line ends where there are few blank lines.

    All documents together give about 2 FEW pieces.
    """
    size = max(1, sum(map(len, documents)) // (2 * FEW))
    joint = JOINT if text.count(JOINT) >= FEW else "\n"
    parts: list[str] = []
    length = 0
    for part in text.split(joint):
        parts.append(part)
        length += len(part)
        if length >= size:
            yield joint.join(parts)
            parts, length = [], 0
    if any(parts):
        yield joint.join(parts)


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
        """The token that masks another."""
        return self.tokenizer.size

    @property
    def start(self) -> int | None:
        """The token in front of every sequence."""
        return self.tokenizer.start if isinstance(self.tokenizer, StartTokenizer) else None

    def save_tokenizer(self, folder: Path) -> None:
        """Save it in the run's folder, for checkpoints and for a run that resumes."""
        write_whole(folder / FILE, self.tokenizer.to_json())

    def batch(self, index: int) -> Batch:
        """Sequences that start anywhere in the training text."""
        tokens, rng = self.splits["train"], draw(self.plan.seed, index)
        starts = torch.randint(len(tokens) - self._row + 1, (self.plan.batch, 1), generator=rng)
        return self._pair(tokens, starts, rng)

    def windows(self, name: str, most: int | None = None) -> Iterator[Batch]:
        """A split from its beginning, window by window, so that each token is a target once. An incomplete last window
        is left out.
        """
        tokens, stride = self.splits[name], self.plan.length
        if self.plan.task == "masked" and self.start is not None:
            stride -= 1  # the start token is one of the inputs, and no target
        count = (len(tokens) - self._row) // stride + 1
        starts = torch.arange(count if most is None else min(count, most))[:, None] * stride
        for index, part in enumerate(starts.split(self.plan.batch)):
            yield self._pair(tokens, part, draw(0, index))  # the same tokens are masked for every seed

    @property
    def _row(self) -> int:
        """Tokens of text in a row: inputs and one more target, less the start token."""
        return self.plan.length + (self.start is None)

    def _pair(self, tokens: Tensor, starts: Tensor, rng: torch.Generator) -> Batch:
        """Inputs and targets of rows that begin at these places of the text, the start token in front."""
        if self.device.type == "cuda":
            starts = starts.pin_memory()  # memory that is not pinned is copied after the work that is queued before it
        places = starts.to(self.device, non_blocking=True) + torch.arange(self._row, device=self.device)
        rows, first = tokens[places].long(), 0
        if self.start is not None:
            rows, first = nn.functional.pad(rows, (1, 0), value=self.start), 1
        if self.plan.task == "causal":
            return next_token_pair(rows)
        rows = rows[:, :-1]
        masked = (torch.rand(rows.shape, generator=rng) < self.plan.masked).to(rows.device)
        masked[:, :first] = False
        masked[:, first] |= ~masked.any(1)  # at least one, or there would be no loss
        return rows.masked_fill(masked, self.mask), rows.masked_fill(~masked, IGNORED)


def read_text_data(plan: Plan, folder: Path, device: torch.device) -> TextData:
    """The plan's text as tokens, by split. A tokenizer that `folder` has already is used again; nothing is written."""
    text = _text_of_plan(plan)
    tokenizer = tokenizer_of_plan(plan, folder, (text,))
    (tokens_of,) = encode_texts(tokenizer, (text,))
    splits = {name: tokens.to(device) for name, tokens in tokens_of.items()}
    for name, tokens in splits.items():
        if len(tokens) <= plan.length:
            source = {"select": plan.select, "report": plan.report}.get(name) or plan.corpus or ("the text",)
            raise LocaterError(
                f"{', '.join(source)}: its {name} split has {len(tokens)} tokens, too few for sequences of "
                f"{plan.length}: give more text, or a smaller --length"
            )
    facts: dict[str, Any] = {
        "text": list(plan.corpus) or "locater.inputs.corpus.embedded_text",
        "sha256": text.sha256,
        "documents": text.count,
        "characters": {name: len(x) for name, x in text.joined.items()},
        "bytes": {name: len(x.encode()) for name, x in text.joined.items()},
        "tokens": {name: len(x) for name, x in splits.items()},
        "vocabulary": tokenizer.size + plan.bos,
    }
    if plan.select:
        facts["held_out"] = {"select": list(plan.select), "report": list(plan.report)}
    if isinstance(tokenizer, WordTokenizer):
        facts["unknown"] = {name: tokenizer.unknown(x) for name, x in text.joined.items()}
    return TextData(plan, StartTokenizer(tokenizer) if plan.bos else tokenizer, splits, facts, device)


def _text_of_plan(plan: Plan) -> Text:
    """The text of a plan; that of the run before, in this process, where its files have not changed since."""
    files = [Path(name) for part in (plan.corpus, plan.select, plan.report) for name in part]
    if not all(path.is_file() for path in files):  # a folder, or the embedded text
        return _read_text(plan)
    key = (
        plan.corpus,
        plan.select,
        plan.report,
        *((x.st_mtime_ns, x.st_size) for x in (path.stat() for path in files)),
    )
    if key not in _last_text:
        text = _read_text(plan)
        _last_text.clear()
        _last_text[key] = text
    return _last_text[key]


_last_text: dict[Any, Text] = {}  # at most one


def _read_text(plan: Plan) -> Text:
    documents = read_documents(plan.corpus) if plan.corpus else _embedded_documents()
    return Text(documents, _held_out(plan, documents) if plan.select else None)


def _held_out(plan: Plan, documents: Sequence[str]) -> dict[str, list[str]]:
    """Documents of the plan's own texts for select and report. Refused where one of them is in another split too."""
    texts = {"select": read_documents(plan.select), "report": read_documents(plan.report)}
    seen = dict.fromkeys(documents, "--corpus")
    for name, part in texts.items():
        option = "--report-text" if name == "report" else f"--{name}"
        double = next((seen[document] for document in part if document in seen), None)
        if double is not None:
            raise LocaterError(
                f"{option} {', '.join(getattr(plan, name))}: a document in it is in {double} too: "
                "give each split a text of its own"
            )
        seen |= dict.fromkeys(part, option)
    return texts


class Text:
    """Documents by split. Equal where the text is the same, so that the runs of a sweep train one tokenizer and encode
    once. `held_out` has the documents of select and report; without it they get shares of `documents`.
    """

    def __init__(self, documents: Sequence[str], held_out: Mapping[str, Sequence[str]] | None = None) -> None:
        self.parts = split(documents) if held_out is None else {"train": documents, **held_out}
        self.joined = {name: JOINT.join(self.parts[name]) for name in ("train", "select", "report")}
        if held_out is None:
            self.count, self.sha256 = len(documents), fingerprint(JOINT.join(documents))
        else:
            self.count = sum(map(len, self.parts.values()))
            self.sha256 = fingerprint(" ".join(fingerprint(joined) for joined in self.joined.values()))

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Text) and self.sha256 == other.sha256

    def __hash__(self) -> int:
        return hash(self.sha256)


def tokenizer_of_plan(plan: Plan, folder: Path, texts: tuple[Text, ...]) -> Tokenizer:
    """The tokenizer of a plan: that of the run in `folder`, if there is one, or a new one. Words are counted again in
    every part of a run: the same text, which is checked, has the same.
    """
    if plan.words:
        return _word_tokenizer(plan.vocabulary, texts)
    return tokenizer_of_run(folder, plan.vocabulary, partial(_pair_tokenizer, plan.vocabulary, texts))


@lru_cache(maxsize=1)
def _word_tokenizer(most: int, texts: tuple[Text, ...]) -> Tokenizer:
    """Cached, as are the byte pairs and the tokens below, for the next run of a sweep."""
    return WordTokenizer.from_texts((document for text in texts for document in text.parts["train"]), most)


@lru_cache(maxsize=1)
def _pair_tokenizer(vocabulary: int, texts: tuple[Text, ...]) -> Tokenizer:
    documents = [document for text in texts for document in text.parts["train"]]
    if vocabulary == BYTES:
        return make_tokenizer(vocabulary, documents)
    key = f"tokenizer {vocabulary} {_text_hashes(texts)}"
    return PairTokenizer.from_json(load_or_make(key, lambda: make_tokenizer(vocabulary, documents).to_json()))


@lru_cache(maxsize=1)
def encode_texts(tokenizer: Tokenizer, texts: tuple[Text, ...]) -> list[dict[str, Tensor]]:
    """Tokens of each text, by split."""
    tokens: list[dict[str, Tensor]] = load_or_make(
        f"tokens {tokenizer.to_json()} {_text_hashes(texts)}",
        lambda: [{name: tokenizer.encode(joined) for name, joined in text.joined.items()} for text in texts],
    )
    return tokens


def _text_hashes(texts: tuple[Text, ...]) -> str:
    return " ".join(text.sha256 for text in texts)


@lru_cache(maxsize=1)
def _embedded_documents() -> list[str]:
    """Cached for the next run of a sweep, since it takes a few seconds."""
    return embedded_documents()


# ---- Text by class: each corpus of the plan is one class, and a sequence has the class of its text ----


@dataclass
class ClassData:
    """Token streams by split and class. Every class is drawn equally often."""

    plan: Plan
    tokenizer: Tokenizer
    splits: dict[str, list[Tensor]]
    facts: dict[str, Any]
    device: torch.device

    def save_tokenizer(self, folder: Path) -> None:
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
    tokens_of = encode_texts(tokenizer, texts)
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
