"""Tiny models of every family that has a record of its block, each built once."""

from __future__ import annotations

from functools import cache
from typing import Any

from torch import Tensor, nn

from tests.families import CASES, blocks
from tests.parity import model_of, tokens

BY_LABEL = {case.label: case for case in [*CASES, *blocks.CASES]}
LABELS = (
    "gpt_neox gpt_neox-sequential phi phi-normed falcon falcon-per-head falcon-groups falcon-groups-one-norm falcon-alibi opt opt-bare "
    "opt-post-norm starcoder2 stablelm stablelm-parallel roberta-decoder electra-widened distilbert mpnet albert albert-unshared xlnet "
    "xlnet-causal-clamped deberta_v2-keys-only dinov2 dinov2_with_registers clip-text clip-vision clip-classifier siglip-text "
    "siglip-vision-headless locater-qwen3 locater-post locater-sandwich-alone locater-no-mlp llama mistral-window mixtral qwen2 qwen3 "
    "qwen3_moe gemma2 gemma3 gpt_oss phi3 gptj bloom olmo2 olmo3 cohere cohere2 granite granitemoe t5-encoder deberta_v2 deepseek_v2 "
    "deepseek_v3 deepseek_v3-yarn-biased"
).split()
UNPADDED = "bloom gemma2".split()  # in float64 their eager attention makes NaN of padding
REFUSED = {
    "clip": "CLIPModel: paths go through one stack, and it has text_model.encoder.layers.* and vision_model",
    "siglip": "vision_model.head.attention: paths go through one stack",
    "siglip-vision": "head.attention: paths go through one stack",
    "mt5": "EncDecAttention: paths go through one stack",
    "umt5": "EncDecAttention: paths go through one stack",
    "bart": "encoder_attn: paths go through one stack",
    "whisper": "encoder_attn: paths go through one stack",
    "gemma3-composite": "gemma3 has two towers with blocks of their own: pass model.model.language_model",
}


@cache
def built(label: str) -> tuple[nn.Module, dict[str, Tensor]]:
    """A model in float64 and a batch of two inputs; the second one is padded where the model takes text."""
    case = BY_LABEL[label]
    model: Any = model_of(case)
    if case.implementations == ("eager",):
        model.set_attn_implementation("eager")
    return model, tokens(pads=0) if label in UNPADDED else case.batch()
