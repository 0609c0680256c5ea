"""Fixes in the optimizer's states of versions."""

from __future__ import annotations

from tests.reverts.revert import Revert

_CUT = "tests/sharding/test_optimizer_rows.py::test_a_cut_of_states[waiting]"
_VERSIONS = "tests/publisher/test_states.py"
_ROWS = "delta_tracker/sharding/optimizer_rows.py"

REVERTS = [
    Revert(
        defect="rows are read between a lookup and its backward pass",
        generator=_CUT,
        edits={
            "delta_tracker/sharding/kernel_hooks.py": [
                ("        self.in_flight.add(update)\n        node", "        node")
            ]
        },
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
        edits={_ROWS: [('        group["lr"] = float(scalars["group_lr"])\n', "        pass\n")]},
    ),
    Revert(
        defect="a kernel is partly written before a missing number is found",
        generator="tests/sharding/test_optimizer_rows.py::test_case[scalars]",
        edits={_ROWS: [("if missing := [name for name in _NAMES if name not in found]:", "if missing := []:")]},
    ),
    Revert(
        defect="a cut fails after a reshard that leaves a rank no rows of a table",
        generator="tests/sharding/test_optimizer_rows.py::test_case[written]",
        edits={
            _ROWS: [("if versions and versions != self._held.get(fqn):", "if versions != self._held.get(fqn, []):")]
        },
    ),
    Revert(
        defect="loaded optimizer states are lost if a version fails before it has marked them",
        generator=f"{_VERSIONS}::test_case[in_progress]",
        edits={
            _ROWS: [
                (
                    "                yield fqn\n            self._held[fqn] = versions\n",
                    "                self._held[fqn] = versions\n                yield fqn\n",
                )
            ]
        },
    ),
    Revert(
        defect="loaded optimizer states are not found",
        generator="tests/sharding/test_optimizer_rows.py::test_case[written]",
        edits={_ROWS: [("(state.data_ptr(), state._version)  # noqa", "(state.data_ptr(), 0)  # noqa")]},
    ),
    Revert(
        defect="rows that change while a snapshot is copied have the states of another time",
        generator=f"{_VERSIONS}::test_a_version_has_the_rows_and_states_at_its_cut[RowWiseAdagrad]",
        edits={
            "delta_tracker/publisher/row_gatherer.py": [
                (
                    "                sources += [Source(state, ids) for state in held]\n",
                    "                sources += [Source(torch.zeros_like(state), ids) for state in held]\n",
                )
            ],
        },
    ),
    Revert(
        defect="a merge chooses the states of a row without its values",
        generator=f"{_VERSIONS}::test_case[merged]",
        edits={
            "delta_tracker/stream/maintenance/merging.py": [
                (
                    "gather(self.sources[number].reader(column), place[wanted])",
                    "self.sources[number].reader(column)(0, len(wanted))",
                )
            ]
        },
    ),
    Revert(
        defect="a stream continues with a delta after its format changed",
        generator=f"{_VERSIONS}::test_case[resumed]",
        edits={
            "delta_tracker/publisher/repair.py": [
                ("        if not _continues(log, link.version, schema) or ", "        if ")
            ]
        },
    ),
    Revert(
        defect="a stream continues with a delta after a load that may lack the optimizer's states",
        generator=f"{_VERSIONS}::test_case[resumed]",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("if self._training is not None and tracker.restored is not Restored.STREAM:", "if False:")
            ]
        },
    ),
    Revert(
        defect="loaded optimizer states are not published",
        generator=f"{_VERSIONS}::test_case[in_progress]",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("        for fqn in self._watch.written():\n", "        for fqn in ():\n")
            ]
        },
    ),
    Revert(
        defect="the training state is that of a later batch",
        generator=f"{_VERSIONS}::test_case[in_progress]",
        edits={"delta_tracker/publisher/version_source.py": [("        self.handle.wait_for_updates(seconds)\n", "")]},
    ),
    Revert(
        defect="a version has the rows of the next batch",
        generator=f"{_VERSIONS}::test_case[wrong_order]",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("            raise MissingStepError(tracker.num_batches)\n", "            pass\n")
            ]
        },
    ),
    Revert(
        defect="a warm-up before the publisher counts as the next batch",
        generator=f"{_VERSIONS}::test_case[wrong_order]",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("(num_before if tracker.num_batches == num_batches else 0)", "0")
            ]
        },
    ),
    Revert(
        defect="each version waits for a graph that the training thread holds",
        generator=f"{_VERSIONS}::test_case[in_progress]",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("        self._waited_in_vain = True\n", "        self._waited_in_vain = False\n")
            ]
        },
    ),
    Revert(
        defect="other consumers lose the rows after a cut",
        generator=f"{_VERSIONS}::test_case[contents]",
        edits={
            "delta_tracker/publisher/version_source.py": [
                ("return bisect_right(self._cuts, position, key=lambda cut: cut[0])", "return len(self._cuts)")
            ]
        },
    ),
]
