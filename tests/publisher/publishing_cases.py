"""Cases for a publisher on all ranks, with a predictor that must equal the trainer bit for bit."""

from __future__ import annotations

import contextlib
import copy
import gc
import logging
import os
import signal
import threading
import time
import weakref
from collections.abc import Callable
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist
from torch import nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, TopK, TrackingMode, Upkeep
from delta_tracker.errors import DeltaTrackerError, FencedError, RankFailedError, RankLostError, StorageError
from delta_tracker.publisher import coordinator
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.publisher.coordinator import Draft
from delta_tracker.publisher.tracker_reader import TrackerReader
from delta_tracker.publisher.versions import Step
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage
from tests.models import Spec, Table, batch, ordinary_optimizer, shard
from tests.publisher.flights import finish, flight
from tests.raised import frames_of_each, has_frames
from tests.stores.rules import alters, calls, disconnects, fails, nth, on
from tests.stores.wrapped import Operation, Rule, WrappedStorage


def empty_model(tracker: ModelDeltaTracker) -> dict[str, torch.Tensor]:
    return {
        fqn: torch.full((table.num_rows, table.dim), -1.0, dtype=table.dtype) for fqn, table in tracker.tables.items()
    }


def assert_equal(tracker: ModelDeltaTracker, model: dict[str, torch.Tensor]) -> None:
    """Check that the predictor equals this rank's shards bit for bit."""
    for fqn, shard_spec in tracker.shards.items():
        rows = slice(shard_spec.row_offset, shard_spec.row_offset + shard_spec.num_rows)
        for (first, end), view in zip(shard_spec.columns, tracker.live.column_views(fqn), strict=True):
            held = model[fqn][rows, first:end].contiguous()
            assert torch.equal(held.view(torch.uint8), view.contiguous().view(torch.uint8)), fqn


def attempt(action: Any) -> str:
    try:
        action()
    except DeltaTrackerError as error:
        return f"{type(error).__name__}: {error}"
    return "nothing was raised"


def is_interrupted(action: Callable[[], object]) -> bool:
    """Call ``action``, send Ctrl-C to this process after half a second, and return True if that ended the call."""
    main, is_heard = threading.main_thread().ident, threading.Event()

    def interrupt(*_: object) -> None:
        if not is_heard.is_set():
            is_heard.set()
            raise KeyboardInterrupt

    def send() -> None:
        # Python misses a signal that arrives just as the thread begins to wait, so send it again.
        while not is_heard.wait(0.5):
            signal.pthread_kill(main, signal.SIGINT)

    before = signal.signal(signal.SIGINT, interrupt)
    sending = threading.Thread(target=send)
    sending.start()
    try:
        action()
    except KeyboardInterrupt:
        return True
    finally:
        is_heard.set()
        sending.join()
        signal.signal(signal.SIGINT, before)
    return False


def equal(rank: int, world_size: int, url: str, spec: dict[str, Any], num_versions: int = 6) -> dict[str, Any]:
    """After every version each rank's predictor equals the trainer, with updates and evaluations in between."""
    model_spec = Spec.every_sharding(world_size, **spec)
    model = shard(model_spec)
    kinds = []
    with ModelDeltaTracker(model, ["stream", "other"]) as tracker:
        publisher = Publisher(tracker, url, "stream")
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        generator = torch.Generator().manual_seed(rank)
        for number in range(num_versions):
            for _ in range(number % 3):
                model(batch(model_spec, generator)).backward()
                tracker.step()
            loss = model(batch(model_spec, generator))
            if number % 2:
                tracker.get_delta("other")
            manifest = publisher.snapshot() if number == 3 else publisher.publish()
            assert predictor.sync() == manifest.version == publisher.version
            assert_equal(tracker, held)
            loss.backward()
            tracker.step()
            kinds.append(manifest.kind)
        last = publisher.publish()
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        assert tracker.num_hook_errors == 0
        return {
            "kinds": kinds,
            "version": last.version,
            "batches": last.batches,
            "rows": last.num_rows,
            "attempt": attempt(publisher.publish),
        }


def _full(kind: str) -> Rule:
    """Return a rule that fails operations of a kind, each with another text."""
    return fails(
        on(kind), lambda operation: StorageError(operation.url, f"No space left on device for {operation.name}")
    )


def failing_rank(rank: int, world_size: int, url: str, broken_rank: int, operation: str) -> list[str]:
    """A rank fails before the commit: nothing is visible, and the next version has the pending rows."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        storage = WrappedStorage(Storage(url, create=True))
        publisher = Publisher(tracker, storage)
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        generator = torch.Generator().manual_seed(rank)
        publisher.publish()
        messages = []
        for _ in range(2):
            model(batch(spec, generator)).backward()
            tracker.step()
            if rank == broken_rank:
                storage.rules.append(_full(operation))
            before = predictor.sync()
            messages.append(attempt(publisher.publish))
            storage.rules.clear()
            assert predictor.sync() == before == publisher.version
        manifest = publisher.publish()
        assert manifest.version == before + 1
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return messages


def fenced(rank: int, world_size: int, url: str) -> list[str]:
    """A second publisher claims the stream; afterwards the first cannot publish on any rank."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    with ModelDeltaTracker(model, ["first", "second"]) as tracker:
        first = Publisher(tracker, url, "first")
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        generator = torch.Generator().manual_seed(rank)
        first.publish()
        predictor.sync()
        second = Publisher(tracker, url, "second")
        assert (first.generation, second.generation) == (1, 2)
        assert first.stream == second.stream
        model(batch(spec, generator)).backward()
        version = predictor.sync()
        messages = [attempt(first.publish), attempt(first.snapshot)]
        assert predictor.sync() == version
        first.close()
        assert tracker.get_delta("first", commit=False).num_rows, "the fenced publisher's rows stay pending"
        assert second.publish().kind == "snapshot"
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        second.close()
        return messages


def forgotten_errors(rank: int, world_size: int, url: str) -> None:
    """An error that is kept pins no rows of its version, and the next calls raise an error of the same length."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model, ["first", "second"]) as tracker:
        storage = WrappedStorage(Storage(url, create=True))
        publisher = Publisher(tracker, storage, "first")
        publisher.publish()
        if rank == 0:
            storage.rules.append(_full("put"))
        model(batch(spec, torch.Generator().manual_seed(rank))).backward()
        lengths = frames_of_each(publisher.publish, StorageError if rank == 0 else RankFailedError)
        assert len(set(lengths[1:])) == 1, lengths
        lengths = frames_of_each(publisher.flush, StorageError if rank == 0 else RankFailedError)
        assert len(set(lengths[1:])) == 1, lengths
        assert not has_frames(publisher.error)
        gc.collect()
        assert not [each for each in gc.get_objects() if type(each) is Draft], "the rows of a version that failed"
        storage.rules.clear()
        second = Publisher(tracker, url, "second")
        lengths = frames_of_each(publisher.publish, FencedError)
        assert len(set(lengths[1:])) == 1, lengths
        assert not has_frames(publisher.error)
        dist.barrier()
        publisher.close()
        second.close()


def logged_once(rank: int, world_size: int, url: str) -> list[str]:
    """Return what is logged during two outages, of which each attempt to publish reports another text."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("delta_tracker")
    logger.addHandler(handler)
    with ModelDeltaTracker(model) as tracker:
        storage = WrappedStorage(Storage(url, create=True))
        publisher = Publisher(tracker, storage, cadence=Cadence(batches=1), dense=False)
        publisher.publish()
        for call in (publisher.publish, publisher.step):
            storage.rules.append(_full("put"))
            for _ in range(10):
                model(batch(spec, torch.Generator().manual_seed(rank))).backward()
                tracker.step()
                attempt(call)
            attempt(publisher.flush)  # the worker may still be writing
            storage.rules.clear()
            publisher.publish()
        dist.barrier()
        publisher.close()
    logger.removeHandler(handler)
    return messages


def out_of_step(rank: int, world_size: int, url: str) -> list[str]:
    """Ranks at different batches publish nothing."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url)
        if rank == 1:
            tracker.step()
        messages = [attempt(publisher.publish)]
        if rank == 0:
            tracker.step()
        publisher.publish()
        publisher.close()
        return messages


def unwritable(rank: int, world_size: int, url: str) -> list[str]:
    """Refuse a URL that one rank or all ranks cannot use, and an unknown consumer."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        return [
            attempt(lambda: Publisher(tracker, f"{url}/file/below")),
            attempt(lambda: Publisher(tracker, f"{url}/file/below" if rank == 1 else f"{url}/fine")),
            attempt(lambda: Publisher(tracker, url, "nobody")),
        ]


def killed_before_commit(rank: int, world_size: int, url: str) -> None:
    """Kill rank 0 after every part and before the manifest is written; never returns."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url)
    publisher.publish()
    model(batch(spec, torch.Generator().manual_seed(rank))).backward()
    if rank == 0:
        publisher._writer._claim.commit = lambda entry: os.kill(os.getpid(), signal.SIGKILL)
    publisher.publish()


def refused(rank: int, world_size: int, url: str, other: str) -> dict[str, str]:
    """Return the errors for invalid arguments and calls on every rank; stream and pending rows are unchanged."""
    spec = Spec([Table("t", 6, "row"), Table("u", 6, "row")])
    model = shard(spec)
    answers = {}
    with ModelDeltaTracker(model, ["stream", "own"]) as tracker:
        publisher = Publisher(tracker, url, "stream")
        publisher.publish()
        model(batch(spec, torch.Generator().manual_seed(rank))).backward()
        answers["read"] = attempt(lambda: tracker.get_delta("stream"))
        answers["clear"] = attempt(lambda: tracker.clear("stream"))
        answers["remove"] = attempt(lambda: tracker.remove_consumer("stream"))
        answers["second"] = attempt(lambda: Publisher(tracker, other, "stream"))
        answers["stores"] = attempt(lambda: Publisher(tracker, other if rank else f"{other}-0", "own"))
        answers["memory"] = attempt(lambda: Publisher(tracker, "memory://", "own"))
        in_thread: list[str] = []
        thread = threading.Thread(target=lambda: in_thread.append(attempt(publisher.publish)))
        thread.start()
        thread.join()
        answers["thread"] = in_thread[0]
        num_rows = tracker.get_delta("own", commit=False).num_rows
        assert publisher.publish().version == 2
        assert num_rows
        publisher.close()
        assert tracker.get_delta("stream").num_rows == 0, "free again"
    answers["detached"] = attempt(lambda: Publisher(tracker, url, "own"))
    with ModelDeltaTracker(model, fqns_to_skip=["u"] if rank else []) as tracker:
        publisher = Publisher(tracker, url)
        answers["tables"] = attempt(publisher.publish)
        publisher.close()
    assert StreamLog(Storage(url)).versions() == [0, 1, 2, 3], "two claims, a snapshot and a delta"
    return answers


def detached_rank(rank: int, world_size: int, url: str) -> list[str]:
    """A rank whose tracker is detached reports it, so that the other ranks do not wait."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, url)
    if rank == 1:
        tracker.detach()
    messages = [attempt(publisher.publish) for _ in range(2)]
    publisher.close()
    tracker.detach()
    return messages


def lost_rank(rank: int, world_size: int, url: str) -> list[str]:
    """A rank that never joins is reported, and later calls do not wait for it again."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, timeout=timedelta(seconds=2))
        messages = [] if rank == 1 else [attempt(publisher.publish) for _ in range(2)]
        dist.barrier()
        return messages


def lost_rank_again(rank: int, world_size: int, url: str) -> None:
    """The error of a lost rank is raised again and again, each time with the same number of frames."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, timeout=timedelta(seconds=2))
        if rank == 0:
            lengths = frames_of_each(publisher.publish, RankLostError)
            assert len(set(lengths[1:])) == 1, lengths
            assert not has_frames(publisher.error)
        dist.barrier()


def top_k_and_snapshots(rank: int, world_size: int, url: str) -> list[int]:
    """Rows that top-k leaves out are counted in the manifest and sent later; a snapshot has all rows."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        publisher = Publisher(tracker, url, top_k=TopK(rows=5))
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        pending = []
        for number in range(5):
            model(batch(spec, generator)).backward()
            manifest = publisher.snapshot() if number == 4 else publisher.publish()
            predictor.sync()
            differing_rows = sum(
                int((held[fqn][spec.row_offset : spec.row_offset + spec.num_rows, first:end] != view).any(1).sum())
                for fqn, spec in tracker.shards.items()
                for (first, end), view in zip(spec.columns[:1], tracker.live.column_views(fqn)[:1], strict=True)
            )
            everywhere = torch.tensor(differing_rows)
            dist.all_reduce(everywhere)
            assert int(everywhere) == manifest.pending_rows
            pending.append(manifest.pending_rows)
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return pending


def given_up(rank: int, world_size: int, url: str) -> list[str]:
    """A publisher whose consumer was dropped on one rank publishes a snapshot without being asked."""
    spec = Spec([Table("t", 40, "row", dim=64)])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    limit = 4_000 if rank == 1 else None
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING, max_bytes=limit) as tracker:
        publisher = Publisher(tracker, url)
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        kinds = []
        for num_batches in (1, 30, 0, 0):
            for _ in range(num_batches):
                model(batch(spec, generator, size=8)).backward()
                tracker.step()
            kinds.append(publisher.publish().kind)
            predictor.sync()
            assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return kinds


def replicated(rank: int, world_size: int, url: str) -> None:
    """Tables with ordinary optimizers, including a replicated one, are written once and equal at the end."""
    spec = Spec([Table("copy", 12, "data"), Table("dense", 13, "row", kernel="dense"), Table("t", 9, "row")], bag=True)
    model = shard(spec)
    ordinary = ordinary_optimizer(model, "Adam", lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url)
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        for _ in range(4):
            publisher.publish()
            predictor.sync()
            assert_equal(tracker, held)
            ordinary.zero_grad()
            model(batch(spec, generator)).backward()
            ordinary.step()
        dist.barrier()
        publisher.close()


def interrupted(rank: int, world_size: int, url: str) -> int:
    """A version whose wait is interrupted is finished before the next one gathers rows into the same memory."""
    spec = Spec([Table("t", 40, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        (fqn,) = tracker.tables
        storage = WrappedStorage(Storage(url, create=True))
        publisher = Publisher(tracker, storage)
        publisher.snapshot()
        for _ in range(3):  # grows the buffers to their final size
            model(batch(spec, generator, size=40)).backward()
            tracker.step()
        publisher.publish()
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        predictor.sync()
        model(batch(spec, generator, size=2)).backward()
        tracker.step()
        cut = tracker.live.column_views(fqn)[0].clone()
        is_heard, goes_on = threading.Event(), threading.Event()

        def interrupt_the_wait(_: Operation) -> None:
            """Interrupt the thread that waits for the part."""
            # Python misses a signal that arrives just as the thread begins to wait, so send it again.
            while not is_heard.wait(0.05):
                signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            goes_on.wait()

        storage.rules.append(calls(nth(1, on("put")), before=interrupt_the_wait))

        def interrupt(number: int, frame: object) -> None:
            is_heard.set()
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            raise KeyboardInterrupt

        ignored = signal.signal(signal.SIGINT, interrupt)
        try:
            publisher.publish()
        except KeyboardInterrupt:
            pass
        else:
            raise AssertionError("it was not interrupted")
        finally:
            signal.signal(signal.SIGINT, ignored)
        threading.Timer(0.2, goes_on.set).start()
        model(batch(spec, generator, size=2)).backward()
        tracker.step()
        publisher.publish()
        predictor.sync(limit=1)
        assert torch.equal(held[fqn], cut)
        predictor.sync()
        assert_equal(tracker, held)
        publisher.close()
        return predictor.version


def forked(rank: int, world_size: int, url: str) -> str:
    """Return the error of a publisher that is used in a forked process."""
    spec = Spec([Table("t", 6, "row")])
    with ModelDeltaTracker(shard(spec)) as tracker:
        publisher = Publisher(tracker, url)
        reader, answer = os.pipe()
        pid = os.fork()
        if not pid:
            signal.alarm(60)
            os.write(answer, attempt(publisher.publish).encode())
            os._exit(0)
        os.close(answer)
        _, status = os.waitpid(pid, 0)
        said = os.read(reader, 1000).decode()
        os.close(reader)
        assert status == 0, status
        publisher.publish()
        publisher.close()
        return said


def mixed_calls(rank: int, world_size: int, url: str) -> list[str]:
    """Ranks that call different methods publish nothing, and publish again once they call the same one."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, cadence=Cadence(batches=1))
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        publisher.publish()
        model(batch(spec, generator)).backward()
        tracker.step()
        if rank == 0:
            messages = [attempt(publisher.publish)]
        else:
            publisher.step()
        tracker.step()
        publisher.step()
        if rank == 1:
            messages = [f"{type(publisher.error).__name__}: {publisher.error}"]
        for _ in range(5):
            tracker.step()
            publisher.step()
        publisher.flush()
        assert publisher.version > 1
        publisher.publish()
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return messages


def interrupted_among_ranks(rank: int, world_size: int, url: str, top_k: int | None) -> list[str]:
    """Ctrl-C ends the wait for a late rank at once, and the same call, made again, completes the version."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        budget = None if top_k is None else TopK(rows=top_k)
        publisher = Publisher(tracker, url, top_k=budget, timeout=timedelta(seconds=12))
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        publisher.publish()
        model(batch(spec, generator)).backward()
        tracker.step()
        messages = []
        if rank == 0 and is_interrupted(publisher.publish):
            messages.append("interrupted")
        dist.barrier()  # now the other rank calls publish()
        messages.append(attempt(publisher.publish))
        while publisher.publish().pending_rows:
            pass
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return messages


def interrupted_score(rank: int, world_size: int, url: str) -> str:
    """Rank 1 is interrupted in the score of its rows, and publishes again; return the error of both ranks."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    once = _Once(lambda fqn, rows: torch.zeros(len(rows)), KeyboardInterrupt)
    once.has_raised = rank == 0
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, top_k=TopK(rows=30, score=once), timeout=timedelta(seconds=12))
        publisher.publish()
        model(batch(spec, generator)).backward()
        tracker.step()
        with contextlib.suppress(KeyboardInterrupt):
            message = attempt(publisher.publish)
        if rank == 1:
            assert once.has_raised
            message = attempt(publisher.publish)
        publisher.publish()
        held = empty_model(tracker)
        Predictor(held, url).sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return message


def interrupted_message(rank: int, world_size: int, url: str, then: str, is_later: bool) -> str:
    """Rank 1 is interrupted before it sends its share, and calls ``then``, perhaps at a later batch.

    Returns:
        The error of this rank.
    """
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, timeout=timedelta(seconds=12))
        publisher.publish()
        model(batch(spec, generator)).backward()
        tracker.step()
        if rank == 0:
            message = attempt(publisher.publish)
        else:
            delivery = publisher._versions._delivery
            once = _Once(delivery.start, KeyboardInterrupt)
            with mock.patch.object(delivery, "start", once), contextlib.suppress(KeyboardInterrupt):
                publisher.publish()
            assert once.has_raised
            if is_later:
                tracker.step()
            message = attempt(getattr(publisher, then))
            if is_later:
                message = str(publisher.error)
        dist.barrier()
        if then == "publish":
            publisher.publish()
            held = empty_model(tracker)
            Predictor(held, url).sync()
            assert_equal(tracker, held)
            dist.barrier()
        publisher.close()
        return message


class _Once:
    """Raises at the first call and then does what it replaces."""

    def __init__(self, function: Any, exception: type[BaseException]) -> None:
        self._function, self._exception = function, exception
        self.has_raised = False

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.has_raised:
            return self._function(*args, **kwargs)
        self.has_raised = True
        raise self._exception("once")


def fails_between_collectives(rank: int, world_size: int, url: str) -> list[str]:
    """Rank 1 fails or is interrupted before it votes or sends its message; all ranks publish again soon after."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    messages = []
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, cadence=Cadence(batches=1))
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        for exception in (MemoryError, KeyboardInterrupt):
            model(batch(spec, generator)).backward()
            once = _Once(torch.from_numpy, exception)
            num_interrupts = 0
            with mock.patch.object(torch, "from_numpy", once if rank == 1 else torch.from_numpy):
                for number in range(30):
                    tracker.step()
                    try:
                        publisher.step()
                    except KeyboardInterrupt:
                        num_interrupts += 1
                    if number % 2:
                        finish(publisher)  # so that each state comes, whatever the worker's pace
            assert once.has_raised == (rank == 1)
            assert num_interrupts == (rank == 1 and exception is KeyboardInterrupt)
            attempt(publisher.flush)
            version = publisher.version
            for _ in range(5):
                tracker.step()
                publisher.step()
            publisher.flush()
            assert publisher.version > version
            publisher.publish()
            predictor.sync()
            assert_equal(tracker, held)
            dist.barrier()
        once = _Once(coordinator.put_part, MemoryError)
        with mock.patch.object(coordinator, "put_part", once if rank == 1 else coordinator.put_part):
            try:
                publisher.snapshot()
            except (MemoryError, DeltaTrackerError) as error:
                messages.append(f"{type(error).__name__}: {error}")
        publisher.publish()
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
    return messages


def interrupted_cut(rank: int, world_size: int, url: str) -> None:
    """A snapshot whose cut is interrupted, and made again, has the rows that changed while it was copied."""
    spec = Spec([Table("t", 40, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        has_part = threading.Event()
        storage = WrappedStorage(Storage(url, create=True), calls(on("put"), after=lambda *_: has_part.set()))
        publisher = Publisher(tracker, storage, cadence=Cadence(batches=1))
        for _ in range(2):
            tracker.step()
            publisher.step()
        assert has_part.wait(60)
        model(batch(spec, generator, size=8)).backward()  # after the copy
        with mock.patch.object(torch, "index_select", _Once(torch.index_select, KeyboardInterrupt)) as once:
            for _ in range(40):
                tracker.step()
                with contextlib.suppress(KeyboardInterrupt):
                    publisher.step()
                finish(publisher)
        assert once.has_raised
        publisher.flush()
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        predictor.sync()
        assert_equal(tracker, held)
        publisher.close()
        assert tracker.consumers == ("default",)


def unsupported_dense(rank: int, world_size: int, url: str) -> list[str]:
    """Publish with ``top_k`` while rank 0 has a dense tensor that a stream cannot have; return the errors."""
    spec = Spec([Table("t", 40, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    dense = nn.Linear(3, 2)
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        publisher = Publisher(tracker, url, dense=dense, top_k=TopK(rows=30), timeout=timedelta(seconds=12))
        publisher.publish()
        model(batch(spec, generator)).backward()
        tracker.step()
        held_weight = dense.weight.data
        if rank == 0:
            dense.weight.data = torch.zeros(2, 3, dtype=torch.complex64)
        messages = [attempt(publisher.publish) for _ in range(2)]
        dense.weight.data = held_weight
        publisher.publish()
        held = empty_model(tracker)
        Predictor(ModelTarget(held, dense=False), url).sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return messages


def interrupted_repair(rank: int, world_size: int, url: str) -> list[int]:
    """Rank 1 is interrupted once a version that repairs is committed; return the pending rows of the next versions."""
    spec = Spec([Table("t", 40, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)

    def train(tracker: ModelDeltaTracker) -> None:
        model(batch(spec, generator, size=8)).backward()
        tracker.step()

    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        publisher = Publisher(tracker, url, top_k=TopK(rows=2))
        publisher.publish()
        saved = copy.deepcopy(model.state_dict()), tracker.state_dict()
        train(tracker)
        publisher.publish()
        publisher.close()
    model.load_state_dict(saved[0])
    with ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker:
        tracker.load_state_dict(saved[1])
        publisher = Publisher(tracker, url, top_k=TopK(rows=2), timeout=timedelta(seconds=12))
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        if rank:
            once = _Once(publisher._reader.end, KeyboardInterrupt)
            with mock.patch.object(publisher._reader, "end", once), contextlib.suppress(KeyboardInterrupt):
                publisher.publish()
            assert once.has_raised
        else:
            publisher.publish()
        pending = []
        for _ in range(2):
            train(tracker)
            pending.append(publisher.publish().pending_rows)
        publisher.snapshot()
        predictor.sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return pending


def counted_steps(rank: int, world_size: int, url: str) -> list[int]:
    """Calls of ``step()`` alone commit a version, within a bounded number of calls."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, cadence=Cadence(batches=1))
        publisher.publish()
        log = StreamLog(Storage(url))
        versions = []
        for _ in range(14):
            tracker.step()
            publisher.step()
            finish(publisher)
            dist.barrier()
            versions.append(log.head().version)
        publisher.flush()
        publisher.close()
        return versions


def interrupted_step(rank: int, world_size: int, url: str) -> list[int]:
    """Rank 1 is interrupted at the start of a ``step()``, and goes on; return the versions after each call."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, cadence=Cadence(batches=1), timeout=timedelta(seconds=12))
        publisher.publish()
        once = _Once(publisher._still.count_call, KeyboardInterrupt)
        once.has_raised = rank == 0
        versions = []
        with mock.patch.object(publisher._still, "count_call", once):
            for _ in range(12):
                model(batch(spec, generator)).backward()
                tracker.step()
                with contextlib.suppress(KeyboardInterrupt):
                    publisher.step()
                finish(publisher)
                dist.barrier()
                versions.append(publisher.version)
        assert once.has_raised
        assert publisher.error is None
        publisher.flush()
        publisher.publish()
        held = empty_model(tracker)
        Predictor(held, url).sync()
        assert_equal(tracker, held)
        dist.barrier()
        publisher.close()
        return versions


def altered_entry(rank: int, world_size: int, url: str) -> list[str]:
    """The version fails on every rank. The next one is a snapshot on every rank, which readers continue from."""
    model_spec = Spec.every_sharding(world_size)
    model = shard(model_spec)
    errors, kinds = [], []
    with ModelDeltaTracker(model) as tracker:
        storage = WrappedStorage(Storage(url, create=True), is_remote=True)
        publisher = Publisher(tracker, storage)
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        for step in range(4):
            model(batch(model_spec, torch.Generator().manual_seed(10 * step + rank))).backward()
            tracker.step()
            if step == 1:
                if rank == 0:
                    altered = nth(1, on("create", name="log/"))
                    storage.rules.append(alters(lambda data: data.replace(b"{", b"[", 1), altered))
                errors.append(attempt(publisher.publish))
                assert sum(tracker.num_pending().values()) > 0
            kinds.append(publisher.publish().kind)
            predictor.sync()
            assert predictor.version == publisher.version
            assert_equal(tracker, held)
        publisher.close()
    assert kinds == ["snapshot", "snapshot", "delta", "delta"]
    return errors


def lost_entry(rank: int, world_size: int, url: str, call: str) -> list[str]:
    """The newest entry is deleted. All ranks continue with a snapshot, from which all readers continue."""
    spec = Spec.every_sharding(world_size)
    model = shard(spec)
    messages = []
    with ModelDeltaTracker(model) as tracker:
        storage = Storage(url, create=True)
        publisher = Publisher(tracker, storage, cadence=Cadence(batches=1), upkeep=Upkeep(pointer_seconds=None))
        publisher.publish()
        held, behind = empty_model(tracker), empty_model(tracker)
        ahead, late = Predictor(held, url), Predictor(behind, url)
        late.sync()
        for step in range(3):
            model(batch(spec, torch.Generator().manual_seed(10 * step + rank))).backward()
            tracker.step()
            if step == 1:
                ahead.sync()
                dist.barrier()
                if rank == 0:
                    storage.delete(entry_name(publisher.version))
                dist.barrier()
            if step == 1 and call == "step":
                while publisher.error is None:  # set in the same call on all ranks
                    publisher.step()
                    tracker.step()
                messages.append(f"{type(publisher.error).__name__}: {publisher.error}")
                assert sum(tracker.num_pending().values()) > 0
            entry = publisher.snapshot() if (step, call) == (1, "snapshot") else publisher.publish()
            kind = "snapshot" if step == 1 and call != "step" else "delta"  # the steps have begun a snapshot
            assert (entry.kind, entry.generation) == (kind, min(step, 1) + 1)
            assert (publisher.version, publisher.generation) == (entry.version, entry.generation)
        for reader, rows in ((ahead, held), (late, behind)):
            reader.sync()
            assert reader.version == publisher.version
            assert_equal(tracker, rows)
        dist.barrier()
        publisher.close()
    return messages


def unknown_outcome(rank: int, world_size: int, url: str) -> list[str]:
    """The answer to a commit is lost. No rank reports that the version was not published, and the next follows it."""
    spec = Spec([Table("t", 6, "row")])
    model = shard(spec)
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("delta_tracker.publisher")
    with ModelDeltaTracker(model) as tracker:
        storage = WrappedStorage(Storage(url, create=True))
        publisher = Publisher(tracker, storage)
        first = publisher.publish().version
        logger.addHandler(handler)
        with storage.under(disconnects(on("create", name="log/"))):
            messages.append(attempt(publisher.publish))
        logger.removeHandler(handler)
        assert publisher.publish().version == first + 2
        dist.barrier()
        publisher.close()
    return messages


def dropped(rank: int, world_size: int, url: str, during: str) -> None:
    """A publisher that is deleted without close(), between or in a version, leaves no thread and loses no row."""
    spec = Spec([Table("t", 40, "row")])
    model = shard(spec)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker:
        publisher = Publisher(tracker, url, cadence=Cadence(batches=1, snapshot_every=1))
        publisher.publish()
        model(batch(spec, generator)).backward()
        before = tracker.num_pending()
        if during == "a copy":
            while flight(publisher) is None:
                tracker.step()
                publisher.step()
            assert len(tracker.consumers) == 2
            assert (tracker.num_pending(), tracker.needs_snapshot()) == (tracker.num_pending("default"), False)
        elif during == "a delta":
            publisher._versions._begin(Step.DELTA, is_complete=False)
        dist.barrier()
        alive = weakref.ref(publisher)
        del publisher
        deadline = time.monotonic() + 60
        while alive() is not None or any(each.name.startswith("publisher") for each in threading.enumerate()):
            gc.collect()
            assert time.monotonic() < deadline, gc.get_referrers(alive())
            time.sleep(0.01)
        assert tracker.num_pending() == before  # before other calls, which could release the consumer of the copy
        assert tracker.consumers == ("default",)
        with tracker.reserve() as handle:
            assert handle.note is None, "after another owner's read, a resumed publisher would miss rows"
        dist.barrier()
        publisher = Publisher(tracker, url)
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        for kind in ("snapshot", "delta"):
            assert publisher.publish().kind == kind
            predictor.sync()
            assert_equal(tracker, held)
            model(batch(spec, generator)).backward()
        publisher.close()


def unable_to_vote(rank: int, world_size: int, url: str, broken_rank: int) -> list[str]:
    """A rank that fails before its vote reports it, so that the other ranks do not wait, and all can continue."""
    spec = Spec([Table("t", 6, "row")])
    tracker = ModelDeltaTracker(shard(spec))
    with Publisher(tracker, url, timeout=timedelta(seconds=12)) as publisher:
        messages = []
        for call in (publisher.publish, publisher.snapshot):
            failing = mock.patch.object(TrackerReader, "batch_and_schema", side_effect=StorageError(url, "x"))
            with failing if rank == broken_rank else contextlib.nullcontext():
                messages.append(attempt(call))
            assert call().version == publisher.version
        return messages


def dropped_since_the_vote(rank: int, world_size: int, url: str) -> str:
    """The consumer is dropped between the vote and the read: the error says what works."""
    spec = Spec([Table("t", 40, "row", dim=64)])
    model = shard(spec)
    with (
        ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING, max_bytes=1) as tracker,
        Publisher(tracker, url) as publisher,
    ):
        publisher.snapshot()
        model(batch(spec, torch.Generator().manual_seed(rank), size=8)).backward()
        tracker.step()
        with mock.patch.object(TrackerReader, "needs_snapshot", False):
            message = attempt(publisher.publish)
        assert publisher.publish().kind == "snapshot"
        return message
