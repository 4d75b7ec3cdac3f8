"""GPT-2: queries, keys and values fused in one transposed map (Conv1D), LayerNorm in front, learned absolute
positions.
"""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.layers.build import expect, expect_layers, integer, norm_layout, present, shape_of
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.layers.map_layouts import MapLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)h\.(?P<layer>\d+)\.attn\.c_attn\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    heads, width = integer(config, weights, "n_head"), integer(config, weights, "n_embd")
    head_dim = width // heads
    matches = [(m["prefix"], int(m["layer"]), name) for m, name in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "n_layer")
    for prefix, index, name in matches:
        block = f"{prefix}h.{index}"
        expect(weights, name, shape_of(weights, name), (width, 3 * width), "n_embd, 3 x n_embd")
        q, k, v = (_columns(weights, f"{block}.attn.c_attn", i * width, (i + 1) * width) for i in range(3))
        scale = head_dim**-0.5 if config.get("scale_attn_weights", True) else 1.0
        if config.get("scale_attn_by_inverse_layer_idx"):
            scale /= index + 1
        yield AttentionLayout(
            name=f"{block}.attn",
            index=index,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=q,
            key=k,
            logits=LogitsLayout(scale=scale, causal=True),
            value=v,
            out=_columns(weights, f"{block}.attn.c_proj", 0, width),
            norm=norm_layout(weights, f"{block}.ln_1", "layer", config.get("layer_norm_epsilon", 1e-5)),
        )


def _columns(weights: Weights, stem: str, start: int, stop: int) -> MapLayout:
    """Output columns start:stop of a Conv1D map, which is stored (in, out)."""
    name = f"{stem}.weight"
    rows, bias = (range(start, stop),), present(weights, f"{stem}.bias")
    return MapLayout(name, shape_of(weights, name), rows, bias, transposed=True)


BLOCK = Block(
    attention="attn",
    before_attention="ln_1",
    before_mlp="ln_2",
    other_norms=("ln_cross_attn",),
    mlp="mlp",
    up="mlp.c_fc",
    down="mlp.c_proj",
    stack="h",
    final="ln_f",
    transposed=True,
)
FAMILY = Family(("gpt2",), layers, BLOCK)
