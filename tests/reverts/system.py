"""Faults of several parts at once, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import Loses, Replaces, Returns
from tests.reverts.revert import Revert

REVERTS = {
    "tests/system/test_power_loss.py::test_a_power_loss_at_any_call_loses_no_acknowledged_version": [
        Revert("a power loss finds entries whose parts retention deleted"),
        Revert("the name of a version is not synced"),
    ],
    "tests/system/test_power_loss.py::test_a_power_loss_after_a_failed_sync_loses_no_acknowledged_version": [
        Revert("a power loss takes a version whose sync failed and that was read back"),
    ],
    "tests/system/test_raw_ids.py::test_no_raw_id_reads_the_row_of_another_id": [
        Revert(
            "unknown raw ids read the last row of the table in a model of one rank",
            Returns("MchMap._is_own_default", "True"),
        ),
        Revert("rows that a failed attempt unmapped stay unmapped: the last applied owners are compared"),
        Revert("an admission shows to lookups before its row is written: map, then write"),
        Revert("evicted raw ids are those of another consumer's last read"),
        Revert("the rows of a delta are written without their raw ids"),
        Revert("a row of a whole block is written before the listed one, which has another raw id meanwhile"),
    ],
    "tests/system/test_mirror_sweep.py::test_a_killed_mirror_leaves_a_prefix_and_is_completed[False]": [
        Revert("a mirror creates an entry before its objects"),
    ],
    "tests/system/test_monitor_schedules.py::test_random_schedules": [
        Revert(
            "a busy handler keeps the collector from collecting",
            Replaces("Collector._loop", "_ > 0", "True"),
            Replaces("Collector._loop", "sleep(...)", "time.sleep(_BURST_SECONDS)"),
        ),
        Revert(
            "a delivery that fails drops its windows and events",
            Replaces("SinkQueue.deliver", "(windows, events)", "([], [])"),
        ),
        Revert("a sink is called while it delivers", Replaces("Runner.run", "_.is_busy", "False")),
        Revert(
            "nothing is delivered where no thread can be started", Replaces("Runner.run", "here_if_refused", "False")
        ),
    ],
    "tests/system/test_follower_forks.py::test_many_children_of_a_process_that_follows": [
        Revert("a fork leaves the lock of the tables as threads of the parent held it"),
        Revert("a fork does not wait for the end of a write"),
    ],
    "tests/system/test_follower_forks.py::test_children_of_a_process_that_follows[too slow]": [
        Revert("a forked process does not say that rows may be torn"),
    ],
    "tests/system/test_soak.py::test_all_components_at_once_never_wait_long_and_leave_no_thread": [
        Revert("a closed publisher leaves its thread"),
    ],
    "tests/system/test_resume.py::test_a_killed_trainer_continues_bit_for_bit": [
        Revert(
            "a killed trainer continues with the learning rate of its warm-up",
            Loses("optimizer_rows._write", "_['lr']"),
        ),
    ],
}
