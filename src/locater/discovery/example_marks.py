"""Placeholders in a text: tokens whose embeddings a model replaces by features of a picture or a sound."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from locater.discovery.example_settings import BATCH, Settings
from locater.sources.sources import config_of

# names of the token, of the method that computes the features, of its inputs
SOUND = (
    "input_features input_features_mask feature_attention_mask input_values input_features_attention_mask padding_mask"
).split()
PICTURE = (
    "pixel_values image_grid_thw image_sizes image_grid_hw grid_thw image_position_ids pixel_position_ids"
    " pixel_attention_mask target_sizes spatial_shapes image_merge_sizes high_res_pixel_values"
).split()
KINDS = (
    (("image_token_id", "image_token_index", "im_patch_id", "image_patch_id"), "get_image_features", PICTURE),
    (("audio_token_id", "audio_token_index"), "get_audio_features", SOUND),
)
MISMATCH = re.compile(r"tokens: (?P<tokens>\d+),? features:? (?P<features>\d+)")
BEFORE = 3  # tokens of text before the first placeholder


def put_placeholders(model: nn.Module, guess: dict[str, Tensor], quietly: Callable[..., Any]) -> None:
    """Put one placeholder into the text for each feature vector of a picture or a sound; the text gets longer.

    `quietly(call, **arguments)` calls a method of the model and gives None where that fails.
    """
    _make_room(model, guess)
    for tokens, method, inputs in KINDS:
        given = {name: guess[name] for name in inputs if name in guess}
        token = Settings(config_of(model)).number(tokens, -1)
        compute = next((getattr(part, method) for part in model.modules() if hasattr(part, method)), None)
        if token < 0 or not given or guess.get("input_ids", torch.zeros(())).ndim != 2:
            continue
        if compute is None:  # the model makes room itself: one placeholder for a picture or a sound
            _put(model, guess, token, 1)
            continue
        known, config = inspect.signature(compute).parameters, config_of(model)
        settings = {name: config[name] for name, p in known.items() if p.default is p.empty and name in config}
        features = quietly(compute, **settings, **{name: x for name, x in given.items() if name in known})
        if features is not None:
            _put(model, guess, token, _count(features) // BATCH)


def more_placeholders(model: nn.Module, guess: dict[str, Tensor], message: str) -> dict[str, Tensor] | None:
    """A guess with as many placeholders as a model's error says that it has features; None for other errors."""
    match = MISMATCH.search(message)
    if match is None or guess.get("input_ids", torch.zeros(())).ndim != 2:
        return None
    missing = (int(match["features"]) - int(match["tokens"])) // BATCH
    for tokens, method, inputs in KINDS:
        token = Settings(config_of(model)).number(tokens, -1)
        known = any(name in guess for name in inputs) and method.split("_")[1] in message.lower()
        if token >= 0 and known and missing > 0:
            changed = dict(guess)
            _put(model, changed, token, missing)
            return changed
    return None


def _make_room(model: nn.Module, guess: dict[str, Tensor]) -> None:
    """A longer text where a mask says which tokens the features of a picture replace, and they are many."""
    count = Settings(config_of(model)).number(("latent_query_num",), 0)
    if count and "image_embeds_position_mask" in guess and guess["input_ids"].shape[1] < count + BEFORE:
        _put(model, guess, int(guess["input_ids"][0, 0]), count)
        mask = torch.zeros_like(guess["input_ids"])
        mask[:, BEFORE : BEFORE + count] = 1
        guess["image_embeds_position_mask"] = mask


def _put(model: nn.Module, guess: dict[str, Tensor], token: int, count: int) -> None:
    ids = guess["input_ids"]
    ids = torch.where(ids == token, max(token - 1, 0), ids)  # none by chance
    marks = torch.full((len(ids), count), token, device=ids.device)
    guess["input_ids"] = ids = torch.cat([ids[:, :BEFORE], marks, ids[:, BEFORE:]], 1)
    if "attention_mask" in guess:
        guess["attention_mask"] = torch.ones_like(ids)
    arguments = inspect.signature(model.forward).parameters
    for name in ("mm_token_type_ids", "token_type_ids"):  # 1 where a picture stands, 0 for text
        if name in arguments and (name == "mm_token_type_ids" or name in guess):
            guess[name] = (ids == token).long()


def _count(features: Any) -> int:
    """How many feature vectors a method returned."""
    pooled = getattr(features, "pooler_output", None)
    return _vectors(getattr(features, "last_hidden_state", features) if pooled is None else pooled)


def _vectors(features: Any) -> int:
    if isinstance(features, Tensor):
        return features.shape[:-1].numel()
    return sum(_vectors(part) for part in features) if isinstance(features, (list, tuple)) else 0
