"""How well the entropy of heads is predicted without running the model: from weights alone, and on normal tokens with
the measured mean and covariance.

    make surrogate                                        measures the models at hand, then writes the page
    python scripts/surrogate.py train --data FOLDER       trains the models of docs/results/surrogate-plan.md (minutes on a GPU)
    python scripts/surrogate.py page                      writes the page again from the figures

Statistics come from one text and entropy is measured on another. Models at hand are the checkpoints inside the package
(on the two halves of Python's documentation), the sentence encoder all-MiniLM-L6-v2 where it is installed and every model
folder below --models (on valid.txt.xz and test.txt.xz in --text, or the documentation where that is missing). A model
that reads no text has a file inputs.txt in its folder: a line that says what the inputs are, then token ids, one
sequence a line and all of one length; the first half gives the statistics, the second half is measured on.

Figures go to docs/results/surrogate.json, those of trained models to docs/results/surrogate-runs.jsonl.
"""

from __future__ import annotations

import argparse
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import torch

sys.path[:0] = [str(Path(__file__).parent)]

from surrogate_heads import record  # noqa: E402 - beside this file
from surrogate_page import page, table  # noqa: E402
from surrogate_runs import ARMS, tiny, train_all  # noqa: E402

from locater.commands.load import load_model  # noqa: E402
from locater.errors import LocaterError  # noqa: E402
from locater.inputs.corpus import embedded_text  # noqa: E402
from locater.inputs.text import Batch, batches, read_text  # noqa: E402
from locater_lab.engine.reproduction import rounded  # noqa: E402
from locater_lab.engine.trained_models import model_folders  # noqa: E402
from locater_lab.train.sweep import read_lines  # noqa: E402

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "docs" / "results"
LENGTH, GATHERED, MEASURED = 256, 4096, 8192  # tokens in a sequence, for statistics, to measure on
DEMO = "demo (in the package)"


def models_at_hand(folders: list[Path]) -> dict[str, Path]:
    """Trained models by name."""
    by_name = {name: path for folder in folders for name, path in model_folders(folder).items()}
    demo = by_name.pop(DEMO)
    return {"demo": demo, "demo, trained with LocAteR": demo / "twin", **by_name}


@cache
def texts(folder: Path) -> dict[str, tuple[str, str]]:
    """By corpus, one text for statistics and one to measure on."""
    docs = embedded_text()
    corpora = {"Python's documentation": (docs[: len(docs) // 2], docs[len(docs) // 2 :])}
    if (folder / "valid.txt.xz").is_file():
        corpora["WikiText-2"] = (read_text(folder / "valid.txt.xz"), read_text(folder / "test.txt.xz"))
    return corpora


def own_inputs(path: Path) -> tuple[str, list[Batch], list[Batch]]:
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


def entry(name: str, folder: Path, corpora: dict[str, tuple[str, str]]) -> dict[str, Any]:
    """The figures of one model."""
    model = load_model(str(folder))
    if (folder / "inputs.txt").is_file():
        corpus, gathered, measured = own_inputs(folder / "inputs.txt")
        return {"model": name, "corpus": corpus, **record(model, gathered, measured)}

    tokenizer = folder if any(folder.glob("*token*")) else folder.parent  # the twin of the demo has that of the demo

    def cut(text: str, tokens: int) -> list[Batch]:
        return batches(model, text, tokenizer=str(tokenizer), length=LENGTH, tokens=tokens)

    corpus = next(iter(corpora)) if name.startswith("demo") else list(corpora)[-1]
    one, another = corpora[corpus]
    elsewhere = next((text for title, (text, _) in corpora.items() if title != corpus), None)
    other = None if elsewhere is None else cut(elsewhere, GATHERED)
    return {"model": name, "corpus": corpus, **record(model, cut(one, GATHERED), cut(another, MEASURED), other)}


def measure(args: argparse.Namespace) -> None:
    """Measure the models at hand. Those that are not here keep the figures that the file has of them."""
    path = args.out / "surrogate.json"
    kept = {e["model"]: e for e in json.loads(path.read_text())} if path.is_file() else {}
    for name, folder in models_at_hand(args.models or [ROOT.parent / "shared" / "models"]).items():
        if args.only is None or args.only in name:
            kept[name] = rounded(entry(name, folder, texts(args.text)), 5)
            print(f"{name}: {len(kept[name]['heads']['entropy'])} heads")
            path.write_text("[\n" + ",\n".join(json.dumps(e) for e in kept.values()) + "\n]\n")
    write_page(args)


def read_all(folder: Path) -> list[dict[str, Any]]:
    """Figures of the models at hand, then of trained ones."""
    trained = [
        {"model": line["arm"], "corpus": "images" if '"image"' in line["options"] else "Wikipedia", **line}
        for line in read_lines(folder / "surrogate-runs.jsonl")
        if line["status"] == "done"
    ]
    order = {name: number for number, name in enumerate(ARMS)}
    at_hand: list[dict[str, Any]] = json.loads((folder / "surrogate.json").read_text())
    return [*at_hand, *sorted(trained, key=lambda e: order.get(e["model"], len(order)))]


def write_page(args: argparse.Namespace) -> None:
    entries = read_all(args.out)
    (args.out / "surrogate.md").write_text(page(entries))
    print(table(entries))
    print(f"{len(entries)} models: {args.out / 'surrogate.md'}")


def train(args: argparse.Namespace) -> None:
    arms = {name: plan for name, plan in ARMS.items() if args.only is None or args.only in name}
    if args.tiny:
        train_all(
            args.out / "surrogate-runs.jsonl", args.data, args.jobs, 300_000, {n: tiny(p) for n, p in arms.items()}
        )
    else:
        train_all(args.out / "surrogate-runs.jsonl", args.data, args.jobs, arms=arms)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", nargs="?", choices=("measure", "train", "page"), default="measure")
    parser.add_argument("--models", type=Path, action="append", help="folder of more trained models; may be repeated")
    parser.add_argument(
        "--text",
        type=Path,
        default=ROOT.parent / "shared" / "data" / "wikitext-2",
        help="folder of valid.txt.xz, test.txt.xz",
    )
    parser.add_argument(
        "--data",
        type=Path,
        default=ROOT.parent / "shared" / "data",
        help="folder of articles.txt.xz and fashion.npz, for train",
    )
    parser.add_argument("--jobs", type=int, default=9, help="models trained at a time")
    parser.add_argument("--tiny", action="store_true", help="train tiny models, to try the command; give another --out")
    parser.add_argument("--only", help="models whose name contains this")
    parser.add_argument("--out", type=Path, default=RESULTS)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    try:
        {"measure": measure, "train": train, "page": write_page}[args.command](args)
    except LocaterError as error:
        sys.exit(f"surrogate: {error}")


if __name__ == "__main__":
    main()
