"""Self-contained HTML pages: the frame that all share, around the words, style, script and data of each.

No page fetches anything. The parts are files in page/; marks such as @TITLE@ in them are filled in here.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
from collections.abc import Mapping, Sequence
from importlib.resources import files
from typing import Any

from locater.findings import FLAGS, Verdict
from locater.version import __version__


def assemble(
    name: str,
    words: Mapping[str, str],
    data: Mapping[str, Any] | None = None,
    markup: Mapping[str, str] | None = None,
    scripts: Sequence[str] = (),
    styles: Sequence[str] = (),
    connect: str = "",
) -> str:
    """The page of `page/NAME.html`, with its style NAME.css and, if it has data, its script NAME.js.

    `words` are texts by mark and are escaped; `markup` is inserted as it is. The script reads `data` as JSON. `scripts`
    and `styles` are files of page/ that it uses. The page's policy lets no other script run and loads nothing;
    `connect` is where a live page may ask for news.
    """
    template, values = _part(f"{name}.html"), {mark: html.escape(text) for mark, text in words.items()}
    values |= markup or {}
    values["STYLE"] = "".join(_part(file) for file in ("base.css", *styles, f"{name}.css"))
    values["POLICY"] = policy()
    if data is not None:
        template += _part("scripts.html")
        values["SCRIPT"] = "".join(_part(file) for file in ("draw.js", *scripts, f"{name}.js"))
        # "<" is escaped: no text in the data can end the script
        values["POLICY"] = policy(f"\n{values['SCRIPT']}\n", connect)
        values["DATA"] = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    whole = _part("frame.html").replace("@PAGE@\n", template)
    return re.sub(r"@([A-Z]+)@", lambda mark: values[mark[1]], whole)


def prose(title: str, parts: Sequence[str], footer: str) -> str:
    """A page of sentences, tables and drawings, without a script. `footer` says what its numbers rest on."""
    words = {
        "TITLE": f"{title} · Locater",
        "HEADING": title,
        "FOOTER": f"Made by Locater {__version__}{footer}",
    }
    return assemble("prose", words, markup={"PROSE": "\n".join(parts)})


def wide(markup: str) -> str:
    """A table or drawing that scrolls by itself where it is wider than the page."""
    return f'<div class="wide">{markup}</div>'


def policy(script: str = "", connect: str = "") -> str:
    """A Content-Security-Policy: the script, styles and pictures of the page itself, and nothing from elsewhere."""
    parts = [
        "default-src 'none'",
        "style-src 'unsafe-inline'",
        "img-src data:",
        "base-uri 'none'",
        "form-action 'none'",
    ]
    if script:
        parts.append(f"script-src 'sha256-{base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()}'")
    return "; ".join([*parts, *([f"connect-src {connect}"] if connect else [])])


def _part(file: str) -> str:
    return (files("locater.report") / "page" / file).read_text(encoding="utf-8")


# ---- what the data of several pages share ----


def short_name(source: str) -> str:
    """The last part of a path, with the one before it where the last is generic, such as `model` or `step-100`."""
    parts = [part for part in source.split("/") if part and part != "."]
    telling = re.sub(r"^(model|final|last|checkpoint.*|step.*|[0-9a-f]{40})$", "", parts[-1]) if parts else source
    return telling or "/".join(parts[-2:])


def round_significant(x: float | None, digits: int = 4) -> float | None:
    """Rounded to significant digits, which keeps pages small."""
    if x is None or x == 0 or not math.isfinite(x):
        return 0.0 if x == 0 else None
    return round(x, digits - 1 - math.floor(math.log10(abs(x))))


def layer_note(entry: Mapping[str, Any]) -> str:
    """What kind of attention a layer has, in a few words."""
    notes = [entry["kind"] + "-attention", f"{entry['heads']} heads of {entry['head_dim']}"]
    if entry["kv_heads"] != entry["heads"]:
        notes.append(f"{entry['kv_heads']} key heads")
    if entry["window"]:
        notes.append(f"window {entry['window']}")
    if entry["positions"]:
        notes.append(entry["positions"])
    return ", ".join(notes)


def flag_table() -> dict[str, dict[str, Any]]:
    """The table of flags by name, as scripts read it."""
    return {flag.name: {"meaning": flag.meaning, "way_out": flag.way_out, "severity": flag.severity} for flag in FLAGS}


def excuses(verdict: Verdict) -> dict[str, str]:
    """Why flags that are faults on other heads are not faults on this one."""
    faults = (flag.name for flag in FLAGS if flag.severity == "fault")
    return {name: verdict.notes[name] for name in faults if name in verdict.notes}


# ---- Markdown as a page ----


# the one markup that text may have
FOLD = r"<p>&lt;details markdown=&quot;1&quot;&gt;\n&lt;summary&gt;(.*?)&lt;/summary&gt;</p>"


def prose_page(text: str, figures: Mapping[str, str]) -> str:
    """A page from Markdown whose first line is its title. `![...](figure:NAME)` is replaced by the SVG of that name."""
    from markdown_it import MarkdownIt  # comes with rich

    first, _, rest = text.partition("\n")
    title = first.removeprefix("# ")
    body = MarkdownIt("commonmark", {"html": False}).enable("table").render(rest)
    body = re.sub(FOLD, r"<details><summary>\1</summary>", body).replace("<p>&lt;/details&gt;</p>", "</details>")
    body = body.replace("<table>", '<div class="wide"><table>').replace("</table>", "</table></div>")
    body = re.sub(r'<a href="(?!#|https?:)[^"]*">(.*?)</a>', r"\1", body)  # files of the repository: no link
    body = re.sub(r'src="figure:([^"]+)"', lambda mark: f'src="{_data_url(figures[mark[1]])}"', body)
    words = {"TITLE": f"{title} · Locater", "HEADING": title, "FOOTER": f"Made by Locater {__version__}."}
    return assemble("prose", words, markup={"PROSE": body})


def _data_url(drawing: str) -> str:
    return f"data:image/svg+xml;base64,{base64.b64encode(drawing.encode()).decode()}"
