"""The Gaussian surrogate: folding measured tokens into heads, exact cases, and trained models on text they were not
measured on.
"""

from __future__ import annotations

import math
from dataclasses import replace
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import locater
from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater.inputs.text import batches
from locater.layers import AttentionLayer, Norm, Tokens, effective
from locater.numerics import spearman
from locater.observing.input_covariances import statistics_of_batches
from locater.observing.observation import observe
from locater.observing.run_model import run_model
from locater.predict.prediction_and_logit_bound import predict
from locater.predict.statistics_file import Input
from locater.theory import unit_moments
from locater.theory.gaussian_tokens_and_covariance_root import JITTER, gaussian_tokens, root
from locater_lab.engine.trained_models import sentence_model, why_unavailable
from tests import ROOT
from tests.families import CASES
from tests.parity import model_of

SHARED = ROOT.parent / "shared"
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
    "gemma2",
]
NORMED = ["qwen3", "gemma3", "cohere-normed", "stablelm-normed", "timm-head-norms", "timm-rms", "phi-normed"]
CROSS = ["t5", "bart", "whisper", "roberta-cross", "torch-transformer-pre"]


def layers_of(label: str) -> list[AttentionLayer]:
    return list(attention_layers(model_of(next(c for c in CASES if c.label == label))))


def some_tokens(width: int, seed: int = 0, rank: int | None = None) -> Tokens:
    """A mean and a covariance that is far from the identity."""
    generator = torch.Generator().manual_seed(seed)
    factor = torch.randn(width, rank or 2 * width, dtype=torch.float64, generator=generator) / width**0.5
    return Tokens(torch.randn(width, dtype=torch.float64, generator=generator), factor @ factor.mT)


def measured(layer: AttentionLayer) -> Tokens:
    tokens = some_tokens(layer.width)
    return tokens if layer.kind == "self" else replace(tokens, memory=some_tokens(layer.key.shape[1], seed=1))


def maps(layer: AttentionLayer, head: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(W_Q, b_q, W_K, b_k) of one head, float64."""
    size, kv = layer.head_dim, head // layer.group
    q, k = (slice(at * size, (at + 1) * size) for at in (head, kv))
    # in front of a norm of each head, where the map has one
    query, key = (getattr(p, "down", p) for p in (layer.query, layer.key))
    b_q, b_k = (
        torch.zeros(size).double() if p.bias is None else p.bias.double()[rows] for p, rows in ((query, q), (key, k))
    )
    return query.weight().double()[q], b_q, key.weight().double()[k], b_k


def normed(weight: Tensor, bias: Tensor, tokens: Tokens, norm: Norm | None, head: int) -> tuple[Tensor, Tensor]:
    """Norm of queries or keys in mean field: divided by the root of E |W x + b|^2 / d_head over tokens, with explicit d
    x d products.
    """
    if norm is None:
        return weight, bias
    size = len(weight)
    if norm.kind == "layer":
        off_mean = torch.eye(size, dtype=torch.float64) - 1 / size
        weight, bias = off_mean @ weight, off_mean @ bias
    constant = weight @ tokens.mean + bias
    energy = torch.trace(weight @ tokens.covariance @ weight.T) + constant @ constant
    gain = torch.ones(size, dtype=torch.float64) if norm.gain is None else norm.gain.double()
    gain = gain if gain.ndim == 1 else gain[head]
    factor = gain / (energy / size).sqrt()
    shift = torch.zeros(size, dtype=torch.float64) if norm.bias is None else norm.bias.double()
    return factor[:, None] * weight, factor * bias + (shift if shift.ndim == 1 else shift[head])


# ---- explicit d x d formulas ----


@pytest.mark.parametrize("label", [*PLAIN, *NORMED])
@torch.no_grad()
def test_moments_over_measured_tokens(label: str) -> None:
    """M = s tr(W C), S = s^2 tr((W C)^2), F = s^2 tr(W C W^T C), key bias s |C^(1/2) W_K^T (W_Q mean + b_q)|."""
    for layer in layers_of(label):
        tokens = measured(layer)
        C, s = tokens.covariance, layer.scale
        folded = effective(layer, tokens=tokens)
        M, S, F = unit_moments(folded.moments(), s)
        for head in range(layer.heads):
            W_Q, b_q, W_K, b_k = maps(layer, head)
            W_Q, b_q = normed(W_Q, b_q, tokens, getattr(layer.query, "inner", layer.query_norm), head)
            W_K, _ = normed(W_K, b_k, tokens, getattr(layer.key, "inner", layer.key_norm), head // layer.group)
            W = W_Q.T @ W_K
            e = W_K.T @ (W_Q @ tokens.mean + b_q)
            scale = float(F[head].sqrt())
            assert float(M[head]) == pytest.approx(s * float(torch.trace(W @ C)), abs=1e-9 * scale)
            assert float(S[head]) == pytest.approx(s**2 * float(torch.trace(W @ C @ W @ C)), abs=1e-9 * scale**2)
            assert float(F[head]) == pytest.approx(s**2 * float(torch.trace(W @ C @ W.T @ C)), rel=1e-9)
            assert float(folded.key_bias[head]) == pytest.approx(s * float((e @ C @ e).sqrt()), rel=1e-9)


@pytest.mark.parametrize("label", CROSS)
@torch.no_grad()
def test_cross_attention_has_two_covariances(label: str) -> None:
    """F = s^2 tr(C_q W C_k W^T); traces have no meaning. The key bias speaks of the memory's spread."""
    for layer in (x for x in layers_of(label) if x.kind == "cross"):
        tokens = measured(layer)
        assert tokens.memory is not None
        folded = effective(layer, tokens=tokens)
        found = folded.moments()
        assert found.cross is None
        for head in range(layer.heads):
            W_Q, b_q, W_K, _ = maps(layer, head)
            W, e = W_Q.T @ W_K, W_K.T @ (W_Q @ tokens.mean + b_q)
            expected = torch.trace(tokens.covariance @ W @ tokens.memory.covariance @ W.T)
            assert float(found.frobenius_sq[head]) == pytest.approx(float(expected), rel=1e-9)
            assert float(folded.key_bias[head]) == pytest.approx(
                layer.scale * float((e @ tokens.memory.covariance @ e).sqrt()), rel=1e-9
            )


@pytest.mark.parametrize("label", ["olmo2", "deepseek_v3", "qwen3"])
@torch.no_grad()
def test_norms_inside_the_maps_take_the_measured_root_mean_square(label: str) -> None:
    """Tokens three times as large, mean included, leave queries as they are."""
    for layer in layers_of(label):
        tokens = measured(layer)
        large = effective(layer, tokens=Tokens(3 * tokens.mean, 9 * tokens.covariance))
        ours = effective(layer, tokens=tokens)
        assert torch.allclose(ours.query, large.query, rtol=1e-9)
        if label != "deepseek_v3":  # its rotary keys pass no norm
            assert torch.allclose(ours.key, large.key, rtol=1e-9)


@pytest.mark.parametrize("label", ["olmo2", "deepseek_v3", "deepseek_v3-yarn-biased", "cohere-normed", "qwen3"])
@torch.no_grad()
def test_the_fold_meets_the_spread_of_real_logits_on_measured_tokens(label: str) -> None:
    for layer in layers_of(label):
        tokens = measured(layer)
        x = gaussian_tokens(tokens.mean, tokens.covariance, 1, 800)
        at = torch.zeros(800, dtype=torch.long)
        bare = replace(layer, norm=Norm(), softcap=None, bias=None)
        real = bare.logits(x, query_positions=at, key_positions=at)[0]
        folded = effective(layer, tokens=tokens)
        ours = (folded.moments().frobenius_sq * layer.scale**2 + folded.key_bias**2).sqrt()
        assert torch.allclose(ours, real.std(dim=-1).square().mean(-1).sqrt(), rtol=0.12)


@torch.no_grad()
def test_unit_tokens_are_a_special_case() -> None:
    """After LayerNorm the stream is gain * z + bias with covariance of z I - 11^T/d: as statistics, the same
    numbers.
    """
    for label in ("gpt2", "llama", "qwen3"):
        for layer in layers_of(label):
            d = layer.width
            C = torch.eye(d, dtype=torch.float64) - (1 / d if layer.norm.kind == "layer" else 0)
            gain = torch.ones(d, dtype=torch.float64) if layer.norm.gain is None else layer.norm.gain
            mean = torch.zeros(d, dtype=torch.float64) if layer.norm.bias is None else layer.norm.bias
            ours, unit = effective(layer, tokens=Tokens(mean, gain[:, None] * C * gain)), effective(layer)
            tolerance = 10 * JITTER  # I - 11^T/d is singular
            assert torch.allclose(ours.moments().frobenius_sq, unit.moments().frobenius_sq, rtol=tolerance)
            assert torch.allclose(
                ours.moments().trace, unit.moments().trace, atol=tolerance * float(unit.moments().frobenius_sq.max())
            )
            assert torch.allclose(ours.key_bias, unit.key_bias, rtol=tolerance)


@torch.no_grad()
def test_the_root_mean_square_of_queries_is_that_of_tokens() -> None:
    """||W R||_F^2 + |W mean + b|^2 is E |q|^2: what a norm on the queries divides by."""
    layer = replace(layers_of("llama-wide-heads-biased")[0], norm=Norm())
    tokens = some_tokens(layer.width)
    x = gaussian_tokens(tokens.mean, tokens.covariance, 1, 40000)
    q = layer.queries(x, torch.zeros(40000, dtype=torch.long))[0]
    W, b = layer.query.weight().unflatten(0, (layer.heads, -1)), layer.query.bias
    assert b is not None
    constant = W @ tokens.mean + b.view(layer.heads, -1)
    expected = (W @ root(tokens.covariance)).square().sum((1, 2)) + constant.square().sum(-1)
    assert torch.allclose(q.square().sum(-1).mean(-1), expected, rtol=0.02)


# ---- the root ----


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("rank", [64, 40, 5, 1])
def test_root_of_singular_covariances(rank: int, dtype: torch.dtype) -> None:
    C = some_tokens(64, rank=rank).covariance.to(dtype)
    R = root(C)
    mean = float(C.diagonal().mean())
    assert torch.allclose(
        R @ R.mT, C, rtol=0, atol=2 * JITTER * mean + 20 * torch.finfo(dtype).eps * float(C.abs().max())
    )
    assert R.dtype == dtype


def test_root_of_nothing_and_of_rubbish() -> None:
    assert torch.equal(root(torch.zeros(3, 3)), torch.zeros(3, 3))
    broken = torch.eye(3)
    broken[1, 1] = torch.nan
    assert root(broken).isnan().all()
    almost = torch.diag(torch.tensor([1.0, -1e-4]))  # not a covariance, by more than the jitter
    assert torch.allclose(root(almost) @ root(almost).mT, torch.diag(torch.tensor([1.0, 0.0])), atol=1e-6)


def test_gaussian_tokens_have_the_moments_asked_for() -> None:
    tokens = some_tokens(6)
    x = gaussian_tokens(tokens.mean, tokens.covariance, 20, 2000, first=torch.arange(6, dtype=torch.float64))
    assert torch.equal(x[:, 0], torch.arange(6, dtype=torch.float64).expand(20, 6))
    later = x[:, 1:].flatten(0, 1)
    spread = tokens.covariance.diagonal().sqrt()
    assert ((later.mean(0) - tokens.mean).abs() < 5 * spread / len(later) ** 0.5).all()
    assert torch.allclose(torch.cov(later.mT), tokens.covariance, atol=0.05)
    assert torch.equal(
        x, gaussian_tokens(tokens.mean, tokens.covariance, 20, 2000, first=torch.arange(6, dtype=torch.float64))
    )
    assert not torch.equal(x[:, 1:], gaussian_tokens(tokens.mean, tokens.covariance, 20, 2000, seed=1)[:, 1:])


# ---- where the prediction must be exact ----


def given_of(tokens: Tokens, layer: AttentionLayer, first: Tensor | None = None) -> Input:
    memory = tokens.memory
    return Input(
        0, layer.name, layer.kind, 0, tokens.mean.float(), tokens.covariance.float(), None if first is None else first.float(),
        None if memory is None else memory.mean.float(), None if memory is None else memory.covariance.float(),
    )  # fmt: skip


LENGTH, DRAWS = 24, 200


@pytest.mark.parametrize(
    "label", ["llama", "mistral-window", "gemma3", "gemma2", "gpt_oss", "bert", "bloom", "xlnet", "deberta_v2", "bart"]
)
@torch.no_grad()
def test_normal_inputs_are_predicted_within_monte_carlo_error(label: str) -> None:
    """Other draws of the same tokens, the maps of the layer written out; five standard errors."""
    for layer in layers_of(label)[-2:]:
        tokens = measured(layer)
        first = None if layer.kind == "cross" else tokens.mean + 2
        ours = predict(layer, given_of(tokens, layer, first), LENGTH, sequences=4 * DRAWS)
        x = gaussian_tokens(tokens.mean, tokens.covariance, DRAWS, LENGTH, first, seed=7)
        memory = (
            None
            if tokens.memory is None
            else gaussian_tokens(tokens.memory.mean, tokens.memory.covariance, DRAWS, LENGTH, seed=8)
        )
        p = replace(layer, norm=Norm(), memory_norm=None).attention(x, memory)  # (B, H, T, S)
        entropy = -torch.special.xlogy(p, p).sum(-1).mean(-1)
        compare(ours["entropy"], entropy)
        rest = p[..., 1:] / p[..., 1:].sum(-1, keepdim=True)
        rows = layer.visible(LENGTH, LENGTH)[0, 0][:, 1:].any(-1)
        compare(ours["rest_entropy"], -torch.special.xlogy(rest, rest).sum(-1)[..., rows].mean(-1))
        if layer.kind == "self":
            compare(ours["sink"], p[..., 0][..., layer.visible(LENGTH, LENGTH)[0, 0][:, 0]].mean(-1))
        else:
            assert "sink" not in ours


def compare(predicted: Tensor, sequences: Tensor) -> None:
    """`sequences` (B, H): the same number, one per sequence of an independent draw, a quarter as many."""
    error = sequences.std(0) / len(sequences) ** 0.5
    assert ((predicted.double() - sequences.mean(0)).abs() < 5 * math.sqrt(1.25) * error + 1e-5).all()


@torch.no_grad()
def test_heads_without_queries_are_uniform() -> None:
    model: Any = model_of(next(c for c in CASES if c.label == "bert"))
    for name, p in model.named_parameters():
        if ".query." in name:
            p.zero_()
    for layer in attention_layers(model):
        for given in (None, given_of(measured(layer), layer, torch.zeros(layer.width))):
            found = predict(layer, given, 50)
            assert torch.allclose(found["entropy"], torch.full((4,), math.log(50)), atol=1e-5)
            assert torch.allclose(found["rest_entropy"], torch.full((4,), math.log(49)), atol=1e-5)
            assert torch.allclose(found["sink"], torch.full((4,), 1 / 50), atol=1e-6)


@torch.no_grad()
def test_equal_tokens_are_uniform_in_what_each_row_sees() -> None:
    layer = replace(layers_of("llama")[0], rotary=None)
    constant = Input(
        0, "", "self", 9, torch.ones(layer.width), torch.zeros(layer.width, layer.width), torch.ones(layer.width)
    )
    expected = sum(math.log(n) for n in range(1, 31)) / 30
    assert torch.allclose(predict(layer, constant, 30)["entropy"], torch.full((4,), expected), atol=1e-4)


@torch.no_grad()
def test_cross_attention_looks_at_as_many_keys_as_asked() -> None:
    layer = next(x for x in layers_of("bart") if x.kind == "cross")
    silent = replace(layer, scale=0.0)
    for given in (None, given_of(measured(layer), layer)):
        assert torch.allclose(
            predict(silent, given, 8, 40)["entropy"], torch.full((layer.heads,), math.log(40)), atol=1e-5
        )


@torch.no_grad()
def test_weights_alone_know_that_layer_norm_removes_the_mean() -> None:
    """A key map that reads nothing but the mean direction sees nothing after LayerNorm, and everything after
    RMSNorm.
    """
    layer = layers_of("gpt2")[0]
    ones = torch.ones_like(layer.key.weight())
    blind = replace(layer, norm=Norm("layer"), key=replace(layer.key, weight=lambda: ones, bias=None))
    uniform = sum(math.log(n) for n in range(1, 21)) / 20
    assert torch.allclose(predict(blind, None, 20)["entropy"], torch.full((4,), uniform), atol=1e-3)
    assert (predict(replace(blind, norm=Norm("rms")), None, 20)["entropy"] < uniform - 0.1).all()


def test_scans_use_statistics(tmp_path: Path) -> None:
    case = next(c for c in CASES if c.label == "qwen3")
    model = model_of(case).float()
    found = statistics_of_batches(model, [case.batch()])
    scanned = locater.scan(model, statistics=found, length=9)
    assert scanned.assumptions["prediction"] == "predicted"
    for layer, given in zip(attention_layers(model), found.inputs, strict=True):
        rows = [row for row in scanned.rows if row.layer == given.layer]
        M, _, F = unit_moments(effective(layer, tokens=given.as_tokens()).moments(), layer.scale)
        assert [row.M for row in rows] == pytest.approx(M.tolist(), rel=1e-5)
        assert [row.F for row in rows] == pytest.approx(F.tolist(), rel=1e-5)
        assert [row.expected_entropy for row in rows] == pytest.approx(
            predict(layer, given, 9)["entropy"].tolist(), rel=1e-5
        )
    found.save(tmp_path / "a.pt")
    model.save_pretrained(tmp_path / "model")
    again = locater.scan(tmp_path / "model", statistics=locater.Statistics.load(tmp_path / "a.pt"), length=9)
    assert [row.M for row in again.rows] == pytest.approx([row.M for row in scanned.rows], rel=1e-4)


# ---- trained models, held out ----


MODELS: dict[str, Path | None] = {
    "demo": Path(str(files("locater") / "demo")),
    "stories260K": SHARED / "models" / "stories260K",
    "MiniLM": None if why_unavailable() else sentence_model(),
}
T = 128


@cache
def texts() -> tuple[str, str]:
    """One text for statistics, another to measure on."""
    from pydoc_data import topics

    text = "\n\n".join(topics.topics[name] for name in sorted(topics.topics))
    return text[: len(text) // 2], text[len(text) // 2 :]


@pytest.mark.parametrize("name", [pytest.param(x, marks=[pytest.mark.slow] if x == "MiniLM" else []) for x in MODELS])
@torch.no_grad()
def test_held_out_predictions_of_trained_models(name: str) -> None:
    folder = MODELS[name]
    if folder is None or not folder.is_dir():
        pytest.skip(f"{folder} is not here" if folder else str(why_unavailable()))
    model: Any = load_model(str(folder))
    most = min(T, getattr(model.config, "max_position_embeddings", T))
    one, other = (batches(model, text[:60000], length=most, tokens=2048) for text in texts())
    found = statistics_of_batches(model, one)
    with observe(model, rest=True) as seen:
        for part in other:
            run_model(model, part)
    layers = list(attention_layers(model))
    measured = torch.tensor([row.entropy for row in seen.rows])
    predicted = torch.cat([predict(layers[x.layer], x, most)["entropy"] for x in found.inputs])
    prior = torch.cat([predict(layer, None, most)["entropy"] for layer in layers])
    right, wrong = spearman(predicted, measured), spearman(prior, measured)
    error, prior_error = (float((x - measured).abs().mean()) for x in (predicted, prior))
    print(f"{name}: statistics {right:.2f}, {error:.2f} nats; weights alone {wrong:.2f}, {prior_error:.2f} nats")
    assert right is not None
    assert right >= 0.8
    assert error < prior_error
