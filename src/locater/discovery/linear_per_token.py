"""What lies between two places of a tape: a part of it is computed again on probes. The results show which token and
which channels each number comes from, and by which factors.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from locater.discovery.tape import Node, replay
from locater.errors import UnreadableError

CLOSE = 1e-6  # of a probe that should be equal
SMALL, LARGE = 1e-3, 1e6  # sizes of probes: where they do not agree, numbers are clipped or not linear
FAINT = 1e-10  # of the largest coefficient: channels below are not taken for sources
NO_MAP = "channels of its queries, keys or values come from no map"


@dataclass(frozen=True)
class TapePath:
    """The calls from some places of a tape (`cuts`) to a later one, as a function of the numbers at the cuts. Norms on
    the way are left out: what they read passes as it is.
    """

    target: Node
    cuts: tuple[Node, ...]
    widths: tuple[int, ...]  # channels of each cut: its last axis, or its last axes together
    norms: tuple[tuple[Node, Node], ...] = ()  # (what a norm made, what it read), the earliest first
    transposed: bool = False  # the last axis of the target is that of tokens

    @property
    def channels(self) -> int:
        """Channels of all cuts together."""
        return sum(self.widths)

    @property
    def tokens(self) -> int:
        """Rows of the first cut."""
        return self.cuts[0].value.numel() // self.widths[0]

    def __call__(self, values: Sequence[Tensor]) -> Tensor:
        """The target, (M, T, h), where the cuts have these values."""
        given = dict(zip(self.cuts, values, strict=True))
        for made, read in self.norms:
            given[made] = replay(read, given)
        return as_rows(replay(self.target, given), self.transposed)

    def probe(self, channels: Tensor, factors: Tensor | None = None) -> Tensor:
        """The target where every token has the same channels, times a factor of its own where `factors` are given."""
        values = []
        for cut, part in zip(self.cuts, channels.split(self.widths), strict=True):
            rows = part.expand(cut.value.numel() // len(part), -1)
            rows = rows if factors is None else rows * factors[:, None]
            values.append(rows.to(cut.value).reshape(cut.value.shape).clone())
        result = self(values)
        result = result.double() if not result.is_complex() else result
        if not torch.isfinite(result).all():
            raise UnreadableError("a probe of its maps is not finite")
        return result


def as_rows(x: Tensor, transposed: bool = False) -> Tensor:
    """(M, T, h) of queries, keys or values: heads and sequences on one axis."""
    x = x.mT if transposed else x
    x = x[None] if x.ndim == 2 else x
    if x.ndim < 3 or not x.numel():
        raise UnreadableError(f"its queries, keys or values have the shape {list(x.shape)}")
    return x.reshape(-1, *x.shape[-2:])


def token_rows(passage: TapePath) -> Tensor:
    """(M, T): the row of the cuts, their tokens flattened, that each row of the target comes from."""
    count = passage.tokens
    if any(cut.value.numel() != count * width for cut, width in zip(passage.cuts, passage.widths, strict=True)):
        raise UnreadableError("its queries, keys or values are made of maps of different tokens")
    channels = 0.5 + torch.rand(passage.channels, generator=torch.Generator().manual_seed(2), dtype=torch.float64)
    codes = (torch.arange(count).double() + 1) / count
    zero = passage.probe(torch.zeros(passage.channels))
    alike, coded = (passage.probe(SMALL * channels, factors) - zero for factors in (None, codes))
    size, largest = alike.abs().max(-1)
    if (size <= 1e-9 * size.max()).any():
        raise UnreadableError("tokens of its queries, keys or values come from no map")
    ratio = coded.gather(-1, largest[..., None]) / alike.gather(-1, largest[..., None])
    rows = (ratio[..., 0] * count - 1).round().long()
    inside = ((rows >= 0) & (rows < count)).all()
    if not inside or (coded - codes[rows][..., None] * alike).abs().max() > CLOSE * size.max():
        raise UnreadableError("tokens are mixed in its queries, keys or values")
    against = zero - passage.probe(-SMALL * channels, codes)  # where a largest token is taken, it is now another one
    if (coded - against).abs().max() > CLOSE * size.max():
        raise UnreadableError("tokens are pooled in its queries, keys or values")
    return rows


@dataclass(frozen=True)
class Wiring:
    """Each channel of a head as a sum of at most two channels of the cuts, with coefficients for each token."""

    heads: list[int]  # of each head, the first head that is equal to it
    sources: Tensor  # (U, h, 2): channel of the cuts, of U heads that differ; -1 where there is no second one
    coefficients: Tensor  # (B, T, U, h, 2), of B sequences without common tokens
    shift: Tensor  # (B, T, U, h): what is added apart from the cuts


def wiring_of(passage: TapePath, order: Tensor, rows: Tensor) -> Wiring:
    """The wiring of a passage. `order` (B, H) has the leading index in the target of each sequence and head, `rows`
    (B, T) the tokens of each sequence.
    """
    kept = _without_common_tokens(rows)
    order, rows = order[kept], rows[kept]
    noise = torch.randn(passage.channels, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    heads = _first_equal_heads(passage.probe(noise)[order])
    order = order[:, sorted(set(heads))]
    wiring = _one_source(passage, order) or _two_sources(passage, order, rows)
    sources, coefficients = wiring
    shift = passage.probe(torch.zeros(passage.channels))[order]
    for size in (SMALL, LARGE):
        made = passage.probe(size * noise)[order] - shift
        ours = (size * noise[sources.clamp_min(0)] * coefficients).sum(-1).transpose(1, 2)
        if (made - ours).abs().max() > CLOSE * ours.abs().max():
            raise UnreadableError("its queries, keys or values are clipped, or no linear function of their maps")
    return Wiring(heads, sources, coefficients, shift.transpose(1, 2))


def _without_common_tokens(rows: Tensor) -> list[int]:
    """Sequences that have no token in common."""
    kept: list[int] = []
    met: set[int] = set()
    for number, tokens in enumerate(rows.tolist()):
        if len(set(tokens)) < len(tokens):
            raise UnreadableError("a token is met twice in one of its sequences")
        if met.isdisjoint(tokens):
            met.update(tokens)
            kept.append(number)
    return kept


def _first_equal_heads(x: Tensor) -> list[int]:
    """Of each head of (B, H, T, h), the first that is equal to it."""
    firsts: list[int] = []
    heads = []
    for head in range(x.shape[1]):
        same = next((other for other in firsts if torch.equal(x[:, other], x[:, head])), None)
        firsts += [head] if same is None else []
        heads.append(head if same is None else same)
    return heads


def _one_source(passage: TapePath, order: Tensor) -> tuple[Tensor, Tensor] | None:
    """(sources, coefficients) where each channel has one source; None where that is not so."""
    channels = passage.channels
    ramp = torch.arange(channels).double() + 1
    codes = ramp[torch.randperm(channels, generator=torch.Generator().manual_seed(0))]
    zero = passage.probe(torch.zeros(channels))
    small = SMALL / channels
    ones, ramp, mixed = (
        ((passage.probe(small * code) - zero) / small)[order].transpose(1, 2)
        for code in (torch.ones_like(ramp), ramp, codes)
    )  # (B, T, U, h)
    if not (ones.abs() > FAINT * ones.abs().max()).all():
        return None
    sources = (ramp / ones - 1).round().long()
    inside = (sources >= 0) & (sources < channels) & (sources == sources[:1, :1])
    if not inside.all() or (codes[sources] * ones - mixed).abs().max() > CLOSE * mixed.abs().max():
        return None
    sources = torch.stack([sources[0, 0], torch.full_like(sources[0, 0], -1)], -1)
    return sources, torch.stack([ones, torch.zeros_like(ones)], -1)


def _two_sources(passage: TapePath, order: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
    """(sources, coefficients) of channels with up to two sources, by derivatives."""
    with torch.enable_grad():
        generator = torch.Generator().manual_seed(3)
        starts = [torch.randn(cut.value.shape, generator=generator).to(cut.value) for cut in passage.cuts]
        starts = [SMALL * start.requires_grad_() for start in map(Tensor.detach, starts)]
        target = passage(starts)[order]  # (B, U, T, h)
        numbers = (torch.arange(target.shape[1]).to(target) + 1) ** 1.5  # their mean is none of them
        columns = []
        for channel in range(target.shape[-1]):
            part = target[..., channel]
            weighed = part * numbers[:, None]
            plain, numbered = (_slopes(y, starts, passage, rows) for y in (part, weighed))
            columns.append(_by_head(plain, numbered, numbers))
    sources, coefficients = (torch.stack(x, -2) for x in zip(*columns, strict=True))
    return sources, coefficients  # (U, h, 2), (B, T, U, h, 2)


def _slopes(y: Tensor, starts: list[Tensor], passage: TapePath, rows: Tensor) -> Tensor:
    """(B, T, C): derivatives of the sum of `y` by the channels of each token."""
    slopes = torch.autograd.grad(y.sum(), starts, retain_graph=True, allow_unused=True)
    parts = [
        (torch.zeros_like(start) if slope is None else slope).reshape(-1, width)[rows]
        for slope, start, width in zip(slopes, starts, passage.widths, strict=True)
    ]
    return torch.cat(parts, -1).double()


def _by_head(plain: Tensor, numbered: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """(sources (U, 2), coefficients (B, T, U, 2)) of one channel of each head. A source belongs to one head, or to all
    of them. `plain` and `numbered` (B, T, C) are derivatives of the sum over heads, and of that weighed by `numbers`.
    """
    size = plain.abs().amax((0, 1))
    counted = (size > FAINT * size.max()).nonzero().flatten()
    slopes = plain[..., counted]
    number = (numbered[..., counted] * slopes).sum((0, 1)) / slopes.square().sum((0, 1))
    if (numbered[..., counted] - number * slopes).abs().max() > CLOSE * numbered.abs().max():
        raise UnreadableError("its heads share channels of a map")
    heads = len(numbers)
    shared = (number - numbers.mean()).abs() < CLOSE * numbers.mean() if heads > 1 else torch.zeros_like(number).bool()
    owners = (number[:, None] - numbers).abs() < CLOSE * numbers  # (sources, U)
    owners |= shared[:, None]
    slopes = torch.where(shared, slopes / heads, slopes)
    if not owners.any(-1).all():
        raise UnreadableError("some of its heads share channels of a map")
    counts = owners.sum(0)
    if (counts < 1).any() or (counts > 2).any():
        many = f"a channel of its queries, keys or values mixes {int(counts.max())} channels"
        raise UnreadableError(many if counts.all() else NO_MAP)
    head, own = owners.mT.nonzero().unbind(-1)  # in the order of heads
    slot = torch.arange(len(head)) - (counts.cumsum(0) - counts)[head]
    sources = torch.full((heads, 2), -1)
    coefficients = plain.new_zeros(*plain.shape[:2], heads, 2)
    sources[head, slot] = counted[own]
    coefficients[:, :, head, slot] = slopes[..., own]
    return sources, coefficients
