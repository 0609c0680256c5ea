"""Resync after faults: correct rows or a typed error, and correct rows after the next snapshot."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from delta_tracker import ModelTarget, Predictor
from delta_tracker.errors import (
    InvalidArgumentError,
    MissingVersionError,
    PartialRowsError,
    StorageError,
    StreamError,
)
from delta_tracker.row_target import TensorTarget
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, Link, Merged, entry_name
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.serving import Follower, a_history, assert_holds, empty_model, eventually, read
from tests.predictor.waits import shorten_waits
from tests.stores.rules import nth
from tests.stores.wrapped import WrappedStorage
from tests.stream.histories import History
from tests.stream.streams import FQN, Writer, a_second_later


def _gap(root: Path, history: History) -> str:
    (root / entry_name(3)).unlink()
    return "MissingVersionError: version 3 is missing, and the newest version is 6"


def _of_part(damage: Callable[[Path], object], reason: str) -> Callable[[Path, History], str]:
    def fault(root: Path, history: History) -> str:
        name = history.log.read(3).parts[0].name
        damage(root / name)
        return f"CorruptPartError: part {name} is corrupt: {reason}"

    return fault


def _malformed(root: Path, history: History) -> str:
    (root / entry_name(3)).write_text("{}")
    return f"MalformedError: {entry_name(3)} is malformed"


def _duplicate(root: Path, history: History) -> str:
    shutil.copy(root / entry_name(2), root / entry_name(3))
    return f"MalformedError: {entry_name(3)} is malformed: it is the entry of version 2"


def _stale(root: Path, history: History) -> str:
    stale = replace(history.log.read(3), parent=Link(2, "0" * 32))
    (root / entry_name(3)).write_bytes(stale.to_json())
    return f"StreamReplacedError: the stream {history.storage.url} is not the one of which version 2 was applied"


def _stale_behind_malformed(root: Path, history: History) -> str:
    (root / entry_name(2)).write_text("{}")
    return _stale(root, history)


def _retention(root: Path, history: History) -> str:
    retain(history.storage, Retention(versions=1, grace_seconds=0.0))
    return "MissingVersionError: version 3 is missing, and the newest version is 6"


def _replaced(root: Path, history: History) -> str:
    for name in ("log", "parts"):
        shutil.rmtree(root / name)
    other = History(history.storage, 99)
    history.states.update(other.states)
    history.held = other.held
    return f"StreamReplacedError: the stream {history.storage.url} is not the one of which version 2 was applied"


_FAULTS = {
    "gap": _gap,
    "no part": _of_part(Path.unlink, "it does not exist"),
    "short part": _of_part(lambda path: path.write_bytes(path.read_bytes()[:-1]), "it has"),
    "long part": _of_part(lambda path: path.write_bytes(path.read_bytes() + b"x"), "it has"),
    "flipped part": _of_part(lambda path: path.write_bytes(path.read_bytes()[:-1] + b"\x80"), "its xxh3 is not"),
    "malformed entry": _malformed,
    "duplicate entry": _duplicate,
    "stale entry": _stale,
    "stale entry behind a malformed one": _stale_behind_malformed,
    "retention": _retention,
    "replaced": _replaced,
}


@pytest.mark.parametrize("is_following", [False, True])
@pytest.mark.parametrize("fault", _FAULTS)
def test_each_fault_is_overcome_and_named_in_the_log(
    tmp_path: Path, fault: str, is_following: bool, caplog, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten_waits(monkeypatch, gap_check_seconds=0.01)
    history = History(Storage(f"file://{tmp_path}", create=True, fsync=False), 1)
    history.delta(2)
    model = empty_model()
    predictor = Predictor(model, history.storage)
    assert predictor.sync() == 2
    for kind in ("delta", "delta", "snapshot", "delta"):
        getattr(history, kind)()
    said = _FAULTS[fault](tmp_path, history)
    if is_following:
        predictor.follow(poll_seconds=0.001)
        eventually(lambda: predictor.version == history.version and predictor.status().resyncs == 1)
        predictor.stop()
    else:
        predictor.sync()
    assert predictor.version == history.version
    assert_holds(model, history, history.version)
    status = predictor.status()
    assert (status.resyncs, status.error, status.lag_versions, status.lag_seconds) == (1, None, 0, 0.0)
    first = 1 if fault == "replaced" else 5
    assert status.last_resync.startswith(f"version 2 to {first}: {said}")
    (record,) = [each for each in caplog.records if "resync" in each.message]
    assert record.message.startswith(
        f"resync of {history.storage.url} from version 2 to {first}: {said.split(': ', 1)[1]}"
    )


def test_a_merged_version_skips_a_fault(caplog) -> None:
    history = History(Storage("memory://"), 2)
    model = empty_model()
    predictor = Predictor(model, history.storage)
    predictor.sync()
    for _ in range(4):
        history.delta()
    assert compact(history.storage, fold=1e9).kind == "delta"
    last = history.delta()
    assert last is None
    history.storage.delete(entry_name(3))
    assert predictor.sync() == history.version == 6
    assert_holds(model, history, 6)
    assert predictor.status().last_resync.startswith("version 2 to 5: MissingVersionError")
    assert (predictor.manifest.kind, predictor.manifest.version) == ("delta", 6)


def test_a_gap_stays_an_error_until_it_is_repaired(monkeypatch: pytest.MonkeyPatch, caplog) -> None:
    """No version skips the gap. A listing is expensive, so polling alone does not detect it."""
    shorten_waits(monkeypatch, gap_check_seconds=0.05, back_off_seconds=0.002)
    history = History(Storage("memory://"), 3)
    follower = Follower(history)
    follower.sync()
    history.delta()
    history.delta()
    entry = read(history.storage, entry_name(2))
    history.storage.delete(entry_name(2))
    follower.predictor.follow(poll_seconds=0.001)
    eventually(lambda: follower.predictor.error is not None)
    before = follower.storage.count()
    eventually(lambda: follower.storage.count() > before + 100)
    assert isinstance(follower.predictor.error, MissingVersionError)
    assert "recovered at version" not in caplog.text
    history.storage.put(entry_name(2), [memoryview(entry)])
    eventually(lambda: follower.predictor.version == 3 and follower.predictor.error is None)
    follower.predictor.stop()
    follower.check()
    assert caplog.text.count("failed and retries") == caplog.text.count("recovered at version") == 1


def test_a_store_that_fails_at_each_operation_in_turn() -> None:
    history = a_history(5, 4)
    for number in range(1, 200):
        follower = Follower(history)
        follower.cut_off(nth(number))
        error = follower.sync()
        if error is None:
            break
        assert isinstance(error, StorageError)
        assert follower.sync() is None
        assert follower.predictor.version == history.version
    assert number > 5


def test_a_temporary_store_failure_is_logged_once(caplog) -> None:
    history = a_history(6, 2)
    follower = Follower(history)
    predictor = follower.predictor
    predictor.follow(poll_seconds=0.0005)
    eventually(lambda: predictor.version == history.version)
    follower.cut_off()
    eventually(lambda: isinstance(predictor.error, StorageError))
    begin = follower.storage.count()
    history.delta()
    eventually(lambda: follower.storage.count() > begin + 5)
    status = predictor.status()
    assert (status.lag_versions, status.lag_seconds) == (None, None)
    assert "503 service unavailable" in status.error
    follower.check()
    follower.connect()
    eventually(lambda: predictor.version == history.version and predictor.error is None)
    predictor.stop()
    follower.check()
    assert caplog.text.count("failed and retries: the store memory:// cannot be used: 503") == 1
    assert caplog.text.count("recovered at version") == 1


def test_tables_may_be_newer_than_the_saved_position() -> None:
    """The stream position is written after the rows, so a process that dies in between leaves an old one."""
    history = a_history(7, 0)
    for _ in range(6):
        history.delta()
    states = []
    follower = Follower(history)
    for _ in range(7):
        follower.predictor.sync(limit=1)
        states.append(follower.predictor.state_dict())
    assert [state["version"] for state in states] == list(range(1, 8))
    for state in states:
        model = {name: tensor.clone() for name, tensor in follower.model.items()}
        predictor = Predictor(model, history.storage)
        predictor.load_state_dict(state)
        assert predictor.version == state["version"]
        assert predictor.sync() == history.version
        assert_holds(model, history, history.version)
        assert predictor.status().resyncs == 0


@pytest.mark.parametrize(
    "change", [{"version": "1"}, {"version": True}, {"version": None}, {"stream": 1}, {"stream": ""}, {"xxh3": None},
               {"generation": -1}, {"created": None}, {"pin": -1}, {"pin": 1, "release": 2}, {"more": 1}],
)  # fmt: skip
def test_an_invalid_state_is_refused(change: dict) -> None:
    history = a_history(8, 2)
    follower = Follower(history)
    follower.sync()
    states = follower.predictor.state_dict() | change, {"version": 1}, {"pin": 1}, [1]
    for state in states:
        with pytest.raises(InvalidArgumentError, match="state_dict"):
            follower.predictor.load_state_dict(state)
    with follower.predictor.reading(), pytest.raises(InvalidArgumentError, match="reading"):
        follower.predictor.load_state_dict({})
    assert follower.predictor.version == history.version
    follower.predictor.load_state_dict({})
    assert follower.predictor.version is follower.predictor.manifest is None
    assert follower.sync() is None
    assert follower.predictor.version == history.version


def test_a_state_of_another_stream_leads_to_its_snapshot(caplog) -> None:
    follower = Follower(a_history(10, 3))
    follower.sync()
    with a_second_later():
        history = a_history(9, 3)
    moved = Follower(history, follower.predictor.state_dict(), follower.model)
    moved.is_lost = True
    assert moved.sync() is None
    assert moved.predictor.version == history.version
    assert "StreamReplacedError" in moved.predictor.status().last_resync


def test_a_delta_in_place_of_a_snapshot_is_no_start() -> None:
    """The other entries name this entry as their snapshot, but it is a delta."""
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    writer.delta([1])
    entry = StreamLog(writer.storage).read(1)
    planted = replace(entry, kind="delta", snapshot=None, parts=(), tables={})
    writer.storage.delete(entry_name(1))
    writer.storage.create(entry_name(1), planted.to_json())
    predictor = Predictor(writer.model(), writer.storage)
    with pytest.raises(StreamError):
        predictor.sync()
    assert predictor.version is None


def test_a_merged_version_of_another_stream_is_not_applied() -> None:
    history, other = (History(Storage("memory://"), seed) for seed in (13, 14))
    follower = Follower(history)
    follower.sync()
    for each in (history, other):
        for _ in range(4):
            each.delta(3)
    merged = Merged.of(compact(other.storage, fold=1e9))
    for name in (merged.name, *(part.name for part in other.log.read_merged(merged).parts)):
        history.storage.put(name, [memoryview(read(other.storage, name))])
    history.storage.delete(entry_name(3))
    assert isinstance(follower.sync(), MissingVersionError)
    assert follower.predictor.version == 2
    assert follower.predictor.status().resyncs == 0


@pytest.mark.parametrize("fold", [1e9, 1e-9])
def test_a_damaged_merged_version_delays_no_reader(fold: float) -> None:
    history = History(Storage("memory://"), 15)
    follower = Follower(history)
    follower.sync()
    for _ in range(3):
        history.delta(3)
    merged = Merged.of(compact(history.storage, fold=fold))
    history.storage.put(merged.name, [memoryview(b"{}")])
    history.storage.delete(entry_name(2))
    if fold > 1:
        history.snapshot()
        assert follower.sync() is None
    newcomer = Follower(history)
    if fold < 1:
        assert isinstance(newcomer.sync(), MissingVersionError)
        assert newcomer.predictor.version == 1
    else:
        assert newcomer.sync() is None
        assert newcomer.predictor.version == follower.predictor.version == history.version


class _Whole(TensorTarget):
    needs_whole_rows = True


def test_a_version_without_written_rows_is_not_in_progress() -> None:
    writer = Writer(Storage("memory://"))
    writer.snapshot()
    table = torch.zeros(20, 4)
    predictor = Predictor({FQN: _Whole.of(table)}, writer.storage)
    good = predictor.sync()
    block = Block(FQN, (0, 20), (0, 2), 1, "list", Encoding.F32)
    writer.table[5, :2] = 7.0
    writer.write("delta", [BlockRows.of(block, torch.tensor([5]), torch.full((1, 2), 7.0))])
    with pytest.raises(PartialRowsError):
        predictor.sync()
    with predictor.reading() as served:
        assert served == (good, None)
    assert predictor.state_dict()["version"] == good
    last = writer.snapshot()
    assert predictor.sync() == last.version
    assert torch.equal(table, writer.table)


def test_names_map_tables_and_dense_tensors() -> None:
    writer = Writer(Storage("memory://"))
    writer.dense["w"] = torch.arange(3.0)
    writer.table.normal_()
    writer.snapshot()
    model = {"mine": torch.zeros(20, 4), "w": torch.zeros(3), "bias": torch.zeros(3)}
    predictor = Predictor(ModelTarget(model, names={FQN: "mine", "w": "bias"}), writer.storage)
    predictor.sync()
    assert torch.equal(model["mine"], writer.table)
    assert torch.equal(model["bias"], writer.dense["w"])
    assert not model["w"].any()
    for names in ({FQN: "nothing"}, {FQN: "mine", "other": "mine"}):
        with pytest.raises(InvalidArgumentError, match="names="):
            Predictor(ModelTarget(model, names=names), writer.storage).sync()


def test_a_resync_at_the_only_url_does_not_read_the_applied_entry() -> None:
    """Another url could show that the log is another copy of the stream."""
    writer = Writer(WrappedStorage(Storage("memory://")))
    writer.snapshot()
    held = writer.delta([1]).version
    predictor = Predictor(writer.model(), writer.storage)
    predictor.sync()
    writer.storage.delete(writer.delta([2]).parts[0].name)
    newest = writer.snapshot().version
    writer.storage.take()
    assert predictor.sync() == newest
    assert entry_name(held) not in [each.name for each in writer.storage.take()]
