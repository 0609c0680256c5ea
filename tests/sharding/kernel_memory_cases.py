"""Cases that count how often the kernels of a real model are flushed and split into tables."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TrackingMode
from tests.models import Spec, Table, batch, kernels_of, shard

_FLUSH, _SPLIT = "flush", "split_embedding_weights"


def _kernels(model: DistributedModelParallel) -> list[Any]:
    """Return the kernels of the model's collection on this rank, without the replicated ones."""
    return kernels_of(model.module.ec)


@contextmanager
def _counted(model: DistributedModelParallel) -> Iterator[Counter[str]]:
    """Count the calls of all kernels together, each as a share of one call for each kernel."""
    calls: Counter[str] = Counter()
    kernels = _kernels(model)

    def counting(name: str, call: Callable[[], Any]) -> Callable[[], Any]:
        def counted() -> Any:
            calls[name] += 1
            return call()

        return counted

    for kernel in kernels:
        for name in (_FLUSH, _SPLIT):
            setattr(kernel, name, counting(name, getattr(kernel, name)))
    yield calls
    for kernel in kernels:
        for name in (_FLUSH, _SPLIT):
            delattr(kernel, name)


def counts(rank: int, world_size: int, url: str, num_tables: int, mode: str) -> dict[str, dict[str, int]]:
    """Calls by what is done, on a model with two kernels of equally many tables."""
    tables = [
        Table(f"{dtype}{number}", 10, "table:0", dtype=dtype)
        for dtype in ("FP32", "FP16")
        for number in range(num_tables)
    ]
    spec = Spec(tables, bag=True)
    model = shard(spec)
    assert len(_kernels(model)) == 2
    generator = torch.Generator().manual_seed(0)
    found: dict[str, dict[str, int]] = {}

    def count(what: str, action: Callable[[], Any]) -> Any:
        with _counted(model) as calls:
            result = action()
        found[what] = dict(calls)
        return result

    def train() -> None:
        model(batch(spec, generator)).backward()
        tracker.step()

    tracker = count("build", lambda: ModelDeltaTracker(model, ["stream", "reader"], mode=TrackingMode[mode]))
    publisher = Publisher(tracker, url, "stream")
    count("snapshot", publisher.snapshot)
    count("train", train)
    delta = count("read", lambda: tracker.get_delta("reader", with_values=True, with_optimizer=True))
    assert all(len(rows) for rows in delta.values())
    count("publish", publisher.publish)
    rows = count("read tables", tracker.read_tables)
    few = {fqn: torch.tensor([1, 0]) for fqn in delta}
    some = count("read rows of tables", lambda: tracker.read_tables(few))
    for fqn, now in rows.items():
        assert torch.equal(now, tracker.read_rows(fqn))
        assert torch.equal(some[fqn], now[[1, 0]])
    held = {fqn: torch.zeros(table.num_rows, table.dim, dtype=table.dtype) for fqn, table in tracker.tables.items()}
    Predictor(held, url).sync()
    assert all(torch.equal(held[fqn], tracker.read_rows(fqn)) for fqn in held)
    publisher.close()
    tracker.detach()
    return found


def flushed_anew(rank: int, world_size: int, url: str, mode: str) -> int:
    """Every read and version has the rows in a kernel's cache, because each begins with a flush.

    The cache is simulated: a flush writes all rows of its kernel, as a cache in which all of them changed does.
    """
    spec = Spec([Table("a", 10, "table:0"), Table("b", 10, "table:0")], bag=True)
    model = shard(spec)
    (kernel,) = _kernels(model)
    generator = torch.Generator().manual_seed(0)
    num_flushes = 0

    def flush() -> None:
        nonlocal num_flushes
        num_flushes += 1
        kernel.emb_module.weights_host.data.fill_(num_flushes)  # as the cache does it: torch does not count the write

    with ModelDeltaTracker(model, ["stream", "reader"], mode=TrackingMode[mode]) as tracker:
        publisher = Publisher(tracker, url, "stream")
        publisher.snapshot()
        held = {fqn: torch.zeros(table.num_rows, table.dim) for fqn, table in tracker.tables.items()}
        predictor = Predictor(held, url)
        predictor.sync()
        kernel.flush = flush
        for _ in range(3):
            model(batch(spec, generator, max_length=3)).backward()
            tracker.step()
            before = num_flushes
            delta = tracker.get_delta("reader", with_values=True)
            assert num_flushes == before + 1
            assert all(bool((rows.values == num_flushes).all()) for rows in delta.values())
            publisher.publish()
            assert num_flushes == before + 2
            predictor.sync()
            assert all(bool((held[fqn][rows.ids] == num_flushes).all()) for fqn, rows in delta.items())
            for fqn in held:
                rows = tracker.read_rows(fqn)
                assert bool((rows == num_flushes).all()), "a read of one table flushes for itself"
        assert tracker.num_hook_errors == 0
        publisher.close()
    return num_flushes
