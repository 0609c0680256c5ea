"""Fixes in what is published and restored of managed collisions."""

from __future__ import annotations

from tests.reverts.revert import Revert

_STATES = "tests/sharding/test_collision_states.py::"
_FILE = "delta_tracker/sharding/collision_states.py"

REVERTS = [
    Revert(
        defect="the iteration of the last eviction is not restored",
        generator=_STATES + "test_training_continues_bit_for_bit",
        edits={
            _FILE: [
                (
                    '    module._last_eviction_iter = parts[0]["last_eviction_iter"]  # noqa: SLF001\n',
                    "",
                ),
            ],
        },
    ),
    Revert(
        defect="the ids since the last eviction are not restored",
        generator=_STATES + "test_training_continues_bit_for_bit",
        edits={_FILE: [('    history = _joined(parts, "history")\n', '    history = _joined(parts, "history")[:0]\n')]},
    ),
    Revert(
        defect="the joined ids of several ranks are not sorted",
        generator=_STATES + "test_fewer_ranks_keep_all_ids_and_their_history",
        edits={_FILE: [("    if len(parts) > 1:\n", "    if len(parts) > 9:\n")]},
    ),
    Revert(
        defect="ids are restored to ranks that do not look them up",
        generator=_STATES + "test_a_state_that_does_not_fit_is_refused",
        edits={_FILE: [("        if len(other):\n", "        if len(other) > len(known):\n")]},
    ),
]
