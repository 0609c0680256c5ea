"""Mirrors of some tables: what they copy, who reads them, and what is refused there."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from delta_tracker import ModelDeltaTracker, ModelTarget, Predictor, Publisher, Recovery, Rollout, Standby, restore
from delta_tracker.errors import (
    CorruptPartError,
    DeltaTrackerError,
    InvalidArgumentError,
    LeftOutPartError,
    MalformedError,
    MissingTableError,
)
from delta_tracker.raw_ids import NO_OWNER
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.codec import encode_rows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import STATES_FORMAT, Block, DenseSpec, Kind, Manifest, Part
from delta_tracker.stream.format.part_writer import put_part, put_training
from delta_tracker.stream.host_cache import HostCache
from delta_tracker.stream.log import StreamLog, part_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.mirroring import Mirror, promote
from delta_tracker.stream.pinning import pin_version
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import Bucket, Identity, StateSpec, TableSpec, TableStates
from tests.cli.commands import Cli
from tests.predictor.cache_server import CacheServer, cache_server
from tests.stores.rules import calls, on
from tests.stores.wrapped import Operation, WrappedStorage
from tests.stream.test_mirroring import copy, entries, everything

_ROWS, _DIM = 20, 4
_STATES = TableStates("ADAM", ((0, _DIM),), (StateSpec("momentum1", torch.float32, "columns"),))
_IDENTITY = Identity(_ROWS, (Bucket((0, _ROWS), None),))
_STATED = "log/tables.json"
_APART = [["item"], ["user.id"], ["user.country", "top.weight"]]  # tables of each part
_ALL = ["item", "user.country", "user.id"]


class Stream:
    """A stream of several tables, whose versions have a part for each group of tables."""

    def __init__(self, storage: Storage, *, has_states: bool = False) -> None:
        self.storage, self.has_states = storage, has_states
        self.claim = StreamLog(storage).claim()
        self.owners: dict[str, Tensor] = {}  # raw ids of the rows of tables that have them
        self.tables = {name: torch.randn(_ROWS, _DIM) for name in _ALL}
        self.dense = {"top.weight": torch.randn(3)}
        self.history: dict[int, dict[str, Tensor]] = {}

    def write(self, kind: Kind, groups: Iterable[Iterable[str]] = _APART, ids: Iterable[int] = (1, 2)) -> Manifest:
        """Publish all rows, or those in ``ids``, of the tables and dense tensors in ``groups``."""
        groups = [list(group) for group in groups]
        rows = list(range(_ROWS)) if kind == "snapshot" else list(ids)
        for values in (self.tables.get(name, self.dense.get(name)) for group in groups for name in group):
            values[rows if values.dim() > 1 else slice(None)] += 1.0
        head, chosen = self.claim.head, [name for group in groups for name in group]
        draft = Manifest(
            stream="",
            generation=0,
            writer="",
            version=0,
            kind=kind,
            created=0.0,
            tables={name: TableSpec(name, _ROWS, _DIM, torch.float32) for name in self.tables},
            dense={name: DenseSpec(self.dense[name].dtype, (3,)) for name in self.dense if name in chosen},
            parts=tuple(self._part(number, group, rows) for number, group in enumerate(groups)),
        )
        if self.has_states:
            name = part_name(head.version + 1, head.generation, "r0t")
            training = put_training(self.storage, name, [memoryview(b"state")], 5)
            states = dict.fromkeys(self.tables, _STATES)
            identities = dict.fromkeys(self.owners, _IDENTITY)
            draft = replace(draft, format=STATES_FORMAT, states=states, training=(training,), identities=identities)
        entry = self.claim.commit(draft)
        self.history[entry.version] = {name: each.clone() for name, each in (self.tables | self.dense).items()}
        return entry

    def _part(self, number: int, group: list[str], rows: list[int]) -> Part:
        head = self.claim.head
        names = [part_name(head.version + 1, head.generation, f"r{number}{kind}") for kind in ("", "s")]
        listed = None if len(rows) == _ROWS else torch.tensor(rows)
        encoding, blocks = Encoding.of(torch.float32), []
        for name in (each for each in group if each in self.tables):
            block = Block(name, (0, _ROWS), (0, _DIM), len(rows), "all" if listed is None else "list", encoding)
            values = BlockRows.of(block, listed, encode_rows(self.tables[name][rows].clone(), encoding))
            states = (values.read,) if self.has_states else ()
            owned = self.owners.get(name)
            owners = None if owned is None else BlockRows.of(block, listed, owned[rows, None].clone()).read
            blocks.append(replace(values, states=states, owners=owners))
        dense = {name: each for name, each in self.dense.items() if name in group}
        return put_part(self.storage, names[0], blocks, dense, states_name=names[1] if self.has_states else None)


def served(names: Iterable[str] = _ALL) -> dict[str, Tensor]:
    return {name: torch.full((_ROWS, _DIM), -1.0) for name in names}


def predictor_of(found: dict[str, Tensor], storage: Any, **options: Any) -> Predictor:
    return Predictor(ModelTarget(found, dense=False), storage, **options)


def read(storage: Storage, tables: list[str] | None, names: Iterable[str]) -> tuple[int | None, dict[str, Tensor]]:
    """Return the version and the tables of a new predictor."""
    found = served(names)
    predictor = predictor_of(found, storage, tables=tables)
    predictor.sync()
    assert predictor.status().resyncs == 0
    return predictor.version, found


def is_as_published(found: tuple[int | None, dict[str, Tensor]], stream: Stream) -> bool:
    version, tables = found
    assert version is not None
    newest = stream.history[max(each for each in stream.history if each <= version)]  # it may be a claim
    return all(torch.equal(each, newest[name]) for name, each in tables.items())


def part_bytes(counted: WrappedStorage, call: Callable[[], object]) -> tuple[object, int]:
    """Return the result of a call, or its error, and the bytes of parts that it read."""
    found = [0]

    def count(operation: Operation, answer: Any) -> None:
        found[0] += 0 if answer is None else len(answer)

    rule = calls(on("read", "read_range", name="parts/"), after=count)
    counted.rules.append(rule)
    try:
        return call(), found[0]
    except DeltaTrackerError as error:
        return error, found[0]
    finally:
        counted.rules.remove(rule)


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture(params=[False, True], ids=["values", "states"])
def stream(request: pytest.FixtureRequest) -> Stream:
    torch.manual_seed(0)
    stream = Stream(Storage("memory://"), has_states=request.param)
    stream.write("snapshot")
    stream.write("delta", [["item", "user.id"], ["user.country"]])
    stream.write("delta", [["user.id"], ["user.country", "top.weight"]])
    return stream


@pytest.fixture
def partial(stream: Stream) -> Storage:
    """A mirror of the table ``item``."""
    destination = Storage("memory://")
    copy(Mirror(stream.storage, destination, tables="item"))
    return destination


@pytest.mark.parametrize("tables", [["item"], ["user.*"], ["top.weight"], ["*"]])
def test_a_mirror_has_the_log_and_the_parts_of_its_tables(stream: Stream, tables: list[str]) -> None:
    destination = WrappedStorage(Storage("memory://"))

    def check(entry: Operation) -> None:
        assert entry.name == _STATED or destination.inner.size(_STATED)

    destination.rules.append(calls(on("create"), before=check))
    copy(Mirror(stream.storage, destination, tables=tables))
    copied, source = everything(destination), everything(stream.storage)
    assert copied.pop(_STATED) == b'{"tables":["%s"]}' % tables[0].encode()
    parts = {
        part.name
        for version in (1, 2, 3)
        for part in StreamLog(stream.storage).read(version).parts
        for name in (*(block.table for block in part.blocks), *part.dense)
        if name == tables[0] or tables[0] == "*" or (tables[0] == "user.*" and name.startswith("user."))
    }
    log = {name for name in source if name.startswith("log/") and name != f"log/{0:020d}.json"}
    assert copied == {name: source[name] for name in log | parts}
    assert entries(destination) == [1, 2, 3]


def test_a_predictor_of_the_chosen_tables_reads_what_it_reads_at_the_source(stream: Stream, cli: Cli) -> None:
    counted, at_source = WrappedStorage(Storage("memory://")), WrappedStorage(stream.storage)
    mirror = Mirror(stream.storage, counted, tables=["item", "user.id"])
    for _ in range(2):
        copy(mirror)
        for tables in (["item"], ["user.id", "item"]):
            one, num_bytes = part_bytes(counted, lambda tables=tables: read(counted, tables, tables))
            two, num_bytes_there = part_bytes(at_source, lambda tables=tables: read(at_source, tables, tables))
            assert is_as_published(one, stream)
            assert is_as_published(two, stream)
            assert num_bytes == num_bytes_there > 0
        stream.write("delta")
        stream.claim = StreamLog(stream.storage).claim()
        stream.write("snapshot", [["user.country"], ["item"], ["top.weight", "user.id"]])


def test_merged_versions_and_new_tables_are_copied_by_the_choice(stream: Stream) -> None:
    destination = Storage("memory://")
    mirror = Mirror(stream.storage, destination, tables=["user.*"])
    copy(mirror)
    assert compact(stream.storage, fold=10.0) is not None
    copy(mirror)
    assert len(destination.names("merged")) == 1
    assert is_as_published(read(destination, ["user.*"], ["user.id", "user.country"]), stream)
    stream.tables["user.late"] = torch.randn(_ROWS, _DIM)
    stream.write("snapshot", [["user.late"], *_APART])
    copy(mirror)
    assert is_as_published(read(destination, ["user.*"], ["user.id", "user.country", "user.late"]), stream)


@pytest.mark.advice("LeftOutPartError: check_not_left_out")
@pytest.mark.parametrize("way", ["tables", "source"])
def test_a_reader_of_other_tables_is_refused(stream: Stream, partial: Storage, way: str) -> None:
    counted = WrappedStorage(partial)
    predictor = predictor_of(served(), counted)
    for number in range(3):
        error, num_bytes = part_bytes(counted, predictor.sync)
        assert isinstance(error, LeftOutPartError)
        assert error.path in stream.storage.names("parts")
        assert error.tables == ("item",)
        assert "begin again with tables=['item'] (--table)" in error.remedy
        assert number == 0 or num_bytes == 0, "once it is known, no part is read in vain"
    assert predictor.version is None
    assert predictor.status().resyncs == 0
    if way == "tables":
        assert is_as_published(read(partial, ["item"], ["item"]), stream)
    else:
        assert is_as_published(read(stream.storage, None, _ALL), stream)


def test_a_reader_goes_on_at_the_full_url(stream: Stream) -> None:
    destination, target = Storage("memory://"), served()
    mirror = Mirror(stream.storage, destination, tables="item")
    counted = WrappedStorage(destination)
    predictor = predictor_of(target, [counted, stream.storage])
    for number in range(4):
        copy(mirror)
        num_operations = len(counted.operations)
        predictor.sync()
        assert number == 0 or len(counted.operations) == num_operations, "it is not asked again for half a minute"
        assert is_as_published((predictor.version, target), stream)
        stream.write("delta", [["item"]])
        stream.write("delta", [["user.id"]])
    assert predictor.status().resyncs == 0
    copy(mirror)
    counted = WrappedStorage(stream.storage)
    other = predictor_of(served(["item"]), [destination, counted], tables="item")
    assert part_bytes(counted, other.sync) == (other.version, 0)


def test_a_reader_waits_at_a_full_url_that_lags(stream: Stream) -> None:
    destination, lagging, target = Storage("memory://"), Storage("memory://"), served()
    copy(Mirror(stream.storage, lagging))
    before = predictor_of(target, lagging)
    before.sync()
    stream.write("delta", [["user.id"]])
    copy(Mirror(stream.storage, destination, tables="item"))
    predictor = predictor_of(target, [destination, lagging])
    predictor.load_state_dict(before.state_dict())
    for _ in range(2):
        assert predictor.sync() == 3
    copy(Mirror(stream.storage, lagging))
    assert predictor.sync() == 4
    assert is_as_published((4, target), stream)


def test_a_new_reader_does_not_begin_with_an_older_snapshot(stream: Stream) -> None:
    destination = Storage("memory://")
    stream.write("snapshot", [[*_ALL, "top.weight"]])
    mirror = Mirror(stream.storage, destination, tables="item")
    copy(mirror)
    stream.write("snapshot")
    copy(mirror)
    predictor = predictor_of(served(), destination)
    with pytest.raises(LeftOutPartError):
        predictor.sync()
    assert predictor.version is None


def test_a_reader_at_a_version_keeps_its_rows(stream: Stream) -> None:
    destination, target = Storage("memory://"), served()
    predictor = predictor_of(target, stream.storage)
    predictor.sync()
    state = predictor.state_dict()
    mirror = Mirror(stream.storage, destination, tables="item")
    copy(mirror)
    other = predictor_of(target, destination)
    other.load_state_dict(state)
    stream.write("delta", [["item"]])
    copy(mirror)
    other.sync()
    assert is_as_published((other.version, target), stream), "no part of this version was left out"
    held = other.version, {name: each.clone() for name, each in target.items()}
    stream.write("delta", [["user.id"]])
    stream.write("snapshot")
    copy(mirror)
    for _ in range(3):
        with pytest.raises(LeftOutPartError):
            other.sync()
    assert other.version == held[0]
    assert all(torch.equal(each, held[1][name]) for name, each in target.items())
    assert other.status().resyncs == 0


def test_readers_over_http_and_through_a_host_cache_are_refused_at_once(stream: Stream, tmp_path: Path) -> None:
    destination = Storage("memory://")
    copy(Mirror(stream.storage, destination, tables="item"))
    with cache_server(destination) as cache:
        for options in ({}, {"cache": HostCache(tmp_path)}):
            with pytest.raises(LeftOutPartError):
                predictor_of(served(), Storage(cache.url), **options).sync()
        assert is_as_published(read(Storage(cache.url), ["item"], ["item"]), stream)


@pytest.mark.parametrize("copy_in_cache", [CacheServer.truncate, CacheServer.hold])
def test_a_cache_with_a_wrong_copy_of_the_choice_is_bypassed(
    stream: Stream, partial: Storage, copy_in_cache: Callable[[CacheServer, str], None]
) -> None:
    with cache_server(partial) as cache:
        copy_in_cache(cache, _STATED)
        with pytest.raises(LeftOutPartError):
            predictor_of(served(), cache.url).sync()
        copy(Mirror(Storage(cache.url), Storage("memory://"), tables="item"))


class _Job:
    def __init__(self) -> None:
        self.model = nn.Sequential(nn.EmbeddingBag(20, 4, sparse=True), nn.EmbeddingBag(20, 4, sparse=True))
        self.tracker = ModelDeltaTracker(self.model)
        optimizer = torch.optim.Adagrad(self.model.parameters(), lr=0.1)
        self.recovery = Recovery(training_state={"optimizer": optimizer})


@pytest.mark.parametrize("call", ["promote", "publish", "compact", "restore", "follow", "take_over", "claim"])
def test_nothing_continues_at_a_mirror_of_some_tables(call: str) -> None:
    job, source, destination = _Job(), Storage("memory://"), Storage("memory://")
    with Publisher(job.tracker, source, recovery=job.recovery) as publisher:
        publisher.snapshot()
        for _ in range(2):
            job.model[0](torch.tensor([[1, 2]])).sum().backward()
            job.tracker.step()
            publisher.publish()
    copy(Mirror(source, destination, tables="0"))
    before, other = everything(destination), _Job()

    def perform(storage: Storage) -> object:
        options: dict[str, Any] = {"tracker": other.tracker, "recovery": other.recovery}
        match call:
            case "promote":
                return promote(storage)
            case "publish":
                return Publisher(other.tracker, storage).close()
            case "compact":
                return compact(storage)
            case "restore":
                return restore(other.model, storage, **options)
            case "claim":
                return StreamLog(storage).claim()
            case _:
                standby = Standby(other.model, storage, look_seconds=0.0, **options)
                return standby.sync() if call == "follow" else standby.take_over(force=True)

    with pytest.raises(InvalidArgumentError, match=r"this is a mirror of \['0'\] only") as caught:
        perform(destination)
    assert caught.value.argument == "url"
    assert "Pass the url of its source, or a mirror of all tables" in caught.value.remedy
    assert everything(destination) == before
    whole = Storage("memory://")
    copy(Mirror(source, whole))
    perform(whole)


def test_a_standby_claims_nothing_if_it_serves_a_mirror_of_some_tables(stream: Stream, tmp_path: Path) -> None:
    source, serving, job = Storage("memory://"), Storage(tmp_path.as_uri()), _Job()
    with Publisher(job.tracker, source, recovery=job.recovery) as publisher:
        publisher.snapshot()
    copy(Mirror(stream.storage, serving, tables="item"))
    before, other = everything(source), _Job()
    options = {"tracker": other.tracker, "recovery": other.recovery, "serving": [serving]}
    with pytest.raises(InvalidArgumentError, match=r"this is a mirror of \['item'\] only"):
        Standby(other.model, source, look_seconds=0.0, **options).take_over(force=True)
    assert everything(source) == before


def test_a_rollback_belongs_to_the_source(stream: Stream, partial: Storage) -> None:
    with pytest.raises(LeftOutPartError):
        pin_version(partial, 2)
    pin_version(stream.storage, 2)
    copy(Mirror(stream.storage, partial, tables="item"))
    target = served(["item"])
    predictor = predictor_of(target, partial, tables="item", rollout=Rollout(follows_pins=True))
    predictor.sync()
    assert predictor.version == 2
    assert is_as_published((2, target), stream)


@pytest.mark.advice("InvalidArgumentError: check_mirrored")
def test_a_destination_keeps_its_choice(stream: Stream, partial: Storage) -> None:
    before = everything(partial)
    for tables in (["user.id"], ["item", "user.id"], None):
        with pytest.raises(InvalidArgumentError, match="tables=") as caught:
            copy(Mirror(stream.storage, partial, tables=tables))
        assert "Pass tables=['item'], with which memory:// began, or an empty destination" in caught.value.remedy
        copy(Mirror(stream.storage, Storage("memory://"), tables=tables))
    whole = Storage("memory://")
    copy(Mirror(stream.storage, whole))
    with pytest.raises(InvalidArgumentError, match=r"Pass tables=None if"):
        copy(Mirror(stream.storage, whole, tables="item"))
    assert _STATED not in everything(whole)
    assert everything(partial) == before
    stream.write("delta")
    copy(Mirror(stream.storage, partial, tables=["item", "item"]))
    assert entries(partial) == [1, 2, 3, 4]
    partial.delete("log/tables.json")
    with pytest.raises(InvalidArgumentError) as caught:
        copy(Mirror(stream.storage, partial, tables=["item"]))
    assert "or else an empty destination" in caught.value.remedy


def test_of_two_mirrors_that_begin_at_once_one_is_refused(stream: Stream) -> None:
    destination = WrappedStorage(Storage("memory://"))
    begun = threading.Event()

    def begin(_: object) -> None:
        if not begun.is_set():
            begun.set()
            Mirror(stream.storage, destination.inner, tables="user.id").step()

    destination.rules.append(calls(on("create", name=_STATED), before=begin))
    with pytest.raises(InvalidArgumentError, match=r"tables=\['item'\]"):
        Mirror(stream.storage, destination, tables="item").step()
    copy(Mirror(stream.storage, destination, tables="user.id"))
    assert is_as_published(read(destination, ["user.id"], ["user.id"]), stream)


def test_a_name_that_the_first_snapshot_lacks_is_refused(stream: Stream) -> None:
    destination = Storage("memory://")
    with pytest.raises(MissingTableError, match="items"):
        Mirror(stream.storage, destination, tables=["item", "items"]).step()
    assert not everything(destination)
    with pytest.raises(InvalidArgumentError):
        Mirror(stream.storage, destination, tables=[])


def test_a_mirror_of_a_mirror_copies_no_more_than_that_has(stream: Stream, partial: Storage) -> None:
    for tables in (None, ["user.id"]):
        destination = Storage("memory://")
        with pytest.raises(LeftOutPartError, match=r"mirror of the tables \['item'\]"):
            copy(Mirror(partial, destination, tables=tables))
        assert not entries(destination)
    destination = Storage("memory://")
    copy(Mirror(partial, destination, tables=["ite*"]))
    assert is_as_published(read(destination, ["item"], ["item"]), stream)
    for _ in range(3):
        stream.claim = StreamLog(stream.storage).claim()
    copy(Mirror(stream.storage, partial, tables="item"))
    copy(Mirror(partial, destination, tables=["ite*"]))
    with pytest.raises(LeftOutPartError):  # although a claim follows
        copy(Mirror(partial, Storage("memory://")))
    assert entries(destination) == entries(stream.storage)[1:]


def test_verify_checks_what_is_there(tmp_path: Path, cli: Cli) -> None:
    torch.manual_seed(0)
    stream = Stream(Storage((tmp_path / "source").as_uri(), create=True), has_states=True)
    stream.write("snapshot")
    stream.write("delta")
    stream.write("delta", [["item", "user.id"]])
    url = (tmp_path / "copy").as_uri()
    cli("mirror", stream.storage.url, url, "--once", "--table", "item", "--table", "top.*")
    compact(stream.storage, fold=10.0)
    cli("mirror", stream.storage.url, url, "--once", "--table", "item", "--table", "top.*")
    for quick in ([], ["--quick"]):
        found = cli.json("verify", url, *quick)
        assert (found["findings"], found["entries"], found["merged"], found["parts"]) == ([], 3, 1, 6)
        assert found["mirrored_tables"] == ["item", "top.*"]
    assert cli.json("inspect", url)["mirrored_tables"] == ["item", "top.*"]
    assert "mirror of" in cli("inspect", url)
    assert cli.json("inspect", stream.storage.url)["mirrored_tables"] == []
    stream.write("delta", [["user.id"]])
    said = cli("mirror", stream.storage.url, url, "--once", "--table", "item", "--table", "top.*")
    assert "a delta without rows of the chosen tables" in said
    cli("mirror", stream.storage.url, url, "--once", "--table", "item", code=2)
    assert "Pass tables=['item', 'top.*'], with which" in cli.err
    cli("mirror", stream.storage.url, url, "--promote", "--force", code=2)
    assert "this is a mirror of ['item', 'top.*'] only" in cli.err
    cli("mirror", stream.storage.url, url, "--promote", "--table", "item", code=2)
    for _ in range(2):
        stream.write("delta")
    cli("mirror", stream.storage.url, url, "--once", "--table", "item", "--table", "top.*")
    cli("compact", url, code=2)
    assert "this is a mirror of" in cli.err
    cli("diff", url, "1", "2", "--table", "user.id", code=2)
    assert "was left out" in cli.err
    cli("report", url, "--out", str(tmp_path / "report.html"), code=1)  # it names old heartbeats
    assert "left out" not in (tmp_path / "report.html").read_text()
    part = next(each for each in Storage(url).names("parts"))
    (tmp_path / "copy" / part).unlink()
    assert [each["where"] for each in cli.json("verify", url, code=1)["findings"]] == [part]


def test_verify_checks_the_raw_ids_of_the_chosen_tables(tmp_path: Path, cli: Cli) -> None:
    stream = Stream(Storage((tmp_path / "source").as_uri(), create=True), has_states=True)
    stream.owners["user.id"] = torch.arange(_ROWS)
    stream.write("snapshot", [["item", "user.id"], ["user.country"]])
    stream.owners["user.id"][7] = NO_OWNER
    stream.write("delta", [["user.id"]], [7])
    stream.owners["user.id"][8] = 7
    stream.write("delta", [["item", "user.id"]], [8])
    for tables in (["item"], ["user.*"]):
        url = (tmp_path / tables[0][:4]).as_uri()
        cli("mirror", stream.storage.url, url, "--once", "--table", tables[0])
        assert cli.json("verify", url)["findings"] == []


def test_a_part_that_is_lost_was_not_left_out(stream: Stream, partial: Storage) -> None:
    for name in partial.names("parts"):
        partial.delete(name)
    with pytest.raises(CorruptPartError, match="does not exist"):
        read(partial, ["item"], ["item"])
    with pytest.raises(CorruptPartError):
        copy(Mirror(partial, Storage("memory://"), tables="item"))


@pytest.mark.advice("MalformedError: mirrored_tables")
def test_a_malformed_choice_is_reported_and_copied_back(stream: Stream, partial: Storage) -> None:
    stated = everything(partial)[_STATED]
    for data in (b"", b"[]", b'{"tables":[]}', b'{"tables":[1]}', b'{"tables":""}'):
        partial.replace(_STATED, data)
        for call in (lambda: promote(partial), lambda: Mirror(stream.storage, partial, tables="item").step()):
            with pytest.raises(MalformedError, match="Mirror to an empty destination"):
                call()
    partial.replace(_STATED, stated)
    assert not Mirror(stream.storage, partial, tables="item").step()


def test_retention_deletes_what_no_reader_needs(stream: Stream) -> None:
    destination = Storage("memory://")
    retention = Retention(versions=1, grace_seconds=0.0)
    mirror = Mirror(stream.storage, destination, tables="item", retention=retention)
    copy(mirror)
    for _ in range(3):
        stream.write("delta")
        stream.write("snapshot")
    copy(mirror)
    assert entries(destination) == entries(stream.storage)[-2:], "the newest snapshot, and the entry before it"
    assert len(destination.names("parts")) == 2
    assert is_as_published(read(destination, ["item"], ["item"]), stream)
    for _ in range(2):
        stream.write("delta", [["user.id"]])
    assert compact(stream.storage, fold=0.01) is not None
    copy(mirror)
    retain(destination, retention)
    assert entries(destination) == entries(stream.storage)[-2:], "readers start at the merged snapshot"
    assert len(destination.names("parts")) == 1
    assert is_as_published(read(destination, ["item"], ["item"]), stream)
