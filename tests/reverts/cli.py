"""Promises of the command line: what it checks, what it refuses, and its exit codes."""

from __future__ import annotations

from tests.reverts.revert import Revert

_VERIFY = "tests/cli/test_verify.py::"
_MIRROR = "tests/cli/test_mirror.py::"
_MAIN = "tests/cli/test_main.py::"

REVERTS = [
    Revert(
        defect="verify calls a stream undamaged that has lost its newest snapshot",
        generator=f"{_VERIFY}test_a_newest_snapshot_that_is_missing_is_found",
        edits={"delta_tracker/cli/verify.py": [("is not None and self._lacks_snapshot():", "is None:")]},
    ),
    Revert(
        defect="verify reports a promotion as damage",
        generator=f"{_VERIFY}test_a_promotion_is_no_damage",
        edits={
            "delta_tracker/cli/verify.py": [
                ("        return before is None or manifest.forked_from.stream == stream\n", "        return False\n"),
            ],
        },
    ),
    Revert(
        defect="verify reports merged entries of a former stream as damage",
        generator=f"{_VERIFY}test_a_promotion_is_no_damage",
        edits={
            "delta_tracker/cli/verify.py": [
                ("if self._streams and manifest.stream not in self._streams:", "if manifest.stream != self._stream:"),
            ],
        },
    ),
    Revert(
        defect="verify accepts entries of a stream that no claim has forked",
        generator=f"{_VERIFY}test_an_entry_of_a_stream_that_was_not_forked_is_found",
        edits={
            "delta_tracker/cli/verify.py": [
                ("    if stream and manifest.stream != stream and not _starts(", "    if not stream and not _starts("),
            ],
        },
    ),
    Revert(
        defect="verify skips what is below a missing entry",
        generator=f"{_VERIFY}test_entries_below_a_gap_are_checked",
        edits={
            "delta_tracker/cli/verify.py": [
                (
                    "[version for version in listed if version <= newest]",
                    "[version for version in listed if version > 3]",
                ),
            ],
        },
    ),
    Revert(
        defect="verify stops at a damaged newest entry",
        generator=f"{_VERIFY}test_a_damaged_newest_entry_is_a_finding_among_others",
        edits={
            "delta_tracker/cli/verify.py": [
                (
                    "MalformedError:  # reported when the entry is checked\n            return self.stream.log.n",
                    "ZeroDivisionError:\n            return self.stream.log.n",
                ),
            ],
        },
    ),
    Revert(
        defect="verify finds no stray name above the newest version",
        generator=f"{_VERIFY}test_verify_and_inspect_agree_on_a_stray_name",
        edits={"delta_tracker/cli/verify.py": [("if versions and self.stream.log", "if False and self.stream.log")]},
    ),
    Revert(
        defect="verify misses an entry that the listing has and the store lacks",
        generator=f"{_VERIFY}test_an_entry_that_is_listed_but_missing_is_found[False]",
        edits={
            "delta_tracker/cli/verify.py": [
                ("            elif version > self._start >= 0 and", "            elif False and")
            ]
        },
    ),
    Revert(
        defect="verify calls an entry damaged that retention deletes during the check",
        generator=f"{_VERIFY}test_an_entry_that_is_listed_but_missing_is_found[True]",
        edits={"delta_tracker/cli/verify.py": [(" and self._newest_snapshot(head) < version:", ":")]},
    ),
    Revert(
        defect="verify calls objects damaged that retention deleted before a promotion",
        generator=f"{_VERIFY}test_objects_that_retention_deleted_before_a_promotion_are_no_damage",
        edits={"delta_tracker/cli/verify.py": [(" or manifest.stream != self._stream\n", "\n")]},
    ),
    Revert(
        defect="no version is exported if the newest entry is damaged",
        generator="tests/cli/test_export.py::test_a_version_below_a_damaged_newest_entry_is_exported",
        edits={
            "delta_tracker/stream/cursor.py": [
                (
                    "            if head is None or version > head.version:\n                raise\n",
                    "            raise\n",
                ),
            ],
        },
    ),
    Revert(
        defect="versions of a former stream are called missing",
        generator=f"{_MIRROR}test_versions_of_the_former_stream_are_read_but_not_pinned",
        edits={
            "delta_tracker/stream/cursor.py": [
                ("stream = head.stream if found is None else found.stream", "stream = head.stream"),
            ],
        },
    ),
    Revert(
        defect="a checkpoint of a former stream with states is called missing",
        generator="tests/cli/test_dcp_checkpoint.py::test_what_a_checkpoint_cannot_have_is_refused",
        edits={"delta_tracker/cli/dcp_checkpoint.py": [("head.stream != path[-1].stream:", "not head.stream:")]},
    ),
    Revert(
        defect="a rollback to a version of a former stream calls it missing",
        generator=f"{_MIRROR}test_versions_of_the_former_stream_are_read_but_not_pinned",
        edits={"delta_tracker/stream/rollback.py": [("    _refuse_former(log, version)\n", "")]},
    ),
    Revert(
        defect="a mirror of a url without a stream succeeds",
        generator=f"{_MIRROR}test_a_source_without_a_stream_is_named_before_anything_is_created",
        edits={
            "delta_tracker/cli/mirror.py": [
                ("        stream.newest_readable()  # before anything is created\n", "        pass\n"),
            ],
        },
    ),
    Revert(
        defect="a mirror of a stream without a snapshot succeeds",
        generator=f"{_MIRROR}test_a_source_without_a_stream_is_named_before_anything_is_created",
        edits={"delta_tracker/cli/mirror.py": [("    if once and mirror.head is None:\n", "    if False:\n")]},
    ),
    Revert(
        defect="a mirror says that a source with a gap has deleted the version",
        generator=f"{_MIRROR}test_a_source_with_a_gap_is_named",
        edits={
            "delta_tracker/stream/mirror.py": [
                ("        if snapshot is None or snapshot.version < version:\n", "        if False:\n"),
            ],
        },
    ),
    Revert(
        defect="a closed pipe has the exit code 1",
        generator=f"{_MAIN}test_a_closed_pipe_exits_with_141",
        edits={"delta_tracker/cli/output.py": [("        raise BrokenPipeError\n", "        raise SystemExit(1)\n")]},
    ),
    Revert(
        defect="output on a full disk ends with a traceback",
        generator=f"{_MAIN}test_a_full_disk_exits_with_2_and_says_so",
        edits={"delta_tracker/cli/main.py": [("error.errno not in _WRITE_ERRORS", "error.errno in _WRITE_ERRORS")]},
    ),
    Revert(
        defect="a closed stdout ends with a traceback",
        generator=f"{_MAIN}test_a_closed_stdout_exits_with_2_and_says_so",
        edits={"delta_tracker/cli/main.py": [("        if sys.stdout is None:  #", "        if False:  #")]},
    ),
    Revert(
        defect="numbers that are not finite end with a traceback",
        generator="tests/cli/test_numbers.py::test_a_number_that_is_not_finite_is_refused",
        edits={"delta_tracker/cli/numbers.py": [("        if not number <= _MAX:", "        if False:")]},
    ),
    Revert(
        defect="a rollback pins a version with wrong bytes",
        generator="tests/cli/test_rollback.py::test_a_version_with_wrong_bytes_is_not_pinned",
        edits={"delta_tracker/stream/rollback.py": [("reads_parts=not is_quick", "reads_parts=False")]},
    ),
    Revert(
        defect="a rollback reads all parts before it says that the stream is pinned",
        generator="tests/cli/test_rollback.py::test_a_version_with_wrong_bytes_is_not_pinned",
        edits={
            "delta_tracker/stream/rollback.py": [
                ("    _former(log, replaces=replaces)  # refuse before the parts are read\n", ""),
            ],
        },
    ),
    Revert(
        defect="rollback and release do not say that there is no stream",
        generator="tests/cli/test_rollback.py::test_a_url_without_a_stream_is_named",
        edits={"delta_tracker/cli/release.py": [("        stream.head()\n", "        pass\n")]},
    ),
    Revert(
        defect="plan does not say that there is no stream",
        generator="tests/cli/test_plan.py::test_streams_that_show_no_workload_are_refused",
        edits={"delta_tracker/planning/observed.py": [("    if not entries:\n", "    if False:\n")]},
    ),
    Revert(
        defect="tail exits with 0 although a version is missing",
        generator="tests/cli/test_tail.py::test_tail_names_what_is_missing_between_its_lines",
        edits={"delta_tracker/cli/tail.py": [("            code = FINDING\n", "")]},
    ),
    Revert(
        defect="tail calls versions missing that retention deleted",
        generator="tests/cli/test_tail.py::test_what_retention_deleted_is_not_missing",
        edits={"delta_tracker/cli/tail.py": [(" and not _is_deletable(stream, version):", ":")]},
    ),
    Revert(
        defect="inspect says that a new predictor stops although a merged entry bridges the gap",
        generator="tests/cli/test_inspect.py::test_a_merged_entry_bridges_a_missing_version",
        edits={"delta_tracker/cli/survey.py": [(" or _merged_from(stream, version)", "")]},
    ),
    Revert(
        defect="the advice for a malformed entry is only to start another stream",
        generator="tests/cli/test_export.py::test_a_version_below_a_damaged_newest_entry_is_exported",
        edits={
            "delta_tracker/errors.py": [
                ('        "call Publisher.snapshot(): predictors continue from it. If no', '        "If no'),
            ],
        },
    ),
    Revert(
        defect="a report does not say that it has findings",
        generator="tests/cli/test_report.py::test_the_number_of_findings_is_printed",
        edits={
            "delta_tracker/cli/report.py": [
                ("            if num_faults := ", "            if False and num_faults == ")
            ]
        },
    ),
    Revert(
        defect="an option without a value is shown as an invalid value",
        generator=f"{_MAIN}test_what_a_call_lacks_is_named",
        edits={
            "delta_tracker/cli/mirror.py": [
                ('store_options(dst_options, "--dst-option")', "store_options(dst_options)")
            ]
        },
    ),
    Revert(
        defect="a bucket's url without a bucket is accepted",
        generator=f"{_MAIN}test_what_a_call_lacks_is_named",
        edits={"delta_tracker/stream/storage/url.py": [("    if parts.scheme in _BUCKETS and", "    if False and")]},
    ),
    Revert(
        defect="diff does not name the tables to choose from",
        generator=f"{_MAIN}test_the_tables_to_choose_from_are_named",
        edits={"delta_tracker/cli/diff.py": [("    if fqn is None:\n", "    if False:\n")]},
    ),
    Revert(
        defect="the limit of the ranks of a plan names 1 tables",
        generator="tests/cli/test_plan.py::test_one_table_is_singular",
        edits={"delta_tracker/planning/workload.py": [('"1 table" if len(self.tables) == 1 else ', "")]},
    ),
    Revert(
        defect="fleet shows empty tables",
        generator="tests/cli/test_fleet.py::test_without_predictors_no_empty_table_is_shown",
        edits={"delta_tracker/cli/fleet.py": [("        if shown:\n", "        if True:\n")]},
    ),
]
