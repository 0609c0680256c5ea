"""The program: commands and help, wrong calls, exit codes, and untrusted text on a terminal."""

from __future__ import annotations

import json
import os
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

import delta_tracker.cli
from delta_tracker.cli.commands import commands
from delta_tracker.cli.main import main
from delta_tracker.cli.text import escaped
from delta_tracker.stream.heartbeat import Heartbeat, write_heartbeat
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.cli.commands import Cli, entry, flip, interrupted, make, path_of, url_of
from tests.cli.trainer import Trainer
from tests.stream.streams import Writer

HOSTILE = "ec.[red]t\x1b[2J\x9b31m\n\u202eevil"


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
    files = Path(delta_tracker.cli.__file__).parent.glob("*.py")
    assert {path.stem for path in files if "@click.command(" in path.read_text()} == commands_by_name().keys()


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
    assert line.startswith("error: URL='file:///nowhere/at/all' cannot be used. Check the URL")


def test_a_missing_package_is_named(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    cli("--help", code=2)
    assert "[cli]'" in cli.err


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


def test_an_http_endpoint_in_the_environment_needs_an_option(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"ENDPOINT": "http://127.0.0.1:9", "ACCESS_KEY_ID": "a", "SECRET_ACCESS_KEY": "b"}.items():
        monkeypatch.setenv(f"AWS_{name}", value)
    cli("inspect", "s3://bucket/x", code=2)
    assert "--option allow_http=true" in cli.err


_READERS = (
    *("inspect URL", "verify URL", "diff URL 1 2", "compact URL", "mirror URL OUT --once", "rollback URL 1"),
    *("export URL --out OUT", "report URL --out OUT"),
)
_WITHOUT_PARTS = ("tail URL", "top URL --once", "fleet URL", "release URL", "takeover URL")


@pytest.mark.parametrize(
    ("folder", "words"),
    [
        *(("log", words) for words in (*_READERS, *_WITHOUT_PARTS, "plan --from URL", "mirror OTHER EMPTY --once")),
        *(("parts", words) for words in (*_READERS, "mirror OTHER EMPTY --once")),
        *(("control", words) for words in (*_READERS, *_WITHOUT_PARTS)),
    ],
)
@pytest.mark.usefixtures("writer")
def test_each_command_names_a_link_in_the_place_of_a_folder(cli: Cli, tmp_path: Path, folder: str, words: str) -> None:
    make(tmp_path / "other")
    (tmp_path / "stream" / "control").mkdir(exist_ok=True)
    (tmp_path / "stream" / folder).rename(tmp_path / "aside")
    for stream in ("stream", "empty"):
        (tmp_path / stream).mkdir(exist_ok=True)
        (tmp_path / stream / folder).symlink_to(tmp_path / "aside")
    paths = {"URL": "stream", "OTHER": "other", "EMPTY": "empty", "OUT": "out"}
    places = {word: str(tmp_path / name) for word, name in paths.items()}
    cli(*(places.get(word, word) for word in words.split()), code=2)
    said = " ".join(cli.err.split())
    assert f"{folder} is a link to '{tmp_path / 'aside'}' instead of a directory. Replace it by" in said


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
    write_heartbeat(writer.storage, Heartbeat(name="p", time=time.time(), error=HOSTILE, **beat))
    (path_of(writer, "predictors") / "q.json").write_text(json.dumps({"name": HOSTILE}))
    url = url_of(writer)
    shown = [cli("inspect", url), cli.err, cli("diff", url, 1, 2), cli("export", url, "--out", tmp_path / "out")]
    cli("diff", url, 1, 2, "--table", "x", code=2)
    shown.append(cli.err)
    flip(path_of(writer, entry(writer, 2).parts[0].name))
    shown += [cli("verify", url, code=1), cli("inspect", url, "--json")]
    for text in shown:
        assert not {"\x1b", "\x9b", "\u202e"} & set(text), text
    assert "[red]" in shown[0]
    assert [each.name for each in tmp_path.glob("out/*")] == [
        "ec.%5Bred%5Dt%1B%5B2J%C2%9B31m%0A%E2%80%AEevil.weight.safetensors"
    ]


_CALLS = [
    "inspect URL",
    "inspect URL --json",
    "verify URL",
    "diff URL 1 3",
    "fleet URL",
    "tail URL --count 5",
    "top URL --once",
    "plan --from URL",
    "mirror URL COPY --once",
    "--help",
]


@pytest.fixture
def words(request: pytest.FixtureRequest, writer: Writer, tmp_path: Path) -> list[str]:
    return [{"URL": url_of(writer), "COPY": str(tmp_path / "copy")}.get(each, each) for each in request.param.split()]


@pytest.mark.parametrize("words", _CALLS, indirect=True, ids=str)
def test_a_closed_pipe_exits_with_141(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as pipe:
        monkeypatch.setattr("sys.stdout", pipe)
        assert main(words) == 141


@pytest.mark.parametrize("words", _CALLS, indirect=True, ids=str)
def test_a_full_disk_exits_with_2_and_says_so(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with Path("/dev/full").open("w") as full:
        monkeypatch.setattr("sys.stdout", full)
        assert main(words) == 2
    assert capsys.readouterr().err.startswith("error: the output cannot be written: No space left on device. Redirect")


@pytest.mark.parametrize("words", ["inspect URL", "--help"], indirect=True, ids=str)
def test_a_closed_stdout_exits_with_2_and_says_so(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("sys.stdout", None)
    assert main(words) == 2
    assert "stdout='closed' cannot be used. Redirect it to a file" in capsys.readouterr().err
    monkeypatch.setattr("sys.stderr", None)
    assert main(words) == 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("inspect URL -o x", "A value of --option has no =. Write name=value."),
        ("mirror URL COPY --dst-option =x", "A value of --dst-option has no name. Write name=value."),
        ("mirror URL", "Pass DST, the URL of the copy."),
        ("mirror URL --promote", "Pass URL and DST with --promote, or only the URL of the mirror and --force."),
        ("mirror URL COPY --promote --once", "Omit --once, --table, --poll and --keep-versions with --promote."),
        ("mirror URL COPY --force", "Pass --force and --silence only with --promote."),
        ("export URL", "Pass --out or --dcp."),
        ("diff URL 1 3 --ids", "Table ec.embeddings.t has no raw ids. Omit --ids."),
        ("inspect s3://", "Write s3://bucket/prefix, with a bucket."),
        ("inspect az:///prefix", "Write az://container/prefix, with a container."),
    ],
)
def test_what_a_call_lacks_is_named(cli: Cli, writer: Writer, tmp_path: Path, arguments: str, message: str) -> None:
    words = {"URL": url_of(writer), "COPY": str(tmp_path / "copy")}
    cli(*(words.get(each, each) for each in arguments.split()), code=2)
    assert message in cli.err


def test_the_tables_to_choose_from_are_named(cli: Cli, trainer: Trainer) -> None:
    cli("diff", trainer.writer.storage.url, 1, 2, code=2)
    names = [f"--table {escaped(each)}" for each in sorted(entry(trainer.writer, 1).tables)]
    assert f"The stream has 2 tables. Pass {' or '.join(names)}." in cli.err
