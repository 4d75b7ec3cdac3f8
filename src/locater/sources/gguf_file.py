"""Read GGUF files: tensors under the names of the Hugging Face model, metadata as its configuration.

Files of architecture "llama" store the rows of queries and keys in another order, in which neighbouring channels rotate
together. That order is undone here: it does not change moments at offset 0, but it does change logits at other offsets.
Gains of Gemma are stored as 1 + w and returned as w. The header is read here; the `gguf` package dequantises.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

import numpy as np
import torch
from torch import Tensor

from locater.errors import DamagedError, LocaterError, printable
from locater.files import regular_file
from locater.sources.config_rules import ROPE, RULES, Rule, fault
from locater.sources.weights import Rows, take_rows

# The header: the metadata, and the position of each tensor. As strict as llama.cpp.

HEADER_LIMIT = 100_000_000  # bytes; the longest known vocabularies take a tenth of it
MOST = 500_000  # keys, and tensors: each takes more memory than bytes
CODES = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "B", 10: "Q", 11: "q", 12: "d"}
SCALARS = {kind: struct.Struct(f"<{code}") for kind, code in CODES.items()}
BOOL, TEXT, ARRAY, UINT32 = 7, 8, 9, 4
# the fewest bytes that a value of each type takes
LEAST = {TEXT: 8, ARRAY: 12} | {kind: scalar.size for kind, scalar in SCALARS.items()}
DEEPEST = 4  # levels of arrays inside arrays
AXES = 4  # at most, of a tensor
VERSIONS = (2, 3)
COUNT, KIND, AXIS = struct.Struct("<Q"), struct.Struct("<I"), struct.Struct("<q")
ALIGNMENT = "general.alignment"


class GgufTensorEntry(NamedTuple):
    """The position of a tensor in the file. `shape` lists axes from the fastest to the slowest, as the file does."""

    shape: tuple[int, ...]
    kind: Any  # gguf.GGMLQuantizationType
    start: int
    size: int


class Array(NamedTuple):
    """The length of a setting that is an array. No setting that is used is an array, so the elements are not read."""

    length: int


@dataclass(frozen=True)
class Header:
    fields: dict[str, Any]
    tensors: dict[str, GgufTensorEntry]
    data: np.memmap[Any, Any]  # the whole file, mapped


def read_header(path: Path) -> Header:
    """The header of a file. A damaged file is refused with the reason."""
    size = regular_file(path)
    if size < 24:
        raise LocaterError(f"{path}: not a readable GGUF file ({size} bytes)")
    try:
        data = np.memmap(path, mode="r")
    except (OSError, ValueError) as error:
        raise LocaterError(f"{path}: cannot be read ({error})") from None
    cursor = _Cursor(path, memoryview(data))  # type: ignore[arg-type]
    try:
        tensor_count, key_count = cursor.start()
        fields: dict[str, Any] = {}
        for _ in range(key_count):
            name = cursor.text()
            if name in fields:
                cursor.refuse(f"the key {name!r:.80} occurs twice")
            kind = cursor.take(KIND)
            fields[name] = cursor.value(kind, name)
            if name == ALIGNMENT and kind != UINT32:
                cursor.refuse(f"{ALIGNMENT} has a value of type {kind}")
        tensors = _tensors(cursor, tensor_count, fields)
    except struct.error:
        raise DamagedError(
            "truncated", f"{path}: not a readable GGUF file (truncated in its header): download it again"
        ) from None
    except UnicodeDecodeError:
        raise LocaterError(
            f"{path}: not a readable GGUF file (a name or a text is not UTF-8): download it again"
        ) from None
    return Header(fields, tensors, data)


class _Cursor:
    """Reads forward through the header; reading past the end raises struct.error."""

    def __init__(self, path: Path, data: memoryview) -> None:
        self.path = path
        self.data = data[:HEADER_LIMIT]
        self.size = len(data)
        self.at = 0

    def refuse(self, reason: str) -> NoReturn:
        raise LocaterError(f"{self.path}: not a readable GGUF file ({reason}): download it again")

    def take(self, form: struct.Struct) -> Any:
        (value,) = form.unpack_from(self.data, self.at)
        self.at += form.size
        return value

    def skip(self, size: int) -> int:
        """Move forward by `size` bytes and return where they begin."""
        begin, self.at = self.at, self.at + size
        if self.at > len(self.data):
            raise struct.error
        return begin

    def text(self) -> str:
        length = self.take(COUNT)
        begin = self.skip(length)
        return str(self.data[begin : begin + length], "utf-8")

    def start(self) -> tuple[int, int]:
        """Check the magic bytes and the version; return the numbers of tensors and keys."""
        if bytes(self.data[:4]) != b"GGUF":
            self.refuse("it does not begin with GGUF")
        self.at = 4
        version = self.take(KIND)
        if version & 0xFFFF == 0:
            self.refuse("it is written in the other byte order; convert it with gguf-convert-endian")
        if version not in VERSIONS:
            self.refuse(f"version {version}; versions {VERSIONS} are supported")
        tensors, keys = self.take(COUNT), self.take(COUNT)
        for count, least, kind in ((tensors, 24, "tensors"), (keys, 13, "keys")):
            if count * least > len(self.data) or count > MOST:
                self.refuse(f"{count:,} {kind} in {self.size:,} bytes")
        return tensors, keys

    def value(self, kind: int, name: str, depth: int = 0) -> Any:
        """A setting: a number, a text, or the length of an array."""
        if kind == TEXT:
            return self.text()
        if kind == BOOL:
            truth = self.take(SCALARS[BOOL])
            if truth > 1:
                self.refuse(f"the key {name!r:.80} is neither true nor false")
            return bool(truth)
        if kind in SCALARS:
            return self.take(SCALARS[kind])
        if kind != ARRAY:
            self.refuse(f"the key {name!r:.80} has a value of type {kind}")
        return self.array(name, depth)

    def array(self, name: str, depth: int) -> Array:
        if depth == DEEPEST:
            self.refuse(f"the key {name!r:.80} has arrays nested more than {DEEPEST} deep")
        kind, count = self.take(KIND), self.take(COUNT)
        if kind not in LEAST:
            self.refuse(f"the key {name!r:.80} has a value of type {kind}")
        if count * LEAST[kind] > len(self.data) - self.at:
            self.refuse(f"the key {name!r:.80} has an array of {count:,} in {self.size:,} bytes")
        if kind in SCALARS:
            self.skip(count * SCALARS[kind].size)
        elif kind == TEXT:
            self.skip_texts(count)
        else:
            for _ in range(count):
                self.array(name, depth + 1)
        return Array(count)

    def skip_texts(self, count: int) -> None:
        """Skip an array of texts by their lengths alone: vocabularies have hundreds of thousands."""
        data, at, length, end = self.data, self.at, COUNT.unpack_from, len(self.data)
        for _ in range(count):
            at += 8 + length(data, at)[0]
            if at > end:
                raise struct.error
        self.at = at


def _tensors(cursor: _Cursor, count: int, fields: dict[str, Any]) -> dict[str, GgufTensorEntry]:
    """The entries of all tensors. Their offsets count from the end of the header, padded to the alignment."""
    entries: dict[str, tuple[tuple[int, ...], Any, int, int]] = {}
    for _ in range(count):
        name = cursor.text()
        if name in entries:
            cursor.refuse(f"the tensor {printable(name)} occurs twice")
        entries[name] = _entry(cursor, name)
    alignment = fields.get(ALIGNMENT, 32)
    if alignment < 1 or alignment & (alignment - 1):
        cursor.refuse(f"{ALIGNMENT} is {alignment}, not a power of two")

    def padded(size: int) -> int:
        return -(-size // alignment) * alignment

    begin, expected = padded(cursor.at), 0
    tensors = {}
    for name, (shape, kind, offset, size) in entries.items():
        if offset != expected:
            where = f"begins at byte {offset:,} of the data and not at {expected:,}, where the last one ends"
            cursor.refuse(f"the tensor {printable(name)} {where}")
        if begin + offset + size > cursor.size:
            raise DamagedError(
                "truncated",
                f"{cursor.path}: not a readable GGUF file (truncated: the tensor {printable(name)} ends at byte "
                f"{begin + offset + size:,} of {cursor.size:,}): download it again",
            )
        tensors[name] = GgufTensorEntry(shape, kind, begin + offset, size)
        expected += padded(size)
    return tensors


def _entry(cursor: _Cursor, name: str) -> tuple[tuple[int, ...], Any, int, int]:
    """Shape, type, offset and size in bytes of a tensor."""
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType

    axes = cursor.take(KIND)
    if axes > AXES:
        cursor.refuse(f"the tensor {printable(name)} has {axes} axes")
    shape = tuple(cursor.take(AXIS) for _ in range(axes))
    if any(axis < 1 for axis in shape):  # no tensor is empty, and a length beyond 2^63 reads as negative
        cursor.refuse(f"the tensor {printable(name)} has the shape {shape}")
    number, offset = cursor.take(KIND), cursor.take(COUNT)
    if number not in GGMLQuantizationType._value2member_map_:
        cursor.refuse(
            f"the tensor {printable(name)} is stored as type {number}, which the installed gguf package does not know"
        )
    kind = GGMLQuantizationType(number)
    block, size = GGML_QUANT_SIZES[kind]
    if (shape[0] if shape else 1) % block:
        cursor.refuse(f"the tensor {printable(name)} has the shape {list(shape)} in blocks of {block}")
    return shape, kind, offset, math.prod(shape) // block * size


# The tensors and the configuration.

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
OTHERS = {  # modules of a block that a reader of attention does not need
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_norm": "post_attention_layernorm",
}
OTHERS_OF_GEMMA = {
    **OTHERS,
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
OUTSIDE = {  # tensors that are in no block
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
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
    settings = GgufSettings(path, architecture, header.fields)
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

    def __init__(
        self, path: Path, header: Header, architecture: str, config: dict[str, Any], whole: bool = False
    ) -> None:
        self.where = str(path)
        self._header = header
        self._architecture = architecture
        self._config = config
        self._stored: dict[str, str] = {}  # from our name to the name in the file
        for name in header.tensors:
            match = re.fullmatch(r"blk\.(\d{1,6})\.(\w+)\.(weight|bias)", name, re.ASCII)
            if match and match[2] in MODULES:
                self._stored[f"model.layers.{match[1]}.{MODULES[match[2]]}.{match[3]}"] = name
            elif whole:
                self._stored[self._other_name(name, match)] = name

    def whole(self) -> GGUFWeights:
        """The same with all tensors of the file: `names` of a reader of attention are those of attention alone."""
        return GGUFWeights(Path(self.where), self._header, self._architecture, self._config, whole=True)

    def _other_name(self, name: str, block: re.Match[str] | None) -> str:
        """Our name of a tensor that is none of attention; one without a known counterpart keeps its own."""
        if block is None:
            return OUTSIDE.get(name, name)
        modules = OTHERS_OF_GEMMA if self._architecture.startswith("gemma") else OTHERS
        if block[2] not in modules:
            return name
        return f"model.layers.{block[1]}.{modules[block[2]]}.{block[3]}"

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
            places = _rows_in_halves(torch.arange(self.shape(name)[0]), self._config[heads])
        if rows is not None:
            places = take_rows(torch.arange(self.shape(name)[0]) if places is None else places, rows)
        data = _floats(Path(self.where), self._header, self._stored[name], places)
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data - 1
        return data


def _rows_in_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs (0, 1), (2, 3), ... to halves (i, i + n/2)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True)
class GgufSettings:
    """The metadata of one architecture. Each setting is checked when it is read: a count, a number or a text."""

    path: Path
    architecture: str
    fields: dict[str, Any]

    def get(self, key: str, default: Any = None) -> Any:
        """A setting, checked against the rules of `config_rules.py`; `default` where the file does not have it."""
        name = f"{self.architecture}.{key}"
        value = self.fields.get(name, default)
        if value is None:
            return None
        expected = fault(RANGES, key, value)
        if expected is not None:
            shown = f"an array of {value.length}" if isinstance(value, Array) else f"{value!r:.40}"
            raise LocaterError(f"{self.path}: its key {name} is {shown}, not {expected}: convert the model again")
        return value


def _config(settings: GgufSettings, factors: list[float] | None) -> dict[str, Any]:
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


def _rope(settings: GgufSettings, config: dict[str, Any], factors: list[float] | None) -> dict[str, Any]:
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
