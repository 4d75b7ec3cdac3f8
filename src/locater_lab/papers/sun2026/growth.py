"""How a sink grows on text: by which recipe, and what it is then. Study g; its arms are those of studies e here and d of
qiu2025 too.
"""

from __future__ import annotations

from locater_lab.engine.arms import difference, mark_inconclusive, mean_of_arm, study_of_runs
from locater_lab.engine.claims import Claim, Measurement
from locater_lab.engine.reproduction import Results
from locater_lab.engine.runs import Runs
from locater_lab.engine.sink_runs import (
    LEFT,
    NO_TEXT_SINK,
    ON_TEXT,
    SHARE,
    SPIKE,
    VALUE,
    has_text_sink,
    pick_recipe,
    text_arms,
    text_rows,
    text_sink_tables,
    weight_left,
)

GU = "Gu et al. 2024"
OF_SINKS = ("g1", "g2", "g3", "g4", "g5", "g6")  # open where there is no sink
REST = f"weight on the first token over that under softmax, {ON_TEXT}"
CHANGE = f"change of the first token's share, {ON_TEXT}"

CLAIMS = (
    Claim("g1", "Sigmoid attention, whose rows need not sum to 1, has no sink", REST, "at most", LEFT, where=f"abstract, {GU}",
          bound="ours"),
    Claim("g2", "A sink in the softmax, fixed at zero, takes it away too", REST, "at most", LEFT, by="ours"),
    Claim("g3", "A token that is always first grows the sink", f"first token's share with a start token less without, {ON_TEXT}",
          "at least", 0.0, by="ours"),
    Claim("g4", "A sink adds nothing: its value is small", f"length of the first token's value over others', {ON_TEXT}", "at most", 0.5,
          where=f"abstract, {GU}", bound="ours"),
    Claim("g5", "A sink needs no massive activation", f"largest entry of the stream over the median, {ON_TEXT}", "at most", 1000.0,
          by="ours"),
    Claim("g6", "Without weight decay there is less of a sink", CHANGE, "at most", 0.0, by="summary", where=GU),
)  # fmt: skip


def judge(runs: Runs) -> Results:
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
        measured = mark_inconclusive(measured, OF_SINKS, NO_TEXT_SINK)
    return Results(measured, text_sink_tables(runs, arms))


STUDY = study_of_runs("how a sink grows on text", CLAIMS, text_rows, judge)
