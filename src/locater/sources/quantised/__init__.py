"""Quantised checkpoints read as floats: one file per format, behind the same interface as plain tensors."""

from locater.sources.quantised.view import Dequantised, seen_through

__all__ = ["Dequantised", "seen_through"]
