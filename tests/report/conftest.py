"""One browser for all page tests of a process; what a test opens in it is closed behind it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import pytest

from tests.report.visits import CHROMIUM


@pytest.fixture(scope="session")
def chromium() -> Iterator[Any]:
    from playwright.sync_api import sync_playwright

    with sync_playwright() as play:
        sandbox = ["--no-sandbox"] if os.geteuid() == 0 else []
        opened = play.chromium.launch(executable_path=CHROMIUM, args=[*sandbox, "--disable-gpu"])
        yield opened
        opened.close()


@pytest.fixture
def browser(chromium: Any) -> Iterator[Any]:
    yield chromium
    for context in chromium.contexts:  # pages that stay open go on drawing, and slow the next test
        context.close()
