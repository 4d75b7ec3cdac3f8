"""GPT-J: rotary positions turn neighbouring channels, so rows of queries and keys are read in half layout; LayerNorm in
front.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from torch import nn

from locater.calls.call_and_masks import Call
from locater.calls.listeners import active_listeners
from locater.calls.patching import Undo, argument_of, notify, replace_method
from locater.errors import LocaterError
from locater.families.record import Block, Family
from locater.kernels import Terms
from locater.layers.build import expect, expect_layers, integer, map_layout, norm_layout, shape_of
from locater.layers.layout import AttentionLayout, LogitsLayout, rotary_layout
from locater.layers.rotary import halves
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered
from locater.torch_private import GPTJ_ATTENTION

PATTERN = r"(?P<prefix>(.*\.)?)h\.(?P<layer>\d+)\.attn\.q_proj\.weight"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    heads, width = (
        integer(config, weights, "n_head", "num_attention_heads"),
        integer(config, weights, "n_embd", "hidden_size"),
    )
    head_dim = width // heads
    turning = config.get("rotary_dim", 64)
    turning = head_dim if turning is None else turning  # null: all channels turn
    if turning > head_dim:
        raise LocaterError(
            f"{weights.where}: the configuration turns {turning} channels (rotary_dim) of heads that have {head_dim}"
        )
    order = [*halves(turning), *range(turning, head_dim)]
    matches = [(m["prefix"], int(m["layer"]), name) for m, name in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "n_layer", "num_hidden_layers")
    for prefix, index, name in matches:
        block = f"{prefix}h.{index}"
        expect(weights, name, shape_of(weights, name), (heads * head_dim, width), "n_head x head size, n_embd")
        query, key, value, out = (map_layout(weights, f"{block}.attn.{part}_proj") for part in ("q", "k", "v", "out"))
        yield AttentionLayout(
            name=f"{block}.attn",
            index=index,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=query.within_heads(heads, order),
            key=key.within_heads(heads, order),
            logits=LogitsLayout(scale=head_dim**-0.5, causal=True),
            value=value,
            out=out,
            norm=norm_layout(weights, f"{block}.ln_1", "layer", config.get("layer_norm_epsilon", 1e-5)),
            rotary=rotary_layout({}, turning),
        )


BLOCK = Block(
    attention="attn",
    before_attention="ln_1",
    mlp="mlp",
    up="mlp.fc_in",
    down="mlp.fc_out",
    parallel=True,
    stack="h",
    final="ln_f",
)


def tap(module: nn.Module) -> Iterator[Undo]:
    """The method `_attn` is called with queries and keys after rotation and cache."""
    yield replace_method(module, GPTJ_ATTENTION, _attend)


def _attend(module: Any, attend: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    out = attend(*args, **kwargs)
    sites = active_listeners(module)
    if sites:
        names = ((0, "query"), (1, "key"), (3, "attention_mask"))
        q, k, mask = (argument_of(args, kwargs, at, name) for at, name in names)
        terms = Terms(1 / float(module.scale_attn))
        call = Call(q.detach(), k.detach(), terms, out[0].detach().transpose(1, 2))
        notify(sites, call if mask is None else call.masked(mask.detach(), added=True))
    return out


def unobservable(module: nn.Module) -> str | None:
    if "Flash" in type(module).__name__:
        return "GPT-J is not observed under FlashAttention; load it with attn_implementation='eager'"
    return None


FAMILY = Family(("gptj",), layers, BLOCK, tap, unobservable)
