"""The program: commands and help, wrong calls, exit codes, and untrusted text on a terminal."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from delta_tracker.cli.commands import commands
from delta_tracker.stream.heartbeat import Heartbeat, leave_heartbeat
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.cli.commands import Cli, entry, flip, interrupted, path_of, url_of
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
    assert line.startswith("error: URL='file:///nowhere/at/all' cannot be used. There is no stream")


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
