"""Random training and publishing on several simulated CUDA streams: ``python -m tests.publisher.stream_orders``.

Training uses one stream after the other, and orders them itself. A version is read on any stream and written by another
thread, as by a publisher. Nothing but the library orders these streams. Each version must have exactly the rows of its
cut.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Collection
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from delta_tracker.publisher import host_copies
from tests.fake_streams.order import Race, passes
from tests.fake_streams.simulation import fake_streams
from tests.publisher.fake_trackers import ROW_OFFSET, FakeTracker, read, read_blocks, tracker_reader

_DIM = 4

Found = dict[str, tuple[list[int], Tensor]]


class _Run:
    """One run. Host tensors hold the weights after all operations, in the order in which they were called."""

    def __init__(self, seed: int, worker: ThreadPoolExecutor) -> None:
        self._draw = random.Random(seed)
        self._worker = worker
        sizes = [self._draw.choice([3, 20, 60]) for _ in range(self._draw.choice([1, 2, 3]))]
        self._weights = {f"t{number}": torch.rand(size, _DIM) for number, size in enumerate(sizes)}
        self._dense = torch.rand(5)
        self._on_device = self._dense.to("cuda")
        self._tracker = FakeTracker({fqn: each.to("cuda") for fqn, each in self._weights.items()})
        self._streams = [torch.cuda.default_stream(), *(torch.cuda.Stream() for _ in range(2))]
        torch.cuda.synchronize()
        self._stream = self._draw.choice(self._streams)
        self._reader = tracker_reader(self._tracker, dense={"dense": self._on_device})
        self._pending: set[tuple[str, int]] = set()
        self._since_cut: set[tuple[str, int]] = set()
        self._is_free = True  # no version is being published

    def go(self) -> None:
        for _ in range(self._draw.choice([1, 3, 6])):
            act = self._draw.choice([self._train, self._train, self._publish_delta, self._publish_snapshot])
            self._is_free = act == self._train
            act()
        torch.cuda.synchronize()  # before the weights are freed

    def _train(self) -> None:
        stream = self._stream
        if self._draw.random() < 0.4:
            stream = self._draw.choice(self._streams)
            stream.wait_stream(self._stream)
            self._stream = stream
        with torch.cuda.stream(stream):
            value = self._draw.random()
            ids = {
                fqn: torch.tensor([self._draw.randrange(len(each)) for _ in range(self._draw.choice([1, 5]))])
                for fqn, each in self._weights.items()
                if self._draw.random() < 0.8
            }
            rows = {(fqn, row) for fqn, each in ids.items() for row in each.tolist()}
            self._pending |= rows
            is_read = self._is_free and self._draw.random() < 0.2
            between = partial(self._publish_meanwhile, rows) if is_read else None
            self._tracker.write({fqn: each.to("cuda") for fqn, each in ids.items()}, value, between=between)
            self._on_device.fill_(value)
        for fqn, each in ids.items():
            self._weights[fqn][each] = value
        self._pending |= rows
        self._since_cut |= rows
        self._dense.fill_(value)
        self._tracker.log.consumers.step()

    def _publish_meanwhile(self, is_open: set[tuple[str, int]]) -> None:
        """Publish a delta while a batch is open: its rows may have the old or the new values, and are sent again."""
        with torch.cuda.stream(self._draw.choice(self._streams)):
            draft, delta = self._reader.cut("delta", None)
            check = self._expected(self._pending, is_open)
            check(self._in_worker(read, draft))
            self._reader.handle.commit(delta)
        self._pending = set(is_open)

    def _publish_delta(self) -> None:
        with torch.cuda.stream(self._draw.choice(self._streams)):
            draft, delta = self._reader.cut("delta", None)
        check = self._expected(self._pending)
        self._since_cut = set()
        for _ in range(self._draw.choice([0, 0, 2])):
            self._train()
        check(self._in_worker(read, draft))
        with torch.cuda.stream(self._draw.choice(self._streams)):
            if self._draw.random() < 0.8:
                self._reader.handle.commit(delta)
                self._pending = set(self._since_cut)
            else:
                self._reader.handle.abort(delta)

    def _publish_snapshot(self) -> None:
        with torch.cuda.stream(self._draw.choice(self._streams)):
            blocks = self._reader.copy()
        for _ in range(self._draw.choice([0, 1, 2])):
            self._train()
        copied = self._in_worker(read_blocks, blocks)
        for _ in range(self._draw.choice([0, 1])):
            self._train()
        with torch.cuda.stream(self._draw.choice(self._streams)):
            draft, delta = self._reader.cut("snapshot", None)
        every = {(fqn, row) for fqn, each in self._weights.items() for row in range(len(each))}
        check = self._expected(every)
        self._since_cut = set()
        for _ in range(self._draw.choice([0, 1])):
            self._train()
        found = self._in_worker(read, draft)
        for fqn, (ids, rows) in copied.items():
            newer = found.get(fqn, ([], rows[:0]))
            rows[torch.tensor(newer[0], dtype=torch.int64) - ROW_OFFSET] = newer[1]
            found[fqn] = ids, rows
        check(found)
        with torch.cuda.stream(self._draw.choice(self._streams)):
            self._reader.handle.commit(delta)
            self._reader.end(None, None)
        self._pending = set(self._since_cut)

    def _expected(
        self, pending: set[tuple[str, int]], is_open: Collection[tuple[str, int]] = ()
    ) -> Callable[[Found], None]:
        """Return a check that only the pending rows are found, with the current weights unless they are open."""
        weights = {fqn: each.clone() for fqn, each in self._weights.items()}
        dense, rows = self._dense.clone(), set(pending)

        def check(found: Found) -> None:
            assert torch.equal(found.pop("dense")[1], dense)
            assert {(fqn, row - ROW_OFFSET) for fqn, (ids, _) in found.items() for row in ids} == rows
            for fqn, (ids, values) in found.items():
                for row, value in zip(ids, values, strict=True):
                    local = row - ROW_OFFSET
                    assert (fqn, local) in is_open or torch.equal(value, weights[fqn][local]), (fqn, local)

        return check

    def _in_worker(self, call: Callable[..., Any], *arguments: object) -> Any:
        return self._worker.submit(call, *arguments).result()


def _is_copy(race: Race) -> bool:
    """Return True for copies of a snapshot's blocks, which may have rows that training has since written."""
    return passes(race.current_access, "publisher/host_copies.py", "read")


def run(seed: int) -> None:
    """Run one schedule in one order, and check every version."""
    draw = random.Random(seed)
    sizes = {"MAX_BUFFER_BYTES": draw.choice([64, 300, 1 << 20]), "CHUNK_BYTES": 16}
    with (
        mock.patch.multiple(host_copies, **sizes),
        fake_streams(seed, may_race=_is_copy),
        ThreadPoolExecutor(1) as worker,
    ):
        torch.manual_seed(seed)
        _Run(seed, worker).go()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=10_000)
    for number in range(parser.parse_args().seeds):
        run(number)
