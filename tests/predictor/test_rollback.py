"""Rollback: restores the exact earlier tables, holds them until released, and handles faults in between."""

from __future__ import annotations

import random
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from delta_tracker import ModelTarget, Predictor, Rollout, RowTarget
from delta_tracker.errors import (
    CorruptPartError,
    InvalidArgumentError,
    MissingVersionError,
    NoSnapshotError,
    StorageError,
    StreamReplacedError,
)
from delta_tracker.stream.format.manifest import Merged, entry_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.maintenance.retention import Retention, retain
from delta_tracker.stream.pinning import pin_version
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.breaking import Breaking
from tests.predictor.serving import assert_holds, empty_model, eventually
from tests.stores.rules import after, fails
from tests.stores.wrapped import WrappedStorage
from tests.stream.histories import Clock, History, clocked
from tests.stream.streams import FQN, Writer


@pytest.fixture
def clock() -> Iterator[Clock]:
    clock = Clock()
    with clock.of_the_log():
        yield clock


def grow(history: History, chance: random.Random, num_versions: int) -> None:
    for _ in range(num_versions):
        kind = chance.choice(["delta"] * 5 + ["claim", "snapshot", "fuzzy"])
        if kind == "claim":
            history.claim()
            history.delta()  # a publisher may continue from the last one's head
            history.snapshot()
        elif kind == "fuzzy":
            history.snapshot(is_fuzzy=True)
        else:
            getattr(history, kind)()


def followed(history: History) -> tuple[Predictor, dict[str, torch.Tensor]]:
    """Return a predictor that applied every version, starting at the first snapshot."""
    model = empty_model()
    predictor = Predictor(model, history.storage)
    first = history.log.read(1)
    predictor._reader.writer.apply(first, history.storage, is_elsewhere=False)
    while predictor.version != history.version:
        version = predictor.sync(limit=1)
        assert_holds(model, history, version)
    return predictor, model


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("is_compacted", [False, True])
def test_rollback_to_every_version_and_forward(clock: Clock, seed: int, is_compacted: bool) -> None:
    history = History(clocked(clock), seed)
    history.fqns = ["a", "b", "c"]
    history.snapshot()
    chance = random.Random(seed)
    grow(history, chance, 12)
    if is_compacted:
        compact(history.storage, fold=1e9)
        grow(history, chance, 3)
        compact(history.storage, fold=1e-9)
        grow(history, chance, 2)
    predictor, model = followed(history)
    versions = list(range(1, history.version + 1))
    chance.shuffle(versions)
    for version in versions:
        predictor.rollback(version)
        assert_holds(model, history, version)
        assert predictor.version == predictor.sync() == version
        status = predictor.status()
        assert (status.pinned, status.lag_versions) == (version, history.version - version)
        assert_holds(model, history, version)
        if chance.random() < 0.5:
            predictor.release()
            assert predictor.status().pinned is None
            assert predictor.sync() == history.version
            assert_holds(model, history, history.version)


def test_it_stays_there_while_following_until_it_is_released(clock: Clock, caplog) -> None:
    history = History(clocked(clock), 1)
    for _ in range(3):
        history.delta()
    predictor, model = followed(history)
    predictor.follow(poll_seconds=0.001)
    predictor.rollback(2)
    assert "rolled back to version 2 of memory://" in caplog.text
    looks = []
    advance = predictor._reader.advance
    predictor._reader.advance = lambda **given: looks.append(advance(**given)) or looks[-1]
    history.snapshot()
    eventually(lambda: len(looks) > 20)
    assert not any(looks)
    assert_holds(model, history, 2)
    predictor.release()
    eventually(lambda: predictor.version == history.version)
    predictor.stop()
    assert_holds(model, history, history.version)
    assert predictor.status().resyncs == 0


def test_a_version_that_the_stream_lacks_changes_nothing(clock: Clock) -> None:
    history = History(clocked(clock), 2)
    for kind in ("delta", "snapshot", "delta", "delta"):
        clock.seconds += 10
        getattr(history, kind)()
    predictor, model = followed(history)
    for version in (6, -1, 1 << 62):
        with pytest.raises(InvalidArgumentError, match="versions up to 5"):
            predictor.rollback(version)
    with pytest.raises(NoSnapshotError, match=r"version 0 of .* precedes the first snapshot"):
        predictor.rollback(0)  # the claim, before any row
    retain(history.storage, Retention(versions=1, grace_seconds=0.0), clock)
    for version in (1, 2):
        with pytest.raises(MissingVersionError, match=f"version {version} is missing"):
            predictor.rollback(version)
    with predictor.reading(), pytest.raises(InvalidArgumentError, match="reading"):
        predictor.rollback(4)
    assert_holds(model, history, 5)
    status = predictor.status()
    assert (status.version, status.pinned, status.error) == (5, None, None)
    predictor.rollback(4)
    assert_holds(model, history, 4)


def test_rollback_over_merged_versions(clock: Clock) -> None:
    """The versions in the middle were removed; a merged version replaces them."""
    history = History(clocked(clock), 3)
    for _ in range(4):
        history.delta()
    predictor, model = followed(history)
    assert compact(history.storage, fold=1e9).version == 5
    history.delta()
    for version in (3, 4, 5):
        history.storage.delete(entry_name(version))
    predictor.rollback(5)
    assert_holds(model, history, 5)
    with pytest.raises(MissingVersionError):
        predictor.rollback(4)
    assert predictor.version == 5


@pytest.mark.parametrize("kept", ["entry", "parts", "damaged"])
def test_a_merged_snapshot_replaces_the_versions_before_it(clock: Clock, kept: str) -> None:
    """Retention keeps the entry before a claim, without its parts and without the entries before it."""
    history = History(clocked(clock), 3)
    for _ in range(3):
        history.delta()
    last = history.log.read(history.version)
    merged = compact(history.storage, fold=1e-9)
    assert (merged.kind, merged.version) == ("snapshot", last.version)
    history.claim()
    history.delta()
    predictor, model = followed(history)
    if kept == "damaged":  # the versions that it replaces are there
        history.storage.delete(Merged.of(merged).name)
        history.storage.create(Merged.of(merged).name, b"{}")
    else:
        for version in range(2, last.version):
            history.storage.delete(entry_name(version))
        for part in last.parts if kept == "entry" else ():
            history.storage.delete(part.name)
    for version in range(last.version, history.version + 1):
        predictor.rollback(version)
        assert_holds(model, history, version)


def test_a_damaged_version_on_the_way_changes_nothing(tmp_path: Path) -> None:
    history = History(Storage(f"file://{tmp_path}", create=True, fsync=False), 4)
    for _ in range(4):
        history.delta(3)
    predictor, model = followed(history)
    part = tmp_path / history.log.read(4).parts[0].name
    content = part.read_bytes()
    part.write_bytes(content[:-1])
    with pytest.raises(CorruptPartError):
        predictor.rollback(4)
    assert_holds(model, history, 5)
    assert predictor.version == predictor.sync() == 5
    assert predictor.status().pinned is None
    part.write_bytes(content)
    predictor.rollback(4)
    assert_holds(model, history, 4)


def test_an_entry_of_another_history_is_not_on_the_way() -> None:
    history = History(Storage("memory://"), 5)
    for _ in range(4):
        history.delta(3)
    predictor, model = followed(history)
    stale = replace(history.log.read(3), created=1.0)
    history.storage.delete(entry_name(3))
    history.storage.create(entry_name(3), stale.to_json())
    for version in (4, 5):
        with pytest.raises(MissingVersionError, match="version 3 is missing"):
            predictor.rollback(version)
    assert_holds(model, history, 5)


def test_another_stream_has_no_earlier_versions_of_this_one(tmp_path: Path) -> None:
    history = History(Storage(f"file://{tmp_path}/stream", create=True, fsync=False), 6)
    history.delta()
    predictor, model = followed(history)
    (tmp_path / "stream").rename(tmp_path / "old")
    other = History(Storage(f"file://{tmp_path}/stream", create=True, fsync=False), 7)
    other.delta()
    with pytest.raises(StreamReplacedError):
        predictor.rollback(1)
    assert_holds(model, history, 2)
    assert predictor.sync() == 2
    predictor.rollback(1)
    assert_holds(model, other, 1)


@pytest.mark.parametrize("was_pinned", [False, True])
def test_a_rollback_whose_store_fails_is_finished_or_was_not_begun(was_pinned: bool) -> None:
    """Make each operation of the store fail in turn."""
    storage = WrappedStorage(Storage("memory://"))
    history = History(storage, 8)
    for kind in ("delta", "delta", "delta", "snapshot", "delta"):
        getattr(history, kind)()
    num_begun = 0
    for number in range(1, 100):
        predictor, model = followed(history)
        if was_pinned:
            predictor.rollback(5)
        before = predictor.version
        with storage.under(fails(after(number - 1))):
            try:
                predictor.rollback(3)
            except StorageError:
                pass
            else:
                break
        is_begun = predictor.status().pinned == 3
        num_begun += is_begun
        assert predictor.sync() == (3 if is_begun else before)
        assert_holds(model, history, predictor.version)
        predictor.release()
        assert predictor.sync() == history.version
        assert_holds(model, history, history.version)
    assert number > 8
    assert num_begun >= 3
    assert_holds(model, history, 3)


@pytest.mark.parametrize("release", [False, True])
def test_rows_that_were_left_between_versions_are_repaired(release: bool) -> None:
    """Tables with rows of a newer and an older version can recover via a whole snapshot only, not via a delta."""
    history = History(Storage("memory://"), 9)
    for kind in ("delta", "delta", "snapshot", "delta"):
        getattr(history, kind)()
    num_failed = 0
    for number in range(100):
        model = empty_model()
        tables = {name: Breaking.of(tensor) for name, tensor in model.items() if tensor.dim() == 2}
        held = model | tables
        predictor = Predictor(ModelTarget({name: held[name] for name in model}, chunk_rows=2), history.storage)
        predictor.sync()
        tables["a"].left = number
        try:
            predictor.rollback(3)
        except RuntimeError:
            num_failed += 1
        else:
            break
        with predictor.reading() as served:
            assert served.applying in (1, 2, 3)
        if served.applying == 1:
            assert predictor.state_dict() == {}, "nothing to go on from"
        if release:
            predictor.release()
        assert predictor.sync() == (history.version if release else 3)
        assert_holds(model, history, predictor.version)
        with predictor.reading() as served:
            assert served == (predictor.version, None)
    assert num_failed > 5


def test_a_release_while_a_rollback_is_completed_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    history = History(Storage("memory://"), 9)
    for kind in ("delta", "delta", "snapshot", "delta"):
        getattr(history, kind)()
    model = empty_model()
    tables = {name: Breaking.of(tensor) for name, tensor in model.items() if tensor.dim() == 2}
    held = model | tables
    predictor = Predictor(ModelTarget({name: held[name] for name in model}, chunk_rows=2), history.storage)
    predictor.sync()
    tables["a"].left = 1
    with pytest.raises(RuntimeError, match="device lost"):
        predictor.rollback(3)
    assert predictor.status().pinned == 3
    check_path = predictor._reader.writer.check_path

    def releasing(*given: Any) -> Any:
        predictor.release()  # as another thread may do while the versions are read
        return check_path(*given)

    monkeypatch.setattr(predictor._reader.writer, "check_path", releasing)
    assert predictor.sync() == history.version
    assert_holds(model, history, history.version)


def test_a_replaced_stream_that_comes_back_is_not_followed_on_from_rows_of_both(tmp_path: Path) -> None:
    """A mount shows another directory for a while, and a write fails during that time."""
    url = f"file://{tmp_path}/stream"
    history = History(Storage(url, create=True, fsync=False), 10)
    history.delta()
    (tmp_path / "stream").rename(tmp_path / "mine")
    # the same stream before its last versions
    shutil.copytree(tmp_path / "mine", tmp_path / "old")
    (tmp_path / "old" / entry_name(2)).unlink()
    (tmp_path / "mine").rename(tmp_path / "stream")
    for _ in range(3):
        history.delta()
    model = empty_model()
    tables = {name: Breaking.of(tensor) for name, tensor in model.items() if tensor.dim() == 2}
    held = model | tables
    predictor = Predictor(ModelTarget({name: held[name] for name in model}, chunk_rows=2), url)
    predictor.sync()
    (tmp_path / "stream").rename(tmp_path / "mine")
    (tmp_path / "old").rename(tmp_path / "stream")
    History(Storage(url), 11)  # another publisher continues the older copy
    tables["a"].left = 3
    with pytest.raises(RuntimeError, match="device lost"):
        predictor.sync()
    assert predictor.state_dict() == {}
    (tmp_path / "stream").rename(tmp_path / "old")
    (tmp_path / "mine").rename(tmp_path / "stream")
    history.delta(1)
    assert predictor.sync() == history.version
    assert_holds(model, history, history.version)


@pytest.mark.timeout(60)
def test_snapshots_that_lead_to_each_other_are_not_followed_for_ever() -> None:
    """Entries of another stream are mixed with those of this one, so each of its snapshots leads to a fault."""
    history, other = (History(Storage("memory://"), seed) for seed in (11, 12))
    for each in (history, other):
        for kind in ("delta", "delta", "delta", "snapshot", "delta"):
            getattr(each, kind)()
    for version in (3, 6):
        data = other.storage.read(entry_name(version), max_bytes=1 << 20).tobytes()
        history.storage.delete(entry_name(version))
        history.storage.create(entry_name(version), data)
    model = empty_model()
    predictor = Predictor(model, history.storage)
    with pytest.raises(StreamReplacedError):
        predictor.sync()
    assert_holds(model, history, predictor.version)


class _Failing(RowTarget):
    """Table of which writes fail on request, after the first row."""

    num_rows, dim, dtype, rows, columns = 20, 4, torch.float32, (0, 20), ((0, 4),)

    def __init__(self) -> None:
        self.held = torch.zeros(20, 4)
        self.fails = False

    def write(self, ids: torch.Tensor | slice, values: torch.Tensor, columns: tuple[int, int]) -> None:
        if self.fails:
            self.held[ids][:1] = values[:1]
            raise OSError("out of order")
        self.held[ids] = values


def test_a_lookup_sees_the_version_that_a_failed_rollback_has_begun() -> None:
    writer, target = Writer(Storage("memory://")), _Failing()
    writer.snapshot()
    predictor = Predictor({FQN: target}, writer.storage)
    for row in range(3):
        writer.delta([row])
    predictor.sync()
    writer.delta([3])
    target.fails = True
    for call, expected in ((predictor.sync, (4, 5)), (lambda: predictor.rollback(2), (4, 1)), (predictor.sync, (4, 1))):
        with pytest.raises(OSError, match="out of order"):
            call()
        with predictor.reading() as view:
            assert tuple(view) == expected
    target.fails = False
    assert predictor.sync() == 2
    with predictor.reading() as view:
        assert tuple(view) == (2, None)


def test_a_rollback_asks_for_pins_once() -> None:
    writer = Writer(WrappedStorage(Storage("memory://")))
    version = writer.snapshot().version
    writer.delta([1])
    pin_version(writer.storage, version)
    predictor = Predictor(writer.model(), writer.storage, rollout=Rollout(follows_pins=True))
    predictor.sync()
    writer.storage.take()
    predictor.rollback(version)
    asked = [each.name for each in writer.storage.take() if each.name.startswith("control")]
    assert len(set(asked)) == len(asked) > 0, asked
