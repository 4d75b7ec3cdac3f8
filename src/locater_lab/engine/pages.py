"""The page of a paper: a template beside its studies, filled from the JSON document alone.

A template (page.md.j2, Jinja2) extends the one of this folder and fills three blocks: `differs`, rows of a table that
says how what was run differs from what the paper ran; `short`, what came out in plain words; `sections`, the rest in
the paper's order. It asks for numbers by name, and says one thing where a claim holds, another where it fails, a third
where it is open. A name that is not there is an error, not an empty space.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from html import escape
from pathlib import Path
from statistics import fmean
from typing import Any

from jinja2 import BytecodeCache, Environment, FileSystemLoader, StrictUndefined
from jinja2.bccache import Bucket

from locater.files import write_whole
from locater.report.pages import prose_page
from locater_lab.engine import verdict_text
from locater_lab.engine.beliefs import believed
from locater_lab.engine.figures import COLOURS, Cells, Contour, Field, Panel, Series, draw, picture_rows
from locater_lab.engine.provenance import MEASURED_NOW, origin_text
from locater_lab.engine.reproduction import Paper

# Tables of Markdown, those of arms of training runs among them, and which arms failed.


FAR = 1.0  # nats above the plain arm: a run that failed
ARM = {"arm": "arm", "rate": ("rate", "g")}  # the first columns of arms


def markdown_table(rows: Iterable[Mapping[str, Any]], columns: Mapping[str, Sequence[str] | str]) -> str:
    """A table: `columns` gives each key its heading, and a format where it is a number.

    >>> print(markdown_table([{"model": "demo", "loss": 1.234}], {"model": "model", "loss": ("loss", ".2f")}))
    | model | loss |
    |---|---|
    | demo | 1.23 |
    """
    named = {key: (column, "") if isinstance(column, str) else tuple(column) for key, column in columns.items()}
    lines = ["| " + " | ".join(heading for heading, _ in named.values()) + " |", "|---" * len(named) + "|"]
    for row in rows:
        cells = ("-" if row.get(key) is None else cell(format(row[key], form)) for key, (_, form) in named.items())
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def cell(text: str) -> str:
    """Text without bars of its own."""
    return text.replace("|", "\\|")


def arms_table(arms: Iterable[Mapping[str, Any]], columns: Mapping[str, str]) -> str:
    """A row per arm: its rate, and each column's numbers by seed. `columns` says what the keys of an end are called.

    >>> arm = {"arm": "softmax", "rate": 0.001, "ends": [{"loss": 3.21}, {"loss": None}]}
    >>> arms_table([arm], {"loss": "report loss"}).splitlines()[-1]
    '| softmax | 0.001 | 3.210, - |'
    """
    rows = ({**arm, **{key: _by_seed(arm["ends"], key, 3) for key in columns}} for arm in arms)
    return markdown_table(rows, {**ARM, **columns})


def means_table(
    arms: Iterable[Mapping[str, Any]], columns: Mapping[str, tuple[str, int]], names: Mapping[str, str] | None = None
) -> str:
    """A row per arm: its rate, its losses by seed, and means over seeds. `columns` says what keys of an end are called,
    and their digits; `names` what arms are called.

    >>> arm = {"arm": "softmax", "rate": 0.001, "ends": [{"loss": 3.2, "gap": 0.4}, {"loss": 3.3, "gap": 0.5}]}
    >>> means_table([arm], {"gap": ("gap", 2)}).splitlines()[-1]
    '| softmax | 0.001 | 3.2000, 3.3000 | 0.45 |'
    """
    rows = (
        {**arm, "losses": _by_seed(arm["ends"], "loss", 4), **{key: _mean(arm["ends"], key) for key in columns}}
        for arm in rename_arms(arms, names or {})
    )
    means = {key: (heading, f".{digits}f") for key, (heading, digits) in columns.items()}
    return markdown_table(rows, {**ARM, "losses": "report loss, by seed", **means})


def rename_arms(arms: Iterable[Mapping[str, Any]], names: Mapping[str, str]) -> list[dict[str, Any]]:
    """Arms of training runs under the names that a page has for them.

    >>> rename_arms([{"arm": "gated"}, {"arm": "softmax"}], {"gated": "gate per head"})
    [{'arm': 'gate per head'}, {'arm': 'softmax'}]
    """
    return [{**arm, "arm": names.get(arm["arm"], arm["arm"])} for arm in arms]


def failed_arms(arms: Sequence[Mapping[str, Any]], plain: Mapping[str, Any], far: float = FAR) -> dict[str, str]:
    """Arms with a seed that ended more than `far` nats above the plain arm's, and how many of their seeds did.

    >>> plain = {"arm": "softmax", "ends": [{"loss": 3.0}, {"loss": 3.1}]}
    >>> failed_arms([plain, {"arm": "other", "ends": [{"loss": 3.0}, {"loss": 6.0}]}], plain)
    {'other': '1 of 2'}
    """
    counts = {}
    for arm in arms:
        above = [end["loss"] - base["loss"] > far for end, base in zip(arm["ends"], plain["ends"], strict=False)]
        if any(above):
            counts[arm["arm"]] = f"{sum(above)} of {len(above)}"
    return counts


def failed_sentence(lost: Mapping[str, str], far: float = FAR) -> str:
    """One sentence, or nothing.

    >>> failed_sentence({"other": "1 of 2"}), failed_sentence({})
    ('Seeds that failed, more than 1 nat above the plain arm: other (1 of 2).', '')
    """
    named = ", ".join(f"{name} ({count})" for name, count in lost.items())
    return f"Seeds that failed, more than {far:g} nat above the plain arm: {named}." if named else ""


def _by_seed(ends: Sequence[Mapping[str, Any]], key: str, digits: int) -> str:
    return ", ".join("-" if end.get(key) is None else f"{end[key]:.{digits}f}" for end in ends)


def _mean(ends: Sequence[Mapping[str, Any]], key: str) -> float | None:
    values = [end[key] for end in ends if end.get(key) is not None]
    return fmean(values) if values else None


# A figure for many arms: a row for each, a dot for each seed, a bar at their mean. Plain SVG, as in `figures.py`.


ROW, LABELS, PLOT, TOP, BOTTOM, RIGHT = 22, 190, 420, 34, 40, 20


def strip_chart(title: str, x: str, rows: Mapping[str, Sequence[float]]) -> str:
    """Rows in the order given; a line marks zero.

    >>> strip_chart("gain", "nats", {"a": [-0.1, 0.2]}).count("<circle")
    2
    """
    values = [value for held in rows.values() for value in held]
    step = _step((max(*values, 0.0) - min(*values, 0.0)) or 1.0)
    low, high = math.floor(min(*values, 0.0) / step) * step, math.ceil(max(*values, 0.0) / step) * step
    high += step * (high == low)  # all of them zero
    width, bottom = LABELS + PLOT + RIGHT, TOP + ROW * len(rows)

    def at(value: float) -> float:
        return LABELS + PLOT * (value - low) / (high - low)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {bottom + BOTTOM}" width="{width}" height="{bottom + BOTTOM}" '
        'font-family="system-ui, sans-serif" font-size="11" fill="#222">',
        f'<rect width="{width}" height="{bottom + BOTTOM}" fill="#fff"/>',
        f'<text x="{LABELS}" y="18" font-weight="600">{escape(title)}</text>',
        f'<text x="{LABELS + PLOT / 2}" y="{bottom + BOTTOM - 6}" text-anchor="middle">{escape(x)}</text>',
    ]
    for number in range(round((high - low) / step) + 1):
        tick = low + number * step
        stroke = "#555" if abs(tick) < step / 2 else "#e2e2e2"
        parts.append(f'<line x1="{at(tick):.1f}" y1="{TOP}" x2="{at(tick):.1f}" y2="{bottom}" stroke="{stroke}"/>')
        parts.append(f'<text x="{at(tick):.1f}" y="{bottom + 15}" text-anchor="middle">{round(tick, 10):g}</text>')
    for number, (name, held) in enumerate(rows.items()):
        y, mean = TOP + ROW * (number + 0.5), sum(held) / len(held)
        parts.append(f'<text x="{LABELS - 8}" y="{y + 4}" text-anchor="end">{escape(name)}</text>')
        parts.append(
            f'<line x1="{at(mean):.1f}" y1="{y - 7}" x2="{at(mean):.1f}" y2="{y + 7}" stroke="{COLOURS[1]}" stroke-width="2"/>'
        )
        parts += [
            f'<circle cx="{at(value):.1f}" cy="{y}" r="3.5" fill="{COLOURS[0]}" fill-opacity="0.75"/>' for value in held
        ]
    return "\n".join([*parts, "</svg>", ""])


def _step(span: float) -> float:
    """Between ticks: 1, 2 or 5 of a power of ten, for five of them or a few more."""
    power = 10.0 ** math.floor(math.log10(span / 5))
    return next(power * digit for digit in (1, 2, 5, 10) if span / (power * digit) <= 7)


TEMPLATES = Path(__file__).parent


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
    folders = [TEMPLATES] if paper.folder is None else [paper.folder, TEMPLATES]
    environment = Environment(
        loader=FileSystemLoader(folders),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        bytecode_cache=COMPILED,
    )
    environment.filters |= FILTERS
    environment.globals |= {**FUNCTIONS, **facts.functions(), **paper.template_names}
    template = environment.get_template("base.md.j2" if paper.folder is None else "page.md.j2")
    text = template.render(paper=paper, document=document, **_template_variables(document, paper))
    text = text.replace(COVER, _cover(text, paper))
    return re.sub(r"\n{3,}", "\n\n", text).strip("\n") + "\n", facts.figures


COVER = "@COVER@"  # where base.md.j2 wants the figure on top, which is drawn further below


def _cover(text: str, paper: Paper) -> str:
    """The link to the figure on top; nothing where the document lacks the numbers for it."""
    drawn = re.search(rf"!\[[^\]]*\]\(figure:{re.escape(paper.cover)}\)", text) if paper.cover else None
    return drawn[0] if drawn else ""


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

    def say(self, id: str, *, holds: str, fails: str, undecided: str, unmeasured: str = "", otherwise: str = "") -> str:
        """The sentence that fits the verdict. `otherwise` is said of a claim that came out otherwise in a setting that
        cannot fail its paper; without it such a claim is undecided, and that is added.
        """
        words = {"holds": holds, "fails": fails, "undecided": undecided, "unmeasured": unmeasured}[self.verdict(id)]
        if self.verdict(id) == "undecided" and verdict_text.came_out_otherwise(self.claim(id)):
            return otherwise or f"{words} ({verdict_text.OTHERWISE_SHORT})"
        return words

    def interval(self, id: str, digits: int = 3, signed: bool = True) -> str:
        """A measurement with its interval: `-0.0083 (-0.0180 to +0.0014)`; a dash where there is none."""
        entry, sign = self.claim(id), "+" if signed else ""
        if entry["measured"] is None:
            return "-"
        middle = f"{entry['measured']:{sign}.{digits}f}"
        if verdict_text.is_open(entry) or not entry["spread"]:
            return middle
        return f"{middle} ({' to '.join(f'{end:{sign}.{digits}f}' for end in verdict_text.possible_ends(entry))})"

    def figure(self, name: str, *panels: Panel | Cells | Field | str, columns: int = 0, words: str = "") -> str:
        """The link to a figure of these panels, or of a drawing that is whole already."""
        first = panels[0]
        self.figures[name] = first if isinstance(first, str) else draw(panels, columns)  # type: ignore[arg-type]
        return f"![{words or name}](figure:{name})"


def _template_variables(document: Mapping[str, Any], paper: Paper) -> dict[str, Any]:
    claims, assumptions = document["claims"], document["assumptions"]
    times = (f"{name} {verdict_text.time_text(assumptions, name)}" for name in assumptions["processor_seconds"])
    return {
        "made_by": _made_by(paper, assumptions),
        "count": verdict_text.count_by_author(claims),
        "took": ", ".join(times),
        "families": {author: own for author in verdict_text.AUTHORS if (own := _of_author(claims, author))},
        "authors": verdict_text.AUTHORS,
        "believed": believed(document, paper),
        "headline": verdict_text.last_sentence({**document, "paper": paper.name}),
        "origins": _origins(document, paper),
        "open_reasons": verdict_text.reasons(entry for entry in claims if not entry["waits_for"]),
        "waiting": [entry for entry in claims if entry["waits_for"]],
        "measurable": {claim.id for study in paper.studies if study.measure is not None for claim in study.claims},
    }


def _origins(document: Mapping[str, Any], paper: Paper) -> dict[str, dict[str, str]]:
    """Of each claim that was measured, by its id: measured now, or which of the notes says where, when and by which code
    it was.
    """
    about = document["assumptions"]
    known = about.get("origins", {})
    measured = {entry["id"] for entry in document["claims"] if entry["measured"] is not None}
    by_claim: dict[str, str] = {}
    notes: dict[str, str] = {}  # by their words
    for study in paper.studies:
        words = (
            origin_text(known[study.title])
            if study.title in known
            else f"locater {document['locater']}, commit not recorded"
        )
        for claim in study.claims:
            if claim.id in measured:
                now = words == MEASURED_NOW
                by_claim[claim.id] = words if now else notes.setdefault(words, f"kept [{len(notes) + 1}]")
    return {"by_claim": by_claim, "notes": {note: words for words, note in notes.items()}}


def _of_author(claims: Sequence[Mapping[str, Any]], author: str) -> list[Mapping[str, Any]]:
    return [entry for entry in verdict_text.in_order(claims) if entry["by"] == author]


def _made_by(paper: Paper, assumptions: Mapping[str, Any]) -> str:
    how = " --quick" * assumptions["quick"] + " --runs ..." * ("runs" in assumptions)
    first = f"{paper.source}. Made by `locater reproduce {paper.name}{how} --json ... --report ...`"
    again = assumptions.get("judged_again")
    if again is not None:
        return (
            f"{first}, and judged again by `--again` with locater {again['judged_by']}: numbers are as they were measured with "
            f"{again['measured_by']}, those from training runs read again; every number is in the JSON beside this page."
        )
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
    "of": lambda key, mapping: mapping[key],
    "whose": verdict_text.author_text,
    "verdict": verdict_text.verdict_cell,
    "stated": verdict_text.stated_text,
    "measured_text": verdict_text.measured_text,
    "points": points,
    "as_table": markdown_table,
    "renamed": rename_arms,
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
    "strips": strip_chart,
    "picture_rows": picture_rows,
    "failed": failed_arms,
    "failed_words": failed_sentence,
    "max": max,
    "min": min,
    "zip": zip,
    "exp": math.exp,
    "enumerate": enumerate,
}
