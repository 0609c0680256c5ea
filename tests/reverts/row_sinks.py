"""Rules of the order in which a row store is written."""

from __future__ import annotations

from tests.reverts.revert import Revert

_TESTS = "tests/predictor/test_sink_writer.py::"
_CRASH = _TESTS + "test_a_crash_after_any_operation_is_repaired_by_the_next_version"
_RANDOM = _TESTS + "test_no_reader_of_a_random_history_finds_a_stale_a_missing_or_another_row[0]"
_WRITER = "delta_tracker/predictor/sink_writer.py"

REVERTS = [
    Revert(
        defect="a raw id that was moved to another row of the same version is deleted",
        generator=_RANDOM,
        edits={_WRITER: [("some[~_is_in(some, kept)]", "some[len(kept) * 0 :]")]},
    ),
    Revert(
        defect="rows of evicted raw ids stay in a row store",
        generator=_RANDOM,
        edits={_WRITER: [("            left.append(old[is_changed & (old != NO_OWNER)])\n", "")]},
    ),
    Revert(
        defect="raw ids of an interrupted version that no later version has stay in a row store",
        generator=_TESTS + "test_raw_ids_that_only_an_interrupted_version_had_are_deleted[8]",
        edits={
            _WRITER: [
                (
                    "                self._undo(state, fqn, torch.cat(logged).unique())",
                    "                torch.cat(logged).unique()",
                )
            ]
        },
    ),
    Revert(
        defect="the stored map lacks the owners of a version after a crash",
        generator=f"{_CRASH}[delta]",
        edits={_WRITER: [("        if state.is_settling:\n            return self._settled(state)\n", "")]},
    ),
    Revert(
        defect="an interrupted rollback leaves rows that are older than the stored version",
        generator=f"{_CRASH}[rollback]",
        edits={
            _WRITER: [
                ("    is_older = held.version is not None and link.version < held.version\n", "    is_older = False\n")
            ]
        },
    ),
    Revert(
        defect="a delta continues an interrupted rollback",
        generator=f"{_CRASH}[rollback]",
        edits={_WRITER: [("        is_mixed=held.is_mixed or is_elsewhere,\n", "        is_mixed=held.is_mixed,\n")]},
    ),
    Revert(
        defect="default rows of former buckets stay in a row store",
        generator=f"{_CRASH}[buckets]",
        edits={_WRITER: [("            if former:\n", "            if False:\n")]},
    ),
    Revert(
        defect="the keys of a former stream stay in a row store after a crash",
        generator=f"{_CRASH}[stream]",
        edits={_WRITER: [("            if stream != current:  #", "            if False:  #")]},
    ),
    Revert(
        defect="a predictor continues from its own position although the row store has executed a lost request",
        generator=f"{_CRASH}[delta]",
        edits={
            _WRITER: [
                (
                    "        self._is_known = False\n        self._sink.begin(begun)\n",
                    "        self._sink.begin(begun)\n",
                )
            ]
        },
    ),
    Revert(
        defect="readers are not told that rows of an interrupted newer version are stored",
        generator=_TESTS + "test_a_newer_version_that_was_interrupted_stays_recorded",
        edits={
            _WRITER: [
                (
                    (
                        "        applying=None if is_complete else begun.applying,\n"
                        "        applying_xxh3=None if is_complete else begun.applying_xxh3,\n"
                    ),
                    "        applying=None,\n        applying_xxh3=None,\n",
                )
            ]
        },
    ),
    Revert(
        defect="a row store accepts a table of another size",
        generator=_TESTS + "test_a_table_that_changes_within_a_stream_is_refused",
        edits={_WRITER: [("                _check_table(fqn, manifest, held)\n", "                pass\n")]},
    ),
    Revert(
        defect="a row store gets a part of a row",
        generator=_TESTS + "test_columns_of_rows_are_joined_or_refused",
        edits={_WRITER: [("    needs_whole_rows = True\n", "    needs_whole_rows = False\n")]},
    ),
]
