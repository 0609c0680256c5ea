"""Work on several CUDA streams at once, with delays that make a missing order visible."""

from __future__ import annotations

import threading

import pytest
import torch

from benchmarks.plain_torchrec import PlainModel
from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Storage, TrackingMode
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.store.segments import SegmentStore
from tests.gpu.devices import ENGINES, IS_CUDA, OF_MODULES, Side, slow_down, wait
from tests.stream.streams import FQN, Writer

_SIZE = 4096 if IS_CUDA else 100


def test_no_row_changes_while_a_lookup_runs_on_a_side_stream(tmp_path) -> None:
    storage = Storage(f"file://{tmp_path}")
    writer = Writer(storage, _SIZE, 64)
    writer.snapshot()
    table = torch.zeros(_SIZE, 64, device=OF_MODULES)
    predictor = Predictor({FQN: table}, storage)
    predictor.sync()
    ids, stop = torch.arange(_SIZE, device=OF_MODULES), threading.Event()
    pairs = []

    def look_up() -> None:
        side = Side()
        while not stop.is_set():
            with predictor.reading(*side.streams), side():
                first = table.index_select(0, ids)
                slow_down(5)
                second = table.index_select(0, ids)
            side.wait()  # after the lock is released
            pairs.append((first, second))

    thread = threading.Thread(target=look_up)
    thread.start()
    for _ in range(20 if IS_CUDA else 6):
        writer.delta(list(range(_SIZE)))
        predictor.sync()
    stop.set()
    thread.join()
    wait()
    assert len(pairs) > 5
    assert all(torch.equal(first, second) for first, second in pairs)
    assert torch.equal(table.cpu(), writer.table)


@pytest.mark.usefixtures("plain_torchrec")
@pytest.mark.parametrize("kind", ["snapshot", "publish"])
def test_a_version_has_the_rows_of_training_on_a_side_stream(kind: str, tmp_path) -> None:
    storage = Storage(f"file://{tmp_path}")
    tables = {"t": (20_000, 64), "u": (1000, 8)}
    side = Side()
    with side():
        model = PlainModel(tables, OF_MODULES)
        tracker = ModelDeltaTracker(model)
        publisher = Publisher(tracker, storage)
        publisher.snapshot()
        served = {fqn: torch.zeros(table.shape) for fqn, table in model.weights().items()}
        predictor = Predictor(served, storage)
        for number in range(4):
            ids = {name: torch.randint(0, rows, (3000,), device=OF_MODULES) for name, (rows, _) in tables.items()}
            slow_down()
            model.train_on(ids)
            tracker.step()
            getattr(publisher, kind)()
            slow_down()
            predictor.sync()
            for fqn, table in model.weights().items():
                assert torch.equal(served[fqn], table.cpu()), number
        publisher.close()
        tracker.detach()


@pytest.mark.parametrize("with_states", [False, True])
@pytest.mark.parametrize("engine", ENGINES)
def test_a_read_waits_for_marks_of_another_stream(engine: str, with_states: bool) -> None:
    weights = torch.rand(5000, 4, device=OF_MODULES)
    old_states = (lambda ids: weights.index_select(0, ids)) if with_states else None
    store = SegmentStore(5000, OF_MODULES, engine=engine, old_states=old_states)
    log = ChangeLog({"t": store}, ["a"], delete_on_read=True, max_bytes=None)
    side = Side()
    expected = set()
    for number in range(5):
        ids = torch.randint(0, 5000, (500,), device=OF_MODULES)
        expected = set(ids.tolist())
        side.catch_up()
        with side():
            slow_down()
            log.writes.begin_write(number, {"t": ids})
            log.writes.end_write(number, {"t": ids})
        read = log.consumers.read("a")
        assert set(read.rows["t"].ids.tolist()) == expected
        log.consumers.commit(read)
    wait()


@pytest.mark.usefixtures("plain_torchrec")
def test_old_states_are_those_before_an_update_on_a_side_stream() -> None:
    side = Side()
    model = PlainModel({"t": (5000, 16)}, OF_MODULES)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        for _ in range(3):
            before = model.weights()["ec.embeddings.t"].cpu().clone()
            ids = torch.randint(0, 5000, (700,), device=OF_MODULES)
            side.catch_up()
            with side():
                slow_down()
                model.train_on({"t": ids})
                slow_down()
                model.train_on({"t": ids})
            rows = tracker.get_delta()["ec.embeddings.t"]
            assert torch.equal(rows.ids.cpu(), ids.unique().cpu())
            assert torch.equal(rows.states.cpu(), before[rows.ids.cpu()])
            wait()
