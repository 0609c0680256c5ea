"""The planned requests of a publisher and of a predictor are those that a real S3 server gets."""

from __future__ import annotations

import secrets
import time
from collections import Counter
from collections.abc import Sequence

import pytest

from delta_tracker import Predictor, Upkeep
from delta_tracker.planning.forecast import VersionSize, forecast
from delta_tracker.stream.storage.storage import Storage
from tests.planning.streams import Job, new_model
from tests.servers import S3, proxy

_NUM_VERSIONS = 3
_POLL_SECONDS = 0.2


def _billed(seen: Sequence[str]) -> Counter[str]:
    """Return the numbers of requests as a provider counts them."""
    kinds: Counter[str] = Counter()
    for request in seen:
        method, _, path = request.partition(" ")
        kinds["lists" if "list-type" in path else {"POST": "puts"}.get(method, f"{method.lower()}s")] += 1
    return kinds


def test_a_stream_on_s3_takes_the_planned_requests(s3: S3) -> None:
    url = f"{s3.url}/{secrets.token_hex(8)}"
    with proxy(s3.port) as trainers, proxy(s3.port) as predictors:
        job = Job(Storage(url, options=s3.through(trainers.port)), 0.05, upkeep=Upkeep(pointer_seconds=None))
        trainers.seen.clear()
        for number in range(4):
            job.publish(snapshot=number % 2 == 0)
        made = _billed([request for request in trainers.seen if "/control/" not in request])
        planned = forecast(job.workload(snapshot_every=2)).publisher.times(4 / 60)
        # job.publish() reads the entry once more; without a pointer, it is neither written nor renewed by listings.
        assert made["puts"] == pytest.approx(planned.puts - 4)
        assert made["gets"] - 4 == pytest.approx(planned.gets - 0.4)
        assert made["lists"] == pytest.approx(planned.lists - 0.8)

        with Predictor(new_model(), Storage(url, options=s3.through(predictors.port))) as predictor:
            first = predictor.sync()
            predictor.follow(_POLL_SECONDS)
            predictors.seen.clear()
            begin = time.monotonic()
            for _ in range(_NUM_VERSIONS):
                newest = job.publish().version
                assert predictor.wait(newest, timeout=60.0)
                time.sleep(2 * _POLL_SECONDS)
            made, seconds = _billed(predictors.seen), time.monotonic() - begin
            parts, entries = ([each for each in predictors.seen if f"/{part}/" in each] for part in ("parts", "log"))
    job.publisher.close()
    assert len(parts) == newest - first == _NUM_VERSIONS
    # Polls come later on a slow machine; the waits between them vary by a quarter.
    least, most = (
        forecast(job.workload(seconds=seconds / _NUM_VERSIONS, poll_seconds=each, has_heartbeats=False))
        .predictor.times(seconds / 3600)
        .gets
        for each in (seconds / (len(entries) - _NUM_VERSIONS), _POLL_SECONDS)
    )
    assert 0.3 * least <= made["gets"] <= 1.25 * most + 2
    assert made.keys() == {"gets"}


def test_a_large_part_takes_the_planned_requests(s3: S3) -> None:
    """A part of more than 8 MiB is a multipart upload: it is begun, sent in pieces, and completed."""
    with proxy(s3.port) as server:
        storage = Storage(f"{s3.url}/{secrets.token_hex(8)}", options=s3.through(server.port))
        for num_bytes in (8 << 20, 20_000_000):
            server.seen.clear()
            storage.put("parts/a", [memoryview(bytes(num_bytes))])
            assert _billed(server.seen)["puts"] == VersionSize(0, (num_bytes,)).num_writes - 1
