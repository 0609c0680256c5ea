"""Faults of predictors, mirrors and streams together, by the random worlds."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Returns
from tests.reverts.revert import Revert

REVERTS = {
    "tests/system/test_world.py::test_random_worlds_break_no_rule_but_the_known_ones": [
        Revert("a predictor stays at a source that fails", Returns("_asks_others", "False")),
        Revert(
            "a predictor that has a version follows no pin", Returns("decide._ordered", "_forward(log, view, position)")
        ),
        Revert("mirrors copy no pins", Returns("Mirror.copy_pins", "0")),
        Revert("the raw ids of a version are not mapped in a model", DoesNothing("ModelWriter._map")),
    ],
}
