"""Fixes in what is published and restored of managed collisions."""

from __future__ import annotations

from tests.reverts.revert import Revert

_STATES = "tests/sharding/test_collision_states.py::"
_RESTORE = "tests/recovery/test_collisions.py::"
_FILE = "delta_tracker/sharding/collision_states.py"

REVERTS = [
    Revert(
        defect="raw ids that a module of its own maps are not in the stream",
        generator="tests/sharding/test_collisions.py::test_other_collision_modules_are_refused_unless_skipped",
        edits={"delta_tracker/sharding/collisions.py": [("        if id(part) not in held:\n", "        if False:\n")]},
    ),
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
    Revert(
        defect="a restored model keeps the raw ids that it had before",
        generator=_RESTORE + "test_training_with_evictions_continues_bit_for_bit",
        edits={
            "delta_tracker/recovery/plan.py": [
                ("            load_collision_states(module, states)\n", "            assert (module, states)\n"),
            ],
        },
    ),
    Revert(
        defect="the raw ids of two ranks are restored to four, which look others up",
        generator=_RESTORE + "test_more_ranks_are_refused_before_any_write",
        edits={
            "delta_tracker/recovery/preparation.py": [
                ("set(check_collision_slots(fqn, each.module, slots.values()))", "set(slots.values())"),
                ("        check_collision_states(fqn, each.module, states, each.identity)\n", ""),
            ],
        },
    ),
    Revert(
        defect="a rank loads the collision states of all ranks",
        generator="tests/recovery/test_preparation.py::test_a_rank_loads_only_the_collision_states_of_its_slots",
        edits={
            "delta_tracker/recovery/preparation.py": [
                (" for rank, range_ in slots.items() if range_ in joined]", " for rank in slots]"),
            ],
        },
    ),
    Revert(
        defect="rows are published with the raw ids of the version before",
        generator="tests/publisher/test_identities.py::test_each_raw_id_gets_the_trainers_answer",
        edits={
            "delta_tracker/publisher/version_source.py": [
                (
                    "else self._top_k\n",
                    "else self._top_k; former = {fqn: each.clone() for fqn, each in self._owners().items()}\n",
                ),
                (
                    "gather(read, dense=dense, extra=extra, owners=owners)",
                    "gather(read, dense=dense, extra=extra, owners=former)",
                ),
            ],
        },
    ),
    Revert(
        defect="raw ids that change while a snapshot is copied are not sent with it",
        generator="tests/publisher/test_identities.py::test_a_snapshot_is_copied_while_ids_are_evicted",
        edits={
            "delta_tracker/publisher/version_source.py": [
                (
                    "                changed = self._meanwhile.read(",
                    "                self._meanwhile.read(); changed = self._meanwhile.read(",
                ),
            ],
        },
    ),
]
