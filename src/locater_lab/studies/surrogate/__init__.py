"""How well the entropy of heads is predicted without running the model: from weights alone, and on normal tokens with
the measured mean and covariance. docs/results/surrogate-plan.md was written before the runs.

Statistics come from one text and entropy is measured on another. Available models are the checkpoints inside the package
(on the two halves of Python's documentation), the sentence encoder all-MiniLM-L6-v2 where it is installed and every
model folder below --models (on valid.txt.xz and test.txt.xz in --data, or the documentation where that is missing). A
model that reads no text has a file inputs.txt in its folder: a line that says what the inputs are, then token ids, one
sequence a line and all of one length; the first half gives the statistics, the second half is measured on.

    locater reproduce surrogate --jobs 1 --models FOLDER --runs LINES     # measures the available models that LINES lacks
    locater reproduce surrogate --jobs 9 --data FOLDER --runs LINES       # trains the models of the plan that LINES lacks
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import torch

from locater.commands.load_model import load_model
from locater.errors import LocaterError
from locater.inputs.text import Batch, batches, read_text
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Paper, Results, Setting, Study, round_numbers
from locater_lab.engine.trained_models import model_folders
from locater_lab.studies.surrogate.errors_and_claims import (
    BETWEEN,
    CLAIMS,
    DECIDED_BY,
    ClaimFigure,
    Entry,
    claim_figures,
)
from locater_lab.studies.surrogate.tables_of_page import COLUMNS, WORST, cells_table, page_tables
from locater_lab.studies.surrogate.training_runs import ARMS, measure_heads, train_all
from locater_lab.train.sweep import append_line, read_lines

LENGTH, GATHERED, MEASURED = 256, 4096, 8192  # tokens in a sequence, for statistics, to measure on
DEMO = "demo (in the package)"
AVAILABLE = ("demo", "demo, trained with LocAteR", "all-MiniLM-L6-v2", "stories260K", "AntiBERTy", "rxnfp")
MODELS = (*AVAILABLE, *ARMS)  # that claims are about; others stand in the tables alone


def claim_id(claim: str, model: str) -> str:
    """`b3` is the second claim about the third model; claims between models come last.

    >>> claim_id("error", "all-MiniLM-L6-v2"), claim_id("size", "causal models")
    ('b3', 'f1')
    """
    if claim in BETWEEN:
        return f"f{list(BETWEEN).index(claim) + 1}"
    return f"{'abcde'[list(CLAIMS).index(claim)]}{MODELS.index(model) + 1}"


def _claims() -> tuple[Claim, ...]:
    each = [
        Claim(
            claim_id(claim, model),
            f"{words}: {model}",
            DECIDED_BY[claim],
            "at most" if most else "at least",
            bound,
            by="ours",
        )
        for claim, (words, _, bound, most) in CLAIMS.items()
        for model in MODELS
    ]
    between = [
        Claim(claim_id(claim, ""), words, DECIDED_BY[claim], "at least", 0.0, by="ours")
        for claim, words in BETWEEN.items()
    ]
    return (*each, *between)


def measure(setting: Setting) -> Results:
    """Judge the lines that there are; with --jobs make those that are missing first."""
    if setting.runs is None:
        return Results({})
    if setting.jobs and setting.models is not None:
        measure_models(setting)
    elif setting.jobs:
        if setting.data is None:
            raise LocaterError(
                f"--jobs {setting.jobs}: give --models FOLDER to measure models, or --data FOLDER to train them"
            )
        train_all(setting.runs, setting.data, setting.jobs, log=setting.log)
    entries = read_entries((*setting.more_runs, setting.runs))
    return results_of(entries) if entries else Results({})


def measure_models(setting: Setting) -> None:
    """Append a line for every available model that has none."""
    assert setting.runs is not None
    done = {line.get("model") for line in read_lines(setting.runs)}
    for name, folder in available_models(setting.models).items():
        if name not in done:
            line = round_numbers(model_line(name, folder, corpus_texts(setting)), 5)
            append_line(setting.runs, line)
            setting.log(f"{name}: {len(line['heads']['entropy'])} heads")


def read_entries(paths: Sequence[Path]) -> list[Entry]:
    """Figures of the available models, then of those trained here. Of a model with two lines the last one counts."""
    lines = [line for path in paths for line in read_lines(path)]
    by_name = {line["model"]: line for line in lines if "model" in line and "arm" not in line}
    trained = {
        line["arm"]: {"model": line["arm"], "corpus": "images" if '"image"' in line["options"] else "Wikipedia", **line}
        for line in lines
        if "arm" in line and line["status"] == "done"
    }
    order = {name: number for number, name in enumerate(ARMS)}
    return [*by_name.values(), *sorted(trained.values(), key=lambda e: order.get(e["model"], len(order)))]


def results_of(entries: Sequence[Entry]) -> Results:
    """A measurement for each claim, and what the page shows."""
    known = [x for x in claim_figures(entries) if x.claim in BETWEEN or x.model in MODELS]
    return Results({claim_id(x.claim, x.model): _measurement(x) for x in known}, page_tables(entries))


def _measurement(x: ClaimFigure) -> Measurement:
    low, high = x.estimate.interval
    how = "half of the 95 % bootstrap interval over heads, which is not symmetric"
    p = x.estimate.p_value(x.bound)
    return Measurement(x.estimate.value, (high - low) / 2, how, {"interval": [low, high]}, p=p)


def figure_between(figures: Mapping[str, str], claim: str) -> str:
    """The figure of a claim between models, of the table by claim and model."""
    return next(text for name, text in figures.items() if name.startswith(f"{claim}, "))


# ---- the figures of available models ----


def available_models(folder: Path | None) -> dict[str, Path]:
    """Trained models by name."""
    by_name = model_folders(folder)
    demo = by_name.pop(DEMO)
    return {"demo": demo, "demo, trained with LocAteR": demo / "twin", **by_name}


def corpus_texts(setting: Setting) -> dict[str, tuple[str, str]]:
    """By corpus, one text for statistics and one to measure on."""
    docs, data = setting.text, setting.data
    corpora = {"Python's documentation": (docs[: len(docs) // 2], docs[len(docs) // 2 :])}
    if data is not None and (data / "valid.txt.xz").is_file():
        corpora["WikiText-2"] = (read_text(data / "valid.txt.xz"), read_text(data / "test.txt.xz"))
    return corpora


def read_token_inputs(path: Path) -> tuple[str, list[Batch], list[Batch]]:
    """What a file of inputs holds, in words, and batches of its two halves."""
    title, *lines = path.read_text(encoding="utf-8").splitlines()
    try:
        ids = torch.tensor([[int(word) for word in line.split()] for line in lines])
    except ValueError as error:
        raise LocaterError(f"{path}: after the first line, token ids, every line as many ({error})") from None
    half = len(ids) // 2
    parts = ids[:half][: GATHERED // ids.shape[1]], ids[half:][: MEASURED // ids.shape[1]]
    gathered, measured = ([{"input_ids": batch} for batch in part.split(8)] for part in parts)
    return title.lstrip("# "), gathered, measured


def model_line(name: str, folder: Path, corpora: Mapping[str, tuple[str, str]]) -> Entry:
    """The figures of one model, on its own inputs or on a text."""
    model = load_model(str(folder))
    if (folder / "inputs.txt").is_file():
        corpus, gathered, measured = read_token_inputs(folder / "inputs.txt")
        return {"model": name, "corpus": corpus, **measure_heads(model, gathered, measured)}

    tokenizer = folder if any(folder.glob("*token*")) else folder.parent  # the twin of the demo has that of the demo

    def text_batches(text: str, tokens: int) -> list[Batch]:
        return batches(model, text, tokenizer=str(tokenizer), length=LENGTH, tokens=tokens)

    corpus = next(iter(corpora)) if name.startswith("demo") else list(corpora)[-1]
    one, another = corpora[corpus]
    elsewhere = next((text for title, (text, _) in corpora.items() if title != corpus), None)
    other = None if elsewhere is None else text_batches(elsewhere, GATHERED)
    return {
        "model": name,
        "corpus": corpus,
        **measure_heads(model, text_batches(one, GATHERED), text_batches(another, MEASURED), other),
    }


STUDY = Study(
    "entropy of heads",
    _claims(),
    measure,
    "figures of models: --runs FILE of earlier ones, with --jobs N and --models FOLDER or --data FOLDER to make those that it lacks",
    on_models=True,
    on_runs=True,
    needs_data=False,
)
PAPER = Paper(
    "surrogate",
    "The Gaussian surrogate: entropy of heads, predicted and measured",
    "Heads on normal tokens with the mean and covariance of what their layer reads, beside the same heads on text",
    (STUDY,),
    Path(__file__).parent,
    {
        "BETWEEN": BETWEEN, "CLAIMS": CLAIMS, "COLUMNS": COLUMNS, "MODELS": MODELS, "WORST": WORST,
        "between": figure_between, "cells_table": cells_table, "id_of": claim_id,
    },
    kept=("surrogate-heads.jsonl", "surrogate-runs.jsonl"),
    kinds={"experiment": "a b c d e f"},
    within={(-1.0, 1.0): "a"},
    says="Do mean and covariance of what a layer reads predict the entropy of its heads?",
    beliefs={
        "b1 b2 b3 b4 b5 b6 b7 b8 b9 b10 b11 b12 b13 b14 b15": "mean and covariance predict the entropy of heads within 0.35 nats",
        "a1 a2 a3 a4 a5 a6 a7 a8 a9 a10 a11 a12 a13 a14 a15": "mean and covariance order the heads of a model with a rank correlation of 0.85",
        "c1 c2 c3 c4 c5 c6 c7 c8 c9 c10 c11 c12 c13 c14 c15": "the covariance is worth, for the entropy of heads, more than its diagonal",
    },
    cover="errors",
)  # fmt: skip

__all__ = ["PAPER"]
