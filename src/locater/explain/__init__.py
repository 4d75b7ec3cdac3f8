"""What reaches the output from where."""

from locater.explain.paths import ByLength, HeadShares, Path, Paths, decompose

__all__ = ["ByLength", "HeadShares", "Path", "Paths", "decompose"]
