"""XLNet: distances have keys, from a sinusoid, and each of the two dot products adds its own bias to the query.

    logit = scale * ((q + r_w) . k + (q + r_r) . k_r(distance) + (q + r_s) . segment)

The segment term is left out: it is there only for calls with token types, and a single segment adds the same to a whole
row, which softmax does not see. The query stream of permutation training is left out too. The model runs time first;
`x` here is batch first. There is no norm before layer 0.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from locater.checkpoints.sources import Config
from locater.checkpoints.weights import Weights, numbered
from locater.errors import LocaterError
from locater.families.build import expect, expect_layers, integer, norm, shape_of
from locater.families.layer import AttentionLayer, Projection
from locater.families.norm import Norm
from locater.families.relative import RelativeTerms
from locater.numerics import upcast

MODEL_TYPES = ("xlnet",)
PATTERN = r"(?P<prefix>(.*\.)?)layer\.(?P<layer>\d+)\.rel_attn\.q"


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    causal = config.get("attn_type", "bi") == "uni"
    # half of a batch reversed; keys of an earlier segment only
    for setting in ("bi_data", *(["same_length"] if causal else [])):
        if config.get(setting):
            raise LocaterError(
                f"{weights.where}: {setting} belongs to training and is not supported: set it to false in config.json"
            )
    heads, width = (
        integer(config, weights, "n_head", "num_attention_heads"),
        integer(config, weights, "d_model", "hidden_size"),
    )
    head_dim, eps = config.get("d_head") or width // heads, config.get("layer_norm_eps", 1e-12)
    found = [(m["prefix"], int(m["layer"])) for m, _ in numbered(weights, PATTERN)]
    expect_layers(weights, len(found), config, "n_layer", "num_hidden_layers")
    for prefix, index in found:
        stem = f"{prefix}layer.{index}.rel_attn"
        of_maps, of_biases = (width, heads, head_dim), (heads, head_dim)
        for part, shape in {**dict.fromkeys("qkvor", of_maps), "r_w_bias": of_biases, "r_r_bias": of_biases}.items():
            expect(weights, f"{stem}.{part}", shape_of(weights, f"{stem}.{part}"), shape, "d_model, n_head, d_head")
        yield AttentionLayer(
            name=stem,
            index=index,
            heads=heads,
            kv_heads=heads,
            head_dim=head_dim,
            query=_into_heads(weights, f"{stem}.q", weights.read(f"{stem}.r_w_bias").flatten()),
            key=_into_heads(weights, f"{stem}.k"),
            value=_into_heads(weights, f"{stem}.v"),
            out=_out_of_heads(weights, f"{stem}.o"),
            scale=head_dim**-0.5,
            norm=norm(weights, f"{prefix}layer.{index - 1}.ff.layer_norm", "layer", eps) if index else Norm(),
            relative=RelativeTerms(
                code=sinusoid(width, config.get("clamp_len", -1)),
                key=_into_heads(weights, f"{stem}.r"),
                shift=_difference(weights, f"{stem}.r_r_bias", f"{stem}.r_w_bias"),
            ),
            causal=causal,
        )


def _into_heads(weights: Weights, name: str, bias: Tensor | None = None) -> Projection:
    width, heads, head_dim = shape_of(weights, name)
    return Projection(lambda: weights.read(name).flatten(1).mT, (heads * head_dim, width), bias)


def _out_of_heads(weights: Weights, name: str) -> Projection:
    width, heads, head_dim = shape_of(weights, name)
    return Projection(lambda: weights.read(name).flatten(1), (width, heads * head_dim))


def _difference(weights: Weights, name: str, other: str) -> Callable[[], Tensor]:
    return lambda: upcast(weights.read(name)) - upcast(weights.read(other))


def sinusoid(width: int, farthest: int) -> Callable[[Tensor], Tensor]:
    """Sines then cosines of a distance, in float32 as in the model; distances beyond `farthest` count as it, where it
    is positive.
    """
    frequencies = 1 / 10_000 ** (torch.arange(0, width, 2).float() / width)

    def code(distances: Tensor) -> Tensor:
        if farthest > 0:
            distances = distances.clamp(-farthest, farthest)
        angle = distances.float()[:, None] * frequencies.to(distances.device)
        return torch.cat([angle.sin(), angle.cos()], -1)

    return code
