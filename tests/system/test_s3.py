"""A stream on a real S3 server, including lost answers and a server that ignores conditional requests."""

from __future__ import annotations

import secrets
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, Recovery, Upkeep
from delta_tracker.errors import CorruptPartError, FencedError, StorageError, UnsupportedStoreError, WriteRefusedError
from delta_tracker.monitor.monitor import Monitor
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.storage.storage import Storage
from tests.servers import S3, Proxy, free_ports, proxy
from tests.stream.streams import FQN, Writer


@pytest.fixture
def url(s3: S3) -> str:
    """Return an unused URL in the bucket."""
    return f"{s3.url}/{secrets.token_hex(8)}"


@pytest.fixture
def bad(s3: S3) -> Iterator[Proxy]:
    """Start a proxy in front of the server, without faults until a test sets them."""
    with proxy(s3.port) as state:
        yield state


def test_a_stream_on_s3_is_published_and_followed(s3: S3, url: str) -> None:
    writer = Writer(Storage(url, options=s3.options), num_rows=5000, dim=64)
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, Storage(url, options=s3.options))
    predictor.sync()
    for step in range(4):
        writer.delta([step, 1000 + step, 4999])
        predictor.sync()
        assert torch.equal(model[FQN], writer.table)
    late = writer.model()
    Predictor(late, Storage(url, options=s3.options)).sync()
    assert torch.equal(late[FQN], writer.table)


def test_a_second_publisher_on_s3_fences_the_first(s3: S3, url: str) -> None:
    first = Writer(Storage(url, options=s3.options))
    first.snapshot()
    second = Writer(Storage(url, options=s3.options))
    with pytest.raises(FencedError):
        first.delta([1])
    second.snapshot()
    assert second.claim.head.generation == 2


def test_a_store_that_ignores_the_condition_is_refused(s3: S3, url: str, bad: Proxy) -> None:
    storage = Storage(url, options=s3.through(bad.port) | {"skip_signature": "true"})
    storage.probe()  # the proxy itself has no fault
    bad.strip_headers = frozenset({"if-none-match"})
    with pytest.raises(UnsupportedStoreError, match="no atomic create-if-absent") as caught:
        storage.probe()
    assert caught.value.url == url
    assert storage.create("x", b"1")
    assert storage.create("x", b"2")
    assert storage.names("probe") == []


@pytest.mark.parametrize("lost", [1, 2, 7])
def test_a_claim_whose_answers_were_lost_is_won_once(s3: S3, url: str, bad: Proxy, lost: int) -> None:
    storage = Storage(url, options=s3.through(bad.port))
    bad.lose_answers = lost  # with seven, the client stops retrying before it gets an answer
    claim = StreamLog(storage).claim()
    assert bad.lose_answers == 0
    assert claim.head.generation == 1
    assert StreamLog(Storage(url, options=s3.options)).versions() == [0]


def test_a_create_whose_answer_was_lost_reports_that_the_name_exists(s3: S3, url: str, bad: Proxy) -> None:
    storage = Storage(url, options=s3.through(bad.port))
    bad.lose_answers = 1
    assert not storage.create("x", b"mine")
    assert storage.read("x", max_bytes=4).tobytes() == b"mine"
    bad.lose_answers = 100
    with pytest.raises(StorageError):
        storage.create("y", b"mine")
    bad.lose_answers = 0
    assert storage.read("y", max_bytes=4).tobytes() == b"mine"


def test_the_probe_tolerates_lost_answers(s3: S3, url: str, bad: Proxy) -> None:
    storage = Storage(url, options=s3.through(bad.port))
    bad.lose_answers = 1
    storage.probe()
    assert bad.lose_answers == 0
    assert storage.names("probe") == []


def test_versions_whose_answers_were_lost_are_committed_once(s3: S3, url: str, bad: Proxy) -> None:
    writer = Writer(Storage(url, options=s3.through(bad.port)))
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, Storage(url, options=s3.options))
    for lost in (1, 2, 3):
        bad.lose_answers = lost
        manifest = writer.delta([lost, 19])
        assert predictor.sync() == manifest.version
        assert torch.equal(model[FQN], writer.table)
    assert StreamLog(writer.storage).versions() == list(range(manifest.version + 1))


def test_small_objects_take_one_request_and_large_ones_several(s3: S3, url: str, bad: Proxy) -> None:
    storage = Storage(url, options=s3.through(bad.port))
    storage.put("small", [memoryview(b"1"), memoryview(b"2")])
    assert [line.split()[0] for line in bad.seen] == ["PUT"]
    bad.seen.clear()
    data = np.random.default_rng(0).integers(0, 256, 20 << 20, dtype=np.uint8)
    storage.put("large", [data.data])
    assert sorted(line.split()[0] for line in bad.seen) == ["POST", "POST", "PUT", "PUT", "PUT"]
    np.testing.assert_array_equal(storage.read("large", max_bytes=len(data)), data)


def test_a_wrong_key_and_an_unreachable_server_are_reported(s3: S3, url: str) -> None:
    with pytest.raises(StorageError, match=r"PermissionDenied.* PUT ") as caught:
        Storage(url, options=s3.options | {"secret_access_key": "hunter2"}).probe()
    assert "hunter2" not in str(caught.value)
    (port,) = free_ports(1)
    with pytest.raises(StorageError, match=f"127.0.0.1:{port}"):
        Storage(url, options=s3.through(port)).read("x", max_bytes=1)


def test_a_try_again_answer_is_retried(s3: S3, url: str, bad: Proxy) -> None:
    storage = Storage(url, options=s3.through(bad.port))
    bad.conflicts = 1
    writer = Writer(storage)
    bad.conflicts = 1
    writer.snapshot()
    for conflicts in (0, 1, 3):
        bad.conflicts = conflicts
        writer.delta([conflicts])
        assert bad.conflicts == 0
    assert StreamLog(storage).versions() == [0, 1, 2, 3, 4]


def test_a_store_that_always_answers_try_again_fails_and_commits_later(s3: S3, url: str, bad: Proxy) -> None:
    storage = Storage(url, options=s3.through(bad.port))
    writer = Writer(storage)
    writer.snapshot()
    bad.conflicts = 1000
    with pytest.raises(WriteRefusedError, match="00000000000000000002") as caught:
        writer.delta([1])
    assert caught.value.name == "log/00000000000000000002.json"
    with pytest.raises(WriteRefusedError, match="00000000000000000002"):
        StreamLog(storage).claim()
    assert bad.conflicts > 900
    bad.conflicts = 0
    assert StreamLog(storage).versions() == [0, 1]
    assert writer.delta([1]).version == 2  # not fenced


_ALTERED = [(b'{"', b"{}"), (b'"pending_rows":0', b'"pending_rows":7')]  # with the second one, the entry stays valid


@pytest.mark.parametrize("altered", _ALTERED, ids=["malformed", "valid"])
@pytest.mark.parametrize("kind", ["delta", "snapshot"])
def test_an_entry_that_was_altered_on_the_way_is_not_acknowledged(
    s3: S3, url: str, bad: Proxy, altered: tuple[bytes, bytes], kind: str
) -> None:
    """The server does not check the hash that the client sends."""
    storage = Storage(url, options=s3.through(bad.port) | {"skip_signature": "true"})
    writer = Writer(storage)
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, Storage(url, options=s3.options))
    predictor.sync()
    bad.alter = altered
    with pytest.raises(StorageError, match=r"log/0{19}2.json"):
        writer.write(kind, [writer.rows(None if kind == "snapshot" else [3])])
    assert bad.alter is None
    assert writer.claim.needs_snapshot
    writer.table += 1
    assert writer.snapshot().version == 3
    assert not writer.claim.needs_snapshot
    assert predictor.sync() == 3
    assert torch.equal(model[FQN], writer.table)
    writer.delta([4])
    late = writer.model()
    assert predictor.sync() == Predictor(late, storage).sync() == 4
    assert torch.equal(late[FQN], writer.table)
    assert Writer(storage).claim.head.version == 5


@pytest.mark.parametrize("altered", [(b'{"', b"{}"), (b'"generation":', b'"generation":4')], ids=["malformed", "valid"])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_claim_that_was_altered_on_the_way_is_followed_by_another_one(
    s3: S3, url: str, bad: Proxy, altered: tuple[bytes, bytes], is_new: bool
) -> None:
    storage = Storage(url, options=s3.through(bad.port) | {"skip_signature": "true"})
    if not is_new:
        Writer(storage).snapshot()
    head = -1 if is_new else 1
    bad.alter = altered
    writer = Writer(storage)
    assert bad.alter is None
    assert writer.claim.head.version == head + 2
    assert writer.claim.head.generation == (2 if is_new else 3)
    assert writer.claim.needs_snapshot
    writer.snapshot()
    writer.delta([1])
    model = writer.model()
    assert Predictor(model, storage).sync() == writer.claim.head.version == head + 4
    assert torch.equal(model[FQN], writer.table)


def test_a_mirror_on_s3_sends_only_whole_and_intact_objects(s3: S3, url: str, bad: Proxy) -> None:
    """An object is sent in several requests, and found to be corrupt only after the first ones."""
    writer = Writer(Storage("memory://"), num_rows=100_000, dim=64)
    (part,) = writer.snapshot().parts
    assert part.num_bytes > 24 << 20, "more pieces than are read before the upload begins"
    intact = writer.storage.read(part.name, max_bytes=part.num_bytes)
    assert intact is not None
    corrupt = intact.copy()
    corrupt[0] ^= 1
    writer.storage.replace(part.name, corrupt.tobytes())
    destination = Storage(url, options=s3.through(bad.port))
    mirror = Mirror(writer.storage, destination, memory_bytes=1 << 20)
    with pytest.raises(CorruptPartError, match="do not match"):
        mirror.step()
    assert destination.size(part.name) is None
    writer.storage.replace(part.name, intact.tobytes())
    bad.lose_answers = 1
    assert mirror.step()
    writer.delta([1])
    bad.lose_answers = 1
    assert mirror.step()
    late = writer.model()
    Predictor(late, Storage(url, options=s3.options)).sync()
    assert torch.equal(late[FQN], writer.table)
    assert promote(destination).version == 3


def test_each_write_of_a_version_that_s3_refuses_once_as_concurrent_is_repeated(s3: S3, url: str, bad: Proxy) -> None:
    """Parts in one request and in several, states, training states, entries, the pointer and heartbeats."""
    model = torch.nn.Sequential(torch.nn.EmbeddingBag(80_000, 32, sparse=True))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    tracker = ModelDeltaTracker(model)
    storage = Storage(url, options=s3.through(bad.port))
    served = torch.nn.Sequential(torch.nn.EmbeddingBag(80_000, 32, sparse=True))
    predictor = Predictor(served, Storage(url, options=s3.options))
    methods = ("PUT", "POST", "DELETE")
    with Publisher(
        tracker,
        storage,
        recovery=Recovery(training_state={"optimizer": optimizer}, heartbeat_seconds=0.001),
        monitor=Monitor(),
        upkeep=Upkeep(pointer_seconds=0.001),
    ) as publisher:
        for number in range(12):
            bad.busy, bad.busy_after = dict.fromkeys(methods, 1), number
            model(torch.tensor([[number, 70_000 + number]])).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
            tracker.step()
            version = publisher.snapshot().version if number % 6 < 4 else publisher.publish().version
            assert predictor.sync() == version == 1 + number
            assert torch.equal(served[0].weight, model[0].weight)
        assert publisher.error is None
