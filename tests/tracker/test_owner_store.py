"""Owners of slots: each consumer gets the owner of its own last read, in any order of reads, cuts and restores."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace

import pytest
import torch
from torch import Tensor

from delta_tracker.errors import InvalidArgumentError, UnsupportedModelError
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.sharding.collisions import LocalOwners, MchOwners, TensorVersions
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.owner_store import OwnerStore
from delta_tracker.tracker.store.segments import SegmentStore
from delta_tracker.types import Bucket, Identity
from tests.ranks import RankPool
from tests.sharding.hook_faults import Faults
from tests.sweeps import SWEEPS_ARE_WHOLE, num_examples
from tests.syncs import SIMULATED, find_syncs, held, on_device

_CASES = "tests.tracker.collision_cases"
_HISTORIES = 2000 if SWEEPS_ARE_WHOLE else num_examples(20)
_NUM_SLOTS = 6
_IDENTITY = Identity(2**63 - 1, (Bucket((0, _NUM_SLOTS), _NUM_SLOTS - 1),))


class _Mapping:
    """Stand-in for an MCH module with the owner of each slot in a list."""

    def __init__(self, num_slots: int) -> None:
        self.owners = [NO_OWNER] * num_slots
        self._mch_sorted_raw_ids = torch.full((num_slots,), NO_OWNER)
        self._mch_remapped_ids_mapping = torch.arange(num_slots)

    def set(self, owners: list[int]) -> None:
        """Write the owners as TorchRec does, in place."""
        self.owners = list(owners)
        order = torch.tensor(owners).argsort(stable=True)
        self._mch_sorted_raw_ids.copy_(torch.tensor(owners)[order])
        self._mch_remapped_ids_mapping.copy_(order)


def _store(module: _Mapping) -> OwnerStore:
    source = MchOwners("t", _IDENTITY, (0, _NUM_SLOTS), module, torch.device("cpu"))
    return OwnerStore(source, engine="torch")


@dataclass
class _History:
    """A log with two consumers, and what each of them has by brute force."""

    draw: random.Random

    def __post_init__(self) -> None:
        self.module = _Mapping(_NUM_SLOTS)
        self.module.set([8, 3, NO_OWNER, 5, 0, NO_OWNER])
        self.now = torch.zeros(_NUM_SLOTS, 1)
        self._keeps_states = self.draw.random() < 0.5
        self._forgets = self.draw.random() < 0.6
        self.log = ChangeLog(
            {"t": self._rows()},
            ["a", "b"],
            delete_on_read=self._forgets,
            max_bytes=None,
            owners={"t": _store(self.module)},
        )
        self.known = {name: list(self.module.owners) for name in "ab"}
        self.first = list(self.module.owners)  # those of a consumer that is rewound
        self.pending: dict[str, set[int]] = {"a": set(), "b": set()}
        self.ever: set[int] = set()
        self.num_evicted = 0

    def _rows(self) -> SegmentStore:
        states = (lambda ids: self.now[ids].clone()) if self._keeps_states else None
        return SegmentStore(_NUM_SLOTS, engine="torch", old_states=states)

    def run(self, num_actions: int) -> None:
        actions: list[Callable[[], None]] = [self.train] * 6 + [self.read] * 5
        actions += [self.log.compact, self.save, self.make_pending, self.rewind, self.extra_cut, self.swap_back]
        for _ in range(num_actions):
            self.draw.choice(actions)()
        for name in "ab":
            self.read(name)
            self.read(name)

    def train(self) -> None:
        """Give some slots to other raw ids, and write some rows; only these writes are reported."""
        owners, raw_ids = list(self.module.owners), list(range(12))
        for slot in range(_NUM_SLOTS - 1):
            if self.draw.random() < 0.3:
                free = [each for each in raw_ids if each not in owners]
                owners[slot] = self.draw.choice([*free, NO_OWNER])
        self._own(owners)
        written = [slot for slot in range(_NUM_SLOTS) if self.draw.random() < 0.2]
        self.log.writes.mark("t", torch.tensor(written, dtype=torch.int64))
        self.now[written] += 1
        self._changed(written)

    def swap_back(self) -> None:
        """Give a slot to another raw id and back, with a cut between, as A -> B -> A."""
        owners = list(self.module.owners)
        slot, free = self.draw.randrange(_NUM_SLOTS - 1), [each for each in range(12) if each not in owners]
        self._own([free[0] if each == slot else owner for each, owner in enumerate(owners)])
        self.extra_cut()
        self._own(owners)

    def extra_cut(self) -> None:
        """Cut the log without a read."""
        self.log.consumers.add("passing")
        self.log.consumers.remove("passing")

    def _own(self, owners: list[int]) -> None:
        self._changed([slot for slot in range(_NUM_SLOTS) if owners[slot] != self.module.owners[slot]])
        self.module.set(owners)

    def _changed(self, slots: list[int]) -> None:
        for each in (*self.pending.values(), self.ever):
            each.update(slots)

    def read(self, name: str = "") -> None:
        """Read and check one consumer, then commit all, commit a part as top-k does, or abort."""
        name = name or self.draw.choice("ab")
        reading = self.log.consumers.read(name)
        rows = reading.rows["t"]
        ids, owners = rows.ids.tolist(), self.module.owners
        assert set(ids) >= {slot for slot in range(_NUM_SLOTS) if self.known[name][slot] != owners[slot]}
        assert set(ids) <= self.pending[name]
        assert rows.former.tolist() == [self.known[name][slot] for slot in ids]
        assert self.log.segments.owners["t"].owners.tolist() == owners
        self.num_evicted += sum(self.known[name][slot] not in (owners[slot], NO_OWNER) for slot in ids)
        end = self.draw.random()
        left = rows.former == torch.tensor(owners)[rows.ids] if end < 0.3 else torch.zeros_like(rows.ids).bool()
        reading.returns({}, {"t": reading.rows["t"].take(left)})
        self.log.consumers.hold(reading)
        if end < 0.8:
            self.log.consumers.commit(reading)
            self.known[name] = list(owners)
            self.pending[name] = set(rows.ids[left].tolist())
        else:
            self.log.consumers.abort(reading)

    def save(self) -> None:
        """Save and restore the log, as a checkpoint does."""
        self.log.restore(self.log.state())

    def make_pending(self) -> None:
        """Doubt some rows of one consumer; their owners are those of its last read, or unknown."""
        name, knows = self.draw.choice("ab"), self.draw.random() < 0.5
        ids = self.draw.sample(range(_NUM_SLOTS), 2)
        self.log.consumers.make_pending(name, "t", torch.tensor(ids), knows_owners=knows)
        self.pending[name].update(ids)
        self.ever.update(ids)
        for slot in ids:
            self.first[slot] = NO_OWNER
            if not knows:
                self.known[name][slot] = NO_OWNER

    def rewind(self) -> None:
        """Make all rows that changed so far pending again for one consumer, if the log keeps them."""
        name = self.draw.choice("ab")
        if self._forgets:
            with pytest.raises(InvalidArgumentError):
                self.log.consumers.rewind(name)
        else:
            self.log.consumers.rewind(name)
            self.known[name], self.pending[name] = list(self.first), set(self.ever)


@pytest.mark.sweep("long")
def test_each_consumer_gets_the_owners_of_its_own_last_read() -> None:
    evicted = 0
    for seed in range(_HISTORIES):
        history = _History(random.Random(seed))
        history.run(40)
        evicted += history.num_evicted
    assert evicted > 5 * _HISTORIES


def test_unknown_owners_are_none() -> None:
    module = _Mapping(_NUM_SLOTS)
    module.set([5, 7, 3, NO_OWNER, NO_OWNER, NO_OWNER])
    for rewinds in (False, True):
        log = ChangeLog(
            {"t": SegmentStore(_NUM_SLOTS, engine="torch")},
            ["a"],
            delete_on_read=not rewinds,
            max_bytes=None,
            owners={"t": _store(module)},
        )
        if rewinds:
            log.restore(replace(log.state(), history=None))
            log.consumers.rewind("a")
        else:
            log.mark_everything()
        reading = log.consumers.read("a")
        assert reading.rows["t"].former.tolist() == [NO_OWNER] * _NUM_SLOTS
        log.consumers.commit(reading)
        log.replace({"t": SegmentStore(_NUM_SLOTS, engine="torch")}, {"t": _store(module)})
        assert log.consumers.read("a").rows["t"].former.tolist() == [NO_OWNER] * _NUM_SLOTS


def test_a_read_that_runs_out_of_memory_can_be_repeated() -> None:
    before, now = [8, 3, NO_OWNER, 5, 0, NO_OWNER], [8, 4, 7, 5, 0, NO_OWNER]
    for number in itertools.count():
        module = _Mapping(_NUM_SLOTS)
        module.set(before)
        stores = {"t": SegmentStore(_NUM_SLOTS, engine="torch")}
        log = ChangeLog(stores, ["a"], delete_on_read=True, max_bytes=None, owners={"t": _store(module)})
        module.set(now)
        with Faults(number) as faults, suppress(MemoryError):
            log.consumers.read("a")
        rows = log.consumers.read("a").rows["t"]
        assert {1, 2} <= set(rows.ids.tolist())
        assert rows.former is not None
        for slot, former in zip(rows.ids.tolist(), rows.former.tolist(), strict=True):
            assert former in (before[slot], NO_OWNER)
        if faults.num_points <= number:
            break
    assert number > 0


def test_owners_are_compared_only_after_a_write_of_the_module() -> None:
    module = _Mapping(_NUM_SLOTS)
    store, marked = _store(module), []
    reads = []
    read = MchOwners.read
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(MchOwners, "read", lambda self: reads.append(1) or read(self))
        for owners in ([4, *[NO_OWNER] * 5], [4, 9, *[NO_OWNER] * 4]):
            module.set(owners)
            store.update(lambda ids: marked.append(ids.tolist()))
            store.update(marked.append)
    assert marked == [[0], [1]]
    assert len(reads) == 2
    module._mch_sorted_raw_ids = module._mch_sorted_raw_ids.clone()  # another tensor with the same version
    token = TensorVersions(module._mch_sorted_raw_ids)
    assert token == TensorVersions(module._mch_sorted_raw_ids)
    assert token != TensorVersions(module._mch_sorted_raw_ids.clone())
    assert store.copy.nbytes == 8 * _NUM_SLOTS


def test_a_change_that_could_not_be_marked_is_marked_by_the_next_call() -> None:
    module = _Mapping(_NUM_SLOTS)
    store, marked = _store(module), []

    def fails(_: Tensor) -> None:
        raise MemoryError

    module.set([4, *[NO_OWNER] * 5])
    with pytest.raises(MemoryError):
        store.update(fails)
    store.update(lambda ids: marked.append(ids.tolist()))
    assert marked == [[0]]
    assert store.former(torch.tensor([0]), 0).tolist() == [NO_OWNER]


@pytest.mark.parametrize(
    ("owners", "reason"),
    [([1] * 2 + [NO_OWNER] * 4, "raw id 1 owns two slots"), ([NO_OWNER] * 5 + [3], "default row 5 has the raw id 3")],
)
def test_invalid_owners_are_refused_at_reads_and_do_not_stop_training(owners: list[int], reason: str) -> None:
    module = _Mapping(_NUM_SLOTS)
    log = ChangeLog(
        {"t": SegmentStore(_NUM_SLOTS, engine="torch")},
        ["a", "b"],
        delete_on_read=True,
        max_bytes=1,
        owners={"t": _store(module)},
    )
    module.set(owners)
    for _ in range(2):
        with pytest.raises(UnsupportedModelError, match=reason):
            log.consumers.read("a")
    log.writes.mark("t", torch.tensor([4]))
    log.consumers.step()  # drops both consumers, which cuts the log
    log.consumers.clear("a")
    log.state()
    module.set([8 if owner == NO_OWNER and slot == 2 else owner for slot, owner in enumerate(owners)])
    with pytest.raises(UnsupportedModelError, match=reason):  # the new owner is valid, the others are not
        log.consumers.read("a")
    module.set([9, *[NO_OWNER] * 5])
    log.consumers.clear("a")
    module.set([9, 2, *[NO_OWNER] * 4])
    rows = log.consumers.read("a").rows["t"]
    assert rows.ids.tolist() == [1]
    assert rows.former.tolist() == [NO_OWNER]


class _OnDevice(LocalOwners):
    """Owners on a simulated device that reports waits."""

    def token(self) -> None:
        return None

    def read(self) -> Tensor:
        return on_device(torch.tensor(self.module.owners))

    def refusal(self) -> str:
        return ""


def test_a_comparison_on_a_device_waits_once_if_no_owner_changed() -> None:
    module = _Mapping(_NUM_SLOTS)
    with find_syncs():
        store = OwnerStore(_OnDevice("t", _IDENTITY, (0, _NUM_SLOTS), module, torch.device(SIMULATED)), engine="torch")
        with find_syncs() as found:
            store.update(lambda _: None)
        assert len(found) == 1, found
        module.owners = [3, *[NO_OWNER] * 5]
        store.update(lambda _: None)
        store.cut(1)
        assert held(store.former(on_device(torch.arange(_NUM_SLOTS)), 0)).tolist() == [NO_OWNER] * _NUM_SLOTS
        assert held(store.owners).tolist() == module.owners


@pytest.mark.sweep("long")
@pytest.mark.parametrize("world_size", [1, 2, 4] if SWEEPS_ARE_WHOLE else [1, 2])
def test_deltas_have_the_raw_ids_that_lookups_map_to_the_rows(
    world_size: int, one_rank: RankPool, two_ranks: RankPool, four_ranks: RankPool
) -> None:
    ranks = {1: one_rank, 2: two_ranks, 4: four_ranks}[world_size]
    answers = ranks.run(f"{_CASES}:raw_ids_of_deltas", num_steps=400 if SWEEPS_ARE_WHOLE else 45)
    assert len({answer["identities"] for answer in answers}) == 1
    for answer in answers:
        assert answer["evicted"] > 20
        assert answer["readmitted"] > 0


def test_a_checkpoint_keeps_the_former_owners(two_ranks: RankPool) -> None:
    two_ranks.run(f"{_CASES}:checkpoint_of_owners")


def test_a_checkpoint_of_other_ranks_has_the_former_owners_that_were_saved(one_rank: RankPool) -> None:
    (error,) = one_rank.run(f"{_CASES}:resharded_owners")
    assert error.startswith("CheckpointError")
    assert "numbers of former owners and rows differ" in error


def test_a_tracker_that_is_attached_again_keeps_the_former_owners(one_rank: RankPool) -> None:
    one_rank.run(f"{_CASES}:reattached_owners")


@pytest.mark.promise("lossless")
@pytest.mark.parametrize("number", range(3))
@pytest.mark.parametrize("method", ["notice_writes", "begin_write", "end_write", "acknowledge_writes"])
def test_an_interrupted_eviction_loses_no_row_and_leaves_none_open(
    one_rank: RankPool, method: str, number: int
) -> None:
    (problems,) = one_rank.run(f"{_CASES}:interrupted_eviction", method=method, number=number)
    assert problems == []
