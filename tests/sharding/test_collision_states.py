"""Training states of managed-collision modules: training continues from them, and others are refused."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import pytest
import torch
from torch import Tensor
from torchrec.modules.mc_modules import (
    DistanceLFU_EvictionPolicy,
    LFU_EvictionPolicy,
    LRU_EvictionPolicy,
    MCHManagedCollisionModule,
    average_threshold_filter,
)
from torchrec.sparse.jagged_tensor import JaggedTensor

from delta_tracker.errors import RestoreMismatchError
from delta_tracker.raw_ids.raw_id_map import NO_OWNER
from delta_tracker.sharding.collision_states import (
    check_collision_states,
    collision_fault,
    collision_obstacle,
    collision_state,
    load_collision_states,
)
from delta_tracker.stream.format.state_tree import pack, unpack
from delta_tracker.types import Bucket, Identity

_POLICIES = {each.__name__: each for each in (LFU_EvictionPolicy, LRU_EvictionPolicy, DistanceLFU_EvictionPolicy)}
_HASH_SIZE = 60
_NUM_SLOTS = 12


def module(
    policy: str = "DistanceLFU_EvictionPolicy", rows: tuple[int, int] = (0, _NUM_SLOTS), **kwargs: Any
) -> MCHManagedCollisionModule:
    arguments = {"eviction_interval": 3, "input_hash_size": _HASH_SIZE, **kwargs}
    made = MCHManagedCollisionModule(
        zch_size=rows[1] - rows[0],
        device=torch.device("cpu"),
        eviction_policy=_POLICIES[policy](),
        output_global_offset=rows[0],
        **arguments,
    )
    return made.train()


def _with_policy(policy: Any) -> MCHManagedCollisionModule:
    made = module()
    made._eviction_policy = policy
    return made


def identity_of(*edges: int, hash_size: int = _HASH_SIZE) -> Identity:
    ranges = zip([0, *edges[:-1]], edges, strict=True)
    return Identity(hash_size, tuple(Bucket((first, end), end - 1) for first, end in ranges))


def look_up(each: MCHManagedCollisionModule, ids: Tensor) -> list[int]:
    found: list[int] = each({"t": JaggedTensor(ids, lengths=torch.ones(len(ids)).long())})["t"].values().tolist()
    return found


def train(each: MCHManagedCollisionModule, batches: Sequence[Tensor]) -> list[object]:
    """Return the slots of each batch, and what each batch evicted."""
    found: list[object] = []
    for ids in batches:
        found.append(look_up(each, ids))
        evicted = each.evict()
        found.append(None if evicted is None else evicted.tolist())
    return found


def saved(each: MCHManagedCollisionModule) -> dict[str, Any]:
    """Return the state as a stream has it."""
    found = cast("dict[str, Any]", unpack(pack(collision_state(each), "state")))
    assert not collision_fault(found)
    return found


def batches(count: int, low: int = 0, high: int = _HASH_SIZE) -> list[Tensor]:
    generator = torch.Generator().manual_seed(7)
    return [torch.randint(low, high, (6,), generator=generator) for _ in range(count)]


@pytest.mark.parametrize("policy", _POLICIES)
def test_training_continues_bit_for_bit(policy: str) -> None:
    data = batches(32)
    for cut in range(0, 28, 2):
        running = module(policy)
        train(running, data[:cut])
        if cut % 4 == 0:  # at some cuts, evicted slots are not reset yet
            look_up(running, data[cut])
        state = saved(running)
        resumed = module(policy)
        train(resumed, [torch.arange(50, 54)] * 4)
        check_collision_states("t", resumed, [state], identity_of(_NUM_SLOTS))
        assert load_collision_states(resumed, [state]) == 1
        assert train(resumed, data[cut:]) == train(running, data[cut:]), cut
        assert torch.equal(resumed._current_iter_tensor, running._current_iter_tensor)


def test_a_state_of_an_untrained_module_is_restored() -> None:
    new, resumed = module(), module()
    state = saved(new)
    train(resumed, batches(3))
    load_collision_states(resumed, [state])
    data = [torch.arange(9) for _ in range(5)]
    assert train(resumed, data) == train(new, data)


def parts(num_ranks: int, *, count: int = 7, hash_size: int = _HASH_SIZE) -> list[MCHManagedCollisionModule]:
    """Return the modules of several ranks that have trained batches of their buckets."""
    size, slots = hash_size // num_ranks, _NUM_SLOTS // num_ranks
    found = []
    for rank in range(num_ranks):
        each = module(rows=(rank * slots, (rank + 1) * slots), input_hash_size=hash_size)
        train(each, batches(count, rank * size, (rank + 1) * size))
        found.append(each)
    return found


def owners(states: Sequence[Mapping[str, Any]]) -> dict[int, int]:
    """Return the slot of each known id."""
    found = {}
    for state in states:
        pairs = zip(state["sorted"].tolist(), state["mapping"].tolist(), strict=True)
        found.update({raw_id: slot for raw_id, slot in pairs if raw_id != NO_OWNER})
    return found


@pytest.mark.parametrize(("before", "after"), [(2, 1), (4, 2), (4, 1)])
def test_fewer_ranks_keep_all_ids_and_their_history(before: int, after: int) -> None:
    states = [saved(each) for each in parts(before)]
    expected = owners(states)
    assert len(expected) > 4
    slots = _NUM_SLOTS // after
    identity = identity_of(*range(slots, _NUM_SLOTS + 1, slots))
    for rank in range(after):
        joined = module(rows=(rank * slots, (rank + 1) * slots))
        check_collision_states("t", joined, states, identity)
        assert load_collision_states(joined, states) == before // after
        state = saved(joined)
        mine = states[rank * before // after : (rank + 1) * before // after]
        assert owners([state]) == owners(mine)
        assert sorted(state["history"].tolist()) == sorted(torch.cat([each["history"] for each in mine]).tolist())
        assert len(state["history"]) > 0
        assert state["buffer_size"] == sum(each["buffer_size"] for each in mine)
        assert state["mapping"][-1] == (rank + 1) * slots - 1, "the default slot is that of the last segment"
        counts = {int(raw): int(n) for raw, n in zip(state["sorted"], state["metadata"]["counts"], strict=True)}
        for each in mine:
            for raw_id, count in zip(each["sorted"].tolist(), each["metadata"]["counts"].tolist(), strict=True):
                assert raw_id == NO_OWNER or counts[raw_id] == count
        joined.eval()
        known = torch.tensor([*owners(mine)])
        assert look_up(joined, known) == [expected[raw_id] for raw_id in known.tolist()]
        train(joined.train(), batches(9, rank * _HASH_SIZE // after, (rank + 1) * _HASH_SIZE // after))


def _changed(state: dict[str, Any], **values: object) -> list[dict[str, Any]]:
    return [{**state, **values}]


_REFUSED: dict[str, tuple[Callable[[], Any], Callable[[], Any], Identity, str]] = {
    "more ranks": (
        lambda: [saved(module())],
        lambda: module(rows=(0, 6)),
        identity_of(6, 12),
        r"is in the slots 0 to 12 in the version but in the slots 0 to 6, which are not those",
    ),
    "other ranges": (
        lambda: [saved(each) for each in parts(2)],
        lambda: module(rows=(0, 8)),
        identity_of(8, 12),
        "is in the slots 0 to 6, 6 to 12 in the version but in the slots 0 to 8",
    ),
    "missing slots": (
        lambda: [saved(each) for each in parts(4)[::3]],
        module,
        identity_of(12),
        "is in the slots 0 to 3, 9 to 12 in the version",
    ),
    "hash size": (
        lambda: [saved(module(input_hash_size=70))],
        module,
        identity_of(12),
        "hash_size of the collision module of 't' is 70 in the version but 60",
    ),
    "interval": (lambda: [saved(module(eviction_interval=2))], module, identity_of(12), "eviction_interval of"),
    "decay": (
        lambda: [saved(_with_policy(DistanceLFU_EvictionPolicy(decay_exponent=2.0)))],
        module,
        identity_of(12),
        r"policy of .*decay_exponent=2\.0.* but .*decay_exponent=1\.0",
    ),
    "filter": (
        lambda: [saved(_with_policy(DistanceLFU_EvictionPolicy(threshold_filtering_func=average_threshold_filter)))],
        module,
        identity_of(12),
        "threshold_filtering_func=average_threshold_filter",
    ),
    "policy": (lambda: [saved(module("LRU_EvictionPolicy"))], module, identity_of(12), "policy of"),
    "counters": (
        lambda: _changed(saved(module()), metadata={}),
        module,
        identity_of(12),
        r"metadata of the collision module of 't' is \[\] in the version",
    ),
    "iteration": (
        lambda: [saved(each) for each in (parts(2)[0], parts(2, count=8)[1])],
        module,
        identity_of(12),
        "the iteration of the collision module of 't'",
    ),
    "route": (
        lambda: [saved(each) for each in parts(2)],
        lambda: module(rows=(0, 6)),
        identity_of(6, 12, hash_size=20),
        "is on one rank with the id .* in the version but on 2 ranks without it",
    ),
}


@pytest.mark.parametrize("case", _REFUSED)
def test_a_state_that_does_not_fit_is_refused(case: str) -> None:
    states, made, identity, message = _REFUSED[case]
    with pytest.raises(RestoreMismatchError, match=message):
        check_collision_states("t", made(), states(), identity)


def test_an_id_of_the_history_on_another_rank_is_refused() -> None:
    """It would get a row of the wrong rank when it is admitted."""
    state = saved(module(rows=(0, 6)))
    state |= {"history": torch.tensor([40]), "buffer_size": 9}
    with pytest.raises(RestoreMismatchError, match="with the id 40"):
        check_collision_states("t", module(rows=(0, 6)), [state], identity_of(6, 12))


_FAULTS: list[tuple[str, object]] = [
    ("class", 3),
    ("policy", None),
    ("zch_size", "12"),
    ("zch_size", 13),
    ("buffer_size", -2),
    ("buffer_size", 1),
    ("current_iter", 1.5),
    ("iter", torch.tensor(3)),
    ("sorted", torch.zeros(12)),
    ("sorted", torch.zeros(12).long()),
    ("mapping", torch.zeros(12).long()),
    ("mapping", torch.arange(1, 13)),
    ("history", None),
    ("metadata", [torch.arange(12)]),
    ("metadata", {"counts": torch.arange(11)}),
    ("history_metadata", {"last_access_iter": torch.arange(40)}),
    ("evicted", torch.tensor([12])),
    ("evicted", torch.tensor([1.0])),
]


@pytest.mark.parametrize(("key", "value"), _FAULTS)
def test_an_invalid_state_is_found(key: str, value: object) -> None:
    trained = module()
    train(trained, batches(4))
    state = saved(trained)
    assert collision_fault({**state, key: value})
    del state[key]
    assert collision_fault(state) or key == "evicted"


def test_classes_with_unknown_state_cannot_be_saved() -> None:
    class Own(MCHManagedCollisionModule):
        pass

    class Policy(LRU_EvictionPolicy):
        pass

    assert not collision_obstacle(module())
    own, other = copy.copy(module()), module()
    own.__class__ = Own
    other._eviction_policy = Policy()
    assert collision_obstacle(own) == "a Own, whose training state is unknown"
    assert collision_obstacle(other) == "a module with a Policy, whose training state is unknown"
