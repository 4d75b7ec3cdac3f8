"""T5, mT5 and UMT5: logits are not scaled, and a learned table over relative distance is added to them.

The first layer of a stack holds the table and all its layers use it (in UMT5 every layer holds its own);
cross-attention has none, whatever old checkpoints store there.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.layers.build import expect_layers, integer, map_layout, norm_layout, present
from locater.layers.layer import Kind
from locater.layers.layout import AttentionLayout, BucketLayout, LogitsLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)block\.(?P<layer>\d+)\.layer\.0\.SelfAttention\.q\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    first_release = config["model_type"] == "t5"
    config = {
        "d_model": 512,
        "d_kv": 64,
        "num_heads": 8 if first_release else 6,
        "num_layers": 6 if first_release else 8,
        **config,
    }
    stacks = Counter(match["prefix"] for match, _ in numbered(weights, PATTERN)) or {"": 0}
    for stack, count in sorted(stacks.items(), reverse=True):  # the encoder before the decoder
        named = stack.endswith(("encoder.", "decoder."))
        # a stack taken out of its model
        decoder = stack.endswith("decoder.") if named else bool(config.get("is_decoder"))
        expect_layers(weights, count, config, *(["num_decoder_layers"] if decoder else []), "num_layers")
        for index in range(count):
            yield _layer(weights, config, stack, index, decoder, "self")
            if f"{stack}block.{index}.layer.1.EncDecAttention.q.weight" in weights.names():
                yield _layer(weights, config, stack, index, decoder, "cross")


def _layer(weights: Weights, config: Config, stack: str, index: int, decoder: bool, kind: Kind) -> AttentionLayout:
    heads, head_dim, width = (integer(config, weights, key) for key in ("num_heads", "d_kv", "d_model"))
    block = f"{stack}block.{index}.layer.{int(kind == 'cross')}"
    stem = f"{block}.{'EncDecAttention' if kind == 'cross' else 'SelfAttention'}"
    eps = config.get("layer_norm_epsilon", 1e-6)
    shape, why = (heads * head_dim, width), "num_heads x d_kv, d_model"
    query, key = (map_layout(weights, f"{stem}.{part}", shape=shape, why=why) for part in "qk")
    closing = f"{stack.removesuffix('decoder.')}encoder.final_layer_norm"  # of the encoder that a cross layer reads
    return AttentionLayout(
        name=stem,
        index=index,
        heads=heads,
        kv_heads=heads,
        head_dim=head_dim,
        query=query,
        key=key,
        logits=LogitsLayout(
            bias=_bias(weights, config, stack, stem, decoder) if kind == "self" else None,
            causal=decoder and kind == "self",
        ),
        value=map_layout(weights, f"{stem}.v"),
        out=map_layout(weights, f"{stem}.o"),
        norm=norm_layout(weights, f"{block}.layer_norm", "rms", eps),
        memory_norm=norm_layout(weights, closing, "rms", eps)
        if kind == "cross" and f"{closing}.weight" in weights.names()
        else None,
        kind=kind,
    )


def _bias(weights: Weights, config: Config, stack: str, stem: str, decoder: bool) -> BucketLayout | None:
    shared = f"{stack}block.0.layer.0.SelfAttention"
    table = present(weights, *(f"{holder}.relative_attention_bias.weight" for holder in (stem, shared)))
    farthest = config.get("relative_attention_max_distance", 128)
    return None if table is None else BucketLayout(table, not decoder, farthest)


BLOCK = Block(  # an encoder block has two steps, and a decoder block three: the MLP is the last
    attention="layer.0.SelfAttention",
    norm="rms",
    before_attention="layer.0.layer_norm",
    before_mlp=("layer.2.layer_norm", "layer.1.layer_norm"),
    other_norms=("layer.1.layer_norm",),
    mlp=("layer.2.DenseReluDense", "layer.1.DenseReluDense"),
    up=("layer.1.DenseReluDense.wi_1", "layer.1.DenseReluDense.wi"),
    down="layer.1.DenseReluDense.wo",
    stack="block",
    final="final_layer_norm",
)
FAMILY = Family(("mt5", "t5", "umt5"), layers, BLOCK)
