"""Promises of polling, catching up and canaries."""

from __future__ import annotations

from tests.reverts.revert import Revert

_POLLING = "tests/predictor/test_polling.py::"
_SETTLING = "tests/predictor/test_settling.py::"
_CATCH_UP = "tests/predictor/test_catch_up.py::"
_CANARY = "tests/predictor/test_canary.py::"
_SCHEDULE = "delta_tracker/predictor/polling.py"
_CURSOR = "delta_tracker/stream/cursor.py"
_PREDICTOR = "delta_tracker/predictor/predictor.py"

REVERTS: list[Revert] = [
    Revert(
        defect="polls stay rare after a version",
        generator=_POLLING + "test_the_interval_grows_while_no_version_comes_and_a_version_resets_it",
        edits={_SCHEDULE: [("self._hinted, self._current = None, self.first_seconds", "self._hinted = None")]},
    ),
    Revert(
        defect="a version without a hint does not end the trust in hints",
        generator=_POLLING + "test_right_hints_make_polls_rare_until_one_is_missing",
        edits={_SCHEDULE: [("        elif not self._is_moving:\n            self._num_right = 0\n", "")]},
    ),
    Revert(
        defect="a resting follower lists the log",
        generator=_POLLING + "test_a_resting_follower_sends_few_requests_and_lists_nothing",
        edits={_CURSOR: [("own is not None and is_own and", "False and")]},
    ),
    Revert(
        defect="a deleted entry after a claim is not noticed while the pointer is old",
        generator=_POLLING + "test_a_claim_does_not_prove_that_the_next_version_exists",
        edits={_CURSOR: [(' and (own.kind != "claim" or self.log.is_surely_newest(own))', "")]},
        timeout_seconds=90.0,
        hangs=True,
    ),
    Revert(
        defect="a stream without a pointer is listed at a constant interval",
        generator=_POLLING + "test_a_stream_without_a_pointer_is_listed_less_and_less_often",
        edits={
            "delta_tracker/predictor/follower.py": [("longer if is_well else", "_GAP_CHECK_SECONDS if is_well else")]
        },
    ),
    Revert(
        defect="a long wait for hints delays the heartbeats",
        generator=_POLLING + "test_a_rare_poll_does_not_delay_heartbeats",
        edits={"delta_tracker/predictor/follower.py": [("min(left, _BEAT_SECONDS)", "left")]},
        timeout_seconds=90.0,
        hangs=True,
    ),
    Revert(
        defect="a fault of a cache is believed at once",
        generator=_SETTLING + "test_random_faults_of_a_cache_cause_no_resync_and_no_storm",
        edits={_PREDICTOR: [("if self._settling is not None and isinstance(fault, CACHE_FAULTS):", "if False:")]},
    ),
    Revert(
        defect="an object is read past the cache at each attempt",
        generator=_SETTLING + "test_a_fault_of_the_origin_is_believed_after_a_while",
        edits={"delta_tracker/predictor/settling.py": [(" - self._storage.doubted\n", "\n")]},
        timeout_seconds=60.0,
        hangs=True,
    ),
    Revert(
        defect="a version that retention deleted is waited for",
        generator=_SETTLING + "test_a_version_that_retention_deleted_is_not_waited_for",
        edits={_PREDICTOR: [("settling.is_over or self._is_retired(place, settling)", "settling.is_over")]},
    ),
    Revert(
        defect="stale objects of a cache count as failures of the store",
        generator=_SETTLING + "test_a_stale_cache_does_not_count_as_a_failing_store",
        edits={
            _PREDICTOR: [
                (
                    "        except StaleCacheError:\n            raise\n        except StorageError as fault:",
                    "        except StorageError as fault:",
                ),
                (
                    "        except StaleCacheError:\n            raise\n        except (NoSnapshot",
                    "        except (NoSnapshot",
                ),
            ]
        },
    ),
    Revert(
        defect="catching up reads each version",
        generator=_CATCH_UP + "test_a_reader_that_is_far_behind_reads_few_versions",
        edits={_CURSOR: [("        merged = self._merged_ahead(held, newest)\n", "        merged = None\n")]},
    ),
    Revert(
        defect="a damaged merged version causes a resync",
        generator=_CATCH_UP + "test_a_damaged_merged_version_costs_nothing_but_time",
        edits={_PREDICTOR: [("            self._cursor.avoid(manifest)\n", "            raise\n")]},
    ),
    Revert(
        defect="a merged version hides a drift from the gate",
        generator=_CATCH_UP + "test_a_gate_with_a_drift_sees_every_version",
        edits={_PREDICTOR: [("gate is None or gate.max_drift is None", "True")]},
    ),
    Revert(
        defect="a canary starts from the newest snapshot",
        generator=_CANARY + "test_random_histories_are_never_above_the_bound",
        edits={_CURSOR: [("self._starts() if self.allows is None else", "self._starts() if True else")]},
    ),
    Revert(
        defect="a canary catches up beyond its bound",
        generator=_CANARY + "test_random_histories_are_never_above_the_bound",
        edits={_CURSOR: [("            and (self.allows is None or self.allows(manifest))\n", "")]},
    ),
    Revert(
        defect="a canary resyncs beyond its bound",
        generator=_CANARY + "test_a_canary_resyncs_to_a_snapshot_below_the_bound",
        edits={
            _CURSOR: [
                ("self._starts() if self.allows is None else", "self._starts() if True else"),
                ("if self.allows is not None and not self.allows(snapshot):", "if False:"),
            ]
        },
    ),
]
