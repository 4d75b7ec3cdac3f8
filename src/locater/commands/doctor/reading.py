"""Reading a source for doctor: every tensor once, layer by layer, with the heads of each layer beside its tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn

from locater.commands.doctor.heads import LayerHeads, layer_heads
from locater.commands.doctor.tensors import Collector, Facts, HeldWeights, Reader, blocks, place_of
from locater.discovery import read_source
from locater.discovery.record_or_discovery import Reading
from locater.errors import DamagedError, LocaterError
from locater.layers.build import check_layer
from locater.layers.layer import AttentionLayer
from locater.layers.layout import AttentionLayout
from locater.sources.open_source import Config, Source, open_source
from locater.sources.weights import ModuleWeights, Weights
from locater.torch_private import unsaved_buffers

Progress = Callable[[Iterable[Any], int], Iterable[Any]]
COMPUTED = ("rotary_emb.inv_freq", "position_ids", "masked_bias", ".attn.bias", "num_batches_tracked")


@dataclass
class Model:
    """An opened source, and where its attention is."""

    name: str
    weights: Weights
    config: Config
    names: list[str]
    reading: Reading | None = None
    damage: DamagedError | None = None  # why a record could not read it, where that is a fault
    unread: str = ""  # why its heads are not known, where that is none

    @property
    def live(self) -> bool:
        return isinstance(self.weights, ModuleWeights)


@dataclass
class Examined:
    """What was read of a model."""

    model: Model
    facts: dict[str, Facts] = field(default_factory=dict)
    heads: list[LayerHeads] = field(default_factory=list)
    layers: list[AttentionLayer] = field(default_factory=list)
    refused: dict[str, str] = field(default_factory=dict)  # tensors that could not be read, and why

    def heads_layer(self, number: int) -> int:
        """The layer, as tensors name it, of an attention layer."""
        name = next((heads.name for heads in self.heads if heads.number == number), "")
        layer = place_of(f"{name}.x").layer
        return number if layer is None else layer

    @property
    def bytes(self) -> int:
        return sum(x.bytes for x in self.facts.values())


def open_model(source: Source, name: str, download: bool = False, base: str | None = None) -> Model:
    """Open a source with all its tensors; a reader of attention may need some of them alone."""
    weights, config = open_source(source, download, base)
    whole = getattr(weights, "whole", None)
    weights = whole() if callable(whole) else weights
    names = [x for x in weights.names() if not x.endswith(COMPUTED)]
    if isinstance(weights, ModuleWeights):
        names = _saved_once(weights, names)
    return Model(name, weights, config, names)


def find_attention(model: Model, **options: Any) -> None:
    """Where the attention of a model is; a contradiction between its tensors and its configuration is kept."""
    try:
        reading = read_source(model.weights, model.config, **options)
        model.reading = reading if reading.found else None
        model.unread = "" if reading.found else "no attention layer was found"
    except DamagedError as error:
        model.damage = error
    except LocaterError as error:
        model.unread = str(error).removeprefix(f"{model.weights.where}: ")


def _saved_once(weights: ModuleWeights, names: Sequence[str]) -> list[str]:
    """The tensors of a live model that a file of it would have; a parameter with two names counts once."""
    once: dict[int, str] = {}
    for name in names:
        tensor = weights.live_tensor(name)
        if tensor.attribute not in unsaved_buffers(tensor.module):
            once.setdefault(id(getattr(tensor.module, tensor.attribute, tensor)), name)
    return list(once.values())


Unit = tuple[int | None, list[str]]  # number of an attention layer, or None; tensors that are read with it


def units(model: Model) -> list[Unit]:
    """Tensors by the layers that they are in, each once; those of no layer come first."""
    by_place: dict[tuple[str, int | None], list[str]] = {}
    for name in model.names:
        place = place_of(name)
        by_place.setdefault((place.stack if place.layer is not None else "", place.layer), []).append(name)
    order = sorted(by_place, key=lambda key: (key[1] is not None, key[0], key[1] or 0))
    return [(key[1], by_place[key]) for key in order]


def layers_by_place(reading: Reading) -> dict[tuple[str, int | None], list[int]]:
    """Numbers of attention layers by the stack and layer of their tensors."""
    places: dict[tuple[str, int | None], list[int]] = {}
    for number, item in enumerate(reading.found):
        place = place_of(f"{item.name}.x")
        places.setdefault((place.stack if place.layer is not None else "", place.layer), []).append(number)
    return places


def tensor_reader(held: HeldWeights, name: str, of_heads: bool) -> Reader:
    """A reader of one tensor; maps of heads are kept in memory until their layer is done."""
    reader = Reader(held.weights, name, whole=of_heads)
    if of_heads and reader.whole is not None:
        held.hold(name, reader.whole)
    return reader


def attention_names(reading: Reading | None, weights: Weights) -> set[str]:
    """Tensors that the heads are read from."""
    if reading is None or reading.weights is not weights or isinstance(weights, ModuleWeights):
        return set()
    names: set[str] = set()
    for item in reading.found:
        if isinstance(item, AttentionLayout):
            for part in (item.query, item.key, item.value, item.out):
                names |= set() if part is None else {name for name, _ in part.maps(weights)}
    return names


def heads_of_layer(model: Model, held: HeldWeights, number: int) -> tuple[AttentionLayer, LayerHeads]:
    """One attention layer, and what its heads do."""
    assert model.reading is not None
    item = model.reading.found[number]
    if isinstance(item, AttentionLayout) and model.reading.weights is model.weights and not model.live:
        layer = item.build(held)  # type: ignore[arg-type]
        if layer.provenance == "family":
            check_layer(model.weights, layer)
    else:
        (layer,) = model.reading.build([number])
    return layer, layer_heads(layer, number)


def examine(model: Model, progress: Progress | None = None) -> Examined:
    """Read every tensor of one model once."""
    result = Examined(model)
    for _ in examine_units(model, result, progress):
        pass
    return result


def examine_units(
    model: Model, result: Examined, progress: Progress | None = None
) -> Iterator[tuple[list[str], Mapping[str, Tensor], list[int]]]:
    """The same, layer by layer: names, row sketches, and numbers of attention layers of each."""
    held, wanted = HeldWeights(model.weights), attention_names(model.reading, model.weights)
    places = {} if model.reading is None else layers_by_place(model.reading)
    every, done = units(model), set[int]()
    for _, names in progress(every, len(every)) if progress else every:
        sketches: dict[str, Tensor] = {}
        for name in names:
            try:
                facts, sketches[name] = _collected(model.weights, tensor_reader(held, name, name in wanted), name)
                result.facts[name] = facts
            except DamagedError:
                raise
            except LocaterError as error:
                result.refused[name] = str(error)
        place = place_of(names[0])
        numbers = places.get((place.stack if place.layer is not None else "", place.layer), [])
        done.update(numbers)
        for number in numbers:
            _add_heads(result, held, number)
        yield names, sketches, numbers
        held.release()
    for number in set(range(len(model.reading.found) if model.reading else 0)) - done:  # in no numbered layer
        _add_heads(result, held, number)


def _add_heads(result: Examined, held: HeldWeights, number: int) -> None:
    model = result.model
    try:
        layer, heads = heads_of_layer(model, held, number)
    except DamagedError as error:
        model.damage = model.damage or error
    except LocaterError as error:
        model.unread = model.unread or str(error).removeprefix(f"{model.weights.where}: ")
    else:
        heads.forget()
        result.layers.append(layer)
        result.heads.append(heads)


def _collected(weights: Weights, read: Reader, name: str) -> tuple[Facts, Tensor]:
    collector = Collector(weights, name)
    for start, stop in blocks(weights, name):
        collector.add(start, read(start, stop))
    return collector.done()


def source_name(source: Source) -> str:
    return type(source).__name__ if isinstance(source, nn.Module) else str(source)
