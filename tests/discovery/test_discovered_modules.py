"""Discovery in plain PyTorch: attention written by hand, a block with adaptive norms, a compiled model, bad input."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import flex_attention as flex

import locater
from locater.errors import LocaterError

X = {"x": torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.to_q, self.to_k = nn.Linear(32, 32, bias=False), nn.Linear(32, 32)
        self.to_v, self.to_out = nn.Linear(32, 32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part(x).unflatten(-1, (4, 8)).transpose(1, 2) for part in (self.to_q, self.to_k, self.to_v))
        weights = (q @ k.transpose(-1, -2) * 0.3).softmax(-1)
        return self.to_out((weights @ v).transpose(1, 2).flatten(2))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.RMSNorm(32), Attention()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.norm(x))


class Adaptive(nn.Module):
    """As in a DiT: what attention reads is scaled and shifted by a condition."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attn = nn.LayerNorm(32, elementwise_affine=False), Attention()
        self.modulation = nn.Linear(32, 64)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        scale, shift = self.modulation(t)[:, None].chunk(2, -1)
        return x + self.attn(self.norm(x) * (1 + scale) + shift)


def test_attention_written_by_hand() -> None:
    model, x = Block().double(), torch.randn(1, 7, 32, dtype=torch.float64)
    (layer,) = locater.discover(model, X).layers
    assert (layer.norm.kind, layer.heads, layer.scale) == ("rms", 4, pytest.approx(0.3))
    wanted = model.attn(model.norm(x))
    assert (layer.output(x) - wanted).abs().max() < 1e-6 * wanted.std()
    assert len(locater.scan(Block(), example=X).rows) == 4


def test_the_stream_of_an_adaptive_norm_is_what_the_maps_read() -> None:
    model, x = Adaptive().double(), torch.randn(1, 7, 32, dtype=torch.float64)
    (layer,) = locater.discover(model, {**X, "t": torch.randn(2, 32)}).layers
    wanted = model.attn(x)
    assert layer.norm.kind == "none"
    assert (layer.output(x) - wanted).abs().max() < 1e-6 * wanted.std()


def test_layers_follow_the_weights_of_the_model() -> None:
    model = Block()
    (before,) = locater.discover(model, X).layers
    with torch.no_grad():
        model.attn.to_q.weight.mul_(2)
    (after,) = locater.discover(model).layers  # from what is kept with the model
    x = torch.randn(1, 3, 32)
    assert torch.allclose(after.queries(x), before.queries(x))  # both read the live tensor
    assert torch.equal(after.query.weight(), model.attn.to_q.weight)


@pytest.mark.parametrize(
    ("model", "example", "says"),
    [
        (nn.Bilinear(3, 5, 2), None, "Give them: example={'input1': tensor, 'input2': tensor}"),
        (Block(), {"y": 1}, "unexpected keyword"),
        (Block().to("meta"), X, "meta device"),
        ("a folder", None, "not a live model"),
    ],
)
def test_bad_input_is_one_line(model: Any, example: Any, says: str) -> None:
    with pytest.raises(LocaterError) as error:
        locater.discover(model, example)
    assert says in str(error.value)
    assert "\n" not in str(error.value)


class Mixed(Block):
    """Distances to points that are in float32 whatever the model is in, as of a codebook."""

    def forward(self, x: Tensor) -> Tensor:
        near = torch.cdist(x, torch.linspace(-1, 1, 96).view(1, 3, 32).expand(len(x), -1, -1))
        return super().forward(x + near.mean(-1, keepdim=True))


def test_a_model_that_makes_tensors_in_another_dtype_runs() -> None:
    model, x = Mixed().double(), torch.randn(1, 7, 32, dtype=torch.float64)
    (layer,) = locater.discover(model, X).layers
    wanted = model.attn(model.norm(x))
    assert (layer.output(x) - wanted).abs().max() < 1e-6 * wanted.std()


class Shared(nn.Module):
    """Keys and values of an earlier stream, hidden where they are later, as layers of Gemma 4 share them."""

    def __init__(self) -> None:
        super().__init__()
        self.attn, self.norm, self.between = Attention(), nn.RMSNorm(32), nn.Linear(32, 32)

    def forward(self, x: Tensor) -> Tensor:
        part, y = self.attn, self.norm(self.between(x).tanh())
        q, k, v = (
            f(z).unflatten(-1, (4, 8)).transpose(1, 2) for f, z in ((part.to_q, y), (part.to_k, x), (part.to_v, x))
        )
        later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1)
        weights = (q @ k.transpose(-1, -2) * 0.3).masked_fill(later, -torch.inf).softmax(-1)
        return part.to_out((weights @ v).transpose(1, 2).flatten(2))


def test_a_causal_mask_over_keys_of_another_stream_has_to_be_given() -> None:
    model, x = Shared().double(), torch.randn(1, 7, 32, dtype=torch.float64)
    (layer,) = locater.discover(model, X).layers
    assert layer.kind == "cross"
    y = model.between(x).tanh()
    with pytest.raises(LocaterError, match="hidden by their distance"):
        layer.output(y, x)
    seen = torch.ones(7, 7, dtype=torch.bool).tril()
    wanted = model(x)
    assert (layer.output(y, x, mask=seen[None, None]) - wanted).abs().max() < 1e-6 * wanted.std()


class Residual(nn.Module):
    """A residual attention block of OpenAI's CLIP, as open_clip and torchvision write theirs too."""

    def __init__(self, mask: Tensor | None = None) -> None:
        super().__init__()
        self.attn, self.ln_1 = nn.MultiheadAttention(32, 4), nn.LayerNorm(32)
        self.mlp, self.ln_2 = nn.Sequential(nn.Linear(32, 64), nn.GELU(), nn.Linear(64, 32)), nn.LayerNorm(32)
        self.attn_mask = mask

    def forward(self, x: Tensor) -> Tensor:
        z = self.ln_1(x)
        x = x + self.attn(z, z, z, need_weights=False, attn_mask=self.attn_mask)[0]
        return x + self.mlp(self.ln_2(x))


class Embedded(nn.Module):
    """Something in front of PyTorch's own stack, and a decoder whose memory is normed."""

    def __init__(self, norm_first: bool) -> None:
        super().__init__()
        self.norm, self.memory_norm = nn.LayerNorm(32), nn.RMSNorm(32, eps=1e-6)
        settings = dict(dropout=0.0, batch_first=True, norm_first=norm_first)
        encoder = nn.TransformerEncoderLayer(32, 4, 48, **settings)  # type: ignore[arg-type]
        decoder = nn.TransformerDecoderLayer(32, 4, 48, **settings)  # type: ignore[arg-type]
        self.encoder = nn.TransformerEncoder(encoder, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoder(decoder, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.decoder(self.norm(x), self.memory_norm(self.encoder(self.norm(x))))


class Fused(nn.Module):
    """Attention with timm's names."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv, self.proj, self.num_heads, self.scale = nn.Linear(32, 96), nn.Linear(32, 32), 4, 8**-0.5

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 8)).movedim(-3, 0).transpose(-2, -3)
        return self.proj(((q @ k.mT * self.scale).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Late(nn.Module):
    """Timm's names, and a norm behind attention in place of in front of it."""

    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.attn = nn.LayerNorm(32), Fused()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.norm1(self.attn(x))


class Named(nn.Module):
    """Timm's names, and another one for the norm in front."""

    def __init__(self) -> None:
        super().__init__()
        self.ln, self.attn = nn.LayerNorm(32), Fused()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.attn(self.ln(x))


def redrawn(model: nn.Module) -> nn.Module:
    """With gains and biases as training may leave them: factors of 0.02 to 20."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            noise = torch.randn(p.shape, generator=generator)
            p.copy_(noise.exp() if p.ndim == 1 else noise * 0.2)
    return model.eval()


def swapped(model: nn.Module) -> nn.Module:
    """PyTorch's own layer with a norm of another kind put in."""
    model.layers[0].norm1 = nn.RMSNorm(32, eps=1e-6)  # type: ignore[union-attr,index]
    return model


def encoder(norm_first: bool) -> nn.Module:
    layer = nn.TransformerEncoderLayer(32, 4, 48, dropout=0.0, batch_first=True, norm_first=norm_first)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


def attended(model: nn.Module, x: Tensor) -> dict[str, list[Tensor]]:
    """Inputs (queries, keys) of each module that attends, as the model in float64 gives them, batch first."""
    seen: dict[str, list[Tensor]] = {}

    def hook(name: str) -> Any:
        def see(module: Any, args: Any, kwargs: Any) -> None:
            given = [x.detach() for x in args[:2]] * 2
            first = isinstance(module, Fused) or module.batch_first
            seen[name] = [x if first else x.transpose(0, 1) for x in given[:2]]

        return see

    handles = [
        part.register_forward_pre_hook(hook(name), with_kwargs=True)
        for name, part in model.named_modules()
        if isinstance(part, nn.MultiheadAttention | Fused)
    ]
    with torch.enable_grad():  # no fast path past the attention
        model(x)
    for handle in handles:
        handle.remove()
    return seen


@pytest.mark.parametrize(
    ("build", "norms"),
    [
        (lambda: nn.Sequential(*(Residual(torch.full((5, 5), -torch.inf).triu(1)) for _ in range(2))), ["layer"] * 2),
        (lambda: Embedded(True), ["layer"] * 6),
        (lambda: Embedded(False), ["layer"] * 6),
        (lambda: encoder(True), ["layer", "layer"]),
        (lambda: encoder(False), ["none", "layer"]),
        (lambda: swapped(encoder(True)), ["rms", "layer"]),
        (Named, ["layer"]),
        (Late, ["none"]),
    ],
    ids=["clip", "embedded-pre", "embedded-post", "encoder-pre", "encoder-post", "rms", "timm-ln", "timm-late"],
)
def test_the_norm_in_front_of_attention_is_the_one_that_runs(build: Any, norms: list[str]) -> None:
    """Scan, discovery and what the modules are given in float64 agree, whatever the block around attention is."""
    torch.manual_seed(0)
    model = redrawn(build())
    x = torch.randn(5, 5, 32, generator=torch.Generator().manual_seed(4))
    found = {layer.name: layer for layer in locater.discover(model, {_argument(model): x}).layers}
    layers = locater.attention_layers(model, example={_argument(model): x})
    assert [layer.norm.kind for layer in layers] == norms
    rows = locater.scan(model, example={_argument(model): x}).rows
    model, x = model.double(), x.double()
    seen = attended(model, x)
    assert seen.keys() == found.keys() == {layer.name for layer in layers}
    for number, layer in enumerate(layers):
        assert layer.unknown_norm is None
        other = found[layer.name]
        z = torch.randn(1, 6, 32, dtype=torch.float64, generator=torch.Generator().manual_seed(number))
        memory = None if layer.kind == "self" else z.flip(1)
        torch.testing.assert_close(
            layer.logits(z, memory, normalized=True), other.logits(z, memory, normalized=True), rtol=1e-6, atol=1e-6
        )
        part: Any = model.get_submodule(layer.name)
        weight, bias = (
            (part.qkv.weight, part.qkv.bias) if isinstance(part, Fused) else (part.in_proj_weight, part.in_proj_bias)
        )
        q, k = (
            nn.functional.linear(y, weight[at : at + 32], bias[at : at + 32]).unflatten(-1, (4, 8)).transpose(1, 2)
            for y, at in zip(seen[layer.name], (0, 32), strict=True)
        )
        wanted = (q @ k.mT * 8**-0.5).detach()
        # the stream in front of the norm is not seen: its standardised form is, as what the norm gave
        given = [_standardised(layer.norm, seen[layer.name][0])]
        given.append(given[0] if layer.kind == "self" else _standardised(layer.memory_norm, seen[layer.name][1]))
        ours = layer.logits(*given, normalized=True).detach()
        assert (ours - wanted).abs().max() < 1e-5 * wanted.std()
        W = weight[:32].view(4, 8, 32).transpose(1, 2) @ weight[32:64].view(4, 8, 32)
        front = [norm.gain for norm in (layer.norm, layer.norm if memory is None else layer.memory_norm) if norm]
        gains = [torch.ones(32) if gain is None else gain for gain in front]
        folded = gains[0].double()[:, None] * W * gains[-1].double()
        for side, norm in ((-2, layer.norm), (-1, layer.norm if memory is None else layer.memory_norm)):
            if norm is not None and norm.kind == "layer":
                folded = folded - folded.mean(side, keepdim=True)
        size = folded.square().sum((-1, -2)).detach()
        scanned = torch.tensor([row.frobenius_sq for row in rows if row.layer == number], dtype=torch.float64)
        torch.testing.assert_close(scanned, size, rtol=1e-4, atol=0)


def _argument(model: nn.Module) -> str:
    return {"TransformerEncoder": "src", "Sequential": "input"}.get(type(model).__name__, "x")


def _standardised(norm: Any, y: Tensor) -> Tensor:
    """z of y = gain z + bias."""
    if norm is None or norm.kind == "none":
        return y
    y = y if norm.bias is None else y - norm.bias.double()
    return y / norm.gain.double()


class Wrapped(nn.Module):
    """Nobody guesses its input."""

    def __init__(self) -> None:
        super().__init__()
        self.block = Residual()

    def forward(self, batch: Any) -> Tensor:
        return self.block(batch["tokens"]["embedded"])


def test_a_norm_that_cannot_be_known_is_named(tmp_path: Any) -> None:
    """A copy of the model does not run, or there is a file alone: the layers are there, with a line about their norm."""
    notes = locater.scan(Wrapped()).assumptions["notes"]
    (note,) = [note for note in notes if "norm in front is not known" in note]
    assert note.startswith("block.attn: ")
    assert "Residual" in note
    assert note.endswith("example={...}")
    assert not any(
        "not known" in note
        for note in locater.scan(
            Wrapped(), example={"batch": {"tokens": {"embedded": torch.randn(5, 2, 32)}}}
        ).assumptions["notes"]
    )
    torch.save(Residual().state_dict(), tmp_path / "model.pt")
    (note,) = [x for x in locater.scan(tmp_path / "model.pt", heads=4).assumptions["notes"] if "is not known" in x]
    assert '"norm": "ln_1"' in note


def test_a_file_may_name_the_norm_in_front(tmp_path: Any) -> None:
    model = redrawn(nn.Sequential(Residual(), Residual()))
    save_file(model.state_dict(), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "torch", "num_heads": 4, "norm": "ln_1"}')
    example = {"input": torch.randn(5, 1, 32)}
    for stored, live in zip(locater.scan(tmp_path).rows, locater.scan(model, example=example).rows, strict=True):
        assert stored.frobenius_sq == pytest.approx(live.frobenius_sq, rel=1e-5)


# FlexAttention that a model calls itself


class Flexed(nn.Module):
    """A causal block whose attention is `attend(q, k, v)`."""

    def __init__(self, attend: Any) -> None:
        super().__init__()
        self.embedding, self.norm = nn.Embedding(50, 32), nn.LayerNorm(32)
        self.to_q, self.to_k, self.to_v, self.back = (nn.Linear(32, size) for size in (32, 16, 16, 32))
        self.attend = attend

    def forward(self, input_ids: Tensor) -> Tensor:
        x = self.embedding(input_ids)
        q, k, v = (m(self.norm(x)).unflatten(-1, (-1, 8)).transpose(1, 2) for m in (self.to_q, self.to_k, self.to_v))
        return x + self.back(self.attend(q, k, v).transpose(1, 2).flatten(2))


def causal_flex(q: Tensor, k: Tensor, v: Tensor, score_mod: Any = None) -> Tensor:
    T = q.shape[2]
    mask = flex.create_block_mask(lambda b, h, i, j: i >= j, None, None, T, T, device="cpu")
    return flex.flex_attention(q, k, v, score_mod=score_mod, block_mask=mask, enable_gqa=True, scale=0.2)


def causal_fused(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True, scale=0.2)


compiled_flex = torch.compile(flex.flex_attention)


def test_flex_attention_called_directly_is_read_as_fused_attention() -> None:
    torch.manual_seed(0)
    one, other = Flexed(causal_flex), Flexed(causal_fused)
    other.load_state_dict(one.state_dict())
    functions = flex.flex_attention, flex.create_block_mask
    found, wanted = locater.scan(one), locater.scan(other)
    assert (flex.flex_attention, flex.create_block_mask) == functions
    assert [asdict(row) for row in found.rows] == [asdict(row) for row in wanted.rows]
    assert (len(found.rows), found.layers[0]["causal"], found.rows[0].scale) == (4, True, 0.2)


@pytest.mark.parametrize(
    ("attend", "why"),
    [
        (partial(causal_flex, score_mod=lambda score, *at: score * 2), "with a score_mod, a function of single logits"),
        (partial(compiled_flex, enable_gqa=True), "runs a part of itself through torch.compile or torch.vmap"),
    ],
)
def test_why_a_pass_cannot_be_recorded_is_the_reason(attend: Any, why: str) -> None:
    with pytest.raises(LocaterError, match=why):
        locater.scan(Flexed(attend), example={"input_ids": torch.arange(6)[None]})


def test_named_tensors_of_cross_attention_are_no_self_attention() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": 32, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 4}
    config = transformers.WhisperConfig(
        **sizes, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, vocab_size=50, pad_token_id=0
    )
    model = transformers.WhisperModel(config).eval()
    part = "*layers.*.*attn.{}_proj.weight"
    named = locater.scan(model, query=part.format("q"), key=part.format("k"), heads=4)
    kinds = [(layer["name"].split(".")[-2], layer["kind"]) for layer in named.layers]
    assert sorted(kinds) == [("encoder_attn", "cross"), ("self_attn", "self"), ("self_attn", "self")]
    assert any(note.startswith("2 of 3 layers are taken for self-attention") for note in named.assumptions["notes"])
    cross = kinds.index(("encoder_attn", "cross"))
    for row in named.rows:
        assert (row.trace is None) is (row.layer == cross)
