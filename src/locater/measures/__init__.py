"""Measures of hidden states: how alike tokens are, how many directions they use, which entries stick out, how normal
they are.

Hidden states are tensors (batch, tokens, width). The mask `real` is True for tokens that are not padding; padding never
counts, whatever numbers it contains. Results are computed and returned in float64 for inputs of any precision, because
near collapse the answer is a small difference of large numbers. A value that does not exist (no tokens, a zero matrix,
an infinite entry among the real tokens) is NaN.
"""

from locater.measures.activation_distribution import (
    MASSIVE,
    MASSIVE_RATIO,
    ChannelMoments,
    Massive,
    Normality,
    excess_kurtosis,
    massive_activations,
    mean_share,
    normality_distance,
)
from locater.measures.rank import Directions, Ranks, ranks, ranks_of_gram, singular_values, top_directions
from locater.measures.token_residual_and_cosine import (
    CENTRES,
    composite_norm,
    rank_residual,
    token_cosine,
    token_residual,
)

__all__ = [
    "CENTRES",
    "MASSIVE",
    "MASSIVE_RATIO",
    "ChannelMoments",
    "Directions",
    "Massive",
    "Normality",
    "Ranks",
    "composite_norm",
    "excess_kurtosis",
    "massive_activations",
    "mean_share",
    "normality_distance",
    "rank_residual",
    "ranks",
    "ranks_of_gram",
    "singular_values",
    "token_cosine",
    "token_residual",
    "top_directions",
]
