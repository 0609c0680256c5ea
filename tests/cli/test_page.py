"""The page of a report: safe against hostile streams, and small."""

from __future__ import annotations

import base64
import hashlib
import os
import re
import time
from collections import Counter
from pathlib import Path

import pytest
import torch

from delta_tracker.cli.main import main
from delta_tracker.cli.page import render
from delta_tracker.cli.report import MAX_TABLES
from delta_tracker.stream import log as log_module
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, entry_name
from delta_tracker.stream.heartbeat import Heartbeat, write_heartbeat
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.cli.commands import beat, leave, make, path_of
from tests.cli.trainer import HOSTILE, Page, Trainer, figures_of
from tests.stream.streams import FQN, Writer


def test_text_of_a_stream_never_becomes_markup_or_script(trainer: Trainer, tmp_path: Path) -> None:
    head = trainer.writer.claim.head
    fields = {"stream": head.stream, "version": 3, "lag_versions": 4, "lag_seconds": 1.0, "resyncs": 1}
    beat = Heartbeat(name="p", time=time.time(), error=HOSTILE, **fields)
    write_heartbeat(trainer.writer.storage, beat)
    out = tmp_path / "r.html"
    assert main(["report", trainer.writer.storage.url, "--out", str(out)]) == 0
    text = out.read_text(encoding="utf-8")
    page = Page(text)
    tags = Counter(tag for tag, _ in page.elements)
    assert tags["script"] == 1
    assert not {"img", "iframe", "link", "object", "base", "form", "a"} & set(tags)
    attributes = {name for _, each in page.elements for name in each}
    assert not {name for name in attributes if name.startswith("on") or name in ("src", "href")}
    assert "http" not in text.replace("http-equiv", "")
    shown = HOSTILE.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
    assert page.text.count(shown[:20]) >= 4
    assert shown in page.text, "it is shown as it is, in the error"
    (script,) = re.findall(r"<script>(.*?)</script>", text, flags=re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    policy = next(each["content"] for tag, each in page.elements if "http-equiv" in each)
    assert policy.startswith("default-src 'none'")
    assert f"script-src 'sha256-{digest}';" in policy
    assert "\x1b" not in text
    assert "\u202e" not in text


def test_the_page_shows_the_figures(trainer: Trainer, capsys) -> None:
    figures = figures_of(capsys, trainer.writer.storage.url)
    page = Page(render(figures))
    assert "versions 1 to 15: 12 deltas, 2 snapshots, 1 new publisher" in page.text
    for table in figures["tables"]:
        assert f"{table['rows']:,}" in page.text
        for each in table["hottest"]:
            assert f"row {each['row']}" in page.text
    hits = [each for _, each in page.elements if "data-t" in each]
    of_sizes = hits[: len(figures["bins"])]
    assert [each["data-t"].split(" ")[1] for each in of_sizes] == [str(each["first"]) for each in figures["bins"]]
    legend = [each for tag, each in page.elements if tag == "li" and "data-s" in each]
    assert len(of_sizes[1]["data-v"].split("|")) == len(figures["tables"]) + 1 <= len(legend)


@pytest.mark.parametrize("num_versions", [0, 1, 2, 3])
def test_a_stream_of_few_versions_has_a_page(num_versions: int, tmp_path: Path) -> None:
    writer = Writer(Storage((tmp_path / "s").as_uri(), create=True))
    for number in range(num_versions):
        writer.delta([number]) if number else writer.snapshot()
    out = tmp_path / "r.html"
    assert main(["report", str(tmp_path / "s"), "--out", str(out)]) == 0
    text = Page(out.read_text()).text
    assert ("No delta has been committed yet" in text) is (num_versions == 1)
    assert ("No version has been committed yet" in text) is (num_versions < 1)
    assert "No predictor has written a heartbeat" in text


def dated(tmp_path: Path, seconds: list[float], skews: dict[int, float] | None = None) -> Writer:
    """A stream of versions committed at ``seconds`` by the store's clock, and ``skews`` later by the writer's."""
    now, skew = 1e9, 0.0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(log_module.time, "time", lambda: now + skew)
        writer = Writer(Storage((tmp_path / "s").as_uri(), create=True, fsync=False))
        os.utime(path_of(writer, entry_name(0)), (now, now))
        for number, each in enumerate(seconds):
            now, skew = 1e9 + each, (skews or {}).get(number, skew)
            version = (writer.delta([number % 20]) if number else writer.snapshot()).version
            os.utime(path_of(writer, entry_name(version)), (now, now))
    return writer


def page_of(writer: Writer, tmp_path: Path, code: int = 0) -> Page:
    assert main(["report", writer.storage.url, "--out", str(tmp_path / "r.html")]) == code
    return Page((tmp_path / "r.html").read_text())


def test_time_is_on_the_axis_and_a_pause_of_the_publisher_is_empty(tmp_path: Path) -> None:
    seconds = [0, 10, 20, 30, 70, 80, 90]
    page = page_of(dated(tmp_path, seconds), tmp_path)
    assert "time (UTC)" in page.text
    hits = [each["style"] for _, each in page.elements if "data-t" in each][: len(seconds)]
    places = [tuple(map(float, re.findall(r"[\d.]+", style or ""))) for style in hits]
    assert [left + width for left, width in places] == pytest.approx([each + 10 for each in seconds], abs=0.1)
    assert [width for _, width in places] == pytest.approx([10] * len(seconds), abs=0.1)


@pytest.mark.parametrize("skews", [{0: 7200.0}, {3: 7200.0}, {3: -7200.0}, {2: 50.0, 4: -30.0}])
def test_time_is_on_the_axis_even_if_a_clock_was_wrong(tmp_path: Path, skews: dict[int, float]) -> None:
    seconds = [0, 10, 20, 30, 70, 80, 90]
    page = page_of(dated(tmp_path, seconds, skews), tmp_path)
    assert "time (UTC)" in page.text
    hits = [each["style"] for _, each in page.elements if "data-t" in each][:7]
    lefts = [float(re.findall(r"[\d.]+", style or "")[0]) for style in hits]
    assert lefts == sorted(lefts)


def test_a_silent_predictor_has_no_figures(tmp_path: Path) -> None:
    writer = make(tmp_path / "stream")
    leave(writer, beat(writer, "quiet", host="a", lag_versions=0, lag_seconds=0.0, version=2), seconds_ago=900)
    leave(writer, beat(writer, "other", host="a", lag_versions=0, lag_seconds=0.0, version=2), seconds_ago=900)
    leave(writer, beat(writer, "fresh", host="b", lag_versions=0, lag_seconds=0.0, version=None), seconds_ago=0)
    page_of(writer, tmp_path)
    text = (tmp_path / "r.html").read_text()
    rows = {
        name: Page(row).text.split() for name, row in re.findall(r'class="name">(\w+)</td>(.*?)</tr>', text, re.DOTALL)
    }
    assert " ".join(rows["quiet"]).startswith("! silent a 15 min ago no data since ")
    assert not {"0", "versions", "ms"} & set(rows["quiet"])
    assert "".join(rows["a"]) == "22" + 4 * "nodata"
    figures = rows["fresh"][rows["fresh"].index("ago") :]
    assert not {"0", "versions", "ms"} & set(figures), "without a version, it has no lag"


def test_tables_name_each_cell_for_narrow_pages(trainer: Trainer, tmp_path: Path) -> None:
    leave(trainer.writer, beat(trainer.writer, "p", error="late"))
    page = page_of(trainer.writer, tmp_path)
    cells = [each for tag, each in page.elements if tag == "td"]
    labelled = [each for each in cells if "data-label" in each]
    assert {each["data-label"] for each in labelled} >= {"version", "behind", "rows sent", "p50"}
    rest = Counter(each.get("class") for each in cells if "data-label" not in each)
    assert set(rest) <= {"name", "text state", "text", "bar", None}
    num_hot = sum(tag == "td" and each.get("class") == "bar" for tag, each in page.elements)
    assert rest[None] == 2 * num_hot, "the tables of hot rows are narrow"


def test_tables_that_never_change_or_are_empty_are_listed(tmp_path: Path) -> None:
    writer = Writer(Storage((tmp_path / "s").as_uri(), create=True))
    specs = {
        FQN: writer.spec,
        "empty": TableSpec("empty", 0, 4, torch.float32),
        "still": TableSpec("still", 9, 2, torch.float32),
    }
    writer.write("delta", [], specs)
    writer.write("delta", [writer.rows([1])], specs)
    out = tmp_path / "r.html"
    assert main(["report", str(tmp_path / "s"), "--out", str(out)]) == 0
    assert "still" in out.read_text()


def test_a_page_stays_small_whatever_the_names(tmp_path: Path) -> None:
    writer = Writer(Storage((tmp_path / "s").as_uri(), create=True, fsync=False))
    specs = {name: TableSpec(name, 8, 2, torch.float32) for name in (f"{index}" + "<&" * 20_000 for index in range(60))}

    def rows(name: str) -> BlockRows:
        return BlockRows.of(Block(name, (0, 8), (0, 2), 1, "list", Encoding.F32), torch.tensor([3]), torch.randn(1, 2))

    for _ in range(3):
        writer.write("delta", [rows(name) for name in specs], specs)
    out = tmp_path / "r.html"
    assert main(["report", str(tmp_path / "s"), "--out", str(out)]) == 0
    assert out.stat().st_size < 300_000
    assert f"And {60 - MAX_TABLES} tables with fewer bytes" in Page(out.read_text()).text
