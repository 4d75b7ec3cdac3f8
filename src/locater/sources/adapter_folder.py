"""A folder with a LoRA adapter of peft, read as what acts: the weights of its base model plus scale B A.

Axes: r rank of the adapter. A map W (out, in) of the base is read as W + scale B A, with B (out, r) and A (r, in); with
DoRA as m (W + scale B A) / |W + scale B A|, row by row. Only the rows asked for are computed. Tensors that were trained
as a whole (biases, `modules_to_save`) stand in place of those of the base.
"""

from __future__ import annotations

import math
import os
import re
import reprlib
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from torch import Tensor

from locater.errors import LocaterError, first_line, printable
from locater.files import CONFIG_LIMIT, is_there, read_json
from locater.numerics import upcast
from locater.sources.config_rules import FINITE_OR_NULL, FLAG, Rule, fault
from locater.sources.pickle_file import open_pickles
from locater.sources.safetensors_file import SafetensorsWeights
from locater.sources.weights import Rows, Weights, quantised_names, take_rows

SETTINGS, BASE = "adapter_config.json", "base_model_name_or_path"
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
ADAPTERS = 8  # on one another, at most
LONGEST, KEYS = 1000, 10_000  # characters of a key of alpha_pattern, and how many there may be
PARTS = 64  # of a name, from its end, by which it is found
STEPS = 300_000_000  # that matching all keys of alpha_pattern may take, at some nanoseconds each
TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # whose maps are Conv1D
LITERAL = re.compile(r"[\w.\-]+")
ATOMS = ("LITERAL", "NOT_LITERAL", "ANY", "IN")
HUB_ID = re.compile(r"(hf://)?[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?(@[\w.%-]+)?", re.ASCII)
TEXT: Rule = ("a text", lambda x: x is None or (isinstance(x, str) and len(x) <= LONGEST))


def _is_alpha(key: str, value: Any) -> bool:
    return len(key) <= LONGEST and value is not None and FINITE_OR_NULL[1](value)


RULES: dict[str, Rule] = {
    BASE: TEXT,
    "revision": TEXT,
    "lora_alpha": FINITE_OR_NULL,
    "use_rslora": FLAG,
    "use_dora": FLAG,
    "lora_bias": FLAG,
    "target_modules": (
        "a list of names, or a pattern",
        lambda x: isinstance(x, str) or (isinstance(x, list) and bool(x)),
    ),
    "fan_in_fan_out": FLAG,
    "alpha_pattern": (
        "a table of numbers by the names of maps",
        lambda x: x is None or (isinstance(x, dict) and len(x) <= KEYS and all(map(_is_alpha, x, x.values()))),
    ),
}
# opens the base model of an adapter: its settings, where it is, its folder on this machine; also the base's name
OpenBase = Callable[[Mapping[str, Any], str, Path | None], tuple[Weights, dict[str, Any], str]]


@dataclass
class Adapter:
    """The path of one map, and the names of the adapter's tensors for it."""

    path: str
    scale: float = 1.0
    tensors: dict[str, str] = field(default_factory=dict)  # lora_A, lora_B, lora_B.bias, lora_magnitude_vector


class AdaptedWeights:
    """The tensors of a base model as an adapter changes them."""

    def __init__(
        self,
        base: Weights,
        own: Weights,
        settings: Mapping[str, Any],
        where: str,
        base_name: str,
        model_type: str | None = None,
    ) -> None:
        self.where, self._settings = where, settings
        below = base_name_of(base)
        self.base_name = base_name if below is None else f"{base_name} (an adapter on {below})"
        self._base, self._own = base, own
        # peft corrects the setting by the kind of layer, which a square map does not show
        self._transposed = model_type in TRANSPOSED if model_type else bool(settings.get("fan_in_fan_out"))
        self._adapters: dict[str, Adapter] = {}  # by the base's name of the weight
        self._replaced: dict[str, str] = {}  # the base's name -> the adapter's
        self._index = _NameIndex(base.names())
        for name in own.names():
            self._assign(name)
        alphas = _Alphas(settings, f"{where}/{SETTINGS}")
        for weight, adapter in self._adapters.items():
            self._check(weight, adapter)
            if "lora_A" in adapter.tensors:
                rank = max(1, *own.shape(adapter.tensors["lora_A"])[:1])
                adapter.scale = alphas[adapter.path] / (math.sqrt(rank) if settings.get("use_rslora") else rank)

    def names(self) -> Collection[str]:
        return self._base.names()

    @property
    def changed_names(self) -> set[str]:
        """Tensors of the base that the adapter changes or replaces."""
        biases = {
            f"{weight.removesuffix('.weight')}.bias"
            for weight, adapter in self._adapters.items()
            if "lora_B.bias" in adapter.tensors
        }
        return {*self._adapters, *self._replaced, *biases}

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
            more = take_rows(upcast(self._own.read(extra)).flatten(), rows)
            return (upcast(base) + self._adapters[weight].scale * more).to(upcast(base).dtype)
        if not {"lora_A", "lora_B"} <= adapter.tensors.keys() or len(self._base.shape(name)) != 2:
            raise LocaterError(f"{self.where}: the adapter of {name} is not one of a linear map: merge it first")
        return self._adapted_map(upcast(base), name, adapter, rows)

    def _adapted_map(self, base: Tensor, name: str, adapter: Adapter, rows: Rows | None) -> Tensor:
        """The map as it acts, in the base's precision; the sum is in that of the adapter where this is higher."""
        parts = {part: upcast(self._own.read(stored)) for part, stored in adapter.tensors.items()}
        dtype = max((base, *parts.values()), key=lambda tensor: tensor.dtype.itemsize).dtype
        return self._sum(base.to(dtype), {part: x.to(dtype) for part, x in parts.items()}, name, adapter, rows).to(
            base.dtype
        )

    def _sum(self, base: Tensor, parts: dict[str, Tensor], name: str, adapter: Adapter, rows: Rows | None) -> Tensor:
        b, a = parts["lora_B"], parts["lora_A"]
        shape, (out, into) = self._base.shape(name), (b.shape[0], a.shape[1])
        transposed = self._transposed if out == into else shape == (into, out)
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

    def _assign(self, name: str) -> None:
        """Put one tensor of the adapter where it acts."""
        path = name.removeprefix("base_model.model.")
        match = PART.fullmatch(path)
        if match is None:
            path = path.replace(".base_layer.", ".")
            if self._index.ends_like(".".join(path.split(".")[-2:])):  # others are new: a head of a task
                self._replace(self._in_base(path, name), name)
            return
        weight = self._in_base(f"{match['map']}.weight", name)
        part = f"{match['part']}.bias" if match["kind"] == "bias" else match["part"]
        if part == "lora_B.bias":
            self._in_base(f"{match['map']}.bias", name)
        adapter = self._adapters.setdefault(weight, Adapter(match["map"]))
        self._refuse_two(name, adapter.tensors.get(part))
        adapter.tensors[part] = name

    def _refuse_two(self, name: str, other: str | None) -> None:
        if other is not None:
            both = f"{printable(other)} and {printable(name)}"
            raise LocaterError(f"{self.where}: {both} are of one place in its base model: remove one")

    def _replace(self, place: str, name: str) -> None:
        self._refuse_two(name, self._replaced.get(place))
        if self._own.shape(name) != self._base.shape(place):
            sizes = f"{list(self._own.shape(name))}, the base has {list(self._base.shape(place))}"
            raise LocaterError(f"{self.where}: {printable(name)} has the shape {sizes}: it is of another base")
        self._check_dtype(name)
        self._replaced[place] = name

    def _check(self, weight: str, adapter: Adapter) -> None:
        """Shapes and dtypes of an adapter's tensors. Those of a convolution or an embedding are refused when read."""
        shapes = {part: self._own.shape(name) for part, name in adapter.tensors.items()}
        shape, (a, b) = self._base.shape(weight), (shapes.get("lora_A"), shapes.get("lora_B"))
        for name in adapter.tensors.values():
            self._check_dtype(name)
        self._check_settings(weight, adapter)
        if a is None or b is None or len(shape) != 2:
            return
        if len(a) != 2 or len(b) != 2 or a[0] != b[1] or not a[0]:
            raise LocaterError(
                f"{self.where}: lora_A and lora_B of {printable(weight)} are {list(a)} and {list(b)}, which make no map"
            )
        transposed = self._transposed if b[0] == a[1] else shape == (a[1], b[0])
        if shape != ((a[1], b[0]) if transposed else (b[0], a[1])):
            raise LocaterError(
                f"{self.where}: its adapter of {weight} is for {[b[0], a[1]]}, the base has {list(shape)}"
            )
        for part in ("lora_magnitude_vector", "lora_B.bias"):
            if part in shapes and math.prod(shapes[part]) != b[0]:
                raise LocaterError(
                    f"{self.where}: {part} of {printable(weight)} is {list(shapes[part])}, where {b[0]} numbers belong"
                )

    def _check_settings(self, weight: str, adapter: Adapter) -> None:
        """Refuse tensors that peft would leave out by the settings, and settings whose tensors are missing."""
        targets = self._settings.get("target_modules")
        if isinstance(targets, list):
            ends = {".".join(adapter.path.split(".")[-count:]) for count in range(1, PARTS)}
            if not any(isinstance(target, str) and target in ends for target in targets):
                raise LocaterError(
                    f"{self.where}: has tensors for {printable(adapter.path)}, which target_modules does not name: the "
                    "settings are of another adapter"
                )
        for setting, part in (("use_dora", "lora_magnitude_vector"), ("lora_bias", "lora_B.bias")):
            held, said = part in adapter.tensors, bool(self._settings.get(setting))
            if held != said and "lora_A" in adapter.tensors and (held or setting == "use_dora"):
                have = "has" if held else "has no"
                raise LocaterError(
                    f"{self.where}: {printable(weight)} {have} {part}, and {setting} is {said}: the settings are of "
                    "another adapter"
                )

    def _check_dtype(self, name: str) -> None:
        shape = self._own.shape(name)
        dtype = self._own.read(name, [(0, 0)] if shape else None).dtype
        if not dtype.is_floating_point:
            raise LocaterError(f"{self.where}: {printable(name)} is stored as {dtype}, not as numbers with a fraction")

    def _in_base(self, live: str, name: str) -> str:
        """The base's name of a tensor. A base may be stored with or without the name of the model around its layers."""
        if live in self._base.names():
            return live
        near = self._index.near(live)
        if len(near) != 1:
            raise LocaterError(
                f"{self.where}: the adapter has {printable(name)}, which its base model {self._base.where} has not "
                "under that name: load both and scan the live model"
            )
        return near[0]


class _NameIndex:
    """Names of tensors by the parts they end with."""

    def __init__(self, names: Collection[str]) -> None:
        self._by_end: dict[str, list[str]] = {}
        for name in names:
            for end in _ends(name):
                found = self._by_end.setdefault(end, [])
                if len(found) < 2:  # two are as many as can be: no name is chosen among several
                    found.append(name)
        self._names = {*names}

    def ends_like(self, end: str) -> bool:
        return end in self._by_end

    def near(self, live: str) -> list[str]:
        """Names that end with `live`, and those that it ends with."""
        return list(dict.fromkeys([*self._by_end.get(live, ()), *(end for end in _ends(live) if end in self._names)]))


def _ends(name: str) -> Iterator[str]:
    parts = name.split(".")[-PARTS:]
    return (".".join(parts[at:]) for at in range(len(parts)))


class _Alphas:
    """The alpha of each map: that of the first key of `alpha_pattern` which matches its path, or lora_alpha.

    peft takes keys as regular expressions that match the end of a path. Here they are limited to those that take a
    bounded time: no repetition of a group, no look around, and only so many `*` and `?` as the paths allow.
    """

    def __init__(self, settings: Mapping[str, Any], where: str) -> None:
        self._alpha, self._where = settings.get("lora_alpha"), where
        self._patterns = [
            (*self._compile_pattern(key), key, alpha) for key, alpha in (settings.get("alpha_pattern") or {}).items()
        ]
        self._left = STEPS

    def __getitem__(self, path: str) -> float:
        for pattern, power, factor, key, alpha in self._patterns:
            self._left -= factor * len(path) ** power
            if self._left < 0:
                self._refuse(key, "would take too long to match")
            if pattern.match(path):
                return float(alpha)
        if self._alpha is None:
            raise LocaterError(
                f"{self._where}: lora_alpha is None and alpha_pattern has no entry for {printable(path)}"
            )
        return float(self._alpha)

    def _compile_pattern(self, key: str) -> tuple[re.Pattern[str], int, int]:
        """The pattern as peft makes it, and how its time grows with a path: factor * length ** power."""
        whole = rf"(.*\.)?({key})$"
        if LITERAL.fullmatch(key):
            return re.compile(whole), 2, 1
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                power, factor = _growth(re._parser.parse(whole))  # type: ignore[attr-defined]
                return re.compile(whole), power + 1, factor
        except (re.error, RecursionError, OverflowError) as error:
            self._refuse(key, f"is no regular expression ({first_line(error)})")
        except ValueError as error:
            self._refuse(key, f"has {first_line(error)}")

    def _refuse(self, key: str, reason: str) -> NoReturn:
        raise LocaterError(
            f"{self._where}: the key {printable(key)} of alpha_pattern {reason}: write the names of maps, "
            "such as 'layers.0.self_attn.q_proj'"
        )


def _growth(parsed: Any) -> tuple[int, int]:
    """How many repetitions a pattern has, and how many ways the choices in it can go."""
    power, factor = 0, 1
    for kind, value in parsed:
        name, inner = str(kind), []
        if name in ("MAX_REPEAT", "MIN_REPEAT"):
            _, most, item = value
            simple = len(item) == 1 and str(item[0][0]) in ATOMS
            if most > 1 and not simple:
                raise ValueError("a group that is repeated")
            power, factor, inner = power + (most > 1), factor * (2 if most <= 1 else 1), [] if simple else [item]
        elif name == "SUBPATTERN":
            inner = [value[-1]]
        elif name == "BRANCH":
            factor, inner = factor * len(value[1]), value[1]
        elif name not in (*ATOMS, "AT"):
            raise ValueError(f"{name.lower().replace('_', ' ')}, which is not read here")
        for part in inner:
            more, times = _growth(part)
            power, factor = power + more, factor * times
    return power, factor


def open_adapter(folder: Path, open_base: OpenBase) -> tuple[Weights, dict[str, Any]]:
    """The weights of an adapter's folder on its base model, and the configuration of that."""
    settings = checked_settings(read_json(folder / SETTINGS, most=CONFIG_LIMIT), str(folder))
    file = next((folder / name for name in FILES if is_there(folder / name)), None)
    if file is None:
        raise LocaterError(f"{folder}: an adapter without weights: {FILES[0]} is missing")
    base, config, name = open_base(settings, str(folder), folder)
    own = (
        SafetensorsWeights([file], str(folder)) if file.suffix == ".safetensors" else open_pickles([file], str(folder))
    )
    return AdaptedWeights(base, own, settings, str(folder), name, config.get("model_type")), config


def checked_settings(settings: Any, where: str) -> dict[str, Any]:
    """The settings of an adapter; kinds of adapters that are not read, and values that are none, are refused."""
    if not isinstance(settings, dict):
        raise LocaterError(f"{where}/{SETTINGS}: contains a {type(settings).__name__}, not settings of an adapter")
    _refuse_other_kinds(where, settings)
    for key in RULES:
        allowed = fault(RULES, key, settings.get(key))
        if allowed is not None:
            shown = reprlib.repr(settings.get(key))
            raise LocaterError(f"{where}/{SETTINGS}: {key} is {shown:.60}, not {allowed}")
    if not settings.get(BASE):
        raise LocaterError(f"{where}/{SETTINGS}: {BASE} is {settings.get(BASE)!r}: write the base model's folder there")
    return settings


def base_on_this_machine(settings: Mapping[str, Any], folder: Path) -> Path | None:
    """The base of an adapter: a folder beside it, or a folder or a file elsewhere on this machine."""
    base = settings.get(BASE)
    if not isinstance(base, str) or not base or "\0" in base or base.startswith(("\\\\", "//")):  # of another machine
        return None
    if os.path.isdir(folder / base):
        return folder / base
    return Path(base) if os.path.lexists(base) else None


def base_on_the_hub(settings: Mapping[str, Any], where: str) -> str:
    """The base of an adapter from elsewhere: a model of the hub, and nothing that is on this machine or its network."""
    base = settings[BASE]
    if not HUB_ID.fullmatch(base):
        raise LocaterError(
            f"{where}: its base model is {printable(base)}, and an adapter from elsewhere may name a model of the hub "
            "alone (org/model): give the base yourself with --base (locater.scan(..., base=...))"
        )
    return f"hf://{at_revision(settings).removeprefix('hf://')}"


def at_revision(settings: Mapping[str, Any]) -> str:
    """A model of the hub at the revision that the adapter was trained on."""
    base, revision = str(settings[BASE]), settings.get("revision")
    if not revision or "@" in base or not HUB_ID.fullmatch(base):
        return base
    return f"hf://{base.removeprefix('hf://')}@{revision.replace('/', '%2F')}"


def base_name_of(weights: Weights) -> str | None:
    """The base model that an adapter's weights are read on; None for other weights."""
    name: str | None = getattr(weights, "base_name", None)
    return name


def _refuse_other_kinds(folder: str, settings: Mapping[str, Any]) -> None:
    kind = settings.get("peft_type")
    if kind != "LORA":
        shown = reprlib.repr(kind)
        raise LocaterError(f"{folder}: an adapter of the kind {shown} is not read: merge it into its base model first")
    other = next((name for name in OTHERWISE if settings.get(name)), None)
    if other is None and settings.get("init_lora_weights", True) not in PLAIN_STARTS:
        other = "init_lora_weights"
    if other is not None:
        shown = reprlib.repr(settings[other])
        raise LocaterError(f"{folder}: an adapter with {other} = {shown:.60} is not read: merge it into its base first")
