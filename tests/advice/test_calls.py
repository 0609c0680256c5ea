"""Advice to make another call first, or the call in another way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torchmetrics

from delta_tracker import (
    DataPosition,
    Gate,
    ModelDeltaTracker,
    Predictor,
    Publisher,
    Recovery,
    Rollout,
    Storage,
    restore,
)
from delta_tracker.cli import diff as diff_command
from delta_tracker.cli.main import main
from delta_tracker.compat import ModelDeltaTrackerTrec, TorchrecAssertionError
from delta_tracker.errors import HeldVersionError, InvalidArgumentError, MalformedError, NoSnapshotError, PinError
from delta_tracker.monitor import Monitor
from delta_tracker.monitor.device.metrics import DeviceCounter, DeviceMean
from delta_tracker.monitor.state import LogicalCounters
from delta_tracker.sinks.lmdb import LmdbSink
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.pin import announce_deletions
from delta_tracker.stream.pinning import pin_version, release_pin
from tests.advice.jobs import Job, refused, small_model
from tests.cli.commands import Cli


@pytest.mark.advice("InvalidArgumentError: Follower.start Follower.wait")
def test_following_is_started_once_and_before_a_wait(tmp_path: Path) -> None:
    job, model = Job(tmp_path), small_model()
    with job.serve(model) as predictor:
        refused(InvalidArgumentError, lambda: predictor.wait(1), "Call follow() first, or sync() instead")
        predictor.follow()
        refused(InvalidArgumentError, predictor.follow, "Call stop() first")
        predictor.stop()
        predictor.follow(poll_seconds=0.01)
        assert job.is_served_by(model, predictor.wait(1, timeout=60))


@pytest.mark.advice("InvalidArgumentError: Monitor.start")
def test_a_monitor_is_stopped_before_it_starts_again() -> None:
    monitor = Monitor()
    monitor.start([])
    refused(InvalidArgumentError, lambda: monitor.start([]), "Call stop() first")
    monitor.stop()
    monitor.start([])
    monitor.stop()


@pytest.mark.advice("InvalidArgumentError: Predictor.accept")
def test_a_predictor_with_a_gate_accepts(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with torch.no_grad():
        job.model[0].weight[3] = torch.nan
    job.publisher.publish()
    refused(InvalidArgumentError, lambda: job.serve().accept(2), "Build the Predictor with a gate")
    predictor = job.serve(model := small_model(), rollout=Rollout(gate=Gate()))
    refused(HeldVersionError, predictor.sync, "call accept(2) or rollback(...)")
    predictor.accept(2)
    assert predictor.sync() == 2
    assert model[0].weight[3].isnan().all()


@pytest.mark.advice("InvalidArgumentError: Stat._needs_labels")
def test_a_stat_with_labels_is_used_by_its_cells() -> None:
    counter = Monitor().counter("rows", labels=["table"])
    error = refused(InvalidArgumentError, lambda: counter.add(1), ".cell(table).add(1)")
    assert "Call rows" in error.remedy
    refused(InvalidArgumentError, lambda: counter.add(1, table="user"), "Call rows.cell(table='user').add(1)")
    refused(InvalidArgumentError, lambda: counter.add(1, t="user"), "Pass exactly the labels ['table'] of 'rows'")
    counter.cell(table="user").add(1)


@pytest.mark.advice("InvalidArgumentError: refuse_labels", "InvalidArgumentError: order_labels")
@pytest.mark.parametrize("kind", ["counter", "gauge", "stat", "histogram"])
def test_a_label_is_declared_before_it_is_used(kind: str) -> None:
    stat = getattr(Monitor(), kind)("rows")
    words = "Define 'rows' with labels=['table']", "it has no labels"
    calls = [lambda: stat.add(2, table="user"), lambda: stat.cell(table="user"), lambda: stat.timer(table="user")]
    calls += [lambda: stat.set(2, table="user")] if kind == "gauge" else []
    for call in calls:
        assert "{'table': 'user'}" in str(refused(InvalidArgumentError, call, *words))
    refused(InvalidArgumentError, calls[0], "then call rows.cell(table='user').add(2)")
    labelled = getattr(monitor := Monitor(), kind)("rows", labels=["table"])
    for value in (None, b"user", ["user"], torch.ones(1), object()):
        words = ("Pass a string or a number as label 'table' of 'rows', whose labels are ['table']",)
        refused(InvalidArgumentError, lambda value=value: labelled.cell(table=value), *words)
        refused(InvalidArgumentError, lambda value=value: labelled.add(2, table=value), *words)
    labelled.cell(table="user").add(2)
    assert [
        (each.labels, each.figures.total) for each in monitor.collect().totals if each.definition.name == "rows"
    ] == [((("table", "user"),), 2)]


@pytest.mark.advice("InvalidArgumentError: _DeviceStat._refuse_labels")
@pytest.mark.parametrize("kind", [DeviceMean, DeviceCounter])
def test_a_device_stat_is_built_for_each_set_of_labels(kind: type[DeviceMean]) -> None:
    monitor = Monitor()
    refused(InvalidArgumentError, lambda: kind("a", monitor=monitor, labels=["table"]), "Pass a mapping of label")
    stat = kind("loss", monitor=monitor, labels={"table": "user"})
    for labels in ({"table": "user"}, {"t": 1}):
        words = f"Build one {kind.__name__} for each set of labels", "This one has {'table': 'user'}"
        refused(InvalidArgumentError, lambda labels=labels: stat.update(1.0, **labels), *words)
    other = kind("loss", monitor=monitor, labels={"table": "item"})
    other.update(1.0)
    assert {each.labels: each.count for each in monitor.collect().windows if each.definition.name == "loss"} == {
        (("table", "item"),): 1
    }


@pytest.mark.advice("InvalidArgumentError: Stream.head observe _encoding", "NoSnapshotError: command")
def test_a_command_is_given_a_stream_or_a_description(cli: Cli, tmp_path: Path) -> None:
    cli("inspect", tmp_path / "stream", code=2)
    assert "Check the URL, or start the publisher" in cli.err
    cli("plan", "--from", tmp_path / "stream", code=2)
    assert "Check the URL, or start the publisher" in cli.err
    job = Job(tmp_path)
    cli("inspect", job.url)
    cli("plan", "--from", job.url, code=2)
    assert "Pass a stream with two deltas or more, or describe it with --table" in " ".join(cli.err.split())
    cli("plan", "--table", "20x4", "--changed", "0.1")
    job.publish(1)
    job.publish(2)
    cli("plan", "--from", job.url)


@pytest.mark.advice("InvalidArgumentError: path_to _refuse_former", "MissingVersionError: checked_path")
def test_a_version_of_the_stream_is_passed(tmp_path: Path) -> None:
    job, model = Job(tmp_path), small_model()
    predictor = job.serve(model)
    error = refused(InvalidArgumentError, lambda: predictor.rollback(7), "Pass one of the versions up to 1")
    assert error.argument == "version"
    predictor.rollback(1)
    assert job.is_served_by(model, predictor.version)
    store = Storage(f"file://{tmp_path}/other", create=True)
    StreamLog(store).claim()
    refused(NoSnapshotError, lambda: pin_version(store, 0), "snapshot()")
    refused(PinError, lambda: release_pin(store), "do nothing")


@pytest.mark.advice(
    "InvalidArgumentError: LmdbSink.remove RedisSink.remove", "InvalidArgumentError: ServingStreams._newest _stream_of"
)
def test_another_stream_is_finished_before_one_is_removed(tmp_path: Path) -> None:
    job, sink = Job(tmp_path), LmdbSink(str(tmp_path / "rows"))
    with Predictor(sink, job.url) as predictor:
        predictor.sync()
        former = sink.current()
        assert former is not None
        refused(InvalidArgumentError, lambda: sink.remove(former), "Call finish() of another stream first")
        job.publisher.close()
        (tmp_path / "stream").rename(tmp_path / "former")
        Job(tmp_path)
        predictor.sync()
        assert sink.current() != former
        sink.remove(former)
        sink.close()


@pytest.mark.advice("InvalidArgumentError: connection")
def test_an_http_endpoint_is_allowed_by_an_option() -> None:
    options = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1", "endpoint": "http://127.0.0.1:9"}
    refused(InvalidArgumentError, lambda: Storage("s3://bucket/x", options=options), "Add allow_http='true'")
    Storage("s3://bucket/x", options=options | {"allow_http": "true"})


@pytest.mark.advice("InvalidArgumentError: os_errors_of")
def test_a_directory_with_space_is_set(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job = Job(tmp_path)
    job.publish(3)
    scratch = diff_command.mapped

    def full(path: Path, *arguments: Any) -> Any:
        if not path.is_relative_to(tmp_path):
            raise OSError(28, "No space left on device")
        return scratch(path, *arguments)

    monkeypatch.setattr(diff_command, "mapped", full)
    cli("diff", job.url, 1, 2, code=2)
    assert "Set it to a directory with space" in " ".join(cli.err.split())
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # as with TMPDIR
    cli("diff", job.url, 1, 2)


@pytest.mark.advice("InvalidArgumentError: main")
def test_the_output_of_a_command_is_redirected(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    job = Job(tmp_path)
    with monkeypatch.context() as closed:
        closed.setattr("sys.stdout", None)
        assert main(["inspect", job.url]) == 2
    assert "Redirect it to a file, or to /dev/null" in capsys.readouterr().err
    with (tmp_path / "out").open("w") as out:
        monkeypatch.setattr("sys.stdout", out)
        assert main(["inspect", job.url]) == 0


class _Loader:
    """A loader whose position is saved."""

    position = 0

    def __iter__(self) -> Iterator[int]:
        while True:
            self.position += 1
            yield self.position

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


@pytest.mark.advice("InvalidArgumentError: LocalJob._check_data")
def test_a_position_is_attached_before_the_first_batch(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)
    with Publisher(
        tracker, f"file://{tmp_path}", recovery=Recovery(training_state={"optimizer": optimizer})
    ) as publisher:
        publisher.snapshot()

    def run(*, attaches: bool) -> None:
        data = DataPosition(_Loader())
        other = ModelDeltaTracker(model)
        if attaches:
            other.attach_data(data)
        batches = iter(data)
        next(batches)
        restore(
            model,
            f"file://{tmp_path}",
            tracker=other,
            recovery=Recovery(training_state={"optimizer": optimizer}),
            data=data,
            ignore=["data"],
        )

    refused(InvalidArgumentError, lambda: run(attaches=False), "Call tracker.attach_data(data) before the first batch")
    run(attaches=True)


@pytest.mark.advice("InvalidArgumentError: MetricCounter._check_unsynced")
def test_a_synchronized_metric_is_unsynced_before_it_is_saved() -> None:
    metric = torchmetrics.SumMetric()
    tracker = ModelDeltaTracker(small_model())
    tracker.register_counter("seen", metric)
    metric.update(3)
    metric._cache, metric._is_synced = {"sum_value": metric.sum_value.clone()}, True  # as sync() leaves it
    refused(InvalidArgumentError, tracker.state_dict, "Call its unsync() first")
    metric.unsync()
    saved = tracker.state_dict()
    metric.update(3)
    tracker.load_state_dict(saved)
    assert metric.compute() == 3


@pytest.mark.advice("InvalidArgumentError: _check")
def test_a_weight_is_on_the_device_of_its_values() -> None:
    mean = DeviceMean("c", monitor=Monitor())
    refused(
        InvalidArgumentError, lambda: mean.update(torch.ones(1), weight=torch.ones(1, device="meta")), "Move it to cpu"
    )
    mean.update(torch.ones(1), weight=torch.ones(1))


@pytest.mark.advice("InvalidArgumentError: _parsed")
def test_counters_are_loaded_from_a_checkpoint_of_this_library() -> None:
    monitor = Monitor()
    monitor.counter("rows", is_logical=True).add(3)
    counters = LogicalCounters(monitor)
    refused(InvalidArgumentError, lambda: counters.merge([{"rows": 3}]), "Load a checkpoint that this library saved")
    counters.load_state_dict(counters.merge([counters.state_dict()]))


@pytest.mark.advice("InvalidArgumentError: ModelDeltaTrackerTrec.get_unique")
def test_budgets_that_differ_are_passed_to_get_delta() -> None:
    model = small_model()
    tracker = ModelDeltaTrackerTrec(model, mode="EMBEDDING")
    refused(
        TorchrecAssertionError,
        lambda: tracker.get_unique(per_table_percentage={"0": (1, 0.5)}),
        "get_delta(top_k=TopK(...))",
    )
    assert tracker.get_unique() is not None


@pytest.mark.advice("MalformedError: running_deletions")
def test_a_garbled_announcement_is_deleted(tmp_path: Path) -> None:
    job, store = Job(tmp_path), Storage(f"file://{tmp_path}/stream")
    name = announce_deletions(store, job.publisher.stream, 0)
    store.replace(name, b"<html>")
    refused(MalformedError, lambda: pin_version(store, 1), "Delete it when no retention pass runs")
    store.delete(name)
    assert pin_version(store, 1).version == 1


@pytest.mark.advice("MalformedError: parse_manifest check_version check_merged _check_tables _pieces")
def test_a_garbled_entry_is_copied_back_or_passed_by_a_snapshot(cli: Cli, tmp_path: Path) -> None:
    job, store = Job(tmp_path), Storage(f"file://{tmp_path}/stream")
    copy = Storage(f"file://{tmp_path}/copy", create=True)
    mirror = Mirror(store, copy)
    while mirror.step():
        pass
    entry = tmp_path / "copy" / entry_name(1)
    whole = entry.read_bytes()
    entry.write_bytes(b"<html>")
    refused(MalformedError, lambda: Predictor(small_model(), copy).sync(), "copy the object back from a mirror")
    entry.write_bytes((tmp_path / "stream" / entry_name(1)).read_bytes())
    assert entry.read_bytes() == whole
    model = small_model()
    assert job.is_served_by(model, Predictor(model, copy).sync())
    job.publish(3)
    (tmp_path / "stream" / entry_name(2)).write_bytes(b"<html>")
    cli("export", job.url, "--version", 2, "--out", tmp_path / "a", code=1)
    assert "snapshot()" in cli.err
    job.publisher.snapshot()
    cli("export", job.url, "--out", tmp_path / "b")
