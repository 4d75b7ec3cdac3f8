"""Sun, Canziani, LeCun and Zhu (2026): spikes in the stream, sinks in attention, and what ties or unties them."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.sun2026 import sinks_and_spikes, trained_models, training

PAPER = Paper(
    "sun2026",
    "Spikes, sparse tokens and sinks: claim by claim",
    "Sun, Canziani, LeCun and Zhu, Spike, Sparse, Sink (2026, arXiv 2603.05498); measures of Gu et al. (2024, arXiv 2410.10781) and "
    "Sun et al. (2024, arXiv 2402.17762)",
    (
        sinks_and_spikes.METRICS_STUDY,
        sinks_and_spikes.NORM_STUDY,
        sinks_and_spikes.FIRST_STUDY,
        trained_models.STUDY,
        training.TRAINING_STUDY,
        training.SINK_STUDY,
        training.GROWTH_STUDY,
        training.OWN_STUDY,
    ),
    Path(__file__).parent,
    kinds={"identity": "a c d1 d2", "simulation": "a5 a6 b c3", "experiment": "d e f g h"},
    scaled="b d e f g",
    one_run="d5 d6 d7 d8 d10 d11 d12",
    within={(0.0, 1.0): "a5 a6 b3", (0.0, 2.0): "b2", (-1.0, 1.0): "e4 e14 f3 f12"},
    says="Norms in front of branches are what lets massive activations (spikes) and attention sinks occur together; "
    "sinks bias heads to short range, and spikes act as implicit parameters.",
    beliefs={
        "h1": "norms in front are what couples spikes and sinks",
        "h2": "sinks bias heads to short range",
        "h3": "spikes act as implicit parameters",
        "e5 e6 f11": "gates lower the weight on the first token",
    },
    cover="text",
)

__all__ = ["PAPER"]
