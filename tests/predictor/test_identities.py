"""Predictors of tables with raw ids: indexes, refusals, kept tables, and lookups in other threads."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any

import pytest
import torch

from delta_tracker import ModelTarget, Predictor, RawIdIndex, TableSpec
from delta_tracker.errors import InvalidArgumentError, MalformedError, ModelMismatchError
from delta_tracker.predictor.identities import identities_after
from delta_tracker.predictor.served_model import Receiver
from delta_tracker.raw_ids import NO_OWNER, bucket_of, defaults_of
from delta_tracker.stream.format.manifest import Kind
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.identity_histories import DIM, FQN, Follower, History, split
from tests.stores.rules import fails, on
from tests.stream.streams import Writer


def _history(seed: int = 0, num_deltas: int = 3) -> History:
    history = History(seed)
    for _ in range(num_deltas):
        history.delta()
    return history


def _history_of(num_buckets: int) -> History:
    """Return a history with default rows and this number of buckets, after its first snapshot."""
    return History(0, num_buckets, num_rows=6, has_defaults=True)


def _change_owners(history: History) -> torch.Tensor:
    """Publish deltas until an owner has changed. Returns a mask of the rows with a changed owner."""
    before = history.states[history.version].owners
    while torch.equal(history.states[history.version].owners, before):
        history.delta()
    return history.states[history.version].owners != before


def _publish(history: History, kind: Kind, owners: dict[int, int]) -> None:
    """Publish a version with these owners of some rows, without further training. In a snapshot, others have none."""
    if kind == "snapshot":
        history.owners = [NO_OWNER] * history.num_rows
    for slot, raw_id in owners.items():
        history.owners[slot] = raw_id
        history._write(slot)
    blocks = [
        history._block(each.rows, None, history.owners[slice(*each.rows)], history.rows[slice(*each.rows)])
        for each in history.identity.buckets
    ]
    history._commit(kind, blocks if kind == "snapshot" else [], sorted(history.changed))


def _fail(*_: object) -> None:
    raise MemoryError("no memory")


def _predictor(history: History, **options: Any) -> Predictor:
    return Predictor(ModelTarget({FQN: torch.zeros(history.num_rows, DIM)}, **options), history.storage)


def test_every_raw_id_reads_the_row_of_the_trainers_module() -> None:
    follower = Follower(_history())
    assert follower.sync()
    assert follower.num_checks > follower.history.version


def test_names_of_indexes_may_end_with_weight() -> None:
    history = _history()
    index = RawIdIndex(history.num_rows)
    _predictor(history, raw_ids={f"{FQN}.weight": index}).sync()
    assert torch.equal(index.owners(), history.states[history.version].owners)


@pytest.mark.parametrize("raw_ids", [{FQN: 3}, [RawIdIndex(4)], {"unknown": RawIdIndex(4)}])
def test_other_arguments_are_refused(raw_ids: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="raw_ids"):
        _predictor(_history(), raw_ids=raw_ids)


def test_a_table_with_raw_ids_needs_a_mapping() -> None:
    history = _history()
    predictor = _predictor(history)
    with pytest.raises(ModelMismatchError, match="without a mapping of raw ids"):
        predictor.sync()
    with pytest.raises(ModelMismatchError, match="without a mapping of raw ids"):
        predictor.follow()
    assert predictor.version is None


def test_an_index_of_another_size_is_refused() -> None:
    history = _history()
    predictor = _predictor(history, raw_ids={FQN: RawIdIndex(history.num_rows + 1)})
    with pytest.raises(ModelMismatchError, match=f"RawIdIndex of {history.num_rows + 1} rows"):
        predictor.sync()


def test_a_table_without_raw_ids_refuses_an_index() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    predictor = Predictor(ModelTarget({FQN: writer.table.clone()}, raw_ids={FQN: RawIdIndex(20)}), writer.storage)
    with pytest.raises(ModelMismatchError, match="without raw ids in the stream but with a mapping"):
        predictor.sync()


def test_an_index_may_not_serve_two_tables() -> None:
    history = _history()
    index = RawIdIndex(history.num_rows)
    predictor = _predictor(history, raw_ids={FQN: index})
    manifest = predictor._reader.newest()[0]
    table = manifest.tables[FQN]
    other = {"b": TableSpec("b", table.num_rows, table.dim, table.dtype)}
    both = replace(
        manifest,
        tables={**manifest.tables, **other},
        identities=dict.fromkeys([FQN, "b"], manifest.identities[FQN]),
        parts=(),
    )
    tables = {fqn: torch.zeros(history.num_rows, DIM) for fqn in both.tables}
    shared = Predictor(ModelTarget(tables, raw_ids=dict.fromkeys(tables, index)), history.storage)
    with pytest.raises(ModelMismatchError, match=f"shared with '{FQN}'"):
        shared._destination.resolve(both)


@pytest.mark.advice("MalformedError: version_owners identities_after")
def test_a_version_with_a_raw_id_of_two_rows_is_refused_before_any_write() -> None:
    history = _history_of(1)
    follower = Follower(history)
    follower.sync()
    table, owners = follower.table.clone(), follower.index.owners()
    whole = history.identity.buckets[0].rows
    rows = [[3, 0, 0, 0]] * history.num_rows
    first = [int(history.raw_ids[3]), *[NO_OWNER] * (history.num_rows - 1)]
    # Each block is valid: the snapshot's rows are older than the listed one.
    history.owners = [*first[1:], NO_OWNER]
    history.owners[1] = first[0]
    history._commit("snapshot", [history._block(whole, None, first, rows)], [1])
    with pytest.raises(MalformedError, match="has two rows"):
        follower.predictor.sync()
    assert torch.equal(follower.table, table)
    assert torch.equal(follower.index.owners(), owners)
    history.snapshot()
    history.delta()
    assert follower.sync()


def test_a_rollback_to_such_a_version_writes_nothing() -> None:
    history = _history_of(1)
    whole = history.identity.buckets[0].rows
    first = [int(history.raw_ids[3]), *[NO_OWNER] * (history.num_rows - 1)]
    history.owners = [NO_OWNER, *first[:-1]]
    history._commit("snapshot", [history._block(whole, None, first, [[3, 0, 0, 0]] * history.num_rows)], [1])
    broken = history.version
    history.owners = [NO_OWNER] * history.num_rows
    history.snapshot()
    follower = Follower(history)
    assert follower.sync()
    table = follower.table.clone()
    with pytest.raises(MalformedError, match="has two rows"):
        follower.predictor.rollback(broken)
    assert torch.equal(follower.table, table)
    assert follower.predictor.status().pinned is None
    follower.assert_holds()


def test_a_delta_with_other_buckets_is_refused_before_any_write() -> None:
    history = _history_of(2)
    follower = Follower(history)
    follower.sync()
    table, owners = follower.table.clone(), follower.index.owners()
    history.identity = split(history.num_rows, 1, history.hash_size)
    history.buckets = [0] * len(history.raw_ids)
    history.owners = [NO_OWNER] * history.num_rows
    history.changed = set(range(history.num_rows))
    history._commit("delta", [], sorted(history.changed))
    broken = history.version
    with pytest.raises(MalformedError, match="are not those of its predecessor"):
        follower.predictor.sync()
    assert torch.equal(follower.table, table)
    assert torch.equal(follower.index.owners(), owners)
    history.snapshot()
    assert follower.sync()
    table = follower.table.clone()
    with pytest.raises(MalformedError, match="are not those of its predecessor"):
        follower.predictor.rollback(broken)
    assert torch.equal(follower.table, table)
    assert follower.predictor.status().pinned is None


def test_a_version_without_a_table_keeps_its_buckets() -> None:
    history = _history_of(2)
    snapshot = _predictor(history)._reader.newest()[0]
    both = {FQN: history.identity, "b": history.identity}
    assert identities_after(replace(snapshot, kind="delta"), both) == both
    assert identities_after(snapshot, both) == both
    assert identities_after(replace(snapshot, identities={}), both) == {"b": history.identity}


def test_a_mapping_that_is_half_written_is_repaired_by_a_snapshot(monkeypatch: pytest.MonkeyPatch) -> None:
    history = _history()
    follower = Follower(history)
    assert follower.sync()
    _change_owners(history)
    index = follower.index

    def torn(ready: tuple[torch.Tensor, torch.Tensor]) -> None:
        raw_ids, rows = index.tensors()
        raw_ids.fill_(NO_OWNER)
        rows.copy_(ready[1])
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(index, "map", torn)
        with pytest.raises(KeyboardInterrupt):
            follower.predictor.sync()
    follower.check()
    assert list(follower.predictor.state_dict()) == ["identities"], "no position"
    assert follower.sync()
    assert follower.predictor.version == history.version


@pytest.mark.advice("InvalidArgumentError: set_saved_identities")
def test_kept_tables_route_unknown_raw_ids_before_the_next_version() -> None:
    history = _history_of(2)
    follower = Follower(history)
    follower.sync()
    kept = follower.restarted()
    kept.assert_holds()
    assert kept.predictor.state_dict() == follower.predictor.state_dict()
    index = RawIdIndex(history.num_rows)
    predictor = _predictor(history, raw_ids={FQN: index})
    with pytest.raises(InvalidArgumentError, match="Load the state of its RawIdIndex first"):
        predictor.load_state_dict(follower.predictor.state_dict())
    assert predictor.version is None
    for identities in ("[]", 3, follower.predictor.state_dict()["identities"][:-1]):  # type: ignore[index]
        with pytest.raises(InvalidArgumentError, match="Pass what state_dict"):
            predictor.load_state_dict({**follower.predictor.state_dict(), "identities": identities})


def test_a_position_with_other_buckets_than_the_index_is_refused() -> None:
    history = _history_of(2)
    follower = Follower(history)
    follower.sync()
    other = RawIdIndex(history.num_rows)
    other.set_identity(split(history.num_rows, 1, history.hash_size))
    predictor = _predictor(history, raw_ids={FQN: other})
    with pytest.raises(InvalidArgumentError, match="saved with the position"):
        predictor.load_state_dict(follower.predictor.state_dict())
    other.set_identity(history.identity)
    owners = torch.full((history.num_rows,), NO_OWNER)
    bucket = int(bucket_of(history.identity, torch.tensor(10**6)))
    owners[history.identity.buckets[1 - bucket].rows[0]] = 10**6
    other.map(other.prepare(owners))
    with pytest.raises(InvalidArgumentError, match="belongs to another bucket"):
        predictor.load_state_dict(follower.predictor.state_dict())
    assert predictor.version is None


def test_a_position_without_raw_ids_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    history = _history_of(2)
    follower = Follower(history)
    follower.sync()
    empty = RawIdIndex(history.num_rows)
    empty.set_identity(history.identity)
    predictor = _predictor(history, raw_ids={FQN: empty})
    predictor.load_state_dict(follower.predictor.state_dict())
    assert f"no row of {FQN} has a raw id" in caplog.text


def test_tables_that_are_saved_while_a_version_is_applied_keep_changed_owners_unmapped() -> None:
    history = _history_of(2)
    first, second = (int(raw_id) for raw_id in history.raw_ids[torch.tensor(history.buckets) == 0][:2])
    _publish(history, "snapshot", {0: first})
    follower = Follower(history)
    follower.sync()
    _publish(history, "delta", {0: second})
    follower.break_at(1)
    assert not follower.sync()
    kept = follower.restarted()
    default = history.identity.buckets[0].default
    assert kept.index.rows_of(torch.tensor([first, second])).tolist() == [default, default]
    kept.check()
    assert kept.sync()


def test_a_rollback_after_a_failed_attempt_maps_the_raw_ids_again() -> None:
    history = _history_of(1)
    first, second, third = history.raw_ids[:3].tolist()
    _publish(history, "snapshot", {0: first, 1: second})
    follower = Follower(history)
    follower.sync()
    at, before = history.version, follower.index.owners()
    _publish(history, "delta", {0: third})
    follower.break_at(1)
    assert not follower.sync()
    default = history.num_rows - 1
    assert follower.index.rows_of(torch.tensor([first, second, third])).tolist() == [default, 1, default]
    assert follower.rollback(at)
    assert torch.equal(follower.index.owners(), before)


def test_a_raw_id_that_an_interrupted_merged_version_has_moved_has_one_row(monkeypatch: pytest.MonkeyPatch) -> None:
    history = _history_of(1)
    raw_id = int(history.raw_ids[0])
    _publish(history, "snapshot", dict.fromkeys(range(3), NO_OWNER) | {0: raw_id})
    follower = Follower(history)
    follower.sync()
    start = history.version
    _publish(history, "delta", {0: NO_OWNER, 1: raw_id})
    _publish(history, "delta", {1: NO_OWNER, 2: raw_id})
    merged = compact(history.storage, fold=1e9)
    assert merged is not None
    assert merged.version == start + 2
    parts = {part.name for part in StreamLog(history.storage).read(start + 1).parts}  # type: ignore[union-attr]
    with monkeypatch.context() as patch, follower.storage.under(fails(on(name=parts.__contains__))):
        patch.setattr(Receiver, "write_dense", _fail)
        for _ in range(3):  # the third error of the store causes a resync
            assert not follower.sync()
    assert follower.index.rows_of(torch.tensor([raw_id])).tolist() == [2]
    follower.predictor.sync(1)
    assert follower.predictor.version == start + 1
    assert follower.index.rows_of(torch.tensor([raw_id])).tolist() == [1]
    assert int((follower.index.owners() == raw_id).sum()) == 1
    assert follower.sync()


def test_lookups_in_other_threads_never_read_the_row_of_another_raw_id() -> None:
    history = _history(4, 0)
    table, index = torch.full((history.num_rows, DIM), -1.0), RawIdIndex(history.num_rows)
    predictor = Predictor(ModelTarget({FQN: table}, raw_ids={FQN: index}, chunk_rows=1), history.storage)
    predictor.sync()
    numbers, defaults = torch.arange(len(history.raw_ids)), defaults_of(history.identity, history.raw_ids)
    wrong: list[str] = []
    is_over = threading.Event()
    num_lookups = [0, 0]

    def look(thread: int) -> None:
        while not is_over.is_set() and not wrong:
            with predictor.reading() as (version, applying):
                slots = index.rows_of(history.raw_ids)
                rows = table[slots]
            is_right = (rows[:, 0] == numbers) | ((rows[:, 0] == -1) & (slots == defaults))
            for each in {version, applying} - {None}:
                state = history.states[each]
                own = state.slots_of(history.raw_ids)
                is_right |= (slots == own) & (rows == state.rows[own]).all(1)
            if not bool(is_right.all()):
                wrong.append(f"{slots[~is_right]} {rows[~is_right]} {version=} {applying=}")
            num_lookups[thread] += 1

    threads = [threading.Thread(target=look, args=(number,)) for number in range(len(num_lookups))]
    for thread in threads:
        thread.start()
    for number in range(20):
        history.snapshot() if number % 10 == 9 else history.delta()
        predictor.sync()
    is_over.set()
    for thread in threads:
        thread.join()
    assert not wrong
    assert min(num_lookups) > 0
    assert torch.equal(table, history.states[history.version].rows)


@pytest.mark.parametrize("breaks", [False, True], ids=["", "after failed attempts"])
def test_admitted_and_evicted_raw_ids_are_counted(breaks: bool) -> None:
    history = History(3)
    follower = Follower(history)
    held, expected = torch.full((history.num_rows,), NO_OWNER), [0, 0]
    for count in range(12):
        if count:
            history.delta()
        owners = history.states[history.version].owners
        for number, each in enumerate((owners, held)):
            expected[number] += int(((owners != held) & (each != NO_OWNER)).sum())
        held = owners
        if breaks:
            follower.break_at(1 + count % 3)
            follower.sync()
        assert follower.sync()
        status = follower.predictor.status()
        assert [status.counts.admitted, status.counts.evicted] == expected
    assert min(expected) > 0
