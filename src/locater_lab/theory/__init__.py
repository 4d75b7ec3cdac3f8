"""What papers say of stacks of attention: bounds on rank collapse, sums over paths, simulations, approximation."""

from locater_lab.theory import approximation
from locater_lab.theory.collapse import (
    FunctionalBlock,
    attention_bound,
    beta,
    contraction_order,
    contraction_rate,
    depth_residuals,
    hidden_states,
    layer_bound,
    mlp_lipschitz,
    skip_bound,
)
from locater_lab.theory.path_sums import (
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
from locater_lab.theory.random_walk_simulation import Walks, simulate

__all__ = [
    "FrozenLayer",
    "FunctionalBlock",
    "Path",
    "Walks",
    "all_paths",
    "apply_layers",
    "approximation",
    "attention_bound",
    "beta",
    "contraction_order",
    "contraction_rate",
    "depth_residuals",
    "frozen_layers",
    "hidden_states",
    "layer_bound",
    "length_contributions",
    "length_weights",
    "mlp_lipschitz",
    "path_counts",
    "path_lengths",
    "path_sum",
    "simulate",
    "skip_bound",
    "skip_weight",
    "terms_by_length",
]
