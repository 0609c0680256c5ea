"""Fixes in what of a model is tracked, and what is refused."""

from __future__ import annotations

from tests.reverts.revert import Revert

_KINDS = "tests/tracker/test_kinds.py::test_random_kinds_are_tracked_exactly_or_refused"
_REFUSALS = "delta_tracker/sharding/refusals.py"

REVERTS = [
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
        defect="a DMPCollection is accepted",
        generator=_KINDS,
        edits={_REFUSALS: [("    _refuse_replicas(model, found, torchrec)\n", "")]},
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
                ('            **dict.fromkeys(activations, "_checkpoint_wrapped_module"),\n', ""),
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
        defect="buffers that managed collisions shard are published as whole ones",
        generator="tests/sharding/test_discover.py::test_sharded_buffers_are_not_taken_as_whole",
        edits={
            "delta_tracker/sharding/dense.py": [
                ("{name: None if name in parts else tensor for name, tensor in found.items()}", "found"),
            ],
        },
    ),
]
