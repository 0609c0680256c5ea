"""Cases about several consumers and their memory: faults 11 and 12."""

from __future__ import annotations

from benchmarks.faults.models import Table, build
from benchmarks.faults.registry import case, expect
from benchmarks.faults.trackers import Make

_NUM_BATCHES = 50
_MAX_BYTES = 4096


@case(11)
def clear_one_of_two(make: Make) -> None:
    """Clearing a consumer discards its pending rows, but not those of the other one."""
    training = build(Table("t"))
    tracker = make(training, consumers=["a", "b"])
    training.train(t=[1])
    tracker.clear("a")
    training.train(t=[2])
    (rows,) = tracker.read("a").values()
    expect(rows.ids == [2], f"reads {sorted(rows.ids)} after `clear`, not [2]")
    (rows,) = tracker.read("b").values()
    expect(sorted(rows.ids) == [1, 2], "clears the other consumer too")


@case(11)
def read_without_name(make: Make) -> None:
    """With several consumers, a read without a name raises an error that lists them."""
    training = build(Table("t"))
    tracker = make(training, consumers=["alpha", "beta"])
    training.train(t=[1])
    try:
        tracker.read()
    except Exception as error:  # noqa: BLE001  any type is accepted, if the message has the names
        names_both = all(name in str(error) for name in ("alpha", "beta"))
        expect(names_both, f"{type(error).__name__} that does not name the consumers")
        return
    expect(None, "reads for nobody")


@case(12)
def slow_consumer(make: Make) -> None:
    """One consumer reads every batch, the other never reads; memory for one changed row does not grow."""
    training = build(Table("t"))
    tracker = make(training, consumers=["fast", "slow"])
    held = []
    for _ in range(_NUM_BATCHES):
        training.train(t=[1])
        tracker.read("fast")
        held.append(tracker.held_bytes())
    expect(held[0], "the case holds nothing")
    expect(held[-1] <= held[0], f"holds one row {held[-1] // held[0]} times")


@case(12)
def bounded_memory(make: Make) -> None:
    """Memory stays below the bound ``max_bytes``."""
    rows = 400
    training = build(Table("t", rows=rows))
    tracker = make(training, "embedding", consumers=["fast", "slow"], max_bytes=_MAX_BYTES)
    most = 0
    for start in range(0, rows, 20):
        training.train(t=range(start, start + 20))
        tracker.read("fast")
        most = max(most, tracker.held_bytes())
    expect(most <= _MAX_BYTES, f"holds {most} bytes, has no bound")
