"""Conditions that need attention: their order, their next steps, and their words beside the color."""

from __future__ import annotations

import time
from pathlib import Path

from delta_tracker.cli.main import main
from delta_tracker.errors import HeldVersionError
from delta_tracker.stream.format.manifest import entry_name
from delta_tracker.stream.log import StreamLog
from tests.cli.commands import beat, entry, flip, leave, make, path_of
from tests.cli.trainer import Page, figures_of
from tests.stream.streams import Writer


def written(writer: Writer, tmp_path: Path, code: int = 0) -> str:
    assert main(["report", writer.storage.url, "--out", str(tmp_path / "r.html")]) == code
    return (tmp_path / "r.html").read_text()


def test_each_condition_has_its_next_step_and_a_word_beside_its_color(tmp_path: Path, capsys) -> None:
    writer = make(tmp_path / "stream")
    assert Page(written(writer, tmp_path)).text.count("Next step") == 0
    assert "Nothing needs attention" in Page(written(writer, tmp_path)).text
    stuck = tuple((5.0 * (2 - index), 1, 3) for index in range(3))
    error = HeldVersionError(2, "drift <b>")
    for name, changes in {
        "held": {"window": stuck, "error": f"HeldVersionError: {error}", "next_step": error.remedy, "version": 1},
        "odd": {"window": stuck, "error": "KeyError: 'x. y'", "version": 1},
        "stuck": {"window": stuck, "version": 1},
        "elsewhere": {"stream": "1" * 32},
    }.items():
        leave(writer, beat(writer, name, **changes))
    leave(writer, beat(writer, "silent", time=time.time() - 900), seconds_ago=900)
    writer.claim = StreamLog(writer.storage).claim()
    writer.delta([1])
    writer.claim = StreamLog(writer.storage).claim()
    writer.delta([1])
    writer.storage.delete(entry_name(4))
    flip(path_of(writer, entry(writer, 3).parts[0].name))
    found = figures_of(capsys, writer.storage.url, code=1)
    said = [(each["level"], each["what"].split(":")[0].split(",")[0], each["next_step"]) for each in found["notices"]]
    assert [each[:2] for each in said] == [
        ("fault", "log/00000000000000000004.json"),
        ("fault", "version 3"),
        ("fault", "Predictor held"),
        ("fault", "Predictor odd"),
        ("fault", "Predictor stuck"),
        ("warning", "A new publisher took over 2 times"),
        ("warning", "Predictor silent"),
        ("warning", "Predictor elsewhere"),
    ]
    assert said[2][2] == "Check the trainer; then call accept(2) or rollback(...), or publish a good snapshot"
    page = Page(written(writer, tmp_path, code=1))
    for _, _, step in said:
        assert f"Next step: {step}." in page.text
    assert page.text.count("✕ Fault") == 5
    assert page.text.count("! Warning") == 3
