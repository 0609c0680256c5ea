"""Every rule of FORMAT.md is shown by a test: each sentence with MUST is listed here with the test that breaks it."""

from __future__ import annotations

import ast
import itertools
import re
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import xxhash

from delta_tracker import Predictor, Storage
from delta_tracker.errors import CorruptPartError, MalformedError, StreamReplacedError
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest, Part, entry_name
from delta_tracker.stream.format.part_reader import read_parts
from delta_tracker.stream.format.part_writer import put_part
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import FQN, Writer

_TESTS = Path(__file__).parent.parent
_FORMAT = _TESTS.parent / "delta_tracker" / "stream" / "FORMAT.md"
_HERE = "stream/test_format_rules.py"
_STATES = "stream/test_row_states.py"
_SOME_TABLES = "stream/test_partial_mirrors.py"
_IDENTITIES = "stream/test_identities.py"

# The beginning of each sentence, and the tests that break the rule, or that fail if the library does.
_RULES = {
    "The newest entry, the **head**, MUST NOT be deleted": [
        "stream/test_lost_entries.py::test_one_publisher_continues_whatever_a_person_deletes",
    ],
    "The next version MUST be a snapshot": [
        "stream/test_log.py::test_a_log_that_lost_its_newest_entries_continues_with_a_claim_and_a_snapshot",
    ],
    "A publisher MUST NOT create the name of a lost entry again": [
        "stream/test_log.py::test_a_log_that_lost_its_newest_entries_continues_with_a_claim_and_a_snapshot",
        "stream/test_log.py::test_the_name_of_a_version_of_unknown_outcome_is_not_used_for_a_claim",
    ],
    "Readers MUST ignore every other object": ["stream/test_log.py::test_unknown_objects_are_skipped"],
    "Afterwards a process whose root is missing MUST NOT create it": [
        "contract/test_storage.py::test_a_directory_that_vanished_is_not_created_again"
    ],
    "A publisher MUST NOT write to another directory": [
        "contract/test_storage.py::test_no_call_writes_to_another_directory_than_the_opened_one"
    ],
    "A **publisher** MUST use a store": ["system/test_s3.py::test_a_store_that_ignores_the_condition_is_refused"],
    "A fenced publisher MUST NOT commit again": ["stream/test_log.py::test_a_second_claim_fences_the_first"],
    "Whatever deletes objects MUST sync": [
        "stream/test_retention.py::test_a_pass_syncs_before_and_between_its_deletions",
        "system/test_power_loss.py::test_a_power_loss_at_any_call_loses_no_acknowledged_version",
    ],
    "Whatever creates a merged entry MUST sync": [f"{_HERE}::test_a_compaction_syncs_what_it_merges"],
    "It MUST keep the head and the head's parent": [
        "stream/test_retention.py::test_versions_beyond_a_bound_are_removed"
    ],
    "Of former streams, it MUST keep the claims with `forked_from`": [
        "stream/test_promotion.py::test_a_mirror_that_begins_after_promotions_has_their_claims"
    ],
    "A snapshot of which an object is missing or has another size MUST NOT count": [
        "stream/test_retention.py::test_a_snapshot_that_lost_an_object_replaces_no_older_one",
        "stream/test_retention.py::test_a_merged_snapshot_that_lost_an_object_replaces_no_version",
    ],
    "It MUST also keep each claim": [
        "stream/test_retention.py::test_claims_and_the_entries_before_them_stay_without_parts",
        "stream/test_sleepers.py::test_no_late_entry_counts_wherever_a_publisher_sleeps_or_dies",
    ],
    "A draft that is being written is locked (`flock`) and MUST NOT": [
        "stream/test_retention.py::test_the_draft_of_a_running_upload_stays"
    ],
    "A process that writes parts MUST create": [
        "stream/test_retention.py::test_a_compaction_that_takes_too_long_names_no_parts"
    ],
    "All ages are by the store's clock": [
        "stream/test_retention.py::test_a_wrong_clock_of_a_publisher_changes_no_age",
        "stream/test_heartbeat_metrics.py::test_wrong_clocks_change_no_age",
    ],
    # A rule for stores: it bounds how late the requests come that these schedules delay.
    "After a publisher has received a response": [
        "stream/test_sleepers.py::test_no_late_entry_counts_wherever_a_publisher_sleeps_or_dies"
    ],
    "| `format` | integer | 1; readers MUST reject anything else": [
        "stream/test_parse.py::test_a_bad_field_is_refused",
        "stream/test_parse.py::test_the_bad_fields_are_all_fields",
    ],
    "| `generation` | count | MUST NOT decrease": [
        f"{_HERE}::test_a_generation_that_falls_is_not_applied",
        f"{_HERE}::test_a_generation_that_falls_is_not_merged",
    ],
    "Per table, `all` blocks MUST be disjoint rectangles": [
        "stream/test_parse.py::test_blocks_outside_their_table_or_on_each_other_are_refused"
    ],
    "In a snapshot the `all` blocks MUST cover": ["stream/test_manifest.py::test_a_snapshot_holds_every_row_once"],
    "There MUST be no `__metadata__`": [f"{_HERE}::test_metadata_in_a_part_is_refused"],
    "The part MUST hold exactly the tensors": [
        "stream/test_part_reader.py::test_a_part_that_is_not_what_its_record_says_is_refused"
    ],
    "All escapes MUST be used": ["stream/test_encoding.py::test_bytes_that_packing_never_writes_are_refused"],
    "The reader MUST check that `stream` is the same": [
        "predictor/test_predictor.py::test_another_stream_in_the_same_place_is_refused_until_it_has_a_snapshot",
        f"{_HERE}::test_a_generation_that_falls_is_not_applied",
        f"{_HERE}::test_a_parent_that_is_not_the_last_entry_is_not_applied",
    ],
    "Readers MUST NOT write anything before": [
        "predictor/test_predictor.py::test_a_damaged_part_changes_nothing",
        "predictor/test_predictor.py::test_a_version_is_applied_whole_or_not_at_all",
    ],
    "Readers MUST check sizes before they allocate memory": [
        "contract/test_storage.py::test_an_object_larger_than_expected_is_refused_before_it_is_read",
        "stream/test_part_reader.py::test_sizes_that_wrap_around_are_refused",
        "stream/test_encoding.py::test_a_bomb_is_not_inflated",
    ],
    "Readers MUST reject an object with a duplicate name": [
        "stream/test_parse.py::test_a_field_twice_is_refused",
        "stream/test_parse.py::test_mutated_manifests_are_refused_or_right",
        "stream/test_part_reader.py::test_a_duplicate_tensor_in_the_header_is_refused",
    ],
    "Readers MUST ignore unknown fields": ["stream/test_parse.py::test_unknown_fields_are_ignored"],
    "Readers MUST NOT assume": [
        f"{_HERE}::test_a_stream_that_breaks_every_habit_of_the_writer_is_read",
        "predictor/test_predictor.py::test_a_missing_version_is_named_and_nothing_beyond_it_applied",
    ],
    # Format 2
    "A reader that finds a `format` that is an integer above 2": [
        "stream/test_parse.py::test_an_entry_of_a_newer_format_needs_a_newer_release",
        "stream/test_parse.py::test_a_format_that_is_no_number_is_malformed",
    ],
    "The first version that is not a claim after a change": ["publisher/test_states.py::test_case"],  # resumed
    "Versions that differ in one of these MUST NOT be merged": [
        f"{_STATES}::test_versions_with_other_states_are_not_merged",
        f"{_IDENTITIES}::test_versions_with_other_identities_or_encodings_are_not_merged",
    ],
    "| `optimizer` | null or string": ["stream/test_parse.py::test_a_bad_field_of_format_2_is_refused"],
    "In a **table with states**": ["stream/test_parse.py::test_a_bad_field_of_format_2_is_refused"],
    "A part has these fields in addition": [
        "stream/test_parse.py::test_a_bad_field_of_format_2_is_refused",
        f"{_STATES}::test_tables_without_states_have_no_object_with_states",
    ],
    "Readers that need only values, such as predictors": [f"{_STATES}::test_a_predictor_needs_no_states"],
    "A reader of the whole object MUST check every digest": [
        f"{_STATES}::test_every_flipped_byte_of_a_body_or_its_digests_is_refused"
    ],
    "A reader of some tensors MUST check": [
        "predictor/test_table_choice.py::test_a_damaged_tensor_is_found_before_a_row_changes"
    ],
    "A reader of ranges MUST check": [
        f"{_STATES}::test_every_flipped_byte_of_a_body_or_its_digests_is_refused",
        f"{_STATES}::test_an_object_of_another_size_or_without_bytes_is_refused",
    ],
    "It MUST check the header before": [f"{_STATES}::test_a_header_is_checked_before_it_is_used"],
    "**The newest wins** holds for rows": [
        "stream/test_overlay.py::test_values_and_states_are_from_the_same_rows",
        f"{_STATES}::test_rows_keep_their_states_when_they_are_selected",
        f"{_STATES}::test_a_compaction_keeps_the_states_with_their_rows",
        f"{_IDENTITIES}::test_owners_and_values_are_from_the_same_rows_after_an_overlay",
        f"{_IDENTITIES}::test_a_compaction_keeps_the_owners_with_their_rows",
    ],
    "A span MUST have exactly the bytes": [
        "stream/test_state_tree.py::test_invalid_texts_are_refused_before_the_data_are_read"
    ],
    "A reader that knows the key MUST match parameters": [
        "recovery/test_changed_optimizers.py::test_states_follow_the_names_of_their_parameters"
    ],
    "Readers MUST ignore other keys": [f"{_STATES}::test_a_training_state_is_decoded_in_parts"],
    "A table with raw ids MUST have one range": ["stream/test_parse.py::test_a_bad_field_of_format_2_is_refused"],
    "Each of its blocks MUST have all columns": ["stream/test_parse.py::test_a_bad_field_of_format_2_is_refused"],
    "A default row MUST NOT have an owner": [f"{_IDENTITIES}::test_owners_that_break_a_rule_are_refused"],
    "A raw id MUST NOT own two rows of a `list`": [
        f"{_IDENTITIES}::test_owners_that_break_a_rule_are_refused",
        f"{_IDENTITIES}::test_a_listed_owner_replaces_that_in_a_whole_block",
    ],
    "A row whose owner changed since the version before MUST be in": [
        "tracker/test_owner_store.py::test_deltas_have_the_raw_ids_that_lookups_map_to_the_rows",
        "tracker/test_top_k.py::test_rows_with_another_raw_id_are_never_left_out",
    ],
    "A raw id MUST NOT own two rows of a version": [
        "predictor/test_identities.py::test_a_version_with_a_raw_id_of_two_rows_is_refused_before_any_write",
        "cli/test_verify.py::test_verify_finds_a_raw_id_with_two_rows_after_a_version",
    ],
    "A reader that serves lookups": [
        "predictor/test_identities_random.py::test_random_owners_never_read_the_row_of_another",
        "predictor/test_identities.py::test_lookups_in_other_threads_never_read_the_row_of_another_raw_id",
    ],
    "It MUST apply a version in these steps": [
        "predictor/test_identities_random.py::test_random_owners_never_read_the_row_of_another",
        "predictor/test_identities.py::test_a_rollback_after_a_failed_attempt_maps_the_raw_ids_again",
    ],
    "A row of an `all` block that is also listed MUST NOT be written": [
        "predictor/test_identities_random.py::test_random_owners_never_read_the_row_of_another",
        f"{_IDENTITIES}::test_a_listed_owner_replaces_that_in_a_whole_block",
    ],
    "A reader MUST NOT apply a table with raw ids": [
        "sharding/test_raw_id_maps.py::test_refusals_of_sorted_modules",
        "sharding/test_raw_id_maps.py::test_refusals_of_hash_modules",
        "predictor/test_identities.py::test_a_table_with_raw_ids_needs_a_mapping",
    ],
    "Readers of a whole part MUST check these rules": [
        f"{_IDENTITIES}::test_owners_that_break_a_rule_are_refused",
        f"{_IDENTITIES}::test_owners_must_be_there_exactly_if_the_table_has_raw_ids",
    ],
    "A reader that needs states MUST start": [
        "recovery/test_recovery_path.py::test_a_version_without_states_is_refused"
    ],
    "It MUST reject a later entry": [
        "recovery/test_recovery_path.py::test_a_delta_after_other_tables_or_states_is_refused",
        "recovery/test_recovery_path.py::test_a_claim_stands_for_the_version_before_it",
    ],
    "Of the confirmed pointers to one stream, a reader MUST": [
        "stream/test_pointer.py::test_a_reader_believes_the_newest_pointer_whose_entry_is_there"
    ],
    "A reader MUST NOT take any field": [
        "stream/test_pointer.py::test_a_pointer_that_was_forged_for_four_polls_does_no_harm"
    ],
    "A reader MUST report anything but a pointer": [
        "predictor/test_fault_delay.py::test_an_answer_that_is_no_pointer_is_reported_until_it_is_right"
    ],
    "A reader MUST check each object that a pointer leads to": [
        "stream/test_log_index.py::test_an_entry_of_another_hash_than_the_pointers_is_a_stale_cache"
    ],
    "It MUST NOT read entries below": ["stream/test_log_index.py::test_entries_below_the_oldest_are_refused"],
    "It MUST NOT follow a pointer to another stream": [
        "stream/test_pointer.py::test_another_stream_is_believed_once_its_entry_is_there"
    ],
    "All objects that an entry names MUST be in the mirror": [
        "system/test_mirror_sweep.py::test_a_killed_mirror_leaves_a_prefix_and_is_completed"
    ],
    "It MUST create `log/tables.json` before": [
        f"{_SOME_TABLES}::test_a_mirror_has_the_log_and_the_parts_of_its_tables",
        f"{_SOME_TABLES}::test_of_two_mirrors_that_begin_at_once_one_is_refused",
    ],
    "A reader MUST NOT apply a version if a part": [
        f"{_SOME_TABLES}::test_a_reader_at_a_version_keeps_its_rows",
        f"{_SOME_TABLES}::test_a_reader_of_other_tables_is_refused",
    ],
    "It MUST check the entry's hash": ["predictor/test_pins.py::test_a_pin_of_another_entry_is_refused"],
    "It MUST NOT be remembered once the store": [
        "predictor/test_pins.py::test_a_forged_pin_counts_only_while_it_exists",
        "stream/reading/test_orders.py::test_a_forged_pin_that_is_lost_stops_no_predictor",
    ],
    "A writer MUST check the entries and objects": [
        "predictor/test_pins.py::test_a_pin_whose_path_is_deleted_meanwhile_is_corrected"
    ],
    "Retention MUST keep all entries and objects": ["predictor/test_pins.py::test_retention_keeps_the_path_of_a_pin"],
    "Before a pass deletes entries or their objects, it MUST write": [
        "stream/test_pinning.py::test_a_pin_between_the_look_and_the_deletions_of_a_pass_ends_the_pass",
        "predictor/test_pins.py::test_a_pin_written_during_a_retention_pass_ends_the_pass",
    ],
    "A pass MUST end itself": ["stream/test_pinning.py::test_a_pass_ends_before_its_announcement_expires"],
    "After a writer has written a pin": [
        "stream/test_pinning.py::test_a_pass_that_ends_while_a_pin_is_checked_is_found",
        "stream/test_pinning.py::test_a_pin_during_a_retention_pass_keeps_its_versions_or_is_undone",
    ],
    "If the `before` of one": ["stream/test_pinning.py::test_an_interrupted_pass_is_announced_for_an_hour"],
    "A mirror MUST NOT create an entry of its own": [
        "stream/test_mirroring.py::test_a_mirror_stops_if_another_program_appends_to_the_destination",
        "stream/test_mirroring.py::test_a_copy_has_the_same_bytes_from_the_newest_snapshot_on",
    ],
    "Its `stream` is new, its `generation` is one higher": [
        "stream/test_promotion.py::test_a_promotion_is_a_claim_of_a_new_stream",
        "stream/test_promotion.py::test_invalid_forks_are_rejected",
    ],
}


def _rules() -> Iterator[str]:
    """Yield the sentences and table rows of FORMAT.md with MUST."""
    blocks = re.split(r"\n\n|\n(?=\||- |\d\. )", _FORMAT.read_text())
    for block in blocks:
        text = re.sub(r"^(- |\d\. )", "", " ".join(block.split()))
        sentences = [text] if text.startswith("|") else re.split(r"(?<=[.:;]) (?=[A-Z*])", text)
        yield from (sentence for sentence in sentences if "MUST" in sentence)


def test_each_rule_names_its_tests() -> None:
    rules = list(_rules())
    assert len(rules) > 20
    for rule in rules:
        assert sum(rule.startswith(start) for start in _RULES) == 1, f"list the tests of the rule: {rule}"
    for start in _RULES:
        assert any(rule.startswith(start) for rule in rules), f"FORMAT.md has no such rule: {start}"


@pytest.mark.parametrize("test", sorted(set(itertools.chain.from_iterable(_RULES.values()))))
def test_a_test_that_a_rule_names_exists(test: str) -> None:
    name, _, function = test.partition("::")
    nodes = ast.walk(ast.parse((_TESTS / name).read_text()))
    assert function in {node.name for node in nodes if isinstance(node, ast.FunctionDef)}


def _forge(writer: Writer, entry: Manifest) -> None:
    """Create an entry that no publisher creates."""
    assert writer.storage.create(entry_name(entry.version), entry.to_json())


def _fallen() -> tuple[Writer, Manifest]:
    """Return a stream of generation 2, and an entry of generation 1 that follows its head."""
    storage = Storage("memory://")
    old = Writer(storage).claim.head
    writer = Writer(storage)
    writer.snapshot()
    head = writer.delta([1])
    fallen = replace(head, version=head.version + 1, generation=old.generation, parent=head.link, parts=())
    return writer, fallen


@pytest.mark.parametrize("restart", [False, True])
def test_a_generation_that_falls_is_not_applied(restart: bool) -> None:
    writer, fallen = _fallen()
    predictor = Predictor(writer.model(), writer.storage)
    head = predictor.sync()
    if restart:
        state = predictor.state_dict()
        predictor = Predictor({FQN: writer.table.clone()}, writer.storage)
        predictor.load_state_dict(state)
    _forge(writer, fallen)
    with pytest.raises(StreamReplacedError):
        predictor.sync()
    assert predictor.version == head


def test_a_generation_that_falls_is_not_merged() -> None:
    writer, fallen = _fallen()
    _forge(writer, fallen)
    with pytest.raises(MalformedError, match="generation 1 is below 2"):
        compact(writer.storage, fold=1e-9)


def test_a_generation_that_falls_is_not_rolled_back_to() -> None:
    writer, fallen = _fallen()
    predictor = Predictor(writer.model(), writer.storage)
    _forge(writer, fallen)
    with pytest.raises(MalformedError, match="generation 1 is below 2"):
        predictor.rollback(fallen.version)


def test_a_parent_that_is_not_the_last_entry_is_not_applied() -> None:
    writer, fallen = _fallen()
    predictor = Predictor(writer.model(), writer.storage)
    head = predictor.sync()
    assert fallen.parent is not None
    _forge(writer, replace(fallen, generation=2, parent=replace(fallen.parent, xxh3="0" * 32)))
    with pytest.raises(StreamReplacedError):
        predictor.sync()
    assert predictor.version == head


def test_a_compaction_syncs_what_it_merges(tmp_path: Path) -> None:
    storage = WrappedStorage(Storage(tmp_path))
    writer = Writer(storage)
    writer.snapshot()
    writer.delta([1])
    writer.delta([2])
    storage.take()
    assert compact(storage, fold=10.0) is not None
    found = [(each.kind, each.name.split("/")[0]) for each in storage.operations if each.kind in ("sync", "create")]
    assert found == [("sync", "log"), ("create", "merged")]


def test_metadata_in_a_part_is_refused() -> None:
    writer = Writer(Storage("memory://"))
    entry = writer.snapshot()
    (part,) = entry.parts
    data = writer.storage.read(part.name, max_bytes=1 << 20).tobytes()
    length = int.from_bytes(data[:8], "little")
    header = data[8 : 8 + length].rstrip().replace(b"{", b'{"__metadata__":{},', 1)
    header += b" " * (-len(header) % 8)
    _rewrite(writer, entry, len(header).to_bytes(8, "little") + header + data[8 + length :])
    with pytest.raises(CorruptPartError, match="metadata"):
        read_parts(writer.storage, StreamLog(writer.storage).read(1), memory_bytes=1 << 20)


def _rewrite(writer: Writer, entry: Manifest, data: bytes) -> None:
    """Replace the only part of an entry, and record its new size and hash."""
    (part,) = entry.parts
    writer.storage.replace(part.name, data)
    changed = replace(part, num_bytes=len(data), xxh3=xxhash.xxh3_128_hexdigest(data))
    writer.storage.replace(entry_name(entry.version), replace(entry, parts=(changed,)).to_json())


def test_a_stream_that_breaks_every_habit_of_the_writer_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times fall, versions have no rows, parts or tables, a rank has several parts, and names say nothing."""
    times = itertools.count(2e9, -1000.0)
    monkeypatch.setattr(time, "time", lambda: next(times))
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, writer.storage)
    empty = replace(writer.claim.head, kind="delta", parts=())
    assert writer.claim.commit(empty).tables == {writer.spec.fqn: writer.spec}
    assert writer.claim.commit(replace(empty, tables={}, dense={})).tables == {}
    writer.table.normal_()
    parts: list[Part] = []
    for number, blocks in enumerate(([((0, 2), [1]), ((2, 5), [3])], [((5, 20), [7, 9])], [])):
        rows = [
            BlockRows.of(
                Block(FQN, within, (0, 4), len(ids), "list", Encoding.F32), torch.tensor(ids), writer.table[ids]
            )
            for within, ids in blocks
        ]
        parts.append(put_part(writer.storage, f"parts/{9 - number}.safetensors", rows, states_name=None))
    committed = writer.claim.commit(replace(empty, parts=tuple(parts)))
    assert [len(part.blocks) for part in committed.parts] == [2, 1, 0]
    assert predictor.sync() == committed.version == 4
    changed = torch.zeros(writer.spec.num_rows, dtype=torch.bool)
    changed[[1, 3, 7, 9]] = True
    assert torch.equal(model[FQN][changed], writer.table[changed])
    assert model[FQN][~changed].eq(0).all()
