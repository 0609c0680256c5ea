"""Rules of the row stores in Redis and LMDB."""

from __future__ import annotations

from tests.reverts.revert import Revert

_CONTRACT = "tests/contract/test_row_sinks.py::"

REVERTS = [
    Revert(
        defect="a writer of Redis that was replaced overwrites newer rows",
        generator=_CONTRACT + "test_a_paused_writer_of_redis_changes_nothing_after_another_took_over",
        edits={"delta_tracker/sinks/redis.py": [("register_script(_CHECK + text)", "register_script(text)")]},
    ),
    Revert(
        defect="a second writer of Redis replaces one that runs",
        generator=_CONTRACT + "test_a_second_writer_is_refused_until_the_first_one_ends[redis]",
        edits={"delta_tracker/sinks/redis.py": [("            self._check_writer(held)\n", "            pass\n")]},
    ),
    Revert(
        defect="Redis may evict rows",
        generator=_CONTRACT + "test_redis_that_may_evict_rows_is_refused",
        edits={
            "delta_tracker/sinks/redis.py": [
                ('if policy != "noeviction" and not policy.startswith("volatile-")', "if not policy")
            ]
        },
    ),
    Revert(
        defect="a reader of LMDB stops when the file has grown",
        generator=_CONTRACT + "test_lmdb_readers_follow_the_growth_of_the_file",
        edits={"delta_tracker/sinks/lmdb_rows.py": [("            self._env.set_mapsize(0)\n", "")]},
    ),
    Revert(
        defect="a full file of LMDB ends the sink",
        generator=_CONTRACT + "test_lmdb_readers_follow_the_growth_of_the_file",
        edits={"delta_tracker/sinks/lmdb.py": [('env.set_mapsize(2 * env.info()["map_size"])', "raise")]},
    ),
    Revert(
        defect="owners in LMDB that were changed in the same transaction are read as they were",
        generator=_CONTRACT + "test_owners_are_kept_for_sparse_and_dense_rows[lmdb]",
        edits={"delta_tracker/sinks/lmdb.py": [('self._waits_for.add("owners")', "pass")]},
    ),
    Revert(
        defect="a lookup without rows of its own fails",
        generator=_CONTRACT + "test_invalid_lookups_and_stored_rows_are_refused[redis]",
        edits={"delta_tracker/sinks/stored_values.py": [("    if not data:\n", "    if data is None:\n")]},
    ),
]
