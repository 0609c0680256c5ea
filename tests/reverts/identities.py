"""Fixes in how a predictor maps raw ids to rows."""

from __future__ import annotations

from tests.reverts.revert import Revert

_RANDOM = "tests/predictor/test_identities_random.py::test_random_owners_never_read_the_row_of_another"
_FAILED = "tests/predictor/test_identities.py::test_a_rollback_after_a_failed_attempt_maps_the_raw_ids_again"
_MERGED = "tests/predictor/test_identities.py::test_a_raw_id_that_an_interrupted_merged_version_has_moved_has_one_row"
_SYSTEM = "tests/system/test_raw_ids.py::test_no_raw_id_reads_the_row_of_another_id"
_PREDICTOR = "delta_tracker/predictor/predictor.py"
_WRITER = "delta_tracker/predictor/model_writer.py"
_IDENTITIES = "delta_tracker/predictor/identities.py"
_INDEX = "delta_tracker/raw_id_index.py"

_BLOCKS = """\
def _blocks(contents):
    for rows in (*contents.whole, *contents.listed):
        ids = slice(*rows.block.rows) if rows.ids is None else rows.ids
        is_overlaid = hasattr(rows.owners.args[0], "owners")
        owners = rows.owners.args[0].owners if is_overlaid else rows.owners
        yield rows.block.table, ids, owners(0, rows.block.num_rows)[:, 0]


"""

REVERTS = [
    Revert(
        defect="kept tables without a position route unknown raw ids to another bucket's default row",
        generator="tests/sharding/test_raw_id_maps.py::test_tables_that_are_kept_after_a_failed_rollback",
        edits={
            "delta_tracker/predictor/model_writer.py": [
                ("        return {**position, **({", "        return position and {**position, **({"),
            ]
        },
    ),
    Revert(
        defect="raw ids that a failed attempt has removed are not counted as evicted",
        generator="tests/predictor/test_identities.py::test_admitted_and_evicted_raw_ids_are_counted",
        edits={
            _WRITER: [
                (
                    "                if num_evicted := change.unmap():\n",
                    "                if (num_evicted := change.unmap()) < 0:\n",
                ),
                (
                    "        num_admitted = change.num_admitted()\n",
                    (
                        "        num_admitted = change.num_admitted()\n"
                        "        self.num_evicted += int((change.former != torch.iinfo(torch.int64).max).sum())\n"
                    ),
                ),
            ],
        },
    ),
    Revert(
        defect="rows are written while their former owners are still mapped to them",
        generator=_RANDOM,
        edits={
            _IDENTITIES: [
                (
                    "        if bool(is_owned.any()):\n            self.raw_ids.unmap",
                    "        if False:\n            self.raw_ids.unmap",
                )
            ]
        },
    ),
    Revert(
        defect="the owners of whole blocks are mapped although listed rows have newer ones",
        generator=_RANDOM,
        edits={
            _IDENTITIES: [
                ("for fqn, ids, owners in contents.owners():", "for fqn, ids, owners in _blocks(contents):"),
                (
                    "def version_owners(",
                    _BLOCKS + "def version_owners(",
                ),
            ]
        },
    ),
    Revert(
        defect="a failed attempt leaves raw ids unmapped, because the last applied owners are compared",
        generator=_FAILED,
        edits={
            _IDENTITIES: [
                ("    live = raw_ids.owners()\n", "    live = _APPLIED.get(id(raw_ids), raw_ids.owners())\n"),
                (
                    "        self.raw_ids.map(ready)\n",
                    "        self.raw_ids.map(ready)\n        _APPLIED[id(self.raw_ids)] = self.final\n",
                ),
                ("VersionOwners = ", "_APPLIED = {}\nVersionOwners = "),
            ]
        },
    ),
    Revert(
        defect="unknown raw ids read the last row of the table",
        generator=_RANDOM,
        edits={
            _INDEX: [
                (
                    "_NO_ROW, defaults_of(self._identity, raw_ids, self._default_rows), found)",
                    "_NO_ROW, self.rows[1] - 1, found)",
                )
            ]
        },
    ),
    Revert(
        defect="unmapped raw ids keep the default row of former buckets",
        generator=_RANDOM,
        edits={_INDEX: [("            self._owners.reroute(self._defaults(), identity)\n", "")]},
    ),
    Revert(
        defect="unknown raw ids read rows of former owners after the buckets have changed",
        generator=_RANDOM,
        edits={_WRITER: [("            for chunk in default_rows:\n                chunk.write()\n", "")]},
    ),
    Revert(
        defect="an interrupted merged version leaves a raw id with two rows",
        generator=_MERGED,
        edits={_IDENTITIES: [("    final[left] = NO_OWNER\n", "")]},
    ),
    Revert(
        defect="a predictor goes on from raw ids that are half written",
        generator="tests/predictor/test_identities.py::test_a_mapping_that_is_half_written_is_repaired_by_a_snapshot",
        edits={_WRITER: [("is_mixed, self.is_mixed = self.is_mixed, True", "is_mixed = self.is_mixed")]},
    ),
    Revert(
        defect="a rollback writes rows before it finds a raw id with two rows",
        generator="tests/predictor/test_identities.py::test_a_rollback_to_such_a_version_writes_nothing",
        edits={_WRITER: [("        self.receiver.place(contents)\n        version_owners(contents)\n", "")]},
    ),
    Revert(
        defect="a restarted predictor does not route unknown raw ids",
        generator="tests/sharding/test_raw_id_maps.py::test_kept_tables",
        edits={_WRITER: [("                self.applier.adopt(identities)\n", "                pass\n")]},
    ),
    Revert(
        defect="a restarted predictor routes unknown raw ids by the buckets of the version before the interrupted one",
        generator="tests/sharding/test_raw_id_maps.py::test_tables_that_are_kept_while_the_buckets_change",
        edits={
            _WRITER: [
                (
                    "                self.identities = {**self.identities, change.fqn: change.identity}\n",
                    "",
                )
            ]
        },
    ),
    Revert(
        defect="a table that is renamed to another one of the model is written there but mapped under its own name",
        generator="tests/sharding/test_raw_id_maps.py::test_a_renamed_table_has_the_mapping_of_the_models_table",
        edits={
            "delta_tracker/predictor/raw_id_maps.py": [
                (
                    "for name, own in names.items() if own in found",
                    "for name, own in names.items() if name not in found",
                )
            ],
        },
    ),
    Revert(
        defect="a delta with other buckets than its predecessor is applied",
        generator="tests/predictor/test_identities.py::test_a_delta_with_other_buckets_is_refused_before_any_write",
        edits={_IDENTITIES: [("        if held.get(fqn) != identity:\n", "        if False:\n")]},
    ),
    Revert(
        defect="a rollback writes rows before it finds a delta with other buckets",
        generator="tests/predictor/test_identities.py::test_a_delta_with_other_buckets_is_refused_before_any_write",
        edits={_PREDICTOR: [("            identities = identities_after(manifest, identities)\n", "")]},
    ),
    Revert(
        defect="the buckets of tables that a delta does not have are lost",
        generator="tests/predictor/test_identities.py::test_a_delta_without_a_table_keeps_its_buckets",
        edits={_IDENTITIES: [("return {**held, **manifest.identities}", "return manifest.identities")]},
    ),
    Revert(
        defect="an index with other buckets is combined with a saved position",
        generator="tests/predictor/test_identities.py::test_a_position_with_other_buckets_than_the_index_is_refused",
        edits={
            "delta_tracker/predictor/apply.py": [
                ("raw_ids.identity != identity:", "raw_ids.identity is None:"),
                ("check_owners(identity, torch.arange(first, end), owners)", "pass"),
            ]
        },
    ),
    Revert(
        defect="rows that a failed attempt unmapped stay unmapped: the last applied owners are compared",
        generator=_SYSTEM,
        edits={
            _IDENTITIES: [
                ("    live = raw_ids.owners()\n", "    live = _APPLIED.get(id(raw_ids), raw_ids.owners())\n"),
                (
                    "        self.raw_ids.map(ready)\n",
                    "        self.raw_ids.map(ready)\n        _APPLIED[id(self.raw_ids)] = self.final\n",
                ),
                ("VersionOwners = ", "_APPLIED = {}\nVersionOwners = "),
            ]
        },
    ),
    Revert(
        defect="an admission shows to lookups before its row is written: map, then write",
        generator=_SYSTEM,
        edits={
            _IDENTITIES: [
                (
                    "        if bool(is_owned.any()):\n            self.raw_ids.unmap",
                    "        if False:\n            self.raw_ids.unmap",
                )
            ]
        },
    ),
    Revert(
        defect="evicted raw ids are those of another consumer's last read",
        generator=_SYSTEM,
        edits={
            "delta_tracker/tracker/store/owners.py": [
                ("self.changed(start, self._seg", "self.changed(self._segments[-1].start - 1, self._seg"),
            ],
        },
    ),
    Revert(
        defect="unknown raw ids read the last row of the table in a model of one rank",
        generator=_SYSTEM,
        edits={
            "delta_tracker/sharding/raw_id_maps.py": [
                (
                    "        if not self._is_own_default(identity):\n            self._module.remap",
                    "        if False:\n            self._module.remap",
                ),
            ],
        },
    ),
    Revert(
        defect="the rows of a delta are written without their raw ids",
        generator=_SYSTEM,
        edits={
            _WRITER: [
                (
                    "        if manifest.identities:\n",
                    '        if manifest.identities and manifest.kind == "snapshot":\n',
                ),
            ],
        },
    ),
    Revert(
        defect="a row of a whole block is written before the listed one, which has another raw id meanwhile",
        generator=_SYSTEM,
        edits={
            "delta_tracker/stream/format/overlay.py": [
                (
                    "        listed = [left for each in listed for left in blocks.outside(each)]\n",
                    (
                        "        assert blocks\n"
                        "        reads = {id(each.block): each.read for each in every if each.ids is None}\n"
                        "        whole = [\n"
                        "            BlockRows(each.block, None, reads[id(each.block)], each.states, each.owners)\n"
                        "            for each in whole\n"
                        "        ]\n"
                        "        listed = [BlockRows(one.block, one.ids, one.read, one.states) for one in listed]\n"
                    ),
                ),
            ],
        },
    ),
]
