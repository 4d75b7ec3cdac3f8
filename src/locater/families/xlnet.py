"""XLNet: distances have keys, from a sinusoid, and each of the two dot products adds its own bias to the query.

    logit = scale * ((q + r_w) . k + (q + r_r) . k_r(distance) + (q + r_s) . segment)

The segment term is left out: it is there only for calls with token types, and a single segment adds the same to a whole
row, which softmax does not see. The query stream of permutation training is left out too. The model runs time first;
`x` here is batch first. There is no norm before layer 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from locater.calls.call_and_masks import Call
from locater.calls.listeners import active_listeners
from locater.calls.patching import Undo, argument_of, notify, replace_method
from locater.errors import LocaterError
from locater.families.record import Block, Family
from locater.kernels import Terms
from locater.layers.build import expect, expect_layers, integer, norm_layout, shape_of
from locater.layers.layout import AttentionLayout, DistanceLayout, LogitsLayout, SinusoidLayout
from locater.layers.map_layouts import MapLayout, NormLayout, VectorLayout
from locater.sources.config_rules import configuration
from locater.sources.open_source import Config
from locater.sources.weights import Weights, numbered

PATTERN = r"(?P<prefix>(.*\.)?)layer\.(?P<layer>\d+)\.rel_attn\.q"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    causal = config.get("attn_type", "bi") == "uni"
    # half of a batch reversed; keys of an earlier segment only
    for setting in ("bi_data", *(["same_length"] if causal else [])):
        if config.get(setting):
            raise LocaterError(
                f"{weights.where}: {setting} belongs to training and is not supported: set it to false in "
                f"{configuration(weights)}"
            )
    heads, width = (
        integer(config, weights, "n_head", "num_attention_heads"),
        integer(config, weights, "d_model", "hidden_size"),
    )
    head_dim, eps = config.get("d_head") or width // heads, config.get("layer_norm_eps", 1e-12)
    matches = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, PATTERN)]
    expect_layers(weights, len(matches), config, "n_layer", "num_hidden_layers")
    rows = (range(heads * head_dim),)
    for prefix, index in matches:
        stem = f"{prefix}layer.{index}.rel_attn"
        of_maps, of_biases = (width, heads, head_dim), (heads, head_dim)
        for part, shape in {**dict.fromkeys("qkvor", of_maps), "r_w_bias": of_biases, "r_r_bias": of_biases}.items():
            expect(weights, f"{stem}.{part}", shape_of(weights, f"{stem}.{part}"), shape, "d_model, n_head, d_head")
        place = DistanceLayout(
            SinusoidLayout(width, config.get("clamp_len", -1)),
            key=MapLayout(f"{stem}.r", of_maps, rows, transposed=True),
            shift=(f"{stem}.r_r_bias", f"{stem}.r_w_bias"),
        )
        before = f"{prefix}layer.{index - 1}.ff.layer_norm"
        yield AttentionLayout(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=MapLayout(f"{stem}.q", of_maps, rows, transposed=True, shift=VectorLayout(f"{stem}.r_w_bias", rows)),
            key=MapLayout(f"{stem}.k", of_maps, rows, transposed=True),
            logits=LogitsLayout(head_dim**-0.5, relative=place, causal=causal),
            value=MapLayout(f"{stem}.v", of_maps, rows, transposed=True),
            out=MapLayout(f"{stem}.o", of_maps, (range(width),)),
            norm=norm_layout(weights, before, "layer", eps) if index else NormLayout(),
        )


BLOCK = Block(
    attention="rel_attn",
    after_attention="rel_attn.layer_norm",
    after_mlp="ff.layer_norm",
    up="ff.layer_1",
    down="ff.layer_2",
    added="rel_attn.dropout",  # the attention module adds its skip itself
    time_first=True,
)


def tap(module: nn.Module) -> Iterator[Undo]:
    """The method `rel_attn_core` is called with everything, time first; position and segment terms become a bias.

    In two-stream attention the content stream is counted. The query stream has other queries for the same keys, often
    for a few positions only, and is left out. In the content stream every token sees itself, padding too, so padding
    is read from the mask of the query stream, which is passed with or without that stream.
    """
    # the query stream's mask, from the start of a call until its first stream is seen
    under_way: dict[str, Tensor | None] = {}
    yield replace_method(module, "forward", partial(_keep_mask, under_way))
    yield replace_method(module, "rel_attn_core", partial(_attend, under_way))


def _keep_mask(
    under_way: dict[str, Tensor | None], module: nn.Module, forward: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    if active_listeners(module):
        under_way["mask"] = argument_of(args, kwargs, 3, "attn_mask_g")
    return forward(*args, **kwargs)


def _attend(
    under_way: dict[str, Tensor | None], module: Any, attend: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    out = attend(*args, **kwargs)
    sites = active_listeners(module)
    if sites and "mask" in under_way:
        mask = under_way.pop("mask")
        with torch.no_grad():
            call = _described(module, args, kwargs, out[0] if isinstance(out, tuple) else out)
            if mask is not None:  # (T, S, B, 1)
                real = (mask == 0).any(0).any(-1).T
                call = call.with_terms(padding=real.expand(call.query.shape[0], -1))
            notify(sites, call)
    return out


def _described(module: Any, args: Any, kwargs: Any, out: Tensor) -> Call:
    names = ("q_head", "k_head_h", "v_head_h", "k_head_r", "seg_mat", "attn_mask")
    q, k, _, k_r, segments, mask = (argument_of(args, kwargs, at, name) for at, name in enumerate(names))
    place = torch.einsum("ibnd,jbnd->bnij", q + module.r_r_bias, k_r)
    bias = module.rel_shift_bnij(place, klen=k.shape[0])
    if segments is not None:
        of_query = torch.einsum("ibnd,snd->ibns", q + module.r_s_bias, module.seg_embed)
        bias = bias + torch.einsum("ijbs,ibns->bnij", segments, of_query)
    terms = Terms(
        float(module.scale),
        bias=bias * module.scale,
        mask=None if mask is None else mask.permute(2, 3, 0, 1) == 0,
    )
    query = (q + module.r_w_bias).permute(1, 2, 0, 3)
    return Call(query, k.detach().permute(1, 2, 0, 3), terms, out.detach().transpose(0, 1))


FAMILY = Family(("xlnet",), layers, BLOCK, tap)
