"""The part of docs/families.md about every model type of transformers, from the lines that scripts/reach.py writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LINES = Path(__file__).resolve().parents[1] / "docs" / "results" / "reach.jsonl"
SHOWN = 12  # model types that a reason names
INTRODUCTION = """
## Every model type of transformers

`make reach` builds a tiny model with random weights of every model type that transformers {version} knows, runs it on inputs that are guessed
from its configuration and the arguments of `forward` (`src/locater/families/example_inputs.py`), counts the softmax attention that it meets, and
reads, discovers and observes it. The lines are in [results/reach.jsonl](results/reach.jsonl). This table has {count} of {total} model types.
{missing}
| | model types |
|---|---|
"""
MEANING = {
    "record": "read by a record",
    "verified": "without a record: discovered, every layer verified",
    "partly": "without a record: discovered in part",
    "observed": "observed only",
    "refused": "softmax attention met, and refused",
    "none": "no softmax attention met",
    "not run": "built, and no inputs that it runs on",
    "not built": "no tiny model",
}


def section(rows: list[Row]) -> str:
    """Counts, then the types by what Locater makes of them, then reasons."""
    if not rows:
        return ""
    missing = any("missing" in row.get("discovered", {}) for row in rows)
    text = INTRODUCTION.format(
        version=rows[0]["transformers"],
        count=len(rows),
        total=rows[0]["types"],
        missing="Discovery was not part of the package when it was made.\n" if missing else "",
    )
    text += "".join(f"| {name} | {number} |\n" for name, number in counts(rows).items())
    text += "\n| outcome | count | model types |\n|---|---|---|\n"
    for kind, meaning in MEANING.items():
        types = [row["model_type"] for row in rows if outcome(row) == kind]
        text += f"| {meaning} | {len(types)} | {', '.join(types)} |\n" if types else ""
    return text + _reasons(rows)


def outcome(row: Row) -> str:
    """What Locater makes of a model type: a key of MEANING."""
    if not row["built"]:
        return "not built"
    if not row["ran"]:
        return "not run"
    if not sum(row["met"].values()):
        return "none"
    if row["record"].get("layers"):
        return "record"
    discovered = row["discovered"]
    if discovered.get("layers"):
        return "verified" if discovered["verified"] == sum(discovered[name] for name in PARTS) else "partly"
    return "observed" if row["observed"].get("heads") else "refused"


FROM_DISK = "discovered from disk, every layer as in the live model"
PARTS = ("layers", "refused_layers", "unreached")  # of a discovery: what the model has


def counts(rows: list[Row]) -> dict[str, int]:
    """How many model types got how far."""
    questions: dict[str, Callable[[Row], Any]] = {
        "built": lambda row: row["built"],
        "ran": lambda row: row["ran"],
        "softmax attention met": lambda row: sum(row.get("met", {}).values()),
        "- through the attention interface of transformers": lambda row: row.get("met", {}).get("interface"),
        "- in PyTorch's fused call, beside the interface": lambda row: row.get("met", {}).get("fused"),
        "- written out as a softmax, beside the interface": lambda row: row.get("met", {}).get("softmax"),
        "read by a record": lambda row: row.get("record", {}).get("layers"),
        "discovered, every layer verified by logits and output": lambda row: (
            outcome({**row, "record": {}}) == "verified"
        ),
        "discovered in part": lambda row: outcome({**row, "record": {}}) == "partly",
        FROM_DISK: lambda row: (
            row.get("disk", {}).get("same") and row["disk"]["layers"] == row["disk"]["same"] == row["disk"]["live"]
        ),
        "observed": lambda row: row.get("observed", {}).get("heads"),
        "faults of Locater (an exception that is no refusal)": lambda row: any("error" in x for x in steps(row)),
    }
    if not any("disk" in row for row in rows):  # lines from before there was discovery from disk
        questions.pop(FROM_DISK)
    return {name: sum(bool(question(row)) for row in rows) for name, question in questions.items()}


def steps(row: Row) -> list[dict[str, Any]]:
    """What came of reading, discovering and observing a type, as far as it got."""
    return [row[name] for name in ("record", "discovered", "disk", "observed") if name in row]


def _reasons(rows: list[Row]) -> str:
    """A table of reasons with the types that they hold for. Names of classes and sizes are taken out, so that equal
    reasons meet.
    """
    types: dict[str, list[str]] = {}
    for row in rows:
        for reason in reasons_of(row):
            types.setdefault(reason, []).append(row["model_type"])
    if not types:
        return ""
    lines = sorted(types.items(), key=lambda item: (-len(item[1]), item[0]))
    return "\n| reason | model types |\n|---|---|\n" + "".join(
        f"| {reason.replace('|', '/')} | {_few(names)} |\n" for reason, names in lines
    )


def _few(names: list[str]) -> str:
    """The first names, and how many more there are: all of them are in the table of outcomes."""
    return ", ".join(names[:SHOWN]) + (f" and {len(names) - SHOWN} more" if len(names) > SHOWN else "")


def reasons_of(row: Row) -> list[str]:
    """Why a type is not read or observed in full, without what differs from type to type."""
    kind = outcome(row)
    if kind in ("not built", "not run"):
        return [f"{MEANING[kind]}: {_plain(row.get('why', ''))}"]
    if kind in ("record", "verified", "none"):
        return []
    lines = [_plain(line.partition(": ")[2]) for line in row["discovered"].get("reasons", ())]
    for name in ("discovered", "observed"):
        problem = row[name].get("refused") or row[name].get("error")
        lines += [f"{name}: {_plain(problem)}"] if problem else []
    if row["discovered"].get("unreached"):
        lines.append("attention modules that its inputs did not reach")
    return list(dict.fromkeys(lines))


def _plain(line: str) -> str:
    """A reason without the name of its class, shapes, and what a message says about the tensors of one model."""
    line = re.sub(r"^[\w.-]+: (no inputs could be guessed: )?", "", line)
    line = re.sub(r"model_type '[^']*' is not a known architecture.*", "its architecture is not known", line)
    line = re.sub(r"it does not run on .*?\) \((.*)", r"\1", line)
    line = re.sub(r"\)?\.? Give them:.*", "", line)
    return re.sub(r"\d+", "N", line).replace("`", "").strip()[:140]


def read(path: Path = LINES) -> list[Row]:
    """Rows of the file, in order of the model types; none where there is no file."""
    rows = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    return sorted(rows, key=lambda row: row["model_type"])
