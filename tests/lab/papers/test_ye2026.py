"""Hybrids: prompts, states, recall, stacks that are trained seed by seed at once, verdicts, the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from locater_lab.engine.claims import verdict_of
from locater_lab.engine.pages import page, write_report
from locater_lab.engine.reproduction import Paper, Results, Study
from locater_lab.papers import Setting, reproduce
from locater_lab.papers.ye2026 import PAPER, composition, states, trained_stacks
from locater_lab.papers.ye2026.composition import CompositionTask, draw_prompts

TINY = replace(trained_stacks.QUICK, task=CompositionTask(4, 2), steps=3, batch=4, width=16)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trained_stacks, "QUICK", TINY)
        patch.setattr(states, "LOADS", (0.5, 1.0, 2.0, 8.0))
        yield json.loads(reproduce(PAPER, Setting()).to_json())


def test_what_is_exact_is_decided(document: dict[str, Any]) -> None:
    verdicts = {x["id"]: x["verdict"] for x in document["claims"]}
    assert {name for name, verdict in verdicts.items() if verdict == "fails"} == {"b3", "b4", "b6", "c4"}
    undecided = {"d1", "d2", "d3", "d4", "e1", "e2", "e4"}
    assert {name for name, verdict in verdicts.items() if verdict == "undecided"} == undecided


def test_the_theorem_is_the_papers_and_open_with_its_reason(document: dict[str, Any]) -> None:
    papers = {x["id"]: x for x in document["claims"] if x["by"] == "paper"}
    assert papers.keys() == {"c5", "e1", "e2"}
    assert {x["where"] for x in papers.values()} == {"abstract"}
    text, _ = page(document, PAPER)
    assert (
        "The paper's claims: experiments none; constructions 1 hold, 0 fail, 0 undecided; identities 0 hold, 0 fail, 2 undecided."
        in text
    )
    assert "- e1: waits for a proof" in text
    assert "--claim e1" not in text, "no command decides it"


@pytest.mark.parametrize("forward", [False, True])
def test_prompts_are_chains_of_what_they_list(forward: bool) -> None:
    made = draw_prompts(CompositionTask(5, 3), 3, torch.Generator().manual_seed(0), forward, questions=2)
    assert made.layer[0].unique_consecutive().tolist() == ([0, 1, 2] if forward else [2, 1, 0])
    for b in range(3):
        tables: dict[int, dict[int, int]] = {0: {}, 1: {}, 2: {}}
        for layer, x, y in zip(made.layer[b].tolist(), made.x[b].tolist(), made.y[b].tolist(), strict=True):
            tables[layer][x] = y
        for q in range(2):
            at = int(made.start[b, q])
            for number in range(3):
                at = tables[number][at]
                assert at == int(made.reached[b, q, number])
            assert at == int(made.answer[b, q])


def test_recurrences_see_a_wrong_beta() -> None:
    """The comparison can fail: another step of the state is another output."""
    tensors = states.draw_operands()
    one = [tensors[n][0, 0] for n in ("q", "k", "v")]
    a = states.erasing_loop(one[0], one[1], one[2], tensors["beta"][0, 0])
    b = states.erasing_loop(one[0], one[1], one[2], tensors["beta"][0, 1])
    assert (a - b).abs().max() > 1e-3
    assert states.mechanism_difference("delta", states.erasing_loop, ("beta",)) < 1e-12


def test_states_by_hand() -> None:
    assert composition.count_states(("start", "f1", "f2"), 2, 2) == 2
    assert composition.count_states(("f2", "f1", "start"), 1, 2) == 4
    assert composition.state_table(2) == {
        "forward, start first": [2, 2], "forward, start last": [4, 4], "reverse, start first": [6, 6], "reverse, start last": [4, 4],
    }  # fmt: skip


def test_hops_by_hand_need_the_right_keys() -> None:
    made = draw_prompts(CompositionTask(4, 3), 8, torch.Generator().manual_seed(2))
    assert composition.hop_errors(made, CompositionTask(4, 3), "softmax", 12).sum() == 0
    assert composition.hop_errors(made, CompositionTask(4, 3), "delta", 12).sum() == 0
    assert composition.hop_errors(made, CompositionTask(4, 3), "delta", 2).mean() > 0.3


def test_seeds_are_trained_beside_each_other_and_not_together() -> None:
    """A seed's gradient does not know of the other seed."""
    model = trained_stacks.StackModels(TINY, "LS", CPU)
    made = draw_prompts(TINY.task, 3, torch.Generator().manual_seed(0), questions=2)
    out = model(made)
    assert out.shape == (2, TINY.seeds, 3, 2, 4)
    grads = torch.autograd.grad(out[:, 0].square().sum(), model.parameters)
    assert all(grad[1].abs().max() == 0 for grad in grads)
    assert all(grad[0].abs().max() > 0 for grad in grads)
    assert not torch.equal(out[:, 0], out[:, 1])


def test_a_stack_learns_one_hop() -> None:
    easy = replace(TINY, task=CompositionTask(4, 1), layouts=("S",), steps=150, batch=16, width=32, head=8, rate=1e-2)
    assert trained_stacks.train_stack(easy, "S", CPU).min() > 0.9


def test_questions_do_not_look_at_later_ones() -> None:
    model = trained_stacks.StackModels(TINY, "LS", CPU)
    made = draw_prompts(TINY.task, 2, torch.Generator().manual_seed(0), questions=3)
    other = replace(made, start=torch.cat([made.start[:, :2], (made.start[:, 2:] + 1) % 4], 1))
    with torch.no_grad():
        torch.testing.assert_close(model(made)[:, :, :, :2], model(other)[:, :, :, :2])


NOISE = (-0.02, 0.0, 0.01, 0.02)  # between seeds
FULL_LEARNS = {
    "LLL": [[0.4, 0.1, 0.1 + x] for x in NOISE],
    "LLS": [[0.4, 0.2, 0.2 - x] for x in NOISE],
    "LSS": [[0.5, 0.5, 0.4 + x] for x in NOISE],
    "SSS": [[1.0 - abs(x), 1.0, 0.95 - x] for x in NOISE],
}
ONE_DOES_NOT = {
    "LLL": [[1.0, 1.0, 0.04]] * 4,
    "LLS": [[1.0, 1.0, 0.1]] * 4,
    "LSS": [[1.0, 1.0, 0.95], *[[1.0, 1.0, 0.1]] * 3],
    "SSS": [[1.0, 0.1, 0.1], *[[1.0, 1.0, 1.0]] * 3],
}


def verdicts_of(results: Results) -> dict[str, str]:
    return {c.id: verdict_of(c, results.measured[c.id], "").verdict for c in trained_stacks.CLAIMS}


def with_stacks(document: dict[str, Any], results: Results) -> dict[str, Any]:
    """The document with these trained stacks in the place of its own."""
    study = Study("trained stacks", trained_stacks.CLAIMS, lambda setting: results)
    other = json.loads(reproduce(Paper("ye2026", "", "", (study,))).to_json())
    claims = [x for x in document["claims"] if x["id"][0] != "d"] + other["claims"]
    return {**document, "claims": claims, "studies": document["studies"] | other["studies"]}


def test_verdicts_of_stacks_wait_until_the_task_is_learned() -> None:
    size = trained_stacks.FULL
    results = trained_stacks.judge_stacks(FULL_LEARNS, size, "cuda")
    d2 = results.measured["d2"]
    assert d2 is not None
    assert d2.value == pytest.approx(-0.5525 + 0.0075)
    assert verdicts_of(results) == {"d1": "holds", "d2": "holds", "d3": "undecided", "d4": "holds"}, (
        "rank correlations of 1 with all of four seeds have no spread, and four signs decide nothing"
    )
    worse = {**FULL_LEARNS, "SSS": [[1.0 - abs(x), 0.5, 0.1 + x] for x in NOISE]}
    brief = trained_stacks.judge_stacks(worse, replace(size, brief=True), "cpu")
    assert set(verdicts_of(brief).values()) == {"undecided"}
    long = trained_stacks.judge_stacks(worse, size, "cuda")
    assert verdicts_of(long) == {"d1": "fails", "d2": "undecided", "d3": "undecided", "d4": "holds"}


def test_the_page_counts_the_seeds_that_learned(document: dict[str, Any]) -> None:
    """Where a seed of full layers has not: in short and below the table, and with the picture that a brief run does
    not have.
    """
    text, figures = page(
        with_stacks(document, trained_stacks.judge_stacks(ONE_DOES_NOT, trained_stacks.FULL, "cuda")), PAPER
    )
    counts = "Seeds that answer 90% at the last hop: LLL 0 of 4, LLS 0 of 4, LSS 1 of 4, SSS 3 of 4."
    assert "stacks" in figures
    assert text.count(counts) == 2
    assert "is undecided with so few seeds: the mean share of right answers is 0.78" in text
    assert "nothing is concluded" not in text
    assert "Seeds that answer" not in page(document, PAPER)[0]


def test_the_page_is_made_of_the_document_alone(tmp_path: Path, document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    written = write_report(document, PAPER, tmp_path / "y.md", tmp_path)
    text = written[0].read_text()
    assert [path.name for path in written[1:]] == ["ye2026-recall.svg"]
    assert "nothing is concluded" in text
    assert "Trained on" not in text
    whole = with_stacks(document, trained_stacks.judge_stacks(FULL_LEARNS, trained_stacks.FULL, "cuda"))
    written = write_report(whole, PAPER, tmp_path / "z.md", tmp_path)
    assert "ye2026-stacks.svg" in [path.name for path in written]
    assert "stacks of full layers learn to compose: the mean share of right answers is 0.95" in written[0].read_text()


def test_the_page_says_nothing_of_what_was_not_measured(document: dict[str, Any]) -> None:
    nothing = {**document, "studies": {}, "claims": [{**x, "measured": None} for x in document["claims"]]}
    text, figures = page(nothing, PAPER)
    assert not figures
    assert "## a." not in text
    assert "true by construction" not in text
    assert "## Not tested" in text
