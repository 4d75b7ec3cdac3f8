"""Claims that need a GPU: stated here, so that a run shows what is open, and undecided until their measurements are written."""

from __future__ import annotations

from locater.papers.claim import Claim
from locater.papers.paper import Study

GPU = "a CUDA device and its training runs, which are not written yet"

STUDIES = (
    Study(
        "LocAteR in the paper's own setting",
        (
            Claim(
                "c", "LocAteR lowers validation perplexity and raises attention entropy: one layer, one head, post-norm, width 128",
                "change of log validation perplexity by LocAteR, each arm at its best learning rate", "at most", 0.0,
            ),
        ),
        needs=f"{GPU}; also the training split of WikiText-2",
    ),
    Study(
        "parts of the penalty, full size",
        (
            Claim(
                "d", "6 layers of width 512: LocAteR with target 1 in logit units takes perplexity from 75.59 to 74.54",
                "change of log validation perplexity by LocAteR, 3,000 steps, two seeds", "about", -0.014, 0.004, by="notes",
            ),
        ),
        needs=GPU,
    ),
    Study(
        "the mechanism",
        (
            Claim(
                "e", "LocAteR improves perplexity by raising entropy",
                "rank correlation of mean entropy with log perplexity over the arms of d", "at most", -0.5,
            ),
        ),
        needs=GPU,
    ),
    Study(
        "a fair comparison",
        (
            Claim(
                "f", "The gain is the penalty's: it survives a learning rate tuned per arm and an initialisation with the same mean",
                "validation loss of LocAteR less that of mimetic initialisation, each at its best learning rate", "at most", 0.0,
            ),
        ),
        needs=GPU,
    ),
    Study(
        "trainability",
        (
            Claim(
                "h", "A concentrated spectrum trains where others collapse: deeper models and hotter learning rates",
                "share of failed runs with LocAteR less that without, over depths and learning rates beyond the stable ones",
                "at most", -0.2,
            ),
        ),
        needs=GPU,
    ),
    Study(
        "beyond text",
        (
            Claim(
                "i", "The effect is not one of language: an image classifier gains too",
                "change of test error of a vision transformer by LocAteR, each arm at its best learning rate", "at most", 0.0,
            ),
        ),
        needs=GPU,
    ),
)  # fmt: skip
