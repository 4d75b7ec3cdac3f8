"""Tests, in folders named after the rooms that they test. What is about no single room stands at the top."""

import runpy
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def benchmark(name: str) -> dict[str, Any]:
    """What a script in benchmarks/ defines; it imports its neighbours by name."""
    folder = str(ROOT / "benchmarks")
    sys.path.insert(0, folder)
    try:
        return runpy.run_path(f"{folder}/{name}.py")
    finally:
        sys.path.remove(folder)
