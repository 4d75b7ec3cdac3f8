"""What four papers on one head predict, beside what heads of small trained models are: docs/results/one-head.md.

    make study STUDY='one_head --models FOLDER'

Models: those available (the demo and its twin, the sentence encoder where installed, folders below --models), and two
that are trained here in about a minute: one layer that learns to copy, two layers of attention alone that learn n-grams.
"""

from __future__ import annotations

import argparse
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from statistics import median
from typing import Any

import locater
from locater.commands.load_model import load_model
from locater_lab.engine.trained_models import model_folders, read_each
from locater_lab.train import Plan, load, run

RESULTS = Path("docs/results")  # from the root of the repository, where make runs
TRAINING_OPTIONS = dict(observe=0, evaluate=0, checkpoint=0, device="cpu")
TRAINED_HERE = {
    "copy, one layer": dict(task="copy", vocabulary=64, layers=1, heads=1, width=64, length=64, batch=32, steps=600, rate=6e-3, positions="learned"),
    "n-grams, two layers": dict(
        task="ngram", vocabulary=3, concentration=0.2, layers=2, heads=1, width=32, length=32, batch=32, steps=500, rate=1e-2, mlp="none",
        positions="learned", scale=0.3,
    ),
}  # fmt: skip
MOST = 0.5  # of a model's heads: from there on a prediction held in it

Row = Any
LENGTH = 512  # tokens that a scan assumes


@dataclass(frozen=True)
class PaperPrediction:
    """A sentence of a paper about W of one head, as a condition on a row of a scan. The thresholds are ours."""

    paper: str
    says: str
    condition: str
    holds: Callable[[Row], bool]
    about: str = ""  # the model that it is about, where it is not about all: then of its last layer


PREDICTIONS = (
    PaperPrediction(
        "amsel2024", "a head that compares tokens needs all its directions", "effective rank at least half the head size",
        lambda row: row.effective_rank >= 0.5 * row.head_dim,
    ),
    PaperPrediction("amsel2024", "its W is a multiple of the identity", "|κ| at least 0.5", lambda row: abs(row.concentration) >= 0.5),
    PaperPrediction(
        "sahiner2022", "a penalty on weights is one on the nuclear norm: few directions are left", "effective rank below half the head size",
        lambda row: row.effective_rank < 0.5 * row.head_dim,
    ),
    PaperPrediction(
        "hu2025", "a head that interpolates has W of rank two, its eigenvalues zero", "stable rank at most 2 and |κ| at most 0.1",
        lambda row: row.stable_rank <= 2 and abs(row.concentration) <= 0.1,
    ),
    PaperPrediction(
        "hu2025", "and a low temperature: its logits are far apart", "√F at least √(2 log T)",
        lambda row: row.F is not None and row.F >= 2 * math.log(LENGTH),
    ),
    PaperPrediction(
        "chen2024", "the head that copies what followed the same context becomes sharp: its scale grows", "√F of the last layer at least √(2 log T)",
        lambda row: row.F is not None and row.F >= 2 * math.log(LENGTH), "n-grams, two layers",
    ),
    PaperPrediction(
        "bao2024", "attention localizes where eigenvalues concentrate around a mean that is not zero", "|κ| at least 0.5 and M above 1",
        lambda row: abs(row.concentration) >= 0.5 and row.M > 1,
    ),
)  # fmt: skip


def load_models(folder: Path | None) -> dict[str, Any]:
    """Models by name."""
    available, left_out = read_each(model_folders(folder).items(), lambda name, path: load_model(str(path)))
    for name, why in left_out.items():
        print(f"{name}: left out ({why})")
    available["demo's twin, with LocAteR"] = load_model(str(files("locater") / "demo" / "twin"))
    for name, settings in TRAINED_HERE.items():
        with tempfile.TemporaryDirectory() as out:
            available[name] = load(run(Plan(**TRAINING_OPTIONS, **settings, out=out + "/run")).model)  # type: ignore[arg-type]
    return available


def model_row(name: str, model: Any) -> dict[str, Any]:
    """Medians over the heads of a model, and the share of heads that are as each prediction says."""
    scan = locater.scan(model, length=LENGTH)
    rows: list[Row] = [row for row in scan.rows if row.kind == "self" and row.effective_rank is not None]
    return {
        "model": name,
        "heads": len(rows),
        "head_dim": rows[0].head_dim,
        "stable_rank": median(row.stable_rank for row in rows),
        "effective_rank": median(row.effective_rank for row in rows),
        "M": median(row.M for row in rows),
        "root_F": median(row.F**0.5 for row in rows),
        "kappa": median(row.concentration for row in rows),
        "shares": [_share(prediction, name, rows) for prediction in PREDICTIONS],
    }


def _share(prediction: PaperPrediction, name: str, rows: list[Row]) -> float | None:
    if prediction.about and prediction.about != name:
        return None
    last = max(row.layer for row in rows)
    some = [row for row in rows if not prediction.about or row.layer == last]
    return sum(map(prediction.holds, some)) / len(some)


def page_text(rows: list[dict[str, Any]]) -> str:
    """The table of models, and that of predictions."""
    names = [row["model"] for row in rows]
    lines = [
        HEAD,
        "| model | heads | head size | stable rank | effective rank | M, mean self-logit | √F, spread of logits | κ |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in rows:
        numbers = (
            f"{row[key]:.{digits}f}"
            for key, digits in (("stable_rank", 1), ("effective_rank", 1), ("M", 2), ("root_F", 2), ("kappa", 2))
        )
        lines.append(f"| {row['model']} | {row['heads']} | {row['head_dim']} | {' | '.join(numbers)} |")
    lines += [
        BETWEEN,
        f"| paper | it says | as a condition on a head | {' | '.join(names)} | held in |",
        "|---|---|---|" + "---|" * (len(names) + 1),
    ]
    for number, prediction in enumerate(PREDICTIONS):
        shares = [row["shares"][number] for row in rows]
        known = [x for x in shares if x is not None]
        cells = ["-" if x is None else f"{x:.0%}" for x in shares]
        held = f"{sum(x >= MOST for x in known)} of {len(known)} models"
        condition = prediction.condition.replace("|", "\\|")
        lines.append(
            f"| [{prediction.paper}]({prediction.paper}.md) | {prediction.says} | {condition} | {' | '.join(cells)} | {held} |"
        )
    return "\n".join(lines) + "\n" + TAIL


HEAD = """# One head: what four papers predict, and what trained heads are

Four papers say what W = W_Qᵀ W_K of one head should be. [amsel2024](amsel2024.md): a head that finds the nearest or farthest token needs full rank, and learns a
multiple of the identity. [sahiner2022](sahiner2022.md): with weight decay, training a layer is a problem with a nuclear norm, whose optimum has few directions.
[chen2024](chen2024.md): the head that copies what followed the same context sharpens as it is learned. [hu2025](hu2025.md): a head that
interpolates has a W of rank two whose eigenvalues are zero, and a low temperature. Beside them [bao2024](bao2024.md), for the mean.

Made by `make study STUDY=one_head`; the conditions and their thresholds are ours and were fixed in the script before it was run. Each paper makes its statement for a
head with one task; a head of a trained model may have another, or none. So a low share refutes no paper: it says that its construction is not what
training finds in these models.

Medians over heads, from the weights alone (unit tokens, 512 of them):
"""
BETWEEN = f"""
The share of a model's heads that are as a paper predicts; a prediction held in a model where the share is {MOST:.0%} or more:
"""
TAIL = """
Rank and scale are those of the effective map, with the gains of norms folded in (docs/theory.md). Temperature is the scale of logits here: a head with √F above
√(2 log T) = 3.5 has no more than half of the entropy of uniform attention. The n-gram and the copy model were trained with one seed: their columns are examples, not samples.
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", type=Path, help="folder with more trained models")
    parser.add_argument("--out", type=Path, default=RESULTS, help="folder for one-head.json and one-head.md")
    options = parser.parse_args()
    rows = [model_row(name, model) for name, model in load_models(options.models).items()]
    predictions = [{"paper": p.paper, "says": p.says, "condition": p.condition} for p in PREDICTIONS]
    document = {"locater": locater.__version__, "length": LENGTH, "predictions": predictions, "models": rows}
    (options.out / "one-head.json").write_text(json.dumps(document, indent=1) + "\n")
    (options.out / "one-head.md").write_text(page_text(rows))


if __name__ == "__main__":
    main()
