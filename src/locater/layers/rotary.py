"""Rotary positions: frequencies from a model's configuration, the rotation, and its effect on a head's drive.

Only frequencies are stored; a pair of channels (i, i + n/2) turns by `frequency_i` per position. Frequencies and angles
are float32, as in the models themselves: at position 8,000 the rounding of an angle is no longer small, and it is the
model's own rounding that has to be met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from locater.brief import brief
from locater.errors import LocaterError
from locater.layers.position_biases import PositionsError, refuse_other_length


@dataclass(frozen=True)
class Rotary:
    """The first 2 * len(frequencies) channels of each head turn; the rest pass."""

    frequencies: Float[Tensor, " pairs"]
    amplitude: float = 1.0  # of the rotated channels: some length extensions (yarn) scale them
    first: int = 0  # the model's number for position 0; no product of queries and keys depends on it

    __repr__ = brief

    @property
    def channels(self) -> int:
        return 2 * len(self.frequencies)

    def rotate(self, x: Float[Tensor, "*b t h"], positions: Tensor) -> Float[Tensor, "*b t h"]:
        angle = (positions + self.first).float()[..., None] * self.frequencies.to(positions.device)  # (..., t, pairs)
        precise = torch.promote_types(x.dtype, torch.float32)
        cos, sin = ((f(angle).to(x.device, precise) * self.amplitude).to(x) for f in (torch.cos, torch.sin))
        turning, rest = x[..., : self.channels], x[..., self.channels :]
        first, second = turning.chunk(2, -1)
        return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], -1)

    def drive(self, gram: Float[Tensor, "*n h h"], offsets: Tensor) -> Float[Tensor, "*n offsets"]:
        """tr(R_delta^T G): the mean logit, before the scale, of a token with a copy of itself delta positions back.

        G = W_K W_Q^T as in `Moments.gram`, its amplitude already folded in; delta = 0 gives the trace.
        """
        even, odd, still = self.drive_terms(gram)
        angle = offsets.double()[:, None] * self.frequencies.double()  # (offsets, pairs)
        return even @ torch.cos(angle).mT + odd @ torch.sin(angle).mT + still[..., None]

    def drive_terms(
        self, gram: Float[Tensor, "*n h h"]
    ) -> tuple[Float[Tensor, "*n pairs"], Float[Tensor, "*n pairs"], Float[Tensor, "*n"]]:
        """(even, odd, still) with drive(delta) = sum_i even_i cos(f_i delta) + odd_i sin(f_i delta) + still."""
        g, n = gram.double(), len(self.frequencies)
        diagonal = g.diagonal(dim1=-2, dim2=-1)
        first = torch.arange(n, device=g.device)
        second = first + n
        even = diagonal[..., :n] + diagonal[..., n : 2 * n]
        odd = g[..., second, first] - g[..., first, second]
        return even, odd, diagonal[..., 2 * n :].sum(-1)


@dataclass(frozen=True)
class RotaryTable:
    """Rotations by angles that are not position times frequency, such as those of rows and columns of an image. The
    first 2 * pairs channels of each head turn, as for `Rotary`; only positions of the table are known.
    """

    angles: Float[Tensor, "positions pairs"]

    __repr__ = brief

    def rotate(self, x: Float[Tensor, "*b t h"], positions: Tensor) -> Float[Tensor, "*b t h"]:
        refuse_other_length(positions, len(self.angles))
        if int(positions.max()) >= len(self.angles):
            raise PositionsError(
                f"its angles are known for {len(self.angles)} positions, and not for position {int(positions.max())}: "
                "discover the model with inputs of that size"
            )
        angle = self.angles[positions].to(x)
        channels = 2 * self.angles.shape[1]
        first, second = x[..., :channels].chunk(2, -1)
        cos, sin = angle.cos(), angle.sin()
        return torch.cat([first * cos - second * sin, second * cos + first * sin, x[..., channels:]], -1)


def rotary_from_config(config: Mapping[str, Any], head_dim: int, kind: str | None = None, share: float = 1.0) -> Rotary:
    """Rotary positions as `config` describes them; `kind` picks an entry where layer types differ (Gemma 3).

    `share` is the part of the channels that turns, where the configuration does not say.
    """
    rope: Mapping[str, Any] = config.get("rope_parameters") or {}
    if kind is not None and kind in rope:
        rope = rope[kind]
    rope = {**(config.get("rope_scaling") or {}), **rope}
    base = float(_first(rope.get("rope_theta"), config.get("rope_theta"), 10_000.0))
    share = float(_first(rope.get("partial_rotary_factor"), config.get("partial_rotary_factor"), share))
    channels = int(head_dim * share)
    frequencies = 1.0 / base ** (torch.arange(0, channels, 2).float() / channels)
    if 2 * len(frequencies) > head_dim:
        raise LocaterError(
            f"the configuration turns {channels} channels of heads that have {head_dim}: only pairs can turn"
        )
    how = rope.get("rope_type", rope.get("type", "default"))
    try:
        if how == "default":
            return Rotary(frequencies)
        if how == "linear":
            return Rotary(frequencies / _needed("factor", rope))
        if how == "llama3":
            return Rotary(_llama3(frequencies, rope))
        if how == "yarn":
            return _yarn(frequencies, base, channels, rope, config)
        if how == "longrope":
            return _longrope(base, channels, rope, config)
    except KeyError as missing:
        raise LocaterError(
            f"the configuration has rotary positions of type {how!r} without {missing}: add it"
        ) from None
    raise LocaterError(
        f"rotary positions of type {how!r} are not supported (default, linear, llama3, longrope and yarn are); "
        "moments do not need them: name the tensors with --query and --key"
    )


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Slow channels (wavelength beyond the trained length) are slowed by `factor`, fast ones not; a ramp between."""
    length = _needed("original_max_position_embeddings", rope)
    low, high = _needed("low_freq_factor", rope), _needed("high_freq_factor", rope)
    if high <= low:
        raise LocaterError(
            f"the configuration says high_freq_factor = {high:g}, not above low_freq_factor = {low:g}: correct it"
        )
    turns = length * frequencies / (2 * math.pi)
    keep = ((turns - low) / (high - low)).clamp(0, 1)
    return frequencies * (keep + (1 - keep) / _needed("factor", rope))


def _yarn(
    frequencies: Tensor, base: float, channels: int, rope: Mapping[str, Any], config: Mapping[str, Any]
) -> Rotary:
    factor = _needed("factor", rope)
    length = float(rope.get("original_max_position_embeddings") or _needed("max_position_embeddings", config))
    if base <= 1:
        raise LocaterError(
            f"the configuration says rope_theta = {base:g} with yarn, which needs one above 1: correct it"
        )

    def channel(turns: float) -> float:  # the channel that makes this many turns over the trained length
        return channels * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = channel(float(rope.get("beta_fast") or 32)), channel(float(rope.get("beta_slow") or 1))
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, channels - 1)
    ramp = ((torch.arange(channels // 2).float() - low) / max(high - low, 1e-3)).clamp(0, 1)
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        mscale, mscale_all = rope.get("mscale"), rope.get("mscale_all_dim")
        amplitude = (
            yarn_scale(factor, mscale) / yarn_scale(factor, mscale_all)
            if mscale and mscale_all
            else yarn_scale(factor, 1.0)
        )
    return Rotary(frequencies * (ramp / factor + 1 - ramp), float(amplitude))


def _longrope(base: float, channels: int, rope: Mapping[str, Any], config: Mapping[str, Any]) -> Rotary:
    """A factor per channel. Of its two sets, the one for sequences up to the trained length: longer ones use
    `long_factor`.
    """
    amplitude = rope.get("attention_factor")
    if amplitude is None:
        length = _needed("original_max_position_embeddings", rope, config)
        factor = float(rope.get("factor") or _needed("max_position_embeddings", config) / length)
        amplitude = math.sqrt(1 + math.log(factor) / math.log(length)) if factor > 1 else 1.0
    slowed = torch.tensor(rope["short_factor"], dtype=torch.float32)
    if len(slowed) != channels // 2:
        raise LocaterError(
            f"the configuration slows {len(slowed)} pairs of channels (short_factor) of heads that turn {channels // 2}"
        )
    return Rotary(1.0 / (slowed * base ** (torch.arange(0, channels, 2).float() / channels)), float(amplitude))


def _first(*values: Any) -> Any:
    """The first value that is not None (null in a configuration)."""
    return next(value for value in values if value is not None)


def _needed(key: str, *settings: Mapping[str, Any]) -> float:
    """A required number, from the first of `settings` that has it."""
    value = next((config[key] for config in settings if config.get(key) is not None), None)
    if value is None:
        raise KeyError(key)
    return float(value)


def yarn_scale(factor: float, weight: float) -> float:
    return 0.1 * weight * math.log(factor) + 1 if factor > 1 else 1.0


def halves(channels: int) -> list[int]:
    """Row order for models that turn neighbouring channels (0, 1), (2, 3), ...: it brings each pair to (i, i + n/2).

    Applied to the rows of queries and keys alike; their product does not see it.
    """
    return [*range(0, channels, 2), *range(1, channels, 2)]
