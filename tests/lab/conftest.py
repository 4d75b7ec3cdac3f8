"""For tests of what single claims say."""

from __future__ import annotations

import pytest

from locater_lab.engine import claims
from locater_lab.engine.runs import Arm


@pytest.fixture
def without_rules(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which way a claim goes by made-up runs, all seeds of all arms counted. The rules on edges and on seeds, under which
    few runs decide nothing, have tests of their own (tests/lab/engine).
    """
    monkeypatch.setattr(Arm, "edge", lambda self, runs: None)
    monkeypatch.setattr(Arm, "choosing", 0)
    monkeypatch.setattr(claims, "FEWEST_SEEDS", 1)
