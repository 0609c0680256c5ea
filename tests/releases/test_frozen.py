"""Data of the previous release, which is in ``frozen/``, is read by the code of this checkout."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from delta_tracker import Predictor, Storage
from delta_tracker.stream.log import StreamLog
from tests.heartbeats import read_heartbeats
from tests.releases.jobs import SMALL, Jobs, Model, num_wrong
from tests.releases.release import FROZEN


@pytest.fixture
def frozen(tmp_path: Path) -> Path:
    """A copy, because predictors and publishers write to it. Its files have the present time."""
    return shutil.copytree(FROZEN, tmp_path / "frozen", copy_function=shutil.copyfile)


def _url(frozen: Path, stream: str) -> str:
    return f"file://{frozen / stream}"


def test_the_files_are_small() -> None:
    assert sum(path.stat().st_size for path in FROZEN.rglob("*") if path.is_file()) < 150_000


@pytest.mark.promise("streams")
@pytest.mark.parametrize("stream", ["format-1", "format-2"])
def test_each_version_of_an_older_stream_has_its_rows(frozen: Path, stream: str) -> None:
    url = _url(frozen, stream)
    code, found = Jobs().command("verify", url, "--json")
    assert (code, found["ok"]) == (0, True)
    entries = [StreamLog(Storage(url)).read(version) for version in range(Jobs().read(url, SMALL)["version"] + 1)]
    assert {entry.format for entry in entries if entry and entry.kind != "claim"} == {int(stream[-1])}
    model = Model(SMALL, None)
    predictor = Predictor(model, url)
    for entry in entries:
        if entry is not None and entry.kind != "claim":
            predictor.rollback(entry.version)
            assert num_wrong(model.state_dict(), SMALL, entry.batches[1]) == 0, entry.version


@pytest.mark.promise("positions")
def test_a_predictor_continues_from_an_older_position(frozen: Path) -> None:
    state = json.loads((frozen / "position.json").read_text())
    found = Jobs().read(_url(frozen, "format-1"), SMALL, state, held=3)
    assert (found["wrong"], found["batches"], found["resyncs"]) == (0, 14, 0)


@pytest.mark.promise("orders")
def test_an_older_rollback_and_release_are_obeyed(frozen: Path) -> None:
    release = max((frozen / "format-1" / "control" / "pins").iterdir())
    assert json.loads(release.read_text())["kind"] == "release"
    assert Jobs().read(_url(frozen, "format-1"), SMALL, follows_pins=True)["batches"] == 14
    release.unlink()
    found = Jobs().read(_url(frozen, "format-1"), SMALL, follows_pins=True)
    assert (found["version"], found["wrong"], found["batches"]) == (3, 0, 2)


@pytest.mark.promise("heartbeats")
def test_older_heartbeats_are_shown(frozen: Path) -> None:
    (beat,) = read_heartbeats(Storage(_url(frozen, "format-1")))
    assert (beat.name, beat.error) == ("p", None)
    assert beat.version is not None
    code, found = Jobs().command("fleet", _url(frozen, "format-1"), "--json")
    assert sum(found["states"].values()) == 1
    code, found = Jobs().command("inspect", _url(frozen, "format-2"), "--json")
    assert code == 0
    assert found["publisher"]["generation"] == 1


@pytest.mark.promise("checkpoints")
@pytest.mark.filterwarnings("ignore")  # DCP warns in a process without a group
def test_an_older_checkpoint_continues(frozen: Path) -> None:
    jobs, url, path = Jobs(), _url(frozen, "format-1"), str(frozen / "checkpoint")
    assert jobs.load(path, SMALL) == [0, 15]
    assert jobs.load(path, SMALL, url=url) == [0, 15, "delta"]
    jobs.train(url, 2)
    jobs.close(url)
    _assert_reads(jobs, url, 17)


@pytest.mark.promise("recovery")
def test_a_job_is_restored_from_an_older_stream(frozen: Path) -> None:
    jobs, url = Jobs(), _url(frozen, "format-2")
    wrong, num_batches = jobs.restore(url, SMALL)
    assert wrong == 0
    jobs.train(url, 2)
    jobs.close(url)
    _assert_reads(jobs, url, num_batches + 2)


@pytest.mark.promise("recovery")
def test_a_standby_takes_an_older_stream_over(frozen: Path) -> None:
    jobs, url = Jobs(), _url(frozen, "format-2")
    jobs.stand_by(url, SMALL)
    wrong, num_batches = jobs.take_over(url, SMALL)
    assert wrong == 0
    jobs.train(url, 2)
    jobs.close(url)
    _assert_reads(jobs, url, num_batches + 2)


@pytest.mark.promise("row stores")
def test_an_older_row_store_is_read_and_written(frozen: Path) -> None:
    jobs, rows = Jobs(), str(frozen / "rows")
    wrong, version = jobs.look_up(rows, SMALL, 14)
    assert wrong == 0
    assert jobs.fill(_url(frozen, "format-1"), rows) == version
    assert jobs.look_up(rows, SMALL, 14) == [0, version]


def _assert_reads(jobs: Jobs, url: str, num_batches: int) -> None:
    found: dict[str, Any] = jobs.read(url, SMALL)
    assert (found["wrong"], found["batches"]) == (0, num_batches)
