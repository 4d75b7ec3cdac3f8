"""Which task comes next. Jobs whose worker died run alone, and are given up at the third death.

Alone means when nothing else runs: a job may have died of the memory that others took.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Sequence

from locater.commands.fleet.cache_keys import Job, Task

TRIES = 3


class Schedule:
    """Waiting tasks, and suspects: jobs that were running when a worker died."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self._waiting = deque(tasks)
        self._suspects: deque[Job] = deque()
        self._deaths: Counter[tuple[str, int]] = Counter()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._suspects)

    def next(self, running: int) -> Task | None:
        """The next task, given how many are running; None if there is none, or if it has to wait."""
        if self._waiting:
            return self._waiting.popleft()
        if self._suspects and not running:
            return (self._suspects.popleft(),)
        return None

    def requeue(self, jobs: Sequence[Job]) -> None:
        """Put jobs that a dead worker had not started first in line."""
        if jobs:
            self._waiting.appendleft(tuple(jobs))

    def record_death(self, job: Job) -> int | None:
        """Count a death of a worker during this job. Returns the number of deaths if the job is given up, else None."""
        self._deaths[job.name] += 1
        if self._deaths[job.name] >= TRIES:
            return self._deaths[job.name]
        self._suspects.append(job)
        return None
