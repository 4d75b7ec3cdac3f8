"""Five kinds of heads (sink, previous token, induction, local, dead), found in models that are trained here in a minute
or two each: docs/kinds-of-heads.md.

Of each kind the clearest head is shown: spectrum, pattern and prediction side by side. The words of the page about
these heads are claims, with bounds that were chosen when the heads had been seen: heads that are trained again, by
another version of the code, have to bear them out. The table counts heads of each kind in all available models.
"""

from __future__ import annotations

import copy
import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import locater
from locater.discovery import attention_layers
from locater.errors import LocaterError
from locater.findings.flags import LEVEL, LOCAL, ROLE_WEIGHT, UNIFORM
from locater.layers import AttentionLayer, Norm
from locater.observing.head_roles import matches
from locater.theory.gaussian_tokens_and_covariance_root import gaussian_tokens
from locater_lab.engine.claims import Claim, Measurement, Relation
from locater_lab.engine.reproduction import Paper, Results, Setting, Study
from locater_lab.studies.kinds_of_heads.exhibits import (
    Exhibit,
    draw_pattern,
    draw_prediction,
    draw_spectrum,
    given_models,
    held_out,
    installed_models,
    packaged_models,
    trained_models,
)
from locater_lab.train import Transformer, load

SHOWN = 48  # tokens of a pattern
FROM = 8  # rows before this one see too few tokens for zones to be apart
DRAWS = 64  # sequences of normal tokens
TOKENS = 4096  # that models are measured on which are not trained here
IDLE = 1e-3  # nats that a dead head may cost when it is taken out
ZONES = ("first token", "itself", "1 before", "2-4", "5+")
COPY = "after copy"
FIGURE_SERIES = ("measured", "predicted", "weights alone")
COLUMNS = ("entropy", "entropy_ratio", "sink", "previous", "induction", "distance", "self_mass")
PREDICTED = ("predicted_entropy", "prior_entropy", "predicted_sink")
SCANNED = ("M", "F", "concentration", "localization", "effective_rank", "head_dim", "expected_entropy")

Row = Any


@dataclass(frozen=True)
class Kind:
    """A kind of head: whether a row of a probe is of this kind, and how clearly."""

    name: str
    role: str | None  # as a probe names it; None: by what the loss is without the head
    clear: Callable[[Row, float], float]  # of a row and that cost; the largest is shown


KINDS = (
    Kind("sink", "first-token", lambda row, cost: row.sink),
    Kind("previous-token", "previous-token", lambda row, cost: row.previous),
    Kind("induction", "induction", lambda row, cost: row.induction),
    Kind("local", "local", lambda row, cost: -row.distance),
    Kind("dead", None, lambda row, cost: row.entropy_ratio),
)


@dataclass(frozen=True)
class ProbedModel:
    """A model with its probe, and for models that are trained here what the loss gains without each head, in nats."""

    exhibit: Exhibit
    probe: Any
    costs: dict[tuple[int, int], float] | None = None

    def heads_of_kind(self, kind: Kind) -> list[tuple[Row, float]]:
        """The heads of a kind, each with its cost."""
        costs = self.costs or {}
        pairs = zip(self.probe.rows, self.probe.verdicts, strict=True)
        rows = [(row, verdict.role, costs.get((row.layer, row.head), math.inf)) for row, verdict in pairs]
        return [
            (row, cost) for row, role, cost in rows if (abs(cost) < IDLE if kind.role is None else role == kind.role)
        ]

    def counts(self) -> dict[str, Any]:
        """How many heads are of each kind; None where it was not measured."""
        known = {kind.name: len(self.heads_of_kind(kind)) for kind in KINDS if kind.role or self.costs is not None}
        uniform = sum(row.entropy_ratio > LEVEL for row in self.probe.rows)
        rows = {"model": self.exhibit.title, "heads": len(self.probe.rows), "data": self.exhibit.label}
        return {**rows, **{kind.name: known.get(kind.name) for kind in KINDS}, "uniform": uniform}


def clearest_head(kind: Kind, models: Sequence[ProbedModel]) -> tuple[ProbedModel, Row] | None:
    """The head that is most clearly of this kind, with its model."""
    found = [(kind.clear(row, cost), model, row) for model in models for row, cost in model.heads_of_kind(kind)]
    return max(found, key=lambda entry: entry[0])[1:] if found else None


# ---- what is measured of one head ----


def weight_by_zone(maps: Tensor, copies: Tensor | None) -> list[float | None]:
    """Weight (B, T, T) of a causal head by zones, mean over rows: `ZONES`, and on tokens that followed a copy (B, T, T)
    of the current one, which then count there alone.
    """
    T = maps.shape[-1]
    at = torch.arange(T)
    back = (at[:, None] - at[None, :]).expand_as(maps)
    first = (at[None, :] == 0).expand_as(maps)
    after = torch.zeros_like(first) if copies is None else copies & ~first
    near = ~(first | after)
    distances = ((0, 0), (1, 1), (2, 4), (5, T))
    zones = [first, *(near & (back >= low) & (back <= high) for low, high in distances)]
    weight = [float((maps * zone).sum(-1)[:, FROM:].mean()) for zone in (*zones, *([] if copies is None else [after]))]
    return list(weight)


@torch.no_grad()
def maps_on_normal_tokens(layer: AttentionLayer, entry: Any, head: int, length: int) -> dict[str, Tensor]:
    """Maps of a head on normal tokens: with the mean and covariance of its real input, from weights alone, and on the
    first kind of tokens with either part left out.
    """
    bare = replace(layer, norm=Norm(), memory_norm=None)

    def on(mean: Tensor, covariance: Tensor, first: Tensor | None) -> Tensor:
        return bare.attention(gaussian_tokens(mean, covariance, DRAWS, length, first))[:, head]

    unit = torch.randn(DRAWS, length, layer.width, generator=torch.Generator().manual_seed(0))
    return {
        "predicted": on(entry.mean, entry.covariance, entry.first),
        "weights alone": layer.attention(unit, normalized=True)[:, head],
        "without the mean": on(torch.zeros_like(entry.mean), entry.covariance, None),
        "the mean alone": on(entry.mean, torch.zeros_like(entry.covariance), None),
    }


@torch.no_grad()
def loss_of(model: Transformer, pairs: list[tuple[Tensor, Tensor]]) -> float:
    losses = [float(model(inputs, targets)) * len(inputs) for inputs, targets in pairs]
    return sum(losses) / sum(len(inputs) for inputs, _ in pairs)


def without_head(model: Transformer, layer: int, head: int) -> Transformer:
    """A copy of the model in which this head adds nothing to the stream."""
    cut = copy.deepcopy(model)
    attention: Any = cut.model.layers[layer].self_attn
    with torch.no_grad():
        attention.o_proj.weight[:, head * attention.size : (head + 1) * attention.size] = 0
    return cut


def head_costs(exhibit: Exhibit, runs: Path) -> dict[tuple[int, int], float]:
    """What the loss on held-out data gains without each head."""
    model, pairs = load(exhibit.folder), held_out(exhibit.name, runs)
    plain = loss_of(model, pairs)
    heads = [(number, head) for number, layer in enumerate(attention_layers(model)) for head in range(layer.heads)]
    return {head: loss_of(without_head(model, *head), pairs) - plain for head in heads}


def pattern_figure(kind: Kind, model: Transformer, row: Row, ids: Tensor) -> str:
    """The map on the first held-out sequence; of an induction head on random tokens that are repeated."""
    title = f"Pattern: {SHOWN} tokens of one sequence"
    ids = ids[:1, :SHOWN]
    if kind.name == "induction":
        title = f"Pattern: {SHOWN // 2} random tokens, repeated"
        once = torch.randperm(model.shape.vocabulary, generator=torch.Generator().manual_seed(0))[None, : SHOWN // 2]
        ids = torch.cat([once, once], 1)
    return draw_pattern(attention_map(model, row, ids)[0], title)


def attention_map(model: Transformer, row: Row, ids: Tensor) -> Tensor:
    maps = locater.attention_pattern(model, {"input_ids": ids}, layers=[row.layer], heads=[row.head])
    return maps[row.layer, row.head]


def describe_head(kind: Kind, one: ProbedModel, row: Row, runs: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Numbers of one head, and its three pictures."""
    exhibit, probe = one.exhibit, one.probe
    model, pairs = load(exhibit.folder), held_out(exhibit.name, runs)
    ids = torch.cat([inputs for inputs, _ in pairs])
    maps = attention_map(model, row, ids)
    scanned = next(x for x in locater.scan(model, eigenvalues=True).rows if (x.layer, x.head) == (row.layer, row.head))
    entry = next(x for x in probe.statistics.inputs if x.layer == row.layer)
    normal = maps_on_normal_tokens(attention_layers(model)[row.layer], entry, row.head, ids.shape[1])
    copies = matches(ids, (1,)) if kind.name == "induction" else None
    zones = (*ZONES, COPY) if copies is not None else ZONES
    unknown: list[float | None] = [None] * (copies is not None)
    values = {
        "measured": weight_by_zone(maps, copies),
        **{name: weight_by_zone(x, None) + unknown for name, x in normal.items()},
    }
    scale, pairs_of = scanned.scale or 1.0, scanned.eigenvalues or ()
    eigenvalues = [(scale * re, scale * im) for re, im in pairs_of]
    entropies = tuple(f"{row[name]:.2f}" for name in ("entropy", *PREDICTED[:2]))
    document = {
        "kind": kind.name,
        "model": exhibit.title,
        "layer": row.layer,
        "head": row.head,
        **{name: row[name] for name in (*COLUMNS, *PREDICTED)},
        **{name: scanned[name] for name in SCANNED},
        "flags": list(row.flags),
        "zones": list(zones),
        "weights": values,
        "largest_eigenvalue": max(math.hypot(*pair) for pair in eigenvalues),
        "loss": loss_of(model, pairs),
        "cost": (one.costs or {})[row.layer, row.head],
    }
    title = f"Entropy {entropies[0]}; predicted {entropies[1]}; from weights {entropies[2]}"
    pictures = {
        "spectrum": draw_spectrum(eigenvalues, scanned.M or 0.0, scanned.F or 0.0),
        "pattern": pattern_figure(kind, model, row, ids),
        "prediction": draw_prediction(zones, {name: values[name] for name in FIGURE_SERIES}, title),
    }
    return document, pictures


def near_uniform(model: ProbedModel) -> list[dict[str, Any]]:
    """Heads that average nearly everything, each with what the loss gains without it."""
    costs = model.costs or {}
    return [
        {
            "model": model.exhibit.title,
            **{name: row[name] for name in ("layer", "head", "entropy_ratio")},
            "cost": costs[row.layer, row.head],
        }
        for row in model.probe.rows
        if row.entropy_ratio > LEVEL
    ]


# ---- the study ----


def _claim(id: str, says: str, quantity: str, relation: Relation, stated: float) -> Claim:
    return Claim(id, says, quantity, relation, stated, by="ours")


CLAIMS = (
    _claim(
        "a1",
        "Normal tokens with the measured first token see the sink",
        "weight on the first token, predicted over measured",
        "at least",
        0.5,
    ),
    _claim(
        "a2",
        "Normal tokens have no position, and miss the previous token",
        "weight one token back, predicted over measured",
        "at most",
        0.5,
    ),
    _claim(
        "a3",
        "The eigenvalues of an induction head are small for its logits",
        "the largest eigenvalue over the root mean square of the singular values",
        "at most",
        0.5,
    ),
    _claim(
        "a4",
        "How sharp the induction head is, is predicted",
        "entropy, predicted less measured, without sign, nats",
        "at most",
        0.25,
    ),
    _claim(
        "a5",
        "Where the local head looks is predicted, zone by zone",
        "largest difference of weights, predicted less measured",
        "at most",
        0.05,
    ),
    _claim(
        "a6",
        "That the dead head is near uniform is seen from weights alone",
        "entropy, from weights less measured, without sign, nats",
        "at most",
        0.25,
    ),
    _claim("a7", "Uniform is not dead", "the largest loss without a head that is near uniform, nats", "at least", 0.1),
)
ONE = "none: one head of one training run, an example and no sample"


def measure(setting: Setting) -> Results:
    """Train four models, minutes in all, and find the clearest head of each kind."""
    if setting.quick:
        return Results({})
    with tempfile.TemporaryDirectory(prefix="locater-kinds-") as runs:
        further = [] if setting.models is None else given_models([setting.models])
        return results_of(*make_tables(Path(runs), further, setting.log))


def results_of(tables: dict[str, Any], pictures: dict[str, str]) -> Results:
    """A measurement for each claim."""
    head = {entry["kind"]: entry for entry in tables["heads"]}

    def weight(kind: str, series: str, zone: str) -> float:
        return float(head[kind]["weights"][series][head[kind]["zones"].index(zone)])

    sink, induction, local, dead = (head[kind] for kind in ("sink", "induction", "local", "dead"))
    zones = zip(local["weights"]["measured"], local["weights"]["predicted"], strict=True)
    values = {
        "a1": sink["predicted_sink"] / sink["sink"],
        "a2": weight("previous-token", "predicted", "1 before") / weight("previous-token", "measured", "1 before"),
        "a3": induction["largest_eigenvalue"] / radius(induction),
        "a4": abs(induction["predicted_entropy"] - induction["entropy"]),
        "a5": max(abs(a - b) for a, b in zones),
        "a6": abs(dead["prior_entropy"] - dead["entropy"]),
        "a7": max((entry["cost"] for entry in tables["near_uniform"]), default=0.0),
    }
    return Results({id: Measurement(value, 0.0, ONE) for id, value in values.items()}, {**tables, "pictures": pictures})


def make_tables(
    runs: Path, further: list[Exhibit], log: Callable[[str], None]
) -> tuple[dict[str, Any], dict[str, str]]:
    """The tables of the page, and its pictures by name."""
    models = []
    for exhibit in trained_models(runs):
        probe = locater.probe(exhibit.folder, exhibit.batches)
        models.append(ProbedModel(exhibit, probe, head_costs(exhibit, runs)))
    others = [
        ProbedModel(exhibit, locater.probe(exhibit.folder, tokenizer=exhibit.tokenizer, tokens=TOKENS))
        for exhibit in (*packaged_models(), *installed_models(), *further)
    ]
    heads: list[dict[str, Any]] = []
    pictures: dict[str, str] = {}
    for kind in KINDS:
        chosen = clearest_head(kind, models)
        if chosen is None:
            raise LocaterError(f"{kind.name}: no head of this kind in the models that were trained for it")
        head, drawn = describe_head(kind, *chosen, runs)
        heads.append(head)
        pictures |= {f"{kind.name}-{part}": svg for part, svg in drawn.items()}
        log(f"{kind.name}: {head['model']}, layer {head['layer']}, head {head['head']}")
    tables = {
        "idle": IDLE,
        "models": [model.counts() for model in (*models, *others)],
        "heads": heads,
        "near_uniform": [entry for model in models for entry in near_uniform(model)],
    }
    return tables, pictures


# ---- what its page uses ----


TITLES = {
    "sink": "Sink",
    "previous-token": "Previous token",
    "induction": "Induction",
    "local": "Local",
    "dead": "Dead",
}


def by_kind(heads: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    return {head["kind"]: head for head in heads}


def radius(head: Mapping[str, Any]) -> float:
    """The root mean square of the singular values of s W, which that of its eigenvalues would equal if W were normal."""
    return float((head["F"] / head["head_dim"]) ** 0.5)


def numbers_text(head: Mapping[str, Any]) -> str:
    """One sentence."""
    cost = head["cost"]
    loss = f"{cost:.2f} nats" if cost >= 0.005 else f"{cost:.4f} nats"
    flags = ", ".join(f"`{flag}`" for flag in head["flags"]) or "none"
    return (
        f"Head {head['head']} of layer {head['layer']} in “{head['model']}”: M {head['M']:.2f}, √F {head['F'] ** 0.5:.2f}, κ {head['concentration']:.3f}, "
        f"Λ {head['localization']:.3f}; flags of the probe: {flags}. Without it the loss, {head['loss']:.2f}, rises by {loss}."
    )


def weight_text(head: Mapping[str, Any], series: str, zone: str) -> str:
    return f"{head['weights'][series][head['zones'].index(zone)]:.2f}"


STUDY = Study(
    "the clearest heads", CLAIMS, measure, "models that are trained in minutes: leave --quick out", on_models=True
)
PAPER = Paper(
    "kinds-of-heads",
    "Five kinds of heads",
    "Heads of small models that are trained here, one of each kind",
    (STUDY,),
    Path(__file__).parent,
    {
        "TITLES": TITLES, "IDLE": IDLE, "LEVEL": LEVEL, "LOCAL": LOCAL, "ROLE_WEIGHT": ROLE_WEIGHT, "UNIFORM": UNIFORM,
        "by_kind": by_kind, "numbers_of": numbers_text, "radius": radius, "weight": weight_text,
    },
    page="kinds-of-heads",
    kinds={"experiment": "a"},
    says="Of heads of five known kinds, what is predicted from weights and from mean and covariance?",
    beliefs={
        "a1 a4 a5": "the prediction from mean and covariance sees a sink, how sharp an induction head is, and where a local "
        "head looks",
        "a2": "that prediction misses the head that looks at the previous token",
        "a6 a7": "weights alone show that a head is near uniform, which is not the same as dead",
    },
)  # fmt: skip

__all__ = ["PAPER"]
