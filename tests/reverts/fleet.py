"""Promises of the fleet view and pins."""

from __future__ import annotations

from tests.reverts.revert import Revert

_PINS = "tests/predictor/test_pins.py"

REVERTS = [
    Revert(
        defect="a retention pass that has looked for pins deletes what leads to a later one",
        generator="tests/stream/test_rollback.py::test_a_pin_during_a_retention_pass_keeps_its_versions_or_is_undone",
        edits={
            "delta_tracker/stream/rollback.py": [
                (
                    "        if before > oldest:\n",
                    "        if False and before > oldest:\n",
                ),
            ],
        },
    ),
    Revert(
        defect="retention passes share an announcement",
        generator="tests/stream/test_rollback.py::test_a_pin_during_two_passes_finds_both",
        edits={
            "delta_tracker/stream/pin.py": [("{secrets.token_hex(16)}.json", "{'0' * 32}.json")],
        },
    ),
    Revert(
        defect="a pin checks its path before it looks for announcements",
        generator="tests/stream/test_rollback.py::test_a_pass_that_ends_while_a_pin_is_checked_is_found",
        edits={
            "delta_tracker/stream/rollback.py": [
                (
                    "        written = storage.stat(pin_name(pin.counter))\n",
                    (
                        "        _, oldest = checked_path(log, version)\n"
                        "        written = storage.stat(pin_name(pin.counter))\n"
                    ),
                ),
                (
                    "        _, oldest = checked_path(log, version)\n        before = ",
                    "        before = ",
                ),
            ],
        },
    ),
    Revert(
        defect="a retention pass deletes after its announcement has expired",
        generator="tests/stream/test_rollback.py::test_a_pass_ends_before_its_announcement_expires",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("        if time.monotonic() >= self._ends_at:\n            self._is_over = True\n", ""),
            ],
        },
    ),
    Revert(
        defect="retention does not look for a pin again before it deletes",
        generator=f"{_PINS}::test_a_pin_written_during_a_retention_pass_ends_the_pass",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("        if not self._left and not self._is_over:\n", "        if False:\n"),
            ],
        },
    ),
    Revert(
        defect="retention deletes what leads to a pinned version",
        generator=f"{_PINS}::test_retention_keeps_the_path_of_a_pin",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("    path = _pinned_path(log, held, pin)\n", "    path = _pinned_path(log, held, None)\n"),
            ],
        },
    ),
    Revert(
        defect="a pin is written over that of another operator",
        generator=f"{_PINS}::test_one_of_two_operators_is_refused",
        edits={
            "delta_tracker/stream/rollback.py": [
                ("    if not storage.create(name, data):\n", "    if storage.replace(name, data):\n"),
            ],
        },
    ),
    Revert(
        defect="the path of a pin is not checked again after the pin was written",
        generator=f"{_PINS}::test_a_pin_whose_path_is_deleted_meanwhile_is_corrected",
        edits={
            "delta_tracker/stream/rollback.py": [
                ("        _, oldest = checked_path(log, version)\n", "        oldest = version\n"),
            ],
        },
    ),
    Revert(
        defect="a release leads only to the snapshot that it names, which retention may have deleted",
        generator=f"{_PINS}::test_all_predictors_end_at_one_version",
        edits={
            "delta_tracker/predictor/predictor.py": [
                (
                    "                if self._cursor.allows is None or self._cursor.allows(later):\n",
                    "                if False:\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a predictor counts as stuck although it had no lag in its window",
        generator="tests/stream/test_fleet.py::test_a_state_is_judged_by_the_window",
        edits={
            "delta_tracker/stream/fleet.py": [
                ("    if 0 in lags:\n", "    if lags[-1] == 0:\n"),
            ],
        },
    ),
]
