"""Publishers, readers and maintenance of a log whose newest entries another program has deleted."""

from __future__ import annotations

import pytest

from delta_tracker.stream.format.manifest import Kind
from tests.stream.lost_entries import BEFORE, explore
from tests.sweeps import SWEEPS_ARE_WHOLE


@pytest.mark.sweep("long")
@pytest.mark.parametrize(
    ("kind", "is_directory"),
    [
        ("delta", False),
        *(
            pytest.param(*case, marks=pytest.mark.sweep("long", only=True))  # up to a minute
            for case in (("snapshot", False), ("delta", True), ("snapshot", True))
        ),
    ],
)
def test_one_publisher_continues_whatever_a_person_deletes(kind: Kind, is_directory: bool) -> None:
    befores = BEFORE if SWEEPS_ARE_WHOLE else ("", "x")
    assert explore(kind, is_directory=is_directory, befores=befores) > 500
