"""Sentences about the checkpoints of runs: what was read, what comes first, and what is missing or repeated."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

from locater.findings import FLAGS
from locater.report.tables import counted

Document = Mapping[str, Any]
NAMED = 4  # runs, flags or steps that a sentence names


def run_labels(names: Sequence[str]) -> dict[str, str]:
    """What to call runs: the shortest ends of their paths that tell them apart.

    >>> run_labels(["/data/a/small", "/data/b/small", "/data/b/large"])
    {'/data/a/small': 'a/small', '/data/b/small': 'b/small', '/data/b/large': 'b/large'}
    """
    parts = {name: [part for part in name.split("/") if part] or [name] for name in names}
    for count in range(1, max((len(x) for x in parts.values()), default=0) + 1):
        ends = {name: "/".join(x[-count:]) for name, x in parts.items()}
        if len({*ends.values()}) == len(ends):
            return ends
    return {name: name for name in names}


def failure_words(source: str, reason: str) -> str:
    """Source and reason; the source is not said twice where the reason names it."""
    return reason if source in reason else f"{source} ({reason})"


def overview(document: Document) -> str:
    """Runs, checkpoints and heads."""
    runs = document["runs"]
    labels = run_labels([run["name"] for run in runs])
    if not runs:
        return "No checkpoint was read."
    if len(runs) == 1:
        return f"{_run_words(runs[0])}."
    named = "; ".join(f"{labels[run['name']]}: {_run_words(run)}" for run in runs[:NAMED])
    more = f"; and {counted(len(runs) - NAMED, 'more run')}" if len(runs) > NAMED else ""
    return f"{counted(len(runs), 'run')}. {named}{more}."


def _run_words(run: Mapping[str, Any]) -> str:
    steps, heads = run["steps"], sum(layer["heads"] for layer in run["layers"])
    what = f"{counted(len(steps), 'checkpoint')} of {counted(heads, 'head')} in {counted(len(run['layers']), 'layer')}"
    if not run["numbered"] or len(steps) < 2:
        return what
    distances = {b["step"] - a["step"] for a, b in pairwise(steps)}
    every = f", every {distances.pop():,}" if len(distances) == 1 else ""
    return f"{what}, steps {steps[0]['step']:,} to {steps[-1]['step']:,}{every}"


def first_faults(document: Document) -> str:
    """The step at which each fault is first seen, by run."""
    parts = []
    labels = run_labels([run["name"] for run in document["runs"]])
    for run in document["runs"]:
        order = {flag.name: place for place, flag in enumerate(FLAGS)}
        faults = [x for x in run["first"] if x["fault_step"] is not None]
        faults.sort(key=lambda x: (x["fault_step"], order.get(x["flag"], len(order))))
        words = ", ".join(f"{x['flag']} from {step_words(run, x['fault_step'])}" for x in faults)
        parts.append((labels[run["name"]], words))
    if not any(words for _, words in parts):
        return "No head has a fault at any step." if parts else ""
    if len(parts) == 1:
        return f"First faults: {parts[0][1]}."
    named = "; ".join(f"{name}: {words or 'none'}" for name, words in parts[:NAMED])
    more = f"; and {counted(len(parts) - NAMED, 'more run')}" if len(parts) > NAMED else ""
    return f"First faults: {named}{more}."


def step_words(run: Mapping[str, Any], step: int) -> str:
    """`step 300`, or the source where checkpoints have no steps."""
    if run["numbered"]:
        return f"step {step:,}"
    return str(run["steps"][step]["source"])


def irregularities(document: Document) -> list[str]:
    """Gaps, failed sources, repeated weights, changes of shape, and sources without a place: one sentence each."""
    runs, sentences = document["runs"], []
    labels = run_labels([run["name"] for run in runs])
    gaps = [(run, gap) for run in runs for gap in run["gaps"]]
    if gaps:
        missing = sum(gap["missing"] for _, gap in gaps)
        named = ", ".join(_gap_words(gap) for _, gap in gaps[:NAMED])
        sentences.append(f"{counted(missing, 'step')} {_are(missing)} missing: {named}{_more(gaps)}.")
    failed = document["failed"]
    if failed:
        named = "; ".join(failure_words(x["source"], x["reason"]) for x in failed[:NAMED])
        sentences.append(f"{counted(len(failed), 'source')} could not be read: {named}{_more(failed)}.")
    repeats = sum(len(group) - 1 for group in document["duplicates"])
    if repeats:
        total = sum(len(run["steps"]) for run in runs)
        have = "has" if repeats == 1 else "have"
        groups = [_group_words(group, labels) for group in document["duplicates"]]
        sentences.append(
            f"{repeats:,} of {counted(total, 'checkpoint')} {have} the weights of another: "
            f"{'; '.join(groups[:NAMED])}{_more(groups)}."
        )
    for change in document["shapes"]:
        parts = ", ".join(change["parts"][:NAMED])
        sentences.append(f"{change['run']} changes its shape and is shown in parts: {parts}{_more(change['parts'])}.")
    aside = [x for run in runs for x in run["aside"]]
    if aside:
        reasons = Counter(x["reason"] for x in aside)
        named = "; ".join(f"{x['source']} ({x['reason']})" for x in aside[:NAMED])
        sentences.append(f"{counted(reasons.total(), 'checkpoint')} not shown: {named}{_more(aside)}.")
    return sentences


def _gap_words(gap: Mapping[str, int]) -> str:
    first, last = gap["after"] + gap["every"], gap["before"] - gap["every"]
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _group_words(group: Sequence[Mapping[str, Any]], labels: Mapping[str, str]) -> str:
    """`step 200 = 300 = 400`, or with runs `a 200 = b 200`."""
    with_run = len(labels) > 1
    named = [f"{labels[x['run']]} {x['step']:,}" if with_run else f"{x['step']:,}" for x in group]
    more = f" and {len(named) - NAMED:,} more" if len(named) > NAMED else ""
    return f"{'' if with_run else 'step '}{' = '.join(named[:NAMED])}{more}"


def _more(items: Sequence[Any]) -> str:
    return f" and {len(items) - NAMED:,} more" if len(items) > NAMED else ""


def _are(count: int) -> str:
    return "is" if count == 1 else "are"
