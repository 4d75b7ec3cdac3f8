"""What attention layers compute: `AttentionLayer` and its parts, the layouts that say where these are, and how layers
are folded, stacked and split.
"""

from locater.layers.layer import AttentionLayer, Projection
from locater.layers.norm import Norm
from locater.layers.norm_folding import Effective, Tokens, effective
from locater.layers.rotary import Rotary, rotary_from_config

__all__ = [
    "AttentionLayer",
    "Effective",
    "Norm",
    "Projection",
    "Rotary",
    "Tokens",
    "effective",
    "rotary_from_config",
]
