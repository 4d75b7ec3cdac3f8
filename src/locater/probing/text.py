"""From text to batches: a tokenizer, sequences of one length, the special tokens that a model expects."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line

OWN = ("locater", "locater_variant")  # types that `locater train` writes and transformers does not know
OFFSET = ("roberta", "xlm-roberta", "camembert", "mpnet")  # count positions from the padding id on
Batch = dict[str, Tensor]
Text = str | Path | Tensor | Sequence[str] | Mapping[str, Tensor] | Iterable[Mapping[str, Tensor]]
EMPTY = "the text is empty: give at least a few hundred words"


def batches(
    model: nn.Module, text: Text, *, tokenizer: Any = None, length: int = 256, tokens: int = 4096, batch: int = 8, skip: int = 0
) -> list[Batch]:
    """Batches of sequences of `length` tokens, about `tokens` in all, after the first `skip` tokens of the text.

    `text` is a string, the path of a text file, strings, token ids (N,) or (B, T), or batches as the model takes them, which are
    passed on as they are. A tokenizer is looked for where the model came from unless given.
    """
    if isinstance(text, Tensor):
        if text.ndim not in (1, 2) or text.is_floating_point():
            raise LocaterError(
                f"a tensor of shape {list(text.shape)} ({text.dtype}): token ids are whole numbers, (tokens,) or (sequences, tokens)"
            )
        if text.ndim == 2:
            return _checked(model, [{"input_ids": part} for part in text.split(batch)])
        return _checked(model, _cut(([], text.tolist(), []), length, tokens, batch, skip))
    held = [text] if isinstance(text, str | Path | Mapping) else list(text)
    if held and all(isinstance(part, Mapping) for part in held):
        return _checked(model, [dict(part) for part in held])  # type: ignore[arg-type]
    if not all(isinstance(part, str | Path) for part in held):
        wrong = next(type(part).__name__ for part in held if not isinstance(part, str | Path))
        raise LocaterError(
            f"text holds {wrong} objects: give a string, a path, strings, a tensor of token ids, or batches as the model takes them"
        )
    whole = "\n".join(read_text(part) if isinstance(part, Path) else str(part) for part in held)
    return _checked(model, _cut(_tokenized(model, whole, tokenizer), length, tokens, batch, skip))


def read_text(path: Path) -> str:
    """The text of a file, .xz and .gz included."""
    import gzip
    import lzma

    try:
        opened: Any = {".xz": lzma.open, ".gz": gzip.open}.get(path.suffix, open)
        with opened(path, "rt", encoding="utf-8") as file:
            found = str(file.read())
    except UnicodeDecodeError as error:
        raise LocaterError(f"{path}: not UTF-8 text (byte {error.start:,}): convert it, or give another file") from None
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read as text ({error.strerror or first_line(error)})") from None
    except (EOFError, lzma.LZMAError) as error:
        raise LocaterError(f"{path}: cannot be read as text ({first_line(error)})") from None
    if "\0" in found:
        raise LocaterError(f"{path}: not text: it holds a zero byte")
    if not found.strip():
        raise LocaterError(f"{path}: {EMPTY}")
    return found


def tokenizer_for(model: Any, given: Any = None) -> Any:
    """A tokenizer: given, by path, or from where the model came from."""
    if given is not None and not isinstance(given, str | Path):
        return given
    config = getattr(model, "config", None)
    where = str(given) if given is not None else getattr(model, "name_or_path", "") or getattr(config, "_name_or_path", "")
    way_out = "give one with tokenizer= (--tokenizer PATH on the command line), or in Python token ids in place of text"
    if not where:
        raise LocaterError(f"{type(model).__name__}: it does not say where its tokenizer is: {way_out}")
    try:
        from transformers import AutoTokenizer, PreTrainedTokenizerFast

        own = getattr(config, "model_type", "") in OWN  # a type that transformers would warn of
        return (PreTrainedTokenizerFast if own else AutoTokenizer).from_pretrained(where)
    except ImportError:
        raise LocaterError("reading text needs the transformers package: pip install 'locater[hf]'") from None
    except Exception as error:
        why = "" if Path(where).is_dir() and not list(Path(where).glob("*token*")) else f" ({first_line(error)})"
        raise LocaterError(f"{where}: no tokenizer there{why}: {way_out}") from None


def _tokenized(model: nn.Module, text: str, tokenizer: Any) -> tuple[list[int], list[int], list[int]]:
    """Special tokens in front, the text's own, special tokens behind."""
    if not text.strip():
        raise LocaterError(EMPTY)
    tok = tokenizer_for(model, tokenizer)
    bare = tok("a", add_special_tokens=False)["input_ids"]
    full = tok("a")["input_ids"]
    at = next((i for i in range(len(full) - len(bare) + 1) if full[i : i + len(bare)] == bare), None)
    before, after = ([], []) if at is None else (full[:at], full[at + len(bare) :])
    return before, tok(text, add_special_tokens=False, verbose=False)["input_ids"], after


def _cut(ids: tuple[list[int], list[int], list[int]], length: int, tokens: int, batch: int, skip: int) -> list[Batch]:
    before, held, after = ids
    size = length - len(before) - len(after)
    held = held[skip:]
    if size < 2 or len(held) < 2:
        raise LocaterError(f"{len(held)} tokens of text in sequences of {length}: attention needs at least two")
    pieces = [held[i : i + size] for i in range(0, len(held), size)][: max(1, tokens // length)]
    whole = [piece for piece in pieces if len(piece) == size] or pieces[:1]
    rows = torch.tensor([[*before, *piece, *after] for piece in whole])
    return [{"input_ids": part, "attention_mask": torch.ones_like(part)} for part in rows.split(batch)]


def _checked(model: Any, found: list[Batch]) -> list[Batch]:
    """Refuse what the model would fail on later and less clearly; add what a pair of stacks wants."""
    config = getattr(model, "config", None)
    if config is None:
        return found
    text_config = config.get_text_config() if hasattr(config, "get_text_config") else config
    most = getattr(text_config, "max_position_embeddings", None) or getattr(text_config, "n_positions", None)
    if most and getattr(config, "model_type", "") in OFFSET:
        most -= (config.pad_token_id or 0) + 1
    rows = getattr(text_config, "vocab_size", None)
    for held in found:
        ids = held.get("input_ids")
        if ids is None:
            continue
        if not isinstance(ids, Tensor) or ids.ndim != 2 or not ids.numel():
            raise LocaterError("a batch's input_ids must be a tensor (sequences, tokens): pad ragged sequences and give an attention_mask")
        if most and ids.shape[1] > most:
            raise LocaterError(f"sequences of {ids.shape[1]} tokens, but the model has {most} positions: use length={most} or less")
        low, high = int(ids.min()), int(ids.max())
        if rows and (low < 0 or high >= rows):
            wrong = low if low < 0 else high
            raise LocaterError(f"token id {wrong} is beyond the model's vocabulary of {rows}: is this the model's own tokenizer?")
        if getattr(config, "is_encoder_decoder", False) and not {"decoder_input_ids", "decoder_inputs_embeds", "labels"} & held.keys():
            held["decoder_input_ids"] = ids
            if "attention_mask" in held:
                held["decoder_attention_mask"] = held["attention_mask"]
    return found
