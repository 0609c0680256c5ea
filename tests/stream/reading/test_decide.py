"""Decisions of a reader over all small logs, orders, faults and views of several urls, compared with a second text.

``python -m tests.stream.reading.exploring [short] [FAMILY ...]`` prints the number of states.
"""

from __future__ import annotations

from itertools import islice

import pytest

from tests.stream.reading.exploring import Exploration
from tests.stream.reading.families import FAMILIES
from tests.sweeps import SWEEPS_ARE_WHOLE, num_examples


@pytest.mark.sweep("short")
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reader_breaks_no_rule_and_comes_to_rest_at_the_newest_version(family: str) -> None:
    every = 1 if SWEEPS_ARE_WHOLE else 8 // num_examples(1)
    found = Exploration().run(islice(FAMILIES[family][0](), 0, None, every))
    assert found.states > 30
    assert found.steps > 100


@pytest.mark.sweep("long", only=True)
@pytest.mark.timeout(0)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_reader_of_longer_logs_breaks_no_rule(family: str) -> None:
    found = Exploration().run(FAMILIES[family][1]())
    print(family, found)
    assert found.states > 100
