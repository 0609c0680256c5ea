"""Human-readable values, and escaping of untrusted text on a terminal."""

from __future__ import annotations

import pytest

from delta_tracker.cli import text
from delta_tracker.errors import StorageError


@pytest.mark.parametrize("harmful", ["\x1b[2J", "\x9b1m", "\r", "\n", "\t", "\u202e", "\u2028", "\ud800", "\x00"])
def test_control_characters_are_escaped(harmful: str) -> None:
    shown = text.escaped(f"table {harmful}x")
    assert harmful[0] not in shown
    assert shown == f"table {ascii(harmful[0])[1:-1]}{harmful[1:]}x"
    assert text.escaped("schöne Tabelle [red]") == "schöne Tabelle [red]"


def test_an_error_is_one_short_paragraph() -> None:
    shown = text.error_text(StorageError("file:///x\n", "broken " * 1000))
    assert shown.startswith("error: ")
    assert "\n" not in shown
    assert len(shown) < 1000


def test_numbers_have_the_unit_that_says_enough() -> None:
    assert [text.size(each) for each in (0, 999, 999.6, 1500, 10_000, 2e16)] == [
        "0 B",
        "999 B",
        "1.0 kB",
        "1.5 kB",
        "10 kB",
        "20 PB",
    ]
    seconds = [text.duration(each) for each in (0.5, 9.94, 119, 120, 7199, 7200, 172_800)]
    assert seconds == ["500 ms", "9.9 s", "119 s", "2 min", "120 min", "2 h", "2 d"]
    assert text.plural(1, "entry", "entries") + text.plural(0, "part") == "1 entry0 parts"
    assert text.format_time(-1e30).startswith("in year -")
