"""Fixes in the stream: its log, its storage and retention."""

from __future__ import annotations

from tests.reverts.revert import Revert

_RETENTION = "delta_tracker/stream/maintenance/retention.py"
_PASSES = (
    "tests/stream/test_retention_passes.py::"
    "test_passes_of_one_process_delete_what_separate_ones_delete_within_the_grace"
)

REVERTS = [
    Revert(
        defect="a publisher's clock decides what retention deletes",
        generator="tests/stream/test_retention.py::test_no_reader_within_the_grace_period_loses_its_next_version",
        edits={
            "delta_tracker/stream/format/manifest.py": [
                (
                    "        return self.created if self.modified is None else self.modified\n",
                    "        return self.created\n",
                ),
            ],
        },
    ),
    Revert(
        defect="the host's clock decides what retention deletes",
        generator="tests/stream/test_retention.py::test_a_wrong_clock_of_a_publisher_changes_no_age",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("    clock = newest if now is None else now()\n", "    clock = 2e10\n"),
            ],
        },
    ),
    Revert(
        defect="an object that is dated in the future ends every grace period",
        generator="tests/stream/test_retention.py::test_an_object_dated_in_the_future_changes_no_age",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("min(held.newest(leftovers.newest), time.time())", "held.newest(leftovers.newest)"),
            ],
        },
    ),
    Revert(
        defect="a dead predictor with a fast clock stays live",
        generator="tests/cli/test_inspect.py::test_a_dead_predictor_with_a_fast_clock_is_silent",
        edits={
            "delta_tracker/cli/followers.py": [
                ("clock.now() - each.modified)", "clock.now() - each.beat.time)"),
            ],
        },
    ),
    Revert(
        defect="the lag of a predictor depends on its publisher's clock",
        generator="tests/predictor/test_status.py::test_the_lag_does_not_depend_on_the_publishers_clock",
        edits={
            "delta_tracker/stream/cursor.py": [
                (
                    "max(0.0, last.modified - first.modified) + time.monotonic() - self._newest[1]",
                    "max(0.0, time.time() - self.log.read(held + 1).created)",
                ),
            ],
        },
    ),
    Revert(
        defect="the time axis of a report runs backwards",
        generator="tests/cli/test_history.py::test_the_axis_never_runs_backwards",
        edits={
            "delta_tracker/cli/times.py": [
                (
                    "        self._last = max(self._last, now)\n",
                    "        self._last = manifest.created\n",
                ),
            ],
        },
    ),
    Revert(
        defect="ages are wrong on a host with a fast clock",
        generator="tests/stream/test_heartbeat_metrics.py::test_wrong_clocks_change_no_age",
        edits={
            "delta_tracker/stream/store_clock.py": [
                ("        self.offset = min(max(0.0, self._low), self._high)\n", "        self.offset = 0.0\n"),
            ],
        },
    ),
    Revert(
        defect="heartbeats and probes of the dead are kept forever",
        generator="tests/stream/test_retention.py::test_heartbeats_and_probes_of_the_dead_are_removed",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ('"drafts", "probe", "predictors", ', '"drafts", "probe/no", "predictors/no", '),
            ],
        },
    ),
    Revert(
        defect="retention deletes the draft of a running upload",
        generator="tests/stream/test_retention.py::test_the_draft_of_a_running_upload_stays",
        edits={
            "delta_tracker/stream/storage/local.py": [
                ("            _lock(descriptor, fcntl.LOCK_EX)\n", ""),
            ],
        },
    ),
    Revert(
        defect="a write creates a directory that vanished",
        generator="tests/contract/test_storage.py::test_a_directory_that_vanished_is_not_created_again",
        edits={
            "delta_tracker/stream/storage/local.py": [
                (
                    "        (directory / parent).mkdir(exist_ok",
                    "        (directory / parent).mkdir(parents=True, exist_ok",
                ),
            ],
            "delta_tracker/stream/storage/storage.py": [
                (
                    "        if self._identity is not None and not self._is_current():\n",
                    "        if self._is_remote:\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a heartbeat is written to an empty mount point",
        generator="tests/stream/test_heartbeat.py::test_a_heartbeat_never_creates_a_stream",
        edits={
            "delta_tracker/stream/heartbeat.py": [
                ('            if not target.storage.has_directory("log"):\n                return\n', ""),
            ],
        },
    ),
    Revert(
        defect="a publisher writes to the mount point of an unmounted volume, which has a file",
        generator="tests/stream/test_log.py::test_a_publisher_and_a_reader_survive_an_unmount",
        edits={
            "delta_tracker/stream/storage/storage.py": [
                ("        return identity(status) == self._identity and not (", "        return not ("),
            ],
        },
    ),
    Revert(
        defect="a directory that is replaced during a write gets the object",
        generator="tests/contract/test_storage.py::test_a_directory_that_is_replaced_during_a_write_gets_no_object",
        edits={
            "delta_tracker/stream/storage/local.py": [
                ("        check()\n        if overwrite:\n", "        if overwrite:\n"),
            ],
        },
    ),
    Revert(
        defect="retention frees claims, and random readers take what a sleeper leaves",
        generator="tests/predictor/test_resync_random.py::test_no_reader_applies_the_entries_of_a_sleeper",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("    guards = held.guards()\n", "    guards: set[int] = set()\n"),
            ],
        },
    ),
    Revert(
        defect="an answer that says try again fences the publisher",
        generator="tests/stream/test_sleepers.py::test_no_late_entry_counts_wherever_a_publisher_sleeps_or_dies",
        edits={
            "delta_tracker/stream/storage/storage.py": [
                (
                    "            if self.size(name) is not None:\n                return False\n",
                    "            return False\n",
                ),
            ],
            "delta_tracker/stream/log.py": [
                (
                    "            if taken is None or _is_superseded(taken, head):",
                    (
                        "            if taken is None:\n                raise self._fence(head.generation, version)\n"
                        "            if _is_superseded(taken, head):"
                    ),
                ),
            ],
        },
    ),
    Revert(
        defect="a publisher whose successor's claim was deleted acknowledges a version at its name",
        generator="tests/stream/test_lost_entries.py::test_one_publisher_continues_whatever_a_person_deletes",
        edits={
            "delta_tracker/stream/log.py": [
                (" and not is_lost and not _continues_after(self, entry.version):\n", " and not is_lost:\n"),
            ],
        },
    ),
    Revert(
        defect="a publisher does not see the new stream in its emptied log",
        generator="tests/stream/test_lost_entries.py::test_one_publisher_continues_whatever_a_person_deletes",
        edits={
            "delta_tracker/stream/log.py": [
                ("        asked = [*versions[: len(versions) - len(asked)][-1:], *asked]", "        asked = [*asked]"),
            ],
        },
    ),
    Revert(
        defect="a claim whose name is refused tries for ever",
        generator="tests/stream/test_log.py::test_a_claim_whose_name_is_unavailable_fails",
        edits={
            "delta_tracker/stream/log.py": [
                ("            if refused == _REFUSALS:\n", "            if refused < 0:\n"),
                ("for attempt in range(_CLAIM_ATTEMPTS):", "for attempt in iter(int, 1):"),
                ("            back_off(refused + 1)\n", ""),
            ],
        },
        hangs=True,
        timeout_seconds=30,
    ),
    Revert(
        defect="retention frees the names that a fenced publisher tries",
        generator="tests/stream/test_sleepers.py::test_no_late_entry_counts_wherever_a_publisher_sleeps_or_dies",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("    guards = held.guards()\n", "    guards: set[int] = set()\n"),
            ],
        },
    ),
    Revert(
        defect="retention frees the name of the entry before a claim",
        generator="tests/stream/test_sleepers.py::test_no_late_entry_counts_wherever_a_publisher_sleeps_or_dies",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("                found.add(version - 1)\n", "                pass\n"),
            ],
        },
    ),
    Revert(
        defect="a reader takes a claim that was created late",
        generator="tests/stream/test_sleepers.py::test_no_late_entry_counts_wherever_a_publisher_sleeps_or_dies",
        edits={
            "delta_tracker/stream/cursor.py": [
                (
                    '        if manifest.kind == "claim" and not self.log.is_committed(manifest):',
                    "        if not manifest.version + 1:",
                ),
            ],
        },
    ),
    Revert(
        defect="an entry whose directory cannot be synced is read back from memory and acknowledged",
        generator="tests/stream/test_log.py::test_a_version_whose_name_cannot_be_synced_is_not_acknowledged",
        edits={
            "delta_tracker/stream/log.py": [
                (
                    "        except (NameConflictError, NotDurableError, DirectoryReplacedError):\n",
                    "        except NameConflictError:\n",
                ),
                ('        self.storage.sync(name.rpartition("/")[0])\n', ""),
            ],
        },
    ),
    Revert(
        defect="retention deletes parts before the deletion of their entries is on disk",
        generator="tests/stream/test_retention.py::test_a_pass_syncs_before_and_between_its_deletions",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("    if gone:\n        _sync_entries(log.storage)\n", ""),
            ],
        },
    ),
    Revert(
        defect="a listing follows links to directories",
        generator="tests/contract/test_storage.py::test_a_listing_follows_links_to_files_only",
        edits={
            "delta_tracker/stream/storage/local.py": [
                ("            if not (entry.is_symlink() and stat.S_ISDIR(status.st_mode)):\n    ", ""),
            ],
        },
    ),
    Revert(
        defect="the traceback of a fenced publisher grows with each commit",
        generator="tests/stream/test_log.py::test_a_fenced_publisher_that_tries_again_keeps_no_tracebacks",
        edits={
            "delta_tracker/stream/log.py": [
                ("unraised(self._fenced)\n        created", "self._fenced\n        created")
            ]
        },
    ),
    Revert(
        defect="a failed pass of the upkeep keeps the rows that it merged",
        generator="tests/stream/test_upkeep.py::test_the_memory_of_a_failed_pass_is_freed",
        edits={
            "delta_tracker/stream/maintenance/upkeep.py": [("step: unraised(error)}", "step: error}")],
        },
    ),
    Revert(
        defect="a retention pass clears the error of the compactions",
        generator="tests/stream/test_upkeep.py::test_a_retention_pass_does_not_clear_the_error_of_a_compaction",
        edits={
            "delta_tracker/stream/maintenance/upkeep.py": [
                ('        self._succeed("start")\n', "        self._errors = {}\n"),
            ],
        },
    ),
    Revert(
        defect="a compaction that fails keeps retention from running",
        generator="tests/stream/test_upkeep.py::test_versions_are_removed_although_the_compaction_before_fails",
        edits={
            "delta_tracker/stream/maintenance/upkeep.py": [
                ("            self._fail(step, error)\n            return True\n", "            raise\n"),
            ],
        },
    ),
    Revert(
        defect="a slow sync dates a file before its name",
        generator="tests/stream/test_local.py::test_a_slow_sync_does_not_date_a_file_before_its_name",
        edits={
            "delta_tracker/stream/storage/local.py": [
                ("                os.utime(descriptor)", "                "),
            ],
        },
    ),
    Revert(
        defect="a listing lacks an object whose status cannot be read",
        generator="tests/contract/test_storage.py::test_a_listing_that_may_lack_an_object_fails",
        edits={
            "delta_tracker/stream/storage/local.py": [
                ("        if error.errno in _NOWHERE:\n", "        if error.errno:\n"),
            ],
        },
    ),
    Revert(
        defect="a manifest may have a name twice",
        generator="tests/stream/test_parse.py::test_a_field_twice_is_refused",
        edits={"delta_tracker/stream/format/parse.py": [("    _check_names(text)\n", "")]},
    ),
    Revert(
        defect="lookups wait until all values of a manifest are built",
        generator="tests/stream/test_parse.py::test_a_lookup_waits_briefly_while_a_manifest_is_parsed",
        edits={
            "delta_tracker/stream/format/parse.py": [("    _check_names(text)\n", "    load_json(data)\n")],
        },
    ),
    Revert(
        defect="all blocks of a manifest are built before the first is checked",
        generator="tests/stream/test_parse.py::test_the_first_invalid_element_of_a_manifest_ends_the_work",
        edits={
            "delta_tracker/stream/format/parse.py": [
                ("in enumerate(elements(value, path)):", "in enumerate(Decoder(list[Raw]).decode(value)):")
            ],
        },
    ),
    Revert(
        defect="a malformed entry is parsed at each read",
        generator="tests/stream/test_log.py::test_a_malformed_entry_is_parsed_once_however_often_it_is_read",
        edits={"delta_tracker/stream/log.py": [("maxlen=_MAX_REFUSED", "maxlen=0")]},
    ),
    Revert(
        defect="the start of a publisher and a predictor lists the whole log",
        generator="tests/stream/test_known_head.py::test_no_operation_lists_a_log_with_a_pointer_whatever_its_length",
        edits={
            "delta_tracker/stream/log.py": [
                ("return self._known_head() or self._listed_head()", "return self._listed_head()"),
            ],
        },
    ),
    Revert(
        defect="the check for a gap at a claim lists the whole log",
        generator="tests/stream/test_known_head.py::test_no_operation_lists_a_log_with_a_pointer_whatever_its_length",
        edits={
            "delta_tracker/stream/cursor.py": [
                ('(own.kind != "claim" or self.log.is_surely_newest(own))', 'own.kind != "claim"'),
            ],
        },
    ),
    Revert(
        defect="an entry that retention keeps below a gap is the newest",
        generator="tests/stream/test_known_head.py::test_an_entry_that_retention_keeps_below_a_gap_is_not_the_newest",
        edits={
            "delta_tracker/stream/log.py": [
                ("self._follows_deletable(entry) and not has_deletions", "not has_deletions"),
            ],
        },
    ),
    Revert(
        defect="an entry whose deletion a power loss has undone is the newest",
        generator="tests/stream/test_known_head.py::"
        "test_entries_whose_deletion_a_power_loss_has_undone_are_not_the_newest",
        edits={
            "delta_tracker/stream/log.py": [(" and not has_deletions(self.storage)", "")],
        },
    ),
    Revert(
        defect="a late entry in a directory proves its own place in the log",
        generator="tests/stream/test_sleepers.py::test_no_late_entry_counts_in_a_directory_either",
        edits={
            "delta_tracker/stream/log.py": [("if is_deletable and after is not None:", "if is_deletable:")],
        },
    ),
    Revert(
        defect="a retention pass that deletes nothing reads the whole log",
        generator="tests/stream/test_retention_passes.py::test_a_pass_that_deletes_nothing_reads_only_new_entries",
        edits={_RETENTION: [("            self._left = left\n", "")]},
    ),
    Revert(
        defect="the bytes of versions since the last pass do not count",
        generator=_PASSES,
        edits={_RETENTION: [("            self.num_bytes += entry.total_bytes\n", "")]},
    ),
    Revert(
        defect="snapshots since the last pass are not known to retention",
        generator=_PASSES,
        edits={_RETENTION: [('            if entry.kind == "snapshot":\n', "            if False:\n")]},
    ),
    Revert(
        defect="merged entries that another one covers stay until the next full pass",
        generator=_PASSES,
        edits={_RETENTION: [(" or bool(_superseded(held, start, before))", "")]},
    ),
    Revert(
        defect="a retention pass does not notice that the log was replaced",
        generator="tests/stream/test_retention_passes.py::test_a_replaced_log_is_read_anew",
        edits={
            _RETENTION: [
                (
                    "there is None or (there.stream, there.link) != (self.head.stream, self.head.link)",
                    "there is None",
                ),
                ("(entry.stream, entry.parent) != (self.head.stream, self.head.link)", "False"),
            ]
        },
    ),
    Revert(
        defect="entries that another process deletes end the log for later passes",
        generator="tests/stream/test_retention_passes.py::"
        "test_entries_that_another_process_deletes_do_not_end_the_log_for_later_passes",
        edits={
            _RETENTION: [
                (
                    "if not log.is_surely_newest(self.head) and log.versions(after=self.head.version):",
                    "if False:",
                )
            ]
        },
    ),
    Revert(
        defect="a retention pass forgets a snapshot right before a claim",
        generator=_PASSES,
        edits={
            _RETENTION: [
                (
                    "first = min(kept)",
                    "first = min([each for each in kept if each not in held.guards()] or [max(kept)])",
                ),
                (
                    "snapshots=[(version, each.committed) for version, each in kept.items()",
                    "snapshots=[(version, each.committed) for version, each in kept.items() if version >= first",
                ),
            ]
        },
    ),
]
