"""``delta-tracker top``: its screen, its lines of JSON, and the state of the terminal afterwards."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path

import pytest

from delta_tracker.cli import top as top_command
from delta_tracker.cli.main import main
from delta_tracker.errors import StorageError
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.storage.storage import Storage
from tests.cli.commands import HOSTILE, beat, date, interrupted, leave, path_of
from tests.stream.streams import Writer


@pytest.fixture
def storage(tmp_path: Path) -> Storage:
    return Storage((tmp_path / "stream").as_uri(), create=True, fsync=False)


def frames(storage: Storage, arguments: str, capsys: pytest.CaptureFixture[str]) -> str:
    capsys.readouterr()
    assert main(["top", storage.url, *arguments.split()]) == 0
    return capsys.readouterr().out


@pytest.fixture(autouse=True)
def _wide_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "200")  # a narrower one wraps and cuts texts


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
    (silent,) = [line.split() for line in text.splitlines() if line.startswith("silent ")]
    assert silent[1:3] == ["!", "silent"]
    assert "no data since" in " ".join(silent)
    assert silent.count("-") == 4, "what it wrote last is not what is now"
    assert "next step: " in text
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
    rates = [line["rows_per_second"] for line in lines]
    assert lines[2]["time"] > lines[2]["read"] == lines[1]["read"]
    assert rates[2] == rates[1] > 0, "rates do not fall to 0 because the store cannot be read"


def test_a_malformed_entry_below_the_head_is_shown(storage: Storage, capsys) -> None:
    writer = Writer(storage)
    writer.snapshot()
    for number in range(3):
        writer.delta([number])
    path_of(writer, entry_name(2)).write_text("{")
    found = json.loads(frames(storage, "--once --json", capsys))
    assert [each["version"] for each in found["versions"]] == [4, 3]
    assert "00000000000000000002.json is malformed" in found["problem"]
    assert "Check for other writers" in frames(storage, "--once", capsys)


def test_a_terminal_shows_a_screen_that_ctrl_c_ends(storage: Storage, capsys, monkeypatch) -> None:
    writer = Writer(storage)
    writer.snapshot()
    leave(writer, beat(writer, "p-1", version=1))
    for name, value in {"FORCE_COLOR": "1", "COLUMNS": "80", "LINES": "24", "TERM": "xterm"}.items():
        monkeypatch.setenv(name, value)
    sleeps = iter([lambda: writer.delta([1]), interrupted])
    monkeypatch.setattr(time, "sleep", lambda _: next(sleeps)())
    assert main(["top", storage.url, "--every", "60"]) == 130
    output = capsys.readouterr().out
    assert output.rindex("\x1b[?1049l") > output.index("\x1b[?1049h"), "the terminal shows its former screen"
    shown = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", output).split("delta-tracker top")[1:]
    assert ["version 1 " in shown[0], "version 2 " in shown[1], len(shown)] == [True, True, 2]
    assert all(word in each for each in shown for word in ("heartbeat", "last change", "kind", "Ctrl-C quits"))


def test_a_url_without_a_stream_is_reported_or_waited_for(storage: Storage, capsys, monkeypatch) -> None:
    assert main(["top", storage.url, "--once"]) == 2
    assert "there is no stream" in capsys.readouterr().err
    sleeps = iter([lambda: None, lambda: Writer(storage).snapshot(), interrupted])
    monkeypatch.setattr(time, "sleep", lambda _: next(sleeps)())
    assert main(["top", storage.url, "--json"]) == 130
    shown = capsys.readouterr()
    assert "waiting for its first version" in shown.err
    assert json.loads(shown.out)["head"]["version"] == 1


def test_a_publisher_that_has_stopped_needs_attention(storage: Storage, capsys) -> None:
    writer = Writer(storage)
    writer.snapshot()
    for number in range(4):
        writer.delta([number])
    for seconds_ago, path in enumerate(sorted(path_of(writer, "log").iterdir(), reverse=True)):
        date(path, 600 + 10 * seconds_ago)
    shown = frames(storage, "--once", capsys)
    assert "No version for 10 min; before, the longest time between two was 10.0 s" in shown
    assert "next step: If training should go on, read the log of the trainer" in shown
