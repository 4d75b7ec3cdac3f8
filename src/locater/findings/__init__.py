"""What stands out about a head: flags with thresholds, meaning and remedy; verdicts on them; conditions of users."""

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
from locater.findings.verdicts import UNTRAINED, Verdict, heads_by_role, is_near_uniform, is_untrained, judge

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
    "is_near_uniform",
    "is_untrained",
    "judge",
    "key_variance",
    "parse_conditions",
    "reasons",
    "remedy_for",
]
