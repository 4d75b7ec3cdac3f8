"""From text to batches of token ids: sequences of one length, with the special tokens that the model expects."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.inputs.tokenizer import WAY_OUT, tokenizer_for

OFFSET = ("roberta", "xlm-roberta", "camembert", "mpnet")  # their positions start after the padding id
Batch = dict[str, Tensor]
Text = str | Path | Tensor | Sequence[str] | Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]
EMPTY = "the text is empty: give at least a few hundred words"
LONGEST_NAME = 1000  # characters: no path is longer, most texts are


class TextWindow(TypedDict, total=False):
    """How text is cut into batches: the options of `batches`."""

    tokenizer: Any
    length: int
    tokens: int
    batch: int
    skip: int


def batches(
    model: nn.Module,
    text: Text,
    *,
    tokenizer: Any = None,
    length: int = 256,
    tokens: int = 4096,
    batch: int = 8,
    skip: int = 0,
    beyond_positions: bool = False,
) -> list[Batch]:
    """Batches of sequences of `length` tokens, about `tokens` in all, after the first `skip` tokens of the text.

    `text` is a string, the path of a text file, several of either, token ids (N,) or (B, T), or batches as the model
    takes them, which are returned unchanged. A string that names a file stands for that file (`as_text`). The default
    tokenizer is the one saved with the model. With `beyond_positions` sequences may have more tokens than the model
    states positions for.
    """
    most = None if beyond_positions else positions_of(model)
    if isinstance(text, Tensor):
        if text.ndim not in (1, 2) or text.is_floating_point():
            raise LocaterError(
                f"a tensor of shape {list(text.shape)} ({text.dtype}): "
                "token ids are whole numbers, (tokens,) or (sequences, tokens)"
            )
        if text.ndim == 2:
            return _check_batches(model, most, [{"input_ids": part} for part in text.split(batch)])
        return _check_batches(model, most, _cut_sequences(([], text.tolist(), []), length, tokens, batch, skip))
    parts = [text] if isinstance(text, str | Path | Mapping) else list(text)
    if parts and all(isinstance(part, Mapping) for part in parts):
        return _check_batches(model, most, [dict(part) for part in parts])  # type: ignore[arg-type]
    return _check_batches(
        model, most, _cut_sequences(_tokenize(model, as_text(parts), tokenizer), length, tokens, batch, skip)
    )


def as_text(parts: Sequence[Any]) -> str:
    """Strings and text files joined into one text. A string that names a file is read; one that looks like the name of
    a missing file is refused.

    The strings of a list are files only if all of them look like files. Otherwise all are text: a line of a corpus may
    well be `and/or`.
    """
    if not all(isinstance(part, str | Path) for part in parts):
        wrong = next(type(part).__name__ for part in parts if not isinstance(part, str | Path))
        raise LocaterError(
            f"text contains {wrong} objects: give a string, a path, strings, a tensor of token ids, "
            "or batches as the model takes them"
        )
    files = files_named(parts)
    return "\n".join(str(part) if path is None else read_text(path) for part, path in zip(parts, files, strict=True))


def files_named(parts: Sequence[Any]) -> list[Path | None]:
    """The file that each part of a text names; None for a part that is text itself."""
    named = [part if isinstance(part, Path) else _file_named(part) if isinstance(part, str) else None for part in parts]
    if all(path is not None for path in named):
        return named
    return [part if isinstance(part, Path) else None for part in parts]


def _file_named(text: str) -> Path | None:
    """The path that a string names: an existing file or folder, or a string that looks like a path, not like words."""
    if len(text) > LONGEST_NAME or "\n" in text or not text.strip():
        return None
    path = os.path.expanduser(text)
    ends_in_suffix = re.search(r"\.[A-Za-z]\w{0,7}$", text) is not None
    if re.search(r"\s", text) is None:
        is_path = ends_in_suffix or re.search(r"[/\\]", text) is not None
    else:
        is_path = ends_in_suffix and re.match(r"(/|~|\.\.?[/\\]|[A-Za-z]:\\)", text) is not None
    return Path(path) if is_path or os.path.exists(path) else None


def read_text(path: Path) -> str:
    """The text of a file, which may be compressed as .xz or .gz."""
    import gzip
    import lzma

    try:
        opened: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
        with opened(path, "rt", encoding="utf-8") as file:
            text = str(file.read())
    except UnicodeDecodeError as error:
        raise LocaterError(f"{path}: not UTF-8 text (byte {error.start:,}): convert it, or give another file") from None
    except FileNotFoundError:
        raise LocaterError(f"{path}: no such file") from None
    except IsADirectoryError:
        raise LocaterError(f"{path}: is a folder: name a text file in it") from None
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read as text ({error.strerror or first_line(error)})") from None
    except ValueError:
        raise LocaterError(f"{str(path)!r}: no file can have this name") from None
    except (EOFError, lzma.LZMAError) as error:
        raise LocaterError(f"{path}: cannot be read as text ({first_line(error)})") from None
    if "\0" in text:
        raise LocaterError(f"{path}: not text: it contains a zero byte")
    if not text.strip():
        raise LocaterError(f"{path}: {EMPTY}")
    return text


def _tokenize(model: nn.Module, text: str, tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Token ids of the special tokens before a text, of the text itself, and of the special tokens after it."""
    if not text.strip():
        raise LocaterError(EMPTY)
    tok = tokenizer_for(model, tokenizer)
    try:
        bare = tok("a", add_special_tokens=False)["input_ids"]
        full = tok("a")["input_ids"]
        ids = tok(text, add_special_tokens=False, verbose=False)["input_ids"]
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers package
        where = getattr(tok, "name_or_path", "") or type(tok).__name__
        raise LocaterError(f"{where}: its tokenizer failed on this text ({first_line(error)}): {WAY_OUT}") from None
    at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
    before, after = ([], []) if at is None else (full[:at], full[at + len(bare) :])
    return before, ids, after


def _cut_sequences(
    ids: tuple[list[int], list[int], list[int]], length: int, tokens: int, batch: int, skip: int
) -> list[Batch]:
    """Batches of sequences of `length` tokens, each with the special tokens; an incomplete last sequence is dropped."""
    before, text, after = ids
    size = length - len(before) - len(after)
    text = text[skip:]
    if size < 2 or len(text) < 2:
        counted = "1 token" if len(text) == 1 else f"{len(text)} tokens"
        raise LocaterError(f"{counted} of text in sequences of {length}: attention needs at least two")
    pieces = [text[i : i + size] for i in range(0, len(text), size)][: max(1, tokens // length)]
    whole = [piece for piece in pieces if len(piece) == size] or pieces[:1]
    rows = torch.tensor([[*before, *piece, *after] for piece in whole])
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows.split(batch)]


def positions_of(model: Any) -> int | None:
    """The longest sequence that a model has positions for; None if its configuration does not say."""
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None)
    if most and getattr(config, "model_type", "") in OFFSET:
        most -= (getattr(config, "pad_token_id", None) or 0) + 1
    return most or None


def check_ids(model: Any, ids: Tensor) -> None:
    """Refuse token ids that the model's vocabulary does not have."""
    config: Any = getattr(model, "config", None)
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    rows = getattr(text_config, "vocab_size", None)
    low, high = int(ids.min()), int(ids.max())
    if rows and (low < 0 or high >= rows):
        wrong = low if low < 0 else high
        raise LocaterError(
            f"token id {wrong} is beyond the model's vocabulary of {rows}: is this the model's own tokenizer?"
        )


def _check_batches(model: Any, most: int | None, batches: list[Batch]) -> list[Batch]:
    """Refuse batches on which the model would fail later, and less clearly. Give encoder-decoders their decoder ids."""
    config = getattr(model, "config", None)
    if config is None:
        return batches
    for batch in batches:
        ids = batch.get("input_ids")
        if ids is None:
            continue
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            raise LocaterError(
                "a batch's input_ids must be a tensor (sequences, tokens): "
                "pad ragged sequences and give an attention_mask"
            )
        if most and ids.shape[1] > most:
            raise LocaterError(
                f"sequences of {ids.shape[1]} tokens, but the model has {most} positions: use length={most} or less"
            )
        check_ids(model, ids)
        decoder_inputs = {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & batch.keys()
        if getattr(config, "is_encoder_decoder", False) and not decoder_inputs:
            batch["decoder_input_ids"] = ids
            if "attention_mask" in batch:
                batch["decoder_attention_mask"] = batch["attention_mask"]
    return batches
