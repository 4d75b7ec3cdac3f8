"""The tables of flags and roles in docs/reference/columns.md, as src/locater/findings/flags.py has them:
`python scripts/flags_page.py` writes them; a test compares.
"""

from __future__ import annotations

import re
from pathlib import Path

from locater.findings.flags import FLAGS, ROLES

PAGE = Path(__file__).resolve().parents[1] / "docs" / "reference" / "columns.md"
BEGIN, END = "<!-- flags -->", "<!-- end of flags -->"


def tables() -> str:
    """Both tables in Markdown."""
    flags = [f"| `{x.name}` | {x.severity} | {_columns(x.needs)} | {x.meaning} | {x.way_out} |" for x in FLAGS]
    said = [x.shown.replace("{:.2f}", "a share").replace("{:.1f}", "so many") for x in ROLES]
    roles = [f"| `{x.name}` | {_columns(x.needs)} | {words} |" for x, words in zip(ROLES, said, strict=True)]
    head = ["| flag | kind | reads | meaning | way out |", "|---|---|---|---|---|"]
    return "\n".join([*head, *flags, "", "| role | reads | said of such a head |", "|---|---|---|", *roles])


def page(text: str) -> str:
    """The text of the page with today's tables between the marks."""
    return re.sub(f"{BEGIN}.*{END}", lambda _: f"{BEGIN}\n\n{tables()}\n\n{END}", text, flags=re.DOTALL)


def _columns(names: tuple[str, ...]) -> str:
    return ", ".join(f"`{name}`" for name in names)


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
