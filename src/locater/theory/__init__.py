"""Predictions about attention from moments and sizes. Pure functions: tensors in, tensors out. See docs/theory.md."""

from locater.theory import approximation
from locater.theory.attenuation import expected_entropy, kept_at_entropy, residual_kept, variance_at
from locater.theory.blocks import Block, hidden_states
from locater.theory.bounds import attention_bound, beta, layer_bound, mlp_lipschitz, skip_bound
from locater.theory.contraction import contraction_order, contraction_rate, depth_residuals
from locater.theory.entropy import entropy_floor, entropy_floor_of_range, entropy_ratio, second_order_entropy
from locater.theory.path_sums import (
    FrozenLayer,
    Path,
    all_paths,
    apply_layers,
    frozen_layers,
    length_contributions,
    length_weights,
    path_counts,
    path_lengths,
    path_sum,
    skip_weight,
    terms_by_length,
)
from locater.theory.propagation import (
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
    "Block",
    "FrozenLayer",
    "Path",
    "Walks",
    "all_paths",
    "apply_layers",
    "approximation",
    "attention_bound",
    "beta",
    "continuum",
    "contraction_order",
    "contraction_rate",
    "depth_residuals",
    "entropy_floor",
    "entropy_floor_of_range",
    "entropy_ratio",
    "expected_entropy",
    "frozen_layers",
    "hidden_states",
    "kept_at_entropy",
    "layer_bound",
    "length_contributions",
    "length_weights",
    "localization",
    "mixture_continuum",
    "mixture_localization",
    "mixture_propagation",
    "mlp_lipschitz",
    "path_counts",
    "path_lengths",
    "path_sum",
    "phase_diagram",
    "regime",
    "residual_kept",
    "second_order_entropy",
    "signal_propagation",
    "simulate",
    "skip_bound",
    "skip_weight",
    "terms_by_length",
    "unit_moments",
    "variance_at",
]
