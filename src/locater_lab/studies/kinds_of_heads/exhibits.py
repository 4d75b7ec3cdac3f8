"""The models of the gallery: those in the package, the sentence encoder where it is installed, small ones that are
trained here in a minute or two, and folders of checkpoints that the command is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from locater.errors import LocaterError
from locater_lab.engine.trained_models import sentence_model
from locater_lab.train import Plan, run
from locater_lab.train.data import open_data

DEMO = Path(str(files("locater") / "demo"))
DOCUMENTATION = "the documentation inside Python"
SEQUENCES = 96  # of a trained model's own held-out data: a third for statistics, the rest is measured


@dataclass(frozen=True)
class Exhibit:
    """A model of the gallery: what it is, what to look at, and what it is run on."""

    name: str  # of its files
    title: str
    origin: str
    look: str
    folder: Path
    label: str = DOCUMENTATION  # what the probe calls its data
    batches: tuple[dict[str, Tensor], ...] | None = None  # None: text
    tokenizer: str | None = None


@dataclass(frozen=True)
class Recipe:
    """A small model that is trained for the gallery. `settings` are those of `locater train`."""

    title: str
    origin: str
    look: str
    settings: dict[str, Any]

    def plan(self, out: Path) -> Plan:
        return Plan(out=str(out), observe=0, evaluate=0, checkpoint=0, device="cpu", **self.settings)


RECIPES = {
    "copy": Recipe(
        "Copy, one head",
        "One layer with one head. After three of 64 tokens the token before has to be copied; everywhere else the head has nothing to add.",
        "The head is a sink: where it has nothing to add it puts its weight on the first token. Compare `sink` with `predicted_sink`.",
        dict(
            task="copy", vocabulary=64, layers=1, heads=1, width=64, length=64, batch=32, steps=1000, rate=6e-3, positions="learned",
        ),
    ),
    "spare": Recipe(
        "Copy, four heads",
        "The same task with four heads where one is enough, and a strong weight decay.",
        "Two heads are dead: near uniform, and the loss is the same without them. A scan sees how small their √F is.",
        dict(
            task="copy", vocabulary=64, layers=1, heads=4, width=64, length=64, batch=32, steps=1500, rate=6e-3, positions="learned", decay=1.0,
            floor=0.01,
        ),
    ),
    "chains": Recipe(
        "Chains, two layers",
        "Two layers of attention alone. Every sequence has a rule of its own for which token follows which; the model has to find earlier places of the "
        "current token and look at what followed.",
        "An induction circuit: a head of layer 0 looks at the previous token, heads of layer 1 at what followed the same token before.",
        dict(
            task="ngram", vocabulary=64, concentration=0.01, layers=2, heads=4, width=64, length=64, batch=32, steps=1500, rate=1e-2, mlp="none",
            positions="learned", scale=0.3, decay=0.3, floor=0.01,
        ),
    ),
    "letters": Recipe(
        "Letters, two layers",
        "Two blocks with rotary positions that read Python's documentation letter by letter.",
        "Local heads: most of the weight is within a few letters, and the prediction knows it, because the head itself turns queries and keys.",
        dict(layers=2, heads=4, width=64, length=128, batch=16, steps=800, rate=6e-3),
    ),
}  # fmt: skip


def packaged() -> list[Exhibit]:
    """The demo and its twin."""
    words = "A decoder of 6 layers x 4 heads with rotary positions, trained on the documentation inside Python in nine minutes"
    return [
        Exhibit(
            "demo",
            "Demo",
            f"{words}. It is part of the package.",
            "No faults and no roles: a small model that has read little text has soft heads. The first layer looks nearly everywhere, later ones mostly a few tokens back.",
            DEMO,
        ),
        Exhibit(
            "twin",
            "Demo's twin, with LocAteR",
            f"{words}, with the control LocAteR (target 2).",
            "M is 1.9 in every head, where the demo's lie between -0.3 and 0.3. The validation loss is 3.24 in place of 3.21.",
            DEMO / "twin",
            tokenizer=str(DEMO),
        ),
    ]


def installed() -> list[Exhibit]:
    """The sentence encoder that the tests use, where it is installed."""
    folder = sentence_model()
    if folder is None:
        return []
    return [
        Exhibit(
            "minilm",
            "all-MiniLM-L6-v2",
            "A sentence encoder of 6 layers x 12 heads, BERT's shape.",
            "A sharp previous-token head in layer 0, and a head in layer 1 that rests on the first token. Weights alone take nearly all heads for close to uniform.",
            folder,
        )
    ]


def trained(runs: Path, names: Sequence[str] = tuple(RECIPES)) -> Iterator[Exhibit]:
    """Models of `RECIPES`, each trained in a folder of its own below `runs`; one that is there already is not trained
    again.
    """
    for name in names:
        recipe = RECIPES[name]
        result = run(recipe.plan(runs / name))
        yield Exhibit(
            name,
            recipe.title,
            recipe.origin,
            recipe.look,
            Path(result.model),
            "its own data, held out",
            tuple({"input_ids": inputs} for inputs, _ in held_out(name, runs)),
        )


def held_out(name: str, runs: Path) -> list[tuple[Tensor, Tensor]]:
    """Inputs and targets that a trained model has not seen."""
    plan = RECIPES[name].plan(runs / name)
    return list(open_data(plan, runs / name, torch.device("cpu")).windows("report", SEQUENCES))


def given(folders: Sequence[Path]) -> list[Exhibit]:
    """Checkpoints in folders, or in folders of folders."""
    found = []
    for folder in folders:
        inside = [folder] if (folder / "config.json").is_file() else sorted(folder.glob("*/"))
        models = [path for path in inside if (path / "config.json").is_file()]
        if not models:
            raise LocaterError(
                f"{folder}: no checkpoint there (a folder with config.json, or a folder of such folders)"
            )
        found += [Exhibit(path.name, path.name, "Given by --models.", "", path) for path in models]
    return found
