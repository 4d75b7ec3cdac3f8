"""`probe()`: run a model over text or images, and compare what its heads do with what theory predicts."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.commands.load_model import load_model
from locater.commands.probe_data import count_sequences, data_label, probe_batches, split_batches
from locater.commands.scan_rows import row_keys
from locater.commands.scanning import column_of, root_mean_square, scan
from locater.defaults import LENGTH, TOKENS, Progress
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.findings import flags_of
from locater.inputs.text import Batch, Text
from locater.layers import AttentionLayer
from locater.layers.output_maps_and_written_norms import written_norms, written_shares
from locater.numerics import finite_or_none, spearman
from locater.observing.head_roles import Circuit, circuit_scores, period_of
from locater.observing.input_covariances import statistics_of_batches
from locater.observing.observation import observe
from locater.observing.residual_stream import SeenLayer
from locater.observing.run_model import run_model
from locater.observing.seen_heads import SeenHead
from locater.predict.prediction_and_logit_bound import logit_bound, predict
from locater.predict.statistics_file import Input, Statistics
from locater.report.probe import stream_after
from locater.report.verdict_sentences import head_list
from locater.results.probe import BOUND, MEASURED, PREDICTED, PRIOR, Probe, ProbeRow
from locater.results.scan import Scan
from locater.theory import kept_at_entropy

LONGEST = 1024  # tokens that heads are run on for predictions
CIRCUIT_COLUMNS = ("previous", "duplicate", "induction", "skip_induction", "pair_induction")
LAYER_COLUMNS = ("typical_kept", "predicted_typical_kept", "prior_typical_kept")  # also given per layer
COMPARED = {  # prediction: the measured column that it is compared with
    "predicted_entropy": "entropy",
    "predicted_rest_entropy": "rest_entropy",
    "predicted_sink": "sink",
    "prior_entropy": "entropy",
    "predicted_typical_kept": "typical_kept",
    "prior_typical_kept": "typical_kept",
}
HeadKey = tuple[int, int]  # layer and head


def probe(
    model: nn.Module | str | os.PathLike[str],
    text: Text | None = None,
    *,
    images: str | Path | None = None,
    tokenizer: Any = None,
    length: int = LENGTH,
    tokens: int = TOKENS,
    rows: int | None = None,
    label: str | None = None,
    progress: Progress | None = None,
) -> Probe:
    """Run `model` over about `tokens` tokens of `text` in sequences of `length`; measure and predict every head.

    `model` is a module or the folder of a checkpoint. `text` is a string, a path, several of either, token ids, or
    batches as the model takes them; the default is the documentation that comes with Python. `images` replaces the
    text: a folder of pictures or an array. The first third of the data gives the statistics behind the predictions, the
    rest is measured. A single batch serves both, and the result says so. `rows` samples that many rows of each
    attention call. `label` is what the result calls the data.
    """
    if text is not None and images is not None:
        raise LocaterError("text and images exclude each other: give one of them to run the model on")
    source = os.fspath(model) if isinstance(model, str | os.PathLike) else type(model).__name__
    module = load_model(source) if isinstance(model, str | os.PathLike) else model
    batches = probe_batches(module, text, images, tokenizer, length, tokens)
    result = probe_on_batches(module, batches, source, rows=rows, progress=progress)
    result.assumptions["data"] = label or data_label(text, images)
    return result


def probe_on_batches(
    module: nn.Module, batches: list[Batch], source: str, rows: int | None = None, progress: Progress | None = None
) -> Probe:
    """Probe a model on batches as it takes them."""
    for_statistics, for_measurement = split_batches(module, batches)
    statistics = statistics_of_batches(module, for_statistics, progress)
    predicted = scan(module, statistics=statistics, length=max(2, min(statistics.length, 4096)))
    circuits = _circuits(module, for_statistics)
    with observe(module, rest=True, outputs=True, hidden=True, rows=rows) as seen:
        for batch in progress(for_measurement, len(for_measurement)) if progress else for_measurement:
            run_model(module, batch)
    prior = scan(module, length=predicted.assumptions["length"])
    written = {number: written_norms(layer) for number, layer in enumerate(attention_layers(module))}
    probe_rows = _rows(module, seen.rows, statistics, predicted, prior, circuits, written)
    inputs = {entry.layer: entry for entry in statistics.inputs}
    observed = {row.layer for row in seen.rows}
    layers = [
        {
            **entry,
            **{name: root_mean_square(column_of(probe_rows, entry["layer"], name)) for name in LAYER_COLUMNS},
            **_residuals_around(entry["name"], seen.layers),
            "input": _input_entry(inputs.get(entry["layer"])),
        }
        for entry in prior.layers
        if entry["layer"] in observed
    ]
    assumptions = {
        "prediction": "predicted",
        "how": _kinds(sampled=bool(rows)),
        "held_out": for_statistics is not for_measurement,
        "tokens": predicted.assumptions["tokens"],
        "notes": _notes(
            predicted, for_statistics is for_measurement, seen.silent, period_of(module) if circuits else None
        )
        + _origin(probe_rows, prior, written),
        "length": predicted.assumptions["length"],
        "measured_sequences": count_sequences(for_measurement),
        "statistics_sequences": count_sequences(for_statistics),
    }
    return Probe(source, assumptions, layers, seen.layers, probe_rows, agreement(probe_rows), statistics)


def _rows(
    module: nn.Module,
    seen: Sequence[SeenHead],
    statistics: Statistics,
    predicted: Scan,
    prior: Scan,
    circuits: Mapping[HeadKey, Circuit],
    written: Mapping[int, Sequence[float | None]],
) -> list[ProbeRow]:
    """One row for each observed head."""
    layers = list(attention_layers(module))
    inputs = {entry.layer: entry for entry in statistics.inputs}
    length = max(2, min(statistics.length, LONGEST))
    by_layer = {
        number: _layer_predictions(layers[number], inputs.get(number), length)
        for number in sorted({row.layer for row in seen})
    }
    scanned = {(row.layer, row.head): row for row in predicted.rows}
    unit_tokens = {(row.layer, row.head): row.localization for row in prior.rows}
    rows = []
    for row in seen:
        key = (row.layer, row.head)
        predictions = {name: values[row.head] for name, values in by_layer[row.layer].items()}
        predictions["prior_localization"] = unit_tokens[key]
        theory = {} if key not in scanned else vars(scanned[key])
        norm, share = written[row.layer][row.head], written_shares(written[row.layer])[row.head]
        theory = {**theory, "written": norm, "written_share": share}
        rows.append(_row(row, predictions, theory, circuits.get(key), predicted.assumptions["length"]))
    return rows


def _layer_predictions(layer: AttentionLayer, entry: Input | None, length: int) -> dict[str, list[float | None]]:
    """Predictions for the heads of a layer, at the lengths of its own input: towers and stacks differ in them."""
    queries = keys = length
    if entry is not None:
        queries, keys = (max(2, min(x or length, LONGEST)) for x in (entry.length, entry.memory_length))
    predicted = {} if entry is None else predict(layer, entry, queries, keys)
    columns: dict[str, Tensor | None] = {
        "predicted_entropy": predicted.get("entropy"),
        "predicted_sink": predicted.get("sink"),
        "predicted_rest_entropy": predicted.get("rest_entropy"),
        "prior_entropy": predict(layer, None, queries, keys)["entropy"],
        "logit_bound": logit_bound(layer),
    }
    for kind in ("predicted", "prior"):
        entropy = columns[f"{kind}_entropy"]
        columns[f"{kind}_typical_kept"] = (
            None if entropy is None else kept_at_entropy(entropy, row_keys(layer, queries, keys), typical=True)
        )
    return {
        name: [None] * layer.heads if values is None else [finite_or_none(float(x)) for x in values]
        for name, values in columns.items()
    }


def _origin(rows: Sequence[ProbeRow], prior: Scan, written: Mapping[int, Sequence[float | None]]) -> list[str]:
    """Where NaN or infinite numbers come from: the weights of some heads, or something else before a layer."""
    lost = [(row.layer, row.head) for row in rows if "nonfinite" in row.flags]
    if not lost:
        return []
    flagged = {(row.layer, row.head) for row in prior.rows if "nonfinite" in row.flags}
    own = [(i, h) for i, h in lost if (i, h) in flagged or not math.isfinite(written[i][h] or 0)]
    if own:
        return [
            f"NaN or infinite weights in {head_list(own)} (layer.head): what reads their output has no numbers either"
        ]
    return [
        f"NaN or infinite numbers reach layer {lost[0][0]} and do not come from weights of attention: "
        "look at MLPs, norms and embeddings before it, or at the precision"
    ]


def _row(
    seen: SeenHead,
    predictions: Mapping[str, float | None],
    theory: Mapping[str, Any],
    circuit: Circuit | None,
    length: int,
) -> ProbeRow:
    """`theory` is the head's row in the scan with statistics, whose M, F and localization are those of these tokens,
    and what the head can write.
    """
    own = {f.name for f in fields(ProbeRow)}
    values = {name: value for name, value in vars(seen).items() if name in own}
    values["typical_kept"] = None if not seen.participation else seen.participation**-0.5
    values |= vars(circuit) if circuit is not None else {}
    values |= predictions
    values |= {f"predicted_{name}": theory.get(name) for name in ("M", "F", "localization")}
    finite = "nonfinite" not in (*seen.flags, *theory.get("flags", ())) and math.isfinite(theory["written"] or 0)
    return ProbeRow(**{**values, "flags": flags_of({**theory, **values, "finite": finite}, length)})


def _residuals_around(layer_name: str, streams: list[SeenLayer]) -> dict[str, float | None]:
    """How much tokens differ in the stream before and after the block that contains an attention layer."""
    after = stream_after(layer_name, streams)
    if after is None:
        return {"residual_before": None, "residual_after": None}
    before = next((x.residual for x in streams if (x.stack, x.block) == (after.stack, after.block - 1)), None)
    return {"residual_before": finite_or_none(before), "residual_after": finite_or_none(after.residual)}


def _input_entry(entry: Input | None) -> dict[str, Any] | None:
    """Statistics of a layer's input as the document has them."""
    if entry is None:
        return None
    shares = ("mean_share", "kurtosis", "normality", "normality_expected")
    return {
        "tokens": entry.tokens,
        **{name: finite_or_none(getattr(entry, name)) for name in shares},
        "directions": [x for x in entry.directions if math.isfinite(x)],
    }


def _circuits(module: nn.Module, batches: list[Batch]) -> dict[HeadKey, Circuit]:
    """Scores on repeated random tokens; none for models that do not read tokens."""
    if not batches or "input_ids" not in batches[0]:
        return {}
    try:
        return circuit_scores(module)
    except LocaterError:
        return {}


def role_scores(module: nn.Module, batches: list[Batch]) -> dict[HeadKey, dict[str, float | None]]:
    """The columns that roles are judged by and that repeated random tokens show."""
    return {key: dict(vars(circuit)) for key, circuit in _circuits(module, batches).items()}


def _kinds(sampled: bool) -> dict[str, str]:
    """The kind of number in each column."""
    kinds = dict.fromkeys(MEASURED, "sampled" if sampled else "exact")
    kinds |= dict.fromkeys(CIRCUIT_COLUMNS, "exact")
    return kinds | dict.fromkeys(PREDICTED, "predicted") | dict.fromkeys(PRIOR, "prior") | dict.fromkeys(BOUND, "bound")


def _notes(predicted: Scan, same_batches: bool, silent: Sequence[str], period: int | None) -> list[str]:
    unrelated = ("position biases", "no statistics")  # notes of a scan that do not apply to a probe
    notes = [note for note in predicted.assumptions["notes"] if not note.startswith(unrelated)]
    if same_batches:
        notes.append("only one sequence: predictions use statistics of the same text that was measured")
    if silent:
        notes.append(f"not called, and left out: {', '.join(silent)}")
    if period is not None:
        notes.append(f"previous, duplicate and induction: on {period} random tokens repeated once")
    return notes


def agreement(rows: Sequence[ProbeRow]) -> dict[str, dict[str, float | None]]:
    """How good each prediction is over heads: Spearman's rank correlation and the mean absolute error."""
    scores: dict[str, dict[str, float | None]] = {}
    for prediction, column in COMPARED.items():
        pairs = [(row[prediction], row[column]) for row in rows if None not in (row[prediction], row[column])]
        if len(pairs) > 2:
            a, b = torch.tensor(pairs, dtype=torch.float64).unbind(1)
            error = float((a - b).abs().mean())
            scores[prediction] = {"spearman": spearman(a, b), "error": error, "heads": float(len(pairs))}
    return scores
