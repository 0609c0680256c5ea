"""The command line, on real streams: what each command says and what it exits with."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from delta_tracker.cli import compact as compact_command
from delta_tracker.cli import export as export_command
from delta_tracker.cli import verify as verify_command
from delta_tracker.cli.commands import commands
from delta_tracker.cli.followers import GONE_SECONDS, SILENT_SECONDS
from delta_tracker.cli.main import main
from delta_tracker.predictor import Predictor
from delta_tracker.stream.compaction import compact
from delta_tracker.stream.encoding import Encoding
from delta_tracker.stream.heartbeat import Heartbeat, leave_heartbeat
from delta_tracker.stream.log import StreamLog, entry_name
from delta_tracker.stream.manifest import Manifest
from delta_tracker.stream.part import PartReader
from delta_tracker.stream.storage import Storage
from delta_tracker.types import TableSpec
from tests.servers import S3
from tests.streams import FQN, Writer

REPOSITORY = Path(__file__).parents[1]
HOSTILE = "ec.[red]t\x1b[2J\x9b31m\n\u202eevil"


class Cli:
    """Runs commands in this process."""

    def __init__(self, capsys: pytest.CaptureFixture[str]) -> None:
        self._capsys = capsys
        self.err = ""

    def __call__(self, *arguments: object, code: int = 0) -> str:
        self._capsys.readouterr()
        assert main([str(each) for each in arguments]) == code
        out, self.err = self._capsys.readouterr()
        assert "Traceback" not in self.err
        return out

    def json(self, *arguments: object, code: int = 0) -> dict:
        return json.loads(self(*arguments, "--json", code=code))


@pytest.fixture
def cli(capsys: pytest.CaptureFixture[str]) -> Cli:
    return Cli(capsys)


@pytest.fixture
def writer(tmp_path: Path) -> Writer:
    """A stream of the versions 0 to 7 in ``tmp_path``: a claim, a snapshot, three deltas; the same of a second one."""
    return make(tmp_path / "stream")


def make(path: Path, **options) -> Writer:
    torch.manual_seed(0)
    writer = Writer(Storage(path.as_uri(), create=True), num_rows=50, **options)
    writer.dense = {"over.weight": torch.randn(3, 2)}
    writer.snapshot()
    for number in range(3):
        writer.delta([number, 10 + number, 49])
    return writer


def url_of(writer: Writer) -> str:
    return writer.storage.url


def path_of(writer: Writer, name: str) -> Path:
    return Path(url_of(writer).removeprefix("file://")) / name


def entry(writer: Writer, version: int) -> Manifest:
    found = StreamLog(writer.storage).read(version)
    assert found is not None
    return found


def flip(path: Path, at: int = -1) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


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


def interrupted(*_: object, **__: object) -> None:
    raise KeyboardInterrupt


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
    for shown in ("version 5, a claim", "50 x 4 F32", "1 snapshot, 3 deltas, 2 claims", "no predictor is known"):
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


# verify


def test_verify_passes_what_is_whole(cli: Cli, writer: Writer) -> None:
    compact(writer.storage)
    compact(writer.storage, fold=0.01)
    found = cli.json("verify", url_of(writer))
    assert found["ok"]
    assert (found["entries"], found["merged"], found["findings"]) == (5, 1, [])
    assert found["bytes"] == sum(path.stat().st_size for path in path_of(writer, "parts").iterdir())
    assert cli("verify", url_of(writer)).startswith("all is well: 5 entries, 1 merged entries, 5 parts, ")


@pytest.mark.parametrize("reads_pieces", [False, True])
def test_verify_finds_every_byte_that_changed(
    cli: Cli, writer: Writer, reads_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reads_pieces:
        monkeypatch.setattr(verify_command, "_MEMORY_BYTES", 0)
    compact(writer.storage)
    paths = [path for folder in ("parts", "log", "merged") for path in sorted(path_of(writer, folder).iterdir())]
    assert len(paths) == 4 + 5 + 1 + 1
    for path in paths:
        good = path.read_bytes()
        for at in {0, len(good) // 3, len(good) - 1}:
            flip(path, at)
            found = json.loads(cli("verify", url_of(writer), "--json", code=1) or '{"findings": [{"where": "head"}]}')
            assert found["findings"], (path, at)
            path.write_bytes(good)
    assert cli.json("verify", url_of(writer))["ok"]


def test_verify_names_each_damage(cli: Cli, writer: Writer) -> None:
    url = url_of(writer)
    compact(writer.storage)
    (merged,) = path_of(writer, "merged").iterdir()
    parts = [path_of(writer, entry(writer, version).parts[0].name) for version in (1, 2, 3, 4)]
    flip(parts[0])
    parts[1].unlink()
    parts[2].write_bytes(parts[2].read_bytes()[:-1])
    rewritten = json.loads(merged.read_text())
    rewritten["merges"]["xxh3"] = "0" * 32
    rewritten["parent"]["xxh3"] = "0" * 32
    merged.write_text(json.dumps(rewritten))
    found = cli.json("verify", url, code=1)["findings"]
    assert [(each["where"], each["problem"].split(",")[0][:30]) for each in found] == [
        (f"parts/{parts[0].name}", "its xxh3 is not " + entry(writer, 1).parts[0].xxh3[:14]),
        (f"parts/{parts[1].name}", "it does not exist"),
        (f"parts/{parts[2].name}", f"it has {parts[2].stat().st_size} bytes instead of"[:30]),
        (f"merged/{merged.name}", "it follows another version 1 t"),
        (f"merged/{merged.name}", "it stands for another version "),
    ]
    assert all(each["is_in_the_way"] for each in found)
    quick = cli.json("verify", url, "--quick", code=1)["findings"]
    assert [each["where"] for each in quick] == [each["where"] for each in found[1:]]
    writer.snapshot()
    later = cli.json("verify", url, code=1)["findings"]
    assert not any(each["is_in_the_way"] for each in later)
    assert "new predictors do not read it" in cli("verify", url, code=1)


def test_verify_follows_the_chain(cli: Cli, writer: Writer) -> None:
    path = path_of(writer, entry_name(3))
    fields = json.loads(path.read_text())
    for change, problem in (
        ({"created": 1.0}, "it follows"),  # as the next entry notices
        ({"stream": "0" * 32}, "it is of stream"),
        ({"snapshot": None}, "as the newest snapshot"),
        ({"generation": 0}, "its generation 0 is below 1"),
    ):
        path.write_text(json.dumps(fields | change))
        assert problem in cli("verify", url_of(writer), code=1)
    path.unlink()
    assert "it is missing" in cli("verify", url_of(writer), code=1)


def test_verify_passes_over_what_retention_takes_meanwhile(
    cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer.snapshot()

    def reader(storage: Storage, part, manifest: Manifest, **options) -> PartReader:
        if manifest.version in (1, 2):  # it goes upwards, each entry before its parts
            storage.delete(entry_name(manifest.version))
            storage.delete(part.name)
        return PartReader(storage, part, manifest, **options)

    monkeypatch.setattr(verify_command, "PartReader", reader)
    assert cli.json("verify", url_of(writer))["ok"]
    monkeypatch.undo()
    assert cli.json("verify", url_of(writer))["entries"] == 3  # what is left begins above version 0


# tail


def test_tail_shows_the_newest_lines_and_ends_by_count(cli: Cli, writer: Writer) -> None:
    lines = cli("tail", url_of(writer), "--lines", 3, "--count", 2, "--json").splitlines()
    assert [json.loads(line)["version"] for line in lines] == [2, 3]
    assert json.loads(lines[0])["tables"] == {FQN: {"rows": 3, "bytes": 48}}
    screen = cli("tail", url_of(writer), "-n", 100, "-c", 5).splitlines()
    assert len(screen) == 6
    assert "snapshot" in screen[2]
    assert max(map(len, screen)) <= 100


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


def program(*arguments: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "delta_tracker.cli", *map(str, arguments)]
    return subprocess.Popen(
        command,
        cwd=REPOSITORY,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TERM": "dumb"},
    )


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


# diff


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_diff_is_what_a_loop_over_all_rows_finds(
    data: st.DataObject, cli: Cli, tmp_path_factory: pytest.TempPathFactory
) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.float16, torch.bfloat16]))
    writer = Writer(Storage(tmp_path_factory.mktemp("s").as_uri()), num_rows=12, dim=3, dtype=dtype)
    tables: dict[int, torch.Tensor] = {}
    for is_snapshot in [True, *data.draw(st.lists(st.booleans(), min_size=1, max_size=5))]:
        if is_snapshot:
            writer.table[data.draw(st.integers(0, 11))] += 1
            manifest = writer.snapshot()
        else:
            manifest = writer.delta(sorted(data.draw(st.sets(st.integers(0, 11)))))
        tables[manifest.version] = writer.table.clone()
    if data.draw(st.booleans()):
        compact(writer.storage)
    v1, v2 = data.draw(st.sampled_from([*tables])), data.draw(st.sampled_from([*tables]))
    found = cli.json("diff", url_of(writer), v1, v2, "--limit", 5)
    moved = {}
    for row, (one, other) in enumerate(zip(tables[v1].tolist(), tables[v2].tolist(), strict=True)):
        if one != other:
            moved[row] = math.dist(one, other)
    assert found["changed"] == len(moved)
    farthest = sorted(moved.items(), key=lambda item: (-item[1], item[0]))[:5]
    assert [each["row"] for each in found["farthest"]] == [row for row, _ in farthest]
    assert [each["moved"] for each in found["farthest"]] == pytest.approx([length for _, length in farthest])
    for each in found["farthest"]:
        assert each["length_before"] == pytest.approx(math.hypot(*tables[v1][each["row"]].tolist()))
    if moved:
        assert found["moved"]["max"] == pytest.approx(max(moved.values()))
        assert found["moved"]["mean"] == pytest.approx(sum(moved.values()) / len(moved))


def test_diff_of_rows_that_are_no_numbers(cli: Cli, writer: Writer) -> None:
    writer.table[3] = math.nan
    writer.table[4] = -writer.table[4] * 0.0  # -0.0 is other bits, and no way off
    writer.write("delta", [writer.rows([3, 4])])
    found = cli.json("diff", url_of(writer), 4, 5)
    assert [(each["row"], each["moved"]) for each in found["farthest"]] == [(3, None), (4, 0.0)]
    assert found["moved"]["max"] is None
    assert "nan" in cli("diff", url_of(writer), 4, 5)


def test_diff_says_what_it_lacks(cli: Cli, writer: Writer) -> None:
    cli("diff", url_of(writer), 1, 9, code=2)
    assert "versions up to 4" in cli.err
    cli("diff", url_of(writer), 1, 2, "--table", "ec.nothing", code=2)
    assert f"Name a table of version 1: {FQN}" in cli.err
    cli("diff", url_of(writer), 0, 2, code=1)
    assert "no snapshot" in cli.err
    assert "0 of 50 rows" in cli("diff", url_of(writer), 3, 3)


# export


@pytest.mark.parametrize("encoding", [Encoding.F32, Encoding.INT8])
@pytest.mark.parametrize("reads_pieces", [False, True])
def test_export_is_what_a_predictor_holds(
    cli: Cli, tmp_path: Path, encoding: Encoding, reads_pieces: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if reads_pieces:
        monkeypatch.setattr("delta_tracker.cli.versions._MEMORY_BYTES", 0)
    writer = make(tmp_path / "s", encoding=encoding)
    held = torch.full_like(writer.table, -1), torch.zeros(3, 2)
    predictor = Predictor({FQN: held[0], "over.weight": held[1]}, writer.storage)
    for version in (1, 3, 4):
        predictor.rollback(version)
        out = tmp_path / f"v{version}"
        found = cli.json("export", url_of(writer), "--version", version, "--out", out)
        assert found["files"] == ["dense.safetensors", f"{FQN}.weight.safetensors"]
        assert found["bytes"] == sum(path.stat().st_size for path in out.iterdir())
        state = load_file(out / f"{FQN}.weight.safetensors") | load_file(out / "dense.safetensors")
        cli("export", url_of(writer), "--version", version, "--out", f"{out}.pt", "--format", "torch")
        for each in (state, torch.load(f"{out}.pt", weights_only=True)):
            assert each.keys() == {f"{FQN}.weight", "over.weight"}
            assert torch.equal(each[f"{FQN}.weight"], held[0])
            assert torch.equal(each["over.weight"], held[1])
    assert sorted(path.name for path in tmp_path.iterdir()) == ["s", "v1", "v1.pt", "v3", "v3.pt", "v4", "v4.pt"]


def test_export_of_the_newest_version_and_of_odd_shapes(cli: Cli, tmp_path: Path) -> None:
    writer = make(tmp_path / "s", dtype=torch.bfloat16, dim=3)
    writer.dense = {
        "flag": torch.tensor([True]),
        "steps": torch.tensor(7),
        "none": torch.empty(0, 4),
        "half": torch.ones(3).half(),
    }
    writer.delta([1])
    cli("export", url_of(writer), "--out", tmp_path / "out")
    dense = load_file(tmp_path / "out" / "dense.safetensors")
    # Of a name that an older version alone has, that is what a predictor still holds.
    assert dense.keys() == {*writer.dense, "over.weight"}
    assert all(torch.equal(dense[name], tensor) for name, tensor in writer.dense.items())
    assert torch.equal(load_file(tmp_path / "out" / f"{FQN}.weight.safetensors")[f"{FQN}.weight"], writer.table)


@pytest.mark.parametrize("form", ["safetensors", "torch"])
def test_export_is_there_whole_or_not_at_all(
    cli: Cli, writer: Writer, tmp_path: Path, form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    arguments = ["export", url_of(writer), "--format", form, "--out"]
    (tmp_path / "mine").write_text("years of work")
    cli(*arguments, tmp_path / "mine", code=2)
    assert (tmp_path / "mine").read_text() == "years of work"
    cli(*arguments, tmp_path / "no" / "such" / "directory", code=2)
    flip(path_of(writer, entry(writer, 3).parts[0].name))
    cli(*arguments, tmp_path / "out", code=1)
    assert "corrupt" in cli.err
    monkeypatch.setattr(export_command, "write_rows", interrupted)
    cli(*arguments, tmp_path / "out", code=130)
    monkeypatch.setattr(export_command, "write_rows", full_disk)
    cli(*arguments, tmp_path / "out", code=2)
    assert "No space left on device" in cli.err
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine", "stream"]


def full_disk(*_: object) -> None:
    raise OSError(28, os.strerror(28))


# compact


def test_compact_leaves_less_to_read_and_the_same_rows(cli: Cli, writer: Writer) -> None:
    before = cli.json("inspect", url_of(writer))["new_predictor"]
    (merged,) = cli.json("compact", url_of(writer), "--fold", 0.01)["merged"]
    assert (merged["first"], merged["version"], merged["kind"]) == (0, 4, "snapshot")
    after = cli.json("inspect", url_of(writer))["new_predictor"]
    assert after["bytes"] < before["bytes"]
    assert after["versions"] == 1
    held = writer.model() | {"over.weight": torch.zeros(3, 2)}
    Predictor(held, writer.storage).sync()
    assert torch.equal(held[FQN], writer.table)
    assert cli("compact", url_of(writer)) == "nothing to merge\n"
    cli("compact", url_of(writer), "--fold", 0, code=2)
    cli("compact", url_of(writer), "--min-versions", 1, code=2)


def test_compact_beside_a_publisher_ends_and_breaks_nothing(
    cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*arguments, **options):
        found = compact(*arguments, **options)
        for number in range(3):
            writer.delta([number])
        return found

    monkeypatch.setattr(compact_command, "compact", busy)
    assert cli("compact", url_of(writer)).count("\n") == 1
    assert cli.json("verify", url_of(writer))["ok"]


def test_compact_that_is_interrupted_leaves_a_whole_stream(
    cli: Cli, writer: Writer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(StreamLog, "create_merged", interrupted)
        cli("compact", url_of(writer), code=130)
    assert cli.json("verify", url_of(writer))["ok"]
    assert cli.json("compact", url_of(writer))["merged"]


# demo


def test_demo_leaves_a_stream_for_the_other_commands(cli: Cli, tmp_path: Path) -> None:
    out = tmp_path / "demo"
    found = cli.json("demo", "--seconds", 0.5, "--every", 0.1, "--out", out)
    assert found["equal"]
    assert found["deltas"] >= 1
    assert cli.json("verify", out)["ok"]
    assert cli.json("inspect", out)["predictors"][0]["name"] == "demo-predictor"
    cli("demo", "--out", out, code=2)
    assert "bit for bit" in cli("demo", "--seconds", 0.3)
