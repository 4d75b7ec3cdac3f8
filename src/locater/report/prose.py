"""Markdown as a self-contained page in the style of the others: figures inside, nothing to fetch."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping
from importlib.resources import files

from locater.version import __version__


def prose_page(text: str, figures: Mapping[str, str]) -> str:
    """A page from Markdown whose first line is its title; `![...](figure:NAME)` stands for the SVG drawing of that
    name.
    """
    from markdown_it import MarkdownIt  # comes with rich

    first, _, rest = text.partition("\n")
    title = first.removeprefix("# ")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(rest)
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = re.sub(r'<a href="(?!#|https?:)[^"]*">(.*?)</a>', r"\1", body)  # files of the tree are not beside the page
    body = re.sub(r'src="figure:([^"]+)"', lambda mark: f'src="{_embedded(figures[mark[1]])}"', body)
    words = {
        "TITLE": html.escape(f"{title} · Locater"), "HEADING": html.escape(title), "BODY": body,
        "STYLE": _part("base.css") + _part("prose.css"), "FOOTER": f"Made by Locater {__version__}.",
    }  # fmt: skip
    return re.sub(r"@([A-Z]+)@", lambda mark: words[mark[1]], _part("prose.html"))


def _part(name: str) -> str:
    return (files("locater.report") / "page" / name).read_text(encoding="utf-8")


def _embedded(drawing: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(drawing.encode()).decode()}"
