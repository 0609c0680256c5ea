"""Promises of the pointer object: how it is written, and what readers believe of it."""

from __future__ import annotations

from tests.reverts.revert import Revert

_VIEW = "delta_tracker/stream/pointer.py"
_WRITER = "delta_tracker/stream/pointer_writer.py"
_LOG = "delta_tracker/stream/log.py"
_PUBLISHER = "delta_tracker/publisher/publisher.py"
_WRITER_TESTS = "tests/stream/test_pointer_writer.py"

REVERTS: list[Revert] = [
    Revert(
        defect="a publisher waits for the pointer to be written",
        generator=f"{_WRITER_TESTS}::test_a_publisher_publishes_while_its_pointer_cannot_be_written",
        edits={
            _WRITER: [("        if self._thread is None:\n            self._start()\n", "        self.write_now()\n")]
        },
    ),
    Revert(
        defect="the pointer is written for each version",
        generator=f"{_WRITER_TESTS}::test_many_commits_are_one_write_and_nothing_is_written_at_rest",
        edits={_WRITER: [("                self._stop.wait(min(", "                self._stop.wait(0 * min(")]},
    ),
    Revert(
        defect="the pointer keeps deleted and merged versions after upkeep",
        generator=f"{_WRITER_TESTS}::test_the_pointer_is_right_in_random_histories",
        edits={_WRITER: [("if self._is_stale or self._scan is None or", "if self._scan is None or")]},
    ),
    Revert(
        defect="the thread of a dropped publisher writes on",
        generator=f"{_WRITER_TESTS}::test_the_thread_of_a_dropped_publisher_ends",
        edits={_PUBLISHER: [("weakref.finalize(self, self._pointer.end).atexit = False", "pass")]},
    ),
    Revert(
        defect="a late pointer from before a restore counts",
        generator="tests/stream/test_pointer.py::test_a_late_pointer_from_before_a_restore_changes_nothing",
        edits={
            _VIEW: [("    if other.version > head.version:\n        return head", "    if False:\n        return head")]
        },
    ),
    Revert(
        defect="a reader believes a pointer to another stream without its entry",
        generator="tests/stream/test_pointer.py::test_another_stream_is_believed_once_its_entry_is_there",
        edits={_VIEW: [("        if not self._has_entry(pointer):\n            return False\n", "")]},
    ),
    Revert(
        defect="a forked process waits for ever for the pointer that its parent was reading",
        generator="tests/system/test_pointer_forks.py::test_a_forked_process_reads_the_pointer_while_a_thread_of_its_parent_does",
        edits={_VIEW: [("        protect(self)\n", "")]},
    ),
    Revert(
        defect="a reader reads the pointer at each poll",
        generator="tests/stream/test_pointer.py::test_a_view_reads_at_most_once_in_its_interval",
        edits={_VIEW: [(">= self._seconds", ">= 0.0")]},
    ),
    Revert(
        defect="a reader over http asks for entries that do not exist yet",
        generator="tests/stream/test_log_index.py::test_no_entry_above_the_pointer_is_requested_at_once",
        edits={_LOG: [("return awaited is not None and awaited[0] == version", "return True")]},
    ),
    Revert(
        defect="a reader over http asks the origin for the head again and again",
        generator="tests/stream/test_log_index.py::test_a_pointer_ahead_of_its_entry_is_a_stale_cache",
        edits={_LOG: [("now - self._doubted[1] < _DOUBT_SECONDS", "now < self._doubted[1]")]},
    ),
]
