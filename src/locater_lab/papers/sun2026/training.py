"""What drives sinks and spikes in training, head size, gates, norms, MLPs or weight decay (study e); the same where
softmax has a sink (study f), and how a sink grows on text (study g).

The paper trains models of 7 billion parameters, whose largest |h| is in the thousands. Here numbers are ratios and
shares, and every verdict is of models of a few layers of width 256 alone. Spikes are judged by the models that all
mechanisms are compared in: softmax and the gate per head at the better of two learning rates, other arms at the higher
of them, and "post" at the better of two lower ones: it is a norm of the sum, not the paper's norm of branches with
QK-norm. Where the plain model has no massive entry nothing is said of spikes.

No head of those models has a sink, so sinks are judged by other ones (`engine/mechanism_runs.py`), trained on more text by
the recipe that grew the most. They are compared by the first token's share of rows. Where not one head of the plain
model has a sink, nothing is said of sinks.

The arms of study g are those of study e here and of study d of qiu2025 too.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from locater.measures import MASSIVE_RATIO
from locater_lab.engine.arms import (
    difference,
    mark_inconclusive,
    mean_of_arm,
    rank_correlation,
    study_of_arms,
    study_of_runs,
    value_of,
)
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.mechanism_runs import (
    AT_THIS_SIZE,
    COPY,
    COPY_SINK,
    HERE,
    NEARLY_GONE,
    NO_SPIKE,
    NO_TEXT_SINK,
    NOT_LEARNED,
    ON_TEXT,
    PLAIN,
    SHARE,
    SINK_RATIO,
    SOFTMAX,
    SPIKE,
    VALUE,
    VARIED,
    WEIGHT,
    arm,
    at_lower_rates,
    has_text_sink,
    pick_recipe,
    sink_arm,
    sink_tables,
    text_arms,
    text_rows,
    text_sink_tables,
    weight_left,
)
from locater_lab.engine.reproduction import Results, Study
from locater_lab.engine.runs import Row, Runs
from locater_lab.papers.qiu2025.training import ELEMENT, HEAD, training_table

# ---- e: what drives sinks and spikes ----


HEAD_SIZES = {8: arm(heads=32), 16: arm(heads=16), 64: SOFTMAX, 128: arm(heads=2)}  # by head size
SANDWICH, POST = arm(norm="sandwich"), at_lower_rates(arm(norm="post"))
GELU, NONE, NO_DECAY = arm(mlp="gelu"), arm(mlp="none"), arm(decay=0.0)
OTHERS = (SANDWICH, POST, GELU, NONE, NO_DECAY, HEAD, ELEMENT)
ARMS = (*HEAD_SIZES.values(), *OTHERS)
TEXT_SIZES = {8: "heads of 8", 16: "heads of 16", 64: "plain", 128: "heads of 128"}
TEXT_ARMS = (*TEXT_SIZES.values(), "sandwich", "gelu", "no mlp", "no decay", "head", "element")
OF_SPIKES = ("e7", "e9", "e12", "e13", "e14")
OF_SINKS = ("e3", "e4", "e5", "e6", "e8", "e10", "e11", "e14")
LARGEST_ENTRY, SPIKE_RATIO = (f"measures.{name}" for name in ("spike", "spike_ratio"))
CHANGE = f"change of the first token's share, {ON_TEXT}"

TRAINING_CLAIMS = (
    Claim("e1", "There are sinks to drive away", f"sink ratio of the plain model, {ON_TEXT}", "at least", 0.1, by="ours"),
    Claim("e2", "There are spikes to drive away", f"largest entry over the median in the plain model, {AT_THIS_SIZE}", "at least", MASSIVE_RATIO,
          by="ours"),
    Claim("e3", "Small heads have less of a sink", f"first token's share with heads of 8 less with heads of 64, equal width, {ON_TEXT}",
          "at most", 0.0, by="summary"),
    Claim("e4", "Sinks grow with head size", "rank correlation of head size (8, 16, 64, 128) with the first token's share, "
          f"seed by seed, {ON_TEXT}", "at least", 0.8, by="summary", bound="ours"),
    Claim("e5", "A gate per head lowers sinks", CHANGE, "at most", 0.0, by="summary"),
    Claim("e6", "A gate per element lowers sinks", CHANGE, "at most", 0.0, by="summary"),
    Claim("e7", "Norms behind branches lower spikes", f"change of the largest entry over the median by sandwich norms, {VARIED}",
          "at most", 0.0, by="summary"),
    Claim("e8", "They leave sinks as they are", f"log of the first token's share with sandwich norms over that without, {ON_TEXT}",
          "about", 0.0, 0.25, by="summary", bound="ours"),
    Claim("e9", "A norm of the sum lowers spikes", f"change of the largest entry over the median, at the better of two lower "
          f"rates, {AT_THIS_SIZE}", "at most", 0.0, by="ours"),
    Claim("e10", "GELU in the place of SwiGLU has more of a sink", CHANGE, "at least", 0.0, by="summary"),
    Claim("e11", "Without MLPs there is more of a sink", CHANGE, "at least", 0.0, by="summary"),
    Claim("e12", "Without MLPs spikes shrink", f"change of the largest entry over the median, {VARIED}", "at most", 0.0, by="summary"),
    Claim("e13", "Without weight decay spikes grow", f"change of the largest entry of the stream, {VARIED}", "at least", 0.0,
          by="summary"),
    Claim("e14", "Spikes and sinks decouple: which arm has more of one says little of the other",
          f"rank correlation of the spike over its median with the first token's share over all arms, seed by seed, {ON_TEXT}",
          "at most", 0.5, by="summary", bound="ours"),
)  # fmt: skip


def unless_massive(
    measured: Mapping[str, Measurement | None], plain: Measurement | None, ids: tuple[str, ...]
) -> dict[str, Measurement | None]:
    """The same measurements, those of `ids`, on spikes, left open where the plain model has none."""
    return mark_inconclusive(measured, ids if plain is not None and plain.value < MASSIVE_RATIO else (), NO_SPIKE)


def judge_training(runs: Runs) -> Results:
    measured = {
        "e2": mean_of_arm(runs, SOFTMAX, SPIKE_RATIO),
        "e7": difference(runs, SANDWICH, SOFTMAX, SPIKE_RATIO),
        "e9": difference(runs, POST, SOFTMAX, SPIKE_RATIO),
        "e12": difference(runs, NONE, SOFTMAX, SPIKE_RATIO),
        "e13": difference(runs, NO_DECAY, SOFTMAX, LARGEST_ENTRY),
    }
    measured = unless_massive(measured, measured["e2"], OF_SPIKES)
    table = training_table(runs, ARMS)
    return Results(measured | judge_sinks(runs), {} if table is None else {"drivers": table})


def judge_sinks(runs: Runs) -> dict[str, Measurement | None]:
    """Claims on sinks, by the arms of the recipe that was picked; nothing while none is."""
    recipe = pick_recipe(runs)
    if recipe is None:
        return {}
    arms = text_arms(recipe)
    plain = arms["plain"]
    measured = {
        "e1": mean_of_arm(runs, plain, SINK_RATIO),
        "e3": difference(runs, arms["heads of 8"], plain, SHARE),
        "e4": rank_correlation(runs, [arms[name] for name in TEXT_SIZES.values()], list(TEXT_SIZES), SHARE),
        "e5": difference(runs, arms["head"], plain, SHARE),
        "e6": difference(runs, arms["element"], plain, SHARE),
        "e8": difference(runs, arms["sandwich"], plain, lambda line: math.log(value_of(line, SHARE) or math.nan)),
        "e10": difference(runs, arms["gelu"], plain, SHARE),
        "e11": difference(runs, arms["no mlp"], plain, SHARE),
        "e14": rank_correlation(runs, [arms[name] for name in TEXT_ARMS], SPIKE_RATIO, SHARE),
    }
    measured = unless_massive(measured, mean_of_arm(runs, plain, SPIKE_RATIO), ("e14",))
    return measured if has_text_sink(runs, plain) else mark_inconclusive(measured, OF_SINKS, NO_TEXT_SINK)


def training_rows(runs: Runs) -> list[Row]:
    """Runs of both kinds of models."""
    return [row for arm in ARMS for row in arm.rows(runs)] + text_rows(runs)


TRAINING_STUDY = study_of_runs("what drives sinks and spikes", TRAINING_CLAIMS, training_rows, judge_training)


# ---- f: where there is a sink ----


COPY_SIZES = {
    size: PLAIN if size == COPY.width else sink_arm(heads=COPY.width // size) for size in (8, 16, 32, 64)
}  # heads of equal width in all
COPY_SANDWICH, COPY_POST = sink_arm(norm="sandwich"), sink_arm(norm="post")
COPY_GELU, COPY_NONE, COPY_NO_DECAY, COPY_GATE = (
    sink_arm(mlp="gelu"),
    sink_arm(mlp="none"),
    sink_arm(decay=0.0),
    sink_arm("gated"),
)
COPY_ARMS = (*reversed(COPY_SIZES.values()), COPY_SANDWICH, COPY_POST, COPY_GELU, COPY_NONE, COPY_NO_DECAY, COPY_GATE)
ON_FIRST, LARGEST = (
    f"change of the weight on the first token, {HERE}",
    f"change of the largest entry over the median, {HERE}",
)

COPY_OF_SPIKES = ("f4", "f6", "f9", "f10", "f12")
UNLEARNED = "without an MLP the source is not learned, so that heads have something to add"

SINK_CLAIMS = (
    Claim("f1", "There is a sink to drive away", f"weight on the first token, plain model, {HERE}", "at least", COPY_SINK, by="ours"),
    Claim("f2", "Small heads have less of a sink", f"weight on the first token, heads of 8 less one of 64, {HERE}", "at most", 0.0,
          by="summary"),
    Claim("f3", "Sinks grow with head size", "rank correlation of head size (8, 16, 32, 64) with the weight on the first token, seed by "
          f"seed, {HERE}", "at least", 0.8, by="summary", bound="ours"),
    Claim("f4", "Norms behind branches lower spikes", LARGEST, "at most", 0.0, by="summary"),
    Claim("f5", "They leave sinks as they are", f"log of the weight on the first token with sandwich norms over that without, {HERE}",
          "about", 0.0, 0.25, by="summary", bound="ours"),
    Claim("f6", "A norm of the sum lowers spikes", LARGEST, "at most", 0.0, by="ours"),
    Claim("f7", "GELU in the place of SwiGLU has more of a sink", ON_FIRST, "at least", 0.0, by="summary"),
    Claim("f8", "Without MLPs there is more of a sink", ON_FIRST, "at least", 0.0, by="summary"),
    Claim("f9", "Without MLPs spikes shrink", LARGEST, "at most", 0.0, by="summary"),
    Claim("f10", "Without weight decay spikes grow", LARGEST, "at least", 0.0, by="summary"),
    Claim("f11", "A gate lowers what acts on the first token", ON_FIRST, "at most", 0.0, by="summary"),
    Claim("f12", "Spikes and sinks decouple: which arm has more of one says little of the other",
          f"rank correlation of the spike with the weight on the first token over all arms, seed by seed, {HERE}", "at most", 0.5,
          by="summary", bound="ours"),
)  # fmt: skip


def judge_copy_sinks(runs: Runs) -> Results:
    measured = {
        "f1": mean_of_arm(runs, PLAIN, WEIGHT),
        "f2": difference(runs, COPY_SIZES[8], PLAIN, WEIGHT),
        "f3": rank_correlation(runs, COPY_SIZES.values(), list(COPY_SIZES), WEIGHT),
        "f4": difference(runs, COPY_SANDWICH, PLAIN, SPIKE),
        "f5": difference(runs, COPY_SANDWICH, PLAIN, lambda line: math.log(value_of(line, WEIGHT) or math.nan)),
        "f6": difference(runs, COPY_POST, PLAIN, SPIKE),
        "f7": difference(runs, COPY_GELU, PLAIN, WEIGHT),
        "f8": difference(runs, COPY_NONE, PLAIN, WEIGHT),
        "f9": difference(runs, COPY_NONE, PLAIN, SPIKE),
        "f10": difference(runs, COPY_NO_DECAY, PLAIN, SPIKE),
        "f11": difference(runs, COPY_GATE, PLAIN, WEIGHT),
        "f12": rank_correlation(runs, COPY_ARMS, SPIKE, WEIGHT),
    }
    measured = unless_massive(measured, mean_of_arm(runs, PLAIN, SPIKE), COPY_OF_SPIKES)
    unlearned = difference(runs, COPY_NONE, PLAIN, "report_loss")
    if unlearned is not None and unlearned.value > NOT_LEARNED:
        measured = mark_inconclusive(measured, ("f8", "f9"), UNLEARNED)
    return Results(measured, sink_tables(runs, COPY_ARMS))


SINK_STUDY = study_of_arms("sinks and spikes where there is a sink", SINK_CLAIMS, COPY_ARMS, judge_copy_sinks)


# ---- g: how a sink grows on text ----


GU = "Gu et al. 2024"
GROWTH_OF_SINKS = ("g1", "g2", "g3", "g4", "g5", "g6")  # open where there is no sink
REST = f"weight on the first token over that under softmax, {ON_TEXT}"

GROWTH_CLAIMS = (
    Claim("g1", "Sigmoid attention, whose rows need not sum to 1, has no sink", REST, "at most", NEARLY_GONE, by="ours",
          where=f"abstract, {GU}"),
    Claim("g2", "A sink in the softmax, fixed at zero, takes it away too", REST, "at most", NEARLY_GONE, by="ours"),
    Claim("g3", "A token that is always first grows the sink", f"first token's share with a start token less without, {ON_TEXT}",
          "at least", 0.0, by="ours"),
    Claim("g4", "A sink adds nothing: its value is small", f"length of the first token's value over others', {ON_TEXT}", "at most", 0.5,
          by="ours", where=f"abstract, {GU}"),
    Claim("g5", "A sink needs no massive activation", f"largest entry of the stream over the median, {ON_TEXT}", "at most", 1000.0,
          by="ours"),
    Claim("g6", "Without weight decay there is less of a sink", CHANGE, "at most", 0.0, by="ours", where=GU),
)  # fmt: skip


def judge_growth(runs: Runs) -> Results:
    recipe = pick_recipe(runs)
    if recipe is None:
        return Results({}, text_sink_tables(runs, ()))
    arms = text_arms(recipe)
    plain, start = arms["plain"], (arms["plain"], arms["other start"])
    with_start, without = start if plain.base.bos else start[::-1]
    measured: dict[str, Measurement | None] = {
        "g1": weight_left(runs, arms["sigmoid"], plain),
        "g2": weight_left(runs, arms["plus one"], plain),
        "g3": difference(runs, with_start, without, SHARE),
        "g4": mean_of_arm(runs, plain, VALUE),
        "g5": mean_of_arm(runs, plain, SPIKE),
        "g6": difference(runs, arms["no decay"], plain, SHARE),
    }
    if not has_text_sink(runs, plain):
        measured = mark_inconclusive(measured, GROWTH_OF_SINKS, NO_TEXT_SINK)
    return Results(measured, text_sink_tables(runs, arms))


GROWTH_STUDY = study_of_runs("how a sink grows on text", GROWTH_CLAIMS, text_rows, judge_growth)


# ---- h: the paper's own abstract, which waits for runs ----


OWN_CLAIMS = (
    Claim("h1", "Norms in front of branches are what lets sinks and spikes occur together: without them the two decouple",
          "rank correlation of spikes with sinks over heads and seeds, without such norms less with them", "at most", 0.0, where="abstract",
          bound="ours"),
    Claim("h2", "Sinks bias single heads towards short range", "mean distance that heads attend over, with their sink less with it taken away",
          "at most", 0.0, where="abstract", bound="ours"),
    Claim("h3", "Spikes act as implicit parameters: near-constant hidden states that persist across layers",
          "report loss with spike tokens' states replaced by their mean over texts less that without, in nats", "at most", 0.01,
          where="abstract", bound="ours"),
)  # fmt: skip
OWN_NEEDS = (
    "models that have spikes and sinks, trained with norms in front, behind and none on text seen once, several seeds of each; no arm "
    "of this page has spikes"
)
OWN_STUDY = Study("the claims of its abstract", OWN_CLAIMS, needs=OWN_NEEDS)
