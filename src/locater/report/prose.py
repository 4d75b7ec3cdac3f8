"""Markdown as a self-contained page in the style of the others, with its figures inside."""

from __future__ import annotations

import base64
import re
from collections.abc import Mapping

from locater.report.pages import assemble
from locater.version import __version__


def prose_page(text: str, figures: Mapping[str, str]) -> str:
    """A page from Markdown whose first line is its title. `![...](figure:NAME)` is replaced by the SVG of that name."""
    from markdown_it import MarkdownIt  # comes with rich

    first, _, rest = text.partition("\n")
    title = first.removeprefix("# ")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(rest)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = re.sub(r'<a href="(?!#|https?:)[^"]*">(.*?)</a>', r"\1", body)  # files of the repository: no link
    body = re.sub(r'src="figure:([^"]+)"', lambda mark: f'src="{_embedded(figures[mark[1]])}"', body)
    words = {"TITLE": f"{title} · Locater", "HEADING": title, "FOOTER": f"Made by Locater {__version__}."}
    return assemble("prose", words, markup={"PROSE": body})


def _embedded(drawing: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(drawing.encode()).decode()}"
