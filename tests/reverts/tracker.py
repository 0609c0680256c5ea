"""Fixes in the log of changed rows."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS = [
    Revert(
        defect="a cut does not mark open rows again",
        generator="tests/test_segments.py::test_random_schedules_agree_with_the_reference",
        edits={
            "delta_tracker/store/segments.py": [
                ("        for ids in self._open.values():\n            self._mark(ids)\n", ""),
            ],
        },
    ),
    Revert(
        defect="a read that raised keeps its cut",
        generator="tests/test_segments.py::test_random_schedules_agree_with_the_reference",
        edits={
            "delta_tracker/changes.py": [
                ("            self._tidy()\n\n    def seal(", "            pass\n\n    def seal("),
            ],
        },
    ),
    Revert(
        defect="batches of backward passes that raised stay open",
        generator="tests/test_segments.py::test_random_schedules_agree_with_the_reference",
        edits={"delta_tracker/changes.py": [("        self._ended.append(key)\n", "        del key\n")]},
    ),
]
