"""Hybrids: prompts, states, recall, stacks that are trained seed by seed at once, verdicts, the page."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from locater_papers import Setting, reproduce
from locater_papers.claim import verdict_of
from locater_papers.report import write_report
from locater_papers.ye2026 import PAPER, composing, recall, recurrences, stacks
from locater_papers.ye2026.page import lead, page
from locater_papers.ye2026.task import Task, prompts

TINY = replace(stacks.QUICK, task=Task(4, 2), steps=3, batch=4, width=16)
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def document() -> Iterator[dict[str, Any]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stacks, "QUICK", TINY)
        patch.setattr(recall, "SEEDS", {True: 2})
        yield json.loads(reproduce(PAPER, Setting()).to_json())


def test_what_is_exact_is_decided(document: dict[str, Any]) -> None:
    said = {x["id"]: x["verdict"] for x in document["claims"]}
    assert {name for name, verdict in said.items() if verdict == "fails"} == {"b3", "b4", "b6", "c4"}
    assert {name for name, verdict in said.items() if verdict == "undecided"} == {"d1", "d2", "d3", "d4"}


@pytest.mark.parametrize("forward", [False, True])
def test_prompts_are_chains_of_what_they_list(forward: bool) -> None:
    made = prompts(Task(5, 3), 3, torch.Generator().manual_seed(0), forward, questions=2)
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
    held = recurrences.operands()
    one = [held[n][0, 0] for n in ("q", "k", "v")]
    a = recurrences.erased(one[0], one[1], one[2], held["beta"][0, 0])
    b = recurrences.erased(one[0], one[1], one[2], held["beta"][0, 1])
    assert (a - b).abs().max() > 1e-3
    assert recurrences.difference("delta", recurrences.erased, ("beta",)) < 1e-12


def test_states_by_hand() -> None:
    assert composing.states(("start", "f1", "f2"), 2, 2) == 2
    assert composing.states(("f2", "f1", "start"), 1, 2) == 4
    assert composing.state_table(2) == {
        "forward, start first": [2, 2], "forward, start last": [4, 4], "reverse, start first": [6, 6], "reverse, start last": [4, 4],
    }  # fmt: skip


def test_hops_by_hand_need_the_right_keys() -> None:
    made = prompts(Task(4, 3), 8, torch.Generator().manual_seed(2))
    assert composing.hopped(made, Task(4, 3), "softmax", 12).sum() == 0
    assert composing.hopped(made, Task(4, 3), "delta", 12).sum() == 0
    assert composing.hopped(made, Task(4, 3), "delta", 2).mean() > 0.3


def test_seeds_are_trained_beside_each_other_and_not_together() -> None:
    """A seed's gradient does not know of the other seed."""
    model = stacks.Stack(TINY, "LS", CPU)
    made = prompts(TINY.task, 3, torch.Generator().manual_seed(0), questions=2)
    out = model(made)
    assert out.shape == (2, TINY.seeds, 3, 2, 4)
    grads = torch.autograd.grad(out[:, 0].square().sum(), model.parameters)
    assert all(grad[1].abs().max() == 0 for grad in grads)
    assert all(grad[0].abs().max() > 0 for grad in grads)
    assert not torch.equal(out[:, 0], out[:, 1])


def test_a_stack_learns_one_hop() -> None:
    easy = replace(TINY, task=Task(4, 1), layouts=("S",), steps=150, batch=16, width=32, head=8, rate=1e-2)
    assert stacks.trained(easy, "S", CPU).min() > 0.9


def test_questions_do_not_look_at_later_ones() -> None:
    model = stacks.Stack(TINY, "LS", CPU)
    made = prompts(TINY.task, 2, torch.Generator().manual_seed(0), questions=3)
    other = replace(made, start=torch.cat([made.start[:, :2], (made.start[:, 2:] + 1) % 4], 1))
    with torch.no_grad():
        torch.testing.assert_close(model(made)[:, :, :, :2], model(other)[:, :, :, :2])


def test_verdicts_of_stacks_wait_until_the_task_is_learned() -> None:
    size = stacks.FULL
    right = {
        "LLL": [[0.4, 0.1, 0.1]] * 4,
        "LLS": [[0.4, 0.2, 0.1]] * 4,
        "LSS": [[0.5, 0.5, 0.4]] * 4,
        "SSS": [[1.0, 1.0, 0.95]] * 4,
    }
    found = stacks.judged(right, size, "cuda")
    said = {c.id: verdict_of(c, found[c.id], "").verdict for c in stacks.CLAIMS}
    assert said == {"d1": "holds", "d2": "holds", "d3": "holds", "d4": "holds"}
    assert found["d2"].value == pytest.approx(-0.55)
    worse = {**right, "SSS": [[1.0, 0.5, 0.1]] * 4}
    assert all(
        verdict_of(c, stacks.judged(worse, replace(size, brief=True), "cpu")[c.id], "").verdict == "undecided"
        for c in stacks.CLAIMS
    )
    long = stacks.judged(worse, size, "cuda")
    assert [verdict_of(c, long[c.id], "").verdict for c in stacks.CLAIMS] == [
        "fails",
        "undecided",
        "undecided",
        "holds",
    ]


def test_the_page_counts_the_seeds_that_learned(document: dict[str, Any]) -> None:
    """Where a seed of full layers has not: in the lead and below the table, and with the picture that a brief run does
    not have.
    """
    right = {
        "LLL": [[1.0, 1.0, 0.04]] * 4,
        "LLS": [[1.0, 1.0, 0.1]] * 4,
        "LSS": [[1.0, 1.0, 0.95], *[[1.0, 1.0, 0.1]] * 3],
    }
    measured = stacks.judged({**right, "SSS": [[1.0, 0.1, 0.1], *[[1.0, 1.0, 1.0]] * 3]}, stacks.FULL, "cuda")
    entries = [dict(entry) for entry in document["claims"]]
    for entry in entries:
        if entry["id"] in measured:
            entry |= {
                "measured": measured[entry["id"]].value,
                "numbers": dict(measured[entry["id"]].numbers),
                "decided": False,
            }
    lines, figures = page({**document, "claims": entries})
    counts = "Seeds that answer 90 % at the last hop: LLL 0 of 4, LLS 0 of 4, LSS 1 of 4, SSS 3 of 4."
    assert "stacks" in figures
    assert any(text.startswith(counts) for text in lines)
    assert counts in "\n".join(lead({**document, "claims": entries}))
    assert not any("nothing is concluded" in text for text in lines)
    assert "Seeds that answer" not in "\n".join(lead(document))


def test_the_page_is_made_of_the_document_alone(tmp_path: Path, document: dict[str, Any]) -> None:
    json.dumps(document, allow_nan=False)
    written = write_report(document, PAPER, tmp_path / "y.md", tmp_path)
    page = written[0].read_text()
    assert [path.name for path in written[1:]] == ["ye2026-recall.svg"]
    assert "nothing is concluded" in page
    assert "Trained at this size, stacks" not in page
    right = {
        "LLL": [[0.4, 0.1, 0.1]] * 4,
        "LLS": [[0.4, 0.2, 0.1]] * 4,
        "LSS": [[0.5, 0.5, 0.4]] * 4,
        "SSS": [[1.0, 1.0, 0.95]] * 4,
    }
    found = stacks.judged(right, stacks.FULL, "cuda")
    more = [json.loads(json.dumps(verdict_of(c, found[c.id], "").to_dict())) for c in stacks.CLAIMS]
    whole = {**document, "claims": [x for x in document["claims"] if x["id"][0] != "d"] + more}
    written = write_report(whole, PAPER, tmp_path / "z.md", tmp_path)
    assert "ye2026-stacks.svg" in [path.name for path in written]
    assert "answer 95 % at all hops; with one full layer less 40 %" in written[0].read_text()
