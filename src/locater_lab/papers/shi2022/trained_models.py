"""Trained models by depth: how alike tokens are, raw and around the mean, and what the theorem says of a trained BERT.
Study e.

In a trained block gains count, and GELU is a little steeper than ReLU, so v has two more factors:

    v = g_1 g_2 (1 + L s^2) (1 + h s sqrt(lambda)) / (sigma_1 sigma_2),   g = max|gain|, L = 1.129

`close` takes each weight's own norm in the place of s: sum_h |W_VO,h| sqrt(lambda_h) for h s sqrt(lambda), |W_in|
|W_out| for s^2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.load_model import load_model
from locater.inputs.text import batches
from locater.measures import ranks, token_cosine
from locater.numerics import spearman
from locater_lab.engine.claims import Claim, Measurement, half_range
from locater_lab.engine.reproduction import Results, Setting, Study
from locater_lab.engine.trained_models import model_folders, read_each
from locater_lab.papers.dong2021.residual_by_depth import LENGTH, TEXT_CHARACTERS, is_causal
from locater_lab.papers.shi2022.token_distance import (
    STEEPEST,
    attention_eigenvalue,
    distance_from_equal,
    least_deviation,
)

SAMPLES = {True: 8, False: 32}
BOUNDED = 2  # samples on which blocks are compared with the theorem: a singular value per head and sample
READ: dict[str, Callable[[Tensor], Tensor]] = {
    "cosine": token_cosine,
    "centred_cosine": lambda x: token_cosine(x, centred=True),
    "centred_rank": lambda x: ranks(x, centred=True).effective,
}
Batch = dict[str, Tensor]

CLAIMS = (
    Claim(
        "e1", "Tokens of a trained encoder grow alike with depth",
        "rank correlation of depth with mean cosine, least of trained models without a mask", "at least", 0.8, where="abstract", bound="ours",
    ),
    Claim(
        "e2", "So do tokens of trained causal models with norms in front",
        "the same, least of trained causal models", "at least", 0.8, by="ours",
    ),
    Claim(
        "e3", "Where tokens are more alike they have fewer directions",
        "rank correlation over layers of mean cosine with effective rank around the mean, "
        "largest of the models", "at most", -0.8, by="ours",
    ),
    Claim(
        "e4", "Cosine around the mean shows the same as raw cosine",
        "change of cosine around the mean from first to last state over that of raw cosine, largest of the models", "at least",
        0.5, by="ours",
    ),
    Claim("e5", "In a trained encoder with the blocks of BERT the theorem promises equal tokens: v is under 1", "least v of its blocks", "at most", 1.0, by="ours"),
    Claim(
        "e6", "The theorem holds there, gains and GELU counted", "largest d(H') / (v d(H)), each norm in place of s",
        "at most", 1.0, by="ours",
    ),
)  # fmt: skip


@torch.no_grad()
def readings_by_layer(model: Any, inputs: Sequence[Batch]) -> dict[str, Tensor]:
    """Cosine, cosine and effective rank around the mean, of every sample in every state: (samples, states) each.

    Special tokens at both ends of an encoder's sample are left out.
    """
    ends = 0 if is_causal(model) else 1
    parts: dict[str, list[Tensor]] = {name: [] for name in READ}
    for part in inputs:
        states = torch.stack(model(**part, output_hidden_states=True).hidden_states)[
            :, :, ends : part["input_ids"].shape[1] - ends
        ]
        for name, read in READ.items():
            parts[name].append(torch.stack([read(x) for x in states], 1))
    return {name: torch.cat(values) for name, values in parts.items()}


@torch.no_grad()
def promised_bounds(model: Any, part: Batch) -> list[dict[str, float]]:
    """Of every block of a BERT: v, the closer bound, what it did to d, sigma_1 sigma_2; the largest or least over the
    samples.
    """
    model.set_attn_implementation("eager")
    seen: list[Tensor] = []
    norms = [
        norm for layer in model.encoder.layer for norm in (layer.attention.output.LayerNorm, layer.output.LayerNorm)
    ]
    hooks = [norm.register_forward_pre_hook(lambda module, args: seen.append(args[0])) for norm in norms]
    try:
        out = model(**part, output_hidden_states=True, output_attentions=True)
    finally:
        for hook in hooks:
            hook.remove()
    blocks = []
    for number, layer in enumerate(model.encoder.layer):
        before, after = (out.hidden_states[number + n].double() for n in range(2))
        rows = []
        for b, sample in enumerate(out.attentions[number].double()):
            roots = [attention_eigenvalue(a) ** 0.5 for a in sample]
            in_front = [x[b].double() for x in seen[2 * number : 2 * number + 2]]
            rows.append(
                {
                    **_bounds(layer, roots, in_front),
                    "kept": distance_from_equal(after[b]) / distance_from_equal(before[b]),
                }
            )
        worst = max(row["kept"] / row["close"] for row in rows)
        means = {name: sum(row[name] for row in rows) / len(rows) for name in rows[0]}
        blocks.append({**means, "least_v": min(row["v"] for row in rows), "share": worst})
    return blocks


def _bounds(layer: nn.Module, roots: Sequence[float], before: Sequence[Tensor]) -> dict[str, float]:
    """`roots` are sqrt(lambda) of each head, `before` the inputs of the two norms."""
    parts: Any = layer
    heads = len(roots)
    W_V, W_O = parts.attention.self.value.weight.double(), parts.attention.output.dense.weight.double()
    values = [_spectral_norm(o @ v) for v, o in zip(W_V.chunk(heads), W_O.chunk(heads, 1), strict=True)]
    outer, inner = (
        _spectral_norm(parts.output.dense.weight.double()),
        _spectral_norm(parts.intermediate.dense.weight.double()),
    )
    gains = [
        norm.weight.double().abs().max().item() for norm in (parts.attention.output.LayerNorm, parts.output.LayerNorm)
    ]
    sigma = least_deviation(before[0]) * least_deviation(before[1])
    s = max(*values, outer, inner)
    factor = gains[0] * gains[1] / sigma
    return {
        "v": factor * (1 + STEEPEST * s * s) * (1 + heads * s * max(roots)), "sigma": sigma, "root": max(roots), "s": s,
        "close": factor * (1 + STEEPEST * outer * inner) * (1 + sum(a * b for a, b in zip(values, roots, strict=True))),
    }  # fmt: skip


def _spectral_norm(w: Tensor) -> float:
    return torch.linalg.matrix_norm(w, 2).item()


def read_models(setting: Setting) -> tuple[list[dict[str, Any]], dict[str, str]]:
    """Every available model on two halves of the samples, and what was left out, with the reason."""
    models, left_out = read_each(
        model_folders(setting.models).items(), lambda name, folder: _read_model(name, folder, setting)
    )
    return list(models.values()), left_out


def _read_model(name: str, folder: Path, setting: Setting) -> dict[str, Any]:
    model = load_model(str(folder)).requires_grad_(False)
    parts = batches(
        model, setting.text[:TEXT_CHARACTERS], length=LENGTH, tokens=LENGTH * SAMPLES[setting.quick], batch=4
    )
    curves = {key: [half.mean(0).tolist() for half in x.chunk(2)] for key, x in readings_by_layer(model, parts).items()}
    few = {key: x[:BOUNDED] for key, x in parts[0].items()}
    blocks = promised_bounds(model, few) if model.config.model_type == "bert" else []
    return {"model": name, "causal": is_causal(model), "curves": curves, "blocks": blocks}


def measure_entries(entries: Sequence[Mapping[str, Any]]) -> dict[str, Measurement]:
    """Claims, each half of the samples by itself."""
    kinds = {causal: [entry for entry in entries if entry["causal"] is causal] for causal in (False, True)}
    blocks = [block for entry in entries for block in entry["blocks"]]
    measured: dict[str, Measurement] = {}
    for key, causal in (("e1", False), ("e2", True)):
        if kinds[causal]:
            measured[key] = _halves(
                [min(_correlation_with_depth(entry, half) for entry in kinds[causal]) for half in range(2)]
            )
    if entries:
        measured["e3"] = _halves([max(_lost_rank(entry, half) for entry in entries) for half in range(2)])
        measured["e4"] = _halves([max(_shown_entry(entry, half) for entry in entries) for half in range(2)])
    if blocks:
        of = f"of {len(blocks)} blocks and all samples"
        measured["e5"] = Measurement(min(block["least_v"] for block in blocks), 0.0, f"none: the least {of}")
        measured["e6"] = Measurement(max(block["share"] for block in blocks), 0.0, f"none: the largest {of}")
    return measured


def _correlation_with_depth(entry: Mapping[str, Any], half: int) -> float:
    curve = torch.tensor(entry["curves"]["cosine"][half])
    return spearman(torch.arange(len(curve)).double(), curve) or 0.0


def _lost_rank(entry: Mapping[str, Any], half: int) -> float:
    x, y = (torch.tensor(entry["curves"][name][half]) for name in ("cosine", "centred_rank"))
    return spearman(x, y) or 0.0


def _shown_entry(entry: Mapping[str, Any], half: int) -> float:
    raw, centred = (entry["curves"][name][half] for name in ("cosine", "centred_cosine"))
    return float((centred[-1] - centred[0]) / (raw[-1] - raw[0]))


def _halves(values: list[float]) -> Measurement:
    return half_range(values, "half the difference of two halves of the samples")


def measure(setting: Setting) -> Results:
    entries, left_out = read_models(setting)
    shown = [
        {**entry, "curves": {key: _mean_of_halves(curves) for key, curves in entry["curves"].items()}}
        for entry in entries
    ]
    table = {"models": shown, "left_out": left_out, "samples": SAMPLES[setting.quick], "length": LENGTH}
    return Results(measure_entries(entries), {"trained_models": table} if entries else {})


def _mean_of_halves(halves: Sequence[Sequence[float]]) -> list[float]:
    return [sum(values) / len(values) for values in zip(*halves, strict=True)]


STUDY = Study(
    "trained models", CLAIMS, measure, needs="a trained model of the kind that the claim names", on_models=True
)
