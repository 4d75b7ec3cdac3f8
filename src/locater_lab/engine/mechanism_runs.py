"""What the papers on mechanisms train: one model and one text, and the runs in which softmax attention has a sink.

All runs go to one file, and papers that need the same plan share its run.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any

from locater.measures import MASSIVE_RATIO
from locater_lab.engine.arms import (
    Line,
    final_numbers,
    judging_values,
    open_at_edges,
    table_of_arms,
    uniform_first,
    value_of,
)
from locater_lab.engine.claims import Measurement, by_seed
from locater_lab.engine.reproduction import Paper
from locater_lab.engine.runs import Arm, Row, Runs, expected_rows
from locater_lab.mechanisms import mechanisms
from locater_lab.train.map_measures_and_diverged_layer import SINK
from locater_lab.train.plan import Plan

# ---- The plan of the zoo ----
# A mechanism with its default settings is trained at two learning rates with the first seed, then with two more seeds at
# the better one. Variations of it, and of the blocks around it, are trained at the higher rate, which softmax prefers,
# with two seeds; those that fail there with both seeds (norms after the sums) at two lower rates.


BASE = Plan(
    corpus=("speeches.tar.xz",),
    vocabulary=4096,
    layers=6,
    width=256,
    heads=4,
    length=256,
    steps=1500,
    batch=32,
    observe=0,
    evaluate=500,
    checkpoint=0,
    compile=True,
)
MASKED = replace(BASE, task="masked")
IMAGE = replace(BASE, task="image", corpus=(), vocabulary=256, images="fashion.npz", batch=128)
RATES, IMAGE_RATES = (1e-3, 2.5e-3), (2e-4, 5e-4)
AT_THIS_SIZE = "as seen at this size"
COOL_RATES = (2.5e-4, 1e-3)  # of what fails at the higher rate with every seed
TUNED, VARIED = f"each at the better of two rates, {AT_THIS_SIZE}", f"variations at one rate, {AT_THIS_SIZE}"
NO_SPIKE = f"the plain model's largest entry is below {MASSIVE_RATIO:,.0f} medians, so that there is no spike"
NO_SINK = "the plain model gives its first token no more than uniform attention does, so that there is no sink"


def changes_in_words(attention: str, changes: Mapping[str, Any]) -> list[str]:
    """How an arm differs from the plain one, in words."""
    return ([attention] if attention != "softmax" or not changes else []) + [
        f"{key}={value}" for key, value in changes.items()
    ]


def arm(
    attention: str = "softmax", base: Plan = BASE, name: str | None = None, *, claim: str = "zoo", **changes: Any
) -> Arm:
    """A way to train: a mechanism at two rates with three seeds, or a variation at one rate with two.

    >>> arm("gated(per=element)").name, arm(mlp="none").name, arm("softmax", MASKED).name
    ('gated(per=element)', 'mlp=none', 'softmax, masked')
    """
    tuned = not changes and base.task != "image" and attention in {m.name for m in mechanisms()}
    words = changes_in_words(attention, changes) + ([base.task] if base.task != "causal" else [])
    rates = IMAGE_RATES if base.task == "image" else RATES
    return Arm(
        name or ", ".join(words),
        claim,
        replace(base, attention=attention, **changes),
        rates if tuned else rates[1:],
        3 if tuned else 2,
    )


def at_lower_rates(arm: Arm) -> Arm:
    """The same arm at the better of two lower rates."""
    return replace(arm, rates=COOL_RATES)


SOFTMAX, SOFTMAX_MASKED, SOFTMAX_IMAGE = arm(), arm(base=MASKED), arm(base=IMAGE)


def rows_of(paper: Paper, runs: Runs) -> list[Row]:
    """The runs of a paper's studies, as far as they are known: other seeds wait for the better rate."""
    return [row for study in paper.studies if study.rows is not None for row in study.rows(runs)]


def plan_table(papers: Sequence[Paper]) -> list[str]:
    """The run plan as Markdown: the runs of each paper, and how many of them no paper above has."""
    lines = ["| paper | arms | runs | of them new | steps |", "|---|---|---|---|---|"]
    seen: dict[str, Row] = {}
    for paper in papers:
        rows = expected_rows(partial(rows_of, paper))
        new = [row for row in rows if row.key not in seen]
        seen |= {row.key: row for row in new}
        arms, steps = len({(row.claim, row.arm) for row in rows}), sum(row.plan.steps for row in new)
        lines.append(f"| {paper.name} | {arms} | {len(rows)} | {len(new)} | {steps:,} |")
    return [*lines, f"| | | | {len(seen)} | {sum(row.plan.steps for row in seen.values()):,} |"]


# ---- Runs in which softmax attention has a sink: one layer on a synthetic source, and models of text ----
# **On the copy source** (`locater train --task copy`). After three triggers the token before is copied; elsewhere the
# current token is all one needs, and a head has nothing to add. The rate is one at which softmax has a sink with seeds 0,
# 1 and 2, looked for before the arms were fixed; seeds 3 to 7 chose nothing. A sink has two measures. The share of the
# first token in a row made to sum to 1 is that of the papers: of the map behind a gate. The weight is what acts, gates
# and row sums included.
#
# **On text.** Recipes that may grow a sink, the rule that picks one of them, and arms trained by it. Each recipe changes
# one thing of the first, or its length, and is trained once with a seed of its own, observed, so that its line has the
# curve of the sink. The rule is in `pick_recipe`. Arms follow at the picked recipe, seed by seed: whatever ends a
# sitting, all arms of a tier have about as many seeds. An arm is judged by the seeds that it has, three at least; the
# time decides how many, not what came out.


# ---- on the copy source ----


COPY = Plan(
    task="copy", vocabulary=64, layers=1, width=64, heads=1, length=64, batch=32, steps=1000, positions="learned", observe=0, evaluate=500,
    checkpoint=0, precision="float32",
)  # fmt: skip
COPY_RATE, COPY_SEEDS = 6e-3, 8
COPY_CHOSE = 3  # the first seeds, which chose the rate and were seen before the claims were written
UNIFORM = round(uniform_first(COPY.length), 4)  # the first token's weight where attention is even
COPY_SINK = 0.3  # and from where on it is a sink
NEARLY_GONE = 0.1  # of the plain model's weight: what counts as taken away
NOT_LEARNED = 0.1  # nats above the plain model: an arm that has not learned the source
HERE = "one layer on the copy source"
WEIGHT, SHARE, VALUE, SPIKE = (
    f"measures.{name}" for name in ("first_weight", "first_mass", "first_value", "spike_ratio")
)


def sink_arm(attention: str = "softmax", **changes: Any) -> Arm:
    """A mechanism, or a variation of the model, at the one rate.

    >>> sink_arm("gated").name, sink_arm(heads=4).name
    ('gated', 'heads=4')
    """
    return Arm(
        ", ".join(changes_in_words(attention, changes)),
        "sinks",
        replace(COPY, attention=attention, **changes),
        (COPY_RATE,),
        COPY_SEEDS,
        COPY_CHOSE,
    )


PLAIN = sink_arm()


def weight_left(runs: Runs, arm: Arm, against: Arm = PLAIN) -> Measurement | None:
    """Weight on the first token over that of the plain model, seed by seed."""
    values = judging_values(runs, (arm, against), WEIGHT)
    if values is None or not all(b for _, b in values):
        return None
    return open_at_edges(runs, (arm, against), by_seed([a / b for a, b in values]))


def sink_tables(runs: Runs, arms: Iterable[Arm]) -> dict[str, Any]:
    """The tables that sinks.md.j2 reads: the arms with the seeds that there are, and how they were trained."""
    rows = table_of_arms(runs, arms, final_numbers_with_weights)
    if not rows:
        return {}
    return {
        "sinks": {
            "arms": rows,
            "means": {measure: _means(rows, measure) for measure in ("first_weight", "first_mass", "spike_ratio")},
            "trained": {"width": COPY.width, "tokens": COPY.length, "steps": COPY.steps, "rate": COPY_RATE},
            "even": UNIFORM,
            "far": NOT_LEARNED,
        }
    }


def _means(rows: Sequence[Mapping[str, Any]], measure: str) -> dict[str, float]:
    """A measure by arm, means over seeds; of arms that have it."""
    return {
        row["arm"]: fmean(end[measure] for end in row["ends"])
        for row in rows
        if all(end[measure] is not None for end in row["ends"])
    }


def final_numbers_with_weights(line: Line) -> dict[str, Any]:
    """What pages on sinks show of a run."""
    measures = line.get("measures") or {}
    return final_numbers(line) | {name: measures.get(name) for name in ("first_weight", "first_value")}


# ---- on text ----


ARTICLES = Plan(
    corpus=("wikipedia/articles.txt.xz",), vocabulary=4095, bos=True, layers=6, width=256, heads=4, length=256, batch=16, steps=2000, rate=3e-3,
    observe=0, evaluate=0, checkpoint=0, compile=True,
)  # fmt: skip
RECIPES: dict[str, dict[str, Any]] = {
    "start token": {},
    "no start token": {"bos": False},
    "hot": {"rate": 8e-3},
    "more decay": {"decay": 0.5},
    "learned positions": {"positions": "learned"},
    "512 tokens": {"length": 512, "batch": 8},
    "10 layers": {"layers": 10},
    "long": {"steps": 4000, "decay": 0.5},
}
PROBE_SEED, OBSERVED = 9, 50  # a seed of recipes alone; steps between two points of a curve
ENOUGH = 0.25  # share of heads with a sink that is enough: of recipes that have it the cheapest is taken
NEAR = 0.3  # nats above the best recipe: one that ends further up has not learned the text
TEXT_SEEDS, LEAST = 4, 3  # of an arm, as many as the time allows
ON_TEXT = "on text, at the recipe with sinks"
NO_TEXT_SINK = (
    f"not every seed of the plain model has a head that gives its first token more than {SINK:g}: there is no sink"
)
SINK_RATE, SINK_RATIO, GATE = (f"measures.{name}" for name in ("sink_rate", "sink_ratio", "gate"))


def recipe_row(name: str) -> Row:
    """The one run of a recipe."""
    plan = replace(ARTICLES, **RECIPES[name], seed=PROBE_SEED, observe=OBSERVED)
    return Row("text sinks", f"recipe: {name}", plan)


def pick_recipe(runs: Runs) -> str | None:
    """The recipe that arms are trained by; None until all have been tried, or where none was survived.

    Of recipes that end within `NEAR` of the best report loss, those count in which `ENOUGH` of the heads have a sink,
    and the one that computes least is taken. Where none has, it is the one with the most sinks, and among equals the
    one that gives its first token the most.
    """
    lines = {name: runs.of(recipe_row(name)) for name in RECIPES}
    if None in lines.values():
        return None
    done = {name: line for name, line in lines.items() if line is not None and line["status"] == "done"}
    best = min((line["report_loss"] for line in done.values()), default=0.0)
    near = {name: line for name, line in done.items() if line["report_loss"] <= best + NEAR}
    enough = [name for name, line in near.items() if (value_of(line, SINK_RATE) or 0.0) >= ENOUGH]
    if enough:
        return min(enough, key=lambda name: relative_cost(recipe_row(name).plan))
    return max(
        near, key=lambda name: tuple(value_of(near[name], what) or 0.0 for what in (SINK_RATE, SHARE)), default=None
    )


def relative_cost(plan: Plan) -> int:
    """Tokens times weights inside blocks, up to a factor."""
    return plan.steps * plan.batch * plan.length * plan.layers * plan.width**2


@dataclass(frozen=True)
class TextArm(Arm):
    """An arm at the one rate of its recipe, with the seeds that there are."""

    def final_lines(self, runs: Runs) -> list[dict[str, Any]] | None:
        """Lines of its first seeds up to one that is missing; None with fewer than three, or where one diverged."""
        found: list[dict[str, Any]] = []
        for seed in range(self.seeds):
            line = runs.of(self.row(self.rates[0], seed))
            if line is None:
                break
            if line["status"] != "done":
                return None
            found.append(line)
        return found if len(found) >= LEAST else None


def text_arm(recipe: str, attention: str = "softmax", **changes: Any) -> TextArm:
    """A mechanism, or a variation of the model, by a recipe. The size of heads is given by itself, since recipes differ
    in none of their widths.

    >>> text_arm("hot", "gated").rates, text_arm("hot", mlp="gelu").name
    ((0.008,), 'mlp=gelu')
    """
    base = replace(ARTICLES, **RECIPES[recipe] | {"attention": attention} | changes)
    return TextArm(", ".join(changes_in_words(attention, changes)), "text sinks", base, (base.rate,), TEXT_SEEDS)


GATES = {
    "element": "gated(per=element)",
    "head": "gated",
    "values": "gated(position=value, per=element)",
    "shared": "gated(shared=True, per=element)",
    "constant": "gated(from_input=False)",
    "ns": "gated(score=ns_sigmoid, per=element)",
}
TIERS: tuple[dict[str, tuple[str, dict[str, Any]]], ...] = (  # what decides most comes first
    {
        "plain": ("softmax", {}),
        "element": (GATES["element"], {}),
        "head": (GATES["head"], {}),
        "heads of 8": ("softmax", {"heads": 32}),
        "gelu": ("softmax", {"mlp": "gelu"}),
        "no mlp": ("softmax", {"mlp": "none"}),
        "sandwich": ("softmax", {"norm": "sandwich"}),
    },
    {name: (GATES[name], {}) for name in ("values", "constant", "ns", "shared")},
    {
        "sigmoid": ("sigmoid", {}),
        "plus one": ("softmax_plus_one", {}),
        "other start": ("softmax", {"bos": None}),
        "heads of 16": ("softmax", {"heads": 16}),
        "heads of 128": ("softmax", {"heads": 2}),
        "no decay": ("softmax", {"decay": 0.0}),
    },
)


def text_arms(recipe: str) -> dict[str, TextArm]:
    """All arms by this recipe, in the order in which they are trained."""
    bos = bool(replace(ARTICLES, **RECIPES[recipe]).bos)
    return {
        name: text_arm(recipe, attention, **{key: not bos if key == "bos" else value for key, value in changes.items()})
        for tier in TIERS
        for name, (attention, changes) in tier.items()
    }


def text_rows(runs: Runs) -> list[Row]:
    """Recipes first; arms once one of them is picked, tier by tier and in each seed by seed."""
    rows, recipe = [recipe_row(name) for name in RECIPES], pick_recipe(runs)
    if recipe is None:
        return rows
    arms = text_arms(recipe)
    of_tiers = ([arms[name] for name in tier] for tier in TIERS)
    return rows + [arm.row(arm.rates[0], seed) for tier in of_tiers for seed in range(TEXT_SEEDS) for arm in tier]


def has_text_sink(runs: Runs, plain: Arm) -> bool:
    """Whether a head of the plain model has a sink with every seed."""
    lines = plain.final_lines(runs)
    return bool(lines) and all((value_of(line, SINK_RATE) or 0.0) > 0 for line in lines or ())


def text_sink_tables(runs: Runs, names: Iterable[str]) -> dict[str, Any]:
    """The table that text_sinks.md.j2 reads: recipes with their curves, which one was picked, and the arms `names` by
    it, with the seeds that there are.
    """
    rows = [row for name in RECIPES if (row := _recipe_table_row(name, runs.of(recipe_row(name)))) is not None]
    if not rows:
        return {}
    recipe = pick_recipe(runs)
    arms = text_arms(recipe) if recipe is not None else {}
    base = replace(ARTICLES, **RECIPES[recipe or "start token"])
    return {
        "text_sinks": {
            "recipes": rows,
            "picked": recipe,
            "enough": ENOUGH,
            "near": NEAR,
            "sink": SINK,
            "even": uniform_first(base.length),
            "has_sink": recipe is not None and has_text_sink(runs, arms["plain"]),
            "trained": {key: getattr(base, key) for key in ("layers", "width", "heads", "length", "batch", "steps", "rate", "decay", "bos")},
            "arms": table_of_arms(runs, [arms[name] for name in names if name in arms], final_numbers_with_weights),
        }
    }  # fmt: skip


def _recipe_table_row(name: str, line: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """A recipe as the page shows it; None while it was not tried, and without numbers where it diverged."""
    if line is None:
        return None
    plan = recipe_row(name).plan
    row: dict[str, Any] = {
        "recipe": name,
        "changes": _words(RECIPES[name]),
        "steps": plan.steps,
        "loss": line.get("report_loss"),
    }
    measures = line.get("measures") or {}
    row |= {key: measures.get(key) for key in ("sink_rate", "sink_ratio", "first_mass", "first_value", "spike_ratio")}
    return row | {
        "even": uniform_first(plan.length),
        "weights": line.get("sinks") or [],
        "rates": line.get("sink_rates") or [],
    }


def _words(changes: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in changes.items()) or "-"
