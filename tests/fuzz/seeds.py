"""The good files that are mutated: tiny models and documents of every format, made once."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
SHAPE = dict(hidden_size=16, num_hidden_layers=2, num_attention_heads=2, vocab_size=16, max_position_embeddings=32)


def llama(folder: Path) -> dict[str, torch.Tensor]:
    """A saved Llama; gives back its tensors."""
    from safetensors.torch import load_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SHAPE, intermediate_size=16, num_key_value_heads=1)).save_pretrained(folder)
    return load_file(folder / "model.safetensors")


def mixed(folder: Path) -> dict[str, torch.Tensor]:
    """Tensors of a Llama in several precisions, and some without a number in them."""
    kinds = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
    tensors = {name: tensor.to(kinds[i % len(kinds)]) for i, (name, tensor) in enumerate(sorted(llama(folder).items()))}
    return tensors | {f"empty.{i}": torch.zeros(shape) for i, shape in enumerate(((0,), (0, 4), (4, 0)))}


def make_safetensors(folder: Path) -> None:
    from safetensors.torch import save_file

    save_file(mixed(folder), folder / "model.safetensors")


def make_shards(folder: Path) -> None:
    from safetensors.torch import save_file

    tensors = mixed(folder)
    (folder / "model.safetensors").unlink()
    _shard(folder, tensors, "model.safetensors", save_file)


def make_pickled_shards(folder: Path) -> None:
    tensors = mixed(folder)
    (folder / "model.safetensors").unlink()
    _shard(folder, tensors, "pytorch_model.bin", torch.save)


def _shard(folder: Path, tensors: dict[str, Any], stem: str, save: Callable[..., object]) -> None:
    names = sorted(tensors)
    places = {name: f"part-{i % 2}.{stem.rpartition('.')[2]}" for i, name in enumerate(names)}
    for place in set(places.values()):
        save({name: tensors[name] for name in names if places[name] == place}, folder / place)
    (folder / f"{stem}.index.json").write_text(json.dumps({"metadata": {"total_size": 1}, "weight_map": places}))


def make_pickle(folder: Path, zipped: bool = True) -> None:
    tensors = mixed(folder)
    (folder / "model.safetensors").unlink()
    tensors["model.extra"] = tensors["model.norm.weight"]  # two names for one storage
    torch.save(tensors, folder / "pytorch_model.bin", _use_new_zipfile_serialization=zipped)


def make_dcp(folder: Path) -> None:
    """A checkpoint of torch.distributed.checkpoint, by one process and beside an optimizer's state."""
    import torch.distributed.checkpoint as dcp

    tensors = mixed(folder)
    (folder / "model.safetensors").unlink()
    dcp.save({"model": tensors, "optim": {"state": tensors["model.norm.weight"]}, "step": 3}, checkpoint_id=folder)


def make_adapter(folder: Path) -> None:
    """A LoRA adapter of peft, trained, beside its base."""
    import peft
    from transformers import LlamaForCausalLM

    llama(folder / "base")
    config = peft.LoraConfig(
        r=3, lora_alpha=5, target_modules=["q_proj", "k_proj"], alpha_pattern={"layers.1.self_attn.k_proj": 7}
    )
    model = peft.get_peft_model(LlamaForCausalLM.from_pretrained(folder / "base"), config)
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.3 * torch.randn(parameter.shape, generator=generator))
    model.save_pretrained(folder / "adapter")
    path = folder / "adapter" / "adapter_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "base_model_name_or_path": "../base"}))


def make_legacy_pickle(folder: Path) -> None:
    make_pickle(folder, zipped=False)


def make_quantised(folder: Path) -> None:
    """A Llama of five layers, each with maps of another format; numbers are random, shapes and types are right."""
    from safetensors.torch import save_file
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    shape = {**SHAPE, "hidden_size": 32, "num_hidden_layers": 5}
    LlamaForCausalLM(LlamaConfig(**shape, intermediate_size=16, num_key_value_heads=1)).save_pretrained(folder)
    from safetensors.torch import load_file

    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if "self_attn" in name:
            stored = (_fp8, _packed, _nf4, _int8, _gptq)[int(name.split(".")[2])](weight)
            del tensors[name]
            tensors |= {f"{name.removesuffix('weight')}{part}": tensor for part, tensor in stored.items()}
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    said = {"quant_method": "gptq", "bits": 4, "group_size": 16, "weight_block_size": [16, 16], "desc_act": True}
    said["config_groups"] = {"group_0": {"weights": {"num_bits": 4, "group_size": 16}}}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": said}))


def _words(*shape: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31 - 1, shape, dtype=torch.int64).int()


def _fp8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    out, into = weight.shape
    return {"weight": weight.to(torch.float8_e4m3fn), "weight_scale_inv": torch.rand(out // 16, into // 16)}


def _packed(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    out, into = weight.shape
    groups = into // 16
    return {
        "weight_packed": _words(out, into // 8),
        "weight_scale": torch.rand(out, groups),
        "weight_zero_point": _words(out // 8, groups),
        "weight_shape": torch.tensor(weight.shape),
        "weight_g_idx": torch.randint(0, groups, (into,)).int(),
    }


def _nf4(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    blocks = -(-weight.numel() // 64)
    said = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": list(weight.shape)}
    said |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": 0.5}
    return {
        "weight": torch.randint(0, 256, (weight.numel() // 2, 1)).to(torch.uint8),
        "weight.absmax": torch.randint(0, 256, (blocks,)).to(torch.uint8),
        "weight.quant_map": torch.linspace(-1, 1, 16),
        "weight.nested_absmax": torch.rand(-(-blocks // 256)),
        "weight.nested_quant_map": torch.linspace(-1, 1, 256),
        "weight.quant_state.bitsandbytes__nf4": torch.tensor(list(json.dumps(said).encode()), dtype=torch.uint8),
    }


def _int8(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    codes = torch.randint(-128, 128, weight.shape).to(torch.int8)
    return {"weight": codes, "SCB": torch.rand(len(weight)), "weight_format": torch.tensor(0, dtype=torch.uint8)}


def _gptq(weight: torch.Tensor) -> dict[str, torch.Tensor]:
    out, into = weight.shape
    groups = into // 16
    return {
        "qweight": _words(into // 8, out),
        "qzeros": torch.full((groups, out // 8), 0x77777777, dtype=torch.int32),
        "scales": torch.rand(groups, out).half(),
        "g_idx": torch.randint(0, groups, (into,)).int(),
    }


def make_gguf(folder: Path) -> None:
    """Two files: plain numbers with a vocabulary, and quantised maps with a table for longer texts."""
    import gguf
    import numpy as np

    rng = np.random.default_rng(0)
    for number, kind in enumerate((None, gguf.GGMLQuantizationType.Q8_0)):
        writer = gguf.GGUFWriter(folder / f"{number}.gguf", "llama")
        writer.add_block_count(2)
        writer.add_embedding_length(32)
        writer.add_context_length(32)
        writer.add_head_count(2)
        writer.add_head_count_kv(1)
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(10_000.0)
        writer.add_bool("llama.some_switch", True)
        writer.add_token_list(["a", "bc", "", "déf"])
        writer.add_array("llama.some_numbers", [1, 2, 3])
        if kind is None:
            writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
            writer.add_rope_scaling_factor(2.0)
        else:
            writer.add_custom_alignment(64)
            writer.add_tensor("rope_freqs.weight", np.ones(8, dtype=np.float32))
        for layer in range(2):
            writer.add_tensor(f"blk.{layer}.attn_norm.weight", np.ones(32, dtype=np.float32))
            for name, rows in (("attn_q", 32), ("attn_k", 16), ("attn_v", 16), ("attn_output", 32)):
                data = rng.standard_normal((rows, 32)).astype(
                    np.float16 if name == "attn_v" and kind is None else np.float32
                )
                quantised = data if kind is None else gguf.quantize(data, kind)
                writer.add_tensor(f"blk.{layer}.{name}.weight", quantised, raw_dtype=kind)
        half = gguf.quantize(rng.standard_normal((4, 32)).astype(np.float32), gguf.GGMLQuantizationType.BF16)
        writer.add_tensor("extra.weight", half, raw_dtype=gguf.GGMLQuantizationType.BF16)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": dict(intermediate_size=16, num_key_value_heads=1, rope_scaling={"rope_type": "yarn", "factor": 4.0, "rope_theta": 1e4,
                  "original_max_position_embeddings": 16}),
    "Qwen3": dict(intermediate_size=16, num_key_value_heads=1, head_dim=8),
    "Gemma3Text": dict(intermediate_size=16, num_key_value_heads=1, head_dim=8, sliding_window=4,
                       layer_types=["sliding_attention", "full_attention"]),
    "GPT2": dict(n_embd=16, n_layer=2, n_head=2, n_positions=32),
    "GPTNeoX": dict(intermediate_size=16),
    "Bert": dict(intermediate_size=16),
    "T5": dict(d_model=16, d_ff=16, d_kv=8, num_layers=2, num_heads=2),
    "Bloom": dict(n_layer=2, n_head=2),
    "Falcon": dict(ffn_hidden_size=16),
    "CLIPVision": dict(intermediate_size=16, image_size=8, patch_size=4),
    "DebertaV2": dict(intermediate_size=16, relative_attention=True, pos_att_type=["c2p", "p2c"]),
}  # fmt: skip


def make_config(folder: Path) -> None:
    """A folder per family."""
    import transformers

    for name, own in FAMILIES.items():
        torch.manual_seed(0)
        config = getattr(transformers, f"{name}Config")(**{**SHAPE, **own})
        getattr(transformers, f"{name}Model")(config).save_pretrained(folder / name)


def make_scan(folder: Path) -> None:
    from locater import scan

    llama(folder)
    for name in ("scan.json", "good.json"):
        scan(folder, details=True).save(folder / name)


def make_statistics(folder: Path) -> None:
    from transformers import LlamaForCausalLM

    import locater

    llama(folder)
    ids = torch.randint(0, 16, (4, 16), generator=torch.Generator().manual_seed(0))
    locater.statistics(LlamaForCausalLM.from_pretrained(folder), ids, length=16, tokens=64).save(
        folder / "statistics.pt"
    )


def make_log(folder: Path) -> None:
    header = {"kind": "run", "schema": 1, "source": "m", "every": 1, "columns": ["entropy"],
              "layers": [{"layer": i, "heads": 2, "name": f"l{i}", "kind": "self"} for i in range(2)]}  # fmt: skip
    lines: list[dict[str, Any]] = [header]
    for step in range(4):
        lines.append({"kind": "loss", "step": 2 * step, "loss": 3.0 / (step + 1)})
        heads = {"entropy": [[0.5, 0.25], None]}
        lines.append({"kind": "step", "step": 2 * step + 1, "loss": 2.5, "heads": heads, "scalars": {"rate": 1e-3}})
    lines += [{"kind": "warning", "step": 7, "flag": "sharp", "layer": 0, "head": 1, "value": 0.5}, header]
    lines += [{"kind": "loss", "step": 6, "loss": 1.0}, {"kind": "end", "step": 6}]
    (folder / "run.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
