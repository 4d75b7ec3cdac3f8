"""Nguyen et al. (2026): gated attention as a hierarchical mixture of experts, and how many samples its experts take."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.nguyen2026 import gate_places, sample_counts

PAPER = Paper(
    "nguyen2026",
    "Gated attention as a mixture of experts: what a gate changes, and what it does not",
    "Nguyen, Pham, Cao, Dinh, Nguyen, Ho and Rinaldo, A Statistical Theory of Gated Attention through the Lens of Hierarchical Mixture of "
    "Experts (arXiv 2602.01468, 2026)",
    (gate_places.MIXTURE_STUDY, gate_places.PLACES_STUDY, sample_counts.SAMPLES_STUDY, sample_counts.THEOREM_STUDY),
    Path(__file__).parent,
    kinds={"identity": "a b d", "simulation": "b2 b4 b5 b6 b7 c"},
    says="An entry of attention, with or without a gate, is a hierarchical mixture of experts; a gate makes the "
    "experts non-linear, for which fewer samples are enough.",
    beliefs={
        "a1 a2": "an entry of attention, gated or not, is a hierarchical mixture of experts",
        "b2": "a gate after attention or on values makes a head non-linear",
        "d1": "gated attention needs polynomially many samples where attention needs exponentially many",
    },
    cover="places",
)

__all__ = ["PAPER"]
