"""Which tokens and heads an output comes from."""

from locater.explain.decomposing import decompose
from locater.explain.explanation import Explanation
from locater.explain.linear_operator import operator
from locater.explain.path_sums import ByLength, HeadShares, Path, Paths
from locater.explain.targets import Target
from locater.explain.token_paths import paths

__all__ = ["ByLength", "Explanation", "HeadShares", "Path", "Paths", "Target", "decompose", "operator", "paths"]
