"""Which flags of a head are faults, and why the others are not.

A head with a role is sharp on purpose, and a measurement overrides a prediction.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from locater.findings.flags import (
    FLAG_NAMES,
    FLAGS,
    LEVEL,
    NO_ROLE,
    RETIRED,
    ROLES,
    Flag,
    Numbers,
    Role,
    applies,
    key_variance,
)

# variance of logits of a nearly uniform head: trained models lie above it (docs/log.md, 2026-11-16), a new GPT-2 below
NEAR_UNIFORM = 0.1
UNTRAINED = 0.8  # share of nearly uniform heads, from which the model as a whole is called untrained
RETIRED_REASON = "A flag of an earlier version of Locater that is now a column: docs/flags.md"
UNKNOWN_REASON = "A flag of another version of Locater: scan the model again"


class Verdict(NamedTuple):
    """The flags of one head, judged."""

    faults: tuple[str, ...]  # flags that say something is wrong
    notes: dict[str, str]  # every other flag, and why it is not a fault here
    role: str | None  # a name of ROLES


def judge(rows: Sequence[Numbers], length: int) -> list[Verdict]:
    """Faults and notes of all heads of a model, from their `flags` and numbers.

    >>> judge([{"flags": ("sharp", "locked"), "entropy_ratio": 0.03, "previous": 0.99}], length=256)[0].faults
    ()
    """
    alike = {"uniform": is_untrained(rows), "silent": _is_zero_initialised(rows)}
    return [_verdict(row, length, alike) for row in rows]


def is_untrained(rows: Sequence[Numbers]) -> bool:
    """Whether so many heads are nearly uniform that it is a property of the model, not of single heads."""
    return bool(rows) and sum(is_near_uniform(row) for row in rows) >= UNTRAINED * len(rows)


def _is_zero_initialised(rows: Sequence[Numbers]) -> bool:
    """Whether so many heads write nothing that the output maps still have their initial value, zero."""
    return bool(rows) and sum("silent" in row["flags"] for row in rows) >= UNTRAINED * len(rows)


def is_near_uniform(row: Numbers) -> bool:
    """Whether a softmax head treats all tokens nearly alike: as measured, or else as its weights predict."""
    ratio, F, key_bias = (row.get(column) for column in ("entropy_ratio", "F", "key_bias"))
    if ratio is not None:
        return bool(ratio > LEVEL)
    if row.get("expected_entropy") is None or F is None or key_bias is None:
        return False
    return key_variance(F, key_bias) < NEAR_UNIFORM


def heads_by_role(rows: Sequence[Numbers], verdicts: Sequence[Verdict]) -> dict[str, list[tuple[int, int]]]:
    """(layer, head) of the heads with each role. A role is left out if it was not measured: if no head has its columns.

    >>> rows = [{"layer": 0, "head": 3, "flags": (), "previous": 0.9, "induction": 0.1}]
    >>> heads_by_role(rows, judge(rows, length=256))
    {'previous-token': [(0, 3)], 'induction': []}
    """
    measured = [role for role in ROLES if any(all(row.get(x) is not None for x in role.needs) for row in rows)]
    pairs = list(zip(rows, verdicts, strict=True))
    return {
        role.name: [(row["layer"], row["head"]) for row, verdict in pairs if verdict.role == role.name]
        for role in measured
    }


def _verdict(row: Numbers, length: int, alike: Mapping[str, bool]) -> Verdict:
    acts = not set(row["flags"]) & set(NO_ROLE)
    role = next((role for role in ROLES if acts and applies(role, row, length)), None)
    reasons = {flag.name: _excuse(flag, row, role, alike) for flag in FLAGS if flag.name in row["flags"]}
    unknown = (name for name in row["flags"] if name not in FLAG_NAMES)
    reasons |= {name: RETIRED_REASON if name in RETIRED else UNKNOWN_REASON for name in unknown}
    faults = tuple(name for name, reason in reasons.items() if not reason)
    return Verdict(faults, {name: reason for name, reason in reasons.items() if reason}, role.name if role else None)


def _excuse(flag: Flag, row: Numbers, role: Role | None, alike: Mapping[str, bool]) -> str:
    """Why a flag of this head is not a fault; empty if it is one."""
    if flag.severity == "note":
        return flag.way_out
    if flag.on_purpose and role is not None:
        article = "An" if role.name[0] in "aeiou" else "A"
        shown = role.shown.format(row[role.needs[0]])
        return f"{article} {role.name} head ({shown}): it is {flag.name} on purpose, leave it"
    ratio = row.get("entropy_ratio")
    if flag.confirmed is not None and ratio is not None and not flag.confirmed(ratio):
        return f"Predicted, but not measured: its entropy is {ratio:.2f} of that of uniform attention"
    if alike.get(flag.name):
        return "So are nearly all heads of this model: it looks untrained"
    return ""
