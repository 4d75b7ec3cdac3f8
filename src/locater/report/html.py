"""A scan, or two of them, as one self-contained page: data as JSON, drawn by the scripts in page/, no library, nothing to fetch."""

from __future__ import annotations

import html
import json
import math
import re
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

from locater.findings import FLAGS
from locater.result import HeadRow, Scan
from locater.version import __version__

NUMBERS = (
    "M", "S", "F", "mean", "concentration", "localization", "expected_entropy", "residual_kept", "key_bias", "stable_rank", "spectral_norm",
    "skew",
)  # fmt: skip


def scan_page(scan: Scan) -> str:
    """The page of one scan."""
    heads = f"{len(scan.rows)} heads in {len(scan.layers)} attention layers"
    flagged = sum(bool(row.flags) for row in scan.rows)
    counts = f"{heads}, head size {_sizes(scan)}. " + (f"{flagged} heads are flagged." if flagged else "No head is flagged.")
    return _page(short_name(scan.source), " ".join(filter(None, (counts, collapse_risk(scan)))), [scan], aligned=True)


def collapse_risk(scan: Scan) -> str:
    """What attention alone keeps of the differences between tokens, over layers, in a sentence; nothing where it is not known."""
    known = [(entry["residual_kept"], entry["layer"]) for entry in scan.layers if entry.get("residual_kept") is not None]
    if not known:
        return ""
    length = scan.assumptions["length"]
    (low, where), (high, _) = min(known), max(known)
    span = f"{low:.3f}" if f"{low:.3f}" == f"{high:.3f}" else f"{low:.3f} (layer {where}) to {high:.3f}"
    return (
        f"Rank-collapse risk: attention alone keeps {span} of what differs between tokens; "
        f"uniform attention over {length} tokens keeps {length**-0.5:.3g}, a row with a single token 1."
    )


def compare_page(a: Scan, b: Scan, aligned: bool) -> str:
    """The page of two scans; `aligned` when they have the same heads, so that differences mean something."""
    counts = f"A: {len(a.rows)} heads in {len(a.layers)} layers. B: {len(b.rows)} heads in {len(b.layers)} layers."
    if not aligned:
        counts += " Their shapes differ, so heads are shown one model at a time and not subtracted."
    return _page(f"{short_name(a.source)} against {short_name(b.source)}", counts, [a, b], aligned)


def _page(title: str, counts: str, scans: Sequence[Scan], aligned: bool) -> str:
    assumed = scans[0].assumptions
    notes = "; ".join(assumed["notes"])
    measured = assumed.get("prediction") == "predicted"  # with statistics of the layers' inputs
    data = {
        "length": assumed["length"],
        "aligned": aligned,
        "flags": {flag.name: {"meaning": flag.meaning, "way_out": flag.way_out} for flag in FLAGS},
        "scans": [_data(scan, letter) for scan, letter in zip(scans, "AB", strict=False)],
    }
    words = {
        "TITLE": f"{title} · Locater",
        "HEADING": title,
        "COUNTS": counts,
        "ASSUMED": f"For {assumed['length']} {assumed['tokens']}; weights {assumed['weights']}." + (f" {notes}." if notes else ""),
        "KIND": "Predicted" if measured else "Prior",
        "FOOTER": f"Made by Locater {__version__} from weights {'and statistics' if measured else 'alone'}.",
    }
    return assemble("page", words, data)


def assemble(name: str, words: dict[str, str], data: dict[str, Any]) -> str:
    """page/NAME.html with its words, the shared style and drawing, a script and style of its own, and its data."""

    def part(file: str) -> str:
        return (files("locater.report") / "page" / file).read_text(encoding="utf-8")

    held = {mark: html.escape(text) for mark, text in words.items()}
    held["STYLE"] = part("page.css") + (part(f"{name}.css") if name != "page" else "")
    held["SCRIPT"] = part("draw.js") + part(f"{name}.js")
    held["DATA"] = json.dumps(data, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # no name can end the script
    return re.sub(r"@([A-Z]+)@", lambda mark: held[mark[1]], part(f"{name}.html"))


def _data(scan: Scan, letter: str) -> dict[str, Any]:
    rotary = any("frequencies" in entry for entry in scan.layers)
    places = {entry["layer"]: place for place, entry in enumerate(scan.layers)}  # a shard's layers do not start at 0
    return {
        "name": short_name(scan.source),
        "letter": letter,
        "layers": [_layer(entry) for entry in scan.layers],
        "heads": [_head(row, places[row.layer], rotary) for row in scan.rows],
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
    kept: dict[str, Any] = {"name": entry["name"], "short": str(entry["layer"]), "heads": entry["heads"], "note": layer_note(entry)}
    if "frequencies" in entry:
        kept["frequencies"] = [significant(f, 7) for f in entry["frequencies"]]
    return kept


def _head(row: HeadRow, place: int, rotary: bool) -> dict[str, Any]:
    kept: dict[str, Any] = {"layer": place, "head": row.head, "flags": list(row.flags), "approximation": row.approximation}
    kept.update({name: significant(row[name]) for name in NUMBERS})
    if row.eigenvalues is not None:
        kept["eigenvalues"] = [[significant(re, 3), significant(im, 3)] for re, im in row.eigenvalues]
    if row.profile is not None:
        kept["profile"] = [significant(x, 3) for x in row.profile]
    if row.drive is not None and rotary:
        kept["even"], kept["odd"] = ([significant(x, 3) for x in row.drive[part]] for part in ("even", "odd"))
        kept["still"] = significant(row.drive["still"])
    return kept


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
