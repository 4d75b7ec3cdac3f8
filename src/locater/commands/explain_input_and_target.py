"""What an explanation runs a model on, the batch of one prompt or one picture with its tokens as text; and the number
of the output that is explained, as a user gives it: a token or a class by text or id, and a position.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError, first_line
from locater.explain.explanation import Target, TargetChoice, choose_target, vectors
from locater.inputs.images import image_batches, shown_pixels
from locater.inputs.text import Batch, check_ids, positions_of
from locater.inputs.tokenizer import tokenizer_for
from locater.results.explanations import Picture, Prediction, TokenStream


@dataclass(frozen=True, eq=False)
class ExplainInput:
    """One input of a model."""

    batch: Batch
    streams: list[TokenStream]
    tokenizer: Any = None
    picture: Picture | None = None
    notes: list[str] = field(default_factory=list)


def read_input(
    model: nn.Module,
    text: str | None,
    decoder_text: str | None,
    image: str | Path | None,
    tokenizer: Any,
    chat: bool = False,
) -> ExplainInput:
    """The batch of one prompt, one picture, or both for a model with two towers. `chat`: the prompt is the message of a
    user, written by the chat template of the tokenizer.
    """
    config = getattr(model, "config", None)
    two_towers = hasattr(model, "get_image_features") and hasattr(model, "get_text_features")
    main_input = getattr(model, "main_input_name", "input_ids")
    pair = bool(getattr(config, "is_encoder_decoder", False))
    if text is None and image is None:
        raise LocaterError(
            "nothing to explain: give the prompt with --prompt or --text FILE, or a picture with --image"
        )
    if text is not None and image is not None and not two_towers:
        raise LocaterError(f"{type(model).__name__} reads one input: give --prompt or --image, not both")
    if text is not None and main_input != "input_ids" and not two_towers:
        way_out = "give a picture with --image" if main_input == "pixel_values" else "from Python, give its inputs"
        raise LocaterError(f"{type(model).__name__} reads {main_input}, not text: {way_out}")
    if decoder_text is not None and not pair:
        raise LocaterError(f"--decoder-text: {type(model).__name__} has no decoder beside an encoder: use --prompt")
    if image is not None:
        return _read_picture(model, image, text, tokenizer)
    assert text is not None
    tok = tokenizer_for(model, tokenizer)
    ids, tokens = tokenize_prompt(model, tok, _as_chat(tok, text) if chat else text, special=not chat)
    batch: Batch = {"input_ids": torch.tensor([ids])}
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    if not pair:
        return ExplainInput(batch, [TokenStream("input", tokens, ids, special_places(tok, ids))], tok)
    decoder_ids, decoder_tokens = _decoder(model, tok, decoder_text)
    batch["decoder_input_ids"] = torch.tensor([decoder_ids])
    streams = [
        TokenStream("encoder", tokens, ids, special_places(tok, ids)),
        TokenStream("decoder", decoder_tokens, decoder_ids, [0]),
    ]
    return ExplainInput(batch, streams, tok)


def _as_chat(tok: Any, text: Any) -> str:
    """What a chat template writes for one message of a user, up to where the answer begins."""
    if not getattr(tok, "chat_template", None):
        raise LocaterError("the tokenizer has no chat template: leave out --chat, and write the prompt as it should be")
    try:
        message = [{"role": "user", "content": text}]
        return str(tok.apply_chat_template(message, tokenize=False, add_generation_prompt=True))
    except Exception as error:  # of a template, which may raise anything
        raise LocaterError(f"the chat template of the tokenizer refused this prompt ({first_line(error)})") from None


def tokenize_prompt(model: nn.Module, tok: Any, text: str, special: bool = True) -> tuple[list[int], list[str]]:
    """Token ids of a prompt, with the special tokens that the tokenizer adds if `special`, and the part of the text of
    each.
    """
    if not isinstance(text, str):
        raise LocaterError(f"the prompt is a {type(text).__name__}: give one text")
    if not text.strip():
        raise LocaterError("the prompt is empty: give at least one word with --prompt")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise LocaterError("the prompt is not UTF-8 text")
    try:
        offsets = bool(getattr(tok, "is_fast", False))
        coded = tok(text, add_special_tokens=special, return_offsets_mapping=offsets, verbose=False)
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # a panic of the tokenizers package is not an Exception
        raise LocaterError(f"the tokenizer failed on this prompt ({first_line(error)})") from None
    ids = [int(i) for i in coded["input_ids"]]
    most = positions_of(model)
    if most and len(ids) > most:
        raise LocaterError(f"the prompt has {len(ids):,} tokens, but the model has {most:,} positions: shorten it")
    check_ids(model, torch.tensor(ids))
    return ids, token_texts(tok, text, ids, coded.get("offset_mapping"))


def token_texts(tok: Any, text: str, ids: Sequence[int], offsets: Sequence[tuple[int, int]] | None) -> list[str]:
    """The part of the text that each token stands for, with the space in front of it; special tokens by name.

    Joined, they are the text again, unless the tokenizer changes characters. A character of several tokens is shown
    with the first of them.
    """
    names = [str(name) for name in tok.convert_ids_to_tokens(list(ids))]
    if offsets is None:
        return [tok.decode([i]) or name for i, name in zip(ids, names, strict=True)]
    pieces, end = [], 0
    for number, name, (start, stop) in zip(ids, names, offsets, strict=True):
        if stop <= end or number == tok.unk_token_id:
            pieces.append(name)
        else:
            gap = text[end:start]
            pieces.append((gap if gap.isspace() else "") + text[max(start, end) : stop])
        end = max(end, stop)
    return pieces


def special_places(tok: Any, ids: Sequence[int]) -> list[int]:
    """Positions of special tokens."""
    special = set(tok.all_special_ids)
    return [place for place, number in enumerate(ids) if number in special]


def _decoder(model: Any, tok: Any, text: str | None) -> tuple[list[int], list[str]]:
    """The start token of the decoder, then the text that it has generated so far."""
    start = getattr(model.config, "decoder_start_token_id", None)
    if start is None:
        start = getattr(getattr(model, "generation_config", None), "decoder_start_token_id", None)
    if start is None:
        start = model.config.pad_token_id
    if start is None:
        raise LocaterError(f"{type(model).__name__}: its configuration names no decoder_start_token_id")
    ids = [] if not text else [int(i) for i in tok(text, add_special_tokens=False)["input_ids"]]
    tokens = [tok.decode([i]) for i in ids]
    check_ids(model, torch.tensor([start, *ids]))
    return [int(start), *ids], [str(tok.convert_ids_to_tokens([int(start)])[0]), *tokens]


def _read_picture(model: Any, image: str | Path, text: str | None, tokenizer: Any) -> ExplainInput:
    if not str(image):
        raise LocaterError("the name of the picture is empty: give one with --image")
    if Path(image).is_dir():
        raise LocaterError(f"{image}: is a folder: name one picture in it")
    pixels = image_batches(model, image, count=1)[0]["pixel_values"]
    config = model.config
    vision = getattr(config, "vision_config", None) or config
    patch = getattr(vision, "patch_size", None)
    if not patch:
        raise LocaterError(
            f"{type(model).__name__}: its configuration names no patch size, so it has no patches to show"
        )
    tall, wide = (patch, patch) if isinstance(patch, int) else tuple(patch)
    rows, columns = pixels.shape[-2] // tall, pixels.shape[-1] // wide
    picture = Picture(shown_pixels(model, pixels[0]), rows, columns)
    patches = [f"row {r + 1}, column {c + 1}" for r in range(rows) for c in range(columns)]
    batch: Batch = {"pixel_values": pixels}
    if text is None:
        return ExplainInput(batch, [TokenStream("input", patches)], None, picture)
    tok = tokenizer_for(model, tokenizer)
    ids, tokens = tokenize_prompt(model, tok, text)
    batch["input_ids"] = torch.tensor([ids])
    batch["attention_mask"] = torch.ones_like(batch["input_ids"])
    streams = [TokenStream("image", patches), TokenStream("text", tokens, ids, special_places(tok, ids))]
    return ExplainInput(batch, streams, tok, picture)


# ---- the number that is explained ----


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
