"""Fixes in the optimizer's states of versions."""

from __future__ import annotations

from tests.reverts.revert import Revert

_CUT = "tests/sharding/test_optimizer_rows.py::test_a_cut_of_states[waiting]"
_ROWS = "delta_tracker/sharding/optimizer_rows.py"

REVERTS = [
    Revert(
        defect="rows are read between a lookup and its backward pass",
        generator=_CUT,
        edits={"delta_tracker/sharding/kernel_hooks.py": [("        self.in_flight.add(update)\n", "")]},
    ),
    Revert(
        defect="rows are read while a backward pass writes them",
        generator=_CUT,
        edits={
            "delta_tracker/tracker/consumer_handle.py": [
                (
                    "        while self._log.open_updates() or self._lookups_in_flight():",
                    "        while self._lookups_in_flight():",
                )
            ]
        },
    ),
    Revert(
        defect="a graph in a reference cycle stops publishing",
        generator=_CUT,
        edits={"delta_tracker/tracker/consumer_handle.py": [("            gc.collect()", "            pass")]},
    ),
    Revert(
        defect="the learning rate of a restored kernel is that of its optimizer object",
        generator="tests/sharding/test_optimizer_rows.py::test_case[scalars]",
        edits={_ROWS: [('        group["lr"] = scalars["group_lr"]\n', "        pass\n")]},
    ),
    Revert(
        defect="loaded optimizer states are not found",
        generator="tests/sharding/test_optimizer_rows.py::test_case[written]",
        edits={_ROWS: [("(state.data_ptr(), state._version)  # noqa", "(state.data_ptr(), 0)  # noqa")]},
    ),
]
