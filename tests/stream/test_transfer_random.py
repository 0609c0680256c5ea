"""Random interruptions of transfers: readers end up equal, no byte is fetched twice, and stop() never waits."""

from __future__ import annotations

import contextlib
import random
import time

import torch
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from delta_tracker import Predictor
from delta_tracker.errors import StorageError
from delta_tracker.stream.storage.storage import Storage
from tests.predictor.serving import eventually
from tests.stream.slow_s3 import Fault, SlowS3, slow_s3
from tests.stream.streams import FQN, Writer

_NUM_ROWS = 16_384  # parts of 1 to 4 MiB
_LOST_BYTES = 300 << 10  # an interruption loses at most 256 KiB
_ABANDONED_BYTES = 1 << 20  # bytes in flight when stop() abandons a request
_PROMPT_SECONDS = 30.0
_STEPS = ["snapshot", "delta", "sync", "sync", "follow", "follow"]


class Schedule:
    """A stream and one reader of it, behind a server that interrupts transfers; each method is a step."""

    def __init__(self, writer: Writer, server: SlowS3, seed: int) -> None:
        self.writer, self.server = writer, server
        self.random = random.Random(seed)
        server.max_retries = 0
        self.model = writer.model()
        self.predictor = Predictor(self.model, server.storage(read_timeout="60s"))
        self.num_empty = self.num_stops = 0

    def fault(self, name: str, kinds: str, share: float) -> Fault | None:
        if self.random.random() >= share:
            return None
        size = self.writer.storage.size(name)
        num_bytes = int(size * self.random.choice([0, 0, 0.4, 0.6]))
        self.num_empty += num_bytes == 0
        return self.random.choice(kinds.split()), num_bytes

    def snapshot(self) -> None:
        self.writer.snapshot()

    def delta(self) -> None:
        self.writer.delta(sorted(self.random.sample(range(_NUM_ROWS), _NUM_ROWS // 4)))

    def sync(self) -> None:
        """Try a few times; no attempt reads bytes again that an earlier one has read."""
        self.server.faults = lambda name: self.fault(name, "cut", 0.8)
        for _ in range(4):
            if self.attempt():
                return

    def attempt(self) -> bool:
        """Sync once; return True if everything was read, which fails only if a request returned no bytes."""
        before = self.num_empty
        try:
            self.predictor.sync()
        except StorageError:
            assert self.num_empty > before, "it failed although every request brought some bytes"
            return False
        assert torch.equal(self.model[FQN], self.writer.table)
        return True

    def follow(self) -> None:
        """Follow for a moment, in which a transfer may stall."""
        self.server.faults = lambda name: self.fault(name, "cut silent silent", 0.9)
        self.predictor.follow(poll_seconds=0.01)
        faults = sum(self.server.num_faults.values())
        head = self.writer.claim.head.version
        eventually(lambda: self.predictor.version == head or sum(self.server.num_faults.values()) > faults)
        time.sleep(0.1)
        begin = time.monotonic()
        with contextlib.suppress(StorageError):  # the fault that it was retrying
            self.predictor.stop()
        assert time.monotonic() - begin < _PROMPT_SECONDS
        self.num_stops += 1

    def check(self) -> None:
        for name, num_bytes in self.server.sent.items():
            if name.startswith("parts/"):
                lost = self.server.num_broken[name] * _LOST_BYTES + self.num_stops * _ABANDONED_BYTES
                assert num_bytes <= self.writer.storage.size(name) + lost


@given(steps=st.lists(st.sampled_from(_STEPS), min_size=3, max_size=7), seed=st.integers(0, 1 << 30))
@settings(max_examples=6, deadline=None, derandomize=True, phases=[Phase.generate], report_multiple_bugs=False)
def test_random_interruptions_cost_what_they_interrupt(steps: list[str], seed: int) -> None:
    writer = Writer(Storage("memory://"), num_rows=_NUM_ROWS, dim=64)
    with slow_s3(writer.storage) as server:
        schedule = Schedule(writer, server, seed)
        schedule.snapshot()
        for step in ["sync", *steps, "follow"]:
            getattr(schedule, step)()
            schedule.check()
        server.faults = lambda _: None
        assert schedule.attempt()
        schedule.check()
