"""Read GGUF files: tensors under the names of the Hugging Face model, metadata as its configuration.

Files of architecture "llama" store the rows of queries and keys in another order, in which neighbouring channels rotate
together. That order is undone here: it does not change moments at offset 0, but it does change logits at other offsets.
Gains of Gemma are stored as 1 + w and returned as w. `gguf_header.py` reads the header; the `gguf` package dequantises.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from locater.errors import LocaterError
from locater.sources.gguf_header import Array, Header, read_header
from locater.sources.settings import ROPE, RULES, Rule, fault
from locater.sources.weights import Rows, take_rows

MODEL_TYPES = {  # of the GGUF architectures whose layout is known
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3moe": "qwen3_moe",
    "gemma2": "gemma2",
    "gemma3": "gemma3_text",
}
MODULES = {  # part of a block in the file, and its module in the Hugging Face model
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
}
KEYS = {  # key of the metadata, and its name in a Hugging Face configuration
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window",
    "attn_logit_softcapping": "attn_logit_softcapping",
}
PLAIN = ("F64", "F32", "F16", "BF16")  # kinds of tensors that are not quantised
RANGES: dict[str, Rule] = {key: RULES[name] for key, name in KEYS.items()} | {
    "rope.scaling.type": ("a text", lambda x: isinstance(x, str)),
    "rope.scaling.factor": ROPE["factor"],
    "rope.scaling.original_context_length": RULES["max_position_embeddings"],
    "rope.freq_base_swa": RULES["rope_local_base_freq"],
}


def open_gguf(path: Path) -> tuple[GGUFWeights, dict[str, Any]]:
    """Weights and configuration of a GGUF file."""
    try:
        import gguf  # noqa: F401
    except ImportError:
        raise LocaterError(f"{path}: to read GGUF files, install locater[gguf]") from None
    header = read_header(path)
    architecture = header.fields.get("general.architecture")
    if not isinstance(architecture, str) or architecture not in MODEL_TYPES:
        known = ", ".join(sorted(MODEL_TYPES))
        raise LocaterError(f"{path}: GGUF architecture {architecture!r:.40} is not supported (known: {known})")
    settings = Settings(path, architecture, header.fields)
    divisors = header.tensors.get("rope_freqs.weight")
    factors = None if divisors is None else _floats(path, header, "rope_freqs.weight").flatten().tolist()
    config = _config(settings, factors)
    return GGUFWeights(path, header, architecture, config), config


def _floats(path: Path, header: Header, name: str, rows: Tensor | None = None) -> Tensor:
    """A tensor, or some of its rows, as floating-point numbers, dequantised by the gguf package."""
    from gguf import GGMLQuantizationType, dequantize
    from gguf.quants import quant_shape_to_byte_shape

    tensor = header.tensors[name]
    plain = {GGMLQuantizationType.F32: np.float32, GGMLQuantizationType.F16: np.float16}.get(tensor.kind)
    shape = tuple(reversed(tensor.shape))
    data = header.data[tensor.start : tensor.start + tensor.size]
    try:
        if plain:
            data = data.view(plain).reshape(shape)
        else:
            data = data.reshape(quant_shape_to_byte_shape(shape or (1,), tensor.kind))
        if rows is not None:
            data, shape = data[rows.numpy()], (len(rows), *shape[1:])
        return torch.from_numpy(dequantize(data, tensor.kind).copy()).view(shape)
    except NotImplementedError:
        raise LocaterError(
            f"{path}: {name} is stored as {tensor.kind.name}, which is not a format of weights: use another file"
        ) from None


class GGUFWeights:
    """The tensors of a GGUF file, dequantised when they are read."""

    def __init__(self, path: Path, header: Header, architecture: str, config: dict[str, Any]) -> None:
        self.where = str(path)
        self._header = header
        self._architecture = architecture
        self._config = config
        self._stored: dict[str, str] = {}  # from our name to the name in the file
        for name in header.tensors:
            match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name, re.ASCII)
            if match and match[2] in MODULES:
                self._stored[f"model.layers.{match[1]}.{MODULES[match[2]]}.{match[3]}"] = name

    @property
    def quantised(self) -> dict[str, str]:
        """Formats of the tensors that are stored in fewer bits: "q4_k"."""
        kinds = ((name, self._header.tensors[stored].kind.name) for name, stored in self._stored.items())
        return {name: kind.lower() for name, kind in kinds if kind not in PLAIN}

    def names(self) -> Collection[str]:
        return self._stored.keys()

    def all_numbers(self) -> int:
        """Of the whole file: `names` are those of attention alone."""
        return sum(prod(tensor.shape) for tensor in self._header.tensors.values())

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(reversed(self._header.tensors[self._stored[name]].shape))  # GGUF counts axes from the fastest

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        if not self.shape(name):
            raise LocaterError(f"{self.where}: {name} is a single number, where a map or a vector belongs")
        places = None  # of the rows in the file
        if self._architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            places = _turn_halves(torch.arange(self.shape(name)[0]), self._config[heads])
        if rows is not None:
            places = take_rows(torch.arange(self.shape(name)[0]) if places is None else places, rows)
        data = _floats(Path(self.where), self._header, self._stored[name], places)
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data - 1
        return data


def _turn_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs (0, 1), (2, 3), ... to halves (i, i + n/2)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class Settings:
    """The metadata of one architecture. Each setting is checked when it is read: a count, a number or a text."""

    path: Path
    architecture: str
    fields: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, checked against the rules of `settings.py`; `default` where the file does not have it."""
        name = f"{self.architecture}.{key}"
        value = self.fields.get(name, default)
        if value is None:
            return None
        expected = fault(RANGES, key, value)
        if expected is not None:
            shown = f"an array of {value.length}" if isinstance(value, Array) else f"{value!r:.40}"
            raise LocaterError(f"{self.path}: its key {name} is {shown}, not {expected}: convert the model again")
        return value


def _config(settings: Settings, factors: list[float] | None) -> dict[str, Any]:
    architecture = settings.architecture
    values = {ours: settings.get(key) for key, ours in KEYS.items()}
    config = {name: value for name, value in values.items() if value is not None}
    config["model_type"] = MODEL_TYPES[architecture]
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if width and heads:
        config.setdefault("head_dim", width // heads)
    # the file has no query scale; the largest model of each of these two differs from the others
    if architecture in ("gemma2", "gemma3"):
        largest = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[architecture]
        config["query_pre_attn_scalar"] = width // heads if largest and width and heads else config.get("head_dim")
    rope = _rope(settings, config, factors)
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": settings.get("rope.freq_base_swa", 10_000.0)}
        config["rope_parameters"] = {"full_attention": {"rope_theta": 1_000_000.0, **rope}, "sliding_attention": local}
    else:
        config["rope_parameters"] = rope
    return config


def _rope(settings: Settings, config: dict[str, Any], factors: list[float] | None) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope_theta" in config:
        rope["rope_theta"] = config["rope_theta"]
    if factors is not None:  # one divisor per frequency, in models with an extended length
        return {**rope, "rope_type": "longrope", "short_factor": factors, "attention_factor": 1.0}
    kind = settings.get("rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": settings.get("rope.scaling.factor", 1.0)}
        length = settings.get("rope.scaling.original_context_length")
        if length is not None and kind == "yarn":
            rope["original_max_position_embeddings"] = length
    elif kind != "none":
        rope["rope_type"] = kind  # the reader of positions refuses it by name
    return rope
