"""Pins of streams that end, and predictors that are interrupted on the way to them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from delta_tracker import Predictor
from delta_tracker.errors import SinkError
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.pin import PinFollower
from delta_tracker.stream.rollback import pin_version
from tests.predictor.memory_sink import MemorySink, Stored
from tests.predictor.pin_fleet import Fleet
from tests.stream.streams import FQN


@pytest.fixture
def fleet(tmp_path: Path) -> Fleet:
    """A stream with the snapshot 1 and the deltas 2 to 5."""
    fleet = Fleet(tmp_path / "stream")
    fleet.deltas(4)
    return fleet


def _entry_parts(fleet: Fleet, version: int) -> list[str]:
    entry = StreamLog(fleet.storage).read(version)
    assert entry is not None
    return [part.name for part in entry.parts]


def _sink_predictor(fleet: Fleet) -> tuple[Predictor, MemorySink]:
    sink = MemorySink(Stored())
    predictor = Predictor(sink, fleet.storage, follows_pins=True, chunk_rows=5)
    predictor._pins = PinFollower(lambda: fleet.storage, seconds=0.0)
    return predictor, sink


def _sink_rows(sink: MemorySink) -> torch.Tensor:
    return torch.stack([sink.stored.rows[str(sink.stored.current), FQN, row][1] for row in range(20)])


# Rows that are newer than the position


def test_a_pin_at_the_applied_version_replaces_rows_of_an_interrupted_one(fleet: Fleet) -> None:
    predictor = fleet.join(is_fragile=True)
    last = predictor.sync()
    fleet.published("snapshot")  # bad
    fleet.tables[predictor].left = 1
    with pytest.raises(RuntimeError, match="device lost"):
        predictor._take(predictor._cursor.next())  # type: ignore[arg-type]
    pin_version(fleet.storage, last)
    predictor.sync()
    with predictor.reading() as served:
        assert served.applying is None
    fleet.assert_holds(predictor, last)


def test_a_pin_at_the_stored_version_replaces_rows_of_an_interrupted_one(fleet: Fleet) -> None:
    predictor, sink = _sink_predictor(fleet)
    last = predictor.sync()
    fleet.published("delta")  # bad
    sink.fails_after = 2
    with pytest.raises(SinkError):
        predictor.sync()
    sink.fails_after = None
    pin_version(fleet.storage, last)
    predictor.sync()
    assert predictor.version == last
    assert torch.equal(_sink_rows(sink), fleet.bits[last])


@pytest.mark.parametrize("num_more", [0, 1])
def test_a_pin_at_a_loaded_position_replaces_rows_that_were_saved_later(fleet: Fleet, num_more: int) -> None:
    predictor = fleet.join()
    predictor.sync()
    position = predictor.state_dict()
    last = fleet.published("delta") if num_more else predictor.version
    fleet.published("delta")
    predictor.sync()
    after = fleet.restart(position, fleet.rows_of(predictor))
    after.sync(num_more) if num_more else None
    assert after.version == last
    pin_version(fleet.storage, last)
    after.sync()
    fleet.assert_holds(after, last)
    assert after.status().pinned == last
