"""The page of a paper: a template beside its studies, filled from the JSON document alone.

A template (page.md.j2, Jinja2) extends the one of this folder and fills three blocks: `differs`, rows of a table that
says how what was run differs from what the paper ran; `short`, what came out in plain words; `sections`, the rest in the
paper's order. It asks for numbers by name, and says one thing where a claim holds, another where it fails, a third where
it is open. A name that is not there is an error, not an empty space.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from locater.files import write_whole
from locater.report.prose import prose_page
from locater_lab.engine import verdict_words
from locater_lab.engine.figures import Cells, Contour, Field, Panel, Series, draw
from locater_lab.engine.papers import Paper
from locater_lab.engine.pictures import picture_rows
from locater_lab.engine.strips import strips
from locater_lab.engine.tables import arms_table, cell, failed, failed_words, markdown_table, means_table, renamed

HERE = Path(__file__).parent


def write_report(document: Mapping[str, Any], paper: Paper, path: Path, images: Path) -> list[Path]:
    """Write the page, as HTML with its figures inside (.html) or as Markdown with figures in files; returns the files
    written.
    """
    text, figures = page(document, paper)
    if path.suffix == ".html":
        write_whole(path, prose_page(text, figures))
        return [path]
    written = []
    for name, drawing in figures.items():
        target = images / f"{paper.name}-{name}.svg"
        write_whole(target, drawing)
        written.append(target)
        link = Path(os.path.relpath(target.resolve(), path.resolve().parent)).as_posix()
        text = text.replace(f"(figure:{name})", f"({link})")
    write_whole(path, text)
    return [path, *written]


class CompiledTemplates(BytecodeCache):
    """Templates that this process has compiled. Each page has an environment of its own, so they would be compiled for
    each; a template whose file has changed is compiled again.
    """

    def __init__(self) -> None:
        self.codes: dict[str, bytes] = {}

    def load_bytecode(self, bucket: Bucket) -> None:
        if bucket.key in self.codes:
            bucket.bytecode_from_string(self.codes[bucket.key])

    def dump_bytecode(self, bucket: Bucket) -> None:
        self.codes[bucket.key] = bucket.bytecode_to_string()


COMPILED = CompiledTemplates()


def page(document: Mapping[str, Any], paper: Paper) -> tuple[str, dict[str, str]]:
    """Markdown, with (figure:NAME) where the link to a figure goes, and the figures by name."""
    facts = Facts(document)
    folders = [HERE] if paper.folder is None else [paper.folder, HERE]
    environment = Environment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        bytecode_cache=COMPILED,
    )
    environment.filters |= FILTERS
    environment.globals |= FUNCTIONS | facts.functions()
    template = environment.get_template("base.md.j2" if paper.folder is None else "page.md.j2")
    text = template.render(paper=paper, document=document, **_about(document, paper))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n", facts.figures


@dataclass
class Facts:
    """What a template can ask of a document."""

    document: Mapping[str, Any]
    figures: dict[str, str] = field(default_factory=dict)

    def functions(self) -> dict[str, Callable[..., Any]]:
        names = ("claim", "value", "verdict", "measured", "numbers", "table", "has", "say", "interval", "figure")
        return {name: getattr(self, name) for name in names}

    def claim(self, id: str) -> Mapping[str, Any]:
        """A claim of the document, measured or not."""
        for entry in self.document["claims"]:
            if entry["id"] == id:
                return entry
        raise KeyError(f"claim {id} is not in this document")

    def measured(self, *ids: str) -> bool:
        """Whether all of these claims are in the document and were measured."""
        present = {entry["id"] for entry in self.document["claims"] if entry["measured"] is not None}
        return present >= set(ids)

    def value(self, id: str) -> float:
        return float(self.claim(id)["measured"])

    def verdict(self, id: str) -> str:
        """holds, fails or undecided; unmeasured where nothing was measured."""
        return str(self.claim(id)["verdict"]) if self.measured(id) else "unmeasured"

    def numbers(self, id: str) -> Mapping[str, Any]:
        """The numbers behind a claim."""
        return self.claim(id)["numbers"]

    def has(self, *names: str) -> bool:
        """Whether studies left tables of these names."""
        return all(any(name in study["tables"] for study in self.document["studies"].values()) for name in names)

    def table(self, name: str) -> Any:
        """A study's table."""
        for study in self.document["studies"].values():
            if name in study["tables"]:
                return study["tables"][name]
        raise KeyError(f"no study of this document has a table {name}")

    def say(self, id: str, *, holds: str, fails: str, undecided: str, unmeasured: str = "") -> str:
        """The sentence that fits the verdict."""
        return {"holds": holds, "fails": fails, "undecided": undecided, "unmeasured": unmeasured}[self.verdict(id)]

    def interval(self, id: str, digits: int = 3, signed: bool = True) -> str:
        """A measurement with its interval: `-0.0083 (-0.0180 to +0.0014)`; a dash where there is none."""
        entry, sign = self.claim(id), "+" if signed else ""
        if entry["measured"] is None:
            return "-"
        middle = f"{entry['measured']:{sign}.{digits}f}"
        if verdict_words.is_open(entry) or not entry["spread"]:
            return middle
        ends = (entry["measured"] - entry["spread"], entry["measured"] + entry["spread"])
        return f"{middle} ({' to '.join(f'{end:{sign}.{digits}f}' for end in ends)})"

    def figure(self, name: str, *panels: Panel | Cells | Field | str, columns: int = 0, words: str = "") -> str:
        """The link to a figure of these panels, or of a drawing that is whole already."""
        first = panels[0]
        self.figures[name] = first if isinstance(first, str) else draw(panels, columns)  # type: ignore[arg-type]
        return f"![{words or name}](figure:{name})"


def _about(document: Mapping[str, Any], paper: Paper) -> dict[str, Any]:
    claims, assumptions = document["claims"], document["assumptions"]
    times = (f"{name} {verdict_words.time_of(assumptions, name)}" for name in assumptions["processor_seconds"])
    return {
        "made_by": _made_by(paper, assumptions),
        "count": verdict_words.count(claims),
        "took": ", ".join(times),
        "open_reasons": verdict_words.reasons(entry for entry in claims if verdict_words.is_open(entry)),
        "waiting": [entry for entry in claims if entry["waits_for"]],
        "measurable": {claim.id for study in paper.studies if study.measure is not None for claim in study.claims},
    }


def _made_by(paper: Paper, assumptions: Mapping[str, Any]) -> str:
    how = " --quick" * assumptions["quick"] + " --runs ..." * ("runs" in assumptions)
    first = f"{paper.source}. Made by `locater reproduce {paper.name}{how} --json ... --report ...`"
    if "joined" in assumptions:
        count = assumptions["joined"]
        return f"{first}, {count} runs joined by `--from`; the JSON beside this page has every number and its command."
    return f"{first}; every number is in the JSON beside this page."


def points(rows: Iterable[Any], x: Any, y: Any, least: float | None = None) -> list[tuple[float, float]]:
    """Points of a curve from two keys of a table's rows; rows that lack one are left out. `least`: drawn there if
    smaller.

    >>> points([{"s": 1, "H": 0.5}, {"s": 2, "H": None}], "s", "H")
    [(1, 0.5)]
    """
    pairs = ((row[x], row[y]) for row in rows)
    known = [(a, b) for a, b in pairs if a is not None and b is not None]
    return known if least is None else [(a, max(b, least)) for a, b in known]


def values_by_arm(arms: Iterable[Mapping[str, Any]], measure: str) -> dict[str, list[float]]:
    """A measure of each arm, seed by seed; arms that lack it are left out.

    >>> values_by_arm([{"arm": "a", "ends": [{"gap": 0.4}, {"gap": None}]}, {"arm": "b", "ends": [{"gap": None}]}], "gap")
    {'a': [0.4]}
    """
    values = {arm["arm"]: [end[measure] for end in arm["ends"] if end[measure] is not None] for arm in arms}
    return {name: known for name, known in values.items() if known}


def changes_by_arm(
    arms: Iterable[Mapping[str, Any]], plain: Mapping[str, Any], measure: str = "loss"
) -> dict[str, list[float]]:
    """A measure of each arm less that of the plain one, by the seeds that both have; the plain one is left out.

    >>> plain = {"arm": "softmax", "ends": [{"loss": 3.0}]}
    >>> changes_by_arm([plain, {"arm": "gated", "ends": [{"loss": 2.5}, {"loss": 2.0}]}], plain)
    {'gated': [-0.5]}
    """
    return {
        arm["arm"]: [end[measure] - base[measure] for end, base in zip(arm["ends"], plain["ends"], strict=False)]
        for arm in arms
        if arm["arm"] != plain["arm"]
    }


FILTERS: dict[str, Callable[..., Any]] = {
    "cell": cell,
    "whose": verdict_words.whose,
    "stated": verdict_words.stated,
    "measured_text": verdict_words.measured,
    "points": points,
    "as_table": markdown_table,
    "renamed": renamed,
    "by_arm": values_by_arm,
    "changes_by_arm": changes_by_arm,
    "arms_table": arms_table,
    "means_table": means_table,
    "number": format,  # {{ x | number(".2f") }}, and every other format of Python
}
FUNCTIONS: dict[str, Callable[..., Any]] = {
    "Panel": Panel,
    "Series": Series,
    "Cells": Cells,
    "Field": Field,
    "Contour": Contour,
    "strips": strips,
    "picture_rows": picture_rows,
    "failed": failed,
    "failed_words": failed_words,
    "max": max,
    "min": min,
    "zip": zip,
    "exp": math.exp,
    "enumerate": enumerate,
}
