"""Promises of mirrors, forks and failover."""

from __future__ import annotations

from tests.reverts.revert import Revert

_SWEEP = "tests/system/test_mirror_sweep.py::test_a_killed_mirror_leaves_a_prefix_and_is_completed"

REVERTS = [
    Revert(
        defect="readers over http do not find older merged snapshots",
        generator="tests/stream/test_log_index.py::test_a_path_from_an_older_merged_snapshot_is_found_over_http",
        edits={
            "delta_tracker/stream/cursor.py": [
                ("        if not self.log.is_listed:  # the pointer names", "        if False:  # the pointer names"),
            ],
        },
    ),
    Revert(
        defect="a mirror runs on its own source",
        generator="tests/stream/test_mirror.py::test_a_mirror_on_its_own_source_is_refused",
        edits={
            "delta_tracker/stream/mirror.py": [
                ("        if source.is_same(destination):\n", "        if source.url == destination.url:\n"),
            ],
        },
    ),
    Revert(
        defect="a mirror that starts while a pin applies starts above the pinned version",
        generator="tests/stream/test_mirror.py::test_a_mirror_that_starts_while_a_pin_applies_copies_the_path_of_the_pin",
        edits={
            "delta_tracker/stream/mirror.py": [
                ("        start = self._pinned_start(head)\n", "        start = None\n"),
            ],
        },
    ),
    Revert(
        defect="a mirror creates an entry before its objects",
        generator=f"{_SWEEP}[False]",
        edits={
            "delta_tracker/stream/mirror.py": [
                (
                    "        self._copy_objects(entry)\n        self._create(name, data, version)\n",
                    "        self._create(name, data, version)\n        self._copy_objects(entry)\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a mirror trusts an object of an interrupted copy by its size",
        generator="tests/stream/test_mirror.py::test_an_object_of_an_interrupted_copy_is_checked[0]",
        edits={
            "delta_tracker/stream/mirror.py": [
                (
                    "            for _ in self._checked(self._destination, stored):\n                pass\n",
                    "            pass\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a mirror continues although another program appended to the destination",
        generator="tests/stream/test_mirror.py::test_a_mirror_stops_if_another_program_appends_to_the_destination",
        edits={
            "delta_tracker/stream/mirror.py": [
                (
                    (
                        "        if not self._to.create_copy(name, data):\n"
                        '            raise self._diverged(version, "another program has appended this version")\n'
                    ),
                    "        self._to.create_copy(name, data)\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a mirror copies entries of another stream",
        generator="tests/stream/test_mirror.py::test_a_mirror_stops_at_an_entry_that_does_not_follow",
        edits={
            "delta_tracker/stream/mirror.py": [
                ("(entry.stream, entry.parent) == (head.stream, head.link)", "entry.stream == head.stream"),
            ],
        },
    ),
    Revert(
        defect="a mirror copies a claim that is not part of the log",
        generator="tests/stream/test_mirror.py::test_a_claim_whose_name_retention_had_deleted_is_not_copied",
        edits={
            "delta_tracker/stream/mirror.py": [
                (
                    "        if is_committed is False:\n",
                    "        if is_committed is False and not entry.kind:\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a mirror copies a malformed entry before the log continues after it",
        generator="tests/stream/test_mirror.py::test_an_altered_entry_is_copied_once_the_log_continues_after_it[False]",
        edits={
            "delta_tracker/stream/mirror.py": [
                ("            return entry if is_followed else None\n", "            return entry\n"),
            ],
        },
    ),
    Revert(
        defect="obstore panics if a mirror copies a large object from bucket to bucket",
        generator="tests/system/test_s3.py::test_a_mirror_on_s3_sends_only_whole_and_intact_objects",
        edits={
            "delta_tracker/stream/mirror.py": [
                ("put(stored.name, buffers(reader))", "put(stored.name, (piece.data for piece in pieces))"),
            ],
        },
    ),
    Revert(
        defect="a pin is copied before the version that it names",
        generator="tests/stream/test_mirror.py::test_pins_are_copied_once_the_destination_has_the_pinned_version",
        edits={
            "delta_tracker/stream/mirror.py": [
                (
                    "if entry is None or (entry.stream, entry.xxh3) != (pin.stream, pin.xxh3):",
                    "if not pin.stream:",
                ),
            ],
        },
    ),
    Revert(
        defect="readers over http do not see the versions that a mirror copies",
        generator="tests/stream/test_mirror.py::test_a_copy_is_read_over_http_by_its_own_pointer",
        edits={
            "delta_tracker/stream/mirror.py": [
                ("        self._head = entry\n        self._point_at(entry)\n", "        self._head = entry\n"),
            ],
        },
    ),
    Revert(
        defect="a promotion keeps the id of the stream",
        generator="tests/stream/test_promotion.py::test_a_promotion_is_a_claim_of_a_new_stream",
        edits={
            "delta_tracker/stream/log.py": [
                ("secrets.token_hex(16) if before is None", "secrets.token_hex(16) if head is None"),
            ],
        },
    ),
    Revert(
        defect="a promotion keeps the snapshots of the former stream",
        generator="tests/stream/test_promotion.py::test_predictors_keep_their_rows_until_the_first_snapshot[False]",
        edits={
            "delta_tracker/stream/log.py": [
                ("                snapshot=None if before is None", "                snapshot=None if head is None"),
            ],
            "delta_tracker/stream/format/parse.py": [(" or snapshot is not None\n    ):", "\n    ):")],
        },
    ),
    Revert(
        defect="a predictor continues from a store with another entry at its version",
        generator="tests/predictor/test_sources.py::test_only_a_source_with_the_same_entry_qualifies",
        edits={
            "delta_tracker/predictor/sources.py": [
                ("entry is not None and (entry.stream, entry.link) == (place.stream, place.link)", "entry is not None"),
            ],
        },
    ),
    Revert(
        defect="random cuts lead a predictor to a store with other entries",
        generator="tests/predictor/test_sources.py::test_random_cuts_lead_to_no_wrong_row_and_no_way_back",
        edits={
            "delta_tracker/predictor/sources.py": [
                ("entry is not None and (entry.stream, entry.link) == (place.stream, place.link)", "entry is not None"),
            ],
        },
    ),
    Revert(
        defect="a store that failed is asked at each attempt",
        generator="tests/predictor/test_sources.py::test_a_failed_source_is_asked_again_after_a_growing_pause",
        edits={
            "delta_tracker/predictor/sources.py": [
                ("if source is failed or now < source.retry_at:", "if source is failed:"),
            ],
        },
    ),
    Revert(
        defect="a mirror copies nothing if the path of a pin is not complete",
        generator="tests/stream/test_mirror.py::test_a_mirror_starts_above_a_pin_whose_path_is_not_complete",
        edits={
            "delta_tracker/stream/mirror.py": [
                (
                    "        except (MissingVersionError, NoSnapshotError, InvalidArgumentError) as error:\n",
                    "        except (NoSnapshotError, InvalidArgumentError) as error:\n",
                ),
            ],
        },
    ),
]
