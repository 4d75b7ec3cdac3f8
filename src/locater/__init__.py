"""Locater: an instrument for attention. Find every head, read its query-key spectrum, predict what it will do."""

from locater import heads, kernels, theory
from locater.compare import Comparison, compare
from locater.errors import LocaterError
from locater.heads import AttentionLayer, attention_layers, register
from locater.result import HeadRow, Scan
from locater.scan import scan
from locater.spectrum import Moments, moments
from locater.version import __version__

__all__ = [
    "AttentionLayer",
    "Comparison",
    "HeadRow",
    "LocaterError",
    "Moments",
    "Scan",
    "__version__",
    "attention_layers",
    "compare",
    "heads",
    "kernels",
    "moments",
    "register",
    "scan",
    "theory",
]
