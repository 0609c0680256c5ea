"""Waits between CUDA streams. Each is necessary: without it, the simulated streams find an order with wrong rows."""

from __future__ import annotations

from tests.reverts.revert import Revert

_FENCE = "delta_tracker/predictor/table_fence.py"
_TORN = "tests/predictor/test_table_fence.py::test_lookups_on_streams_see_no_torn_rows"
_PREFETCH = "tests/sharding/test_prefetch_order.py::test_reads_and_prefetches_in_any_order_corrupt_no_row"

REVERTS = [
    Revert(
        defect="a lookup does not wait on its stream for the last write of rows",
        generator=_TORN,
        edits={
            _FENCE: [
                (
                    "                stream.wait_event(self._written[device])\n        return streams\n",
                    "                pass\n        return streams\n",
                )
            ]
        },
    ),
    Revert(
        defect="a lookup leaves no event for the next write",
        generator=_TORN,
        edits={_FENCE: [("                self._read[stream].record(stream)\n", "")]},
    ),
    Revert(
        defect="a write of rows does not wait for lookups on other streams",
        generator=_TORN,
        edits={_FENCE: [("                    stream.wait_event(event)\n", "                    pass\n")]},
    ),
    Revert(
        defect="a write of rows does not wait for the last write on another stream",
        generator="tests/predictor/test_table_fence.py::test_writes_on_different_streams_are_ordered",
        edits={
            _FENCE: [
                (
                    "                stream.wait_event(self._written[device])\n            for other",
                    "                pass\n            for other",
                )
            ]
        },
    ),
    Revert(
        defect="a write of rows leaves no event for lookups",
        generator=_TORN,
        edits={
            _FENCE: [
                (
                    "{device: torch.cuda.current_stream(device).record_event() for device in self.devices}",
                    "{}",
                )
            ]
        },
    ),
    Revert(
        defect="dense tensors are written during lookups on other streams",
        generator=_TORN,
        edits={
            "delta_tracker/predictor/model_writer.py": [
                (
                    "with self.lock.writing(), self.fence.writing():\n            receiver",
                    "with self.lock.writing():\n            receiver",
                )
            ]
        },
    ),
    Revert(
        defect="a table that moves to a device is written during lookups that were launched before",
        generator="tests/predictor/test_table_fence.py::"
        "test_a_table_that_moves_to_the_device_is_not_written_during_lookups",
        edits={_FENCE: [("                torch.cuda.synchronize(device)\n", "")]},
    ),
    Revert(
        defect="any number of writes of rows is queued on a device, with the memory of each",
        generator="tests/predictor/test_table_fence.py::test_queued_writes_are_bounded",
        edits={_FENCE: [("                event.synchronize()\n", "                pass\n")]},
    ),
    Revert(
        defect="rows are copied to a device from pageable memory, inside the lock",
        generator="tests/predictor/test_table_fence.py::test_writes_wait_for_no_device_and_copy_no_pageable_memory",
        edits={"delta_tracker/rows.py": [("tensor.pin_memory().to(device, non_blocking=True)", "tensor.to(device)")]},
    ),
    Revert(
        defect="a flush of a cache does not wait for the prefetches before it",
        generator=_PREFETCH,
        edits={"delta_tracker/sharding/prefetch_order.py": [("    current.wait_stream(prefetches)\n", "")]},
    ),
    Revert(
        defect="later prefetches do not wait for a flush of the cache",
        generator=_PREFETCH,
        edits={
            "delta_tracker/sharding/prefetch_order.py": [
                ("        prefetches.wait_stream(current)\n", "        pass\n"),
            ],
        },
    ),
    Revert(
        defect="hooks read cached rows while a prefetch moves them",
        generator=_PREFETCH,
        edits={
            "delta_tracker/sharding/kernel_memory.py": [
                (
                    "        with between_prefetches(tbe_of(self._module)):  # they",
                    "        with one_cut():  # they",
                )
            ]
        },
    ),
    Revert(
        defect="cached rows of a serving model stay as they were",
        generator="tests/sharding/test_row_cache.py::test_cached_rows_are_written_in_place",
        edits={
            "delta_tracker/sharding/row_cache.py": [
                ("        memory.index_copy_(0, found.index_select(0, source).clamp(min=0), new)\n", "")
            ]
        },
    ),
]
