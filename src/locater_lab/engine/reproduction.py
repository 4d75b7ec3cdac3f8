"""A paper as a list of studies, each of which measures once and decides several claims; and one run over them."""

from __future__ import annotations

import json
import math
import os
import platform
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field, fields, replace
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
from locater_lab.engine.claims import Claim, ClaimVerdict, Kind, Measurement, judge_together, verdict_of
from locater_lab.engine.provenance import origin_here, origin_of_lines


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


NOT_QUICK = "a run without --quick, or with its claim named"
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
    origin: Mapping[str, Any] | None = None  # of kept training runs that it rests on (`provenance.py`)


@dataclass(frozen=True)
class TimedResults:
    """Results of a study, and what they took."""

    results: Results
    seconds: float  # by the clock
    processor_seconds: float
    origin: Mapping[str, Any] = field(default_factory=dict)
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
    quick: bool = True  # whether a quick run of a whole paper measures it


@dataclass(frozen=True)
class Paper:
    """A paper, or a study of our own: `name` is what the command line calls it. `folder` has its page.md.j2; without, a
    page has verdicts alone.

    `template_names` are further functions and numbers that its template uses. `page` says where below docs/ its page is
    kept, without the suffix; the document is kept in docs/results under the same name. `kept` are the files of
    docs/results that it judges, where they are not lines of training runs that the engine made.

    What its claims are tested by stands here, for all of them at a glance: ids, or letters for whole groups, where an id
    counts before its letter. `kinds`: the kind of test of each. `scaled`: those that are tested outside of their authors'
    own setting. `one_run`: those that rest on one training run. `seen`: those whose conditions were chosen after their
    outcome had been seen. `within`: what quantities can be.

    What its page begins with: `says`, what the paper says, in a sentence of ours; `beliefs`, by the ids of claims, the
    clause that is believed where these hold (`beliefs.py`); `cover`, one of its figures.
    """

    name: str
    title: str
    source: str
    studies: tuple[Study, ...]
    folder: Path | None = None
    template_names: Mapping[str, Any] = field(default_factory=dict)
    page: str = ""
    kept: tuple[str, ...] = ()
    kinds: Mapping[Kind, str] = field(default_factory=dict)
    scaled: str = ""
    one_run: str = ""
    seen: str = ""
    within: Mapping[tuple[float | None, float | None], str] = field(default_factory=dict)
    says: str = ""
    beliefs: Mapping[str, str] = field(default_factory=dict)
    cover: str = ""

    def __post_init__(self) -> None:
        """Give each claim what is stated here of it. A claim of a paper that states kinds must have one."""
        kinds, ranges = _by_name(self.kinds), _by_name(self.within)
        scaled, one_run, seen = (_by_name({True: names}) for names in (self.scaled, self.one_run, self.seen))

        def stated(claim: Claim) -> Claim:
            kind = _named(claim, kinds)
            if self.kinds and kind is None:
                raise ValueError(f"{self.name}: claim {claim.id} has no kind of test")
            return replace(
                claim,
                kind=kind or claim.kind,
                setting="scaled" if _named(claim, scaled) else claim.setting,
                one_run=bool(_named(claim, one_run)) or claim.one_run,
                seen=bool(_named(claim, seen)) or claim.seen,
                within=_named(claim, ranges) or claim.within,
            )

        studies = tuple(replace(study, claims=tuple(map(stated, study.claims))) for study in self.studies)
        object.__setattr__(self, "studies", studies)

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


def _by_name(stated: Mapping[Any, str]) -> dict[str, Any]:
    """What is stated, by id or letter."""
    return {name: value for value, names in stated.items() for name in names.split()}


def _named(claim: Claim, stated: Mapping[str, Any]) -> Any:
    return stated.get(claim.id, stated.get(claim.id[0]))


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
        measured_now = is_measured(study, setting.quick, claim is not None)
        result = done.get(study.title) or (
            measure_timed(study, setting) if measured_now else TimedResults(Results({}), 0.0, 0.0)
        )
        if measured_now:
            times[study.title] = result
        if result.results.tables:
            tables[study.title] = result.results.tables
        for each in study.claims:
            if each.id in ids:
                measured = result.results.measured.get(each.id)
                how = command_for(paper, each, study, setting, measured is not None)
                verdicts.append(
                    verdict_of(each, measured, how, study.needs if study.quick else study.needs or NOT_QUICK)
                )
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
    spent = time.perf_counter() - clock, _processor_seconds() - processor
    return TimedResults(results, *spent, results.origin or _origin(study, setting), text)


def _origin(study: Study, setting: Setting) -> Mapping[str, Any]:
    """Of the lines of its file where a study reads runs, else of here and now."""
    if study.on_runs and setting.runs is not None and setting.runs.is_file():
        files = [path for path in (*setting.more_runs, setting.runs) if path.suffix == ".jsonl"]
        return origin_of_lines(
            json.loads(line) for path in files for line in path.read_text(encoding="utf-8").splitlines()
        )
    return origin_here("CPU" if setting.quick or not torch.cuda.is_available() else torch.cuda.get_device_name())


def is_measured(study: Study, quick: bool, asked: bool = False) -> bool:
    """Whether a run measures a study; one that is not quick is left out of a quick run, unless asked for by its claims."""
    return study.measure is not None and (study.quick or not quick or asked)


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
    for name in ("seconds", "processor_seconds", "origins"):
        assumptions[name] = {k: v for document in documents for k, v in document["assumptions"].get(name, {}).items()}
    assumptions["quick"] = all(document["assumptions"]["quick"] for document in documents)
    for name in ("torch", "python"):
        versions = {part for document in documents for part in document["assumptions"][name].split(", ")}
        assumptions[name] = ", ".join(sorted(versions))
    if len(documents) > 1:
        assumptions["joined"] = len(documents)
    verdicts = judge_together([_as_verdict(claims[name]) for name in ids])
    judged = {v.claim.id: {key: getattr(v, key) for key in JUDGED} for v in verdicts}
    return {
        **documents[-1],
        "assumptions": assumptions,
        "claims": [claims[name] | judged[name] for name in ids],
        "studies": {title: {"tables": tables[title]} for title in titles},
    }


JUDGED = ("verdict", "decided", "undecided_by")  # what judging together changes of a claim
STATED = ("stated", "relation", "tolerance")  # what a kept p is of


def _as_verdict(entry: Mapping[str, Any], claim: Claim | None = None) -> ClaimVerdict:
    """A claim of a document with its numbers as they were measured, not judged yet; under what is stated of it now where
    that is given.
    """
    if claim is None:
        known = {part.name: entry[part.name] for part in fields(Claim) if part.name in entry}
        claim = Claim(**known, says=entry["claim"])
    p, alone = entry.get("p"), entry.get("alone", entry["verdict"])
    p = None if p is None else min(max(p, 0.0), 1.0)
    if entry["measured"] is None:
        return verdict_of(claim, None, entry["command"], entry["waits_for"])
    return ClaimVerdict(
        claim, claim.stated, entry["measured"], entry["spread"], alone, alone != "undecided", entry["command"], entry["numbers"],
        entry["spread_of"], p=p, alone=alone, values=entry.get("values", _values_of(entry)),
    )  # fmt: skip


def _values_of(entry: Mapping[str, Any]) -> int | None:
    """How many values stand behind a claim of a document that does not say so; None where it rests on no sample."""
    numbers = entry["numbers"].get("by_seed")
    said = re.search(r"interval \(t\) over (\d+)", entry["spread_of"])
    return None if entry.get("p") is None else len(numbers) if numbers else int(said[1]) if said else None


def judge_again(document: Mapping[str, Any], paper: Paper, anew: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """A kept document under the claims and rules of now; `anew` is a document of the studies that were measured now.

    All other numbers stay as they were measured, and `assumptions` says by which version. A claim whose statement has
    changed since then needs a new measurement: it is refused here.
    """
    now: Mapping[str, Any] = anew or {"claims": (), "studies": {}, "assumptions": {}}
    held = {entry["id"]: entry for entry in (*document["claims"], *now["claims"])}
    verdicts = []
    for study in paper.studies:
        for claim in study.claims:
            entry = held.get(claim.id)
            if entry is None:
                how = f"locater reproduce {paper.name} --claim {claim.id}"
                verdicts.append(verdict_of(claim, None, how, study.needs))
                continue
            changed = [key for key in STATED if entry[key] != getattr(claim, key)]
            if entry["measured"] is not None and changed:
                raise LocaterError(
                    f"{paper.name} {claim.id}: {changed[0]} has changed since it was measured: measure it again"
                )
            verdicts.append(_as_verdict(entry, claim))
    earlier = document["assumptions"]
    since = {"measured_by": earlier.get("judged_again", {}).get("measured_by", document["locater"])}
    since["judged_by"] = __version__
    since["measured_again"] = list(now["assumptions"].get("seconds", ()))
    runs = {key: now["assumptions"][key] for key in ("runs",) if key in now["assumptions"]}
    unknown = {"devices": [f"locater {since['measured_by']}"], "dates": [], "commits": {"": 1}}
    origins = {title: {**earlier.get("origins", {}).get(title, unknown), "kept": True} for title in earlier["seconds"]}
    origins |= now["assumptions"].get("origins", {})
    about = {**earlier, **runs, **_rules(), "judged_again": since, "origins": origins}
    tables = {title: study["tables"] for title, study in {**document["studies"], **now["studies"]}.items()}
    ordered = {study.title: tables[study.title] for study in paper.studies if study.title in tables}
    return Reproduction(paper, judge_together(verdicts), about, ordered).to_dict()


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
        "origins": {title: dict(x.origin) for title, x in times.items()},
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
    return about | _rules()


def _rules() -> dict[str, str]:
    """What a document says of its verdicts."""
    text = (
        "holds or fails where all of measured - spread ... measured + spread is on one side of what is stated, else "
        "undecided; claims on seeds by Student's t, those of one document and one author together (Holm, 5 %); "
        "`undecided_by` names a rule that keeps a claim open"
    )
    return {"verdict": text}


@cache
def _text() -> str:
    return embedded_text()


def _processor_seconds() -> float:
    """Seconds of processors so far, in this process and in those it has waited for."""
    spent = os.times()
    return spent.user + spent.system + spent.children_user + spent.children_system
