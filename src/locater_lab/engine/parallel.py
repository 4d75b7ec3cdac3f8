"""Studies of one or several papers at a time, in processes that share the work."""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_all_start_methods, get_context

from locater_lab.engine.papers import Paper, Setting, Study, Timed, studies_of, timed

Task = tuple[Paper, Study, Setting]
_tasks: list[Task] = []  # of this process and, by fork, of its workers: settings hold functions that cannot be sent


def measure_at_once(
    papers: Sequence[tuple[Paper, Setting]], claim: str | None, workers: int
) -> dict[str, dict[str, Timed]]:
    """Results by paper and title of the study. Nothing where processes cannot be forked, or one would do: then
    `reproduce` measures.
    """
    tasks = [(paper, study, setting) for paper, setting in papers for study in studies_of(paper, claim)]
    tasks = [task for task in tasks if task[1].measure is not None]
    results: dict[str, dict[str, Timed]] = {paper.name: {} for paper, _ in papers}
    if workers < 2 or len(tasks) < 2 or "fork" not in get_all_start_methods():
        return results
    _tasks[:] = tasks
    with ProcessPoolExecutor(min(workers, len(tasks)), get_context("fork")) as pool:
        waiting = {pool.submit(_work, number): task for number, task in enumerate(tasks)}
        for count, done in enumerate(as_completed(waiting), 1):
            paper, study, setting = waiting[done]
            results[paper.name][study.title] = result = done.result()
            setting.tell(f"{paper.name}: {study.title}, {result.seconds:.0f} s ({count} of {len(tasks)} studies)")
    return results


def _work(number: int) -> Timed:
    _, study, setting = _tasks[number]
    return timed(study, setting)


def processors() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
