"""Tiny decoders: Llama and its relatives, GPT-2, GPT-NeoX, Gemma 3."""

from __future__ import annotations

from typing import Any

from torch import nn

from tests.parity import EPS, Case, decoder_sites, tokens

SHAPE = dict(
    hidden_size=32,
    num_hidden_layers=2,
    num_attention_heads=4,
    intermediate_size=48,
    vocab_size=64,
    max_position_embeddings=64,
)
GROUPED = dict(SHAPE, num_key_value_heads=2, rms_norm_eps=EPS)


def make(name: str, **kw: Any) -> nn.Module:
    import transformers

    config = getattr(transformers, f"{name}TextConfig", None) or getattr(transformers, f"{name}Config")
    settings = config(**kw)
    settings._experts_implementation = "eager"  # the fused product over experts has no float64
    return getattr(transformers, f"{name}ForCausalLM")(settings)


def case(label: str, name: str, spread: float = 1.0, how: tuple[str, ...] = ("eager", "sdpa"), **kw: Any) -> Case:
    return Case(
        label, lambda: make(name, **{**GROUPED, **kw}), tokens, decoder_sites(2), spread=spread, implementations=how
    )


LLAMA3 = {"rope_type": "llama3", "rope_theta": 100.0, "factor": 4.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
          "original_max_position_embeddings": 16}  # fmt: skip
YARN = {"rope_type": "yarn", "rope_theta": 100.0, "factor": 4.0, "original_max_position_embeddings": 16}

WINDOWS = ["sliding_attention", "full_attention"]
GEMMA = dict(head_dim=8, query_pre_attn_scalar=24)
EXPERTS = dict(num_experts_per_tok=1)

CASES = [
    case("llama", "Llama"),
    case("llama-wide-heads-biased", "Llama", head_dim=12, attention_bias=True),
    case("llama-rope-linear", "Llama", rope_parameters={"rope_type": "linear", "rope_theta": 100.0, "factor": 4.0}),
    case("llama-rope-llama3", "Llama", rope_parameters=LLAMA3),
    case("llama-rope-yarn", "Llama", spread=0.9, rope_parameters=YARN),
    case("mistral-window", "Mistral", sliding_window=4),
    case("mixtral", "Mixtral", spread=1.05, **EXPERTS, num_local_experts=2, sliding_window=4),
    case("qwen2", "Qwen2"),
    case("qwen2-window", "Qwen2", use_sliding_window=True, sliding_window=4, max_window_layers=1),
    case("qwen3", "Qwen3", head_dim=8),
    case("qwen3_moe", "Qwen3Moe", **EXPERTS, head_dim=8, num_experts=2, moe_intermediate_size=16),
    case("gemma3", "Gemma3", **GEMMA, sliding_window=4, layer_types=WINDOWS),
    case(
        "gemma3-both-ways", "Gemma3", **GEMMA, sliding_window=6, layer_types=WINDOWS, use_bidirectional_attention=True
    ),
    # transformers refuses fused attention for these two: it can neither cap logits nor add sinks
    case("gemma2", "Gemma2", how=("eager",), **GEMMA, sliding_window=4, attn_logit_softcapping=3.0, spread=1.2),
    case(
        "gpt_oss",
        "GptOss",
        how=("eager",),
        spread=0.85,
        **EXPERTS,
        head_dim=8,
        sliding_window=4,
        num_local_experts=2,
        rope_parameters=YARN,
    ),
    Case("gpt2", lambda: make_gpt2(), tokens, decoder_sites(2, "transformer.h", "attn", "ln_1", "c_proj"), spread=1.25),
    Case(
        "gpt_neox",
        lambda: make_neox(),
        tokens,
        decoder_sites(2, "gpt_neox.layers", "attention", "input_layernorm", "dense"),
    ),
]


def make_neox() -> nn.Module:
    rope = {"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
    return make("GPTNeoX", **SHAPE, layer_norm_eps=EPS, rope_parameters=rope)


def make_gpt2(n_layer: int = 2) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    shape = dict(n_embd=32, n_layer=n_layer, n_head=4, vocab_size=64, n_positions=64, bos_token_id=0, eos_token_id=0)
    return GPT2LMHeadModel(GPT2Config(**shape, layer_norm_epsilon=EPS, scale_attn_by_inverse_layer_idx=True))
