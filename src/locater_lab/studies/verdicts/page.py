"""What the lines of the bench say together, with 95 % intervals of Wilson, and docs/verdicts.md, made from them alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from locater_lab.engine.pages import markdown_table
from locater_lab.studies.flags import share_text
from locater_lab.studies.verdicts import unseen, unseen2
from locater_lab.studies.verdicts.bench import CALLS, LARGE, table_of_names
from locater_lab.studies.verdicts.commands import COMPARE_ON, PROBE_ON, PROBED, SCAN_ON
from locater_lab.studies.verdicts.faults import GROUPS, KNOWN
from locater_lab.studies.verdicts.models import SMALLEST

ROLES = {"chosen on": "thresholds chosen on", "judged": "judged", "tiny": "tiny models"}
ASKED = {
    "scan": f"`scan --fail-on {SCAN_ON}`",
    "compare": f"`compare BASE MODEL --fail-on {COMPARE_ON}`",
    "doctor": "`doctor MODEL`",
    "doctor --base": "`doctor MODEL --base BASE`",
    "doctor --adapter": "`doctor MODEL --base BASE --adapter ADAPTER`",
    "probe": f"`probe --fail-on {PROBE_ON}`",
}
DOCTORS = ("doctor", "doctor --base", "doctor --adapter")
SIGNS = {(False, False): "-", (True, False): "found", (True, True): "named"}
Line = Mapping[str, Any]
FOUND, NAMED = 0.9, 0.8  # what doctor has to reach on models that judge


# ---- counting ----


@dataclass(frozen=True)
class Count:
    """Of `of` planted models `found` were found and `right` named rightly."""

    found: int
    right: int
    of: int

    def found_text(self) -> str:
        return share_text(self.found, self.of)

    def right_text(self) -> str:
        return share_text(self.right, self.of)


def change(line: Line) -> float | None:
    """Of the loss; None where it is NaN, or where there is none."""
    loss, reference = line["loss"], line["reference"]
    return None if not isinstance(loss, float) or not isinstance(reference, float) else loss - reference


def does_harm(line: Line) -> bool:
    """A fault that moves the loss by SMALLEST or more, gives NaN, or leaves a file that cannot be run."""
    if line["group"] == "harmless" or line["reference"] is None:
        return False
    moved = change(line)
    return moved is None or abs(moved) >= SMALLEST


def is_fault(line: Line) -> bool:
    return bool(line["group"] != "harmless")


def best_call(line: Line) -> str:
    """The way to ask doctor that can know a fault: with the adapter where one was merged, else with the base."""
    return "doctor --adapter" if line["group"] == "merging" else "doctor --base"


def count(lines: Iterable[Line], call: str | Callable[[Line], str]) -> Count:
    """Over the lines on which this command was asked."""
    asked = [
        line["said"][name] for line in lines if (name := call if isinstance(call, str) else call(line)) in line["said"]
    ]
    found = [said for said in asked if said["status"]]
    return Count(len(found), sum(said["right"] for said in found), len(asked))


def alarms(lines: Iterable[Line], call: str) -> Count:
    """False alarms on harmless changes; `right` counts those that are called by their name."""
    asked = [line["said"][call] for line in lines if not is_fault(line) and call in line["said"]]
    return Count(sum(bool(said["status"]) for said in asked), sum(said["right"] for said in asked), len(asked))


def of_text(lines: Iterable[Line]) -> str:
    """What `doctor --text` adds: how often the loss is called a fault, by how far it moved."""
    parts: dict[str, list[int]] = {}
    for line in lines:
        said = line["said"].get("text")
        if said is None or line["reference"] is None:
            continue
        moved = change(line)
        harmless = "harmless, " if not is_fault(line) else ""
        size = "NaN or not run" if moved is None else "from 0.5 nats" if moved >= 0.5 else "0.05 to 0.5" if moved >= SMALLEST else "less"  # fmt: skip
        told = 2 if said["status"] else int(any(severity == "change" for severity, _ in said["causes"]))
        parts.setdefault(harmless + size, []).append(told)
    return "\n".join(
        f"{name}: fault {share_text(told.count(2), len(told))}, changed {told.count(1)}, nothing {told.count(0)}"
        for name, told in sorted(parts.items())
    )


def of_role(lines: Sequence[Line], role: str) -> list[Line]:
    return [line for line in lines if line["role"] == role]


def of_set(lines: Iterable[Line], name: str) -> list[Line]:
    """Those of the faults of a set: of `KNOWN` those that rules were written beside."""
    table = table_of_names()
    return [line for line in lines if (table[line["fault"]].belongs if line["fault"] in table else KNOWN) == name]


def answer(line: Line, call: str) -> str:
    """What a command makes of a fault: "missed", "named", "unknown" (found, and no cause named), or the wrong causes."""
    said = line["said"][call]
    if not said["status"]:
        return "missed"
    told = dict.fromkeys(
        cause for severity, cause in said.get("causes", ()) if severity == "fault" and cause != "unknown"
    )
    return "named" if said["right"] else ", ".join(told) or "unknown"


def models_of(lines: Iterable[Line]) -> list[str]:
    order = {"chosen on": 0, "judged": 1, "tiny": 2}
    found = {line["model"]: order[line["role"]] for line in lines}
    return sorted(found, key=lambda name: (found[name], name != "demo"))


def goal(lines: Sequence[Line]) -> dict[str, Any]:
    """What issue and plan ask of doctor: on judged models, by faults that do harm; without those that were not seen."""
    judged = of_role(of_set(lines, KNOWN), "judged")
    harmful = count([line for line in judged if does_harm(line)], best_call)
    calls = ("doctor", "doctor --base", "doctor --adapter")
    false = [alarms(judged, call) for call in calls]
    alarm = Count(sum(x.found for x in false), sum(x.right for x in false), sum(x.of for x in false))
    reached = bool(harmful.of) and harmful.found >= FOUND * harmful.of and harmful.right >= NAMED * harmful.of
    return {"harmful": harmful, "alarms": alarm, "reached": reached and not alarm.found}


# ---- the page ----


CHOOSING = """
No threshold was chosen on a judged model, but earlier states of the rules were tried on them. Most of what these missed there
they missed on a model of the first kind too. Two rules came from Gemma-3-270M, and need no threshold: gains of norms of queries
are looked at (no model of the first kind has such norms; four faults were not found before), and a zero map of values silences
its layer (one fault had another cause before). Tiny models, and most lines of the others, were measured before these two: each line
has its commit.
"""


def page(lines: Sequence[Line], why: dict[str, str]) -> str:
    """The whole page. `why` says of a fault why it is missed, where that is known."""
    new = {name: [x for x in of_set(lines, name) if any(map(x["said"].get, DOCTORS))] for name in UNSEEN}
    lines = of_set(lines, KNOWN)
    parts = [
        _head(lines),
        *(_beyond(own, name) for name, own in new.items()),
        _models(lines),
        _commands(lines),
        _groups(lines),
        _missed(lines, why),
        _alarms(lines),
        *(_unseen(own, name) for name, own in new.items()),
        _faults(lines),
    ]
    return "\n".join(part.strip("\n") + "\n" for part in parts if part)


def _beyond(lines: Sequence[Line], name: str) -> str:
    if not lines:
        return ""
    harmful = count([x for x in lines if is_fault(x) and does_harm(x)], best_call)
    alarm, told = alarms(lines, "doctor --base"), UNSEEN[name]
    return f"""
{told.lead} [{told.title[0].lower()}{told.title[1:]}](#{told.title.lower().replace(" ", "-")})
doctor finds {harmful.found_text()} of those that do harm, and names the right cause of {harmful.right_text()}; false alarms: {alarm.found} of {alarm.of}.
"""


def _head(lines: Sequence[Line]) -> str:
    planted, harmless = [x for x in lines if is_fault(x)], [x for x in lines if not is_fault(x)]
    reached = goal(lines)
    harmful, alarm = reached["harmful"], reached["alarms"]
    made = Counter(line["commit"] for line in lines)
    commits = ", ".join(f"{commit} ({number:,})" for commit, number in made.most_common())
    kinds = len({x["fault"] for x in planted}), len({x["fault"] for x in harmless})
    if harmful.of:
        verdict = (
            f"On models that no threshold was chosen on, `locater doctor` finds {harmful.found_text()} of the faults that do "
            f"harm, and names the right cause of {harmful.right_text()}; false alarms: {alarm.found} of {alarm.of}. "
            f"Aims are {FOUND:.0%}, {NAMED:.0%} and none: {'reached' if reached['reached'] else 'not reached'}, for faults that were known."
        )
    else:
        verdict = "No model that judges was measured."
    return f"""
# The bench of faults: how far verdicts can be trusted

{verdict}

{kinds[0]} faults in {len(GROUPS)} groups and {kinds[1]} harmless changes, planted {len(planted):,} and {len(harmless):,} times in {len({x["model"] for x in lines})} models
(`src/locater_lab/studies/verdicts/faults.py`), and each command asked about each of them. A fault does harm where it moves the
loss on a few hundred tokens of what the model was made for by {SMALLEST} nats or more, gives NaN, or leaves a file that cannot be
run; merging is held against the adapter merged well. Models of more than {LARGE:,} numbers have each fault and strength once, in
one of its places; smaller ones have every place. A fault is found where the exit status is not 0, and named where the cause
that was planted is among those that the command gives (flags and errors count, where a command gives none). Shares have 95 %
intervals (Wilson).

    make verdicts                      # the demo alone, two minutes
    make verdicts MODELS=folder        # and the models of that folder, and tiny ones; lines of this code are kept

Figures: `docs/results/verdicts.jsonl`, a line for each model, fault and place; each has the commit that made it, here
{commits}.
"""


def _models(lines: Sequence[Line]) -> str:
    rows = []
    for name in models_of(lines):
        own = [x for x in lines if x["model"] == name]
        if own[0]["role"] == "tiny":
            continue
        rows.append(
            {
                "model": name,
                "role": ROLES[own[0]["role"]],
                "loss": next((x["reference"] for x in own if x["group"] not in ("merging",)), None),
                "faults": sum(map(is_fault, own)),
                "harmful": sum(map(does_harm, own)),
                "harmless": sum(not is_fault(x) for x in own),
            }
        )
    tiny = {x["model"] for x in lines if x["role"] == "tiny"}
    rest = f"\nAnd {len(tiny)} tiny models with drawn numbers, one of each family ({', '.join(sorted(x.removeprefix('tiny ') for x in tiny))}): their loss says nothing.\n" if tiny else ""  # fmt: skip
    columns = {"model": "model", "role": "role", "loss": ("loss", ".3f"), "faults": "planted", "harmful": "do harm",
               "harmless": "harmless"}  # fmt: skip
    return f"## Models\n\n{markdown_table(_text(rows), columns)}\n{rest}\n{CHOOSING.strip()}\n"


def _text(rows: Iterable[dict[str, object]]) -> list[dict[str, object]]:
    """Whole numbers as text: a table formats the others."""
    return [{key: str(x) if isinstance(x, int) else x for key, x in row.items()} for row in rows]


def _commands(lines: Sequence[Line]) -> str:
    rows = []
    for role, title in ROLES.items():
        own = of_role(lines, role)
        for call in CALLS:
            merging = [x for x in own if (x["group"] == "merging") == (call == "doctor --adapter")]
            faults = [x for x in merging if is_fault(x)]
            harmful = count([x for x in faults if does_harm(x)], call)
            every, false = count(faults, call), alarms(own, call)
            if every.of:
                rows.append(
                    {
                        "models": title,
                        "command": ASKED[call],
                        "found": harmful.found_text() if harmful.of else None,
                        "named": harmful.right_text() if harmful.of else None,
                        "all": f"{every.found} and {every.right} of {every.of}",
                        "false": f"{false.found} of {false.of}",
                    }
                )
    columns = {"models": "models", "command": "command", "found": "found, of those that do harm", "named": "named rightly",
               "all": "found and named, of all", "false": "false alarms"}  # fmt: skip
    return f"""
## By command

Faults of merging are asked of `doctor --adapter` alone, which has what it takes to know them. `probe` runs the model, on those of at
most {PROBED} heads. Where doctor alone was asked again, answers of other commands are of an earlier commit: each has a hash of the
code that gave it.

{markdown_table(rows, columns)}
"""


def _groups(lines: Sequence[Line]) -> str:
    names = [x for x in models_of(lines) if not x.startswith("tiny ")]
    rows = []
    for group in GROUPS:
        own = [x for x in lines if x["group"] == group]
        row: dict[str, object] = {"group": group}
        for name in names:
            harmful = count([x for x in own if x["model"] == name and does_harm(x)], best_call)
            row[name] = f"{harmful.found} / {harmful.right} / {harmful.of}" if harmful.of else None
        tiny = count([x for x in own if x["role"] == "tiny"], best_call)
        row["tiny"] = f"{tiny.found} / {tiny.right} / {tiny.of}" if tiny.of else None
        rows.append(row)
    if not any(row.get(name) for row in rows for name in (*names, "tiny")):
        return ""
    columns = {"group": "group", **{name: name for name in names}, "tiny": "tiny models (all faults)"}
    return f"""
## By group and model

`locater doctor` with the base, or with the adapter for merging: found / named rightly / planted, of the faults that do harm.

{markdown_table(rows, columns)}
"""


def _missed(lines: Sequence[Line], why: dict[str, str]) -> str:
    """Faults that do harm and are not found, or not named, by model; with what is said in place of it."""
    rows = []
    for line in lines:
        said = line["said"].get(best_call(line))
        if said is None or not does_harm(line) or (said["status"] and said["right"]):
            continue
        told = ", ".join(dict.fromkeys(cause for _, cause in said.get("causes", ()))) or said["says"][:80]
        rows.append(
            {
                "fault": f"{line['fault']} ({line['at']})",
                "model": line["model"],
                "loss": _loss(line),
                "verdict": "not found" if not said["status"] else "another cause",
                "said": told,
                "why": why.get(line["fault"], ""),
            }
        )
    if not any(best_call(line) in line["said"] for line in lines):
        return ""
    if not rows:
        return "## What is missed\n\nNo fault that does harm is missed.\n"
    columns = {
        "fault": "fault",
        "model": "model",
        "loss": "loss",
        "verdict": "verdict",
        "said": "what is said",
        "why": "why",
    }
    return f"## What is missed, and why\n\n{markdown_table(rows, columns)}\n"


def _alarms(lines: Sequence[Line]) -> str:
    rows = []
    for line in lines:
        for call, said in line["said"].items():
            if not is_fault(line) and said["status"]:
                told = ", ".join(cause for _, cause in said.get("causes", ())) or said["says"][:100]
                rows.append(
                    {
                        "change": f"{line['fault']} ({line['at']})",
                        "model": line["model"],
                        "command": ASKED[call],
                        "said": told,
                    }
                )
    columns = {"change": "change", "model": "model", "command": "command", "said": "what is said"}
    table = markdown_table(rows, columns) if rows else "None."
    return f"## False alarms\n\n{table}\n"


def _loss(line: Line) -> str | None:
    moved = change(line)
    if line["reference"] is None:
        return None
    return f"{moved:+.3f}" if moved is not None else "NaN" if line["loss"] == "nan" else "cannot be run"


def _faults(lines: Sequence[Line]) -> str:
    """Each fault: what it is, and for each model the change of the loss and what doctor makes of it."""
    names = [x for x in models_of(lines) if not x.startswith("tiny ")]
    known = table_of_names()
    parts = []
    for group in (*GROUPS, "harmless"):
        rows = []
        own = [x for x in lines if x["group"] == group and x["role"] != "tiny"]
        for fault, at in dict.fromkeys((x["fault"], x["at"]) for x in own):
            row: dict[str, object] = {"fault": f"`{fault}`, {at}", "causes": ""}
            for line in own:
                if (line["fault"], line["at"]) == (fault, at):
                    row["causes"] = " or ".join(line["causes"])
                    said = line["said"].get(best_call(line))
                    sign = (
                        ""
                        if said is None
                        else f" {SIGNS[bool(said['status']), bool(said['right'] and said['status'])]}"
                    )
                    row[line["model"]] = f"{_loss(line) or ''}{sign if is_fault(line) else ''}".strip() or None
            rows.append(row)
        if rows:
            columns = {"fault": "fault, place", "causes": "cause", **{name: name for name in names}}
            told = [
                f"- `{name}`: {known[name].says}" for name in dict.fromkeys(x["fault"] for x in own) if name in known
            ]
            parts.append(f"### {group.capitalize()}\n\n" + "\n".join(told) + f"\n\n{markdown_table(rows, columns)}\n")
    return (
        "## Every fault\n\nChange of the loss, and what `doctor` makes of it (with the base, or the adapter).\n\n"
        + "\n".join(parts)
    )


@dataclass(frozen=True)
class UnseenSet:
    """What the page says of a set of faults that no rule was written for."""

    title: str
    lead: str  # before its title, where the page begins
    file: str
    told: str


UNSEEN = {
    "unseen 1": UnseenSet(
        "Faults that nobody had in mind",
        "All of this is about faults that were known when the rules were written. Doctor was then asked about others: 101 of 133 found, 43 named, "
        "18 named wrongly, 19 false alarms of 75. The rules were mended with these at hand, so they are seen now. Of",
        "unseen.py",
        f"""The rules of doctor were frozen at
{unseen.FROZEN} before these were written down, by somebody who knew [the page of doctor](doctor.md) and the faults above, and had not read the
code of the rules; they were mended with these at hand after that (101 of 133 found, 43 named, 18 named wrongly, 19 false alarms of 75): by the rules of today they are
seen. Lines that were not asked again have the answers of before; each names its commit. They are in no figure above. What counts as the right cause was fixed before doctor was
asked; one was added afterwards, because with two groups of two heads `outputs-by-position-in-group` is a swap.""",
    ),
    "unseen 2": UnseenSet(
        "A second set that nobody had in mind",
        "The rules were mended after that. Of",
        "unseen2.py",
        f"""Somebody wrote
them down who had read neither the rules of doctor, nor their page, nor any of its answers, most of them after threads in which
people tell what went wrong; the rules were mended at the same time by somebody who had not seen them, and frozen at
{unseen2.FROZEN} before doctor was asked. They are in no figure above. What counts as the right cause was fixed before that. These are the answers of the frozen rules;
they were mended with this set at hand afterwards, so that it is seen too.""",
    ),
}


def _unseen(lines: Sequence[Line], name: str) -> str:
    """Faults that no rule was written for: how many are found, what they are called, and each of them."""
    if not lines:
        return ""
    kinds = [len({x["fault"] for x in lines if is_fault(x) == real}) for real in (True, False)]
    trained = [x for x in lines if x["role"] != "tiny"]
    harmful = [x for x in trained if is_fault(x) and does_harm(x)]
    columns = {"faults": "faults", "command": "command", "found": "found", "named": "right cause", "unknown": "no cause",
               "wrong": "wrong cause", "false": "false alarms"}  # fmt: skip
    once = len({(x["model"], x["fault"]) for x in trained}) == len(trained)
    return f"""
## {UNSEEN[name].title}

{kinds[0]} more faults and {kinds[1]} more harmless changes (`src/locater_lab/studies/verdicts/{UNSEEN[name].file}`). {UNSEEN[name].told} Where doctor has no cause for what was done, none counts as right, and the honest
answer is that it is unknown: it has one for {sum(bool(x["causes"]) for x in harmful)} of the {len(harmful)} that do harm. Each is planted {"once in" if once else "at its places and strengths in"}
{", ".join(models_of(trained))}. Intervals take these for independent, which they are
not: "each once" counts a fault once, by the worst answer of the models that it harms.

{markdown_table(_text(_unseen_counts(lines)), columns)}

Change of the loss, and what `doctor` makes of it (with the base, or the adapter): the right cause ("named"), no cause
("unknown"), the wrong ones by name, or "missed", with the change that it reports.

{_unseen_table(trained, name)}
"""


def _unseen_counts(lines: Sequence[Line]) -> list[dict[str, object]]:
    rows: list[dict[str, object]] = []
    planted, every = [x for x in lines if is_fault(x) and x["role"] != "tiny"], lines
    harmful, tiny = [x for x in planted if does_harm(x)], [x for x in every if x["role"] == "tiny"]
    groups = [("that do harm", harmful), ("that do harm, each once", harmful), ("all", planted)]
    for title, some in [*groups, *([("of tiny models", [x for x in tiny if is_fault(x)])] if tiny else [])]:
        lines = tiny if some and some[0]["role"] == "tiny" else [x for x in every if x["role"] != "tiny"]
        for call in DOCTORS:
            told = [(x["fault"], answer(x, call)) for x in some if call in x["said"]]
            if "once" in title:  # missed, a wrong cause, none, the right one
                worst = {"missed": 0, "unknown": 2, "named": 3}
                told = list(dict(sorted(told, key=lambda item: -worst.get(item[1], 1))).items())
            missed, named, unknown = ([x for _, x in told].count(word) for word in ("missed", "named", "unknown"))
            false = alarms(lines, call)
            rows.append(
                {
                    "faults": title,
                    "command": ASKED[call],
                    "found": share_text(len(told) - missed, len(told)),
                    "named": share_text(named, len(told)),
                    "unknown": unknown,
                    "wrong": share_text(len(told) - missed - named - unknown, len(told)),
                    "false": share_text(false.found, false.of)
                    if false.of and title in ("all", "of tiny models")
                    else None,
                }
            )
    return rows


def _unseen_table(lines: Sequence[Line], name: str) -> str:
    says = {x.name: x.says for x in table_of_names().values() if x.belongs == name}
    rows = []
    for fault in sorted(says, key=lambda fault: any(x["fault"] == fault and not is_fault(x) for x in lines)):
        own = [x for x in lines if x["fault"] == fault and best_call(x) in x["said"]]
        if own:
            causes = (" or ".join(own[0]["causes"]) or "none") if is_fault(own[0]) else "harmless"
            row: dict[str, object] = {"fault": f"`{fault}`: {says[fault]}", "causes": causes}
            for model in models_of(own):
                told = {x["at"]: f"{_loss(x) or ''} {_unseen_sign(x)}".strip() for x in own if x["model"] == model}
                row[model] = "; ".join(f"{at}: {x}" if len(told) > 1 else x for at, x in told.items())
            rows.append(row)
    return markdown_table(rows, {"fault": "fault", "causes": "right", **{name: name for name in models_of(lines)}})


def _unseen_sign(line: Line) -> str:
    """Of a fault what doctor answers, and of a missed one the change that it reports; of a harmless change an alarm."""
    told, said = answer(line, best_call(line)), line["said"][best_call(line)].get("causes", ())
    severity = "change" if told == "missed" else "fault"
    causes = ", ".join(dict.fromkeys(cause for kind, cause in said if kind == severity))
    if is_fault(line):
        return f"missed ({causes or 'no change'})" if told == "missed" else told
    return "" if told == "missed" else f"alarm: {causes}"
