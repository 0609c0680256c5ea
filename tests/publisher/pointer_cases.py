"""Cases for the pointer object that a publisher writes."""

from __future__ import annotations

import gc
import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, Publisher, Upkeep
from delta_tracker.errors import InvalidArgumentError, UnknownOutcomeError
from delta_tracker.stream.pointer import POINTER_NAME, read_pointer
from delta_tracker.stream.storage.storage import Storage
from tests.models import Spec, shard
from tests.stores.rules import Gate, calls, disconnects, fails, on
from tests.stores.wrapped import WrappedStorage
from tests.waiting import eventually

_DEADLINE = 60.0


def _threads() -> set[threading.Thread]:
    return {each for each in threading.enumerate() if each.name == "head-pointer"}


def publishes_without_the_pointer(rank: int, world_size: int, url: str, hangs: bool) -> None:
    """Check that versions are published while the pointer cannot be written."""
    is_pointer = on("replace", name=POINTER_NAME)
    tried, gate = threading.Event(), Gate(is_pointer)
    rules = [calls(is_pointer, before=lambda _: tried.set()), *[gate] * hangs, fails(is_pointer, "it is full")]
    storage = WrappedStorage(Storage(url, create=True), *rules)
    with ModelDeltaTracker(shard(Spec.every_sharding(world_size))) as tracker:
        publisher = Publisher(tracker, storage, upkeep=Upkeep(pointer_seconds=0.001))
        for _ in range(3):
            publisher.publish()
        assert tried.wait(_DEADLINE) is (rank == 0)
        publisher.publish()
        assert publisher.error is None
        gate.open()
        publisher.close()
    assert read_pointer(storage) is None


def points_at_the_head(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """Publish with upkeep, and return the pointer after the end."""
    before = _threads()
    storage = Storage(url, create=True)
    with ModelDeltaTracker(shard(Spec.every_sharding(world_size))) as tracker:
        publisher = Publisher(tracker, storage, upkeep=Upkeep(compact_every=4, pointer_seconds=0.001))
        assert _threads() <= before, "nothing is committed yet"
        for _ in range(6):
            publisher.publish()
        with mock.patch("delta_tracker.stream.pointer_writer._CLOSE_SECONDS", _DEADLINE):  # for the last write
            publisher.close()
        assert _threads() <= before
        head = publisher.version
    dist.barrier()  # only rank 0 writes the pointer
    pointer = read_pointer(storage)
    assert pointer is not None
    return {"head": head, "pointer": replace(pointer, time=0.0).to_json().decode()}


def points_at_a_version_of_unknown_outcome(rank: int, world_size: int, url: str, is_first: bool) -> None:
    """The answer to a commit is lost. The pointer soon shows the version, although nothing more is published."""
    storage = WrappedStorage(Storage(url, create=True))
    with ModelDeltaTracker(shard(Spec.every_sharding(world_size))) as tracker:
        publisher = Publisher(tracker, storage, upkeep=Upkeep(pointer_seconds=0.001))
        if not is_first:
            publisher.publish()
        with storage.under(disconnects(on("create", name="log/"))), pytest.raises(UnknownOutcomeError):
            publisher.publish()
        eventually(lambda: (pointer := read_pointer(storage)) is not None and pointer.version == publisher.version + 1)
        publisher.close()


def ends_with_the_publisher(rank: int, world_size: int, url: str) -> None:
    """Drop a publisher without closing it, and check that its thread ends."""
    before = _threads()
    with ModelDeltaTracker(shard(Spec.every_sharding(world_size))) as tracker:
        publisher: Publisher | None = Publisher(tracker, url, upkeep=Upkeep(pointer_seconds=0.001))
        assert publisher is not None
        publisher.publish()
        assert _threads() - before
        publisher = None
        gc.collect()
        eventually(lambda: not _threads() - before)


def writes_no_pointer(rank: int, world_size: int, url: str) -> None:
    """Check the argument of the publisher."""
    storage = Storage(url, create=True)
    with ModelDeltaTracker(shard(Spec.every_sharding(world_size)), ["a", "b"]) as tracker:
        for seconds in (0, -1.0, float("nan"), float("inf")):
            with pytest.raises(InvalidArgumentError, match="pointer_seconds"):
                Publisher(tracker, storage, "a", upkeep=Upkeep(pointer_seconds=seconds))
        publisher = Publisher(tracker, storage, "b", upkeep=Upkeep(pointer_seconds=None))
        publisher.publish()
        publisher.close()
    assert read_pointer(storage) is None
