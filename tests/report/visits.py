"""Pages opened in a real browser."""

from __future__ import annotations

import json
import re
import shutil
import time
from pathlib import Path
from typing import Any

import pytest

from tests.summary import NO_BROWSER

# the shell without windows takes a third of the time
NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
CHROMIUM = next((path for name in NAMES if (path := shutil.which(name))), None)
needs_browser = pytest.mark.skipif(CHROMIUM is None, reason=NO_BROWSER)


class Visit:
    """A page opened offline; everything on its console is kept."""

    def __init__(self, browser: Any, page: Path, scheme: str = "light", width: int = 1320, choice: str = "") -> None:
        self.context = browser.new_context(offline=True, color_scheme=scheme, viewport={"width": width, "height": 900})
        self.page = self.context.new_page()
        self.console: list[str] = []
        self.page.on("console", lambda m: self.console.append(m.text))
        self.page.on("pageerror", lambda e: self.console.append(str(e)))
        self.page.goto(page.as_uri() + choice)

    def until(self, expression: str, seconds: float = 60.0) -> None:
        """Wait until an expression is true. `wait_for_function` would evaluate text inside the page, which the page's
        own policy forbids.
        """
        end = time.monotonic() + seconds
        while not self.page.evaluate(expression):
            assert time.monotonic() < end, f"not within {seconds} s: {expression}"
            self.page.wait_for_timeout(20)

    def text(self, selector: str) -> str:
        return str(self.page.text_content(selector))

    def inside(self, selector: str) -> str:
        return str(self.page.inner_html(selector))


def data_of(page: Path) -> dict[str, Any]:
    """The data that a page carries."""
    script = re.search(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    assert script is not None
    return json.loads(script[1])
