"""Fixes in what of a model is tracked, and what is refused."""

from __future__ import annotations

from tests.reverts.revert import Revert

_KINDS = "tests/tracker/test_kinds.py::test_random_kinds_are_tracked_exactly_or_refused"
_REFUSALS = "delta_tracker/sharding/refusals.py"
_REPLICAS = "delta_tracker/sharding/replicas.py"

REVERTS = [
    Revert(
        defect="updates by a copy that has the rows of the original in the same memory are not reported",
        generator="tests/sharding/test_copies.py::test_a_copy_of_a_sharded_model[id_only-torchrec-1]",
        edits={
            "delta_tracker/sharding/kernel_hooks.py": [
                ("and not self._contained(lambda: share_rows(module, original), otherwise=True):", "or not module:"),
            ],
        },
    ),
    Revert(
        defect="a subclass of a sharded collection is skipped",
        generator=_KINDS,
        edits={
            "delta_tracker/sharding/torchrec_api.py": [
                (
                    "next((holder for kind, holder in self.collections.items() if isinstance(module, kind)), None)",
                    "self.collections.get(type(module))",
                ),
            ],
            "delta_tracker/sharding/discover.py": [
                ("    if unsupported:\n", "    if False:\n"),
                ("    if not found.tables and not found.skipped:\n", "    if False:\n"),
            ],
        },
    ),
    Revert(
        defect="sharded modules that are no collection are skipped",
        generator=_KINDS,
        edits={
            "delta_tracker/sharding/discover.py": [
                ("    if unsupported:\n", "    if False:\n"),
                ("    if not found.tables and not found.skipped:\n", "    if False:\n"),
            ],
        },
    ),
    Revert(
        defect="recorded lookups replace the comparison of dense tables",
        generator=_KINDS,
        edits={
            "delta_tracker/tracker/tracker.py": [
                (
                    "        return make_store(partial(self._model.shard, fqn), self._capture, engine=self._engine)\n",
                    (
                        "        model, capture, shard = self._model, self._capture, self._model.shards[fqn]\n"
                        "        if self._records_lookups and not shard.is_fused:\n"
                        "            old = (lambda ids: capture.old_states(model.shards[fqn], ids))\n"
                        "            old = old if capture.keeps_old else None\n"
                        "            return SegmentStore(shard.spec.num_rows, shard.device, old_states=old)\n"
                        "        return make_store(partial(model.shard, fqn), capture, engine=self._engine)\n"
                    ),
                ),
            ],
        },
    ),
    Revert(
        defect="optimizers that write outside the backward pass are accepted",
        generator=_KINDS,
        edits={_REFUSALS: [("    _refuse_optimizers(found)\n", "")]},
    ),
    Revert(
        defect="writes of a DMPCollection that cannot be reported are accepted",
        generator="tests/sharding/test_replicas.py::test_replicas_whose_writes_cannot_be_reported_are_refused",
        edits={_REFUSALS: [("    _refuse_replicas(model, found, torchrec)\n", "")]},
    ),
    Revert(
        defect="a DMPCollection's sync is not hooked",
        generator="tests/sharding/test_replicas.py::test_the_rows_that_a_sync_changes_are_reported",
        edits={
            _REPLICAS: [
                ("        if groups:\n            yield SyncHook(", "        if False:\n            yield SyncHook(")
            ]
        },
    ),
    Revert(
        defect="a sync forgets writes in place before it",
        generator="tests/sharding/test_replicas.py::test_writes_in_place_just_before_a_sync_are_reported",
        edits={
            _REPLICAS: [
                ("        self._contained(lambda: self._log.notice_writes(self._tables), otherwise=None)\n", ""),
            ]
        },
    ),
    Revert(
        defect="each replica marks only its own changed rows at a sync",
        generator="tests/sharding/test_replicas.py::test_the_rows_that_a_sync_changes_are_reported",
        edits={_REPLICAS: [("            merged |= other\n", "            merged = self._own\n")]},
    ),
    Revert(
        defect="the first sync marks only the changed rows",
        generator="tests/sharding/test_replicas.py::test_the_rows_that_a_sync_changes_are_reported",
        edits={_REPLICAS: [("        listener.diverged(self._tables)\n", "        listener.synced(self._tables)\n")]},
    ),
    Revert(
        defect="old states are captured after a sync",
        generator="tests/sharding/test_replicas.py::test_the_rows_that_a_sync_changes_are_reported",
        edits={
            _REPLICAS: [
                ("        self._opened(key, ids)\n", ""),
                (
                    "            self._applied(key, ids)\n",
                    "            self._opened(key, ids)\n            self._applied(key, ids)\n",
                ),
            ]
        },
    ),
    Revert(
        defect="small values of equal replicas are taken as unchanged",
        generator="tests/sharding/test_replicas.py::test_rows_that_the_next_average_changes_are_reported",
        edits={_REPLICAS: [("torch.cat([ids, self._unstable[fqn]])", "ids")]},
    ),
    Revert(
        defect="each replica is published",
        generator="tests/sharding/test_replicas.py::test_a_predictor_equals_every_replica_after_a_sync",
        edits={"delta_tracker/publisher/row_gatherer.py": [("if shard.replica == 0 and (", "if (")]},
    ),
    Revert(
        defect="top-k counts each replica",
        generator="tests/sharding/test_replicas.py::test_top_k_counts_each_row_once",
        edits={
            "delta_tracker/tracker/delta_reader.py": [("if spec.replica == 0 and (", "if (")],
        },
    ),
    Revert(
        defect="a state is saved while the replicas differ",
        generator="tests/sharding/test_replicas.py::test_a_state_is_saved_only_after_a_sync",
        edits={
            "delta_tracker/tracker/checkpoint/tracker_checkpoint.py": [
                ("        self._check_synced(self._group if is_gathered else None)\n", ""),
            ],
        },
    ),
    Revert(
        defect="an average of eight replicas is taken as exact",
        generator="tests/sharding/test_replicas.py::test_all_rows_are_reported_if_a_sync_may_change_them",
        edits={_REPLICAS: [("group.num_replicas == 1 and is_averaged", "is_averaged")]},
    ),
    Revert(
        defect="pruning is accepted",
        generator=_KINDS,
        edits={_REFUSALS: [("    _refuse_pruning(model, found, torchrec)\n", "")]},
    ),
    Revert(
        defect="torch's wrappers have a component in the names",
        generator="tests/sharding/test_discover.py::test_wrappers_have_no_component_in_names",
        edits={
            "delta_tracker/sharding/torchrec_api.py": [
                ('        **dict.fromkeys(activations, "_checkpoint_wrapped_module"),\n', ""),
            ],
        },
    ),
    Revert(
        defect="parameters that FSDP shards are published as whole ones",
        generator="tests/sharding/test_discover.py::test_parameters_that_fsdp_shards_are_not_taken_as_whole",
        edits={
            "delta_tracker/sharding/dense.py": [
                (" = None if id(tensor) in flattened else tensor", " = tensor"),
            ],
        },
    ),
    Revert(
        defect="the raw ids of managed collisions are dense tensors, which predictors write at another time",
        generator="tests/sharding/test_discover.py::test_raw_ids_of_managed_collisions_are_not_dense",
        edits={
            "delta_tracker/sharding/dense.py": [
                ("if id(module) not in inside or id(module) in left_out:", "if id(module) not in inside:"),
            ],
        },
    ),
]
