"""Models that are trained to test the surrogate on: docs/results/surrogate-plan.md. Each run leaves one line of JSON
with the figures of its heads, and no weights. And these figures, of any model: what each head does on text, what is
predicted for it from several kinds of tokens, and quantities that may explain the difference.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.discovery import attention_layers
from locater.errors import LocaterError, first_line
from locater.inputs.text import Batch, read_text
from locater.kernels import attention_statistics
from locater.layers import AttentionLayer, Norm, effective
from locater.observing.head_roles import circuit_scores
from locater.observing.input_covariances import statistics_of_batches
from locater.observing.observation import observe
from locater.observing.run_model import IDS, run_model
from locater.predict.prediction_and_logit_bound import on_tokens, predict
from locater.predict.statistics_file import Input, Statistics
from locater_lab.engine.provenance import SOURCES, check_commit, commit_of
from locater_lab.engine.reproduction import round_numbers
from locater_lab.engine.runs import Row, machine
from locater_lab.engine.trained_models import layer_inputs
from locater_lab.train.data import open_data
from locater_lab.train.loop import DivergedError, run
from locater_lab.train.plan import Plan
from locater_lab.train.sweep import append_line, read_lines

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


TEXT, IMAGES = "articles.txt", "fashion.npz"
GATHERED, MEASURED = 4096, 8192  # tokens for statistics, and to measure on
BASE = Plan(
    corpus=(TEXT,), vocabulary=4096, layers=6, width=256, heads=4, length=256, batch=32, steps=1500, rate=2.5e-3,
    observe=0, evaluate=0, checkpoint=0, log=500, compile=True,
)  # fmt: skip
ARMS: dict[str, Plan] = {
    "causal 4x128": replace(BASE, layers=4, width=128, rate=4e-3),
    "causal 6x256": BASE,
    "causal 8x384": replace(BASE, layers=8, width=384, heads=6, rate=1.5e-3),
    "causal 12x512": replace(BASE, layers=12, width=512, heads=8, rate=1e-3),
    "masked 6x256": replace(BASE, task="masked"),
    "image 6x192": replace(
        BASE, task="image", corpus=(), vocabulary=256, length=128, images=IMAGES, width=192, heads=6, batch=128, rate=5e-4
    ),
    "learned 6x256": replace(BASE, positions="learned"),
    "small heads 6x256": replace(BASE, heads=16),
    "causal 6x256, seed 1": replace(BASE, seed=1),
}  # fmt: skip


def train_all(
    out: Path,
    data: Path,
    jobs: int,
    characters: int = 24_000_000,
    arms: dict[str, Plan] = ARMS,
    log: Callable[[str], None] = print,
) -> None:
    """Train every arm that has no line in `out`, `jobs` at a time. `data` is a folder that holds articles.txt.xz and
    fashion.npz, directly or one level down.
    """
    done = {line["options"] for line in map(_with_options, read_lines(out))}
    missing = {name: plan for name, plan in arms.items() if _options_text(plan, characters) not in done}
    if not missing:
        log("every run has its line")
        return
    check_commit(out, commit_of(SOURCES))
    broken = []
    with tempfile.TemporaryDirectory(prefix="locater-surrogate-") as folder:
        placed = _prepare_plans(missing, data, Path(folder), characters)
        with ProcessPoolExecutor(jobs, mp_context=get_context("fork")) as pool:
            running = {pool.submit(train, placed[name], Path(folder)): name for name in missing}
            for future in as_completed(running):
                name = running[future]
                try:
                    line = {"arm": name, "options": _options_text(missing[name], characters), **future.result()}
                except (
                    Exception
                ) as error:  # anything can end a run (compilers, memory); it has no line and is run again
                    broken.append(f"{name}: {type(error).__name__}: {first_line(error)}")
                    log(broken[-1])
                    continue
                append_line(out, round_numbers(line, 5))
                trained = (
                    f"loss {line['report_loss']:.4f}, {line['seconds']:.0f} s"
                    if line["status"] == "done"
                    else "diverged"
                )
                log(f"{name}: {trained}")
    if broken:
        raise LocaterError(f"{len(broken)} runs broke and can be run again, the first: {broken[0]}")


def _prepare_plans(arms: dict[str, Plan], data: Path, folder: Path, characters: int) -> dict[str, Plan]:
    """The plans with their data where it is. Text is turned into tokens here, once: forked processes inherit them."""
    torch.set_num_threads(1)  # a process with a team of threads cannot be forked safely
    os.environ["TOKENIZERS_PARALLELISM"] = "true"
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", "2")
    placed = {name: _with_local_data(plan, data, folder, characters) for name, plan in arms.items()}
    text = next((plan for plan in placed.values() if plan.corpus), None)
    if text is not None:
        open_data(text, folder, torch.device("cpu"))
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    return placed


def train(plan: Plan, folder: Path) -> dict[str, Any]:
    """Train one model, then measure its heads on the CPU, in float32."""
    from locater_lab.train import load

    plan = replace(plan, out=tempfile.mkdtemp(dir=folder))
    try:
        result = run(plan)
    except DivergedError as error:
        return {"status": "diverged", "message": str(error).replace(str(folder), "run"), **machine(plan)}
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
    model = load(result.model)
    figures = measure_heads(model, split_batches(plan, "select", GATHERED), split_batches(plan, "report", MEASURED))
    shutil.rmtree(plan.out, ignore_errors=True)
    return {
        "status": "done",
        "report_loss": result.report_loss,
        "accuracy": result.accuracy,
        "seconds": result.seconds,
        "trained_tokens": result.tokens,
        **figures,
        **machine(plan),
    }


def split_batches(plan: Plan, split: str, tokens: int) -> list[Batch]:
    """The beginning of a split, as batches that the model takes: about so many tokens, or all there are."""
    data = open_data(plan, Path(plan.out), torch.device("cpu"))
    each = plan.length if plan.task != "image" else _patch_count(plan, data.facts["shape"])
    return [{"inputs": inputs} for inputs, _ in data.windows(split, max(1, tokens // each))]


def _patch_count(plan: Plan, shape: list[int]) -> int:
    return shape[0] * shape[1] // plan.patch**2


def _with_local_data(plan: Plan, data: Path, folder: Path, characters: int) -> Plan:
    """The plan with its data where it is. Text is cut after so many characters, at the end of an article."""
    if plan.images is not None:
        return replace(plan, images=str(_find_file(data, plan.images)))
    path = folder / TEXT
    if not path.is_file():
        text = read_text(_find_file(data, f"{TEXT}.xz"))
        end = text.find("\n\n", characters)
        path.write_text(text if end < 0 else text[:end], encoding="utf-8")
    return replace(plan, corpus=(str(path),))


def _find_file(data: Path, name: str) -> Path:
    path = next((path for path in (data / name, *sorted(data.glob(f"*/{name}"))) if path.is_file()), None)
    if path is None:
        raise LocaterError(f"{data}: no {name} in it, nor one level down: give --data FOLDER")
    return path


def _options_text(plan: Plan, characters: int) -> str:
    """What decides a run: options that are not a plan's defaults, and how much text there was."""
    options = Row("surrogate", "", plan).options
    return json.dumps({**options, "characters": characters if plan.corpus else None}, sort_keys=True)


def _with_options(line: dict[str, Any]) -> dict[str, Any]:
    return {"options": "", **line}
