"""What reaches the output from where."""

from locater.explain.paths import ByLength, HeadShares, Path, Paths
from locater.explain.reading import decompose

__all__ = ["ByLength", "HeadShares", "Path", "Paths", "decompose"]
