"""A paper is two files: studies, and a template that says what came out. Several are measured at once."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

import locater_lab.papers
from locater.errors import LocaterError
from locater.inputs.corpus import fingerprint
from locater_lab.engine import reproduction
from locater_lab.engine.claims import Measurement
from locater_lab.engine.devices_and_processes import measure_in_parallel
from locater_lab.engine.pages import page
from locater_lab.engine.reproduction import judge_again
from locater_lab.papers import Claim, Paper, Setting, Study, reproduce
from tests.conftest import Result

STUDIES = """
from pathlib import Path

from locater_lab.papers import Claim, Paper, Results, Study
from locater_lab.engine.claims import Measurement, by_seed

CLAIMS = (
    Claim("a1", "Halves are small", "half of one", "at most", 0.6, where="Theorem 1"),
    Claim("a2", "Seeds lower the loss", "change of loss", "at most", 0.0, where="Figure 2"),
)


def measure(setting):
    seeds = [-0.3, -0.2, -0.25, -0.28, -0.22]
    return Results({"a1": Measurement(0.5, 0.0, "none: counted"), "a2": by_seed(seeds)}, {"halves": [{"n": 1, "half": 0.5}]})


OTHER = Study("never", (Claim("b1", "More", "more", "at least", 1.0, by="ours"),), None, "a larger machine")
PAPER = Paper("made2026", "A made-up paper", "Nobody (2026)", (Study("halves", CLAIMS, measure), OTHER), Path(__file__).parent,
              kinds={"identity": "a1", "experiment": "a b"}, scaled="a2")
"""
TEMPLATE = """{% extends "base.md.j2" %}
{% block differs %}
| a large model | a small one |
{% endblock %}
{% block short %}
- {{ say("a1", holds="Halves are small.", fails="Halves are not small.", undecided="Halves are open.") }}
- {{ say("a2", holds="Seeds help", fails="Seeds hurt", undecided="Seeds are undecided") }}: {{ interval("a2", 2) }}.
{% endblock %}
{% block sections %}
{% if has("halves") %}
## Halves

{{ figure("halves", Panel("halves", "n", "half", [Series("half", table("halves") | points("n", "half"), "dots")])) }}

{{ table("halves") | as_table({"n": "n", "half": ("half of it", ".2f")}) }}
{% endif %}
{% endblock %}
"""


@pytest.fixture
def paper(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Paper]:
    (tmp_path / "made2026.py").write_text(STUDIES)
    (tmp_path / "page.md.j2").write_text(TEMPLATE)
    monkeypatch.syspath_prepend(str(tmp_path))
    made: Paper = import_module("made2026").PAPER
    locater_lab.papers.PAPERS.add(made, "made2026")
    yield made
    locater_lab.papers.PAPERS.remove("made2026")
    del sys.modules["made2026"]


def test_a_paper_is_two_files(paper: Paper) -> None:
    document = json.loads(reproduce(paper).to_json())
    assert [(x["id"], x["verdict"], x["where"]) for x in document["claims"]] == [
        ("a1", "holds", "Theorem 1"),
        ("a2", "holds", "Figure 2"),
        ("b1", "undecided", ""),
    ]
    assert document["studies"] == {"halves": {"tables": {"halves": [{"n": 1, "half": 0.5}]}}}
    text, figures = page(document, paper)
    assert "| a large model | a small one |" in text
    assert "- Halves are small." in text
    assert "- Seeds help: -0.25 (-0.30 to -0.20)." in text
    assert "| 1 | 0.50 |" in text
    counted = (
        "The paper's claims: experiments 1 hold, 0 fail, 0 undecided; identities 1 hold, 0 fail, 0 undecided. Our own: "
    )
    assert f"{counted}experiments 0 hold, 0 fail, 1 undecided" in text
    kinds = [(x["id"], x["kind"], x["setting"]) for x in document["claims"]]
    assert kinds == [("a1", "identity", "own"), ("a2", "experiment", "scaled"), ("b1", "experiment", "own")]
    assert figures["halves"].startswith("<svg")
    assert "b1: waits for a larger machine" in text


def test_every_claim_of_a_paper_has_a_kind_of_test(paper: Paper) -> None:
    with pytest.raises(ValueError, match="made2026: claim b1 has no kind of test"):
        replace(paper, kinds={"experiment": "a"})
    for each in locater_lab.papers.PAPERS.values():
        assert all(claim.kind for claim in each.claims), each.name


def test_a_document_is_judged_again_by_its_own_numbers(
    paper: Paper, run: Callable[..., Result], tmp_path: Path
) -> None:
    """Numbers stay, whatever verdicts and sentences were kept; what was measured by another statement is refused."""
    document = reproduce(paper).to_dict()
    before = json.loads(json.dumps(document))
    for entry in before["claims"]:
        entry |= {"verdict": "fails", "decided": True, "kind": "", "claim": "in other words"}
        del entry["undecided_by"], entry["values"]
    before["claims"][1] |= {"numbers": {}}  # as many documents were: the sample is told in words alone
    again = judge_again(before, paper)
    kept = [{**x, "numbers": y["numbers"]} for x, y in zip(document["claims"], again["claims"], strict=True)]
    assert again["claims"] == kept
    assert again["assumptions"]["judged_again"]["measured_by"] == document["locater"]
    (tmp_path / "made.json").write_text(json.dumps(before))
    done = run("reproduce", "made2026", "--again", tmp_path / "made.json", "--json", "-")
    assert json.loads(done.out)["claims"] == again["claims"], done.err
    before["claims"][0]["stated"] = 0.4
    with pytest.raises(LocaterError, match="made2026 a1: stated has changed since it was measured"):
        judge_again(before, paper)


def test_a_page_says_what_the_verdict_is(paper: Paper) -> None:
    document = json.loads(reproduce(paper).to_json())
    for verdict, words in (("fails", "Halves are not small."), ("undecided", "Halves are open.")):
        changed = [{**x, "verdict": verdict} if x["id"] == "a1" else x for x in document["claims"]]
        assert words in page({**document, "claims": changed}, paper)[0]
    bare = {**document, "claims": [{**x, "measured": None} for x in document["claims"]], "studies": {}}
    assert "Halves are not" not in page(bare, paper)[0]
    assert "Halves are open" not in page(bare, paper)[0]


def test_a_name_that_is_not_there_is_an_error(paper: Paper, tmp_path: Path) -> None:
    (tmp_path / "page.md.j2").write_text('{% extends "base.md.j2" %}{% block short %}{{ value("a9") }}{% endblock %}')
    with pytest.raises(KeyError, match="claim a9"):
        page(json.loads(reproduce(paper).to_json()), paper)


def test_several_papers_at_once(paper: Paper, run: Callable[..., Result], tmp_path: Path) -> None:
    done = run("reproduce", "made2026", "gerami2024", "--claim", "a1", "--quick", "--json", tmp_path / "NAME.json")
    assert done.status == 0, done.err
    assert json.loads((tmp_path / "made2026.json").read_text())["paper"] == "made2026"
    assert json.loads((tmp_path / "gerami2024.json").read_text())["claims"][0]["id"] == "a1"
    refused = run("reproduce", "made2026", "gerami2024", "--json", tmp_path / "x.json")
    assert refused.status == 2
    assert "put NAME into it" in refused.err


@pytest.mark.skipif(not hasattr(os, "fork"), reason="studies are measured one after the other without fork")
def test_studies_at_once_give_what_they_give_one_by_one(paper: Paper) -> None:
    told: list[str] = []
    settings = [(paper, Setting(log=told.append)), (locater_lab.papers.paper("gerami2024"), Setting(log=told.append))]
    at_once = measure_in_parallel(settings, "a1", 2)
    assert len(told) == 2
    for each, setting in settings:
        documents = [reproduce(each, setting, "a1", done).to_dict() for done in (at_once[each.name], {})]
        plain: list[Any] = [[{**x, "command": ""} for x in document["claims"]] for document in documents]
        assert plain[0] == plain[1]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="studies are measured one after the other without fork")
def test_a_document_names_the_text_that_another_process_read(paper: Paper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reproduction, "_text", lambda: "words")
    claim = Claim("r1", "There is text", "characters", "at least", 1.0, by="ours")
    study = Study(
        "length of the text", (claim,), lambda s: {"r1": Measurement(float(len(s.text)), 0.0, "none: counted")}
    )
    reader = Paper("reader", "A paper that reads", "Nobody (2026)", (study,))
    settings = [(reader, Setting()), (paper, Setting())]
    at_once = measure_in_parallel(settings, None, 2)
    read, unread = (reproduce(each, s, None, at_once[each.name]).assumptions for each, s in settings)
    assert read["text_sha256"] == fingerprint("words")
    assert "text_sha256" not in unread


def test_a_document_of_an_earlier_version_is_refused(paper: Paper, run: Callable[..., Result], tmp_path: Path) -> None:
    document = json.loads(reproduce(paper).to_json())
    del document["studies"]
    (tmp_path / "old.json").write_text(json.dumps(document))
    done = run("reproduce", "made2026", "--from", tmp_path / "old.json", "--report", tmp_path / "x.md")
    assert (done.status, done.err.count("\n")) == (2, 1)
    assert "old.json: written by an earlier version" in done.err


def test_an_unknown_paper_is_refused(run: Callable[..., Result]) -> None:
    with pytest.raises(LocaterError, match="no paper"):
        locater_lab.papers.paper("bao2042")
    assert run("reproduce", "zhai2023", "bao2042").status == 2
