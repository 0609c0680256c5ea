"""Faults of streams and stores, by the generator that finds them."""

from __future__ import annotations

from tests.reverts.mutation import DoesNothing, Replaces, Returns
from tests.reverts.revert import Revert

_PASSES = (
    "tests/stream/test_retention_passes.py"
    "::test_passes_of_one_process_delete_what_separate_ones_delete_within_the_grace"
)

_MIRROR = "tests/stream/test_mirror_decisions.py::test_a_mirror_copies_what_follows_and_nothing_else"

REVERTS = {
    f"{_MIRROR}[restarted]": [
        Revert("a mirror copies a late claim", Returns("mirroring._is_committed", "True")),
        Revert("a mirror copies a malformed entry that nothing follows", Returns("mirroring._is_followed", "True")),
        Revert(
            "a mirror copies an entry of another stream",
            Replaces("mirroring.next_copy", "Position.after(head).leads_to(entry)", "True"),
        ),
        Revert("a mirror that restarts checks nothing", Returns("mirroring._check", "log.entry(head.version + 1)")),
    ],
    f"{_MIRROR}[due]": [
        Revert("a mirror at rest sees no gap of its source", Replaces("mirroring.next_copy", "is_due", "False")),
    ],
    "tests/stream/test_partial_mirrors.py::test_a_mirror_has_the_log_and_the_parts_of_its_tables": [
        Revert("a mirror of some tables lacks parts of them", Returns("TableChoice.has", "not self.patterns")),
    ],
    "tests/stream/test_partial_mirrors.py::test_a_destination_keeps_its_choice": [
        Revert("a mirror continues with other tables than it began with", DoesNothing("check_mirrored")),
    ],
    "tests/stream/test_partial_mirrors.py::test_a_reader_goes_on_at_the_full_url": [
        Revert(
            "a reader of a mirror of other tables asks no other url",
            Replaces("decide._asks_others", "LeftOutPartError", "OlderCopyError"),
        ),
    ],
    "tests/stream/test_pointer.py::test_a_reader_believes_the_newest_pointer_whose_entry_is_there": [
        Revert("a late writer of the pointer moves readers back"),
        Revert("a reader believes a pointer before it has read its entry"),
    ],
    "tests/predictor/test_pins.py::test_a_forged_pin_counts_only_while_it_exists": [
        Revert("a forged pin counts for ever"),
        Revert("what was done for a forged pin is not forgotten with it"),
        Revert("a pin whose entry was read is forgotten if the store has fewer pins"),
    ],
    "tests/stream/test_pointer_writer.py::test_the_pointer_is_right_in_random_histories": [
        Revert("the pointer keeps deleted and merged versions after upkeep"),
    ],
    "tests/stream/test_overlay.py::test_values_and_states_are_from_the_same_rows": [
        Revert("listed rows replace the values of a whole block, but not their states"),
    ],
    "tests/stream/test_row_states.py::test_every_flipped_byte_of_a_body_or_its_digests_is_refused[part-ranges]": [
        Revert("a range of an object is read without its digest"),
    ],
    "tests/stream/test_identities.py::test_a_compaction_keeps_the_owners_with_their_rows": [
        Revert("merged rows have the owners of another version"),
    ],
    "tests/stream/test_identities.py::test_owners_and_values_are_from_the_same_rows_after_an_overlay": [
        Revert("listed rows replace the values of a whole block, but not their owners"),
    ],
    "tests/stream/test_retention.py::test_no_reader_within_the_grace_period_loses_its_next_version": [
        Revert("a publisher's clock decides what retention deletes"),
    ],
    "tests/stream/test_sleepers.py::test_no_late_entry_counts_wherever_a_publisher_sleeps_or_dies": [
        Revert("an answer that says try again fences the publisher"),
        Revert("retention frees the names that a fenced publisher tries", Returns("retention._guards", "set()")),
        Revert("retention frees the name of the entry before a claim"),
    ],
    "tests/stream/test_sleepers.py::test_the_claim_of_a_publisher_that_is_killed_is_never_served": [
        Revert("a reader takes a claim that was created late", Returns("StreamLog.is_committed", "True")),
    ],
    "tests/stream/test_lost_entries.py::test_one_publisher_continues_whatever_a_person_deletes": [
        Revert("a publisher whose successor's claim was deleted acknowledges a version at its name"),
        Revert("a publisher does not see the new stream in its emptied log"),
    ],
    "tests/stream/test_sleepers.py::test_no_late_entry_counts_in_a_directory_either": [
        Revert("a late entry in a directory proves its own place in the log"),
    ],
    _PASSES: [
        Revert("the bytes of versions since the last pass do not count"),
        Revert("snapshots since the last pass are not known to retention"),
        Revert("merged entries that another one covers stay until the next full pass"),
        Revert("a retention pass forgets a snapshot right before a claim"),
    ],
    "tests/stream/test_transfer_random.py::test_random_interruptions_cost_what_they_interrupt": [
        Revert("a read of a part that failed begins at byte 0 in the next call"),
        Revert("what was read of a version before an error is dropped"),
        Revert("a transfer that is interrupted fails although it brought bytes"),
        Revert("stop() waits for a request that hangs"),
    ],
    "tests/stream/test_pinning.py::test_a_pin_during_a_retention_pass_keeps_its_versions_or_is_undone": [
        Revert("a retention pass that has looked for pins deletes what leads to a later one"),
    ],
}
