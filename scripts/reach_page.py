"""The part of docs/families.md about every model type of transformers, from the lines that scripts/reach.py writes.

What the keys of a line mean is in tests/reach/row.py.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

Row = dict[str, Any]
LINES = Path(__file__).resolve().parents[1] / "docs" / "results" / "reach.jsonl"
SHOWN = 12  # model types that a reason names
INTRODUCTION = """
## Every model type of transformers

`make reach` builds a tiny model with random weights of every model type that transformers {version} knows. It runs the model on inputs that are
guessed from its configuration and the arguments of `forward` (`src/locater/discovery/example_inputs.py`), counts the softmax attention that it
meets, [discovers](discover.md) it, live and from a saved copy, and observes it. The lines are in [results/reach.jsonl](results/reach.jsonl).
This page has {count} of {total} model types.
{versions}
| | model types |
|---|---|
"""
VERSIONS = """
The lines were made with version {version} of the code, a hash of the sources that read, discover and observe attention (`ROOMS` in `scripts/reach.py`){others}.
The sources may have changed since: `python scripts/reach.py --page` says how many lines are of another version than the tree.
"""
MEANING = {
    "verified": "every softmax attention discovered and verified: logits and output",
    "mask_open": "every one verified: logits and output, the mask of some has to be given",
    "logits_only": "every one verified: logits, the output of some is not known",
    "qk_only": "every one verified: queries and keys, the logits of some are not known",
    "partly": "some verified, others refused or not reached by the inputs",
    "record": "not discovered in full, and read by the record of its family",
    "observed": "observed only",
    "refused": "softmax attention met, and refused",
    "none": "no softmax attention met",
    "not run": "built, and no inputs that it runs on",
    "not built": "no tiny model",
}
STEPS = {  # of a layer: how far it got
    "verified": "logits and output",
    "mask_open": "mask to be given",
    "logits_only": "logits only",
    "qk_only": "queries and keys only",
    "refused_layers": "refused",
    "unreached": "not reached",
}

WHOLE = ("verified", "mask_open", "logits_only", "qk_only")  # how far all the attention of a model may be verified


def section(rows: list[Row]) -> str:
    """Counts, then the types by what Locater makes of them, then towers that are not verified in full, then reasons."""
    if not rows:
        return ""
    text = INTRODUCTION.format(
        version=rows[0]["transformers"], count=len(rows), total=rows[0]["types"], versions=_versions(rows)
    )
    text += "".join(f"| {name} | {number} |\n" for name, number in counts(rows).items())
    text += "\n| outcome | count | model types |\n|---|---|---|\n"
    for kind, meaning in MEANING.items():
        types = [row["model_type"] for row in rows if outcome(row) == kind]
        text += f"| {meaning} | {len(types)} | {', '.join(types)} |\n" if types else ""
    return text + _heads(rows) + _towers(rows) + _reasons(rows)


WAYS = {"scan": "scan, live", "disk": "scan, from a saved copy", "observe": "observe"}
HEADS = """
Heads are counted apart from Locater: a plain pass tells in which modules softmax attention is met, in how many places of
their code, and how many heads its queries or maps have. Each of these heads has to be a row, or its module has to be named in a
line, also where the whole model is refused (`tests/reach/heads.py`).

| | model types with heads | a row for every head | other heads named in a line | a head left out without a word |
|---|---|---|---|---|
"""


def _heads(rows: list[Row]) -> str:
    """How many types have a row for each head that was met, by the way of reading, and which leave some out."""
    lines = []
    for way, words in WAYS.items():
        types = [row for row in rows if way in row.get("heads", {})]
        outcomes = {row["model_type"]: heads_of(row, way) for row in types}
        counts = [sum(x == kind for x in outcomes.values()) for kind in ("whole", "named")]
        silent = [name for name, kind in outcomes.items() if kind == "silent"]
        lines.append(f"| {words} | {len(types)} | {' | '.join(map(str, counts))} | {_with_names(silent)} |\n")
    return HEADS + "".join(lines) if any(row.get("heads") for row in rows) else ""


def heads_of(row: Row, way: str) -> str:
    """What became of the heads of a type: "whole", "named" in part, or left out, "silent"."""
    result = row["heads"][way]
    if "silent" in result or "error" in result or ("refused" in result and "rows" not in result):
        return "silent"
    return "whole" if result["rows"] >= row["heads"]["met"] else "named"


def _with_names(names: list[str]) -> str:
    return f"{len(names)}: {_few(names)}" if names else "0"


def _versions(rows: list[Row]) -> str:
    """Which version of the code most lines are of, and which lines are of another."""
    versions = Counter(row.get("code", "unknown") for row in rows)
    version = versions.most_common(1)[0][0]
    types = [row["model_type"] for row in rows if row.get("code", "unknown") != version]
    return VERSIONS.format(version=version, others=f"; {len(types)} with another: {_few(types)}" if types else "")


def outcome(row: Row) -> str:
    """What Locater makes of a model type: a key of MEANING."""
    if not row["built"]:
        return "not built"
    if not row["ran"]:
        return "not run"
    if not sum(row["met"].values()):
        return "none"
    step = discovery(row)
    if step in WHOLE:
        return step
    if row["record"].get("layers"):
        return "record"
    if step == "partly":
        return step
    return "observed" if row["observed"].get("heads") else "refused"


def discovery(row: Row) -> str:
    """How far discovery got with all the softmax attention of a model: a key of MEANING, or nothing."""
    numbers = row.get("discovered", {})
    if not numbers.get("layers"):
        return ""
    if numbers.get("refused_layers") or numbers.get("unreached"):
        return "partly"
    return next(step for step in WHOLE[::-1] if numbers.get(step))


SCANS = (
    "scanned live and from a saved copy, gains and biases redrawn",
    "- every row has the same numbers in both",
    "- rows differ and no line of either scan names their layer",
)


def counts(rows: list[Row]) -> dict[str, int]:
    """How many model types got how far."""
    questions: dict[str, Callable[[Row], Any]] = {
        "built": lambda row: row["built"],
        "ran": lambda row: row["ran"],
        "softmax attention met": lambda row: sum(row.get("met", {}).values()),
        "- through the attention interface of transformers": lambda row: row.get("met", {}).get("interface"),
        "- in PyTorch's fused call, beside the interface": lambda row: row.get("met", {}).get("fused"),
        "- written out as a softmax, beside the interface": lambda row: row.get("met", {}).get("softmax"),
        "queries and keys of every attention verified": lambda row: discovery(row) in WHOLE,
        "queries and keys of every attention that ran verified": lambda row: (
            discovery(row) and not row["discovered"].get("refused_layers")
        ),
        "logits of every attention verified": lambda row: discovery(row) in WHOLE[:3],
        "logits and output of every attention verified, some masks to be given": lambda row: (
            discovery(row) in WHOLE[:2]
        ),
        "logits and output of every attention verified": lambda row: discovery(row) == "verified",
        "- the same from a saved copy, equal to the live model": lambda row: from_disk(row),
        SCANS[0]: lambda row: row.get("scans", {}).get("rows"),
        SCANS[1]: lambda row: row.get("scans", {}).get("rows", 0) and row["scans"]["rows"] == row["scans"]["same"],
        SCANS[2]: lambda row: row.get("scans", {}).get("silent"),
        "some attention verified": lambda row: discovery(row) == "partly",
        "read by the record of its family": lambda row: row.get("record", {}).get("layers"),
        "observed": lambda row: row.get("observed", {}).get("heads"),
        "faults of Locater (an exception that is no refusal)": lambda row: any("error" in x for x in steps(row)),
    }
    if not any("scans" in row for row in rows):  # lines from before scans were compared
        questions = {name: question for name, question in questions.items() if name not in SCANS}
    return {name: sum(bool(question(row)) for row in rows) for name, question in questions.items()}


def from_disk(row: Row) -> bool:
    """Whether all layers of a type are verified in full, live and from disk, and are the same."""
    stored = row.get("disk", {})
    return discovery(row) == "verified" and stored.get("verified") == stored.get("same") == row["discovered"]["layers"]


def steps(row: Row) -> list[dict[str, Any]]:
    """What came of reading, discovering and observing a type, as far as it got."""
    ways = [row["heads"][way] for way in WAYS if way in row.get("heads", {})]
    return [*(row[name] for name in ("record", "discovered", "disk", "scans", "observed") if name in row), *ways]


def _towers(rows: list[Row]) -> str:
    """Layers of each tower by how far they got, for types of several towers that are not verified in full."""
    lines = []
    for row in rows:
        towers = row.get("discovered", {}).get("towers", {})
        if discovery(row) != "verified" and any(sum(map(_number(some), STEPS)) for some in towers.values()):
            for tower, some in towers.items():
                numbers = " | ".join(str(some.get(step) or "") for step in STEPS)
                lines.append(f"| {row['model_type']} | {tower or '(whole)'} | {numbers} |\n")
    if not lines:
        return ""
    head = f"\nLayers by tower, where not all of them are verified in full:\n\n| model type | tower | {' | '.join(STEPS.values())} |\n"
    return head + "|---" * (2 + len(STEPS)) + "|\n" + "".join(lines)


def _number(counts: dict[str, int]) -> Callable[[str], int]:
    return lambda name: counts.get(name, 0)


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
    if kind in ("verified", "none"):
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
