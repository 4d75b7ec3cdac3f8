"""Tokens of training text: a tokenizer of whole words, and files of tokens, so that a sweep tokenizes its text once and
not once in each process.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.inputs.corpus import fingerprint

# ---- Words as tokens ----
# Text split at white space, with a token for the end of a line and one for all rare words.


UNKNOWN, LINE_END = "<unk>", "<eos>"
SPECIAL = (UNKNOWN, LINE_END)  # their ids are 0 and 1
SEPARATORS = "[\\x1c-\\x1f]"  # white space to Python, and not to the tokenizers package


class WordTokenizer:
    """Every word is a token, and so is the end of every line: `<eos>`, which a blank line has too. A last line without
    a line break is ended as well. All words that are not in the vocabulary are one token, `<unk>`.

    A literal `<unk>` or `<eos>` in the text is the same token.

    >>> tokenizer = WordTokenizer(["a", "cat"])
    >>> tokenizer.encode("a black cat\\n\\na cat").tolist()
    [2, 0, 3, 1, 1, 2, 3, 1]
    """

    def __init__(self, words: Sequence[str]) -> None:
        self.ids = {word: index for index, word in enumerate((*SPECIAL, *words))}
        self.size = len(self.ids)

    @classmethod
    def from_texts(cls, texts: Iterable[str], most: int = 0) -> WordTokenizer:
        """The `most` frequent words of the texts, or all with 0. Among equally frequent words, the first to appear."""
        counts: Counter[str] = Counter()
        for text in texts:
            counts.update(text.split())
        for word in SPECIAL:
            counts.pop(word, None)
        return cls([word for word, _ in counts.most_common(most or None)])

    def encode(self, text: str) -> Tensor:
        ids: list[int] = []
        of, unknown, end = self.ids.get, self.ids[UNKNOWN], self.ids[LINE_END]
        for line in text.removesuffix("\n").split("\n") if text else ():
            ids += [of(word, unknown) for word in line.split()]
            ids.append(end)
        return torch.tensor(ids, dtype=torch.int32)

    def unknown(self, text: str) -> int:
        """How many words of the text are not in the vocabulary. A literal `<unk>` does not count."""
        return sum(word not in self.ids for word in text.split())

    def to_json(self) -> str:
        """As the tokenizers package would write it. It gives the tokens of `encode`, but does not end a last line
        without a line break: a prompt may stop within a line.
        """
        replacements = (({"String": "\n"}, f" {LINE_END} "), ({"Regex": SEPARATORS}, " "))
        normalizers = [{"type": "Replace", "pattern": pattern, "content": text} for pattern, text in replacements]
        document: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": {"type": "Sequence", "normalizers": normalizers},
            "pre_tokenizer": {"type": "WhitespaceSplit"},
            "post_processor": None,
            "decoder": None,
            "model": {"type": "WordLevel", "vocab": self.ids, "unk_token": UNKNOWN},
        }
        return json.dumps(document)


# ---- Tokens in files that several processes read ----
# The folder is named by an environment variable, which child processes inherit. Without it nothing is written.


TOKENS_FOLDER = "LOCATER_TOKENS"


@contextmanager
def shared_tokens(folder: Path) -> Iterator[None]:
    """Keep tokens in this folder, here and in processes started here."""
    before = os.environ.get(TOKENS_FOLDER)
    os.environ[TOKENS_FOLDER] = str(folder)
    try:
        yield
    finally:
        if before is None:
            del os.environ[TOKENS_FOLDER]
        else:
            os.environ[TOKENS_FOLDER] = before


def load_or_make(key: str, make: Callable[[], Any]) -> Any:
    """What `make` returns, which may be text, tensors, and lists and dictionaries of them.

    `make` is called unless the folder has the result for this key; equal keys must mean equal results.
    """
    where = os.environ.get(TOKENS_FOLDER)
    if where is None:
        return make()
    path = Path(where) / f"{fingerprint(key)}.pt"
    if path.is_file():
        return torch.load(path, weights_only=True)
    value, partial = make(), path.with_suffix(f".{os.getpid()}")
    torch.save(value, partial)
    partial.replace(path)  # whole or not at all
    return value
