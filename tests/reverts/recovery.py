"""Faults of restores and standbys, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Replaces
from tests.reverts.revert import Revert

REVERTS = {
    "tests/recovery/test_collisions.py::test_training_with_evictions_continues_bit_for_bit": [
        Revert("a restored model keeps the raw ids that it had before", DoesNothing("load_collision_states")),
    ],
    "tests/recovery/test_standby.py::test_a_standby_equals_the_trainer_at_each_version_and_continues": [
        Revert("the states of followed rows are not written", Replaces("RowWriter.write", "as_tables(...)", "_[:1]")),
    ],
    "tests/recovery/test_standby.py::test_the_serving_stream_continues_after_a_takeover": [
        Revert(
            "a stream continues from a position after which rows were read for another purpose",
            Replaces("ConsumerHandle.note_of", "_ == _", "True"),
        ),
        Revert("a version does not have the positions of the serving streams"),
    ],
}
