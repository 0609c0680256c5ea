"""Promises of the host cache and of hints over NATS."""

from __future__ import annotations

from tests.reverts.revert import Revert

_CACHE = "delta_tracker/stream/host_cache.py"
_NATS = "delta_tracker/stream/notify/nats.py"

REVERTS = [
    Revert(
        defect="each process of a host fetches each part",
        generator="tests/contract/test_host_cache.py::test_the_processes_of_a_host_fetch_each_part_once",
        edits={_CACHE: [("            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "")]},
    ),
    Revert(
        defect="a suspended process blocks the other predictors of its host",
        generator="tests/contract/test_host_cache.py::test_a_suspended_process_does_not_block_the_others",
        edits={_CACHE: [("now - seen[1] > self._patience_seconds", "now - seen[1] > 1e9")]},
    ),
    Revert(
        defect="a part that differs from its record is kept in the host cache",
        generator="tests/stream/test_host_cache.py::test_a_part_that_is_damaged_at_its_origin_is_not_kept",
        edits={
            _CACHE: [
                (
                    "        with _own_errors():\n            is_right = _is_right(draft, part)\n",
                    "        is_right = True\n",
                )
            ]
        },
    ),
    Revert(
        defect="a damaged file of the host cache is used",
        generator="tests/stream/test_host_cache.py::test_a_damaged_file_is_fetched_again",
        edits={_CACHE: [("            if _is_right(descriptor, part):\n", "            if descriptor >= 0:\n")]},
    ),
    Revert(
        defect="the host cache grows without a bound",
        generator="tests/stream/test_host_cache.py::test_the_least_recently_used_parts_are_deleted",
        edits={_CACHE: [("            if total <= num_bytes:\n", "            if total >= 0:\n")]},
    ),
    Revert(
        defect="parts that are fetched at once exceed the bound of the host cache",
        generator="tests/stream/test_host_cache.py::test_parts_that_are_fetched_at_once_stay_within_the_limit",
        edits={_CACHE: [("                num_bytes -= status.st_size\n", "                num_bytes -= 0\n")]},
    ),
    Revert(
        defect="a process that is suspended with the lock of the host cache blocks the others",
        generator="tests/stream/test_host_cache.py::test_a_process_that_holds_the_lock_of_the_directory_blocks_nobody",
        edits={_CACHE: [("time.monotonic() < deadline:", "time.monotonic() < deadline + 3600:")]},
    ),
    Revert(
        defect="a reader that connects to NATS later gets no hint",
        generator="tests/contract/test_notify.py::test_a_reader_that_connects_to_nats_later_gets_the_last_hint",
        edits={_NATS: [("            await self._saw(stream, last)\n", "            await self._saw(stream, -1)\n")]},
    ),
    Revert(
        defect="hints over NATS end when the JetStream stream is deleted",
        generator="tests/contract/test_notify.py::test_a_deleted_stream_of_nats_is_created_again",
        edits={_NATS: [("            await connection.close()\n            raise\n", "            raise\n")]},
    ),
]
