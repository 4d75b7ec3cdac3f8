"""What stands out about a head: flags with thresholds, meaning and way out; verdicts on them; conditions of users."""

from locater.findings.conditions import (
    QUANTITIES,
    Condition,
    comparison,
    crossings,
    explain,
    parse_conditions,
    reasons,
    remedy_for,
)
from locater.findings.flags import (
    EXPLODING,
    FLAG_NAMES,
    FLAGS,
    RETIRED,
    ROLE_WEIGHT,
    ROLES,
    Flag,
    Role,
    flags_of,
    key_variance,
)
from locater.findings.remedies import OF_FLAGS, Remedy
from locater.findings.verdicts import UNTRAINED, Verdict, heads_by_role, judge, near_uniform, untrained

__all__ = [
    "EXPLODING",
    "FLAGS",
    "FLAG_NAMES",
    "OF_FLAGS",
    "QUANTITIES",
    "RETIRED",
    "ROLES",
    "ROLE_WEIGHT",
    "UNTRAINED",
    "Condition",
    "Flag",
    "Remedy",
    "Role",
    "Verdict",
    "comparison",
    "crossings",
    "explain",
    "flags_of",
    "heads_by_role",
    "judge",
    "key_variance",
    "near_uniform",
    "parse_conditions",
    "reasons",
    "remedy_for",
    "untrained",
]
