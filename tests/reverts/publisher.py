"""Fixes in how a publisher's ranks find each other."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS = [
    Revert(
        defect="an error of a callback during a wait loses the group",
        generator="tests/publisher/test_building.py::test_an_error_of_a_callback_during_a_wait_does_not_lose_the_group",
        edits={
            "delta_tracker/distributed.py": [
                (
                    "            if meanwhile is not None:\n                meanwhile()\n",
                    (
                        "            if meanwhile is not None:\n"
                        "                with self._typed_errors():\n"
                        "                    meanwhile()\n"
                    ),
                )
            ]
        },
    ),
    Revert(
        defect="a publisher that cannot start keeps its name",
        generator="tests/publisher/test_comfort.py::test_a_publisher_that_lost_a_rank_at_its_start_leaves_its_name",
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "        except BaseException:\n            self._recorder.close()\n            raise\n",
                    "        except BaseException:\n            raise\n",
                )
            ]
        },
    ),
    Revert(
        defect="a rank that is interrupted at the start of a step is one vote behind the others",
        generator="tests/publisher/test_publisher.py::"
        "test_a_rank_that_is_interrupted_at_the_start_of_a_step_stays_in_step",
        edits={
            "delta_tracker/publisher/publisher.py": [
                ("            self._still.look()\n            while", "            while"),
                (
                    "        try:\n            number = self._num_steps + 1\n",
                    "        self._still.look()\n        try:\n            number = self._num_steps + 1\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a publisher writes no heartbeat and fails if the system has no more threads later",
        generator="tests/recovery/test_standby.py::test_a_system_that_has_no_more_threads_still_gets_heartbeats",
        edits={
            "delta_tracker/publisher/heartbeats.py": [
                (
                    "self._job: Future[None] = self._worker.submit(lambda: None)",
                    "self._job: Future[None] = Future()\n        self._job.set_result(None)",
                ),
            ],
        },
    ),
    Revert(
        defect="flush() leaves the other ranks waiting for a message that an interrupt prevented",
        generator="tests/publisher/test_publisher.py::"
        "test_a_message_that_was_not_sent_is_sent_by_flush_and_close[flush]",
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "        self._land()\n        self._exchange.send_owed_message()\n",
                    "        self._land()\n",
                ),
            ],
        },
    ),
    Revert(
        defect="close() leaves the other ranks waiting for a message that an interrupt prevented",
        generator="tests/publisher/test_publisher.py::"
        "test_a_message_that_was_not_sent_is_sent_by_flush_and_close[close]",
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "                self._exchange.send_owed_message()\n            self._source.close",
                    "                pass\n            self._source.close",
                ),
            ],
        },
    ),
    Revert(
        defect="a close that was interrupted cannot be repeated",
        generator="tests/publisher/test_comfort.py::test_a_close_that_was_interrupted_is_completed_by_the_next",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("if forgets and not self.handle.is_released:", "if forgets:")
            ]
        },
    ),
    Revert(
        defect="a rank that was interrupted while it waited counts as present, and another waits for it",
        generator="tests/publisher/test_building.py::"
        "test_a_rank_that_is_interrupted_while_it_waits_does_not_count_as_present",
        edits={
            "delta_tracker/distributed.py": [
                (
                    "        except BaseException:\n            # The other",
                    "        except ZeroDivisionError:\n            # The other",
                ),
            ],
        },
    ),
    Revert(
        defect="with top_k, the ranks wait for each other if one of them is interrupted before its read",
        generator="tests/publisher/test_publisher.py::test_an_interrupt_ends_the_wait_for_another_rank[2]",
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "begin the version\n                    self._expect_read(count)\n",
                    "begin the version\n                    pass\n",
                ),
            ],
        },
    ),
    Revert(
        defect="after an interrupt, a rank votes on a version that the other ranks have finished",
        generator="tests/publisher/test_publisher.py::test_ranks_agree_on_a_repair_after_an_interrupt",
        edits={
            "delta_tracker/publisher/publisher.py": [
                ("                    self._flight = None  # if this", "                    # if this"),
                (
                    "                    self._finish(flight.read, committed)\n",
                    "                    self._flight = None\n" + 20 * " " + "self._finish(flight.read, committed)\n",
                ),
            ],
        },
    ),
    Revert(
        defect="with top_k, the other ranks wait for a rank whose dense tensors cannot be read",
        generator="tests/publisher/test_publisher.py::test_all_ranks_report_dense_tensors_that_cannot_be_published",
        edits={
            "delta_tracker/publisher/publisher.py": [
                ("            self._source.fail_expected_read()\n        return", "            pass\n        return"),
            ],
        },
    ),
    Revert(
        defect="after an interrupt, one rank repairs and another selects the top k, and both wait for each other",
        generator="tests/publisher/test_publisher.py::test_ranks_agree_on_a_repair_after_an_interrupt",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("top_k = None if is_repairing else", "top_k = None if self._is_repairing else"),
            ],
        },
    ),
    Revert(
        defect="a publisher begins with a snapshot after a restart although the stream has a recent one",
        generator="tests/publisher/test_cadence.py::test_a_restarted_trainer_counts_from_the_last_snapshot",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "return head.snapshot is None or head.version + 1 - head.snapshot >= every",
                    "return head.kind == 'claim' or head.version + 1 - head.snapshot >= every",
                ),
            ],
        },
    ),
    Revert(
        defect="the newest snapshot of the stream is not counted from",
        generator="tests/publisher/test_cadence.py::test_a_restarted_trainer_counts_from_the_last_snapshot",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "return head.snapshot is None or head.version + 1 - head.snapshot >= every",
                    "return head.snapshot is None",
                ),
            ],
        },
    ),
    Revert(
        defect="a rank that dies while a group is made or used is torch's own error",
        generator="tests/publisher/test_building.py::test_a_rank_killed_while_it_builds_a_publisher_is_reported",
        edits={
            "delta_tracker/distributed.py": [
                (
                    "    except RuntimeError as error:  # base of DistError",
                    "    except EOFError as error:  # base of DistError",
                ),
            ],
        },
    ),
    Revert(
        defect="ranks do not meet before a group is made",
        generator="tests/publisher/test_building.py::test_a_publisher_that_one_rank_builds_alone_is_refused",
        edits={
            "delta_tracker/distributed.py": [
                (
                    "            number = meeting.attend(self.rank, self.world_size)\n",
                    "            number = 0 * id(meeting)\n",
                ),
            ],
        },
    ),
    Revert(
        defect="a background thread starts collectives",
        generator="tests/system/test_collectives.py::test_no_background_thread_starts_a_collective",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "self._writer.tally(share, count.most.num_bytes)",
                    "self._worker.submit(self._writer.tally, share, count.most.num_bytes).result()",
                ),
            ],
        },
    ),
    Revert(
        defect="a rank that cannot read its rows leaves the others waiting in top-k",
        generator="tests/tracker/test_top_k.py::test_a_rank_that_cannot_read_does_not_keep_the_others_waiting",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/tracker/delta_reader.py": [("if isinstance(top_k, TopK):", "if not top_k:")],
        },
    ),
    Revert(
        defect="Ctrl-C is not heard while a rank waits for another",
        generator="tests/publisher/test_publisher.py::test_an_interrupt_ends_the_wait_for_another_rank",
        timeout_seconds=240.0,
        edits={"delta_tracker/distributed.py": [("work.wait(_INTERRUPT_PAUSE)", "work.wait()")]},
    ),
    Revert(
        defect="a closed publisher leaves its thread",
        generator="tests/system/test_soak.py::test_all_components_at_once_never_wait_long_and_leave_no_thread",
        edits={"delta_tracker/publisher/publisher.py": [("        self._worker.shutdown()\n", "")]},
    ),
    Revert(
        defect="a publisher keeps the rows of a version that failed",
        generator="tests/publisher/test_publisher.py::test_an_error_that_is_raised_again_keeps_no_traceback[forgotten_errors]",
        edits={
            "delta_tracker/publisher/publisher.py": [
                ("        self._error = unraised(error)\n", "        self._error = error\n")
            ]
        },
    ),
    Revert(
        defect="the traceback of a lost rank grows with each call",
        generator="tests/publisher/test_publisher.py::test_an_error_that_is_raised_again_keeps_no_traceback[lost_rank_again]",
        edits={
            "delta_tracker/distributed.py": [
                ("            self._lost = unraised(error)\n", "            self._lost = error\n"),
                (
                    "unraised(self._lost)\n        assert self._gloo",
                    "self._lost\n        assert self._gloo",
                ),
            ]
        },
    ),
    Revert(
        defect="ranks with different encodings publish",
        generator="tests/publisher/test_cadence.py::test_ranks_with_different_arguments_are_refused",
        edits={
            "delta_tracker/publisher/publisher.py": [('"top_k", "encoding", "vote_every"', '"top_k", "vote_every"')]
        },
    ),
    Revert(
        defect="a number as text raises a TypeError",
        generator="tests/test_arguments.py::test_what_is_not_a_finite_number_is_refused",
        edits={
            "delta_tracker/arguments.py": [
                ("    if isinstance(value, bool) or not isinstance(value, Real):\n        return False\n", "")
            ]
        },
    ),
]
