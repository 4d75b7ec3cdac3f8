"""Predictions about attention from moments and sizes. Pure functions: tensors in, tensors out. See docs/theory.md."""

from locater.theory.entropy import (
    entropy_floor,
    entropy_floor_of_range,
    entropy_ratio,
    expected_entropy,
    kept_at_entropy,
    residual_kept,
    second_order_entropy,
    variance_at,
)
from locater.theory.propagation_and_regimes import (
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

__all__ = [
    "REGIMES",
    "continuum",
    "entropy_floor",
    "entropy_floor_of_range",
    "entropy_ratio",
    "expected_entropy",
    "kept_at_entropy",
    "localization",
    "mixture_continuum",
    "mixture_localization",
    "mixture_propagation",
    "phase_diagram",
    "regime",
    "residual_kept",
    "second_order_entropy",
    "signal_propagation",
    "unit_moments",
    "variance_at",
]
