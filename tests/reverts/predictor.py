"""Fixes in how a predictor gets over faults."""

from __future__ import annotations

from tests.reverts.revert import Revert

_SCHEDULE = "tests/predictor/test_resync_random.py::test_faults_of_readers_are_overcome"
_PREDICTOR = "delta_tracker/predictor/predictor.py"
_MODEL_WRITER = "delta_tracker/predictor/model_writer.py"
_PINS = "tests/predictor/test_pins.py"
_STREAMS = "tests/predictor/test_pins_of_streams.py"
_FORKS = "tests/system/test_follower_forks.py::test_children_of_a_process_that_follows"

_ASKS = "        followed = self._follows_next_stream()\n        if followed:"
_COMPLETES = "(self._pinned is not None and self._pin_stream == order.stream)"
_NEVER_BEGINS_AGAIN = (f"return self._writer.is_mixed or {_COMPLETES}", "return False")

REVERTS = [
    Revert(
        defect="stop() in a signal handler waits for ever if it interrupts wait()",
        generator="tests/predictor/test_stopping.py::test_a_signal_handler_may_call_stop_during_wait",
        edits={
            "delta_tracker/predictor/follower.py": [
                (
                    "        for waiter in tuple(self._waiters):\n            waiter.put(None)\n",
                    (
                        "        with self._control:\n"
                        "            for waiter in tuple(self._waiters):\n"
                        "                waiter.put(None)\n"
                    ),
                )
            ]
        },
        timeout_seconds=30.0,
        hangs=True,
    ),
    Revert(
        defect="a rollback that fails ends a pin for ever",
        generator="tests/predictor/test_pins.py::test_a_rollback_that_fails_leaves_the_pin",
        edits={
            "delta_tracker/predictor/predictor.py": [
                (
                    "            self._return_to(version, overrules=",
                    "            self._pin_stream = None\n            self._return_to(version, overrules=",
                )
            ]
        },
    ),
    Revert(
        defect="a release during the completion of a rollback is forgotten",
        generator="tests/predictor/test_rollback.py::test_a_release_while_a_rollback_is_completed_is_kept",
        edits={_PREDICTOR: [("        if not completes:\n", "        if True:\n")]},
    ),
    Revert(
        defect="predictors stay at a pin for ever after its stream was replaced",
        generator="tests/predictor/test_pins.py::test_a_pin_ends_at_the_first_snapshot_of_a_promoted_log",
        edits={_PREDICTOR: [("return looks_for_gap and self._leaves_pin()", "return False")]},
    ),
    Revert(
        defect="a release that is older than a rollback undoes it",
        generator="tests/predictor/test_pins.py::test_a_rollback_is_not_undone_by_an_older_release[6]",
        edits={_PREDICTOR: [(", self._outlived, self._overruled)", ", self._outlived)")]},
    ),
    Revert(
        defect="a pin of a former stream stops predictors for ever",
        generator="tests/predictor/test_pins.py::"
        "test_a_pin_of_a_stream_that_was_replaced_does_not_stop_a_predictor_that_starts_again",
        edits={_PREDICTOR: [("        if self._is_replaced(order.stream):\n", "        if False:\n")]},
    ),
    Revert(
        defect="a predictor of a former stream applies versions of the next one that a pin excludes",
        generator=f"{_PINS}::test_a_predictor_goes_from_a_former_stream_to_the_pin_of_the_new_one",
        edits={_PREDICTOR: [(_ASKS, _ASKS.replace("self._follows_next_stream()", "False"))]},
    ),
    Revert(
        defect="a canary of a former stream applies versions of the next one that a release skips",
        generator=f"{_PINS}::test_a_predictor_goes_from_a_former_stream_past_what_a_release_of_the_new_one_skips",
        edits={
            _PREDICTOR: [
                ("            return None\n        self._obeyed", "            return False\n        self._obeyed"),
            ]
        },
    ),
    Revert(
        defect="an interrupted move to the pin of another stream fails for ever",
        generator=f"{_PINS}::test_an_interrupted_move_to_the_pin_of_a_new_stream_is_completed",
        edits={
            _PREDICTOR: [
                ("self._return_to(pinned, stream=self._pin_stream,", "self._return_to(pinned,"),
                _NEVER_BEGINS_AGAIN,
            ]
        },
    ),
    Revert(
        defect="a damaged snapshot holds up a predictor whose pin has ended",
        generator=f"{_PINS}::test_a_damaged_snapshot_after_a_pin_that_has_ended_is_passed_over",
        edits={_PREDICTOR: [("                first = first or fault\n", "                raise\n")]},
    ),
    Revert(
        defect="a predictor that restarts at a pin continues the former stream beyond it",
        generator=f"{_PINS}::test_a_restart_at_a_pin_does_not_continue_the_former_stream",
        edits={_PREDICTOR: [("            self._outlives(order, place)\n", "")]},
    ),
    Revert(
        defect="a predictor takes a version of a former stream for the pin of the new one with its number",
        generator=f"{_STREAMS}::test_a_row_store_follows_a_pin_with_the_number_of_the_version_of_a_former_stream[0]",
        edits={_PREDICTOR: [("return self._pin_stream in (None, place.stream)", "return True"), _NEVER_BEGINS_AGAIN]},
    ),
    Revert(
        defect="an interrupted move to a pin of another stream is completed although the pin was released",
        generator=f"{_STREAMS}::test_an_interrupted_move_to_another_stream_obeys_a_newer_order[release-row store]",
        edits={_PREDICTOR: [_NEVER_BEGINS_AGAIN]},
    ),
    Revert(
        defect="mixed tables start at the newest snapshot and not at the pin",
        generator=f"{_STREAMS}::test_mixed_tables_start_at_the_pin_of_the_new_stream[at a version]",
        edits={_PREDICTOR: [("return self._writer.is_mixed or (self._pinned", "return (self._pinned")]},
    ),
    Revert(
        defect="a canary that waits for a release fails over to another url",
        generator=f"{_STREAMS}::test_a_canary_that_waits_for_a_release_of_the_new_stream_stays_at_its_url",
        edits={
            _PREDICTOR: [
                ("            return followed is True\n        faults", "            raise fault\n        faults")
            ]
        },
    ),
    Revert(
        defect="rows that were saved after their position stay under a pin",
        generator=f"{_STREAMS}::test_a_pin_at_a_loaded_position_replaces_rows_that_were_saved_later[1]",
        edits={_MODEL_WRITER: [("return self._is_loaded or self._applying", "return self._applying")]},
    ),
    Revert(
        defect="rows of an interrupted version stay under a pin",
        generator=f"{_STREAMS}::test_a_pin_at_the_applied_version_replaces_rows_of_an_interrupted_one",
        edits={_MODEL_WRITER: [("return self._is_loaded or self._applying is not None", "return self._is_loaded")]},
    ),
    Revert(
        defect="rows of an interrupted version stay in a row store under a pin",
        generator=f"{_STREAMS}::test_a_pin_at_the_stored_version_replaces_rows_of_an_interrupted_one",
        edits={"delta_tracker/predictor/sink_writer.py": [("and self._state.applying is not None", "and False")]},
    ),
    Revert(
        defect="a former stream is continued past what its release skips",
        generator=f"{_STREAMS}::test_a_former_stream_is_not_continued_after_an_order[released-False]",
        edits={_PREDICTOR: [("is_past = order.kind", "is_past = True or order.kind")]},
    ),
    Revert(
        defect="a predictor on the way to a pin continues the former stream if the new one has a pin too",
        generator=f"{_STREAMS}::test_a_predictor_on_the_way_to_a_pin_goes_to_that_of_the_new_stream",
        edits={_PREDICTOR: [("place.link.version if place is not None and is_whole else None", "None")]},
    ),
    Revert(
        defect="a pin whose stream had ended is ignored in an older copy of the log",
        generator=f"{_STREAMS}::test_an_order_whose_stream_had_ended_is_followed_in_an_older_copy_of_the_log",
        edits={_PREDICTOR: [("            self._outlived = 0  # the log was replaced by an older copy\n", "")]},
    ),
    Revert(
        defect="a damaged version of a former stream leads to the newest snapshot and not to the pin",
        generator=f"{_STREAMS}::test_a_fault_of_a_former_stream_leads_to_the_pin_of_the_new_one[a part is missing]",
        edits={
            _PREDICTOR: [
                (_ASKS, _ASKS.replace("= self", "= isinstance(fault, StreamReplacedError) and self")),
            ]
        },
    ),
    Revert(
        defect="a pin of a former stream and a malformed head prevent every recovery",
        generator=f"{_STREAMS}::test_a_pin_of_a_former_stream_does_not_prevent_a_recovery[malformed]",
        edits={_PREDICTOR: [("if leaves_stream and (isinstance(error", "if False and (isinstance(error")]},
    ),
    Revert(
        defect="a pin that was followed once is not followed in an older copy of the log",
        generator=f"{_STREAMS}::test_an_older_copy_of_the_log_brings_its_pin_back",
        edits={
            _PREDICTOR: [
                (
                    "            return order.counter <= self._overruled\n",
                    "            return order.counter <= max(self._obeyed, self._overruled)\n",
                )
            ]
        },
    ),
    Revert(
        defect="a release is not followed from a loaded position before it",
        generator=f"{_STREAMS}::test_a_release_is_followed_again_from_a_position_before_it",
        edits={_PREDICTOR: [("            self._obeyed = self._outlived = 0  # by", "            pass  # by")]},
    ),
    Revert(
        defect="a malformed merged snapshot holds up a predictor whose pin has ended",
        generator=f"{_STREAMS}::test_a_malformed_merged_snapshot_does_not_hold_up_a_predictor_whose_pin_has_ended",
        edits={
            "delta_tracker/stream/cursor.py": [
                ("        manifest = self._newest_snapshot()\n", "        manifest = self.log.newest_snapshot()\n")
            ]
        },
    ),
    Revert(
        defect="an unreadable snapshot holds up a predictor whose pin has ended",
        generator=f"{_STREAMS}::test_an_unreadable_snapshot_does_not_hold_up_a_predictor_whose_pin_has_ended",
        edits={
            _PREDICTOR: [("if self._keeps_failing else _FAULTS\n        first", "if False else _FAULTS\n        first")]
        },
    ),
    Revert(
        defect="a damaged snapshot after a release holds up predictors",
        generator=f"{_STREAMS}::test_a_release_passes_over_a_damaged_snapshot[False]",
        edits={_PREDICTOR: [("                first = first or fault\n", "                raise\n")]},
    ),
    Revert(
        defect="a canary in seconds applies versions after a pin, if another publisher's clock is behind",
        generator=f"{_STREAMS}::test_a_canary_applies_nothing_after_a_pin_that_it_does_not_allow_yet",
        edits={_PREDICTOR: [("                self._awaited = order\n", "")]},
    ),
    Revert(
        defect="a resync applies a version after a pin that was found meanwhile",
        generator=f"{_STREAMS}::test_a_resync_applies_nothing_after_a_pin_that_was_found_meanwhile",
        edits={_PREDICTOR: [("if way in self._ways or self._is_excluded(manifest):", "if way in self._ways:")]},
    ),
    Revert(
        defect="an interrupted resync leaves rows of the new stream between those of the former one",
        generator=f"{_STREAMS}::test_an_interrupted_resync_to_another_stream_is_not_continued_in_the_former_one",
        edits={_PREDICTOR: [(" or stream not in (None, manifest.stream)", "")]},
    ),
    Revert(
        defect="a version that is applied by sync() or rollback() does not wake wait()",
        generator="tests/predictor/test_waiting.py::test_a_sync_that_ends_at_a_held_version_wakes_it",
        edits={
            _PREDICTOR: [
                ("            self._follower.moved()  # also if a later", "            pass  # also if a later")
            ]
        },
    ),
    Revert(
        defect="a canary compares versions of an older copy of the log with those of the lost one",
        generator="tests/predictor/test_canary.py::test_a_canary_counts_again_in_an_older_copy_of_the_log",
        edits={"delta_tracker/predictor/canary.py": [("= manifest.stream, manifest.writer", '= manifest.stream, ""')]},
    ),
    Revert(
        defect="follow() returns without a thread and without an error",
        generator="tests/predictor/test_follower.py::test_a_thread_that_cannot_begin_is_reported",
        edits={"delta_tracker/predictor/follower.py": [("begun.set_exception(ended)", "pass")]},
    ),
    Revert(
        defect="a rollback needs versions that a merged snapshot replaces",
        generator="tests/predictor/test_rollback.py::test_a_merged_snapshot_replaces_the_versions_before_it[entry]",
        edits={
            "delta_tracker/stream/cursor.py": [
                (
                    "            return whole if whole is not None and whole.link",
                    "            return whole if False and whole.link",
                )
            ]
        },
    ),
    Revert(
        defect="an error that is none of the stream's ends follow()",
        generator=_SCHEDULE,
        edits={
            "delta_tracker/predictor/follower.py": [
                (
                    "        except Exception as error:  # noqa: BLE001",
                    "        except StreamError as error:  # noqa: BLE001",
                )
            ]
        },
    ),
    Revert(
        defect="a version with an unknown table holds a predictor up for ever",
        generator=_SCHEDULE,
        edits={
            "delta_tracker/predictor/predictor.py": [
                ("    StreamReplacedError,\n    TableMismatchError,\n)\n#", "    StreamReplacedError,\n)\n#")
            ]
        },
    ),
    Revert(
        defect="a panic of the store is no typed error",
        generator=_SCHEDULE,
        edits={
            "delta_tracker/stream/storage/storage.py": [
                ("            if not is_panic(error):\n                raise\n", "            raise\n")
            ]
        },
    ),
    Revert(
        defect="follow() does not refuse a model that cannot receive the newest version",
        generator="tests/predictor/test_follower.py::test_follow_refuses_a_stream_that_does_not_fit_the_model",
        edits={
            "delta_tracker/predictor/predictor.py": [
                (
                    "self._follower.start(poll_seconds, self._check_newest)",
                    "self._follower.start(poll_seconds, lambda: None)",
                )
            ]
        },
    ),
    Revert(
        defect="rows of a version that was cut short are hidden by the version before it",
        generator="tests/predictor/test_follower.py::test_rows_of_a_later_partly_applied_version_are_reported",
        edits={
            "delta_tracker/predictor/model_writer.py": [
                (
                    'manifest.kind == "snapshot" or begun.version <= manifest.version:',
                    "manifest is not None:",
                )
            ]
        },
    ),
    Revert(
        defect="an object that cannot be read holds a predictor up for ever",
        generator=_SCHEDULE,
        edits={"delta_tracker/predictor/predictor.py": [("_NUM_TRIES = 3", "_NUM_TRIES = 1 << 30")]},
    ),
    Revert(
        defect="a way around an unreadable object stops at another one",
        generator="tests/predictor/test_unreadable.py::test_a_newest_entry_that_cannot_be_read_hides_no_snapshot",
        edits={
            "delta_tracker/predictor/predictor.py": [
                ("way_back(fault, skips_unreadable=self._keeps_failing)", "way_back(fault)")
            ]
        },
    ),
    Revert(
        defect="a fork leaves the lock of the tables as threads of the parent held it",
        generator=f"{_FORKS}[many]",
        edits={
            "delta_tracker/predictor/model_writer.py": [
                ("self.lock.after_fork_in_child() or self._is_torn", "self._is_torn")
            ]
        },
    ),
    Revert(
        defect="a fork does not wait for the end of a write",
        generator=f"{_FORKS}[many]",
        edits={"delta_tracker/predictor/model_writer.py": [("        self.lock.before_fork()\n", "")]},
    ),
    Revert(
        defect="a forked process does not say that rows may be torn",
        generator=f"{_FORKS}[too slow]",
        edits={
            "delta_tracker/predictor/model_writer.py": [("            if self._is_torn:\n", "            if False:\n")]
        },
    ),
    Revert(
        defect="a remote store is asked in a forked process",
        generator="tests/system/test_follower_forks.py::test_a_remote_store_is_refused_in_a_child_instead_of_waiting_for_ever",
        edits={
            "delta_tracker/stream/storage/storage.py": [
                ("if self._is_remote and os.getpid() not in _processes:", "if False:")
            ]
        },
    ),
    Revert(
        defect="a signal handler that calls stop() hangs while stop() or follow() waits",
        generator="tests/predictor/test_stopping.py::test_a_signal_handler_may_call_stop_during_stop",
        edits={
            "delta_tracker/predictor/follower.py": [
                ("self._control = threading.RLock()", "self._control = threading.Lock()")
            ]
        },
        timeout_seconds=30,
        hangs=True,
    ),
    Revert(
        defect="a thread whose stop() was interrupted runs at the same time as the next one",
        generator="tests/predictor/test_stopping.py::test_an_interrupted_stop_leaves_one_thread_at_most",
        edits={"delta_tracker/predictor/follower.py": [("        self._over.wait()", "        self._thread = None")]},
    ),
    Revert(
        defect="stop() waits for a lookup",
        generator="tests/predictor/test_stopping.py::test_stop_does_not_wait_for_a_lookup",
        edits={"delta_tracker/predictor/lock.py": [("                    check()\n", "")]},
    ),
    Revert(
        defect="the rows of a version that the gate holds stay in memory",
        generator="tests/predictor/test_gate.py::test_a_held_version_is_not_kept_in_memory",
        edits={"delta_tracker/predictor/gate.py": [("raise unraised(self.held)", "raise self.held")]},
    ),
    Revert(
        defect="stop() raises the error that the predictor keeps",
        generator="tests/predictor/test_follower.py::test_the_error_that_is_kept_has_no_traceback",
        edits={"delta_tracker/predictor/follower.py": [("raise unraised(self.error)", "raise self.error")]},
    ),
    Revert(
        defect="each attempt during an outage is logged",
        generator="tests/predictor/test_follower.py::test_each_of_many_outages_is_logged_once",
        edits={
            "delta_tracker/predictor/follower.py": [
                ("kind_of(error) != kind_of(self.error)", "str(error) != str(self.error)")
            ]
        },
    ),
    Revert(
        defect="entries that are skipped are logged at each attempt",
        generator="tests/predictor/test_follower.py::test_a_malformed_entry_is_logged_once_while_it_delays_the_predictor",
        edits={"delta_tracker/stream/cursor.py": [("            self._skipped.add(key)\n", "")]},
    ),
    Revert(
        defect="an error that ends follow() and cannot be copied is logged without its place",
        generator="tests/predictor/test_follower.py::test_an_error_that_ends_the_thread_is_logged_with_its_place",
        edits={
            "delta_tracker/predictor/follower.py": [
                ('following %s: %s", url, what)', 'following %s: %s", url, _described(error))')
            ]
        },
    ),
    Revert(
        defect="an error that is sent to another process loses its cause",
        generator="tests/test_errors.py::test_errors_can_be_sent_to_another_process",
        edits={"delta_tracker/errors.py": [("vars(self), _picklable(self.__cause__)", "vars(self), None")]},
    ),
    Revert(
        defect="dense tensors change before the rows of their version",
        generator="tests/integrations/test_aot_inductor.py::test_dense_tensors_of_a_mapping_change_after_the_last_row",
        edits={
            "delta_tracker/predictor/model_writer.py": [
                (
                    "        for num_rows in self.applier.write(placements):\n",
                    (
                        "        with self.lock.writing(), self.fence.writing():\n"
                        "            receiver.write_dense(contents)\n"
                        "        for num_rows in self.applier.write(placements):\n"
                    ),
                ),
            ],
        },
    ),
]
