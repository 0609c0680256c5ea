"""Faults of predictors, mirrors and streams together, by the random worlds."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Loses, Replaces, Returns
from tests.reverts.revert import Revert

REVERTS = {
    "tests/system/test_simulation.py::test_random_worlds_break_no_rule_but_the_known_ones": [
        Revert("a predictor stays at a source that fails", Returns("_asks_others", "False")),
        Revert(
            "a predictor that has a version follows no pin",
            Returns("decide._follow_order", "_apply_next(log, view, position)"),
        ),
        Revert("a rollback of a predictor is ignored", Replaces("decide._order", "own is not None", "False")),
        Revert("mirrors copy no pins", Returns("Mirror.copy_pins", "0")),
        Revert("a pin keeps a predictor at a stream that has ended", Returns("_has_ended", "False")),
        Revert("mirrors copy no claims of former streams", Returns("Mirror.copy_claims", "0")),
        Revert("a release leads to a bad version", Replaces("release_pin", "snapshot.version <= pin.bad", "False")),
        Revert("retention deletes what leads to a pin", Returns("_pinned_path", "[]")),
        Revert("retention ignores the grace", Replaces("retention._needed", "committed <= before", "True")),
        Revert(
            "a merged delta leads past a held version",
            Replaces("GateKeeper.check_not_held", "is_inside", "False"),
        ),
        Revert(
            "a gate ignores dense tensors",
            Replaces("GateKeeper.measure", "tensor.is_floating_point()", "False"),
        ),
        Revert("a rollback leads past a canary", Replaces("Reader.rollback", "source.canary is not None", "False")),
        Revert("a pin leads past a canary", Replaces("_apply_pin", "view.policy.is_canary", "False")),
        Revert("the raw ids of a version are not mapped in a model", DoesNothing("ModelWriter._map")),
        Revert("a row store keeps raw ids of an interrupted version", DoesNothing("SinkWriter._undo")),
        Revert(
            "a row store keeps raw ids that lost their row",
            Replaces("SinkWriter._log", "is_changed & (old != NO_OWNER)", "is_changed & False"),
        ),
    ],
    "tests/system/test_simulation.py::test_a_schedule_that_broke_a_rule_breaks_none": [
        Revert(
            "unknown raw ids of all ranks read the default row of the last one in an index",
            Replaces("RawIdIndex.rows_of", "defaults_of(...)", "self.rows[1] - 1"),
        ),
        Revert(
            "unknown raw ids of all ranks read the default row of the last one in a model",
            Returns("MchMap._is_own_default", "True"),
        ),
        Revert("versions lack the rows that an average of replicas changed", DoesNothing("watch_syncs")),
        Revert(
            "retention deletes the merged snapshot of a pin",
            Replaces("retention._Plan.of", "each not in pinned", "True"),
        ),
        Revert(
            "a path to a pin names no tables that a predictor leaves out",
            Loses("VersionWriter.write_path", "self._note(...)"),
        ),
        Revert(
            "a position that was saved with another choice of tables is accepted",
            Replaces("TableChoice.position_in", "saved != self.saved().get('tables')", "False"),
        ),
        Revert(
            "a row store continues with another choice of tables",
            Replaces("SinkWriter.restore", "states[current].choice != self._choice.patterns", "False"),
        ),
        Revert(
            "a chosen table that a snapshot lacks is never found again",
            Replaces("TableChoice.narrowed", "MissingTableError", "InvalidArgumentError"),
        ),
        Revert(
            "other urls are not asked for a version that fits",
            Replaces("decide._asks_others", "view.surveys", "False", nth=2),
        ),
        Revert("a version that does not fit is applied", DoesNothing("check_targets")),
        Revert("a changed model keeps its position", Returns("ModelWriter.keeps_rows", "True")),
        Revert(
            "a predictor of some tables applies all of them",
            Replaces("TableChoice.narrowed", "not self.patterns or entry.kind == 'claim'", "True"),
        ),
    ],
    "tests/system/test_simulation.py::test_an_actor_with_the_permissions_of_its_role_is_refused_nothing": [
        Revert(
            "a heartbeat is created instead of replaced, which its role does not allow",
            Replaces(
                "write_heartbeat",
                "storage.replace(...)",
                "storage.create(heartbeat_path(beat.name), json.dumps(fields).encode())",
            ),
        ),
    ],
}
