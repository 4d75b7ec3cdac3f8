"""A checkpoint written as a folder: one file, shards with an index, a pickle, a GGUF file; and files that are damaged
afterwards.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from locater_lab.studies.verdicts.checkpoint import SHARDS, Checkpoint, NotHereError, Place

WEIGHTS = ("model.safetensors", "pytorch_model.bin", "model.gguf")
INDEX = "model.safetensors.index.json"
Damage = Callable[[Path, Checkpoint, Place], None]  # done to the files of a folder


def write(c: Checkpoint, folder: Path, container: str) -> Path:
    """Write the checkpoint; returns what a command is given: the folder, or the GGUF file in it."""
    folder.mkdir(parents=True, exist_ok=True)
    _share_other_files(c.folder, folder)
    (folder / "config.json").write_text(json.dumps(c.config, indent=1))
    return WRITERS[container](c, folder)


def _share_other_files(source: Path, folder: Path) -> None:
    """Tokenizers and the like as hard links, or copies where the file system differs."""
    for path in source.iterdir():
        if not path.is_file() or path.name == "config.json" or path.suffix in (".safetensors", ".bin", ".gguf"):
            continue
        try:
            os.link(path, folder / path.name)
        except OSError:
            shutil.copyfile(path, folder / path.name)


def _own(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.contiguous() for name, tensor in tensors.items()}


def _save(tensors: dict[str, Tensor], path: Path) -> None:
    save_file(tensors, path, metadata={"format": "pt"})


def _one_file(c: Checkpoint, folder: Path) -> Path:
    _save(_own(c.tensors), folder / "model.safetensors")
    return folder


def _shards(
    c: Checkpoint,
    folder: Path,
    name: str = "model-{:05d}-of-{:05d}.safetensors",
    index: str = INDEX,
    save: Callable[[dict[str, Tensor], Path], None] = _save,
) -> Path:
    """Blocks in order, about as many in each shard; what is in no block goes first."""
    parts: list[dict[str, Tensor]] = [{} for _ in range(SHARDS)]
    for key, tensor in _own(c.tensors).items():
        at = next((i for i, path in enumerate(c.blocks) if key.startswith(path)), 0)
        parts[c.shard_of(at)][key] = tensor
    parts = [part for part in parts if part]
    file_of: dict[str, str] = {}
    for number, part in enumerate(parts, 1):
        file = name.format(number, len(parts))
        save(part, folder / file)
        file_of |= dict.fromkeys(part, file)
    size = sum(x.numel() * x.element_size() for x in c.tensors.values())
    (folder / index).write_text(json.dumps({"metadata": {"total_size": size}, "weight_map": file_of}, indent=1))
    return folder


def _renamed_shards(c: Checkpoint, folder: Path) -> Path:
    return _shards(c, folder, "part-{:02d}.safetensors")


def _save_pickle(tensors: Mapping[str, Tensor], path: Path, new: bool = True) -> None:
    torch.save({n: x.clone() for n, x in tensors.items()}, path, _use_new_zipfile_serialization=new)


def _pickle(c: Checkpoint, folder: Path) -> Path:
    _save_pickle(c.tensors, folder / "pytorch_model.bin")
    return folder


def _old_pickle(c: Checkpoint, folder: Path) -> Path:
    """As torch wrote files before version 1.6."""
    _save_pickle(c.tensors, folder / "pytorch_model.bin", new=False)
    return folder


def _pickle_shards(c: Checkpoint, folder: Path) -> Path:
    return _shards(c, folder, "pytorch_model-{:05d}-of-{:05d}.bin", "pytorch_model.bin.index.json", _save_pickle)


WRITERS = {
    "one file": _one_file,
    "shards": _shards,
    "renamed shards": _renamed_shards,
    "pickle": _pickle,
    "old pickle": _old_pickle,
    "pickle shards": _pickle_shards,
}

# ---- GGUF: the names and the order of rows of llama.cpp ----

ARCHITECTURES = {"llama": "llama", "gemma3_text": "gemma3"}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "input_layernorm": "attn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
OTHER_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
               "lm_head.weight": "output.weight"}  # fmt: skip
FFN_NORMS = {  # names that differ between the architectures
    "llama": {"post_attention_layernorm": "ffn_norm"},
    "gemma3_text": {
        "post_attention_layernorm": "post_attention_norm",
        "pre_feedforward_layernorm": "ffn_norm",
        "post_feedforward_layernorm": "post_ffw_norm",
    },
}


def gguf_name(name: str, kind: str) -> str:
    """What llama.cpp calls a tensor of a Hugging Face model.

    >>> gguf_name("model.layers.3.self_attn.q_proj.weight", "llama")
    'blk.3.attn_q.weight'
    """
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.+)\.(weight|bias)", name)
    if match is None:
        return OTHER_NAMES[name]
    return f"blk.{match[1]}.{({**NAMES, **FFN_NORMS[kind]})[match[2]]}.{match[3]}"


def _gguf(c: Checkpoint, folder: Path) -> Path:
    """Matrices in 16 bits (or as `packed` has them), vectors in 32."""
    import gguf

    kind, one = str(c.config.get("model_type")), c.stack[0]
    if kind not in ARCHITECTURES:
        raise NotHereError(f"{c.name}: no GGUF file is written for {kind}")
    writer = gguf.GGUFWriter(folder / "model.gguf", ARCHITECTURES[kind])
    settings: dict[str, Any] = c.config
    writer.add_block_count(len(c.stack))
    writer.add_context_length(settings["max_position_embeddings"])
    writer.add_embedding_length(settings["hidden_size"])
    writer.add_feed_forward_length(settings["intermediate_size"])
    writer.add_head_count(one.heads)
    writer.add_head_count_kv(one.kv_heads)
    writer.add_key_length(one.head_dim)
    writer.add_value_length(one.head_dim)
    writer.add_layer_norm_rms_eps(settings["rms_norm_eps"])
    writer.add_vocab_size(settings["vocab_size"])
    rope = settings.get("rope_parameters") or settings
    writer.add_rope_freq_base(float((rope.get("full_attention") or rope)["rope_theta"]))
    if kind == "gemma3_text":
        writer.add_sliding_window(settings["sliding_window"])
    for name, tensor in c.tensors.items():
        _add(writer, c, name, tensor, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "config.json").unlink()  # a GGUF file has its own
    return folder / "model.gguf"


def _add(writer: Any, c: Checkpoint, name: str, tensor: Tensor, kind: str) -> None:
    import gguf

    numbers = torch.from_numpy(c.packed[name]) if name in c.packed else tensor.float()
    if kind == "llama" and re.search(r"\.[qk]_proj\.", name):
        heads = c.stack[0].heads if ".q_proj." in name else c.stack[0].kv_heads
        numbers = numbers.unflatten(0, (heads, 2, -1)).transpose(1, 2).reshape(numbers.shape)
    if kind == "gemma3_text" and name.endswith("norm.weight"):
        numbers = numbers + 1
    whole = numbers.contiguous().numpy()
    if name in c.packed:  # a row of blocks for each row of numbers
        writer.add_tensor(gguf_name(name, kind), whole, raw_dtype=gguf.GGMLQuantizationType.Q8_0)
        return
    writer.add_tensor(gguf_name(name, kind), whole.astype(np.float16) if tensor.ndim > 1 else whole)


WRITERS["gguf"] = _gguf

# ---- damage to files that were written as shards ----


def shard_files(folder: Path) -> list[Path]:
    found = sorted(folder.glob("model-*.safetensors"))
    if len(found) < 2:
        raise NotHereError(f"{folder}: one shard")
    return found


def cut_short(folder: Path, c: Checkpoint, place: Place) -> None:
    """The last shard ends after a share of its bytes."""
    shard = shard_files(folder)[-1]
    with shard.open("r+b") as file:
        file.truncate(int(shard.stat().st_size * place.strength))


def zeros_at_the_end(folder: Path, c: Checkpoint, place: Place) -> None:
    """The last shard has its length, and zeros in its last share: space was reserved, and the download stopped."""
    shard = shard_files(folder)[-1]
    size = shard.stat().st_size
    with shard.open("r+b") as file:
        file.seek(int(size * (1 - place.strength)))
        file.write(bytes(size - file.tell()))


def lost_shard(folder: Path, c: Checkpoint, place: Place) -> None:
    """The last shard is not there."""
    shard_files(folder)[-1].unlink()


def stale_index(folder: Path, c: Checkpoint, place: Place) -> None:
    """The index is of another sharding: it names another shard for the tensors of a block."""
    shards = [path.name for path in shard_files(folder)]

    def change(index: dict[str, Any]) -> None:
        for name in c.in_block(len(c.stack) // 2):
            here = shards.index(index["weight_map"][name])
            index["weight_map"][name] = shards[(here + 1) % len(shards)]

    rewrite_index(folder, change)


def short_index(folder: Path, c: Checkpoint, place: Place) -> None:
    """The index does not name the tensors of a block, which the shards have."""

    def change(index: dict[str, Any]) -> None:
        for name in c.in_block(len(c.stack) // 2):
            del index["weight_map"][name]

    rewrite_index(folder, change)


def tensors_twice(folder: Path, c: Checkpoint, place: Place) -> None:
    """The first shard has the tensors of the last block too, in another state."""
    first, names = shard_files(folder)[0], c.in_block(len(c.stack) - 1)
    tensors = load_file(first)
    tensors |= {name: c.tensors[name].clone().mul_(0.9) for name in names if c.tensors[name].is_floating_point()}
    save_file(tensors, first, metadata={"format": "pt"})


def rewrite_index(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    index = json.loads((folder / INDEX).read_text())
    change(index)
    (folder / INDEX).write_text(json.dumps(index, indent=1))
