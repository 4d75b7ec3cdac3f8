"""How studies use a machine: several of them, or parts of one, in processes of their own; the device, a training step
as a CUDA graph; and numbers that several of them take: normal draws that are the same everywhere, slopes, differences.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_all_start_methods, get_context
from typing import TypeVar

import torch
from torch import Tensor

from locater_lab.engine.reproduction import Paper, Setting, Study, TimedResults, is_measured, measure_timed, studies_of


def draw_normal(*shape: int, seed: int) -> Tensor:
    """Standard normal, float64, the same wherever it is drawn.

    >>> bool((draw_normal(2, 3, seed=1) == draw_normal(2, 3, seed=1)).all()), draw_normal(2, seed=0).dtype
    (True, torch.float64)
    """
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def log_slope(at: Sequence[float], values: Sequence[float]) -> float:
    """Slope of log values over log `at`, by least squares.

    >>> round(log_slope([10, 100], [3.0, 0.03]), 6)
    -2.0
    """
    x, y = (torch.tensor(numbers, dtype=torch.float64).log() for numbers in (at, values))
    x = x - x.mean()
    return float((x * y).sum() / x.square().sum())


def relative_difference(tensor: Tensor, reference: Tensor) -> float:
    """Largest entry of the difference over the largest of the reference.

    >>> relative_difference(torch.tensor([1.0, 3.0]), torch.tensor([1.0, 4.0]))
    0.25
    """
    return float((tensor - reference).abs().max() / reference.abs().max())


# ---- studies of one or several papers at a time, in processes that share the work ----


Task = tuple[Paper, Study, Setting]
_tasks: list[Task] = []  # of this process and, by fork, of its workers: settings hold functions that cannot be sent


def measure_in_parallel(
    papers: Sequence[tuple[Paper, Setting]],
    claim: str | None,
    workers: int,
    cost: Callable[[str, str], float] = lambda *_: 0.0,
    failures: dict[str, Exception] | None = None,
) -> dict[str, dict[str, TimedResults]]:
    """Results by paper and title of the study, of which `cost` knows the longest. Nothing where processes cannot be
    forked, or one would do: then `reproduce` measures. A study that breaks loses its paper and no other: the first
    exception of each is in `failures`, where that is given, else raised.
    """
    tasks = [(paper, study, setting) for paper, setting in papers for study in studies_of(paper, claim)]
    tasks = [task for task in tasks if is_measured(task[1], task[2].quick, claim is not None)]
    tasks.sort(key=lambda task: -cost(task[0].name, task[1].title))  # the longest first, so that none ends alone
    results: dict[str, dict[str, TimedResults]] = {paper.name: {} for paper, _ in papers}
    if workers < 2 or len(tasks) < 2 or "fork" not in get_all_start_methods():
        return results
    _tasks[:] = tasks
    with ProcessPoolExecutor(min(workers, len(tasks)), get_context("fork")) as pool:
        waiting = {pool.submit(_measure_task, number): task for number, task in enumerate(tasks)}
        for count, done in enumerate(as_completed(waiting), 1):
            paper, study, setting = waiting[done]
            try:
                results[paper.name][study.title] = result = done.result()
            except Exception as error:
                if failures is None:
                    raise
                failures.setdefault(paper.name, error)
                setting.log(f"{paper.name}: {study.title} broke: {error} ({count} of {len(tasks)} studies)")
                continue
            setting.log(f"{paper.name}: {study.title}, {result.seconds:.0f} s ({count} of {len(tasks)} studies)")
    return results


def _measure_task(number: int) -> TimedResults:
    _, study, setting = _tasks[number]
    return measure_timed(study, setting)


def processor_count() -> int:
    """How many this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- parts of one study ----


Part = TypeVar("Part")
Found = TypeVar("Found")


def map_parts(work: Callable[[Setting, Part], Found], parts: list[Part], setting: Setting) -> list[Found]:
    """`work` on each part, in their order; without jobs here, one after the other.

    >>> map_parts(lambda setting, part: part + setting.quick, [1, 2], Setting(quick=True))
    [2, 3]
    """
    if setting.jobs < 2:
        return [work(setting, part) for part in setting.each(parts)]
    sent = replace(setting, progress=None, log=print)  # bars and closures stay here
    # a team of threads in each would only fight over the cores
    context, alone = get_context("spawn"), torch.set_num_threads
    with ProcessPoolExecutor(min(setting.jobs, len(parts)), context, alone, (1,)) as pool:
        # the first that breaks is raised, and what has not begun is dropped
        found = pool.map(work, repeat(sent), parts)
        return [one for _, one in zip(setting.each(parts), found, strict=True)]


def device_of_study(setting: Setting) -> str:
    """Quick runs are small enough for the CPU."""
    return "cuda" if torch.cuda.is_available() and not setting.quick else "cpu"


# ---- CUDA graphs ----


WARM_UP_STEPS = 3  # steps that capturing needs before it


def as_cuda_graph(step: Callable[[], None]) -> Callable[[], None]:
    """`step`, taken a few times and captured; what is returned replays it. Tensors that it reads and writes stay where
    they are.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(WARM_UP_STEPS):
            step()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()

    def again(held: object = step) -> None:  # what a graph reads and writes has to stay alive
        graph.replay()

    return again
