"""Verdicts in words and as tables in the terminal, from the JSON document alone: what is stated, what was measured, how
many hold, and why some are open.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from locater_lab.engine.claims import OTHERWISE
from locater_lab.engine.reproduction import Paper

Entry = Mapping[str, Any]  # a claim of the JSON document

AUTHORS = {
    "paper": "The paper's claims",
    "summary": "Claims of public summaries",
    "ours": "Our own",
}
KIND_WORDS = {
    "experiment": "experiments",
    "simulation": "simulations",
    "published": "published numbers computed again",
    "construction": "constructions",
    "identity": "identities",
    "": "of no stated kind",
}


def stated_text(entry: Entry) -> str:
    """`at most 0.05`, `about 0.064 ± 0.008`; a bound that this project chose says so."""
    room = f" ± {entry['tolerance']:g}" if entry["relation"] == "about" else ""
    ours = " (our bound)" if entry.get("bound") == "ours" and entry["by"] != "ours" else ""
    return f"{entry['relation']} {entry['stated']:g}{room}{ours}"


def measured_text(entry: Entry) -> str:
    """`0.029 ± 0.015`, `0.029 (open)` where a spread is not known, or a dash.

    >>> measured_text({"measured": 0.5, "spread": None, "spread_of": "unknown: there is no sink"})
    '0.5 (open)'
    """
    if entry["measured"] is None:
        return "-"
    value, spread = entry["measured"], entry["spread"]
    if is_open(entry):
        return f"{value:.3g} (open)"
    if spread and possible_ends(entry) != (value - spread, value + spread):
        return f"{value:.3g} ({' to '.join(f'{end:.3g}' for end in possible_ends(entry))})"
    return f"{value:.3g}" + (f" ± {spread:.2g}" if spread else "")


def possible_ends(entry: Entry) -> tuple[float, float]:
    """The ends of an interval, no further than the quantity can go.

    >>> possible_ends({"measured": -0.3, "spread": 3.81, "within": [-1.0, 1.0]})
    (-1.0, 1.0)
    """
    low, high = entry["measured"] - entry["spread"], entry["measured"] + entry["spread"]
    least, most = entry.get("within") or (None, None)
    return low if least is None else max(low, least), high if most is None else min(high, most)


OTHERWISE_SHORT = "came out otherwise, not in the setting of the paper"


def came_out_otherwise(entry: Entry) -> bool:
    """Whether a claim of a paper would have failed, had it been tested in the paper's own setting."""
    return entry.get("undecided_by") == OTHERWISE


def verdict_cell(entry: Entry) -> str:
    """`undecided: otherwise here` where a setting that is not the paper's came out against it.

    >>> verdict_cell({"verdict": "undecided", "undecided_by": OTHERWISE}), verdict_cell({"verdict": "fails"})
    ('undecided: otherwise here', '**fails**')
    """
    if entry["verdict"] == "fails":
        return "**fails**"
    return "undecided: otherwise here" if came_out_otherwise(entry) else str(entry["verdict"])


def author_text(entry: Entry) -> str:
    """Who says it, and where: `paper, Theorem 2`.

    >>> author_text({"by": "paper", "where": "Theorem 2"}), author_text({"by": "ours"})
    ('paper, Theorem 2', 'ours')
    """
    return ", ".join(filter(None, (entry["by"], entry.get("where", ""))))


def is_open(entry: Entry) -> bool:
    """Whether something was measured that cannot decide its claim, whatever it is."""
    return entry["measured"] is not None and str(entry.get("spread_of", "")).startswith("unknown")


def reasons(claims: Iterable[Entry]) -> list[str]:
    """Why claims are open or not measured, each reason once with the claims it is of."""
    by_reason: dict[str, list[str]] = {}
    for entry in claims:
        waits = entry["waits_for"] and f"waits for {entry['waits_for']}"
        reason = (
            entry["spread_of"].removeprefix("unknown: ") if is_open(entry) else waits or entry.get("undecided_by", "")
        )
        if reason:
            by_reason.setdefault(reason, []).append(entry["id"])
    return [f"{', '.join(ids)}: {reason}" for reason, ids in by_reason.items()]


def tally(claims: Iterable[Entry]) -> tuple[int, int, int]:
    """How many hold, fail and are undecided."""
    verdicts = [entry["verdict"] for entry in claims]
    return verdicts.count("holds"), verdicts.count("fails"), verdicts.count("undecided")


def count_by_author(claims: Sequence[Entry]) -> str:
    """How many hold, fail and are undecided, by who says them and by the kind of test, experiments first.

    >>> entries = [{"by": "paper", "verdict": "holds", "kind": "identity"}, {"by": "ours", "verdict": "fails", "kind": "experiment"}]
    >>> count_by_author(entries)
    "The paper's claims: experiments none; identities 1 hold, 0 fail, 0 undecided. Our own: experiments 0 hold, 1 fail, 0 undecided"
    """
    parts = []
    for author, words in AUTHORS.items():
        by_kind = tally_by_kind(claims, author)
        if by_kind:
            counts = (
                "{} {} hold, {} fail, {} undecided".format(KIND_WORDS[kind], *count) for kind, count in by_kind.items()
            )
            none = ["experiments none"] if author == "paper" and "experiment" not in by_kind else []
            parts.append(f"{words}: {'; '.join([*none, *counts])}")
    return ". ".join(parts)


def tally_by_kind(claims: Iterable[Entry], author: str) -> dict[str, tuple[int, int, int]]:
    """What an author's claims came to, by the kinds of test that there are."""
    own = [entry for entry in claims if entry["by"] == author]
    by_kind = {kind: [entry for entry in own if entry.get("kind", "") == kind] for kind in KIND_WORDS}
    return {kind: tally(entries) for kind, entries in by_kind.items() if entries}


def results_cells(claims: Sequence[Entry]) -> list[str]:
    """A paper's row in docs/results: its own claims by kind, experiments first, then those of summaries, then ours."""
    own = tally_by_kind(claims, "paper")
    counts = [own.get(kind) for kind in KIND_WORDS if kind]
    others = [tally([entry for entry in claims if entry["by"] == author]) for author in ("summary", "ours")]
    return [" / ".join(map(str, each)) if each and any(each) else "-" for each in (*counts, *others)]


def in_order(claims: Iterable[Entry]) -> list[Entry]:
    """The paper's claims first, and of each author's its experiments."""
    authors, kinds = list(AUTHORS), list(KIND_WORDS)
    return sorted(claims, key=lambda entry: (authors.index(entry["by"]), kinds.index(entry.get("kind", ""))))


def last_sentence(document: Mapping[str, Any]) -> str:
    """What the paper's own experiments came to; of a study of ours, what its claims came to.

    >>> last_sentence({"paper": "x", "claims": [{"by": "paper", "verdict": "holds", "kind": "experiment"}]})
    'x: of 1 experiment of the paper 1 holds, 0 fail, 0 are undecided.'
    """
    if all(entry["by"] == "ours" for entry in document["claims"]):
        return "{}: of our own claims {} hold, {} fail, {} are undecided.".format(
            document["paper"], *tally(document["claims"])
        )
    counts = tally_by_kind(document["claims"], "paper").get("experiment")
    if counts is None:
        return f"{document['paper']}: no experiment of a paper was tested."
    word, held = "experiment" if sum(counts) == 1 else "experiments", "holds" if counts[0] == 1 else "hold"
    return f"{document['paper']}: of {sum(counts)} {word} of the paper {counts[0]} {held}, {counts[1]} fail, {counts[2]} are undecided."


def time_text(assumptions: Mapping[str, Any], study: str) -> str:
    """Processor time of a study; that of the clock where another device did nearly all."""
    spent, clock = assumptions["processor_seconds"][study], assumptions["seconds"][study]
    return f"{clock:.0f} s by the clock" if spent < clock / 10 else f"{spent:.0f} s"


def time_spent(assumptions: Mapping[str, Any]) -> float:
    """Processor seconds of all studies."""
    return sum(assumptions["processor_seconds"].values())


# ---- in the terminal ----


STYLES = {"holds": "green", "fails": "bold red", "undecided": "dim"}


def print_verdicts(document: Mapping[str, Any], console: Console) -> None:
    """One line per claim."""
    table = Table(header_style="bold", box=None, pad_edge=False)
    for name in ("id", "test", "stated", "measured", "verdict"):
        table.add_column(name, no_wrap=True)
    table.add_column("claim", overflow="fold")
    for entry in in_order(document["claims"]):
        verdict = entry["verdict"]
        claim = f"{escape(entry['claim'])} [dim]({escape(author_text(entry))})[/dim]"
        table.add_row(
            entry["id"],
            entry.get("kind", ""),
            stated_text(entry),
            measured_text(entry),
            f"[{STYLES[verdict]}]{verdict}[/]",
            claim,
        )
    console.print(table)
    for reason in reasons(document["claims"]):
        console.print(f"[dim]{escape(reason)}[/dim]", highlight=False)
    console.print(
        f"{count_by_author(document['claims'])} (± is the spread; --json has the numbers behind each)", highlight=False
    )


def print_last_sentence(document: Mapping[str, Any], console: Console) -> None:
    console.print(f"[bold]{escape(last_sentence(document))}[/bold]", highlight=False)


def claims_ahead(paper: Paper) -> str:
    """Before anything is measured: how many claims of whom, the paper's first and by the kind of their test."""
    kinds = [claim.kind for claim in paper.claims if claim.by == "paper"]
    own = ", ".join(f"{kinds.count(kind)} {words}" for kind, words in KIND_WORDS.items() if kind in kinds)
    others = len(paper.claims) - len(kinds)
    said = f"{len(kinds)} claims of the paper ({own}), {others} others" if kinds else f"{others} claims of our own"
    return f"{paper.name}: {said}"


def print_claims(paper: Paper, console: Console) -> None:
    """What `--list` shows."""
    console.print(f"[bold]{paper.name}[/bold]  {escape(paper.source)}", highlight=False)
    for study in paper.studies:
        how = "" if study.measure is not None else f" [dim](undecided: needs {escape(study.needs)})[/dim]"
        console.print(f"  {escape(study.title)}{how}", highlight=False)
        for claim in study.claims:
            console.print(f"    [bold]{claim.id}[/bold]  {escape(claim.says)}", highlight=False)
