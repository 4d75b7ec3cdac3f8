"""What each command says about a model: its exit status, the words of its verdict, and the causes that it names.

Commands run in this process, as the shell would start them. A status of 1 or 2 counts as found: a file that cannot be
read is not taken for a sound one.
"""

from __future__ import annotations

import contextlib
import io
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor

import locater
from locater.commands.doctor.on_text import Behaviour, findings_on_text, run_on_tokens
from locater.commands.load_model import load_model
from locater.errors import LocaterError, first_line
from locater.findings import crossings, parse_conditions
from locater.inputs.text import batches
from locater_lab.studies.verdicts.models import quiet

SCAN_ON = "nonfinite,sharp"  # as the README has it, and action.yml
COMPARE_ON = "fault"
PROBE_ON = "nonfinite,locked,exploding"
PROBE_TOKENS, PROBE_LENGTH = 192, 96
PROBED = 100  # heads at most of a model that is probed: of more it takes a quarter of a minute a time
Said = dict[str, Any]  # status, says, seconds; of doctor also causes

WORDS = {  # of commands that name no causes: what in their words says a cause
    "nonfinite": "nonfinite|not finite|nan|inf",
    "overflow": "overflow",
    "zero": "zero",
    "constant": "constant",
    "scaled-head": "sharp|exploding|locked|uniform",
    "scaled-queries": "sharp|exploding|locked|uniform",
    "dead-head": "uniform|silent",
    "zero-layer": "uniform|silent|zero",
    "missing-layer": "layers|missing|not there|has no",
    "config": "config|num_attention_heads|num_hidden_layers|vocab_size|layers",
    "lost-biases": "bias",
    "stale-index": "index",
    "truncated": "truncat|cut off|incomplete|bytes|not there|no such file|git.lfs|pointer|empty",
    "duplicate-names": " is in .+(and in|the index says)",
    "another-model": "other shapes|different heads",
}


def named(causes: tuple[str, ...], words: str) -> bool:
    """Whether words of a command say one of these causes: its name, or what stands for it in a flag or an error.

    >>> named(("rotary-order",), "rotary order differs"), named(("overflow",), "1 head is sharp")
    (True, False)
    """
    patterns = (WORDS.get(cause, "$^") + "|" + cause.replace("-", "[- ]") for cause in causes)
    return any(re.search(pattern, words, re.IGNORECASE) for pattern in patterns)


def shell(*words: object) -> Said:
    """A command line, run here: its status and the words that a reader of a log would see."""
    out, err, status = io.StringIO(), io.StringIO(), 0
    start = time.perf_counter()
    from locater.cli import main

    with patch.object(sys, "argv", ["locater", *map(str, words)]), _caught(out, err):
        try:
            main()
        except SystemExit as stop:
            status = int(stop.code or 0)
    said = " ".join(err.getvalue().split())
    return {"status": status, "says": said[:300], "out": out.getvalue(), "seconds": time.perf_counter() - start}


@contextlib.contextmanager
def _caught(out: io.StringIO, err: io.StringIO) -> Iterator[None]:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
        yield


def scan(path: Path) -> Said:
    return shell("scan", path, "--fail-on", SCAN_ON)


def compare(base: Path, path: Path) -> Said:
    """What it prints in front of its tables is its verdict, and flags that heads gained stand in them: both are words."""
    said = shell("compare", base, path, "--fail-on", COMPARE_ON)
    if said["status"] != 1:
        return said
    front = said["out"].partition("medians over heads")[0].splitlines()[2:]
    gained = sorted(set(re.findall(r"\+[a-z-]+", said["out"])))
    return {**said, "says": " ".join((said["says"], *front, *gained))[:400]}


def probe(path: Path, ids: Tensor) -> Said:
    """On tokens of what the model was made for; a model that cannot be run has status 2."""
    start = time.perf_counter()
    try:
        from locater.results.probe import PROBE_COLUMNS, PROBE_FLAGS

        with quiet():
            module = load_model(str(path))
        found = locater.probe(module, ids, tokens=PROBE_TOKENS, length=PROBE_LENGTH)
        conditions = parse_conditions(PROBE_ON, PROBE_COLUMNS, PROBE_FLAGS)
        says = crossings(conditions, [vars(row) for row in found.rows], found.assumptions["length"])
        status = 1 if says else 0
    except (LocaterError, RuntimeError, IndexError, ValueError) as error:
        status, says = 2, first_line(error)
    return {"status": status, "says": says[:300], "seconds": time.perf_counter() - start}


def doctor(path: Path, base: Path | None = None, adapter: Path | None = None) -> Said:
    call: Callable[..., Any] = locater.doctor
    start = time.perf_counter()
    given: Mapping[str, Any] = {"base": base and str(base), "adapter": adapter and str(adapter)}
    try:
        found = call(str(path), **{key: value for key, value in given.items() if value is not None})
    except LocaterError as error:
        line = first_line(error)
        return {"status": 2, "says": line[:300], "causes": [], "seconds": time.perf_counter() - start}
    causes = [[finding.severity, finding.cause] for finding in found.findings]
    return {
        "status": int(bool(found.broken)),
        "says": str(found.verdict)[:300],
        "causes": causes,
        "seconds": time.perf_counter() - start,
    }


@cache
def _base_on_text(base: Path, ids: tuple[tuple[int, ...], ...]) -> Behaviour:
    return _on_text(base, torch.tensor(ids))


def _on_text(path: Path, ids: Tensor) -> Behaviour:
    with quiet():
        module = load_model(str(path))
    return run_on_tokens(module, batches(module, ids, batch=2))


def text(path: Path, base: Path, ids: Tensor) -> Said:
    """What `doctor --text` adds to the weights: a status of 1 where it calls the loss, or the output, a fault."""
    start = time.perf_counter()
    rows = ids if ids.ndim == 2 else ids[None]
    try:
        found = findings_on_text(_on_text(path, rows), _base_on_text(base, tuple(map(tuple, rows.tolist()))))
    except (LocaterError, RuntimeError, IndexError, ValueError) as error:
        return {"status": 2, "says": first_line(error)[:300], "causes": [], "seconds": time.perf_counter() - start}
    return {
        "status": int(any(item.severity == "fault" for item in found)),
        "says": "; ".join(f"{item.where} {item.words}" for item in found)[:400],
        "causes": [[item.severity, item.cause] for item in found],
        "seconds": time.perf_counter() - start,
    }


def is_right(said: Said, causes: tuple[str, ...], harmless: bool) -> bool:
    """Whether the cause is named: by a finding of doctor, else by words. Of a harmless change: no alarm, and the change
    is called by its name where causes are named at all.
    """
    if "causes" in said and (said["causes"] or not said["status"]):
        told = [cause for severity, cause in said["causes"] if harmless or severity == "fault"]
        return any(cause in told for cause in causes)
    if harmless:
        return not said["status"]
    return bool(said["status"]) and named(causes, said["says"])
