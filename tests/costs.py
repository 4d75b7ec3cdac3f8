"""`--costs N`: which files and tests take most processor time, children included, in whatever process they ran.

Durations tell how long a test waited, on a busy machine mostly for others; processor time is what it takes from them.
"""

from __future__ import annotations

import resource
import time
from collections import defaultdict
from collections.abc import Iterator

import pytest

from tests import processes

_spent = 0.0


def _processor_time() -> float:
    ended = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + ended.ru_utime + ended.ru_stime + processes.spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Iterator[None]:
    """Adds to each phase's report what this process has spent since the phase before; xdist sends it on."""
    global _spent
    report = yield
    now = _processor_time()
    report.spent = now - _spent
    _spent = now
    return report


def pytest_runtest_logstart() -> None:
    """Imports and collection, and what xdist does between tests, are no test's."""
    global _spent
    _spent = _processor_time()


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter, config: pytest.Config) -> None:
    tests: dict[str, float] = defaultdict(float)
    files: dict[str, float] = defaultdict(float)
    for reports in terminalreporter.stats.values():
        for report in reports:
            if spent := getattr(report, "spent", 0.0):
                tests[report.nodeid] += spent
                files[report.nodeid.split("::")[0]] += spent
    terminalreporter.section(f"processor time: {sum(tests.values()):.0f} s in {len(tests)} tests")
    for costs in (files, tests):
        for name, spent in sorted(costs.items(), key=lambda item: -item[1])[: config.getoption("--costs")]:
            terminalreporter.write_line(f"{spent:8.2f} s {name}")
