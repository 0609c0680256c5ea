"""Advice to those who restore a job, or let another one stand by."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from delta_tracker import ModelDeltaTracker, Publisher, Recovery, Standby, Storage, restore
from delta_tracker.errors import (
    CorruptPartError,
    IncompleteModelError,
    InvalidArgumentError,
    LivePublisherError,
    NotRecoverableError,
    RankFailedError,
    ReservedConsumerError,
    RestoreMismatchError,
    StorageError,
    StreamReplacedError,
    TakeoverFailedError,
    UnsupportedModelError,
)
from delta_tracker.stream.log import StreamLog
from tests.advice.jobs import refused, small_model


class _Job:
    """A trainer of a plain model, which publishes its state."""

    def __init__(
        self, root: Path, model: nn.Module | None = None, optimizer: type[torch.optim.Optimizer] = torch.optim.Adagrad
    ) -> None:
        self.url = f"file://{root}/stream"
        self.model = small_model() if model is None else model
        self.optimizer = optimizer(self.model.parameters(), lr=0.1)
        self.tracker = ModelDeltaTracker(self.model)

    def recovery(self, **others: Any) -> Recovery:
        return Recovery(training_state={"optimizer": self.optimizer, **others})

    def publisher(self, url: Any = None, **options: Any) -> Publisher:
        arguments = {"recovery": self.recovery()} | options
        return Publisher(self.tracker, url or self.url, **arguments)

    def train(self, *rows: int) -> None:
        self.model(torch.tensor([list(rows)])).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tracker.step()

    def restore(self, version: int | None = None, **options: Any) -> int:
        arguments = {"tracker": self.tracker, "recovery": self.recovery()} | options
        return restore(self.model, self.url, version, **arguments).version

    def standby(self, **options: Any) -> Standby:
        arguments = {"tracker": self.tracker, "recovery": self.recovery(), "look_seconds": 0.0} | options
        return Standby(self.model, self.url, **arguments)

    def equals(self, other: _Job) -> bool:
        own, its = self.optimizer.state_dict()["state"], other.optimizer.state_dict()["state"]
        return all(
            torch.equal(one, two) for one, two in zip(self.model.parameters(), other.model.parameters(), strict=True)
        ) and all(torch.equal(own[key]["sum"], its[key]["sum"]) for key in own)


def _published(root: Path, number: int = 3) -> _Job:
    """Return a job that has published a snapshot and deltas, and is dead."""
    job = _Job(root)
    with job.publisher() as publisher:
        publisher.snapshot()
        for row in range(number):
            job.train(row)
            publisher.publish()
    return job


def _damage(root: Path, version: int) -> None:
    for part in (root / "stream" / "parts").glob(f"{version:020d}*"):
        part.write_bytes(part.read_bytes()[:-1])


@pytest.mark.advice("CorruptPartError: TrainingStates._error TrainingStates._found check_size")
def test_an_older_version_than_a_corrupt_one_is_restored(tmp_path: Path) -> None:
    _published(tmp_path)
    _damage(tmp_path, 4)
    job = _Job(tmp_path)
    refused(CorruptPartError, job.restore, "To restore, pin or roll back, pass an older version")
    assert job.restore(3) == 3
    with job.publisher() as publisher:
        job.train(9)
        publisher.publish()
    other = _Job(tmp_path)
    other.restore()
    assert other.equals(job)


@pytest.mark.advice(
    "NotRecoverableError: Restoration.run Restoration._prepare Plan.check_objects names_of_all_ranks recovery_path "
    "_path"
)
@pytest.mark.parametrize("kind", ["no stream", "only a claim", "without states", "missing part"])
def test_another_version_is_restored_or_none(tmp_path: Path, kind: str) -> None:
    job = _Job(tmp_path)
    if kind in ("no stream", "only a claim"):
        if kind == "only a claim":
            _Job(tmp_path).publisher().close()
        error = refused(NotRecoverableError, job.restore, "Check the URL, or start without restore")
        assert error.version is None
        with job.publisher() as publisher:
            publisher.snapshot()
    else:
        trainer = _published(tmp_path)
        if kind == "without states":
            with trainer.publisher(recovery=None) as publisher:
                trainer.train(5)
                publisher.snapshot()
        else:
            part = StreamLog(Storage(job.url)).read(4).parts[0]  # with the rows
            (tmp_path / "stream" / part.name).unlink()
        refused(NotRecoverableError, job.restore, "Choose another version", "recovery=")
        assert job.restore(3) == 3
        with job.publisher() as publisher:
            publisher.publish()
    other = _Job(tmp_path)
    other.restore()
    assert other.equals(job)


def _deeper() -> nn.Module:
    return nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.BatchNorm1d(4))


@pytest.mark.advice(
    "RestoreMismatchError: _same check_same _check_keys _check_presence prepare check_optimizer _check_groups "
    "_kernels _targets check_collisions check_collision_slots check_collision_states _check_routes "
    "check_scalars"
)
@pytest.mark.parametrize(
    "build",
    [
        lambda root: _Job(root, nn.Sequential(nn.EmbeddingBag(30, 4, sparse=True))),
        lambda root: _Job(root, small_model(2)),
        lambda root: _Job(root, _deeper()),
        lambda root: _Job(root, optimizer=torch.optim.SGD),
    ],
    ids=["rows", "table", "buffer", "optimizer"],
)
def test_a_job_like_that_of_the_version_is_built(tmp_path: Path, build: Callable[[Path], _Job]) -> None:
    trainer = _published(tmp_path)
    job = build(tmp_path)
    before = [each.detach().clone() for each in job.model.parameters()]
    error = refused(RestoreMismatchError, job.restore)
    assert "Build the job like that of the version" in error.remedy or "ignore" in error.remedy
    assert all(torch.equal(one, two) for one, two in zip(before, job.model.parameters(), strict=True))
    fitting = _Job(tmp_path)
    fitting.restore()
    assert fitting.equals(trainer)


@pytest.mark.advice("RestoreMismatchError: check_fit _check_presence")
def test_what_only_one_job_has_is_ignored(tmp_path: Path) -> None:
    trainer = _published(tmp_path)
    job, reader = _Job(tmp_path), _Rejecting()
    recovery = job.recovery(reader=reader)
    refused(RestoreMismatchError, lambda: job.restore(recovery=recovery), "Name it in ignore={'reader'}")
    job.restore(recovery=recovery, ignore=["reader"])
    assert job.equals(trainer)


class _Rejecting:
    """An object that rejects its state until it is repaired."""

    is_broken = True

    def state_dict(self) -> dict[str, Any]:
        return {"position": 3}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if self.is_broken:
            raise KeyError("next")


@pytest.mark.advice(
    "IncompleteModelError: _Incomplete.__call__",
    "RankFailedError: LocalJob._load",
)
def test_a_failed_restore_is_repeated_once_the_problem_is_fixed(tmp_path: Path) -> None:
    trainer = _Job(tmp_path)
    with trainer.publisher(recovery=trainer.recovery(reader=_Rejecting())) as publisher:
        trainer.train(3)
        publisher.snapshot()
    job, reader = _Job(tmp_path), _Rejecting()
    call = lambda: job.restore(recovery=job.recovery(reader=reader))  # noqa: E731
    refused(RankFailedError, call, "Fix the problem on that rank and restore again on all ranks")
    refused(IncompleteModelError, lambda: job.train(1), "Call restore() again on all ranks")
    reader.is_broken = False
    call()
    assert job.equals(trainer)
    job.train(1)


@pytest.mark.advice("ReservedConsumerError: LocalJob.check_tracker")
def test_a_job_is_restored_between_two_publishers(tmp_path: Path) -> None:
    trainer = _published(tmp_path)
    with trainer.publisher() as publisher:
        refused(
            ReservedConsumerError, trainer.restore, "Close the publisher, load or restore, and build a new Publisher"
        )
        publisher.close()
        trainer.restore(2)
    with trainer.publisher() as publisher:
        publisher.publish()
    other = _Job(tmp_path)
    other.restore()
    assert other.equals(trainer)


@pytest.mark.advice("InvalidArgumentError: LocalJob.check_tracker")
def test_a_tracker_of_another_shard_is_attached_again(tmp_path: Path) -> None:
    trainer, job = _published(tmp_path), _Job(tmp_path, nn.Sequential(nn.EmbeddingBag(10, 4, sparse=True)))
    job.model[0] = nn.EmbeddingBag(20, 4, sparse=True)
    job.optimizer = torch.optim.Adagrad(job.model.parameters(), lr=0.1)
    refused(InvalidArgumentError, job.restore, "Call tracker.reattach()")
    job.tracker.reattach()
    job.restore()
    assert job.equals(trainer)


@pytest.mark.advice("UnsupportedModelError: refuse_unrecoverable")
def test_a_model_with_a_skipped_table_is_published_without_states(tmp_path: Path) -> None:
    job = _Job(tmp_path, small_model(2))
    job.tracker = ModelDeltaTracker(job.model, fqns_to_skip=["1"])
    refused(UnsupportedModelError, job.publisher, "Publish without recovery=")
    with job.publisher(recovery=None) as publisher:
        assert publisher.snapshot().version == 1


@pytest.mark.advice("UnsupportedModelError: _check_unfused", "InvalidArgumentError: _Flattener._refuse")
def test_the_optimizer_of_a_table_is_passed(tmp_path: Path) -> None:
    job = _Job(tmp_path)
    refused(
        UnsupportedModelError, lambda: _snapshot(job, recovery=Recovery()), "Pass the optimizer that has its parameter"
    )
    with job.publisher() as publisher:
        publisher.snapshot()
    assert _Job(tmp_path).restore() >= 1


def _snapshot(job: _Job, **options: Any) -> None:
    with job.publisher(**options) as publisher:
        publisher.snapshot()


@pytest.mark.advice(
    "IncompleteModelError: _Incomplete.__call__",
    "LivePublisherError: Standby._check_due Standby._claim RecoveryStream.claim "
    "RecoveryStream._forced_head StreamLog.claim check_silence",
    "InvalidArgumentError: Claim.mark_used",
)
@pytest.mark.parametrize("way", ["stop", "force"])
def test_a_trainer_is_stopped_or_fenced_before_a_takeover(tmp_path: Path, way: str) -> None:
    trainer, job = _Job(tmp_path), _Job(tmp_path)
    publisher = trainer.publisher()
    publisher.snapshot()
    trainer.train(3)
    publisher.publish()
    standby = job.standby()
    standby.sync()
    refused(IncompleteModelError, lambda: job.train(1), "Call Standby.take_over() first, on all ranks")
    refused(
        LivePublisherError,
        lambda: standby.take_over(silence=60),
        "Stop that trainer, wait, or fence it with force=True",
    )
    if way == "stop":
        publisher.close()
        time.sleep(0.5)
        taken = standby.take_over(silence=0.3)
    else:
        taken = standby.take_over(force=True)
    assert job.equals(trainer)
    with job.publisher(taken.recovery) as successor:
        job.train(1)
        successor.publish()
    refused(InvalidArgumentError, lambda: job.publisher(taken.recovery), "Build the publisher with the url")
    with job.publisher() as successor:
        successor.publish()
    publisher.close()


@pytest.mark.advice("TakeoverFailedError: Standby.take_over")
@pytest.mark.parametrize("way", ["snapshot", "restore", "repair", "force"])
def test_a_standby_that_is_behind_is_helped(tmp_path: Path, way: str) -> None:
    trainer, job = _Job(tmp_path), _Job(tmp_path)
    publisher = trainer.publisher()
    publisher.snapshot()
    standby = job.standby()
    standby.sync()
    trainer.train(3)
    publisher.publish()
    parts = list((tmp_path / "stream" / "parts").glob(f"{2:020d}*"))
    whole = [part.read_bytes() for part in parts]
    _damage(tmp_path, 2)
    call = lambda: standby.take_over(silence=1e-9)  # noqa: E731  the publisher leaves no heartbeat between
    advice = "If the trainer is alive, publish a snapshot", "older version", "repair", "force=True"
    assert not refused(TakeoverFailedError, call, *advice).is_claimed
    if way == "snapshot":
        publisher.snapshot()
        standby.take_over(silence=1e-9)
    elif way == "repair":
        for part, data in zip(parts, whole, strict=True):
            part.write_bytes(data)
        standby.take_over(silence=1e-9)
    elif way == "restore":
        standby.close()
        publisher.close()
        assert job.restore(1) == 1
        job.train(1)
        return
    else:
        error = refused(
            TakeoverFailedError, lambda: standby.take_over(force=True), "restore(...) with an older version"
        )
        assert error.version >= 3
        assert error.is_claimed
        return
    assert job.equals(trainer)
    publisher.close()


@pytest.mark.advice("TakeoverFailedError: Standby._complete", "InvalidArgumentError: Standby._check_open")
@pytest.mark.parametrize("way", ["again", "older version"])
def test_a_failed_takeover_is_completed_or_replaced_by_a_restore(tmp_path: Path, way: str) -> None:
    trainer, job = _Job(tmp_path), _Job(tmp_path)
    standby = job.standby()
    with trainer.publisher() as publisher:
        publisher.snapshot()
        standby.sync()
        for row in range(3):
            trainer.train(row)
            publisher.publish()
    parts = list((tmp_path / "stream" / "parts").glob(f"{4:020d}*"))
    whole = [part.read_bytes() for part in parts]
    _damage(tmp_path, 4)
    refused(TakeoverFailedError, lambda: standby.take_over(force=True), "call take_over() again", "an older version")
    if way == "again":
        for part, data in zip(parts, whole, strict=True):
            part.write_bytes(data)
        taken = standby.take_over()
        assert job.equals(trainer)
        refused(InvalidArgumentError, standby.sync, "Build a new Standby")
        with job.publisher(taken.recovery) as publisher:
            job.train(4)
            publisher.publish()
        assert _Job(tmp_path).standby().sync() is not None
    else:
        standby.close()
        assert job.restore(3) == 3
        with job.publisher() as publisher:
            job.train(4)
            publisher.publish()
    other = _Job(tmp_path)
    other.restore()
    assert other.equals(job)


@pytest.mark.advice(
    "StreamReplacedError: RecoveryStream._forced_head RecoveryStream.decide_follow Standby._check_due StreamLog.claim",
    "NotRecoverableError: Standby._check_due ShardFollower._apply",
)
def test_a_standby_waits_for_the_store_of_its_stream(tmp_path: Path) -> None:
    trainer = _published(tmp_path)
    job = _Job(tmp_path)
    standby = job.standby()
    standby.sync()
    (tmp_path / "stream").rename(tmp_path / "unmounted")
    refused(StorageError, lambda: standby.take_over(force=True), "Mount its volume and try again")
    (tmp_path / "unmounted").rename(tmp_path / "stream")
    (tmp_path / "stream" / "log").rename(tmp_path / "log")
    refused(StreamReplacedError, lambda: standby.take_over(force=True), "Check the url, mount or restore its store")
    (tmp_path / "log").rename(tmp_path / "stream" / "log")
    standby.take_over(force=True)
    assert job.equals(trainer)
    empty = tmp_path / "empty"
    other = _Job(empty)
    refused(NotRecoverableError, lambda: other.standby().take_over(force=True), "start without restore")
    with other.publisher() as publisher:
        publisher.snapshot()
