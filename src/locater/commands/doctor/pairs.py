"""A model beside its base: both are read once, tensor by tensor, and what sets them apart is summed while they are.

D is the difference W - B of a tensor W of the model and B of the base.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from locater.commands.doctor.heads import LayerHeads
from locater.commands.doctor.places import layers_words
from locater.commands.doctor.reading import (
    Examined,
    Model,
    Progress,
    attention_names,
    heads_of_layer,
    layers_by_place,
    tensor_reader,
    units,
)
from locater.commands.doctor.tensors import (
    GROUP,
    Collector,
    Facts,
    HeldWeights,
    Reader,
    as_matrix,
    blocks,
    file_of,
    place_of,
    probes,
)
from locater.errors import DamagedError, LocaterError
from locater.findings.causes import Finding
from locater.sources.adapter_folder import AdaptedWeights

RANK_PROBES = 80  # random vectors that D is met by: ranks up to 64 show
HIGHEST_RANK = 64
WINDOW = 8  # directions among which the last of a low rank is looked for
# mean square of the error of rounding to a dtype, as a share of the mean square of the numbers
ROUNDING_NOISE = {"bfloat16": 2.4e-6, "float16": 4e-8}
ROUNDING = {"float64": 1e-12, "float32": 2e-6, "float16": 1.5e-3, "bfloat16": 6e-3, "float8_e4m3fn": 0.06}
TRAINED = 0.9  # cosine above which one map was trained from another
STRUCTURE = 0.02  # what a reordered or scaled map may differ by: rounding, and no training
MANY_ROWS = 65_536
BLOCK_START = 4096  # numbers


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
    of_adapter: bool = False
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
        return max(ROUNDING.get(x.dtype, 0.0) for x in (self.facts, self.base_facts))

    @property
    def rounded(self) -> bool:
        """Whether a cast explains D."""
        return not self.equal and (self.cast or not self.same_dtype) and self.difference <= self.rounding

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


class Differ:
    """Sums over D of one tensor, block by block."""

    def __init__(self, pair: Pair, shape: tuple[int, ...]) -> None:
        self.pair, self.width = pair, math.prod(shape[1:])
        rows = shape[0] if shape else 1
        self.count = RANK_PROBES if rows <= MANY_ROWS else 24
        wide = min(rows, self.width) >= 16
        self.gram = torch.zeros(self.count, self.count, dtype=torch.float64) if wide else None
        self.dtypes: set[str] = set()
        self._sums = dict.fromkeys(("dot", "own", "base", "delta", "ed", "ee"), 0.0)

    def add(
        self, stored: Tensor, base_stored: Tensor, x: Tensor, b: Tensor, same: bool, expected: Tensor | None
    ) -> None:
        """Rows of both as they are stored, and as float matrices; and what the adapter adds to them."""
        pair, sums = self.pair, self._sums
        pair.same_dtype = stored.dtype == base_stored.dtype
        x, b = (x, b) if x.dtype == b.dtype else (x.double(), b.double())
        same = same or (not pair.same_dtype and torch.equal(x, b))
        own_square = _square(x)
        sums["own"] += own_square
        if same:
            for key in ("dot", "base"):
                sums[key] += own_square
            if expected is not None:
                sums["ee"] += _square(expected)
            pair.groups += x.numel() // GROUP
            return
        pair.equal = False
        d = x - b
        delta, base = _square(d), _square(b)
        pair.cast &= pair.same_dtype and delta <= ROUNDING["bfloat16"] ** 2 * base and _is_cast(x, b)
        sums["base"] += base
        sums["delta"] += delta
        sums["dot"] += _dot(x, b)
        pair.delta_sum += float(d.sum(1).sum(dtype=torch.float64))
        if expected is not None:
            sums["ee"] += _square(expected)
            sums["ed"] += _dot(d, expected)
        self.dtypes |= {str(t.dtype).removeprefix("torch.") for t in (stored, base_stored)}
        limit = max(ROUNDING.get(str(t.dtype).removeprefix("torch."), 0.0) for t in (stored, base_stored))
        if pair.cast or (not pair.same_dtype and delta <= (limit**2) * base):
            return
        if self.gram is not None:
            y = (d.float() @ probes(self.width, self.count)).double()
            self.gram += y.mT @ y
        if self.width >= GROUP:
            self._look_at_groups(b, d)

    def _look_at_groups(self, b: Tensor, d: Tensor) -> None:
        """Each group of numbers by its sums: of b, of d = x - b, and of the products of both."""
        pair, cut = self.pair, self.width // GROUP * GROUP
        b, d = (t[:, :cut].reshape(-1, GROUP) for t in (b, d))
        ones = torch.ones(GROUP, dtype=d.dtype)
        squares = d.square()
        bb, db, dd = b.square() @ ones, (d * b) @ ones, squares @ ones
        tiny = 1e-30
        factor_less_1 = db / bb.clamp_min(tiny)
        xx = (bb + 2 * db + dd).clamp_min(tiny)
        beside = (dd - db * factor_less_1).clamp_min(0) / xx
        odd = (factor_less_1.abs() > 0.12) & (beside < 0.05) & (bb > 0)
        shifted = ((d @ ones).square() > 0.85 * GROUP * dd) & (dd > 0.1 * bb)
        shifted &= ~odd
        pair.groups += len(d)
        pair.odd_groups += int(odd.sum())
        pair.shifted_groups += int(shifted.sum())
        pair.odd_delta += float(dd[odd].sum(dtype=torch.float64))
        pair.shifted_delta += float(dd[shifted].sum(dtype=torch.float64))
        pair.changed_groups += int((dd > 0).sum())
        fourth = GROUP * (squares.square_() @ ones) / dd.square()  # where nothing changed it is NaN
        pair.kurtosis += float(fourth.nan_to_num(0.0, 0.0, 0.0).sum(dtype=torch.float64))

    def done(self) -> None:
        pair, sums = self.pair, self._sums
        pair.dot, pair.delta = sums["dot"], math.sqrt(sums["delta"])
        pair.size, pair.base_size = math.sqrt(sums["own"]), math.sqrt(sums["base"])
        pair.expected, pair.expected_dot = math.sqrt(sums["ee"]), sums["ed"]
        if self.gram is not None and pair.changed and bool(self.gram.isfinite().all()):
            values = torch.linalg.eigvalsh(self.gram).flip(0).clamp_min(0)
            total = float(values.sum())
            if total > 0:
                pair.shares = [round(float(x) / total, 6) for x in values[:16]]
                most = min(self.width, pair.numbers // max(self.width, 1))
                noise = max(ROUNDING_NOISE.get(x, 1e-12) for x in self.dtypes) * sums["own"]
                pair.rank = low_rank(values, most, noise / sums["delta"])


def low_rank(values: Tensor, most: int, noise: float = 0.0) -> int | None:
    """The rank of a map from the squared singular values of its sketch, largest first; None where it is not low.

    Behind a low rank there is no more than the `noise` of rounding, as a share of all squares.

    >>> low_rank(torch.tensor([9.0, 4.0, 1e-4, 9e-5, 8e-5, 8e-5]), 64, 1e-4), low_rank(torch.linspace(6, 1, 6), 64)
    (2, None)
    """
    shares = values / values.sum()
    tails = shares.flip(0).cumsum(0).flip(0)  # from each on
    limit = 2 * noise + 1e-7
    below = (tails[1:] <= limit).nonzero().flatten()
    if not len(below):
        return None
    gaps = shares[:-1] / shares[1:].clamp_min(1e-14)
    first = int(below[0])
    rank = first + int(gaps[first : first + WINDOW].argmax()) + 1  # where the gap is, near where the noise begins
    known = rank <= min(HIGHEST_RANK, max(1, most // 2)) and float(gaps[rank - 1]) >= 2 and float(tails[rank]) < 0.2
    return rank if known else None


def _is_cast(x: Tensor, b: Tensor) -> bool:
    """Whether one is the other, rounded to a type of 16 bits: what float32 keeps of it."""
    return any(torch.equal(u, v.to(t).to(v)) for t in (torch.float16, torch.bfloat16) for u, v in ((x, b), (b, x)))


def _dot(x: Tensor, y: Tensor) -> float:
    """The inner product, by rows: a sum over a whole block would round more."""
    rows = torch.linalg.vecdot(x, y) if x is not y else torch.linalg.vector_norm(x, dim=1).square()
    return float(rows.sum(dtype=torch.float64))


def _square(x: Tensor) -> float:
    return _dot(x, x)


def examine_pair(
    own: Model, base: Model, adapter: AdaptedWeights | None = None, progress: Progress | None = None
) -> Paired:
    """Read both once, layer by layer."""
    result = Paired(Examined(own), Examined(base))
    names = matched_names(own.names, base.names)
    found = set(names.values())
    result.missing = [name for name in base.names if name not in found]
    result.extra = [name for name in own.names if name not in names]
    held, base_held = HeldWeights(own.weights), HeldWeights(base.weights)
    wanted, base_wanted = (attention_names(x.reading, x.weights) for x in (own, base))
    places = {} if own.reading is None else layers_by_place(own.reading)
    touched = set() if adapter is None else adapter.changed_names
    every, done = units(own), set[int]()
    for _, group in progress(every, len(every)) if progress else every:
        for name in group:
            other = names.get(name)
            try:
                read = tensor_reader(held, name, name in wanted)
                if other is None:
                    result.own.facts[name] = _alone(own, read, name)
                    continue
                base_read = tensor_reader(base_held, other, other in base_wanted)
                extra = Reader(adapter, other) if adapter is not None and other in touched else None
                _read_pair(result, (name, read), (other, base_read), extra)
            except DamagedError:
                raise
            except LocaterError as error:
                result.own.refused[name] = str(error)
        place = place_of(group[0])
        for number in places.get((place.stack if place.layer is not None else "", place.layer), []):
            done.add(number)
            _add_heads(result, held, base_held, number)
        held.release()
        base_held.release()
    for number in set(range(len(own.reading.found) if own.reading else 0)) - done:
        _add_heads(result, held, base_held, number)
    result.heads.sort(key=lambda x: x.number)
    return result


def _alone(model: Model, read: Reader, name: str) -> Facts:
    collector = Collector(model.weights, name)
    for start, stop in blocks(model.weights, name):
        collector.add(start, read(start, stop))
    return collector.done()[0]


def _same(stored: Tensor, base_stored: Tensor) -> bool:
    """Whether two blocks have the same numbers in the same type."""
    if stored.dtype != base_stored.dtype:
        return False
    first = [x.reshape(-1)[:BLOCK_START] for x in (stored, base_stored)]  # most that differ do so here
    return torch.equal(*first) and torch.equal(stored, base_stored)


def _read_pair(result: Paired, own: tuple[str, Reader], base: tuple[str, Reader], extra: Reader | None) -> None:
    (name, read), (other, base_read) = own, base
    weights, base_weights = result.own.model.weights, result.base.model.weights
    shape, base_shape = weights.shape(name), base_weights.shape(other)
    pair = Pair(name, other, numbers=math.prod(shape), of_adapter=extra is not None)
    if shape != base_shape:
        pair.equal, pair.other_shape = False, True
        pair.facts, pair.base_facts = _alone(result.own.model, read, name), _alone(result.base.model, base_read, other)
    else:
        one, two = Collector(weights, name), None  # of the base there is one from the first block that differs
        differ = Differ(pair, shape)
        for start, stop in blocks(weights, name):
            stored, base_stored = read(start, stop), base_read(start, stop)
            same = _same(stored, base_stored)
            two = copy.deepcopy(one) if two is None and not same else two
            x = one.add(start, stored)
            b = x if two is None else two.add(start, base_stored)
            expected = None if extra is None else as_matrix(extra(start, stop)) - b
            differ.add(stored, base_stored, x, b, same, expected)
        pair.facts = one.done()[0]
        facts = pair.facts if two is None else two.done()[0]
        pair.base_facts = replace(facts, name=other, file=file_of(base_weights, other))
        differ.done()
    result.pairs[name] = pair
    result.own.facts[name], result.base.facts[other] = pair.facts, pair.base_facts


def _add_heads(result: Paired, held: HeldWeights, base_held: HeldWeights, number: int) -> None:
    own, base = result.own.model, result.base.model
    try:
        layer, heads = heads_of_layer(own, held, number)
    except DamagedError as error:
        own.damage = own.damage or error
        return
    except LocaterError as error:
        own.unread = own.unread or str(error).removeprefix(f"{own.weights.where}: ")
        return
    result.own.layers.append(layer)
    result.own.heads.append(heads)
    if base.reading is None or number >= len(base.reading.found):
        heads.forget()
        return
    try:
        base_layer, base_heads = heads_of_layer(base, base_held, number)
    except LocaterError as error:
        base.unread = base.unread or str(error).removeprefix(f"{base.weights.where}: ")
        heads.forget()
        return
    result.base.layers.append(base_layer)
    result.base.heads.append(base_heads)
    result.heads.append(head_pair(heads, base_heads))
    heads.forget()
    base_heads.forget()


def head_pair(own: LayerHeads, base: LayerHeads) -> HeadPair:
    """The heads of one layer in both: what each computes, and whether some order of heads makes it the same."""
    parts, base_parts = own.maps(), base.maps()
    comparable = parts.keys() == base_parts.keys() and all(parts[x].shape == base_parts[x].shape for x in parts)
    comparable = comparable and own.logits.shape == base.logits.shape
    pair = HeadPair(own.number, own, base, comparable)
    if not comparable:
        return pair
    pair.logits_difference = _apart(own.logits.transpose(0, 1), base.logits.transpose(0, 1))
    effects = [own.logits.transpose(0, 1).flatten(1)]
    base_effects = [base.logits.transpose(0, 1).flatten(1)]
    if own.outputs is not None and base.outputs is not None and own.outputs.shape == base.outputs.shape:
        pair.output_difference = _apart(own.outputs, base.outputs)
        effects.append(own.outputs.flatten(1))
        base_effects.append(base.outputs.flatten(1))
    # each effect in units of the base's own size, so that logits do not outweigh outputs
    ours, theirs = [], []
    for x, b in zip(effects, base_effects, strict=True):
        size = b.norm(dim=1).median().clamp_min(1e-30)
        ours.append(x / size)
        theirs.append(b / size)
    a, b = torch.cat(ours, 1), torch.cat(theirs, 1)
    squares = a.square().sum(1)[:, None] + b.square().sum(1)[None] - 2 * a @ b.mT
    apart = squares.clamp_min(0).sqrt() / b.norm(dim=1).clamp_min(1e-30)
    pair.order = [int(x) for x in apart.argmin(1)]
    nearest = apart.gather(1, torch.tensor(pair.order)[:, None]).flatten()
    pair.equivalent = sorted(pair.order) == list(range(len(pair.order))) and bool((nearest < STRUCTURE).all())
    return pair


def _apart(own: Tensor, base: Tensor) -> Tensor:
    """|own - base| / |base| for each head."""
    size = base.flatten(1).norm(dim=1).clamp_min(1e-30)
    return (own - base).flatten(1).norm(dim=1) / size


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
