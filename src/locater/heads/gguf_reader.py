"""GGUF files, through the `gguf` package: their tensors under the names that the families know, their metadata as a configuration.

Files of architecture "llama" store the rows of queries and keys in another order (neighbouring channels turn together); it is
undone here. Moments at offset 0 cannot see that order, logits and drives can. Gemma's gains are stored as 1 + w and handed on as w.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError, first_line
from locater.heads.weights import Rows, take_rows

MODEL_TYPES = {  # architectures whose layout is known
    "llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "qwen3moe": "qwen3_moe", "gemma2": "gemma2", "gemma3": "gemma3_text",
}  # fmt: skip
STEMS = {
    "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj", "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj",
    "attn_norm": "input_layernorm", "attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm",
}  # fmt: skip
KEYS = {
    "block_count": "num_hidden_layers", "embedding_length": "hidden_size", "context_length": "max_position_embeddings",
    "attention.head_count": "num_attention_heads", "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim", "attention.layer_norm_rms_epsilon": "rms_norm_eps", "rope.freq_base": "rope_theta",
    "attention.sliding_window": "sliding_window", "attn_logit_softcapping": "attn_logit_softcapping",
}  # fmt: skip


def open_gguf(path: Path) -> tuple[GGUFWeights, dict[str, Any]]:
    """Weights and configuration of a GGUF file."""
    try:
        import gguf
    except ImportError:
        raise LocaterError(f"{path}: to read GGUF files, install locater[gguf]") from None
    try:
        reader = gguf.GGUFReader(path)
        held = {name: field.contents() for name, field in reader.fields.items() if not name.startswith("tokenizer.")}
        tensors = {tensor.name: tensor for tensor in reader.tensors}
    except Exception as error:  # the package raises whatever its parsing runs into
        raise LocaterError(f"{path}: not a readable GGUF file ({first_line(error)})") from None
    architecture = str(held.get("general.architecture"))
    if architecture not in MODEL_TYPES:
        raise LocaterError(f"{path}: GGUF architecture {architecture!r} is not supported (known: {', '.join(sorted(MODEL_TYPES))})")
    config = _config(held, architecture, tensors)
    return GGUFWeights(path, tensors, architecture, config), config


class GGUFWeights:
    """Tensors of a GGUF file, dequantised when they are read."""

    def __init__(self, path: Path, tensors: dict[str, Any], architecture: str, config: dict[str, Any]) -> None:
        self.where = str(path)
        self._architecture = architecture
        self._config = config
        self._tensors: dict[str, Any] = {}
        for name, tensor in tensors.items():
            match = re.fullmatch(r"blk\.(\d+)\.(\w+)\.(weight|bias)", name)
            if match and match[2] in STEMS:
                self._tensors[f"model.layers.{match[1]}.{STEMS[match[2]]}.{match[3]}"] = tensor

    def names(self) -> Collection[str]:
        return self._tensors.keys()

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(int(n) for n in reversed(self._tensors[name].shape))  # GGUF counts axes from the fastest

    def read(self, name: str, rows: Rows | None = None) -> Tensor:
        import gguf

        tensor = self._tensors[name]
        data = torch.from_numpy(gguf.dequantize(tensor.data, tensor.tensor_type).copy()).view(self.shape(name))
        if self._architecture == "llama" and re.search(r"\.[qk]_proj\.", name):
            data = _turn_halves(data, self._config["num_attention_heads" if ".q_proj." in name else "num_key_value_heads"])
        if self._architecture.startswith("gemma") and name.endswith("norm.weight"):
            data = data - 1
        return take_rows(data, rows)


def _turn_halves(rows: Tensor, heads: int) -> Tensor:
    """Rows of each head from pairs (0, 1), (2, 3), ... to halves (i, i + n/2)."""
    return rows.unflatten(0, (heads, -1, 2)).transpose(1, 2).reshape(rows.shape)


def _config(held: dict[str, Any], architecture: str, tensors: dict[str, Any]) -> dict[str, Any]:
    config = {ours: held[f"{architecture}.{key}"] for key, ours in KEYS.items() if f"{architecture}.{key}" in held}
    config["model_type"] = MODEL_TYPES[architecture]
    config.setdefault("num_key_value_heads", config.get("num_attention_heads"))
    width, heads = config.get("hidden_size"), config.get("num_attention_heads")
    if isinstance(width, int) and isinstance(heads, int):
        config.setdefault("head_dim", width // heads)
    if architecture in ("gemma2", "gemma3"):  # the file leaves the query scale to the program: the largest of each has its own
        largest = config.get("num_hidden_layers") == {"gemma2": 46, "gemma3": 62}[architecture]
        config["query_pre_attn_scalar"] = width // heads if largest and width and heads else config.get("head_dim")
    rope = _rope(held, architecture, tensors, config)
    if architecture == "gemma3":
        local = {"rope_type": "default", "rope_theta": held.get("gemma3.rope.freq_base_swa", 10_000.0)}
        config["rope_parameters"] = {"full_attention": {"rope_theta": 1_000_000.0, **rope}, "sliding_attention": local}
    else:
        config["rope_parameters"] = rope
    return config


def _rope(held: dict[str, Any], architecture: str, tensors: dict[str, Any], config: dict[str, Any]) -> dict[str, Any]:
    rope: dict[str, Any] = {"rope_type": "default"}
    if "rope_theta" in config:
        rope["rope_theta"] = config["rope_theta"]
    if "rope_freqs.weight" in tensors:  # a divisor per frequency, where the length was extended
        factors = [float(x) for x in tensors["rope_freqs.weight"].data]
        length = config.get("max_position_embeddings", 1)
        return {
            **rope,
            "rope_type": "longrope",
            "short_factor": factors,
            "attention_factor": 1.0,
            "original_max_position_embeddings": length,
        }
    kind = held.get(f"{architecture}.rope.scaling.type", "none")
    if kind in ("linear", "yarn"):
        rope |= {"rope_type": kind, "factor": held[f"{architecture}.rope.scaling.factor"]}
        if f"{architecture}.rope.scaling.original_context_length" in held:
            rope["original_max_position_embeddings"] = held[f"{architecture}.rope.scaling.original_context_length"]
    return rope
