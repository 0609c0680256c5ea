"""Faults of hooks and tables, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Loses, Replaces, Returns
from tests.reverts.revert import Revert

_SCHEDULES = "tests/sharding/test_plain_tables.py::test_random_schedules_lose_no_update_and_send_nothing_else"

REVERTS = {
    "tests/sharding/test_kernel_memory.py::test_hooks_read_rows_in_a_cache_without_a_flush": [
        Revert("hooks flush the caches of kernels", Replaces("Kernel.rows", "_THREAD.in_place() is None", "True")),
        Revert("hooks read old rows of tables whose new rows are in a cache", Returns("CachedTable.overlay", "rows")),
    ],
    "tests/sharding/test_kernel_hooks.py::test_a_compiled_lookup_reports_the_rows_that_change": [
        Revert("the compiler traces hooks", Replaces("untraced", "torch.compiler.disable(_)", "_")),
        Revert("all rows of a compiled lookup stay open", Replaces("_lookup_node", "compiled is not None", "False")),
        Revert(
            "each write of a compiled lookup counts as one that no hook reported",
            Replaces("PostLookupHook._end", "not _.is_proven", "False"),
        ),
    ],
    f"{_SCHEDULES}[SGD with momentum-True-True]": [
        Revert("rows that only a sparse momentum moves are lost", Replaces("StepHook._written", "cat([_, _])", "_")),
    ],
    f"{_SCHEDULES}[SparseAdam-True-True]": [
        Revert("writes before a step are taken for writes of the step", Loses("StepHook.before", "notice_writes(...)")),
    ],
    f"{_SCHEDULES}[Adagrad-True-False]": [
        Revert(
            "a gradient that another hook replaces is not noticed",
            Replaces("StepHook.after", "_.grad is not _", "False"),
        ),
    ],
    f"{_SCHEDULES}[SGD-True-True]": [
        Revert("a closure's gradients are read before the closure runs", Returns("_has_closure", "False")),
    ],
    f"{_SCHEDULES}[SGD-True-False]": [
        Revert(
            "the own writes of a step count as writes to all rows", Loses("StepHook.after", "acknowledge_writes(...)")
        ),
    ],
    "tests/sharding/test_replicas.py::test_the_rows_that_a_sync_changes_are_reported": [
        Revert("a DMPCollection's sync is not hooked", DoesNothing("watch_syncs")),
        Revert(
            "each replica marks only its own changed rows at a sync",
            Loses("ReplicaGroup.exchange", "all_reduce(...)"),
        ),
        Revert(
            "the first sync marks only the changed rows",
            Replaces("SyncHook.__init__", "_.diverged(self._tables)", "_.synced(self._tables)"),
        ),
        Revert(
            "old states are captured after a sync",
            Loses("SyncHook.before", "_begin_write(...)"),
            Replaces("SyncHook.before.after", "_end_write(...)", "(self._begin_write(key, ids), _)"),
        ),
    ],
    "tests/sharding/test_replicas.py::test_rows_that_the_next_average_changes_are_reported": [
        Revert(
            "small values of equal replicas are taken as unchanged",
            Replaces("SyncHook._pack_changed", "cat([_, _])", "_"),
        ),
    ],
    "tests/sharding/test_prefetch_order.py::test_reads_and_prefetches_in_any_order_corrupt_no_row": [
        Revert(
            "a flush of a cache does not wait for the prefetches before it",
            Loses("row_cache._between", "_.wait_stream(prefetches)"),
        ),
        Revert(
            "later prefetches do not wait for a flush of the cache",
            Loses("row_cache._between", "prefetches.wait_stream(_)"),
        ),
        Revert(
            "hooks read cached rows while a prefetch moves them",
            Replaces("Kernel.rows", "between_prefetches(...)", "one_cut()"),
        ),
    ],
    "tests/sharding/test_prefetch_order.py::test_reads_and_lookups_on_a_stream_of_their_own_corrupt_no_row": [
        Revert("lookups do not wait for a flush of the cache", DoesNothing("PostLookupHook._pre_lookup")),
    ],
    "tests/sharding/test_row_cache.py::test_cached_rows_are_written_in_place": [
        Revert("cached rows of a serving model stay as they were", DoesNothing("CachedTable.write")),
    ],
    "tests/sharding/test_collision_states.py::test_training_continues_bit_for_bit": [
        Revert(
            "the iteration of the last eviction is not restored",
            Loses("load_collision_states", "module._last_eviction_iter"),
        ),
        Revert(
            "the ids since the last eviction are not restored",
            Replaces("collision_states._load_history", "torch.cat([state['history'] for state in parts])", "_[:0]"),
        ),
    ],
}
