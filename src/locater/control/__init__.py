"""Interventions: each can be attached to a model, adds to the loss or acts after a step, and can be detached again."""

from locater.control.base import Control, Controls
from locater.control.entropy import EntropyPenalty
from locater.control.forward_controls import CarriedChange, carried_changes
from locater.control.locater import LocAteR
from locater.control.mimetic import Mimetic
from locater.control.qk_clip import QKClip
from locater.control.qk_norm import QKNorm
from locater.control.registry import CONTROLS, register_control
from locater.control.sigma_reparam import SigmaReparam
from locater.control.softcap import LogitSoftcap
from locater.control.surgery import Surgery, without
from locater.control.temperature import Temperature

__all__ = [
    "CONTROLS",
    "CarriedChange",
    "Control",
    "Controls",
    "EntropyPenalty",
    "LocAteR",
    "LogitSoftcap",
    "Mimetic",
    "QKClip",
    "QKNorm",
    "SigmaReparam",
    "Surgery",
    "Temperature",
    "carried_changes",
    "register_control",
    "without",
]
