"""The literature, executable: the claims of a paper as functions that return stated value, measured value, spread and verdict."""

from locater.errors import LocaterError
from locater.papers.bao2024 import PAPER as BAO2024
from locater.papers.claim import Claim, Measured, Verdict, judge, verdict_of
from locater.papers.dong2021 import PAPER as DONG2021
from locater.papers.paper import Paper, Reproduction, Setting, Study, chosen, reproduce

PAPERS = {paper.name: paper for paper in (BAO2024, DONG2021)}


def paper(name: str) -> Paper:
    """A paper by the name that the command line gives it."""
    if name not in PAPERS:
        raise LocaterError(f"{name}: no such paper; there are {', '.join(PAPERS)}")
    return PAPERS[name]


__all__ = [
    "PAPERS",
    "Claim",
    "Measured",
    "Paper",
    "Reproduction",
    "Setting",
    "Study",
    "Verdict",
    "chosen",
    "judge",
    "paper",
    "reproduce",
    "verdict_of",
]
