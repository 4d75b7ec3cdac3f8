"""Trained models whose attention is made binary as it is, with no fine-tuning: entropy, order of keys, gradients, loss.
Study c.

The paper fine-tunes for 300 epochs after the change; nothing here says that this is not needed. It says how much it has
to repair.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.load import load_model
from locater.control import Controls, Temperature
from locater.control.base import Layers
from locater.inputs.text import batches
from locater.layers import AttentionLayer, Norm
from locater.observing.inputs import run
from locater_lab.engine.claims import Claim, Measurement, half_range
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import HALVES, layer_inputs, model_folders
from locater_lab.mechanisms import mechanism
from locater_lab.mechanisms.swap import SwapMechanism
from locater_lab.papers.xiao2026.flattening import ranks, row_correlation, top_agreement

LENGTH = 128
TOKENS = {True: 1024, False: 8192}  # per half of the text
CHARACTERS = {True: 30_000, False: 240_000}
RESTORED = math.pi / 2  # times: brings the spread of Gaussian logits back to what it was

CLAIMS = (
    Claim("c1", "Signs flatten the rows of trained models too", "change of mean entropy in nats by binary attention, least of the models",
          "at least", 0.0, by="ours"),
    Claim("c2", "Trained heads keep their strongest key more often than random ones do (13 %)",
          "share of rows whose largest weight stays the largest, least of the models", "at least", 0.13, by="ours"),
    Claim("c3", "The order of keys is kept as well as of Gaussian ones (0.62)",
          "rank correlation of real and binary logits within rows, mean over heads, least of the models", "at least", 0.62, by="ours"),
    Claim("c4", "A trained model can be made binary as it is: fine-tuning is for the last bit",
          "divergence of the next token's distribution from the model's own, nats, largest of the causal models", "at most", 0.1,
          by="ours"),
    Claim("c5", "Giving logits their spread back (times pi/2) makes up for it: flatness is what is wrong",
          "share of that divergence that is undone, least of the causal models", "at least", 0.5, by="ours"),
    Claim("c6", "Fine-tuning sees its queries and keys: most entries are inside the window from -1 to 1 through which gradients come",
          "share of entries of queries and keys outside of it, largest of the models", "at most", 0.5, by="ours"),
)  # fmt: skip


class BinaryAttention(SwapMechanism):
    """Attention of an attached model becomes binary, without a bias: the one thing that binary attention would learn is
    left out.

    >>> BinaryAttention()
    BinaryAttention(layers=None)
    """

    def __init__(self, layers: Layers = None) -> None:
        self.name, self.layers = "binary", layers


@contextmanager
def made_binary(model: nn.Module, times: float = 1.0) -> Iterator[None]:
    """The model with binary attention, logits multiplied by `times`; as it was afterwards."""
    control = Controls([Temperature(init=1 / times, learn=False), BinaryAttention()]).attach(model)
    try:
        yield
    finally:
        control.detach()


@torch.no_grad()
def layer_entry(layer: AttentionLayer, x: Tensor) -> dict[str, float]:
    """Means over heads and over rows of the second half, whose keys are many: entropies, kept top, kept order, share
    outside the window.
    """
    bare = replace(layer, norm=Norm(), memory_norm=None)  # x is what comes out of the norm
    q, k = bare.queries(x).double(), bare.keys(x).double()
    late = slice(x.shape[1] // 2, None)
    how: dict[str, Any] = dict(causal=layer.causal, scale=layer.scale)
    real, binary = (mechanism(name).map(q, k, **how)[:, :, late] for name in ("softmax", "binary"))
    # keys that all of these rows see, but for the first, which many heads use as a sink
    early = slice(1, x.shape[1] // 2)
    logits = [y[..., early].clamp_min(1e-300).log().flatten(0, 2) for y in (real, binary)]
    ranked = row_correlation(ranks(logits[0]), ranks(logits[1].mul(1e5).round()))
    return {
        "entropy": float(torch.special.entr(real).sum(-1).mean()),
        "binary_entropy": float(torch.special.entr(binary).sum(-1).mean()),
        "top": float(top_agreement(real, binary).mean()),
        "rank": float(ranked[ranked.isfinite()].mean()),
        "outside": float(torch.cat([q.abs().flatten(), k.abs().flatten()]).gt(1).double().mean()),
        "size": float(q.shape[-1]),
        "query_rms": float(q.square().mean().sqrt()),
        "key_rms": float(k.square().mean().sqrt()),
    }


@torch.no_grad()
def next_token(model: nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
    """Log probabilities of the next token (sequences, tokens, vocabulary)."""
    return torch.cat([run(model, part).logits[:, :-1].log_softmax(-1) for part in batch])


def loss(log: Tensor, batch: list[dict[str, Tensor]]) -> float:
    """Mean loss of the next token, in nats."""
    following = torch.cat([part["input_ids"][:, 1:] for part in batch])
    return -float(log.gather(-1, following[..., None]).mean())


def divergence(log: Tensor, other: Tensor) -> float:
    """KL(p || q) in nats per token: what q loses against p on text that p would write, whatever text this is.

    >>> half, sure = torch.tensor([[0.5, 0.5]]).log(), torch.tensor([[0.75, 0.25]]).log()
    >>> round(divergence(half, sure), 4)
    0.1438
    """
    return float((log.exp() * (log - other)).sum(-1).mean())


@torch.no_grad()
def pooled(model: nn.Module, batch: list[dict[str, Tensor]]) -> Tensor:
    """Means over tokens of what an encoder gives, a row per sequence."""
    return torch.cat([run(model, part).last_hidden_state.mean(1) for part in batch])


def model_entry(folder: Path, text: str, quick: bool) -> dict[str, Any]:
    """One model on one text: means over layers, and what it gives out as it is, binary, and with the spread back."""
    model = load_model(str(folder))
    batch = batches(model, text, length=LENGTH, tokens=TOKENS[quick])
    layers = [layer_entry(layer, x) for layer, x in layer_inputs(model, batch)]
    entry: dict[str, Any] = {name: sum(row[name] for row in layers) / len(layers) for name in layers[0]}
    entry |= {"layers": layers, "causal": "CausalLM" in type(model).__name__}
    outputs = next_token if entry["causal"] else pooled
    before = outputs(model, batch)
    with made_binary(model):
        after = outputs(model, batch)
    with made_binary(model, RESTORED):
        restored = outputs(model, batch)
    if not entry["causal"]:
        return {**entry, "cosine": _cosine(before, after), "restored_cosine": _cosine(before, restored)}
    lost, still_lost = divergence(before, after), divergence(before, restored)
    return {
        **entry,
        "loss": loss(before, batch),
        "binary_loss": loss(after, batch),
        "restored_loss": loss(restored, batch),
        "divergence": lost,
        "restored_divergence": still_lost,
        "undone": 1 - still_lost / lost,
    }


def _cosine(a: Tensor, b: Tensor) -> float:
    return float(nn.functional.cosine_similarity(a, b).mean())


def measure(setting: Setting) -> Results:
    """Every model on two halves of a text, which give the spread."""
    size = CHARACTERS[setting.quick]
    by_half: list[dict[str, dict[str, Any]]] = [{}, {}]
    plan = [(name, folder, half) for name, folder in model_folders(setting.models).items() for half in range(2)]
    for name, folder, half in setting.each(plan):
        by_half[half][name] = model_entry(folder, setting.text[half * size : (half + 1) * size], setting.quick)
    models = [list(half.values()) for half in by_half]
    causal = [[m for m in half if m["causal"]] for half in models]

    def halves(values: list[float]) -> Measurement:
        return half_range(values, HALVES)

    measured = {
        "c1": halves([min(m["binary_entropy"] - m["entropy"] for m in half) for half in models]),
        "c2": halves([min(m["top"] for m in half) for half in models]),
        "c3": halves([min(m["rank"] for m in half) for half in models]),
        "c4": halves([max(m["divergence"] for m in half) for half in causal]),
        "c5": halves([min(m["undone"] for m in half) for half in causal]),
        "c6": halves([max(m["outside"] for m in half) for half in models]),
    }
    rows = [{"model": name, **entry} for name, entry in by_half[0].items()]
    return Results(measured, {"models_made_binary": rows})


STUDY = Study("trained models made binary as they are", CLAIMS, measure, on_models=True)
