"""The summary of a fleet: a table in the terminal and a notebook display."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from rich.console import Console
from rich.markup import escape

from locater.markup import display, table
from locater.report.terminal import empty_table
from locater.report.verdict_sentences import amount

NAMED = 5  # failed checkpoints and groups of duplicates that are named
HEADINGS = ("run", "checkpoints", "steps", "heads", "with faults", "at the last", "failed", "to do", "duplicates")


def print_fleet(document: Mapping[str, Any], console: Console) -> None:
    """A line per run, then the first step of each flag, failures and duplicates."""
    lines = run_lines(document)
    shown = empty_table("", HEADINGS)
    shown.columns[0].justify, shown.columns[0].no_wrap, shown.columns[0].overflow = "left", False, "fold"
    for line in lines:
        shown.add_row(*map(escape, line))
    console.print(shown)
    for sentence in sentences(document):
        console.print(sentence, markup=False, highlight=False)


def fleet_in_notebook(document: Mapping[str, Any]) -> str:
    title = f"Fleet {os.path.basename(document['source'])}"
    return display(
        title,
        [state_sentence(document), *sentences(document)],
        table(HEADINGS, run_lines(document), left=["run", "steps"]),
    )


def state_sentence(document: Mapping[str, Any]) -> str:
    """`12 of 14 checkpoints done, 1 failed, 1 to do.`"""
    counts = document["checkpoints"]
    total = sum(counts.values())
    parts = [f"{counts['done']:,} of {amount(total, 'checkpoint')} done"]
    parts += [f"{counts['failed']:,} failed"] if counts["failed"] else []
    parts += [f"{counts['to_do']:,} to do"] if counts["to_do"] else []
    return ", ".join(parts) + "."


def run_lines(document: Mapping[str, Any]) -> list[list[str]]:
    """The cells of the table, a line per run."""
    names = short_names([run["run"] for run in document["runs"]])
    return [
        [
            name,
            f"{run['checkpoints']:,}",
            _steps(run),
            *(_count(run[column]) for column in ("heads", "heads_with_faults", "heads_with_faults_at_last")),
            str(len(run["failed"])),
            str(run["to_do"]),
            str(sum(len(group) - 1 for group in run["duplicates"])),
        ]
        for name, run in zip(names, document["runs"], strict=True)
    ]


def _count(number: int | None) -> str:
    return "-" if number is None else f"{number:,}"


def short_names(names: Sequence[str | None]) -> list[str]:
    """Runs without the folders that they share.

    >>> short_names(["/data/a/run", "/data/b/run", None]), short_names(["/data/run"])
    (['a/run', 'b/run', '-'], ['run'])
    """
    known = [name for name in names if name is not None]
    parts = [name.split("/") for name in known]
    shared = 0
    while parts and all(len(part) > shared + 1 and part[shared] == parts[0][shared] for part in parts):
        shared += 1
    return ["-" if name is None else "/".join(name.split("/")[shared:]) for name in names]


def sentences(document: Mapping[str, Any]) -> list[str]:
    """When flags first appear, what failed and why, and which checkpoints have equal queries, keys and norms."""
    found = []
    names = short_names([run["run"] for run in document["runs"]])
    several = len(names) > 1
    for name, run in zip(names, document["runs"], strict=True):
        lead = f"{name}: " if several else ""
        said: list[str] = []
        if run["flags"]:
            said.append(f"first step of each flag: {'; '.join(_flags(run['flags']))}.")
        for group in run["duplicates"][:NAMED]:
            said.append(f"equal queries, keys and norms: {_listed([_named(entry) for entry in group])}.")
        if len(run["duplicates"]) > NAMED:
            said.append(
                f"{len(run['duplicates']) - NAMED} more groups with equal queries, keys and norms: --json lists them."
            )
        if run["without_step"]:
            said.append(f"{amount(run['without_step'], 'checkpoint')} without a step.")
        found += [lead + line if several else line[0].upper() + line[1:] for line in said]
    failed = [failure for run in document["runs"] for failure in run["failed"]]
    found += [f"Failed: {_reason(failure)}" for failure in failed[:NAMED]]
    if len(failed) > NAMED:
        found.append(f"{amount(len(failed) - NAMED, 'more failure')}: --json lists them.")
    return [*found, *(f"Damaged: {line}; run the fleet again" for line in document["damaged"])]


def _flags(flags: Mapping[str, Mapping[str, Any]]) -> list[str]:
    parts = []
    for name, entry in flags.items():
        fault = entry["first_fault"]
        as_fault = "no fault" if fault is None else f"a fault from {_named(fault)} on"
        if fault is not None and fault == entry["first"]:
            as_fault = "a fault"
        parts.append(f"{name} {_named(entry['first'])} ({amount(entry['heads'], 'head')}, {as_fault})")
    return parts


def _named(entry: Mapping[str, Any]) -> str:
    """A checkpoint by its step, or by its name where it has none."""
    return str(entry["step"]) if entry["step"] is not None else os.path.basename(entry["source"].rstrip("/"))


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - 8} more" if len(names) > 8 else ""
    return ", ".join(names[:8]) + more


def _reason(failure: Mapping[str, Any]) -> str:
    """The reason, which names the checkpoint or one of its files."""
    named = str(failure["reason"]).startswith(failure["source"])
    return str(failure["reason"]) if named else f"{failure['source']}: {failure['reason']}"


def _steps(run: Mapping[str, Any]) -> str:
    steps = run["steps"]
    if not steps["count"]:
        return "-"
    if steps["count"] == 1:
        return str(steps["first"])
    return f"{steps['count']:,} from {steps['first']} to {steps['last']}"
