"""Cases for the tracker's state in a checkpoint, on real sharded models; each runs on every rank.

One case trains and saves, another one restores, possibly at another world size under another plan. Both write what they
hold to files, which the test compares.
"""

from __future__ import annotations

import contextlib
import logging
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Self

import torch
import torchmetrics
from torch import distributed as dist
from torch.distributed import checkpoint as dcp
from torch.distributed import distributed_c10d
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from delta_tracker import ModelDeltaTracker, Publisher, TopK, TrackingMode
from delta_tracker.integrations.dcp import SavedTracker
from delta_tracker.monitor.monitor import MONITOR, Monitor
from delta_tracker.monitor.state import LogicalCounters
from delta_tracker.tracker.checkpoint.part import digest
from delta_tracker.tracker.checkpoint.tracker_checkpoint import LoadOutcome
from delta_tracker.tracker.cursors import LogState
from tests.models import Spec, Table, batch, ordinary_optimizer, shard
from tests.publisher.publishing_cases import attempt

CONSUMERS = ["a", "b", "c"]


def build(spec: dict[str, Any], mode: str) -> tuple[Spec, Any, ModelDeltaTracker]:
    made = Spec([Table(**table) for table in spec["tables"]], **{key: spec[key] for key in spec if key != "tables"})
    model = shard(made)
    return made, model, ModelDeltaTracker(model, CONSUMERS, mode=TrackingMode(mode))


def train(spec: Spec, model: Any, generator: torch.Generator, num_batches: int) -> None:
    ordinary = ordinary_optimizer(model, "SGD", lr=0.1)
    for _ in range(num_batches):
        ordinary.zero_grad()
        model(batch(spec, generator)).backward()
        ordinary.step()


def log_state(tracker: ModelDeltaTracker) -> LogState:
    """Return the log's saved state before it is packed into the tensors of a checkpoint."""
    return tracker._log.state()


def notes_of(tracker: ModelDeltaTracker) -> dict[str, object]:
    consumers = tracker._log.cursors.consumers
    return {name: each.note for name, each in consumers.items() if each.note is not None}


def dump(tracker: ModelDeltaTracker, state: LogState, file: Path) -> None:
    """Write this rank's pending rows, with global ids, and its weights to a file."""
    held: dict[str, Any] = {"num_batches": state.num_batches}
    for fqn, spec in tracker.shards.items():
        held[fqn] = {
            "rows": [spec.row_offset, spec.row_offset + spec.num_rows],
            "columns": [list(each) for each in spec.columns],
            "replicated": spec.is_replicated,
            "weights": tracker.read_rows(fqn),
        }
        for name, consumer in state.consumers.items():
            assert not consumer.was_dropped
            rows = consumer.rows.get(fqn)
            if rows is None:
                continue
            held[fqn][name] = {
                "ids": rows.ids + spec.row_offset,
                "states": rows.states,
                "known": rows.known,
                "ages": torch.zeros_like(rows.ids) if rows.ages is None else rows.ages.long(),
            }
    torch.save(held, file)


def same(left: LogState, right: LogState) -> bool:
    """Return whether two states of one rank are equal bit for bit."""
    for name, consumer in left.consumers.items():
        for fqn, rows in consumer.rows.items():
            other = right.consumers[name].rows.get(fqn)
            if other is None:
                if len(rows):
                    return False
                continue
            for mine, its in ((rows.ids, other.ids), (rows.states, other.states), (rows.known, other.known)):
                if mine is not None and not torch.equal(mine.nan_to_num(7.0), its.nan_to_num(7.0)):
                    return False
    return left.num_batches == right.num_batches


# The functions that exchange data between ranks, and which of their arguments this rank sends.
_SENT: dict[str, Callable[..., Any]] = {
    "all_gather": lambda _, tensor, **kwargs: [tensor],
    "all_gather_into_tensor": lambda _, tensor, **kwargs: [tensor],
    "all_reduce": lambda tensor, **kwargs: [tensor],
    "all_to_all_single": lambda _, tensor, **kwargs: [tensor],
    "barrier": lambda **kwargs: [],
    "broadcast": lambda tensor, src=None, **kwargs: [tensor] if src == dist.get_rank() else [],
    "gather": lambda tensor, *args, **kwargs: [tensor],
    "isend": lambda tensor, *args, **kwargs: [tensor],
    "reduce": lambda tensor, *args, **kwargs: [tensor],
    "scatter": lambda _, scatter_list=None, **kwargs: scatter_list or [],
    "send": lambda tensor, *args, **kwargs: [tensor],
}


class Messages:
    """Context manager that counts this rank's calls that exchange data with other ranks, and the bytes sent."""

    def __init__(self) -> None:
        self.calls = 0
        self.num_bytes = 0

    def __enter__(self) -> Self:
        self._real = {name: getattr(distributed_c10d, name) for name in _SENT}
        for name, real in self._real.items():
            setattr(distributed_c10d, name, partial(self._counted, name, real))
        return self

    def __exit__(self, *args: object) -> None:
        for name, real in self._real.items():
            setattr(distributed_c10d, name, real)

    def _counted(self, name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        self.num_bytes += sum(each.nbytes for each in _SENT[name](*args, **kwargs))
        return real(*args, **kwargs)


def save(model: Any, tracker: ModelDeltaTracker, path: str, how: str = "sync") -> dict[str, int]:
    """Save model and tracker; return what ranks exchanged for the tracker."""
    with Messages() as own:
        tracker.state_dict()
    with Messages() as alone:
        dcp.save({"model": model}, checkpoint_id=f"{path}/model")
    with Messages() as both:
        if how == "sync":
            dcp.save({"model": model, "tracker": tracker}, checkpoint_id=f"{path}/checkpoint")
        else:
            dcp.async_save(
                {"model": model, "tracker": tracker},
                checkpoint_id=f"{path}/checkpoint",
                async_stager=BlockingAsyncStager(),  # the newer stager cannot copy a ShardedTensor
            ).result()
    assert both.calls >= alone.calls > 0 or dist.get_world_size() == 1
    return {
        "own messages": own.calls + both.calls - alone.calls if how == "sync" else own.calls,
        "own bytes": own.num_bytes,
        "plan bytes": both.num_bytes - alone.num_bytes,
    }


def saving(rank: int, world_size: int, path: str, spec: dict[str, Any], mode: str, how: str = "sync") -> dict[str, Any]:
    """Train, read, leave rows out, and save; saving changes nothing."""
    made, model, tracker = build(spec, mode)
    generator = torch.Generator().manual_seed(rank)
    for number in range(5):
        train(made, model, generator, 1)
        tracker.step()
        if number in (1, 2):
            tracker.get_delta("a", top_k=None if mode == "id_only" else TopK(rows=4))
        if number == 2:
            tracker.get_delta("b")
    train(made, model, generator, 1)
    uncommitted = tracker.get_delta("c", commit=False)
    train(made, model, generator, 1)
    with tracker.reserve("b") as handle:
        handle.annotate({"rank": rank, "stream": "00ff"})
    before = log_state(tracker)
    dump(tracker, before, Path(path) / f"saved-{rank}of{world_size}.pt")
    tensors = {name for name, _ in model.state_dict().items()}
    assert tensors == {name for name in tensors if name.startswith(("ec.", "dense."))}, "no tracker tensor in it"
    exchanged = save(model, tracker, path, how)
    assert same(before, log_state(tracker))
    assert same(log_state(tracker), before)
    tracker.commit(uncommitted)
    tracker.detach()
    pending = [sum(len(rows) for rows in consumer.rows.values()) for consumer in before.consumers.values()]
    return {"pending": pending, **exchanged}


def loading(
    rank: int, world_size: int, path: str, spec: dict[str, Any], mode: str, again: str | None = None
) -> dict[str, Any]:
    """Restore under the plan of ``spec``, save ``again``, and continue training."""
    made, model, tracker = build(spec, mode)
    train(made, model, torch.Generator().manual_seed(100 + rank), 1)  # pending rows that the restore must replace
    tracker.step()
    dcp.load(
        {"model": model, "tracker": SavedTracker(tracker, f"{path}/checkpoint")}, checkpoint_id=f"{path}/checkpoint"
    )
    assert tracker.restored is LoadOutcome.STATE
    assert notes_of(tracker) == {"b": {"rank": 0, "stream": "00ff"}}
    restored = log_state(tracker)
    dump(tracker, restored, Path(path) / f"loaded-{rank}of{world_size}.pt")
    exchanged = {}
    if again is not None:
        exchanged = save(model, tracker, again)
        dump(tracker, restored, Path(again) / f"saved-{rank}of{world_size}.pt")
    train(made, model, torch.Generator().manual_seed(rank), 2)
    for name in CONSUMERS:
        delta = tracker.get_delta(name, commit=False)
        for fqn, rows in delta.items():
            old = restored.consumers[name].rows.get(fqn)
            if old is None:
                continue
            now = tracker._log.consumers.read(name).rows[fqn]
            at = torch.isin(now.ids, old.ids)
            assert torch.equal(now.ids[at], old.ids), fqn
            if old.states is not None:
                assert torch.equal(now.states[at], old.states), "the oldest value stays"
            assert len(rows) == len(now)
    assert tracker.num_hook_errors == 0
    tracker.detach()
    return exchanged


def exchange(state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the parts of all ranks, as if each had read all ranks' files."""
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, state)
    return {key: tensor for part in every for key, tensor in part.items()}


def renamed(state: dict[str, torch.Tensor], old: str, new: str) -> dict[str, torch.Tensor]:
    """Return a state whose headers have ``old`` replaced by ``new``."""
    changed = {}
    for key, tensor in state.items():
        text = bytes(tensor.numpy()).decode() if key.endswith("/header") else ""
        assert not text or old in text, (old, text)
        changed[key] = (
            torch.frombuffer(bytearray(text.replace(old, new).encode()), dtype=torch.uint8) if text else tensor
        )
    return changed


def damaged(rank: int, world_size: int, path: str) -> dict[str, str]:
    """Return the errors for states that cannot be loaded; they change nothing."""
    spec = spec_of("row", "column:0,1")
    made, model, tracker = build(spec, "embedding")
    train(made, model, torch.Generator().manual_seed(rank), 2)
    tracker.step()
    whole = exchange(tracker.state_dict())
    mine = tracker.state_dict()
    other = {key: tensor for key, tensor in whole.items() if key not in mine}
    rows = next(key for key in mine if "/rows/" in key)
    head = {key: tensor for key, tensor in mine.items() if key.endswith("/header")}
    train(made, model, torch.Generator().manual_seed(9 + rank), 1)
    with tracker.reserve("a") as handle:
        handle.annotate("before")
        messages = {"note": attempt(lambda: handle.annotate({1, 2}))}
    before = log_state(tracker)
    states = {
        "version": renamed(whole, '"version": 1', '"version": 99'),
        "mode": renamed(whole, '"embedding"', '"id_only"'),
        "consumer": renamed(whole, '["c", ', '["d", '),
        "table": renamed(whole, "ec.embeddings.t0", "ec.embeddings.other"),
        "shape": renamed(whole, '"num_rows": 17, "dim"', '"num_rows": 18, "dim"'),
        "dtype": renamed(whole, '"dtype_name": "float32"', '"dtype_name": "float16"'),
        "one rank's consumers": {**mine, **renamed(other, '["c", ', '["d", ')},
        "part": other,
        "no header": {rows: mine[rows]},
        "a tensor": {key: tensor for key, tensor in whole.items() if key != rows},
        "a length": {**whole, rows: mine[rows][:-1]},
        "a value": {**whole, rows: mine[rows] + 1},
        "an id": {**whole, **renamed(head, digest(mine[rows]), digest(mine[rows] + 1)), rows: mine[rows] + 1},
        "not JSON": {**whole, f"rank{rank}of{world_size}/header": torch.zeros(3, dtype=torch.uint8)},
        "a short list": renamed(whole, '"shards": {', '"shards": {"x": [1, "a"], '),
        "a list": renamed(whole, '"shards": {', '"shards": {"x": [9, 2, "float32", "0", 1, [[0, 2]], true], '),
        "another rank": renamed(whole, '"world_size": 2', '"world_size": 3'),
        "a negative count": renamed(whole, '"num_batches": 1', '"num_batches": -1'),
    }
    messages |= {name: attempt(lambda state=state: tracker.load_state_dict(state)) for name, state in states.items()}
    narrow = ModelDeltaTracker(model, CONSUMERS, fqns_to_skip=["t1"], mode=TrackingMode.EMBEDDING)
    messages["fewer tables"] = attempt(lambda: narrow.load_state_dict(whole))
    messages["counters"] = attempt(lambda: _with_counter(model).load_state_dict(whole))
    messages["noted consumer"] = attempt(lambda: tracker.reserve("x"))
    messages["strategy"] = attempt(lambda: tracker.state_dict(strategy="both"))
    assert same(before, log_state(tracker))
    assert same(log_state(tracker), before)
    assert notes_of(tracker) == {"a": "before"}
    assert tracker.restored is None
    tracker.load_state_dict(mine)  # its own part alone covers its shards
    assert tracker.restored is LoadOutcome.STATE
    tracker.load_state_dict(whole)
    assert notes_of(tracker) == {}
    return messages


def _with_counter(model: Any) -> ModelDeltaTracker:
    tracker = ModelDeltaTracker(model, CONSUMERS, mode=TrackingMode.EMBEDDING)
    tracker.register_counter("sum", Total())
    return tracker


def spec_of(*shardings: str, **kwargs: Any) -> dict[str, Any]:
    """Return the spec of a model with one table for each sharding."""
    rows = (17, 10, 9, 12)
    return {
        "tables": [{"name": f"t{i}", "rows": rows[i], "sharding": each} for i, each in enumerate(shardings)],
        **kwargs,
    }


class Total:
    """A minimal object that can be merged."""

    def __init__(self) -> None:
        self.total = 0
        self.names: list[str] = []

    def state_dict(self) -> dict[str, Any]:
        return {"total": self.total, "names": self.names}

    def merge(self, states: Any) -> dict[str, Any]:
        return {
            "total": sum(state["total"] for state in states),
            "names": sorted(name for state in states for name in state["names"]),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.total, self.names = state["total"], state["names"]


def column_ranges(rank: int, world_size: int) -> str:
    """Sums over column ranges cannot be split at other columns."""
    _, _, tracker = build(spec_of("column:0,1"), "momentum_diff")
    saved = exchange(tracker.state_dict())
    tracker.detach()
    _, _, tracker = build(spec_of("column:0,0"), "momentum_diff")
    tracker.load_state_dict(saved)  # the same ranges, on one rank
    tracker.detach()
    _, _, tracker = build(spec_of("row"), "momentum_diff")
    return attempt(lambda: tracker.load_state_dict(saved))


def legacy(rank: int, world_size: int, path: str, spec: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without tracker state makes every row pending and logs a warning."""
    _, model, tracker = build(spec, "embedding")
    dcp.save({"model": model}, checkpoint_id=f"{path}/checkpoint")
    tracker.get_delta("a", commit=False)
    with capture_logs() as logs:
        dcp.load(
            {"model": model, "tracker": SavedTracker(tracker, f"{path}/checkpoint")}, checkpoint_id=f"{path}/checkpoint"
        )
    everything = []
    for name in CONSUMERS:
        delta = tracker.get_delta(name)
        for fqn, rows in delta.items():
            assert len(rows) == tracker.shards[fqn].num_rows
            assert not rows.known.any()
        everything.append(delta.num_rows)
        assert tracker.get_delta(name).num_rows == 0
    events = [event.name for event in MONITOR.collect().events]
    return {"restored": tracker.restored.name, "rows": everything, "logs": logs, "events": events}


def one_rank_cannot(rank: int, world_size: int, path: str) -> list[str]:
    """A checkpoint lacks a tensor that rank 1 alone needs: all ranks refuse it, so that no rank waits."""
    made, model, tracker = build(spec_of("row"), "embedding")
    train(made, model, torch.Generator().manual_seed(rank), 2)
    dcp.save({"model": model, "tracker": tracker}, checkpoint_id=f"{path}/checkpoint")
    if rank == 0:
        file = Path(path) / "checkpoint" / ".metadata"
        metadata = pickle.loads(file.read_bytes())
        del metadata.state_dict_metadata["tracker.rank1of2/rows/ec.embeddings.t0"]
        file.write_bytes(pickle.dumps(metadata))
    dist.barrier()
    state = {"model": model, "tracker": SavedTracker(tracker, f"{path}/checkpoint")}
    before = log_state(tracker)
    messages = [attempt(lambda: dcp.load(state, checkpoint_id=f"{path}/checkpoint")) for _ in range(2)]
    assert same(before, log_state(tracker))
    tracker.detach()
    return messages


@contextlib.contextmanager
def capture_logs() -> Any:
    logs: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logs.append(record.getMessage())
    logger = logging.getLogger("delta_tracker")
    logger.addHandler(handler)
    try:
        yield logs
    finally:
        logger.removeHandler(handler)


def behind(rank: int, world_size: int) -> list[list[str]]:
    """A consumer that rank 1 dropped stays dropped on every rank that receives rows of rank 1."""
    made, model, tracker = build(spec_of("row", "table:0"), "embedding")
    train(made, model, torch.Generator().manual_seed(rank), 2)
    if rank == 1:
        tracker._log.consumers._max_bytes = 1
        tracker.step()
        assert all(tracker.needs_snapshot(name) for name in CONSUMERS)
        tracker._log.consumers._max_bytes = None
        tracker.clear("b")
    saved = exchange(tracker.state_dict())
    tracker.detach()
    answers = []
    for plan in (spec_of("row", "table:0"), spec_of("table:0", "table:0")):
        _, _, tracker = build(plan, "embedding")
        tracker.load_state_dict(saved)
        answers.append([attempt(partial(tracker.get_delta, name)) for name in CONSUMERS])
        tracker.detach()
    return answers


def _counting(model: Any) -> tuple[ModelDeltaTracker, dict[str, Any]]:
    tracker = ModelDeltaTracker(model, CONSUMERS)
    counters = {
        "sum": torchmetrics.SumMetric(),
        "mean": torchmetrics.MeanMetric(),
        "max": torchmetrics.MaxMetric(),
        "min": torchmetrics.MinMetric(),
        "cat": torchmetrics.CatMetric(),
        "confusion": torchmetrics.classification.BinaryConfusionMatrix(),
        "own": Total(),
    }
    for name, counter in counters.items():
        tracker.register_counter(name, counter)
    monitor = Monitor()
    counters["samples"] = monitor.counter("samples", labels=["kind"], is_logical=True).cell(kind="seen")
    tracker.register_counter("monitor", LogicalCounters(monitor))
    return tracker, counters


def counting(rank: int, world_size: int, path: str, strategy: str, held: list[list[float]]) -> list[str]:
    """Count ``held[r]`` on rank ``r``, and write the state of all ranks to files."""
    made = Spec([Table(**spec_of("row")["tables"][0])])
    model = shard(made)
    tracker, counters = _counting(model)
    train(made, model, torch.Generator().manual_seed(rank), 2)
    for value in held[rank]:
        for name in ("sum", "mean", "max", "min", "cat"):
            counters[name].update(torch.tensor(value))
        counters["confusion"].update(torch.tensor([value / 100]), torch.tensor([1]))
        counters["own"].total += value
        counters["own"].names.append(f"{value}")
        counters["samples"].add(value)
    state = tracker.state_dict(strategy=strategy)
    assert bool(state) == (strategy == "local" or rank == 0)
    if state:
        torch.save(state, f"{path}/counted-{rank}.pt")
    dump(tracker, log_state(tracker), Path(path) / f"saved-{rank}of{world_size}.pt")
    if strategy == "local":
        dcp.save({"model": model, "tracker": tracker}, checkpoint_id=f"{path}/checkpoint")
    else:
        dcp.save({"model": model}, checkpoint_id=f"{path}/checkpoint")
    tracker.detach()
    return sorted(state)


def counted(rank: int, world_size: int, path: str, how: str) -> dict[str, Any]:
    """Restore the counters on this rank, which counted before; return what it holds afterwards."""
    made = Spec([Table(**spec_of("row")["tables"][0])])
    model = shard(made)
    tracker, counters = _counting(model)
    counters["sum"].update(1000.0)
    counters["own"].total = 1000
    counters["samples"].add(1000)
    checkpoint = {"model": model}
    if how == "dcp":
        dcp.load(
            {**checkpoint, "tracker": SavedTracker(tracker, f"{path}/checkpoint")}, checkpoint_id=f"{path}/checkpoint"
        )
    else:
        dcp.load(checkpoint, checkpoint_id=f"{path}/checkpoint")
        state = {}
        for file in sorted(Path(path).glob("counted-*.pt")):
            state |= torch.load(file, weights_only=True)
        tracker.load_state_dict(state)
    dump(tracker, log_state(tracker), Path(path) / f"loaded-{rank}of{world_size}.pt")
    answer = {
        "sum": counters["sum"].sum_value.item(),
        "mean": [counters["mean"].mean_value.item(), counters["mean"].weight.item()],
        "max": counters["max"].max_value.item(),
        "min": counters["min"].min_value.item(),
        "cat": torch.cat([torch.atleast_1d(each) for each in counters["cat"].value]).tolist()
        if counters["cat"].value
        else [],
        "confusion": counters["confusion"].confmat.flatten().tolist(),
        "own": [counters["own"].total, counters["own"].names],
        "updates": counters["sum"]._update_count,
        "samples": counters["samples"].collect_total(),
    }
    tracker.detach()
    return answer


def refused_counters(rank: int, world_size: int) -> dict[str, str]:
    """Return the errors for registering counters that cannot be restored."""
    tracker = ModelDeltaTracker(shard(Spec([Table("t", 6, "row")])))
    tracker.register_counter("total", Total())
    messages = {
        "object": attempt(lambda: tracker.register_counter("loss", 3)),
        "twice": attempt(lambda: tracker.register_counter("total", Total())),
        "slash": attempt(lambda: tracker.register_counter("a/b", Total())),
        "two": attempt(lambda: tracker.register_counter("c", torchmetrics.SumMetric() + torchmetrics.SumMetric())),
    }
    strange = Total()
    strange.names = torch.ones(2, dtype=torch.complex64)  # type: ignore[assignment]
    other = ModelDeltaTracker(shard(Spec([Table("t", 6, "row")])))
    other.register_counter("strange", strange)
    messages["dtype"] = attempt(other.state_dict)
    bad = Total()
    bad.names = [object()]  # type: ignore[list-item]
    tracker.register_counter("bad", bad)
    messages["JSON"] = attempt(tracker.state_dict)
    return messages


def two_trackers(rank: int, world_size: int, path: str) -> str:
    """Load a checkpoint of two trackers with a name that neither has."""
    model = shard(Spec([Table("t", 6, "row")]))
    left, right = ModelDeltaTracker(model), ModelDeltaTracker(model)
    dcp.save({"left": left, "right": right}, checkpoint_id=path)
    refused = attempt(SavedTracker(left, path, key="middle").state_dict)
    assert left.restored is None
    return refused


def read_before_publishing(rank: int, world_size: int, path: str) -> list[str]:
    """Return the kinds of the first versions after a load, without and with an earlier read by another caller."""
    model = shard(Spec([Table("t", 6, "row")]))
    tracker = ModelDeltaTracker(model)
    publisher = Publisher(tracker, f"file://{path}")
    publisher.snapshot()
    state = tracker.state_dict()
    publisher.close()
    kinds = []
    for takes in (lambda: None, tracker.get_delta, tracker.clear):
        tracker.load_state_dict(state)
        tracker.mark_changed("ec.embeddings.t")
        takes()
        publisher = Publisher(tracker, f"file://{path}")
        kinds.append(publisher.publish().kind)
        publisher.close()
    return kinds


def from_stream(rank: int, world_size: int) -> list[str]:
    """Pending rows, notes and the count of batches are replaced, and earlier writes to the weights are ignored."""
    spec = Spec([Table("t", 17, "row"), Table("d", 6, "data")], bag=True)
    model = shard(spec)
    tracker = ModelDeltaTracker(model, ["a", "b", "c"])
    generator = torch.Generator().manual_seed(0)
    tables = {fqn.rpartition(".")[2]: fqn for fqn in tracker.tables}
    fqn = tables["t"]
    train(spec, model, generator, 2)
    refused = tracker.get_delta("a", commit=False)
    messages = [
        attempt(partial(tracker.checkpoint.restore_from_stream, 7, pending, notes))
        for pending, notes in (
            ({"x": {}}, {}),
            ({"b": {}}, {"x": 1}),
            ({"b": {"nothing": None}}, {}),
            ({"b": {fqn: torch.tensor([99])}}, {}),
        )
    ]
    with tracker.reserve("c", holder="a test"):
        messages.append(attempt(partial(tracker.checkpoint.restore_from_stream, 7, {}, {})))
    tracker.commit(refused)  # these calls aborted nothing
    assert (tracker.num_batches, tracker.restored) == (0, None)

    with torch.no_grad():
        for name in tracker.tables:
            for view in tracker.live.column_views(name):
                view.add_(1.0)
    tracker.checkpoint.restore_from_stream(
        7, {"b": {fqn: torch.tensor([2, 0], dtype=torch.int32)}, "c": {fqn: None}}, {"a": [1]}
    )
    assert (tracker.num_batches, tracker.restored) == (7, LoadOutcome.STREAM)
    assert notes_of(tracker) == {"a": [1]}
    num_rows = tracker.shards[fqn].num_rows
    expected = {"a": [], "b": [0, 2], "c": list(range(num_rows))}
    for name, ids in expected.items():
        read = tracker.get_delta(name, commit=False)
        assert {each: rows.ids.tolist() for each, rows in read.items()} == {fqn: ids, tables["d"]: []}, name
        assert read.batches == (7, 7)
    with tracker.reserve("a", holder="a test") as handle:
        assert handle.is_as_restored
    train(spec, model, generator, 1)
    assert any(len(rows) for rows in tracker.get_delta("a").values())
    return messages
