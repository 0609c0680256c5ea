"""Rules for leaving out rows whose stored bytes did not change."""

from __future__ import annotations

from tests.reverts.revert import Revert

_TESTS = "tests/publisher/test_stored_rows.py::"
_RANDOM = f"{_TESTS}test_predictors_equal_those_of_a_publisher_that_sends_all_rows"
_RECORD = "tests/publisher/test_row_record.py::"
_ROW_RECORD = "delta_tracker/publisher/row_record.py"
_STORED_ROWS = "delta_tracker/publisher/stored_rows.py"

REVERTS = [
    Revert(
        defect="unchanged: the rows of a version that failed count as stored",
        generator=f"{_TESTS}test_only_rows_whose_stored_bytes_changed_are_sent",
        edits={_STORED_ROWS: [("if staged.is_committed:\n            for", "if staged:\n            for")]},
    ),
    Revert(
        defect="unchanged: a row stays known while another value is written",
        generator=_RANDOM,
        timeout_seconds=300.0,
        edits={
            _ROW_RECORD: [
                (
                    "            self._known[ids[~same]] = False\n            for held",
                    "            for held",
                ),
                ("        self._known[ids[~same]] = False\n        self._digests", "        self._digests"),
            ]
        },
    ),
    Revert(
        defect="unchanged: an equal row is sent",
        generator=f"{_TESTS}test_only_rows_whose_stored_bytes_changed_are_sent",
        edits={_STORED_ROWS: [("if not skips or not same.any():", "if skips:")]},
    ),
    Revert(
        defect="unchanged: the record of a shard is kept when the shards change",
        generator=f"{_TESTS}test_only_rows_whose_stored_bytes_changed_are_sent",
        edits={_STORED_ROWS: [("        if layout != self._layout:\n            self._forget(layout)\n", "")]},
    ),
    Revert(
        defect="unchanged: a version has some columns of a row",
        generator=f"{_TESTS}test_a_version_has_all_columns_of_a_row",
        edits={
            _STORED_ROWS: [
                (
                    "if sum(each.block.num_columns for each in blocks) == tables[shard[0]].dim:",
                    "if tables:",
                )
            ]
        },
    ),
    Revert(
        defect="unchanged: a row whose states changed is not sent",
        generator=f"{_TESTS}test_a_row_is_sent_if_only_its_states_changed",
        edits={
            _STORED_ROWS: [
                (
                    "    return [rows.read, *([] if rows.owners is None else [rows.owners]), *rows.states]",
                    "    return [rows.read, *([] if rows.owners is None else [rows.owners])]",
                ),
                (
                    "                states = tuple(readers[len(readers) - len(each.states) :])\n",
                    "                states = each.states\n",
                ),
            ]
        },
    ),
    Revert(
        defect="unchanged: a row whose raw id changed is not sent",
        generator=f"{_TESTS}test_a_row_is_sent_if_only_its_raw_id_changed",
        edits={
            _STORED_ROWS: [
                (
                    "    return [rows.read, *([] if rows.owners is None else [rows.owners]), *rows.states]",
                    "    return [rows.read, *rows.states]",
                ),
                ("None if each.owners is None else readers[1]", "each.owners"),
            ]
        },
    ),
    Revert(
        defect="unchanged: a restore misses rows that another consumer read between versions",
        generator=f"{_TESTS}test_rows_that_another_consumer_read_between_versions_are_pending_after_a_restore",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("needs_all_rows=taken is not None and bool(self.handle.others()),", "needs_all_rows=False,")
            ]
        },
    ),
    Revert(
        defect="unchanged: rows of a copy that was read twice are known",
        generator=f"{_RECORD}test_a_row_is_equal_if_its_parts_are_those_of_a_committed_version",
        edits={
            _ROW_RECORD: [
                (
                    "        if all(number == len(self._known) for number in self._num_written):",
                    "        if self._num_written:",
                )
            ]
        },
    ),
    Revert(
        defect="unchanged: ranks choose differently",
        generator=f"{_TESTS}test_invalid_choices_and_choices_that_differ_are_refused",
        edits={
            "delta_tracker/publisher/publisher.py": [
                ("states={states!r} and skip_unchanged={skip_unchanged!r}", "states={states!r}")
            ]
        },
    ),
]
