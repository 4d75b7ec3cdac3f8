"""Quantised checkpoints read as floats: one file per format, behind the same interface as plain tensors."""

from locater.sources.quantised.dequantised import Dequantised, dequantised_view

__all__ = ["Dequantised", "dequantised_view"]
