"""The literature, executable: the claims of a paper as functions that return stated value, measured value, spread and
verdict.
"""

from pathlib import Path

from locater.registry import Registry
from locater_lab.engine.claims import Claim, ClaimVerdict, Measurement, judge, verdict_of
from locater_lab.engine.reproduction import Paper, Reproduction, Results, Setting, Study, reproduce, select_claims


def _with_a_page(room: str) -> tuple[str, ...]:
    """Folders of locater_lab/ROOM that have a page: each is a paper, or a study in the same form."""
    return tuple(sorted(page.parent.name for page in (Path(__file__).parents[1] / room).glob("*/page.md.j2")))


NAMES = _with_a_page("papers")
STUDIES = _with_a_page("studies")  # our own questions; counted apart
PAPERS: Registry[Paper] = Registry("paper")
PAPERS.load_later("locater_lab.papers", NAMES, "PAPER")  # imported one by one, when they are used
PAPERS.load_later("locater_lab.studies", STUDIES, "PAPER")


def paper(name: str) -> Paper:
    """A paper by the name that the command line gives it."""
    return PAPERS.lookup(name)


__all__ = [
    "NAMES",
    "PAPERS",
    "STUDIES",
    "Claim",
    "ClaimVerdict",
    "Measurement",
    "Paper",
    "Reproduction",
    "Results",
    "Setting",
    "Study",
    "judge",
    "paper",
    "reproduce",
    "select_claims",
    "verdict_of",
]
