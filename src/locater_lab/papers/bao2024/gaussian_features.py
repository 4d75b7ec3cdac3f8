"""Are the features of trained models Gaussian, as the paper takes them? Inputs, queries, keys and logits, beside normal
tokens. Study g.

Two answers that need not agree: how far the distributions are from normal, and how well heads are predicted by running
them on normal tokens with the measured mean and covariance.
"""

from __future__ import annotations

from dataclasses import replace
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor

from locater.commands.load_model import load_model
from locater.commands.probing import probe
from locater.inputs.text import batches
from locater.layers import AttentionLayer, Norm
from locater.measures import ChannelMoments, normality_distance
from locater.theory.gaussian_tokens_and_covariance_root import gaussian_tokens
from locater_lab.engine.claims import Claim, half_range
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import HALVES, layer_inputs, model_folders

LENGTH = 128
TOKENS = {True: 2048, False: 8192}  # per half of the text
CHARACTERS = {True: 60_000, False: 240_000}
KINDS = ("input", "query", "key", "logit")
SAMPLE, HEADS = 4096, 4  # logits per head; heads of a layer that are looked at, evenly taken

CLAIMS = (
    Claim(
        "g1", "What attention layers read is Gaussian",
        "distance from normal over that of as many normal tokens, median over layers of trained models (grows with their number)",
        "at most", 1.5, by="ours", where="assumed by the theory",
    ),
    Claim(
        "g2", "The tails of what attention layers read are nearly those of a normal",
        "absolute excess kurtosis of the median channel, median over layers", "at most", 0.25, by="ours",
    ),
    Claim(
        "g3", "Queries and keys are Gaussian",
        "distance from normal over that of as many normal tokens, median over layers, queries and keys (grows with their number)",
        "at most", 1.5, by="ours", where="assumed by the theory",
    ),
    Claim(
        "g4", "Logits of a row are Gaussian across keys",
        "distance from normal over that of the same head on normal tokens, median over layers", "at most", 1.5,
        by="ours", where="assumed by the theory",
    ),
    Claim(
        "g5", "What attention layers read has mean zero",
        "share of the energy that is the mean, median over layers", "at most", 0.05, by="ours", where="assumed by the theory",
    ),
    Claim(
        "g6", "Gaussian by behaviour: normal tokens of the same mean and covariance order heads by entropy as real ones do",
        "rank correlation of predicted with measured entropy on held-out text, least of the models", "at least", 0.85, by="ours",
    ),
    Claim(
        "g7", "Gaussian by behaviour: they predict the entropy of heads",
        "mean error of predicted entropy in nats on held-out text, largest of the models", "at most", 0.35, by="ours",
    ),
)  # fmt: skip


def kurtosis_and_distance(x: Tensor) -> tuple[float, float]:
    """Excess kurtosis of the median channel and distance from normal of tokens (..., width)."""
    flat = x.reshape(-1, x.shape[-1])
    return float(ChannelMoments.of(flat).median_kurtosis), normality_distance(flat).mean


def row_logits(layer: AttentionLayer, x: Tensor) -> Tensor:
    """Logits (samples, heads) of rows in the second half, each row less its mean and over its spread; the first key is
    left out.
    """
    logits = layer.logits(x)[:, :, x.shape[1] // 2 :, 1:]  # (B, H, rows, keys)
    seen = layer.visible(x.shape[1], x.shape[1])[:, :, x.shape[1] // 2 :, 1:].expand_as(logits)
    count = seen.sum(-1, keepdim=True)
    rest = (logits - (logits * seen).sum(-1, keepdim=True) / count) * seen
    unit = rest / (rest.square().sum(-1, keepdim=True) / count).sqrt().clamp_min(1e-9)
    heads = unit.transpose(0, 1).flatten(1)[:, seen[:, 0].flatten()]  # (H, samples); masks are the same for every head
    return heads[:, torch.linspace(0, heads.shape[1] - 1, SAMPLE).long()].mT


@torch.no_grad()
def layer_shapes(layer: AttentionLayer, x: Tensor) -> dict[str, tuple[float, float]]:
    """Kurtosis and distance of inputs, and of queries, keys (before rotation) and logits, mean over some heads."""
    bare = replace(layer, norm=Norm(), memory_norm=None)  # x is what comes out of the norm
    still = replace(bare, rotary=None)
    logits, query, key = row_logits(bare, x), still.queries(x)[:, :, 1:], still.keys(x)[:, :, 1:]
    by_kind = {
        "input": [kurtosis_and_distance(x[:, 1:])],
        "logit": [kurtosis_and_distance(logits[:, h, None]) for h in _evenly_taken(layer.heads)],
        "query": [kurtosis_and_distance(query[:, h]) for h in _evenly_taken(layer.heads)],
        "key": [kurtosis_and_distance(key[:, h]) for h in _evenly_taken(layer.kv_heads)],
    }
    return {kind: (fmean(k for k, _ in each), fmean(d for _, d in each)) for kind, each in by_kind.items()}


@torch.no_grad()
def layer_entry(name: str, number: int, layer: AttentionLayer, x: Tensor) -> dict[str, Any]:
    """One layer: every kind's kurtosis and distance, and the same of normal tokens with its mean and covariance."""
    flat = x[:, 1:].flatten(0, 1)
    normal = gaussian_tokens(flat.mean(0), flat.mT.cov(), x.shape[0], x.shape[1], x[:, 0].mean(0), seed=number)
    real, like = layer_shapes(layer, x), layer_shapes(layer, normal)
    share = float(ChannelMoments.of(flat).mean_share)
    columns = {
        kind: {"kurtosis": real[kind][0], "distance": real[kind][1], "normal_distance": like[kind][1]} for kind in KINDS
    }
    return {"model": name, "layer": number, "mean_share": share, **columns}


def measure(setting: Setting) -> Results:
    """Every model on two halves of a text, which give the spread."""
    size = CHARACTERS[setting.quick]
    halves = [setting.text[i * size : (i + 1) * size] for i in range(2)]
    plan = [(name, folder, half) for name, folder in model_folders(setting.models).items() for half in range(2)]
    layers: list[list[dict[str, Any]]] = [[], []]
    agreed: list[dict[str, dict[str, float]]] = [{}, {}]
    for name, folder, half in setting.each(plan):
        model = load_model(str(folder))
        text = batches(model, halves[half], length=LENGTH, tokens=TOKENS[setting.quick])
        layers[half] += [layer_entry(name, number, *pair) for number, pair in enumerate(layer_inputs(model, text))]
        agreement = probe(model, halves[half], length=LENGTH, tokens=TOKENS[setting.quick] // 2).agreement
        agreed[half][name] = {f"{k}_{m}": v[m] or 0.0 for k, v in agreement.items() for m in ("spearman", "error")}
    return _results(layers, agreed)


def _results(layers: list[list[dict[str, Any]]], agreed: list[dict[str, dict[str, float]]]) -> Results:
    def ratio(entries: list[dict[str, Any]], *kinds: str) -> float:
        return median(e[kind]["distance"] / e[kind]["normal_distance"] for e in entries for kind in kinds)

    spearman = [min(a["predicted_entropy_spearman"] for a in half.values()) for half in agreed]
    error = [max(a["predicted_entropy_error"] for a in half.values()) for half in agreed]
    by_half = {
        "g1": [ratio(e, "input") for e in layers],
        "g2": [median(abs(e["input"]["kurtosis"]) for e in entries) for entries in layers],
        "g3": [ratio(e, "query", "key") for e in layers],
        "g4": [ratio(e, "logit") for e in layers],
        "g5": [median(e["mean_share"] for e in entries) for entries in layers],
        "g6": spearman,
        "g7": error,
    }
    measured = {id: half_range(values, HALVES) for id, values in by_half.items()}
    return Results(measured, {"normality": layers[0], "predicted_entropy": agreed[0]})


def _evenly_taken(heads: int) -> list[int]:
    count = min(HEADS, heads)
    return [i * heads // count for i in range(count)]


STUDY = Study("are features Gaussian", CLAIMS, measure, on_models=True)
