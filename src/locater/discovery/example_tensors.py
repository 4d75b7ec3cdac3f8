"""Small tensors for the arguments of `forward`, by their names, with sizes from a model's configuration.

Axes: B examples, T tokens, d width.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import Tensor

from locater.discovery import example_pictures_and_sounds as made
from locater.discovery.example_settings import BATCH, TEXT, TOKENS, VOCABULARY, WIDTH, Make, Request

BOOKS = ("num_codebooks", "n_codebooks", "num_rvq", "num_vq", "n_vq")


def ids(request: Request) -> Tensor:
    """(B, T) token ids, without those of special tokens at both ends of small vocabularies."""
    vocabulary = request.words or request.settings.part(TEXT).number(VOCABULARY, 128)
    return request.integers(min(vocabulary, 100), BATCH, TOKENS, low=min(5, vocabulary - 1))


def codes(request: Request) -> Tensor:
    """(B, T, codebooks)"""
    books = request.settings.part(TEXT).number(BOOKS, request.settings.number(BOOKS, 8))
    vocabulary = request.words or request.settings.number(VOCABULARY, 128)
    return request.integers(min(vocabulary, 100), BATCH, TOKENS, books)


def stacked_codes(request: Request) -> Tensor:
    """(B x codebooks, T)"""
    return codes(request).mT.flatten(0, 1).contiguous()


def codes_first(request: Request) -> Tensor:
    """(B, codebooks, T)"""
    return codes(request).mT.contiguous()


def text_and_codes(request: Request) -> Tensor:
    """(B, T, 1 + codebooks): a token of text, then codes of sound."""
    books = codes(request)
    return torch.cat([ids(request)[..., None].clamp(max=int(books.max())), books], -1)


def ones(request: Request) -> Tensor:
    """(B, T): every token counts."""
    return torch.ones(BATCH, TOKENS, dtype=torch.long)


def states(request: Request) -> Tensor:
    """(B, T, d)"""
    return request.noise(BATCH, TOKENS, request.settings.number(WIDTH, 32))


def memory(request: Request) -> Tensor:
    """(B, T, d), d that of the encoder whose states cross-attention reads."""
    names = ("encoder_hidden_size", "cross_attention_hidden_size", "vision_hidden_size", "hidden_size_cross")
    return request.noise(BATCH, TOKENS, request.settings.number((*names, *WIDTH), 32))


def latents(request: Request) -> Tensor:
    """(B, d, T)"""
    return states(request).mT.contiguous()


def boxes(request: Request) -> Tensor:
    """(B, T, 4): left, top, right, bottom, in order."""
    return request.integers(100, BATCH, TOKENS, 4).sort(-1).values


def regions(request: Request) -> Tensor:
    """(B, T, features): regions of a picture, as a detector gives them."""
    return request.noise(BATCH, TOKENS, request.settings.number(("visual_feat_dim", "visual_embedding_dim"), 32))


def places(request: Request) -> Tensor:
    """(B, T, 4): where the regions are, as shares of the sides."""
    return request.noise(BATCH, TOKENS, 4).sigmoid().sort(-1).values


def places_in_text(request: Request) -> Tensor:
    """(B, T): which tokens a picture's features replace; as many as the features."""
    count = min(request.settings.number(("latent_query_num",), 4), TOKENS - 1)
    mask = torch.zeros(BATCH, TOKENS, dtype=torch.long)
    mask[:, 1 : 1 + count] = 1
    return mask


def pictures_of_tokens(request: Request) -> Tensor:
    """(B, T, pictures): which pictures a token looks at."""
    return torch.ones(BATCH, TOKENS, made.pictures(request).shape[1], dtype=torch.long)


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
    "hidden_states": (states, made.picture, made.spectrum_frames),
    "pixel_values": (
        made.picture,
        made.pictures,
        made.patch_rows,
        made.wide_picture,
        made.film_last,
        made.patch_squares,
    ),
    **dict.fromkeys("image images prompt_pixel_values prompt_masks".split(), (made.picture,)),
    **dict.fromkeys("pixel_values_videos video".split(), (made.pictures,)),
    "flattened_patches": (made.flattened_patches,),
    **dict.fromkeys("grid_thw image_grid_thw".split(), (made.grid,)),
    **dict.fromkeys("grid_hw image_grid_hw target_sizes spatial_shapes".split(), (made.spatial_shapes,)),
    **dict.fromkeys("pixel_position_ids image_position_ids".split(), (made.patch_places,)),
    **dict.fromkeys("merge_sizes image_merge_sizes".split(), (lambda request: torch.ones(BATCH, dtype=torch.long),)),
    "high_res_pixel_values": (made.high_resolution,),
    "input_boxes": (made.prompt_boxes,),
    "input_boxes_labels": (lambda request: torch.ones(BATCH, 2, dtype=torch.long),),
    "image_sizes": (made.image_sizes,),
    "aspect_ratio_ids": (made.tile_ids,),
    "aspect_ratio_mask": (made.tile_mask,),
    "pixel_attention_mask": (made.patch_mask, made.picture_mask),
}
SOUND_MAKERS: dict[str, tuple[Make, ...]] = {
    **dict.fromkeys(
        "input_features audio_mel spectrogram mel_spectrogram".split(),
        (made.spectrum, made.spectrum_frames, made.spectrum_picture),
    ),
    **dict.fromkeys(
        "input_features_mask feature_attention_mask audio_mel_mask".split(),
        (made.frame_mask, made.frame_mask_first),
    ),
    "input_values": (made.wave, made.wave_channel, made.spectrum_frames),
    "padding_mask": (made.sample_mask,),
    **dict.fromkeys("feature_lens audio_feature_lengths".split(), (made.lengths,)),
    "past_values": (made.series, made.series_channels),
    "past_time_features": (made.series_features,),
    "future_values": (made.future,),
    "future_time_features": (made.future_features,),
    "past_observed_mask": (made.series_mask,),
}
# Architectures give one name to tensors of different axes: several makers, tried in turn, those of one group together.
GROUPS = (TEXT_MAKERS, DECODER_MAKERS, PICTURE_MAKERS, SOUND_MAKERS)
# The same where another argument tells which form pictures have.
PACKED = (made.patches, made.square_patches, made.row_of_squares)
MARKED: dict[str, dict[str, tuple[Make, ...]]] = {
    "grid_thw": {"hidden_states": PACKED, "pixel_values": (*PACKED, made.patch_squares)},
    "image_grid_thw": {"pixel_values": (*PACKED, made.patch_squares)},
    **{key: {"pixel_values": PACKED} for key in ("grid_hw", "image_grid_hw")},
    "aspect_ratio_ids": {"pixel_values": (made.tiles,)},
    "image_sizes": {"pixel_values": (made.cut_pictures, made.picture, made.pictures)},
    "spatial_shapes": {"pixel_values": (made.patch_rows,)},
    "target_sizes": {"pixel_values": (made.patch_strip, made.patch_rows)},
    **{key: {"pixel_values": (made.patch_rows,)} for key in ("pixel_position_ids", "image_position_ids")},
    "image_attention_mask": {"pixel_values": (made.pictures,)},
    "feature_lens": {"input_features": (made.packed_spectrum,)},
    "prompt_pixel_values": dict.fromkeys(("pixel_values", "prompt_pixel_values", "prompt_masks"), (made.half_picture,)),
}


def makers(name: str, arguments: Collection[str]) -> tuple[Make, ...]:
    """The makers of an argument, given the names of all arguments; none where its name is not known."""
    marked = (table[name] for mark, table in MARKED.items() if mark in arguments and name in table)
    tables = (table[name] for table in GROUPS if name in table)
    return next(marked, next(tables, ()))


def group_of(name: str) -> int:
    """Arguments of one group take the same way of making: text, text of a decoder, pictures, sounds."""
    return next((number for number, table in enumerate(GROUPS) if name in table), 0)
