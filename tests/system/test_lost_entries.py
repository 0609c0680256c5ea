"""Newest entries that a person or a lifecycle rule deletes while the trainer lives."""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from unittest import mock

import pytest
import torch

from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher, Recovery, Upkeep
from delta_tracker.errors import DeltaTrackerError, MissingVersionError, NotRecoverableError
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.publisher.tracker_reader import TrackerReader
from delta_tracker.recovery.restore import restore
from delta_tracker.recovery.standby import Standby
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.storage.storage import Storage


@pytest.fixture(params=["file", "s3"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Storage:
    if request.param == "file":
        return Storage(f"file://{tmp_path}/stream", create=True)
    s3 = request.getfixturevalue("s3")
    return Storage(f"{s3.url}/{secrets.token_hex(8)}", options=s3.options)


class Serving:
    """A model with a predictor."""

    def __init__(self, storage: Storage) -> None:
        self.model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4, sparse=True))
        self.predictor = Predictor(self.model, storage, monitor=Monitor())


class Job:
    """A trainer of one table, and predictors of its stream."""

    def __init__(self, storage: Storage, *, version: int | None = None) -> None:
        self.storage, self.log = storage, StreamLog(storage)
        self.model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4, sparse=True))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.5)
        self.tracker = ModelDeltaTracker(self.model)
        recovery = Recovery(training_state={"optimizer": self.optimizer})
        if version is not None:
            restore(self.model, storage, version, tracker=self.tracker, recovery=recovery)
        self.publisher = Publisher(
            self.tracker,
            storage,
            recovery=recovery,
            cadence=Cadence(batches=1),
            monitor=Monitor(),
            upkeep=Upkeep(pointer_seconds=None),
        )

    def train(self, *rows: int) -> None:
        self.model(torch.tensor([rows])).sum().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.tracker.step()

    def publish(self, *rows: int) -> int:
        self.train(*rows)
        return self.publisher.publish().version

    def delete(self, *versions: int) -> None:
        for version in versions:
            self.storage.delete(entry_name(version))

    def predictor(self, version: int | None = None, storage: Storage | None = None) -> Serving:
        found = Serving(self.storage if storage is None else storage)
        if version is not None:
            with suppress(MissingVersionError):  # after the versions below the gap
                found.predictor.sync()
            assert found.predictor.version == version
        return found

    def assert_equal(self, *servings: Serving) -> None:
        for each in servings:
            for _ in range(5):
                with suppress(DeltaTrackerError):
                    each.predictor.sync()
            assert each.predictor.version == self.publisher.version
            assert torch.equal(each.model[0].weight, self.model[0].weight)


@contextmanager
def job_of(storage: Storage, **options: int) -> Iterator[Job]:
    job = Job(storage, **options)
    try:
        yield job
    finally:
        job.publisher.close()


@pytest.mark.parametrize("call", ["publish", "snapshot"])
@pytest.mark.parametrize("num_lost", [1, 2, 4])
def test_a_publisher_continues_after_its_newest_entries_were_deleted(
    storage: Storage, call: str, num_lost: int
) -> None:
    with job_of(storage) as job:
        job.publisher.snapshot()
        behind = job.predictor(1)
        job.publish(1, 2)
        job.publish(3)
        ahead = job.predictor(3)
        job.delete(*range(4 - num_lost, 4))
        job.train(4)
        getattr(job.publisher, call)()
        job.publish(5)
        job.assert_equal(ahead, behind, job.predictor())


def test_a_trainer_that_ends_before_its_snapshot_is_restored_from_the_version_before(storage: Storage) -> None:
    with job_of(storage) as job:
        for row in range(3):
            job.publish(row)
        job.delete(job.publisher.version)
        job.train(7)
        for _ in range(5):
            job.publisher.step()
        with mock.patch.object(TrackerReader, "copy", side_effect=MemoryError), pytest.raises(MemoryError):
            job.publisher.flush()  # claims the stream again, and fails before it publishes a snapshot
    ahead = job.predictor(2)
    with pytest.raises(NotRecoverableError, match="Choose another version") as caught:
        Job(storage, version=job.log.versions()[-1])
    assert "version 3 is missing" in caught.value.reason
    with job_of(storage, version=2) as again:
        assert again.publisher.publish().kind == "snapshot", "new readers could not reach a delta"
        again.publish(8)
        again.assert_equal(ahead, again.predictor())
        restored = Job(storage, version=again.publisher.version)
        assert torch.equal(restored.model[0].weight, again.model[0].weight)
        restored.publisher.close()


@pytest.mark.parametrize("has_lost_version", [False, True])
def test_a_standby_follows_over_a_lost_entry_and_takes_over(tmp_path: Path, has_lost_version: bool) -> None:
    storage = Storage(f"file://{tmp_path}/stream", create=True)
    with job_of(storage) as job:
        job.publish(0)
        model = torch.nn.Sequential(torch.nn.EmbeddingBag(50, 4, sparse=True))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        tracker = ModelDeltaTracker(model)
        standby = Standby(model, storage, tracker=tracker, recovery=Recovery(training_state={"optimizer": optimizer}))
        assert standby.sync() == 1
        job.publish(1)
        if has_lost_version:
            assert standby.sync() == 2
        job.delete(2)
        assert job.publish(2) == 4
        job.publish(3)
    for _ in range(3):
        with suppress(DeltaTrackerError):
            standby.sync()
    assert standby.version == 5
    taken = standby.take_over(force=True)
    assert torch.equal(model[0].weight, job.model[0].weight)
    with Publisher(tracker, taken.recovery, recovery=Recovery(training_state={"optimizer": optimizer})) as publisher:
        assert publisher.publish().generation == 3
