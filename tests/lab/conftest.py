"""For tests of what single claims say."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.lab.made_runs import lifted_rules


@pytest.fixture
def without_rules() -> Iterator[None]:
    with lifted_rules():
        yield
