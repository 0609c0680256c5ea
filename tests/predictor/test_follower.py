"""Faults during `follow()` are retried and reported; an error that ends its thread is recorded."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import (
    FollowEndedError,
    MalformedError,
    ModelMismatchError,
    StorageError,
    StreamError,
)
from delta_tracker.row_target import RowTarget
from delta_tracker.stream import heartbeat as heartbeat_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest, Merged, entry_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.memory import MemoryStore
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.heartbeats import read_heartbeats
from tests.predictor.serving import Breakable, PanicException, eventually, read
from tests.predictor.waits import shorten_waits
from tests.raised import has_frames
from tests.stores.rules import fails
from tests.stores.wrapped import WrappedStorage
from tests.stream.slow_s3 import slow_s3
from tests.stream.streams import FQN, Writer


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    shorten_waits(monkeypatch, back_off_seconds=0.002)


@pytest.fixture
def writer() -> Writer:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    return writer


@pytest.mark.advice("FollowEndedError: Follower._run")
def test_a_thread_that_cannot_begin_is_reported(writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    predictor = Predictor(writer.model(), writer.storage)
    with monkeypatch.context() as patched:
        patched.setattr(asyncio, "SelectorEventLoop", Mock(side_effect=OSError("Too many open files")))
        with pytest.raises(FollowEndedError, match="Too many open files"):
            predictor.follow()
        assert isinstance(predictor.error, FollowEndedError)
    predictor.follow(0.001)
    eventually(lambda: predictor.version == 1)
    predictor.stop()


def _unknown_table(writer: Writer, kind: str = "delta") -> Manifest:
    other = TableSpec("other", 5, 4, torch.float32)
    rows = BlockRows.of(Block("other", (0, 5), (0, 4), 5, "all", Encoding.F32), None, torch.ones(5, 4))
    own = writer.rows(None if kind == "snapshot" else [3])
    return writer.write(kind, [own, rows], {FQN: writer.spec, "other": other})


def _unknown_dense(writer: Writer, kind: str = "delta") -> Manifest:
    writer.dense["w"] = torch.ones(3)
    try:
        return writer.snapshot() if kind == "snapshot" else writer.delta([3])
    finally:
        del writer.dense["w"]


_MISMATCHES = pytest.mark.parametrize(
    ("publish", "tensor"), [(_unknown_table, "table"), (_unknown_dense, "dense tensor")]
)


@_MISMATCHES
@pytest.mark.parametrize("kind", ["delta", "snapshot"])
@pytest.mark.parametrize("is_new", [False, True])
def test_follow_refuses_a_stream_that_does_not_fit_the_model(
    writer: Writer, publish: Callable, tensor: str, kind: str, is_new: bool
) -> None:
    predictor = Predictor(writer.model(), writer.storage)
    if not is_new:
        predictor.sync()
    before = predictor.version
    misfit = publish(writer, kind)
    if kind == "snapshot":
        writer.claim = Writer(writer.storage).claim  # the head is a claim, which lists no tables
    if is_new:
        with pytest.raises(ModelMismatchError, match=f"^version {misfit.version} does not fit: {tensor} "):
            predictor.follow()
        assert not any(thread.name == "predictor" for thread in threading.enumerate())
    else:  # it serves the rows that it has
        predictor.follow(poll_seconds=0.001)
        eventually(lambda: isinstance(predictor.error, ModelMismatchError))
    assert predictor.version == before
    writer.snapshot()
    if is_new:
        predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor.version == writer.claim.head.version)
    predictor.stop()


@_MISMATCHES
def test_following_retries_after_a_version_that_does_not_fit_the_model(
    writer: Writer, publish: Callable, tensor: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(heartbeat_module.HeartbeatWriter, "is_due", lambda self: True)
    model = writer.model()
    predictor = Predictor(model, writer.storage, name="p")
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor.version == 1)
    before = model[FQN].clone()
    publish(writer)
    writer.delta([1])
    eventually(lambda: isinstance(predictor.error, ModelMismatchError))
    text = f"ModelMismatchError: version 2 does not fit: {tensor} "
    eventually(lambda: text in (read_heartbeats(writer.storage)[0].error or ""))
    assert text in predictor.status().error
    with predictor.reading() as served:
        assert served == (1, None)
        assert torch.equal(model[FQN], before)
    again = Writer(writer.storage)
    last = again.snapshot()
    eventually(lambda: predictor.version == last.version and predictor.error is None)
    predictor.stop()
    assert torch.equal(model[FQN], again.table)
    assert predictor.status().resyncs == 1
    assert f": {text}" in predictor.status().last_resync


class _CudaOutOfMemoryError(torch.OutOfMemoryError):
    """Stands in for the error of a CUDA device that is out of memory."""


@pytest.mark.parametrize(
    "kind",
    [
        MemoryError,
        _CudaOutOfMemoryError,
        RuntimeError,
        ValueError,
        pytest.param(PanicException, marks=pytest.mark.advice("StreamError: Follower._record_errors")),
    ],
)
def test_a_target_that_raises_is_tried_again(writer: Writer, kind: type[BaseException]) -> None:
    target = Breakable.of(writer.model()[FQN])
    table = target.regions[0].memory
    predictor = Predictor(ModelTarget({FQN: target}, chunk_rows=4), writer.storage)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor.version == 1)
    failing = threading.Event()
    failing.set()

    def write(number: int) -> None:
        if number % 3 == 2 and failing.is_set():
            raise kind("no memory")

    target.num_writes, target.before_write = 0, write
    last = writer.delta(list(range(20)))
    eventually(lambda: predictor.error is not None and target.num_writes > 9)
    assert kind.__name__ in predictor.status().error
    with predictor.reading() as served:
        assert served == (1, last.version)
        assert not torch.equal(table, writer.table)
    failing.clear()
    eventually(lambda: predictor.version == last.version and predictor.error is None)
    predictor.stop()
    with predictor.reading() as served:
        assert served == (last.version, None)
        assert torch.equal(table, writer.table)


def test_rows_of_a_later_partly_applied_version_are_reported() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    target = Breakable.of(writer.model()[FQN])
    table = target.regions[0].memory
    predictor = Predictor(ModelTarget({FQN: target}, chunk_rows=1), writer.storage)
    predictor.sync()
    held = {1: writer.table.clone()}
    for ids in ([1], [2], [1, 3]):
        held[writer.delta(ids).version] = writer.table.clone()
    writer.delta([5])
    merged = compact(writer.storage, fold=1e9)
    assert merged.kind == "delta"
    gap = read(writer.storage, entry_name(2))
    writer.storage.delete(entry_name(2))

    def write(number: int) -> None:
        if number == 2:
            raise MemoryError("no memory")

    target.num_writes, target.before_write = 0, write
    with pytest.raises(MemoryError):
        predictor.sync()
    with predictor.reading() as served:
        assert served == (1, merged.version)
    writer.storage.put(entry_name(2), [memoryview(gap)])
    target.before_write = lambda number: None
    while predictor.version < merged.version:
        with predictor.reading() as served:
            assert served.applying == merged.version or torch.equal(table, held[served.version])
        predictor.sync(limit=1)
    with predictor.reading() as served:
        assert served == (merged.version, None)
    predictor.sync()
    assert torch.equal(table, writer.table)


def test_a_panic_of_the_store_is_a_typed_error(monkeypatch: pytest.MonkeyPatch) -> None:
    writer = Writer(Storage("memory://"))
    last = writer.snapshot()
    model = writer.model()

    def panic(*args: object, **kwargs: object) -> None:
        raise PanicException("called `Option::unwrap()` on a `None` value")

    predictor = Predictor(model, writer.storage)
    with monkeypatch.context() as patched:
        patched.setattr(MemoryStore, "names", panic)
        with pytest.raises(StorageError, match=r"PanicException: called `Option::unwrap"):
            predictor.sync()
        predictor.follow(poll_seconds=0.001)
        eventually(lambda: isinstance(predictor.error, StorageError))
    eventually(lambda: predictor.version == last.version and predictor.error is None)
    predictor.stop()


@pytest.mark.advice("FollowEndedError: Follower._follow")
@pytest.mark.parametrize("kind", [SystemExit, KeyboardInterrupt])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_error_that_ends_the_thread_is_recorded(
    writer: Writer, kind: type[BaseException], monkeypatch: pytest.MonkeyPatch
) -> None:
    target = Breakable.of(writer.model()[FQN])
    predictor = Predictor({FQN: target}, writer.storage, name="p")
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor.version == 1 and bool(read_heartbeats(writer.storage)))

    def write(number: int) -> None:
        raise kind("enough")

    target.before_write = write
    last = writer.delta([1, 2])
    eventually(lambda: not any(thread.name == "predictor" for thread in threading.enumerate()))
    said = f"FollowEndedError: the thread of follow() ended: {kind.__name__}: enough. Call follow() again."
    assert predictor.status().error == said
    (beat,) = read_heartbeats(writer.storage)
    assert (beat.error, beat.next_step) == (said, "Call follow() again")
    with predictor.reading() as served:
        assert served == (1, last.version)
    with pytest.raises(StreamError, match="enough") as caught:
        predictor.stop()
    assert read_heartbeats(writer.storage) == [beat], "it was not stopped on purpose"
    assert isinstance(caught.value.__cause__, kind)
    target.before_write = lambda number: None
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor.version == last.version)
    predictor.stop()
    (beat,) = read_heartbeats(writer.storage)
    assert heartbeat_module.predictor_state(beat, 0.0, last) == "stopped"


class _UncopiableError(BaseException):
    """An error that cannot be copied, because its constructor takes other arguments."""

    def __init__(self, number: int, *, reason: str) -> None:
        super().__init__(f"{number}: {reason}")


def test_an_error_that_ends_the_thread_is_logged_with_its_place(
    writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    target = Breakable.of(writer.model()[FQN])

    def write(number: int) -> None:
        raise _UncopiableError(7, reason="enough")

    target.before_write = write
    predictor = Predictor({FQN: target}, writer.storage)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: not any(thread.name == "predictor" for thread in threading.enumerate()))
    with pytest.raises(StreamError, match="7: enough"):
        predictor.stop()
    place = f"({__file__}:{write.__code__.co_firstlineno + 1})"
    (message,) = [each.getMessage() for each in caplog.records if "stopped following" in each.getMessage()]
    assert message.endswith(f"_UncopiableError: 7: enough {place}")


class _Greedy(RowTarget):
    """A target whose error's traceback keeps its arguments alive, like that of any target that raises."""

    def __init__(self, table: Tensor) -> None:
        (self.num_rows, self.dim), self.dtype = table.shape, table.dtype
        self.rows, self.columns = (0, self.num_rows), ((0, self.dim),)
        self.addresses: list[int] = []

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        self.addresses.append(values.data_ptr())
        raise MemoryError("no memory")


def test_an_error_that_is_kept_does_not_keep_the_rows_it_was_raised_with(writer: Writer) -> None:
    """The retry reuses their memory; if the error kept it, every retry would run out of memory."""
    target = _Greedy(writer.table)
    predictor = Predictor({FQN: target}, writer.storage)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: len(target.addresses) > 5)
    with pytest.raises(MemoryError):
        predictor.stop()
    assert len(set(target.addresses[1:])) == 1


@pytest.mark.parametrize("kind", [StorageError, MemoryError, SystemExit])
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_the_error_that_is_kept_has_no_traceback(writer: Writer, kind: type[BaseException]) -> None:
    target = Breakable.of(writer.model()[FQN])
    predictor = Predictor({FQN: target}, writer.storage)
    predictor.follow(poll_seconds=0.001)
    eventually(lambda: predictor.version == 1)

    def write(number: int) -> None:
        try:
            [].remove(number)
        except ValueError as error:
            raise StorageError("memory://", "no route") if kind is StorageError else kind("enough") from error

    target.before_write = write
    writer.delta([1, 2])
    eventually(lambda: predictor.error is not None)
    with pytest.raises((StreamError, MemoryError)) as caught:
        predictor.stop()
    assert (type(caught.value), str(caught.value)) == (type(predictor.error), str(predictor.error))
    assert not has_frames(predictor.error)


@pytest.mark.parametrize("is_remote", [False, True])
def test_each_of_many_outages_is_logged_once(writer: Writer, is_remote: bool, caplog: pytest.LogCaptureFixture) -> None:
    outages = 3 if is_remote else 10  # a remote one takes seconds
    with slow_s3(writer.storage) as server:
        server.max_retries = 0
        seconds = itertools.count(1.37, 1.37)
        outage = fails(fault=lambda operation: StorageError(operation.url, f"no answer in {next(seconds):.2f} s"))
        view = WrappedStorage(writer.storage)
        predictor = Predictor(writer.model(), server.storage() if is_remote else view)
        predictor.follow(poll_seconds=0.001)
        eventually(lambda: predictor.version == 1)
        for _ in range(outages):
            server.faults = lambda _: ("cut", 0)
            view.rules.append(outage)
            before = server.num_faults.total() + view.count()
            last = writer.delta([1])
            eventually(lambda: server.num_faults.total() + view.count() >= before + 9)  # noqa: B023
            server.faults = lambda _: None
            view.rules.clear()
            eventually(lambda: predictor.version == last.version and predictor.error is None)  # noqa: B023
        predictor.stop()
    said = [record.getMessage()[:19] for record in caplog.records if record.levelno >= logging.WARNING]
    assert said == ["predictor failed an", "predictor recovered"] * outages


def test_a_malformed_entry_is_logged_once_while_it_delays_the_predictor(
    writer: Writer, caplog: pytest.LogCaptureFixture
) -> None:
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    writer.storage.replace(Merged(2, 2, "delta").name, b"{}")
    bad = writer.delta([1])
    writer.storage.replace(entry_name(2), bad.to_json()[:-1])
    for _ in range(5):
        with pytest.raises(MalformedError):
            predictor.sync()
    said = [record.getMessage().partition(":")[0] for record in caplog.records]
    assert said == ["skipped what cannot be read"] * 2, "the merged entry, and the newest entry"
