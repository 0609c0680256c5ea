"""Objects that a restore reads: all are checked before the first write, with one listing of a remote store."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from delta_tracker.errors import CorruptPartError, NotRecoverableError
from delta_tracker.recovery.plan import Plan
from delta_tracker.state_tree import pack
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import Writer

_STATES = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "range"),))


@pytest.fixture
def stream() -> tuple[WrappedStorage, Manifest]:
    """Return a store with a version that has the training states of 16 ranks and a dense tensor."""
    storage = WrappedStorage(Storage("memory://"))
    writer = Writer(storage, states=_STATES)
    writer.training = [pack({"rank": rank}, "state") for rank in range(16)]
    writer.dense = {"w": torch.ones(3)}
    writer.snapshot()
    last = writer.snapshot()
    storage.take()
    return storage, last


def plan_of(storage: Storage, last: Manifest, *, has_dense: bool = True) -> Plan:
    empty: dict[str, Any] = {name: {} for name in ("shards", "targets", "scalars", "collisions", "held", "dense")}
    return Plan(storage=storage, path=[last], names=last.dense.keys() if has_dense else (), applied=None, **empty)


def test_objects_of_a_remote_store_are_checked_with_one_listing(
    stream: tuple[WrappedStorage, Manifest],
) -> None:
    storage, last = stream
    remote = WrappedStorage(storage, is_remote=True)
    plan_of(remote, last).check_objects(last.training)
    (listing,) = remote.operations
    assert listing.kind == "objects"
    listed = storage.names(listing.name, **listing.arguments)
    assert len(listed) == len(last.objects), "no objects of the version before"


def test_a_directory_is_asked_for_the_needed_objects_only(stream: tuple[WrappedStorage, Manifest]) -> None:
    storage, last = stream
    plan_of(storage, last).check_objects(last.training)
    assert storage.count() == storage.count("size") == len(last.training) + len(last.parts), (
        "no states of rows that no shard has"
    )


def test_nothing_is_listed_without_objects(stream: tuple[WrappedStorage, Manifest]) -> None:
    storage, last = stream
    plan_of(storage, last, has_dense=False).check_objects(())
    assert not storage.operations


def test_a_missing_object_is_refused(stream: tuple[WrappedStorage, Manifest]) -> None:
    storage, last = stream
    storage.delete(last.training[7].name)
    with pytest.raises(NotRecoverableError, match=f"{last.training[7].name} is missing"):
        plan_of(storage, last).check_objects(last.training)
    plan_of(storage, last).check_objects(())
    storage.delete(last.parts[0].name)
    with pytest.raises(NotRecoverableError, match=f"{last.parts[0].name} is missing"):
        plan_of(storage, last).check_objects(())


def test_an_object_of_another_size_is_refused(stream: tuple[WrappedStorage, Manifest]) -> None:
    storage, last = stream
    storage.replace(last.training[3].name, b"short")
    with pytest.raises(CorruptPartError, match="it has 5 bytes instead of"):
        plan_of(storage, last).check_objects(last.training)
