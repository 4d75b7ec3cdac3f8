"""Spikes and sinks in trained models: where the stream jumps, on which token, and whether the MLP that does it is
quadratic. Study d.

The stream is read after every half-block (attention, then MLP), h_0 the embedding. The first token stands out by max
|h| there over the median of max |h| of later tokens. A step up is the half-block at which this grows most, as a factor;
a step down where it shrinks most. As the first token sees itself alone, every token can be tried there as a sequence of
one. Tokens that the text does not use are left out: a model that never learned them has one embedding for all, and they
would all do the same. The MLP as a quadratic form is in `quadratic_form`.
"""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional

from locater.commands.load_model import load_model
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.inputs.text import batches
from locater.layers import Norm
from locater.measures import massive_activations, token_cosine
from locater_lab.engine.claims import Claim, Measurement, half_range
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import HALVES, model_folders, read_each
from locater_lab.papers.sun2026.sinks_and_spikes import LENGTH
from locater_lab.train.map_measures_and_diverged_layer import map_numbers

# A SwiGLU MLP as a quadratic form, which it is where its gates are far above 0.


def weights_of(mlp: nn.Module) -> tuple[Tensor, Tensor, Tensor]:
    """Gate and up (hidden, width), down (width, hidden), float64."""
    return tuple(mlp.get_parameter(f"{name}_proj.weight").detach().double() for name in ("gate", "up", "down"))  # type: ignore[return-value]


def quadratic_form(mlp: nn.Module, channel: int) -> Float[Tensor, "width width"]:
    """sym(S_k)."""
    gate, up, down = weights_of(mlp)
    S = torch.einsum("m,ma,mb->ab", down[channel], gate, up)
    return (S + S.mT) / 2


def quadratic_mlp(mlp: nn.Module, h: Float[Tensor, "*n width"]) -> Float[Tensor, "*n width"]:
    """The MLP with silu the identity."""
    gate, up, down = weights_of(mlp)
    return ((h.double() @ gate.mT) * (h.double() @ up.mT)) @ down.mT


def form_error(mlp: nn.Module, h: Float[Tensor, "n width"]) -> float:
    """The quadratic MLP beside h^T S_k h, channel by channel."""
    out = quadratic_mlp(mlp, h)
    channels = range(0, out.shape[-1], max(1, out.shape[-1] // 8))
    forms = [torch.einsum("na,ab,nb->n", h.double(), quadratic_form(mlp, k), h.double()) for k in channels]
    return max(float((f - out[:, k]).abs().max() / out[:, k].abs().max()) for f, k in zip(forms, channels, strict=True))


def dominance(S: Float[Tensor, "width width"]) -> float:
    """Largest lambda^2 over their sum: 1 for a form of rank one.

    >>> dominance(torch.diag(torch.tensor([2.0, -1.0, 0.0])))
    0.8
    """
    square = torch.linalg.eigvalsh(S.double()).square()
    return float(square.max() / square.sum())


def alignment(a: Tensor, b: Tensor) -> float:
    """Cosine of two sets of vectors taken as one."""
    a, b = a.double().flatten(), b.double().flatten()
    return float(a @ b / (a.norm() * b.norm()))


SEQUENCES = {True: 24, False: 96}  # of each half of the text
CHARACTERS = {True: 30_000, False: 120_000}
STEP = 2.0  # factor by which the stream's largest entry grows at a step up

CLAIMS = (
    Claim("d1", "Attention at the first position is W_O W_V x in trained models too",
          "largest relative error over layers and models, float32", "at most", 1e-4, by="summary"),
    Claim("d2", "The SwiGLU MLP is out_k = h^T S_k h once silu is the identity", "largest relative error, trained weights, float64",
          "at most", 1e-10, by="summary"),
    Claim("d3", "Trained models have massive activations", "share of the small models at hand that have one", "at least", 0.5, by="ours"),
    Claim("d4", "One half-block steps up: there the first token comes to stand out",
          "largest factor by which it stands out more, over half-blocks and models", "at least", STEP, by="summary", bound="ours"),
    Claim("d5", "That half-block is an MLP, early in the model",
          "its number over that of all half-blocks, and 1 more if it is attention; model with the step", "at most", 0.25, by="summary",
          bound="ours"),
    Claim("d6", "Almost every token spikes at the first position (98.4 % of the vocabulary and more)",
          f"share of the text's tokens that, put first, have {STEP:g} times the largest entry of a later token behind the step",
          "at least", 0.984, by="summary"),
    Claim("d7", "The spike is in few channels", "share of the first token's energy that is in its two largest channels, behind the step",
          "at least", 0.5, by="summary", bound="ours"),
    Claim("d8", "There the MLP acts as its quadratic form", "cosine of the MLP's output and the form's, first token", "at least", 0.9,
          by="summary", bound="ours"),
    Claim("d9", "On later tokens it does not", "the same cosine there", "at most", 0.6, by="ours"),
    Claim("d10", "One eigenvector dominates the form of the spike's channel", "share of the largest eigenvalue in the sum of squares",
          "at least", 0.5, by="summary", bound="ours"),
    Claim("d11", "Behind the norm spike tokens are near constant",
          "mean cosine of the text's tokens, each put first, after RMSNorm behind the step", "at least", 0.9, by="summary", bound="ours"),
    Claim("d12", "One half-block steps down: the spike is cancelled before the end",
          "least factor by which the first token stands out less, model with the step", "at most", 0.5, by="summary", bound="ours"),
    Claim("d13", "It is the position that spikes, not the token that stands there",
          "how far the first token stands out behind the step when put in the middle, over how far it does when first", "at most", 0.5,
          by="ours"),
    Claim("d14", "Sinks without spikes: small trained models have sinks where nothing is massive",
          "largest sink ratio of the models without a massive activation, 64 tokens", "at least", 0.1, by="ours"),
)  # fmt: skip
OF_STEP = {
    "d6": "vocabulary", "d7": "in_two_channels", "d8": "cosine", "d9": "cosine_later", "d10": "dominance", "d11": "alike", "d12": "fall",
    "d13": "moved",
}  # fmt: skip

States = list[Float[Tensor, "B T width"]]
Pairs = list[tuple[Tensor, Tensor]]  # input and output of a part
Stream = tuple[States, Pairs, Pairs]  # states, and the pairs of attention and of MLPs


def swiglu_blocks(model: Any) -> nn.ModuleList:
    """Pre-norm blocks with a SwiGLU MLP, as Llama has them; refused otherwise."""
    layers = getattr(getattr(model, "model", None), "layers", None)
    parts = ("input_layernorm", "post_attention_layernorm", "mlp.gate_proj")
    if layers is None or not all(_has(block, part) for block in layers for part in parts):
        raise LocaterError(f"{type(model).__name__}: no pre-norm blocks with a gated MLP")
    return layers


def _has(module: nn.Module, path: str) -> bool:
    return path in dict(module.named_modules())


@torch.no_grad()
def half_blocks(model: Any, ids: Tensor) -> Stream:
    """The stream before, between and behind half-blocks; input and output of each attention and each MLP."""
    states: States = []
    attention: Pairs = []
    mlps: Pairs = []

    def before(module: nn.Module, args: Any, kwargs: Any) -> None:
        states.append((args[0] if args else kwargs["hidden_states"]).detach())

    def keep_attention(module: nn.Module, args: Any, kwargs: Any, out: Any) -> None:
        attention.append((args[0] if args else kwargs["hidden_states"], out[0] if isinstance(out, tuple) else out))

    def keep_mlp(module: nn.Module, args: Any, out: Tensor) -> None:
        mlps.append((args[0], out))

    hooks = []
    for block in swiglu_blocks(model):
        for part in (block, block.get_submodule("post_attention_layernorm")):
            hooks.append(part.register_forward_pre_hook(before, with_kwargs=True))
        hooks.append(block.get_submodule("self_attn").register_forward_hook(keep_attention, with_kwargs=True))
        hooks.append(block.get_submodule("mlp").register_forward_hook(keep_mlp))
    hooks.append(model.model.norm.register_forward_pre_hook(before, with_kwargs=True))
    try:
        model(input_ids=ids)
    finally:
        for hook in hooks:
            hook.remove()
    return states, attention, mlps


def largest_entries(states: States) -> Float[Tensor, "halves B T"]:
    """max |h| of every token."""
    return torch.stack([x.abs().amax(-1) for x in states]).double()


def first_token_ratios(tops: Float[Tensor, "halves B T"]) -> Float[Tensor, " halves"]:
    """max |h| of first tokens, mean, over the median of later ones."""
    return tops[:, :, 0].mean(1) / tops[:, :, 1:].flatten(1).median(1).values


def largest_steps(out: Float[Tensor, " halves"]) -> tuple[int, float, int, float]:
    """Half-block and factor of the step up and of the step down, half-blocks from 1.

    >>> largest_steps(torch.tensor([1.0, 1.5, 6.0, 6.0, 3.0]))
    (2, 4.0, 4, 0.5)
    """
    factors = out[1:] / out[:-1]
    up, down = int(factors.argmax()), int(factors.argmin())
    return up + 1, float(factors[up]), down + 1, float(factors[down])


# --- one model ---


def sink_shares(model: Any, attention: Pairs) -> dict[str, float]:
    """Shares of heads with a sink, on the first token and in the first half, and the largest alpha_1 of a head."""
    maps = [
        replace(layer, norm=Norm()).attention(x)
        for layer, (x, _) in zip(attention_layers(model), attention, strict=True)
    ]
    counted = [map_numbers(weights, causal=True) for weights in maps]  # what attention reads is behind the norm
    shares = {
        name: math.fsum(each[name] or 0.0 for each in counted) / len(counted) for name in ("sink_rate", "sink_ratio")
    }
    return {**shares, "alpha": max(float(weights[..., 0].mean((0, 2)).max()) for weights in maps)}


def first_error(model: Any, attention: Pairs) -> float:
    """Attention's output at the first position beside W_O W_V x, largest of the layers."""
    errors = []
    for layer, (x, out) in zip(attention_layers(model), attention, strict=True):
        assert layer.value is not None
        assert layer.out is not None
        v = layer.value(x[:, 0]).unflatten(-1, (layer.kv_heads, -1)).repeat_interleave(layer.group, -2).flatten(-2)
        errors.append(float((layer.out(v) - out[:, 0]).abs().max() / out[:, 0].abs().max()))
    return max(errors)


@torch.no_grad()
def measure_half(model: Any, ids: Tensor) -> dict[str, Any]:
    """Everything that is measured of a model on one half of a text."""
    stream = half_blocks(model, ids)
    states, attention, mlps = stream
    tops = largest_entries(states)
    out = first_token_ratios(tops)
    up, factor, down, fall = largest_steps(out)
    massive = [massive_activations(x) for x in states]
    return {
        "largest": tops.amax(-1).mean(1).tolist(), "first": tops[:, :, 0].mean(1).tolist(),
        "others": tops[:, :, 1:].flatten(1).median(1).values.tolist(), "out": out.tolist(),
        "massive": any(bool(x.is_massive.any()) for x in massive), "ratio": max(float(x.ratio.mean()) for x in massive),
        "up": up, "factor": factor, "down": down, "fall": fall, "is_mlp": up % 2 == 0, "halves": len(states) - 1,
        "form_error": form_error(swiglu_blocks(model)[0].get_submodule("mlp"), mlps[0][0][0]), "first_error": first_error(model, attention),
        **sink_shares(model, attention), **(measure_step(model, ids, stream, up) if factor >= STEP and up % 2 == 0 else {}),
    }  # fmt: skip


def measure_step(model: Any, ids: Tensor, stream: Stream, up: int) -> dict[str, Any]:
    """The MLP that steps up: on first tokens as the text has them, on later ones, and on the text's tokens put first
    one by one.
    """
    states, _, mlps = stream
    number = up // 2 - 1
    mlp = swiglu_blocks(model)[number].get_submodule("mlp")
    x, out = mlps[number]
    form_out = quadratic_mlp(mlp, x)
    later = float(largest_entries(states)[up, :, 1:].median())
    first = states[up][:, 0].abs().mean(0)
    channel = int(first.argmax())
    shares = sorted(dominance(quadratic_form(mlp, k)) for k in range(len(first)))
    words = ids[:, 1:].unique()
    alone = half_blocks(model, words[:, None])[0][up][:, 0]
    middle = ids.clone()
    middle[:, ids.shape[1] // 2] = ids[:, 0]
    moved = float(largest_entries(half_blocks(model, middle)[0])[up, :, ids.shape[1] // 2].mean())
    return {
        "words": len(words), "vocabulary": float((alone.abs().amax(-1) > STEP * later).double().mean()), "channel": channel,
        "in_two_channels": float(first.square().topk(2).values.sum() / first.square().sum()),
        "cosine": alignment(form_out[:, 0], out[:, 0]), "cosine_later": alignment(form_out[:, 1:], out[:, 1:]),
        "dominance": dominance(quadratic_form(mlp, channel)), "dominance_median": shares[len(shares) // 2], "dominance_largest": shares[-1],
        "alike": float(token_cosine(functional.rms_norm(alone, alone.shape[-1:])[None])), "first_tokens": len(ids[:, 0].unique()),
        "moved": moved / float(first.max()), "middle": moved / later,
    }  # fmt: skip


def measure_models(setting: Setting) -> tuple[dict[str, list[dict[str, Any]]], dict[str, str]]:
    """Every available model on two halves of the text, and what was left out, with the reason."""

    def halves(name: str, folder: Path) -> list[dict[str, Any]]:
        model = load_model(str(folder)).requires_grad_(False)
        swiglu_blocks(model)
        return [measure_half(model, ids) for ids in _measure_halves(model, setting)]

    return read_each(setting.each(list(model_folders(setting.models).items())), halves)


def _measure_halves(model: Any, setting: Setting) -> list[Tensor]:
    size, count = CHARACTERS[setting.quick], SEQUENCES[setting.quick]
    texts = [setting.text[i * size : (i + 1) * size] for i in range(2)]
    return [
        torch.cat([part["input_ids"] for part in batches(model, t, length=LENGTH, tokens=LENGTH * count)])[:count]
        for t in texts
    ]


def measure(setting: Setting) -> Results:
    """Claims about the step are measured on the model with the largest; not at all where no model has one."""
    by_model, left_out = measure_models(setting)
    if not by_model:
        return Results({})
    every = [half for halves in by_model.values() for half in halves]
    stepping = max(by_model, key=lambda name: math.fsum(half["factor"] for half in by_model[name]))
    own = by_model[stepping]
    massive = [sum(halves[i]["massive"] for halves in by_model.values()) / len(by_model) for i in range(2)]
    worst = "none: the largest of all"
    measured = {
        "d1": Measurement(max(half["first_error"] for half in every), 0.0, worst),
        "d2": Measurement(max(half["form_error"] for half in every), 0.0, worst),
        "d3": half_range(massive, HALVES),
        "d4": half_range([half["factor"] for half in own], HALVES),
    }
    if all(half["factor"] >= STEP for half in own):
        measured["d5"] = half_range([half["up"] / half["halves"] + (not half["is_mlp"]) for half in own], HALVES)
    if all("vocabulary" in half for half in own):
        measured |= {key: half_range([half[name] for half in own], HALVES) for key, name in OF_STEP.items()}
    calm = [halves for halves in by_model.values() if not any(half["massive"] for half in halves)]
    if calm:
        measured["d14"] = half_range([max(halves[i]["sink_ratio"] for halves in calm) for i in range(2)], HALVES)
    return Results(measured, {"streams": {"models": by_model, "left_out": left_out, "stepping": stepping}})


NEEDS = "a trained model with pre-norm blocks and a step up: --models FOLDER"
STUDY = Study("spikes and sinks of trained models", CLAIMS, measure, needs=NEEDS, on_models=True)
