"""Small pictures, sounds and series, and what goes with them, as the arguments of `forward` take them.

Axes: B examples, C channels of a picture, H and W its sides, P the side of a patch, N patches of all pictures.
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater.discovery.example_settings import AUDIO, BATCH, CHANNELS, MELS, VISION, Request, Settings

PATCH = ("patch_size", "spatial_patch_size", "vision_patch_size")
IMAGE = ("image_size", "img_size", "image_resolution", "resolution", "input_image_size", "max_img_size")
TEMPORAL = ("temporal_patch_size", "tubelet_size", "temporal_patch", "patch_temporal")
MERGED = ("pooling_kernel_size", "spatial_merge_size", "merge_size", "merge_kernel_size")
OPEN_SIDES = (64, 96)  # where a configuration has no size of pictures


def picture(request: Request) -> Tensor:
    """(B, C, H, W)"""
    return request.noise(BATCH, _channels(request), *_sides(request))


def wide_picture(request: Request) -> Tensor:
    """(B, C, 64, 96), whatever size the configuration has: convolutions take any that they can halve often enough."""
    return request.noise(BATCH, _channels(request), *OPEN_SIDES)


def pictures(request: Request) -> Tensor:
    """(B, frames or pictures, C, H, W)"""
    names = ("num_frames", "frames_per_clip", "num_image_with_embedding")
    frames = request.settings.part(VISION).number(names, 2)
    return request.noise(BATCH, frames, _channels(request), *_sides(request))


def film_last(request: Request) -> Tensor:
    """(B, frames, H, W, C): channels last."""
    frames = request.settings.part(VISION).number(TEMPORAL, 2)
    return request.noise(BATCH, frames, *_sides(request), _channels(request))


def tiles(request: Request) -> Tensor:
    """(B, pictures, tiles, C, H, W)"""
    return request.noise(BATCH, 1, _tiles(request), _channels(request), *_sides(request))


def tile_ids(request: Request) -> Tensor:
    """(B, pictures): the first form of a picture that there is, one tile."""
    return torch.ones(BATCH, 1, dtype=torch.long)


def tile_mask(request: Request) -> Tensor:
    """(B, pictures, tiles)"""
    return torch.ones(BATCH, 1, _tiles(request), dtype=torch.long)


def patches(request: Request) -> Tensor:
    """(N, C x frames x P x P): all pictures in one row of patches."""
    vision = request.settings.part(VISION)
    return request.noise(
        BATCH * _patches(request), _channels(request) * vision.number(TEMPORAL, 1) * _patch(vision) ** 2
    )


def square_patches(request: Request) -> Tensor:
    """(N, C, P, P)"""
    side = _patch(request.settings.part(VISION))
    return request.noise(BATCH * _patches(request), _channels(request), side, side)


def row_of_squares(request: Request) -> Tensor:
    """(1, N, C, P, P)"""
    return square_patches(request)[None]


def patch_rows(request: Request) -> Tensor:
    """(B, patches, C x P x P)"""
    return request.noise(BATCH, _patches(request), _channels(request) * _patch(request.settings.part(VISION)) ** 2)


def patch_squares(request: Request) -> Tensor:
    """(B, patches, C, P, P)"""
    side = _patch(request.settings.part(VISION))
    return request.noise(BATCH, _patches(request), _channels(request), side, side)


def patch_strip(request: Request) -> Tensor:
    """(B, C, P, patches x P): patches side by side."""
    side = _patch(request.settings.part(VISION))
    return request.noise(BATCH, _channels(request), side, _patches(request) * side)


def patch_places(request: Request) -> Tensor:
    """(B, patches, 2): column and row of each patch."""
    rows, columns = torch.meshgrid(*map(torch.arange, _grid(request)), indexing="ij")
    return torch.stack([columns.flatten(), rows.flatten()], -1).expand(BATCH, -1, -1).contiguous()


def flattened_patches(request: Request) -> Tensor:
    """(B, patches, 2 + C x P x P): row, column and pixels of each patch, counted from 1."""
    size = request.settings.number(("patch_embed_hidden_size",), 768)
    places = patch_places(request).flip(-1) + 1.0
    return torch.cat([places, request.noise(BATCH, _patches(request), size)], -1)


def grid(request: Request) -> Tensor:
    """(B, 3): frames, rows and columns of patches of each picture."""
    return torch.tensor([[1, *_grid(request)]]).expand(BATCH, -1).contiguous()


def spatial_shapes(request: Request) -> Tensor:
    """(B, 2): rows and columns of patches of each picture."""
    return torch.tensor([_grid(request)]).expand(BATCH, -1).contiguous()


def patch_mask(request: Request) -> Tensor:
    """(B, patches)"""
    return torch.ones(BATCH, _patches(request), dtype=torch.long)


def picture_mask(request: Request) -> Tensor:
    """(B, pictures)"""
    return torch.ones(BATCH, pictures(request).shape[1], dtype=torch.bool)


def half_picture(request: Request) -> Tensor:
    """(B, C, H / 2, W): a model that puts its prompt below the picture."""
    height, width = _sides(request)
    return request.noise(BATCH, _channels(request), height // 2, width)


def image_sizes(request: Request) -> Tensor:
    """(B, 2): height and width of each picture."""
    return torch.tensor([_pinpoint(request) or _sides(request)]).expand(BATCH, -1).contiguous()


def cut_pictures(request: Request) -> Tensor:
    """(B, 1 + tiles, C, H, W): the picture made small, then its tiles, as many as the first size in the list has."""
    height, width = _sides(request)
    whole = _pinpoint(request) or (height, width)
    count = 1 + (whole[0] // height) * (whole[1] // width)
    return request.noise(BATCH, count, _channels(request), height, width)


def high_resolution(request: Request) -> Tensor:
    """(B, C, H, W) for a second tower that sees more of a picture."""
    vision = request.settings.part(("high_res_vision_config",))
    return request.noise(BATCH, _channels(request), *vision.sides(IMAGE, _sides(request)))


def prompt_boxes(request: Request) -> Tensor:
    """(B, 2, 4): two boxes in a picture, as shares of its sides."""
    return request.noise(BATCH, 2, 4).sigmoid().sort(-1).values


def _pinpoint(request: Request) -> tuple[int, int] | None:
    """The first size in the list of those that a model cuts pictures to."""
    sizes = request.settings.values.get("image_grid_pinpoints")
    return tuple(sizes[0]) if sizes else None


def _grid(request: Request) -> tuple[int, int]:
    """Rows and columns of patches: not as many of both, so that the two cannot be mixed up, and both divisible by the
    number that the model merges into one.
    """
    merged = request.settings.part(VISION).number(MERGED, 2)
    return 2 * merged, 3 * merged


def _patches(request: Request) -> int:
    rows, columns = _grid(request)
    return rows * columns


def _channels(request: Request) -> int:
    return request.settings.part(VISION).number(CHANNELS, 3)


def _tiles(request: Request) -> int:
    return request.settings.part(VISION).number(("max_num_tiles",), 1)


def _patch(vision: Settings) -> int:
    return vision.sides(PATCH, (14, 14))[0]


def _sides(request: Request) -> tuple[int, int]:
    whole, vision = request.settings, request.settings.part(VISION)
    return vision.sides(IMAGE, whole.sides(IMAGE, OPEN_SIDES))


# ---- sounds and series ----


SAMPLES = 3840


def spectrum(request: Request) -> Tensor:
    """(B, mels, frames), as many frames as the positions of an encoder that halves them."""
    audio = request.settings.part(AUDIO)
    window = 4 * audio.number(("n_window",), 16)  # a multiple of what an encoder takes at a time
    frames = window if "n_window" in audio.values else 2 * audio.number(("max_source_positions",), 32)
    return request.noise(BATCH, audio.number(MELS, 80), frames)


def packed_spectrum(request: Request) -> Tensor:
    """(mels, frames of all examples)"""
    return spectrum(request).transpose(0, 1).flatten(1)


def lengths(request: Request) -> Tensor:
    """(B,): frames of each example."""
    return torch.full((BATCH,), spectrum(request).shape[-1])


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
    return torch.ones(spectrum_frames(request).shape[:2], dtype=torch.bool)


def wave(request: Request) -> Tensor:
    """(B, samples)"""
    return request.noise(BATCH, SAMPLES)


def wave_channel(request: Request) -> Tensor:
    """(B, 1, samples)"""
    return request.noise(BATCH, 1, SAMPLES)


def sample_mask(request: Request) -> Tensor:
    """(B, samples)"""
    return torch.ones(BATCH, SAMPLES, dtype=torch.long)


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


def future(request: Request) -> Tensor:
    """(B, time to predict)"""
    return request.noise(BATCH, request.settings.number(("prediction_length",), 8))


def future_features(request: Request) -> Tensor:
    """(B, time to predict, features of time)"""
    count = request.settings.values.get("num_time_features") or 0
    return request.noise(BATCH, future(request).shape[1], count)


def series_mask(request: Request) -> Tensor:
    """(B, time)"""
    return torch.ones_like(series(request))
