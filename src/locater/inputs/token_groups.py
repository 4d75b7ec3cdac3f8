"""Which group each token of a batch belongs to: system, prompt, answer, image, text, special.

Image tokens and special ones are known by their ids. What a chat says is found between the separators of its template:
the template is rendered once with marks in place of what is said, and the separators around the marks are looked for in
the text of the tokens, without white space, which tokenizers move about. Tokens of the template itself are special.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError, first_line
from locater.inputs.tokenizer import tokenizer_for

GROUPS = ("special", "image", "system", "prompt", "answer", "text")
SPECIAL, IMAGE, TEXT = GROUPS.index("special"), GROUPS.index("image"), GROUPS.index("text")
OF_ROLE = {"system": "system", "user": "prompt", "assistant": "answer"}
CHATS: tuple[tuple[str, ...], ...] = (
    ("system", "user", "assistant", "user", "assistant"),
    ("system", "user"),
    ("user", "assistant", "user", "assistant"),
    ("user",),
)
IMAGE_IDS = ("image_token_id", "image_token_index", "video_token_id", "video_token_index")
MARKERS = (
    "vision_start_token_id",
    "vision_end_token_id",
    *("boi_token_id", "eoi_token_id", "boi_token_index", "eoi_token_index"),
)
ROLES = ("bos", "eos", "pad", "sep", "cls", "mask")


@dataclass(frozen=True)
class TokenGroups:
    """How tokens are told apart; `labels` gives the group of each token of a batch."""

    special: frozenset[int]
    image: frozenset[int]
    separators: Separators | None = None  # of a chat template; None: what is said is `text`
    tokenizer: Any = None

    __repr__ = brief

    def labels(self, ids: Int[Tensor, "B T"]) -> Int[Tensor, "B T"]:
        """The group of each token, a number in GROUPS."""
        labels = torch.full_like(ids, TEXT)
        if self.separators is not None:
            rows = [self._said(row) for row in ids.tolist()]
            labels = torch.tensor(rows, dtype=ids.dtype, device=ids.device)
        for group, members in ((SPECIAL, self.special), (IMAGE, self.image)):
            if members:
                labels = labels.masked_fill(torch.isin(ids, torch.tensor(sorted(members), device=ids.device)), group)
        return labels

    def _said(self, ids: Sequence[int]) -> list[int]:
        """The groups of one sequence by the separators of its template."""
        pieces = ["".join(self.tokenizer.decode([token]).split()) for token in ids]
        assert self.separators is not None
        spans = self.separators.spans("".join(pieces))
        labels: list[int] = []
        at = 0
        for piece in pieces:
            begin, at = at, at + len(piece)
            middle = begin + len(piece) / 2
            own = next((group for start, end, group in spans if start <= middle < end), None)
            if not piece and labels:  # white space goes with what is before it
                own = GROUPS[labels[-1]]
            labels.append(TEXT if not spans else SPECIAL if own is None else GROUPS.index(own))
        return labels


@dataclass(frozen=True)
class Separators:
    """What a template writes between what is said, without white space."""

    begin: Mapping[str, str]  # in front of the first message, by its group
    between: Mapping[tuple[str, str], str]  # after one group and in front of the next
    end: Mapping[str, str]  # after the last message, by its group

    def spans(self, text: str) -> list[tuple[int, int, str]]:
        """(start, end, group) of what is said in `text`; none where it does not begin as the template does."""
        openings = [
            (at, len(mark), group) for group, mark in self.begin.items() if mark and (at := text.find(mark)) >= 0
        ]
        if not openings:
            return []
        at, size, group = min(openings, key=lambda opening: (opening[0], -opening[1]))
        start, found = at + size, []
        while True:
            marks = [(after, mark) for (before, after), mark in self.between.items() if before == group]
            marks.append(("", self.end.get(group, "")))
            ends = [(end, len(mark), after) for after, mark in marks if mark and (end := text.find(mark, start)) >= 0]
            end, size, after = min(ends, key=lambda ending: (ending[0], -ending[1]), default=(len(text), 0, ""))
            found.append((start, end, group))
            if not after:
                return found
            start, group = end + size, after


def token_groups(model: Any, tokenizer: Any = None) -> TokenGroups:
    """How the tokens of a model's batches are told apart. With a tokenizer (or the path of one; by default that of the
    model, where it has one) special tokens and the parts of a chat are known; without, what the configuration names.

    >>> from types import SimpleNamespace
    >>> model = SimpleNamespace(config=SimpleNamespace(image_token_id=7, bos_token_id=1))
    >>> groups = token_groups(model, tokenizer=False).labels(torch.tensor([[1, 7, 7, 4]]))
    >>> [GROUPS[group] for group in groups[0]]
    ['special', 'image', 'image', 'text']
    """
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    image = _ids_named(config, IMAGE_IDS)
    special = _ids_named(config, MARKERS) | _ids_named(text, tuple(f"{role}_token_id" for role in ROLES))
    if tokenizer is False:
        return TokenGroups(special - image, image)
    try:
        loaded = tokenizer_for(model, tokenizer)
    except LocaterError:
        if tokenizer is not None:
            raise
        return TokenGroups(special - image, image)
    loaded = getattr(loaded, "tokenizer", loaded)  # of a processor
    special |= frozenset(int(token) for token in loaded.all_special_ids)
    return TokenGroups(special - image, image, template_separators(loaded), loaded)


def chat_batch(model: Any, messages: Sequence[Mapping[str, str]], tokenizer: Any = None) -> dict[str, Tensor]:
    """A batch of one chat, as the template of the tokenizer writes it."""
    loaded = tokenizer_for(model, tokenizer)
    try:
        text = loaded.apply_chat_template([dict(message) for message in messages], tokenize=False)
    except Exception as error:  # of a template, which may raise anything
        raise LocaterError(f"the chat template of the tokenizer refused these messages: {first_line(error)}") from None
    ids = torch.tensor([loaded(text, add_special_tokens=False)["input_ids"]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def template_separators(tokenizer: Any) -> Separators | None:
    """What the chat template of a tokenizer writes around what is said; None without a template that can be read."""
    if not getattr(tokenizer, "chat_template", None):
        return None
    begin: dict[str, str] = {}
    between: dict[tuple[str, str], str] = {}
    end: dict[str, str] = {}
    for roles in CHATS:
        marks = [f"qz{number}zq" for number in range(len(roles))]
        messages = [{"role": role, "content": mark} for role, mark in zip(roles, marks, strict=True)]
        try:
            text = "".join(str(tokenizer.apply_chat_template(messages, tokenize=False)).split())
        except Exception:  # some templates know no system message, and raise what they like
            continue
        places = [text.find(mark) for mark in marks]
        if -1 in places or places != sorted(places):
            continue
        groups = [OF_ROLE[role] for role in roles]
        end.setdefault(groups[-1], text[places[-1] + len(marks[-1]) :])
        begin.setdefault(groups[0], text[: places[0]])
        for at, (before, after) in enumerate(pairwise(groups)):
            between.setdefault((before, after), text[places[at] + len(marks[at]) : places[at + 1]])
    return Separators(begin, between, end) if begin and any(begin.values()) else None


def _ids_named(config: Any, names: Sequence[str]) -> frozenset[int]:
    found = (getattr(config, name, None) for name in names)
    return frozenset(i for ids in found if ids is not None for i in (ids if isinstance(ids, list | tuple) else [ids]))
