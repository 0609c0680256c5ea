"""Fixes in the recovery of training states, and in what keeps and checks them."""

from __future__ import annotations

from tests.reverts.revert import Revert

_RESTORE = "tests/recovery/test_restore.py::"
_PATH = "tests/recovery/test_path.py::"

REVERTS = [
    Revert(
        defect="a restore from a directory reads the status of the files of all later versions",
        generator="tests/recovery/test_plan.py::test_a_directory_is_asked_for_the_needed_objects_only",
        edits={
            "delta_tracker/recovery/plan.py": [("if objects and self.storage.is_remote:", "if objects:")],
        },
    ),
    Revert(
        defect="a restore asks a remote store for the size of each object",
        generator="tests/recovery/test_plan.py::test_objects_of_a_remote_store_are_checked_with_one_listing",
        edits={
            "delta_tracker/recovery/plan.py": [
                (
                    "sizes[each.name] if each.name in sizes else self.storage.size(each.name)",
                    "self.storage.size(each.name)",
                ),
            ],
        },
    ),
    Revert(
        defect="retention deletes the states and training states of kept versions",
        generator="tests/stream/test_retention.py::test_the_states_and_training_states_of_kept_versions_stay",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [
                ("for each in manifest.objects}\n", "for each in manifest.parts}\n"),
            ],
        },
    ),
    Revert(
        defect="the bound of retention on bytes counts parts only",
        generator="tests/stream/test_retention.py::test_the_bytes_of_all_objects_count",
        edits={
            "delta_tracker/stream/maintenance/retention.py": [("manifest.total_bytes", "manifest.num_bytes")],
        },
    ),
    Revert(
        defect="an interrupted restore leaves a model that trains",
        generator=_RESTORE + "test_an_interrupted_restore_leaves_a_model_that_says_so",
        edits={"delta_tracker/recovery/restore.py": [("        mark(model, version)\n", "")]},
    ),
    Revert(
        defect="the counters and learning rates of fused optimizers are not restored",
        generator=_RESTORE + "test_a_job_continues_bit_for_bit",
        edits={"delta_tracker/recovery/plan.py": [("        write_scalars(self.shards, self.scalars)\n", "")]},
    ),
    Revert(
        defect="gradients of the batches before a restore are added to those of the first batch after it",
        generator=_RESTORE + "test_a_job_continues_bit_for_bit",
        edits={
            "delta_tracker/recovery/restore.py": [
                ("        self._job.model.zero_grad(set_to_none=True)", "        pass")
            ]
        },
    ),
    Revert(
        defect="a lookup before a restore writes to restored rows",
        generator=_RESTORE + "test_what_does_not_fit_is_refused_and_changes_nothing",
        edits={
            "delta_tracker/recovery/job.py": [
                ("                    handle.wait_for_updates(_UPDATE_SECONDS)\n", "                    pass\n")
            ]
        },
    ),
    Revert(
        defect="the state of another optimizer is loaded",
        generator=_RESTORE + "test_wrong_objects_are_refused_and_the_position_is_attached",
        edits={
            "delta_tracker/recovery/preparation.py": [
                ("    job.objects.check_states(states, job.rank, job.world_size, job.ignore)\n", "")
            ]
        },
    ),
    Revert(
        defect="a resumed job publishes versions without a position in the data",
        generator=_RESTORE + "test_wrong_objects_are_refused_and_the_position_is_attached",
        edits={"delta_tracker/recovery/restore.py": [("job.tracker.attach_data(job.objects.data)", "pass")]},
    ),
    Revert(
        defect="a publisher misses the rows of a table that was not restored",
        generator=_RESTORE + "test_a_table_that_is_not_restored_is_sent_again",
        edits={
            "delta_tracker/recovery/preparation.py": [
                (
                    "{**found.get(name, {}), **unrestored} for name in consumers",
                    "found.get(name, {}) for name in consumers",
                )
            ]
        },
    ),
    Revert(
        defect="a state of some ranks only is lost at another number of ranks",
        generator="tests/recovery/test_preparation.py::test_a_state_of_some_ranks_only_is_refused",
        edits={
            "delta_tracker/recovery/preparation.py": [
                ("        if missing := sorted(every - each - set(ignore)):", "        if missing := []:")
            ]
        },
    ),
    Revert(
        defect="an invalid value in a training state raises an untyped error",
        generator="tests/recovery/test_library.py::test_an_invalid_value_is_refused",
        edits={
            "delta_tracker/recovery/library.py": [
                (
                    "        return self._converted(rank, key, self._states.load",
                    "        return cast(Any, self._states.load",
                ),
                ('"library", key), kind)\n', '"library", key))\n'),
            ]
        },
    ),
    Revert(
        defect="a version that a restore does not need prevents it",
        generator=_PATH + "test_the_rows_after_a_version_are_unknown_if_one_is_damaged",
        edits={
            "delta_tracker/recovery/pending.py": [
                ("except (CorruptPartError, MalformedError)", "except ZeroDivisionError")
            ]
        },
    ),
    Revert(
        defect="a killed trainer continues with the learning rate of its warm-up",
        generator="tests/system/test_resume.py::test_a_killed_trainer_continues_bit_for_bit",
        edits={
            "delta_tracker/sharding/optimizer_rows.py": [
                ('        group["lr"] = float(scalars["group_lr"])\n', "        pass\n")
            ]
        },
        timeout_seconds=240.0,
    ),
    Revert(
        defect="a job restores the optimizer of a sharded table to other rows",
        generator="tests/recovery/test_fit.py::test_a_difference_is_refused_by_name",
        edits={
            "delta_tracker/recovery/fit.py": [
                ("if saved.world_size == job.world_size and not shard.is_replicated:", "if False:"),
            ],
        },
    ),
    Revert(
        defect="a row-wise state is restored to other column ranges",
        generator="tests/recovery/test_fit.py::test_a_difference_is_refused_by_name",
        edits={
            "delta_tracker/recovery/fit.py": [
                ('    if any(state.width == "range" for state in expected.states):\n', "    if False:\n"),
            ],
        },
    ),
    Revert(
        defect="a merged entry of another history is applied",
        generator=_PATH + "test_a_merged_entry_of_another_history_is_not_used",
        edits={
            "delta_tracker/recovery/path.py": [
                ("                    if known in (None, entry.parent):\n", "                    if True:\n"),
            ],
        },
    ),
    Revert(
        defect="deltas are applied to a snapshot with other states",
        generator=_PATH + "test_a_delta_after_other_tables_or_states_is_refused",
        edits={
            "delta_tracker/recovery/path.py": [
                ("            if entry.schema != path[0].schema:\n", "            if False:\n"),
            ],
        },
    ),
    Revert(
        defect="a model whose gradients will be reordered is restored",
        generator="tests/recovery/test_warm_up.py::test_the_gradients_of_a_warm_model_have_their_last_order",
        edits={"delta_tracker/recovery/warm_up.py": [('.get("iteration", 0)) < 1', '.get("iteration", 0)) < 0')]},
    ),
]
