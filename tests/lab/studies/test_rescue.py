"""The rescue trial: base runs, states, branches, the queue that makes them, and how they are judged."""

from __future__ import annotations

import json
import os
import time
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from locater.discovery import attention_layers
from locater_lab.studies import rescue
from locater_lab.studies.early_warning import plan
from locater_lab.studies.rescue import base_runs, branches, judging, queue, signals
from locater_lab.train.sweep import read_lines


@pytest.fixture(scope="module")
def forked(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Any]:
    """The line of a hot toy run with a state, and what makes its branches."""
    size = replace(base_runs.TOY, steps=36, branch=5, batch=2, length=16, kinds=("gpt2-a",))
    tokens, states = (tmp_path_factory.mktemp(name) for name in ("tokens", "states"))
    np.save(tokens / "wiki.npy", np.random.default_rng(0).integers(0, 256, 4096, dtype=np.uint8))
    run = next(run for run in base_runs.planned_runs(size) if run.rate > 1)
    line = base_runs.train_base(run, tokens, states, "cpu", size)
    return line, lambda arm: branches.train_branch(run, arm, tokens, states, "cpu", size)


def test_a_branch_in_which_nothing_is_done_is_the_run_itself(forked: Any) -> None:
    line, branch = forked
    assert line["state"] == "alarmed"
    plain = branch("nothing")
    rest = line["losses"][plain["step"] :]
    assert [round(x, 3) for x in plain["losses"][: len(rest)]] == rest
    assert len(rest) >= 3


def test_each_arm_changes_what_it_says(forked: Any) -> None:
    _, branch = forked
    lines = {arm: branch(arm) for arm in ("nothing", *branches.CLIPPING, "freeze", "half")}
    plain = lines["nothing"]["losses"]
    assert all(line["losses"][1:] != plain[1:] for arm, line in lines.items() if arm != "nothing")
    assert lines["half"]["losses"][0] == lines["freeze"]["losses"][0] == plain[0]
    named, drawn = ({tuple(head[:2]) for head in lines[arm]["heads"]} for arm in ("named", "random"))
    assert named
    assert len(named) == len(drawn)
    assert not named & drawn
    layer, whole = ({tuple(head[:2]) for head in lines[arm]["heads"]} for arm in ("layer", "all"))
    assert named <= layer <= whole


def test_frozen_queries_stay(forked: Any) -> None:
    model = plan.build_model(plan.BY_NAME["llama-b"], plan.TrainingRun("llama-b", "one", 0))  # two heads share a key
    frozen = branches.FrozenHeads(model, [(1, 2)])
    before = [layer.query.weight().detach().clone() for layer in attention_layers(model)]
    keys = [layer.key.weight().detach().clone() for layer in attention_layers(model)]
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1)
    frozen.restore()
    for number, layer in enumerate(attention_layers(model)):
        stays = (layer.query.weight() == before[number]).all(1).view(layer.heads, -1).all(1).tolist()
        assert stays == [number == 1 and head == 2 for head in range(layer.heads)]
        assert not (layer.key.weight() == keys[number]).any()


def line_of(kind: str, sort: str, rate: float, number: int) -> dict[str, Any]:
    return {"name": f"{kind} {sort} {rate:g} {number}", "run": {"kind": kind, "rate": rate}, "state": sort}


def test_states_are_chosen_by_sort_and_kind() -> None:
    sorts = ("alarmed", "quiet", "")
    lines = [line_of(kind, sort, 2.0, i) for kind in ("a", "b") for sort in sorts for i in range(9)]
    chosen = queue.chosen_states(lines, replace(base_runs.TOY, states=10, of_kind=6))
    counts = Counter(name.rsplit(" ", 2)[0] for name in chosen)
    assert sum(counts.values()) == 20
    assert set(counts) == {"a alarmed", "b alarmed", "a quiet", "b quiet"}
    assert max(counts.values()) <= 6
    assert {name.split()[1] for name in chosen[:8]} == {"alarmed", "quiet"}, "a cut-off leaves some of both"


def test_quiet_states_are_of_the_kinds_of_alarmed_ones_and_of_their_rates_first() -> None:
    alarmed = [line_of("a", "alarmed", 4.0, 0)]
    quiet = [line_of(kind, "quiet", rate, i) for kind in ("a", "b") for rate in (1.0, 4.0) for i in range(3)]
    chosen = queue.chosen_states(alarmed + quiet, replace(base_runs.TOY, states=4, of_kind=9))
    assert sorted(x for x in chosen if "quiet" in x)[1:] == [f"a quiet 4 {i}" for i in range(3)]
    assert not any(name.startswith("b") for name in chosen)


def test_what_rivals_read_from_the_weights_is_of_the_live_ones() -> None:
    for name in ("gpt2-a", "llama-b", "qwen3-a", "olmo2"):
        model = plan.build_model(plan.BY_NAME[name], plan.TrainingRun(name, "one", 0))
        signals = base_runs.WeightSignals(model)
        maps = [base_runs.query_and_key(layer) for layer in attention_layers(model)]
        before = torch.cat([p.weight().detach().flatten() for pair in maps for p in pair])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.5).add_(0.01 * torch.randn_like(parameter))
        maps = [base_runs.query_and_key(layer) for layer in attention_layers(model)]
        now = torch.cat([p.weight().detach().flatten() for pair in maps for p in pair])
        lowest = []
        for layer, (query, key) in zip(attention_layers(model), maps, strict=True):
            for part, heads in ((query, layer.heads), (key, layer.kv_heads)):
                squares = torch.linalg.svdvals(part.weight().detach().double().view(heads, -1, query.shape[1])) ** 2
                shares = squares / squares.sum(-1, keepdim=True)
                lowest.append((-(shares * shares.log()).sum(-1)).min().item())
        step, entropy, update, root, largest = signals.row(11)
        assert step == 11
        assert entropy == pytest.approx(min(lowest), abs=1e-5)
        assert update == pytest.approx(((now - before).norm() / now.norm()).item(), rel=1e-5)
        normed = name in ("qwen3-a", "olmo2")
        assert (root == pytest.approx(2.25, rel=0.05), root is not None, largest is not None) == (normed,) * 3


def test_a_queue_goes_on_after_what_breaks_and_stops_at_its_time(tmp_path: Path) -> None:
    said: list[str] = []
    taken: list[dict[str, Any]] = []
    work = [
        ("fine", partial(dict, n=1)),
        ("broken", partial(int, "x")),
        ("dead", partial(os._exit, 3)),
        ("last", partial(dict, n=2)),
    ]
    with queue.Queue(1, time.monotonic() + 600, said.append) as one:
        one.drain(work, taken.append)  # type: ignore[arg-type]
    assert [line["n"] for line in taken] == [1, 2]
    assert [text.split(":")[0] for text in one.broken] == ["broken", "dead", "dead"]
    with queue.Queue(1, time.monotonic() - 1, said.append) as late:
        late.drain(work[:1], taken.append)
    assert len(taken) == 2
    assert not late.broken


@pytest.mark.slow
def test_the_trial_at_toy_size_goes_on_where_it_was_cut_off(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--toy", "--out", str(tmp_path), "--states", str(tmp_path / "states")]
    assert queue.main([*options, "--minutes", "0"]) == 0
    assert not list(read_lines(tmp_path / queue.BASE))
    assert queue.main(options) == 0
    assert "the trial is complete" in capsys.readouterr().out
    made = (tmp_path / queue.BRANCHES).read_text()
    (tmp_path / queue.BRANCHES).write_text("".join(made.splitlines(keepends=True)[:-1]))
    lost = list(read_lines(tmp_path / queue.BRANCHES))[-1]["name"]
    (tmp_path / "states" / f"{lost}.pt").unlink()
    assert queue.main(options) == 0
    again = list(read_lines(tmp_path / queue.BRANCHES))
    assert len({(line["name"], line["arm"]) for line in again}) == len(again) == len(made.splitlines())
    seconds = {"seconds": 0}
    assert {**again[-1], **seconds} == {**json.loads(made.splitlines()[-1]), **seconds}


CALM = [3.0] * 100
RISEN = [3.0] * 60 + [4.0] * 40


def trial(saving: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Forty alarmed runs that rise from step 60 on, and one arm that stops it, beside ten ordinary runs."""
    warning = [{"step": 31, "flag": "exploding", "layer": 0, "head": 0, "value": 300.0}]
    shared = {
        "norms": [1.0] * 100,
        "rivals": [[1, 1.0, 0.1]],
        "observed": [[1, 0, 10.0, 1.0, 0.5], [91, 0, 90.0, 1.0, 0.5]],
    }
    run = {"kind": "a", "rate": 1.0, "cause": "", "seed": 0}
    usual = {"run": run, "losses": CALM, "warnings": [], **shared}
    hot = {"run": {**run, "rate": 4.0, "cause": "rate"}, "losses": RISEN, "warnings": warning, **shared}
    base = [{"name": f"usual {i}", **usual} for i in range(10)] + [{"name": f"hot {i}", **hot} for i in range(40)]
    made = [
        {
            "name": f"hot {i}",
            "sort": "alarmed",
            "step": 31,
            "arm": arm,
            "losses": (CALM if arm == saving else RISEN)[31:],
        }
        for i in range(40)
        for arm in branches.ARMS
    ]
    quiet = [
        {"name": f"usual {i}", "sort": "quiet", "step": 31, "arm": "nothing", "losses": CALM[31:]} for i in range(10)
    ]
    return base, made + quiet


def test_an_arm_that_saves_is_found_and_one_that_does_not_is_not() -> None:
    found = judging.judge_trial(*trial("named"))
    assert found["r1"] is not None
    assert (found["r1"].value, found["r1"].numbers) == (1.0, {"states": 40, "saved": 40, "lost": 0})
    assert found["r2"] is not None
    assert found["r2"].value == 1.0
    layer = judging.judge_trial(*trial("layer"))
    assert layer["r1"] is not None
    assert layer["r3"] is not None
    assert (layer["r1"].value, layer["r1"].p, layer["r3"].value) == (0.0, 1.0, 1.0)


def test_states_too_few_are_not_judged_and_those_that_had_failed_are_none() -> None:
    base, made = trial("named")
    few = [branch for branch in made if int(branch["name"].split()[1]) < 5]
    assert judging.judge_trial(base, few)["r1"] is None
    late = [{**branch, "step": 95} for branch in made]
    assert [s["sort"] for s in judging.states_of(base, late)] == ["quiet"] * 10


def test_signals_are_compared_at_the_false_alarms_of_the_released_rule() -> None:
    base, made = trial("named")
    found = judging.judge_trial(base, made)["r7"]
    assert found is not None
    assert found.value == 1.0, "the largest logit of hot runs is that of ordinary ones, and no ordinary run may alarm"
    assert signals.bound_for(signals.signals_of(base)["largest logit"], base[:10], 0) == 90.0


def test_fisher_is_that_of_scipy() -> None:
    for a, of_a, b, of_b in ((8, 10, 1, 10), (3, 7, 5, 9), (0, 5, 5, 5)):
        expected = stats.fisher_exact([[a, of_a - a], [b, of_b - b]]).pvalue
        assert judging.fisher(a, of_a, b, of_b) == pytest.approx(expected)


def test_what_the_page_shows_is_of_the_lines() -> None:
    base, made = trial("named")
    facts = {"device": "none", "torch": "none", "commit": "none"}
    base = [{**line, **facts, "rivals": [[1, 3.0, 0.1, None, None]]} for line in base]
    found = rescue.results_of(base, made)
    arms = found.tables["arms"]["alarmed"]
    assert (arms["named"]["F1"], arms["nothing"]["F1"], arms["nothing"]["states"]) == (0, 40, 40)
    assert arms["named"]["p"] < 1e-9
    assert found.tables["saved"]["F1"]["named"] == [40, 40]
    assert found.tables["saved"]["F1"]["half"] == [0, 40]
    assert found.tables["ladder"]["4"]["F1"] == found.tables["ladder"]["4"]["warned"] == 40
    assert found.tables["ladder"]["4"]["above the best"] == pytest.approx(1.0)
    mean = found.tables["sensitivity"]["mean"]
    assert (mean["nothing"], mean["named"], mean["base"]) == (
        pytest.approx(1.0),
        pytest.approx(0.0),
        pytest.approx(0.8),
    )
    rivals = found.tables["rivals"]
    assert (rivals["the released rule"]["caught"], rivals["the released rule"]["false"]) == (40, 0)
    assert (rivals["largest logit"]["caught"], rivals["largest logit"]["false"]) == (0, 0)
    assert rivals["the released rule"]["area"] is None, "all stressed runs rise"


def test_area_and_catches_of_signals_are_those_of_their_definition() -> None:
    def line(name: str, cause: str, rows: list[tuple[int, float]], risen: bool) -> dict[str, Any]:
        run = {"kind": "qwen3-a", "rate": 4.0 if cause else 1.0, "cause": cause, "seed": 0}
        observed = [[step, 0, x, 1.0, 0.5] for step, x in rows]
        rivals = [[step, 3.0, 0.1, x, x] for step, x in rows]
        shared = {"norms": [1.0] * 100, "warnings": [], "observed": observed, "rivals": rivals}
        return {"name": name, "run": run, "losses": RISEN if risen else CALM, **shared}

    usual = [line(f"u{i}", "", [(1, 1.0 + i), (51, 2.0 + i)], risen=False) for i in range(3)]
    low, high = ([(1, 1.0), (51, x), (91, 900.0)] for x in (3.0, 30.0))
    base = [
        *usual,
        line("early", "rate", high, risen=True),
        line("late", "rate", low, risen=True),
        line("lives", "rate", low[:2], risen=False),
    ]
    row = signals.rival_rows(base)["largest logit"]
    wrong = signals.first_wrong_step(RISEN, [])
    assert wrong == 63
    assert (row["caught"], row["of"], row["lead"], row["false"]) == (1, 2, wrong - 51, 0), "at 91 it is too late"
    assert row["area"] == 0.75, "one pair is won, one is even"
    normed = signals.normed_rows([*base, *({**x, "run": {**x["run"], "kind": "qwen3-c"}} for x in base)])[
        "growth of the gains"
    ]
    assert normed["bound"] == 2.0, (
        "the highest growth of an ordinary run; both failures grow more, and so does what lives"
    )
    assert normed["chosen"] == normed["judged"] == [2, 2, 0, 3, 1, 1]
