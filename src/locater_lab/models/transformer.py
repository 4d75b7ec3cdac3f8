"""One set of blocks for a causal language model, a masked one, classifiers of text and images, and denoisers of images.

Names and numbers are those of Llama. A causal model with rotary positions and SwiGLU is saved as a Llama, with QK-norm
as a Qwen3, and transformers loads it. All others have the model type `locater`; with other norms, without MLPs or with
fused layers `locater_variant`, whose blocks surgery and path sums do not know.

Axes in comments: B sequences, T tokens, d channels, H heads.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import nullcontext
from functools import lru_cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from locater.calls.attention_interface import listening_function
from locater.calls.call_and_masks import OtherAttention
from locater.errors import LocaterError, first_line
from locater.sources.open_source import open_source
from locater_lab.mechanisms.fusion import Fusion, layer_fusion
from locater_lab.mechanisms.registry import mechanism, other_attention
from locater_lab.mechanisms.softmax import DEFAULT_CAP
from locater_lab.models.family import EPS
from locater_lab.models.noise_and_patches import NoiseLevel, to_patches
from locater_lab.models.shape import THETA, Shape

# The product of the stream with the output embedding, at a width that matrix units like.


ALIGNED = 64  # columns; rows of bfloat16 then begin at multiples of 128 bytes


def vocabulary_logits(x: Tensor, weight: Tensor, aligned: int = ALIGNED) -> Tensor:
    """x Wᵀ (..., V), computed with rows of zeros below W up to a multiple of `aligned` and cut to V again.

    A vocabulary of words has any size, 32,543 say. Rows of logits that begin at odd addresses take the slow kernels of
    a GPU, forward and backward.

    >>> import torch
    >>> vocabulary_logits(torch.ones(1, 2), torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]]))
    tensor([[ 3.,  7., 11.]])
    """
    words = weight.shape[0]
    missing = -words % aligned
    if not missing:
        return functional.linear(x, weight)
    return functional.linear(x, functional.pad(weight, (0, 0, 0, missing)))[..., :words]


class Unembedding(nn.Linear):
    """From the stream to logits of words; a linear map that pads its product on a GPU."""

    def forward(self, input: Tensor) -> Tensor:
        return vocabulary_logits(input, self.weight) if input.is_cuda else super().forward(input)


def fused_attention(
    module: nn.Module,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Any,
    *,
    scaling: float,
    is_causal: bool,
    mechanism: OtherAttention | None = None,
    stream: Tensor | None = None,
    s_aux: Tensor | None = None,
    weights: Any = None,
) -> tuple[Tensor, None]:
    """PyTorch's attention, or the module's own mechanism at its own scale; called like an attention function of
    transformers.
    """
    if mechanism is not None:
        return attend_by_mechanism(module, q, k, v, stream, is_causal).transpose(1, 2), None
    grouped = q.shape[1] != k.shape[1]
    out = functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, scale=scaling, enable_gqa=grouped)
    return out.transpose(1, 2), None


def attend_by_mechanism(module: Any, q: Tensor, k: Tensor, v: Tensor, x: Tensor | None, causal: bool) -> Tensor:
    """Attention by the module's mechanism, which chooses its own precision. Gates are computed from x."""
    with torch.autocast(q.device.type, enabled=False) if torch.is_autocast_enabled(q.device.type) else nullcontext():
        if module.mechanism is None:
            return mechanism(module.attention)(q, k, v, causal=causal).to(v.dtype)
        stream = None if x is None else x.to(module.q_proj.weight.dtype)
        out: Tensor = module.mechanism(q, k, v, stream, causal=causal)
        return out.to(v.dtype)


def attention_weights(
    module: Any, x: Tensor | None, causal: bool, q: Tensor, k: Tensor, heads: Tensor | None
) -> Tensor:
    """The map (B, H, T, S) by which `attend_by_mechanism` weighs values, of all query heads or of some."""
    if module.mechanism is not None:
        stream = None if x is None else x.to(module.q_proj.weight.dtype)
        maps: Tensor = module.mechanism.map(q, k, stream, causal=causal)
        return maps if heads is None else maps[:, heads]
    if heads is not None:
        q, k = q[:, heads], k[:, heads // module.num_key_value_groups]
    return mechanism(module.attention).map(q, k, causal=causal)


# The name of the table of attention functions in transformers: `observe`, `Monitor` and some controls act on calls that
# go through a table of this name.
ALL_ATTENTION_FUNCTIONS = {"sdpa": listening_function("sdpa", fused_attention)}


class Attention(nn.Module):
    """Grouped attention by PyTorch's fused function, or by another mechanism, which may have parameters of its own."""

    def __init__(self, shape: Shape, depth: int = 0) -> None:
        super().__init__()
        named = shape.by_layer[depth]
        self.size, self.causal, self.attention = shape.width // shape.heads, shape.causal, named.name
        self.num_key_value_groups = shape.heads // shape.kv_heads  # attention functions of transformers read it
        self.q_proj = nn.Linear(shape.width, shape.width, bias=shape.is_fairseq)
        self.k_proj = nn.Linear(shape.width, shape.kv_heads * self.size, bias=shape.is_fairseq)
        self.v_proj = nn.Linear(shape.width, shape.kv_heads * self.size, bias=shape.is_fairseq)
        self.o_proj = nn.Linear(shape.width, shape.width, bias=shape.is_fairseq)
        self.q_norm = nn.RMSNorm(self.size, EPS) if shape.qk_norm else None
        self.k_norm = nn.RMSNorm(self.size, EPS) if shape.qk_norm else None
        self.mechanism = None if named.is_bare else named.module(**shape.sizes(), depth=depth)
        self.other = other_attention(named.name, named.settings.get("cap", DEFAULT_CAP))

    def operands(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> tuple[Tensor, Tensor, Tensor]:
        """q, k, v (B, H, T, h), after norms and rotation."""
        q, k, v = (m(x).unflatten(-1, (-1, self.size)).transpose(1, 2) for m in (self.q_proj, self.k_proj, self.v_proj))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q).to(v.dtype), self.k_norm(k).to(v.dtype)
        if turn is not None:
            rotation = rotate_halves if self.attention == "differential" else rotate
            q, k = rotation(q, *turn), rotation(k, *turn)
        return q, k, v

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        q, k, v = self.operands(x, turn)
        attend = ALL_ATTENTION_FUNCTIONS["sdpa"]
        other: dict[str, Any] = {}
        if self.attention != "softmax":
            stream = None if self.mechanism is None else x
            other = {"mechanism": self.other, "stream": stream}
            other["weights"] = partial(attention_weights, self, stream, self.causal)
        if self.attention == "learned_sink":
            other["s_aux"] = self.mechanism.sinks  # type: ignore[union-attr]
        mixed, _ = attend(self, q, k, v, None, scaling=self.size**-0.5, is_causal=self.causal, **other)  # (B, T, H, h)
        return self.o_proj(mixed.flatten(2))


BENDS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": functional.gelu, "relu": functional.relu}


class MLP(nn.Module):
    """SwiGLU, GELU or ReLU without a gate, or two linear maps with nothing between."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.bend = BENDS.get(shape.mlp)
        self.gate_proj = nn.Linear(shape.width, shape.hidden, bias=False) if shape.mlp == "swiglu" else None
        self.up_proj = nn.Linear(shape.width, shape.hidden, bias=shape.is_fairseq)
        self.down_proj = nn.Linear(shape.hidden, shape.width, bias=shape.is_fairseq)

    def forward(self, x: Tensor) -> Tensor:
        up = self.up_proj(x)
        if self.gate_proj is not None:
            up = functional.silu(self.gate_proj(x)) * up
        elif self.bend is not None:
            up = self.bend(up)
        return self.down_proj(up)


def norm_of(shape: Shape) -> nn.Module:
    return nn.LayerNorm(shape.width, EPS) if shape.is_fairseq else nn.RMSNorm(shape.width, EPS)


class TransformerBlock(nn.Module):
    """Attention and MLP: x + f(norm(x)) with norm="pre", x + norm(f(norm(x))) with "sandwich", norm(x + f(x)) with
    "post", x + f(x) with "none".
    """

    def __init__(self, shape: Shape, depth: int = 0, dropout: float = 0.0) -> None:
        super().__init__()
        self.dropout = dropout

        def norm_if(present: bool) -> nn.Module | None:
            return norm_of(shape) if present else None

        before, after, mlp = shape.norm in ("pre", "sandwich"), shape.norm in ("sandwich", "post"), shape.mlp != "none"
        self.input_layernorm, self.post_attention_layernorm = norm_if(before), norm_if(before and mlp)
        self.attention_out_norm, self.mlp_out_norm = norm_if(after), norm_if(after and mlp)
        self.around = shape.norm == "post"  # whether a norm after a branch is of the sum with the skip
        self.self_attn = Attention(shape, depth)
        self.mlp = MLP(shape) if mlp else None

    def forward(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        return self.after_mlp(self.after_attention(x, turn))

    def read(self, x: Tensor) -> Tensor:
        """The normalized stream, which attention reads."""
        return _normalize(self.input_layernorm, x)

    def after_attention(self, x: Tensor, turn: tuple[Tensor, Tensor] | None) -> Tensor:
        return self._add_branch(x, self.self_attn(self.read(x), turn), self.attention_out_norm)

    def after_mlp(self, x: Tensor) -> Tensor:
        if self.mlp is None:
            return x
        return self._add_branch(x, self.mlp(_normalize(self.post_attention_layernorm, x)), self.mlp_out_norm)

    def _add_branch(self, x: Tensor, y: Tensor, norm: nn.Module | None) -> Tensor:
        y = _apply_dropout(self, y)
        return _normalize(norm, x + y) if self.around else x + _normalize(norm, y)


def _normalize(norm: nn.Module | None, x: Tensor) -> Tensor:
    return x if norm is None else norm(x)


def _apply_dropout(module: TransformerBlock | TransformerStack, x: Tensor) -> Tensor:
    """Dropout while the module trains; without it no random number is drawn."""
    return functional.dropout(x, module.dropout) if module.dropout and module.training else x


class TransformerStack(nn.Module):
    """From token ids (B, T) or images (B, height, width, channels) to a normalized stream (B, T, d).

    Images with noise have a plane more, their noise level (`models.noise_and_patches`).
    """

    cos: Tensor
    sin: Tensor
    waves: Tensor

    def __init__(self, shape: Shape, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.dropout, length = shape, dropout, shape.length
        if shape.image is None:
            self.embed_tokens: nn.Module = nn.Embedding(shape.vocabulary, shape.width)
        else:
            self.embed_tokens = nn.Linear(shape.patch**2 * shape.image[2], shape.width, bias=False)
        self.embed_level = NoiseLevel(shape.width) if shape.denoises else None
        if shape.positions == "learned":
            self.embed_positions = nn.Embedding(length, shape.width)
        elif shape.positions == "sinusoidal":
            angle = position_angles(length, shape.width)
            self.register_buffer("waves", torch.cat([angle.sin(), angle.cos()], -1), persistent=False)
        elif shape.positions == "rotary":
            angle = position_angles(length, shape.width // shape.heads)
            self.register_buffer("cos", angle.cos(), persistent=False)
            self.register_buffer("sin", angle.sin(), persistent=False)
        self.layers = nn.ModuleList(TransformerBlock(shape, depth, dropout) for depth in range(shape.layers))
        kind = cast("Fusion", shape.fusion)
        self.fusion = None if kind is None else layer_fusion(kind, shape.layers, shape.width)
        self.norm = norm_of(shape) if shape.has_last_norm else nn.Identity()

    def embed(self, inputs: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor] | None]:
        """The stream before the first block, and the cosines and sines by which queries and keys are rotated."""
        levels, dtype = None, next(self.embed_tokens.parameters()).dtype
        if self.embed_level is not None:
            levels, noisy = inputs[:, 0, 0, -1], inputs[..., :-1]
            inputs = to_patches(noisy, self.shape.patch).to(dtype)
        elif self.shape.image is not None:
            inputs = patches(inputs, self.shape.patch, dtype)
        x = self.embed_tokens(inputs)
        if self.embed_level is not None:
            x = x + self.embed_level(levels)
        length = x.shape[1]
        if self.shape.positions == "learned":
            return _apply_dropout(self, x + self.embed_positions.weight[:length]), None
        if self.shape.positions == "sinusoidal":
            return _apply_dropout(self, x * self.shape.width**0.5 + self.waves[:length].to(x.dtype)), None
        turn = (self.cos[:length], self.sin[:length]) if self.shape.positions == "rotary" else None
        return _apply_dropout(self, x), turn

    def forward(self, inputs: Tensor) -> Tensor:
        x, turn = self.embed(inputs)
        states = []
        for layer in self.layers:
            x = layer(x, turn)
            states.append(x)
        return self.norm(x if self.fusion is None else self.fusion(states))


class Transformer(nn.Module):
    """The model. `model(ids)` gives logits, `model(ids, targets)` the mean loss over targets that are not -100.

    A denoiser gives the velocity of each patch (B, T, numbers), and with targets their mean squared error.

    >>> _ = torch.manual_seed(0)
    >>> Transformer(Shape(width=16, layers=1, hidden=24))(torch.zeros(1, 5, dtype=torch.long)).shape
    torch.Size([1, 5, 256])
    """

    def __init__(self, shape: Shape, scale: float = 0.02, dropout: float = 0.0) -> None:
        super().__init__()
        self.shape, self.config = shape, shape.config()
        self.model = TransformerStack(shape, dropout)
        self.lm_head = Unembedding(shape.width, shape.classes or shape.vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.ndim > 1 and ".mechanism." not in name and ".fusion." not in name:
                _draw_map(name, p, scale, shape)
        if shape.is_fairseq:
            for name, p in self.named_parameters():
                if name.endswith(("o_proj.bias", "up_proj.bias", "down_proj.bias")):
                    nn.init.zeros_(p)
        if shape.is_tied and isinstance(self.model.embed_tokens, nn.Embedding):
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(
        self,
        inputs: Tensor | None = None,
        targets: Tensor | None = None,
        *,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
    ) -> Tensor:
        """`input_ids` is another name for `inputs`, and a mask of ones is accepted, so batches made for models of
        transformers work.
        """
        inputs = input_ids if inputs is None else inputs
        if inputs is None or (attention_mask is not None and not bool(attention_mask.all())):
            raise LocaterError("this model takes inputs of one length, token ids or images, and no padding")
        x = self.model(inputs)
        logits = self.lm_head(x.mean(1) if self.shape.is_classifier else x)
        if targets is None:
            return logits
        if self.shape.denoises:
            return functional.mse_loss(logits.float(), targets)
        return functional.cross_entropy(logits.flatten(0, -2).float(), targets.flatten())


def _draw_map(name: str, p: Tensor, scale: float, shape: Shape) -> None:
    """First weights. Ours are normal, and maps whose output is added to the stream start smaller, so that its size does
    not grow with depth. In fairseq embeddings alone are normal; queries, keys and values are uniform with a gain of
    1/sqrt 2 (Xavier), their biases as of any linear map, other maps with a gain of 1.
    """
    if not shape.is_fairseq or "embed_" in name:
        adds = name.endswith(("o_proj.weight", "down_proj.weight"))
        nn.init.normal_(p, std=scale / (2 * shape.layers) ** 0.5 if adds else scale)
        return
    read = name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight"))
    nn.init.xavier_uniform_(p, gain=2**-0.5 if read else 1.0)


def position_angles(length: int, size: int) -> Tensor:
    """(T, size / 2): position times a frequency for every pair of channels, from 1 down to nearly 1 / THETA."""
    return torch.arange(length)[:, None] * (1.0 / THETA ** (torch.arange(0, size, 2).float() / size))


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the channel pairs (i, i + h/2) by each position's angle."""
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def rotate_halves(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`rotate` within each half of the channels, for heads whose halves have attention maps of their own.

    Every other angle is that of a head half the size.
    """
    return torch.cat([rotate(half, cos[..., ::2], sin[..., ::2]) for half in x.chunk(2, -1)], -1)


def patches(images: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    """(B, height, width, channels) in 0..255 to (B, patches, size * size * channels) around 0."""
    return to_patches(images.to(dtype), size) / 127.5 - 1.0


def load(folder: str | os.PathLike[str]) -> Transformer:
    """The model in a folder that `locater train` wrote, in evaluation mode."""
    weights, config = open_source(Path(folder))
    try:
        model = Transformer(Shape.of(config))
        model.load_state_dict({name: weights.read(name) for name in names_of(model)}, strict=False)
    except (KeyError, TypeError, RuntimeError) as error:
        raise LocaterError(f"{folder}: not a model that locater train saved ({first_line(error)})") from None
    return model.eval()


def names_of(model: Transformer) -> list[str]:
    """Names of the model's tensors without those of controls. The output map of text models is left out: it is the
    embedding.
    """
    return list(_names_of_shape(model.shape))


@lru_cache(maxsize=64)  # a run asks for them at every checkpoint
def _names_of_shape(shape: Shape) -> tuple[str, ...]:
    with torch.device("meta"):
        plain = Transformer(shape)
    return tuple(name for name in plain.state_dict() if name != "lm_head.weight" or not shape.is_tied)
