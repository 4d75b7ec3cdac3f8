"""Locater: an instrument for attention. Find every head, read its query-key spectrum, predict, measure.

Names are imported when they are first used, so that `locater --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError
from locater.version import __version__

if TYPE_CHECKING:  # for type checkers and editors; the same names as in _NAMES and _MODULES
    from locater import attention, control, explain, families, integrations, kernels, measures, testing, theory, train
    from locater.control import (
        EntropyPenalty,
        LocAteR,
        LogitSoftcap,
        Mimetic,
        QKClip,
        QKNorm,
        SigmaReparam,
        Surgery,
        SwapMechanism,
        Temperature,
    )
    from locater.families import AttentionLayer, Block, Discovered, Family, attention_layers, discover, register
    from locater.monitor import Monitor
    from locater.observing import Observation, attention_pattern, observe, statistics
    from locater.predict import Statistics
    from locater.spectrum import Moments, moments
    from locater.verbs.compare_result import Comparison
    from locater.verbs.comparing import compare
    from locater.verbs.explain_result import Explanations
    from locater.verbs.explaining import explanations
    from locater.verbs.fleet.result import Fleet
    from locater.verbs.probe_result import Probe
    from locater.verbs.probing import probe
    from locater.verbs.scan_result import HeadRow, Scan
    from locater.verbs.scanning import scan
    from locater.verbs.series import ComparisonSeries

__all__ = [
    "AttentionLayer",
    "Block",
    "Comparison",
    "ComparisonSeries",
    "Discovered",
    "EntropyPenalty",
    "Explanations",
    "Family",
    "Fleet",
    "HeadRow",
    "LocAteR",
    "LocaterError",
    "LogitSoftcap",
    "Mimetic",
    "Moments",
    "Monitor",
    "Observation",
    "Probe",
    "QKClip",
    "QKNorm",
    "Scan",
    "SigmaReparam",
    "Statistics",
    "Surgery",
    "SwapMechanism",
    "Temperature",
    "__version__",
    "attention",
    "attention_layers",
    "attention_pattern",
    "compare",
    "control",
    "discover",
    "explain",
    "explanations",
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
    "testing",
    "theory",
    "train",
]

_MODULES = (
    "attention",
    "control",
    "explain",
    "families",
    "integrations",
    "kernels",
    "measures",
    "testing",
    "theory",
    "train",
)
_NAMES = {  # module: what it gives to the package
    "control": (
        "EntropyPenalty",
        "LocAteR",
        "LogitSoftcap",
        "Mimetic",
        "QKClip",
        "QKNorm",
        "SigmaReparam",
        "Surgery",
        "SwapMechanism",
        "Temperature",
    ),
    "families": ("AttentionLayer", "Block", "Discovered", "Family", "attention_layers", "discover", "register"),
    "monitor": ("Monitor",),
    "observing": ("Observation", "attention_pattern", "observe", "statistics"),
    "predict": ("Statistics",),
    "spectrum": ("Moments", "moments"),
    "verbs.compare_result": ("Comparison",),
    "verbs.comparing": ("compare",),
    "verbs.explain_result": ("Explanations",),
    "verbs.explaining": ("explanations",),
    "verbs.fleet.result": ("Fleet",),
    "verbs.probe_result": ("Probe",),
    "verbs.probing": ("probe",),
    "verbs.scan_result": ("HeadRow", "Scan"),
    "verbs.scanning": ("scan",),
    "verbs.series": ("ComparisonSeries",),
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
