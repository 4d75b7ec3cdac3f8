"""Ding, Fan, Lan, Schuurmans and Soricut (2020): attention normalized over queries, then over keys, explains no key
away.
"""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.ding2020 import guarantee, trained

PAPER = Paper(
    "ding2020",
    "Attention that does not explain away: what every key is promised, and whether keys need it",
    "Ding, Fan, Lan, Schuurmans and Soricut, Attention that does not Explain Away (arXiv 2009.14308)",
    (guarantee.STUDY, guarantee.MASKED, trained.STUDY, trained.RUNS),
    Path(__file__).parent,
)

__all__ = ["PAPER"]
