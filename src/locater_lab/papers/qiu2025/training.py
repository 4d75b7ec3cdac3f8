"""Gates in training, at the size of this project's runs: which lower the loss, take the sink away and calm the stream
(studies d and e), and what they do where softmax has a sink (study f).

The paper's models have 15 billion parameters and 400 billion tokens. These have 6 layers of width 256 and a few million
tokens, so that every verdict is of this size alone. Softmax and one gate per head are at the better of two learning
rates, variations at the higher of them.

No head of these models has a sink, so claims on sinks are judged by other ones (`engine/mechanism_runs.py`), trained on more
text by the recipe that grew the most. Where not one head of softmax has a sink there, nothing is said of sinks.

Study f says which gates take a sink away, and which leave it; the models of study d have none.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

from locater_lab.engine.arms import (
    difference,
    has_sink,
    mark_inconclusive,
    mean_of_arm,
    rank_correlation,
    study_of_arms,
    study_of_runs,
    table_of_arms,
    uniform_first,
)
from locater_lab.engine.claims import Claim, Measurement, by_seed
from locater_lab.engine.mechanism_runs import (
    AT_THIS_SIZE,
    BASE,
    COPY_SINK,
    GATE,
    GATES,
    HERE,
    NEARLY_GONE,
    NO_TEXT_SINK,
    ON_TEXT,
    PLAIN,
    SHARE,
    SOFTMAX,
    TUNED,
    UNIFORM,
    VARIED,
    WEIGHT,
    arm,
    has_text_sink,
    pick_recipe,
    sink_arm,
    sink_tables,
    text_arms,
    text_rows,
    text_sink_tables,
    weight_left,
)
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Arm, Row, Runs

# ---- d and e: gates in training ----


HEAD, ELEMENT = arm("gated"), arm("gated(per=element)")
VALUE, KEY, QUERY = arm("gated(position=value, per=element)"), arm("gated(position=key)"), arm("gated(position=query)")
CONSTANT, NS, SHARED = (
    arm("gated(from_input=False)"),
    arm("gated(score=ns_sigmoid, per=element)"),
    arm("gated(shared=True, per=element)"),
)
ARMS = (SOFTMAX, HEAD, ELEMENT, VALUE, KEY, QUERY, CONSTANT, NS, SHARED)
HOT, SHORT, HOT_SEEDS = 1.5e-2, 400, 2  # a rate at which softmax loses half a nat, and steps
UNIFORM_LOSS = math.log(BASE.vocabulary)  # what a run that diverged is counted as
SPIKE_RATIO = "measures.spike_ratio"
OF_SINKS = ("d7", "d8", "d9", "d10", "d11", "d12", "d15")

TRAINING_CLAIMS = (
    Claim("d1", "A gate per element after attention lowers the loss", f"change of report loss against softmax, {VARIED}",
          "at most", 0.0, where="Table 1"),
    Claim("d2", "So does one gate per head", f"change of report loss against softmax, {TUNED}", "at most", 0.0, where="Table 1"),
    Claim("d3", "Per element is better than per head", f"report loss per element less per head, {VARIED}", "at most", 0.0,
          where="Table 1"),
    Claim("d4", "After attention is better than on values", f"report loss after attention less on values, per element, {VARIED}",
          "at most", 0.0, where="Table 1"),
    Claim("d5", "It is better than on keys", f"report loss after attention less on keys, per head, {VARIED}", "at most", 0.0,
          where="Table 1"),
    Claim("d6", "It is better than on queries", f"report loss after attention less on queries, per head, {VARIED}", "at most", 0.0,
          where="Table 1"),
    Claim("d7", "The gate lowers the sink", f"change of the first token's share of rows by a gate per element, {ON_TEXT}",
          "at most", 0.0, where="Table 4"),
    Claim("d8", "So does one per head", f"change of the first token's share of rows by a gate per head, {ON_TEXT}", "at most", 0.0,
          where="Table 4"),
    Claim("d9", "Gates on values leave more of the sink", f"first token's share with gates on values less after attention, {ON_TEXT}",
          "at least", 0.0, where="Table 4"),
    Claim("d10", "So do gates shared by heads", f"first token's share with shared gates less with own ones, {ON_TEXT}", "at least", 0.0,
          where="Table 4"),
    Claim("d11", "So do gates that cannot close", f"first token's share with NS-sigmoid less with the sigmoid, {ON_TEXT}",
          "at least", 0.0, where="Table 4"),
    Claim("d12", "So do gates that ignore the input", f"first token's share without input less with it, per head, {ON_TEXT}",
          "at least", 0.0, where="Table 4"),
    Claim("d13", "The gate lowers the largest activation", f"change of the largest entry over the median by a gate per element, {VARIED}",
          "at most", 0.0, where="Table 4"),
    Claim("d14", "Gates close in training: they start at 1/2", f"mean gate per element after training, {VARIED}", "at most", 0.5,
          where="Table 4", bound="ours"),
    Claim("d15", "The more the gates close, the smaller the sink", "rank correlation of mean gate with the first token's share over the "
          f"table's six variants, seed by seed, {ON_TEXT}", "at least", 0.8, where="Table 4", bound="ours"),
    Claim("d16", "Gates that cannot close cost loss", f"report loss with NS-sigmoid less with the sigmoid, per element, {VARIED}",
          "at least", 0.0, where="Table 4"),
    Claim("d17", "Gates shared by heads cost loss", f"report loss with shared gates less with own ones, per element, {VARIED}",
          "at least", 0.0, where="Table 1"),
    Claim("d18", "A gate that ignores the input, which adds no function, leaves the loss where it is",
          f"change of report loss against softmax, {VARIED}", "about", 0.0, 0.01, by="ours"),
)  # fmt: skip
HOT_CLAIMS = (
    Claim("e1", "The gate stands a hot learning rate better (in the paper: a rate at which the plain model diverges)",
          f"report loss per element less softmax at a rate of {HOT:g}, {SHORT} steps, {HOT_SEEDS} seeds, {AT_THIS_SIZE}; a run that diverged "
          "counts as a uniform guess", "at most", 0.0, where="its dense model of 48 layers at a rate of 8e-3", bound="ours"),
)  # fmt: skip


def training_table(runs: Runs, arms: Sequence[Arm]) -> dict[str, Any] | None:
    """Arms of one model as a page shows them, and whether the plain one has a sink; None without its runs."""
    rows = table_of_arms(runs, arms)
    shares = [end["first_mass"] for row in rows if row["arm"] == SOFTMAX.name for end in row["ends"]]
    if not shares:
        return None
    return {
        "arms": rows,
        "layers": BASE.layers,
        "width": BASE.width,
        "tokens": BASE.length,
        "uniform": uniform_first(BASE.length),
        "plain_share": fmean(shares),
        "has_sink": has_sink(runs, SOFTMAX),
    }


def judge_training(runs: Runs) -> Results:
    loss = "report_loss"
    measured = {
        "d1": difference(runs, ELEMENT, SOFTMAX, loss),
        "d2": difference(runs, HEAD, SOFTMAX, loss),
        "d3": difference(runs, ELEMENT, HEAD, loss),
        "d4": difference(runs, ELEMENT, VALUE, loss),
        "d5": difference(runs, HEAD, KEY, loss),
        "d6": difference(runs, HEAD, QUERY, loss),
        "d13": difference(runs, ELEMENT, SOFTMAX, SPIKE_RATIO),
        "d14": mean_of_arm(runs, ELEMENT, "measures.gate"),
        "d16": difference(runs, NS, ELEMENT, loss),
        "d17": difference(runs, SHARED, ELEMENT, loss),
        "d18": difference(runs, CONSTANT, SOFTMAX, loss),
    }
    table = training_table(runs, ARMS)
    tables = {} if table is None else {"gates_in_training": table}
    return Results(measured | judge_sinks(runs), tables | text_sink_tables(runs, ("plain", *GATES)))


def judge_sinks(runs: Runs) -> dict[str, Measurement | None]:
    """Claims on sinks, by the arms of the recipe that was picked; nothing while none is."""
    recipe = pick_recipe(runs)
    if recipe is None:
        return {}
    arms = text_arms(recipe)
    plain, element = arms["plain"], arms["element"]
    measured = {
        "d7": difference(runs, element, plain, SHARE),
        "d8": difference(runs, arms["head"], plain, SHARE),
        "d9": difference(runs, arms["values"], element, SHARE),
        "d10": difference(runs, arms["shared"], element, SHARE),
        "d11": difference(runs, arms["ns"], element, SHARE),
        "d12": difference(runs, arms["constant"], arms["head"], SHARE),
        "d15": rank_correlation(runs, [arms[name] for name in GATES], GATE, SHARE),
    }
    return measured if has_text_sink(runs, plain) else mark_inconclusive(measured, OF_SINKS, NO_TEXT_SINK)


def training_rows(runs: Runs) -> list[Row]:
    """Runs of both kinds of models; of the second, recipes, and arms that gates are judged by."""
    recipe = pick_recipe(runs)
    arms = [] if recipe is None else [text_arms(recipe)[name].name for name in ("plain", *GATES)]
    on_text = [row for row in text_rows(runs) if row.plan.observe or row.arm in arms]
    return [row for arm in ARMS for row in arm.rows(runs)] + on_text


def hot_rows() -> dict[str, list[Row]]:
    """Short runs at a hot rate, without a gate and with one per element."""
    plan = replace(BASE, steps=SHORT, evaluate=0, rate=HOT)
    kinds = {"softmax": "softmax", "gated per element": "gated(per=element)"}
    return {
        name: [Row("hot", f"{name}, hot", replace(plan, attention=text, seed=seed)) for seed in range(HOT_SEEDS)]
        for name, text in kinds.items()
    }


def judge_hot(runs: Runs) -> Results:
    losses: dict[str, list[float]] = {}
    for name, rows in hot_rows().items():
        lines = [runs.of(row) for row in rows]
        if any(line is None for line in lines):
            return Results({})
        losses[name] = [_loss_or_uniform(line) for line in lines if line is not None]
    plain, gated = losses.values()
    differences = [a - b for a, b in zip(gated, plain, strict=True)]
    return Results({"e1": by_seed(differences)}, {"hot_rate": {"losses": losses, "rate": HOT, "steps": SHORT}})


def _loss_or_uniform(line: Mapping[str, Any]) -> float:
    return float(line["report_loss"]) if line["status"] == "done" else UNIFORM_LOSS


TRAINING_STUDY = study_of_runs("gates in training", TRAINING_CLAIMS, training_rows, judge_training)
HOT_STUDY = study_of_arms(
    "a hot learning rate", HOT_CLAIMS, (), judge_hot, [row for rows in hot_rows().values() for row in rows]
)


# ---- f: gates where there is a sink ----


COPY_HEAD, COPY_ELEMENT, COPY_VALUES = (
    sink_arm("gated"),
    sink_arm("gated(per=element)"),
    sink_arm("gated(position=value, per=element)"),
)
COPY_KEY, COPY_QUERY = sink_arm("gated(position=key)"), sink_arm("gated(position=query)")
COPY_CONSTANT, COPY_NS = sink_arm("gated(from_input=False)"), sink_arm("gated(score=ns_sigmoid, per=element)")
COPY_ARMS = (PLAIN, COPY_HEAD, COPY_ELEMENT, COPY_VALUES, COPY_KEY, COPY_QUERY, COPY_CONSTANT, COPY_NS)
COPY_VARIANTS = (
    COPY_ELEMENT,
    COPY_HEAD,
    COPY_VALUES,
    COPY_CONSTANT,
    COPY_NS,
)  # of the paper's six; with one head there is none to share a gate with
ON_FIRST = f"weight on the first token, as it acts, {HERE}"
OF_ROWS = f"first token's share of rows made to sum to 1, {HERE}"  # what the paper's table has

SINK_CLAIMS = (
    Claim("f1", "Softmax has a sink to take away", ON_FIRST, "at least", COPY_SINK, by="ours"),
    Claim("f2", "A gate per element takes weight off it", f"change of the {OF_ROWS}", "at most", 0.0, where="Table 4"),
    Claim("f3", "So does one gate per head", f"change of the {OF_ROWS}", "at most", 0.0, where="Table 4"),
    Claim("f4", "Gates on values leave more of it", f"{OF_ROWS}, with gates on values less after attention", "at least", 0.0,
          where="Table 4"),
    Claim("f5", "A gate on keys leaves it", ON_FIRST, "at least", COPY_SINK, by="ours"),
    Claim("f6", "A gate on queries leaves it", ON_FIRST, "at least", COPY_SINK, by="ours"),
    Claim("f7", "Gates that ignore the input leave more of it", f"{OF_ROWS}, without input less with it, per head", "at least", 0.0,
          where="Table 4"),
    Claim("f8", "Gates that cannot close leave more of it", f"{OF_ROWS}, with NS-sigmoid less with the sigmoid", "at least", 0.0,
          where="Table 4"),
    Claim("f9", "The more the gates close, the smaller the sink", "rank correlation of mean gate with the first token's share over "
          f"{len(COPY_VARIANTS)} variants, seed by seed, {HERE}", "at least", 0.8, where="Table 4", bound="ours"),
    Claim("f10", "As it acts, the gate per element leaves a tenth at most", f"weight on the first token over that under softmax, {HERE}",
          "at most", NEARLY_GONE, by="ours"),
    Claim("f11", "So does the gate per head", f"weight on the first token over that under softmax, {HERE}", "at most", NEARLY_GONE, by="ours"),
    Claim("f12", "The map behind a gate per head has no sink either: no more than even attention gives", OF_ROWS, "at most", UNIFORM,
          by="ours"),
)  # fmt: skip


def judge_copy_sinks(runs: Runs) -> Results:
    measured = {
        "f1": mean_of_arm(runs, PLAIN, WEIGHT),
        "f2": difference(runs, COPY_ELEMENT, PLAIN, SHARE),
        "f3": difference(runs, COPY_HEAD, PLAIN, SHARE),
        "f4": difference(runs, COPY_VALUES, COPY_ELEMENT, SHARE),
        "f5": mean_of_arm(runs, COPY_KEY, WEIGHT),
        "f6": mean_of_arm(runs, COPY_QUERY, WEIGHT),
        "f7": difference(runs, COPY_CONSTANT, COPY_HEAD, SHARE),
        "f8": difference(runs, COPY_NS, COPY_ELEMENT, SHARE),
        "f9": rank_correlation(runs, COPY_VARIANTS, "measures.gate", SHARE),
        "f10": weight_left(runs, COPY_ELEMENT),
        "f11": weight_left(runs, COPY_HEAD),
        "f12": mean_of_arm(runs, COPY_HEAD, SHARE),
    }
    return Results(measured, sink_tables(runs, COPY_ARMS))


SINK_STUDY = study_of_arms("gates where there is a sink", SINK_CLAIMS, COPY_ARMS, judge_copy_sinks)
