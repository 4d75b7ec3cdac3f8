"""What every table shows of a head, under which name, and the sentence above it: the terminal, pages and notebooks
share them.
"""

from __future__ import annotations

import html
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from locater.findings import FLAGS, ROLES, Verdict, near_uniform, untrained

NAMED = 6  # heads of one flag that are named in a sentence
MOST_SHOWN = 20  # heads of a large model that a table shows one by one
Read = Callable[[Any], float | None]


def _column(name: str) -> Read:
    return lambda row: row[name]


def _root(row: Any) -> float | None:
    return None if row.F is None else row.F**0.5


def _symmetry(row: Any) -> float | None:
    return row.S / row.F if row.S is not None and row.F else None


# heading: how it is read from a row. What has to go first where there is no room comes last.
SCAN: dict[str, Read] = {
    "M": _column("M"), "√F": _root, "H": _column("expected_entropy"), "Λ": _column("localization"), "κ": _column("concentration"),
    "S/F": _symmetry, "key bias": _column("key_bias"), "kept": _column("residual_kept"),
}  # fmt: skip
PROBE: dict[str, Read] = {
    "H": _column("entropy"), "first": _column("sink"), "max logit": _column("max_logit"), "pred. H": _column("predicted_entropy"),
    "prior H": _column("prior_entropy"), "distance": _column("distance"), "top": _column("max_probability"), "Λ": _column("localization"),
    "pred. first": _column("predicted_sink"),
}  # fmt: skip


def summary(rows: Sequence[Any], verdicts: Sequence[Verdict]) -> str:
    """How many heads deserve a look, which, and why. One sentence in place of many where all heads are alike."""
    if not rows:
        return "There is no head."
    said = []
    if untrained([vars(row) for row in rows]):
        count = sum(near_uniform(vars(row)) for row in rows)
        which = f"All {counted(count, 'head')}" if count == len(rows) else f"{count:,} of {counted(len(rows), 'head')}"
        said.append(
            f"{which} are near uniform: this looks like an untrained model (in a trained one, attention has collapsed)."
        )
    bad = sum(bool(held.faults) for held in verdicts)
    if bad:
        verb = "deserves" if bad == 1 else "deserve"
        said.append(
            f"{bad:,} of {counted(len(rows), 'head')} {verb} a look (layer.head): {'; '.join(_named(rows, verdicts))}."
        )
    elif not said:
        said.append("No head deserves a look.")
    return " ".join(said)


def noted(rows: Sequence[Any], verdicts: Sequence[Verdict]) -> str:
    """How many notes of each kind there are, calmly; not those that are said of the model."""
    flags = Counter(name for held in verdicts for name in held.notes)
    if untrained([vars(row) for row in rows]):
        flags.pop("uniform", None)
    kinds = ", ".join(f"{name} {count:,}" for name, count in flags.most_common())
    return f"{counted(flags.total(), 'note')}, no fault: {kinds}." if flags else ""


def _named(rows: Sequence[Any], verdicts: Sequence[Verdict]) -> list[str]:
    """`sharp 0.2, 1.4 and 3 more` for every fault there is, worst first."""
    parts = []
    for flag in FLAGS:
        where = [
            f"{row.layer}.{row.head}" for row, held in zip(rows, verdicts, strict=True) if flag.name in held.faults
        ]
        if where:
            more = f" and {len(where) - NAMED:,} more" if len(where) > NAMED else ""
            parts.append(f"{flag.name} {', '.join(where[:NAMED])}{more}")
    return parts


def roles(rows: Sequence[Any], verdicts: Sequence[Verdict]) -> str:
    """How many heads have which role, and the first of them; nothing where none has one."""
    parts = []
    for role in ROLES:
        where = [f"{row.layer}.{row.head}" for row, held in zip(rows, verdicts, strict=True) if held.role == role.name]
        if where:
            more = ", …" if len(where) > NAMED else ""
            parts.append(f"{counted(len(where), f'{role.name} head')} ({', '.join(where[:NAMED])}{more})")
    rest = sum(held.role is None for held in verdicts)
    return f"What heads do: {', '.join(parts)}; {rest:,} without one of these roles." if parts else ""


def moved(before: Sequence[Verdict], after: Sequence[Verdict]) -> str:
    """How many heads gained or lost a fault, of two models with the same heads."""
    gained, lost = (
        sum(bool({*x.faults} - {*y.faults}) for x, y in zip(*pair, strict=True))
        for pair in ((after, before), (before, after))
    )
    if not gained and not lost:
        return "No head gained a fault, none lost one."
    return f"{counted(gained, 'head') if gained else 'No head'} gained a fault, {f'{lost:,}' if lost else 'none'} lost one."


def origin(assumptions: Mapping[str, Any]) -> str:
    """Where the numbers of a scan come from, in a few words."""
    if assumptions.get("prediction") == "predicted":
        return "Predicted from weights and statistics of what the layers read; not measured."
    return "From weights only; not measured on data."


def collapse_risk(layers: Sequence[Mapping[str, Any]], length: int) -> str:
    """What attention alone keeps of the differences between tokens, over layers, in a sentence; nothing where it is not
    known.
    """
    known = [(entry["residual_kept"], entry["layer"]) for entry in layers if entry.get("residual_kept") is not None]
    if not known:
        return ""
    (low, where), (high, _) = min(known), max(known)
    span = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} (layer {where}) to {high:.3f}"
    return (
        f"Rank-collapse risk: attention alone keeps {span} of what differs between tokens; "
        f"uniform attention over {length} tokens keeps {length**-0.5:.3g}, a row with a single token 1."
    )


def chosen(rows: Sequence[Any], verdicts: Sequence[Verdict], most: int) -> list[tuple[Any, Verdict]]:
    """At most so many heads: those with faults, the rarest flag first so that none hides another, then the others in
    model order.
    """
    counts = Counter(name for held in verdicts for name in held.faults)
    both = list(zip(rows, verdicts, strict=True))
    bad = sorted((x for x in both if x[1].faults), key=lambda x: min(counts[name] for name in x[1].faults))[:most]
    bad.sort(key=lambda x: (x[0].layer, x[0].head))
    return bad + [x for x in both if not x[1].faults][: most - len(bad)]


def number(x: float | None) -> str:
    """Two decimals, or three digits of what is large."""
    if x is None:
        return "-"
    return f"{round(x, 2) + 0.0:.2f}" if abs(x) < 100 else f"{x:.3g}"  # + 0.0: no minus sign on zero


def counted(count: int, word: str) -> str:
    return f"{count:,} {word}" + ("" if count == 1 else "s")


def notebook(
    title: str, sentences: Sequence[str], columns: Mapping[str, Read], rows: Sequence[Any], verdicts: Sequence[Verdict]
) -> str:
    """A result in a notebook: its name, what is to be said of it, and a small table. No style that a dark theme would
    break.
    """
    shown = chosen(rows, verdicts, MOST_SHOWN)
    cells = "".join(f"<th>{html.escape(name)}</th>" for name in ("layer", "head", *columns, "flags"))
    lines = [
        "<tr>" + "".join(f"<td>{text}</td>" for text in (row.layer, row.head, *(number(read(row)) for read in columns.values())))
        + f"<td style='text-align:left'>{_flags(held)}</td></tr>"
        for row, held in shown
    ]  # fmt: skip
    whole = f"{len(shown):,} of {counted(len(rows), 'head')}; <code>.report(path)</code> writes all."
    more = f"<p>{whole}</p>" if len(shown) < len(rows) else ""
    said = html.escape(" ".join(filter(None, sentences)))
    return f"<p><b>{html.escape(title)}</b><br>{said}</p><table><tr>{cells}</tr>{''.join(lines)}</table>{more}"


def _flags(held: Verdict) -> str:
    faults, notes = (html.escape(" ".join(names)) for names in (held.faults, held.notes))
    return " ".join(
        filter(
            None, (f"<b>{faults}</b>" if faults else "", f"<span style='opacity:0.6'>{notes}</span>" if notes else "")
        )
    )
