"""Fixes in the hooks of kernels, and in reading the memory of kernels."""

from __future__ import annotations

from tests.reverts.revert import Revert

_HOOKS = "delta_tracker/sharding/kernel_hooks.py"
_TESTS = "tests/sharding/test_kernel_hooks.py"
_CAPTURED = f"{_TESTS}::test_replays_of_a_captured_step_are_not_lost"

REVERTS = [
    Revert(
        defect="replays of a captured step are lost",
        generator=_CAPTURED,
        edits={_HOOKS: [("        if is_capturing():\n            self._captured()\n            return\n\n        def", "        def")]},
    ),
    Revert(
        defect="a captured step is reported once and its replays are lost",
        generator=_CAPTURED,
        edits={
            "delta_tracker/tracker/store/segments.py": [
                ("if self._is_reported and not self._has_unmarked:", "if not self._has_unmarked:")
            ]
        },
    ),
    Revert(
        defect="compaction is captured into a CUDA graph",
        generator=_CAPTURED,
        edits={"delta_tracker/sharding/odist_hook.py": [("        if not is_capturing():\n", "        if True:\n")]},
    ),
    Revert(
        defect="step() marks rows inside a CUDA graph",
        generator=_CAPTURED,
        edits={"delta_tracker/tracker/change_log.py": [("            if not is_capturing():", "            if True:")]},
    ),
]
