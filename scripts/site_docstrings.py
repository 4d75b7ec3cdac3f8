"""Examples in docstrings (>>> ...) as code on the documentation site: Markdown would take them for quotations."""

from __future__ import annotations

import re
from typing import Any

from griffe import Extension, Object

EXAMPLE = re.compile(r"(?m)^>>> .*(?:\n.+)*")


class Doctests(Extension):
    """Fences every example of every docstring."""

    def on_object(self, *, obj: Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(lambda found: f"```pycon\n{found[0]}\n```", obj.docstring.value)
