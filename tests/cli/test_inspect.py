"""``delta-tracker inspect`` on real streams."""

from __future__ import annotations

import re
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from delta_tracker.cli.silence import SILENCE_SECONDS
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.heartbeat import GONE_SECONDS, Heartbeat, PublisherHeartbeatWriter, write_heartbeat
from delta_tracker.stream.log import StreamLog
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.pointer import POINTER_NAME
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import StateSpec, TableStates
from tests.cli.commands import Cli, beat, date, entry, leave, make, make_owned, path_of, url_of
from tests.predictor.cache_server import cache_server
from tests.stream.histories import Clock
from tests.stream.streams import FQN, Writer


def test_inspect_counts_what_is_there(cli: Cli, writer: Writer) -> None:
    Writer(writer.storage)  # a second generation, which has claimed and published nothing
    found = cli.json("inspect", url_of(writer))
    manifests = [entry(writer, version) for version in range(6)]
    assert found["head"]["version"] == 5
    assert found["head"]["kind"] == "claim"
    assert 0 <= found["head"]["age_seconds"] < 300
    log = found["log"]
    assert (log["first"], log["last"], log["snapshots"], log["deltas"], log["claims"]) == (0, 5, 1, 3, 2)
    assert log["bytes"] == log["part_bytes"] == sum(manifest.num_bytes for manifest in manifests)
    assert log["entry_bytes"] == sum(path.stat().st_size for path in path_of(writer, "log").iterdir())
    table = {"rows": 50, "dim": 4, "dtype": "F32", "snapshot_bytes": 800, "delta_rows": 9, "delta_bytes": 144}
    assert found["tables"] == {FQN: table}
    assert [each["generation"] for each in found["versions"]] == [1] * 5 + [2]
    assert found["new_predictor"] == {
        "snapshot": 1,
        "is_merged": False,
        "versions": 5,
        "rows": 59,
        "parts": 4,
        "bytes": log["bytes"],
    }
    assert [each["version"] for each in found["versions"]] == list(range(6))
    assert found["findings"] == []
    assert [each["version"] for each in cli.json("inspect", url_of(writer), "--last", 2)["versions"]] == [4, 5]
    assert cli.json("inspect", url_of(writer), "--last", 0)["versions"] == []
    screen = cli("inspect", url_of(writer))
    for shown in ("version 5, a claim", "50 x 4 F32", "1 snapshot, 3 deltas, 2 claims", "no predictor has written"):
        assert shown in screen


def test_inspect_counts_states_and_training_states_apart_from_what_a_predictor_reads(cli: Cli, tmp_path: Path) -> None:
    states = TableStates("EXACT_TEST", ((0, 4),), (StateSpec("sum", torch.float32, "columns"),))
    writer = Writer(Storage((tmp_path / "states").as_uri(), create=True), states=states)
    writer.training = [bytes(1000)]
    manifests = [writer.snapshot(), writer.delta([1, 7])]
    found = cli.json("inspect", url_of(writer))
    assert found["log"]["bytes"] == found["log"]["part_bytes"] == sum(each.total_bytes for each in manifests)
    assert found["new_predictor"]["bytes"] == sum(each.num_bytes for each in manifests) < found["log"]["bytes"] - 2000


def test_inspect_says_what_a_new_predictor_really_reads(cli: Cli, writer: Writer) -> None:
    for _ in range(3):
        predictor = Predictor(writer.model() | {"over.weight": torch.zeros(3, 2)}, writer.storage)
        predictor.sync()
        new = cli.json("inspect", url_of(writer))["new_predictor"]
        status = predictor.status()
        assert (new["rows"], new["bytes"]) == (status.counts.rows, status.counts.num_bytes)
        compact(writer.storage, fold=0.01)
        writer.delta([5, 6])
    assert new["is_merged"]


def test_inspect_shows_predictors_until_they_are_long_gone(cli: Cli, writer: Writer) -> None:
    url, now = url_of(writer), time.time()
    left = Heartbeat(
        name="a",
        time=now,
        stream=writer.claim.head.stream,
        version=2,
        lag_versions=9,
        lag_seconds=1.5,
        resyncs=3,
        error="x",
    )
    write_heartbeat(writer.storage, left)
    leave(writer, replace(left, name="b"), SILENCE_SECONDS + 60)
    leave(writer, replace(left, name="c"), GONE_SECONDS + 60)
    write_heartbeat(writer.storage, replace(left, name="d", stream="0" * 32))
    write_heartbeat(writer.storage, replace(left, name="e", version=None, stream=None))
    write_heartbeat(writer.storage, replace(left, name="f", time=now + 1000))
    path_of(writer, "predictors/g.json").write_text("nonsense")
    found = cli.json("inspect", url)
    assert "g.json error=" in cli.err
    seen = {each["name"]: (each["state"], each["lag_versions"]) for each in found["predictors"]}
    # The current state of the log, not the predictor's last state.
    assert seen == {"a": ("live", 2), "b": ("silent", 2), "d": ("live", None), "e": ("live", None), "f": ("live", 2)}
    assert found["predictors_gone"] == 1
    screen = cli("inspect", url)
    assert "silent" in screen
    assert "1 predictor without a heartbeat for an hour" in screen


def test_inspect_shows_the_heartbeats_of_the_publisher(cli: Cli, writer: Writer) -> None:
    url, head = url_of(writer), writer.claim.head
    assert "generation 1; no heartbeat" in cli("inspect", url)
    assert cli.json("inspect", url)["publisher"] == {
        "generation": 1,
        "heartbeat_seconds_ago": None,
        "is_silent": False,
    }
    PublisherHeartbeatWriter(writer.storage).write(head)
    beat = path_of(writer, f"publishers/{1:020d}.json")
    date(beat, SILENCE_SECONDS + 60)
    assert not cli.json("inspect", url)["publisher"]["is_silent"], "the newest version is a sign of life"
    for path in path_of(writer, "log").iterdir():
        date(path, SILENCE_SECONDS + 100)
    found = cli.json("inspect", url)["publisher"]
    assert (found["heartbeat_seconds_ago"], found["is_silent"]) == (pytest.approx(SILENCE_SECONDS + 60, abs=50), True)
    assert "generation 1, silent, last heartbeat" in cli("inspect", url)
    date(beat, 0)
    assert "generation 1, last heartbeat" in cli("inspect", url)


def test_inspect_finds_what_keeps_a_new_predictor_away(cli: Cli, writer: Writer) -> None:
    url = url_of(writer)
    path_of(writer, entry_name(3)).unlink()
    found = cli.json("inspect", url, code=1)
    assert found["findings"] == ["a new predictor stops before version 3, which is missing or malformed"]
    assert found["log"]["strays"] == 3
    writer.snapshot()  # repairs it
    assert cli.json("inspect", url)["findings"] == []
    path_of(writer, entry_name(4)).write_text("nonsense")
    assert "log/00000000000000000004.json is malformed" in cli("inspect", url, code=1)


def test_inspect_of_a_stream_without_snapshot(cli: Cli, tmp_path: Path) -> None:
    writer = Writer(Storage((tmp_path / "s").as_uri(), create=True))
    assert "has no snapshot yet" in cli.json("inspect", url_of(writer), code=1)["findings"][0]
    text = cli("inspect", url_of(writer), code=1)
    assert "has no snapshot to start from" in text
    assert "problem: a new predictor cannot start" in text


def skews(text: str) -> list[tuple[str, int, str]]:
    """Return the hosts whose skews a text reports, with the seconds and the direction."""
    found = re.findall(r"the clock of ([a-z0-9 ]+) is (\d+) s (ahead of|behind) the store's", text)
    return [(whose, int(seconds), where) for whose, seconds, where in found]


def test_a_dead_predictor_with_a_fast_clock_is_silent(cli: Cli, writer: Writer) -> None:
    now = time.time()
    leave(writer, beat(writer, "fast", time=now + 3600), SILENCE_SECONDS + 1)
    leave(writer, beat(writer, "gone", time=now + 7200), GONE_SECONDS + 1)
    leave(writer, beat(writer, "slow", time=now - 3600))
    for command in ("inspect", "top --once", "report"):
        found = cli.json(command.split()[0], url_of(writer), *command.split()[1:])
        assert {each["name"]: each["state"] for each in found["predictors"]} == {"fast": "silent", "slow": "live"}
        assert skews(" ".join(found["skews"])) == [
            ("predictor fast", pytest.approx(3600 + SILENCE_SECONDS, abs=60), "ahead of"),
            ("predictor slow", pytest.approx(3600, abs=60), "behind"),
        ]
        assert found["predictors_gone"] == 1


@pytest.mark.parametrize("ahead", [3600.0, -3600.0])
def test_a_publisher_with_a_wrong_clock_is_shown(cli: Cli, tmp_path: Path, ahead: float) -> None:
    clock = Clock()
    clock.seconds = time.time()
    with clock.of_the_log(ahead):
        writer = make(tmp_path / "s")
    writer.claim = StreamLog(writer.storage).claim()
    writer.delta([1])
    url = url_of(writer)
    expected = [("the publisher of generation 1", pytest.approx(3600, abs=60), "ahead of" if ahead > 0 else "behind")]
    leave(writer, beat(writer, "p", version=2, time=time.time()))
    found = cli.json("inspect", url)
    assert 0 <= found["head"]["age_seconds"] < 300
    assert all(0 <= time.time() - each["committed"] < 300 for each in found["versions"])
    top = cli.json("top", url, "--once", "--window", "300")
    assert 0 <= top["head"]["age_seconds"] < 300
    assert top["versions_per_second"] * top["window_seconds"] == pytest.approx(5)
    report = cli.json("report", url, "--out", tmp_path / "page.html")
    assert 0 <= report["time"] - report["versions"]["begin"] < 300
    assert report["cadence_seconds"]["max"] < 300
    verify = cli.json("verify", url)
    for figures in (found, top, report, verify):
        assert skews(" ".join(figures["skews"])) == expected
    assert skews((tmp_path / "page.html").read_text().replace("&#39;", "'")) == expected
    for command in ("inspect", "verify", "top --once"):
        name, *options = command.split()
        assert skews(cli(name, url, *options).replace("\n", " ")) == expected


def test_inspect_and_top_show_admissions_and_evictions(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")  # a narrower terminal breaks the last heading
    writer = make_owned(tmp_path / "s")
    for command in ("inspect", "top --once"):
        name, *options = command.split()
        versions = cli.json(name, url_of(writer), *options)["versions"]
        assert {each["version"]: each["owners"] for each in versions} == {
            0: {},
            1: {FQN: None},
            2: {FQN: {"admitted": 2, "evicted": 1}},
            3: {FQN: {"admitted": 1, "evicted": 1}},
        }
        shown = cli(name, url_of(writer), *options)
        assert "ids in / out" in shown
        assert "2 / 1" in shown
        lines = [line.split() for line in shown.splitlines() if "snapshot" in line or "claim" in line]
        assert "?" in next(line for line in lines if line[:2] == ["1", "snapshot"])
        assert "?" not in next(line for line in lines if line[:2] == ["0", "claim"])
    assert "ids in / out" not in cli("inspect", url_of(make(tmp_path / "t")))


def test_a_merged_entry_bridges_a_missing_version(cli: Cli, writer: Writer) -> None:
    compact(writer.storage)
    writer.delta([5])
    path_of(writer, entry_name(3)).unlink()
    found = cli.json("inspect", url_of(writer))
    assert found["findings"] == []
    assert found["new_predictor"]["versions"] == 4, "versions 1, 2 and 5, and versions 2 to 4 as one"
    tables = {FQN: torch.zeros(50, 4), "over.weight": torch.zeros(3, 2)}
    assert Predictor(tables, writer.storage).sync() == 5
    assert torch.equal(tables[FQN], writer.table)


def test_inspect_names_what_a_server_sends_instead_of_the_pointer(cli: Cli) -> None:
    with cache_server(Storage("memory://")) as server:
        cli("inspect", server.url, code=2)
        assert "there is no stream" in cli.err
        server.origin.replace(POINTER_NAME, b"<html>Please log in</html>")
        cli("inspect", server.url, code=2)
        assert "26 bytes, an HTML or XML page: '<html>Please log in</html>'" in " ".join(cli.err.split())
        assert "there is no stream" not in cli.err


def test_inspect_names_a_file_in_the_place_of_the_log(cli: Cli, tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"<html>")
    cli("inspect", tmp_path.as_uri(), code=2)
    assert "log is a file of 6 bytes instead of a directory" in " ".join(cli.err.split())
    assert "there is no stream" not in cli.err
