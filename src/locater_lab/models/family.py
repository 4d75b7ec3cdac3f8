"""Models of `locater train` that no other library knows: Llama's blocks with any attention mechanism, and variants of
them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.errors import LocaterError
from locater.families import register
from locater.families.record import Block, Family, Part
from locater.families.shared_shapes import LLAMA_BLOCK, decoder_layers
from locater.layers.build import norm_layout
from locater.layers.layer import AttentionLayer
from locater.layers.layout import AttentionLayout, SinksLayout
from locater.layers.norm import NormKind
from locater.sources.open_source import Config
from locater.sources.weights import Weights
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.modules import AttentionModule
from locater_lab.mechanisms.softmax import DEFAULT_CAP
from locater_lab.mechanisms.stack import LayerAttention, parse_attention

MODEL_TYPE, VARIANT = "locater", "locater_variant"
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
    return not any(mechanism.name in UNREAD for mechanism in parse_attention(attention, layers))


@dataclass(frozen=True)
class MechanismLayer(AttentionLayer):
    """A layer with another mechanism than softmax; `learned` builds the module of a mechanism that has parameters."""

    learned: Callable[[], AttentionModule] | None = None

    def attention(
        self,
        x: Tensor,
        x_k: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        normalized: bool = False,
    ) -> Tensor:
        """The weights, whatever they sum to."""
        self._without_mask(mask)
        q, k, stream = self._operands(x, x_k, normalized)
        if self.learned is None:
            return mechanism(self.mechanism).map(q, k, causal=self.causal, padding=padding)
        return self.learned().to(q.dtype).map(q, k, stream, causal=self.causal, padding=padding)

    def output(
        self,
        x: Tensor,
        x_k: Tensor | None = None,
        x_v: Tensor | None = None,
        *,
        padding: Tensor | None = None,
        mask: Tensor | None = None,
        normalized: bool = False,
    ) -> Tensor:
        """The output of the layer; some mechanisms are more than a map of values."""
        if self.learned is None or self.value is None or self.out is None or x_v is not None:
            return super().output(x, x_k, x_v, padding=padding, mask=mask, normalized=normalized)
        self._without_mask(mask)
        q, k, stream = self._operands(x, x_k, normalized)
        v = self._heads(self.value(stream), self.kv_heads)
        mixed = self.learned().to(q.dtype)(q, k, v, stream, causal=self.causal, padding=padding)
        return self.out(mixed.transpose(1, 2).flatten(2))

    def _without_mask(self, mask: Tensor | None) -> None:
        if mask is not None:
            raise LocaterError(f"{self.name}: {self.mechanism} attention takes no mask= here")

    def _operands(self, x: Tensor, x_k: Tensor | None, normalized: bool) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, and the stream that gates are computed from."""
        norm = self.norm.affine if normalized else self.norm
        source = x if x_k is None else x_k
        return self.queries(x, normalized=normalized), self.keys(source, normalized=normalized), norm(source)


def layers(weights: Weights, config: Config) -> Iterator[AttentionLayout]:
    """Attention of the types `locater` and `locater_variant`, for `locater.attention_layers`."""
    by_layer = parse_attention(config.get("attention", "softmax"), config["num_hidden_layers"])
    norms, place = config.get("norm", "pre"), re.compile(r"layers\.\d+\.self_attn$")
    around = norms == "post"
    kind: NormKind = "layer" if config.get("build") == "fairseq" else "rms"
    for layer in decoder_layers(weights, config, normed=norms in ("pre", "sandwich")):
        named = by_layer[layer.index]
        if named.name in UNREAD:
            raise LocaterError(f"{weights.where}: {named.name} attention is not read: {UNREAD[named.name]}")
        if around and layer.index:  # the norm that made the layer's input
            behind = "attention_out_norm" if config["mlp"] == "none" else "mlp_out_norm"
            before = place.sub(f"layers.{layer.index - 1}.{behind}", layer.name)
            layer = replace(layer, norm=norm_layout(weights, before, kind, EPS))
        elif layer.norm.kind == "rms":
            layer = replace(layer, norm=replace(layer.norm, kind=kind))
        placed = replace(layer, rotary=layer.rotary if config["positions"] == "rotary" else None)
        if config.get("qk_norm"):
            query, key = (norm_layout(weights, f"{layer.name}.{part}_norm", "rms", EPS) for part in "qk")
            placed = replace(placed, query_norm=query, key_norm=key)
        yield _with_mechanism(placed.with_logits(causal=config["is_causal"]), named, config)


@dataclass(frozen=True)
class MechanismLayout(AttentionLayout):
    """Where the heads of a layer with another mechanism are; the layer that is built from it computes the mechanism."""

    named: LayerAttention = field(kw_only=True)
    config: Config = field(kw_only=True)

    def build(self, weights: Weights, quantised: str | None = None) -> AttentionLayer:
        layer = super().build(weights, quantised)
        if self.named.name == "softmax_plus_one":
            return replace(layer, sinks=torch.zeros(layer.heads))
        learned = None
        if not self.named.is_bare:
            learned = partial(_load_module, self.named, self.config, weights, layer.name, layer.index)
        return MechanismLayer(**_fields_of(layer) | {"mechanism": self.named.name, "learned": learned})


def _fields_of(parts: AttentionLayer | AttentionLayout) -> dict[str, Any]:
    return {item.name: getattr(parts, item.name) for item in fields(parts)}


def _with_mechanism(layout: AttentionLayout, named: LayerAttention, config: Config) -> AttentionLayout:
    """The layer with its mechanism."""
    if named.name == "softcap":
        return layout.with_logits(softcap=named.settings.get("cap", DEFAULT_CAP))
    if named.name == "learned_sink":
        return layout.with_logits(sinks=SinksLayout(f"{layout.name}.mechanism.sinks"))
    if named.name == "softmax":
        return layout
    return MechanismLayout(**_fields_of(layout), named=named, config=config)


def _load_module(named: LayerAttention, config: Config, weights: Weights, name: str, depth: int) -> AttentionModule:
    """The learned parameters of a layer, as a module; built when the layer is run, because reading may be traced."""
    width, heads = config["hidden_size"], config["num_attention_heads"]
    with torch.device("meta"):
        module = named.module(
            width=width, heads=heads, size=width // heads, kv_heads=config["num_key_value_heads"], depth=depth
        )
    read = {part: weights.read(f"{name}.mechanism.{part}").detach() for part in module.state_dict()}
    module.load_state_dict(read, assign=True)
    return module.requires_grad_(False)


def block(config: Config) -> Block:
    """Norms in front ("pre"), behind attention and MLP too ("sandwich"), behind the sums alone ("post"), or none."""
    place, has_mlp = config.get("norm", "pre"), config.get("mlp") != "none"
    behind: Part = "mlp_out_norm" if has_mlp else None
    plain = LLAMA_BLOCK if has_mlp else replace(LLAMA_BLOCK, before_mlp=None, mlp=None, up=None, down=None)
    if config.get("build") == "fairseq":
        plain = replace(plain, norm="layer", final=None if place == "post" else plain.final)
    if place == "sandwich":
        return replace(plain, attention_out="attention_out_norm", mlp_out=behind)
    if place == "none":
        return replace(plain, before_attention=None, before_mlp=None, final=None)
    if place == "post":
        return replace(
            plain, before_attention=None, before_mlp=None, after_attention="attention_out_norm", after_mlp=behind
        )
    return plain


def _load(folder: Path) -> nn.Module:
    from locater_lab.models.transformer import load  # it imports the transformer, which imports this file

    model = load(folder)
    if model.shape.image is not None:
        raise LocaterError(
            f"{folder}: a model of images trained by `locater train` cannot be probed from the command line; "
            f"in Python: observe(locater_lab.train.load({str(folder)!r}))"
        )
    return model


FAMILY = register(Family((MODEL_TYPE, VARIANT), layers, block, load=_load))
