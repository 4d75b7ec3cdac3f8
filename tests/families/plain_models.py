"""Attention in plain PyTorch, as people write it: by hand, in the shape of timm's blocks and of diffusion models.

Widths: `WIDTH` in `HEADS` heads. Each model is small, and takes `x` (B, T, WIDTH) unless it says otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

WIDTH, HEADS = 32, 4
SIZE = WIDTH // HEADS


def noise(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def future(length: int) -> Tensor:
    """True where a causal mask hides: (T, T)."""
    return torch.ones(length, length, dtype=torch.bool).triu(1)


def split(x: Tensor, heads: int = HEADS) -> Tensor:
    """(B, T, d) to (B, H, T, h)."""
    return x.unflatten(-1, (heads, -1)).transpose(1, 2)


def joined(x: Tensor) -> Tensor:
    """(B, H, T, h) to (B, T, d)."""
    return x.transpose(1, 2).flatten(2)


class Maps(nn.Module):
    """Four maps and one of the ways to attend."""

    def __init__(self, attend: Callable[[Tensor, Tensor, Tensor], Tensor], kv_heads: int = HEADS) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            nn.Linear(WIDTH, WIDTH),
            nn.Linear(WIDTH, kv_heads * SIZE),
            nn.Linear(WIDTH, kv_heads * SIZE),
        )
        self.proj = nn.Linear(WIDTH, WIDTH)
        self.attend = attend

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.attend(self.q(x), self.k(x), self.v(x)))


class Residual(nn.Module):
    """x + attention(norm(x))."""

    def __init__(self, attention: nn.Module, norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.attention = norm or nn.LayerNorm(WIDTH), attention

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attention(self.norm(x))


# ---- ways to attend: queries, keys and values (B, T, d) to mixed values (B, T, d)


def one_head(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return torch.softmax(q @ k.transpose(-2, -1) / WIDTH**0.5, dim=-1) @ v


def many_heads(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(split, (q, k, v))
    return joined(functional.softmax(q @ k.mT * SIZE**-0.5, -1) @ v)


def by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = (x.unflatten(-1, (HEADS, SIZE)) for x in (q, k, v))
    weights = torch.einsum("bqhd,bkhd->bhqk", q, k).mul(SIZE**-0.5).softmax(dim=-1)
    return torch.einsum("bhqk,bkhd->bqhd", weights, v).flatten(2)


def one_head_by_einsum(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    weights = (torch.einsum("bid,bjd->bij", q, k) / WIDTH**0.5).softmax(-1)
    return torch.einsum("bij,bjd->bid", weights, v)


def by_baddbmm(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Batch and heads on one axis, as in a UNet without fused attention."""
    q, k, v = (split(x).flatten(0, 1) for x in (q, k, v))
    empty = torch.empty(q.shape[0], q.shape[1], k.shape[1], dtype=q.dtype)
    weights = torch.baddbmm(empty, q, k.transpose(-1, -2), beta=0, alpha=SIZE**-0.5).softmax(-1)
    return joined(torch.bmm(weights, v).unflatten(0, (-1, HEADS)))


def masked_by_fill(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(split, (q, k, v))
    scores = (q * SIZE**-0.5) @ k.mT
    return joined(scores.masked_fill(future(q.shape[2]), float("-inf")).softmax(-1) @ v)


def masked_by_addition(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = map(split, (q, k, v))
    mask = torch.full((q.shape[2], q.shape[2]), float("-inf"), dtype=q.dtype).triu(1)
    return joined((q @ k.mT / SIZE**0.5 + mask).softmax(-1) @ v)


def grouped_by_repeat(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = split(q), split(k, 2).repeat_interleave(2, 1), split(v, 2).repeat_interleave(2, 1)
    return joined(functional.scaled_dot_product_attention(q, k, v, is_causal=True))


def grouped_by_expand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k, v = split(q), split(k, 2), split(v, 2)
    k, v = (x[:, :, None].expand(-1, -1, 2, -1, -1).flatten(1, 2) for x in (k, v))
    return joined((q @ k.mT / SIZE**0.5).softmax(-1) @ v)


def grouped_by_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return joined(functional.scaled_dot_product_attention(split(q), split(k, 2), split(v, 2), enable_gqa=True))


class Several(nn.Module):
    """nn.MultiheadAttention inside a module of one's own, beside attention written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.mha = nn.LayerNorm(WIDTH), nn.MultiheadAttention(WIDTH, HEADS, batch_first=True)
        self.own = Residual(Maps(many_heads))

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        return self.own(x + self.mha(y, y, y, need_weights=False)[0])


# ---- the shape of timm's blocks


class FusedQKV(nn.Module):
    """One map for queries, keys and values, norms of queries and keys, a scale."""

    def __init__(self, qk_norm: bool = True) -> None:
        super().__init__()
        self.num_heads, self.head_dim, self.scale = HEADS, SIZE, SIZE**-0.5
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.q_norm = nn.LayerNorm(SIZE) if qk_norm else nn.Identity()
        self.k_norm = nn.LayerNorm(SIZE) if qk_norm else nn.Identity()
        self.attn_drop, self.proj_drop = nn.Dropout(0.1), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, self.head_dim).permute(2, 0, 3, 1, 4).unbind(0)
        q, k = self.q_norm(q), self.k_norm(k)
        weights = self.attn_drop(((q * self.scale) @ k.transpose(-2, -1)).softmax(dim=-1))
        return self.proj_drop(self.proj((weights @ v).transpose(1, 2).reshape(B, N, C)))


class WindowAttention(nn.Module):
    """As in Swin: windows of WINDOW x WINDOW tokens as the batch, and a learned bias for each distance in a window."""

    WINDOW = 2

    def __init__(self) -> None:
        super().__init__()
        side = self.WINDOW
        self.num_heads, self.scale = HEADS, SIZE**-0.5
        self.relative_position_bias_table = nn.Parameter(torch.zeros((2 * side - 1) ** 2, HEADS))
        at = torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij")).flatten(1)
        apart = at[:, :, None] - at[:, None, :] + side - 1
        self.register_buffer("relative_position_index", apart[0] * (2 * side - 1) + apart[1], persistent=False)
        self.qkv, self.proj = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        B, N, C = x.shape
        q, k, v = self.qkv(x).reshape(B, N, 3, self.num_heads, C // self.num_heads).permute(2, 0, 3, 1, 4).unbind(0)
        bias = self.relative_position_bias_table[self.relative_position_index.view(-1)].view(N, N, -1)
        logits = (q * self.scale) @ k.transpose(-2, -1) + bias.permute(2, 0, 1).contiguous().unsqueeze(0)
        return self.proj((logits.softmax(-1) @ v).transpose(1, 2).reshape(B, N, C))


class SwinBlock(nn.Module):
    """x (B, H, W, C): a picture cut into windows, attention inside each, and back."""

    def __init__(self, shift: int = 0) -> None:
        super().__init__()
        self.norm1, self.attn, self.shift = nn.LayerNorm(WIDTH), WindowAttention(), shift

    def forward(self, x: Tensor) -> Tensor:
        B, H, W, C = x.shape
        w = WindowAttention.WINDOW
        y = torch.roll(self.norm1(x), (-self.shift, -self.shift), (1, 2))
        windows = y.view(B, H // w, w, W // w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(-1, w * w, C)
        y = self.attn(windows).view(B, H // w, W // w, w, w, C).permute(0, 1, 3, 2, 4, 5).reshape(B, H, W, C)
        return x + torch.roll(y, (self.shift, self.shift), (1, 2))


# ---- the shape of diffusion models, with the names that their checkpoints have


class Attention(nn.Module):
    """to_q, to_k, to_v, to_out.0; over a text where one is given."""

    def __init__(self, context: int = WIDTH, bias: bool = False, fused: bool = True) -> None:
        super().__init__()
        self.heads, self.scale, self.fused = HEADS, SIZE**-0.5, fused
        self.to_q, self.to_k = nn.Linear(WIDTH, WIDTH, bias=bias), nn.Linear(context, WIDTH, bias=bias)
        self.to_v = nn.Linear(context, WIDTH, bias=bias)
        self.to_out = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)])

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor | None = None) -> Tensor:
        text = hidden_states if encoder_hidden_states is None else encoder_hidden_states
        q, k, v = split(self.to_q(hidden_states)), split(self.to_k(text)), split(self.to_v(text))
        if self.fused:
            mixed = functional.scaled_dot_product_attention(q, k, v, attn_mask=None, dropout_p=0.0, is_causal=False)
        else:
            mixed = (q @ k.transpose(-1, -2) * self.scale).softmax(-1) @ v
        return self.to_out[1](self.to_out[0](joined(mixed)))


class FeedForward(nn.Module):
    """A gated MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(2 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x, gate = self.up(x).chunk(2, -1)
        return self.down(x * functional.gelu(gate))


class AdaLayerNormZero(nn.Module):
    """Shift, scale and gates from an embedding of the time; at the start they are 0."""

    def __init__(self) -> None:
        super().__init__()
        self.silu, self.linear = nn.SiLU(), nn.Linear(WIDTH, 6 * WIDTH)
        self.norm = nn.LayerNorm(WIDTH, elementwise_affine=False, eps=1e-6)

    def forward(self, x: Tensor, emb: Tensor) -> tuple[Tensor, ...]:
        shift, scale, *rest = self.linear(self.silu(emb)).chunk(6, dim=1)
        return self.norm(x) * (1 + scale[:, None]) + shift[:, None], *rest


class DiTBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn1 = AdaLayerNormZero(), Attention(bias=True)
        self.norm3, self.ff = nn.LayerNorm(WIDTH, 1e-6, elementwise_affine=False), FeedForward()

    def forward(self, x: Tensor, emb: Tensor) -> Tensor:
        y, gate, shift, scale, gate_mlp = self.norm1(x, emb)
        x = x + gate[:, None] * self.attn1(y)
        y = self.norm3(x) * (1 + scale[:, None]) + shift[:, None]
        return x + gate_mlp[:, None] * self.ff(y)


class DiT(nn.Module):
    """Patches of a noisy picture, a time and a class: hidden_states (B, 4, 8, 12), timestep (B,), class_labels (B,)."""

    def __init__(self, blocks: int = 2) -> None:
        super().__init__()
        self.patch, self.position = nn.Conv2d(4, WIDTH, 2, 2), nn.Parameter(0.02 * noise(1, 24, WIDTH))
        self.time, self.labels = nn.Sequential(nn.Linear(16, WIDTH), nn.SiLU()), nn.Embedding(10, WIDTH)
        self.transformer_blocks = nn.ModuleList([DiTBlock() for _ in range(blocks)])
        self.proj_out = nn.Linear(WIDTH, 16)

    def forward(self, hidden_states: Tensor, timestep: Tensor, class_labels: Tensor) -> Tensor:
        x = self.patch(hidden_states).flatten(2).transpose(1, 2)
        waves = timestep[:, None] * torch.exp(-torch.arange(8, device=x.device)).to(x)
        emb = self.time(torch.cat([waves.cos(), waves.sin()], -1)) + self.labels(class_labels)
        x = x + self.position
        for block in self.transformer_blocks:
            x = block(x, emb)
        return self.proj_out(x)


class BasicTransformerBlock(nn.Module):
    """Of a UNet: attention over the picture, attention over a text of width 24, an MLP."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn1 = nn.LayerNorm(WIDTH), Attention()
        self.norm2, self.attn2 = nn.LayerNorm(WIDTH), Attention(context=24)
        self.norm3, self.ff = nn.LayerNorm(WIDTH), FeedForward()

    def forward(self, x: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        x = x + self.attn1(self.norm1(x))
        x = x + self.attn2(self.norm2(x), encoder_hidden_states)
        return x + self.ff(self.norm3(x))


class UNetLevel(nn.Module):
    """A block over the pixels of one level: sample (B, WIDTH, H, W)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.proj_in, self.proj_out = (
            nn.GroupNorm(4, WIDTH),
            nn.Conv2d(WIDTH, WIDTH, 1),
            nn.Conv2d(WIDTH, WIDTH, 1),
        )
        self.transformer_blocks = nn.ModuleList([BasicTransformerBlock()])

    def forward(self, sample: Tensor, encoder_hidden_states: Tensor) -> Tensor:
        B, C, H, W = sample.shape
        x = self.proj_in(self.norm(sample)).permute(0, 2, 3, 1).reshape(B, H * W, C)
        for block in self.transformer_blocks:
            x = block(x, encoder_hidden_states)
        return sample + self.proj_out(x.reshape(B, H, W, C).permute(0, 3, 1, 2))


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """Neighbouring channels of x (B, H, T, h) turned by angles (T, h / 2)."""
    a, b = x[..., ::2], x[..., 1::2]
    cos, sin = angles.cos().to(x), angles.sin().to(x)
    return torch.stack([a * cos - b * sin, a * sin + b * cos], -1).flatten(-2)


class JointAttention(nn.Module):
    """Two streams with maps of their own attend together; queries and keys are normalised and turned."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = HEADS
        for name in ("to_q", "to_k", "to_v", "add_q_proj", "add_k_proj", "add_v_proj"):
            setattr(self, name, nn.Linear(WIDTH, WIDTH))
        for name in ("norm_q", "norm_k", "norm_added_q", "norm_added_k"):
            setattr(self, name, nn.RMSNorm(SIZE, eps=1e-6))
        self.to_out, self.to_add_out = (
            nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Dropout(0.0)]),
            nn.Linear(WIDTH, WIDTH),
        )

    def forward(self, x: Tensor, text: Tensor, angles: Tensor) -> tuple[Tensor, Tensor]:
        q, k, v = split(self.to_q(x)), split(self.to_k(x)), split(self.to_v(x))
        tq, tk, tv = split(self.add_q_proj(text)), split(self.add_k_proj(text)), split(self.add_v_proj(text))
        q = torch.cat([self.norm_added_q(tq), self.norm_q(q)], 2)
        k = torch.cat([self.norm_added_k(tk), self.norm_k(k)], 2)
        mixed = joined(
            functional.scaled_dot_product_attention(turned(q, angles), turned(k, angles), torch.cat([tv, v], 2))
        )
        text, x = mixed.split([text.shape[1], x.shape[1]], 1)
        return self.to_out[1](self.to_out[0](x)), self.to_add_out(text)


class JointBlock(nn.Module):
    """hidden_states (B, T, d) and encoder_hidden_states (B, S, d)."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm1_context, self.attn = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH), JointAttention()

    def forward(self, hidden_states: Tensor, encoder_hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        length = hidden_states.shape[1] + encoder_hidden_states.shape[1]
        angles = torch.arange(length)[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
        x, text = self.attn(self.norm1(hidden_states), self.norm1_context(encoder_hidden_states), angles)
        return hidden_states + x, encoder_hidden_states + text


class SingleBlock(nn.Module):
    """Attention and MLP side by side, with one output map for both, as in the second half of Flux."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.heads = nn.LayerNorm(WIDTH, elementwise_affine=False), HEADS
        self.to_q, self.to_k, self.to_v = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.norm_q, self.norm_k = nn.RMSNorm(SIZE, eps=1e-6), nn.RMSNorm(SIZE, eps=1e-6)
        self.proj_mlp, self.proj_out = nn.Linear(WIDTH, 48), nn.Linear(WIDTH + 48, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm(x)
        angles = torch.arange(x.shape[1])[:, None] * torch.tensor([1.0, 0.3, 0.1, 0.03])
        q, k = (turned(n(split(m(y))), angles) for n, m in ((self.norm_q, self.to_q), (self.norm_k, self.to_k)))
        mixed = joined(functional.scaled_dot_product_attention(q, k, split(self.to_v(y))))
        return x + self.proj_out(torch.cat([mixed, functional.gelu(self.proj_mlp(y))], 2))


@dataclass(frozen=True)
class Plain:
    """A model, inputs for it, and what is expected of discovery."""

    build: Callable[[], nn.Module]
    example: dict[str, Any] = field(default_factory=lambda: {"x": noise(2, 7, WIDTH)})
    layers: int = 1
    heads: int = HEADS
    reason: str | None = None  # why its layers are refused
    no_output: str | None = None  # why their output is not known
    no_logits: str | None = None


def written(attend: Callable[[Tensor, Tensor, Tensor], Tensor], kv_heads: int = HEADS) -> Callable[[], nn.Module]:
    return lambda: Residual(Maps(attend, kv_heads))


PICTURE = noise(2, 4, 8, 12)
TEXT = noise(2, 5, 24, seed=1)
MODELS: dict[str, Plain] = {
    "one head": Plain(written(one_head), heads=1),
    "many heads": Plain(written(many_heads)),
    "einsum": Plain(written(by_einsum)),
    "einsum, one head": Plain(written(one_head_by_einsum), heads=1),
    "baddbmm": Plain(written(by_baddbmm)),
    "mask by masked_fill": Plain(written(masked_by_fill)),
    "mask by addition": Plain(written(masked_by_addition)),
    "grouped by repeat": Plain(written(grouped_by_repeat, 2)),
    "grouped by expand": Plain(written(grouped_by_expand, 2)),
    "grouped by fused": Plain(written(grouped_by_fused, 2)),
    "MultiheadAttention beside one's own": Plain(Several, layers=2),
    "timm": Plain(lambda: Residual(FusedQKV())),
    "timm without norms": Plain(lambda: Residual(FusedQKV(False))),
    "windows": Plain(SwinBlock, {"x": noise(2, 4, 6, WIDTH)}),
    "shifted windows": Plain(lambda: SwinBlock(1), {"x": noise(2, 4, 6, WIDTH)}),
    "DiT": Plain(
        DiT,
        {"hidden_states": PICTURE, "timestep": torch.tensor([3.0, 700.0]), "class_labels": torch.tensor([1, 7])},
        layers=2,
    ),
    "UNet": Plain(UNetLevel, {"sample": noise(2, WIDTH, 3, 4), "encoder_hidden_states": TEXT}, layers=2),
    "joint": Plain(
        JointBlock,
        {"hidden_states": noise(2, 6, WIDTH), "encoder_hidden_states": noise(2, 3, WIDTH, seed=1)},
        layers=0,
        reason="2 maps that read different streams",
    ),
    "single": Plain(SingleBlock, no_output="its output map reads other numbers"),
}
