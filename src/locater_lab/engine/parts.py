"""Parts of a study, several at a time in processes of their own where the setting has jobs; and the device of what they
train.

A part sets its own seeds, so that it finds the same wherever it runs. What it returns travels between processes: plain
numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from itertools import repeat
from multiprocessing import get_context
from typing import TypeVar

import torch

from locater_lab.engine.papers import Setting

Part = TypeVar("Part")
Found = TypeVar("Found")


def every(work: Callable[[Setting, Part], Found], parts: list[Part], setting: Setting) -> list[Found]:
    """`work` on each part, in their order; without jobs here, one after the other.

    >>> every(lambda setting, part: part + setting.quick, [1, 2], Setting(quick=True))
    [2, 3]
    """
    if setting.jobs < 2:
        return [work(setting, part) for part in setting.each(parts)]
    sent = replace(setting, progress=None, tell=print)  # bars and closures stay here
    # a team of threads in each would only fight over the cores
    context, alone = get_context("spawn"), torch.set_num_threads
    with ProcessPoolExecutor(min(setting.jobs, len(parts)), context, alone, (1,)) as pool:
        # the first that breaks is raised, and what has not begun is dropped
        found = pool.map(work, repeat(sent), parts)
        return [one for _, one in zip(setting.each(parts), found, strict=True)]


def device(setting: Setting) -> str:
    """Quick runs are small enough for the CPU."""
    return "cuda" if torch.cuda.is_available() and not setting.quick else "cpu"
