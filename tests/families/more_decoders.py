"""More tiny decoders: BLOOM, OPT, Falcon, Phi, GPT-J, DeepSeek and other relatives; three of them need a tap of their
own.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from tests.families.decoders import EXPERTS, GROUPED, SHAPE, WINDOWS, YARN, case, make
from tests.parity import EPS, Case, Record, Site, decoder_sites, tokens

LOWEST = torch.finfo(torch.float32).min  # float64's lowest is -inf in a float32 softmax, and a row of it NaN


@contextlib.contextmanager
def bloom_tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    """Queries and keys from `_reshape`; mask and ALiBi from the call's arguments; maps from what it returns."""
    handles = []
    for path, here in records.items():
        module = model.get_submodule(path)
        handles.append(module.register_forward_pre_hook(partial(_bloom_before, here), with_kwargs=True))
        handles.append(module.register_forward_hook(partial(_bloom_after, here)))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for path in records:
            del model.get_submodule(path)._reshape


def _bloom_before(here: Record, module: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    mask, alibi, split = kwargs["attention_mask"], kwargs["alibi"], type(module)._reshape
    here.mask = mask == 0

    def reshape(fused: Tensor) -> Any:
        q, k, v = split(module, fused)
        here.calls += 1
        here.logits = module.inv_norm_factor * (q @ k.mT) + module.beta * alibi.view(len(q), module.num_heads, 1, -1)
        return q, k, v

    module._reshape = reshape
    return args, {**kwargs, "attention_mask": mask.clamp_min(LOWEST)}


def _bloom_after(here: Record, module: Any, args: Any, out: Any) -> None:
    here.maps = out[1]
    here.output = out[0] - args[1]  # the stream is added inside


@contextlib.contextmanager
def gptj_tap(model: nn.Module, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    """Everything from `_attn`, which gets queries and keys after their rotation."""

    def wrap(module: Any, here: Record) -> Any:
        def attend(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> Any:
            out, maps = type(module)._attn(module, q, k, v, mask)
            here.calls += 1
            here.logits, here.maps, here.mask = q @ k.mT / module.scale_attn, maps, mask == 0
            return out, maps

        return attend

    modules: list[Any] = [model.get_submodule(path) for path in records]
    for module, here in zip(modules, records.values(), strict=True):
        module._attn = wrap(module, here)
    try:
        yield
    finally:
        for module in modules:
            del module._attn


@contextlib.contextmanager
def falcon_tap(model: Any, implementation: str, records: dict[str, Record]) -> Iterator[None]:
    """sdpa: what the fused function is given. eager: queries and keys from their rotation, maps from what the module
    returns.
    """
    from transformers.models.falcon import modeling_falcon

    running: list[Record] = []
    fused, rotate = torch.nn.functional.scaled_dot_product_attention, modeling_falcon.apply_rotary_pos_emb

    def enter(here: Record, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        running.append(here)
        if implementation == "eager":
            here.mask = kwargs["attention_mask"] == 0

    def leave(here: Record, module: nn.Module, args: Any, out: Any) -> None:
        here.maps = out[1]

    def keep(q: Tensor, k: Tensor) -> Tensor:
        running[-1].calls += 1
        running[-1].logits = q @ k.mT * q.shape[-1] ** -0.5
        return running[-1].logits

    def see(q: Tensor, k: Tensor, v: Tensor, attn_mask: Tensor, **kw: Any) -> Tensor:
        logits = keep(q, k)
        visible = attn_mask if attn_mask.dtype == torch.bool else attn_mask > LOWEST
        if attn_mask.is_floating_point():  # ALiBi comes with the mask
            running[-1].logits = logits + attn_mask.masked_fill(~visible, 0.0)
        running[-1].mask = visible[:, :1]
        return fused(q, k, v, attn_mask=attn_mask, **kw)

    def turn(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        q, k = rotate(q, k, cos, sin)
        if implementation == "eager":
            keep(q, k)
        return q, k

    before = model.config._attn_implementation
    handles = []
    for path, here in records.items():
        handles.append(model.get_submodule(path).register_forward_pre_hook(partial(enter, here), with_kwargs=True))
        handles.append(model.get_submodule(path).register_forward_hook(partial(leave, here)))
    model.config._attn_implementation = implementation  # asked at every call; set_attn_implementation declines
    torch.nn.functional.scaled_dot_product_attention = see  # type: ignore[assignment]
    modeling_falcon.apply_rotary_pos_emb = turn
    try:
        yield
    finally:
        modeling_falcon.apply_rotary_pos_emb = rotate
        torch.nn.functional.scaled_dot_product_attention = fused
        model.config._attn_implementation = before
        for handle in handles:
            handle.remove()


def bloom(label: str, **kw: Any) -> Case:
    # 6: no power of 2
    settings = dict(hidden_size=48, n_layer=2, n_head=6, vocab_size=64, layer_norm_epsilon=EPS, **kw)
    sites = decoder_sites(2, "transformer.h", "self_attention", "input_layernorm", "dense")
    return Case(label, lambda: make("Bloom", **settings), tokens, sites, ("eager",), bloom_tap, shift_free=True)


def opt(label: str, sites: list[Site], spread: float = 1.0, **kw: Any) -> Case:
    settings = dict(SHAPE, ffn_dim=48, **kw)
    settings.pop("intermediate_size")
    return Case(
        label,
        lambda: make("OPT", **settings),
        tokens,
        sites,
        spread=spread,
        redraw_more=quiet_embeddings if sites is OPT_PRE else None,
    )


def quiet_embeddings(model: nn.Module) -> None:
    """OPT fixes eps at 1e-5: the first layer's input must be small for it to show."""
    for name, p in model.named_parameters():
        if "embed" in name:
            p.mul_(0.05)


def falcon(label: str, norm: str, **kw: Any) -> Case:
    settings: dict[str, Any] = dict(SHAPE, layer_norm_epsilon=EPS, bias=True, **kw)
    settings.pop("intermediate_size")
    sites = decoder_sites(2, "transformer.h", "self_attention", norm, "dense")
    return Case(label, lambda: make("Falcon", **settings), tokens, sites, tap=falcon_tap)


def deepseek(label: str, name: str, spread: float = 1.0, **kw: Any) -> Case:
    sizes = dict(
        kv_lora_rank=10,
        qk_nope_head_dim=8,
        qk_rope_head_dim=4,
        v_head_dim=6,
        num_key_value_heads=4,
        num_attention_heads=4,
    )
    experts = dict(
        first_k_dense_replace=1, n_routed_experts=2, n_shared_experts=1, num_experts_per_tok=1, moe_intermediate_size=16
    )
    settings = dict(GROUPED, **experts, n_group=1, topk_group=1)
    settings.update(sizes, **kw)
    return Case(
        label, lambda: make(name, **settings), tokens, decoder_sites(2), spread=spread, redraw_more=quiet_latents
    )


def quiet_latents(model: nn.Module) -> None:
    """DeepSeek fixes the latents' eps at 1e-6: they must be small for it to show. Shared rotary keys keep their
    size.
    """
    for name, p in model.named_parameters():
        if "q_a_proj" in name:
            p.mul_(0.01)
        if "kv_a_proj" in name:
            p[:10].mul_(0.01)


def wide_gains(model: nn.Module) -> None:
    """Cohere keeps gains in a table, heads by channels, which was redrawn like a matrix."""
    for name, p in model.named_parameters():
        if "q_norm" in name or "k_norm" in name:
            p.copy_(1 + p)


PHI = dict(
    layer_norm_eps=EPS, rope_parameters={"rope_type": "default", "rope_theta": 100.0, "partial_rotary_factor": 0.5}
)
LONG = dict(max_position_embeddings=64, original_max_position_embeddings=16)
LONGROPE = {"rope_type": "longrope", "rope_theta": 100.0, "short_factor": [1.0, 1.5, 2.0, 4.0], "long_factor": [9.0] * 4,
            "original_max_position_embeddings": 16}  # fmt: skip
DEEP_YARN = {**YARN, "mscale": 1.0, "mscale_all_dim": 0.7}
OPT_PRE = decoder_sites(2, "model.decoder.layers", "self_attn", "self_attn_layer_norm", "out_proj")
OPT_POST = [
    Site(s.attention, f"model.decoder.layers.{i - 1}.final_layer_norm" if i else None, s.out)
    for i, s in enumerate(OPT_PRE)
]
MLP_NORM = dict(new_decoder_architecture=True, num_kv_heads=2)
ALIBI: dict[str, Any] = dict(implementations=("sdpa",), shift_free=True)
ROUNDED = dict(alibi=True, num_attention_heads=16, hidden_size=64)
GPTJ = dict(n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4, vocab_size=64, layer_norm_epsilon=EPS)
BARE_SITES = [Site(s.attention, None, s.out) for s in decoder_sites(2)]

CASES = [
    bloom("bloom"),
    bloom("bloom-slow", slow_but_exact=True, pretraining_tp=2),
    opt("opt", OPT_PRE),
    opt("opt-post-norm", OPT_POST, do_layer_norm_before=False, word_embed_proj_dim=16),
    opt("opt-bare", OPT_PRE, 1.2, enable_bias=False, layer_norm_elementwise_affine=False),
    falcon("falcon", "input_layernorm"),
    falcon("falcon-per-head", "input_layernorm", multi_query=False, parallel_attn=False),
    falcon("falcon-groups", "ln_attn", **MLP_NORM),
    falcon("falcon-groups-one-norm", "input_layernorm", **MLP_NORM, num_ln_in_parallel_attn=1),
    # transformers' eager path adds ALiBi twice
    replace(falcon("falcon-alibi", "input_layernorm", alibi=True), **ALIBI),
    # slopes that are no powers of 2 are rounded by position, counted from the first real token
    replace(
        falcon("falcon-alibi-rounded", "input_layernorm", **ROUNDED),
        **ALIBI,
        spread=0.85,
        batch=partial(tokens, pads=0),
    ),
    replace(case("phi", "Phi", **PHI), sites=decoder_sites(2, out="dense")),
    replace(case("phi-normed", "Phi", **PHI, qk_layernorm=True), sites=decoder_sites(2, out="dense")),
    case("phi3", "Phi3", sliding_window=4, pad_token_id=0),
    case("phi3-longrope", "Phi3", **LONG, rope_parameters=LONGROPE, pad_token_id=0),
    Case(
        "gptj",
        lambda: make("GPTJ", **GPTJ),
        tokens,
        decoder_sites(2, "transformer.h", "attn", "ln_1", "out_proj"),
        ("eager",),
        gptj_tap,
    ),
    deepseek("deepseek_v3", "DeepseekV3", q_lora_rank=12),
    deepseek("deepseek_v3-plain-query", "DeepseekV3", q_lora_rank=None, rope_interleave=False),
    deepseek("deepseek_v3-yarn-biased", "DeepseekV3", q_lora_rank=12, rope_parameters=DEEP_YARN, attention_bias=True),
    deepseek("deepseek_v2", "DeepseekV2", q_lora_rank=12),
    replace(case("olmo2", "Olmo2"), sites=BARE_SITES),
    replace(case("olmo3", "Olmo3", sliding_window=4, layer_types=WINDOWS), sites=BARE_SITES),
    case("cohere", "Cohere", layer_norm_eps=EPS),
    replace(case("cohere-normed", "Cohere", layer_norm_eps=EPS, use_qk_norm=True), redraw_more=wide_gains),
    case("cohere2", "Cohere2", layer_norm_eps=EPS, sliding_window=4, layer_types=WINDOWS),
    case("starcoder2", "Starcoder2", spread=0.9, norm_epsilon=EPS, sliding_window=4),
    case("stablelm", "StableLm", layer_norm_eps=EPS, use_qkv_bias=True),
    case("stablelm-normed", "StableLm", layer_norm_eps=EPS, qk_layernorm=True, use_qkv_bias=True),
    case("granite", "Granite", attention_multiplier=0.3),
    case("granitemoe", "GraniteMoe", **EXPERTS, attention_multiplier=0.27, num_local_experts=2),
]
