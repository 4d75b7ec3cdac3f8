"""Small tensors for the arguments of `forward`, by their names, with sizes from a model's configuration.

Axes: B examples, T tokens, d width, C channels of a picture, H and W its sides, P the side of a patch.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TEXT = ("text_config", "text", "decoder", "text_encoder", "llm_config", "language_config")
VISION = ("vision_config", "vision", "image_config", "encoder", "backbone_config", "vision_encoder_config")
AUDIO = ("audio_config", "audio_encoder_config", "encoder_config", "encoder", "speech_config", "audio_encoder")
VOCABULARY = ("vocab_size", "text_vocab_size", "n_vocab", "n_words", "char_vocab_size", "num_embeddings")
WIDTH = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "width", "encoder_embed_dim")
CHANNELS = ("num_channels", "in_channels", "in_chans", "n_channels", "input_channels")
MELS = (
    "num_mel_bins feature_projection_input_dim input_feat_per_channel input_feat_size n_mels input_dim feature_size"
    " input_size mel_bins num_mels num_features"
).split()
BATCH, TOKENS, GRID = 2, 9, 4  # GRID x GRID patches of a packed picture


@dataclass(frozen=True)
class Settings:
    """A configuration as a mapping, with the configurations of its parts."""

    values: Mapping[str, Any]

    def part(self, names: tuple[str, ...]) -> Settings:
        """The first of the named parts that there is, here and then in parts of this configuration, or the whole."""
        return self._part(names) or self

    def _part(self, names: tuple[str, ...]) -> Settings | None:
        direct = next((self.values[name] for name in names if isinstance(self.values.get(name), Mapping)), None)
        if direct is not None:
            return Settings(direct)
        inner = (value for value in self.values.values() if isinstance(value, Mapping) and "model_type" in value)
        return next((part for value in inner if (part := Settings(value)._part(names)) is not None), None)

    def number(self, names: tuple[str, ...] | list[str], default: int) -> int:
        """The first whole number above zero under one of the names, here and then in parts of this configuration."""
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        inner = [value for value in self.values.values() if isinstance(value, Mapping)]
        numbers = (Settings(value).number(names, 0) for value in inner if "model_type" in value)
        return next((number for number in numbers if number), default)

    def sides(self, name: str, default: int) -> tuple[int, int]:
        """Height and width under a name that holds a number, a pair or a mapping with height and width."""
        value = self.values.get(name)
        if isinstance(value, Mapping):
            value = [value.get("height"), value.get("width")]
        if isinstance(value, int) and value > 0:
            return value, value
        if isinstance(value, (list, tuple)) and len(value) >= 2 and all(isinstance(side, int) for side in value[-2:]):
            return value[-2], value[-1]
        return default, default


@dataclass(frozen=True)
class Request:
    """What a maker needs: the configuration, and where random numbers come from."""

    settings: Settings
    random: torch.Generator
    words: int | None = None  # how many embeddings the model has for tokens, where it says so

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.random)


Make = Callable[[Request], Tensor]


def ids(request: Request) -> Tensor:
    """(B, T) token ids, without those of special tokens at both ends of small vocabularies."""
    vocabulary = request.words or request.settings.part(TEXT).number(VOCABULARY, 128)
    return request.integers(min(vocabulary, 100), BATCH, TOKENS, low=min(5, vocabulary - 1))


def codes(request: Request) -> Tensor:
    """(B, T, codebooks)"""
    books = request.settings.number(("num_codebooks", "n_codebooks", "num_channels", "num_rvq"), 8)
    vocabulary = request.words or request.settings.number(VOCABULARY, 128)
    return request.integers(min(vocabulary, 100), BATCH, TOKENS, books)


def ones(request: Request) -> Tensor:
    """(B, T): every token counts."""
    return torch.ones(BATCH, TOKENS, dtype=torch.long)


def states(request: Request) -> Tensor:
    """(B, T, d)"""
    return request.noise(BATCH, TOKENS, request.settings.number(WIDTH, 32))


def picture(request: Request) -> Tensor:
    """(B, C, H, W)"""
    vision = request.settings.part(VISION)
    return request.noise(BATCH, vision.number(CHANNELS, 3), *_sides(request))


def pictures(request: Request) -> Tensor:
    """(B, frames or pictures, C, H, W)"""
    vision = request.settings.part(VISION)
    frames = vision.number(("num_frames", "frames_per_clip", "num_image_with_embedding"), 2)
    return request.noise(BATCH, frames, vision.number(CHANNELS, 3), *_sides(request))


def tiles(request: Request) -> Tensor:
    """(B, pictures, tiles, C, H, W)"""
    vision = request.settings.part(VISION)
    return request.noise(BATCH, 1, _tiles(request), vision.number(CHANNELS, 3), *_sides(request))


def tile_ids(request: Request) -> Tensor:
    """(B, pictures): the first form of a picture that there is, one tile."""
    return torch.ones(BATCH, 1, dtype=torch.long)


def tile_mask(request: Request) -> Tensor:
    """(B, pictures, tiles)"""
    return torch.ones(BATCH, 1, _tiles(request), dtype=torch.long)


def patches(request: Request) -> Tensor:
    """(B x patches, C x frames x P x P): all pictures in one row of patches."""
    vision = request.settings.part(VISION)
    size = vision.number(CHANNELS, 3) * vision.number(("temporal_patch_size",), 1) * _patch(vision) ** 2
    return request.noise(BATCH * GRID * GRID, size)


def patch_rows(request: Request) -> Tensor:
    """(B, patches, C x P x P)"""
    vision = request.settings.part(VISION)
    return request.noise(BATCH, GRID * GRID, vision.number(CHANNELS, 3) * _patch(vision) ** 2)


def flattened_patches(request: Request) -> Tensor:
    """(B, T, 2 + C x P x P): row, column and pixels of each patch."""
    size = request.settings.number(("patch_embed_hidden_size",), 768)
    places = torch.arange(1, TOKENS + 1).float()[None, :, None].expand(BATCH, -1, 2)
    return torch.cat([places, request.noise(BATCH, TOKENS, size)], -1)


def grid(request: Request) -> Tensor:
    """(B, 3): frames, rows and columns of patches of each picture."""
    return torch.tensor([[1, GRID, GRID]]).expand(BATCH, -1).contiguous()


def spatial_shapes(request: Request) -> Tensor:
    """(B, 2): rows and columns of patches of each picture."""
    return torch.full((BATCH, 2), GRID)


def patch_mask(request: Request) -> Tensor:
    """(B, patches)"""
    return torch.ones(BATCH, GRID * GRID, dtype=torch.long)


def image_sizes(request: Request) -> Tensor:
    """(B, 2): height and width of each picture."""
    return torch.tensor([_sides(request)]).expand(BATCH, -1).contiguous()


def spectrum(request: Request) -> Tensor:
    """(B, mels, frames), as many frames as the positions of an encoder that halves them."""
    audio = request.settings.part(AUDIO)
    frames = 2 * audio.number(("max_source_positions",), 32)
    return request.noise(BATCH, audio.number(MELS, 80), frames)


def spectrum_frames(request: Request) -> Tensor:
    """(B, frames, mels)"""
    audio = request.settings.part(AUDIO)
    frames = audio.number(("max_length", "num_frames"), 64)
    return request.noise(BATCH, min(frames, 1024), audio.number(MELS, 80))


def spectrum_picture(request: Request) -> Tensor:
    """(B, 1, frames, mels)"""
    return spectrum_frames(request)[:, None]


def frame_mask(request: Request) -> Tensor:
    """(B, frames), for `spectrum`."""
    return torch.ones(spectrum(request).shape[::2], dtype=torch.long)


def frame_mask_first(request: Request) -> Tensor:
    """(B, frames), for `spectrum_frames`."""
    return torch.ones(spectrum_frames(request).shape[:2], dtype=torch.long)


def wave(request: Request) -> Tensor:
    """(B, samples)"""
    return request.noise(BATCH, 3840)


def wave_channel(request: Request) -> Tensor:
    """(B, 1, samples)"""
    return request.noise(BATCH, 1, 3840)


def series(request: Request) -> Tensor:
    """(B, time): a past long enough for the largest lag."""
    lags = request.settings.values.get("lags_sequence") or [0]
    return request.noise(BATCH, request.settings.number(("context_length", "prediction_length"), 32) + max(lags))


def series_channels(request: Request) -> Tensor:
    """(B, time, channels)"""
    length = request.settings.number(("context_length",), 32)
    return request.noise(BATCH, length, request.settings.number(("num_input_channels", "input_size"), 1))


def series_features(request: Request) -> Tensor:
    """(B, time, features of time)"""
    count = request.settings.values.get("num_time_features") or 0
    return request.noise(BATCH, series(request).shape[1], count)


def series_mask(request: Request) -> Tensor:
    """(B, time)"""
    return torch.ones_like(series(request))


def boxes(request: Request) -> Tensor:
    """(B, T, 4): left, top, right, bottom, in order."""
    return request.integers(100, BATCH, TOKENS, 4).sort(-1).values


def latents(request: Request) -> Tensor:
    """(B, d, T)"""
    return states(request).mT.contiguous()


def _tiles(request: Request) -> int:
    return request.settings.part(VISION).number(("max_num_tiles",), 1)


def _patch(vision: Settings) -> int:
    return vision.sides("patch_size", 14)[0]


def _sides(request: Request) -> tuple[int, int]:
    vision = request.settings.part(VISION)
    whole = request.settings.sides("image_size", 0)
    return whole if whole[0] and not vision.values.get("image_size") else vision.sides("image_size", 64)


# Several makers: architectures give one name to tensors of different axes. They are tried in turn.
MAKERS: dict[str, tuple[Make, ...]] = {
    **dict.fromkeys(
        "input_ids decoder_input_ids qformer_input_ids task_inputs tasks_input_ids classes_input_ids ids".split(),
        (ids,),
    ),
    **dict.fromkeys("inputs x".split(), (ids, states)),
    **dict.fromkeys(
        "attention_mask decoder_attention_mask mask tasks_attention_mask classes_attention_mask".split(), (ones,)
    ),
    **dict.fromkeys(
        "inputs_embeds query_embeds context context_hidden_states noise_embeds action_embeds src tgt memory".split(),
        (states,),
    ),
    "hidden_states": (states, picture),
    "pixel_values": (picture, pictures, patch_rows),
    **dict.fromkeys("image images prompt_pixel_values prompt_masks".split(), (picture,)),
    **dict.fromkeys("pixel_values_videos video".split(), (pictures,)),
    "flattened_patches": (flattened_patches,),
    **dict.fromkeys("grid_thw image_grid_thw".split(), (grid,)),
    "merge_sizes": (lambda request: torch.ones(BATCH, dtype=torch.long),),
    "image_sizes": (image_sizes,),
    "aspect_ratio_ids": (tile_ids,),
    "aspect_ratio_mask": (tile_mask,),
    "spatial_shapes": (spatial_shapes,),
    "pixel_attention_mask": (patch_mask,),
    **dict.fromkeys(
        "input_features audio_mel spectrogram mel_spectrogram".split(), (spectrum, spectrum_frames, spectrum_picture)
    ),
    **dict.fromkeys(
        "input_features_mask feature_attention_mask audio_mel_mask".split(), (frame_mask, frame_mask_first)
    ),
    "input_values": (wave, wave_channel, spectrum_frames),
    "past_values": (series, series_channels),
    "past_time_features": (series_features,),
    "past_observed_mask": (series_mask,),
    **dict.fromkeys("bbox boxes".split(), (boxes,)),
    "latents": (latents,),
}
# The same where another argument tells which form pictures have.
MARKED: dict[str, dict[str, tuple[Make, ...]]] = {
    "grid_thw": {"hidden_states": (patches,), "pixel_values": (patches,)},
    "image_grid_thw": {"pixel_values": (patches,)},
    "aspect_ratio_ids": {"pixel_values": (tiles,)},
    "spatial_shapes": {"pixel_values": (patch_rows,)},
}


def makers(name: str, arguments: Collection[str]) -> tuple[Make, ...]:
    """The makers of an argument, given the names of all arguments; none where its name is not known."""
    marked = (table[name] for mark, table in MARKED.items() if mark in arguments and name in table)
    return next(marked, MAKERS.get(name, ()))
