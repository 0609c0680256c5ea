"""Fixes of standbys and takeovers."""

from __future__ import annotations

from tests.reverts.revert import Revert

_TESTS = "tests/recovery/test_standby.py::"
_FAILED = _TESTS + "test_a_failure_after_the_claim_keeps_it_and_a_retry_completes"
_DAMAGED = _TESTS + "test_a_missing_or_damaged_version_is_passed_by_a_snapshot"
_STUCK = _TESTS + "test_a_standby_that_cannot_apply_a_version_does_not_fence_the_trainer"
_MISPLACED = _TESTS + "test_other_serving_streams_than_those_of_the_trainer_are_refused"
_CLAIMS = "[self._claim_serving(exchange, claimed, number) for number in range(len(self._serving))]"
_STANDBY = "delta_tracker/recovery/standby.py"
_SERVING = "delta_tracker/recovery/serving_streams.py"
_FOLLOWING = "delta_tracker/recovery/following.py"

REVERTS = [
    Revert(
        defect="a publisher that was alive again before the claim is fenced",
        generator=_TESTS + "test_a_heartbeat_while_the_standby_catches_up_prevents_the_claim",
        edits={_STANDBY: [("                self._check_still_silent(verdict)\n", "")]},
    ),
    Revert(
        defect="a restore between two calls of a standby mixes rows of two versions",
        generator=_TESTS + "test_a_restore_between_two_calls_of_a_standby_is_noticed",
        edits={_FOLLOWING: [("and not is_following(self._job.model):", "and False:")]},
    ),
    Revert(
        defect="a store that is missing after a failed takeover looks like a stream without versions",
        generator=_TESTS + "test_a_store_that_is_missing_after_a_failed_takeover_is_not_an_empty_stream",
        edits={_STANDBY: [("return self._seen if self.version", "return None if self.version")]},
    ),
    Revert(
        defect="a standby that last saw a claim does not see later versions, once retention deleted those after it",
        generator="tests/stream/test_liveness.py::"
        "test_the_newest_entry_is_found_after_retention_deleted_all_but_a_claim_of_those_seen",
        edits={"delta_tracker/stream/liveness.py": [('if head.kind == "claim" and not', "if False and not")]},
    ),
    Revert(
        defect="a takeover ends at the version that the standby has applied",
        generator=_FAILED,
        edits={_STANDBY: [("        version = claimed.entry.version\n", "        version = self.version\n")]},
    ),
    Revert(
        defect="the position of a standby moves before the rows are written",
        generator=_DAMAGED,
        edits={
            _FOLLOWING: [
                (
                    "        self._writer.write(entry)\n        self._applied = entry\n",
                    "        self._applied = entry\n        self._writer.write(entry)\n",
                )
            ]
        },
    ),
    Revert(
        defect="the states of followed rows are not written",
        generator=_TESTS + "test_a_standby_equals_the_trainer_at_each_version_and_continues",
        edits={
            "delta_tracker/recovery/row_writer.py": [
                (
                    "as_tables(each, entry.states.get(each.block.table))]",
                    "as_tables(each, entry.states.get(each.block.table))[:1]]",
                )
            ]
        },
    ),
    Revert(
        defect="a model can train before its job has claimed the serving streams",
        generator=_FAILED,
        edits={
            "delta_tracker/recovery/restore.py": [
                ("        if not self._keeps_mark:\n            unmark(model)\n", "        unmark(model)\n")
            ]
        },
    ),
    Revert(
        defect="a takeover that is tried again claims the stream again",
        generator=_FAILED,
        edits={_STANDBY: [("        return self._writer\n", "        return secrets.token_hex(16)\n")]},
    ),
    Revert(
        defect="a standby claims the stream although a version was committed after its look",
        generator=_TESTS + "test_a_version_committed_during_the_decision_prevents_the_claim",
        edits={
            _STANDBY: [
                (
                    "            return self._log.claim(after=after, writer=writer)\n",
                    "            return self._log.claim(writer=writer)\n",
                )
            ]
        },
    ),
    Revert(
        defect="two standbys follow one request, and the second one fences the first",
        generator=_TESTS + "test_one_request_lets_one_standby_take_over",
        edits={
            _STANDBY: [
                ('            if head.generation != verdict["generation"] and not ', "            if False and not ")
            ]
        },
    ),
    Revert(
        defect="a request for a silent publisher fences it after it has recovered",
        generator=_TESTS + "test_follow_ends_by_a_request_by_silence_or_without_a_stream",
        edits={
            "delta_tracker/stream/takeover_request.py": [
                ("    return request if request.force or not has_lapsed else None\n", "    return request\n")
            ]
        },
    ),
    Revert(
        defect="a standby with a rank that cannot read the store fences the trainer",
        generator=_TESTS + "test_follow_ends_by_a_request_by_silence_or_without_a_stream",
        edits={
            _STANDBY: [('_first(messages, "outage" if verdict.get("is_own") else "obstacle") if is_due else ""', '""')]
        },
    ),
    Revert(
        defect="a standby that cannot apply a version claims the stream after a request",
        generator=_STUCK,
        edits={_STANDBY: [('"outage" if verdict.get("is_own") else "obstacle") if is_due', '"outage") if is_due')]},
    ),
    Revert(
        defect="take_over() claims the stream although a version cannot be applied",
        generator=_STUCK,
        edits={_STANDBY: [("                if not force:\n", "                if False:\n")]},
    ),
    Revert(
        defect="a malformed head ends follow()",
        generator=_STUCK,
        edits={
            _STANDBY: [
                (
                    "        except (MalformedError, StorageError) as error:\n            self._log_once(",
                    "        except StorageError as error:\n            self._log_once(",
                )
            ]
        },
    ),
    Revert(
        defect="a standby creates the directory of a wrong serving url, and claims a new stream there",
        generator=_MISPLACED,
        edits={
            _SERVING: [
                ("open_storage(each) for each in urls]  # a", "open_storage(each, create=True) for each in urls]  # a"),
                (
                    '    if head is None:\n        remedy = "Check the url, and',
                    '    if head is None:\n        return ""\n        remedy = "Check the url, and',
                ),
            ]
        },
    ),
    Revert(
        defect="a standby claims another serving stream than the trainer's",
        generator=_MISPLACED,
        edits={_SERVING: [("            if len(others) > sum(", "            if False and len(others) > sum(")]},
    ),
    Revert(
        defect="rows of a failed takeover stay, although the log does not have them any more",
        generator=_TESTS + "test_rows_of_a_version_that_is_not_in_the_log_any_more_do_not_stay",
        edits={
            _STANDBY: [
                (
                    f"            beat()\n            serving = {_CLAIMS}\n        except BaseException:\n",
                    "            beat()\n        except BaseException:\n",
                ),
                (
                    "            raise\n        return restored, serving\n",
                    f"            raise\n        return restored, {_CLAIMS}\n",
                ),
            ]
        },
    ),
    Revert(
        defect="a standby that was suspended takes the serving stream from the job that has taken over",
        generator=_TESTS + "test_a_suspended_standby_does_not_fence_the_job_that_has_taken_over",
        edits={_SERVING: [("after=head.link, writer=self._writers[number]", "writer=self._writers[number]")]},
    ),
    Revert(
        defect="rows of a snapshot that was written in part stay after the next takeover",
        generator=_FAILED,
        edits={
            _STANDBY: [("                self._following.overwritten(restoration.plan)\n", "                pass\n")]
        },
    ),
    Revert(
        defect="rows of a version that was written in part stay, although the log does not have it any more",
        generator=_TESTS + "test_rows_of_a_version_that_is_not_in_the_log_any_more_do_not_stay",
        edits={
            _FOLLOWING: [("        return self._applied if is_there else None\n", "        return self._applied\n")]
        },
    ),
    Revert(
        defect="a version does not have the positions of the serving streams",
        generator=_TESTS + "test_the_serving_stream_continues_after_a_takeover",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("            place = note if isinstance(note, Mapping) else None\n", "            place = None\n")
            ]
        },
    ),
    Revert(
        defect="a stream continues from a position after which rows were read for another purpose",
        generator=_TESTS + "test_the_serving_stream_continues_after_a_takeover",
        edits={
            "delta_tracker/tracker/checkpoint/tracker_checkpoint.py": [
                (
                    "        return self._annotations.get(consumer) if is_current else None\n",
                    "        return self._annotations.get(consumer)\n",
                )
            ]
        },
    ),
    Revert(
        defect="a path continues from rows of another history",
        generator="tests/recovery/test_path.py::test_a_path_from_a_place_uses_the_merged_deltas_after_it",
        edits={
            "delta_tracker/recovery/path.py": [
                (
                    "self._log.merged(after=applied.version) if each.first > applied.version]",
                    "self._log.merged(after=applied.version)]",
                ),
            ]
        },
    ),
    Revert(
        defect="a publisher looks dead while another rank writes",
        generator=_TESTS + "test_a_publisher_leaves_heartbeats_while_another_rank_writes",
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "self._count_votes(None if flight is None or self._beats is None else self._beat)",
                    "self._count_votes()",
                )
            ]
        },
    ),
    Revert(
        defect="an alert does not see the first failure of a takeover for most reasons",
        generator=_TESTS + "test_an_alert_sees_each_failed_takeover",
        edits={
            "delta_tracker/recovery/standby_gauges.py": [
                ("(*(failure.__name__ for failure in _FAILURES), _OTHER):", '("StorageError",):')
            ]
        },
    ),
    Revert(
        defect="a loop that calls step() goes on after its publisher is fenced",
        generator=_TESTS + "test_a_training_loop_with_step_ends_when_its_publisher_is_fenced",
        edits={
            "delta_tracker/publisher/publisher.py": [
                ("        return isinstance(self._error, FencedError)\n", "        return False\n")
            ]
        },
    ),
    Revert(
        defect="a publisher that could not be built uses up the claim of a takeover",
        generator=_TESTS + "test_a_version_committed_during_the_decision_prevents_the_claim",
        edits={"delta_tracker/publisher/publisher.py": [("            self._writer.release()\n", "")]},
    ),
    Revert(
        defect="another standby refuses its silence, because the one that takes over leaves one heartbeat",
        generator=_TESTS + "test_one_request_lets_one_standby_take_over",
        edits={_STANDBY: [("PublisherPulse(self._storage, 0.0)", "PublisherPulse(self._storage)")]},
    ),
    Revert(
        defect="a standby that is stuck looks healthy",
        generator=_STUCK,
        edits={
            "delta_tracker/stream/liveness.py": [
                ("            version=version,\n", "            version=None if head is None else head.version,\n")
            ]
        },
    ),
    Revert(
        defect="the lag of a standby stays in the metrics after it has taken over",
        generator=_TESTS + "test_one_request_lets_one_standby_take_over",
        edits={
            "delta_tracker/recovery/standby_gauges.py": [("                gauge.remove()\n", "                pass\n")]
        },
    ),
    Revert(
        defect="a publisher is fenced by its own version, of which it did not learn",
        generator=_TESTS + "test_a_version_that_was_believed_to_have_failed_is_part_of_the_history",
        edits={
            "delta_tracker/stream/log.py": [
                (
                    "            return taken\n        newest = (taken if",
                    "            pass\n        newest = (taken if",
                ),
            ]
        },
    ),
    Revert(
        defect="the heartbeats of publishers that have ended stay",
        generator="tests/stream/test_retention.py::test_heartbeats_of_publishers_that_have_ended_are_removed",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("            (self.publisher_beats, _PUBLISHER_BEAT_NAME, retention.heartbeat_seconds),\n", ""),
            ],
        },
    ),
    Revert(
        defect="delta-tracker takeover replaces a live publisher without --force",
        generator="tests/cli/test_takeover.py::test_a_live_publisher_is_not_replaced_without_force",
        edits={
            "delta_tracker/cli/takeover.py": [
                ("    if signs.silent_seconds < silence:\n", "    if signs.silent_seconds < 0:\n")
            ]
        },
    ),
    Revert(
        defect="delta-tracker inspect calls a publisher silent that has just committed a version",
        generator="tests/cli/test_inspect.py::test_inspect_shows_the_heartbeats_of_the_publisher",
        edits={
            "delta_tracker/cli/survey.py": [
                ("min(committed, self.beat_seconds_ago) > SILENT", "self.beat_seconds_ago > SILENT")
            ]
        },
    ),
    Revert(
        defect="a standby takes over without a serving stream of the trainer, whose publisher goes on",
        generator=_MISPLACED,
        edits={_SERVING: [("            if left_out:\n", "            if False:\n")]},
        timeout_seconds=40.0,
        hangs=True,
    ),
    Revert(
        defect="a recovery stream continues without states after a takeover",
        generator=_MISPLACED,
        edits={"delta_tracker/publisher/publisher.py": [("and url.has_states and states is None", "and False")]},
    ),
]
