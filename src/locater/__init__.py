"""Locater: an instrument for attention. Find every head, read its query-key spectrum, predict, measure."""

from locater import heads, kernels, theory
from locater.compare import Comparison, compare
from locater.control import LocAteR
from locater.errors import LocaterError
from locater.heads import AttentionLayer, attention_layers, register
from locater.probe import Probe, probe
from locater.probing import Monitor, Observation, Statistics, observe, statistics
from locater.result import HeadRow, Scan
from locater.scan import scan
from locater.spectrum import Moments, moments
from locater.version import __version__

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
    "attention_layers",
    "compare",
    "heads",
    "kernels",
    "moments",
    "observe",
    "probe",
    "register",
    "scan",
    "statistics",
    "theory",
]
