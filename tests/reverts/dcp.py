"""Fixes in the export of checkpoints for TorchRec."""

from __future__ import annotations

from tests.reverts.revert import Revert

_FILE = "delta_tracker/cli/dcp_checkpoint.py"
_LOADS = "tests/cli/test_dcp_checkpoint.py::test_torchrec_loads_what_a_trainer_published"

REVERTS = [
    Revert(
        defect="the states in a checkpoint have keys that TorchRec does not ask for",
        generator=f"{_LOADS}[RowWiseAdagrad]",
        edits={_FILE: [('{f"{table}.{key}": rooms', "{key: rooms")]},
    ),
    Revert(
        defect="a checkpoint has the row-wise states of the first column range only",
        generator=f"{_LOADS}[RowWiseAdagrad]",
        edits={_FILE: [("by_range[number]) for", "by_range[0]) for")]},
    ),
    Revert(
        defect="a checkpoint lacks the dense tensors that are in the training states only",
        generator=f"{_LOADS}[RowWiseAdagrad]",
        edits={_FILE: [("Library(training).dense() | ", "")]},
    ),
    Revert(
        defect="the raw ids of a table are missing in a checkpoint without a word",
        generator="tests/cli/test_dcp_checkpoint.py::test_what_a_checkpoint_cannot_have_is_refused",
        edits={_FILE: [("in path[-1].identities:", "in ():")]},
    ),
]
