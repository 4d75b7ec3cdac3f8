"""A folder with a LoRA adapter of peft, read as what acts: the weights of its base model plus scale B A.

Axes: r rank of the adapter. A map W (out, in) of the base is read as W + scale B A, with B (out, r) and A (r, in); with
DoRA as m (W + scale B A) / |W + scale B A|, row by row. Only the rows asked for are computed. Tensors that were trained
as a whole (biases, `modules_to_save`) stand in place of those of the base.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from locater.checkpoints.pickle_file import open_pickles
from locater.checkpoints.safetensors_file import SafetensorsWeights
from locater.checkpoints.weights import Rows, Weights, quantised_names, take_rows
from locater.errors import LocaterError
from locater.files import is_there, read_json
from locater.numerics import upcast

SETTINGS = "adapter_config.json"
FILES = ("adapter_model.safetensors", "adapter_model.bin")
# settings under which a layer computes otherwise than with W + scale B A, or on another base
OTHERWISE = (
    "use_qalora use_bdlora alora_invocation_tokens arrow_config kasa_config monteclora_config layer_replication"
    " target_parameters trainable_token_indices megatron_config"
).split()
PLAIN_STARTS = (True, False, None, "gaussian", "eva")  # others change the base model too
PART = re.compile(
    r"(?P<map>.+)\.(?P<part>lora_(?:A|B|magnitude_vector|embedding_A|embedding_B))(?:\.(?P<kind>weight|bias))?"
)


@dataclass
class Adapter:
    """Names of the adapter's tensors for one map."""

    scale: float
    tensors: dict[str, str] = field(default_factory=dict)  # lora_A, lora_B, lora_B.bias, lora_magnitude_vector


class AdaptedWeights:
    """The tensors of a base model as an adapter changes them."""

    def __init__(self, base: Weights, own: Weights, settings: Mapping[str, Any], where: str) -> None:
        self.where = where
        self._base, self._own = base, own
        self._transposed = bool(settings.get("fan_in_fan_out"))
        self._adapters: dict[str, Adapter] = {}  # by the base's name of the weight
        self._replaced: dict[str, str] = {}  # the base's name -> the adapter's
        for name in own.names():
            self._sort_in(name, settings)

    def names(self) -> Collection[str]:
        return self._base.names()

    @property
    def quantised(self) -> Mapping[str, str]:
        """The formats of the base model's quantised maps. What the adapter adds to them is not quantised."""
        return {name: kind for name, kind in quantised_names(self._base).items() if name not in self._replaced}

    def shape(self, name: str) -> tuple[int, ...]:
        return self._base.shape(name)

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        if name in self._replaced:
            return self._own.read(self._replaced[name], rows)
        base, adapter = self._base.read(name, rows), self._adapters.get(name)
        if adapter is None:
            weight = f"{name.removesuffix('.bias')}.weight" if name.endswith(".bias") else ""
            extra = self._adapters[weight].tensors.get("lora_B.bias") if weight in self._adapters else None
            if extra is None:
                return base
            return upcast(base) + self._adapters[weight].scale * upcast(self._own.read(extra, rows))
        if not {"lora_A", "lora_B"} <= adapter.tensors.keys():
            raise LocaterError(f"{self.where}: the adapter of {name} is not one of a linear map: merge it first")
        return self._adapted(upcast(base), name, adapter, rows)

    def _adapted(self, base: Tensor, name: str, adapter: Adapter, rows: Rows | None) -> Tensor:
        parts = {part: upcast(self._own.read(stored)) for part, stored in adapter.tensors.items()}
        b, a = parts["lora_B"], parts["lora_A"]
        shape, (out, into) = self._base.shape(name), (b.shape[0], a.shape[1])
        transposed = self._transposed if out == into else shape == (into, out)
        if shape != ((into, out) if transposed else (out, into)):
            raise LocaterError(f"{self.where}: its adapter of {name} is for {[out, into]}, the base has {list(shape)}")
        size = parts.get("lora_magnitude_vector")
        if transposed:
            delta = take_rows(a.mT, rows) @ b.mT * adapter.scale
            if size is not None:  # norms are over what a map reads: all rows of a transposed one
                whole = upcast(self._base.read(name)) + a.mT @ b.mT * adapter.scale
                return (base + delta) * size / whole.norm(dim=0, keepdim=True)
            return base + delta
        changed = base + take_rows(b, rows) @ a * adapter.scale
        if size is None:
            return changed
        return take_rows(size.reshape(-1, 1), rows) * changed / changed.norm(dim=1, keepdim=True)

    def _sort_in(self, name: str, settings: Mapping[str, Any]) -> None:
        """Put one tensor of the adapter where it acts."""
        path = name.removeprefix("base_model.model.")
        match = PART.fullmatch(path)
        if match is None:
            path = path.replace(".base_layer.", ".")
            last = ".".join(path.split(".")[-2:])
            if any(
                f".{other}".endswith(f".{last}") for other in self._base.names()
            ):  # others are new: a head of a task
                self._replaced[self._in_base(path, name)] = name
            return
        weight = self._in_base(f"{match['map']}.weight", name)
        part = f"{match['part']}.bias" if match["kind"] == "bias" else match["part"]
        if part == "lora_B.bias":
            self._in_base(f"{match['map']}.bias", name)
        adapter = self._adapters.setdefault(weight, Adapter(1.0))
        adapter.tensors[part] = name
        if part == "lora_A":
            adapter.scale = _scale(settings, match["map"], self._own.shape(name)[0])

    def _in_base(self, live: str, name: str) -> str:
        """The base's name of a tensor. A base may be stored with or without the name of the model around its layers."""
        names = self._base.names()
        if live in names:
            return live
        near = [other for other in names if f".{live}".endswith(f".{other}") or f".{other}".endswith(f".{live}")]
        if len(near) != 1:
            raise LocaterError(
                f"{self.where}: the adapter has {name}, which its base model {self._base.where} has not under that "
                "name: load both and scan the live model"
            )
        return near[0]


def _scale(settings: Mapping[str, Any], path: str, rank: int) -> float:
    """The factor of B A for one map."""
    patterns = settings.get("alpha_pattern") or {}
    pattern = next((key for key in patterns if re.match(rf"(.*\.)?({key})$", path)), None)
    alpha = settings.get("lora_alpha") if pattern is None else patterns[pattern]
    if not isinstance(alpha, int | float) or rank < 1:
        raise LocaterError(f"{SETTINGS}: lora_alpha is {alpha!r} and the rank of {path} {rank}: not an adapter")
    return alpha / (math.sqrt(rank) if settings.get("use_rslora") else rank)


def open_adapter(
    folder: Path, open_base: Callable[[str], tuple[Weights, dict[str, Any]]]
) -> tuple[Weights, dict[str, Any]]:
    """The weights of an adapter's folder on its base model, and the configuration of that."""
    settings = read_json(folder / SETTINGS)
    base = base_of(settings, str(folder))
    file = next((folder / name for name in FILES if is_there(folder / name)), None)
    if file is None:
        raise LocaterError(f"{folder}: an adapter without weights: {FILES[0]} is missing")
    beside = folder / base
    try:
        weights, config = open_base(str(beside) if beside.is_dir() else base)
    except LocaterError as error:
        raise LocaterError(f"{folder}: its base model cannot be opened: {error}") from None
    own = (
        SafetensorsWeights([file], str(folder)) if file.suffix == ".safetensors" else open_pickles([file], str(folder))
    )
    return AdaptedWeights(weights, own, settings, str(folder)), config


def base_of(settings: Any, where: str) -> str:
    """The base model that an adapter's settings name; kinds of adapters that are not read are refused."""
    if not isinstance(settings, dict):
        raise LocaterError(f"{where}/{SETTINGS}: contains a {type(settings).__name__}, not settings of an adapter")
    _refuse_other_kinds(where, settings)
    base = settings.get("base_model_name_or_path")
    if not isinstance(base, str) or not base:
        raise LocaterError(
            f"{where}/{SETTINGS}: base_model_name_or_path is {base!r}: write the base model's folder there"
        )
    return base


def _refuse_other_kinds(folder: str, settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type")
    if kind != "LORA":
        raise LocaterError(f"{folder}: an adapter of the kind {kind!r} is not read: merge it into its base model first")
    other = next((name for name in OTHERWISE if settings.get(name)), None)
    if other is None and settings.get("init_lora_weights", True) not in PLAIN_STARTS:
        other = "init_lora_weights"
    if other is not None:
        raise LocaterError(
            f"{folder}: an adapter with {other} = {settings[other]!r:.60} is not read: merge it into its base first"
        )
