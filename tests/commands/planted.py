"""Faults planted in the demo: each changes its tensors and settings, and says which cause doctor has to name."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

DEMO = Path(str(files("locater") / "demo"))
Tensors = dict[str, Tensor]
Config = dict[str, Any]
HEADS, KEY_HEADS, SIZE, LAYERS, MIDDLE = 4, 2, 32, 6, 3
PARTS = {"q": "self_attn.q_proj", "k": "self_attn.k_proj", "v": "self_attn.v_proj", "o": "self_attn.o_proj"}
PARTS |= {"up": "mlp.up_proj", "down": "mlp.down_proj", "norm": "input_layernorm"}
MAPS = ("q", "k", "v", "o", "up", "down")


def demo() -> tuple[Tensors, Config]:
    return load_file(DEMO / "model.safetensors"), json.loads((DEMO / "config.json").read_text())


def name(part: str, layer: int = MIDDLE) -> str:
    return f"model.layers.{layer}.{PARTS[part]}.weight"


def save(tensors: Tensors, config: Config, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    save_file({key: value.contiguous() for key, value in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def save_shards(tensors: Tensors, config: Config, folder: Path, index: bool = True) -> list[list[str]]:
    """Two shards with an index; returns the names in each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    names = list(tensors)
    parts = [names[: len(names) // 2], names[len(names) // 2 :]]
    shard_of = {}
    for number, part in enumerate(parts, 1):
        file = f"model-{number:05}-of-00002.safetensors"
        save_file({key: tensors[key].contiguous() for key in part}, folder / file)
        shard_of |= dict.fromkeys(part, file)
    if index:
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shard_of}))
    return parts


@dataclass
class Fault:
    """`alone`: whether the file alone shows it, or the cause as which it does; `broken`: whether it is a fault at all."""

    label: str
    cause: str
    plant: Callable[[Tensors, Config], None]
    alone: bool | str = False
    broken: bool = True


FAULTS: list[Fault] = []


def fault(cause: str, alone: bool | str = False, broken: bool = True) -> Callable[[Any], Any]:
    def add(plant: Callable[[Tensors, Config], None]) -> Callable[[Tensors, Config], None]:
        FAULTS.append(Fault(plant.__name__, cause, plant, alone, broken))
        return plant

    return add


def layer_names(tensors: Iterable[str], layer: int) -> list[str]:
    return [key for key in tensors if key.startswith(f"model.layers.{layer}.")]


# ---- values ----


@fault("nonfinite", alone=True)
def nan_in_an_mlp(t: Tensors, c: Config) -> None:
    t[name("up")][5, 11] = torch.nan


@fault("nonfinite", alone=True)
def infinite_value(t: Tensors, c: Config) -> None:
    t[name("v")][3, 1] = torch.inf


@fault("overflow", alone=True)
def cast_to_float16(t: Tensors, c: Config) -> None:
    t[name("q")] = t[name("q")].float() * 1e6
    for key in t:
        t[key] = t[key].half()


@fault("overflow", alone=True)
def a_head_overflows_in_float16(t: Tensors, c: Config) -> None:
    t[name("q")][:SIZE] *= 1e6
    for key in t:
        t[key] = t[key].half()


@fault("zero", alone=True)
def gain_zero(t: Tensors, c: Config) -> None:
    t[name("norm")].zero_()


@fault("zero", alone=True)
def zero_map(t: Tensors, c: Config) -> None:
    t[name("up")].zero_()


@fault("zero", alone=True)
def half_of_a_map_zero(t: Tensors, c: Config) -> None:
    t[name("down")][64:] = 0


@fault("constant", alone=True)
def constant_map(t: Tensors, c: Config) -> None:
    t[name("down")].fill_(0.01)


@fault("random-bits", alone=True)
def random_bits(t: Tensors, c: Config) -> None:
    w = t[name("up")]
    t[name("up")] = torch.randint(0, 256, (2 * w.numel(),), dtype=torch.uint8).view(w.dtype).view(w.shape)


@fault("random-bits", alone=True)
def a_page_of_random_bits(t: Tensors, c: Config) -> None:
    t[name("down")].view(-1).view(torch.uint8)[8192:12288] = torch.randint(0, 256, (4096,), dtype=torch.uint8)


# ---- heads ----


@fault("scaled-head", alone=True)
def queries_of_a_head_times_50(t: Tensors, c: Config) -> None:
    t[name("q")][:SIZE] *= 50


@fault("scaled-head")
def queries_of_a_head_times_3(t: Tensors, c: Config) -> None:
    t[name("q")][:SIZE] *= 3


@fault("scaled-head")
def values_of_a_head_times_4(t: Tensors, c: Config) -> None:
    t[name("v")][:SIZE] *= 4


@fault("dead-head", alone=True)
def outputs_of_a_head_zero(t: Tensors, c: Config) -> None:
    t[name("o")][:, :SIZE] = 0


@fault("dead-head", alone=True)
def queries_of_a_head_zero(t: Tensors, c: Config) -> None:
    t[name("q")][:SIZE] = 0


@fault("copied-head", alone=True)
def head_copied(t: Tensors, c: Config) -> None:
    t[name("q")][SIZE : 2 * SIZE] = t[name("q")][:SIZE]
    t[name("o")][:, SIZE : 2 * SIZE] = t[name("o")][:, :SIZE]


@fault("copied-head", alone=True)
def head_of_another_layer_copied(t: Tensors, c: Config) -> None:
    t[name("q")][SIZE : 2 * SIZE] = t[name("q", MIDDLE - 1)][:SIZE]


@fault("swapped-heads")
def heads_of_a_layer_swapped(t: Tensors, c: Config) -> None:
    q = t[name("q")].clone()
    t[name("q")][:SIZE], t[name("q")][SIZE : 2 * SIZE] = q[SIZE : 2 * SIZE], q[:SIZE]


@fault("swapped-heads")
def heads_of_two_layers_swapped(t: Tensors, c: Config) -> None:
    first = t[name("q", 1)][:SIZE].clone()
    t[name("q", 1)][:SIZE] = t[name("q")][:SIZE]
    t[name("q")][:SIZE] = first


@fault("permuted-heads")
def query_heads_permuted(t: Tensors, c: Config) -> None:
    t[name("q")] = t[name("q")].view(HEADS, SIZE, -1).roll(1, 0).reshape(HEADS * SIZE, -1)


# ---- layers ----


@fault("zero-layer", alone=True)
def values_and_outputs_zero(t: Tensors, c: Config) -> None:
    t[name("v")].zero_()
    t[name("o")].zero_()


@fault("duplicated-layer", alone=True)
def layer_copied(t: Tensors, c: Config) -> None:
    for key in layer_names(t, MIDDLE):
        t[key.replace(f".{MIDDLE}.", f".{MIDDLE + 1}.", 1)] = t[key].clone()


@fault("duplicated-layer", alone=True)
def attention_copied(t: Tensors, c: Config) -> None:
    for part in "qkvo":
        t[name(part, MIDDLE + 1)] = t[name(part)].clone()


@fault("shifted-layers", alone="duplicated-layer")
def layers_shifted(t: Tensors, c: Config) -> None:
    good = dict(t)
    for layer in range(1, LAYERS):
        for key in layer_names(good, layer):
            t[key] = good[key.replace(f".{layer}.", f".{layer - 1}.", 1)].clone()


@fault("swapped-layers")
def layers_swapped(t: Tensors, c: Config) -> None:
    for key in layer_names(t, MIDDLE):
        other = key.replace(f".{MIDDLE}.", ".1.", 1)
        t[key], t[other] = t[other], t[key]


@fault("missing-layer", alone=True)
def layer_missing(t: Tensors, c: Config) -> None:
    for key in layer_names(list(t), MIDDLE):
        del t[key]


@fault("missing-layer", alone=True)
def last_layer_missing(t: Tensors, c: Config) -> None:
    for key in layer_names(list(t), LAYERS - 1):
        del t[key]


@fault("missing-layer", alone=True)
def map_missing(t: Tensors, c: Config) -> None:
    del t[name("up")]


# ---- conversion ----


def _interleaved(w: Tensor, heads: int) -> Tensor:
    return w.view(heads, 2, SIZE // 2, -1).transpose(1, 2).reshape(w.shape)


@fault("rotary-order")
def rotary_interleaved(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[name("q", layer)] = _interleaved(t[name("q", layer)], HEADS)
        t[name("k", layer)] = _interleaved(t[name("k", layer)], KEY_HEADS)


@fault("rotary-order")
def rotary_interleaved_in_queries(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[name("q", layer)] = _interleaved(t[name("q", layer)], HEADS)


@fault("rotary-order")
def rotary_halves_in_keys_of_a_layer(t: Tensors, c: Config) -> None:
    k = t[name("k")]
    t[name("k")] = k.view(KEY_HEADS, SIZE // 2, 2, -1).transpose(1, 2).reshape(k.shape)


@fault("shifted-gain")
def one_added_to_gains(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[name("norm", layer)] += 1


@fault("shifted-gain", alone=True)
def one_taken_from_gains(t: Tensors, c: Config) -> None:
    for key in t:
        if "norm" in key:
            t[key] -= 1


@fault("scaled-queries")
def scale_folded_twice(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[name("q", layer)] *= SIZE**-0.5


@fault("scaled-queries")
def scale_lost(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[name("q", layer)] *= SIZE**0.5


@fault("fused-order")
def fused_by_groups_read_as_whole(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        q, k, v = (t[name(part, layer)].view(KEY_HEADS, -1, 128) for part in "qkv")
        cut = torch.cat([q, k, v], 1).reshape(-1, 128).split([128, 64, 64])
        for part, rows in zip("qkv", cut, strict=True):
            t[name(part, layer)] = rows.contiguous()


@fault("transposed")
def outputs_transposed(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[name("o", layer)] = t[name("o", layer)].mT.contiguous()


@fault("untied", alone=True)
def output_layer_untied(t: Tensors, c: Config) -> None:
    t["lm_head.weight"] = torch.randn(t["model.embed_tokens.weight"].shape).bfloat16() * 0.02


@fault("untied")
def tie_and_output_layer_changed(t: Tensors, c: Config) -> None:
    c["tie_word_embeddings"] = False
    t["lm_head.weight"] = t["model.embed_tokens.weight"] + torch.randn(1024, 128).bfloat16() * 0.02


@fault("config")
def another_rotary_base(t: Tensors, c: Config) -> None:
    c["rope_parameters"]["rope_theta"] = 500_000.0


@fault("config")
def another_number_of_heads(t: Tensors, c: Config) -> None:
    c.update(num_attention_heads=8, num_key_value_heads=4, head_dim=16)


@fault("config", alone=True)
def number_of_heads_that_does_not_fit(t: Tensors, c: Config) -> None:
    c["num_attention_heads"] = 8


# ---- quantisation ----


def quantised(w: Tensor, bits: int, scale: Callable[[Tensor, Tensor], tuple[Tensor, Tensor]] | None = None) -> Tensor:
    """Rounded to 2^bits steps between the ends of each group of 32."""
    x = w.float().unflatten(1, (-1, 32))
    low, high = x.amin(-1, keepdim=True), x.amax(-1, keepdim=True)
    step = (high - low) / (2**bits - 1)
    codes = ((x - low) / step).round()
    step, low = scale(step, low) if scale else (step, low)
    return (codes * step + low).flatten(1).to(w.dtype)


def quantise(t: Tensors, bits: int = 4, but: dict[str, Callable[[Tensor], Tensor]] | None = None) -> None:
    for layer in range(LAYERS):
        for part in MAPS:
            key = name(part, layer)
            t[key] = (but or {}).get(key, lambda w: quantised(w, bits))(t[key])


@fault("low-bits", alone=True)
def one_map_at_two_bits(t: Tensors, c: Config) -> None:
    quantise(t, 4, {name("up"): lambda w: quantised(w, 2)})


@fault("lost-scales")
def scales_of_four_rows_lost(t: Tensors, c: Config) -> None:
    def lost(step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        factors = torch.ones_like(step)
        factors[:4] = 8
        return step * factors, low * factors

    quantise(t, 4, {name("up"): lambda w: quantised(w, 4, lost)})


@fault("lost-scales")
def scales_moved_by_a_row(t: Tensors, c: Config) -> None:
    def moved(step: Tensor, low: Tensor) -> tuple[Tensor, Tensor]:
        factors = step.roll(1, 0) / step
        return step * factors, low * factors

    quantise(t, 4, {name("down"): lambda w: quantised(w, 4, moved)})


@fault("lost-zero-points", alone=True)
def zero_points_lost(t: Tensors, c: Config) -> None:
    quantise(t, 4, {name("up"): lambda w: quantised(w, 4, lambda step, low: (step, 0 * low))})


@fault("another-model")
def embeddings_of_another_model(t: Tensors, c: Config) -> None:
    w = t["model.embed_tokens.weight"]
    t["model.embed_tokens.weight"] = (torch.randn(w.shape) * w.float().std()).bfloat16()


@fault("another-model")
def embeddings_of_another_tokenizer(t: Tensors, c: Config) -> None:
    t["model.embed_tokens.weight"] = t["model.embed_tokens.weight"][torch.randperm(1024)]


@fault("another-model")
def another_model(t: Tensors, c: Config) -> None:
    for key in t:
        if t[key].ndim == 2:
            t[key] = (torch.randn(t[key].shape) * t[key].float().std()).bfloat16()


# ---- harmless ----


@fault("identical", broken=False)
def copy(t: Tensors, c: Config) -> None:
    pass


@fault("dtype", broken=False)
def in_float32(t: Tensors, c: Config) -> None:
    for key in t:
        t[key] = t[key].float()


@fault("dtype", broken=False)
def in_float16(t: Tensors, c: Config) -> None:
    for key in t:
        t[key] = t[key].half()


@fault("equivalent", broken=False)
def key_heads_permuted_with_all_that_uses_them(t: Tensors, c: Config) -> None:
    group = HEADS // KEY_HEADS
    for layer in range(LAYERS):
        for part, heads, by in (("q", HEADS, group), ("k", KEY_HEADS, 1), ("v", KEY_HEADS, 1)):
            w = t[name(part, layer)]
            t[name(part, layer)] = w.view(heads, SIZE, -1).roll(by, 0).reshape(w.shape)
        o = t[name("o", layer)]
        t[name("o", layer)] = o.view(-1, HEADS, SIZE).roll(group, 1).reshape(o.shape)


@fault("equivalent", broken=False)
def queries_times_4_keys_over_4(t: Tensors, c: Config) -> None:
    for layer in range(LAYERS):
        t[name("q", layer)] *= 4
        t[name("k", layer)] /= 4


@fault("fine-tune", broken=False)
def trained_further(t: Tensors, c: Config) -> None:
    for key in t:
        t[key] = (t[key].float() + 0.01 * t[key].float().std() * torch.randn(t[key].shape)).bfloat16()


@fault("quantised", broken=False)
def four_bits(t: Tensors, c: Config) -> None:
    quantise(t, 4)


@fault("quantised", broken=False)
def eight_bits(t: Tensors, c: Config) -> None:
    quantise(t, 8)


# ---- adapters ----


def low_rank(size: float = 0.05, parts: str = "qv", rank: int = 8, seed: int = 0) -> dict[str, tuple[Tensor, Tensor]]:
    """B and A of an adapter by the map that it changes."""
    generator, tensors = torch.Generator().manual_seed(seed), demo()[0]
    maps = {}
    for layer in range(LAYERS):
        for part in parts:
            w = tensors[name(part, layer)].float()
            b = torch.randn(len(w), rank, generator=generator)
            a = torch.randn(rank, w.shape[1], generator=generator)
            maps[name(part, layer)] = (b * size * w.norm() / (b @ a).norm(), a)
    return maps


def merge(t: Tensors, maps: dict[str, tuple[Tensor, Tensor]], dose: float = 1.0) -> None:
    for key, (b, a) in maps.items():
        t[key] = (t[key].float() + dose * b @ a).to(t[key].dtype)


def save_adapter(maps: dict[str, tuple[Tensor, Tensor]], folder: Path, rank: int = 8, alpha: int = 16) -> Path:
    """A folder as peft writes it."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for key, (b, a) in maps.items():
        stem = f"base_model.model.{key.removesuffix('.weight')}"
        tensors |= {f"{stem}.lora_A.weight": a.contiguous(), f"{stem}.lora_B.weight": (b * rank / alpha).contiguous()}
    save_file(tensors, folder / "adapter_model.safetensors")
    targets = sorted({key.split(".")[-2] for key in maps})
    settings = {"peft_type": "LORA", "base_model_name_or_path": str(DEMO), "lora_alpha": alpha, "r": rank}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "target_modules": targets}))
    return folder
