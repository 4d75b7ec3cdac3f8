"""Ways from a stream to queries, keys, values and the output map, each in a small module: discovery must give what the
module computes, with other weights and other tokens than it was discovered with.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import locater
from locater.control import Mimetic, QKClip
from locater.errors import LocaterError
from locater.layers import effective
from locater.layers.layer import AttentionLayer
from tests.families.plain_models import Maps, many_heads

WIDTH, HEADS, SIZE = 24, 4, 6
X = {"x": torch.randn(2, 5, WIDTH, generator=torch.Generator().manual_seed(0))}


def turned(x: Tensor, first: int = 0) -> Tensor:
    """The last axis in neighbouring pairs, turned by position times 0.7 and 0.2 (...)."""
    steps = torch.arange(x.shape[-2]).to(x) + first
    angle = steps[:, None] * torch.tensor([0.7, 0.2, 0.05])[: x.shape[-1] // 2].to(x)
    even, odd = x[..., ::2], x[..., 1::2]
    return torch.stack([even * angle.cos() - odd * angle.sin(), even * angle.sin() + odd * angle.cos()], -1).flatten(-2)


class Attention(nn.Module):
    """Plain attention whose parts others change. `logits` is what the last pass computed."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))

    def heads(self, x: Tensor) -> Tensor:
        return x.unflatten(-1, (HEADS, -1)).transpose(1, 2)

    def queries(self, x: Tensor) -> Tensor:
        return self.heads(self.q(x))

    def keys(self, x: Tensor) -> Tensor:
        return self.heads(self.k(x))

    def values(self, x: Tensor) -> Tensor:
        return self.heads(self.v(x))

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return self.out(mixed)

    def forward(self, x: Tensor) -> Tensor:
        self.logits = self.queries(x) @ self.keys(x).mT * 0.3
        return self.after(x, (self.logits.softmax(-1) @ self.values(x)).transpose(1, 2).flatten(2))


class Latent(Attention):
    """Keys and values pass a narrow latent with a norm; the turning channels of keys are common to all heads."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.norm, self.up = nn.Linear(WIDTH, 8 + 2), nn.RMSNorm(8), nn.Linear(8, HEADS * (4 + 5))
        self.out = nn.Linear(HEADS * 5, WIDTH)

    def queries(self, x: Tensor) -> Tensor:
        q = self.heads(self.q(x))
        return torch.cat([q[..., :4], turned(q[..., 4:])], -1)

    def keys(self, x: Tensor) -> Tensor:
        low = self.down(x)
        own = self.heads(self.up(self.norm(low[..., :8])))[..., :4]
        return torch.cat([own, turned(low[:, None, :, 8:]).expand(-1, HEADS, -1, -1)], -1)

    def values(self, x: Tensor) -> Tensor:
        return self.heads(self.up(self.norm(self.down(x)[..., :8])))[..., 4:]


class LowRank(Attention):
    """Queries pass two maps without a norm between."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.up = nn.Linear(WIDTH, 8), nn.Linear(8, WIDTH)

    def queries(self, x: Tensor) -> Tensor:
        return self.heads(self.up(self.down(x)))


class TwoMaps(Attention):
    """The first channels of each key are of one map, the others of another."""

    def __init__(self) -> None:
        super().__init__()
        self.k, self.other = nn.Linear(WIDTH, HEADS * 2), nn.Linear(WIDTH, HEADS * 4, bias=False)

    def keys(self, x: Tensor) -> Tensor:
        return torch.cat([self.heads(self.k(x)), self.heads(self.other(x))], -1)


class Later(Attention):
    """Positions begin at 3."""

    def queries(self, x: Tensor) -> Tensor:
        return turned(super().queries(x), 3)

    def keys(self, x: Tensor) -> Tensor:
        return turned(super().keys(x), 3)


class Factors(Attention):
    """A learned factor for each channel of queries, and a vector added to keys."""

    def __init__(self) -> None:
        super().__init__()
        self.factor, self.added = nn.Parameter(torch.ones(SIZE)), nn.Parameter(torch.zeros(HEADS, 1, SIZE))

    def queries(self, x: Tensor) -> Tensor:
        return super().queries(x) * self.factor * 2

    def keys(self, x: Tensor) -> Tensor:
        return super().keys(x) + self.added


class Einsum(Attention):
    """Weights with an axis of heads, products by einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Parameter(torch.randn(WIDTH, HEADS, SIZE)) for _ in range(3))
        self.out = nn.Parameter(torch.randn(HEADS, SIZE, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (torch.einsum("btd,dhk->bthk", x, part) for part in (self.q, self.k, self.v))
        self.logits = torch.einsum("bthk,bshk->bhts", q, k) * 0.3
        mixed = torch.einsum("bhts,bshk->bthk", self.logits.softmax(-1), v)
        return torch.einsum("bthk,hkd->btd", mixed, self.out)


class NormedValues(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(SIZE)

    def values(self, x: Tensor) -> Tensor:
        return self.norm(super().values(x))


class Gated(Attention):
    """Queries and gates are rows of one map, head by head."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(WIDTH, 2 * WIDTH)

    def queries(self, x: Tensor) -> Tensor:
        return self.heads(self.q(x))[..., :SIZE]

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        gate = self.heads(self.q(x))[..., SIZE:].transpose(1, 2).flatten(2)
        return self.out(mixed * torch.sigmoid(gate))


class NormedOutput(Attention):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.RMSNorm(WIDTH)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return self.out(self.norm(mixed))


class OneValue(Attention):
    """Values are common to all heads, keys are not."""

    def __init__(self) -> None:
        super().__init__()
        self.v = nn.Linear(WIDTH, SIZE)

    def values(self, x: Tensor) -> Tensor:
        return self.v(x)[:, None].expand(-1, HEADS, -1, -1)


class Convolved(Attention):
    """Maps as convolutions of one place, on (B, d, T); biases of queries and keys are put together first."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Conv1d(WIDTH, WIDTH, 1) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = x.mT
        both = torch.cat([self.q.bias, self.k.bias])
        q = torch.conv1d(y, self.q.weight, both[:WIDTH])
        k = torch.conv1d(y, self.k.weight, both[WIDTH:])
        q, k, v = (part.unflatten(1, (HEADS, SIZE)).mT for part in (q, k, self.v(y)))
        self.logits = q @ k.mT * 0.3
        return self.out((self.logits.softmax(-1) @ v).transpose(1, 2).flatten(2))


class ScaledNorm(Attention):
    """Queries turn, are normalised, and are multiplied by a learned factor for each channel."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.factor = nn.RMSNorm(SIZE), nn.Parameter(torch.zeros(SIZE))

    def queries(self, x: Tensor) -> Tensor:
        return self.norm(turned(super().queries(x))) * nn.functional.softplus(self.factor) * 1.5

    def keys(self, x: Tensor) -> Tensor:
        return self.norm(turned(super().keys(x)))


class NormedHeads(Attention):
    """Mixed values of each head are normalised, then gated."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.gate = nn.RMSNorm(SIZE), nn.Linear(WIDTH, WIDTH, bias=False)

    def after(self, x: Tensor, mixed: Tensor) -> Tensor:
        return self.out(self.norm(mixed.unflatten(-1, (HEADS, SIZE))).flatten(-2) * torch.tanh(self.gate(x)))


MODULES: list[type[Attention]] = [
    Attention,
    Latent,
    LowRank,
    TwoMaps,
    Later,
    Factors,
    Einsum,
    NormedValues,
    Gated,
    NormedOutput,
    OneValue,
    Convolved,
    ScaledNorm,
    NormedHeads,
]


class Block(nn.Module):
    def __init__(self, kind: type[Attention]) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(WIDTH), kind()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


@pytest.mark.parametrize("kind", MODULES)
def test_logits_and_output_are_those_of_the_module(kind: type[Attention]) -> None:
    torch.manual_seed(0)
    model = Block(kind)
    discovered = locater.discover(model, X)
    assert not discovered.gaps
    model = model.double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn_like(parameter) * 0.5 + 0.3)
    (layer,) = locater.discover(model, X).layers
    x = torch.randn(3, 7, WIDTH, dtype=torch.float64)
    output = model.attn(model.norm(x))
    assert (layer.logits(x) - model.attn.logits).abs().max() < 1e-6 * model.attn.logits.std()
    assert (layer.output(x) - output).abs().max() < 1e-6 * output.std()


@pytest.mark.parametrize("kind", [Latent, LowRank, TwoMaps, Factors])
def test_effective_maps_are_those_of_unit_tokens(kind: type[Attention]) -> None:
    """Without norms inside, the effective maps give the part of the logits that both tokens make, exactly."""
    model = Block(kind).double()
    (layer,) = locater.discover(model, X).layers
    assert isinstance(layer, AttentionLayer)
    maps = effective(layer)
    assert maps.query.isfinite().all()
    assert maps.key.isfinite().all()
    if kind is Latent:  # keys in mean field
        return
    z = torch.randn(1, 2, WIDTH, dtype=torch.float64)
    z = (z - z.mean(-1, keepdim=True)) / z.std(-1, correction=0, keepdim=True)
    logits = layer.logits(torch.cat([z, -z], 1), normalized=True)[0]  # (H, 4, 4): a, b, -a, -b
    both = (logits[:, :2, :2] - logits[:, :2, 2:] - logits[:, 2:, :2] + logits[:, 2:, 2:]) / 4
    ours = maps.scale * torch.einsum("hkd,td,hke,se->hts", maps.query, z[0], maps.key, z[0])
    assert (ours - both).abs().max() < 1e-8 * both.std()


class Chunks(nn.Module):
    """Sequences of different lengths on one axis, attended one after the other, turned by a table of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # (n, d)
        q, k, v = self.qkv(x).unflatten(-1, (3, HEADS, SIZE)).permute(1, 2, 0, 3).unbind(0)
        parts = []
        for start, end in ((0, 6), (6, 10)):
            one, two, three = (part[None, :, start:end] for part in (q, k, v))
            weights = (turned(one) @ turned(two).mT * 0.3).softmax(-1)
            parts.append((weights @ three)[0])
        return self.out(torch.cat(parts, 1).transpose(0, 1).flatten(1))


def test_chunks_of_one_module_are_told_apart() -> None:
    model = Chunks()
    discovered = locater.discover(model, {"x": torch.randn(10, WIDTH)})
    assert not discovered.gaps
    model = model.double()
    x = torch.randn(10, WIDTH, dtype=torch.float64)
    output = model(x)
    for layer in locater.discover(model, {"x": torch.randn(10, WIDTH)}).layers:
        for part in (slice(0, 6), slice(6, 10)):
            assert (layer.output(x[None, part])[0] - output[part]).abs().max() < 1e-6 * output.std()


class Mixing(Attention):
    """Keys are averaged over neighbours."""

    def keys(self, x: Tensor) -> Tensor:
        k = super().keys(x)
        return (k + k.roll(1, -2)) / 2


class Rotating(Attention):
    """Values rotate with position."""

    def values(self, x: Tensor) -> Tensor:
        return turned(super().values(x))


def test_what_cannot_be_read_is_said() -> None:
    (refusal,) = locater.discover(Block(Mixing), X).refused
    assert "tokens are mixed" in refusal.reason
    (layer,) = locater.discover(Block(Rotating), X).layers
    assert layer.unknown_output == "its values rotate with position"
    with pytest.raises(LocaterError, match="rotate with position"):
        layer.output(X["x"])


def test_controls_act_on_such_layers_or_refuse_them_in_one_line() -> None:
    model = Block(Factors)
    locater.discover(model, X)
    control = locater.LocAteR().attach(model)
    control.loss().backward()
    control.detach()
    factor = model.attn.factor
    assert isinstance(factor, nn.Parameter)
    assert factor.grad is not None
    assert factor.grad.abs().sum() > 0  # the factor is a part of what the penalty acts on
    model = Block(TwoMaps)
    locater.discover(model, X)
    for refusing in (QKClip(), Mimetic()):
        with pytest.raises(LocaterError, match="rows of several maps"):
            refusing.attach(model)


class LeastNumber(Attention):
    """Masks by the least number of its weights' dtype times a tensor of the default dtype, as ProphetNet does."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = (1.0 - torch.ones(x.shape[1], dtype=torch.int64)) * torch.finfo(self.q.weight.dtype).min
        self.logits = self.queries(x) @ self.keys(x).mT * 0.3 + hidden
        return self.out((self.logits.softmax(-1) @ self.values(x)).transpose(1, 2).flatten(2))


def test_a_mask_that_overflows_in_the_default_dtype() -> None:
    assert not locater.discover(Block(LeastNumber), X).gaps


class OverQueries(Attention):
    """Weights sum to 1 over queries: slots, no attention of queries over keys."""

    def forward(self, x: Tensor) -> Tensor:
        weights = (self.queries(x) @ self.keys(x).mT).softmax(-2)
        return self.out((weights @ self.values(x)).transpose(1, 2).flatten(2))


class LikeTheStream(Attention):
    """Factors of positions are cast to the dtype of the stream, as cosines often are."""

    def queries(self, x: Tensor) -> Tensor:
        return super().queries(x) * torch.full((1,), 2.0).to(x)


def test_a_softmax_over_queries_is_no_attention_and_a_cast_is_no_stream() -> None:
    discovered = locater.discover(Block(OverQueries), X)
    assert not discovered.layers
    discovered = locater.discover(Block(LikeTheStream), X)
    assert not discovered.gaps
    assert discovered.layers[0].scale == pytest.approx(0.6)


class MaskedStream(nn.Module):
    """As in XLM: the normed stream is multiplied by the mask, in place, and meets learned tokens that are normed too."""

    def __init__(self) -> None:
        super().__init__()
        self.embedded, self.tokens = nn.Embedding(20, 32), nn.Parameter(torch.zeros(1, 5, 32))
        self.norm, self.queries_norm = nn.LayerNorm(32), nn.LayerNorm(32, eps=1e-6)
        self.attention, self.cross = Maps(many_heads), CrossMaps()

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        x = nn.functional.dropout(self.norm(self.embedded(input_ids)), 0.1, self.training)
        x *= attention_mask[..., None].to(x)
        x = x + self.attention(x)
        learned = nn.functional.dropout(self.queries_norm(self.tokens.expand(len(x), -1, -1)), 0.1, self.training)
        return self.cross(learned.to(x.dtype), self.norm(x))


class CrossMaps(Maps):
    def __init__(self) -> None:
        super().__init__(many_heads)

    def forward(self, x: Tensor, memory: Tensor) -> Tensor:  # type: ignore[override]
        return self.proj(self.attend(self.q(x), self.k(memory), self.v(memory)))


def test_norms_behind_a_mask_and_of_learned_tokens_are_found() -> None:
    torch.manual_seed(0)
    model, ids = MaskedStream(), torch.arange(14).view(2, 7)
    example = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    own, cross = locater.discover(model, example).layers
    assert (own.norm.kind, cross.norm.kind, cross.memory_norm and cross.memory_norm.kind) == ("layer",) * 3
    assert cross.norm.eps == 1e-6
    hidden = locater.discover(MaskedStream(), {**example, "attention_mask": (ids > 1).long()})
    assert hidden.layers[0].norm.kind == "none", "a mask that hides tokens is a part of the stream"
    notes = locater.scan(MaskedStream(), example={**example, "attention_mask": (ids > 1).long()}).assumptions["notes"]
    assert any(note.startswith("no known norm in front of 1 of 2 layers") and "(attention)" in note for note in notes)


def test_keys_without_a_known_norm_are_named() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.blocks = nn.LayerNorm(32), nn.ModuleList(CrossMaps() for _ in range(3))

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            for number, block in enumerate(self.blocks):
                x = x + block(self.norm(x), memory if number else self.norm(memory))
            return x

    x, memory = torch.randn(2, 2, 5, 32).unbind()
    notes = locater.scan(Model(), example={"x": x, "memory": memory}).assumptions["notes"]
    (note,) = [note for note in notes if "no known norm" in note]
    assert note.startswith("no known norm in front of the keys of 2 of 3 layers")
    assert note.endswith("(blocks.* (2))")
