"""Steps of a run: which are missing from a regular sequence, and where sources that failed would have been."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple


class Place(NamedTuple):
    """Where a source that was read belongs."""

    source: str
    run: str
    step: int | None


def gaps(steps: Sequence[int]) -> list[dict[str, int]]:
    """Where checkpoints are missing: `after` and `before` are the steps around a gap, `every` the usual distance.

    A gap is a distance that is a multiple of the distance on both sides of it. Doubling steps and a schedule that
    changes have none, and where gaps are more than half as many as the usual distances, the sequence is not regular.

    >>> gaps([0, 1000, 2000, 4000, 5000])
    [{'after': 2000, 'before': 4000, 'every': 1000, 'missing': 1}]
    >>> gaps([0, 1, 2, 4, 8, 16, 32]), gaps([0, 100, 200, 300, 1300, 2300, 3300])
    ([], [])
    """
    distances = [b - a for a, b in pairwise(steps)]
    found = []
    for at, distance in enumerate(distances):
        before = next((x for x in reversed(distances[:at]) if x < distance), None)
        after = next((x for x in distances[at + 1 :] if x < distance), None)
        if before is not None and before == after and distance % before == 0:
            found.append((before, steps[at], steps[at + 1]))
    usual, irregular = Counter(distances), Counter(every for every, _, _ in found)
    return [
        {"after": after, "before": before, "every": every, "missing": (before - after) // every - 1}
        for every, after, before in found
        if usual[every] >= 2 * irregular[every]
    ]


def place_failures(errors: Mapping[str, str], places: Sequence[Place]) -> list[dict[str, Any]]:
    """Each failed source with its reason, and the run and step that its name says, where sources that were read have
    names of the same form (`a/step-300` next to `a/step-200`, which is step 200 of a); else null for both.
    """
    forms, known = _forms(places), {(place.run, place.step) for place in places}
    failed = []
    for source, reason in errors.items():
        run, step = _read_name(source, forms)
        if (run, step) in known:  # another source has this step
            run, step = None, None
        failed.append({"source": source, "run": run, "step": step, "reason": reason})
    return failed


def _forms(places: Sequence[Place]) -> list[tuple[str, re.Pattern[str]]]:
    """Patterns of names with a number that was the step, by run."""
    forms: dict[tuple[str, str], re.Pattern[str]] = {}
    for place in places:
        for number in re.finditer(r"\d+", place.source):
            if place.step is not None and int(number[0]) == place.step:
                head, tail = place.source[: number.start()], place.source[number.end() :]
                pattern = rf"{re.escape(head)}(\d+){re.escape(tail)}"
                forms.setdefault((place.run, pattern), re.compile(pattern))
    return [(run, pattern) for (run, _), pattern in forms.items()]


def _read_name(source: str, forms: Sequence[tuple[str, re.Pattern[str]]]) -> tuple[str | None, int | None]:
    """Run and step, where all forms that fit agree on them.

    >>> _read_name("a/step-300", _forms([Place("a/step-200", "a", 200)]))
    ('a', 300)
    """
    answers = {(run, int(match[1])) for run, pattern in forms if (match := pattern.fullmatch(source))}
    return answers.pop() if len(answers) == 1 else (None, None)
