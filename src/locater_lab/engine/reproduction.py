"""A paper as a list of studies, each of which measures once and decides several claims; and one run over them."""

from __future__ import annotations

import json
import math
import os
import platform
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import cache, cached_property
from pathlib import Path
from typing import Any, TypeVar

import torch

from locater.defaults import Progress
from locater.errors import LocaterError
from locater.files import write_whole
from locater.inputs.corpus import embedded_text, fingerprint
from locater.numerics import one_thread
from locater.version import SCHEMA, __version__
from locater_lab.engine.claims import Claim, ClaimVerdict, Measurement, corrections, judge_together, verdict_of


def round_numbers(x: Any, digits: int) -> Any:
    """Data for JSON with so many digits of every number, which has no place for NaN and infinity.

    >>> round_numbers({"loss": (1.23456, float("nan")), 2: "seeds"}, 3)
    {'loss': [1.23, None], '2': 'seeds'}
    """
    if isinstance(x, float):
        return float(f"{x:.{digits}g}") if math.isfinite(x) else None
    if isinstance(x, Mapping):
        return {str(key): round_numbers(value, digits) for key, value in x.items()}
    return [round_numbers(value, digits) for value in x] if isinstance(x, list | tuple) else x


DIGITS = 5  # more than any of these numbers has
Part = TypeVar("Part")


@dataclass(frozen=True)
class Setting:
    """What a study may use: how long it may take, where more trained models are, and the text that they are run on.

    Studies of training runs read `runs`, lines of JSON, and `more_runs`; with `jobs` they make the lines that `runs`
    lacks, so many at a time, on what is in the folder `data`. `log` is given a line as each study begins.
    """

    quick: bool = True
    models: Path | None = None
    progress: Progress | None = None
    runs: Path | None = None
    data: Path | None = None
    jobs: int = 0
    log: Callable[[str], None] = lambda text: None
    more_runs: tuple[Path, ...] = ()

    @cached_property
    def text(self) -> str:
        """The documentation inside Python; built when a process first asks for it, which takes seconds."""
        return _text()

    def each(self, parts: list[Part]) -> Iterable[Part]:
        """The parts of a study, with a bar where there is a terminal."""
        return parts if self.progress is None else self.progress(parts, len(parts))


@dataclass(frozen=True)
class Results:
    """What a study brings home: a measurement for each claim that it could measure, and tables for the page.

    Tables are data that JSON can hold (lists of rows, curves, settings), by a name that is the paper's own: the page
    reads them, verdicts do not.
    """

    measured: Mapping[str, Measurement | None]
    tables: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TimedResults:
    """Results of a study, and what they took."""

    results: Results
    seconds: float  # by the clock
    processor_seconds: float
    text_sha256: str | None = None  # of `Setting.text`, where this study or one before it read that


@dataclass(frozen=True)
class Study:
    """One measurement and the claims it decides. `measure` is None where it cannot be run yet, and `needs` says what it
    waits for.
    """

    title: str
    claims: tuple[Claim, ...]
    measure: Callable[[Setting], Results | Mapping[str, Measurement | None]] | None = None
    needs: str = ""  # what an undecided study waits for
    on_models: bool = False  # whether it runs trained models, those of `Setting.models` too
    on_runs: bool = False  # whether it judges training runs
    needs_data: bool = True  # whether making those runs reads files; False where the training data is drawn at random
    rows: Callable[[Any], list[Any]] | None = None  # of those, given the runs that there are (`runs.Runs`)


@dataclass(frozen=True)
class Paper:
    """A paper, or a study of our own: `name` is what the command line calls it. `folder` has its page.md.j2; without, a
    page has verdicts alone.

    `template_names` are further functions and numbers that its template uses. `page` says where below docs/ its page is
    kept, without the suffix; the document is kept in docs/results under the same name. `kept` are the files of
    docs/results that it judges, where they are not lines of training runs that the engine made.
    """

    name: str
    title: str
    source: str
    studies: tuple[Study, ...]
    folder: Path | None = None
    template_names: Mapping[str, Any] = field(default_factory=dict)
    page: str = ""
    kept: tuple[str, ...] = ()

    @property
    def page_file(self) -> str:
        """The kept page, below docs/."""
        return f"{self.page or f'results/{self.name}'}.md"

    @property
    def document_file(self) -> str:
        """The kept document, below docs/."""
        return f"results/{Path(self.page_file).stem}.json"

    @property
    def claims(self) -> list[Claim]:
        return [claim for study in self.studies for claim in study.claims]


@dataclass(frozen=True)
class Reproduction:
    """Verdicts of a paper's claims, and the tables of its studies."""

    paper: Paper
    verdicts: tuple[ClaimVerdict, ...]
    assumptions: dict[str, Any] = field(default_factory=dict)
    tables: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # by study, then by name

    def to_dict(self) -> dict[str, Any]:
        """The JSON document: schema, locater, source, paper, assumptions, claims, studies."""
        return {
            "schema": SCHEMA,
            "locater": __version__,
            "source": self.paper.source,
            "paper": self.paper.name,
            "assumptions": self.assumptions,
            "claims": [round_numbers(v.to_dict(), DIGITS) for v in self.verdicts],
            "studies": round_numbers({title: {"tables": tables} for title, tables in self.tables.items()}, DIGITS),
        }

    def to_json(self) -> str:
        return json.dumps(self.to_dict(), indent=1, allow_nan=False)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the JSON document; the file appears whole or not at all."""
        write_whole(Path(path), self.to_json() + "\n")


def reproduce(
    paper: Paper,
    setting: Setting | None = None,
    claim: str | None = None,
    done: Mapping[str, TimedResults] | None = None,
) -> Reproduction:
    """Measure what can be measured and judge every claim, or those that `claim` names: an id (`a2`) or a letter for its
    group. Claims that rest on seeds are judged together, as many as are measured here. `done` has results of studies
    that were measured already, by title.
    """
    setting, done = setting or Setting(), done or {}
    ids = {c.id for c in select_claims(paper, claim)}
    verdicts: list[ClaimVerdict] = []
    tables: dict[str, Mapping[str, Any]] = {}
    times: dict[str, TimedResults] = {}
    studies = studies_of(paper, claim)
    start = time.perf_counter()
    for number, study in enumerate(studies, 1):
        if study.title not in done:
            since = time.perf_counter() - start
            setting.log(f"{paper.name}: study {number} of {len(studies)}, {study.title} ({since:.0f} s so far)")
        result = done.get(study.title) or measure_timed(study, setting)
        if study.measure is not None:
            times[study.title] = result
        if result.results.tables:
            tables[study.title] = result.results.tables
        for each in study.claims:
            if each.id in ids:
                measured = result.results.measured.get(each.id)
                how = command_for(paper, each, study, setting, measured is not None)
                verdicts.append(verdict_of(each, measured, how, study.needs))
    return Reproduction(paper, judge_together(verdicts), _assumptions(setting, times), tables)


def studies_of(paper: Paper, claim: str | None) -> list[Study]:
    """The studies that decide the claims of this name."""
    ids = {c.id for c in select_claims(paper, claim)}
    return [study for study in paper.studies if ids & {c.id for c in study.claims}]


def measure_timed(study: Study, setting: Setting) -> TimedResults:
    """One study, and what it took."""
    clock, processor = time.perf_counter(), _processor_seconds()
    results = measure(study, setting)
    text = fingerprint(setting.text) if "text" in vars(setting) else None
    return TimedResults(results, time.perf_counter() - clock, _processor_seconds() - processor, text)


def measure(study: Study, setting: Setting) -> Results:
    """One study; quick ones are small, and a team of threads costs them more than it brings."""
    if study.measure is None:
        return Results({})
    with one_thread() if setting.quick else nullcontext():
        results = study.measure(setting)
    return results if isinstance(results, Results) else Results(results)


def join_documents(documents: Sequence[dict[str, Any]], paper: Paper) -> dict[str, Any]:
    """Several runs as one document: of a claim or a table that several measured, the last; in the paper's order, judged
    together. `command_for` tells how each was run.
    """
    claims: dict[str, dict[str, Any]] = {}
    tables: dict[str, dict[str, Any]] = {}
    for document in documents:
        for claim in document["claims"]:  # one that was measured is not replaced by one that was not
            if claim["measured"] is not None or claims.get(claim["id"], claim)["measured"] is None:
                claims[claim["id"]] = claim
        for title, study in document.get("studies", {}).items():
            tables.setdefault(title, {}).update(study["tables"])
    ids = [each.id for each in paper.claims if each.id in claims]
    titles = [study.title for study in paper.studies if study.title in tables]
    assumptions = dict(documents[-1]["assumptions"])
    for name in ("seconds", "processor_seconds"):
        assumptions[name] = {k: v for document in documents for k, v in document["assumptions"][name].items()}
    assumptions["quick"] = all(document["assumptions"]["quick"] for document in documents)
    for name in ("torch", "python"):
        versions = {part for document in documents for part in document["assumptions"][name].split(", ")}
        assumptions[name] = ", ".join(sorted(versions))
    if len(documents) > 1:
        assumptions["joined"] = len(documents)
    changes = corrections({key: (x["p"], x["alone"]) for key, x in claims.items() if x.get("p") is not None})
    claims = {key: {**entry, **changes.get(key, {})} for key, entry in claims.items()}
    return {
        **documents[-1],
        "assumptions": assumptions,
        "claims": [claims[name] for name in ids],
        "studies": {title: {"tables": tables[title]} for title in titles},
    }


def select_claims(paper: Paper, claim: str | None) -> list[Claim]:
    """The claims that a name stands for, all without one."""
    found = [c for c in paper.claims if claim is None or c.id == claim or c.id[0] == claim]
    if not found:
        raise LocaterError(
            f"--claim {claim}: {paper.name} has no such claim; there are {', '.join(c.id for c in paper.claims)}"
        )
    return found


def command_for(paper: Paper, claim: Claim, study: Study, setting: Setting, measured: bool) -> str:
    """What decides a claim from a shell; one that was not measured may need more than a quick run."""
    how = " --quick" if setting.quick and measured and not study.on_runs else ""
    where = " --models FOLDER" if study.on_models and setting.models else " --runs FILE" if study.on_runs else ""
    return f"locater reproduce {paper.name} --claim {claim.id}{how}{where}"


def _assumptions(setting: Setting, times: Mapping[str, TimedResults]) -> dict[str, Any]:
    about: dict[str, Any] = {
        "quick": setting.quick,
        "seconds": {title: round(x.seconds, 1) for title, x in times.items()},
        "processor_seconds": {title: round(x.processor_seconds, 1) for title, x in times.items()},
        "torch": torch.__version__,
        "python": platform.python_version(),
    }
    about["threads"] = 1 if setting.quick else torch.get_num_threads()
    if setting.runs is not None and setting.runs.is_file():
        text = "".join(path.read_text(encoding="utf-8") for path in (*setting.more_runs, setting.runs))
        about["runs"] = {"lines": len(text.splitlines()), "sha256": fingerprint(text)}
    texts = {x.text_sha256 for x in times.values()} - {None}
    if texts:
        (about["text_sha256"],) = texts
    about["verdict"] = (
        "holds or fails where all of measured - spread ... measured + spread is on one side of what is stated, else "
        "undecided; claims on seeds by Student's t, those of one document together (Holm, 5 %)"
    )
    return about


@cache
def _text() -> str:
    return embedded_text()


def _processor_seconds() -> float:
    """Seconds of processors so far, in this process and in those it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
