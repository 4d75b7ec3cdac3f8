"""Every control by the name that `--control` takes: the name of its class in lower case, unless it says another.

Case and underscores do not count: `qk_clip`, `QKClip` and `qkclip` are one. A class from elsewhere is added with

    @locater.control.register_control
    class Mine(locater.control.Control): ...
"""

from __future__ import annotations

from typing import TypeVar

from locater.control.base import Control
from locater.control.entropy import EntropyPenalty
from locater.control.locater import LocAteR
from locater.control.mimetic import Mimetic
from locater.control.qk_clip import QKClip
from locater.control.qk_norm import QKNorm
from locater.control.sigma_reparam import SigmaReparam
from locater.control.softcap import LogitSoftcap
from locater.control.surgery import Surgery
from locater.control.temperature import Temperature
from locater.registry import Registry

Class = TypeVar("Class", bound=type[Control])


def _spell(name: str) -> str:
    return name.replace("_", "").lower()


CONTROLS: Registry[type[Control]] = Registry("control", replaceable=True, spelling=_spell, group="controls")


def register_control(kind: Class, name: str | None = None) -> Class:
    """Make a control known in this process by the name of its class, or by `name`; serves as a decorator."""
    CONTROLS.add(kind, name or kind.__name__)
    return kind


for _kind in (EntropyPenalty, LocAteR, LogitSoftcap, Mimetic, QKClip, QKNorm, SigmaReparam, Surgery, Temperature):
    register_control(_kind)
