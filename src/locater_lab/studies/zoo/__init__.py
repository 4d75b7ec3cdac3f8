"""The zoo: every attention mechanism, same model, data and seeds, each at the better of two learning rates."""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.studies.zoo import losses, maps, sinks, step_times

PAPER = Paper(
    "zoo",
    "Every attention mechanism on the same footing",
    "All mechanisms of this project: one model, one text, the same seeds",
    (losses.STUDY, *maps.STUDIES, step_times.STUDY, sinks.STUDY),
    Path(__file__).parent,
    kinds={"experiment": "a b c d e f"},
    within={(0.0, None): "f2 f3 f4 f5 f12", (0.0, 1.0): "f1 f6 f7 f15 f16", (-1.0, 1.0): "c4"},
    says="How do attention mechanisms compare on one model, one text and the same seeds, and which of them takes the "
    "effect of an attention sink away?",
    beliefs={
        "f1": "a softmax head that has nothing to add forms a sink",
        "f2 f3": "a gate or sigmoids take the effect of that sink away",
        "f4 f5": "a sink in the softmax, fixed or learned, takes its effect away",
        "f15": "the map behind a gate has no sink either",
        "a1 a2 a3 a4 a5 a6 a7 a8 a9 a10 a11 a12 a13 a14 a15 a16 a17": "mechanisms of attention change the loss of one model as claimed of them",
    },
    cover="loss",
)

__all__ = ["PAPER"]
