"""Faults of publishers, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import Loses
from tests.reverts.revert import Revert

REVERTS = {
    "tests/publisher/test_identities.py::test_each_raw_id_gets_the_trainers_answer": [
        Revert("rows are published with the raw ids of the version before"),
    ],
    "tests/publisher/test_host_copies.py::test_versions_are_exact_in_any_order_of_streams": [
        Revert("rows are copied to the host before they are gathered", Loses("HostCopy._start", "wait_stream(...)")),
        Revert("a buffer is reused before it was copied", Loses("HostCopy._start", "record_stream(...)")),
        Revert(
            "a snapshot's rows are written before they are on the host", Loses("HostCopy.result", "synchronize(...)")
        ),
        Revert("a read does not wait for the stream of training", Loses("StreamFence.enter", "wait_stream(...)")),
        Revert("rows are gathered into a buffer that is still copied"),
        Revert("a version is written before its rows are on the host"),
        Revert("a snapshot reads rows before earlier updates"),
        Revert("rows are marked on another stream while they are read"),
    ],
}
