"""Slow, interrupted and hanging transfers: parts arrive, no byte is fetched twice, and stop() does not wait."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from delta_tracker import Predictor, RowTarget
from delta_tracker.errors import CorruptPartError, StorageError
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Manifest
from delta_tracker.stream.format.part_reader import Contents, PartBuffer
from delta_tracker.stream.maintenance.retention import Retention
from delta_tracker.stream.maintenance.upkeep import Upkeep, UpkeepThread
from delta_tracker.stream.pointer_writer import PointerWriter
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.stream.storage.store import Transfer
from delta_tracker.stream.storage.url import connection
from delta_tracker.types import TableSpec
from tests.predictor.serving import eventually
from tests.stream.slow_s3 import SlowS3, slow_s3
from tests.stream.streams import FQN, Writer

_PROMPT_SECONDS = 30.0  # stop() takes some 0.1 s, a server that hangs twice as long
# A least rate for which a part that trickles fails after 1.5 s, with a read_timeout of 0.5 s, instead of 16.5 s.
_FAST_LIMIT = "delta_tracker.stream.storage.objects._BYTES_PER_SECOND", 256 << 10
_LOST_BYTES = 300_000  # an interruption loses at most 256 KiB


@pytest.fixture
def writer() -> Writer:
    """Make a stream in memory."""
    return Writer(Storage("memory://"), num_rows=4000, dim=64)


@pytest.fixture
def server(writer: Writer) -> Iterator[SlowS3]:
    with slow_s3(writer.storage) as state:
        yield state


def part_of(manifest: Manifest) -> str:
    (part,) = manifest.parts
    return part.name


def returns_promptly(call: Callable[[], object], at_the_end: Callable[[], object] = lambda: None) -> None:
    """Fail if a call takes too long; ``at_the_end`` releases what it waits for."""
    thread = threading.Thread(target=call, daemon=True)
    begin = time.monotonic()
    thread.start()
    thread.join(_PROMPT_SECONDS)
    is_late = thread.is_alive()
    at_the_end()
    assert not is_late, f"it has not returned after {time.monotonic() - begin:.1f} s"


# One part of 1 MB, which no request transfers completely.


def test_a_part_arrives_however_often_its_transfer_is_cut(server: SlowS3, writer: Writer) -> None:
    name = part_of(writer.snapshot())
    size = writer.storage.size(name)
    server.faults = lambda _: ("cut", 80_000)
    model = writer.model()
    Predictor(model, server.storage()).sync()
    assert torch.equal(model[FQN], writer.table)
    assert server.num_faults[name] > 10
    assert size <= server.sent[name] <= size + _LOST_BYTES


def test_a_part_arrives_however_slow_its_transfer_is(server: SlowS3, writer: Writer) -> None:
    name = part_of(writer.snapshot())
    size = writer.storage.size(name)
    server.bytes_per_second = size / 3
    model = writer.model()
    # Twice the allowed silence.
    Predictor(model, server.storage(read_timeout="1500ms")).sync()
    assert torch.equal(model[FQN], writer.table)
    assert server.sent[name] == size
    assert server.asked.count(f"GET {name}") == 1
    settings = connection("s3://bucket", None)["client_options"]
    assert settings["timeout"] == "365days", "a request is limited by silence alone"
    assert settings["read_timeout"] == "30s"


@pytest.mark.parametrize(
    ("is_web", "trickles"),
    [(True, "control/"), (True, "log/"), (True, "parts/"), (False, "log/"), (False, "parts/"), (False, "?")],
)
def test_a_stream_is_read_from_the_next_url_if_the_first_one_trickles(
    server: SlowS3, writer: Writer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_web: bool, trickles: str
) -> None:
    """Bytes keep arriving, so the server is not silent."""
    monkeypatch.setattr(*_FAST_LIMIT)
    PointerWriter(writer.storage).write_now(writer.snapshot())
    healthy = Storage(tmp_path)
    for each in ("control", "log", "parts"):
        for name in writer.storage.names(each):
            healthy.put(name, [writer.storage.read(name, max_bytes=1 << 30).data])
    server.trickles = trickles
    model = writer.model()
    slow = (server.web if is_web else server.storage)(read_timeout="500ms")
    predictor = Predictor(model, [slow, healthy])
    predictor.follow(poll_seconds=0.01)
    eventually(lambda: predictor.version is not None)
    predictor.stop()
    assert torch.equal(model[FQN], writer.table)


@pytest.mark.parametrize("is_web", [False, True])
@pytest.mark.parametrize("name", ["log/x", "parts/x"])
def test_a_call_ends_if_an_object_trickles(
    server: SlowS3, writer: Writer, monkeypatch: pytest.MonkeyPatch, is_web: bool, name: str
) -> None:
    storage = server.web if is_web else server.storage
    data = os.urandom(3_000 if name == "log/x" else 3_000_000)
    writer.storage.create(name, data)
    server.trickles, transfer = name, Transfer()
    with monkeypatch.context() as patch:
        patch.setattr(*_FAST_LIMIT)
        with pytest.raises(StorageError, match=rf"{name} arrives too slowly: \d+ bytes in"):
            storage(read_timeout="500ms").read(name, max_bytes=len(data), transfer=transfer)
    server.trickles = None
    assert storage().read(name, max_bytes=len(data), transfer=transfer).tobytes() == data


def test_a_later_call_resumes_where_the_last_one_failed(server: SlowS3, writer: Writer) -> None:
    name = part_of(writer.snapshot())
    size = writer.storage.size(name)
    model = writer.model()
    server.max_retries = 0
    predictor = Predictor(model, server.storage())
    answers = [("cut", 600_000)]
    server.faults = lambda _: answers.pop() if answers else ("cut", 0)
    with pytest.raises(StorageError):
        predictor.sync()
    assert predictor.version is None
    server.faults = lambda _: None
    predictor.sync()
    assert torch.equal(model[FQN], writer.table)
    assert size <= server.sent[name] <= size + _LOST_BYTES


def test_bytes_of_two_objects_are_never_mixed(server: SlowS3, writer: Writer) -> None:
    name = part_of(writer.snapshot())
    data = writer.storage.read(name, max_bytes=1 << 24).tobytes()
    server.max_retries = 0
    predictor = Predictor(writer.model(), server.storage())
    answers = [("cut", 600_000)]
    server.faults = lambda _: answers.pop() if answers else ("cut", 0)
    with pytest.raises(StorageError):
        predictor.sync()
    server.faults = lambda _: None
    begun = server.sent[name]
    writer.storage.put(name, [memoryview(bytes(len(data)))])
    with pytest.raises(StorageError, match="changed while it was read"):
        predictor.sync()
    with pytest.raises(CorruptPartError):
        predictor.sync()
    assert server.sent[name] >= begun + len(data), "read from its beginning"
    writer.storage.put(name, [memoryview(data)])
    predictor.sync()


def test_hashing_a_large_part_resumes_where_it_failed() -> None:
    """The part is read twice in pieces of 8 MiB, and never held completely."""
    writer = Writer(Storage("memory://"), num_rows=80_000, dim=64)
    manifest = writer.snapshot()
    name = part_of(manifest)
    size = writer.storage.size(name)
    buffer = PartBuffer()
    with slow_s3(writer.storage) as server:
        server.max_retries = 0
        storage = server.storage()
        answers = [("cut", 0), None, None]
        server.faults = lambda _: answers.pop() if answers else None
        with pytest.raises(StorageError):
            Contents(storage, manifest, memory_bytes=0, buffer=buffer)
        assert answers == []
        Contents(storage, manifest, memory_bytes=0, buffer=buffer)
        assert server.sent[name] <= size + (8 << 20), "the piece with the header is read again"


# Stopping


@pytest.mark.parametrize("is_in_part", [False, True])
def test_stop_does_not_wait_for_a_server_that_hangs(server: SlowS3, writer: Writer, is_in_part: bool) -> None:
    writer.snapshot()
    model = writer.model()
    predictor = Predictor(model, server.storage(read_timeout="60s", timeout="60s"), name="p")
    if is_in_part:
        server.faults = lambda _: ("silent", 100_000)
        predictor.follow(poll_seconds=0.01)
        eventually(lambda: sum(server.num_faults.values()) > 0)
    else:
        predictor.follow(poll_seconds=0.01)
        eventually(lambda: predictor.version is not None)
        server.is_hanging = True
        number = len(server.asked)
        eventually(lambda: len(server.asked) > number)
    time.sleep(0.1)
    returns_promptly(predictor.stop, server.closed.set)
    server.is_hanging, server.faults = False, lambda _: None
    assert "predictor" not in {thread.name for thread in threading.enumerate()}


def test_stop_does_not_wait_for_a_sync_that_hangs(server: SlowS3, writer: Writer) -> None:
    writer.snapshot()
    predictor = Predictor(writer.model(), server.storage(read_timeout="60s", timeout="60s"))
    predictor.sync()
    server.is_hanging = True
    number = len(server.asked)
    sync = threading.Thread(target=lambda: _fails(predictor.sync), daemon=True)
    sync.start()
    eventually(lambda: len(server.asked) > number)
    server.is_hanging = False  # the request of sync() still hangs
    predictor.follow(poll_seconds=0.01)
    time.sleep(0.1)
    returns_promptly(predictor.stop, server.closed.set)  # ends the request
    sync.join(120)
    assert not sync.is_alive()


def test_follow_does_not_wait_for_a_server_that_hangs(server: SlowS3, writer: Writer) -> None:
    writer.snapshot()
    server.is_hanging = True
    predictor = Predictor(writer.model(), server.storage(read_timeout="60s", timeout="60s"))
    returns_promptly(lambda: predictor.follow(poll_seconds=0.01))
    returns_promptly(predictor.stop, server.closed.set)


def _fails(call: Callable[[], object]) -> None:
    try:
        call()
    except StorageError:
        return


def test_a_predictor_that_was_stopped_resumes_its_part(server: SlowS3, writer: Writer) -> None:
    name = part_of(writer.snapshot())
    size = writer.storage.size(name)
    model = writer.model()
    predictor = Predictor(model, server.storage(read_timeout="60s", timeout="60s"))
    server.faults = lambda _: ("silent", 600_000)
    predictor.follow(poll_seconds=0.01)
    eventually(lambda: server.num_faults[name] > 0)
    time.sleep(0.1)
    returns_promptly(predictor.stop, lambda: None)
    server.faults = lambda _: None
    predictor.follow(poll_seconds=0.01)
    eventually(lambda: predictor.version == 1)
    predictor.stop()
    assert torch.equal(model[FQN], writer.table)
    assert server.sent[name] <= size + _LOST_BYTES


# A part of 1 TB in a sparse file.

_HUGE_BYTES = 1 << 40
_HUGE_DIM = 256


class _Huge(RowTarget):
    """A table of 1 TB that keeps nothing."""

    num_rows, dim, dtype = _HUGE_BYTES // _HUGE_DIM // 4, _HUGE_DIM, torch.float32
    rows, columns = (0, num_rows), ((0, _HUGE_DIM),)

    def write(self, ids: Tensor | slice, values: Tensor, columns: tuple[int, int]) -> None:
        raise AssertionError("it is never read whole")


def a_huge_version(storage: Storage, directory: Path, *, has_header: bool) -> Path:
    """Write a snapshot of 1 TB of zeros with a wrong hash; return its file."""
    writer = Writer(storage, dim=_HUGE_DIM)
    manifest = writer.write("delta", [writer.rows([0])])
    (part,) = manifest.parts
    spec = TableSpec(FQN, _Huge.num_rows, _HUGE_DIM, torch.float32)
    block = Block(FQN, (0, spec.num_rows), (0, spec.dim), spec.num_rows, "all", Encoding.of(spec.dtype))
    begin = _header_of(block)
    size = len(begin) + _HUGE_BYTES
    forged = replace(part, name="parts/huge.safetensors", num_bytes=size, blocks=(block,))
    path = directory / forged.name
    with path.open("wb") as file:
        file.write(begin if has_header else b"")
        file.truncate(size)
    writer.claim.commit(replace(manifest, kind="snapshot", tables={FQN: spec}, parts=(forged,)))
    return path


def _header_of(block: Block) -> bytes:
    """Return the bytes of a part with one block of whole rows up to its first value."""
    num_bytes = block.num_rows * block.row_bytes
    shape = [block.num_rows, block.num_columns]
    text = f'{{"0.values":{{"dtype":"F32","shape":{shape},"data_offsets":[0,{num_bytes}]}}}}'.encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text


def test_a_huge_part_without_a_header_is_refused_at_once(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri(), create=True)
    path = a_huge_version(storage, tmp_path, has_header=False)
    predictor = Predictor({FQN: _Huge()}, storage)
    found: list[str] = []

    def sync() -> None:
        try:
            predictor.sync()
        except CorruptPartError as error:
            found.append(error.path)

    returns_promptly(sync, lambda: os.truncate(path, 0))
    assert found == ["parts/huge.safetensors"]


def test_stop_does_not_wait_for_a_huge_part(tmp_path: Path) -> None:
    storage = Storage(tmp_path.as_uri(), create=True)
    path = a_huge_version(storage, tmp_path, has_header=True)
    predictor = Predictor({FQN: _Huge()}, storage)
    predictor.follow(poll_seconds=0.01)
    time.sleep(0.3)
    assert predictor.error is None, "it is being hashed"
    returns_promptly(predictor.stop, lambda: os.truncate(path, 0))


# Closing


def test_closing_does_not_wait_for_upkeep_that_hangs(server: SlowS3, writer: Writer) -> None:
    version = writer.snapshot().version
    storage = server.storage(read_timeout="60s", timeout="60s")
    upkeep = UpkeepThread(
        storage, Upkeep(retention=Retention(versions=1), compact_every=2), retain_every=1, close_seconds=0.2
    )
    server.is_hanging = True
    upkeep.after(version)
    eventually(lambda: len(server.asked) > 0)
    returns_promptly(upkeep.close, server.closed.set)
    assert upkeep.error is None
    upkeep.after(version + 10)
    assert "upkeep" not in {thread.name for thread in threading.enumerate()}
