"""Predictions from moments and sizes. Pure functions: tensors in, tensors out."""

from locater.theory.entropy import entropy_floor, entropy_floor_of_range, entropy_ratio, expected_entropy
from locater.theory.localization import (
    REGIMES,
    continuum,
    localization,
    mixture_continuum,
    mixture_localization,
    mixture_propagation,
    phase_diagram,
    regime,
    signal_propagation,
    unit_moments,
)
from locater.theory.walk import Walks, simulate

__all__ = [
    "REGIMES",
    "Walks",
    "continuum",
    "entropy_floor",
    "entropy_floor_of_range",
    "entropy_ratio",
    "expected_entropy",
    "localization",
    "mixture_continuum",
    "mixture_localization",
    "mixture_propagation",
    "phase_diagram",
    "regime",
    "signal_propagation",
    "simulate",
    "unit_moments",
]
