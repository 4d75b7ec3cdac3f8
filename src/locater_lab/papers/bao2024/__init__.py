"""Bao, Hataya and Karakida (2024): attention localizes when the eigenvalues of the query-key map concentrate around a
mean.
"""

from pathlib import Path

from locater_lab.engine.reproduction import Paper
from locater_lab.papers.bao2024 import (
    entropy_or_mean,
    gaussian_features,
    measured_logits,
    paper_experiment,
    random_walk,
    rebuilt_experiment,
    training,
)

PAPER = Paper(
    "bao2024",
    "Self-attention networks localize when QK-eigenspectrum concentrates: claim by claim",
    "Bao, Hataya and Karakida, Self-attention Networks Localize When QK-eigenspectrum Concentrates (ICML 2024, arXiv 2402.02098)",
    (
        random_walk.PROPAGATION_STUDY,
        random_walk.SOFTMAX_STUDY,
        training.MAIN_STUDY,
        training.SMALL_STUDY,
        entropy_or_mean.PARTS_STUDY,
        training.RIVALS_STUDY,
        training.TASKS_STUDY,
        gaussian_features.STUDY,
        entropy_or_mean.ENTROPY_STUDY,
        training.HOT_STUDY,
        paper_experiment.EXPERIMENT_STUDY,
        rebuilt_experiment.REBUILT_STUDY,
        measured_logits.MEASURED_STUDY,
        entropy_or_mean.CAUSE_STUDY,
        measured_logits.ONCE_STUDY,
        paper_experiment.LONG_STUDY,
    ),
    Path(__file__).parent,
    kinds={"simulation": "a b", "experiment": "c d e f g h i j k l m n o"},
    scaled="b d h j9 j10",
    within={(-1.0, 1.0): "d11"},
    says="Attention localizes when the eigenvalues of the query-key matrix concentrate around a mean that is not "
    "zero; LocAteR, which shrinks their scale and holds the mean, then prevents rank and entropy collapse and "
    "lowers perplexity.",
    beliefs={
        "a1": "with many directions two moments of the spectrum give the propagation probability",
        "b1 b4": "a smaller variance at the same mean moves drawn attention to near tokens, and can prevent both "
        "collapses at once",
        "j9 j10": "LocAteR lowers perplexity and raises entropy in the experiment of the paper",
    },
    cover="collapse",
)

__all__ = ["PAPER"]
