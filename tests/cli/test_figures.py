"""Figures of a report against the data that the test wrote."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from delta_tracker.cli.main import main
from delta_tracker.cli.page import render
from delta_tracker.monitor.buckets import RELATIVE_ERROR
from delta_tracker.stream.format.manifest import entry_name
from tests.cli.trainer import HOSTILE, Page, Trainer, figures_of
from tests.stream.streams import FQN


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
    gaps = np.diff([each.created for each in trainer.manifests])
    by_store = 0.05  # the time from a publisher's last version to the claim of the next one is that of the files
    assert found["cadence_seconds"]["count"] == 13
    assert found["cadence_seconds"]["max"] == pytest.approx(gaps.max(), rel=1.1 * RELATIVE_ERROR, abs=by_store)
    assert [each["gap_seconds"] for each in found["bins"][1:]] == pytest.approx(gaps.tolist(), abs=by_store)
    assert [each["first"] for each in found["bins"]] == [each.version for each in trainer.manifests]
    for fqn, table in zip([FQN, HOSTILE], found["tables"], strict=True):
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
            expected = distances[max(1, math.ceil(round(fraction * len(distances), 6))) - 1]  # the nearest rank
            assert moves[name] == pytest.approx(expected, rel=1.1 * RELATIVE_ERROR)


def test_a_long_stream_is_read_as_far_as_asked_and_the_page_says_so(trainer: Trainer, capsys) -> None:
    url = trainer.writer.storage.url
    newest = figures_of(capsys, url, "--versions", 4)
    assert (newest["versions"]["first"], newest["versions"]["older"]) == (13, 12), "version 12 is a claim"
    assert newest["rows_read"]["versions"] == 3
    assert "12 older entries were not read" in Page(render(newest)).text
    none = figures_of(capsys, url, "--read", 0)
    assert none["rows_read"] == {"first": None, "last": None, "versions": 0, "num_bytes": 0}
    assert none["versions"]["deltas"] == 12
    assert "No rows were read." in Page(render(none)).text


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


@pytest.mark.advice("StreamError: _gap _read_rows")
def test_a_missing_entry_is_a_fault_unless_a_snapshot_lies_above_it(trainer: Trainer, capsys) -> None:
    storage = trainer.writer.storage
    storage.delete(entry_name(0))
    figures_of(capsys, storage.url)
    storage.delete(name := entry_name(trainer.manifests[-2].version))
    assert [each.split(":")[0] for each in figures_of(capsys, storage.url, code=1)["faults"]] == [name]
    trainer.snapshot()
    figures_of(capsys, storage.url)
