"""Faults of the command line, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import Replaces
from tests.reverts.revert import Revert

REVERTS = {
    "tests/cli/test_dcp_checkpoint.py::test_torchrec_loads_what_a_trainer_published[RowWiseAdagrad]": [
        Revert(
            "the states in a checkpoint have keys that TorchRec does not ask for",
            Replaces("dcp_checkpoint._with_states", 'f"{_}.{_}"', "_"),
        ),
        Revert(
            "a checkpoint has the row-wise states of the first column range only",
            Replaces("dcp_checkpoint._target", "_[_]", "_[0]"),
        ),
        Revert(
            "a checkpoint lacks the dense tensors that are in the training states only",
            Replaces("dcp_checkpoint._with_states", "dense(...)", "{}"),
        ),
    ],
    "tests/cli/test_history.py::test_a_clock_that_is_set_back_a_little_does_not_turn_the_axis": [
        Revert(
            "the time axis of a report runs backwards",
            Replaces("Manifest.seconds_since", "max(0.0, _)", "_"),
        ),
    ],
}
