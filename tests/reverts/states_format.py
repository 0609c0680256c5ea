"""Fixes in format 2: row states, checked ranges, and entries of newer formats."""

from __future__ import annotations

from tests.reverts.revert import Revert

_LOG = "delta_tracker/stream/log.py"
_READER = "delta_tracker/stream/format/part_reader.py"
_STATES = "tests/stream/test_row_states.py"
_IDENTITIES = "tests/stream/test_identities.py"

REVERTS = [
    Revert(
        defect="an entry of a newer format is reported as malformed when it is read again",
        generator="tests/stream/test_log.py::test_an_entry_of_a_newer_format_is_reported_as_such_every_time",
        edits={
            _LOG: [
                (
                    "                    raise unraised(its_error)\n",
                    "                    raise MalformedError(name, its_error.reason)\n",
                )
            ]
        },
    ),
    Revert(
        defect="an entry of a newer format is taken for an altered one",
        generator="tests/stream/test_log.py::test_an_entry_of_a_newer_format_is_not_taken_for_an_altered_one",
        edits={_LOG: [("    except NewerFormatError:\n        return True\n", "")]},
    ),
    Revert(
        defect="a claim is written in format 2",
        generator="tests/stream/test_parse.py::test_a_claim_has_format_1_in_every_stream",
        edits={
            "delta_tracker/stream/format/parse.py": [
                ('    if manifest.kind == "claim" and manifest.format != FORMAT:\n', "    if False:\n")
            ]
        },
    ),
    Revert(
        defect="listed rows replace the values of a whole block, but not their states",
        generator="tests/stream/test_overlay.py::test_values_and_states_are_from_the_same_rows",
        edits={
            "delta_tracker/stream/format/overlay.py": [
                (
                    'partial(self._overlaid, whole, "values"), states, owners)\n',
                    'partial(self._overlaid, whole, "values"), whole.states, owners)\n',
                )
            ]
        },
    ),
    Revert(
        defect="a range of an object is read without its digest",
        generator=f"{_STATES}::test_every_flipped_byte_of_a_body_or_its_digests_is_refused[part-ranges]",
        edits={_READER: [("        _check_piece(self._stored, piece, number, digests)\n", "")]},
    ),
    Revert(
        defect="the states of a selection of rows are those of other rows",
        generator=f"{_STATES}::test_rows_keep_their_states_when_they_are_selected",
        edits={
            "delta_tracker/stream/format/block_rows.py": [
                (
                    "            states = tuple(_shifted(read, start) for read in self.states)\n",
                    "            states = self.states\n",
                )
            ]
        },
    ),
    Revert(
        defect="a compaction merges versions whose tables have other states",
        generator=f"{_STATES}::test_versions_with_other_states_are_not_merged",
        edits={
            "delta_tracker/stream/maintenance/compaction.py": [
                ("piece.schema != _schema([*run, piece])", "piece.tables != _schema([*run, piece])[1]")
            ]
        },
    ),
    Revert(
        defect="merged rows have the owners of another version",
        generator=f"{_IDENTITIES}::test_a_compaction_keeps_the_owners_with_their_rows",
        edits={
            "delta_tracker/stream/maintenance/merging.py": [
                ('partial(self.read, "owners")\n', "self.sources[0].owners\n")
            ]
        },
    ),
    Revert(
        defect="listed rows replace the values of a whole block, but not their owners",
        generator=f"{_IDENTITIES}::test_owners_and_values_are_from_the_same_rows_after_an_overlay",
        edits={
            "delta_tracker/stream/format/overlay.py": [('partial(self._overlaid, whole, "owners")\n', "whole.owners\n")]
        },
    ),
    Revert(
        defect="a table with raw ids has blocks of several encodings or of some columns, which no overlay joins",
        generator="tests/stream/test_parse.py::test_a_bad_field_of_format_2_is_refused[parts.1.blocks.0.encoding]",
        edits={
            "delta_tracker/stream/format/parse.py": [("    if identities:\n        _check_identities(manifest)\n", "")]
        },
    ),
    Revert(
        defect="a compaction merges versions of a table with raw ids that have other encodings",
        generator=f"{_IDENTITIES}::test_versions_with_other_identities_or_encodings_are_not_merged[encoding]",
        edits={
            "delta_tracker/stream/maintenance/compaction.py": [
                ("        if not _is_alike(owned, encodings):\n            break\n", "")
            ]
        },
    ),
    Revert(
        defect="owners that no collision module has are accepted",
        generator=f"{_IDENTITIES}::test_owners_that_break_a_rule_are_refused",
        edits={_READER: [("                    self._check_owners(index, ids)\n", "                    pass\n")]},
    ),
    Revert(
        defect="unknown raw ids read the default row of the last bucket",
        generator="tests/test_raw_ids.py::test_unknown_ids_read_the_default_row_of_their_bucket",
        edits={
            "delta_tracker/raw_ids.py": [
                (
                    "    return rows[bucket_of(identity, raw_ids)]\n",
                    "    return torch.full_like(raw_ids, rows[-1])\n",
                )
            ]
        },
    ),
    Revert(
        defect="a compaction leaves out the whole blocks of deltas",
        generator="tests/stream/test_compaction.py::test_whole_blocks_of_a_delta_are_merged_before_its_listed_rows",
        edits={
            "delta_tracker/stream/maintenance/compaction.py": [
                ("            rows += [each for part in parts for each in rows_of_whole_blocks(part)]\n", "")
            ]
        },
    ),
    Revert(
        defect="verify does not check that a raw id owns one row after each version",
        generator="tests/cli/test_verify.py::test_verify_finds_a_raw_id_with_two_rows_after_a_version",
        edits={"delta_tracker/cli/verify.py": [("                self._owners.add(rows)\n", "                pass\n")]},
    ),
    Revert(
        defect="an entry of a draft of format 2 is read as if the format were final",
        generator="tests/stream/test_parse.py::test_a_draft_of_format_2_needs_a_new_stream",
        edits={"delta_tracker/stream/format/parse.py": [("    if draft:\n", "    if False:\n")]},
    ),
]
