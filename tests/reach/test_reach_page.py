"""The page of model types: what a line counts as, and lines of another version of the code."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from tests import ROOT

sys.path.insert(0, str(ROOT / "scripts"))
import reach_page


def line(**changes: Any) -> dict[str, Any]:
    """The line of a type with two layers, verified in full."""
    return {
        "model_type": "some",
        "built": True,
        "ran": True,
        "met": {"interface": 2},
        "record": {},
        "discovered": {"layers": 2, "verified": 2},
        "disk": {"layers": 2, "verified": 2, "live": 2, "same": 2},
        "observed": {"layers": 2, "heads": 8},
        "code": "newer",
        "transformers": "5",
        "types": 9,
        **changes,
    }


OUTCOMES: dict[str, dict[str, Any]] = {
    "verified": {},
    "mask_open": {"discovered": {"layers": 2, "verified": 1, "mask_open": 1}},
    "logits_only": {"discovered": {"layers": 2, "verified": 1, "logits_only": 1}},
    "qk_only": {"discovered": {"layers": 3, "verified": 1, "logits_only": 1, "qk_only": 1}},
    "partly": {"discovered": {"layers": 2, "verified": 2, "unreached": 1}},
    "record": {"discovered": {"layers": 1, "verified": 1, "refused_layers": 1}, "record": {"layers": 2}},
    "observed": {"discovered": {"refused": "it cannot be copied"}},
    "refused": {"discovered": {"layers": 0, "verified": 0, "refused_layers": 2}, "observed": {"refused": "no"}},
    "none": {"met": {}},
    "not run": {"ran": False},
    "not built": {"built": False},
}


@pytest.mark.parametrize("outcome", OUTCOMES)
def test_a_line_counts_as_what_it_is(outcome: str) -> None:
    assert reach_page.outcome(line(**OUTCOMES[outcome])) == outcome


def test_modules_without_a_softmax_do_not_count_against_a_type() -> None:
    assert reach_page.outcome(line(discovered={"layers": 2, "verified": 2, "no_softmax": 5})) == "verified"


def test_counts_are_of_types() -> None:
    rows = [
        line(**OUTCOMES[name]) for name in ("verified", "mask_open", "logits_only", "qk_only", "partly", "observed")
    ]
    counts = reach_page.counts(rows)
    assert counts["queries and keys of every attention verified"] == 4
    assert counts["queries and keys of every attention that ran verified"] == 5
    assert counts["logits of every attention verified"] == 3
    assert counts["logits and output of every attention verified"] == 1
    assert counts["observed"] == 6


def test_the_page_names_lines_of_another_version_and_towers_that_miss_something() -> None:
    towers = {"text": {"layers": 1, "verified": 1}, "vision": {"layers": 0, "verified": 0, "unreached": 1}}
    partly = line(
        model_type="two", code="older", discovered={"layers": 1, "verified": 1, "unreached": 1, "towers": towers}
    )
    text = reach_page.section([line(), line(), partly])
    assert "with version newer of the code" in text
    assert "; 1 with another: two." in text
    assert "| two | vision |  |  |  |  |  | 1 |" in text
    assert "with another" not in reach_page.section([line()])


def test_heads_that_are_left_out_are_counted_by_the_way_of_reading() -> None:
    def heads(name: str, scan: dict[str, Any]) -> dict[str, Any]:
        return line(model_type=name, heads={"met": 8, "scan": scan, "observe": {"rows": 8}})

    text = reach_page.section(
        [
            heads("whole", {"rows": 8}),
            heads("named", {"rows": 4}),
            heads("silent", {"rows": 4, "silent": 1, "named": ["layers.1.attn: 0 of 4 heads"]}),
            heads("broken", {"error": "KeyError"}),
            line(model_type="without", heads={"met": 0}),
        ]
    )
    assert "| scan, live | 4 | 1 | 1 | 2: silent, broken |" in text
    assert "| observe | 4 | 4 | 0 | 0 |" in text


def test_scans_live_and_from_disk_are_counted_where_they_were_compared() -> None:
    same, apart = {"rows": 8, "stored": 8, "same": 8}, {"rows": 8, "stored": 8, "same": 4, "silent": 1}
    assert not any(name in reach_page.counts([line()]) for name in reach_page.SCANS)
    counts = reach_page.counts([line(), line(scans=same), line(scans=apart), line(scans={"refused": "no"})])
    assert [counts[name] for name in reach_page.SCANS] == [2, 1, 1]
