"""Fixes in format 2: row states, checked ranges, and entries of newer formats."""

from __future__ import annotations

from tests.reverts.revert import Revert

_LOG = "delta_tracker/stream/log.py"
_READER = "delta_tracker/stream/format/part_reader.py"
_STATES = "tests/stream/test_row_states.py"

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
                    "partial(self._overlaid, whole, None), states)\n",
                    "partial(self._overlaid, whole, None), whole.states)\n",
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
]
