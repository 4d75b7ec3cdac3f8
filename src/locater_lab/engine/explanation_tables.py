"""Measurements that both papers on explanations judge: areas by model and method, known answers, parameters drawn anew."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

from locater.errors import LocaterError
from locater_lab.engine.claims import Measured, by_seed
from locater_lab.engine.explained import Explained, image_file, image_model, sentence_model, story_model, text_model
from locater_lab.engine.explanation_tests import RIVALS, areas, difference, hits, likeness
from locater_lab.engine.papers import Setting

INPUTS = {True: 48, False: 200}  # explained for each model that is trained here
AT_HAND = {True: 24, False: 100}  # and for each of those at hand, which are larger
KNOWN = {True: 8, False: 64}  # inputs with a known answer, for each seed
SEEDS = 8
MODELS = {"b1": "text", "b2": "images", "b3": "all-MiniLM-L6-v2", "b4": "stories260K"}  # by the claim on each
WORDS = {
    "text": "a text classifier",
    "images": "an image classifier",
    "all-MiniLM-L6-v2": "a sentence encoder",
    "stories260K": "a language model",
}
CLASSIFIERS = ("text", "images")
COSTLY = 20.0  # forward passes that scores may take and still be called cheap
LEARNED = 0.9  # accuracy from which a model counts as having learned its task
GRADIENTS = ("gradient_input", "relevance")
OPERATORS = ("operator logit", "operator input_output", "operator input", "operator norm")
MISSING = "fashion.npz in the folder of --data (images), the trained models (the sentence encoder installed, stories260K in --models)"


@dataclass(frozen=True)
class Areas:
    """The area between the curves of every method for each input, by model."""

    by_model: Mapping[str, Mapping[str, Sequence[float]]]
    facts: Mapping[str, Mapping[str, Any]]

    def less_rivals(self, model: str, method: str, rivals: Sequence[str] = RIVALS) -> Measured | None:
        """A method less its best rival, over the inputs of one model; None where the model is missing."""
        if model not in self.by_model:
            return None
        return by_seed(difference(self.by_model[model], method, rivals), of="inputs of one model")

    def table(self) -> dict[str, Any]:
        methods = list(dict.fromkeys(name for table in self.by_model.values() for name in table))
        rows = [
            {"method": name, **{model: fmean(table[name]) for model, table in self.by_model.items() if name in table}}
            for name in methods
        ]
        return {"rows": rows, "models": list(self.by_model), "facts": dict(self.facts)}


def measured_areas(setting: Setting, methods: Sequence[str], on_classifiers: Sequence[str] = ()) -> Areas:
    """Every method on every model at hand, and more of them on the classifiers that are trained here."""
    count = INPUTS[setting.quick]
    makers: dict[str, Callable[[], Explained | None]] = {
        "text": lambda: text_model(count),
        "images": lambda: image_model(count, setting.data) if image_file(setting.data) else None,
        "all-MiniLM-L6-v2": lambda: sentence_model(AT_HAND[setting.quick]),
        "stories260K": lambda: story_model(AT_HAND[setting.quick], setting.models),
    }
    by_model: dict[str, dict[str, list[float]]] = {}
    facts: dict[str, Mapping[str, Any]] = {}
    for name in setting.each(list(makers)):
        subject = makers[name]()
        if subject is not None:
            facts[name] = {"inputs": len(subject.inputs), **subject.facts}
            names = (*methods, *on_classifiers) if name in CLASSIFIERS else methods
            by_model[name] = {method: areas(subject, method) for method in names}
    return Areas(by_model, facts)


def trained_by_seed(setting: Setting, make: Callable[[int, int], Explained]) -> list[Explained]:
    """A task with a known answer, learned with every seed."""
    subjects = [make(KNOWN[setting.quick], seed) for seed in setting.each(list(range(SEEDS)))]
    for seed, subject in enumerate(subjects):
        if subject.facts["accuracy"] < LEARNED:
            raise LocaterError(f"{subject.name}: not learned with seed {seed}: accuracy {subject.facts['accuracy']}")
    return subjects


def known_answers(subjects: Sequence[Explained], methods: Sequence[str]) -> dict[str, list[float]]:
    """The share of inputs whose largest score is that of the token that decides, by method and seed."""
    return {name: [hits(subject, name) for subject in subjects] for name in methods}


def redrawn(subjects: Sequence[Explained], methods: Sequence[str]) -> dict[str, list[list[float]]]:
    """Rank correlations of scores with those of models whose last blocks were drawn anew, by method and seed."""
    return {name: [likeness(subject, name, seed) for seed, subject in enumerate(subjects)] for name in methods}


def mean_curves(likeness: Mapping[str, Sequence[Sequence[float]]]) -> dict[str, list[float]]:
    """Means over seeds of what `redrawn` returns: for each method a number by how many blocks were drawn anew.

    >>> mean_curves({"rollout": [[1.0, 0.5], [0.0, 0.5]]})
    {'rollout': [0.5, 0.5]}
    """
    return {name: [fmean(depth) for depth in zip(*curves, strict=True)] for name, curves in likeness.items()}
