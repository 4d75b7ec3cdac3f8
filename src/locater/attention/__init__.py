"""Attention mechanisms as functions of queries, keys and values: the mathematics, once."""

from locater.attention.qk_norm import qk_norm
from locater.attention.softcap import softcap, softcap_attention

__all__ = ["qk_norm", "softcap", "softcap_attention"]
