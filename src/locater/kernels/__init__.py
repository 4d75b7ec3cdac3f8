"""Streaming statistics of attention from q and k: no T x T matrix, any mask, one function."""

from locater.kernels.dispatch import (
    SUMMED,
    add_head_sums,
    attention_entropy,
    attention_statistics,
    has_spans,
    mask_spans,
    row_statistics,
)
from locater.kernels.fused import attend_with_statistics, attention_with_statistics, statistics_of
from locater.kernels.reference import weights_by_rows
from locater.kernels.terms import AttentionStatistics, Terms

__all__ = [
    "SUMMED",
    "AttentionStatistics",
    "Terms",
    "add_head_sums",
    "attend_with_statistics",
    "attention_entropy",
    "attention_statistics",
    "attention_with_statistics",
    "has_spans",
    "mask_spans",
    "row_statistics",
    "statistics_of",
    "weights_by_rows",
]
