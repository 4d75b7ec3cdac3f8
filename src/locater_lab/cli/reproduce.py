"""`locater reproduce`: options, files and the terminal; the work is in the engine and in the papers.

They are imported inside functions: the list of commands loads this module.
"""

from __future__ import annotations

import json as jsonlib
import sys
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from locater.cli.shell import Command, check_writable, examples_text, show_progress, stdout_console
from locater.errors import LocaterError
from locater.files import write_whole

if TYPE_CHECKING:
    from locater_lab.engine.claims import Claim
    from locater_lab.engine.reproduction import Paper

HELP = (
    "Test the claims of a paper: what it states beside what is measured, with spread and verdict. "
    "A claim that fails is a finding, not an error."
)
EXAMPLES = (
    "locater reproduce --list",
    "locater reproduce bao2024 --quick --report bao2024.html",
    "locater reproduce zoo --claim f",
)


def build() -> Any:
    app = typer.Typer(add_completion=False)
    app.command("reproduce", cls=Command, help=HELP, epilog=examples_text(*EXAMPLES))(run)
    return typer.main.get_command(app)


# ---- The command: options, files and the terminal ----


Names = Annotated[
    list[str] | None, typer.Argument(metavar="[PAPER]...", help="Names of papers from --list; without any, all papers.")
]
Quick = Annotated[bool, typer.Option("--quick", help="Run smaller measurements, which take minutes on two cores.")]
Listed = Annotated[bool, typer.Option("--list", help="List papers and their claims; measure nothing.")]
ClaimId = Annotated[
    str | None, typer.Option("--claim", metavar="ID", help="Test one claim (a2), or all claims of a letter (a).")
]
Json = Annotated[
    str | None,
    typer.Option(
        "--json",
        metavar="PATH",
        help="Write the data as JSON; - for standard output; NAME in the path stands for the paper's name.",
    ),
]
Report = Annotated[
    str | None,
    typer.Option(
        "--report", metavar="PATH", help="Write an HTML page that works offline (.html), or one in Markdown (.md)."
    ),
]
Figures = Annotated[
    str | None,
    typer.Option(
        "--figures", metavar="FOLDER", help="Folder for the figures of a Markdown page. Default: that of the page."
    ),
]
Models = Annotated[
    str | None, typer.Option("--models", metavar="FOLDER", help="Folder of further trained models to test claims on.")
]
Runs = Annotated[
    str | None,
    typer.Option("--runs", metavar="PATH", help="Training runs to judge claims by. Default: those in docs/results."),
]
Data = Annotated[
    str | None,
    typer.Option(
        "--data",
        metavar="FOLDER",
        help="Data to train on: speeches.tar.xz and fashion.npz for --jobs, wikipedia/ and wikipedia-2/ for bao2024, wikipedia/ for "
        "sun2026 and qiu2025, rte/ for dong2021, fashion.npz for sahiner2022.",
    ),
]
Jobs = Annotated[
    int,
    typer.Option(
        "--jobs", metavar="N", min=0, help="Train the runs that --runs lacks, N at a time (hours without a GPU)."
    ),
]
Earlier = Annotated[
    list[str] | None,
    typer.Option(
        "--from", metavar="PATH", help="Read the JSON of an earlier run instead of measuring; several are joined."
    ),
]


Again = Annotated[
    str | None,
    typer.Option(
        "--again",
        metavar="PATH",
        help="Judge a kept JSON again: claims and rules of now, numbers as they were measured, training runs read again.",
    ),
]


def run(
    papers: Names = None,
    quick: Quick = False,
    show: Listed = False,
    claim: ClaimId = None,
    json: Json = None,
    report: Report = None,
    figures: Figures = None,
    models: Models = None,
    earlier: Earlier = None,
    runs: Runs = None,
    data: Data = None,
    jobs: Jobs = 0,
    again: Again = None,
) -> None:
    """The arguments are checked before hours of work; one page and one document are written for each paper."""
    from locater.amx import avoid_broken_amx
    from locater_lab.engine.devices_and_processes import measure_in_parallel, processor_count
    from locater_lab.engine.quick_times import seconds_of
    from locater_lab.engine.reproduction import Setting, join_documents, reproduce, select_claims
    from locater_lab.engine.verdict_text import print_claims

    chosen_papers = _chosen_papers(papers or [], claim)
    if show:
        for paper in chosen_papers:
            print_claims(paper, stdout_console())
        return
    _check_files(json, report, figures, models, earlier, again, len(chosen_papers))
    run_claims = [
        (paper, c) for paper in chosen_papers for c in select_claims(paper, claim) if _rests_on_runs(paper, c)
    ]
    if runs is not None and not run_claims and not earlier:
        raise LocaterError(f"--runs {runs}: none of these claims rests on training runs: leave it out")
    _check_runs(runs, data, jobs, run_claims)
    if runs is not None and not jobs and not earlier:
        _check_runs_match(Path(runs), chosen_papers, claim)
    log = partial(print, file=sys.stderr, flush=True)
    if earlier:
        (paper,) = chosen_papers
        _write_results(
            join_documents([_read_document(Path(x), paper) for x in earlier], paper), paper, json, report, figures
        )
        return
    avoid_broken_amx()
    if again is not None:
        for paper in chosen_papers:
            document = _judged_again(Path(str(_path_for(again, paper))), paper, log)
            _write_results(document, paper, _path_for(json, paper), _path_for(report, paper), figures)
        return
    settings = []
    for paper in chosen_papers:
        bar = partial(show_progress, label=paper.name)
        files = [Path(runs)] if runs is not None else [] if jobs else _find_kept_runs(paper, claim, log)
        path, more = (files[-1], tuple(files[:-1])) if files else (None, ())
        settings.append((paper, Setting(quick, _as_path(models), bar, path, _as_path(data), jobs, log, more)))
    if claim is None and not jobs:
        _say_what_comes(chosen_papers, quick, log)
    # training and long measurements use all cores by themselves
    broken: dict[str, Exception] = {}
    done = measure_in_parallel(settings, claim, processor_count() if quick and not jobs else 1, seconds_of, broken)
    failures = list(broken.values())
    for paper, setting in settings:
        if paper.name in broken:
            continue
        document = reproduce(paper, setting, claim, done[paper.name]).to_dict()
        try:
            _write_results(document, paper, _path_for(json, paper), _path_for(report, paper), figures)
        except Exception as error:  # the other papers were measured too: they are written before this is reported
            failures.append(error)
    if failures:
        raise failures[0]


def _chosen_papers(names: list[str], claim: str | None) -> list[Paper]:
    from locater_lab.engine.reproduction import select_claims
    from locater_lab.papers import PAPERS, paper

    papers = [paper(name) for name in dict.fromkeys(names)] if names else list(PAPERS.values())
    if claim is not None:
        for each in papers:
            select_claims(each, claim)
    return papers


def _path_for(path: str | None, paper: Paper) -> str | None:
    return None if path is None else path.replace("NAME", paper.name)


def _check_files(
    json: str | None,
    report: str | None,
    figures: str | None,
    models: str | None,
    earlier: list[str] | None,
    again: str | None,
    papers: int,
) -> None:
    """Refuse what could not be written or read before hours of work."""
    check_writable(json, report)
    if again is not None and earlier:
        raise LocaterError(f"--again {again}: leave --from out, which takes verdicts as they are kept")
    if papers > 1 and earlier:
        raise LocaterError("--from is for one paper: name it (--list shows them)")
    for option, path in (("--json", json), ("--report", report), ("--again", again)):
        if papers > 1 and path is not None and "NAME" not in path:
            raise LocaterError(
                f"{option} {path}: {papers} papers need a file each: put NAME into it, as in out/NAME.json"
            )
    if report is not None and Path(report).suffix not in (".md", ".html"):
        raise LocaterError(f"--report {report}: a report is .md or .html: end its name in one of them")
    if figures is not None and report is None:
        raise LocaterError(f"--figures {figures}: figures belong to a page; give --report too")
    if figures is not None and Path(str(report)).suffix == ".html":
        raise LocaterError(
            f"--figures {figures}: {report} holds its figures itself: leave --figures out, or give --report a .md"
        )
    for folder in (figures, models):
        if folder is not None and not Path(folder).is_dir():
            raise LocaterError(f"{folder}: no such folder")


def _rests_on_runs(paper: Paper, claim: Claim) -> bool:
    return any(study.on_runs and claim in study.claims for study in paper.studies)


def _find_kept_runs(paper: Paper, claim: str | None, log: Callable[[str], None]) -> list[Path]:
    """The kept runs, where these claims rest on any; a line says which they are, or that there are none."""
    from locater_lab.engine.reproduction import select_claims
    from locater_lab.engine.runs import kept_runs

    run_claims = [c.id for c in select_claims(paper, claim) if _rests_on_runs(paper, c)]
    if not run_claims:
        return []
    files = kept_runs(paper)
    if files:
        log(
            f"{paper.name}: training claims are judged by the kept runs in {' and '.join(map(str, files))}; --runs PATH for others"
        )
    else:
        stay = (
            f"{run_claims[0]} stays"
            if len(run_claims) == 1
            else f"{len(run_claims)} claims ({run_claims[0]} ... {run_claims[-1]}) stay"
        )
        why = "no training runs come with this installation"
        log(f"{paper.name}: {why}, so {stay} open: give --runs PATH (the project keeps them in docs/results)")
    return files


def _check_runs(runs: str | None, data: str | None, jobs: int, run_claims: list[tuple[Paper, Claim]]) -> None:
    """Refuse training without a file for its results, or without data where it reads any."""
    reading = [c for paper, c in run_claims if any(c in study.claims and study.needs_data for study in paper.studies)]
    if jobs and reading and (runs is None or data is None):
        raise LocaterError(
            f"--jobs {jobs}: training for {reading[0].id} needs --runs PATH for its results and --data FOLDER for what it learns from"
        )
    if jobs and run_claims and runs is None:
        raise LocaterError(f"--jobs {jobs}: training for {run_claims[0][1].id} needs --runs PATH for its results")
    if runs is not None and not jobs and not Path(runs).is_file():
        raise LocaterError(f"{runs}: no such file; give the lines that an earlier --jobs wrote")
    if data is not None and not Path(data).is_dir():
        raise LocaterError(f"{data}: no such folder")


def _check_runs_match(runs: Path, papers: Iterable[Paper], claim: str | None) -> None:
    """Refuse a file in which no line is a run that these claims ask for: all of them would stay open without a word."""
    from locater_lab.engine.reproduction import select_claims
    from locater_lab.engine.runs import Runs as KeptRuns
    from locater_lab.train.sweep import read_lines

    held, studies = (
        KeptRuns(runs),
        [study for paper in papers for study in paper.studies if set(study.claims) & set(select_claims(paper, claim))],
    )
    if any(study.on_runs and study.rows is None for study in studies):
        own_lines = any(paper.kept for paper in papers) and any(read_lines(runs))
        if not held.lines and not own_lines:
            raise LocaterError(f"{runs}: no training run in it; give the lines that an earlier --jobs wrote")
        return  # it takes whatever runs there are
    asked = [row for study in studies if study.rows is not None for row in study.rows(held)]
    if asked and not any(held.of(row) for row in asked):
        what = (
            f"none of its {len(held.lines)} training runs is one that these claims ask for"
            if held.lines
            else "no training run in it"
        )
        raise LocaterError(f"{runs}: {what}; give the lines that an earlier --jobs wrote")


def _as_path(text: str | None) -> Path | None:
    return None if text is None else Path(text)


def _read_document(path: Path, paper: Paper) -> dict[str, Any]:
    try:
        document = jsonlib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise LocaterError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError:
        document = None
    document = document if isinstance(document, dict) else {}
    if document.get("paper") != paper.name or not document.get("claims"):
        why = f" (it is of {document['paper']})" if "paper" in document else ""
        raise LocaterError(f"{path}: not the JSON of locater reproduce {paper.name}{why}")
    if not isinstance(document.get("studies"), dict):
        raise LocaterError(f"{path}: written by an earlier version, without its studies: measure it again")
    return document


def _say_what_comes(papers: list[Paper], quick: bool, log: Callable[[str], None]) -> None:
    """The claims of the papers, which are what is tested, and how long that takes, before it begins."""
    from locater_lab.engine.quick_times import time_ahead
    from locater_lab.engine.verdict_text import claims_ahead
    from locater_lab.papers import PAPERS

    for paper in papers:
        log(claims_ahead(paper))
    if ahead := time_ahead(papers, len(PAPERS), quick):
        log(ahead)


def _judged_again(path: Path, paper: Paper, log: Callable[[str], None]) -> dict[str, Any]:
    """A kept document judged again; studies that read kept runs alone, which takes moments, are measured."""
    from locater_lab.engine.reproduction import Setting, judge_again, reproduce
    from locater_lab.engine.runs import kept_runs

    document, files = _read_document(path, paper), kept_runs(paper)
    studies = tuple(study for study in paper.studies if files and study.on_runs and not study.on_models)
    if not studies:
        return judge_again(document, paper)
    setting = Setting(document["assumptions"]["quick"], runs=files[-1], more_runs=tuple(files[:-1]), log=log)
    return judge_again(document, paper, reproduce(replace(paper, studies=studies), setting).to_dict())


def _write_results(
    document: dict[str, Any], paper: Paper, json: str | None, report: str | None, figures: str | None
) -> None:
    from locater_lab.engine.pages import write_report
    from locater_lab.engine.verdict_text import print_last_sentence, print_verdicts

    console = stdout_console()
    text = jsonlib.dumps(document, indent=1, allow_nan=False)
    if json not in (None, "-"):
        write_whole(Path(str(json)), text + "\n")
    if report is not None:
        write_report(document, paper, Path(report), Path(report).parent if figures is None else Path(figures))
    if json == "-":
        print(text)
        return
    console.print(document["source"], markup=False, highlight=False)
    print_verdicts(document, console)
    for what, path in (("Data", json), ("Page", report)):
        if path is not None:
            console.print(f"{what} written to {path}", markup=False, highlight=False)
    print_last_sentence(document, console)
