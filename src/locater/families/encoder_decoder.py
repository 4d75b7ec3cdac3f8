"""The shape that Whisper and BART share: separate q, k, v and o maps, LayerNorm, `self_attn` in both stacks,
`encoder_attn` between.

Not a family: families say whether norms come before a step (Whisper) or after it (BART).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from locater.layers.build import expect_layers, integer, map_layout, norm_layout
from locater.layers.layer import Kind
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)layers\.(?P<layer>\d+)\.self_attn\.q_proj\.weight"
EPS = 1e-5  # no configuration sets it


def encoder_decoder_layers(weights: Weights, config: Config, *, norm_first: bool) -> Iterator[AttentionLayout]:
    stacks = Counter(match["prefix"] for match, _ in numbered(weights, PATTERN)) or {"": 0}
    for stack, count in sorted(stacks.items(), reverse=True):  # the encoder before the decoder
        decoder = f"{stack}layers.0.encoder_attn.q_proj.weight" in weights.names()
        side = "decoder" if decoder else "encoder"
        expect_layers(weights, count, config, f"{side}_layers")
        for index in range(count):
            yield _layer(weights, config, stack, index, side, "self", norm_first)
            if decoder:
                yield _layer(weights, config, stack, index, side, "cross", norm_first)


def _layer(
    weights: Weights, config: Config, stack: str, index: int, side: str, kind: Kind, norm_first: bool
) -> AttentionLayout:
    heads, width = integer(config, weights, f"{side}_attention_heads"), integer(config, weights, "d_model")
    block = f"{stack}layers.{index}"
    stem = f"{block}.{'encoder_attn' if kind == 'cross' else 'self_attn'}"
    head_dim = width // heads
    shape, why = (heads * head_dim, width), f"{side}_attention_heads, d_model"
    query, key = (map_layout(weights, f"{stem}.{part}_proj", shape=shape, why=why) for part in "qk")
    if norm_first:
        before = f"{stem}_layer_norm"
    elif kind == "cross":
        before = f"{block}.self_attn_layer_norm"
    else:
        before = f"{stack}layers.{index - 1}.final_layer_norm" if index else f"{stack}layernorm_embedding"
    return AttentionLayout(
        name=stem,
        index=index,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        query=query,
        key=key,
        value=map_layout(weights, f"{stem}.v_proj"),
        out=map_layout(weights, f"{stem}.out_proj"),
        logits=LogitsLayout(head_dim**-0.5, causal=side == "decoder" and kind == "self"),
        norm=norm_layout(weights, before, "layer", EPS),
        memory_norm=_closing(weights, config, stack, norm_first) if kind == "cross" else None,
        kind=kind,
    )


def _closing(weights: Weights, config: Config, stack: str, norm_first: bool) -> NormLayout | None:
    """The norm that closes the encoder, where there is an encoder beside this decoder."""
    last = "layer_norm" if norm_first else f"layers.{config.get('encoder_layers', 1) - 1}.final_layer_norm"
    name = f"{stack.removesuffix('decoder.')}encoder.{last}"
    return norm_layout(weights, name, "layer", EPS) if f"{name}.weight" in weights.names() else None
