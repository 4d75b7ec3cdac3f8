"""DeepSeek V2 and V3 (latent attention): queries and keys pass a narrow normalised latent; rotary channels, shared by
all heads in the keys, come on top. They stand last in a head on disk and first here, where `Rotary` expects them.

The norms on the latents keep their own eps: the configuration's is that of the norms on the stream.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from locater.families.record import Family
from locater.families.shared_shapes import LLAMA_BLOCK
from locater.layers.build import expect_layers, integer, map_layout, norm_layout
from locater.layers.layout import AttentionLayout, LogitsLayout, rotary_layout
from locater.layers.map_layouts import JoinedLayout, MapLayout, runs_of, shared_in_front
from locater.layers.rotary import halves, yarn_scale
from locater.sources.open_source import Config
from locater.sources.weights import Rows, Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)layers\.(?P<layer>\d+)\.self_attn\.kv_b_proj\.weight"
LATENT_EPS = 1e-6


@dataclass(frozen=True)
class _Sizes:
    heads: int
    width: int
    still: int  # channels of a head that do not turn
    turning: int  # channels of a head that turn
    value: int
    rank: int  # of the latent of keys and values


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    sizes = _Sizes(
        integer(config, weights, "num_attention_heads"),
        integer(config, weights, "hidden_size"),
        config.get("qk_nope_head_dim", 128),
        config.get("qk_rope_head_dim", 64),
        config.get("v_head_dim", 128),
        config.get("kv_lora_rank", 512),
    )
    deep = integer(config, weights, "num_hidden_layers")
    # further layers predict further tokens, and the model does not run them
    matches = [m for m, _ in numbered(weights, PATTERN) if int(m["layer"]) < deep]
    expect_layers(weights, len(matches), config, "num_hidden_layers")
    head_dim = sizes.still + sizes.turning
    for match in matches:
        block = f"{match['prefix']}layers.{match['layer']}"
        stem = f"{block}.self_attn"
        before = norm_layout(weights, f"{block}.input_layernorm", "rms", config.get("rms_norm_eps", 1e-6))
        key, value = _key_and_value(weights, config, stem, sizes)
        yield AttentionLayout(
            name=stem,
            index=int(match["layer"]),
            heads=sizes.heads,
            kv_heads=sizes.heads,
            head_dim=head_dim,
            query=_query(weights, config, stem, sizes),
            key=key,
            logits=LogitsLayout(head_dim**-0.5 * _stretch(config), causal=True),
            value=value,
            out=map_layout(weights, f"{stem}.o_proj"),
            norm=before,
            rotary=rotary_layout(config, sizes.turning),
        )


def _query(weights: Weights, config: Config, stem: str, sizes: _Sizes) -> MapLayout:
    narrow = f"{stem}.q_a_proj.weight" in weights.names()  # small models have no latent for queries
    head_dim = sizes.still + sizes.turning
    width = config.get("q_lora_rank") or 1536 if narrow else sizes.width
    wide = map_layout(
        weights,
        f"{stem}.q_b_proj" if narrow else f"{stem}.q_proj",
        shape=(sizes.heads * head_dim, width),
        why="num_attention_heads x head size, width or q_lora_rank",
    )
    order = [*(sizes.still + i for i in _turning_order(config, sizes.turning)), *range(sizes.still)]
    wide = wide.within_heads(sizes.heads, order)
    if not narrow:
        return wide
    inner = norm_layout(weights, f"{stem}.q_a_layernorm", "rms", LATENT_EPS)
    return replace(wide, latent=map_layout(weights, f"{stem}.q_a_proj"), latent_norm=inner)


def _key_and_value(weights: Weights, config: Config, stem: str, sizes: _Sizes) -> tuple[JoinedLayout, MapLayout]:
    both, ends = f"{stem}.kv_a_proj_with_mqa", (sizes.rank, sizes.rank + sizes.turning)
    down = map_layout(
        weights,
        both,
        [(0, sizes.rank)],
        shape=(ends[1], sizes.width),
        why="kv_lora_rank + qk_rope_head_dim, hidden_size",
    )
    shared = map_layout(weights, both, [ends]).within_heads(1, _turning_order(config, sizes.turning))
    inner = norm_layout(weights, f"{stem}.kv_a_layernorm", "rms", LATENT_EPS)
    keys: Rows = [
        (h * (sizes.still + sizes.value), h * (sizes.still + sizes.value) + sizes.still) for h in range(sizes.heads)
    ]
    values: Rows = [(end, end + sizes.value) for _, end in keys]
    shape = (sizes.heads * (sizes.still + sizes.value), sizes.rank)
    why = "num_attention_heads x (qk_nope_head_dim + v_head_dim), kv_lora_rank"
    key, value = (
        replace(map_layout(weights, f"{stem}.kv_b_proj", rows, shape=shape, why=why), latent=down, latent_norm=inner)
        for rows in (keys, values)
    )
    places = runs_of(shared_in_front(shared, key, sizes.heads))
    return JoinedLayout((shared, key), places, sizes.heads), value


def _turning_order(config: Config, channels: int) -> list[int]:
    neighbours = config["model_type"] == "deepseek_v2" or config.get("rope_interleave", True)
    return halves(channels) if neighbours else list(range(channels))


def _stretch(config: Config) -> float:
    """Length extension also sharpens the logits, by the square of its amplitude."""
    rope = {**(config.get("rope_scaling") or {}), **(config.get("rope_parameters") or {})}
    weight = rope.get("mscale_all_dim")
    extended = rope.get("rope_type", rope.get("type", "default")) != "default"
    return yarn_scale(float(rope["factor"]), float(weight)) ** 2 if extended and weight else 1.0


BLOCK = replace(LLAMA_BLOCK, shared_up="mlp.shared_experts.up_proj", shared_down="mlp.shared_experts.down_proj")
FAMILY = Family(("deepseek_v2", "deepseek_v3"), layers, BLOCK)
