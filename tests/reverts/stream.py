"""Fixes in the stream: its log, its storage and retention."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS = [
    Revert(
        defect="retention frees the names that a fenced publisher tries",
        generator="tests/test_sleepers.py::test_wherever_a_publisher_sleeps_or_dies_no_late_entry_counts",
        edits={
            "delta_tracker/stream/retention.py": [
                ("    guards = held.guards()\n", "    guards: set[int] = set()\n"),
            ],
        },
    ),
    Revert(
        defect="retention frees the name of the entry before a claim",
        generator="tests/test_sleepers.py::test_wherever_a_publisher_sleeps_or_dies_no_late_entry_counts",
        edits={
            "delta_tracker/stream/retention.py": [
                ("                found.add(version - 1)\n", "                pass\n"),
            ],
        },
    ),
    Revert(
        defect="a reader takes a claim that was created late",
        generator="tests/test_sleepers.py::test_wherever_a_publisher_sleeps_or_dies_no_late_entry_counts",
        edits={
            "delta_tracker/stream/cursor.py": [
                (
                    'manifest is not None and manifest.kind == "claim" and not self.log.is_committed(manifest)',
                    "manifest is not None and not manifest.version + 1",
                ),
            ],
        },
    ),
    Revert(
        defect="a late claim counts as part of the log because its parent is still there",
        generator="tests/test_sleepers.py::test_wherever_a_publisher_sleeps_or_dies_no_late_entry_counts",
        edits={
            "delta_tracker/stream/log.py": [
                (
                    '        if entry.kind != "claim" and entry.parent is not None:\n',
                    "        if entry.parent is not None:\n",
                ),
            ],
        },
    ),
]
