"""A scan, or two of them, as one self-contained page: data as JSON, drawn by the scripts in page/, no library, nothing
to fetch.
"""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import TYPE_CHECKING, Any

from locater.findings import FLAGS, Verdict
from locater.report.tables import SCAN, collapse_risk, moved, notebook, noted, origin, summary
from locater.version import __version__

if TYPE_CHECKING:
    from locater.verbs.scan_result import HeadRow, Scan

NUMBERS = (
    "M", "S", "F", "mean", "concentration", "localization", "expected_entropy", "residual_kept", "key_bias", "stable_rank", "spectral_norm",
    "skew",
)  # fmt: skip


def scan_page(scan: Scan) -> str:
    """The page of one scan."""
    heads = f"{len(scan.rows)} heads in {len(scan.layers)} attention layers"
    risk = collapse_risk(scan.layers, scan.assumptions["length"])
    counts = " ".join(filter(None, (f"{heads}, head size {_sizes(scan)}.", noted(scan.rows, scan.verdicts), risk)))
    return _page(short_name(scan.source), summary(scan.rows, scan.verdicts), counts, [scan], aligned=True)


def scan_in_notebook(scan: Scan) -> str:
    """A small table, what deserves a look first."""
    title = f"{short_name(scan.source)}: {len(scan.rows)} heads in {len(scan.layers)} attention layers"
    said = (summary(scan.rows, scan.verdicts), noted(scan.rows, scan.verdicts), origin(scan.assumptions))
    return notebook(title, said, SCAN, scan.rows, scan.verdicts)


def compare_page(a: Scan, b: Scan, aligned: bool) -> str:
    """The page of two scans; `aligned` when they have the same heads, so that differences mean something."""
    counts = f"A: {len(a.rows)} heads in {len(a.layers)} layers. B: {len(b.rows)} heads in {len(b.layers)} layers."
    if aligned:
        verdict = moved(a.verdicts, b.verdicts)
    else:
        verdict = " ".join(f"{letter}: {summary(x.rows, x.verdicts)}" for letter, x in (("A", a), ("B", b)))
        counts += " Their shapes differ, so heads are shown one model at a time and not subtracted."
    return _page(f"{short_name(a.source)} against {short_name(b.source)}", verdict, counts, [a, b], aligned)


def _page(title: str, verdict: str, counts: str, scans: Sequence[Scan], aligned: bool) -> str:
    assumed = scans[0].assumptions
    notes = "; ".join(assumed["notes"])
    measured = assumed.get("prediction") == "predicted"  # with statistics of the layers' inputs
    data = {
        "length": assumed["length"],
        "aligned": aligned,
        "flags": {
            flag.name: {"meaning": flag.meaning, "way_out": flag.way_out, "severity": flag.severity} for flag in FLAGS
        },
        "scans": [_data(scan, letter) for scan, letter in zip(scans, "AB", strict=False)],
    }
    words = {
        "TITLE": f"{title} · Locater",
        "HEADING": title,
        "VERDICT": verdict,
        "COUNTS": counts,
        "ORIGIN": origin(assumed),
        "ASSUMED": f"For {assumed['length']} {assumed['tokens']}; weights {assumed['weights']}."
        + (f" {notes}." if notes else ""),
        "FOOTER": f"Made by Locater {__version__} from weights {'and statistics' if measured else 'alone'}.",
    }
    return assemble("scan", words, data)


def assemble(name: str, words: dict[str, str], data: dict[str, Any]) -> str:
    """page/NAME.html with its words, the shared style and drawing, a script and style of its own, and its data."""

    def part(file: str) -> str:
        return (files("locater.report") / "page" / file).read_text(encoding="utf-8")

    held = {mark: html.escape(text) for mark, text in words.items()}
    held["STYLE"] = part("base.css") + (part(f"{name}.css") if name != "scan" else "")
    held["SCRIPT"] = part("draw.js") + part(f"{name}.js")
    # no name can end the script
    held["DATA"] = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    return re.sub(r"@([A-Z]+)@", lambda mark: held[mark[1]], part(f"{name}.html"))


def _data(scan: Scan, letter: str) -> dict[str, Any]:
    rotary = any("frequencies" in entry for entry in scan.layers)
    places = {entry["layer"]: place for place, entry in enumerate(scan.layers)}  # a shard's layers do not start at 0
    return {
        "name": short_name(scan.source),
        "letter": letter,
        "layers": [_layer(entry) for entry in scan.layers],
        "heads": [
            _head(row, held, places[row.layer], rotary) for row, held in zip(scan.rows, scan.verdicts, strict=True)
        ],
    }


def layer_note(entry: dict[str, Any]) -> str:
    """What kind of attention a layer has, in a few words."""
    notes = [entry["kind"] + "-attention", f"{entry['heads']} heads of {entry['head_dim']}"]
    if entry["kv_heads"] != entry["heads"]:
        notes.append(f"{entry['kv_heads']} key heads")
    if entry["window"]:
        notes.append(f"window {entry['window']}")
    if entry["positions"]:
        notes.append(entry["positions"])
    return ", ".join(notes)


def _layer(entry: dict[str, Any]) -> dict[str, Any]:
    kept: dict[str, Any] = {
        "name": entry["name"],
        "short": str(entry["layer"]),
        "heads": entry["heads"],
        "note": layer_note(entry),
    }
    if "frequencies" in entry:
        kept["frequencies"] = [significant(f, 7) for f in entry["frequencies"]]
    return kept


def _head(row: HeadRow, held: Verdict, place: int, rotary: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {
        "layer": place,
        "head": row.head,
        "flags": list(row.flags),
        "approximation": row.approximation,
    }
    kept["excused"] = explained(held)
    kept.update({name: significant(row[name]) for name in NUMBERS})
    if row.eigenvalues is not None:
        kept["eigenvalues"] = [[significant(re, 3), significant(im, 3)] for re, im in row.eigenvalues]
    if row.profile is not None:
        kept["profile"] = [significant(x, 3) for x in row.profile]
    if row.drive is not None and rotary:
        kept["even"], kept["odd"] = ([significant(x, 3) for x in row.drive[part]] for part in ("even", "odd"))
        kept["still"] = significant(row.drive["still"])
    return kept


def explained(held: Verdict) -> dict[str, str]:
    """Why flags that are faults elsewhere are none here; what is a note on every head is in the page once."""
    return {flag.name: held.notes[flag.name] for flag in FLAGS if flag.severity == "fault" and flag.name in held.notes}


def significant(x: float | None, digits: int = 4) -> float | None:
    """Significant digits: a page is looked at, not computed from."""
    if x is None or x == 0 or not math.isfinite(x):
        return 0.0 if x == 0 else None
    return round(x, digits - 1 - math.floor(math.log10(abs(x))))


def short_name(source: str) -> str:
    """The last part of a path, with the one before it where the last says nothing."""
    parts = [part for part in source.split("/") if part and part != "."]
    telling = re.sub(r"^(model|final|last|checkpoint.*|step.*|[0-9a-f]{40})$", "", parts[-1]) if parts else source
    return telling or "/".join(parts[-2:])


def _sizes(scan: Scan) -> str:
    return ", ".join(str(size) for size in sorted({entry["head_dim"] for entry in scan.layers}))
