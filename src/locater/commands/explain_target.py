"""The number of an output that is explained, as a user gives it: a token or a class by text or id, and a position."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.explain.explanation import Target, TargetChoice, choose_target, vectors
from locater.results.explanations import Prediction

SPACES = ("Ġ", "▁")  # how vocabularies write the space in front of a token
MOST_PREDICTIONS = 8


@dataclass(frozen=True)
class Entries:
    """Names of the entries of an output: tokens of a vocabulary, classes, or numbers."""

    tokenizer: Any = None
    labels: dict[int, str] | None = None

    def name(self, index: int) -> str:
        if self.labels is not None:
            return self.labels.get(index, f"class {index}")
        if self.tokenizer is None:
            return f"entry {index}"
        text = self.tokenizer.decode([index])
        token = str(self.tokenizer.convert_ids_to_tokens([index])[0])
        if token.startswith(SPACES) and not text.startswith(" "):
            text = " " + text  # decoding alone drops the space of the first token
        readable = text.strip() and "\ufffd" not in text and all(c.isprintable() or c.isspace() for c in text)
        return text if readable else token

    def index(self, target: str) -> int:
        """The entry that a text names; a number is an index."""
        if not target:
            raise LocaterError("the target is empty: give a token, the name of a class, or a number")
        if any("\ud800" <= c <= "\udfff" for c in target):
            raise LocaterError(f"target {target!r}: not UTF-8 text")
        if target.isascii() and target.isdigit():
            return int(target)
        if self.labels is not None:
            return self._class(target)
        if self.tokenizer is None:
            raise LocaterError(f"target {target!r}: no tokenizer is available: give the number of the entry")
        return self._token(target)

    def _class(self, target: str) -> int:
        assert self.labels is not None
        for index, name in self.labels.items():
            if name.casefold() == target.casefold():
                return index
        some = ", ".join([*list(self.labels.values())[:5], *(["..."] if len(self.labels) > 5 else [])])
        raise LocaterError(f"target {target!r} is not a class of the model: give a number, or one of {some}")

    def _token(self, target: str) -> int:
        vocabulary: dict[str, int] = self.tokenizer.get_vocab()
        stripped = target.removeprefix(" ")
        spaced = [sign + stripped for sign in SPACES]
        plain = [stripped]
        for name in [*spaced, *plain] if target.startswith(" ") else [*plain, *spaced]:
            if name in vocabulary:
                return vocabulary[name]
        pieces = [int(i) for i in self.tokenizer(target, add_special_tokens=False)["input_ids"]]
        unknown = (self.tokenizer.unk_token_id, vocabulary.get("<unk>"))  # a tokenizer may have it and not declare it
        if len(pieces) == 1 and pieces[0] not in unknown:
            return pieces[0]
        names = ", ".join(repr(self.name(i)) for i in pieces) or "no token"
        raise LocaterError(
            f"target {target!r} is not one token of the vocabulary: it splits into {names}; give one of them, or an id"
        )


def entries_of(model: Any, tokenizer: Any, output: Tensor, caption: str | None = None) -> Entries:
    """Names of the entries of a model's output (1, T, C) or (1, C). `caption` is the text that a model scores for a
    picture: its only entry. An output without tokens has classes, even if they have no names.
    """
    count = output.shape[-1]
    if count == 1 and caption is not None:
        return Entries(labels={0: caption})
    config = getattr(model, "config", None)
    labels = getattr(config, "id2label", None) or {}
    words = getattr(config, "vocab_size", None)
    if labels and len(labels) == count and (tokenizer is None or words != count):
        return Entries(labels={int(index): str(name) for index, name in labels.items()})
    if output.ndim == 2:
        return Entries(labels={index: f"class {index}" for index in range(count)})
    return Entries(tokenizer=tokenizer)


def find_target(
    output: Any, entries: Entries, target: str | int | None, position: int | None, ids: list[int] | None
) -> Target:
    """The target that a user gave; by default the most likely entry, at the mask or at the last token."""
    values, logits = vectors(output)
    if not logits:
        if target is not None or position is not None:
            raise LocaterError(
                "the model returns no logits, so there is no token to explain: leave out --target and --position, and "
                "its output is explained along itself"
            )
        return choose_target(output)
    index = entries.index(target) if isinstance(target, str) else target
    if values.ndim == 2:
        if position is not None:
            raise LocaterError(f"position {position}: the model has one output for the whole input; leave it out")
        return choose_target(output, index)
    tokens = values.shape[1]
    if position is None:
        position = _mask_position(entries.tokenizer, ids)
    if not isinstance(position, int) or isinstance(position, bool):
        raise LocaterError(f"position {position!r}: give a whole number, an output token from 0")
    if not -tokens <= position < tokens:
        raise LocaterError(f"position {position}: the output has tokens 0 to {tokens - 1}")
    if index is None:
        index = int(values[0, position].argmax())
    try:
        return choose_target(output, (position, index))
    except LocaterError as error:  # names the pair, and the user gave the entry alone
        raise LocaterError(str(error).replace(f"target={(position, index)!r}", f"target {target!r}")) from None


def choice_of(target: Target) -> TargetChoice:
    """The target as methods take it."""
    if target.index is None or target.position is None:
        return target.index
    return target.position, target.index


def _mask_position(tokenizer: Any, ids: list[int] | None) -> int:
    """The first [MASK] of the prompt, else the last token."""
    mask = getattr(tokenizer, "mask_token_id", None)
    return ids.index(mask) if ids is not None and mask is not None and mask in ids else -1


def predictions(output: Any, target: Target, entries: Entries) -> list[Prediction]:
    """The most likely entries of the output at the target, and the target itself; none if there is a single entry."""
    values: Tensor = vectors(output)[0][0].detach().double()
    if target.index is None or values.shape[-1] == 1:
        return []
    row = values if target.position is None else values[target.position]
    shares = torch.softmax(row, -1)
    best = shares.topk(min(MOST_PREDICTIONS, len(shares))).indices.tolist()
    if target.index not in best:
        best.append(target.index)
    return [Prediction(i, entries.name(i), float(row[i]), float(shares[i])) for i in best]
