"""Where the heads are: one file and one `Family` record per architecture, one `AttentionLayer` per attention layer."""

from locater.checkpoints.sources import open_source
from locater.checkpoints.weights import Weights
from locater.families.discovery.searching import Discovered, discover
from locater.families.effective import Effective, Tokens, effective
from locater.families.layer import AttentionLayer, Projection
from locater.families.norm import Norm
from locater.families.reading import attention_layers, layers_of, read_source
from locater.families.record import Block, Family
from locater.families.registry import families, register
from locater.families.rotary import Rotary, rotary_from_config

__all__ = [
    "AttentionLayer",
    "Block",
    "Discovered",
    "Effective",
    "Family",
    "Norm",
    "Projection",
    "Rotary",
    "Tokens",
    "Weights",
    "attention_layers",
    "discover",
    "effective",
    "families",
    "layers_of",
    "open_source",
    "read_source",
    "register",
    "rotary_from_config",
]
