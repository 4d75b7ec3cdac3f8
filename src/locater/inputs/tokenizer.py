"""From text to token ids: the tokenizer of a model, or bytes, or byte pairs learned from the text (with the tokenizers
package).

The last two are saved as tokenizer.json, which transformers reads, so that `locater probe` can run the trained model.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor

from locater.errors import LocaterError, first_line
from locater.sources.open_source import hub_folder
from locater.torch_private import saved_path

OWN = ("locater", "locater_variant")  # model types of `locater train`, unknown to transformers
WAY_OUT = "give one with tokenizer= (--tokenizer PATH on the command line), or in Python token ids in place of text"
BYTES = 256
FILE = "tokenizer.json"
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "clean_up_tokenization_spaces": False}  # tokenizer_config.json
PIECE, PIECES = 1 << 20, 16  # characters of a piece, and pieces that are encoded at the same time


def tokenizer_for(model: Any, tokenizer: Any = None) -> Any:
    """`tokenizer` itself, or loaded where it is a path; by default the one saved with the model."""
    if tokenizer is not None and not isinstance(tokenizer, str | Path):
        return tokenizer
    config = getattr(model, "config", None)
    where = str(tokenizer or "")
    if tokenizer is None:
        where = getattr(model, "name_or_path", "") or saved_path(config)
    if not where:
        raise LocaterError(f"{type(model).__name__}: its tokenizer is not known: {WAY_OUT}")
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        if not Path(where).exists():
            hub_folder(where)  # fails immediately without a network, where transformers would retry for minutes
        own = getattr(config, "model_type", "") in OWN  # transformers would warn about this type
        kind = PreTrainedTokenizerFast if own else AutoTokenizer
        loaded = kind.from_pretrained(where, trust_remote_code=False)  # None would ask whether to run code
    except ImportError:
        raise LocaterError("reading text needs the transformers package: pip install 'locater[hf]'") from None
    except LocaterError as error:
        raise LocaterError(f"no tokenizer there: {error}; {WAY_OUT}") from None
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers package is not an Exception
        no_files = Path(where).is_dir() and not list(Path(where).glob("*token*"))
        reason = "" if no_files else f" ({first_line(error)})"
        raise LocaterError(f"{where}: no tokenizer there{reason}: {WAY_OUT}") from None
    if (
        len(set(loaded.get_vocab()) - set(loaded.all_special_tokens)) < 2
    ):  # transformers invents a tokenizer for a folder without one
        raise LocaterError(f"{where}: no tokenizer there: {WAY_OUT}")
    return loaded


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
        """As the tokenizers package would write it: byte pairs without merges."""
        level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        model: dict[str, Any] = {
            "type": "BPE",
            "dropout": None,
            "unk_token": None,
            "vocab": {sign: b for b, sign in enumerate(byte_signs())},
            "merges": [],
        }
        document: dict[str, Any] = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": [],
            "normalizer": None,
            "pre_tokenizer": level,
            "post_processor": None,
            "decoder": level,
            "model": model,
        }
        return json.dumps(document)


class PairTokenizer:
    """Byte pairs, by the tokenizers package."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self.size = int(tokenizer.get_vocab_size())

    def encode(self, text: str) -> Tensor:
        ids: list[int] = []
        pieces = [text[begin : begin + PIECE] for begin in range(0, len(text), PIECE)]
        for begin in range(0, len(pieces), PIECES):
            for piece in self._tokenizer.encode_batch_fast(pieces[begin : begin + PIECES]):
                ids += piece.ids
        return torch.tensor(ids, dtype=torch.int32)

    def to_json(self) -> str:
        return str(self._tokenizer.to_str())

    @classmethod
    def from_json(cls, text: str) -> PairTokenizer:
        return cls(_library(BYTES + 1).Tokenizer.from_str(text))


def make_tokenizer(vocabulary: int, texts: Iterable[str]) -> Tokenizer:
    """Bytes for a vocabulary of 256; for a larger one, the byte pairs that are most frequent in `texts`."""
    if vocabulary == BYTES:
        return ByteTokenizer()
    library = _library(vocabulary)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    alphabet = library.pre_tokenizers.ByteLevel.alphabet()
    trainer = library.trainers.BpeTrainer(vocab_size=vocabulary, initial_alphabet=alphabet, show_progress=False)
    tokenizer.train_from_iterator(texts, trainer)
    return PairTokenizer(tokenizer)


def tokenizer_of_run(folder: Path, vocabulary: int, make: Callable[[], Tokenizer]) -> Tokenizer:
    """The tokenizer in the folder of a run that has a checkpoint to continue from, without its start token; for other
    runs a new one.
    """
    path = folder / FILE
    if vocabulary == BYTES or not path.is_file() or not any(folder.glob("step-*")):
        return make()
    try:
        saved = without_start(path.read_text(encoding="utf-8"))
        return PairTokenizer(_library(vocabulary).Tokenizer.from_str(saved))
    except LocaterError:
        raise
    except Exception as error:  # the tokenizers package raises plain Exception
        raise LocaterError(
            f"{path}: not a readable tokenizer ({error}): remove the folder of the run and start again"
        ) from None


def byte_signs() -> list[str]:
    """A printable character for every byte, as in GPT-2: the byte itself where printable, else the next from code point
    256 on.
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


# ---- a start token in front of every sequence ----


if TYPE_CHECKING:
    from locater.inputs.tokenizer import Tokenizer

START = "<bos>"


class StartTokenizer:
    """A tokenizer with one more token, `start`. `encode` returns only the tokens of the text: whoever cuts them into
    sequences puts `start` in front of each. The saved tokenizer puts it in front of a text.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer, self.start, self.size = tokenizer, tokenizer.size, tokenizer.size + 1

    def encode(self, text: str) -> Tensor:
        return self._tokenizer.encode(text)

    def to_json(self) -> str:
        document = json.loads(self._tokenizer.to_json())
        kind = {"special": True, "normalized": False, "single_word": False, "lstrip": False, "rstrip": False}
        document["added_tokens"].append({"id": self.start, "content": START, **kind})
        document["post_processor"] = {
            "type": "TemplateProcessing",
            "single": [_special(), _text("A", 0)],
            "pair": [_special(), _text("A", 0), _text("B", 1)],
            "special_tokens": {START: {"id": START, "ids": [self.start], "tokens": [START]}},
        }
        return json.dumps(document)


def without_start(text: str) -> str:
    """A saved tokenizer without its start token; unchanged if it has none."""
    document = json.loads(text)
    others = [token for token in document["added_tokens"] if token["content"] != START]
    if len(others) == len(document["added_tokens"]):
        return text
    return json.dumps({**document, "added_tokens": others, "post_processor": None})


def _special() -> dict[str, Any]:
    return {"SpecialToken": {"id": START, "type_id": 0}}


def _text(name: str, kind: int) -> dict[str, Any]:
    return {"Sequence": {"id": name, "type_id": kind}}
