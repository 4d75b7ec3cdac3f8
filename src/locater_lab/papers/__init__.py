"""The literature, executable: the claims of a paper as functions that return stated value, measured value, spread and
verdict.
"""

from locater.registry import Registry
from locater_lab.engine.claims import Claim, Measurement, Verdict, judge, verdict_of
from locater_lab.engine.reproduction import Paper, Reproduction, Results, Setting, Study, reproduce, select_claims

NAMES = (
    "bao2024",
    "dong2021",
    "saada2024",
    "shi2022",
    "zhai2023",
    "ding2020",
    "gerami2024",
    "xiao2026",
    "qiu2025",
    "nguyen2026",
    "ye2026",
    "sant2022",
    "sun2026",
    "chen2024",
    "amsel2024",
    "sahiner2022",
    "hu2025",
    "atad2026",
    "chefer2021",
)
STUDIES = (
    "zoo",
    "early_warning",
    "surrogate",
    "which_control",
    "kinds_of_heads",
    "flags",
)  # our own questions in the same form, in locater_lab/studies; counted apart
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
    "Measurement",
    "Paper",
    "Reproduction",
    "Results",
    "Setting",
    "Study",
    "Verdict",
    "judge",
    "paper",
    "reproduce",
    "select_claims",
    "verdict_of",
]
