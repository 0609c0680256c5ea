"""``delta-tracker report`` writes its page whole or not at all, and names the extra that it needs."""

from __future__ import annotations

import sys
from pathlib import Path

from delta_tracker.cli.main import main
from delta_tracker.stream.format.manifest import entry_name
from tests.cli.trainer import Trainer


def test_a_page_is_there_whole_or_as_it_was(trainer: Trainer, tmp_path: Path, monkeypatch, capsys) -> None:
    out = tmp_path / "r.html"
    out.write_text("before")
    monkeypatch.setattr(Path, "replace", lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device")))
    assert main(["report", trainer.writer.storage.url, "--out", str(out)]) == 2
    assert "No space left on device" in capsys.readouterr().err
    monkeypatch.undo()
    assert out.read_text() == "before"
    assert {path.name for path in tmp_path.iterdir()} == {"stream", "r.html"}
    assert main(["report", trainer.writer.storage.url, "--out", str(tmp_path / "none" / "r.html")]) == 2
    assert "Name a file in a directory that exists" in capsys.readouterr().err
    monkeypatch.chdir(tmp_path)
    assert main(["report", "stream"]) == 0
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_without_the_extra_it_says_what_to_install(trainer: Trainer, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert main(["report", trainer.writer.storage.url, "--out", str(tmp_path / "r.html")]) == 2
    assert "[cli]'" in capsys.readouterr().err


def test_the_number_of_findings_is_printed(trainer: Trainer, tmp_path: Path, capsys) -> None:
    url, page = trainer.writer.storage.url, tmp_path / "r.html"
    assert main(["report", url, "--out", str(page)]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 1
    (tmp_path / "stream" / entry_name(9)).write_text("{")
    assert main(["report", url, "--out", str(page)]) == 1
    assert capsys.readouterr().out.splitlines()[-1] == "1 finding, listed in the page"
    assert "00000000000000000009.json is malformed" in page.read_text()
