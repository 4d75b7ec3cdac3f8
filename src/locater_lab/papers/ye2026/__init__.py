"""Ye et al. (2026): what stacks of full attention can compose and hybrids with linear layers cannot."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.ye2026 import composition, states, trained_stacks

PAPER = Paper(
    "ye2026",
    "Hybrids of linear and full attention: states, recall, and composing functions",
    "Ye, He, Liao, Wu and Lu, A Provable Expressiveness Hierarchy in Hybrid Linear-Full Attention "
    "(arXiv 2602.01763, 2026)",
    (
        states.RECURRENCE_STUDY,
        states.RECALL_STUDY,
        composition.COMPOSITION_STUDY,
        trained_stacks.STUDY,
        *composition.SEPARATION_STUDIES,
    ),
    Path(__file__).parent,
    kinds={"identity": "a b1 b2 c3 c4 e", "construction": "a5 c", "simulation": "b c2 c7", "experiment": "d"},
    within={(0.0, 1.0): "d1", (-1.0, 1.0): "d3"},
    says="L + 1 layers of full attention compose L functions; fewer of them among exponentially many linear layers "
    "do not.",
    beliefs={
        "c5": "a stack of L + 1 full layers, written by hand, composes L functions",
        "e1 e2": "no stack of fewer full layers among linear ones composes them",
        "d1 d2 d3": "trained stacks compose more hops the more of their layers are full",
    },
    cover="stacks",
)

__all__ = ["PAPER"]
