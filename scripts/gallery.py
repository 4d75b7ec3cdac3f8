"""A gallery: pages of `locater scan` and `locater probe` for every available model, and an index to click through.

    make gallery                                             the package's models, the sentence encoder where installed, four that are trained here
    python scripts/gallery.py --out gallery --models FOLDER  further checkpoints, or folders of them
    python scripts/gallery.py --out gallery --demo           the package's models alone, in seconds

The pages are files that work from a disk, without network access. Trained models stay in OUT/models, so that a second
run is quick.
"""

from __future__ import annotations

import argparse
import html
import re
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path

import locater
from locater.errors import LocaterError, first_line
from locater.files import write_whole
from locater.markup import heat_map
from locater.report.pages import assemble, prose_page
from locater.report.plots import map_of_measured, map_of_scan
from locater.report.verdict_sentences import roles_sentence, summary
from locater.version import __version__
from locater_lab.studies.kinds_of_heads.exhibits import (
    Exhibit,
    given_models,
    installed_models,
    packaged_models,
    trained_models,
)

DOCS = Path(__file__).parents[1] / "docs"
KINDS = "kinds-of-heads.html"
TOKENS = 2048  # that each model is measured on


@dataclass(frozen=True)
class Card:
    """What the index says of a model. `pages` are links by name; `missing` says why a page is not there."""

    exhibit: Exhibit
    size: str
    sentences: tuple[str, ...]
    picture: str
    pages: dict[str, str]
    missing: str = ""


def write_exhibit(exhibit: Exhibit, out: Path, tokens: int = TOKENS) -> Card:
    """Write the pages of one model. A model that cannot be run has its scan alone, and the card says why."""
    scan = replace(locater.scan(exhibit.folder, details=True), source=exhibit.title)
    scan.report(out / f"{exhibit.name}-scan.html")
    pages = {"Scan": f"{exhibit.name}-scan.html"}
    sentences, drawn, missing = [summary(scan.records(), scan.verdicts)], map_of_scan(scan.to_dict()), ""
    try:
        probe = locater.probe(
            exhibit.folder, exhibit.batches, tokenizer=exhibit.tokenizer, tokens=tokens, label=exhibit.label
        )
    except LocaterError as error:
        missing = f"No probe: {first_line(error)}"
    else:
        probe = replace(probe, source=exhibit.title)
        probe.report(out / f"{exhibit.name}-probe.html")
        pages["Probe"] = f"{exhibit.name}-probe.html"
        sentences = [summary(probe.records(), probe.verdicts), roles_sentence(probe.roles)]
        drawn = map_of_measured(probe.source, probe.records())
    heads, layers = len(scan.rows), len(scan.layers)
    size = f"{layers} attention layer{'s' * (layers != 1)}, {heads} head{'s' * (heads != 1)} of {scan.rows[0].head_dim}"
    picture = heat_map(drawn.grid, drawn.label, names=drawn.layers, least=drawn.least, diverging=drawn.diverging)
    return Card(exhibit, size, tuple(filter(None, sentences)), picture, pages, missing)


def index(cards: Iterable[Card]) -> str:
    """The page that leads to all others: a card per model."""
    words = {
        "TITLE": "Gallery · Locater",
        "HEADING": "Gallery",
        "FOOTER": f"Made by Locater {__version__}: python scripts/gallery.py",
    }
    body = "".join(map(_card, cards))
    return assemble("prose", words, markup={"PROSE": f'{STYLE}{INTRODUCTION}<div class="cards">{body}</div>'})


def _card(card: Card) -> str:
    shown = card.exhibit
    links = " ".join(f'<a class="open" href="{html.escape(link)}">{name}</a>' for name, link in card.pages.items())
    look = f"<p><b>Look at:</b> {html.escape(shown.look).replace('`', '')}</p>" if shown.look else ""
    said = "".join(f"<p class='note'>{html.escape(text)}</p>" for text in (*card.sentences, card.missing) if text)
    return (
        f'<section class="card"><h2>{html.escape(shown.title)}</h2><p class="note">{html.escape(card.size)}</p>'
        f"<p>{html.escape(shown.origin)}</p>{look}{said}<div class='picture'>{card.picture}</div><p>{links}</p></section>"
    )


INTRODUCTION = f"""<p>One card per model. <b>Scan</b> is what its weights alone say of every head, <b>Probe</b> what the heads do on data, beside what was predicted. The
pictures show one number of every head, a row per layer.</p>
<p>What sinks, induction heads and other kinds look like: <a href="{KINDS}">five kinds of heads</a>, with spectrum, pattern and prediction side by side.</p>"""
STYLE = """<style>
.prose { max-width: 1320px; }
.cards { display: grid; grid-template-columns: repeat(auto-fill, minmax(min(100%, 340px), 1fr)); gap: 20px; align-items: start; }
.card h2 { margin: 0 0 2px; }
.card p { margin: 0 0 8px; }
.card p.note { overflow-wrap: anywhere; }
.picture { overflow-x: auto; margin: 10px 0; }
.picture svg { width: auto; }
a.open { display: inline-block; margin: 0 4px 6px 0; padding: 4px 14px; border: 1px solid var(--accent); border-radius: 14px; text-decoration: none; }
</style>
"""


def kinds_page(docs: Path = DOCS) -> str:
    """docs/kinds-of-heads.md with its pictures inside; links to headings and files are left out."""
    text = (docs / "kinds-of-heads.md").read_text(encoding="utf-8")
    text = re.sub(r"(?<!!)\[([^\]]+)\]\([^)]*\)", r"\1", text)
    pictures = {path.stem: path.read_text(encoding="utf-8") for path in (docs / "images").glob("kinds-of-heads-*.svg")}
    return prose_page(re.sub(r"\(images/([\w-]+)\.svg\)", r"(figure:\1)", text), pictures)


def gallery(exhibits: Iterable[Exhibit], out: Path, tokens: int = TOKENS) -> list[Card]:
    """Write all pages and the index into `out`. Models that cannot be read are named, and the others are shown."""
    out.mkdir(parents=True, exist_ok=True)
    cards: list[Card] = []
    folders: dict[str, Path] = {}
    for exhibit in exhibits:
        try:
            card = write_exhibit(exhibit, out, tokens)
        except LocaterError as error:
            print(f"{exhibit.title}: left out ({first_line(error)})", file=sys.stderr)
            continue
        if exhibit.name in folders:
            raise LocaterError(
                f"{exhibit.folder}: another model is called {exhibit.name} too: rename one of the folders"
            )
        folders[exhibit.name] = exhibit.folder
        if exhibit.name == "twin" and "demo" in folders:
            locater.compare(folders["demo"], exhibit.folder).report(out / "demo-twin.html")
            card.pages["Compared with the demo"] = "demo-twin.html"
        cards.append(card)
    write_whole(out / KINDS, kinds_page())
    write_whole(out / "index.html", index(cards))
    return cards


def report_progress(exhibits: Iterable[Exhibit]) -> Iterator[Exhibit]:
    for exhibit in exhibits:
        print(exhibit.title, flush=True)
        yield exhibit


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("gallery"), help="folder for the pages")
    parser.add_argument("--models", type=Path, nargs="+", default=[], metavar="FOLDER", help="further checkpoints")
    parser.add_argument("--tokens", type=int, default=TOKENS, help="tokens that each model is measured on")
    parser.add_argument("--demo", action="store_true", help="only the models in the package")
    options = parser.parse_args()
    try:
        further = given_models(options.models)
        more = [] if options.demo else chain(installed_models(), trained_models(options.out / "models"))
        gallery(report_progress(chain(packaged_models(), more, further)), options.out, options.tokens)
        print(f"open {options.out / 'index.html'}")
    except LocaterError as error:
        print(f"gallery: {error}", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main()
