"""``delta-tracker report``: its figures against what the test itself wrote, and its page against hostile streams."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import sys
import time
from collections import Counter
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from delta_tracker.cli.figures import MAX_TABLES
from delta_tracker.cli.history import History
from delta_tracker.cli.main import main
from delta_tracker.cli.movement import Movement, RowCounts
from delta_tracker.cli.page import render
from delta_tracker.monitor.buckets import RELATIVE_ERROR
from delta_tracker.stream.format.block_rows import BlockRows
from delta_tracker.stream.format.contents import Contents
from delta_tracker.stream.format.encoding import Encoding
from delta_tracker.stream.format.manifest import Block, DenseSpec, Manifest, Part
from delta_tracker.stream.heartbeat import Heartbeat, leave_heartbeat
from delta_tracker.stream.log import StreamLog, entry_name
from delta_tracker.stream.storage.storage import Storage
from delta_tracker.types import TableSpec
from tests.stream.streams import FQN, Writer

_EVIL = "ec.</script><script>alert(1)</script><img src=x onerror=alert(2)>'\"`{{7*7}}{% x %}\x1b[31m\u202e|&amp;"


class Trainer:
    """A stream of two tables, of which one is hostile, and everything that a report should find in it."""

    def __init__(self, storage: Storage) -> None:
        self.writer = Writer(storage)
        self.specs = {FQN: TableSpec(FQN, 200, 4, torch.float32), _EVIL: TableSpec(_EVIL, 30, 3, torch.float32)}
        self.writer.dense = {"over.weight": torch.zeros(5, 2)}
        self.tables = {fqn: torch.randn(spec.num_rows, spec.dim) for fqn, spec in self.specs.items()}
        self.moves: dict[str, list[tuple[int, float]]] = {fqn: [] for fqn in self.specs}
        self.counts: dict[str, Counter[int]] = {fqn: Counter() for fqn in self.specs}
        self.unmoved: Counter[str] = Counter()
        self.manifests: list[Manifest] = []

    def move(self, fqn: str, ids: list[int]) -> None:
        """New values for rows; every fifth id keeps its own."""
        for row in ids:
            before = self.tables[fqn][row].clone()
            if row % 5:
                self.tables[fqn][row] += torch.randn(len(before)) * 10.0 ** -(row % 3)
                self.moves[fqn].append((row, math.dist(self.tables[fqn][row].tolist(), before.tolist())))

    def snapshot(self) -> None:
        rows = [self.rows(fqn, None) for fqn in self.specs]
        self.manifests.append(self.writer.write("snapshot", rows, self.specs))

    def delta(self, **ids: list[int]) -> None:
        rows = []
        for fqn, listed in zip(self.specs, ids.values(), strict=True):
            if listed:
                self.move(fqn, listed)
                self.counts[fqn].update(listed)
                self.unmoved[fqn] += sum(row % 5 == 0 for row in listed)
                rows.append(self.rows(fqn, listed))
        self.manifests.append(self.writer.write("delta", rows, self.specs))

    def rows(self, fqn: str, ids: list[int] | None) -> BlockRows:
        spec = self.specs[fqn]
        held = self.tables[fqn].clone() if ids is None else self.tables[fqn][ids]
        form = "all" if ids is None else "list"
        block = Block(fqn, (0, spec.num_rows), (0, spec.dim), len(held), form, Encoding.F32)
        return BlockRows.of(block, None if ids is None else torch.tensor(ids), held)


@pytest.fixture
def trainer(tmp_path: Path) -> Trainer:
    torch.manual_seed(0)
    trainer = Trainer(Storage((tmp_path / "stream").as_uri(), create=True))
    random = np.random.default_rng(0)
    trainer.snapshot()
    for number in range(12):
        ids = [sorted(random.choice(size, count, replace=False).tolist()) for size, count in ((200, 40), (30, 6))]
        trainer.delta(a=ids[0], b=ids[1] if number % 3 else [])
        if number == 5:
            trainer.move(FQN, [7, 8])  # what a snapshot brings counts as moved too
            trainer.snapshot()
        if number == 8:
            trainer.writer.claim = StreamLog(trainer.writer.storage).claim()
    return trainer


def figures_of(capsys: pytest.CaptureFixture[str], *arguments: object, code: int = 0) -> dict:
    capsys.readouterr()
    assert main(["report", *map(str, arguments), "--json"]) == code
    return json.loads(capsys.readouterr().out)


def test_the_figures_are_those_of_an_independent_count(trainer: Trainer, capsys, tmp_path: Path) -> None:
    found = figures_of(capsys, trainer.writer.storage.url)
    deltas = [each for each in trainer.manifests if each.kind == "delta"]
    on_disk = {path.name: path.stat().st_size for path in (tmp_path / "stream" / "parts").iterdir()}
    of_deltas = sum(on_disk[part.name.removeprefix("parts/")] for each in deltas for part in each.parts)
    assert found["bytes"]["deltas"] == of_deltas
    assert found["bytes"]["snapshots"] == sum(on_disk.values()) - of_deltas
    full = (200 * 4 + 30 * 3 + 10) * 4
    assert found["bytes"]["full_snapshots"] == 14 * full
    assert found["bytes"]["saved"] == 14 * full - sum(on_disk.values())
    assert found["bytes"]["saved_ratio"] == pytest.approx(1 - sum(on_disk.values()) / (14 * full))
    versions = found["versions"]
    assert (versions["deltas"], versions["snapshots"], versions["restarts"], versions["missing"]) == (12, 2, 1, 0)
    assert (versions["first"], versions["last"], versions["older"]) == (1, 15, 0)
    times = [each.created for each in trainer.manifests]
    gaps = np.diff(times)
    assert found["cadence_seconds"]["count"] == 13
    assert found["cadence_seconds"]["max"] == pytest.approx(gaps.max(), rel=1.1 * RELATIVE_ERROR)
    assert [each["gap_seconds"] for each in found["bins"][1:]] == pytest.approx(gaps.tolist())
    assert [each["first"] for each in found["bins"]] == [each.version for each in trainer.manifests]
    for fqn, table in zip([FQN, _EVIL], found["tables"], strict=True):
        assert table["name"] == fqn
        assert table["rows"] == sum(trainer.counts[fqn].values())
        assert table["bytes"] == table["rows"] * trainer.specs[fqn].dim * 4 == sum(table["bin_bytes"])
        expected = sorted(trainer.counts[fqn].items(), key=lambda each: (-each[1], each[0]))[:10]
        assert [(each["row"], each["deltas"]) for each in table["hottest"]] == expected
        assert table["hottest_error"] == 0
        distances = sorted(distance for _, distance in trainer.moves[fqn])
        moves = table["moves"]
        assert (moves["count"], moves["unmoved"]) == (len(distances), trainer.unmoved[fqn])
        for name, fraction in (("p50", 0.5), ("p90", 0.9), ("p99", 0.99), ("max", 1.0)):
            expected = distances[math.floor(fraction * (len(distances) - 1))]
            assert moves[name] == pytest.approx(expected, rel=1.1 * RELATIVE_ERROR)
        for bar in table["histogram"]:
            within = sum(bar["above"] * (1 + 1e-6) < distance <= bar["to"] * (1 + 1e-6) for distance in distances)
            assert bar["count"] == within
        assert sum(bar["count"] for bar in table["histogram"]) == len(distances)
        assert len(table["histogram"]) <= 48


def test_a_row_in_two_column_shards_moves_once_by_both() -> None:
    storage = Storage("memory://")
    writer = Writer(storage)
    spec = TableSpec(FQN, 4, 4, torch.float32)
    values = torch.zeros(4, 4)
    movement = Movement({FQN: spec})

    def write(kind: str, ids: list[int] | None) -> None:
        halves = []
        for left in (0, 2):
            held = (values if ids is None else values[ids])[:, left : left + 2].contiguous()
            block = Block(FQN, (0, 4), (left, left + 2), len(held), "all" if ids is None else "list", Encoding.F32)
            halves.append(BlockRows.of(block, None if ids is None else torch.tensor(ids), held))
        movement.add(Contents(storage, writer.write(kind, halves, {FQN: spec})))

    write("snapshot", None)
    values[1] = torch.tensor([3.0, 0.0, 0.0, 4.0])
    write("delta", [1, 2])
    (table,) = movement.tables.values()
    assert table.counts.top(9) == [(1, 1), (2, 1)]
    assert (table.moves.count, table.unmoved) == (1, 1)
    assert table.moves.quantile(0.5) == pytest.approx(5.0, rel=RELATIVE_ERROR)


def test_of_a_table_too_large_every_nth_row_is_compared(trainer: Trainer) -> None:
    movement = Movement(trainer.specs, sample_bytes=2 * 30 * 16, num_counted=10)
    for manifest in trainer.manifests:
        movement.add(Contents(trainer.writer.storage, manifest))
    table = movement.tables[FQN]
    assert table.stride == 7  # 30 rows of 200 fit
    expected = sorted(distance for row, distance in trainer.moves[FQN] if row % 7 == 0)
    assert table.moves.count == len(expected) > 5
    assert table.moves.quantile(1) == pytest.approx(expected[-1], rel=1.1 * RELATIVE_ERROR)
    assert movement.tables[_EVIL].stride == 1
    wide = Movement({FQN: TableSpec(FQN, 2, 2**40, torch.float32)})
    assert wide.tables[FQN].stride == 0, "no memory for a width that somebody made up"


@given(
    st.lists(st.lists(st.integers(0, 30), unique=True, max_size=12), max_size=30),
    st.integers(1, 40),
)
@settings(deadline=None)
def test_counts_are_exact_or_too_low_by_no_more_than_they_say(deltas: list[list[int]], capacity: int) -> None:
    counts, truth = RowCounts(capacity), Counter[int]()
    for ids in deltas:
        counts.add(np.array(ids, np.int64))
        truth.update(ids)
    top = dict(counts.top(100))
    assert len(top) <= capacity
    if len(truth) <= capacity:
        assert counts.error == 0
        assert top == truth
    assert counts.error <= truth.total() / (capacity + 1)
    for row, count in truth.items():
        assert count - counts.error <= top.get(row, 0) <= count


@given(st.lists(st.tuples(st.sampled_from(["delta", "delta", "snapshot", "claim"]), st.integers(0, 99)), max_size=120))
@settings(deadline=None)
def test_bins_are_few_and_lose_nothing(entries: list[tuple[str, int]]) -> None:
    history, created = History(max_bins=4), 1e9
    spec = TableSpec(FQN, 100, 2, torch.float32)
    expected = Counter[str]()
    for version, (kind, rows) in enumerate(entries):
        created += rows
        block = Block(FQN, (0, 100), (0, 2), 100 if kind == "snapshot" else rows, "list", Encoding.F32)
        parts = () if kind == "claim" else (Part("parts/a.safetensors", 10 * rows, "", (block,)),)
        history.add(
            Manifest(
                stream="", generation=1, writer="", version=version, kind=kind, created=created, cut=created - 1,
                tables={FQN: spec}, parts=parts, dense={"d": DenseSpec(torch.float32, (3,))},
            )
        )  # fmt: skip
        expected[kind] += 1
        expected["bytes"] += 10 * rows * (kind == "delta")
        expected["rows"] += rows * (kind == "delta")
    bins = history.bins
    assert len(bins) <= 8
    assert sum(each.deltas for each in bins) == expected["delta"]
    assert sum(each.snapshots for each in bins) == expected["snapshot"]
    assert sum(each.delta_bytes for each in bins) == expected["bytes"]
    assert sum(each.tables[FQN].rows for each in bins if each.tables) == history.totals[FQN].rows == expected["rows"]
    for before, after in pairwise(bins):
        assert before.last < after.first
        assert before.count >= after.count
    versions = [version for version, (kind, _) in enumerate(entries) if kind != "claim"]
    times = [1e9 + sum(rows for _, rows in entries[: version + 1]) for version in versions]
    assert sum(each.gap_seconds for each in bins) == (times[-1] - times[0] if times else 0)
    assert max((each.max_gap for each in bins), default=0) == max(np.diff(times), default=0)


class Page(HTMLParser):
    """The elements and the text of a page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        self.text += data


def test_nothing_of_a_stream_becomes_markup_or_script(trainer: Trainer, tmp_path: Path) -> None:
    head = trainer.writer.claim.head
    fields = {"stream": head.stream, "version": 3, "lag_versions": 4, "lag_seconds": 1.0, "resyncs": 1}
    beat = Heartbeat(name="p", time=time.time(), error=_EVIL, **fields)
    leave_heartbeat(trainer.writer.storage, beat)
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
    shown = _EVIL.replace("\x1b", "\\x1b").replace("\u202e", "\\u202e")
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
    assert ("No delta has been committed yet" in text) is (num_versions < 2)
    assert ("No version has been committed yet" in text) is (num_versions < 1)
    assert "No predictor has left a heartbeat" in text


def test_tables_that_never_change_or_are_empty_have_their_line(tmp_path: Path) -> None:
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


def test_a_long_stream_is_read_as_far_as_asked_and_the_page_says_so(trainer: Trainer, capsys) -> None:
    url = trainer.writer.storage.url
    newest = figures_of(capsys, url, "--versions", 4)
    assert (newest["versions"]["first"], newest["versions"]["older"]) == (13, 12), "version 12 is a claim"
    assert newest["rows_read"]["versions"] == 3
    assert "12 older entries are left out" in Page(render(newest)).text
    none = figures_of(capsys, url, "--read", 0)
    assert none["rows_read"] == {"first": None, "last": None, "versions": 0, "num_bytes": 0}
    assert none["versions"]["deltas"] == 12
    assert "No rows were read." in Page(render(none)).text


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
    assert f"And {60 - MAX_TABLES} tables with less" in Page(out.read_text()).text


def test_a_damaged_stream_has_a_page_that_says_so(trainer: Trainer, capsys, tmp_path: Path) -> None:
    stream = tmp_path / "stream"
    part = stream / trainer.manifests[3].parts[0].name
    part.write_bytes(part.read_bytes()[:-1])
    (stream / entry_name(trainer.manifests[5].version)).write_text("</script>")
    found = figures_of(capsys, stream, code=1)
    assert len(found["faults"]) == 2
    assert found["versions"]["missing"] == 1
    assert found["rows_read"]["versions"] == 12
    out = tmp_path / "r.html"
    assert main(["report", str(stream), "--out", str(out)]) == 1
    text = Page(out.read_text()).text
    assert "2 faults found in this stream" in text
    assert f"version {trainer.manifests[3].version}: " in text


def test_a_missing_entry_is_a_fault_unless_a_snapshot_lies_above_it(trainer: Trainer, capsys) -> None:
    storage = trainer.writer.storage
    storage.delete(entry_name(0))
    figures_of(capsys, storage.url)
    storage.delete(name := entry_name(trainer.manifests[-2].version))
    assert [each.split(":")[0] for each in figures_of(capsys, storage.url, code=1)["faults"]] == [name]
    trainer.snapshot()
    figures_of(capsys, storage.url)


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
    assert "pip install 'delta_tracker[cli]'" in capsys.readouterr().err
    assert main(["report", trainer.writer.storage.url, "--json"]) == 0
