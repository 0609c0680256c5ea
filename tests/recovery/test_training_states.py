"""Values that the library saved in training states: invalid ones are refused, and name their object."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import pytest
import torch

from delta_tracker.errors import CorruptPartError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.recovery.training_states import TrainingStates
from delta_tracker.stream.format.state_tree import pack
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import ShardSpec, StateSpec, TableSpec, TableStates
from tests.stream.streams import Writer

_STATES = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "range"),))
_NUMBERS = {"iter": 3, "iter_cpu": 4, "lr": 0.1, "group_lr": 0.2, "eps": 0, "beta1": 0.9, "beta2": 1, "weight_decay": 0}
_TABLE = TableSpec("plain", 6, 4, torch.float32)
_COLLISION = {
    "class": "Module",
    "policy": "Policy",
    "offset": 2,
    "zch_size": 3,
    "hash_size": 9,
    "eviction_interval": 2,
    "sorted": torch.tensor([5, 7, NO_OWNER]),
    "mapping": torch.tensor([3, 2, 4]),
    "metadata": {"counts": torch.ones(3).long()},
    "iter": torch.tensor([4]),
    "current_iter": 4,
    "last_eviction_iter": 3,
    "evicted": None,
    "buffer_size": 6,
    "history": torch.tensor([8, 5]),
    "history_metadata": {},
}
_LIBRARY: dict[str, Any] = {
    "collisions": {"t": _COLLISION},
    "kernels": {"t": {**_NUMBERS, "iter": torch.tensor(3)}},
    "shards": {"plain": asdict(ShardSpec(_TABLE, 2, 3, ((0, 4),)))},
    "dense": {"w": torch.ones(2)},
    "publisher": "main",
    "consumers": {"other": {"version": 1, "left_out": {"t": torch.tensor([1, 4])}}},
}

_READS: dict[str, Callable[[TrainingStates], object]] = {
    "collisions": lambda library: (library.collision_slots(0), library.collision(0, "t")),
    "kernels": lambda library: library.kernels(0),
    "shards": lambda library: library.shards(0, {"plain": _TABLE}),
    "dense": lambda library: library.dense(),
    "buffers": lambda library: library.buffers(1),
    "publisher": lambda library: library.publisher(),
    "consumers": lambda library: library.consumers(0),
}


def library_of(value: object) -> TrainingStates:
    """Return a reader of training states of two ranks, of which rank 0 has ``value``."""
    writer = Writer(Storage("memory://"), states=_STATES)
    writer.training = [pack({"library": each}, "state") for each in (value, {"buffers": [1]})]
    return TrainingStates(writer.storage, writer.snapshot())


def test_valid_values_are_read() -> None:
    library = library_of(_LIBRARY)
    assert library.kernels(0) == {"t": _NUMBERS}
    assert library.collision_slots(0) == {"t": (2, 5)}
    assert library.collision(0, "t")["history"].tolist() == [8, 5]
    assert library.shards(0, {"plain": _TABLE}) == {"plain": ShardSpec(_TABLE, 2, 3, ((0, 4),))}
    assert torch.equal(library.dense()["w"], torch.ones(2))
    assert (library.publisher(), library.buffers(0)) == ("main", {})
    former = {"rows": [2, 5], "columns": [[0, 4]], "replicated": False}  # of releases before 0.1.0
    shards = library_of({"shards": {"plain": former, "more": former}}).shards(0, {"plain": _TABLE})
    assert shards == {"plain": ShardSpec(_TABLE, 2, 3, ((0, 4),))}
    other = library.consumers(0)["other"]
    assert (other.version, other.left_out["t"].tolist()) == (1, [1, 4])


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("collisions", ...),
        ("collisions.t", []),
        ("collisions.t.sorted", torch.tensor([7, 5, NO_OWNER])),
        ("collisions.t.mapping", ...),
        ("collisions.t.offset", -1),
        ("collisions.t.offset", ...),
        ("collisions.t.zch_size", "3"),
        ("collisions.t.zch_size", 2**70),
        ("kernels", 3),
        ("kernels.t", [1]),
        ("kernels.t.iter", -1),
        ("kernels.t.iter", 2**70),
        ("kernels.t.iter", torch.tensor([3])),
        ("kernels.t.iter", None),
        ("kernels.t.iter_cpu", True),
        ("kernels.t.lr", "0.1"),
        ("kernels.t.eps", None),
        ("kernels.t.group_lr", ...),
        ("shards", []),
        ("shards.plain", ...),
        ("shards.plain.num_rows", [2]),
        ("shards.plain.num_rows", -3),
        ("shards.plain.num_rows", 5),
        ("shards.plain.table", ...),
        ("shards.plain.table.num_rows", 7),
        ("shards.plain.columns", [[0, 5]]),
        ("shards.plain.columns", [[0, 2, 4]]),
        ("shards.plain.is_replicated", 1),
        ("shards.plain", {"rows": [2, 5], "columns": [[0, 4]]}),
        ("shards.plain", {"rows": [5, 2], "columns": [[0, 4]], "replicated": False}),
        ("shards.plain", {"rows": [2], "columns": [[0, 4]], "replicated": False}),
        ("shards.plain", {"rows": [2, 99], "columns": [[0, 4]], "replicated": False}),
        ("dense", None),
        ("dense.w", 1.0),
        ("publisher", 3),
        ("publisher", ...),
        ("consumers", ["other"]),
        ("consumers.other", ...),
        ("consumers.other.version", "3"),
        ("consumers.other.version", -1),
        ("consumers.other.version", 2),
        ("consumers.other.version", ...),
        ("consumers.other.left_out", None),
        ("consumers.other.left_out.t", [1, 4]),
        ("consumers.other.left_out.t", torch.tensor([1.0])),
        ("consumers.other.left_out.t", torch.tensor(1)),
    ],
)
def test_an_invalid_value_is_refused(path: str, value: object) -> None:
    changed = copy.deepcopy(_LIBRARY)
    *keys, last = path.split(".")
    holder = changed
    for key in keys:
        holder = holder[key]
    if value is ...:
        del holder[last]
    else:
        holder[last] = value
    name = path.partition(".")[0]
    library = library_of(changed)
    if path == "consumers.other":
        assert library.consumers(0) == {}  # a consumer that the publisher's tracker did not have
        return
    with pytest.raises(CorruptPartError, match=f"library.{name}"):
        _READS[name](library)
    for other in _READS.keys() - {name, "buffers"}:
        _READS[other](library)


def test_buffers_of_another_type_are_refused() -> None:
    with pytest.raises(CorruptPartError, match=r"library.buffers is invalid: Expected `object`, got `array`"):
        library_of(_LIBRARY).buffers(1)
