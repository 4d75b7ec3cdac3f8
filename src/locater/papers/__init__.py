"""The literature, executable: the claims of a paper as functions that return stated value, measured value, spread and verdict."""

from locater.errors import LocaterError
from locater.papers.bao2024 import PAPER as BAO2024
from locater.papers.claim import Claim, Measured, Verdict, judge, verdict_of
from locater.papers.ding2020 import PAPER as DING2020
from locater.papers.dong2021 import PAPER as DONG2021
from locater.papers.gerami2024 import PAPER as GERAMI2024
from locater.papers.nguyen2026 import PAPER as NGUYEN2026
from locater.papers.paper import Paper, Reproduction, Setting, Study, chosen, reproduce
from locater.papers.qiu2025 import PAPER as QIU2025
from locater.papers.saada2024 import PAPER as SAADA2024
from locater.papers.sant2022 import PAPER as SANT2022
from locater.papers.shi2022 import PAPER as SHI2022
from locater.papers.sun2026 import PAPER as SUN2026
from locater.papers.xiao2026 import PAPER as XIAO2026
from locater.papers.ye2026 import PAPER as YE2026
from locater.papers.zhai2023 import PAPER as ZHAI2023
from locater.papers.zoo import PAPER as ZOO

PAPERS = {
    paper.name: paper
    for paper in (
        BAO2024, DONG2021, GERAMI2024, SANT2022, SHI2022, QIU2025, SUN2026, DING2020, SAADA2024, ZHAI2023,
        XIAO2026, NGUYEN2026, YE2026, ZOO,
    )
}  # fmt: skip


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
