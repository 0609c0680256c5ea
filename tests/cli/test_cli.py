"""The command line, on real streams: the program itself, inspect and tail."""

from __future__ import annotations

import json
import signal
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from delta_tracker.cli.commands import commands
from delta_tracker.cli.followers import GONE_SECONDS, SILENT_SECONDS
from delta_tracker.predictor.predictor import Predictor
from delta_tracker.stream.heartbeat import Heartbeat, leave_heartbeat
from delta_tracker.stream.log import entry_name
from delta_tracker.stream.maintenance.compaction import compact
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.cli.commands import Cli, entry, flip, interrupted, make, path_of, program, url_of
from tests.servers import S3
from tests.stream.streams import FQN, Writer

HOSTILE = "ec.[red]t\x1b[2J\x9b31m\n\u202eevil"


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    return make(tmp_path / "stream")


# The program


def test_the_commands_and_their_help(cli: Cli) -> None:
    listed = cli("--help")
    for name, command in commands_by_name().items():
        assert f"\n  {name} " in listed
        text = cli(name, "--help")
        assert "Examples:\n" in text
        assert f"  delta-tracker {name}" in text
        assert "--json" in text
        assert command.name == name
    assert "130" in listed
    assert {"demo", "inspect", "tail", "verify", "diff", "compact", "export"} <= commands_by_name().keys()


def commands_by_name() -> dict:
    context = commands.make_context("delta-tracker", ["--help-is-not-asked"], resilient_parsing=True)
    return {name: commands.get_command(context, name) for name in commands.list_commands(context)}


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nonsense"],
        ["inspect"],
        ["inspect", "ftp://host/x"],
        ["inspect", "file://host/x"],
        ["inspect", "/nowhere/at/all"],
        ["inspect", "/dev/null"],
        ["inspect", "memory://", "-o", "endpoint=x"],
        ["inspect", "s3://bucket", "-o", "secret"],
        ["inspect", "s3://bucket", "-o", "=secret"],
        ["inspect", "s3://bucket", "-o", "no_such_setting=secret"],
        ["tail", "/nowhere", "--every", "0"],
        ["verify", "/nowhere/at/all"],
        ["diff", "/nowhere/at/all", "0", "1"],
        ["diff", "/nowhere/at/all", "-1", "1"],
        ["compact", "/nowhere/at/all"],
        ["export", "/nowhere/at/all", "--out", "x"],
        ["export", "/nowhere/at/all"],
    ],
)
def test_a_wrong_call_exits_with_2_and_says_what_to_do(cli: Cli, arguments: list[str]) -> None:
    assert cli(*arguments, code=2) == ""
    assert cli.err
    assert "secret" not in cli.err


def test_a_typed_error_is_one_paragraph(cli: Cli) -> None:
    cli("inspect", "/nowhere/at/all", code=2)
    (line,) = cli.err.splitlines()
    assert line.startswith("error: URL='file:///nowhere/at/all' cannot be used. No stream is there")


def test_a_missing_package_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cli("--help", code=2)
    assert "pip install 'delta_tracker[cli]'" in cli.err


def test_a_store_that_cannot_be_reached(cli: Cli) -> None:
    options = [
        "-o",
        "endpoint=http://127.0.0.1:9",
        "-o",
        "allow_http=true",
        "-o",
        "region=x",
        "-o",
        "skip_signature=true",
    ]
    cli("inspect", "s3://bucket/x", *options, code=2)
    assert cli.err.startswith("error: the store s3://bucket/x cannot be used")


def test_an_interrupt_exits_with_130(cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", interrupted)
    cli("tail", url_of(writer), code=130)
    assert cli.err.strip() == "interrupted"


def test_text_of_others_reaches_no_terminal_as_it_is(cli: Cli, tmp_path: Path) -> None:
    writer = Writer(Storage((tmp_path / "s").as_uri(), create=True))
    writer.spec = TableSpec(HOSTILE, 20, 4, torch.float32)
    for ids in (None, [3]):
        writer.table[3] += 1
        rows = writer.rows(ids)
        rows = replace(rows, block=replace(rows.block, table=HOSTILE))
        writer.write("snapshot" if ids is None else "delta", [rows], {HOSTILE: writer.spec})
    beat = {"stream": writer.claim.head.stream, "version": 1, "lag_versions": 0, "lag_seconds": 0.0, "resyncs": 0}
    leave_heartbeat(writer.storage, Heartbeat(name="p", time=time.time(), error=HOSTILE, **beat))
    (path_of(writer, "predictors") / "q.json").write_text(json.dumps({"name": HOSTILE}))
    url = url_of(writer)
    shown = [cli("inspect", url), cli.err, cli("diff", url, 1, 2), cli("export", url, "--out", tmp_path / "out")]
    cli("diff", url, 1, 2, "--table", "x", code=2)
    shown += [cli.err, cli("export", url, "--out", tmp_path / "out.pt", "--format", "torch")]
    flip(path_of(writer, entry(writer, 2).parts[0].name))
    shown += [cli("verify", url, code=1), cli("inspect", url, "--json")]
    for text in shown:
        assert not {"\x1b", "\x9b", "\u202e"} & set(text), text
    assert "[red]" in shown[0]
    assert [each.name for each in tmp_path.glob("out/*")] == [
        "ec.%5Bred%5Dt%1B%5B2J%C2%9B31m%0A%E2%80%AEevil.weight.safetensors"
    ]


# inspect


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
    assert [each["generation"] for each in found["generations"]] == [1, 2]
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
    for shown in ("version 5, a claim", "50 x 4 F32", "1 snapshot, 3 deltas, 2 claims", "no predictor has left"):
        assert shown in screen


def test_inspect_says_what_a_new_predictor_really_reads(cli: Cli, writer: Writer) -> None:
    for _ in range(3):
        predictor = Predictor(writer.model() | {"over.weight": torch.zeros(3, 2)}, writer.storage)
        predictor.sync()
        new = cli.json("inspect", url_of(writer))["new_predictor"]
        status = predictor.status()
        assert (new["rows"], new["bytes"]) == (status.rows, status.num_bytes)
        compact(writer.storage, fold=0.01)
        writer.delta([5, 6])
    assert new["is_merged"]


def test_inspect_shows_predictors_until_they_are_long_gone(cli: Cli, writer: Writer) -> None:
    url, now = url_of(writer), time.time()
    beat = Heartbeat(
        name="a",
        time=now,
        stream=writer.claim.head.stream,
        version=2,
        lag_versions=9,
        lag_seconds=1.5,
        resyncs=3,
        error="x",
    )
    leave_heartbeat(writer.storage, beat)
    leave_heartbeat(writer.storage, replace(beat, name="b", time=now - SILENT_SECONDS - 60))
    leave_heartbeat(writer.storage, replace(beat, name="c", time=now - GONE_SECONDS - 60))
    leave_heartbeat(writer.storage, replace(beat, name="d", stream="0" * 32))
    leave_heartbeat(writer.storage, replace(beat, name="e", version=None, stream=None))
    leave_heartbeat(writer.storage, replace(beat, name="f", time=now + 1000))
    path_of(writer, "predictors/g.json").write_text("nonsense")
    found = cli.json("inspect", url)
    assert "g.json is no heartbeat" in cli.err
    seen = {each["name"]: (each["state"], each["lag_versions"]) for each in found["predictors"]}
    # What the log says now, not what the predictor knew.
    assert seen == {"a": ("live", 2), "b": ("silent", 2), "d": ("live", None), "e": ("live", None), "f": ("live", 2)}
    assert found["predictors_gone"] == 1
    screen = cli("inspect", url)
    assert "silent" in screen
    assert "1 predictor not heard of for an hour" in screen


def test_inspect_finds_what_keeps_a_new_predictor_away(cli: Cli, writer: Writer) -> None:
    url = url_of(writer)
    path_of(writer, entry_name(3)).unlink()
    found = cli.json("inspect", url, code=1)
    assert found["findings"] == ["a new predictor stops before version 3, which is missing or malformed"]
    assert found["log"]["strays"] == 3
    writer.snapshot()  # mends it
    assert cli.json("inspect", url)["findings"] == []
    path_of(writer, entry_name(4)).write_text("nonsense")
    assert "log/00000000000000000004.json is malformed" in cli("inspect", url, code=1)


def test_inspect_of_a_stream_without_snapshot(cli: Cli, tmp_path: Path) -> None:
    writer = Writer(Storage((tmp_path / "s").as_uri(), create=True))
    assert "has no snapshot yet" in cli.json("inspect", url_of(writer), code=1)["findings"][0]
    assert "has nothing to start from" in cli("inspect", url_of(writer), code=1)


def test_a_path_a_url_and_s3_are_all_streams(
    cli: Cli, writer: Writer, s3: S3, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.json("verify", "stream")["entries"] == cli.json("verify", url_of(writer))["entries"] == 5
    url = f"{s3.url}/cli"
    remote = Writer(Storage(url, options=s3.options))
    remote.snapshot()
    options = [word for name, value in s3.options.items() for word in ("-o", f"{name}={value}")]
    assert cli.json("inspect", url, *options)["head"]["version"] == 1
    assert cli.json("verify", url, *options)["ok"]
    cli("export", url, *options, "--out", "remote")
    assert torch.equal(load_file(f"remote/{FQN}.weight.safetensors")[f"{FQN}.weight"], remote.table)


# tail


def test_tail_shows_the_newest_lines_and_ends_by_count(cli: Cli, writer: Writer) -> None:
    lines = cli("tail", url_of(writer), "--lines", 3, "--count", 2, "--json").splitlines()
    assert [json.loads(line)["version"] for line in lines] == [2, 3]
    assert json.loads(lines[0])["tables"] == {FQN: {"rows": 3, "bytes": 48}}
    screen = cli("tail", url_of(writer), "-n", 100, "-c", 5).splitlines()
    assert len(screen) == 6
    assert "snapshot" in screen[2]
    assert max(map(len, screen)) <= 100


def test_tail_names_what_is_missing_between_its_lines(cli: Cli, writer: Writer) -> None:
    for version in (0, 3):
        (path_of(writer, "log") / f"{version:020d}.json").unlink()
    lines = cli("tail", url_of(writer), "--json", "--count", 3).splitlines()
    assert [json.loads(line)["version"] for line in lines] == [1, 2, 4]
    assert cli.err.startswith("version 3 is missing")


def test_tail_follows_and_ends_well_on_an_interrupt(tmp_path: Path) -> None:
    directory = tmp_path / "later"
    with program("tail", directory, "--json", "--every", "0.05") as tail:
        assert "waiting for its first version" in tail.stderr.readline()
        writer = make(directory)
        assert [json.loads(tail.stdout.readline())["version"] for _ in range(5)] == [0, 1, 2, 3, 4]
        writer.delta([7])
        assert json.loads(tail.stdout.readline())["rows"] == 1
        tail.send_signal(signal.SIGINT)
        assert tail.wait(60) == 130
        assert tail.stderr.read().strip() == "interrupted"


def test_tail_notices_another_stream(cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch) -> None:
    def replaced(_: float) -> None:
        for path in path_of(writer, "log").iterdir():
            path.unlink()
        Writer(writer.storage)

    monkeypatch.setattr("time.sleep", replaced)
    cli("tail", url_of(writer), code=1)
    assert cli.err.startswith(f"error: the stream {url_of(writer)} is not the one of which version 4 was applied")


def test_a_reader_that_leaves_is_no_error(writer: Writer) -> None:
    with program("tail", url_of(writer), "-n", "0", "--json", "--every", "0.05") as tail:
        tail.stdout.close()
        deadline = time.monotonic() + 60
        while tail.poll() is None and time.monotonic() < deadline:
            writer.delta([1])
            time.sleep(0.05)
        assert tail.wait(60) == 141
        assert tail.stderr.read() == ""
