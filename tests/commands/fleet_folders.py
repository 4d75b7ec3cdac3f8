"""Checkpoints of a made-up run, and tables of fleets to compare."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import locater

CONFIG = {
    "model_type": "llama",
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "intermediate_size": 48,
    "vocab_size": 64,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 64,
}


def checkpoint(folder: Path, seed: int, **changes: Any) -> Path:
    """A small Llama with random weights, of which a scan reads queries, keys and norms."""
    config = {**CONFIG, **changes}
    width, size = config["hidden_size"], config["head_dim"]
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        stem = f"model.layers.{layer}"
        for name, heads in (("q", "num_attention_heads"), ("k", "num_key_value_heads"), ("v", "num_key_value_heads")):
            rows = config[heads] * size
            tensors[f"{stem}.self_attn.{name}_proj.weight"] = torch.randn(rows, width, generator=generator) * 0.53
        tensors[f"{stem}.self_attn.o_proj.weight"] = torch.randn(
            width, config["num_attention_heads"] * size, generator=generator
        )
        tensors[f"{stem}.input_layernorm.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def make_run(folder: Path, count: int, first: int = 0) -> list[Path]:
    """`step-00000000`, `step-00000100`, ..."""
    return [checkpoint(folder / f"step-{100 * i:08}", seed=i) for i in range(first, first + count)]


def rewritten(folder: Path, factor: float) -> None:
    """The same checkpoint with other weights, as a run that goes on would write it."""
    file = folder / "model.safetensors"
    tensors = {name: tensor * factor for name, tensor in load_file(file).items()}
    save_file(tensors, file, {"format": "pt"})


def table(folder: Path) -> list[dict[str, Any]]:
    """All rows of a fleet in one order, whoever wrote them."""
    return list(locater.Fleet.open(folder).records())
