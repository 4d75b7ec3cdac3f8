"""The shapes that many families share. Not families: a family file starts from `decoder_layers` and `LLAMA_BLOCK`, from
`encoder_layers` and `BERT_BLOCK`, or from `encoder_decoder_layers`, and replaces the parts that differ.

- decoder: separate q, k, v and o maps, RMSNorm in front, rotary positions, grouped keys.
- post-norm encoder: BERT's, whatever its tensors are called. A layer's input comes out of the norm before it: the
  embeddings' for layer 0, then the one that closed the layer before.
- encoder and decoder of Whisper and BART: separate q, k, v and o maps, LayerNorm, `self_attn` in both stacks,
  `encoder_attn` between. Families say whether norms come before a step (Whisper) or after it (BART).
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from locater.errors import LocaterError
from locater.families.record import Block
from locater.layers.build import expect_layers, integer, map_layout, norm_layout
from locater.layers.layer import Kind
from locater.layers.layout import AttentionLayout, LogitsLayout, rotary_layout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)layers\.(?P<layer>\d+)\.self_attn\.q_proj\.weight"
LLAMA_BLOCK = Block(
    attention="self_attn",
    norm="rms",
    before_attention="input_layernorm",
    before_mlp="post_attention_layernorm",
    mlp="mlp",
    up="mlp.up_proj",
    down="mlp.down_proj",
    experts="mlp.experts",
    final="norm",
)


def layer_of_maps(
    weights: Weights,
    name: str,
    index: int,
    paths: Sequence[str],
    shape: tuple[int, int, int],
    why: Sequence[str],
    norm: NormLayout,
    *,
    head_dim: int | None = None,
    causal: bool = False,
) -> AttentionLayout:
    """A layer with a map each for queries, keys, values and outputs, at these `paths`; scale 1/sqrt(head_dim).

    `shape` is heads, key heads and width; `why` names the settings that say the shape of the maps of queries and keys.
    """
    heads, kv_heads, width = shape
    head_dim = head_dim or width // heads
    query, key = (
        map_layout(weights, path, shape=(count * head_dim, width), why=settings)
        for path, count, settings in zip(paths, (heads, kv_heads), why, strict=False)
    )
    return AttentionLayout(
        name=name,
        index=index,
        heads=heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        query=query,
        key=key,
        logits=LogitsLayout(scale=head_dim**-0.5, causal=causal),
        value=map_layout(weights, paths[2]),
        out=map_layout(weights, paths[3]),
        norm=norm,
    )


def decoder_layers(
    weights: Weights,
    config: Config,
    *,
    gain_offset: float = 0.0,
    pattern: str = PATTERN,
    out: str = "o_proj",
    normed: bool = True,
) -> Iterator[AttentionLayout]:
    """Layers with the configuration's own defaults: scale 1/sqrt(head_dim), causal, no window."""
    heads = integer(config, weights, "num_attention_heads")
    kv_heads = config.get("num_key_value_heads") or heads
    width = integer(config, weights, "hidden_size")
    head_dim = config.get("head_dim") or width // heads
    matches = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, pattern)]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    rotary = rotary_layout(config, head_dim)
    for prefix, index in matches:
        block = f"{prefix}layers.{index}"
        stem = f"{block}.self_attn"
        layer = layer_of_maps(
            weights,
            stem,
            index,
            [f"{stem}.{part}" for part in ("q_proj", "k_proj", "v_proj", out)],
            (heads, kv_heads, width),
            [f"num_{part}_heads x head_dim, hidden_size" for part in ("attention", "key_value")],
            norm_layout(weights, f"{block}.input_layernorm", "rms", config.get("rms_norm_eps", 1e-6), gain_offset)
            if normed
            else NormLayout(),
            head_dim=head_dim,
            causal=True,
        )
        yield replace(layer, rotary=rotary)


def window_of(config: Config, index: int) -> int | None:
    """The sliding window of a layer, where `layer_types` marks it as sliding."""
    types = config.get("layer_types") or []
    return config.get("sliding_window") if index < len(types) and types[index] == "sliding_attention" else None


@dataclass(frozen=True)
class Names:
    """Paths under a block, which is `<prefix><stack>.<layer>`."""

    stack: str
    query: str
    key: str
    value: str
    out: str
    last_norm: str


BERT = Names(
    "encoder.layer",
    "attention.self.query",
    "attention.self.key",
    "attention.self.value",
    "attention.output.dense",
    "output.LayerNorm",
)

BERT_BLOCK = Block(
    attention="attention.self",
    after_attention="attention.output.LayerNorm",
    after_mlp="output.LayerNorm",
    other_norms=("crossattention.output.LayerNorm",),
    up="intermediate.dense",
    down="output.dense",
)


def encoder_layers(weights: Weights, config: Config, names: Names, eps: float) -> Iterator[AttentionLayout]:
    """Self-attention layers: scale 1/sqrt(head_dim), every token in view, LayerNorm with `eps`."""
    if config.get("position_embedding_type", "absolute") != "absolute":
        raise LocaterError(
            f"{weights.where}: position_embedding_type {config['position_embedding_type']!r} is not supported, "
            "only 'absolute'"
        )
    heads, width = (
        integer(config, weights, "num_attention_heads", "n_heads"),
        integer(config, weights, "hidden_size", "dim"),
    )
    pattern = rf"(?P<prefix>(.*\.)?){re.escape(names.stack)}\.(?P<layer>\d+)\.{re.escape(names.query)}\.weight"
    matches = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, pattern)]
    expect_layers(weights, len(matches), config, "num_hidden_layers", "n_layers")
    for prefix, index in matches:
        stack = f"{prefix}{names.stack}"
        block = f"{stack}.{index}"
        before = f"{stack}.{index - 1}.{names.last_norm}" if index else f"{prefix}embeddings.LayerNorm"
        yield layer_of_maps(
            weights,
            f"{block}.{names.query.rpartition('.')[0]}",
            index,
            [f"{block}.{part}" for part in (names.query, names.key, names.value, names.out)],
            (heads, heads, width),
            ["num_attention_heads x head_dim, hidden_size"] * 2,
            norm_layout(weights, before, "layer", eps),
        )


ENCODER_DECODER_EPS = 1e-5  # no configuration sets it


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
    if norm_first:
        before = f"{stem}_layer_norm"
    elif kind == "cross":
        before = f"{block}.self_attn_layer_norm"
    else:
        before = f"{stack}layers.{index - 1}.final_layer_norm" if index else f"{stack}layernorm_embedding"
    layer = layer_of_maps(
        weights,
        stem,
        index,
        [f"{stem}.{part}_proj" for part in ("q", "k", "v", "out")],
        (heads, heads, width),
        [f"{side}_attention_heads, d_model"] * 2,
        norm_layout(weights, before, "layer", ENCODER_DECODER_EPS),
        causal=side == "decoder" and kind == "self",
    )
    memory_norm = _closing(weights, config, stack, norm_first) if kind == "cross" else None
    return replace(layer, kind=kind, memory_norm=memory_norm)


def _closing(weights: Weights, config: Config, stack: str, norm_first: bool) -> NormLayout | None:
    """The norm that closes the encoder, where there is an encoder beside this decoder."""
    last = "layer_norm" if norm_first else f"layers.{config.get('encoder_layers', 1) - 1}.final_layer_norm"
    name = f"{stack.removesuffix('decoder.')}encoder.{last}"
    return norm_layout(weights, name, "layer", ENCODER_DECODER_EPS) if f"{name}.weight" in weights.names() else None
