"""What this machine kept from being tested, said at the end of a run, where nobody overlooks it."""

from __future__ import annotations

from importlib.util import find_spec

import pytest

NO_BROWSER = "no Chromium on this machine (make browser installs Debian's)"
avoided: str | None = None  # what was done about a processor's broken AMX


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Called once, in the process that collects the results of all workers."""
    from locater_lab.engine.trained_models import why_unavailable  # which imports PyTorch: no worker needs it

    pages = [report for report in terminalreporter.stats.get("skipped", []) if NO_BROWSER in str(report.longrepr)]
    if pages:
        said = f"{len(pages)} tests of pages were skipped: there is no Chromium here; `make browser` installs one"
        terminalreporter.write_line(said, yellow=True)
    if why := why_unavailable():
        terminalreporter.write_line(f"tests of the sentence model were skipped: {why}", yellow=True)
    if find_spec("beartype") is None:
        terminalreporter.write_line("beartype is not installed: shapes were not checked at run time", yellow=True)
    if avoided:
        terminalreporter.write_line(avoided, yellow=True)
