"""Fixes in reading from a store: resuming, and stopping."""

from __future__ import annotations

from tests.reverts.revert import Revert

_RANDOM = "tests/stream/test_transfer_random.py::test_random_interruptions_cost_what_they_interrupt"
_TESTS = "tests/stream/test_transfer.py"
_STORAGE = "delta_tracker/stream/storage/storage.py"
_PART = "delta_tracker/stream/format/part_reader.py"

REVERTS = [
    Revert(
        defect="a read of a part that failed begins at byte 0 in the next call",
        generator=_RANDOM,
        edits={
            _PART: [
                (
                    "storage.read(part.name, max_bytes=part.num_bytes, out=out, transfer=self._transfer)",
                    "storage.read(part.name, max_bytes=part.num_bytes, out=self._out)",
                )
            ]
        },
    ),
    Revert(
        defect="what was read of a version before an error is dropped",
        generator=_RANDOM,
        edits={_PART: [("            buffer.keep(manifest.parts, sources)\n", "            buffer.begun(())\n")]},
    ),
    Revert(
        defect="a transfer that is interrupted fails although it brought bytes",
        generator=_RANDOM,
        edits={_STORAGE: [("                if transfer.num_bytes <= before:\n", "                if before >= 0:\n")]},
    ),
    Revert(
        defect="a transfer is limited by its whole time",
        generator=f"{_TESTS}::test_a_part_arrives_however_slow_its_transfer_is",
        edits={
            "delta_tracker/stream/storage/url.py": [
                ('_CLIENT_DEFAULTS = {"timeout": "365days", "read_timeout": "30s"}', "_CLIENT_DEFAULTS: dict = {}")
            ]
        },
    ),
    Revert(
        defect="bytes of two objects are mixed",
        generator=f"{_TESTS}::test_bytes_of_two_objects_are_never_mixed",
        edits={_STORAGE: [("if transfer.source not in (None, found):", "if found is None:")]},
    ),
    Revert(
        defect="hashing a large part begins at byte 0 after an error",
        generator=f"{_TESTS}::test_hashing_a_large_part_resumes_where_it_failed",
        edits={
            _PART: [
                (
                    "        if not self._digests:\n            _check_size",
                    "        if end == self._part.num_bytes:\n            self._digests = []\n            _check_size",
                )
            ]
        },
    ),
    Revert(
        defect="stop() waits for a request that hangs",
        generator=_RANDOM,
        edits={
            _STORAGE: [
                (
                    "return answer(blocking, request) if self._is_remote else blocking()",
                    "return blocking() if request and answer else blocking()",
                )
            ]
        },
    ),
    Revert(
        defect="stop() waits for a sync() that hangs",
        generator=f"{_TESTS}::test_stop_does_not_wait_for_a_sync_that_hangs",
        edits={
            "delta_tracker/predictor/follower.py": [
                ("while not self._lock.acquire(timeout=_LOCK_SECONDS):", "while not self._lock.acquire():")
            ]
        },
    ),
    Revert(
        defect="stop() waits until a large part is hashed",
        generator=f"{_TESTS}::test_stop_does_not_wait_for_a_huge_part",
        edits={
            _PART: [("        check()\n        begin = number", "        begin = number")],
            _STORAGE: [("                check()\n                count", "                count")],
        },
    ),
    Revert(
        defect="a large part is hashed before its header is read",
        generator=f"{_TESTS}::test_a_huge_part_without_a_header_is_refused_at_once",
        edits={
            _PART: [
                (
                    "            self._file = _File(part, self._expected(), source)\n            source.finish()\n",
                    "            source.finish()\n            self._file = _File(part, self._expected(), source)\n",
                )
            ]
        },
    ),
    Revert(
        defect="close() waits for upkeep that hangs",
        generator=f"{_TESTS}::test_closing_does_not_wait_for_upkeep_that_hangs",
        edits={"delta_tracker/stream/maintenance/upkeep.py": [("                self._stop.set()\n", "")]},
    ),
    Revert(
        defect="follow() waits for a server that hangs",
        generator=f"{_TESTS}::test_follow_does_not_wait_for_a_server_that_hangs",
        edits={
            "delta_tracker/predictor/follower.py": [("wait([begun], _START_SECONDS)", "wait([begun])")],
        },
    ),
]
