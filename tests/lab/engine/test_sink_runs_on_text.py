"""Models of text with sinks: which recipe is picked, which arms follow, and which seeds they are judged by."""

from __future__ import annotations

import lzma
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from locater_lab.engine.mechanism_runs import (
    RECIPES,
    TEXT_SEEDS,
    TIERS,
    has_text_sink,
    pick_recipe,
    recipe_row,
    relative_cost,
    text_arms,
    text_rows,
    text_sink_tables,
)
from locater_lab.engine.runs import Runs, train
from locater_lab.train.map_measures_and_diverged_layer import SINK
from tests.lab.made_runs import fill_text, text_line


def tried(**rates: tuple[float, float, float]) -> Runs:
    """Recipes with their loss, share and sink rate; others have learned the text and have no sink."""
    runs = Runs()
    for name in RECIPES:
        runs.add(recipe_row(name), text_line(*rates.get(name.replace(" ", "_"), (3.0, 0.1, 0.0))))
    return runs


@pytest.mark.parametrize(
    ("rates", "recipe"),
    [
        ({"long": (2.8, 0.5, 0.6), "hot": (3.0, 0.4, 0.3)}, "hot"),  # both have enough: the shorter one
        ({"long": (2.8, 0.5, 0.6), "hot": (3.2, 0.4, 0.3)}, "long"),  # 0.4 nats behind: not learned
        ({"long": (3.0, 0.2, 0.1), "hot": (3.0, 0.4, 0.2)}, "hot"),  # none has enough: the most sinks
        ({"512_tokens": (3.0, 0.2, 0.0)}, "512 tokens"),  # none at all: the largest share
    ],
)
def test_the_rule_picks(rates: dict[str, Any], recipe: str) -> None:
    assert pick_recipe(tried(**rates)) == recipe


def test_nothing_is_picked_before_all_recipes_were_tried() -> None:
    runs = tried()
    del runs.lines[recipe_row("long").key]
    assert pick_recipe(runs) is None
    assert [row.arm for row in text_rows(runs)] == [f"recipe: {name}" for name in RECIPES]
    runs.add(recipe_row("long"), {"status": "diverged", "message": "", "device": "cpu"})
    assert pick_recipe(runs) == "start token"
    (table,) = text_sink_tables(runs, ()).values()
    assert table["recipes"][-1]["loss"] is None
    for name in RECIPES:
        runs.add(recipe_row(name), {"status": "diverged", "message": "", "device": "cpu"})
    assert pick_recipe(runs) is None


def test_a_recipe_computes_more_with_more_steps_or_layers() -> None:
    plain = relative_cost(recipe_row("start token").plan)
    assert relative_cost(recipe_row("long").plan) == 2 * plain
    assert relative_cost(recipe_row("10 layers").plan) == pytest.approx(10 / 6 * plain)
    assert relative_cost(recipe_row("512 tokens").plan) == plain, "half as many sequences"


def test_arms_differ_from_the_recipe_in_one_thing_each() -> None:
    for recipe, start in (("long", True), ("no start token", False)):
        arms = text_arms(recipe)
        assert len({arm.name for arm in arms.values()}) == len(arms) == sum(map(len, TIERS))
        assert arms["plain"].base.steps == recipe_row(recipe).plan.steps
        assert (arms["plain"].base.bos, arms["other start"].base.bos) == (start, not start)
        for name, arm in arms.items():
            ours, plain = arm.base.to_dict(), arms["plain"].base.to_dict()
            assert sum(ours[key] != plain[key] for key in ours) == (name != "plain"), name


def test_runs_of_a_tier_are_seed_by_seed() -> None:
    runs = tried(hot=(3.0, 0.4, 0.3))
    rows = text_rows(runs)[len(RECIPES) :]
    first = len(TIERS[0])
    assert [row.plan.seed for row in rows[: 2 * first]] == [0] * first + [1] * first
    assert len(rows) == TEXT_SEEDS * sum(map(len, TIERS))


def test_an_arm_is_judged_by_the_seeds_up_to_a_gap() -> None:
    runs = Runs()
    fill_text(runs, {})
    plain = text_arms("start token")["plain"]
    assert len(plain.final_lines(runs) or ()) == TEXT_SEEDS
    assert has_text_sink(runs, plain)
    last = plain.row(plain.rates[0], TEXT_SEEDS - 1)
    kept = runs.lines.pop(last.key)
    assert len(plain.final_lines(runs) or ()) == TEXT_SEEDS - 1
    runs.add(last, {"status": "diverged", "message": "", "device": "cpu"})
    assert plain.final_lines(runs) is None
    runs.lines[last.key] = kept
    del runs.lines[plain.row(plain.rates[0], 1).key]
    assert plain.final_lines(runs) is None, "later seeds would be paired with other seeds of other arms"


def test_a_short_run_brings_what_the_rule_and_the_claims_read(tmp_path: Path) -> None:
    """Trained here, a few steps of a tiny model: a recipe with its curve, and a gated arm."""
    draw = random.Random(0)
    words = ["".join(draw.choices("abcdefgh", k=4)) for _ in range(50)]
    (tmp_path / "wikipedia").mkdir()
    (tmp_path / "wikipedia" / "articles.txt.xz").write_bytes(
        lzma.compress("\n".join(draw.choices(words, k=4000)).encode())
    )
    tiny: dict[str, Any] = {
        "vocabulary": 256,
        "layers": 2,
        "width": 16,
        "heads": 2,
        "length": 8,
        "steps": 4,
        "compile": False,
    }
    line = train(replace(recipe_row("start token").plan, **tiny, observe=2).to_dict(), str(tmp_path))
    assert line["status"] == "done"
    assert [step for step, _ in line["sinks"]] == [step for step, _ in line["sink_rates"]] == [1, 3]
    first = sum(1 / n for n in range(1, 9)) / 8  # of even attention over 8 tokens, as new weights have it
    assert first > SINK
    for (_, weight), (_, share) in zip(line["sinks"], line["sink_rates"], strict=True):
        assert weight == pytest.approx(first, abs=0.01)
        assert share == 1.0
    row = text_arms("start token")["element"].row(3e-3, 0)
    line = train(replace(row.plan, **tiny).to_dict(), str(tmp_path))
    for name in ("first_mass", "first_weight", "first_value", "sink_rate", "sink_ratio", "spike_ratio", "gate"):
        assert isinstance(line["measures"][name], float), name
