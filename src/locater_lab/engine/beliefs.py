"""What we believe of a paper now: findings that are put together from verdicts, so that no sentence can say what its
verdicts do not.

A paper names its findings, each a clause and the claims that it rests on (`Paper.beliefs`). Here they become sentences
on top of its page and lines of the page of results: believed where all of those claims hold, denied where all that are
decided fail, in part where they disagree or some are open, and not known where none is decided.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from locater_lab.engine.reproduction import Paper
from locater_lab.engine.verdict_text import OTHERWISE_SHORT, Entry, came_out_otherwise, tally

KINDS = {
    "experiment": "trained models",
    "simulation": "drawn weights or data",
    "published": "published numbers computed again",
    "construction": "weights made by hand",
    "identity": "algebra, checked",
    "": "of no stated kind",
}
ORDER = ("holds", "in part", "fails", "open")
FIRST_KIND = ("identity", "construction", "published", "simulation", "experiment", "")  # the most certain first
BEGIN, END = "<!-- made by `python -m locater_lab.papers.results_page` -->", "<!-- up to here -->"


@dataclass(frozen=True)
class Finding:
    """A clause, its verdict, and the claims behind it."""

    says: str
    entries: Sequence[Entry]

    @property
    def verdict(self) -> str:
        """holds, fails, in part or open.

        >>> [Finding("", [{"verdict": x} for x in each]).verdict for each in (["holds"], ["holds", "fails"], ["undecided"])]
        ['holds', 'in part', 'open']
        """
        held, failed, undecided = tally(self.entries)
        if not held:
            return "fails" if failed else "open"
        return "in part" if failed or undecided else "holds"

    @property
    def ids(self) -> str:
        names = [str(entry["id"]) for entry in self.entries]
        in_row = len(names) > 3 and names == [f"{names[0][0]}{i}" for i in range(1, len(names) + 1)]
        return f"{names[0]} to {names[-1]}" if in_row else ", ".join(names)

    @property
    def how_sure(self) -> str:
        """What its claims rest on: kinds of test, seeds, and whose setting.

        >>> entry = {"id": "a", "kind": "experiment", "by": "paper", "setting": "scaled", "values": 8, "spread_of": "over 8 seeds"}
        >>> Finding("", [entry]).how_sure
        'trained models, not in the setting of the paper, 8 seeds'
        """
        kinds = {entry.get("kind", "") for entry in self.entries}
        parts = [KINDS[kind] for kind in FIRST_KIND if kind in kinds]
        if any(entry["by"] != "ours" and entry.get("setting") == "scaled" for entry in self.entries):
            parts.append("not in the setting of the paper")
        seeds = {
            entry["values"] for entry in self.entries if entry.get("values") and "seeds" in entry.get("spread_of", "")
        }
        if seeds:
            parts.append(f"{min(seeds)} to {max(seeds)} seeds" if len(seeds) > 1 else f"{min(seeds)} seeds")
        return ", ".join(parts)

    @property
    def rests_on(self) -> str:
        """For brackets: the claims, how many of them are as said where they disagree, and what they rest on."""
        if self.verdict == "open":
            some = any(entry["measured"] is not None for entry in self.entries)
            other = [str(entry["id"]) for entry in self.entries if came_out_otherwise(entry)]
            said = f"; {', '.join(other)} {OTHERWISE_SHORT}" if other else ""
            return f"{self.ids}: {'undecided' if some else 'not measured'}{said}"
        if self.verdict == "holds" or (
            self.verdict == "fails" and len({entry["verdict"] for entry in self.entries}) == 1
        ):
            return f"{self.ids}: {self.how_sure}"
        held, failed, undecided = tally(self.entries)
        return f"{self.ids}: {held} hold, {failed} fail, {undecided} open; {self.how_sure}"


def findings(document: Mapping[str, Any], paper: Paper) -> list[Finding]:
    """The paper's findings of which this document has every claim, in the order of their verdicts."""
    entries = {entry["id"]: entry for entry in document["claims"]}
    known = (
        Finding(says, [entries[name] for name in ids.split()])
        for ids, says in paper.beliefs.items()
        if entries.keys() >= set(ids.split())
    )
    return sorted(known, key=lambda finding: ORDER.index(finding.verdict))


def believed(document: Mapping[str, Any], paper: Paper) -> str:
    """A sentence for each verdict that there is; nothing where no finding is in the document."""
    beginnings = {
        "holds": ("We believe that ", ", and that "),
        "in part": ("It holds in part that ", ", and that "),
        "fails": ("It does not hold here that ", ", nor that "),
        "open": ("Not decided here is whether ", ", and whether "),
    }
    held = findings(document, paper)
    sentences = []
    for verdict in ORDER:
        clauses = [f"{each.says} ({each.rests_on})" for each in held if each.verdict == verdict]
        first, between = beginnings[verdict]
        if clauses:
            sentences.append(f"{first}{between.join(clauses)}.")
    return " ".join(sentences)


# ---- the page of results ----

VERDICT_WORDS = {"holds": "believed", "in part": "in part", "fails": "not so", "open": "open"}


def results_lines(papers: Iterable[Paper], docs: Path) -> list[str]:
    """A line for each finding of each paper, from the documents that are kept below `docs`."""
    rows: list[tuple[tuple[int, int], str]] = []
    for paper in papers:
        document = json.loads((docs / paper.document_file).read_text(encoding="utf-8"))
        link = (
            paper.page_file.removeprefix("results/")
            if paper.page_file.startswith("results/")
            else f"../{paper.page_file}"
        )
        for each in findings(document, paper):
            worst = max(FIRST_KIND.index(entry.get("kind", "")) for entry in each.entries)
            says = each.says[0].upper() + each.says[1:]
            sure = each.rests_on.split(": ", 1)[1]
            line = f"| {says} | {VERDICT_WORDS[each.verdict]}: {sure} | [{paper.name}]({link}) {each.ids} |"
            rows.append(((ORDER.index(each.verdict), worst), line))
    return [
        "| finding | how sure | where |",
        "|---|---|---|",
        *(line for _, line in sorted(rows, key=lambda row: row[0])),
    ]


def with_results(text: str, lines: Sequence[str]) -> str:
    """The page of results with these lines between its marks."""
    before, rest = text.split(BEGIN)
    return "\n".join([before + BEGIN, "", *lines, "", END]) + rest.split(END)[1]
