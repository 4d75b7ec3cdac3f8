"""Small tensors for the arguments of `forward`, by their names, with sizes from a model's configuration: texts,
pictures, sounds and series.

Axes: B examples, T tokens, d width; C channels of a picture, H and W its sides, P the side of a patch, N patches of all
pictures.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from locater.discovery.example_settings import (
    AUDIO,
    BATCH,
    CHANNELS,
    MELS,
    TEXT,
    TOKENS,
    VISION,
    VOCABULARY,
    WIDTH,
    InputRequest,
    InputSettings,
    Make,
)

PATCH = ("patch_size", "spatial_patch_size", "vision_patch_size")
IMAGE = ("image_size", "img_size", "image_resolution", "resolution", "input_image_size", "max_img_size")
TEMPORAL = ("temporal_patch_size", "tubelet_size", "temporal_patch", "patch_temporal")
MERGED = ("pooling_kernel_size", "spatial_merge_size", "merge_size", "merge_kernel_size")
OPEN_SIDES = (64, 96)  # where a configuration has no size of pictures


def picture(request: InputRequest) -> Tensor:
    """(B, C, H, W)"""
    return request.noise(BATCH, _channels(request), *_sides(request))


def wide_picture(request: InputRequest) -> Tensor:
    """(B, C, 64, 96), whatever size the configuration has: convolutions take any that they can halve often enough."""
    return request.noise(BATCH, _channels(request), *OPEN_SIDES)


def pictures(request: InputRequest) -> Tensor:
    """(B, frames or pictures, C, H, W)"""
    names = ("num_frames", "frames_per_clip", "num_image_with_embedding")
    frames = request.settings.part(VISION).number(names, 2)
    return request.noise(BATCH, frames, _channels(request), *_sides(request))


def film_last(request: InputRequest) -> Tensor:
    """(B, frames, H, W, C): channels last."""
    frames = request.settings.part(VISION).number(TEMPORAL, 2)
    return request.noise(BATCH, frames, *_sides(request), _channels(request))


def tiles(request: InputRequest) -> Tensor:
    """(B, pictures, tiles, C, H, W)"""
    return request.noise(BATCH, 1, _tiles(request), _channels(request), *_sides(request))


def tile_ids(request: InputRequest) -> Tensor:
    """(B, pictures): the first form of a picture that there is, one tile."""
    return torch.ones(BATCH, 1, dtype=torch.long)


def tile_mask(request: InputRequest) -> Tensor:
    """(B, pictures, tiles)"""
    return torch.ones(BATCH, 1, _tiles(request), dtype=torch.long)


def patches(request: InputRequest) -> Tensor:
    """(N, C x frames x P x P): all pictures in one row of patches."""
    vision = request.settings.part(VISION)
    return request.noise(
        BATCH * _patches(request), _channels(request) * vision.number(TEMPORAL, 1) * _patch(vision) ** 2
    )


def square_patches(request: InputRequest) -> Tensor:
    """(N, C, P, P)"""
    side = _patch(request.settings.part(VISION))
    return request.noise(BATCH * _patches(request), _channels(request), side, side)


def row_of_squares(request: InputRequest) -> Tensor:
    """(1, N, C, P, P)"""
    return square_patches(request)[None]


def patch_rows(request: InputRequest) -> Tensor:
    """(B, patches, C x P x P)"""
    return request.noise(BATCH, _patches(request), _channels(request) * _patch(request.settings.part(VISION)) ** 2)


def patch_squares(request: InputRequest) -> Tensor:
    """(B, patches, C, P, P)"""
    side = _patch(request.settings.part(VISION))
    return request.noise(BATCH, _patches(request), _channels(request), side, side)


def patch_strip(request: InputRequest) -> Tensor:
    """(B, C, P, patches x P): patches side by side."""
    side = _patch(request.settings.part(VISION))
    return request.noise(BATCH, _channels(request), side, _patches(request) * side)


def patch_places(request: InputRequest) -> Tensor:
    """(B, patches, 2): column and row of each patch."""
    rows, columns = torch.meshgrid(*map(torch.arange, _grid(request)), indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], -1).expand(BATCH, -1, -1).contiguous()


def flattened_patches(request: InputRequest) -> Tensor:
    """(B, patches, 2 + C x P x P): row, column and pixels of each patch, counted from 1."""
    size = request.settings.number(("patch_embed_hidden_size",), 768)
    places = patch_places(request).flip(-1) + 1.0
    return torch.cat([places, request.noise(BATCH, _patches(request), size)], -1)


def grid(request: InputRequest) -> Tensor:
    """(B, 3): frames, rows and columns of patches of each picture."""
    return torch.tensor([[1, *_grid(request)]]).expand(BATCH, -1).contiguous()


def spatial_shapes(request: InputRequest) -> Tensor:
    """(B, 2): rows and columns of patches of each picture."""
    return torch.tensor([_grid(request)]).expand(BATCH, -1).contiguous()


def patch_mask(request: InputRequest) -> Tensor:
    """(B, patches)"""
    return torch.ones(BATCH, _patches(request), dtype=torch.long)


def picture_mask(request: InputRequest) -> Tensor:
    """(B, pictures)"""
    return torch.ones(BATCH, pictures(request).shape[1], dtype=torch.bool)


def half_picture(request: InputRequest) -> Tensor:
    """(B, C, H / 2, W): a model that puts its prompt below the picture."""
    height, width = _sides(request)
    return request.noise(BATCH, _channels(request), height // 2, width)


def image_sizes(request: InputRequest) -> Tensor:
    """(B, 2): height and width of each picture."""
    return torch.tensor([_pinpoint(request) or _sides(request)]).expand(BATCH, -1).contiguous()


def cut_pictures(request: InputRequest) -> Tensor:
    """(B, 1 + tiles, C, H, W): the picture made small, then its tiles, as many as the first size in the list has."""
    height, width = _sides(request)
    whole = _pinpoint(request) or (height, width)
    count = 1 + (whole[0] // height) * (whole[1] // width)
    return request.noise(BATCH, count, _channels(request), height, width)


def high_resolution(request: InputRequest) -> Tensor:
    """(B, C, H, W) for a second tower that sees more of a picture."""
    vision = request.settings.part(("high_res_vision_config",))
    return request.noise(BATCH, _channels(request), *vision.sides(IMAGE, _sides(request)))


def prompt_boxes(request: InputRequest) -> Tensor:
    """(B, 2, 4): two boxes in a picture, as shares of its sides."""
    return request.noise(BATCH, 2, 4).sigmoid().sort(-1).values


def _pinpoint(request: InputRequest) -> tuple[int, int] | None:
    """The first size in the list of those that a model cuts pictures to."""
    sizes = request.settings.values.get("image_grid_pinpoints")
    return tuple(sizes[0]) if sizes else None


def _grid(request: InputRequest) -> tuple[int, int]:
    """Rows and columns of patches: not as many of both, so that the two cannot be mixed up, and both divisible by the
    number that the model merges into one.
    """
    merged = request.settings.part(VISION).number(MERGED, 2)
    return 2 * merged, 3 * merged


def _patches(request: InputRequest) -> int:
    rows, columns = _grid(request)
    return rows * columns


def _channels(request: InputRequest) -> int:
    return request.settings.part(VISION).number(CHANNELS, 3)


def _tiles(request: InputRequest) -> int:
    return request.settings.part(VISION).number(("max_num_tiles",), 1)


def _patch(vision: InputSettings) -> int:
    return vision.sides(PATCH, (14, 14))[0]


def _sides(request: InputRequest) -> tuple[int, int]:
    whole, vision = request.settings, request.settings.part(VISION)
    return vision.sides(IMAGE, whole.sides(IMAGE, OPEN_SIDES))


# ---- sounds and series ----


SAMPLES = 3840


def spectrum(request: InputRequest) -> Tensor:
    """(B, mels, frames), as many frames as the positions of an encoder that halves them."""
    audio = request.settings.part(AUDIO)
    window = 4 * audio.number(("n_window",), 16)  # a multiple of what an encoder takes at a time
    frames = window if "n_window" in audio.values else 2 * audio.number(("max_source_positions",), 32)
    return request.noise(BATCH, audio.number(MELS, 80), frames)


def packed_spectrum(request: InputRequest) -> Tensor:
    """(mels, frames of all examples)"""
    return spectrum(request).transpose(0, 1).flatten(1)


def lengths(request: InputRequest) -> Tensor:
    """(B,): frames of each example."""
    return torch.full((BATCH,), spectrum(request).shape[-1])


def spectrum_frames(request: InputRequest) -> Tensor:
    """(B, frames, mels)"""
    audio = request.settings.part(AUDIO)
    frames = audio.number(("max_length", "num_frames"), 64)
    return request.noise(BATCH, min(frames, 1024), audio.number(MELS, 80))


def spectrum_picture(request: InputRequest) -> Tensor:
    """(B, 1, frames, mels)"""
    return spectrum_frames(request)[:, None]


def frame_mask(request: InputRequest) -> Tensor:
    """(B, frames), for `spectrum`."""
    return torch.ones(spectrum(request).shape[::2], dtype=torch.long)


def frame_mask_first(request: InputRequest) -> Tensor:
    """(B, frames), for `spectrum_frames`."""
    return torch.ones(spectrum_frames(request).shape[:2], dtype=torch.bool)


def wave(request: InputRequest) -> Tensor:
    """(B, samples)"""
    return request.noise(BATCH, SAMPLES)


def wave_channel(request: InputRequest) -> Tensor:
    """(B, 1, samples)"""
    return request.noise(BATCH, 1, SAMPLES)


def sample_mask(request: InputRequest) -> Tensor:
    """(B, samples)"""
    return torch.ones(BATCH, SAMPLES, dtype=torch.long)


def series(request: InputRequest) -> Tensor:
    """(B, time): a past long enough for the largest lag."""
    lags = request.settings.values.get("lags_sequence") or [0]
    return request.noise(BATCH, request.settings.number(("context_length", "prediction_length"), 32) + max(lags))


def series_channels(request: InputRequest) -> Tensor:
    """(B, time, channels)"""
    length = request.settings.number(("context_length",), 32)
    return request.noise(BATCH, length, request.settings.number(("num_input_channels", "input_size"), 1))


def series_features(request: InputRequest) -> Tensor:
    """(B, time, features of time)"""
    count = request.settings.values.get("num_time_features") or 0
    return request.noise(BATCH, series(request).shape[1], count)


def future(request: InputRequest) -> Tensor:
    """(B, time to predict)"""
    return request.noise(BATCH, request.settings.number(("prediction_length",), 8))


def future_features(request: InputRequest) -> Tensor:
    """(B, time to predict, features of time)"""
    count = request.settings.values.get("num_time_features") or 0
    return request.noise(BATCH, future(request).shape[1], count)


def series_mask(request: InputRequest) -> Tensor:
    """(B, time)"""
    return torch.ones_like(series(request))


BOOKS = ("num_codebooks", "n_codebooks", "num_rvq", "num_vq", "n_vq")


def ids(request: InputRequest) -> Tensor:
    """(B, T) token ids, without those of special tokens at both ends of small vocabularies."""
    vocabulary = request.words or request.settings.part(TEXT).number(VOCABULARY, 128)
    return request.integers(min(vocabulary, 100), BATCH, TOKENS, low=min(5, vocabulary - 1))


def codes(request: InputRequest) -> Tensor:
    """(B, T, codebooks)"""
    books = request.settings.part(TEXT).number(BOOKS, request.settings.number(BOOKS, 8))
    vocabulary = request.words or request.settings.number(VOCABULARY, 128)
    return request.integers(min(vocabulary, 100), BATCH, TOKENS, books)


def stacked_codes(request: InputRequest) -> Tensor:
    """(B x codebooks, T)"""
    return codes(request).mT.flatten(0, 1).contiguous()


def codes_first(request: InputRequest) -> Tensor:
    """(B, codebooks, T)"""
    return codes(request).mT.contiguous()


def text_and_codes(request: InputRequest) -> Tensor:
    """(B, T, 1 + codebooks): a token of text, then codes of sound."""
    books = codes(request)
    return torch.cat([ids(request)[..., None].clamp(max=int(books.max())), books], -1)


def ones(request: InputRequest) -> Tensor:
    """(B, T): every token counts."""
    return torch.ones(BATCH, TOKENS, dtype=torch.long)


def states(request: InputRequest) -> Tensor:
    """(B, T, d)"""
    return request.noise(BATCH, TOKENS, request.settings.number(WIDTH, 32))


def memory(request: InputRequest) -> Tensor:
    """(B, T, d), d that of the encoder whose states cross-attention reads."""
    names = ("encoder_hidden_size", "cross_attention_hidden_size", "vision_hidden_size", "hidden_size_cross")
    return request.noise(BATCH, TOKENS, request.settings.number((*names, *WIDTH), 32))


def latents(request: InputRequest) -> Tensor:
    """(B, d, T)"""
    return states(request).mT.contiguous()


def boxes(request: InputRequest) -> Tensor:
    """(B, T, 4): left, top, right, bottom, in order."""
    return request.integers(100, BATCH, TOKENS, 4).sort(-1).values


def regions(request: InputRequest) -> Tensor:
    """(B, T, features): regions of a picture, as a detector gives them."""
    return request.noise(BATCH, TOKENS, request.settings.number(("visual_feat_dim", "visual_embedding_dim"), 32))


def places(request: InputRequest) -> Tensor:
    """(B, T, 4): where the regions are, as shares of the sides."""
    return request.noise(BATCH, TOKENS, 4).sigmoid().sort(-1).values


def places_in_text(request: InputRequest) -> Tensor:
    """(B, T): which tokens a picture's features replace; as many as the features."""
    count = min(request.settings.number(("latent_query_num",), 4), TOKENS - 1)
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    mask[:, 1 : 1 + count] = 1
    return mask


def pictures_of_tokens(request: InputRequest) -> Tensor:
    """(B, T, pictures): which pictures a token looks at."""
    return torch.ones(BATCH, TOKENS, pictures(request).shape[1], dtype=torch.long)


TEXT_MAKERS: dict[str, tuple[Make, ...]] = {
    "input_ids": (ids, codes, stacked_codes, codes_first, text_and_codes),
    **dict.fromkeys(
        "qformer_input_ids task_inputs tasks_input_ids classes_input_ids protein_input_ids ids".split(), (ids,)
    ),
    **dict.fromkeys("inputs x".split(), (ids, states)),
    **dict.fromkeys(
        """attention_mask decoder_attention_mask mask tasks_attention_mask classes_attention_mask
        qformer_attention_mask protein_attention_mask""".split(),
        (ones,),
    ),
    **dict.fromkeys(
        "inputs_embeds query_embeds context context_hidden_states noise_embeds action_embeds src tgt memory".split(),
        (states,),
    ),
    "encoder_hidden_states": (memory,),
    "image_attention_mask": (pictures_of_tokens,),
    "image_embeds_position_mask": (places_in_text,),
    **dict.fromkeys("visual_feats visual_embeds".split(), (regions,)),
    "visual_pos": (places,),
    **dict.fromkeys("bbox boxes".split(), (boxes,)),
    "latents": (latents,),
    "state": (lambda request: request.noise(BATCH, request.settings.number(("max_state_dim", "state_dim"), 8)),),
}
DECODER_MAKERS: dict[str, tuple[Make, ...]] = {
    "decoder_input_ids": (ids, stacked_codes, codes),
    "last_hidden_state": (states,),
}
PICTURE_MAKERS: dict[str, tuple[Make, ...]] = {
    "hidden_states": (states, picture, spectrum_frames),
    "pixel_values": (
        picture,
        pictures,
        patch_rows,
        wide_picture,
        film_last,
        patch_squares,
    ),
    **dict.fromkeys("image images prompt_pixel_values prompt_masks".split(), (picture,)),
    **dict.fromkeys("pixel_values_videos video".split(), (pictures,)),
    "flattened_patches": (flattened_patches,),
    **dict.fromkeys("grid_thw image_grid_thw".split(), (grid,)),
    **dict.fromkeys("grid_hw image_grid_hw target_sizes spatial_shapes".split(), (spatial_shapes,)),
    **dict.fromkeys("pixel_position_ids image_position_ids".split(), (patch_places,)),
    **dict.fromkeys("merge_sizes image_merge_sizes".split(), (lambda request: torch.ones(BATCH, dtype=torch.long),)),
    "high_res_pixel_values": (high_resolution,),
    "input_boxes": (prompt_boxes,),
    "input_boxes_labels": (lambda request: torch.ones(BATCH, 2, dtype=torch.long),),
    "image_sizes": (image_sizes,),
    "aspect_ratio_ids": (tile_ids,),
    "aspect_ratio_mask": (tile_mask,),
    "pixel_attention_mask": (patch_mask, picture_mask),
}
SOUND_MAKERS: dict[str, tuple[Make, ...]] = {
    **dict.fromkeys(
        "input_features audio_mel spectrogram mel_spectrogram".split(),
        (spectrum, spectrum_frames, spectrum_picture),
    ),
    **dict.fromkeys(
        "input_features_mask feature_attention_mask audio_mel_mask".split(),
        (frame_mask, frame_mask_first),
    ),
    "input_values": (wave, wave_channel, spectrum_frames),
    "padding_mask": (sample_mask,),
    **dict.fromkeys("feature_lens audio_feature_lengths".split(), (lengths,)),
    "past_values": (series, series_channels),
    "past_time_features": (series_features,),
    "future_values": (future,),
    "future_time_features": (future_features,),
    "past_observed_mask": (series_mask,),
}
# Architectures give one name to tensors of different axes: several makers, tried in turn, those of one group together.
GROUPS = (TEXT_MAKERS, DECODER_MAKERS, PICTURE_MAKERS, SOUND_MAKERS)
# The same where another argument tells which form pictures have.
PACKED = (patches, square_patches, row_of_squares)
MARKED: dict[str, dict[str, tuple[Make, ...]]] = {
    "grid_thw": {"hidden_states": PACKED, "pixel_values": (*PACKED, patch_squares)},
    "image_grid_thw": {"pixel_values": (*PACKED, patch_squares)},
    **{key: {"pixel_values": PACKED} for key in ("grid_hw", "image_grid_hw")},
    "aspect_ratio_ids": {"pixel_values": (tiles,)},
    "image_sizes": {"pixel_values": (cut_pictures, picture, pictures)},
    "spatial_shapes": {"pixel_values": (patch_rows,)},
    "target_sizes": {"pixel_values": (patch_strip, patch_rows)},
    **{key: {"pixel_values": (patch_rows,)} for key in ("pixel_position_ids", "image_position_ids")},
    "image_attention_mask": {"pixel_values": (pictures,)},
    "feature_lens": {"input_features": (packed_spectrum,)},
    "prompt_pixel_values": dict.fromkeys(("pixel_values", "prompt_pixel_values", "prompt_masks"), (half_picture,)),
}


def makers(name: str, arguments: Collection[str]) -> tuple[Make, ...]:
    """The makers of an argument, given the names of all arguments; none where its name is not known."""
    marked = (table[name] for mark, table in MARKED.items() if mark in arguments and name in table)
    tables = (table[name] for table in GROUPS if name in table)
    return next(marked, next(tables, ()))


def group_of(name: str) -> int:
    """Arguments of one group take the same way of making: text, text of a decoder, pictures, sounds."""
    return next((number for number, table in enumerate(GROUPS) if name in table), 0)
