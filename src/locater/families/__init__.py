"""Where the heads are: one file per model family, one record for what they find."""

from locater.checkpoints.sources import open_source
from locater.checkpoints.weights import Weights
from locater.families.effective import Effective, Tokens, effective
from locater.families.layer import AttentionLayer, Projection
from locater.families.norm import Norm
from locater.families.registry import attention_layers, families, layers_of, register
from locater.families.rotary import Rotary, rotary_from_config

__all__ = [
    "AttentionLayer",
    "Effective",
    "Norm",
    "Projection",
    "Rotary",
    "Tokens",
    "Weights",
    "attention_layers",
    "effective",
    "families",
    "layers_of",
    "open_source",
    "register",
    "rotary_from_config",
]
