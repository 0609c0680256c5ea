"""The previous release and the code of this checkout at one stream, in both directions.

``old`` is a process of the previous release, and ``Jobs`` runs in this process.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.releases.jobs import LARGE, SMALL, Jobs
from tests.releases.release import Release, ReleaseError, previous_release

pytestmark = pytest.mark.filterwarnings("ignore")  # DCP warns in a process without a group

_BOTH = pytest.mark.parametrize("older", ["writes", "reads"])


@pytest.fixture(scope="module")
def old(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Release]:
    """A process of the previous release."""
    with previous_release(tmp_path_factory.mktemp("release")) as release:
        yield release


def _roles(old: Release, older: str) -> tuple[Any, Any]:
    """Return the writer and the reader."""
    return (old, Jobs()) if older == "writes" else (Jobs(), old)


def _assert_reads(reader: Any, url: str, size: tuple[int, int], num_batches: int, **options: Any) -> dict[str, Any]:
    found = reader.read(url, size, **options)
    assert (found["wrong"], found["batches"], found["resyncs"]) == (0, num_batches, 0)
    return found


@_BOTH
@pytest.mark.promise("streams", "orders")
@pytest.mark.parametrize("is_recoverable", [False, True], ids=["format 1", "format 2"])
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_predictor_follows_a_publisher_of_the_other_release(
    old: Release, tmp_path: Path, older: str, *, size: tuple[int, int], is_recoverable: bool
) -> None:
    """Snapshots, deltas, dense tensors, several tables, a rollback and its release, and a compacted stream."""
    (writer, reader), url = _roles(old, older), f"file://{tmp_path}/stream"
    writer.start(url, size, is_recoverable=is_recoverable)
    writer.train(url, 3)
    has_digests = '"tensors":' in (tmp_path / "stream" / "log" / f"{1:020d}.json").read_text()
    assert has_digests == (size == LARGE and older == "reads")
    reader.follow(url, size, "p")
    reader.reach(url, writer.train(url, 2))
    reader.leave(url)
    _assert_reads(reader, url, size, 5)
    assert writer.command("rollback", url, "3", "--json")[0] == 0
    assert _assert_reads(reader, url, size, 2, follows_pins=True)["version"] == 3
    writer.snapshot(url)
    assert reader.command("release", url, "--json")[0] == 0
    _assert_reads(reader, url, size, 5, follows_pins=True)
    writer.train(url, 8)
    assert reader.command("compact", url, "--json")[1]["merged"]
    _assert_reads(writer, url, size, 13)
    assert writer.command("compact", url, "--json")[0] == 0
    _assert_reads(reader, url, size, 13)
    assert reader.command("verify", url, "--json")[1]["ok"]
    writer.close(url)


@_BOTH
@pytest.mark.promise("positions")
def test_a_predictor_continues_from_a_position_of_the_other_release(old: Release, tmp_path: Path, older: str) -> None:
    (writer, reader), url = _roles(old, older), f"file://{tmp_path}"
    writer.start(url, SMALL)
    writer.train(url, 3)
    state = writer.read(url, SMALL)["state"]
    writer.command("rollback", url, "2")
    pinned = writer.read(url, SMALL, follows_pins=True)["state"]
    writer.snapshot(url)
    writer.command("release", url)
    writer.train(url, 2)
    _assert_reads(reader, url, SMALL, 5, state=state, held=3)
    _assert_reads(reader, url, SMALL, 5, state=pinned, held=1, follows_pins=True)
    writer.close(url)


@pytest.mark.promise("positions")
def test_an_older_release_rejects_the_position_of_some_tables(old: Release, tmp_path: Path) -> None:
    today, url = Jobs(), f"file://{tmp_path}"
    today.start(url, SMALL)
    today.train(url, 2)
    found = today.read(url, SMALL, tables=["item"])
    assert (found["wrong"], found["applied"]) == (0, ["item.weight"])
    today.close(url)
    with pytest.raises(ReleaseError, match="what state_dict\\(\\) returned") as error:
        old.read(url, SMALL, found["state"], held=2)
    assert error.value.kind == "InvalidArgumentError"


@_BOTH
@pytest.mark.promise("heartbeats")
def test_heartbeats_of_the_other_release_are_shown(old: Release, tmp_path: Path, older: str) -> None:
    (writer, reader), url = _roles(old, older), f"file://{tmp_path}"
    writer.start(url, SMALL, is_recoverable=True)
    writer.follow(url, SMALL, "p")
    writer.train(url, 1)
    _, fleet = reader.command("fleet", url, "--json")
    assert sum(fleet["states"].values()) == 1
    assert not fleet["states"].keys() & {"silent", "elsewhere", "failing"}
    _, inspected = reader.command("inspect", url, "--json")
    assert [(each["name"], each["error"]) for each in inspected["predictors"]] == [("p", None)]
    assert inspected["publisher"]["generation"] == 1
    writer.leave(url)
    writer.close(url)


@_BOTH
@pytest.mark.promise("fences")
def test_a_publisher_of_the_other_release_fences_and_continues(old: Release, tmp_path: Path, older: str) -> None:
    (first, second), url = _roles(old, older), f"file://{tmp_path}"
    first.start(url, SMALL)
    first.train(url, 3)
    second.start(url, SMALL)
    with pytest.raises(Exception, match="is fenced: generation 2") as error:
        first.train(url, 1)
    assert "FencedError" in f"{type(error.value).__name__} {error.value}"
    second.train(url, 2)
    _assert_reads(first, url, SMALL, 2)
    second.close(url)


@pytest.mark.promise("checkpoints")
def test_a_trainer_continues_from_an_older_checkpoint(old: Release, tmp_path: Path) -> None:
    today, url = Jobs(), f"file://{tmp_path}/stream"
    old.start(url, LARGE)
    old.train(url, 3)
    old.save(url, f"{tmp_path}/checkpoint")
    assert today.load(f"{tmp_path}/checkpoint", LARGE, url=url) == [0, 4, "delta"]
    today.train(url, 2)
    _assert_reads(old, url, LARGE, 6)
    today.close(url)


@pytest.mark.promise("checkpoints")
def test_a_trainer_goes_back_to_the_older_release(old: Release, tmp_path: Path) -> None:
    today, url = Jobs(), f"file://{tmp_path}/stream"
    old.start(url, SMALL)
    old.train(url, 3)
    old.save(url, f"{tmp_path}/checkpoint")
    today.load(f"{tmp_path}/checkpoint", SMALL, url=url)
    today.train(url, 4)
    today.close(url)
    assert old.load(f"{tmp_path}/checkpoint", SMALL, url=url) == [0, 4, "delta"]
    _assert_reads(today, url, SMALL, 4)
    old.train(url, 1)
    _assert_reads(today, url, SMALL, 5)
    old.close(url)


@pytest.mark.promise("recovery")
@pytest.mark.parametrize("size", [SMALL, LARGE], ids=["small", "large"])
def test_a_standby_replaces_an_older_trainer(old: Release, tmp_path: Path, size: tuple[int, int]) -> None:
    today, url = Jobs(), f"file://{tmp_path}"
    old.start(url, size, is_recoverable=True)
    old.train(url, 2)
    today.stand_by(url, size)
    old.train(url, 2)
    assert today.stand_by(url, size) == 5
    assert today.take_over(url, size) == [0, 4]
    _, inspected = old.command("inspect", url, "--json")
    assert [each["name"] for each in inspected["predictors"]] == ["spare"]
    with pytest.raises(ReleaseError, match="is fenced"):
        old.train(url, 1)
    today.train(url, 2)
    _assert_reads(old, url, size, 6)
    today.close(url)


@pytest.mark.promise("recovery")
def test_a_job_of_an_older_release_is_restored(old: Release, tmp_path: Path) -> None:
    today, url = Jobs(), f"file://{tmp_path}"
    old.start(url, SMALL, is_recoverable=True)
    old.train(url, 3)
    old.close(url)
    assert today.restore(url, SMALL) == [0, 3]
    today.train(url, 2)
    _assert_reads(old, url, SMALL, 5)
    today.close(url)


@pytest.mark.promise("row stores")
def test_a_row_store_of_an_older_release_is_continued(old: Release, tmp_path: Path) -> None:
    today, url, rows = Jobs(), f"file://{tmp_path}/stream", f"{tmp_path}/rows"
    old.start(url, SMALL)
    old.train(url, 3)
    version = old.fill(url, rows)
    assert today.look_up(rows, SMALL, 3) == [0, version]
    old.train(url, 2)
    version = today.fill(url, rows)
    assert today.look_up(rows, SMALL, 5) == [0, version]
    old.close(url)


def test_an_older_release_refuses_what_it_cannot_read(old: Release, tmp_path: Path) -> None:
    """These are the limits of the guide: states of trackers, jobs and row stores are not read by an older release."""
    today, url = Jobs(), f"file://{tmp_path}/stream"
    today.start(url, SMALL, is_recoverable=True)
    today.train(url, 3)
    today.fill(url, f"{tmp_path}/rows")
    for kind, call in (
        ("CorruptPartError", lambda: old.restore(url, SMALL)),
        ("CorruptPartError", lambda: old.stand_by(url, SMALL)),
        ("MalformedSinkError", lambda: old.fill(url, f"{tmp_path}/rows")),
        ("MalformedSinkError", lambda: old.look_up(f"{tmp_path}/rows", SMALL, 3)),
    ):
        with pytest.raises(ReleaseError) as error:
            call()
        assert error.value.kind == kind
    _assert_reads(old, url, SMALL, 3)  # as a predictor, it can
    today.save(url, f"{tmp_path}/checkpoint")
    with pytest.raises(ReleaseError) as error:
        old.load(f"{tmp_path}/checkpoint", SMALL, url=url)
    assert error.value.kind == "CheckpointError"
