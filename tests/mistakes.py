"""Plausible mistakes of new users, and what each says: ``python -m tests.mistakes`` prints the table.

The mistakes were collected before their messages were read. Each message must name the offender and the next step.
"""

from __future__ import annotations

import io
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping
from contextlib import closing, redirect_stderr, redirect_stdout, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torchmetrics
from torch import nn

from delta_tracker import (
    Cadence,
    Encoding,
    Gate,
    ModelDeltaTracker,
    ModelTarget,
    Predictor,
    Publisher,
    RankCounters,
    RawIdIndex,
    Recovery,
    Retention,
    Rollout,
    Standby,
    Storage,
    TopK,
    Upkeep,
    compat,
    restore,
)
from delta_tracker import monitor as monitoring
from delta_tracker.cli.main import main as command_line
from delta_tracker.errors import WaitTimeoutError
from delta_tracker.integrations.aot_inductor import CompiledModel, compile_package
from delta_tracker.integrations.dcp import SavedCounters, SavedTracker
from delta_tracker.integrations.lightning import TrackerCallback
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.monitor.sinks.jsonl import JsonlSink
from delta_tracker.monitor.sinks.prometheus import PrometheusSink
from delta_tracker.sinks.lmdb import LmdbSink
from delta_tracker.sinks.lmdb_rows import LmdbRows
from delta_tracker.sinks.redis import RedisSink
from delta_tracker.stream.notify.redis_hints import RedisNotifier

_KEYS = {"access_key_id": "a", "secret_access_key": "b", "region": "us-east-1"}


@dataclass(frozen=True)
class Mistake:
    """A mistake, and the words that its message must have.

    Args:
        make: function that makes the mistake; it raises, or returns what was logged or printed.
        offender: words that name what is wrong.
        step: words of the next step.
    """

    make: Callable[[], object]
    offender: str
    step: str


def _dense_model() -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(100, 8, sparse=True), nn.Linear(8, 1))


def _model() -> nn.Sequential:
    return nn.Sequential(nn.EmbeddingBag(100, 8, sparse=True))


def _tracker(**options: Any) -> ModelDeltaTracker:
    return ModelDeltaTracker(_model(), **options)


def _url() -> str:
    return f"file://{tempfile.mkdtemp(prefix='mistake-')}"


def _train(model: nn.Module, tracker: ModelDeltaTracker | None = None) -> None:
    model(torch.tensor([[1, 2, 3]])).sum().backward()
    torch.optim.SGD(model.parameters(), lr=0.1).step()
    if tracker is not None:
        tracker.step()


def _publisher(url: str | None = None, tracker: Any = None, **options: Any) -> Publisher:
    return Publisher(tracker or _tracker(), url or _url(), **options)


def _stream() -> str:
    """Publish a snapshot and a delta; return the url."""
    url, model = _url(), _model()
    tracker = ModelDeltaTracker(model)
    with Publisher(tracker, url) as publisher:
        publisher.snapshot()
        _train(model, tracker)
        publisher.publish()
    return url


def _synced() -> Predictor:
    predictor = Predictor(_model(), _stream())
    predictor.sync()
    return predictor


class _Kept(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(f"{record.levelname}: {record.getMessage()}")


def _logged(act: Callable[[], object]) -> str:
    """Return what the library logs and warns while ``act`` runs."""
    handler = _Kept()
    logger = logging.getLogger("delta_tracker")
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            act()
    finally:
        logger.removeHandler(handler)
    return " ".join([*handler.texts, *(str(each.message) for each in caught)])


def _steps(publisher: Publisher, model: nn.Module, tracker: ModelDeltaTracker | None, number: int) -> None:
    for _ in range(number):
        _train(model, tracker)
        publisher.step()


def _unstepped() -> str:
    model = _model()
    publisher = Publisher(ModelDeltaTracker(model), _url(), cadence=Cadence(batches=1))
    with publisher:
        return _logged(lambda: _steps(publisher, model, None, 25))


def _fenced(*, steps: bool) -> str:
    url, model = _url(), _model()
    tracker = ModelDeltaTracker(model)
    with Publisher(tracker, url, cadence=Cadence(batches=1)) as publisher, _publisher(url):
        if not steps:
            publisher.publish()
        return _logged(lambda: (_steps(publisher, model, tracker, 10), publisher._versions.finish()))


def _twice_following() -> None:
    with _synced() as predictor:
        predictor.follow()
        predictor.follow()


def _sync_inside_reading() -> None:
    predictor = _synced()
    with predictor.reading():
        predictor.sync()


def _committed_twice() -> None:
    model = _model()
    tracker = ModelDeltaTracker(model)
    _train(model, tracker)
    delta = tracker.get_delta(commit=False)
    tracker.commit(delta)
    tracker.commit(delta)


def _launched() -> str:
    """Publish as a rank of torchrun, without a process group."""
    with mock.patch.dict(os.environ, WORLD_SIZE="2", RANK="1"):
        return _logged(lambda: _publisher().close())


def _published_takeover() -> None:
    """Publish to the takeover instead of its stream."""
    url, model = _url(), _dense_model()
    recovery = Recovery(training_state={"o": torch.optim.SGD(model.parameters(), lr=0.1)}, heartbeat_seconds=None)
    tracker = ModelDeltaTracker(model)
    with Publisher(tracker, url, dense=True, recovery=recovery) as publisher:
        publisher.publish()
    with closing(Standby(model, url, tracker=tracker, recovery=recovery)) as standby:
        standby.sync()
        taken = standby.take_over(force=True)
    Publisher(tracker, taken, dense=True)  # type: ignore[arg-type]


def _rejected() -> str:
    monitor = Monitor()
    monitor.counter("clicks").add(-1)
    return _logged(monitor.collect)


def _used_port() -> str:
    """Return the error for a port in use, with its notes, as a traceback shows them."""
    with closing(PrometheusSink(port=0)) as sink:
        try:
            PrometheusSink(port=sink.port)
        except OSError as error:
            return f"{error} {error.__notes__}"
    return ""


def _rows() -> LmdbRows:
    """Return a reader of rows that were written to LMDB."""
    directory = tempfile.mkdtemp(prefix="mistake-")
    sink = LmdbSink(directory)
    Predictor(sink, _stream()).sync()
    sink.close()
    return LmdbRows(directory)


def _two_publishers() -> None:
    tracker = _tracker()
    with _publisher(tracker=tracker):
        _publisher(tracker=tracker)


def _closed(method: str) -> None:
    publisher = _publisher(cadence=Cadence(batches=1))
    publisher.close()
    getattr(publisher, method)()


def _waits(seconds: float, url: str | None = None) -> None:
    with _synced() if url is None else Predictor(_model(), url) as predictor:
        predictor.follow()
        predictor.wait(99, timeout=seconds)


def _follows_nothing(url: str) -> None:
    with suppress(WaitTimeoutError):
        _waits(0.5, url)


def _extra_table() -> str:
    served = nn.Sequential(nn.EmbeddingBag(100, 8), nn.EmbeddingBag(7, 8))
    return _logged(Predictor(served, _stream()).sync)


def _served_in_training() -> None:
    model = _model()
    with ModelDeltaTracker(model) as tracker:
        Predictor(model, _published(tracker)).sync()


def _published(tracker: ModelDeltaTracker) -> Storage:
    storage = Storage("memory://")
    with Publisher(tracker, storage) as publisher:
        publisher.snapshot()
    return storage


def _command(*arguments: str) -> str:
    said = io.StringIO()
    with redirect_stdout(said), redirect_stderr(said):
        assert command_line(arguments) != 0
    return said.getvalue()


def _bucket(**options: str) -> Storage:
    return Storage("s3://bucket/x", options={**_KEYS, **options})


MISTAKES: Mapping[str, Mistake] = {
    "track a model without tables": Mistake(
        lambda: ModelDeltaTracker(nn.Linear(2, 2)), "no table to track", "nn.EmbeddingBag"
    ),
    "track a path": Mistake(lambda: ModelDeltaTracker("model.pt"), "model='model.pt'", "Pass a torch.nn.Module"),  # type: ignore[arg-type]
    "skip a table that does not exist": Mistake(
        lambda: _logged(lambda: _tracker(fqns_to_skip=["users"])), "'users'", "known tables: ['0']"
    ),
    "skip a string": Mistake(lambda: _tracker(fqns_to_skip="0"), "fqns_to_skip='0'", "Pass a list"),
    "skip a number": Mistake(lambda: _tracker(fqns_to_skip=3), "fqns_to_skip=3", "Pass a list"),
    "consumers as a number": Mistake(lambda: _tracker(consumers=3), "consumers=3", "Pass a list"),
    "serve the model that trains": Mistake(_served_in_training, "model=['0']", "Pass a copy of the model"),
    "predict from no url": Mistake(lambda: Predictor(_model(), None), "url=None", "Pass a url"),  # type: ignore[arg-type]
    "misspell a mode": Mistake(lambda: _tracker(mode="ids"), "mode='ids'", "'ID_ONLY'"),
    "MOMENTUM_LAST with SGD": Mistake(
        lambda: _tracker(mode="MOMENTUM_LAST"), "'0' (its optimizer", "Pass mode='ID_ONLY' or 'EMBEDDING'"
    ),
    "an engine for another device": Mistake(lambda: _tracker(engine="cuda"), "engine='cuda'", "'torch'"),
    "a negative limit": Mistake(lambda: _tracker(max_bytes=-1), "max_bytes=-1", "1 or more"),
    "consumers as a string": Mistake(lambda: _tracker(consumers="serving"), "consumers='serving'", "Pass a list"),
    "a consumer twice": Mistake(lambda: _tracker(consumers=["a", "a"]), "['a', 'a']", "different names"),
    "an unknown consumer": Mistake(lambda: _tracker().get_delta("serving"), "'serving'", "'default'"),
    "commit a consumer": Mistake(
        lambda: _tracker().commit("default"),  # type: ignore[arg-type]
        "delta='default'",
        "get_delta(commit=False)",
    ),
    "commit a read twice": Mistake(_committed_twice, "'default'", "Call get_delta(commit=False) again"),
    "read a row that the shard does not have": Mistake(
        lambda: _tracker().read_rows("0", torch.tensor([100])), "ids=[100]", "less than 100"
    ),
    "compact from a batch that is no number": Mistake(
        lambda: _tracker().compact("0", 1),  # type: ignore[arg-type]
        "start_idx, end_idx=('0', 1)",
        "Pass integers with 0 <= start_idx < end_idx",
    ),
    "mark an unknown table": Mistake(lambda: _tracker().mark_changed("users"), "fqn='users'", "['0']"),
    "mark a row outside": Mistake(
        lambda: _tracker().mark_changed("0", torch.tensor([100])), "ids=[100]", "less than 100"
    ),
    "mark floats": Mistake(
        lambda: _tracker().mark_changed("0", torch.tensor([1.5])), "torch.float32", "tensor of integers"
    ),
    "mark a list": Mistake(lambda: _tracker().mark_changed("0", [1, 2]), "ids=[1, 2]", "torch.tensor"),  # type: ignore[arg-type]
    "read an unknown table": Mistake(lambda: _tracker().read_rows("user"), "fqn='user'", "['0']"),
    "register a number as counter": Mistake(
        lambda: _tracker().register_counter("seen", 3), "seen=3", "torchmetrics.Metric"
    ),
    "rank counters of a number": Mistake(lambda: RankCounters({"seen": 3}), "seen=3", "torchmetrics.Metric"),
    "load something else": Mistake(
        lambda: _tracker().load_state_dict({"a": torch.zeros(3)}), "'a'", "Pass what state_dict() returned"
    ),
    "swap the publisher's arguments": Mistake(
        lambda: Publisher("/stream", _tracker()),  # type: ignore[arg-type]
        "tracker='/stream'",
        "Pass a ModelDeltaTracker first",
    ),
    "publish a model": Mistake(
        lambda: Publisher(_model(), _url()),  # type: ignore[arg-type]
        "tracker='Sequential'",
        "Pass a ModelDeltaTracker first",
    ),
    "forget the colon of a scheme": Mistake(
        lambda: _publisher("s3//bucket/x"), "url='s3//bucket/x'", "Write s3://bucket/x"
    ),
    "a path that a shell would expand": Mistake(
        lambda: _publisher("~/stream"), "url='~/stream'", f"Write {Path.home() / 'stream'}"
    ),
    "misspell a scheme": Mistake(lambda: _publisher("s4://bucket/x"), "url='s4://bucket/x'", "s3"),
    "publish to an http url": Mistake(
        lambda: _publisher("https://example.com/stream"), "https://example.com/stream", "Use the url of the bucket"
    ),
    "publish where nothing can be written": Mistake(
        lambda: _publisher("/proc/stream"), "file:///proc/stream", "Check the url, its permissions"
    ),
    "misspell an encoding": Mistake(lambda: _publisher(encoding="int16"), "encoding='int16'", "'INT8'"),
    "encode an unknown table": Mistake(lambda: _publisher(encoding={"users": "INT8"}), "encoding='users'", "['0']"),
    "INT4 of odd columns": Mistake(
        lambda: _publisher(tracker=ModelDeltaTracker(nn.Sequential(nn.EmbeddingBag(9, 3))), encoding=Encoding.INT4),
        "num_columns=3",
        "Use INT8",
    ),
    "top_k as a number": Mistake(lambda: _publisher(top_k=5), "top_k=5", "TopK(rows=1000)"),
    "two budgets": Mistake(lambda: TopK(rows=5, fraction=0.5), "'fraction': 0.5", "exactly one"),
    "a fraction above 1": Mistake(lambda: TopK(fraction=5), "fraction=5", "up to 1"),
    "a fraction without its name": Mistake(lambda: TopK(0.5), "rows=0.5", "TopK(fraction=0.5)"),  # type: ignore[arg-type]
    "an option of TorchRec's reads": Mistake(
        lambda: _tracker().get_delta(top_percentage=0.5),  # type: ignore[arg-type]
        "top_percentage=0.5",
        "top_k=TopK(fraction=...",
    ),
    "misspell an option of a read": Mistake(
        lambda: _tracker().get_delta(comit=False),  # type: ignore[arg-type]
        "comit=False",
        "commit",
    ),
    "no budget": Mistake(TopK, "TopK=", "exactly one"),
    "a budget as text": Mistake(lambda: TopK(rows="20"), "rows='20'", "whole number"),  # type: ignore[arg-type]
    "an age as text": Mistake(lambda: TopK(rows=5, max_age="2"), "max_age='2'", "1 or more"),  # type: ignore[arg-type]
    "a score that is no function": Mistake(lambda: TopK(rows=5, score="norm"), "score='norm'", "Pass a function"),  # type: ignore[arg-type]
    "a cadence as a number": Mistake(lambda: _publisher(cadence=100), "cadence=100", "Cadence(batches=100)"),
    "upkeep as a retention": Mistake(
        lambda: _publisher(upkeep=Retention(versions=5)), "upkeep=Retention(", "Upkeep(compact_every=50)"
    ),
    "recovery as a text": Mistake(lambda: _publisher(recovery="optimizer"), "recovery='optimizer'", "Recovery("),
    "a cadence of 0": Mistake(lambda: Cadence(batches=0), "batches=0", "positive"),
    "a cadence without a bound": Mistake(
        lambda: _publisher(cadence=Cadence()), "Cadence='no bound'", "Pass one of batches"
    ),
    "step() without a cadence": Mistake(lambda: _publisher().step(), "cadence=None", "cadence=Cadence(...)"),
    "retention as a number": Mistake(lambda: Upkeep(retention=500), "retention=500", "Retention(versions=500)"),
    "retention of 0": Mistake(lambda: Retention(versions=0), "versions=0", "1 or more"),
    "heartbeats as text": Mistake(
        lambda: Recovery(heartbeat_seconds="5"), "heartbeat_seconds='5'", "Pass seconds above 0"
    ),
    "a notifier's url": Mistake(
        lambda: _publisher(notifier="redis://localhost"), "notifier='redis://localhost'", "RedisNotifier(url)"
    ),
    "a timeout in seconds": Mistake(lambda: _publisher(timeout=20), "timeout=20", "timedelta(seconds=30)"),
    "compact every -1": Mistake(lambda: Upkeep(compact_every=-1), "compact_every=-1", "2 or more"),
    "dense names that match nothing": Mistake(
        lambda: _publisher(dense=["over.weight"]), "dense='over.weight'", "Pass some of"
    ),
    "dense as a string": Mistake(lambda: _publisher(dense="over"), "dense='over'", "a list of names"),
    "two publishers of one consumer": Mistake(_two_publishers, "'default'", "add_consumer"),
    "publish after close()": Mistake(lambda: _closed("publish"), "'closed'", "Build a new Publisher"),
    "step after close()": Mistake(lambda: _closed("step"), "'closed'", "Build a new Publisher"),
    "never call tracker.step()": Mistake(_unstepped, "tracker.step() was not called", "call it after each batch"),
    "a second trainer on the stream": Mistake(lambda: _fenced(steps=True), "ERROR: version 1", "Stop this trainer"),
    "swap the predictor's arguments": Mistake(
        lambda: Predictor("/stream", _model()),  # type: ignore[arg-type]
        "model='/stream'",
        "Pass the model first",
    ),
    "an empty stream": Mistake(lambda: Predictor(_model(), _url()).sync(), "no snapshot yet", "Publisher.snapshot()"),
    "a directory that does not exist": Mistake(
        lambda: Predictor(_model(), "/nonexistent/stream").sync(), "file:///nonexistent/stream", "check the url"
    ),
    "a model without the table": Mistake(
        lambda: Predictor(nn.Sequential(nn.Linear(2, 2)), _stream()).sync(), "table '0'", "names={stream: model}"
    ),
    "follow with a model that does not fit": Mistake(
        lambda: Predictor(nn.Sequential(nn.EmbeddingBag(99, 8)), _stream()).follow(), "99 x 8", "Build the predictor's"
    ),
    "another dtype": Mistake(
        lambda: Predictor(nn.Sequential(nn.EmbeddingBag(100, 8, dtype=torch.float16)), _stream()).sync(),
        "float16",
        "Build the predictor's",
    ),
    "a table that the stream lacks": Mistake(_extra_table, "['1']", "keep their values"),
    "names that match nothing": Mistake(
        lambda: Predictor(ModelTarget(_model(), names={"0": "users"}), _url()), "names='users'", "['0', '0.weight']"
    ),
    "a prefix that matches nothing": Mistake(
        lambda: Predictor(ModelTarget(_model(), names={"": "module."}), _url()), "names='module.'", "['0', '0.weight']"
    ),
    "follow twice": Mistake(_twice_following, "already following", "Call stop() first"),
    "poll every 0 s": Mistake(lambda: _synced().follow(poll_seconds=0), "poll_seconds=0", "above 0"),
    "poll as text": Mistake(lambda: _synced().follow(poll_seconds="1"), "poll_seconds='1'", "above 0"),  # type: ignore[arg-type]
    "wait as text": Mistake(lambda: _synced().wait(1, timeout="2"), "timeout='2'", "0 or more"),  # type: ignore[arg-type]
    "follow a misspelt url": Mistake(
        lambda: _logged(lambda: _follows_nothing("/nonexistent/stream")),
        "file:///nonexistent/stream",
        "no snapshot yet",
    ),
    "wait for a misspelt url": Mistake(
        lambda: _waits(0.05, url="/nonexistent/stream"), "file:///nonexistent/stream", "Check the url"
    ),
    "wait without follow()": Mistake(
        lambda: _synced().wait(99), "wait() cannot be called: not following", "Call follow() first"
    ),
    "wait for a version that never comes": Mistake(lambda: _waits(0.05), "version 99", "pass a longer timeout"),
    "roll back to a version that does not exist": Mistake(
        lambda: _synced().rollback(77), "version=77", "versions up to 2"
    ),
    "accept without a gate": Mistake(lambda: _synced().accept(1), "accept()=1", "Build the Predictor with a gate"),
    "a bound of a gate as text": Mistake(lambda: Gate(max_drift="0.5"), "max_drift='0.5'", "positive number"),  # type: ignore[arg-type]
    "a canary as a number": Mistake(
        lambda: Predictor(_model(), _url(), rollout=Rollout(canary=3)), "canary=3", "Canary(versions=3)"
    ),  # type: ignore[arg-type]
    "a gate as a number": Mistake(
        lambda: Predictor(_model(), _url(), rollout=Rollout(gate=0.5)), "gate=0.5", "Gate(max_drift=0.5)"
    ),  # type: ignore[arg-type]
    "raw ids of a plain table": Mistake(
        lambda: Predictor(ModelTarget(_model(), raw_ids={"0": RawIdIndex(100)}), _stream()).sync(),
        "without raw ids in the stream",
        "Leave the table out",
    ),
    "sync inside reading()": Mistake(_sync_inside_reading, "inside reading()", "Leave the"),
    "a store's option misspelt": Mistake(lambda: _bucket(acces_key="x"), "acces_key", "is not valid for store"),
    "an http endpoint": Mistake(lambda: _bucket(endpoint="http://127.0.0.1:1"), "endpoint", "allow_http='true'"),
    "restore without states": Mistake(lambda: restore(_model(), _stream()), "version 2", "recovery=Recovery(...)"),
    "labels of a stat that has none": Mistake(
        lambda: Monitor().counter("c").add(1, t="a"), "labels={'t': 'a'}", "Define 'c' with labels=['t']"
    ),
    "one label as a string": Mistake(
        lambda: Monitor().counter("c", labels="table"), "labels='table'", "Pass a list of label names"
    ),
    "a tensor as label": Mistake(
        lambda: Monitor().counter("c", labels=["t"]).cell(t=torch.ones(2)), "labels={'t'", "Pass a string or a number"
    ),
    "labels of a record": Mistake(
        lambda: Monitor().counter("c", "x", labels=["t"]).add(1, t="a"),  # type: ignore[call-arg]
        "labels={'t': 'a'}",
        "c.cell(t='a').add(1)",
    ),
    "a metric's name": Mistake(lambda: monitoring.counter("my metric!", "x"), "name='my metric!'", "Use letters"),
    "a file as sink": Mistake(lambda: Monitor().start(["m.jsonl"]), "sinks=['m.jsonl']", "JsonlSink(path)"),  # type: ignore[list-item]
    "a mode as the third argument": Mistake(
        lambda: ModelDeltaTracker(_model(), ["a"], "ID_ONLY"),  # type: ignore[arg-type]
        "delete_on_read='ID_ONLY'",
        "True or False",
    ),
    "compact as text": Mistake(lambda: _tracker(auto_compact="no"), "auto_compact='no'", "True or False"),
    "commit as text": Mistake(
        lambda: _tracker().get_delta(commit="no"),  # type: ignore[arg-type]
        "commit='no'",
        "True or False",
    ),
    "values as text": Mistake(
        lambda: _tracker().get_delta(with_values="yes"),  # type: ignore[arg-type]
        "with_values='yes'",
        "True or False",
    ),
    "a method of TorchRec's tracker": Mistake(
        lambda: _tracker().get_unique("default"),  # type: ignore[attr-defined]
        "'get_unique'",
        "import ModelDeltaTracker from delta_tracker.compat",
    ),
    "load the model's state": Mistake(
        lambda: _tracker().load_state_dict(_model().state_dict()), "'0.weight'", "Pass what state_dict() returned"
    ),
    "load a path": Mistake(
        lambda: _tracker().load_state_dict("tracker.pt"),  # type: ignore[arg-type]
        "state='tracker.pt'",
        "Pass what state_dict() returned",
    ),
    "load None": Mistake(lambda: _tracker().load_state_dict(None), "state=None", "load {}"),  # type: ignore[arg-type]
    "load counters from a path": Mistake(
        lambda: RankCounters({"seen": torchmetrics.SumMetric()}).load_state_dict("x.pt"),  # type: ignore[arg-type]
        "state='x.pt'",
        "Pass what state_dict() returned",
    ),
    "swap a counter and its name": Mistake(
        lambda: _tracker().register_counter(torchmetrics.SumMetric(), "seen"),  # type: ignore[arg-type]
        "name=SumMetric()",
        "a name that is a string",
    ),
    "record ids of a tensor": Mistake(
        lambda: _tracker().record_ids(torch.tensor([1])),  # type: ignore[arg-type]
        "kjt=tensor([1])",
        "mark_changed(fqn, ids)",
    ),
    "read tables of a list": Mistake(
        lambda: _tracker().read_tables(["0"]),  # type: ignore[arg-type]
        "ids=['0']",
        "a mapping of table FQN to ids",
    ),
    "a dict as TorchRec's config": Mistake(
        lambda: compat.init_torchrec_delta_tracker(_model(), {"consumers": ["a"]}),  # type: ignore[arg-type]
        "delta_tracker_config={'consumers': ['a']}",
        "DeltaTrackerConfig(consumers=[...])",
    ),
    "swap TorchRec's config and the model": Mistake(
        lambda: compat.init_torchrec_delta_tracker(compat.DeltaTrackerConfig(), _model()),  # type: ignore[arg-type]
        "delta_tracker_config=Sequential(",
        "Pass the model first",
    ),
    "an option of another class": Mistake(
        lambda: Predictor(_model(), _url(), gate=3),  # type: ignore[call-arg, arg-type]
        "gate=3",
        "Write rollout=Rollout(gate=...)",
    ),
    "pass the optimizer to a publisher": Mistake(
        lambda: _publisher(optimizer=3), "optimizer=3", "Pass arguments of Publisher: tracker, url"
    ),
    "misspell an option of a publisher": Mistake(lambda: _publisher(cadance=3), "cadance=3", "Write cadence="),
    "an option that no predictor has": Mistake(
        lambda: Predictor(_model(), _url(), xyz=1),  # type: ignore[arg-type]
        "xyz=1",
        "Pass arguments of Predictor: model, url, rollout",
    ),
    "torchrun without a process group": Mistake(_launched, "WORLD_SIZE=2", "init_process_group() before"),
    "publish to a takeover": Mistake(_published_takeover, "url='Takeover'", "Pass recovery of the Takeover"),
    "a notifier's class": Mistake(
        lambda: _publisher(notifier=RedisNotifier), "notifier=<class", "Pass a Notifier, for example RedisNotifier(url)"
    ),
    "the url memory:// on both sides": Mistake(
        lambda: Predictor(_model(), "memory://").sync(), "memory://", "pass one Storage('memory://') to both"
    ),
    "options of a store as text": Mistake(
        lambda: Storage("s3://bucket/x", options="region=a"),  # type: ignore[arg-type]
        "options=<class 'str'>",
        "Pass a mapping of names to values",
    ),
    "load the model's state into a predictor": Mistake(
        lambda: _synced().load_state_dict(_model().state_dict()),  # type: ignore[arg-type]
        "state={'0.weight': <Tensor [100, 8] of float32>} cannot",
        "Pass what state_dict() returned",
    ),
    "a cache that a shell would expand": Mistake(
        lambda: Predictor(_model(), _url(), cache="~/cache"), "cache='~/cache'", f"Write {Path.home() / 'cache'}"
    ),
    "a url as cache": Mistake(
        lambda: Predictor(_model(), _url(), cache="file:///cache"), "cache='file:///cache'", "a path without scheme"
    ),
    "a number as cache": Mistake(lambda: Predictor(_model(), _url(), cache=3), "cache=3", "'/var/cache/streams'"),  # type: ignore[arg-type]
    "restore the model as its tracker": Mistake(
        lambda: restore(model := _model(), _url(), tracker=model),  # type: ignore[arg-type]
        "tracker=Sequential(",
        "ModelDeltaTracker(model)",
    ),
    "look every timedelta": Mistake(
        lambda: Standby(_model(), _url(), look_seconds=timedelta(seconds=1)),  # type: ignore[arg-type]
        "look_seconds=datetime.timedelta(seconds=1)",
        "Pass seconds",
    ),
    "a url as directory of LMDB": Mistake(
        lambda: LmdbSink("lmdb:///var/rows"), "directory='lmdb:///var/rows'", "a path without scheme"
    ),
    "memory of LMDB as text": Mistake(lambda: LmdbSink(_url()[7:], max_bytes="1G"), "max_bytes='1G'", "an integer"),  # type: ignore[arg-type]
    "a timeout of Redis as text": Mistake(
        lambda: RedisSink("redis://127.0.0.1:1", timeout_seconds="3"),  # type: ignore[arg-type]
        "timeout_seconds='3'",
        "a positive number of seconds",
    ),
    "a prefix of Redis as number": Mistake(
        lambda: RedisSink("redis://127.0.0.1:1", prefix=3),  # type: ignore[arg-type]
        "prefix=3",
        "Pass a text",
    ),
    "read rows of a list": Mistake(lambda: _rows().rows("0", [1, 2]), "ids=[1, 2]", "torch.tensor([7, 42])"),  # type: ignore[arg-type]
    "look up raw ids of a list": Mistake(
        lambda: RawIdIndex(100).rows_of([1, 2]),  # type: ignore[arg-type]
        "raw_ids=[1, 2]",
        "torch.tensor([7, 42])",
    ),
    "a row store that takes arguments": Mistake(
        lambda: _command("sink", _url(), "json:dumps", "--once"), "json:dumps", "that returns a RowSink"
    ),
    "a tracker for Lightning": Mistake(
        lambda: TrackerCallback(_tracker()),  # type: ignore[arg-type]
        "build=ModelDeltaTracker(",
        "Pass a function, such as ModelDeltaTracker",
    ),
    "a publisher for Lightning": Mistake(
        lambda: TrackerCallback(ModelDeltaTracker, _publisher()),  # type: ignore[arg-type]
        "publish=Publisher(",
        "lambda tracker: Publisher(",
    ),
    "load a model as a tracker by DCP": Mistake(
        lambda: SavedTracker(_model(), _url()),  # type: ignore[arg-type]
        "tracker=<class 'torch.nn",
        "Pass a ModelDeltaTracker first",
    ),
    "load a tracker as counters by DCP": Mistake(
        lambda: SavedCounters(_tracker(), _url()),  # type: ignore[arg-type]
        "counters=<class 'delta_tracker",
        "Pass a RankCounters first",
    ),
    "compile a model that is not exported": Mistake(
        lambda: compile_package(_model(), "model.pt2"),  # type: ignore[arg-type]
        "exported=<class 'torch.nn",
        "torch.export.export(model, inputs)",
    ),
    "run a package that does not exist": Mistake(
        lambda: CompiledModel("/nonexistent/model.pt2"), "/nonexistent/model.pt2", "that compile_package() wrote"
    ),
    "a negative increment": Mistake(_rejected, "stat=clicks values=1", "Record finite numbers, 0 or more"),
    "a name of Prometheus' client": Mistake(
        lambda: Monitor().counter("clicks").inc(),  # type: ignore[attr-defined]
        "'inc'",
        "Call add(value): 'clicks' is a counter",
    ),
    "a value instead of a function": Mistake(
        lambda: Monitor().gauge("g").set_function(5),  # type: ignore[arg-type]
        "function=5",
        "Pass a function",
    ),
    "a value instead of a callback": Mistake(
        lambda: Monitor().passive("p", 5),  # type: ignore[arg-type]
        "callback=5",
        "Pass a function",
    ),
    "handle events by None": Mistake(lambda: Monitor().on("*", None), "handler=None", "Pass a function"),  # type: ignore[arg-type]
    "a step as text": Mistake(lambda: Monitor().step("3"), "number='3'", "an integer of 0 or more"),  # type: ignore[arg-type]
    "an epoch as text": Mistake(lambda: Monitor().end_epoch("3"), "number='3'", "an integer of 0 or more"),  # type: ignore[arg-type]
    "an unknown limit of events": Mistake(
        lambda: Monitor().limit_events("*", rate=3), "rule='rate'", "severity, per_second, sample"
    ),
    "a function as source": Mistake(lambda: Monitor().add_source(len), "source=<built-in", "passive(name, callback)"),  # type: ignore[arg-type]
    "emit a text": Mistake(lambda: Monitor().emit("done"), "event='done'", "log(name, message)"),  # type: ignore[arg-type]
    "start without sinks by None": Mistake(lambda: Monitor().start(None), "sinks=None", "Pass a list of sinks"),  # type: ignore[arg-type]
    "flush for seconds": Mistake(lambda: Monitor().flush(3), "timeout=3", "a timedelta above 0"),  # type: ignore[arg-type]
    "stop after seconds": Mistake(lambda: Monitor().stop(3), "timeout=3", "a timedelta above 0"),  # type: ignore[arg-type]
    "a file that a shell would expand": Mistake(
        lambda: JsonlSink("~/m.jsonl"), "path='~/m.jsonl'", f"Write {Path.home() / 'm.jsonl'}"
    ),
    "a port as text": Mistake(lambda: PrometheusSink(port="9464"), "port='9464'", "an integer up to 65535"),  # type: ignore[arg-type]
    "a port in use": Mistake(_used_port, "cannot listen on 127.0.0.1:", "Pass another port, or 0"),
    "a fold in percent": Mistake(
        lambda: _command("compact", _url(), "--fold", "50"), "Invalid value for '--fold'", "0<x<=10"
    ),
    "inspect nothing": Mistake(lambda: _command("inspect", "/nonexistent/x"), "/nonexistent/x", "Check the URL"),
    "diff of an unknown table": Mistake(
        lambda: _command("diff", _stream(), "1", "2", "--table", "users"), "users", "version 1: 0"
    ),
    "export a version that does not exist": Mistake(
        lambda: _command("export", _stream(), "--version", "99", "--out", "/tmp/never"), "99", "2"
    ),
    "verify an empty directory": Mistake(lambda: _command("verify", _url()), "no stream", "Check the URL"),
    "tail a misspelt scheme": Mistake(lambda: _command("tail", "s4://x/y"), "s4://x/y", "Use one of the schemes"),
    "mirror onto itself": Mistake(lambda: _command("mirror", url := _stream(), url), "destination=", "another store"),
    "misspell a command": Mistake(lambda: _command("inspct", "x"), "'inspct'", "Did you mean 'inspect'?"),
}


def said(mistake: Mistake) -> str:
    """Return the message of a mistake, with the type of an error."""
    try:
        return str(mistake.make())
    except Exception as error:  # noqa: BLE001  the test looks at the message
        return f"{type(error).__name__}: {error}"


def main() -> None:
    """Print the table."""
    print("| mistake | message | seconds | names the offender | names the next step |\n|---|---|---|---|---|")
    for name, mistake in MISTAKES.items():
        start = time.monotonic()
        text = said(mistake).replace("\n", " ")
        seconds = time.monotonic() - start
        print(f"| {name} | {text} | {seconds:.2f} | {mistake.offender in text} | {mistake.step in text} |")


if __name__ == "__main__":
    main()
