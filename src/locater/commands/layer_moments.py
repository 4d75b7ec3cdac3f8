"""The small matrices of the layers of a scan, several layers at a time.

On the CPU each layer is folded and multiplied by a worker with one thread of its own: several threads inside one
product wait for each other, on a busy machine most of the time. On a GPU all layers are queued before waiting for the
first result, and their matrices stay there. Layers of one kind are then joined, so that what follows is computed once
for hundreds of heads.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate

import torch
from torch import Tensor

from locater.layers import AttentionLayer, Tokens, effective
from locater.layers.head_blocks import head_blocks
from locater.numerics import lone_workers, one_thread
from locater.predict.statistics_file import Input
from locater.spectrum import Moments, join_moments, lost_in_float32

NumberedLayer = tuple[int, AttentionLayer]
# numbers of query and key maps that are folded at a time, 160 MiB in float32: room for a key head of Llama-405B and its
# 16 query heads, so that their products are those of the whole layer
BLOCK = 40 * 2**20
CACHED = 2**21  # the same where it is up to us: small enough to stay in a cache, and not to be paged in again each time
FEW = 2**20  # numbers of all maps: below it workers cost more than they save
TOGETHER = 2**17  # numbers of one of the small matrices of the heads that are joined: 32 heads of 64, 8 of 128
ON_GPU = 16  # times as many on a GPU, which takes hundreds of heads in the time of one, and is waited for once a record


@dataclass(frozen=True)
class LayerMoments:
    """Consecutive layers of one kind, and the small matrices and key biases of their heads, on the CPU or on CUDA."""

    layers: list[NumberedLayer]
    moments: Moments
    key_bias: Tensor

    def part(self, layers: slice) -> LayerMoments:
        """Some of the layers."""
        ends = [0, *accumulate(layer.heads for _, layer in self.layers)]
        heads = slice(ends[layers.start], ends[layers.stop])
        return LayerMoments(self.layers[layers], self.moments.select(heads), self.key_bias[heads])


@dataclass(frozen=True)
class _LayerPart:
    number: int
    layer: AttentionLayer
    moments: Moments
    key_bias: Tensor

    @property
    def kind(self) -> tuple[object, ...]:
        """What layers that are joined have in common."""
        scale = None if self.layer.unknown_scale is not None else self.layer.scale
        gram, cross = self.moments.query_gram, self.moments.cross
        return scale, self.layer.mechanism, gram.shape[-1], gram.dtype, gram.device, cross is None


@dataclass(frozen=True)
class Work:
    """How layers are processed."""

    raw: bool = False
    inputs: Mapping[int, Input] | None = None  # measured statistics by layer number
    workers: int = 1  # at most
    by_threads: bool = False  # maps can be read by several threads at the same time
    held: bool = False  # maps are in memory already

    def input_of(self, number: int) -> Input | None:
        return None if self.inputs is None else self.inputs[number]


@torch.no_grad()
def layer_moments(
    numbered: Iterable[NumberedLayer], layers: Sequence[AttentionLayer], work: Work
) -> Iterator[LayerMoments]:
    """The small matrices of `numbered`, which are `layers` as they are asked for (a progress bar counts them). With
    measured statistics a layer is one block: the covariance of tokens, as large as a map, would be folded into each.
    """
    room = BLOCK // max(_held_by_worker(layer, work) for layer in layers)  # how many fit into the memory of a block
    small = sum(map(_numbers, layers)) < FEW
    workers = 1 if small or work.inputs is not None else min(work.workers, len(layers), room)
    if workers > 1:
        measured = _by_workers(numbered, work, workers)
    else:  # one that fills the room has all threads
        measured = _one_by_one(numbered, work, alone=room > 1 and work.inputs is None)
    group: list[_LayerPart] = []
    for one in measured:
        if group and (one.kind != group[0].kind or _size(*group, one) > _limit(one.key_bias.device)):
            yield from _join_group(group, work)
            group = []
        group.append(one)
    if group:
        yield from _join_group(group, work)


def _held_by_worker(layer: AttentionLayer, work: Work) -> int:
    """Numbers of maps that a worker has in memory: those of a block, or of the layer where it is read as a whole."""
    return min(_numbers(layer), _block(layer)) if work.by_threads or work.held else _numbers(layer)


def _one_by_one(numbered: Iterable[NumberedLayer], work: Work, alone: bool) -> Iterator[_LayerPart]:
    """Process one layer after the other."""
    for number, layer in numbered:
        with one_thread() if alone else nullcontext():
            read = layer if work.by_threads or _numbers(layer) > BLOCK else _load_maps(layer)
            one = _LayerPart(number, layer, *_moments(read, work.raw, work.input_of(number)))
        yield one


def _by_workers(numbered: Iterable[NumberedLayer], work: Work, workers: int) -> Iterator[_LayerPart]:
    """Process layers in workers, yielding them in order. Maps on a GPU are multiplied there, without waiting for it."""
    waiting: deque[tuple[int, AttentionLayer, Future[tuple[Moments, Tensor]]]] = deque()

    def first() -> _LayerPart:
        number, layer, future = waiting.popleft()
        return _LayerPart(number, layer, *future.result())

    with lone_workers(workers) as pool:
        for number, layer in numbered:
            read = layer if work.by_threads else _load_maps(layer)
            if not work.by_threads and read.query.weight().device.type != "cpu":
                while waiting:
                    yield first()
                yield _LayerPart(number, layer, *_moments(read, work.raw, None))
                continue
            waiting.append((number, layer, pool.submit(_moments, read, work.raw, None)))
            if len(waiting) > workers:
                yield first()
        while waiting:
            yield first()


@dataclass(frozen=True)
class _LoadedWeight:
    """The weight of a projection that was read before."""

    tensor: Tensor

    def __call__(self) -> Tensor:
        return self.tensor


def _load_maps(layer: AttentionLayer) -> AttentionLayer:
    """The layer with its maps read by this thread, since not every source can be read by several threads."""
    query, key = (replace(part, weight=_LoadedWeight(part.weight())) for part in (layer.query, layer.key))
    return replace(layer, query=query, key=key)


def _numbers(layer: AttentionLayer) -> int:
    """How many numbers the query and key maps have."""
    return sum(part.shape[0] * part.shape[1] for part in (layer.query, layer.key))


@torch.no_grad()
def _moments(
    layer: AttentionLayer, raw: bool, statistics: Input | None, double: bool = False
) -> tuple[Moments, Tensor]:
    """The small matrices of a layer and its key biases where its maps are, by blocks of heads. The maps of a block are
    freed before those of the next are read.
    """
    if layer.unknown_scale is not None:  # without its scale a layer has the numbers of its maps alone
        layer = replace(layer, scale=1.0, unknown_scale=None)
    tokens = None if statistics is None else statistics.as_tokens()
    block_moments = partial(_block_moments, raw=raw, tokens=tokens)
    parts = [block_moments(block, double=double) for block in _blocks(layer, tokens)]
    if len({moments.query_gram.dtype for moments, _ in parts}) > 1:  # if one block needs float64, all get it
        parts = [block_moments(block, double=True) for block in _blocks(layer, tokens)]
    return join_moments([moments for moments, _ in parts]), torch.cat([bias for _, bias in parts])


def _blocks(layer: AttentionLayer, tokens: Tokens | None) -> Iterable[AttentionLayer]:
    """Parts of a layer; whole groups of heads where they fit, so that the products are those of the whole layer."""
    if tokens is not None:
        return [layer]
    if isinstance(layer.query.weight, _LoadedWeight) and layer.query.weight.tensor.device.type != "cpu":
        return head_blocks(layer, BLOCK)
    return head_blocks(layer, _block(layer))


def _block(layer: AttentionLayer) -> int:
    """Numbers of maps in a block: those of a key head and its query heads at least, where they fit."""
    group = layer.head_dim * (layer.group * layer.query.shape[1] + layer.key.shape[1])
    return min(BLOCK, max(CACHED, group))


def _block_moments(layer: AttentionLayer, raw: bool, tokens: Tokens | None, double: bool) -> tuple[Moments, Tensor]:
    folded = effective(layer, raw, tokens)
    if double:
        folded = replace(folded, query=folded.query.double(), key=folded.key.double())
    return folded.moments(), folded.key_bias


def _join_group(group: list[_LayerPart], work: Work) -> Iterator[LayerMoments]:
    """The records of a group. On the CPU, heads that need float64 already have it. On a GPU they are known once their
    numbers have arrived, and layers with such heads are multiplied again.
    """
    numbered, counts = [(one.number, one.layer) for one in group], [len(one.key_bias) for one in group]
    with one_thread():
        moments = join_moments([one.moments for one in group])
        bias = torch.cat([one.key_bias for one in group])
        group.clear()  # and with it the matrices of each layer
        single = moments.query_gram.dtype == torch.float32
        heads = lost_in_float32(moments).cpu() if single else torch.zeros(sum(counts), dtype=torch.bool)
        lost = [bool(part.any()) for part in heads.split(counts)]
        whole = LayerMoments(numbered, *_move_to_cpu(moments, bias))
    for again, layers in _runs(counts, lost, moments.head_dim**2, _limit(whole.key_bias.device)):
        if not again:
            yield whole.part(layers)
            continue
        for number, layer in numbered[layers]:
            double = _moments(layer, work.raw, work.input_of(number), double=True)
            yield LayerMoments([(number, layer)], *_move_to_cpu(*double))


def _move_to_cpu(moments: Moments, key_bias: Tensor) -> tuple[Moments, Tensor]:
    """Unchanged on CUDA; from other devices, which may have no float64, moved to the CPU."""
    return (moments, key_bias) if key_bias.device.type == "cuda" else (moments.cpu(), key_bias.cpu())


def _runs(counts: Sequence[int], lost: Sequence[bool], size: int, limit: int) -> Iterator[tuple[bool, slice]]:
    """Runs of layers with the same answer, of at most `limit` numbers. `counts` are heads of layers, `size` is the
    number of entries of a small matrix.

    >>> list(_runs([2, 2, 2, 2], [False, False, True, False], size=1, limit=4))
    [(False, slice(0, 2, None)), (True, slice(2, 3, None)), (False, slice(3, 4, None))]
    """
    start = 0
    for end in range(1, len(counts) + 1):
        full = end < len(counts) and sum(counts[start : end + 1]) * size > limit
        if end == len(counts) or lost[end] != lost[start] or full:
            yield lost[start], slice(start, end)
            start = end


def _limit(device: torch.device) -> int:
    return TOGETHER if device.type == "cpu" else ON_GPU * TOGETHER


def _size(*group: _LayerPart) -> int:
    return sum(one.moments.query_gram.numel() for one in group)
