"""Models of known families with settings drawn at random, and what each of their layers is by its definition (`loops.py`)."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tests.families.drawn_models import array, norm_as_step
from tests.families.loops import Layer, Map
from tests.parity import EPS, redraw

VOCABULARY = 40


@dataclass(frozen=True)
class DrawnFamily:
    """A class of transformers and its settings; `repr` draws the same model again."""

    seed: int
    kind: str
    implementation: str
    padding: str
    settings: dict[str, Any]

    def model(self) -> nn.Module:
        import transformers

        config_kind, model_kind, _, _ = KINDS[self.kind]
        config = getattr(transformers, config_kind)(**self.settings, vocab_size=VOCABULARY, pad_token_id=0)
        torch.manual_seed(0)
        made = getattr(transformers, model_kind)._from_config(config, attn_implementation=self.implementation)
        made = made.double().eval()
        redraw(made, spread=0.7, seed=self.seed)
        return made

    def layers(self, model: nn.Module) -> list[Layer]:
        describe = KINDS[self.kind][3]
        count = self.settings.get("num_hidden_layers", self.settings.get("n_layer"))
        with torch.no_grad():
            return [describe(model, number) for number in range(count)]

    def inputs(self) -> dict[str, Tensor]:
        mask = torch.ones(2, 9, dtype=torch.long)
        if self.padding != "none":
            mask[1, :2] = int(self.padding == "right")
            mask[1, -2:] = int(self.padding == "left")
        ids = torch.randint(VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(self.seed))
        return {"input_ids": ids, "attention_mask": mask}


def draw_family(seed: int) -> DrawnFamily:
    """A family and settings at random."""
    rng = random.Random(seed)
    kind = list(KINDS)[seed % len(KINDS)]
    settings = KINDS[kind][2](rng)
    implementation = rng.choice(("eager", "sdpa")) if kind != "gemma2" else "eager"  # no fused one caps its logits
    # in float64 the lowest number hides with -inf in the float32 of eager softmaxes: rows that see no key are NaN
    paddings = ("none", "right") if implementation == "eager" else ("none", "right", "left")
    return DrawnFamily(seed, kind, implementation, rng.choice(paddings), settings)


# ---- settings


def _decoder(rng: random.Random) -> dict[str, Any]:
    """What all decoders of Llama's shape have."""
    heads = rng.choice((1, 2, 3, 4, 6))
    return dict(
        hidden_size=heads * rng.choice((5, 6, 8)),
        num_hidden_layers=rng.choice((1, 2)),
        num_attention_heads=heads,
        num_key_value_heads=rng.choice([n for n in range(1, heads + 1) if heads % n == 0]),
        head_dim=rng.choice((4, 6, 8)),
        intermediate_size=16,
        max_position_embeddings=64,
        rms_norm_eps=EPS,
    )


def _theta(rng: random.Random) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": rng.choice((100.0, 10_000.0))}}


def _llama(rng: random.Random) -> dict[str, Any]:
    return {**_decoder(rng), **_theta(rng), "attention_bias": rng.random() < 0.5}


def _mistral(rng: random.Random) -> dict[str, Any]:
    return {**_decoder(rng), **_theta(rng), "sliding_window": rng.choice((None, 3, 5))}


def _types(rng: random.Random, count: int) -> list[str]:
    return [rng.choice(("sliding_attention", "full_attention")) for _ in range(count)]


def _gemma2(rng: random.Random) -> dict[str, Any]:
    settings = _decoder(rng)
    return dict(
        settings,
        query_pre_attn_scalar=rng.choice((3, 8, 20)),
        attn_logit_softcapping=rng.choice((None, 2.5, 30.0)),
        sliding_window=rng.choice((3, 5)),
        layer_types=_types(rng, settings["num_hidden_layers"]),
        **_theta(rng),
    )


def _gemma3(rng: random.Random) -> dict[str, Any]:
    settings = _decoder(rng)
    kinds = ("sliding_attention", "full_attention")
    return dict(
        settings,
        query_pre_attn_scalar=rng.choice((3, 8, 20)),
        sliding_window=rng.choice((3, 5)),
        layer_types=_types(rng, settings["num_hidden_layers"]),
        rope_parameters={kind: _theta(rng)["rope_parameters"] for kind in kinds},
    )


def _gpt2(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((1, 2, 4))
    return dict(
        n_embd=heads * rng.choice((5, 8)),
        n_layer=rng.choice((1, 2)),
        n_head=heads,
        n_positions=16,
        layer_norm_epsilon=EPS,
        scale_attn_weights=rng.random() < 0.5,
        scale_attn_by_inverse_layer_idx=rng.random() < 0.5,
        bos_token_id=0,
        eos_token_id=0,
    )


def _bert(rng: random.Random) -> dict[str, Any]:
    heads = rng.choice((1, 2, 4))
    return dict(
        hidden_size=heads * rng.choice((5, 8)),
        num_hidden_layers=rng.choice((1, 2)),
        num_attention_heads=heads,
        intermediate_size=16,
        max_position_embeddings=16,
        layer_norm_eps=EPS,
        is_decoder=rng.random() < 0.3,
    )


# ---- the same by its definition


def _map(linear: nn.Module) -> Map:
    return Map(array(linear.weight), None if linear.bias is None else array(linear.bias))


def _of_llama(model: Any, number: int) -> Layer:
    config, name = model.config, f"model.layers.{number}"
    attention = model.get_submodule(f"{name}.self_attn")
    size = config.head_dim
    rope = config.rope_parameters
    sliding = getattr(config, "sliding_window", None)
    if getattr(config, "layer_types", None):
        kind = config.layer_types[number]
        rope, sliding = rope.get(kind, rope), sliding if kind == "sliding_attention" else None
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, size, 2).float() / size)
    gemma = config.model_type.startswith("gemma")
    query, key = [_map(attention.q_proj)], [_map(attention.k_proj)]
    if hasattr(attention, "q_norm"):
        query.append(_rms(attention.q_norm, gemma, config.num_attention_heads))
        key.append(_rms(attention.k_norm, gemma, config.num_key_value_heads))
    return Layer(
        name=f"{name}.self_attn",
        reads=f"{name}.input_layernorm",
        writes=f"{name}.self_attn.o_proj",
        heads=config.num_attention_heads,
        kv_heads=config.num_key_value_heads,
        size=size,
        front=_rms(model.get_submodule(f"{name}.input_layernorm"), gemma),
        query=query,
        key=key,
        value=[_map(attention.v_proj)],
        out=_map(attention.o_proj),
        scale=getattr(config, "query_pre_attn_scalar", size) ** -0.5,
        turns=tuple((n, n + size // 2, frequency) for n, frequency in enumerate(frequencies.tolist())),
        softcap=getattr(config, "attn_logit_softcapping", None),
        causal=True,
        window=sliding,
    )


def _rms(norm: Any, gemma: bool, count: int = 1) -> Any:
    """An RMSNorm of transformers; Gemma stores w for a gain of 1 + w."""
    plain = nn.Module()
    plain.weight, plain.eps, plain.offset = norm.weight, EPS, float(gemma)
    return norm_as_step(plain, count)


def _of_gpt2(model: Any, number: int) -> Layer:
    config, name = model.config, f"transformer.h.{number}"
    attention, width = model.get_submodule(f"{name}.attn"), config.n_embd
    size = width // config.n_head
    weight, bias = array(attention.c_attn.weight).T, array(attention.c_attn.bias)
    query, key, value = (Map(weight[at : at + width], bias[at : at + width]) for at in (0, width, 2 * width))
    scale = size**-0.5 if config.scale_attn_weights else 1.0
    return Layer(
        name=f"{name}.attn",
        reads=f"{name}.ln_1",
        writes=f"{name}.attn.c_proj",
        heads=config.n_head,
        kv_heads=config.n_head,
        size=size,
        front=norm_as_step(model.get_submodule(f"{name}.ln_1")),
        query=[query],
        key=[key],
        value=[value],
        out=Map(array(attention.c_proj.weight).T, array(attention.c_proj.bias)),
        scale=scale / (number + 1) if config.scale_attn_by_inverse_layer_idx else scale,
        causal=True,
    )


def _of_bert(model: Any, number: int) -> Layer:
    config, name = model.config, f"encoder.layer.{number}.attention"
    attention, heads = model.get_submodule(name).self, config.num_attention_heads
    reads = f"encoder.layer.{number - 1}.output.LayerNorm" if number else "embeddings.LayerNorm"
    size = config.hidden_size // heads
    return Layer(
        name=f"{name}.self",
        reads=reads,
        writes=f"{name}.output.dense",
        heads=heads,
        kv_heads=heads,
        size=size,
        front=norm_as_step(model.get_submodule(reads)),
        query=[_map(attention.query)],
        key=[_map(attention.key)],
        value=[_map(attention.value)],
        out=_map(model.get_submodule(f"{name}.output.dense")),
        scale=size**-0.5,
        causal=config.is_decoder,
    )


Settings = Callable[[random.Random], dict[str, Any]]
Describe = Callable[[Any, int], Layer]
KINDS: dict[str, tuple[str, str, Settings, Describe]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _llama, _of_llama),
    "gpt2": ("GPT2Config", "GPT2LMHeadModel", _gpt2, _of_gpt2),
    "bert": ("BertConfig", "BertModel", _bert, _of_bert),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _gemma2, _of_llama),
    "gemma3": ("Gemma3TextConfig", "Gemma3ForCausalLM", _gemma3, _of_llama),
    "mistral": ("MistralConfig", "MistralForCausalLM", _mistral, _of_llama),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _llama, _of_llama),
}
