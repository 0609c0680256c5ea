"""The hot paths never wait for a device, tested without one."""

from __future__ import annotations

import pytest
import torch

from delta_tracker import DeltaStore, EmbdUpdateMode
from delta_tracker.tracker.row_sets.engines import choose_engine
from delta_tracker.tracker.store.segments import SegmentStore
from tests.ranks import RankPool
from tests.syncs import SIMULATED, assert_no_sync, find_syncs, held, on_device

_IDS = torch.tensor([5, 2, 5, 7, 0])


@pytest.mark.parametrize(
    ("mode", "record", "bag"),
    [
        ("id_only", "updates", False),
        ("id_only", "lookups", True),
        ("embedding", "updates", True),
        ("embedding", "lookups", False),
        ("momentum_last", "updates", False),
        ("momentum_diff", "updates", True),
        ("rowwise_adagrad", "updates", False),
    ],
)
def test_recording_in_every_mode(two_ranks: RankPool, mode: str, record: str, bag: bool) -> None:
    for answer in two_ranks.run("tests.monitor.monitoring_cases:recording_syncs", mode=mode, record=record, bag=bag):
        assert answer["syncs"] == []
        assert answer["errors"] == 0
        assert answer["calls"] >= 4 * 3
        assert answer["rows"] > 0


def test_the_tracker_check_detects_a_sync(two_ranks: RankPool) -> None:
    """With CPU stores, recording old states waits, which the check must detect."""
    (answer, _) = two_ranks.run("tests.monitor.monitoring_cases:recording_syncs_unpadded")
    assert any("unique" in sync or "masked_select" in sync for sync in answer)


@pytest.mark.parametrize("with_states", [False, True], ids=["ids", "states"])
def test_the_store_records_on_a_device(with_states: bool) -> None:
    weights = torch.arange(20.0).view(10, 2)
    with assert_no_sync():
        on_it = on_device(weights)
        old_states = (lambda ids: on_it.index_select(0, ids)) if with_states else None
        store = SegmentStore(10, SIMULATED, engine="torch", old_states=old_states)
        ids = on_device(_IDS)
        store.begin_write(0, ids)
        store.end_write(0)
        store.begin_write(1, ids[:2])
        store.mark(ids, is_written=True)
        store.mark(None)
        store.begin_write(2, None)
    with find_syncs() as found:
        store.cut(1)
    assert not found, "also a cut with writes in progress"
    with find_syncs() as found:
        changed = store.changed(0, 1)
    assert found, "a read waits, and says so"
    assert held(changed.ids).tolist() == list(range(10))


def test_row_sets_record_on_a_device() -> None:
    with assert_no_sync():
        rows = choose_engine("torch", SIMULATED)(10, SIMULATED)
        ids = on_device(_IDS)
        rows.mark(ids)
        padded, count = rows.mark_new_padded(ids + 1)
        assert rows.contains(ids).device == SIMULATED
        other = choose_engine("torch", SIMULATED)(10, SIMULATED)
        other.mark_all()
        other.merge(rows)
    assert held(padded).tolist() == [1, 3, 6, 8, -1]
    assert held(count).tolist() == [4]
    with find_syncs() as found:
        assert held(rows.scan()).tolist() == [0, 1, 2, 3, 5, 6, 7, 8]
    assert found


@pytest.mark.parametrize("mode", list(EmbdUpdateMode))
def test_the_store_of_raw_lookups_appends_on_a_device(mode: EmbdUpdateMode) -> None:
    store = DeltaStore(mode)
    with assert_no_sync():
        ids, states = on_device(_IDS), on_device(torch.arange(10.0).view(5, 2))
        for number in range(3):
            store.append(number, "t", ids, None if mode is EmbdUpdateMode.NONE else states)
        assert store.get_indexed_lookups(0, 3)["t"][0].ids.device == SIMULATED
