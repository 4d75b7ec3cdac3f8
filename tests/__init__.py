"""Tests, in folders named after the rooms that they test. What is about no single room stands at the top."""

from pathlib import Path

ROOT = Path(__file__).parents[1]
