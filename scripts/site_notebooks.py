"""Notebooks as pages of the site: a page of Markdown and its pictures for each, made from the outputs that are stored in them."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any


def page_of(path: Path) -> tuple[str, dict[str, bytes]]:
    """The Markdown of a notebook, and its pictures by the names that the page calls them."""
    book = json.loads(path.read_text(encoding="utf-8"))
    parts: list[str] = []
    pictures: dict[str, bytes] = {}
    for cell in book["cells"]:
        source = "".join(cell["source"])
        if cell["cell_type"] == "markdown":
            parts.append(source)
            continue
        parts.append(f"```python\n{source}\n```")
        for number, output in enumerate(cell["outputs"]):
            name = f"{path.stem}-{cell['id']}-{number}.png"
            parts.append(_output_text(output, name, pictures))
    note = (
        f"This page is the notebook [examples/{path.name}](../examples/{path.name}), with the outputs of its last run."
    )
    return "\n\n".join([*parts, note]), pictures


def _output_text(output: dict[str, Any], name: str, pictures: dict[str, bytes]) -> str:
    """One output: a picture, what a result shows of itself, or text."""
    data = output.get("data", {})
    if "image/png" in data:
        pictures[name] = base64.b64decode("".join(data["image/png"]))
        return f"![Output of the cell above]({name})"
    if "text/html" in data:
        return "<div>" + "".join(data["text/html"]).replace("\n", " ") + "</div>"
    text = "".join(output.get("text") or data.get("text/plain", ""))
    return f"```text\n{text.rstrip()}\n```"
