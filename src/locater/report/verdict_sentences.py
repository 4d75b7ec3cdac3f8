"""Sentences about heads that the terminal, pages and notebooks share. Rows are those of documents."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

from locater.findings import FLAGS, Verdict, is_near_uniform, is_untrained, judge
from locater.report.columns import Row

NAMED = 6  # heads that a sentence names for each flag
MOST_SHOWN = 20  # heads of a large model that a table lists


def verdicts_of(document: Mapping[str, Any]) -> list[Verdict]:
    """For each head of a scan or probe: its role, which of its flags are faults, and why the others are not."""
    return judge(document["heads"], document["assumptions"]["length"])


def summary(rows: Sequence[Row], verdicts: Sequence[Verdict], predicted: str = "") -> str:
    """Which heads have which fault. An untrained model gets one sentence, not one per head.

    `predicted` says what the flags were predicted from (`predicted_from`); without it they were measured.
    """
    if not rows:
        return "There are no heads."
    sentences = []
    if is_untrained(rows):
        count = sum(is_near_uniform(row) for row in rows)
        which = f"All {amount(count, 'head')}" if count == len(rows) else f"{count:,} of {amount(len(rows), 'head')}"
        sentences.append(
            f"{which} are near uniform: this looks like an untrained model (in a trained one, attention has collapsed)."
        )
    pairs = list(zip(rows, verdicts, strict=True))
    for flag in FLAGS:
        heads = [(row["layer"], row["head"]) for row, verdict in pairs if flag.name in verdict.faults]
        if heads:
            sentences.append(_fault_sentence(flag.name, heads, len(rows), predicted))
    return " ".join(sentences) or "No problems found."


def _fault_sentence(name: str, heads: Sequence[tuple[int, int]], of: int, predicted: str) -> str:
    """`2 of 8 heads look sharp (predicted from weights; measure with `locater probe`): 0.2, 1.4.`"""
    count = f"{len(heads):,} of {amount(of, 'head')}"
    if predicted and name not in ("nonfinite", "silent"):  # weights show it, and do not just predict it
        verb = "looks" if len(heads) == 1 else "look"
        return f"{count} {verb} {name} (predicted from {predicted}; measure with `locater probe`): {head_list(heads)}."
    return f"{count} {'is' if len(heads) == 1 else 'are'} {name}: {head_list(heads)}."


def predicted_from(assumptions: Mapping[str, Any]) -> str:
    """What the numbers of a scan were predicted from."""
    return "weights and statistics" if assumptions.get("prediction") == "predicted" else "weights"


def notes_sentence(rows: Sequence[Row], verdicts: Sequence[Verdict]) -> str:
    """How many notes of each kind there are, without those that `summary` states for the whole model."""
    flags = Counter(name for verdict in verdicts for name in verdict.notes)
    if is_untrained(rows):
        flags.pop("uniform", None)
    kinds = ", ".join(f"{name} {count:,}" for name, count in flags.most_common())
    return f"{amount(flags.total(), 'note')}, no fault: {kinds}." if flags else ""


def roles_sentence(roles: Mapping[str, Sequence[tuple[int, int]]]) -> str:
    """Which heads have which role, in one line; empty if no role was measured.

    >>> roles_sentence({"previous-token": [(0, 2)], "induction": [(5, 1), (5, 5)], "local": []})
    'Roles (layer.head): previous-token: 0.2; induction: 5.1, 5.5; none: local.'
    """
    if not roles:
        return ""
    parts = [f"{role}: {head_list(heads)}" for role, heads in roles.items() if heads]
    without = [role for role, heads in roles.items() if not heads]
    if without:
        parts.append(f"none: {', '.join(without)}")
    return f"Roles (layer.head): {'; '.join(parts)}."


def head_list(heads: Sequence[tuple[int, int]]) -> str:
    """`0.2, 1.4 and 3 more`."""
    more = f" and {len(heads) - NAMED:,} more" if len(heads) > NAMED else ""
    return ", ".join(f"{layer}.{head}" for layer, head in heads[:NAMED]) + more


def fault_changes(before: Sequence[Verdict], after: Sequence[Verdict]) -> str:
    """How many heads gained or lost a fault, between two models with the same heads."""
    gained, lost = (
        sum(bool({*x.faults} - {*y.faults}) for x, y in zip(*pair, strict=True))
        for pair in ((after, before), (before, after))
    )
    if not gained and not lost:
        return "No head gained or lost a fault."
    heads = amount(gained, "head") if gained else "No head"
    return f"{heads} gained a fault, {f'{lost:,}' if lost else 'none'} lost one."


NO_ROLES = "the role of a head (induction, previous-token, ...) does not show in its weights: locater probe measures it"


def origin_sentence(assumptions: Mapping[str, Any]) -> str:
    """Where the numbers of a scan come from, in one sentence."""
    if assumptions.get("prediction") == "predicted":
        return "Predicted from weights and statistics of what the layers read; not measured."
    return "Predicted from weights alone, which is a prior; not measured on data."


def read_sentence(assumptions: Mapping[str, Any]) -> str:
    """How much of a model a scan read; empty if that was not counted.

    >>> read_sentence({"read": {"maps": 75, "vectors": 5, "of": 1000}})
    'Read: queries, keys and norms, 8.0 % of the numbers of the model; nothing is known of the rest.'
    """
    read = assumptions.get("read")
    if not read:
        return ""
    what = "queries, keys, values, outputs and norms" if assumptions.get("values") else "queries, keys and norms"
    if not read["of"]:
        return f"Read: {what}; nothing is known of the rest."
    share = 100 * (read["maps"] + read["vectors"]) / read["of"]
    shown = f"{share:.1f}" if share >= 0.1 else f"{share:.2g}"
    return f"Read: {what}, {shown} % of the numbers of the model; nothing is known of the rest."


def collapse_sentence(layers: Sequence[Mapping[str, Any]], length: int) -> str:
    """How much of the differences between tokens attention alone keeps, over layers; empty if unknown."""
    known = [(entry["residual_kept"], entry["layer"]) for entry in layers if entry.get("residual_kept") is not None]
    if not known:
        return ""
    (low, where), (high, _) = min(known), max(known)
    span = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} (layer {where}) to {high:.3f}"
    return (
        f"Rank-collapse risk: attention alone keeps {span} of the differences between tokens; "
        f"uniform attention over {length} tokens keeps {length**-0.5:.3g}, a row with a single token 1."
    )


def directions_sentence(rows: Sequence[Row]) -> str:
    """How many of its directions a head uses, as medians over the heads of each size; empty if unknown.

    >>> directions_sentence([{"head_dim": 64, "stable_rank": 3.2, "effective_rank": 21.7}])
    'Heads of size 64 use 3.2 directions by stable rank, 21.7 by effective rank (medians).'
    """
    sizes: dict[int, list[Row]] = {}
    for row in rows:
        if row["effective_rank"] is not None:
            sizes.setdefault(row["head_dim"], []).append(row)
    parts = [
        f"eads of size {size} use {median(row['stable_rank'] for row in some):.1f} directions by stable rank, "
        f"{median(row['effective_rank'] for row in some):.1f} by effective rank"
        for size, some in sorted(sizes.items())
    ]
    return f"H{'; h'.join(parts)} (medians)." if parts else ""


def heads_to_show(rows: Sequence[Row], verdicts: Sequence[Verdict], most: int) -> list[tuple[Row, Verdict]]:
    """At most `most` heads: first those with faults, then the others, both in model order.

    If too many heads are faulty, those with the rarest flags are chosen, so that no flag hides another.
    """
    counts = Counter(name for verdict in verdicts for name in verdict.faults)
    pairs = list(zip(rows, verdicts, strict=True))
    faulty = [pair for pair in pairs if pair[1].faults]
    faulty.sort(key=lambda pair: min(counts[name] for name in pair[1].faults))
    first = sorted(faulty[:most], key=lambda pair: (pair[0]["layer"], pair[0]["head"]))
    return first + [pair for pair in pairs if not pair[1].faults][: most - len(first)]


def number(x: float | None) -> str:
    """Two decimals; three significant digits from 100 on."""
    if x is None:
        return "-"
    return f"{round(x, 2) + 0.0:.2f}" if abs(x) < 100 else f"{x:.3g}"  # + 0.0: no minus sign on zero


def amount(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def letters(count: int) -> list[str]:
    """A letter for each scan, or a number where there are more scans than letters."""
    return [chr(ord("A") + i) for i in range(count)] if count <= 26 else [str(i + 1) for i in range(count)]
