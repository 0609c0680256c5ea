"""``delta-tracker top``: its screen, its lines of JSON, and the state of the terminal afterwards."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from delta_tracker.cli import top as top_command
from delta_tracker.cli.main import main
from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import HOSTILE, beat, leave
from tests.stream.streams import Writer


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage((tmp_path / "stream").as_uri(), create=True, fsync=False)


def frames(storage: Storage, arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["top", storage.url, *arguments.split()]) == 0
    return capsys.readouterr().out


def test_predictors_are_shown_and_dead_ones_age_out(storage: Storage, capsys) -> None:
    writer = Writer(storage)
    writer.snapshot()
    for number in range(5):
        writer.delta([number])
    for each, seconds_ago in (
        (beat(writer, "live"), 0),
        (beat(writer, "held", error=HOSTILE), 0),
        (beat(writer, "silent"), 100),
        (beat(writer, "gone"), 4000),
        (beat(writer, "elsewhere", stream="0" * 32), 0),
    ):
        leave(writer, each, seconds_ago)
    found = json.loads(frames(storage, "--once --json", capsys))
    seen = {each["name"]: (each["state"], each["behind"], each["lag_versions"]) for each in found["predictors"]}
    assert seen == {
        "live": ("live", 1, 3),
        "held": ("live", 1, 3),
        "silent": ("silent", 3, 3),
        "elsewhere": ("live", None, None),
    }
    assert found["predictors_gone"] == 1
    text = frames(storage, "--once", capsys)
    assert text.index("\nheld ") < text.index("\nsilent ") < text.index("\nlive ")
    assert "predictor (and 1 gone)" in text
    assert "resyncs 8  errors 1" in text
    for bad in ("\x1b", "\x9b", "\u202e", "\r"):
        assert bad not in text
    assert "[red]\\x1b[31m" in text, "markup is no markup"


def test_lines_of_json_go_on_until_it_is_interrupted(storage: Storage, capsys, monkeypatch) -> None:
    writer = Writer(storage)
    writer.snapshot()
    left = [lambda: writer.delta([1]), lambda: None, lambda: None]

    def sleep(seconds: float) -> None:
        assert seconds == 0.5
        if not left:
            raise KeyboardInterrupt
        left.pop(0)()
        Storage.read = broken if len(left) == 1 else read  # type: ignore[method-assign]

    read = Storage.read

    def broken(self, name, **options):
        raise StorageError(self.url, "connection refused")

    monkeypatch.setattr(Storage, "read", read)
    monkeypatch.setattr(top_command.time, "sleep", sleep)
    assert main(["top", storage.url, "--json", "--every", "0.5"]) == 130
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["head"]["version"] for line in lines] == [1, 2, 2, 2]
    assert [line["problem"] is not None for line in lines] == [False, False, True, False], "it tries again"
    assert "connection refused" in lines[2]["problem"]


def test_a_url_without_a_stream_is_reported_immediately(tmp_path: Path, capsys) -> None:
    assert main(["top", str(tmp_path / "none")]) == 2
    assert "There is no stream" in capsys.readouterr().err
