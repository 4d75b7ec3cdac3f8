"""What a recorded pass says of norms and rotary positions: which norm a module of an unknown model is, fitted to one
input and output of it; and which channels of queries and keys rotate in pairs, by which angles and frequencies, read
from the wiring of a projection.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product

import torch
from torch import Tensor, nn

from locater.discovery.linear_per_token import CLOSE, Wiring
from locater.discovery.tape import ModuleResult, Node, Tape, replay
from locater.errors import UnreadableError
from locater.layers.map_layouts import NormLayout
from locater.layers.norm import Norm, NormKind
from locater.sources.weights import WRAPPERS

NORM_CLOSE = 1e-6  # of the output's standard deviation; many norms compute in float32 inside a float64 model
GAINS, BIASES = ("weight", "scale", "gamma", "g"), ("bias", "beta", "b")
SIZES = (1e-3, 1e3)  # of inputs, beside the example's own
USUAL_EPS = (1e-6, 1e-5, 1e-12, 0.0)


def may_be_norm(tape: Tape, node: Node) -> bool:
    """Whether a module made this value that has no matrix and keeps the shape of its input."""
    made = tape.made.get(node)
    if made is None or made.source is node or made.source.value.shape != node.value.shape:
        return False
    named = "norm" in type(made.module).__name__.lower()
    return named and not any(p.squeeze().ndim > 1 for p in made.module.parameters())


def fit_norm(made: ModuleResult, x: Tensor, y: Tensor, node: Node) -> NormLayout | None:
    """The norm with norm(x) = y, from the tensors of its module; None where no formula fits, also to inputs that are
    much smaller or larger. `node` is what the module returned.
    """
    gain, bias = _tensor(made.module, GAINS), _tensor(made.module, BIASES)
    kinds: tuple[NormKind, ...] = ("layer", "rms")
    best, layout, norm = NORM_CLOSE, None, Norm()
    offsets = (0.0, 1.0) if gain else (0.0,)
    for kind, eps, offset in product(kinds, _eps(made.module), offsets):
        factor = None if gain is None else getattr(made.module, gain) + offset
        shift = None if bias is None else getattr(made.module, bias)
        error = relative_difference(Norm(kind, factor, shift, eps)(x), y)
        if error < best * (0.5 if layout else 1):
            best = error
            layout = NormLayout(kind, _path(made, gain), offset, _path(made, bias), eps)
            norm = Norm(kind, factor, shift, eps)
    for size in SIZES if layout is not None else ():
        given = size * made.source.value
        if relative_difference(norm(given), replay(node, {made.source: given})) > 10 * NORM_CLOSE:
            return None
    return layout


def relative_difference(ours: Tensor, theirs: Tensor, where: Tensor | None = None) -> float:
    """Largest difference, in standard deviations of `theirs`; infinite where shapes differ."""
    if ours.shape != theirs.shape or not theirs.numel():
        return float("inf")
    if where is not None:
        where = where.expand(theirs.shape)
        ours, theirs = ours[where], theirs[where]
    ours, theirs = ours.double(), theirs.double()
    error = float((ours - theirs).abs().max() / theirs.std().clamp_min(1e-30)) if theirs.numel() > 1 else float("inf")
    return error if torch.isfinite(theirs).all() and error == error else float("inf")


def _tensor(module: nn.Module, names: tuple[str, ...]) -> str | None:
    return next((name for name in names if isinstance(getattr(module, name, None), Tensor)), None)


def _path(made: ModuleResult, name: str | None) -> str | None:
    return None if name is None else unwrapped_path(f"{made.path}.{name}" if made.path else name)


def _eps(module: nn.Module) -> list[float]:
    own = [x for name, x in vars(module).items() if "eps" in name and isinstance(x, float)]
    return list(dict.fromkeys([*own, *USUAL_EPS]))


def unwrapped_path(path: str) -> str:
    """A path of a module or a tensor without the names of wrappers."""
    return WRAPPERS.sub("", f"{path}.").removesuffix(".")


@dataclass(frozen=True)
class Rotation:
    """Pairs of channels that rotate together: (first, second) of each pair, and angles (T, pairs)."""

    first: list[int]
    second: list[int]
    angles: Tensor
    amplitude: float  # of channels that turn, beside those that do not


@dataclass(frozen=True)
class HeadRows:
    """Heads as rows of a map: factor times the row, then rotated."""

    rows: Tensor  # (U, h): channel of the cuts
    factor: float
    factors: Tensor | None  # (U, h): of each channel, where they are not all `factor`
    turn: Rotation | None


@dataclass(frozen=True)
class _Pair:
    """Two channels that rotate together."""

    channels: tuple[int, int]
    rows: tuple[Tensor, Tensor]  # (U,) each: the channels of the cuts that these are at angle 0
    cos: Tensor  # (B, T, U), times an amplitude
    sin: Tensor


def head_rows(wiring: Wiring) -> HeadRows:
    """Rows, factors and rotation of a wiring."""
    mixed = (wiring.sources[..., 1] >= 0).any(0)  # (h,)
    still = (~mixed).nonzero().flatten()
    factors = wiring.coefficients[..., still, 0]  # (B, T, U, still)
    if still.numel() and (factors - factors[:1, :1]).abs().max() > CLOSE * factors.abs().max():
        raise UnreadableError("factors of its queries, keys or values change with position")
    rows = wiring.sources[..., 0].clone()
    if not mixed.any():
        return _unrotated_rows(rows, factors[0, 0])
    pairs = _pairs(wiring, mixed.nonzero().flatten().tolist())
    cos = torch.stack([pair.cos for pair in pairs], -1)  # (B, T, U, pairs)
    sin = torch.stack([pair.sin for pair in pairs], -1)
    amplitude = torch.hypot(cos, sin)
    size = float(amplitude.median())
    if (amplitude - size).abs().max() > CLOSE * size:
        raise UnreadableError("rotation changes the size of its channels")
    angles = torch.atan2(sin, cos)
    turns = torch.exp(1j * angles)
    if (turns - turns[:, :, :1]).abs().max() > CLOSE:
        raise UnreadableError("its heads rotate by different angles")
    if (turns - turns[:1]).abs().max() > CLOSE:
        raise UnreadableError("sequences of one batch rotate by different angles")
    first, second, straight = [], [], []
    for pair, angle in zip(pairs, angles[0, :, 0].unbind(-1), strict=True):
        a, b = pair.channels
        rows[:, a], rows[:, b] = pair.rows
        # with frequencies >= 0 the first of a pair moves towards the second
        steps = torch.atan2((angle[1:] - angle[:-1]).sin(), (angle[1:] - angle[:-1]).cos())
        moved = steps[steps.abs() > 1e-9]  # the first step is a small one, also in pictures
        backwards = bool(len(moved)) and float(moved[0]) < 0
        a, b, angle = (b, a, -angle) if backwards else (a, b, angle)
        first.append(a)
        second.append(b)
        straight.append(angle)
    factor = size if not still.numel() else _single_factor(factors)
    return HeadRows(
        rows,
        _snap_to_one(factor),
        None,
        Rotation(first, second, torch.stack(straight, -1), _snap_to_one(size / factor)),
    )


def _unrotated_rows(rows: Tensor, factors: Tensor) -> HeadRows:
    factor = _snap_to_one(float(factors.median()))
    alike = (factors - factor).abs().max() <= CLOSE * abs(factor)
    return HeadRows(rows, factor, None, None) if alike else HeadRows(rows, 1.0, factors, None)


def _single_factor(factors: Tensor) -> float:
    factor = float(factors.median())
    if (factors - factor).abs().max() > CLOSE * abs(factor):
        raise UnreadableError("channels of its queries, keys or values have factors of their own")
    return factor


def _snap_to_one(factor: float) -> float:
    return 1.0 if abs(factor - 1) < CLOSE else factor  # angles in float32 have rounded cosines


def _pairs(wiring: Wiring, channels: list[int]) -> list[_Pair]:
    """Pairs of channels (a, b) with x_a cos - x_b sin and x_a sin + x_b cos."""
    pairs, left = [], list(channels)
    sets = {channel: wiring.sources[:, channel].sort(-1).values for channel in channels}
    while left:
        a = left.pop(0)
        b = next((other for other in left if torch.equal(sets[a], sets[other])), None)
        if b is None:
            raise UnreadableError("position mixes its channels, and not in pairs")
        left.remove(b)
        pairs.append(_rotation(wiring, a, b))
    return pairs


def _rotation(wiring: Wiring, a: int, b: int) -> _Pair:
    low, high = wiring.sources[:, a].sort(-1).values.unbind(-1)  # (U,)
    if (low < 0).any():
        raise UnreadableError("position mixes its channels, and not in pairs")

    def coefficient(channel: int, source: Tensor) -> Tensor:  # (B, T, U)
        sources, values = wiring.sources[:, channel], wiring.coefficients[..., channel, :]
        return torch.where(sources[:, 0] == source, values[..., 0], values[..., 1])

    aa, ab, ba, bb = (coefficient(channel, source) for channel in (a, b) for source in (low, high))
    close = CLOSE * torch.stack([aa, ab, ba, bb]).abs().max()
    if (aa - bb).abs().max() <= close and (ab + ba).abs().max() <= close:
        return _Pair((a, b), (low, high), aa, ba)
    if (ab - ba).abs().max() <= close and (aa + bb).abs().max() <= close:
        return _Pair((a, b), (high, low), ab, bb)
    raise UnreadableError("position mixes pairs of its channels, and not by a rotation")


def frequencies(turn: Rotation, known: list[Tensor]) -> tuple[list[float], int] | None:
    """(radians per position of each pair, the first position); None where angles are not position times frequency.

    Numbers of the model's own tables (`known`) are taken where they fit: they are exact, and angles read from cosines
    are not.
    """
    length = len(turn.angles)
    if length < 2:
        return None
    relative = turn.angles - turn.angles[:1]
    steps = torch.arange(length).double()[:, None]
    rough = relative[1]
    for _ in range(2):  # a later position tells the frequency more precisely, up to whole turns
        turns = ((rough * steps - relative) / (2 * torch.pi)).round()
        rough = ((relative + 2 * torch.pi * turns)[-1]) / steps[-1]
    if (torch.exp(1j * (relative - rough * steps)) - 1).abs().max() > 1e-5:
        return None
    exact = torch.tensor(_snap_to_tables(rough, known), dtype=torch.float64)
    for first in (0, 1, 2, *range(3, 64)):
        if (torch.exp(1j * (turn.angles - exact * (steps + first))) - 1).abs().max() < 1e-5:
            return exact.tolist(), first
    return None


def _snap_to_tables(steps: Tensor, known: list[Tensor]) -> list[float]:
    """The numbers of the smallest table that holds all of `steps`, up to rounding; `steps` where no table does."""
    for table in sorted(known, key=Tensor.numel):
        values = table.flatten().double()
        nearest = values[(values - steps[:, None]).abs().argmin(-1)] if values.numel() <= 4096 else values[:1]
        if ((nearest - steps).abs() <= 2e-6 * steps.abs()).all():
            return nearest.tolist()
    return steps.tolist()
