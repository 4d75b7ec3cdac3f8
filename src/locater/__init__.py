"""Locater: an instrument for attention. Find every head, read its query-key spectrum, predict, measure.

Names are imported when they are first used, so that `locater --help` does not wait for torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from locater.errors import LocaterError
from locater.version import __version__

if TYPE_CHECKING:  # for type checkers and editors; the same names as in _NAMES and _MODULES
    from locater import control, explain, families, integrations, kernels, measures, testing, theory
    from locater.commands.ablating import ablate
    from locater.commands.choosing_cache import cache_plan
    from locater.commands.comparing import compare
    from locater.commands.doctor.diagnosing import doctor
    from locater.commands.explaining import explanations
    from locater.commands.fleet.result import Fleet
    from locater.commands.probing import probe
    from locater.commands.probing_lengths import probe_lengths
    from locater.commands.scanning import scan
    from locater.control import (
        EntropyPenalty,
        LocAteR,
        LogitSoftcap,
        Mimetic,
        QKClip,
        QKNorm,
        SigmaReparam,
        Surgery,
        Temperature,
        without,
    )
    from locater.discovery import Discovered, attention_layers, discover
    from locater.families import Block, Family, register
    from locater.inputs.token_groups import chat_batch, token_groups
    from locater.integrations.monitor_for_trainers import Monitor
    from locater.layers import AttentionLayer
    from locater.observing import Observation, attention_pattern, observe, statistics
    from locater.predict import Statistics
    from locater.results.ablation import Ablation
    from locater.results.cache_plan import CachePlan
    from locater.results.comparison import Comparison
    from locater.results.diagnosis import Diagnosis
    from locater.results.explanations import Explanations
    from locater.results.length_probe import LengthProbe
    from locater.results.probe import Probe
    from locater.results.scan import HeadRow, Scan
    from locater.results.series import ComparisonSeries
    from locater.spectrum import Moments, moments

__all__ = [
    "Ablation",
    "AttentionLayer",
    "Block",
    "CachePlan",
    "Comparison",
    "ComparisonSeries",
    "Diagnosis",
    "Discovered",
    "EntropyPenalty",
    "Explanations",
    "Family",
    "Fleet",
    "HeadRow",
    "LengthProbe",
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
    "Temperature",
    "__version__",
    "ablate",
    "attention_layers",
    "attention_pattern",
    "cache_plan",
    "chat_batch",
    "compare",
    "control",
    "discover",
    "doctor",
    "explain",
    "explanations",
    "families",
    "integrations",
    "kernels",
    "measures",
    "moments",
    "observe",
    "probe",
    "probe_lengths",
    "register",
    "scan",
    "statistics",
    "testing",
    "theory",
    "token_groups",
    "without",
]

_MODULES = (
    "control",
    "explain",
    "families",
    "integrations",
    "kernels",
    "measures",
    "testing",
    "theory",
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
        "Temperature",
        "without",
    ),
    "discovery": ("Discovered", "attention_layers", "discover"),
    "families": ("Block", "Family", "register"),
    "inputs.token_groups": ("chat_batch", "token_groups"),
    "layers": ("AttentionLayer",),
    "integrations.monitor_for_trainers": ("Monitor",),
    "observing": ("Observation", "attention_pattern", "observe", "statistics"),
    "predict": ("Statistics",),
    "spectrum": ("Moments", "moments"),
    "results.ablation": ("Ablation",),
    "commands.ablating": ("ablate",),
    "results.comparison": ("Comparison",),
    "commands.choosing_cache": ("cache_plan",),
    "results.cache_plan": ("CachePlan",),
    "commands.comparing": ("compare",),
    "results.diagnosis": ("Diagnosis",),
    "commands.doctor.diagnosing": ("doctor",),
    "results.explanations": ("Explanations",),
    "commands.explaining": ("explanations",),
    "commands.fleet.result": ("Fleet",),
    "results.probe": ("Probe",),
    "commands.probing": ("probe",),
    "commands.probing_lengths": ("probe_lengths",),
    "results.length_probe": ("LengthProbe",),
    "results.scan": ("HeadRow", "Scan"),
    "commands.scanning": ("scan",),
    "results.series": ("ComparisonSeries",),
}
_MOVED = {
    "attention": "locater_lab.mechanisms",
    "train": "locater_lab.train",
    "SwapMechanism": "locater_lab.mechanisms.swap.SwapMechanism",
}
_HOMES = {name: module for module, names in _NAMES.items() for name in names}


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        value = getattr(import_module(f"locater.{_HOMES[name]}"), name)
    elif name in _MODULES:
        value = import_module(f"locater.{name}")
    elif name in _MOVED:
        raise AttributeError(f"locater.{name} is now {_MOVED[name]}")
    else:
        raise AttributeError(f"module 'locater' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
