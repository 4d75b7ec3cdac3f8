"""Streaming statistics of attention from q and k: no T x T matrix, any mask, one function."""

from locater.kernels.dispatch import attention_entropy, attention_statistics, row_statistics
from locater.kernels.terms import AttentionStatistics, Terms

__all__ = ["AttentionStatistics", "Terms", "attention_entropy", "attention_statistics", "row_statistics"]
