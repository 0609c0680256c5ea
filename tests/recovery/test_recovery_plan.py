"""States of a rank that other ranks do not have, collision states of other ranks' slots, and objects to read.

All objects that a restore reads are checked before the first write, with one listing of a remote store.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchrec.modules.mc_modules import LFU_EvictionPolicy, MCHManagedCollisionModule

from delta_tracker.errors import CorruptPartError, NotRecoverableError, RestoreMismatchError
from delta_tracker.recovery.recovery_plan import Plan, load_collisions, names_of_all_ranks
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.sharding.collision_states import collision_state
from delta_tracker.sharding.collisions import MchOwners
from delta_tracker.stream.format.manifest import Manifest
from delta_tracker.stream.format.state_tree import StateReader, pack
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity, StateSpec, TableStates
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import Writer

_STATES = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "range"),))


def states_of(*names: Sequence[str]) -> TrainingStates:
    """Return the training states of ranks with these names."""
    writer = Writer(Storage("memory://"), states=_STATES)
    for rank, each in enumerate(names):
        state = {"rank": {name: rank for name in each if name != "data"}, "data": rank if "data" in each else None}
        writer.training.append(pack(state, "state"))
    return TrainingStates(writer.storage, writer.snapshot())


def test_states_of_all_ranks_are_listed() -> None:
    states = states_of(["a", "data"], ["data", "a"])
    assert names_of_all_ranks(states, [], "memory://") == ["a", "data"]
    assert (states.of_all_ranks("a"), states.of_all_ranks("data")) == ([0, 1], [0, 1])


@pytest.mark.parametrize(("first", "second", "rank"), [(["a"], ["a", "b"], 0), (["b", "a"], ["a"], 1)])
def test_a_state_of_some_ranks_only_is_refused(first: list[str], second: list[str], rank: int) -> None:
    states = states_of(first, second)
    with pytest.raises(
        NotRecoverableError, match=rf"rank {rank} had no states \['b'\]: restore it with 2 ranks, or ignore them"
    ):
        names_of_all_ranks(states, [], "memory://")
    assert names_of_all_ranks(states, ["b"], "memory://") == ["a", "b"]
    assert states.of_all_ranks("b") == [None if each == rank else each for each in range(2)]


def test_a_position_of_some_ranks_only_is_refused() -> None:
    with pytest.raises(NotRecoverableError, match=r"rank 1 had no states \['data'\]"):
        names_of_all_ranks(states_of(["data"], []), [], "memory://")


_NUM_SLOTS = 64  # of each rank that published


def _module(rank: int, world_size: int) -> MCHManagedCollisionModule:
    """Return the module of a rank of a table of ``4 * _NUM_SLOTS`` slots."""
    num_slots = 4 * _NUM_SLOTS // world_size
    return MCHManagedCollisionModule(
        zch_size=num_slots,
        device=torch.device("cpu"),
        eviction_interval=2,
        eviction_policy=LFU_EvictionPolicy(),
        input_hash_size=400,
        output_global_offset=rank * num_slots,
    )


def _load(library: TrainingStates, rank: int, world_size: int) -> tuple[dict[str, Any], int]:
    """Load the collision states of a rank, and return them with the number of loaded bytes."""
    module = _module(rank, world_size)
    end = module._output_global_offset + module._zch_size
    size = 4 * _NUM_SLOTS // world_size
    identity = Identity(400, tuple(Bucket((first, first + size), first + size - 1) for first in range(0, 256, size)))
    owners = {"t": MchOwners("t", identity, (end - size, end), module, torch.device("cpu"))}
    loaded = []
    load = StateReader._leaf

    def counted(reader: StateReader, node: list[Any]) -> object:
        value = load(reader, node)
        loaded.append(value.nbytes if isinstance(value, Tensor) else 0)
        return value

    with mock.patch.object(StateReader, "_leaf", counted):
        return load_collisions(library, owners, range(4)), sum(loaded)


def _library() -> TrainingStates:
    """Return the training states of four ranks."""
    writer = Writer(Storage("memory://"), states=_STATES)
    states = [collision_state(_module(rank, 4)) for rank in range(4)]
    writer.training = [pack({"library": {"collisions": {"t": state}}}, "state") for state in states]
    return TrainingStates(writer.storage, writer.snapshot())


def test_a_rank_loads_only_the_collision_states_of_its_slots() -> None:
    library = _library()
    own = 3 * 8 * _NUM_SLOTS + 8  # raw ids, their slots and their counts, and the iteration
    for world_size in (4, 2, 1):
        for rank in range(world_size):
            found, num_bytes = _load(library, rank, world_size)
            (_, states) = found["t"]
            assert [state["offset"] for state in states] == [
                first * _NUM_SLOTS for first in range(rank * 4 // world_size, (rank + 1) * 4 // world_size)
            ]
            assert num_bytes == own * 4 // world_size


def test_collision_states_of_more_ranks_are_refused_without_loading_them() -> None:
    library = _library()
    with (
        mock.patch.object(StateReader, "_leaf", side_effect=AssertionError("a tensor was loaded")),
        pytest.raises(RestoreMismatchError, match="in the slots 0 to 32, which are not those of one or several ranks"),
    ):
        _load(library, 0, 8)


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
    given = {"storage": storage, "path": [last], "names": last.dense.keys() if has_dense else (), "continues": False}
    empty: dict[str, Any] = {each.name: {} for each in fields(Plan) if each.name not in given}
    return Plan(**given, **empty)


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
