"""Locater: an instrument for attention. Find every head, read its query-key spectrum, predict what it will do."""

from locater import heads, theory
from locater.errors import LocaterError
from locater.heads import AttentionLayer, attention_layers, register
from locater.scan import HeadRow, Scan, scan
from locater.spectrum import Moments, moments
from locater.version import __version__

__all__ = [
    "AttentionLayer",
    "HeadRow",
    "LocaterError",
    "Moments",
    "Scan",
    "__version__",
    "attention_layers",
    "heads",
    "moments",
    "register",
    "scan",
    "theory",
]
