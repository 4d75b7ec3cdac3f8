"""A random checkpoint of 1B shape, for benchmarks that read one from disk."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

LAYERS, WIDTH, HEADS, KEY_HEADS, SIZE, INNER, VOCABULARY, SHARDS = 16, 2048, 32, 8, 64, 8192, 32_000, 4
CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": WIDTH,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KEY_HEADS,
    "head_dim": SIZE,
    "intermediate_size": INNER,
    "vocab_size": VOCABULARY,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "max_position_embeddings": 2048,
    "tie_word_embeddings": True,
    "torch_dtype": "bfloat16",
    "hidden_act": "silu",
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MATRICES = {  # of a block: rows, columns
    "self_attn.q_proj": (HEADS * SIZE, WIDTH),
    "self_attn.k_proj": (KEY_HEADS * SIZE, WIDTH),
    "self_attn.v_proj": (KEY_HEADS * SIZE, WIDTH),
    "self_attn.o_proj": (WIDTH, HEADS * SIZE),
    "mlp.gate_proj": (INNER, WIDTH),
    "mlp.up_proj": (INNER, WIDTH),
    "mlp.down_proj": (WIDTH, INNER),
}


def write_checkpoint(folder: Path) -> int:
    """Random weights whose logits have a spread near 1; returns the bytes on disk."""
    import torch  # not above: contenders import this file, and are measured by what they import themselves
    from safetensors.torch import save_file

    generator = torch.Generator().manual_seed(0)

    def matrix(rows: int, columns: int) -> Any:
        return (torch.randn(rows, columns, generator=generator) / columns**0.5).bfloat16()

    (folder / "config.json").write_text(json.dumps(CONFIG))
    places: dict[str, str] = {}
    for shard in range(SHARDS):
        file = f"model-{shard + 1:05}-of-{SHARDS:05}.safetensors"
        tensors = {"model.embed_tokens.weight": matrix(VOCABULARY, WIDTH)} if shard == 0 else {}
        if shard == SHARDS - 1:
            tensors["model.norm.weight"] = torch.ones(WIDTH).bfloat16()
        for layer in range(shard * LAYERS // SHARDS, (shard + 1) * LAYERS // SHARDS):
            block = f"model.layers.{layer}"
            for name, (rows, columns) in MATRICES.items():
                tensors[f"{block}.{name}.weight"] = matrix(rows, columns)
            for name in ("input_layernorm", "post_attention_layernorm"):
                tensors[f"{block}.{name}.weight"] = (1 + 0.5 * torch.randn(WIDTH, generator=generator)).bfloat16()
        save_file(tensors, folder / file, {"format": "pt"})
        places.update(dict.fromkeys(tensors, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return sum(p.stat().st_size for p in folder.glob("*.safetensors"))
