"""Attention mechanisms as functions of queries, keys and values: the mathematics, once, under one signature."""

from locater.attention.inputs import Inputs
from locater.attention.mechanism_record import Mechanism
from locater.attention.qk_norm import qk_norm
from locater.attention.registry import mechanism, mechanisms, register_mechanism
from locater.attention.softcap import softcap, softcap_attention

__all__ = [
    "Inputs",
    "Mechanism",
    "mechanism",
    "mechanisms",
    "qk_norm",
    "register_mechanism",
    "softcap",
    "softcap_attention",
]
