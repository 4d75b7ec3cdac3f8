"""A model beside its base: each tensor in both, each layer's heads in both, and the findings as they are made.

D is the difference W - B of a tensor W of the model and B of the base.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from torch import Tensor

from locater.commands.doctor.heads import LayerHeads
from locater.commands.doctor.places import layers_words
from locater.commands.doctor.reading import Examined
from locater.commands.doctor.tensors import Facts, place_of
from locater.findings.causes import Finding

ROUNDING = {"float64": 1e-12, "float32": 2e-6, "float16": 1.5e-3, "bfloat16": 6e-3, "float8_e4m3fn": 0.06}
TRAINED = 0.9  # cosine above which one map was trained from another
STRUCTURE = 0.02  # what a reordered or scaled map may differ by: rounding, and no training


@dataclass
class Pair:
    """One tensor in both. `difference` is |D| / |B|."""

    name: str
    base_name: str
    equal: bool = True  # every number is
    other_shape: bool = False
    same_dtype: bool = True
    dot: float = 0.0  # <W, B>
    size: float = 0.0  # |W|
    base_size: float = 0.0
    delta: float = 0.0  # |D|
    delta_sum: float = 0.0
    numbers: int = 0
    rank: int | None = None  # of D, where that is low
    shares: list[float] = field(default_factory=list)  # of the squares of D, by singular direction
    odd_groups: int = 0  # groups of 32 numbers with another scale than in the base
    shifted_groups: int = 0  # groups whose difference is a constant
    zero_groups: int = 0  # of the groups with another scale those that are all zero
    odd_delta: float = 0.0  # squares of D in them
    shifted_delta: float = 0.0
    groups: int = 0
    changed_groups: int = 0
    kurtosis: float = 0.0  # of D in groups, summed over them: 1.8 for rounding to steps, 2.8 for normal numbers
    facts: Facts | None = None
    base_facts: Facts | None = None
    cast: bool = True  # every number is the base's, rounded to 16 bits, whatever type it is stored in now
    expected_dot: float = 0.0  # <D, E> with E what the adapter adds
    expected: float = 0.0  # |E|
    expected_signature: Tensor | None = field(default=None, repr=False)  # R^T E R
    of_adapter: bool = False
    stored: str = ""  # the type that W was stored in, where it was rewritten since
    explained: str = ""  # the cause that explains D

    @property
    def difference(self) -> float:
        if self.base_size:
            return self.delta / self.base_size
        return 0.0 if not self.delta else math.inf

    @property
    def cosine(self) -> float:
        return self.dot / (self.size * self.base_size) if self.size and self.base_size else 0.0

    @property
    def factor(self) -> float:
        """c of the closest c B."""
        return self.dot / self.base_size**2 if self.base_size else 0.0

    @property
    def beside_factor(self) -> float:
        """|W - c B| / |W|."""
        return math.sqrt(max(0.0, 1 - self.cosine**2)) if self.size else 1.0

    @property
    def rounding(self) -> float:
        """What a cast between the two dtypes may change."""
        assert self.facts is not None
        assert self.base_facts is not None
        if self.cast:
            return ROUNDING["bfloat16"]
        return max(ROUNDING.get(x, 0.0) for x in (self.facts.dtype, self.base_facts.dtype, self.stored))

    @property
    def rounded(self) -> bool:
        """Whether a cast explains D."""
        return not self.equal and (self.cast or not self.same_dtype) and self.difference <= self.rounding

    @property
    def movement(self) -> float:
        """Root mean square of D: training moves all numbers of a model about as far."""
        return self.delta / math.sqrt(self.numbers) if self.numbers else 0.0

    @property
    def changed(self) -> bool:
        return not self.equal and not self.rounded

    @property
    def is_map(self) -> bool:
        return self.facts is not None and self.facts.is_map


@dataclass
class HeadPair:
    """The heads of one layer in both, and which rows of the base each row is."""

    number: int
    own: LayerHeads
    base: LayerHeads
    comparable: bool
    logits_difference: Tensor | None = None  # (H,)
    output_difference: Tensor | None = None
    equivalent: bool = False  # some order of heads has the logits and outputs of the base
    order: list[int] = field(default_factory=list)  # head of the base that each head computes as


@dataclass
class Paired:
    """A model and its base."""

    own: Examined
    base: Examined
    pairs: dict[str, Pair] = field(default_factory=dict)
    heads: list[HeadPair] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)  # tensors of the base alone
    extra: list[str] = field(default_factory=list)


def matched_names(own: Sequence[str], base: Sequence[str]) -> dict[str, str]:
    """Names of the model by those of the base, which may have other parts in front (`model.`, `bert.`).

    >>> matched_names(["layers.0.q", "head"], ["model.layers.0.q", "head"])
    {'head': 'head', 'layers.0.q': 'model.layers.0.q'}
    """
    there = set(base)
    found = {name: name for name in own if name in there}
    left, free = [name for name in own if name not in found], there - set(found)
    for ours, theirs in _fronts(left, free):
        for name in left:
            other = f"{theirs}{name.removeprefix(ours)}"
            if name not in found and name.startswith(ours) and other in free:
                found[name] = other
                free.discard(other)
    return found


def _front_parts(names: Iterable[str]) -> set[str]:
    """First parts of names, as far as the number of a layer."""
    fronts = {"".join(f"{part}." for part in name.split(".")[:count]) for name in names for count in range(4)}
    return {front for front in fronts if not any(character.isdigit() for character in front)}


def _fronts(own: Sequence[str], base: set[str]) -> Iterator[tuple[str, str]]:
    """Parts in front of names that may be exchanged; at least one of the two is empty."""
    ours, theirs = (sorted(sorted(_front_parts(names)), key=len) for names in (own, base))
    yield from ((a, b) for a in ours for b in theirs if a != b and not (a and b))


def by_place(pairs: Mapping[str, Pair]) -> dict[tuple[str, int], list[Pair]]:
    """Tensors by layer."""
    places: dict[tuple[str, int], list[Pair]] = {}
    for name, pair in pairs.items():
        place = place_of(name)
        if place.layer is not None:
            places.setdefault((place.stack, place.layer), []).append(pair)
    return places


@dataclass
class Beside:
    """Findings as they are made, and the tensors that they explain."""

    paired: Paired
    found: list[Finding] = field(default_factory=list)
    renamed: bool = False  # tensors have other names than in the base

    @property
    def pairs(self) -> Mapping[str, Pair]:
        return self.paired.pairs

    def left(self) -> list[Pair]:
        """Tensors that changed for no cause named yet."""
        return [pair for pair in self.pairs.values() if pair.changed and not pair.explained]

    def explain(self, names: Iterable[str], cause: str) -> None:
        for name in names:
            if name in self.pairs and self.pairs[name].changed:
                self.pairs[name].explained = self.pairs[name].explained or cause

    def layers_words(self, layers: Iterable[int]) -> str:
        known = [place_of(name).layer for name in self.pairs]
        return layers_words("", sorted(set(layers)), of=len({x for x in known if x is not None}))
