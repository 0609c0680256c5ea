"""Decisions of a reader over all small logs, orders, faults and views of several urls, compared with a second text.

``python -m tests.stream.reading.exploring [short] [FAMILY ...]`` prints the number of states.
"""

from __future__ import annotations

import pytest

from tests.stream.reading.exploring import Exploration
from tests.stream.reading.families import FAMILIES
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.mark.sweep("long")
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reader_breaks_no_rule_and_comes_to_rest_at_the_newest_version(family: str) -> None:
    found = Exploration().run(FAMILIES[family][SWEEPS_ARE_WHOLE]())
    print(family, found)
    assert found.states > 100
    assert found.steps > 100
