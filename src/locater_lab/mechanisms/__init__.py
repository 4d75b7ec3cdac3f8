"""Attention mechanisms as functions of queries, keys and values: the mathematics, once, under one signature."""

from locater_lab.mechanisms.mechanism_record import Inputs, Mechanism
from locater_lab.mechanisms.registry import mechanism, mechanisms, register_mechanism

__all__ = [
    "Inputs",
    "Mechanism",
    "mechanism",
    "mechanisms",
    "register_mechanism",
]
