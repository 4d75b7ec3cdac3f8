"""What lies between two places of a tape: a part of it is computed again on probes, and the results tell which channels
go where, by which factor, and how they turn with position.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.families.discovered_calls import UnreadableError
from locater.tape import Node, replay

CLOSE = 1e-6  # of a probe that should be equal
SMALL, LARGE = 1e-3, 1e6  # sizes of probes: where they do not agree, numbers are clipped or bent


@dataclass(frozen=True)
class Routing:
    """Which channel of `cut` each channel of a target is, at the first position."""

    sources: Tensor  # (H, h): channel of the cut
    factor: float  # the same for all channels
    shift: Tensor  # (H, h): added apart from the map


@dataclass(frozen=True)
class Turning:
    """Pairs of channels that turn together: (first, second) of each pair, and angles (T, pairs)."""

    first: list[int]
    second: list[int]
    angles: Tensor
    amplitude: float


Canonical = Callable[[Tensor], Tensor]  # the target's value to (B, H, T, h)
Probe = Callable[[Tensor], Tensor]  # numbers of the cut's channels to (H, T, h), the same at every token


def probing(target: Node, cut: Node, canonical: Canonical) -> Probe:
    """Gives every token the same channels at `cut`, and returns what arrives at `target`."""

    def probe(channels: Tensor) -> Tensor:
        given = channels.to(cut.value).expand(cut.value.shape).clone()
        result = canonical(replay(target, {cut: given})).double()
        if not torch.isfinite(result).all():
            raise UnreadableError("a probe of its maps is not finite")
        if (result - result[:1]).abs().max() > CLOSE * result.abs().max():
            raise UnreadableError("sequences of one batch are computed differently")
        return result[0]

    return probe


def routing(probe: Probe, channels: int) -> Routing:
    """Where each channel of the target comes from. Channels that do not come from exactly one are refused."""
    ramp = torch.arange(channels).double() + 1
    codes = ramp[torch.randperm(channels, generator=torch.Generator().manual_seed(0))]
    zero = probe(torch.zeros(channels))[:, 0]
    small = SMALL / channels
    ones, ramp, mixed = ((probe(small * code)[:, 0] - zero) / small for code in (torch.ones_like(ramp), ramp, codes))
    if not (ones.abs() > 0).all():
        raise UnreadableError("channels of its queries, keys or values come from no map, or turn at the first position")
    sources = (ramp / ones - 1).round().long()
    inside = (sources >= 0) & (sources < channels)
    if not inside.all() or (codes[sources] * ones - mixed).abs().max() > CLOSE * mixed.abs().max():
        raise UnreadableError("a channel of its queries, keys or values is a mixture, or positions do not begin at 0")
    factor = float(ones.median())
    factor = 1.0 if abs(factor - 1) < CLOSE else factor  # angles in float32 have rounded cosines
    if (ones - factor).abs().max() > CLOSE * abs(factor):
        raise UnreadableError("channels of its queries, keys or values have factors of their own")
    large = probe(LARGE * codes)[:, 0] - zero
    if (large - LARGE * mixed).abs().max() > CLOSE * large.abs().max():
        raise UnreadableError("its queries, keys or values are clipped or bent")
    return Routing(sources, factor, zero)


def turning(probe: Probe, sources: Tensor, channels: int, factor: float) -> Turning | None:
    """How channels turn with position; None where they do not."""
    noise = torch.randn(channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    over_time = probe(noise)
    if (over_time - over_time[:, :1]).abs().max() <= CLOSE * over_time.abs().max():
        return None
    zero, size = probe(torch.zeros(channels)), sources.shape[1]
    columns = []
    for channel in range(size):  # all heads at once: each has sources of its own
        basis = torch.zeros(channels)
        basis[sources[:, channel]] = 1
        columns.append((probe(basis) - zero) / factor)
    matrices = torch.stack(columns, -1)  # (H, T, h, h): from source channel to target channel
    if (matrices - matrices[:1]).abs().max() > CLOSE:
        raise UnreadableError("its heads turn differently")
    return _pairs(matrices[0])


def _pairs(matrices: Tensor) -> Turning:
    """Pairs and angles of rotations (T, h, h), the first of which is a multiple of the identity."""
    size = matrices.shape[-1]
    mixing = matrices.abs().amax(0) > 1e-12
    mixing.fill_diagonal_(False)
    if (mixing.sum(-1) > 1).any() or (mixing != mixing.mT).any():
        raise UnreadableError("with position, its channels mix otherwise than in pairs")
    partner = {int(a): int(b) for a, b in mixing.nonzero()}
    first, second, angles, amplitudes = [], [], [], []
    for a, b in partner.items():
        if a > b:
            continue
        cos, sin = matrices[:, a, a], matrices[:, b, a]
        if (cos - matrices[:, b, b]).abs().max() > CLOSE or (sin + matrices[:, a, b]).abs().max() > CLOSE:
            raise UnreadableError("with position, its channels mix otherwise than by rotation")
        turn = torch.atan2(sin, cos)
        # with frequencies >= 0 the first of a pair moves towards the second
        a, b, turn = (a, b, turn) if float(turn[1:].flatten()[0]) >= 0 else (b, a, -turn)
        first.append(a)
        second.append(b)
        angles.append(turn)
        amplitudes.append(torch.hypot(cos, sin))
    amplitude = torch.stack(amplitudes)
    if (amplitude - amplitude.median()).abs().max() > CLOSE:
        raise UnreadableError("rotation changes the size of its channels")
    still = [channel for channel in range(size) if channel not in partner]
    rest = matrices[:, still, still]
    if still and (rest - 1).abs().max() > CLOSE:
        raise UnreadableError("with position, the factors of its channels change")
    return Turning(first, second, torch.stack(angles, -1), float(amplitude.median()))


def frequencies(turn: Turning, known: list[Tensor]) -> list[float] | None:
    """Radians per position of each pair; None where angles are not position times frequency.

    Numbers of the model's own tables (`known`) are taken where they fit: they are exact, and angles read from cosines
    are not.
    """
    steps = torch.arange(turn.angles.shape[0]).double()[:, None]
    rough = turn.angles[1] if len(steps) > 1 else turn.angles[0]
    for _ in range(2):  # a later position tells the frequency more precisely, up to whole turns
        turns = ((rough * steps - turn.angles) / (2 * torch.pi)).round()
        rough = ((turn.angles + 2 * torch.pi * turns)[-1]) / steps[-1]
    apart = (torch.exp(1j * (turn.angles - rough * steps)) - 1).abs().max()
    if apart > 1e-5:
        return None
    return _snapped(rough, known)


def _snapped(steps: Tensor, known: list[Tensor]) -> list[float]:
    """The numbers of the smallest table that holds all of `steps`, up to rounding; `steps` where no table does."""
    for table in sorted(known, key=Tensor.numel):
        values = table.flatten().double()
        nearest = values[(values - steps[:, None]).abs().argmin(-1)] if values.numel() <= 4096 else values[:1]
        if ((nearest - steps).abs() <= 2e-6 * steps.abs()).all():
            return nearest.tolist()
    return steps.tolist()
