"""Fixes in the training state and the position in the training data."""

from __future__ import annotations

from tests.reverts.revert import Revert

_TREE = "delta_tracker/state_tree.py"
_TRAINING = "delta_tracker/publisher/training.py"
_RANDOM = "delta_tracker/recovery/random_states.py"
_POSITION = "delta_tracker/tracker/data_position.py"

REVERTS = [
    Revert(
        defect="subclasses of plain types lose their type in a training state",
        generator="tests/test_state_tree.py::test_other_values_are_refused_by_their_path",
        edits={
            _TREE: [
                (
                    "self._encoders.get(type(value))",
                    "next((self._encoders[each] for each in type(value).__mro__ if each in self._encoders), None)",
                )
            ]
        },
    ),
    Revert(
        defect="a damaged training state reads one span of its data many times",
        generator="tests/test_state_tree.py::test_invalid_texts_are_refused_before_the_data_are_read",
        edits={_TREE: [("begin != _aligned(self._end) or end < begin", "begin < 0 or end < begin")]},
    ),
    Revert(
        defect="the position is that of the batch that was fetched last",
        generator="tests/tracker/test_data_position.py::test_the_state_is_that_of_the_last_trained_batch",
        edits={_POSITION: [("self._drawn.popleft()", "self._drawn.pop()")]},
    ),
    Revert(
        defect="an iterator of the old position takes a batch of the restored one",
        generator="tests/tracker/test_data_position.py::test_iterators_of_the_old_position_are_refused_and_take_nothing",
        edits={_POSITION: [("            self._check_current(mine)  # before the loader moves\n", "")]},
    ),
    Revert(
        defect="a version can miss the optimizer state of a table that is compared with a copy",
        generator="tests/publisher/test_training.py::test_torchrec[unfused]",
        edits={
            _TRAINING: [("if not storages <= (whole if is_replicated else of_ranks):", "if not storages <= whole:")]
        },
    ),
    Revert(
        defect="buffers of a sharded model within another module are missing on ranks other than 0",
        generator="tests/publisher/test_training.py::test_torchrec[buffers]",
        edits={
            _TRAINING: [
                ("buffers = _buffers(tracker.model)", "buffers = dict(tracker.model.named_buffers())"),
                ("if tensor.untyped_storage().data_ptr() in buffers}", "if name in buffers}"),
            ]
        },
    ),
    Revert(
        defect="a version misses the learning rate of an optimizer of TorchRec",
        generator="tests/publisher/test_training.py::test_an_object_with_parameter_groups_must_save_them",
        edits={_TRAINING: [('"param_groups" in state)', '"state" in state)')]},
    ),
    Revert(
        defect="a rejected state of one random generator changes the others",
        generator="tests/recovery/test_random_states.py::test_a_state_that_a_generator_rejects_changes_no_generator",
        edits={_RANDOM: [('        _try("random", random.Random().setstate', '        _try("random", lambda _: None')]},
    ),
    Revert(
        defect="the position lags behind training for ever after fetched batches were dropped",
        generator="tests/tracker/test_data_position.py::test_a_new_iterator_drops_no_batch_silently",
        edits={
            _POSITION: [
                ("            if self._drawn:\n                remedy", "            if False:\n                remedy")
            ]
        },
    ),
    Revert(
        defect="steps without a batch leave the position behind training",
        generator="tests/tracker/test_data_position.py::test_steps_without_a_batch_are_reported_at_the_cut",
        edits={_POSITION: [("            self._num_missing += 1\n", "            pass\n")]},
    ),
]
