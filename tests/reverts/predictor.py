"""Faults of predictors, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import Loses, Replaces
from tests.reverts.revert import Revert

_HISTORIES = (
    "tests/predictor/test_sink_writer.py::test_no_reader_of_a_random_history_finds_a_stale_a_missing_or_another_row"
)

REVERTS = {
    "tests/predictor/test_model_change.py::test_random_changes_give_the_rows_of_the_version_or_a_typed_error": [
        Revert(
            "a delta is written to a table of the model that was replaced",
            Replaces("VersionWriter.apply", "self.destination.keeps_rows(...)", "True"),
        ),
        Revert(
            "a predictor with a saved position serves the new tables of its model",
            Loses("Reader._check_loaded", "self.writer.keeps_rows(...)"),
        ),
    ],
    "tests/predictor/test_sources.py::test_heartbeats_follow_a_failover": [
        Revert("heartbeats stay at a source that failed"),
    ],
    "tests/predictor/test_identities_random.py::test_random_owners_never_read_the_row_of_another": [
        Revert(
            "unknown raw ids read the last row of the table",
            Replaces("RawIdIndex.rows_of", "defaults_of(...)", "self.rows[1] - 1"),
        ),
        Revert(
            "unmapped raw ids keep the default row of former buckets", Loses("RawIdIndex.set_identity", "reroute(...)")
        ),
        Revert("rows are written while their former owners are still mapped to them"),
        Revert("the owners of whole blocks are mapped although listed rows have newer ones"),
        Revert("unknown raw ids read rows of former owners after the buckets have changed"),
    ],
    "tests/predictor/test_served_age.py::test_the_age_is_that_of_the_stores_clock_whatever_the_readers": [
        Revert("the age of the served rows follows this host's clock although entries contradict it"),
    ],
    "tests/predictor/test_resync_random.py::test_faults_of_readers_are_overcome": [
        Revert("follow() ends at an error that no store or stream has raised"),
        Revert("a version with an unknown table holds a predictor up for ever"),
        Revert("a panic of the store is no typed error"),
        Revert("an object that cannot be read holds a predictor up for ever"),
    ],
    f"{_HISTORIES}[0]": [
        Revert("a raw id that was moved to another row of the same version is deleted"),
        Revert("rows of evicted raw ids stay in a row store"),
    ],
    "tests/predictor/test_sink_writer.py::test_raw_ids_that_only_an_interrupted_version_had_are_deleted[8]": [
        Revert("raw ids of an interrupted version that no later version has stay in a row store"),
    ],
    "tests/predictor/test_sink_writer.py::test_a_crash_after_any_operation_is_repaired_by_the_next_version[delta]": [
        Revert("the stored map lacks the owners of a version after a crash"),
        Revert("a predictor continues from its own position although the row store has executed a lost request"),
    ],
    "tests/predictor/test_sink_writer.py::test_a_crash_after_any_operation_is_repaired_by_the_next_version[rollback]": [
        Revert("an interrupted rollback leaves rows that are older than the stored version"),
        Revert("a delta continues an interrupted rollback"),
    ],
    "tests/predictor/test_sink_writer.py::test_a_crash_after_any_operation_is_repaired_by_the_next_version[buckets]": [
        Revert("default rows of former buckets stay in a row store"),
    ],
    "tests/predictor/test_sink_writer.py::test_a_crash_after_any_operation_is_repaired_by_the_next_version[stream]": [
        Revert("the keys of a former stream stay in a row store after a crash"),
    ],
    "tests/predictor/test_table_fence.py::test_lookups_on_streams_see_no_torn_rows": [
        Revert("a lookup does not wait on its stream for the last write of rows"),
        Revert("a lookup leaves no event for the next write"),
        Revert("a write of rows does not wait for lookups on other streams"),
        Revert("a write of rows leaves no event for lookups"),
        Revert("dense tensors are written during lookups on other streams"),
    ],
    "tests/predictor/test_table_fence.py::test_writes_on_different_streams_are_ordered": [
        Revert("a write of rows does not wait for the last write on another stream"),
    ],
    "tests/predictor/test_table_fence.py::test_a_table_that_moves_to_the_device_is_not_written_during_lookups": [
        Revert("a table that moves to a device is written during lookups that were launched before"),
    ],
}
