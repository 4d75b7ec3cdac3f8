"""One set of blocks for a causal language model, a masked one and an image classifier.

Names and numbers are those of Llama: a causal model with rotary positions and SwiGLU is saved as one, with QK-norm as Qwen3, and
transformers loads it. The others, and those with another attention mechanism than softmax, are of the type `locater`, which is
registered here.

Axes in comments: B sequences, T tokens, d channels, H heads.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from dataclasses import dataclass, fields, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.attention import mechanism
from locater.heads import AttentionLayer, Weights, register
from locater.heads.build import norm
from locater.heads.decoder import decoder_layers
from locater.probing.call import DEFAULT_CAP
from locater.probing.interface import _listener

MODEL_TYPE = "locater"
THETA = 10_000.0
EPS = 1e-5


class Config(dict[str, Any]):
    """config.json, as a model carries it."""

    @property
    def model_type(self) -> str:
        return str(self["model_type"])


@dataclass(frozen=True)
class Shape:
    """Sizes and kinds of a model. `image` is (height, width, channels), and `vocabulary` then counts classes."""

    vocabulary: int = 256
    layers: int = 4
    width: int = 128
    heads: int = 4
    kv_heads: int = 4
    hidden: int = 352
    length: int = 128
    positions: str = "rotary"
    mlp: str = "swiglu"
    qk_norm: bool = False
    causal: bool = True
    image: tuple[int, int, int] | None = None
    patch: int = 4
    attention: str = "softmax"

    @property
    def is_llama(self) -> bool:
        plain = self.attention == "softmax" and self.image is None
        return plain and self.causal and self.positions == "rotary" and self.mlp == "swiglu"

    def config(self) -> Config:
        """What transformers and `locater scan` read."""
        kind = "qwen3" if self.qk_norm else "llama"
        held = Config(
            model_type=kind if self.is_llama else MODEL_TYPE, vocab_size=self.vocabulary, num_hidden_layers=self.layers,
            hidden_size=self.width, num_attention_heads=self.heads, num_key_value_heads=self.kv_heads, head_dim=self.width // self.heads,
            intermediate_size=self.hidden, max_position_embeddings=self.length, hidden_act="silu" if self.mlp == "swiglu" else "gelu",
            rms_norm_eps=EPS, rope_parameters={"rope_type": "default", "rope_theta": THETA}, attention_bias=False, mlp_bias=False,
            tie_word_embeddings=True, bos_token_id=None, eos_token_id=None, pad_token_id=None, dtype="float32",
        )  # fmt: skip
        if self.is_llama:
            return Config(held, architectures=["Qwen3ForCausalLM" if self.qk_norm else "LlamaForCausalLM"])
        return Config(
            held, qk_norm=self.qk_norm, positions=self.positions, mlp=self.mlp, is_causal=self.causal,
            image=None if self.image is None else list(self.image), patch=self.patch, attention=self.attention,
        )  # fmt: skip

    @classmethod
    def of(cls, config: dict[str, Any]) -> Shape:
        """The shape that `config()` wrote down."""
        names = dict(
            vocabulary="vocab_size", layers="num_hidden_layers", width="hidden_size", heads="num_attention_heads",
            kv_heads="num_key_value_heads", hidden="intermediate_size", length="max_position_embeddings",
        )  # fmt: skip
        found: dict[str, Any] = {ours: config[theirs] for ours, theirs in names.items()}
        found["qk_norm"] = config["model_type"] == "qwen3" or config.get("qk_norm", False)
        if config["model_type"] == MODEL_TYPE:
            image = config["image"]
            found |= dict(positions=config["positions"], mlp=config["mlp"], causal=config["is_causal"], patch=config["patch"])
            found["image"] = None if image is None else tuple(image)
            found["attention"] = config.get("attention", "softmax")
        return cls(**found)


def fused(
    module: nn.Module, q: Tensor, k: Tensor, v: Tensor, mask: Any, *, scaling: float, is_causal: bool, mechanism: str | None = None
) -> tuple[Tensor, None]:
    """PyTorch's attention, or the mechanism of that name at its own scale, called as transformers calls attention functions."""
    if mechanism is not None:
        return attended(mechanism, q, k, v, is_causal).transpose(1, 2), None
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def attended(name: str, q: Tensor, k: Tensor, v: Tensor, causal: bool) -> Tensor:
    """The mechanism called `name`, which chooses its own precision."""
    with torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext():
        return mechanism(name)(q, k, v, causal=causal).to(v.dtype)


# Named as the table of transformers is: `observe` and `Monitor` listen to what is called from it, and some controls act there.
ALL_ATTENTION_FUNCTIONS = {"sdpa": _listener("sdpa", fused)}


class Attention(nn.Module):
    """Grouped attention by PyTorch's fused function, or by another mechanism."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.size, self.causal, self.attention = shape.width // shape.heads, shape.causal, shape.attention
        self.num_key_value_groups = shape.heads // shape.kv_heads  # asked for by attention functions
        self.q_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * self.size, bias=False)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=False)
        self.q_norm = nn.RMSNorm(self.size, EPS) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(self.size, EPS) if shape.qk_norm else None

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = (m(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for m in (self.q_proj, self.k_proj, self.v_proj))  # (B, H, T, h)
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if turn is not None:
            q, k = rotate(q, *turn), rotate(k, *turn)
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        other = {} if self.attention == "softmax" else {"mechanism": self.attention}
        mixed, _ = attend(self, q, k, v, None, scaling=self.size**-0.5, is_causal=self.causal, **other)  # (B, T, H, h)
        return self.o_proj(mixed.flatten(2))


class MLP(nn.Module):
    """SwiGLU, or GELU without the gate."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False) if shape.mlp == "swiglu" else None
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=False)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        return self.down_proj(functional.gelu(up) if self.gate_proj is None else functional.silu(self.gate_proj(x)) * up)


class Block(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = nn.RMSNorm(shape.width, EPS), nn.RMSNorm(shape.width, EPS)
        self.self_attn, self.mlp = Attention(shape), MLP(shape)

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), turn)
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    """From token ids (B, T) or images (B, height, width, channels) to a normalized stream (B, T, d)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape, length = shape, shape.length
        if shape.image is None:
            self.embed_tokens: nn.Module = nn.Embedding(shape.vocabulary, shape.width)
        else:
            self.embed_tokens = nn.Linear(shape.patch**2 * shape.image[2], shape.width, bias=False)
        if shape.positions == "learned":
            self.embed_positions = nn.Embedding(length, shape.width)
        else:
            size = shape.width // shape.heads
            angle = torch.arange(length)[:, None] * (1.0 / THETA ** (torch.arange(0, size, 2).float() / size))  # (T, h/2)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)
        self.layers = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.RMSNorm(shape.width, EPS)

    def forward(self, inputs: Tensor) -> Tensor:
        x = self.embed_tokens(inputs if self.shape.image is None else patches(inputs, self.shape.patch, self.norm.weight.dtype))
        turn, length = None, x.shape[1]
        if self.shape.positions == "learned":
            x = x + self.embed_positions.weight[:length]
        else:
            turn = (self.cos[:length], self.sin[:length])
        for layer in self.layers:
            x = layer(x, turn)
        return self.norm(x)


class Transformer(nn.Module):
    """The model. `model(ids)` gives logits, `model(ids, targets)` the mean loss over targets that are not -100.

    >>> _ = torch.manual_seed(0)
    >>> Transformer(Shape(width=16, layers=1, hidden=24))(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 256])
    """

    def __init__(self, shape: Shape, scale: float = 0.02) -> None:
        super().__init__()
        self.shape, self.config = shape, shape.config()
        self.model = Stack(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.ndim > 1:  # what is added to the stream starts smaller, so that its size does not grow with depth
                nn.init.normal_(p, std=scale / (2 * shape.layers) ** 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else scale)
        if isinstance(self.model.embed_tokens, nn.Embedding):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, inputs: Tensor, targets: Tensor | None = None) -> Tensor:
        x = self.model(inputs)
        logits = self.lm_head(x if self.shape.image is None else x.mean(1))
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + h/2) by each position's angle."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def patches(images: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """(B, height, width, channels) in 0..255 to (B, patches, size * size * channels) around 0."""
    B, height, width, channels = images.shape
    x = images.to(dtype).view(B, height // size, size, width // size, size, channels).transpose(2, 3)
    return x.reshape(B, -1, size * size * channels) / 127.5 - 1.0


@dataclass(frozen=True)
class OtherAttention(AttentionLayer):
    """A layer whose weights are those of another mechanism than softmax."""

    mechanism: str = "softmax"

    def attention(self, x: Tensor, x_k: Tensor | None = None, *, padding: Tensor | None = None, normalized: bool = False) -> Tensor:
        """Weights as they act, whatever they sum to."""
        q, k = self.queries(x, normalized=normalized), self.keys(x if x_k is None else x_k, normalized=normalized)
        return mechanism(self.mechanism).map(q, k, causal=self.causal, padding=padding)


def layers(weights: Weights, config: dict[str, Any]) -> Iterator[AttentionLayer]:
    """Attention of the type `locater`, for `locater.attention_layers`."""
    attention = config.get("attention", "softmax")
    for layer in decoder_layers(weights, config):
        placed = replace(layer, causal=config["is_causal"], rotary=layer.rotary if config["positions"] == "rotary" else None)
        if attention == "softcap":
            placed = replace(placed, softcap=DEFAULT_CAP)
        elif attention == "softmax_plus_one":
            placed = replace(placed, sinks=torch.zeros(placed.heads))
        elif attention != "softmax":
            placed = OtherAttention(**{item.name: getattr(placed, item.name) for item in fields(placed)}, mechanism=attention)
        if not config.get("qk_norm"):
            yield placed
            continue
        query, key = (norm(weights, f"{layer.name}.{kind}_norm", "rms", EPS) for kind in "qk")
        yield replace(placed, query_norm=query, key_norm=key)


register(MODEL_TYPE, layers)
