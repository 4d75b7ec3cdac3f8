"""The effective map: differences of real logits between keys must be what W and the key-only term say, and no more."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from locater.discovery import attention_layers
from locater.layers import AttentionLayer, Norm, effective
from locater.layers.norm_folding import mean_field_gain
from tests.families import CASES
from tests.parity import Case, model_of

PLAIN = [
    "llama",
    "llama-wide-heads-biased",
    "qwen2",
    "gpt2",
    "gpt_neox",
    "bert",
    "vit",
    "torch-encoder-pre",
    "torch-encoder-post",
]


def layers_of(label: str) -> list[AttentionLayer]:
    case: Case = next(c for c in CASES if c.label == label)
    return list(attention_layers(model_of(case)))


def unit_tokens(layer: AttentionLayer, count: int, seed: int = 0) -> Tensor:
    x = torch.randn(1, count, layer.width, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    return layer.norm.standardize(x)


@pytest.mark.parametrize("label", PLAIN)
@torch.no_grad()
def test_logits_differ_between_keys_as_the_effective_map_says(label: str) -> None:
    """All tokens at position 0, so that rotary positions drop out; what is common to all keys cancels in the
    difference.
    """
    for layer in layers_of(label):
        z = unit_tokens(layer, 12)
        at = torch.zeros(12, dtype=torch.long)
        real = layer.logits(z, normalized=True, query_positions=at, key_positions=at)
        folded = effective(layer)
        key = folded.key.repeat_interleave(layer.group, 0)
        pairs = torch.einsum("btd,hcd,hce,bse->bhts", z, folded.query, key, z)
        alone = torch.einsum("hd,bsd->bhs", folded.key_term, z)[:, :, None]
        ours = layer.scale * (pairs + alone)
        assert torch.allclose(real.diff(dim=-1), ours.diff(dim=-1), atol=1e-9, rtol=0)


@pytest.mark.parametrize("label", ["gpt2", "bert"])
@torch.no_grad()
def test_layer_norm_takes_the_mean_direction_out(label: str) -> None:
    folded = effective(layers_of(label)[0])
    ones = torch.ones(folded.query.shape[-1], dtype=folded.query.dtype)
    assert (folded.query @ ones).abs().max() < 1e-12
    assert (folded.key @ ones).abs().max() < 1e-12


@pytest.mark.parametrize("label", ["gemma3", "qwen3"])
@torch.no_grad()
def test_query_key_norm_makes_the_scale_of_the_weights_irrelevant(label: str) -> None:
    case = next(c for c in CASES if c.label == label)
    model = model_of(case)
    before = [effective(layer).moments().frobenius_sq.clone() for layer in attention_layers(model)]
    for name, p in model.named_parameters():
        if name.endswith("q_proj.weight"):
            p *= 3
    after = [effective(layer).moments().frobenius_sq for layer in attention_layers(model)]
    for a, b in zip(before, after, strict=True):
        assert torch.allclose(a, b, rtol=1e-12)


@pytest.mark.parametrize("label", ["gemma3", "qwen3"])
@torch.no_grad()
def test_mean_field_meets_the_spread_of_real_logits(label: str) -> None:
    """The norm of each token's own query is replaced by its root mean square: right on average, to a few percent."""
    for layer in layers_of(label):
        z = unit_tokens(layer, 600)
        at = torch.zeros(600, dtype=torch.long)
        real = layer.logits(z, normalized=True, query_positions=at, key_positions=at)[0]
        folded = effective(layer)
        ours = (folded.moments().frobenius_sq * layer.scale**2 + folded.key_bias**2).sqrt()
        measured = real.std(dim=-1).square().mean(-1).sqrt()
        assert torch.allclose(ours, measured, rtol=0.12)


@torch.no_grad()
def test_key_bias_is_the_spread_of_the_key_only_term() -> None:
    layer = layers_of("bert")[1]
    z = unit_tokens(layer, 4000)
    folded = effective(layer)
    measured = layer.scale * torch.einsum("hd,sd->hs", folded.key_term, z[0]).std(-1)
    assert torch.allclose(folded.key_bias, measured, rtol=0.06)


@torch.no_grad()
def test_rotary_amplitude_is_part_of_the_map() -> None:
    layer = layers_of("llama-rope-yarn")[0]
    assert layer.rotary is not None
    assert layer.rotary.amplitude > 1.1
    test_logits_differ_between_keys_as_the_effective_map_says("llama-rope-yarn")


@pytest.mark.parametrize("label", ["llama", "gpt_neox", "llama-rope-yarn"])
@torch.no_grad()
def test_drive_is_the_mean_logit_of_a_copy_some_way_back(label: str) -> None:
    """M(delta) = s tr(R G), against the real layer's logits between copies of unit vectors that far apart."""
    layer = layers_of(label)[0]
    assert layer.rotary is not None
    folded = effective(layer)
    offsets = torch.tensor([0, 1, 2, 5, 11])
    ours = layer.scale * layer.rotary.drive(folded.moments().gram, offsets)
    tokens = torch.eye(layer.width, dtype=torch.float64)[:, None]  # summing over a basis gives the trace
    for column, offset in enumerate(offsets.tolist()):
        at = torch.tensor([offset])
        pair = layer.logits(tokens, tokens, query_positions=at, key_positions=at * 0, normalized=True)
        without_bias = layer.logits(tokens * 0, tokens, query_positions=at, key_positions=at * 0, normalized=True)
        other = layer.logits(tokens, tokens * 0, query_positions=at, key_positions=at * 0, normalized=True)
        both = layer.logits(tokens * 0, tokens * 0, query_positions=at, key_positions=at * 0, normalized=True)
        bilinear = (pair - without_bias - other + both)[:, :, 0, 0]
        if layer.norm.kind == "layer":  # the effective map acts on centred tokens
            ones = torch.ones(1, 1, layer.width, dtype=torch.float64) / layer.width**0.5
            mean_part = [
                layer.logits(a, b, query_positions=at, key_positions=at * 0, normalized=True) for a, b in _corners(ones)
            ]
            expected = bilinear.sum(0) - (mean_part[0] - mean_part[1] - mean_part[2] + mean_part[3])[0, :, 0, 0]
        else:
            expected = bilinear.sum(0)
        assert torch.allclose(ours[:, column], expected, atol=1e-5)


def _corners(x: Tensor) -> list[tuple[Tensor, Tensor]]:
    zero = torch.zeros_like(x)
    return [(x, x), (zero, x), (x, zero), (zero, zero)]


def test_weights_whose_norm_overflows_are_no_head_of_zeros() -> None:
    """A norm on queries divides by |W|; what it cannot know is said, as the flag `nonfinite`, and not taken for
    infinite.
    """
    found = mean_field_gain(torch.tensor([1e20, 1.0]).view(2, 1, 1).expand(2, 3, 4), torch.zeros(2, 3), Norm("rms"))
    assert found.isfinite().all(1).tolist() == [False, True]
    assert found[1].item() == pytest.approx(0.5)  # sqrt(3) / sqrt(12)
