"""Locater: an instrument for attention. Find every head, read its query-key spectrum, predict, measure.

Names are imported when they are first used, so that `locater --help` does not wait for torch.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError
from locater.version import __version__

if TYPE_CHECKING:  # for type checkers and editors; the same names as in _NAMES and _MODULES
    from locater import attention, control, explain, families, integrations, kernels, measures, theory, train
    from locater.compare import Comparison, compare
    from locater.control import LocAteR
    from locater.families import AttentionLayer, attention_layers, register
    from locater.monitor import Monitor
    from locater.observing import Observation, observe
    from locater.predict import Statistics
    from locater.predict import input_statistics as statistics
    from locater.probe import Probe, probe
    from locater.result import HeadRow, Scan
    from locater.scan import scan
    from locater.spectrum import Moments, moments

__all__ = [
    "AttentionLayer",
    "Comparison",
    "HeadRow",
    "LocAteR",
    "LocaterError",
    "Moments",
    "Monitor",
    "Observation",
    "Probe",
    "Scan",
    "Statistics",
    "__version__",
    "attention",
    "attention_layers",
    "compare",
    "control",
    "explain",
    "families",
    "integrations",
    "kernels",
    "measures",
    "moments",
    "observe",
    "probe",
    "register",
    "scan",
    "statistics",
    "theory",
    "train",
]

_MODULES = ("attention", "control", "explain", "families", "integrations", "kernels", "measures", "theory", "train")
_NAMES = {  # module: what it gives to the package
    "compare": ("Comparison", "compare"),
    "control": ("LocAteR",),
    "families": ("AttentionLayer", "attention_layers", "register"),
    "probe": ("Probe", "probe"),
    "monitor": ("Monitor",),
    "observing": ("Observation", "observe", "statistics"),
    "predict": ("Statistics",),
    "result": ("HeadRow", "Scan"),
    "scan": ("scan",),
    "spectrum": ("Moments", "moments"),
}
_OLD = ("heads",)  # work for one release, and warn
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"locater.{_HOMES[name]}"), name)
    elif name in _MODULES or name in _OLD:
        value = import_module(f"locater.{name}")
    else:
        raise AttributeError(f"module 'locater' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """`locater.scan` is the function, not the module of the same name that an import would put in its place."""

    def __setattr__(self, name: str, value: Any) -> None:
        if _HOMES.get(name) == name and isinstance(value, ModuleType):
            value = getattr(value, name)
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Package
