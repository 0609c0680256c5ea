"""Rules of tables without sharding."""

from __future__ import annotations

from tests.reverts.revert import Revert

_HOOK = "delta_tracker/sharding/step_hook.py"
_TABLES = "delta_tracker/sharding/plain_tables.py"
_TESTS = "tests/sharding/test_plain_tables.py"
_WRITES = "tests/sharding/test_plain_writes.py"
_RANDOM = f"{_TESTS}::test_random_schedules_lose_no_update_and_send_nothing_else"


def _revert(defect: str, generator: str, file: str, before: str, after: str) -> Revert:
    return Revert(defect=defect, generator=generator, edits={file: [(before, after)]})


REVERTS = [
    Revert(
        defect="a tracker keeps the memory of weights that were replaced",
        generator=f"{_WRITES}::test_the_memory_of_a_replaced_weight_is_freed",
        edits={
            "delta_tracker/sharding/weights.py": [
                ("def _held(", "_KEPT = []\n\n\ndef _held("),
                ("and tensor.numel()\n", "and tensor.numel() and not _KEPT.append(tensor.untyped_storage())\n"),
            ]
        },
    ),
    _revert(
        "memory that gets the address of the old weight hides that the weight was replaced",
        f"{_WRITES}::test_a_weight_that_is_cast_and_cast_back_is_sent",
        "delta_tracker/sharding/weights.py",
        "StorageWeakRef(tensor.untyped_storage()) if shard.is_stepped else None",
        "None",
    ),
    _revert(
        "a module with other gradients is tracked as before after reattach",
        f"{_WRITES}::test_a_module_with_other_gradients_is_tracked_in_another_way_after_reattach",
        "delta_tracker/tracker/tracker.py",
        "return shard.spec, shard.is_fused, shard.is_stepped",
        "return shard.spec, False, False",
    ),
    _revert(
        "a hook after a closure hides which rows were written",
        f"{_WRITES}::test_a_hook_after_a_closure_may_change_the_gradient",
        _HOOK,
        'if _has_others(optimizer, "post"):',
        "if False:",
    ),
    _revert(
        "a fused optimizer of an alias of a weight is not noticed",
        f"{_WRITES}::test_a_fused_optimizer_of_another_parameter_in_the_same_memory_is_noticed",
        _HOOK,
        'if fqns is None and group.get("fused"):',
        "if False:",
    ),
    _revert(
        "rows of a momentum that a hook loads are lost",
        f"{_WRITES}::test_a_momentum_that_is_loaded_in_a_hook_is_noticed",
        _HOOK,
        "if step.may_load:",
        "if False:",
    ),
    _revert(
        "a write of another thread at the end of a step is acknowledged",
        f"{_WRITES}::test_a_write_of_another_thread_at_the_end_of_a_step_is_sent",
        _HOOK,
        "if after[fqn] != now[fqn]:",
        "if False:",
    ),
    _revert(
        "rows that another process trains are lost",
        f"{_WRITES}::test_rows_that_another_process_trains_in_shared_memory_are_sent[True]",
        _TABLES,
        "and not is_shared",
        "and True",
    ),
    _revert(
        "an optimizer that failed and is gone stops publishing for ever",
        f"{_WRITES}::test_an_optimizer_that_failed_and_is_gone_does_not_stop_publishing",
        _HOOK,
        "            self._listener.ended(step.key)\n",
        "            pass\n",
    ),
    _revert(
        "a table of inference mode is tracked",
        f"{_WRITES}::test_a_table_of_inference_mode_is_refused",
        _TABLES,
        "or weight.is_inference():",
        "or False:",
    ),
    _revert(
        "a frozen table needs an optimizer",
        f"{_WRITES}::test_a_frozen_table_is_restored_without_an_optimizer",
        "delta_tracker/sharding/optimizer_rows.py",
        "and any(parameter.requires_grad for parameter in kernel.module.parameters())",
        "",
    ),
    _revert(
        "rows that only a sparse momentum moves are lost",
        f"{_RANDOM}[SGD with momentum-True-True]",
        _HOOK,
        "return torch.cat([ids, momentum._indices()[0]])",
        "return ids",
    ),
    _revert(
        "an unknown optimizer is trusted to write the gradient's rows only",
        f"{_TESTS}::test_an_optimizer_that_is_not_known_is_named",
        _HOOK,
        "if type(optimizer) in _GRADIENT_ROWS:",
        "if True:",
    ),
    _revert(
        "writes before a step are taken for writes of the step",
        f"{_RANDOM}[SparseAdam-True-True]",
        _HOOK,
        "self._listener.notice_writes(self._tables)",
        "pass",
    ),
    _revert(
        "a gradient that another hook replaces is not noticed",
        f"{_RANDOM}[Adagrad-True-False]",
        _HOOK,
        "late |= {fqn: None for fqn, parameter, gradient, _ in step.gradients if parameter.grad is not gradient}",
        "pass",
    ),
    _revert(
        "a closure's gradients are read before the closure runs",
        f"{_RANDOM}[SGD-True-True]",
        _HOOK,
        "is_computed_inside=_has_closure(args, kwargs)",
        "is_computed_inside=False",
    ),
    _revert(
        "the own writes of a step count as writes to all rows",
        f"{_RANDOM}[SGD-True-False]",
        _HOOK,
        "self._listener.acknowledge_writes(written)",
        "pass",
    ),
    _revert(
        "writes of hooks and closures are taken for writes of the step",
        f"{_TESTS}::test_writes_inside_a_step_that_are_not_the_optimizers_are_sent[SGD-after]",
        _HOOK,
        "if now[fqn] > step.versions[fqn] + (fqn not in skipped)",
        "if False",
    ),
    _revert(
        "a step that raised keeps its rows open for ever",
        f"{_TESTS}::test_rows_of_a_step_that_raised_are_sent_once",
        _HOOK,
        "self.forget(number)",
        "pass",
    ),
    _revert(
        "rows that max_norm rescales are all sent",
        f"{_TESTS}::test_a_table_with_max_norm_is_compared",
        _TABLES,
        "is_stepped = module.sparse and module.max_norm is None",
        "is_stepped = module.sparse",
    ),
    _revert(
        "tables that the ranks train apart are tracked",
        f"{_TESTS}::test_ranks[not_replicated]",
        _TABLES,
        "if replicated is not None and id(weight) not in replicated:",
        "if False:",
    ),
    Revert(
        defect="a part of a table that FSDP keeps is tracked",
        generator=f"{_TESTS}::test_ranks[sharded_by_torch]",
        edits={
            _TABLES: [
                ("if id(weight) in fsdp:", "if False:"),
                ("if weight.is_meta or tuple(weight.shape) != shape:", "if False:"),
            ]
        },
    ),
    _revert(
        "tracked tables are also sent as dense parameters",
        f"{_TESTS}::test_dense_parameters_leave_out_the_tables",
        "delta_tracker/sharding/dense.py",
        'rows = {f"{fqn}.weight" for fqn in tables}',
        "rows: set[str] = set()",
    ),
    _revert(
        "plain modules beside sharded collections are ignored without a word",
        f"{_TESTS}::test_beside_sharded_collections_they_are_named_and_not_tracked",
        "delta_tracker/sharding/discover.py",
        "    if found.modules and plain:\n",
        "    if False:\n",
    ),
    _revert(
        "a step of SparseAdam that writes nothing hides the write of a hook",
        f"{_TESTS}::test_an_empty_gradient_does_not_hide_the_write_of_a_hook",
        _HOOK,
        "if _is_skipped(optimizer, gradient)}",
        "if False}",
    ),
    _revert(
        "values that were assigned to a weight's data are not sent",
        f"{_TESTS}::test_assigned_data_is_sent[True]",
        "delta_tracker/sharding/weights.py",
        "tensor.data_ptr() if shard.is_stepped else 0,",
        "0,",
    ),
    _revert(
        "rows of a module that left the model are published",
        f"{_TESTS}::test_a_table_that_is_no_longer_the_one_that_was_tracked_is_refused[replaced-True]",
        "delta_tracker/tracker/tracked_model.py",
        "table.check()",
        "pass",
    ),
    _revert(
        "a snapshot reads a table before it is checked",
        f"{_TESTS}::test_a_table_that_is_no_longer_the_one_that_was_tracked_is_refused[resized-False]",
        "delta_tracker/tracker/consumer_handle.py",
        """
        self._model.check_attached()
        name = f"{self._held()} (snapshot)"
""",
        """
        name = f"{self._held()} (snapshot)"
""",
    ),
]
