"""The literature, executable: the claims of a paper as functions that return stated value, measured value, spread and
verdict.
"""

from collections.abc import Iterator, Mapping
from importlib import import_module

from locater.errors import LocaterError
from locater_papers.engine.claims import Claim, Measured, Verdict, judge, verdict_of
from locater_papers.engine.papers import Paper, Reproduction, Setting, Study, chosen, reproduce

NAMES = (
    "bao2024", "dong2021", "saada2024", "shi2022", "zhai2023", "ding2020", "gerami2024", "xiao2026", "qiu2025", "nguyen2026", "ye2026",
    "sant2022", "sun2026", "zoo",
)  # fmt: skip


class _Papers(Mapping[str, Paper]):
    """By name; a paper is imported when it is asked for, so that other commands do not wait for all of them."""

    def __getitem__(self, name: str) -> Paper:
        if name not in NAMES:
            raise KeyError(name)
        found: Paper = import_module(f"locater_papers.{name}").PAPER
        return found

    def __iter__(self) -> Iterator[str]:
        return iter(NAMES)

    def __len__(self) -> int:
        return len(NAMES)


PAPERS: Mapping[str, Paper] = _Papers()


def paper(name: str) -> Paper:
    """A paper by the name that the command line gives it."""
    if name not in PAPERS:
        raise LocaterError(f"{name or repr(name)}: no such paper; there are {', '.join(PAPERS)}")
    return PAPERS[name]


__all__ = [
    "NAMES",
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
