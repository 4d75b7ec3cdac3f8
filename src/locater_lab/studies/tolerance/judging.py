"""Rules made on some models, claims judged on others, and the tables of the page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from locater.numerics import finite_or_none
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.reproduction import Results
from locater_lab.studies.surrogate.errors_and_claims import Estimate, head_draws, rank_correlation
from locater_lab.studies.tolerance.measuring import BY_CHANGE, CLASSES, LISTS, SECOND, SUBJECTS, changes_of_a_head

EVERY = {**CLASSES, SECOND: (SECOND,)}
LEAST = 0.5  # rank correlation from which a rule orders heads
FEWEST = 2  # sequences that a change of single heads is judged on
JUDGES = [name for name, subject in SUBJECTS.items() if subject.judges]
WITH_LOSS = [name for name in JUDGES if SUBJECTS[name].drawn is not None]
CHANGES = tuple(changes_of_a_head(512))
FIRST = ("zero", "window", "2 bits")  # what is measured first
CLAIMED = ("zero", "mean", "uniform", "window", "2 bits")
MOST = {"window 1/2": 0.05, "8 bits": 0.01, "4 bits": 0.05}  # nats that all heads at once may cost
BUDGETS = (0.001, 0.01)  # nats, or cosine distance
DEAR, NAMED = 0.01, 10  # heads that cost more are named, as many at most
WORDS = {
    "zero": "at zero",
    "mean": "at their mean",
    "uniform": "attending evenly",
    "window": "with a window of a quarter",
}
Line = Mapping[str, Any]
Rule = tuple[str, int]  # predictor and sign: the heads with the smallest sign * predictor cost least
Rules = Mapping[str, Mapping[str, Rule]]  # by class or "all", then by change


def _claims() -> tuple[Claim, ...]:
    ordered = tuple(
        Claim(
            f"{letter}{len(CLAIMED) * number + at}",
            f"On {model}, the rule from {kind} orders heads {WORDS.get(change, 'with keys of ' + change)} by what they cost",
            "Spearman over heads",
            "at least",
            LEAST,
            by="ours",
        )
        for letter, kind in zip("abcf", EVERY, strict=True)
        for number, model in enumerate(JUDGES if kind in CLASSES else WITH_LOSS)
        for at, change in enumerate(CLAIMED, 1)
    )
    lists = tuple(
        Claim(
            f"d{len(LISTS) * number + at}",
            f"On {model}, the heads that the rule puts last ({name}, {share:g} of all) cost at most half of random ones",
            "cost of the rule's heads less half of that of random ones, nats",
            "at most",
            0.0,
            by="ours",
        )
        for number, model in enumerate(WITH_LOSS)
        for at, (name, (_, share)) in enumerate(LISTS.items(), 1)
    )
    whole = tuple(
        Claim(
            f"e{len(MOST) * number + at}",
            f"On {model}, all heads at once with {_of_1024(name)} cost at most {most:g} nats",
            "loss less that of the model as it is, nats",
            "at most",
            most,
            by="ours",
        )
        for number, model in enumerate(WITH_LOSS)
        for at, (name, most) in enumerate(MOST.items(), 1)
    )
    return tuple(sorted((*ordered, *lists, *whole), key=lambda claim: claim.id[0]))


def _of_1024(name: str) -> str:
    return {"window 1/8": "a window of 128", "window 1/2": "a window of 512"}.get(name, f"keys of {name}")


CLAIMS = _claims()


# ---- what lines say ----


def heads_and_costs(lines: Sequence[Line], model: str, change: str) -> tuple[list[tuple[int, int]], Any] | None:
    """The heads that were changed one by one, and their costs (sequences, heads); None where too few were measured."""
    found = {x["sequence"]: x for x in lines if (x["model"], x["part"], x.get("change")) == (model, "alone", change)}
    if len(found) < FEWEST:
        return None
    own = [found[number] for number in sorted(found)]
    return [(layer, head) for layer, head in own[0]["heads"]], np.array([line["costs"] for line in own])


def column(lines: Sequence[Line], model: str, predictor: str, change: str, heads: Sequence[tuple[int, int]]) -> Any:
    """A predictor of some heads, or None where some have none."""
    part = SECOND if predictor == SECOND and SUBJECTS[model].causal else "predictors"
    line = next((x for x in lines if (x["model"], x["part"]) == (model, part)), None)
    if line is None:
        return None
    name = "gradient x change" if predictor == SECOND != part else predictor  # of encoders it is of second order
    values = line["columns"].get(f"{name}: {change}" if name in BY_CHANGE else name)
    places = {(layer, head): at for at, (layer, head) in enumerate(line["heads"])}
    some = [None] if values is None else [values[places[head]] for head in heads]
    return None if None in some else np.array(some, dtype=np.float64)


def correlation(lines: Sequence[Line], model: str, predictor: str, change: str) -> Estimate | None:
    """Spearman's correlation of a predictor with the cost of a change, over heads."""
    measured = heads_and_costs(lines, model, change)
    if measured is None:
        return None
    heads, costs = measured
    values = column(lines, model, predictor, change, heads)
    if values is None:
        return None
    return rank_correlation(values, costs.mean(0), head_draws({"model": model}, len(heads)))


def rules_of(lines: Sequence[Line]) -> Rules:
    """For each class and change, the predictor that orders the heads of the models that make rules best."""
    makers = [name for name, subject in SUBJECTS.items() if not subject.judges]
    every = [predictor for kind in CLASSES.values() for predictor in kind]
    rules: dict[str, dict[str, Rule]] = {}
    for kind, predictors in {**EVERY, "all": tuple(every)}.items():
        rules[kind] = {}
        for change in CHANGES:
            means = {}
            for predictor in predictors:
                found = [correlation(lines, model, predictor, change) for model in makers]
                known = [each.value for each in found if each is not None]
                if len(known) == len(makers):
                    means[predictor] = sum(known) / len(known)
            if means:
                best = max(means, key=lambda name: abs(means[name]))
                rules[kind][change] = (best, 1 if means[best] > 0 else -1)
    return rules


def list_of_rule(lines: Sequence[Line], model: str, rule: Rule, change: str, count: int) -> list[tuple[int, int]]:
    """The heads of a model that a rule says cost least."""
    line = next(x for x in lines if (x["model"], x["part"]) == (model, "predictors"))
    heads = [(layer, head) for layer, head in line["heads"]]
    values = rule[1] * column(lines, model, rule[0], change, heads)
    return sorted(heads[at] for at in np.argsort(values, kind="stable")[:count])


# ---- verdicts and tables ----


def results_of(lines: Sequence[Line]) -> Results:
    """A measurement for each claim that the lines decide, and what the page shows."""
    rules = rules_of(lines)
    measured: dict[str, Measurement | None] = {}
    for letter, kind in zip("abcf", EVERY, strict=True):
        for number, model in enumerate(JUDGES if kind in CLASSES else WITH_LOSS):
            for at, change in enumerate(CLAIMED, 1):
                rule = rules[kind].get(change)
                found = None if rule is None else correlation(lines, model, rule[0], change)
                if found is not None and rule is not None:
                    measured[f"{letter}{len(CLAIMED) * number + at}"] = _by_heads(found, rule[1])
    for number, model in enumerate(WITH_LOSS):
        costs = _costs_together(lines, model)
        if len(costs) >= FEWEST:
            for at, name in enumerate(LISTS, 1):
                apart = [x["rule"][name] - 0.5 * x["random"][name] for x in costs]
                measured[f"d{len(LISTS) * number + at}"] = by_seed(apart, of="sequences")
            for at, name in enumerate(MOST, 1):
                measured[f"e{len(MOST) * number + at}"] = by_seed([x["all"][name] for x in costs], of="sequences")
    return Results(measured, _tables(lines, rules))


def _by_heads(found: Estimate, sign: int) -> Measurement:
    low, high = (sign * end for end in found.interval[::sign])
    how = "half of the 95 % bootstrap interval over heads, which is not symmetric"
    return Measurement(
        sign * found.value, (high - low) / 2, how, {"interval": [low, high]}, p=found.p_value(sign * LEAST)
    )


def _costs_together(lines: Sequence[Line], model: str) -> list[Mapping[str, Any]]:
    found = {x["sequence"]: x["costs"] for x in lines if (x["model"], x["part"]) == (model, "together")}
    return [found[number] for number in sorted(found)]


def _tables(lines: Sequence[Line], rules: Rules) -> dict[str, Any]:
    measured = [name for name in SUBJECTS if any(line["model"] == name for line in lines)]
    return {
        "models": {name: _facts(lines, name) for name in measured},
        "commits": sorted({line["commit"] for line in lines}),
        "rules": {kind: {change: list(rule) for change, rule in of.items()} for kind, of in rules.items()},
        "correlations": {name: _correlations(lines, name) for name in measured},
        "costs": {name: _shares(lines, name) for name in measured},
        "together": {name: _together(lines, name) for name in measured},
    }


def _facts(lines: Sequence[Line], model: str) -> dict[str, Any]:
    own = [line for line in lines if line["model"] == model]
    alone = [line for line in own if line["part"] == "alone"]
    every = next((len(line["heads"]) for line in own if line["part"] == "predictors"), None)
    return {
        "heads": every,
        "drawn": len(alone[0]["heads"]) if alone else 0,
        "sequences": len({line["sequence"] for line in alone}),
        "together": len(_costs_together(lines, model)),
        "length": SUBJECTS[model].length,
        "long": SUBJECTS[model].long,
        "loss": alone[0]["loss"] if alone else None,
    }


def _correlations(lines: Sequence[Line], model: str) -> dict[str, dict[str, list[float]]]:
    """Spearman with its interval, by change and predictor."""
    found: dict[str, dict[str, list[float]]] = {}
    for change in CHANGES:
        each = {p: correlation(lines, model, p, change) for kind in EVERY.values() for p in kind}
        found[change] = {p: [round(x, 3) for x in (e.value, *e.interval)] for p, e in each.items() if e is not None}
    return found


def _shares(lines: Sequence[Line], model: str) -> dict[str, Any]:
    """Of each change: the median and the largest cost of a head, the share of heads below each budget, and the heads
    that cost most.
    """
    found: dict[str, Any] = {}
    for change in CHANGES:
        measured = heads_and_costs(lines, model, change)
        if measured is not None:
            costs = measured[1].mean(0)
            below = [round(float((costs < most).mean()), 3) for most in BUDGETS]
            found[change] = {
                "sequences": len(measured[1]),
                "again": _again(measured[1]),
                "median": float(np.median(costs)),
                "largest": float(costs.max()),
                "below": below,
                "dear": [list(measured[0][at]) for at in np.argsort(-costs)[:NAMED] if costs[at] > DEAR],
            }
    return found


def _again(costs: Any) -> float | None:
    """Spearman's correlation over heads of the costs on one half of the sequences with those on the other."""
    halves = costs[::2].mean(0), costs[1::2].mean(0)
    found = rank_correlation(*halves, np.ones((1, costs.shape[1])))
    return round(found.value, 3)


def _together(lines: Sequence[Line], model: str) -> dict[str, dict[str, list[float | None]]]:
    """Mean and half of the interval over sequences, None of one alone, of all heads at once and of lists."""
    costs = _costs_together(lines, model)
    if not costs:
        return {}
    means: dict[str, dict[str, list[float | None]]] = {}
    for kind in costs[0]:
        each = {name: by_seed([x[kind][name] for x in costs]) for name in costs[0][kind]}
        means[kind] = {name: [found.value, finite_or_none(found.spread)] for name, found in each.items()}
    return means
