"""Small sounds and series, as the arguments of `forward` take them.

Axes: B examples, frames or samples of time, mels (bands of a spectrum).
"""

from __future__ import annotations

import torch
from torch import Tensor

from locater.discovery.example_settings import AUDIO, BATCH, MELS, Request

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
