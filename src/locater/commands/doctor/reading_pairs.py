"""Reading a model and its base, each once, tensor by tensor and layer by layer."""

from __future__ import annotations

import copy
import math
from dataclasses import replace

import torch
from torch import Tensor

from locater.commands.doctor.differences import Differ
from locater.commands.doctor.heads import LayerHeads
from locater.commands.doctor.pairs import STRUCTURE, HeadPair, Pair, Paired, matched_names
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
from locater.commands.doctor.rewritten import RewrittenWeights
from locater.commands.doctor.tensors import (
    Collector,
    Facts,
    HeldWeights,
    Reader,
    as_matrix,
    blocks,
    file_of,
    place_of,
)
from locater.errors import DamagedError, LocaterError
from locater.sources.adapter_folder import AdaptedWeights

BLOCK_START = 4096  # numbers


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
    pair.stored = weights.stored_dtype(name) if isinstance(weights, RewrittenWeights) else ""
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
    keyed = own.keyed or base.keyed
    effects, base_effects = (
        [(x if keyed else x[..., :-1]).transpose(0, 1).flatten(1)] for x in (own.logits, base.logits)
    )
    constant = True
    if own.outputs is not None and base.outputs is not None and own.outputs.shape == base.outputs.shape:
        pair.output_difference = _apart(own.outputs, base.outputs)
        effects.append(own.outputs[..., :-1].flatten(1))
        base_effects.append(base.outputs[..., :-1].flatten(1))
        if own.constant is not None and base.constant is not None:
            size = base.outputs[..., :-1].norm() / base.outputs.shape[-1] ** 0.5
            apart_ = float((own.constant - base.constant).norm())
            constant = apart_ <= STRUCTURE * max(float(base.constant.norm()), STRUCTURE * float(size))
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
    pair.equivalent = (
        constant and sorted(pair.order) == list(range(len(pair.order))) and bool((nearest < STRUCTURE).all())
    )
    return pair


def _apart(own: Tensor, base: Tensor) -> Tensor:
    """|own - base| / |base| for each head."""
    size = base.flatten(1).norm(dim=1).clamp_min(1e-30)
    return (own - base).flatten(1).norm(dim=1) / size
