"""One model's heads for the record of the surrogate: what each head does on text, what is predicted for it from several
kinds of tokens, and quantities that may explain the difference.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater.inputs.text import Batch
from locater.kernels import attention_statistics
from locater.layers import AttentionLayer, Norm, effective
from locater.observing.head_roles import circuit_scores
from locater.observing.input_covariances import statistics_of_batches
from locater.observing.observation import observe
from locater.observing.run_model import IDS, run_model
from locater.predict.prediction_and_logit_bound import on_tokens, predict
from locater.predict.statistics_file import Input, Statistics
from locater_lab.engine.trained_models import layer_inputs

SEQUENCES = 16  # of normal tokens, and of real ones in random order
OFTEN = 5  # times that a token must occur for its effect on entropy to be counted
COLUMNS = ("entropy", "rest_entropy", "sink")


def measure_heads(
    model: nn.Module, gathered: list[Batch], measured: list[Batch], other: list[Batch] | None = None
) -> dict[str, Any]:
    """Figures of a model, `heads` and `predicted` by column with one number per head.

    Statistics come from the batches `gathered` and from `other`, another corpus; heads are observed on `measured`.
    """
    layers = list(attention_layers(model))
    statistics = {"covariance": statistics_of_batches(model, gathered), "own": statistics_of_batches(model, measured)}
    if other is not None:
        statistics["other"] = statistics_of_batches(model, other)
    with observe(model, rest=True, offsets=(1,)) as seen:
        for part in measured:
            run_model(model, part)
    real, ids = [x for _, x in layer_inputs(model, measured)], _token_ids(measured)
    mixed = [shuffle_tokens(x)[:SEQUENCES] for x in real]
    held_out = statistics["covariance"]
    heads = {
        "layer": [row.layer for row in seen.rows],
        "head": [row.head for row in seen.rows],
        **{name: [row[name] for row in seen.rows] for name in (*COLUMNS, "entropy_ratio", "distance")},
        "previous": [row.offsets[1] for row in seen.rows],
        **_induction(None if ids is None else model, [(row.layer, row.head) for row in seen.rows]),
        **_join_columns([_shape_of_rows(layer, x) for layer, x in zip(layers, mixed, strict=True)]),
        "identity": _identity_shares(layers, real, ids),
        "rank": [
            float(rank) / layer.head_dim
            for layer, x in zip(layers, held_out.inputs, strict=True)
            for rank in effective(layer, tokens=x.as_tokens()).moments().effective_rank
        ],
    }
    return {
        **_facts(model, layers, held_out, real),
        "heads": heads,
        "predicted": predictions(layers, statistics, mixed),
        "layers": [_layer_facts(x) for x in held_out.inputs],
    }


def shuffle_tokens(x: Tensor, seed: int = 0) -> Tensor:
    """Tokens (B, T, d) of all sequences in random order, but for the first of each, which stays."""
    later = x[:, 1:].flatten(0, 1)
    later = later[torch.randperm(len(later), generator=torch.Generator().manual_seed(seed))]
    return torch.cat([x[:, :1], later.view(len(x), -1, x.shape[-1])], 1)


def with_diagonal_covariance(x: Input) -> Input:
    """With the covariance reduced to its diagonal."""
    return replace(x, covariance=x.covariance.diagonal().diag())


def predictions(
    layers: list[AttentionLayer], statistics: dict[str, Statistics], mixed: list[Tensor]
) -> dict[str, dict[str, list[float]]]:
    """By kind of tokens and column, one number per head. `mixed` are real tokens (B, T, d) in random order."""
    length = mixed[0].shape[1]

    def on(inputs: list[Input | None]) -> dict[str, list[float]]:
        parts = [predict(layer, x, length, sequences=SEQUENCES) for layer, x in zip(layers, inputs, strict=True)]
        return _join_columns([{name: part[name] for name in COLUMNS} for part in parts])

    real = [on_tokens(_without_norm(layer), x) for layer, x in zip(layers, mixed, strict=True)]
    return {
        "weights": on([None] * len(layers)),
        "diagonal": on([with_diagonal_covariance(x) for x in statistics["covariance"].inputs]),
        **{name: on([*kind.inputs]) for name, kind in statistics.items()},
        "shuffled": _join_columns([{name: part[name] for name in COLUMNS} for part in real]),
    }


@torch.no_grad()
def _shape_of_rows(layer: AttentionLayer, x: Tensor) -> dict[str, Tensor]:
    """Standard deviation, skew and excess kurtosis of logits within a row, mean over rows, per head (H,). Normal keys
    have skew and excess 0 given their query. Without the first key, and without the first half of the rows.
    """
    half = x.shape[1] // 2
    logits = _without_norm(layer).logits(x)[:, :, half:, 1:].double()  # (B, H, rows, keys)
    seen = layer.visible(x.shape[1], x.shape[1])[:, :, half:, 1:]
    count = seen.sum(-1, keepdim=True)

    def mean_over_keys(z: Tensor) -> Tensor:
        return (z * seen).sum(-1, keepdim=True) / count

    rest = logits - mean_over_keys(logits)
    spread = mean_over_keys(rest.square()).sqrt()
    unit = rest / spread.clamp_min(1e-9)
    return {
        "spread": spread.mean((0, 2, 3)),
        "skew": mean_over_keys(unit**3).mean((0, 2, 3)),
        "kurtosis": mean_over_keys(unit**4).mean((0, 2, 3)) - 3,
    }


@torch.no_grad()
def _identity_shares(layers: list[AttentionLayer], real: list[Tensor], ids: Tensor | None) -> list[float | None]:
    """Share of the variance of row entropies, over the log of visible keys, that the token of the row explains."""
    if ids is None:
        return [None] * sum(layer.heads for layer in layers)
    shares = []
    for layer, x in zip(layers, real, strict=True):
        bare, half = _without_norm(layer), x.shape[1] // 2
        rows = attention_statistics(
            bare.queries(x), bare.keys(x), scale=layer.scale, causal=layer.causal, window=layer.window, extended=False
        )
        ratio = (rows.entropy / rows.visible.clamp_min(2).log())[:, :, half:]  # (B, H, rows)
        shares += [omega_squared(values.flatten(), ids[:, half:].flatten()) for values in ratio.unbind(1)]
    return shares


def omega_squared(values: Tensor, groups: Tensor) -> float | None:
    """Share of the variance of `values` that their group explains, without the part that chance would; groups of fewer
    than OFTEN are left out. None where no two groups are left, or values do not vary.

    >>> groups = torch.arange(4).repeat_interleave(50)
    >>> omega_squared(groups.double(), groups)
    1.0
    >>> abs(omega_squared(torch.randn(200, generator=torch.Generator().manual_seed(0)), groups)) < 0.05
    True
    """
    _, group, counts = groups.unique(return_inverse=True, return_counts=True)
    often = counts[group] >= OFTEN
    values = values.double()[often]
    _, group, counts = groups[often].unique(return_inverse=True, return_counts=True)
    total = float((values - values.mean()).square().sum()) if len(values) else 0.0
    if len(counts) < 2 or not total:
        return None
    means = torch.zeros(len(counts), dtype=torch.float64).index_add_(0, group, values) / counts
    between = float((counts * (means - values.mean()).square()).sum())
    noise = (total - between) / (len(values) - len(counts))
    return (between - (len(counts) - 1) * noise) / (total + noise)


def _induction(model: nn.Module | None, heads: list[tuple[int, int]]) -> dict[str, list[float | None]]:
    """Induction and duplicate-token scores on repeated random tokens; None where no `model` of tokens is given."""
    if model is None:
        return {name: [None] * len(heads) for name in ("induction", "duplicate")}
    scores = circuit_scores(model)
    return {name: [getattr(scores[head], name) for head in heads] for name in ("induction", "duplicate")}


def _token_ids(batches: list[Batch]) -> Tensor | None:
    """Token ids (sequences, tokens) of the batches; None for images."""
    parts = [next((batch[name] for name in IDS if name in batch), None) for batch in batches]
    if any(part is None or part.ndim != 2 for part in parts):
        return None
    return torch.cat([part.cpu() for part in parts if part is not None])


def _facts(model: nn.Module, layers: list[AttentionLayer], gathered: Statistics, real: list[Tensor]) -> dict[str, Any]:
    first = layers[0]
    added = "relative" if first.bias is not None or first.relative is not None else "added to the stream"
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "width": first.width,
        "head_dim": first.head_dim,
        "causal": bool(first.causal),
        "positions": "rotary" if first.rotary is not None else added,
        "length": real[0].shape[1],
        "statistics_tokens": gathered.tokens,
        "measured_tokens": real[0].shape[0] * real[0].shape[1],
    }


def _layer_facts(x: Input) -> dict[str, float | int | None]:
    values, width = torch.linalg.eigvalsh(x.covariance.double()).clamp_min(0), len(x.mean)
    return {
        "layer": x.layer,
        **{name: getattr(x, name) for name in ("mean_share", "kurtosis", "normality", "normality_expected")},
        "directions": float(values.sum().square() / values.square().sum()) / width,  # participation ratio over width
    }


def _without_norm(layer: AttentionLayer) -> AttentionLayer:
    """The layer for tokens that have passed its norm."""
    return replace(layer, norm=Norm(), memory_norm=None)


def _join_columns(parts: list[dict[str, Tensor]]) -> dict[str, list[float]]:
    return {name: torch.cat([part[name].flatten() for part in parts]).tolist() for name in parts[0]}
