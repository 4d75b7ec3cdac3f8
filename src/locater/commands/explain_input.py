"""What an explanation runs a model on: the batch of one prompt or one picture, and its tokens as text."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from locater.errors import LocaterError, first_line
from locater.inputs.images import image_batches, shown_pixels
from locater.inputs.text import Batch, check_ids, positions_of
from locater.inputs.tokenizer import tokenizer_for
from locater.results.explanations import Picture, TokenStream


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
) -> ExplainInput:
    """The batch of one prompt, one picture, or both for a model with two towers."""
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
    ids, tokens = tokenize_prompt(model, tok, text)
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


def tokenize_prompt(model: nn.Module, tok: Any, text: str) -> tuple[list[int], list[str]]:
    """Token ids of a prompt with the special tokens that the tokenizer adds, and the part of the text of each."""
    if not isinstance(text, str):
        raise LocaterError(f"the prompt is a {type(text).__name__}: give one text")
    if not text.strip():
        raise LocaterError("the prompt is empty: give at least one word with --prompt")
    if any("\ud800" <= c <= "\udfff" for c in text):
        raise LocaterError("the prompt is not UTF-8 text")
    try:
        coded = tok(text, return_offsets_mapping=bool(getattr(tok, "is_fast", False)), verbose=False)
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
