"""Promises of the fleet view and pins."""

from __future__ import annotations

from tests.reverts.revert import Revert

_PAGE = "tests/cli/test_page.py"
_PINS = "tests/predictor/test_pins.py"

REVERTS = [
    Revert(
        defect="a retention pass that has looked for pins deletes what leads to a later one",
        generator="tests/stream/test_rollback.py::test_a_pin_during_a_retention_pass_keeps_its_versions_or_is_undone",
        edits={
            "delta_tracker/stream/rollback.py": [
                (
                    "        if before > oldest:\n",
                    "        if False and before > oldest:\n",
                ),
            ],
        },
    ),
    Revert(
        defect="retention passes share an announcement",
        generator="tests/stream/test_rollback.py::test_a_pin_during_two_passes_finds_both",
        edits={
            "delta_tracker/stream/pin.py": [("{secrets.token_hex(16)}.json", "{'0' * 32}.json")],
        },
    ),
    Revert(
        defect="a pin checks its path before it looks for announcements",
        generator="tests/stream/test_rollback.py::test_a_pass_that_ends_while_a_pin_is_checked_is_found",
        edits={
            "delta_tracker/stream/rollback.py": [
                (
                    "        written = storage.stat(pin_name(pin.counter))\n",
                    (
                        "        _, oldest = checked_path(log, version)\n"
                        "        written = storage.stat(pin_name(pin.counter))\n"
                    ),
                ),
                (
                    "        _, oldest = checked_path(log, version)\n        before = ",
                    "        before = ",
                ),
            ],
        },
    ),
    Revert(
        defect="a retention pass deletes after its announcement has expired",
        generator="tests/stream/test_rollback.py::test_a_pass_ends_before_its_announcement_expires",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("        if time.monotonic() >= self._ends_at:\n            self.is_over = True\n", ""),
            ],
        },
    ),
    Revert(
        defect="retention does not look for a pin again before it deletes",
        generator=f"{_PINS}::test_a_pin_written_during_a_retention_pass_ends_the_pass",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("        if not self._left and not self.is_over:\n", "        if False:\n"),
            ],
        },
    ),
    Revert(
        defect="retention deletes what leads to a pinned version",
        generator=f"{_PINS}::test_retention_keeps_the_path_of_a_pin",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("    path = _pinned_path(log, held, pin)\n", "    path = _pinned_path(log, held, None)\n"),
            ],
        },
    ),
    Revert(
        defect="a pin is written over that of another operator",
        generator=f"{_PINS}::test_one_of_two_operators_is_refused",
        edits={
            "delta_tracker/stream/rollback.py": [
                ("    if not storage.create(name, data):\n", "    if storage.replace(name, data):\n"),
            ],
        },
    ),
    Revert(
        defect="the path of a pin is not checked again after the pin was written",
        generator=f"{_PINS}::test_a_pin_whose_path_is_deleted_meanwhile_is_corrected",
        edits={
            "delta_tracker/stream/rollback.py": [
                ("        _, oldest = checked_path(log, version)\n", "        oldest = version\n"),
            ],
        },
    ),
    Revert(
        defect="a release leads only to the snapshot that it names, which retention may have deleted",
        generator="tests/predictor/test_pins_of_streams.py::test_a_release_passes_over_a_damaged_snapshot[True]",
        edits={
            "delta_tracker/predictor/predictor.py": [
                ("            has_later = True\n            yield later\n", "            break\n"),
            ],
        },
    ),
    Revert(
        defect="a predictor counts as stuck although it had no lag in its window",
        generator="tests/stream/test_fleet.py::test_a_state_is_judged_by_the_window",
        edits={
            "delta_tracker/stream/fleet.py": [
                ("    if 0 in lags or (", "    if lags[-1] == 0 or ("),
            ],
        },
    ),
    Revert(
        defect="pins and releases are not read past a damaged cache",
        generator="tests/predictor/test_settling.py::test_pins_and_releases_are_followed_past_a_damaged_cache",
        edits={
            "delta_tracker/predictor/predictor.py": [
                ("has_moved = self._obeys_despite_caches(order)", "has_moved = self._obeys(order)")
            ]
        },
    ),
    Revert(
        defect="a part that is short in an http cache fails every predictor with a host cache",
        generator="tests/predictor/test_settling.py::test_a_host_cache_reads_a_part_that_is_wrong_in_the_http_cache_past_it",
        edits={
            "delta_tracker/stream/host_cache.py": [
                (
                    "                if size is None or size >= part.num_bytes:\n                    raise\n",
                    "                if True:\n                    raise\n",
                )
            ]
        },
    ),
    Revert(
        defect="follow() under a pin checks the newest version",
        generator="tests/predictor/test_pins.py::test_follow_under_a_pin_checks_the_pinned_version_and_not_the_newest",
        edits={
            "delta_tracker/predictor/predictor.py": [
                (
                    "newest = [pinned] if pinned is not None and is_pinned else self._cursor.heads()",
                    "newest = self._cursor.heads()",
                )
            ]
        },
    ),
    Revert(
        defect="a canary takes only the newest snapshot after a release",
        generator="tests/predictor/test_pins.py::test_a_canary_that_starts_after_a_release_takes_an_older_snapshot",
        edits={
            "delta_tracker/predictor/predictor.py": [
                (
                    "for later in self._cursor.snapshots(skips_unreadable=self._keeps_failing):",
                    "for later in self._cursor._starts():",
                )
            ]
        },
    ),
    Revert(
        defect="a follower keeps the polling interval of a source that failed",
        generator="tests/predictor/test_sources.py::test_the_polling_interval_is_that_of_the_present_source",
        edits={
            "delta_tracker/predictor/follower.py": [
                (
                    "                        self._schedule = schedule = self._new_schedule(poll_seconds)\n",
                    "                        pass\n",
                )
            ]
        },
    ),
    Revert(
        defect="heartbeats to a store that fails do not become rarer",
        generator="tests/stream/test_heartbeat.py::test_heartbeats_to_a_store_that_fails_become_rare",
        edits={
            "delta_tracker/stream/heartbeat.py": [
                (
                    "self._seconds * 2**target.num_failures)",
                    "self._seconds)",
                ),
            ],
        },
    ),
    Revert(
        defect="the latest time of all entries bounds a canary",
        generator="tests/predictor/test_canary.py::test_an_entry_of_a_clock_that_is_ahead_does_not_let_later_versions_pass",
        edits={
            "delta_tracker/predictor/canary.py": [
                ("self._latest = head.created", "self._latest = max(self._latest, head.created)")
            ]
        },
    ),
    Revert(
        defect="a change of the source counts as a version",
        generator="tests/predictor/test_sources.py::test_a_change_of_the_source_does_not_count_as_a_version",
        edits={
            "delta_tracker/predictor/predictor.py": [("num_applied += self._storage is before", "num_applied += True")]
        },
    ),
    Revert(
        defect="a canary at rest is stuck",
        generator="tests/stream/test_fleet.py",
        edits={
            "delta_tracker/stream/fleet.py": [
                ("if beat.canary is not None and not has_moved and known and known[-1] <= known[0]:", "if False:")
            ]
        },
    ),
    Revert(
        defect="a predictor waits for the first url although another one has a stream",
        generator="tests/predictor/test_sources.py",
        edits={
            "delta_tracker/predictor/predictor.py": [
                (
                    "        except (NoSnapshotError, StorageError):  #",
                    "        except StorageError:  #",
                ),
            ],
        },
    ),
    Revert(
        defect="heartbeats stay at a source that failed",
        generator="tests/predictor/test_sources.py::test_heartbeats_follow_a_failover",
        edits={
            "delta_tracker/predictor/predictor.py": [
                ("self._moves_heartbeats = heartbeats is None", "self._moves_heartbeats = False"),
            ],
        },
    ),
    Revert(
        defect="the first heartbeat after a failover waits as long as the failed store was left alone",
        generator="tests/stream/test_heartbeat.py::test_the_first_heartbeat_after_a_failover_is_not_late",
        edits={
            "delta_tracker/stream/heartbeat.py": [
                (
                    "        self._target = _Target(storage)\n\n    def leave",
                    "        self._target.storage = storage\n\n    def leave",
                ),
            ],
        },
    ),
    Revert(
        defect="a heartbeat to the former store delays the first one at the next store",
        generator="tests/stream/test_heartbeat.py::test_a_heartbeat_to_the_former_store_does_not_delay_the_next",
        edits={
            "delta_tracker/stream/heartbeat.py": [
                (
                    "        self._target = _Target(storage)\n\n    def leave",
                    (
                        "        old, self._target.storage = self._target, storage\n"
                        "        old.due, old.num_failures = 0.0, 0\n\n    def leave"
                    ),
                ),
            ],
        },
    ),
    Revert(
        defect="a canary of versions that keeps its distance is behind",
        generator="tests/stream/test_fleet.py::test_a_canary_that_keeps_its_distance_is_current",
        edits={
            "delta_tracker/stream/fleet.py": [
                (" or (has_moved and known and min(known) <= _distance(beat)):", ":"),
            ],
        },
    ),
    Revert(
        defect="a long error takes the place of the names of predictors",
        generator="tests/cli/test_fleet.py::test_a_long_error_leaves_the_table_readable",
        edits={
            "delta_tracker/cli/fleet.py": [
                ('"version", "lag"],', '"version", "lag", "error"],'),
                ("beat.host, state, version, lag]", "beat.host, state, version, lag, beat.error]"),
            ],
        },
    ),
    Revert(
        defect="a canary that may not apply a release yet is stuck",
        generator="tests/cli/test_fleet.py::test_a_canary_after_a_release_waits_and_is_not_stuck",
        edits={
            "delta_tracker/stream/fleet.py": [
                ('order.kind == "release" and _waits_after(order, beat, head)', "False"),
            ],
        },
    ),
    Revert(
        defect="the page of a stream fails if a predictor has a version of another stream",
        generator="tests/cli/test_fleet.py::test_a_report_of_a_stream_with_a_predictor_of_another_one",
        edits={"delta_tracker/cli/figures.py": [('"silent", "elsewhere", "unpinned"', '"silent", "unpinned"')]},
    ),
    Revert(
        defect="the report shows the last lag of silent predictors",
        generator=f"{_PAGE}::test_a_silent_predictor_has_no_figures",
        edits={
            "delta_tracker/cli/report.html.jinja": [
                ('set is_silent = each.health == "silent"', "set is_silent = false"),
            ],
        },
    ),
    Revert(
        defect="the lag of silent predictors counts for their host",
        generator=f"{_PAGE}::test_a_silent_predictor_has_no_figures",
        edits={"delta_tracker/cli/followers.py": [('("silent", "elsewhere")', '("elsewhere",)')]},
    ),
    Revert(
        defect="versions are on the axis of reports although their times ascend",
        generator=f"{_PAGE}::test_time_is_on_the_axis_and_a_pause_of_the_publisher_is_empty",
        edits={"delta_tracker/cli/figures.py": [('"time" if history.is_timed else "versions"', '"versions"')]},
    ),
    Revert(
        defect="shifted times are on the axis of reports",
        generator=f"{_PAGE}::test_versions_are_on_the_axis_if_a_clock_was_wrong",
        edits={
            "delta_tracker/cli/history.py": [("seconds > 0 and not self._times.are_shifted and", "seconds > 0 and")]
        },
    ),
    Revert(
        defect="times of contradicting clocks are on the axis of reports",
        generator=f"{_PAGE}::test_versions_are_on_the_axis_if_a_clock_was_wrong",
        edits={
            "delta_tracker/cli/history.py": [
                (" and self._times.max_correction <= _MAX_CORRECTION * seconds", ""),
            ],
        },
    ),
    Revert(
        defect="an error of a predictor has no next step",
        generator="tests/cli/test_attention.py::test_each_condition_has_its_next_step_and_a_word_beside_its_color",
        edits={
            "delta_tracker/cli/attention.py": [
                ("step = next_step_of(error)", "step = None"),
            ],
        },
    ),
    Revert(
        defect="a cell of a narrow page has no name",
        generator=f"{_PAGE}::test_tables_name_each_cell_for_narrow_pages_and_lines_have_a_range",
        edits={"delta_tracker/cli/report.html.jinja": [('<td data-label="rows sent">', "<td>")]},
    ),
    Revert(
        defect="rates fall to 0 because the store cannot be read",
        generator="tests/cli/test_screen.py::test_an_unreadable_store_is_no_standstill",
        edits={
            "delta_tracker/cli/screen.py": [
                ("watch, now, head = view.watch, view.read,", "watch, now, head = view.watch, view.now,"),
            ],
        },
    ),
    Revert(
        defect="a live screen shows the last lag of silent predictors",
        generator="tests/cli/test_top.py::test_predictors_are_shown_and_dead_ones_age_out",
        edits={"delta_tracker/cli/screen.py": [('if state == "silent":  # what', "if False:  # what")]},
    ),
    Revert(
        defect="a live screen does not start on a stream with a malformed entry",
        generator="tests/cli/test_top.py::test_a_malformed_entry_below_the_head_is_shown",
        edits={
            "delta_tracker/cli/watch.py": [("except MalformedError as error:", "except ZeroDivisionError as error:")]
        },
    ),
    Revert(
        defect="keys of the live screen are not read at once",
        generator="tests/cli/test_keys.py::test_a_key_ends_the_wait",
        edits={"delta_tracker/cli/keys.py": [("        tty.setcbreak(descriptor)\n", "")]},
    ),
    Revert(
        defect="a predictor that ignores a rollback counts as current",
        generator="tests/cli/test_fleet.py::test_a_predictor_that_ignores_a_pin_has_exit_code_1",
        edits={"delta_tracker/stream/fleet.py": [("_is_above(order, beat)", "False")]},
    ),
    Revert(
        defect="a fleet that is silent as a whole has exit code 0",
        generator="tests/cli/test_fleet.py::test_a_fleet_that_is_silent_as_a_whole_has_exit_code_1",
        edits={"delta_tracker/cli/fleet.py": [("are_silent or any(", "any(")]},
    ),
]
