"""Models that `locater train` saves and no other library knows: Llama's blocks that attend by any mechanism, and their
variants.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields, replace
from functools import partial

import torch
from torch import Tensor

from locater.attention import mechanism
from locater.attention.call import DEFAULT_CAP
from locater.attention.modules import AttentionModule
from locater.attention.text import Named, parse_attention
from locater.checkpoints.sources import Config
from locater.checkpoints.weights import Weights
from locater.errors import LocaterError
from locater.families.build import norm
from locater.families.decoder import decoder_layers
from locater.families.layer import AttentionLayer

MODEL_TYPES = MODEL_TYPE, VARIANT = "locater", "locater_variant"
UNREAD = {
    "differential": "a head has two maps of queries and keys",
    "qk_norm": "its gains are those of whole heads; a model trained with --qk-norm is read",
}
EPS = 1e-5  # of every norm


def is_scanned(attention: str, layers: int) -> bool:
    """Whether `locater scan` reads a model that attends so.

    >>> is_scanned("sigmoid", 4), is_scanned("differential", 4)
    (True, False)
    """
    return not any(held.name in UNREAD for held in parse_attention(attention, layers))


@dataclass(frozen=True)
class OtherAttention(AttentionLayer):
    """A layer whose weights are those of another mechanism than softmax; `learned` makes the module of one with
    parameters.
    """

    learned: Callable[[], AttentionModule] | None = None

    def attention(
        self, x: Tensor, x_k: Tensor | None = None, *, padding: Tensor | None = None, normalized: bool = False
    ) -> Tensor:
        """Weights as they act, whatever they sum to."""
        q, k, stream = self._operands(x, x_k, normalized)
        if self.learned is None:
            return mechanism(self.mechanism).map(q, k, causal=self.causal, padding=padding)
        return self.learned().to(q.dtype).map(q, k, stream, causal=self.causal, padding=padding)

    def output(
        self, x: Tensor, x_k: Tensor | None = None, *, padding: Tensor | None = None, normalized: bool = False
    ) -> Tensor:
        """What the layer gives; of some mechanisms there is more to it than a map of values."""
        if self.learned is None or self.value is None or self.out is None:
            return super().output(x, x_k, padding=padding, normalized=normalized)
        q, k, stream = self._operands(x, x_k, normalized)
        v = self._heads(self.value(stream), self.kv_heads)
        mixed = self.learned().to(q.dtype)(q, k, v, stream, causal=self.causal, padding=padding)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _operands(self, x: Tensor, x_k: Tensor | None, normalized: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, and what gates are made of."""
        held = self.norm.affine if normalized else self.norm
        source = x if x_k is None else x_k
        return self.queries(x, normalized=normalized), self.keys(source, normalized=normalized), held(source)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayer]:
    """Attention of the types `locater` and `locater_variant`, for `locater.attention_layers`."""
    by_layer = parse_attention(config.get("attention", "softmax"), config["num_hidden_layers"])
    around, place = config.get("norm", "pre") == "post", re.compile(r"layers\.\d+\.self_attn$")
    for layer in decoder_layers(weights, config, normed=not around):
        held = by_layer[layer.index]
        if held.name in UNREAD:
            raise LocaterError(f"{weights.where}: {held.name} attention is not read: {UNREAD[held.name]}")
        if around and layer.index:  # what made the layer's input
            behind = "attention_out_norm" if config["mlp"] == "none" else "mlp_out_norm"
            before = place.sub(f"layers.{layer.index - 1}.{behind}", layer.name)
            layer = replace(layer, norm=norm(weights, before, "rms", EPS))
        placed = replace(
            layer, causal=config["is_causal"], rotary=layer.rotary if config["positions"] == "rotary" else None
        )
        if config.get("qk_norm"):
            query, key = (norm(weights, f"{layer.name}.{kind}_norm", "rms", EPS) for kind in "qk")
            placed = replace(placed, query_norm=query, key_norm=key)
        yield _attending(placed, held, config, weights)


def _attending(layer: AttentionLayer, held: Named, config: Config, weights: Weights) -> AttentionLayer:
    """The layer as its mechanism has it."""
    if held.name == "softcap":
        return replace(layer, softcap=held.settings.get("cap", DEFAULT_CAP))
    if held.name == "softmax_plus_one":
        return replace(layer, sinks=torch.zeros(layer.heads))
    if held.name == "learned_sink":
        return replace(layer, sinks=weights.read(f"{layer.name}.mechanism.sinks"))
    if held.name == "softmax":
        return layer
    learned = None if held.is_bare else partial(_module, held, config, weights, layer.name, layer.index)
    return OtherAttention(
        **{item.name: getattr(layer, item.name) for item in fields(layer)}
        | {"mechanism": held.name, "learned": learned}
    )


def _module(held: Named, config: Config, weights: Weights, name: str, depth: int) -> AttentionModule:
    """What a layer has learned, as a module; made when the layer is run, since one that is only read may be traced."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    with torch.device("meta"):
        made = held.module(
            width=width, heads=heads, size=width // heads, kv_heads=config["num_key_value_heads"], depth=depth
        )
    read = {part: weights.read(f"{name}.mechanism.{part}").detach() for part in made.state_dict()}
    made.load_state_dict(read, assign=True)
    return made.requires_grad_(False)
