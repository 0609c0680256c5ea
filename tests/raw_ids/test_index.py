"""The index of raw ids equals a dict, whatever was mapped before."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker import RawIdIndex
from delta_tracker.errors import InvalidArgumentError
from delta_tracker.predictor.identities import owner_changes
from delta_tracker.raw_ids.raw_id_map import NO_OWNER, defaults_of
from delta_tracker.types import Bucket, Identity

_APPLIED_BYTES = 60
_IDS = st.one_of(st.integers(-3, 12), st.sampled_from([-(2**63), -(2**63) + 1, 2**63 - 2]))


@given(data=st.data(), first=st.sampled_from([0, 5]), num_rows=st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_a_mapping_equals_a_dict(data: Any, first: int, num_rows: int) -> None:
    mapping = RawIdIndex(num_rows)
    mapping.rows = first, first + num_rows  # as a collision module that is one shard of several
    mapping._slots += first
    default = first + num_rows - 1
    mapping.set_identity(Identity(0, (Bucket((0, default + 1), default),)))
    owned: dict[int, int] = {}
    for _ in range(data.draw(st.integers(1, 4))):
        slots = data.draw(st.permutations(range(first, default)))
        ids = data.draw(st.lists(_IDS, unique=True, max_size=num_rows - 1))
        owners = torch.full((num_rows,), NO_OWNER)
        final = dict(zip(ids, slots, strict=False))
        for raw_id, slot in final.items():
            owners[slot - first] = raw_id
        changed = [raw_id for raw_id, slot in owned.items() if final.get(raw_id) != slot]
        rows = torch.tensor([owned[raw_id] for raw_id in changed], dtype=torch.int64)
        mapping.unmap(rows, torch.tensor(changed, dtype=torch.int64))
        for raw_id, slot in owned.items():
            assert mapping.slots_of(torch.tensor(raw_id)) == (default if raw_id in changed else slot)
        mapping.map(mapping.prepare(owners))
        assert torch.equal(mapping.owners(), owners)
        assert sorted(mapping._slots.tolist()) == list(range(first, default + 1))
        assert torch.equal(mapping._raw_ids, mapping._raw_ids.sort().values)
        asked = torch.tensor([*range(-4, 14), *ids, NO_OWNER])
        assert mapping.slots_of(asked).tolist() == [final.get(raw_id, -1) for raw_id in asked.tolist()]
        owned = final


@pytest.mark.parametrize("has_defaults", [False, True])
def test_buckets_that_change(has_defaults: bool) -> None:
    """An index goes from two buckets to one and back; raw ids that were unmapped meanwhile are routed again."""
    default = (lambda row: row) if has_defaults else (lambda _: None)
    two = Identity(100, (Bucket((0, 4), default(3)), Bucket((4, 8), default(7))))
    one = Identity(100, (Bucket((0, 8), default(7)),))
    index = RawIdIndex(8)
    index.set_identity(two)
    owners = torch.full((8,), NO_OWNER)
    owners[[0, 1, 5]] = torch.tensor([10, 20, 60])
    index.map(index.prepare(owners))
    index.unmap(torch.tensor([0, 1, 5]), torch.tensor([10, 20, 60]))
    ids = torch.tensor([10, 20, 60, 70])
    none = torch.full((4,), -1)
    assert torch.equal(index.rows_of(ids), torch.tensor([3, 3, 7, 7]) if has_defaults else none)
    for identity, expected in ((one, [7, 7, 7, 7]), (two, [3, 3, 7, 7])):
        index.set_identity(identity)
        assert torch.equal(index.rows_of(ids), torch.tensor(expected) if has_defaults else none)
        assert bool((index.owners() == NO_OWNER).all())
    index.map(index.prepare(owners))
    assert index.rows_of(ids)[:3].tolist() == [0, 1, 5]


def _filled() -> RawIdIndex:
    index = RawIdIndex(8)
    index.set_identity(Identity(100, (Bucket((0, 4), 3), Bucket((4, 8), 7))))
    owners = torch.full((8,), NO_OWNER)
    owners[[0, 5]] = torch.tensor([10, 60])
    index.map(index.prepare(owners))
    return index


def test_a_saved_index_answers_alike() -> None:
    index, loaded = _filled(), RawIdIndex(8)
    loaded.load_state_dict(index.state_dict())
    ids = torch.tensor([[10, 60], [11, NO_OWNER]])
    assert loaded.rows_of(ids).tolist() == index.rows_of(ids).tolist() == [[0, 5], [3, 7]]
    assert loaded.identity == index.identity
    loaded.load_state_dict(RawIdIndex(8).state_dict())
    assert loaded.identity is None
    assert loaded.rows_of(ids).tolist() == [[-1, -1], [-1, -1]]


@pytest.mark.parametrize(
    "change",
    [
        {"owners": torch.zeros(7, dtype=torch.int64)},
        {"owners": torch.zeros(8)},
        {"owners": torch.zeros(8, dtype=torch.int64)},
        {"hash_size": torch.tensor([-1])},
        {"hash_size": torch.tensor([], dtype=torch.int64)},
        {"buckets": torch.tensor([[0, 4, 3]])},
        {"buckets": torch.tensor([[0, 4], [4, 8]])},
        {"more": torch.zeros(1)},
        {"owners": [NO_OWNER] * 8},
        {"hash_size": torch.tensor(100)},
        {"hash_size": torch.tensor([100.0])},
        {"hash_size": torch.tensor([100, 100])},
        {"buckets": torch.tensor([0, 4, 3])},
        {"buckets": torch.tensor([[0.0, 4.0, 3.0], [4.0, 8.0, 7.0]])},
    ],
)
def test_another_state_is_refused(change: dict[str, Any]) -> None:
    index = _filled()
    with pytest.raises(InvalidArgumentError, match="with 8 rows"):
        index.load_state_dict({**index.state_dict(), **change})
    assert index.rows_of(torch.tensor([10, 60])).tolist() == [0, 5]


@pytest.mark.parametrize("state", [None, [], {1: 2, "a": 3}])
def test_other_arguments_are_refused(state: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="with 8 rows"):
        _filled().load_state_dict(state)


@pytest.mark.parametrize("num_rows", [0, -1, 1.0, True, None])
def test_a_size_must_be_a_count(num_rows: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="num_rows"):
        RawIdIndex(num_rows)


def test_ids_must_be_int64() -> None:
    with pytest.raises(InvalidArgumentError, match="raw_ids"):
        RawIdIndex(3).rows_of(torch.tensor([1], dtype=torch.int32))


def test_unknown_ids_read_the_default_rows_of_their_buckets() -> None:
    index = _filled()
    ids = torch.arange(-50, 150)
    assert index.identity is not None
    expected = defaults_of(index.identity, ids)
    expected[ids == 10], expected[ids == 60] = 0, 5
    assert torch.equal(index.rows_of(ids), expected)


def _peak_bytes(call: Callable[[], object]) -> int:
    """Return the most memory that the tensors and arrays of a call took at one time, in bytes."""
    tracemalloc.start()  # numpy reports its arrays to it
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            call()
        _, arrays = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    events = [each for each in profile.profiler.kineto_results.events() if each.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda each: each.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return peak + arrays


def test_the_memory_per_row_is_as_documented() -> None:
    num_rows = 100_000
    identity = Identity(0, (Bucket((0, num_rows), num_rows - 1),))
    index = RawIdIndex(num_rows)
    assert sum(each.untyped_storage().nbytes() for each in index.tensors()) == 16 * num_rows
    owners = torch.randperm(num_rows)
    owners[-1] = NO_OWNER
    for first in (0, num_rows):  # the second version changes the owners of all rows
        version = {"t": (torch.arange(num_rows), torch.where(owners == NO_OWNER, NO_OWNER, owners + first))}

        def apply(version: Any = version) -> None:
            for change in owner_changes(version, {"t": identity}, {"t": (index,)}):
                change.unmap()
                change.raw_ids.set_identity(change.identity)
                change.raw_ids.map(change.raw_ids.prepare(change.final))

        peak = _peak_bytes(apply) / num_rows  # the first call also loads what it needs
    assert 0.9 * _APPLIED_BYTES < peak <= _APPLIED_BYTES
