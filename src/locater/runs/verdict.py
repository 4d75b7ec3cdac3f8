"""What to say of a run when it ends, fails or is asked: Verdict, Why, Next.

    monitor.verdict()           # in the loop
    locater doctor run/         # from its log

The loss decides whether a run failed; the warnings say which heads were under stress, and since when. How often that
is right was measured: docs/results/run-verdicts.md.
"""

from __future__ import annotations

import json
import math
import re
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from locater.findings.conditions import AT_HOT_RATES, NO_STRESS, STUCK, Remedy
from locater.runs.records import Record
from locater.runs.run_log import Run
from locater.version import SCHEMA, __version__

SMOOTH = 5  # losses in a mean
RISE, LASTING = 0.5, 30  # nats above its best, steps in a row: the loss has risen
NEAR = 0.02  # of log V: a loss that never was further below it has learned nothing
SHORTEST = 30  # steps with a known loss, below which a loss that does not rise says nothing yet
NAMED = 6  # heads in a line
# warnings of logits that are far apart, which a lower rate helps; others are of something else that a user asked for
HOT = re.compile(r"exploding|nonfinite|locked|(max_logit|spread)\s*>.*|entropy(_ratio)?\s*<.*")

State = Literal["healthy", "stressed", "recovered", "failed", "stuck", "too short"]
FAILED: tuple[State, ...] = ("failed", "stuck")


class LossCourse:
    """What the loss of a run did, from its losses one by one, in bounded memory.

    >>> course = LossCourse()
    >>> course.extend((step, 2.0 if step < 40 else 4.0) for step in range(1, 100))
    >>> course.rose_at, course.is_high, course.best, course.count
    (41, True, 2.0, 99)
    """

    def __init__(self, rise: float = RISE, lasting: int = LASTING, near: float = NEAR) -> None:
        self.rise, self.lasting, self.near = rise, lasting, near
        self.count = self.first_step = self.step = self.best_at = 0
        self.first = self.last = self.best = math.inf
        self.lost_at: int | None = None  # the first loss that is not finite
        self.rose_at: int | None = None  # the first step of the last rise
        self._high_since: int | None = None
        self._window: deque[float] = deque(maxlen=SMOOTH)

    def extend(self, points: Iterable[tuple[int, float]]) -> None:
        for step, loss in points:
            self.add(step, loss)

    def add(self, step: int, loss: float) -> None:
        self._window.append(loss)
        mean = sum(self._window) / len(self._window)
        if not self.count:
            self.first, self.first_step = loss, step
        self.count, self.step, self.last = self.count + 1, step, mean
        if not math.isfinite(loss):
            self.lost_at = step if self.lost_at is None else self.lost_at
        elif mean < self.best:
            self.best, self.best_at = mean, step
        if mean <= self.best + self.rise:
            self._high_since = None
            return
        self._high_since = step if self._high_since is None else self._high_since
        if step - self._high_since + 1 >= self.lasting:
            self.rose_at = self._high_since

    @property
    def is_high(self) -> bool:
        """Whether the loss has risen and not come back, or is not finite."""
        lost = self.count > 0 and not math.isfinite(self.last)
        return lost or (self.rose_at is not None and self._high_since is not None)

    def has_learned(self, outputs: int) -> bool:
        """Whether the loss was ever clearly below that of a model that takes all its outputs for equally likely."""
        return self.best < (1 - self.near) * math.log(outputs)


@dataclass(frozen=True)
class RunVerdict:
    """Three lines about a run, and what they rest on. `heads` are (layer, head), those warned of first in front."""

    state: State
    verdict: str
    why: str
    next: str
    heads: tuple[tuple[int, int], ...] = ()
    since: int | None = None  # the step of the first warning
    stressed_before: bool = False  # whether logits were far apart before the loss showed a failure, if it showed one
    outputs: int | None = None

    def lines(self) -> tuple[str, str, str]:
        return f"Verdict   {self.verdict}", f"Why       {self.why}", f"Next      {self.next}"

    def __str__(self) -> str:
        return "\n".join(self.lines())

    def to_json(self) -> str:
        document = {"schema": SCHEMA, "locater": __version__, **vars(self), "heads": list(map(list, self.heads))}
        return json.dumps(document, allow_nan=False)


def verdict_of_run(run: Run, course: LossCourse | None = None) -> RunVerdict:
    """The verdict of a run that was read from its log; `course` is that of its losses, where it is known already."""
    if course is None:
        course = LossCourse()
        course.extend(run.losses)
    known = [record["outputs"] for record in run.steps if type(record.get("outputs")) is int]
    observed = len(run.steps)
    return verdict_of(course, run.warnings, known[-1] if known else None, observed)


def verdict_of(
    course: LossCourse,
    warnings: Sequence[Record],
    outputs: int | None = None,
    observed: int = 0,
    failure: str = "",
) -> RunVerdict:
    """Judge a run by what its loss did and by its warnings.

    `outputs` is the number of outputs of the model (its vocabulary, or its classes), `failure` the exception that ended
    the run.
    """
    controls: list[str] = next((w["controls"] for w in warnings if isinstance(w.get("controls"), list)), [])
    of_heads = (w for w in warnings if type(w.get("layer")) is int and type(w.get("head")) is int)
    stress = sorted(of_heads, key=lambda w: w["step"])
    hot = all(HOT.fullmatch(str(w["flag"])) for w in stress)
    heads = tuple(dict.fromkeys((w["layer"], w["head"]) for w in stress))
    since = stress[0]["step"] if stress else None
    failed_at = _failed_at(course)
    early = hot and since is not None and (failed_at is None or since < failed_at)
    state = _state(course, outputs, bool(heads))
    said = _VERDICTS[state]
    if state == "failed":
        how = "is not finite" if not math.isfinite(course.last) else "rose"
        said = f"failed: the loss {how} since step {failed_at}"
    elif state == "stressed":
        loss = "the loss has not risen" if course.count else "no loss was logged"
        said = f"{count_heads(heads)} {'under stress' if hot else 'warned of'} since step {since}; {loss}"
    elif state == "stuck":
        said = f"stuck: nothing was learned in {course.count} steps"
    if failure:
        said = f"ended by {failure} after step {course.step}; until then: {said}"
    why = "; ".join(filter(None, (_loss_text(course, outputs, state), _heads_text(stress, heads, observed, failed_at))))
    return RunVerdict(state, said, why, _next_text(state, early, failed_at, controls), heads, since, early, outputs)


def _failed_at(course: LossCourse) -> int | None:
    """Where the loss showed a failure, over or not: its last rise, or the first loss that is not finite."""
    return min((x for x in (course.rose_at, course.lost_at) if x is not None), default=None)


def _state(course: LossCourse, outputs: int | None, stressed: bool) -> State:
    if course.is_high:
        return "failed"
    if course.count >= SHORTEST and outputs is not None and outputs > 1 and not course.has_learned(outputs):
        return "stuck"
    if course.rose_at is not None or course.lost_at is not None:
        return "recovered"
    if stressed:
        return "stressed"
    return "healthy" if course.count >= SHORTEST else "too short"


_VERDICTS: dict[State, str] = {
    "healthy": "healthy",
    "recovered": "the loss rose, and came back",
    "too short": f"too early to say: fewer than {SHORTEST} steps with a loss",
    "failed": "",
    "stressed": "",
    "stuck": "",
}


def _loss_text(course: LossCourse, outputs: int | None, state: State) -> str:
    if not course.count:
        return "no loss was logged"
    ends = f"{course.first:.4g} at step {course.first_step} to {course.last:.4g} at step {course.step}"
    lowest = f", its lowest {course.best:.4g} at step {course.best_at}" if course.best_at else ""
    text = f"the loss went from {ends}{lowest}"
    if state == "stuck" and outputs is not None:
        text += (
            f"; log V = {math.log(outputs):.4g} is that of a model for which all {outputs} outputs are equally likely"
        )
    if course.lost_at is not None:
        text += f"; it was not finite at step {course.lost_at}"
    if state == "recovered" and course.rose_at is not None:
        text += f"; it rose by {course.rise:g} at step {course.rose_at}"
    return text


def count_heads(heads: Sequence[tuple[int, int]]) -> str:
    return f"{len(heads)} head{'s' * (len(heads) != 1)}"


def _heads_text(
    stress: Sequence[Record], heads: Sequence[tuple[int, int]], observed: int, failed_at: int | None
) -> str:
    """Which heads were warned of first, of what, since when, and whether that was before the loss rose."""
    if not heads:
        return f"no head was warned of in {observed} observed step{'s' * (observed != 1)}"
    since = stress[0]["step"]
    first = list(dict.fromkeys((w["layer"], w["head"]) for w in stress if w["step"] == since))
    names = ", ".join(f"{layer}.{head}" for layer, head in first[:NAMED])
    names += f" and {len(first) - NAMED} more" if len(first) > NAMED else ""
    flags = ", ".join(dict.fromkeys(str(w["flag"]) for w in stress if w["step"] == since))
    later = f", {len(heads) - len(first)} more later" if len(heads) > len(first) else ""
    order = "" if failed_at is None else ", before the loss" if since < failed_at else ", after the loss"
    return f"heads {names} ({flags}) since step {since}{later}{order}"


def _next_text(state: State, early: bool, failed_at: int | None, controls: Sequence[str]) -> str:
    if state == "stuck":
        return STUCK.action
    if state == "failed":
        remedy = AT_HOT_RATES if early else NO_STRESS
        return Remedy(remedy.action.format(step=failed_at), remedy.controls).words(controls if early else [])
    if state == "stressed":
        look = "look at these heads (locater watch)"
        return f"{look}; if the loss suffers: {AT_HOT_RATES.words(controls)}" if early else look
    return "look at the batches and the learning rate there" if state == "recovered" else "nothing to do"
