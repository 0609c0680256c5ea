"""Cases of versions that are completed after their cut, without the training thread."""

from __future__ import annotations

import os
import signal
import threading
import time
from contextlib import nullcontext
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import distributed as dist

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, Storage, TopK, TrackingMode, Upkeep
from delta_tracker.errors import RankLostError, StreamError
from delta_tracker.publisher.cadence import Cadence
from delta_tracker.publisher.delivery import MessageRounds
from delta_tracker.publisher.versions import Cut, Ended
from delta_tracker.stream.log import StreamLog
from tests.models import Spec, Table, batch, ordinary_optimizer, shard
from tests.publisher.background_cases import Trainer
from tests.publisher.flights import finish, flight
from tests.publisher.publishing_cases import assert_equal, attempt, empty_model
from tests.stores.rules import calls, nth, on
from tests.stores.wrapped import WrappedStorage
from tests.waiting import eventually

_SPEC = Spec([Table("t", 40, "row")])


def _head(url: str) -> int:
    head = StreamLog(Storage(url)).head()
    assert head is not None
    return head.version


def paused(rank: int, world_size: int, url: str) -> None:
    """A version is committed in a pause of training that begins right after its cut, also the first snapshot's part."""
    trainer = Trainer(rank, world_size)
    with trainer.tracker, Publisher(trainer.tracker, url, cadence=Cadence(batches=1)) as publisher:
        publisher.publish()
        before = publisher.version
        while not _is_cut(publisher):
            trainer.step(publisher)
        eventually(lambda: _head(url) > before)
        dist.barrier()
        assert sum(trainer.tracker.num_pending().values()) > 0, "the cursor moves at the next vote"
        publisher.flush()
        assert sum(trainer.tracker.num_pending().values()) == 0


def _is_cut(publisher: Publisher) -> bool:
    return isinstance(flight(publisher), Cut | Ended)


def flushed(rank: int, world_size: int, url: str, top_k: int | None) -> list[int]:
    """After each flush of a slow loop, a predictor equals the trainer. Return the versions after each call."""
    model = shard(_SPEC)
    budget = None if top_k is None else TopK(rows=top_k)
    generator = torch.Generator().manual_seed(rank)
    with (
        ModelDeltaTracker(model, mode=TrackingMode.EMBEDDING) as tracker,
        Publisher(tracker, url, top_k=budget, cadence=Cadence(rows=1)) as publisher,
    ):
        held = empty_model(tracker)
        predictor = Predictor(held, url)
        versions = []
        for number in range(8):
            if number != 5:
                model(batch(_SPEC, generator, size=6)).backward()
                tracker.step()
            publisher.step()
            publisher.flush()
            assert sum(tracker.num_pending().values()) == 0
            predictor.sync()
            assert_equal(tracker, held)
            dist.barrier()
            publisher.flush()
            versions.append(publisher.version)
            assert predictor.sync() == publisher.version
        return versions


def flushed_tables_of_ordinary_optimizers(rank: int, world_size: int, url: str) -> list[int]:
    """A flush compares what only a cut can compare, if training has advanced. Return the versions after each call."""
    spec = Spec([Table("copy", 12, "data"), Table("dense", 13, "row", kernel="dense")], bag=True)
    model = shard(spec)
    ordinary = ordinary_optimizer(model, "Adam", lr=0.1)
    generator = torch.Generator().manual_seed(rank)
    with ModelDeltaTracker(model) as tracker, Publisher(tracker, url, dense=model.module.dense) as publisher:
        held = empty_model(tracker)
        predictor = Predictor(ModelTarget(held, dense=False), url)
        versions = []
        for number in range(4):
            if number != 2:
                ordinary.zero_grad()
                model(batch(spec, generator)).backward()
                ordinary.step()
                tracker.step()
            publisher.flush()
            versions.append(publisher.version)
            predictor.sync()
            assert_equal(tracker, held)
            dist.barrier()
        return versions


def fenced_flush(rank: int, world_size: int, url: str) -> list[str]:
    """A flush of a fenced publisher raises, on all ranks, and again."""
    model = shard(_SPEC)
    with ModelDeltaTracker(model, ["first", "second"]) as tracker:
        publisher = Publisher(tracker, url, "first")
        publisher.flush()
        with Publisher(tracker, url, "second") as other:
            other.publish()
            model(batch(_SPEC, torch.Generator().manual_seed(rank))).backward()
            tracker.step()
            messages = [attempt(publisher.flush) for _ in range(2)]
        publisher.close()
        return messages


def slower_than_the_timeout(rank: int, world_size: int, url: str) -> dict[str, Any]:
    """A store that takes several timeouts for a part and for the entry of a version fails nothing."""
    model = shard(_SPEC)

    def wait(*_: object) -> None:
        time.sleep(2.5)

    with ModelDeltaTracker(model) as tracker:
        storage = WrappedStorage(Storage(url, create=True))
        with Publisher(
            tracker, storage, timeout=timedelta(seconds=1), upkeep=Upkeep(pointer_seconds=None)
        ) as publisher:
            publisher.publish()
            model(batch(_SPEC, torch.Generator().manual_seed(rank), size=20)).backward()
            tracker.step()
            slow = on("put") if rank == world_size - 1 else on("create", name="log/")
            with storage.under(calls(nth(1, slow), before=wait)):
                entry = publisher.publish()
            assert sum(tracker.num_pending().values()) == 0
            return {"version": entry.version, "error": str(publisher.error)}


def committed_between_rounds(rank: int, world_size: int, url: str) -> int:
    """The commit ends while rank 0 answers that it has not ended."""
    model, commits, goes_on = shard(_SPEC), threading.Event(), threading.Event()
    answer = MessageRounds.send_answer

    def slow_answer(rounds: MessageRounds, *data: Any) -> None:
        if commits.is_set() and not goes_on.is_set():
            goes_on.set()
            time.sleep(0.5)
        answer(rounds, *data)

    def wait(*_: object) -> None:
        commits.set()
        assert goes_on.wait(60)

    with ModelDeltaTracker(model) as tracker:
        storage = WrappedStorage(Storage(url, create=True))
        with (
            Publisher(tracker, storage, timeout=timedelta(seconds=4), upkeep=Upkeep(pointer_seconds=None)) as publisher,
            mock.patch.object(MessageRounds, "send_answer", slow_answer),
        ):
            publisher.publish()
            slow = calls(nth(1, on("create", name="log/")), before=wait)
            with storage.under(slow) if rank == 0 else nullcontext():
                publisher.publish()
            return publisher.publish().version


def lost_while_writing(rank: int, world_size: int, url: str, root: str, how: str, call: str) -> dict[str, Any]:
    """The last rank dies or is stopped while it writes its part. Return the time until the others raise."""
    victim, timeout = world_size - 1, 4.0
    model = shard(_SPEC)
    tracker = ModelDeltaTracker(model)
    storage = WrappedStorage(Storage(url, create=True))
    publisher = Publisher(
        tracker,
        storage,
        timeout=timedelta(seconds=timeout),
        cadence=Cadence(batches=1),
        upkeep=Upkeep(pointer_seconds=None),
    )
    publisher.publish()
    model(batch(_SPEC, torch.Generator().manual_seed(rank), size=30)).backward()
    tracker.step()
    pids: list[Any] = [None] * world_size
    dist.all_gather_object(pids, os.getpid())
    began = time.monotonic()
    if rank == victim:

        def lose(*_: object) -> None:
            Path(root, "lost").write_text(str(time.monotonic()))  # the clock is the same in all processes
            os.kill(os.getpid(), signal.SIGKILL if how == "killed" else signal.SIGSTOP)
            time.sleep(1.0)  # the main thread is stopped first, and this one soon after

        storage.rules.append(calls(nth(1, on("put")), before=lose))
    try:
        error: StreamError | None = None
        try:
            if call == "step":
                for _ in range(2):  # the vote, and the cut
                    tracker.step()
                    publisher.step()
                finish(publisher)
                publisher.flush()
            else:
                publisher.publish()
        except StreamError as raised:
            error = raised
        seconds = time.monotonic() - float(Path(root, "lost").read_text())
        pending = sum(tracker.num_pending().values())
        again = time.monotonic()
        second = attempt(publisher.publish)
        return {
            "lost": isinstance(error, RankLostError),
            "seconds": seconds,
            "pending": pending,
            "second": second,
            "again": time.monotonic() - again,
            "total": time.monotonic() - began,
            "threads": [each.name for each in threading.enumerate() if each.name.startswith("publisher-e")],
        }
    finally:
        if rank == 0 and how == "stopped":
            os.kill(pids[victim], signal.SIGCONT)


def every_batch(rank: int, world_size: int, url: str) -> list[tuple[int, int]]:
    """A single rank publishes after each batch if the store keeps up. Return the batches of the versions."""
    trainer = Trainer(rank, world_size)
    with trainer.tracker, Publisher(trainer.tracker, url, cadence=Cadence(batches=1)) as publisher:
        publisher.publish()
        for _ in range(6):
            trainer.step(publisher)
            finish(publisher)
        publisher.flush()
        log = StreamLog(Storage(url))
        entries = [log.read(version) for version in log.versions()]
        return [each.batches for each in entries if each is not None and each.kind == "delta"]


def late_bounds(rank: int, world_size: int, url: str, vote_every: int) -> int:
    """Return the number of calls from the one in which a bound of rows was reached to the cut."""
    model = shard(_SPEC)
    with (
        ModelDeltaTracker(model) as tracker,
        Publisher(tracker, url, cadence=Cadence(rows=1, vote_every=vote_every)) as publisher,
    ):
        publisher.publish()
        worst = 0
        for offset in range(vote_every):
            for _ in range(4 * vote_every + offset):
                tracker.step()
                publisher.step()
                finish(publisher)
            model(batch(_SPEC, torch.Generator().manual_seed(0), size=20)).backward()
            number = 0
            while not _is_cut(publisher):
                tracker.step()
                publisher.step()
                number += 1
                assert number < 100
            worst = max(worst, number - 1)
            publisher.flush()
        return worst
