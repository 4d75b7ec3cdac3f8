"""Where a number comes from: device, date, versions and code of a run or of a measurement, and what lines that were
kept say of theirs.
"""

from __future__ import annotations

import hashlib
import json
import subprocess
from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import torch

import locater
from locater.errors import LocaterError
from locater.version import __version__

PACKAGES, SOURCES = ("locater", "locater_lab"), Path(locater.__file__).parents[1]  # a run rests on both packages
CHANGED = " and changes"  # behind a commit that files of the tree differ from
STAMP = "stamp.json"
MEASURED_NOW = "measured now"


def versions(kind: str) -> dict[str, str]:
    """The device of this kind (`cuda`, `cpu`), versions, and the code (a hash of the sources)."""
    device = torch.cuda.get_device_name() if kind == "cuda" else kind
    known = {
        "device": device,
        "torch": torch.__version__,
        "locater": __version__,
        "code": code_of_tree(SOURCES),
        "date": today(),
    }
    commit = commit_of(SOURCES)
    return {**known, "commit": commit} if commit else known


@cache
def code_of_tree(folder: Path) -> str:
    """A hash over the sources of both packages, which are in this folder: 12 digits of a SHA-256 for each."""
    return "-".join(_code_of(folder / name) for name in PACKAGES)


def _code_of(package: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(package.rglob("*.py")):
        digest.update(path.relative_to(package).as_posix().encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:12]


@cache
def commit_of(folder: Path) -> str | None:
    """The commit of the tree that a folder is in, and whether files of the folder differ from it. Outside of a git tree
    that of the stamp beside the folder, where the code is still the stamped one; else None.
    """
    return _commit_by_git(folder) or _commit_by_stamp(folder)


def _commit_by_stamp(folder: Path) -> str | None:
    path = folder.parent / STAMP
    if not path.is_file():
        return None
    held = json.loads(path.read_text(encoding="utf-8"))
    return str(held["commit"]) if held["code"] == code_of_tree(folder) else f"{held['commit']}{CHANGED}"


def write_stamp(folder: Path = SOURCES) -> Path:
    """Beside the sources, which commit they are of: for a copy of the tree without git, whose runs then name it."""
    commit = _commit_by_git(folder)
    if commit is None or commit.endswith(CHANGED):
        why = "is no git tree" if commit is None else "has files that differ from its commit: commit them first"
        raise LocaterError(f"{folder}: {why}")
    path = folder.parent / STAMP
    path.write_text(json.dumps({"commit": commit, "code": code_of_tree(folder)}) + "\n", encoding="utf-8")
    return path


def _commit_by_git(folder: Path) -> str | None:
    try:
        done = subprocess.run(["git", "-C", folder, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.TimeoutExpired):
        return None
    if done.returncode != 0 or not done.stdout.strip():
        return None
    changes = subprocess.run(["git", "-C", folder, "status", "--porcelain", "--", "."], capture_output=True, timeout=10)
    return done.stdout.strip()[:12] + (CHANGED if changes.stdout else "")


def check_commit(path: Path, commit: str | None) -> None:
    """Refuse to keep, in docs/results of the tree, a line of code that no commit has."""
    kept = SOURCES.parent / "docs" / "results"
    if path.resolve().is_relative_to(kept) and (commit is None or commit.endswith(CHANGED)):
        why = "files of src differ from its commit" if commit else "it names no commit"
        raise LocaterError(f"{path}: a line is not kept where {why}: commit first, or give another file")


def today() -> str:
    return f"{datetime.now(UTC):%Y-%m-%d}"


@cache
def _date_of(commit: str) -> str:
    """The date of a commit of this tree; nothing where git does not know it."""
    try:
        command = ["git", "-C", str(SOURCES), "show", "--no-patch", "--format=%cs", commit.removesuffix(CHANGED)]
        return subprocess.run(command, capture_output=True, text=True, timeout=10).stdout.strip()
    except (OSError, subprocess.TimeoutExpired):
        return ""


# ---- what a page says of it ----


def origin_here(device: str) -> dict[str, Any]:
    """Of what is measured in this process."""
    commit = commit_of(SOURCES)
    return {"kept": False, "devices": [device], "dates": [today()], "commits": {commit or "": 1}}


def origin_of_lines(lines: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Of kept lines: their devices, first and last date (that of the commit where a line has none of its own), and how
    many name which commit.

    >>> origin_of_lines([{"device": "NVIDIA H200", "date": "2026-11-20"}])["commits"]
    {'': 1}
    """
    held = list(lines)
    commits = Counter(str(line.get("commit") or "") for line in held)
    dates = sorted(filter(None, {line.get("date") or _date_of(line.get("commit") or "") for line in held}))
    devices = sorted({_device_of(line) for line in held} - {""})
    return {
        "kept": True,
        "devices": devices,
        "dates": dates[:1] + dates[1:][-1:],
        "commits": dict(sorted(commits.items())),
    }


def _device_of(line: Mapping[str, Any]) -> str:
    return str(line.get("device") or line.get("machine", {}).get("device") or "")


def origin_text(origin: Mapping[str, Any]) -> str:
    """`measured now`, or where and when a kept number was made, and by which code.

    >>> origin_text({"kept": True, "devices": ["NVIDIA H200"], "dates": ["2026-11-16"], "commits": {"": 2, "abc": 1}})
    'NVIDIA H200, 2026-11-16, commit abc; commit not recorded for 2 of 3 runs'
    """
    if not origin["kept"]:
        return MEASURED_NOW
    known = [", ".join(origin["devices"]), " to ".join(origin["dates"])]
    named = {commit: count for commit, count in origin["commits"].items() if commit}
    unnamed = origin["commits"].get("", 0)
    if named:
        known.append(f"commit {', '.join(named)}")
    told = ", ".join(filter(None, known))
    if not unnamed:
        return told
    return (
        f"{told}; commit not recorded for {unnamed} of {unnamed + sum(named.values())} runs"
        if named
        else f"{told}, commit not recorded"
    )


if __name__ == "__main__":
    print(write_stamp())
