"""The models of drawn settings (`drawn.py`), and what their layers are by their definition (`loops.py`).

model = DrawnModel(drawn)        in float64, with every parameter redrawn
model(**inputs_of(drawn))
layers_of(model)
"""

from __future__ import annotations

from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from tests.families import spellings
from tests.families.drawn import LATENT, Drawn
from tests.families.loops import Layer, Map, Norm
from tests.parity import EPS, redraw

VOCABULARY = 40
RANK = 7  # of latents


class RMSNorm(nn.Module):
    """x / rms(x) * (offset + weight)."""

    def __init__(self, width: int, offset: float = 0.0) -> None:
        super().__init__()
        self.weight, self.eps, self.offset = nn.Parameter(torch.ones(width)), EPS, offset

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + self.eps) * (self.offset + self.weight)


class Linear(nn.Linear):
    """A map as it is spelled."""

    def __init__(self, width: int, rows: int, bias: bool, mapping: str) -> None:
        super().__init__(width, rows, bias)
        self.mapping = mapping

    def forward(self, x: Tensor) -> Tensor:
        return spellings.MAPPINGS[self.mapping](x, self.weight, self.bias)


class Conv1D(nn.Module):
    """A map that is stored (in, out), as in GPT-2."""

    def __init__(self, width: int, rows: int, bias: bool) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width, rows))
        self.bias = nn.Parameter(torch.empty(rows)) if bias else None

    def forward(self, x: Tensor) -> Tensor:
        if self.bias is None:
            return x @ self.weight
        return torch.addmm(self.bias, x.view(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


def norm_of(kind: str, width: int) -> nn.Module:
    if kind == "none":
        return nn.Identity()
    return RMSNorm(width, float("1 + w" in kind)) if kind.startswith("rms") else nn.LayerNorm(width, eps=EPS)


class Attention(nn.Module):
    """Attention as it was drawn."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        d, (H, G, h) = drawn.width, (drawn.heads, drawn.kv_heads, drawn.size)
        if drawn.told:
            self.num_heads = H
        self.sliding_window = drawn.window
        biased, linear = drawn.bias != "none", partial(Linear, mapping=drawn.mapping)
        if drawn.layout == "separate":
            self.q, self.v = linear(d, H * h, biased), linear(d, G * h, biased)
            self.k = linear(d, G * h, drawn.bias == "all")
        elif drawn.layout in LATENT:
            both, turning = drawn.layout != "latent", drawn.turning_channels
            self.down_q = linear(d, RANK, biased) if both else nn.Identity()
            self.norm_q = RMSNorm(RANK) if both else nn.Identity()
            self.up_q = linear(RANK if both else d, H * (h + turning), False)
            self.down_kv, self.norm_kv = linear(d, RANK + turning, biased), RMSNorm(RANK)
            self.up_kv = linear(RANK, H * 2 * h, False)
        else:
            self.qkv = (Conv1D if drawn.layout == "Conv1D" else linear)(d, (H + 2 * G) * h, biased)
        if drawn.qk_norm != "none":
            whole = drawn.qk_norm == "rms of all"
            self.q_norm = norm_of(drawn.qk_norm, H * h if whole else h)
            self.k_norm = norm_of(drawn.qk_norm, G * h if whole else h)
        self.out = linear(H * h, d, biased)
        if drawn.sinks:
            self.sinks = nn.Parameter(torch.empty(H))
        if drawn.positions == "table":
            self.table = nn.Embedding(2 * drawn.length, H)
        if drawn.rotary is not None:
            pairs = drawn.turning_channels // 2
            self.register_buffer("frequencies", 100.0 ** (-torch.arange(pairs) / pairs), persistent=False)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        q, k, v = self.sides(x)
        if self.drawn.rotary is not None:
            q, k = self.turned(q), self.turned(k)
        return self.out(spellings.JOINS[self.drawn.joining](self.mixed(q, k, v, real)))

    def sides(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries (B, H, T, h), keys and values (B, G, T, h)."""
        drawn = self.drawn
        H, G, h = drawn.heads, drawn.kv_heads, drawn.size
        split = spellings.SPLITS[drawn.splitting]
        if drawn.layout in LATENT:
            return self.latents(x)
        if drawn.layout == "by head":
            parts = self.qkv(x).view(*x.shape[:2], G, H // G + 2, h)
            q, k, v = parts[:, :, :, :-2].flatten(2, 3), parts[:, :, :, -2], parts[:, :, :, -1]
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            return (self.q_norm(q), self.k_norm(k), v) if drawn.qk_norm != "none" else (q, k, v)
        sizes = [H * h, G * h, G * h]
        q, k, v = (self.q(x), self.k(x), self.v(x)) if drawn.layout == "separate" else self.qkv(x).split(sizes, -1)
        if drawn.qk_norm == "rms of all":
            q, k = self.q_norm(q), self.k_norm(k)
        q, k, v = split(q, H), split(k, G), split(v, G)
        return (self.q_norm(q), self.k_norm(k), v) if drawn.qk_norm.endswith("heads") else (q, k, v)

    def latents(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """As in DeepSeek: keys and values of one latent, and rotary channels that all keys share in front."""
        H, h = self.drawn.heads, self.drawn.size
        q = self.up_q(self.norm_q(self.down_q(x))).unflatten(-1, (H, -1)).transpose(1, 2)
        low, shared = self.down_kv(x).split([RANK, self.down_kv.out_features - RANK], -1)
        k, v = self.up_kv(self.norm_kv(low)).unflatten(-1, (H, 2 * h)).transpose(1, 2).chunk(2, -1)
        return q, torch.cat([shared[:, None].expand(-1, H, -1, -1), k], -1) if shared.shape[-1] else k, v

    def turned(self, x: Tensor) -> Tensor:
        count, how = self.drawn.turning_channels, spellings.SPELLINGS["turning"][self.drawn.turning]
        angles = torch.arange(x.shape[2]).float()[:, None] * self.frequencies.float()  # as all models do
        return how(x, angles) if count == x.shape[-1] else torch.cat([how(x[..., :count], angles), x[..., count:]], -1)

    def added(self, length: int) -> Tensor | None:
        """(H, T, T) that positions add to scaled logits."""
        at = torch.arange(length)
        if self.drawn.positions == "table":
            return self.table(at[:, None] - at + self.drawn.length).permute(2, 0, 1)
        if self.drawn.positions.startswith("alibi"):
            steps = at.expand(length, -1) if self.drawn.positions.endswith("key") else -(at[:, None] - at).abs()
            return torch.tensor(slopes(self.drawn.heads), dtype=torch.float64)[:, None, None] * steps
        return None

    def hidden(self, real: Tensor) -> Tensor | None:
        """(B, 1, T, T): True where a query may not look."""
        drawn, at = self.drawn, torch.arange(real.shape[1])
        if drawn.mask == drawn.padding == "none":
            return None
        apart = at[:, None] - at
        hidden = torch.zeros_like(apart, dtype=torch.bool)
        if drawn.causal:
            hidden = hidden | (apart < 0)
        if self.sliding_window is not None:
            hidden = hidden | (apart.abs() >= self.sliding_window)
        return hidden[None, None] | ~real[:, None, None, :]

    def mixed(self, q: Tensor, k: Tensor, v: Tensor, real: Tensor) -> Tensor:
        """(B, H, T, h): values mixed by the weights."""
        drawn, n = self.drawn, self.drawn.heads // self.drawn.kv_heads
        c, added, hidden = drawn.factor, self.added(real.shape[1]), self.hidden(real)
        if n > 1:
            k, v = (spellings.REPEATS[drawn.repeating](x, n) for x in (k, v))
        if drawn.scale_of == "queries":
            q = q * c
        elif drawn.scale_of == "both":
            q, k = q * c**0.5, k * c**0.5
        c = c if drawn.scale_of == "logits" else 1.0
        if drawn.fused:
            return self.fused(q, k, v, added, hidden, c)
        logits = self.products(q, k, n, c)
        logits = spellings.MOVES[drawn.moving](logits)
        if added is not None:
            logits = logits + added
        if drawn.softcap is not None:
            logits = spellings.CAPS[drawn.capping](logits, drawn.softcap)
        if hidden is not None:
            logits = spellings.MASKINGS[drawn.masking](logits, hidden)
        if drawn.sinks:
            sinks = self.sinks[:, None, None].expand(len(q), -1, q.shape[2], 1)
            weights = spellings.SOFTMAXES[drawn.softmax](torch.cat([logits, sinks], -1))[..., :-1]
        else:
            weights = spellings.SOFTMAXES[drawn.softmax](logits)
        if n > 1 and drawn.repeating == spellings.BY_GROUPS:
            return torch.einsum("bgnqk,bgkd->bgnqd", weights.unflatten(1, (-1, n)), v).flatten(1, 2)
        return spellings.MIXES[drawn.mixing](weights, v)

    def fused(self, q: Tensor, k: Tensor, v: Tensor, added: Tensor | None, hidden: Tensor | None, c: float) -> Tensor:
        """The same in one call."""
        mask = None if hidden is None else ~hidden
        if self.drawn.product == spellings.FUSED_CAUSAL:
            mask = None
        elif added is not None:
            mask = added[None] if hidden is None else added.masked_fill(hidden, -torch.inf)
        elif hidden is not None and self.drawn.product == spellings.FUSED_NUMBERS:
            mask = torch.zeros_like(hidden, dtype=q.dtype).masked_fill(hidden, -torch.inf)
        causal, shared = self.drawn.product == spellings.FUSED_CAUSAL, k.shape[1] < q.shape[1]
        return functional.scaled_dot_product_attention(q, k, v, mask, 0.0, causal, scale=c, enable_gqa=shared)

    def products(self, q: Tensor, k: Tensor, n: int, c: float) -> Tensor:
        """(B, H, T, T): scaled products of queries and keys."""
        drawn = self.drawn
        if drawn.product == spellings.BADDBMM:
            empty = torch.empty(len(q) * drawn.heads, q.shape[2], k.shape[2], dtype=q.dtype)
            both = torch.baddbmm(empty, q.flatten(0, 1), k.flatten(0, 1).mT, beta=0, alpha=c)
            return both.unflatten(0, q.shape[:2])
        if n > 1 and drawn.repeating == spellings.BY_GROUPS:
            logits = torch.einsum("bgnqd,bgkd->bgnqk", q.unflatten(1, (-1, n)), k).flatten(1, 2)
        else:
            logits = spellings.PRODUCTS[drawn.product](q, k)
        return spellings.SCALINGS[drawn.scaling](logits, c) if drawn.scale_of == "logits" else logits


def slopes(heads: int) -> list[float]:
    return [2.0 ** -(head + 1) for head in range(heads)]


class DrawnBlock(nn.Module):
    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.post = drawn.norm == "post"
        self.norm, self.attention = norm_of(drawn.norm, drawn.width), Attention(drawn)

    def forward(self, x: Tensor, real: Tensor) -> Tensor:
        return self.norm(x + self.attention(x, real)) if self.post else x + self.attention(self.norm(x), real)


class DrawnModel(nn.Module):
    """Tokens, blocks of attention alone, logits of tokens."""

    def __init__(self, drawn: Drawn) -> None:
        super().__init__()
        self.drawn = drawn
        self.embed, self.head = nn.Embedding(VOCABULARY, drawn.width), nn.Linear(drawn.width, VOCABULARY)
        self.places = nn.Embedding(drawn.length, drawn.width) if drawn.positions == "learned" else None
        self.first_norm = norm_of("layer" if drawn.norm == "post" else "none", drawn.width)
        self.blocks = nn.ModuleList(DrawnBlock(drawn) for _ in range(drawn.layers))
        self.double().eval()
        redraw(self, seed=drawn.seed)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = self.embed(input_ids)
        if self.places is not None:
            x = x + self.places.weight[: x.shape[1]]
        x = self.first_norm(x)
        for block in self.blocks:
            x = block(x, attention_mask.bool())
        return self.head(x)


def inputs_of(drawn: Drawn) -> dict[str, Tensor]:
    """Tokens; of the last sequence two are padding, where there is padding."""
    generator = torch.Generator().manual_seed(drawn.seed)
    mask = torch.ones(drawn.batch, drawn.length, dtype=torch.long)
    if drawn.padding != "none":
        mask[-1, :2] = int(drawn.padding == "right")
        mask[-1, -2:] = int(drawn.padding == "left")
    ids = torch.randint(VOCABULARY, (drawn.batch, drawn.length), generator=generator)
    return {"input_ids": ids, "attention_mask": mask}


# ---- the same by its definition


def layers_of(model: DrawnModel) -> list[Layer]:
    """What each layer of a drawn model is."""
    return [_layer(model, number) for number in range(model.drawn.layers)]


def array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def norm_as_step(norm: Any, count: int = 1, width: int | None = None) -> Norm | None:
    """A norm that acts on each of `count` parts of a vector of `width`; the rest passes."""
    if isinstance(norm, nn.Identity):
        return None
    size, kind = len(norm.weight), "layer" if isinstance(norm, nn.LayerNorm) else "rms"
    gain, bias = np.ones(width or size * count), np.zeros(width or size * count)
    gain[: size * count] = np.tile(array(norm.weight) + getattr(norm, "offset", 0.0), count)
    if kind == "layer":
        bias[: size * count] = np.tile(array(norm.bias), count)
    return Norm(kind, norm.eps, gain, bias, tuple(range(n * size, (n + 1) * size) for n in range(count)))


def _layer(model: DrawnModel, number: int) -> Layer:
    drawn, attention = model.drawn, model.blocks[number].attention
    name = f"blocks.{number}.attention"
    front, reads = model.blocks[number].norm, f"blocks.{number}.norm"
    if drawn.norm == "post":
        front = model.first_norm if number == 0 else model.blocks[number - 1].norm
        reads = "first_norm" if number == 0 else f"blocks.{number - 1}.norm"
    query, key, value = _latent_sides(attention) if drawn.layout in LATENT else _plain_sides(attention)
    return Layer(
        name=name,
        reads=reads,
        writes=name,
        heads=drawn.heads,
        kv_heads=drawn.kv_heads,
        size=len(query[-1].weight) // drawn.heads if isinstance(query[-1], Map) else drawn.size,
        front=norm_as_step(front),
        query=query,
        key=key,
        value=value,
        out=_map(attention.out),
        scale=1.0 if drawn.scale_of == "nothing" else drawn.factor,
        turns=_turns(attention),
        bias=_bias(attention),
        softcap=drawn.softcap,
        sinks=array(attention.sinks) if drawn.sinks else None,
        causal=drawn.causal,
        window=drawn.window,
        strided=drawn.repeating == spellings.STRIDED,
        shift_free=drawn.positions == "alibi by key",
    )


def _map(linear: Any, rows: Any = slice(None)) -> Map:
    weight = linear.weight.mT if isinstance(linear, Conv1D) else linear.weight
    return Map(array(weight)[rows], None if linear.bias is None else array(linear.bias)[rows])


def _plain_sides(attention: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Queries, keys and values, one head after the other."""
    drawn = attention.drawn
    H, G, h = drawn.heads, drawn.kv_heads, drawn.size
    if drawn.layout == "separate":
        query, key, value = _map(attention.q), _map(attention.k), _map(attention.v)
    elif drawn.layout == "by head":  # of each group: its queries, then its key, then its value
        group = (H // G + 2) * h
        starts = range(0, G * group, group)
        rows = [
            [row for start in starts for row in range(start + a, start + b)]
            for a, b in ((0, group - 2 * h), (group - 2 * h, group - h), (group - h, group))
        ]
        query, key, value = (_map(attention.qkv, part) for part in rows)
    else:
        ends = (0, H * h, (H + G) * h, (H + 2 * G) * h)
        query, key, value = (_map(attention.qkv, slice(a, b)) for a, b in pairwise(ends))
    if drawn.qk_norm == "none":
        return [query], [key], [value]
    counts = (1, 1) if drawn.qk_norm == "rms of all" else (H, G)
    norms = [norm_as_step(norm, n) for norm, n in zip((attention.q_norm, attention.k_norm), counts, strict=True)]
    return [query, norms[0]], [key, norms[1]], [value]


def _latent_sides(attention: Any) -> tuple[list[Any], list[Any], list[Any]]:
    """Of keys and values the latent is normalised and raised, and shared channels pass to every head."""
    drawn = attention.drawn
    H, h, down = drawn.heads, drawn.size, _map(attention.down_kv)
    shared = len(down.weight) - RANK
    high = array(attention.up_kv.weight).reshape(H, 2, h, RANK)
    keys = np.zeros((H, shared + h, RANK + shared))
    keys[:, :shared, RANK:], keys[:, shared:, :RANK] = np.eye(shared), high[:, 0]
    inner = norm_as_step(attention.norm_kv, width=RANK + shared)
    values = np.pad(high[:, 1].reshape(H * h, RANK), ((0, 0), (0, shared)))
    query = [_map(attention.up_q)]
    if drawn.layout != "latent":
        query = [_map(attention.down_q), norm_as_step(attention.norm_q), *query]
    return query, [down, inner, Map(keys.reshape(H * (shared + h), -1))], [down, inner, Map(values)]


def _turns(attention: Any) -> tuple[tuple[int, int, float], ...]:
    drawn = attention.drawn
    pairs = drawn.turning_channels // 2
    frequencies = [] if drawn.rotary is None else attention.frequencies.tolist()
    if drawn.rotary == "interleaved":
        return tuple((2 * n, 2 * n + 1, frequency) for n, frequency in enumerate(frequencies))
    return tuple((n, n + pairs, frequency) for n, frequency in enumerate(frequencies))


def _bias(attention: Any) -> Any:
    drawn = attention.drawn
    if drawn.positions == "table":
        table = array(attention.table.weight)
        return lambda head, i, j: table[i - j + drawn.length, head]
    if drawn.positions.startswith("alibi"):
        slope, by_key = slopes(drawn.heads), drawn.positions.endswith("key")
        return lambda head, i, j: slope[head] * (j if by_key else -abs(i - j))
    return None
