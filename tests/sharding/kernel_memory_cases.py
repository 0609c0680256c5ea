"""Cases that count how often kernels are flushed and split into tables, and that read rows from a kernel's cache."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation, construct_cache_state
from fbgemm_gpu.split_table_batched_embeddings_ops_training import ComputeDevice, SplitTableBatchedEmbeddingBagsCodegen
from torch.utils._python_dispatch import TorchDispatchMode
from torchrec.distributed.model_parallel import DistributedModelParallel

from delta_tracker import ModelDeltaTracker, Predictor, Publisher, TrackingMode
from delta_tracker.sharding.kernel_memory import Kernel, one_cut
from delta_tracker.sharding.local_shard import LocalShard
from delta_tracker.sharding.row_cache import cached_table
from delta_tracker.sharding.weights import read_rows
from delta_tracker.tracker.change_log import ChangeLog
from delta_tracker.tracker.log_writes import LogWrites
from delta_tracker.tracker.modes import EmbeddingCapture
from delta_tracker.tracker.store.shadow import make_store
from delta_tracker.types import ShardSpec, TableSpec
from tests.models import Spec, Table, batch, kernels_of, shard
from tests.sharding.cached_kernel import CachedTbe, Location, cache_lookups

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


class _Ops(TorchDispatchMode):
    """Counts the operations."""

    def __init__(self) -> None:
        super().__init__()
        self.num_ops = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.num_ops += 1
        return func(*args, **(kwargs or {}))


def steps(rank: int, world_size: int, num_tables: int, mode: str) -> dict[str, Any]:
    """Calls and operations of the hooks in the second step, on a model with one kernel."""
    spec = Spec([Table(f"t{number}", 10, "table:0") for number in range(num_tables)], bag=True)
    model = shard(spec)
    features = batch(spec, torch.Generator().manual_seed(1), max_length=5)
    num_ops = 0
    begin_write = LogWrites.begin_write

    def counted(log: LogWrites, key: int, ids: Any) -> None:
        nonlocal num_ops
        assert all(len(table_ids) for table_ids in ids.values())
        with _Ops() as ops:
            begin_write(log, key, ids)
        num_ops += ops.num_ops

    with ModelDeltaTracker(model, mode=TrackingMode[mode]) as tracker:
        model(features).backward()
        with _counted(model) as calls, patch.object(LogWrites, "begin_write", counted):
            model(features).backward()
            tracker.step()
        assert tracker.num_hook_errors == 0
    return {"calls": dict(calls), "num_ops": num_ops}


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


_CACHED = [
    (11, 4, Location.MANAGED_CACHING),
    (9, 8, Location.DEVICE),
    (13, 8, Location.MANAGED_CACHING),
]


def _cached_shards(num_tables: int) -> tuple[CachedTbe, dict[str, LocalShard]]:
    """Return a kernel with a small cache, and its tables by name."""
    specs = [_CACHED[number % len(_CACHED)] for number in range(num_tables)]
    tbe = CachedTbe(specs, num_sets=2)
    kernel = Kernel(tbe, tuple((f"t{slot}", 1) for slot in range(num_tables)), is_fused=True)
    shards = {}
    for slot, (rows, dim, _) in enumerate(specs):
        table = TableSpec(f"t{slot}", rows, dim, torch.float32)
        spec = ShardSpec(table, 0, rows, ((0, dim),))
        shards[table.fqn] = LocalShard(spec, ((kernel, slot),), torch.device("cpu"), is_fused=True)
    return tbe, shards


def in_place(rank: int, world_size: int, seed: int) -> None:
    """Old states come from the cache or the table, whichever is newer, and no hook flushes the cache."""
    generator = torch.Generator().manual_seed(seed)
    tbe, shards = _cached_shards(4)
    held = {fqn: view.clone() for fqn, view in zip(shards, tbe.split_embedding_weights(), strict=True)}
    with cache_lookups():
        stores = {
            fqn: make_store(partial(shards.__getitem__, fqn), EmbeddingCapture(), engine="torch") for fqn in shards
        }
        log = ChangeLog(stores, ["reader"], delete_on_read=True, max_bytes=None)
        sent = {fqn: rows.clone() for fqn, rows in held.items()}
        for key in range(60):
            ids = {fqn: torch.randint(0, len(rows), (3,), generator=generator).unique() for fqn, rows in held.items()}
            for slot, fqn in enumerate(shards):
                tbe.load(slot, ids[fqn][:2], generator)
            before = tbe.num_flushes, tbe.num_splits
            log.writes.begin_write(key, ids)
            assert (tbe.num_flushes, tbe.num_splits - (key == 0)) == before
            for slot, fqn in enumerate(shards):
                values = torch.rand(len(ids[fqn]), held[fqn].shape[1], generator=generator)
                tbe.write(slot, ids[fqn], values)
                held[fqn][ids[fqn]] = values
            log.writes.end_write(key, ids)
            if key % 3 == 1:  # a cut that flushes nothing, so that the cache has the newest rows
                before = tbe.num_flushes
                log.consumers.clear("reader")
                assert tbe.num_flushes == before
                sent = {fqn: rows.clone() for fqn, rows in held.items()}
            if key % 3 == 0:
                before = tbe.num_flushes, tbe.num_splits
                with one_cut():
                    reading = log.consumers.read("reader")
                    for fqn, rows in reading.rows.items():
                        assert torch.equal(rows.states, sent[fqn][rows.ids]), (key, fqn)
                        assert torch.equal(read_rows(shards[fqn], rows.ids), held[fqn][rows.ids]), (key, fqn)
                        assert torch.equal(read_rows(shards[fqn]), held[fqn]), (key, fqn)
                    log.consumers.commit(reading)
                assert (tbe.num_flushes - 1, tbe.num_splits) == before
                sent = {fqn: rows.clone() for fqn, rows in held.items()}


def fbgemm(rank: int, world_size: int) -> None:
    """The stub has FBGEMM's attributes, and finds rows of tables where FBGEMM puts them."""
    specs = [(rows, dim, EmbeddingLocation[location.name]) for rows, dim, location in _CACHED * 2]
    state = construct_cache_state([rows for rows, *_ in specs], [at for *_, at in specs], list(range(len(specs))))
    tbe, _ = _cached_shards(len(specs))
    for slot, first in enumerate(state.cache_hash_size_cumsum[:-1]):
        cached = cached_table(tbe, slot)
        assert (-1 if cached is None else cached.first) == first
    assert tbe.total_cache_hash_size == state.total_cache_hash_size
    real = SplitTableBatchedEmbeddingBagsCodegen([(10, 4, EmbeddingLocation.HOST, ComputeDevice.CPU)])
    assert cached_table(real, 0) is None, "on the CPU there is no cache"
    for name in ("lxu_cache_weights", "lxu_cache_state", "total_cache_hash_size", "embedding_specs"):
        assert type(getattr(real, name)) in (type(getattr(tbe, name)), torch.Tensor), name
    names = [argument.name for argument in torch.ops.fbgemm.lxu_cache_lookup.default._schema.arguments]
    assert names[:3] == ["linear_cache_indices", "lxu_cache_state", "invalid_index"]


def replaced(rank: int, world_size: int) -> None:
    """Views are created again once their memory was replaced, and only then."""
    tbe, shards = _cached_shards(3)

    def check(num_splits: int) -> None:
        for _ in range(2):
            for slot, local in enumerate(shards.values()):
                assert torch.equal(read_rows(local), tbe._split()[slot])
        assert tbe.num_splits == num_splits

    check(1)
    tbe.weights_uvm += 1
    check(1)
    tbe.weights_uvm = tbe.weights_uvm + 1  # as a load with assign=True does
    check(2)
    tbe.weights_dev.data = tbe.weights_dev + 1  # as Module.to() does
    check(3)
    held = tbe.weights_uvm.clone()
    storage = tbe.weights_uvm.untyped_storage()
    size = storage.size()
    storage.resize_(0)  # as fully sharded replicas and stashed memory do
    storage.resize_(size)
    tbe.weights_uvm.copy_(held)
    for slot, local in enumerate(shards.values()):
        assert torch.equal(read_rows(local), tbe._split()[slot])
