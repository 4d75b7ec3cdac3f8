"""Which tokens and heads an output comes from."""

from locater.explain.attention_flow import raw_attention, relevance, rollout
from locater.explain.decomposing import decompose
from locater.explain.deletion_curves import Curve, Deletion, deletion
from locater.explain.explanation import Explanation
from locater.explain.input_gradients import gradient_input, integrated_gradients
from locater.explain.linear_operator import operator, paths
from locater.explain.methods import APPLIES_TO, METHODS
from locater.explain.path_sums import ByLength, HeadParts, Path, Paths
from locater.explain.targets import Target
from locater.explain.value_norms import attention_norms

__all__ = [
    "APPLIES_TO",
    "METHODS",
    "ByLength",
    "Curve",
    "Deletion",
    "Explanation",
    "HeadParts",
    "Path",
    "Paths",
    "Target",
    "attention_norms",
    "decompose",
    "deletion",
    "gradient_input",
    "integrated_gradients",
    "operator",
    "paths",
    "raw_attention",
    "relevance",
    "rollout",
]
