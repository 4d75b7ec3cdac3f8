"""ALBERT: one layer's parameters serve many depths. Every head is yielded once, not once per depth.

There are `num_hidden_groups` x `inner_group_num` attention modules, and each of their heads is counted once. The calls
of a module differ in the norm that made their input. A group that is called repeatedly reads its own closing norm each
time but the first, so that norm is the one recorded: `x` enters it. The first call reads the norm of the group before,
or at depth 0 the embeddings, which are widened after their norm. To follow that call, `dataclasses.replace` the norm:
with `NormLayout()`, `x` is the input of attention itself.
"""

from __future__ import annotations

from collections.abc import Iterator

from locater.families.record import Block, Family
from locater.layers.build import expect_layers, integer, map_layout, norm_layout
from locater.layers.layout import AttentionLayout, LogitsLayout
from locater.layers.map_layouts import NormLayout
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

PATTERN = (
    r"(?P<stack>(?P<prefix>(.*\.)?)albert_layer_groups)\.(?P<layer>\d+)\."
    r"albert_layers\.(?P<inner>\d+)\.attention\.query\.weight"
)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    heads, width = integer(config, weights, "num_attention_heads"), integer(config, weights, "hidden_size")
    head_dim, eps = width // heads, config.get("layer_norm_eps", 1e-12)
    inner = config.get("inner_group_num", 1)
    places = sorted((m["stack"], int(m["layer"]), int(m["inner"])) for m, _ in numbered(weights, PATTERN))
    modules = "num_hidden_groups x inner_group_num"
    expect_layers(weights, len(places), {modules: config.get("num_hidden_groups", 1) * inner}, modules)
    for stack, group, step in places:
        block = f"{stack}.{group}.albert_layers.{step}"
        stem = f"{block}.attention"
        shape, why = (heads * head_dim, width), "num_attention_heads x head_dim, hidden_size"
        query, key = (map_layout(weights, f"{stem}.{part}", shape=shape, why=why) for part in ("query", "key"))
        before = block_before(group, step, inner, config)
        yield AttentionLayout(
            name=stem,
            index=group * inner + step,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=query,
            key=key,
            logits=LogitsLayout(scale=head_dim**-0.5),
            value=map_layout(weights, f"{stem}.value"),
            out=map_layout(weights, f"{stem}.dense"),
            norm=norm_layout(weights, f"{stack}.{before}.full_layer_layer_norm", "layer", eps)
            if before
            else NormLayout(),
        )


def block_before(group: int, step: int, inner: int, config: Config) -> str | None:
    """The block whose norm closed the input of this one's last call; None for the embeddings."""
    if step:
        return f"{group}.albert_layers.{step - 1}"
    depths, groups = config.get("num_hidden_layers", 12), config.get("num_hidden_groups", 1)
    calls = sum(int(depth / (depths / groups)) == group for depth in range(depths))
    last = group if calls > 1 else group - 1
    return f"{last}.albert_layers.{inner - 1}" if last >= 0 else None


BLOCK = Block(
    attention="attention",
    after_attention="attention.LayerNorm",
    after_mlp="full_layer_layer_norm",
    up="ffn",
    down="ffn_output",
    added="attention.output_dropout",  # the attention module adds its skip itself
)
FAMILY = Family(("albert",), layers, BLOCK)
