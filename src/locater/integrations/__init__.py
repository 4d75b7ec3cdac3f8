"""`Monitor` and controls inside the trainers of transformers and Lightning.

The controls themselves are in `locater.control`; what a monitor writes and warns of is in `locater.runs`.
"""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """Import `locater.integrations.hf` or `.lightning` on first use, since either package may be missing."""
    if name not in ("hf", "lightning"):
        raise AttributeError(f"module 'locater.integrations' has no attribute {name!r}")
    return import_module(f"locater.integrations.{name}")
