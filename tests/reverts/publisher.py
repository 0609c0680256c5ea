"""Fixes in how a publisher's ranks find each other."""

from __future__ import annotations

from tests.reverts.revert import Revert

REVERTS = [
    Revert(
        defect="a rank that dies while a group is made or used is torch's own error",
        generator="tests/test_building.py::test_a_rank_killed_while_it_builds_a_publisher_is_reported",
        edits={
            "delta_tracker/process_group.py": [
                (
                    "    except RuntimeError as error:  # DistError is one",
                    "    except EOFError as error:  # DistError is one",
                ),
            ],
        },
    ),
    Revert(
        defect="ranks do not meet before a group is made",
        generator="tests/test_building.py::test_a_publisher_that_one_rank_builds_alone_is_refused",
        edits={
            "delta_tracker/process_group.py": [
                (
                    "            number = meeting.attend(self.rank, self.world_size)\n",
                    "            number = 0 * id(meeting)\n",
                ),
            ],
        },
    ),
]
