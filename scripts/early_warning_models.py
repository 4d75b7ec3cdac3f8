"""Models and optimizers of the unseen runs of the early-warning record."""

from __future__ import annotations

import math
import re
from typing import Any

import torch
from early_warning_plan import LENGTH, Kind, Run
from torch import nn

from locater_lab.models.shape import Shape
from locater_lab.models.transformer import Transformer

WORDS = 2048  # of the vocabulary of words


def vocabulary(kind: Kind) -> int:
    return WORDS if kind.text == "words" else 256


def build(kind: Kind, run: Run) -> nn.Module:
    """The model of a kind, its initial weights multiplied as the run has it."""
    if kind.build == "own":
        sizes = dict(layers=kind.layers, width=kind.width, heads=kind.heads, kv_heads=kind.kv_heads or kind.heads)
        shape = Shape(vocabulary=vocabulary(kind), hidden=3 * kind.width, length=LENGTH, **sizes, **dict(kind.own))
        model: nn.Module = Transformer(shape)
    else:
        model = _of_transformers(kind)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.ndim > 1:
                p.mul_(run.weights)
            if name.endswith(("q_proj.weight", "k_proj.weight")):
                p.mul_(math.sqrt(run.query_key))
    return model


def _of_transformers(kind: Kind) -> nn.Module:
    import transformers

    transformers.logging.set_verbosity_error()
    tokens = dict(vocab_size=vocabulary(kind), bos_token_id=0, eos_token_id=0, pad_token_id=None)
    layers, width, heads = kind.layers, kind.width, kind.heads
    if kind.build == "GPT2":
        sizes: dict[str, Any] = dict(n_embd=width, n_layer=layers, n_head=heads, n_positions=LENGTH)
        sizes |= dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
    elif kind.build == "Bloom":
        sizes = dict(hidden_size=width, n_layer=layers, n_head=heads)
    elif kind.build == "OPT":
        sizes = dict(hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, ffn_dim=3 * width)
        sizes |= dict(word_embed_proj_dim=width, max_position_embeddings=LENGTH, dropout=0.0)
    else:
        sizes = dict(
            hidden_size=width, num_hidden_layers=layers, num_attention_heads=heads, intermediate_size=3 * width
        )
        sizes |= dict(max_position_embeddings=LENGTH)
        if kind.build != "GPTNeoX":
            sizes |= dict(num_key_value_heads=kind.kv_heads or heads, head_dim=width // heads)
        if kind.build == "Starcoder2":
            sizes |= dict(residual_dropout=0.0, embedding_dropout=0.0)
        if kind.build == "Gemma2":
            sizes |= dict(query_pre_attn_scalar=width // heads, sliding_window=LENGTH // 2)
    config = getattr(transformers, f"{kind.build}Config")(**sizes, **tokens)
    head = "LMHeadModel" if kind.build == "GPT2" else "ForCausalLM"
    return getattr(transformers, f"{kind.build}{head}")(config)


def optimizers(kind: Kind, run: Run, model: nn.Module) -> list[torch.optim.Optimizer]:
    rate, parameters = kind.rate * run.rate, list(model.parameters())
    if kind.optimizer == "sgd":
        return [torch.optim.SGD(parameters, rate, momentum=run.momentum)]
    constants = dict(betas=(0.9, run.beta2), eps=run.eps)
    if kind.optimizer == "adamw":
        both: list[torch.optim.Optimizer] = [torch.optim.AdamW(parameters, rate, **constants)]
    else:
        maps = [p for name, p in model.named_parameters() if p.ndim == 2 and not re.search("embed|wte|wpe|head", name)]
        others = [p for p in parameters if not any(p is q for q in maps)]
        muon = torch.optim.Muon(maps, rate, adjust_lr_fn="match_rms_adamw")
        both = [muon, torch.optim.AdamW(others, rate, **constants)]
    for optimizer in both:
        for group in optimizer.param_groups:
            group["weight_decay"] = run.decay  # set here, since the constructors refuse a negative one
    return both
