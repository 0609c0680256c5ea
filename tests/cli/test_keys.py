"""Keys are read at once where there is a terminal, and waited for otherwise."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

from delta_tracker.cli.keys import reading_keys


def test_a_key_ends_the_wait(monkeypatch) -> None:
    ours, theirs = os.openpty()
    with os.fdopen(theirs) as keyboard:
        monkeypatch.setattr(sys, "stdin", keyboard)
        with reading_keys() as wait:
            assert wait(0.0) == ""
            os.write(ours, b"Q ")
            assert [wait(5.0), wait(5.0), wait(-1.0)] == ["q", " ", ""]
    os.close(ours)


def test_without_a_terminal_it_waits(monkeypatch) -> None:
    with Path(os.devnull).open() as nothing:
        monkeypatch.setattr(sys, "stdin", nothing)
        slept: list[float] = []
        monkeypatch.setattr(time, "sleep", slept.append)
        with reading_keys() as wait:
            assert wait(2.0) == ""
    assert slept == [2.0]
