"""Fixes in how a publisher copies rows from a device, and in how CUDA streams are ordered."""

from __future__ import annotations

from tests.reverts.revert import Revert

_ANY_ORDER = "tests/publisher/test_host_copies.py::test_versions_are_exact_in_any_order_of_streams"
_COPIES = "delta_tracker/publisher/host_copies.py"
_COPY = "delta_tracker/host_copy.py"
_FENCE = "delta_tracker/cuda_fence.py"
_LOG = "delta_tracker/tracker/change_log.py"


def _in_any_order(defect: str, file: str, now: str, before: str) -> Revert:
    return Revert(defect=defect, generator=_ANY_ORDER, edits={file: [(now, before)]})


REVERTS = [
    _in_any_order(
        "rows are copied to the host before they are gathered",
        _COPY,
        "            stream.wait_stream(current)\n",
        "",
    ),
    _in_any_order(
        "rows are gathered into a buffer that is still copied",
        _COPIES,
        "                torch.cuda.current_stream(device).wait_event(copies[-len(buffers)].copied)",
        "                pass",
    ),
    _in_any_order("a buffer is reused before it was copied", _COPY, "source.record_stream(stream)", "source.detach()"),
    _in_any_order(
        "a version is written before its rows are on the host",
        _COPIES,
        "waits.append(self._start(layout, host, device).result)",
        "self._start(layout, host, device)",
    ),
    _in_any_order(
        "a snapshot reads rows before earlier updates", _COPIES, "                stream.wait_event(ready)\n", ""
    ),
    _in_any_order(
        "a snapshot's rows are written before they are on the host",
        _COPY,
        "            self.copied.synchronize()\n",
        "            pass\n",
    ),
    _in_any_order(
        "a read does not wait for the stream of training", _FENCE, "stream.wait_stream(other)", "other.query()"
    ),
    _in_any_order(
        "rows are marked on another stream while they are read",
        _LOG,
        "            self._fence.enter(key)\n",
        "",
    ),
    Revert(
        defect="a read in an open batch hides the batch's write from the next read",
        generator="tests/test_cuda_fence.py::test_a_use_that_continues_is_waited_for_when_it_has_ended",
        edits={_FENCE: [("for streams in self._open.values() if device in streams]", "for streams in ()]")]},
    ),
    Revert(
        defect="memory of the log is reused while another stream reads it",
        generator="tests/test_cuda_fence.py::test_memory_that_another_stream_uses_is_not_reused",
        edits={_FENCE: [("tensor.record_stream(stream)", "tensor.detach()")]},
    ),
    Revert(
        defect="a cut waits for each table",
        generator="tests/publisher/test_host_copies.py::test_a_cut_waits_a_constant_number_of_times",
        edits={
            "delta_tracker/tracker/row_sets/torch.py": [
                (
                    'if len(sets) < 2 or sets[0].device.type == "cpu":  # noqa: PLR2004  one set needs no counts',
                    "if sets:",
                )
            ]
        },
    ),
    Revert(
        defect="a rank that failed to vote waits for the next exchange",
        generator="tests/publisher/test_cadence.py::test_a_rank_that_fails_to_vote_votes_at_its_next_call",
        timeout_seconds=240.0,
        edits={
            "delta_tracker/publisher/publisher.py": [
                (
                    "            while self._num_owed:  # more than one if the other ranks are ahead\n",
                    "            while self._num_owed and number % self._vote_every == 0:\n",
                )
            ]
        },
    ),
]
