"""Sant, Gallego, Alastruey and Costa-jussa (2022): heads of one layer that attend in different ways, and how much each
counts.
"""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.sant2022 import kinds, relevance

PAPER = Paper(
    "sant2022",
    "Multiformer: heads of several kinds in one layer, and how much each head counts",
    "Sant, Gallego, Alastruey and Costa-jussa, Multiformer: a head-configurable transformer-based model for direct "
    "speech translation (NAACL SRW 2022, arXiv 2205.07100)",
    (
        kinds.KINDS_STUDY,
        kinds.LAYOUT_STUDY,
        relevance.RELEVANCE_STUDY,
        relevance.MODEL_STUDY,
        relevance.TRAINING_STUDY,
        relevance.SCORES_STUDY,
    ),
    Path(__file__).parent,
    kinds={"identity": "a b c", "simulation": "a6 c5", "construction": "c6", "experiment": "d e f"},
    scaled="e",
    within={(-1.0, 1.0): "e5"},
    says="In speech translation, layers whose heads are of several kinds do better than full attention, and models "
    "whose heads count evenly do better.",
    beliefs={
        "f1": "mixed heads score higher than full attention in speech translation",
        "f2": "models whose heads count evenly score higher there",
    },
    cover="layouts",
)

__all__ = ["PAPER"]
