"""Discovery for a checkpoint on disk whose architecture has no record, from its config.json.

The class that config.json names is built twice: in full without weights (meta device), for the names and shapes of all
tensors, and small with random weights (`small_config`), to be discovered and verified. The layouts are carried over to
all layers (`carried_layouts`), and tensors are read from disk by their names there (`sources.renamed_weights`).
"""

from __future__ import annotations

import contextlib
import copy
import gc
import importlib
import itertools
import math
import os
import threading
import time
import warnings
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from locater.calls.attention_like import attention_like
from locater.discovery.cache_on_disk import CachedLayouts, cache_file, read_cached, write_cached
from locater.discovery.carried_layouts import UNLIKE, SearchResult, carry_layouts, unlike_modules
from locater.discovery.layer_kinds import Kinds
from locater.discovery.layout_json import tensor_names
from locater.discovery.small_config import CUTS, DEPTH, PICTURE_SETTINGS, Reduction, changed_settings, small_config
from locater.discovery.verified_search import Discovered, Refusal, search
from locater.errors import LocaterError
from locater.layers.layout import TableLayout
from locater.sources.open_source import Config
from locater.sources.renamed_weights import Origins, RenamedWeights, TensorOrigin, origins_of
from locater.sources.weights import ModuleWeights, Weights, quantised_names

# A small model of the class that a config.json names, and what a search finds in it for the full one.


BYTES = 8  # of memory for each parameter of a small model: it in float32, and room
SMALL_PICTURE = "its positions are those of pictures of one size, and a model of that size does not run here"
UNSTORED = 30_000_000  # numbers of a small model beyond those of the checkpoint: 240 MB
DEEPEST_EVER = 1_000  # layers of a model, beside one for each tensor of its checkpoint
DEEPEST = 24  # layers of a stack of a small model
# what a search may hold, and how long it may take, and more for each number of the checkpoint: a VITS of 15 million
# numbers needs 7 GB and 17 s of processor time
MOST_BYTES, BYTES_EACH = 1_000_000_000, 500
MOST_SECONDS, SECONDS_EACH = 20, 1e-6


def class_and_settings(weights: Weights, config: Config) -> tuple[type, Any]:
    """The class of transformers that a configuration names, and the configuration as its object. Code that comes with a
    checkpoint is never run.
    """
    where, model_type = weights.where, config.get("model_type")
    _refuse_depth(weights, config)
    if config.get("auto_map"):
        raise LocaterError(
            f"{where}: config.json names code of its own (auto_map), which is not run from here; if you trust it, load "
            "the model with trust_remote_code=True and scan that: locater.scan(model)"
        )
    if config.get("quantization_config") and not quantised_names(weights):
        raise LocaterError(
            f"{where}: config.json says that its weights are quantised, in a way that is not read: "
            "dequantise the model and save it first"
        )
    try:
        import transformers
    except ImportError:
        raise LocaterError(
            f"{where}: model_type {model_type!r} can be discovered from config.json with transformers: "
            "install locater[hf]"
        ) from None
    if model_type not in transformers.CONFIG_MAPPING:
        raise LocaterError(f"{where}: transformers {transformers.__version__} has no model_type {model_type!r}")
    unused = ("attn_implementation", "quantization_config")  # of the weights, which are read as floats
    given = {name: _with_floats(value) for name, value in config.items() if not any(other in name for other in unused)}
    try:
        settings = transformers.CONFIG_MAPPING[model_type].from_dict(given)
        return _class_of(transformers, settings, config.get("architectures")), settings
    except Exception as error:  # configurations check themselves in the code of their class
        raise _unbuildable(where, model_type, error) from None


def _with_floats(value: Any) -> Any:
    """A setting with the numbers that transformers writes as objects, because JSON has none for them:
    {"__float__": "Infinity"}.
    """
    if isinstance(value, dict):
        if list(value) == ["__float__"] and value["__float__"] in ("Infinity", "-Infinity", "NaN"):
            return float(value["__float__"])
        return {name: _with_floats(part) for name, part in value.items()}
    return [_with_floats(part) for part in value] if isinstance(value, list) else value


def build_model(kind: type, settings: Any, device: str, where: str, most: int | None = None) -> nn.Module:
    """A model of this configuration, without data on the device "meta", and of at most so many tensors."""
    try:
        with contextlib.ExitStack() as stack:
            if most is not None:
                stack.enter_context(_at_most(most))
            stack.enter_context(torch.random.fork_rng(devices=[]))
            if device == "meta":
                from transformers import initialization

                stack.enter_context(torch.device("meta"))
                stack.enter_context(initialization.no_init_weights())
                stack.enter_context(initialization.meta_device_safe_creation_ops())
            model: nn.Module = kind(copy.deepcopy(settings)).eval()
    except Exception as error:  # of the constructor of any class
        raise _unbuildable(where, getattr(settings, "model_type", None), error) from None
    return model


@contextlib.contextmanager
def _at_most(tensors: int) -> Iterator[None]:
    """Inside, a model of more tensors is not built in this thread."""
    thread, count = threading.get_ident(), itertools.count(1)

    def counted(*_: object) -> None:
        if threading.get_ident() == thread and next(count) > tensors:
            raise LocaterError(f"it would have more than {tensors:,} tensors, and the checkpoint has far fewer")

    handle = register_module_parameter_registration_hook(counted)
    try:
        yield
    finally:
        handle.remove()


def _refuse_depth(weights: Weights, config: Mapping[str, Any]) -> None:
    """Refuse a number of layers that no checkpoint of so many tensors has: lists of that length are made of it."""
    most, todo = DEEPEST_EVER + len(weights.names()), [config]
    while todo:
        for name, value in todo.pop().items():
            if isinstance(value, Mapping):
                todo.append(value)
            elif type(value) is int and value > most and DEPTH.fullmatch(name):
                raise LocaterError(
                    f"{weights.where}: config.json says {name} = {value:,}, and the checkpoint holds "
                    f"{len(weights.names())} tensors: correct config.json"
                )


@dataclass(frozen=True)
class Candidate:
    """A small configuration, how its modules correspond to those of the full model, and what is missing from it."""

    settings: Any
    kinds: Kinds
    missing: list[str]  # attention modules of the full model that none of its modules is like
    parameters: int


def search_small(
    weights: Weights,
    kind: type,
    settings: Any,
    whole: ModuleWeights,
    example: Mapping[str, Any] | None,
    stored: int,
) -> SearchResult:
    """Search a small model and carry what is found over to the full one: the smallest model that has all kinds of
    attention of the full one, fits into memory and runs; where none has all kinds, the one that lacks least.

    `stored` is how many numbers the checkpoint holds: a small model that has many more is not run.
    """
    results: list[SearchResult] = []
    reasons: list[str] = []
    rest: list[Candidate] = []
    for candidate in _candidates(weights, kind, settings, whole):
        if candidate.missing:
            rest.append(candidate)
        else:
            results += _search_candidate(weights, kind, candidate, whole, example, reasons, stored)
            if results and not _count_lost(results[-1]):
                return results[-1]
    for candidate in sorted(rest, key=lambda candidate: len(candidate.missing))[: 0 if results else None]:
        results += _search_candidate(weights, kind, candidate, whole, example, reasons, stored)
        if results:
            break
    if not results:
        reason = reasons[0] if reasons else "no small model of its class can be built"
        raise LocaterError(f"{weights.where}: {reason}")
    return min(results, key=_count_lost)


def _count_lost(searched: SearchResult) -> int:
    """How many layers were found and could not be carried over."""
    return sum(refusal.reason in (UNLIKE, SMALL_PICTURE) for refusal in searched.refused)


def _search_candidate(
    weights: Weights,
    kind: type,
    candidate: Candidate,
    whole: ModuleWeights,
    example: Mapping[str, Any] | None,
    reasons: list[str],
    stored: int,
) -> list[SearchResult]:
    """What a search finds, carried over; nothing where the model does not run, with the reason in `reasons`."""
    needed, allowed = candidate.parameters * BYTES, _memory() // 2
    if needed > allowed:
        reasons.append(f"a small model of its class needs {needed / 1e9:.0f} GB of memory: load the model, scan that")
        return []
    if candidate.parameters > stored + UNSTORED:
        reasons.append(
            f"a small model of its class has {candidate.parameters:,} numbers, and the checkpoint holds {stored:,}: "
            "correct config.json"
        )
        return []
    try:
        small = ModuleWeights(build_model(kind, candidate.settings, "cpu", weights.where))
        with BoundedWork(stored):
            searched = SearchResult(*search(small.module, small, example))
    except LocaterError as error:
        reasons.append(str(error).removeprefix(f"{weights.where}: "))
        return []
    result = carry_layouts(searched, candidate.kinds, small, whole)
    return [_without_position_tables(result) if candidate.kinds.changed & PICTURE_SETTINGS else result]


class BoundedWork(TorchFunctionMode):
    """Ends a search that holds more memory or takes longer than the checkpoint's size justifies: a few numbers of a
    config.json decide how long a wave or how large a picture it computes.
    """

    def __init__(self, stored: int) -> None:
        super().__init__()
        self._most_bytes, self._most_seconds = MOST_BYTES + BYTES_EACH * stored, MOST_SECONDS + SECONDS_EACH * stored
        self._made: list[weakref.ref[torch.Tensor]] = []
        self._held: dict[int, int] = {}  # bytes by address
        self._bytes, self._started = 0, time.process_time()

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor) and x.layout is torch.strided and not x.is_meta:
                self._add(x)
        if self._bytes > self._most_bytes:
            gc.collect()  # tapes of passes before
            alive = [x for made in self._made if (x := made()) is not None]
            self._made, self._held, self._bytes = [], {}, 0
            for x in alive:
                self._add(x)
        reached = f"{self._most_bytes / 1e9:.1f} GB" if self._bytes > self._most_bytes else ""
        if not reached and time.process_time() - self._started > self._most_seconds:
            reached = f"{self._most_seconds:.0f} s"
        if reached:
            raise LocaterError(f"a small model of its class takes more than {reached} to run: load it and scan that")
        return out

    def _add(self, x: torch.Tensor) -> None:
        memory = x.untyped_storage()
        self._made.append(weakref.ref(x))
        if memory.data_ptr() not in self._held:
            self._held[memory.data_ptr()] = memory.nbytes()
            self._bytes += memory.nbytes()


def _without_position_tables(searched: SearchResult) -> SearchResult:
    """Without layers whose numbers are those of the places of one picture: a small picture has others."""
    placed = [
        layout
        for layout in searched.layouts
        if layout.angles or layout.logits.relative or isinstance(layout.logits.bias, TableLayout)
    ]
    layouts = [layout for layout in searched.layouts if layout not in placed]
    refused = [*searched.refused, *(Refusal(layout.name, SMALL_PICTURE) for layout in placed)]
    return SearchResult(layouts, refused, searched.unreached)


def _candidates(weights: Weights, kind: type, settings: Any, whole: ModuleWeights) -> Iterator[Candidate]:
    """Small configurations that build, without repetitions, the smallest first."""
    known: set[str] = set()
    for start in CUTS:
        cut: Reduction | None = start
        while cut is not None:  # with more and more layers, until all kinds are among them
            small = small_config(settings, cut)
            if repr(small.to_dict()) in known:
                break
            known.add(repr(small.to_dict()))
            try:
                model = ModuleWeights(build_model(kind, small, "meta", weights.where))
            except LocaterError:
                break
            kinds = Kinds(model.modules(), whole.modules(), changed_settings(settings, small))
            missing = unlike_modules(kinds, model, whole)
            yield Candidate(small, kinds, missing, _numbers(model.module))
            cut = _deeper(cut, kinds, missing)


def _numbers(model: nn.Module) -> int:
    """How many numbers a model holds, buffers by their bytes."""
    buffers = sum(buffer.numel() * buffer.element_size() // 4 for buffer in model.buffers())
    return buffers + sum(parameter.numel() for parameter in model.parameters())


def _deeper(cut: Reduction, kinds: Kinds, missing: list[str]) -> Reduction | None:
    """The same with the first layer that was missing; None where that does not help."""
    places = [stack.place(path) for path in missing if (stack := kinds.stack_of(path)) is not None]
    layers = min((place[0] + 1 for place in places if place is not None), default=0)
    if cut.layers is None or layers <= cut.layers or layers > DEEPEST:
        return None
    return replace(cut, layers=layers, by_lists=False)


def _class_of(transformers: Any, settings: Any, names: Any) -> type:
    """The class that a configuration names, or else the model without a head."""
    modeling = type(settings).__module__.replace(".configuration_", ".modeling_")
    for name in names if isinstance(names, list | tuple) else ():
        for place in (lambda: transformers, lambda: importlib.import_module(modeling)):
            with contextlib.suppress(ImportError, AttributeError):
                kind = getattr(place(), str(name))
                if isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel):
                    return kind
    base: type = transformers.MODEL_MAPPING[type(settings)]
    return base if isinstance(base, type) else base[0]


def _unbuildable(where: str, model_type: Any, error: Exception) -> LocaterError:
    reason = " ".join(str(error).split())  # a check of a configuration says what is wrong in its second line
    return LocaterError(
        f"{where}: no {model_type} model can be built from config.json ({type(error).__name__}: {reason:.240})"
    )


def _memory() -> int:
    """Bytes of memory that the machine has."""
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, ValueError, OSError):  # not on this system
        return 16 << 30


MOST_TENSORS = 5_000  # of a model, beside four for each that its checkpoint holds
NO_PLACE = "the model that config.json describes has no place for it"


def discovered_on_disk(weights: Weights, config: Config, example: Mapping[str, Any] | None = None) -> Discovered:
    """Attention layers of a checkpoint, found in a small model of its class. `example` as for `discover`."""
    path = None if example is not None else cache_file(weights, config)
    content = read_cached(path)
    if content is None:
        with _without_warnings():
            content = _search_checkpoint(weights, config, example)
        write_cached(path, content)
    searched = content.searched
    numbered = [replace(layout, index=index) for index, layout in enumerate(searched.layouts)]
    return Discovered(numbered, searched.refused, searched.unreached, RenamedWeights(weights, content.origins))


def _search_checkpoint(weights: Weights, config: Config, example: Mapping[str, Any] | None) -> CachedLayouts:
    """What a search finds, for the whole checkpoint, and where each of its tensors is on disk."""
    kind, settings = class_and_settings(weights, config)
    most = MOST_TENSORS + 4 * len(weights.names())
    full = build_model(kind, settings, "meta", weights.where, most)
    origins, whole = origins_of(weights, full), ModuleWeights(full)
    _refuse_other_attention(weights, origins, whole)
    searched = search_small(weights, kind, settings, whole, example, _numbers_stored(weights, origins, full))
    unused = RenamedWeights(weights, {name: TensorOrigin((name,)) for name in origins.unused})
    refused = [*searched.refused, *(Refusal(path, NO_PLACE) for path in attention_like(unused))]
    known = set(whole.names())
    names = dict.fromkeys(name for layout in searched.layouts for name in tensor_names(layout, known))
    stored = {name: _stored(weights, origins, name, whole.shape(name)) for name in names}
    return CachedLayouts(SearchResult(searched.layouts, refused, searched.unreached), stored)


def _refuse_other_attention(weights: Weights, origins: Origins, whole: ModuleWeights) -> None:
    """Refuse a checkpoint that does not hold the attention of the model that config.json describes, by names and shapes
    alone, before anything runs: what runs has the size that config.json says.
    """
    paths = tuple(f"{path}." if path else "" for path in attention_like(whole))
    maps = [name for name, p in whole.module.named_parameters() if p.ndim > 1 and name.startswith(paths)]
    for name in maps if paths else ():
        if name not in origins.changed:
            _stored(weights, origins, name, whole.shape(name))


def _numbers_stored(weights: Weights, origins: Origins, full: nn.Module) -> int:
    """How many numbers the checkpoint holds; of packed tensors those that the model has there."""
    packed = quantised_names(weights)
    plain = sum(math.prod(weights.shape(name)) for name in weights.names() if name not in packed)
    held = {name for name, origin in origins.stored.items() if not packed.keys().isdisjoint(origin.names)}
    return plain + sum(p.numel() for name, p in full.named_parameters() if name in held)


def _stored(weights: Weights, origins: Origins, name: str, shape: tuple[int, ...]) -> TensorOrigin:
    """Where a tensor of the model is on disk; refused where it is not there, or not of the shape that it has."""
    if name in origins.changed:
        raise LocaterError(
            f"{weights.where}: {name} is changed when transformers loads it, and its rows cannot be followed "
            f"({origins.changed[name]}): load the model and scan that"
        )
    if name not in origins.stored:
        raise LocaterError(f"{weights.where}: the tensor {name} is missing; the checkpoint is incomplete")
    origin = origins.stored[name]
    there = RenamedWeights(weights, {name: origin}).shape(name)
    if there != shape:
        raise LocaterError(
            f"{weights.where}: {origin.names[0]} has shape {list(there)} but the configuration says {list(shape)}"
        )
    return origin


@contextlib.contextmanager
def _without_warnings() -> Iterator[None]:
    """No warnings of transformers: it warns of settings of models that nobody runs."""
    try:
        from transformers.utils import logging
    except ImportError:
        yield
        return
    before = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.set_verbosity(before)
