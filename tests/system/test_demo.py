"""The demo at a tiny size: it succeeds, prints its findings, and detects a predictor that differs from the trainer."""

from __future__ import annotations

import contextlib
import os
import re
import subprocess
import time
import urllib.request
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest
from prometheus_client.core import Sample
from prometheus_client.parser import text_string_to_metric_families

from examples.movielens.data import load_ratings
from examples.movielens.failover import Handover, Story, compare_digests
from examples.movielens.failover_job import digests_path
from examples.movielens.forks import Forks, ProcessFailedError, Send
from examples.movielens.report import Predictions
from examples.movielens.settings import Settings
from examples.movielens.verify import TablesDifferError, compare, verify_run
from tests import forked

pytestmark = pytest.mark.timeout(900)  # on a busy machine

PNG_SIGNATURE = b"\x89PNG\r\n\x1a\n"


def python_m(*command: str) -> subprocess.CompletedProcess[str]:
    return forked.run(*command, timeout_seconds=850)


_scraped: dict[str, set[str]] = defaultdict(set)


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], Path]:
    """Run the demo once, scraping its metrics."""
    folder = tmp_path_factory.mktemp("demo")
    out, output, errors = (folder / name for name in ("out", "output", "errors"))
    # So many batches that the training lasts for some collections of its metrics, of which there is one per second.
    command = ["examples.movielens", "--out", str(out), "--ratings", "2500", "--batch", "8", "--every", "16"]
    program = forked.Program(*command, output=output, errors=errors)
    try:
        while (code := program.poll()) is None:
            for name, url in re.findall(r"^metrics of (\S+): curl (\S+)\n", output.read_text(), flags=re.MULTILINE):
                with contextlib.suppress(OSError), urllib.request.urlopen(url, timeout=5) as answer:
                    _scraped[name].add(answer.read().decode())
            time.sleep(0.2)
    finally:
        program.kill()
    return subprocess.CompletedProcess(command, code, output.read_text(), errors.read_text()), out


def test_metrics_can_be_scraped_during_the_demo(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    """Combine all scrapes: a trainer has no metrics before its first collection, and no gauges after its training."""
    assert sorted(_scraped) == ["predictor", "trainer-0", "trainer-1"]
    samples: dict[tuple[str, str], list[Sample]] = defaultdict(list)
    for name, text in ((name, text) for name, texts in _scraped.items() for text in texts):
        for family in text_string_to_metric_families(text):
            samples[name, family.name.removeprefix("delta_tracker_")] += family.samples
    for trainer in ("trainer-0", "trainer-1"):
        lookups = [each.value for each in samples[trainer, "lookups"] if each.labels["table"] == "ec.embeddings.user"]
        assert max(lookups) > 0
        assert {sample.labels["consumer"] for sample in samples[trainer, "pending_rows"]} == {"stream"}
        assert {sample.value for sample in samples[trainer, "fences"]} == {0}
    for versions in (samples["trainer-0", "published_versions"], samples["predictor", "applied_versions"]):
        assert {sample.labels["kind"] for sample in versions} >= {"snapshot", "delta"}


def test_demo_succeeds_and_prints_its_findings(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    finished, out = demo
    assert finished.returncode == 0, finished.stderr
    for shown in ("bit for bit", "commit to applied", "log loss", "AUC", "1 snapshot", "16 deltas"):
        assert shown in finished.stdout
    assert (out / "log-loss.png").read_bytes().startswith(PNG_SIGNATURE)


def test_verify_fails_on_one_flipped_bit(demo: tuple[subprocess.CompletedProcess[str], Path]) -> None:
    _, out = demo
    assert "bit for bit" in verify_run(Settings.load(out).work)
    path = out / "work" / "predictor@ec.embeddings.movie.npy"
    good = np.load(path)
    bad = good.copy()
    bad.view(np.uint32)[1000, 3] ^= 1
    np.save(path, bad)
    try:
        finished = python_m("examples.movielens.verify", str(out))
    finally:
        np.save(path, good)
    assert finished.returncode == 1
    assert "ec.embeddings.movie differs in 1 of 1,682 rows" in finished.stderr
    assert python_m("examples.movielens.verify", str(out)).returncode == 0


@pytest.mark.sweep("short", only=True)
def test_a_demo_with_managed_collisions_runs_tiny(tmp_path: Path) -> None:
    out = tmp_path / "out"
    finished = python_m("examples.movielens", "--out", str(out), "--ratings", "2500", "--batch", "32", "--zch", "0.33")
    assert finished.returncode == 0, finished.stderr
    for shown in ("all 10 predictor tables", "evicted ids", "16 deltas"):
        assert shown in finished.stdout
    path = out / "work" / "predictor@mc._embedding_module.embeddings.movie.raw_ids.npy"
    raw_ids = np.load(path)
    raw_ids[3] += 1
    np.save(path, raw_ids)
    with pytest.raises(TablesDifferError, match=r"embeddings.movie.raw_ids differs in 1 of"):
        verify_run(Settings.load(out).work)


def test_a_demo_of_failover_runs_tiny(tmp_path: Path) -> None:
    out = tmp_path / "out"
    options = ("--out", str(out), "--ratings", "1000", "--batch", "32", "--silence", "0.6")
    finished = python_m("examples.movielens.failover", *options)
    assert finished.returncode == 0, finished.stderr
    assert finished.stdout.count("killed job") == 2
    for shown in ("all 8 predictor tables", "0 resyncs", "takeovers and at the end equal those of a run without"):
        assert shown in finished.stdout
    settings = Settings.load(out)
    handovers = [Handover(0, "killed", 0, 0)] * finished.stdout.count("took over")
    path = digests_path(settings, "without-interruption", 1)
    path.write_text(path.read_text().replace("a", "b"))
    with pytest.raises(TablesDifferError, match="differs after"):
        compare_digests(settings, Story(handovers))


def table(*rows: Sequence[float]) -> np.ndarray:
    return np.array(rows, dtype=np.float32)


@pytest.mark.parametrize(
    ("predictor", "problem"),
    [
        ({"a": table([1, 2], [3, 5])}, "a differs in 1 of 2 rows"),
        ({"a": table([1, 2], [3, 4]), "b": table([0])}, "b is only in one"),
        ({}, "a is only in one"),
        ({"a": table([1, 2])}, r"a is \(2, 2\) float32 and \(1, 2\) float32"),
        ({"a": table([1, 2], [3, 4]).astype(np.float64)}, "float64"),
    ],
)
def test_compare_names_each_difference(predictor: dict[str, np.ndarray], problem: str) -> None:
    trainer = {"a": table([1, 2], [3, 4])}
    compare(trainer, {"a": table([1, 2], [3, 4])})
    with pytest.raises(TablesDifferError, match=problem):
        compare(trainer, predictor)


def test_compare_is_about_bits() -> None:
    compare({"a": table([np.nan])}, {"a": table([np.nan])})
    with pytest.raises(TablesDifferError):
        compare({"a": table([0.0])}, {"a": table([-0.0])})
    with pytest.raises(TablesDifferError):
        compare({}, {})


def test_demo_does_not_touch_an_unknown_folder(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("years of work")
    finished = python_m("examples.movielens", "--out", str(tmp_path))
    assert finished.returncode == 1
    assert "has other files" in finished.stderr
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


@pytest.mark.parametrize(
    ("wrong", "problem"),
    [
        ({"batch": 31}, "batch=31 cannot be split"),
        ({"batch": 0}, "batch=0 cannot be split"),
        ({"every": 0}, "every=0 would never publish"),
        ({"ratings": 99}, "ratings=99 is too few"),
        ({"zch": 3}, "zch=3 is no share of the ids"),
        ({"ratings": 100_001}, "ratings=100001 is more than the data set has"),
    ],
)
def test_settings_that_cannot_work_are_refused(tmp_path: Path, wrong: dict[str, int], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Settings(out=tmp_path, **wrong)


def test_ratings_are_in_time_order_and_inside_their_tables() -> None:
    ratings = load_ratings(500)
    assert list(ratings.table_rows)[:2] == ["user", "movie"]
    assert ratings.ids.shape == (len(ratings.table_rows), 500)
    for ids, num_rows in zip(ratings.ids, ratings.table_rows.values(), strict=True):
        assert 0 <= int(ids.min()) <= int(ids.max()) < num_rows
    assert (ratings.ids[:2, 0] + 1).tolist() == [259, 255]  # the oldest rating in the data set, four stars
    assert ratings.labels[0] == 1


def test_log_loss_is_the_textbook_one() -> None:
    predictions = Predictions({"fresh": np.array([0.0, 2.0], np.float32)}, np.array([1.0, 0.0], np.float32))
    probability = 1 / (1 + np.exp(-np.array([0.0, 2.0])))
    expected = [-np.log(probability[0]), -np.log(1 - probability[1])]
    np.testing.assert_allclose(predictions.losses("fresh"), expected, rtol=1e-6)


def _endless(send: Send) -> None:
    send({"pid": os.getpid()})
    time.sleep(600)


def _failing(send: Send) -> None:
    raise RuntimeError("it has a problem")


def test_a_failing_child_ends_all_of_them(tmp_path: Path) -> None:
    with Forks(tmp_path, limit_seconds=60) as forks:
        forks.start("endless", _endless)
        events = forks.events()
        pid = next(events)["pid"]
        forks.start("bad one", _failing)
        with pytest.raises(ProcessFailedError, match=r"(?s)bad one ended with code 1.*it has a problem"):
            list(events)
        os.kill(pid, 0)
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_children_that_take_too_long_are_named(tmp_path: Path) -> None:
    with Forks(tmp_path, limit_seconds=0.1) as forks:
        forks.start("endless", _endless)
        with pytest.raises(ProcessFailedError, match="endless took too long"):
            list(forks.events())
