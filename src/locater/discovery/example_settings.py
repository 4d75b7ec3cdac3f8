"""Sizes for made-up inputs, looked up in a model's configuration by the names that configurations give them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

TEXT = ("text_config", "text", "decoder", "text_encoder", "llm_config", "language_config")
VISION = ("vision_config", "vision", "image_config", "encoder", "backbone_config", "vision_encoder_config")
AUDIO = (
    "audio_config audio_encoder_config sound_config asr_config asr_encoder_config encoder_config encoder"
    " speech_config audio_encoder"
).split()
VOCABULARY = ("vocab_size", "text_vocab_size", "n_vocab", "n_words", "char_vocab_size", "num_embeddings")
WIDTH = ("hidden_size", "d_model", "n_embd", "embed_dim", "dim", "hidden_dim", "width", "encoder_embed_dim")
CHANNELS = ("num_channels", "in_channels", "in_chans", "n_channels", "input_channels", "num_image_channels")
MELS = (
    "num_mel_bins feature_projection_input_dim input_feat_per_channel input_feat_size n_mels input_dim feature_size"
    " input_size mel_bins num_mels num_features mel_dim"
).split()
BATCH, TOKENS = 2, 9


@dataclass(frozen=True)
class InputSettings:
    """A configuration as a mapping, with the configurations of its parts."""

    values: Mapping[str, Any]

    def part(self, names: Sequence[str]) -> InputSettings:
        """The first of the named parts that there is, here and then in parts of this configuration, or the whole."""
        return self._part(names) or self

    def _part(self, names: Sequence[str]) -> InputSettings | None:
        direct = next((self.values[name] for name in names if isinstance(self.values.get(name), Mapping)), None)
        if direct is not None:
            return InputSettings(direct)
        inner = (value for value in self.values.values() if isinstance(value, Mapping) and "model_type" in value)
        return next((part for value in inner if (part := InputSettings(value)._part(names)) is not None), None)

    def number(self, names: Iterable[str], default: int) -> int:
        """The first whole number above zero under one of the names, here and then in parts of this configuration."""
        names = list(names)
        for name in names:
            value = self.values.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                return value
        inner = [value for value in self.values.values() if isinstance(value, Mapping)]
        numbers = (InputSettings(value).number(names, 0) for value in inner if "model_type" in value)
        return next((number for number in numbers if number), default)

    def sides(self, names: Sequence[str], default: tuple[int, int]) -> tuple[int, int]:
        """Height and width under a name that has a number, a pair or a mapping with height and width, here and then in
        parts of this configuration.
        """
        for name in names:
            value = self.values.get(name)
            if isinstance(value, Mapping):
                value = [value.get("height"), value.get("width")]
            if isinstance(value, int) and value > 0:
                return value, value
            if isinstance(value, (list, tuple)) and len(value) >= 2 and all(isinstance(side, int) for side in value):
                return value[-2], value[-1]
        inner = [value for value in self.values.values() if isinstance(value, Mapping)]
        sides = (InputSettings(value).sides(names, (0, 0)) for value in inner if "model_type" in value)
        return next((pair for pair in sides if pair[0]), default)


@dataclass(frozen=True)
class InputRequest:
    """What a maker needs: the configuration, and where random numbers come from."""

    settings: InputSettings
    random: torch.Generator
    words: int | None = None  # how many embeddings the model has for tokens, where it says so

    def noise(self, *shape: int) -> Tensor:
        return torch.randn(*shape, generator=self.random)

    def integers(self, high: int, *shape: int, low: int = 0) -> Tensor:
        return torch.randint(low, max(high, low + 1), shape, generator=self.random)


Make = Callable[[InputRequest], Tensor]
