"""Age of the served rows: by the store's clock, at the time of the scrape, and without a request to the store."""

from __future__ import annotations

import time
import urllib.request
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker import Predictor, Storage
from delta_tracker.monitor import Monitor
from delta_tracker.predictor import predictor_gauges
from delta_tracker.predictor.predictor_gauges import ServedAge
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.reading.runtime import Runtime
from tests.monitor.figures import Figures
from tests.stores.rules import Gate, on
from tests.stores.wrapped import WrappedStorage
from tests.stream.streams import Writer
from tests.sweeps import num_examples
from tests.waiting import eventually


@settings(max_examples=num_examples(200), deadline=None)
@given(
    offset=st.floats(-7200, 7200),
    waits=st.lists(st.tuples(st.floats(0.01, 30), st.integers(0, 3)), min_size=2, max_size=30),
)
def test_the_age_is_that_of_the_stores_clock_whatever_the_readers(
    offset: float, waits: list[tuple[float, int]]
) -> None:
    """A reader polls after each wait; meanwhile the given number of versions is committed. The store is right."""
    store = SimpleNamespace(now=1e9)
    age = ServedAge(Runtime(clock=lambda: store.now + offset, monotonic=lambda: store.now))
    waiting: list[float] = []
    version = 0
    served, width, last_empty = None, float("inf"), None
    for wait, num_commits in waits:
        waiting += [store.now + wait * (number + 1) / (num_commits + 1) for number in range(num_commits)]
        store.now += wait
        age.empty_poll = None if last_empty is None else (version, last_empty)
        if waiting:
            version += 1
            served = SimpleNamespace(modified=waiting.pop(0), committed=0.0, merges=None, version=version)
            served.committed = served.modified
            age.applied(served)
            if last_empty is not None:
                width = min(width, store.now - last_empty + 1.0)
            last_empty = None
        else:
            last_empty = store.now
        if served is None:
            continue
        found, true = age.seconds(served), store.now - served.modified
        assert found >= 0
        if width < float("inf"):
            assert abs(found - true) <= width + 1e-3
            assert abs(age.skew_seconds) <= abs(offset) + width


def _scraped(port: int) -> dict[str, float]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    pairs = (line.rpartition(" ") for line in lines if not line.startswith("#"))
    return {name: float(value) for name, _, value in pairs}


def test_the_age_is_read_at_the_scrape_while_the_store_hangs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither the collector nor the follower gets an answer. The lag, which needs one, is no longer exported."""
    pytest.importorskip("prometheus_client")
    from delta_tracker.monitor.sinks.prometheus import PrometheusSink  # noqa: PLC0415  optional

    monkeypatch.setattr(predictor_gauges, "_PATIENCE_SECONDS", 0.0)
    gate = Gate(on("read", "stat"))
    writer, monitor = Writer(WrappedStorage(Storage("memory://"))), Monitor(deadline=timedelta(seconds=1))
    committed = writer.snapshot()
    predictor = Predictor(writer.model(), writer.storage, monitor=monitor)
    predictor.sync()
    sink = PrometheusSink(port=0)
    monitor.start([sink], interval=timedelta(seconds=0.05), system=False)
    age, lag = ('delta_tracker_served_age_seconds{predictor="predictor"}', "delta_tracker_predictor_lag_versions")
    try:
        assert monitor.flush()
        assert f'{lag}{{predictor="predictor"}}' in _scraped(sink.port)
        writer.storage.rules.append(gate)
        assert gate.reached.wait(60)
        for _ in range(3):
            before = time.time()
            found = _scraped(sink.port)[age]
            assert before - committed.created - 2 <= found <= time.time() - committed.created + 2
        first = _scraped(sink.port)[age]
        time.sleep(0.01)
        assert _scraped(sink.port)[age] >= first + 0.01
        eventually(
            lambda: not any(name.startswith(lag) for name in _scraped(sink.port)),
            lambda: "an old lag is shown although the store hangs",
        )
    finally:
        gate.open()
        monitor.stop()
    assert predictor.version == committed.version


def test_a_loaded_position_has_an_age(tmp_path: Path) -> None:
    """The manifest of the position is not saved: it is read once, past claims."""
    writer, monitor = Writer(Storage(f"file://{tmp_path}", create=True)), Monitor()
    writer.snapshot()
    model = writer.model()
    first = Predictor(model, writer.storage)
    first.sync()
    second = Predictor(model, writer.storage, name="second", monitor=monitor)
    figures = Figures(monitor)
    assert figures.of("served_age_seconds", predictor="second") is None
    second.load_state_dict(first.state_dict())
    second.sync()
    assert second.manifest is None
    assert 0 <= figures.of("served_age_seconds", predictor="second") < 60
    assert figures.of("served_event_age_seconds", predictor="second") is None, "the stream has no event times"
    shown = [labels for name, labels in figures.now() if name == "predictor_info"]
    assert [dict(each)["stream"] for each in shown] == [first.status().stream]


def test_the_age_of_a_merged_version_begins_at_its_newest_cut(tmp_path: Path) -> None:
    writer = Writer(Storage(f"file://{tmp_path}", create=True))
    writer.snapshot()
    for number in range(20):
        writer.delta([number])
    merged = compact(writer.storage, fold=1e9)
    assert merged is not None
    assert merged.merges is not None
    late = ServedAge(Runtime(clock=lambda: merged.cut + 500))
    assert late.seconds(merged) == pytest.approx(500)


def test_a_predictor_shows_its_stream_and_its_source(tmp_path: Path) -> None:
    writer, monitor = Writer(Storage(f"file://{tmp_path}", create=True)), Monitor()
    figures = Figures(monitor)
    predictor = Predictor(writer.model(), writer.storage, monitor=monitor)
    url = writer.storage.url
    assert figures.of("predictor_info", predictor="predictor", stream="", url=url) == 1, "it has no version yet"
    stream = writer.snapshot().stream
    predictor.sync()
    assert figures.of("predictor_info", predictor="predictor", stream=stream, url=url) == 1
    assert figures.of("predictor_info", predictor="predictor", stream="", url=url) is None
