"""Fixes in how a publisher's ranks find each other."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS = [
    Revert(
        defect="a rank that dies while a group is made or used is torch's own error",
        generator="tests/publisher/test_building.py::test_a_rank_killed_while_it_builds_a_publisher_is_reported",
        edits={
            "delta_tracker/distributed.py": [
                (
                    "    except RuntimeError as error:  # DistError is one",
                    "    except EOFError as error:  # DistError is one",
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
        defect="the training thread starts collectives on the group of the publisher's thread",
        generator="tests/system/test_collectives.py::test_no_thread_but_the_publishers_starts_a_collective",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/publisher/ranks.py": [
                (
                    "self._thread.submit(self._all_gather, self._group, json.dumps(message)).result()",
                    "self._all_gather(self._group, json.dumps(message))",
                ),
            ],
        },
    ),
    Revert(
        defect="a closed publisher leaves its thread",
        generator="tests/system/test_soak.py::test_everything_at_once_waits_for_nothing_and_leaves_nothing",
        edits={"delta_tracker/publisher/publisher.py": [("        self._worker.shutdown()\n", "")]},
    ),
]
