"""The output of a model as a sum over paths through its heads."""

from locater.explain.decomposing import decompose
from locater.explain.paths import ByLength, HeadShares, Path, Paths

__all__ = ["ByLength", "HeadShares", "Path", "Paths", "decompose"]
