"""Advice to those who publish, and to those who operate a stream."""

from __future__ import annotations

import os
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tracker import Cadence, ModelDeltaTracker, Predictor, Publisher, Recovery, Storage
from delta_tracker.errors import (
    AlteredEntryError,
    CorruptPartError,
    FencedError,
    InvalidArgumentError,
    StorageError,
    UnfinishedStepError,
    UnknownOutcomeError,
    UnsupportedStoreError,
    WriteRefusedError,
)
from delta_tracker.stream import log as log_module
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.mirroring import Mirror
from delta_tracker.stream.pinning import pin_version, release_pin
from delta_tracker.stream.storage import directory as directory_module
from tests.advice.jobs import Job, refused, small_model
from tests.stores.rules import alters, answers, calls, on
from tests.stores.wrapped import WrappedStorage


def _is_served(job: Job) -> bool:
    model = small_model()
    with job.serve(model) as predictor:
        while predictor.sync() != job.publisher.version:
            pass
        return job.is_served_by(model, predictor.version)


@pytest.mark.advice("FencedError: Claim._fence decode_message ServingStreams._newest")
def test_a_fenced_publisher_is_built_again(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with Publisher(ModelDeltaTracker(small_model()), job.url):
        job.train(3)
        refused(FencedError, job.publisher.publish, "build a new Publisher to claim the stream again")
    job.publisher.close()
    job.publisher = Publisher(job.tracker, job.url)
    job.publisher.publish()
    assert _is_served(job)


@pytest.mark.advice("WriteRefusedError: DirectoryStore._check")
@pytest.mark.parametrize("way", ["mounted again", "new publisher"])
def test_a_directory_is_mounted_again_or_its_url_claimed(tmp_path: Path, way: str) -> None:
    job, root = Job(tmp_path), tmp_path / "stream"
    root.rename(tmp_path / "unmounted")
    root.mkdir()
    job.train(3)
    refused(WriteRefusedError, job.publisher.publish, "Mount its volume and try again", "build a new Publisher")
    if way == "mounted again":
        shutil.rmtree(root)  # a write of the pointer may have made a folder in it
        (tmp_path / "unmounted").rename(root)
    else:
        job.publisher.close()
        job.publisher = Publisher(job.tracker, job.url)
    job.publisher.publish()
    assert _is_served(job)


@pytest.mark.advice("WriteRefusedError: Storage.create StreamLog.claim Claim._claim_again")
@pytest.mark.parametrize("call", ["publish", "claim"])
def test_an_object_that_takes_a_name_is_removed(tmp_path: Path, call: str) -> None:
    job = Job(tmp_path)
    if call == "claim":
        job.publisher.close()
    taken = tmp_path / "stream" / entry_name(2)
    taken.symlink_to(tmp_path / "nowhere")
    job.train(3)

    def act() -> None:
        if call == "claim":
            job.publisher = Publisher(job.tracker, job.url)
        job.publisher.publish()

    error = refused(WriteRefusedError, act, "Remove what has this name in the store", "dangling link")
    assert entry_name(2).rpartition("/")[2] in str(error)
    taken.unlink()
    act()
    assert _is_served(job)


@pytest.mark.advice("UnknownOutcomeError: DirectoryStore._sync")
def test_a_version_is_published_again_once_the_disk_can_be_flushed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = Job(tmp_path)

    def fail(*_: object) -> None:
        raise OSError(5, "Input/output error")

    job.train(3)
    with monkeypatch.context() as patched:
        patched.setattr(directory_module, "sync_names", fail)
        refused(UnknownOutcomeError, job.publisher.publish, "Check the disk, then try again; no row was lost")
    job.publisher.publish()
    assert _is_served(job)


@pytest.mark.advice("AlteredEntryError: _create Claim._attempt", "StorageError: _create")
def test_a_snapshot_follows_an_altered_entry(tmp_path: Path) -> None:
    storage = WrappedStorage(Storage("memory://"), is_remote=True)
    model = small_model()
    with Publisher(ModelDeltaTracker(model), storage) as publisher:
        publisher.snapshot()
        with storage.under(alters(lambda data: data + b" ")):
            refused(AlteredEntryError, publisher.publish, "Find out what alters objects", "try again")
        assert publisher.publish().kind == "snapshot"


@pytest.mark.advice(
    "StorageError: DirectoryStore._find DirectoryStore.read DirectoryStore._write _Translation.__exit__ "
    "CachedStore.read BucketStore.read BucketStore._fill BucketStore._fill.following ByteRange.too_short HttpStore.read"
)
def test_a_store_is_repaired_and_the_call_made_again(tmp_path: Path) -> None:
    (tmp_path / "stream").write_text("")
    refused(StorageError, lambda: Job(tmp_path), "then try again")
    (tmp_path / "stream").unlink()
    job, model = Job(tmp_path), small_model()
    predictor = job.serve(model)
    predictor.sync()
    pipe = tmp_path / "stream" / entry_name(2)
    os.mkfifo(pipe)
    refused(StorageError, predictor.sync, "Delete it: no publisher has written it")
    pipe.unlink()
    job.publish(3)
    assert job.is_served_by(model, predictor.sync())


@pytest.mark.advice("StorageError: StreamLog.claim")
def test_the_other_publishers_of_a_stream_are_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(log_module, "back_off", lambda _: None)
    storage = Storage("memory://")
    raced = WrappedStorage(storage, calls(on("create"), before=lambda _: StreamLog(storage).claim()))
    refused(StorageError, lambda: StreamLog(raced).claim(), "Stop the other publishers of this stream")
    assert StreamLog(storage).claim().head.kind == "claim"


@pytest.mark.advice("UnsupportedStoreError: Storage.probe")
def test_a_store_with_an_atomic_create_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    unsafe = WrappedStorage(Storage("memory://"), answers(True, on("create")))
    refused(UnsupportedStoreError, lambda: Publisher(ModelDeltaTracker(small_model()), unsafe), "a local directory")
    assert _is_served(Job(tmp_path))


@pytest.mark.advice("UnsupportedStoreError: _log Storage._operation")
def test_the_url_of_the_bucket_is_used_to_write(tmp_path: Path) -> None:
    job = Job(tmp_path)
    calls: list[Callable[[Any], object]] = [
        lambda url: Storage(url).put("parts/a", [memoryview(b"a")]),
        lambda url: Storage(url).create("parts/b", b"b"),
        lambda url: Storage(url).replace("parts/c", b"c"),
        lambda url: Storage(url).delete("parts/c"),
        lambda url: Storage(url).delete_draft("drafts/c"),
        lambda url: Storage(url).sync("parts"),
        lambda url: Storage(url).names("parts"),
        lambda url: pin_version(Storage(url), 1),
    ]
    for call in calls:
        refused(
            UnsupportedStoreError, lambda call=call: call("http://127.0.0.1:9/stream"), "url of the bucket or directory"
        )
        call(job.url)


@pytest.mark.parametrize("kind", ["file", "open to all"])
def test_a_private_directory_is_used_as_host_cache(tmp_path: Path, kind: str) -> None:
    shared = tmp_path / "shared"
    if kind == "file":
        shared.write_text("")
    else:
        shared.mkdir()
        shared.chmod(0o777)
    refused(InvalidArgumentError, lambda: HostCache(shared), "on a local file system that only this user can write to")
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    job, model = Job(tmp_path), small_model()
    assert job.is_served_by(model, job.serve(model, cache=HostCache(private)).sync())


@pytest.mark.advice("UnfinishedStepError: TrainingCuts.begin")
def test_a_step_of_the_tracker_follows_that_of_the_optimizer(tmp_path: Path) -> None:
    model = small_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tracker = ModelDeltaTracker(model)
    with Publisher(
        tracker, f"file://{tmp_path}", recovery=Recovery(training_state={"optimizer": optimizer})
    ) as publisher:
        for _ in range(2):
            model(torch.tensor([[3]])).sum().backward()
            optimizer.step()
            refused(UnfinishedStepError, publisher.publish, "tracker.step(), publisher.step()")
            tracker.step()
            publisher.publish()


@pytest.mark.advice("InvalidArgumentError: Publisher._checked Publisher.step")
def test_a_publisher_is_used_open_by_the_training_thread_and_with_a_cadence(tmp_path: Path) -> None:
    job = Job(tmp_path)
    errors: list[InvalidArgumentError] = []

    def in_a_thread() -> None:
        errors.append(refused(InvalidArgumentError, job.publisher.publish, "Publish from the training thread"))

    thread = threading.Thread(target=in_a_thread)
    thread.start()
    thread.join()
    assert errors
    refused(InvalidArgumentError, job.publisher.step, "Build the Publisher with cadence=Cadence(...)")
    job.publish(3)
    job.publisher.close()
    refused(InvalidArgumentError, job.publisher.publish, "Build a new Publisher")
    job.publisher = Publisher(job.tracker, job.url, cadence=Cadence(batches=1))
    for row in range(10):
        job.train(row)
        job.publisher.step()
    job.publisher.publish()
    assert _is_served(job)


@pytest.mark.advice(
    "CorruptPartError: check_size checked_pieces",
)
def test_a_snapshot_passes_a_corrupt_part_of_a_mirrored_and_pinned_stream(tmp_path: Path) -> None:
    job, store = Job(tmp_path), Storage(f"file://{tmp_path}/stream")
    copy = Storage(f"file://{tmp_path}/copy", create=True)
    mirror = Mirror(store, copy)
    while mirror.step():
        pass
    job.publish(3)
    (part,) = (tmp_path / "stream" / "parts").glob(f"{2:020d}*")
    whole = part.read_bytes()
    part.write_bytes(whole[:-1])
    refused(CorruptPartError, lambda: pin_version(store, 2), "To restore, pin or roll back, pass an older version")
    pin_version(store, 1)
    refused(CorruptPartError, mirror.step, "Copy the object back", "publish a snapshot there, and mirror to an empty")
    job.train(4)
    job.publisher.snapshot()
    release_pin(store)
    assert _is_served(job)
    refused(CorruptPartError, Mirror(store, copy).step)
    model = small_model()
    other = Storage(f"file://{tmp_path}/other", create=True)
    again = Mirror(store, other)
    while again.step():
        pass
    assert job.is_served_by(model, Predictor(model, other).sync())
    part.write_bytes(whole)
    while mirror.step():
        pass
    assert mirror.head.version == job.publisher.version
