"""From text to token ids: bytes, or pairs of them merged as the text suggests (with the tokenizers package).

Both are saved as tokenizer.json, which transformers reads, so `locater probe` runs what was trained here.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from locater.errors import LocaterError

BYTES = 256
FILE = "tokenizer.json"
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}  # tokenizer_config.json
PIECE = 1 << 20  # characters handed over at once


class Tokenizer(Protocol):
    size: int

    def encode(self, text: str) -> Tensor: ...

    def to_json(self) -> str: ...

    def __hash__(self) -> int: ...


class ByteTokenizer:
    """Every byte of UTF-8 is a token.

    >>> ByteTokenizer().encode("héllo").tolist()
    [104, 195, 169, 108, 108, 111]
    """

    size = BYTES

    def encode(self, text: str) -> Tensor:
        return (
            torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        )

    def to_json(self) -> str:
        """As the tokenizers package would write it: byte pairs, of which none are merged."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model: dict[str, Any] = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "vocab": {sign: b for b, sign in enumerate(byte_signs())},
            "merges": [],
        }
        return json.dumps({
            "version": "1.0", "truncation": None, "padding": None, "added_tokens": [], "normalizer": None, "pre_tokenizer": level,
            "post_processor": None, "decoder": level, "model": model,
        })  # fmt: skip


class PairTokenizer:
    """Byte pairs, by the tokenizers package."""

    def __init__(self, held: Any) -> None:
        self._held = held
        self.size = int(held.get_vocab_size())

    def encode(self, text: str) -> Tensor:
        ids: list[int] = []
        for begin in range(0, len(text), PIECE):
            ids += self._held.encode(text[begin : begin + PIECE]).ids
        return torch.tensor(ids, dtype=torch.int32)

    def to_json(self) -> str:
        return str(self._held.to_str())


def make_tokenizer(vocabulary: int, texts: Iterable[str]) -> Tokenizer:
    """Bytes for 256 tokens; for more, the pairs that are most frequent in `texts`."""
    if vocabulary == BYTES:
        return ByteTokenizer()
    library = _library(vocabulary)
    held = library.Tokenizer(library.models.BPE())
    held.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    held.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    held.train_from_iterator(
        texts, library.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    )
    return PairTokenizer(held)


def tokenizer_of_run(folder: Path, vocabulary: int, make: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer of a run that goes on from a checkpoint, which its folder holds; for others a new one."""
    path = folder / FILE
    if vocabulary == BYTES or not path.is_file() or not any(folder.glob("step-*")):
        return make()
    try:
        return PairTokenizer(_library(vocabulary).Tokenizer.from_file(str(path)))
    except LocaterError:
        raise
    except Exception as error:  # the package raises plain exceptions
        raise LocaterError(
            f"{path}: not a readable tokenizer ({error}): remove the run's folder and start anew"
        ) from None


def byte_signs() -> list[str]:
    """A printable sign for every byte, as GPT-2 chose them: itself where it has one, else the next from code point 256
    on.
    """
    shown = {*range(33, 127), *range(161, 173), *range(174, 256)}
    free = iter(range(BYTES, 2 * BYTES))
    return [chr(b if b in shown else next(free)) for b in range(BYTES)]


def _library(vocabulary: int) -> Any:
    try:
        import tokenizers
        import tokenizers.decoders
        import tokenizers.models
        import tokenizers.pre_tokenizers
        import tokenizers.trainers
    except ImportError:
        raise LocaterError(
            f"a vocabulary of {vocabulary} needs the tokenizers package (pip install 'locater[train]'); 256 does not"
        ) from None
    return tokenizers
