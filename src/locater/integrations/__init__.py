"""Controls in other people's trainers. Thin: what a control does is in `locater.control`."""

from importlib import import_module
from types import ModuleType


def __getattr__(name: str) -> ModuleType:
    """`locater.integrations.hf`, `locater.integrations.lightning`: imported when named, since Lightning may not be
    installed.
    """
    if name not in ("hf", "lightning"):
        raise AttributeError(f"module 'locater.integrations' has no attribute {name!r}")
    return import_module(f"locater.integrations.{name}")
